"""Profiles: bodies, held-back updates, marks and watermarks of events, floors, kinds, weights."""

import sqlalchemy as sa
from alembic import op

from keyfold.core.store.schema import Bytes, Int32, Int64, Real64, Text, UInt64

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "profiles",
        sa.Column("profile_type", Text, primary_key=True),
        sa.Column("profile_id", Text, primary_key=True),
        sa.Column("version", Int64, nullable=False),
        sa.Column("public_version", Int64, nullable=False),
        sa.Column("body", Bytes, nullable=False),
        sa.Column("segments", Bytes, nullable=False),
        sa.Column("segments_version", Int64, nullable=False),
        sa.Column("held_until_us", Int64, nullable=False),
        sa.Column("expires_at", Int64, nullable=False),
        sqlite_strict=True,
    )
    op.create_table(
        "held_updates",
        sa.Column("profile_type", Text, primary_key=True),
        sa.Column("profile_id", Text, primary_key=True),
        sa.Column("time_counter_id", UInt64, primary_key=True, autoincrement=False),
        sa.Column("key", UInt64, primary_key=True, autoincrement=False),
        sa.Column("time", Int64, primary_key=True, autoincrement=False),
        sa.Column("event_id", Text, primary_key=True),
        sa.Column("log", Text, primary_key=True),
        sa.Column("number", Int32, primary_key=True, autoincrement=False),
        sa.Column("counter_id", UInt64, nullable=False),
        sa.Column("owner", UInt64, nullable=False),
        sa.Column("value", Real64, nullable=False),
        sa.Column("count", UInt64, nullable=False),
        sa.Column("committed_at_us", Int64, nullable=False),
        sqlite_strict=True,
    )
    op.create_index("held_updates_committed", "held_updates", ["committed_at_us"])
    op.create_table(
        "event_marks",
        sa.Column("log", Text, primary_key=True),
        sa.Column("event_id", Text, primary_key=True),
        sa.Column("fingerprint", Int64, nullable=False),
        sa.Column("time", Int64, nullable=False),
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
    op.create_table(
        "event_watermarks",
        sa.Column("log", Text, primary_key=True),
        sa.Column("time", Int64, nullable=False),
        sqlite_strict=True,
    )
    op.create_table(
        "profile_floors",
        sa.Column("profile_type", Text, primary_key=True),
        sa.Column("version", Int64, nullable=False),
        sqlite_strict=True,
    )
    op.create_table(
        "counter_kinds",
        sa.Column("counter_id", UInt64, primary_key=True, autoincrement=False),
        sa.Column("name", Text, nullable=False),
        sa.Column("kind", Text, nullable=False),
        sqlite_strict=True,
    )
    op.create_table(
        "key_frequencies",
        sa.Column("counter_id", UInt64, primary_key=True, autoincrement=False),
        sa.Column("key", UInt64, primary_key=True, autoincrement=False),
        sa.Column("profiles", Int64, nullable=False),
        sqlite_strict=True,
    )
    op.create_table(
        "profile_totals",
        sa.Column("profile_type", Text, primary_key=True),
        sa.Column("profiles", Int64, nullable=False),
        sa.Column("counted_at_us", Int64, nullable=False),
        sqlite_strict=True,
    )
