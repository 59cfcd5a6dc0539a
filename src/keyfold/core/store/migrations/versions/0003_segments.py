"""Segments: descriptions, the queue, snapshots, the sets of users."""

import sqlalchemy as sa
from alembic import op

from keyfold.core.store.schema import Int32, Int64, Real64, Text

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "segments",
        sa.Column("segment_id", Text, primary_key=True),
        sa.Column("title", Text, nullable=False),
        sa.Column("source_table", Text, nullable=False),
        sa.Column("condition", Text, nullable=False),
        sa.Column("remove_share_max", Real64),
        sa.Column("made_at_us", Int64, nullable=False),
        sqlite_strict=True,
    )
    op.create_table(
        "segment_queue",
        sa.Column("segment_id", Text, primary_key=True),
        sa.Column("version", Int64, nullable=False),
        sa.Column("stage", Text, nullable=False),
        sa.Column("is_on", Int32, nullable=False),
        sa.Column("is_evaluation_wanted", Int32, nullable=False),
        sa.Column("evaluation_version", Int64, nullable=False),
        sa.Column("diff_version", Int64),
        sa.Column("minimal_valid_version", Int64, nullable=False),
        sa.Column("target_version", Int64),
        sa.Column("approved_version", Int64),
        sa.Column("upto", Text),
        sa.Column("chunks", Int64, nullable=False),
        sa.Column("counts", Text, nullable=False),
        sa.Column("ticket", Int64, nullable=False),
        sa.Column("tries", Int32, nullable=False),
        sa.Column("reason", Text, nullable=False),
        sa.Column("queued_at_us", Int64, nullable=False),
        sa.Column("moved_at_us", Int64, nullable=False),
        sqlite_strict=True,
    )
    op.create_index("segment_queue_stage", "segment_queue", ["stage", "queued_at_us"])
    op.create_table(
        "segment_snapshots",
        sa.Column("segment_id", Text, primary_key=True),
        sa.Column("evaluation_version", Int64, primary_key=True, autoincrement=False),
        sa.Column("location", Text, nullable=False),
        sa.Column("rows", Int64, nullable=False),
        sa.Column("made_at_us", Int64, nullable=False),
        sqlite_strict=True,
    )
    op.create_table(
        "segment_uploads",
        sa.Column("upload_id", Text, primary_key=True),
        sa.Column("segment_id", Text, nullable=False),
        sa.Column("evaluation_version", Int64, nullable=False),
        sa.Column("stored_at_us", Int64, nullable=False),
        sqlite_strict=True,
    )
    op.create_table(
        "user_segments",
        sa.Column("user_id", Text, primary_key=True),
        sa.Column("version", Int64, nullable=False),
        sa.Column("segments", Text, nullable=False),
        sa.Column("departures", Text, nullable=False),
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
