"""The tables of profiles: bodies, held-back updates apart from them, marks of events, watermarks, weights."""

import sqlalchemy as sa

from keyfold.core.store.schema import EVERYWHERE, Bytes, Int32, Int64, Real64, Text, UInt64, table

# `version` guards the row; `public_version` is what the world sees, and does not move when only held-back data does.
# A profile at public version 0 has nothing public: to every reader it is not there.
PROFILES = table(
    "profiles",
    sa.Column("profile_type", Text, primary_key=True),
    sa.Column("profile_id", Text, primary_key=True),
    sa.Column("version", Int64, nullable=False),
    sa.Column("public_version", Int64, nullable=False),
    sa.Column("body", Bytes, nullable=False),
    sa.Column("segments", Bytes, nullable=False),
    sa.Column("segments_version", Int64, nullable=False),
    sa.Column("held_at_us", Int64, nullable=False),  # when something of this profile was last held back; 0: never
    sa.Column("expires_at", Int64, nullable=False),  # unix seconds, after which a sweep looks whether every key has
    distribute_by="profile_id",
)

HELD_UPDATES = table(
    "held_updates",
    sa.Column("profile_type", Text, primary_key=True),
    sa.Column("profile_id", Text, primary_key=True),
    sa.Column("time_counter_id", UInt64, primary_key=True, autoincrement=False),
    sa.Column("key", UInt64, primary_key=True, autoincrement=False),
    sa.Column("time", Int64, primary_key=True, autoincrement=False),
    sa.Column("event_id", Text, primary_key=True),
    sa.Column("log", Text, primary_key=True),
    sa.Column("number", Int32, primary_key=True, autoincrement=False),  # which update of its event
    sa.Column("counter_id", UInt64, nullable=False),
    sa.Column("owner", UInt64, nullable=False),
    sa.Column("value", Real64, nullable=False),
    sa.Column("count", UInt64, nullable=False),  # the value of an exact counter
    sa.Column("committed_at_us", Int64, nullable=False),
    distribute_by="profile_id",
)
sa.Index("held_updates_committed", HELD_UPDATES.c.committed_at_us)

EVENT_MARKS = table(
    "event_marks",
    sa.Column("log", Text, primary_key=True),
    sa.Column("event_id", Text, primary_key=True),
    sa.Column("fingerprint", Int64, nullable=False),
    sa.Column("time", Int64, nullable=False),
    distribute_by="event_id",
    with_rowid=False,
)

# Events older than the watermark of their log are late; it only grows, and marks are deleted a day behind it.
EVENT_WATERMARKS = table(
    "event_watermarks",
    sa.Column("log", Text, primary_key=True),
    sa.Column("time", Int64, nullable=False),
    distribute_by=EVERYWHERE,
)

# The highest public version of any profile that was deleted: whoever comes back starts above it.
PROFILE_FLOORS = table(
    "profile_floors",
    sa.Column("profile_type", Text, primary_key=True),
    sa.Column("version", Int64, nullable=False),
    distribute_by=EVERYWHERE,
)

# The kind of every counter that was ever in force: it never changes silently.
COUNTER_KINDS = table(
    "counter_kinds",
    sa.Column("counter_id", UInt64, primary_key=True, autoincrement=False),
    sa.Column("name", Text, nullable=False),
    sa.Column("kind", Text, nullable=False),
    distribute_by=EVERYWHERE,
)

# In how many profiles a key of an Idf counter stands, where it is more than one; of each counter met one row at least.
KEY_FREQUENCIES = table(
    "key_frequencies",
    sa.Column("counter_id", UInt64, primary_key=True, autoincrement=False),
    sa.Column("key", UInt64, primary_key=True, autoincrement=False),
    sa.Column("profiles", Int64, nullable=False),
    distribute_by=EVERYWHERE,
)
PROFILE_TOTALS = table(
    "profile_totals",
    sa.Column("profile_type", Text, primary_key=True),
    sa.Column("profiles", Int64, nullable=False),
    sa.Column("counted_at_us", Int64, nullable=False),
    distribute_by=EVERYWHERE,
)
