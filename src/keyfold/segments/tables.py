"""The tables of segments: descriptions, the queue with its versions, snapshots, and the set of each user."""

import sqlalchemy as sa

from keyfold.core.store.schema import EVERYWHERE, Int32, Int64, Real64, Text, table

SEGMENTS = table(
    "segments",
    sa.Column("segment_id", Text, primary_key=True),
    sa.Column("title", Text, nullable=False),
    sa.Column("source_table", Text, nullable=False),  # of the settings; empty: snapshots are uploaded
    sa.Column("condition", Text, nullable=False),
    sa.Column("remove_share_max", Real64),
    sa.Column("made_at_us", Int64, nullable=False),
    distribute_by=EVERYWHERE,
)

# One row a segment: where it stands, and the guard of whoever diffs it. Every change raises `version`.
SEGMENT_QUEUE = table(
    "segment_queue",
    sa.Column("segment_id", Text, primary_key=True),
    sa.Column("version", Int64, nullable=False),
    sa.Column("stage", Text, nullable=False),
    sa.Column("is_on", Int32, nullable=False),
    sa.Column("is_evaluation_wanted", Int32, nullable=False),
    sa.Column("evaluation_version", Int64, nullable=False),
    sa.Column("diff_version", Int64),
    sa.Column("minimal_valid_version", Int64, nullable=False),
    sa.Column("target_version", Int64),  # of the diff that was begun; it is finished before another begins
    sa.Column("approved_version", Int64),
    sa.Column("upto", Text),  # the last user id that the diff has dealt with
    sa.Column("chunks", Int64, nullable=False),  # committed by the diff
    sa.Column("counts", Text, nullable=False),  # JSON: what the first pass counted, of which snapshots
    sa.Column("ticket", Int64, nullable=False),
    sa.Column("tries", Int32, nullable=False),
    sa.Column("reason", Text, nullable=False),
    sa.Column("queued_at_us", Int64, nullable=False),
    sa.Column("moved_at_us", Int64, nullable=False),
    distribute_by=EVERYWHERE,
)
sa.Index("segment_queue_stage", SEGMENT_QUEUE.c.stage, SEGMENT_QUEUE.c.queued_at_us)

SEGMENT_SNAPSHOTS = table(
    "segment_snapshots",
    sa.Column("segment_id", Text, primary_key=True),
    sa.Column("evaluation_version", Int64, primary_key=True, autoincrement=False),
    sa.Column("location", Text, nullable=False),
    sa.Column("rows", Int64, nullable=False),
    sa.Column("made_at_us", Int64, nullable=False),
    distribute_by=EVERYWHERE,
)

# Uploads that were finished: to finish one again answers as the first time.
SEGMENT_UPLOADS = table(
    "segment_uploads",
    sa.Column("upload_id", Text, primary_key=True),
    sa.Column("segment_id", Text, nullable=False),
    sa.Column("evaluation_version", Int64, nullable=False),
    sa.Column("stored_at_us", Int64, nullable=False),
    distribute_by="upload_id",
)

# The set of a user, as model.py writes it. An emptied row stays: its version must go on growing.
USER_SEGMENTS = table(
    "user_segments",
    sa.Column("user_id", Text, primary_key=True),
    sa.Column("version", Int64, nullable=False),
    sa.Column("segments", Text, nullable=False),
    sa.Column("departures", Text, nullable=False),
    distribute_by="user_id",
    with_rowid=False,
)
