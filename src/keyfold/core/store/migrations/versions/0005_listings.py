"""Listings: drafts, offers, presets and their counts, counters, feeds."""

import sqlalchemy as sa
from alembic import op

from keyfold.core.store.schema import BinaryText, Int32, Int64, Text

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "draft",
        sa.Column("owner_id", BinaryText, primary_key=True),
        sa.Column("draft_id", Text, primary_key=True),
        sa.Column("version", Int64, nullable=False),
        sa.Column("body", Text, nullable=False),
        sa.Column("offer_id", Text, nullable=False),
        sa.Column("updated_at_us", Int64, nullable=False),
        sqlite_strict=True,
    )
    op.create_index("ix_draft_updated_at_us", "draft", ["updated_at_us"])
    op.create_table(
        "current_draft",
        sa.Column("owner_id", BinaryText, primary_key=True),
        sa.Column("version", Int64, nullable=False),
        sa.Column("draft_id", Text, nullable=False),
        sqlite_strict=True,
    )
    op.create_table(
        "offer_ids",
        sa.Column("offer_id", Text, primary_key=True),
        sa.Column("seller_id", BinaryText, nullable=False),
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
    op.create_table(
        "offer",
        sa.Column("seller_id", BinaryText, primary_key=True),
        sa.Column("offer_id", Text, primary_key=True),
        sa.Column("kind", Text, primary_key=True),
        sa.Column("version", Int64, nullable=False),
        sa.Column("shown", Text),
        sa.Column("shard_id", Int32),
        sa.Column("due_at_us", Int64),
        sa.Column("body", Text, nullable=False),
        sqlite_strict=True,
    )
    op.create_index(
        "offer_due",
        "offer",
        ["shard_id", "due_at_us"],
        sqlite_where=sa.text("due_at_us IS NOT NULL"),
        postgresql_where=sa.text("due_at_us IS NOT NULL"),
    )
    op.create_index(
        "offer_shown",
        "offer",
        ["seller_id", "shown"],
        sqlite_where=sa.text("shown IS NOT NULL"),
        postgresql_where=sa.text("shown IS NOT NULL"),
    )
    op.create_table(
        "sellers",
        sa.Column("seller_id", BinaryText, primary_key=True),
        sa.Column("shard_id", Int32, nullable=False),
        sa.Column("repairs", Int64, nullable=False),
        sa.Column("ended_task_id", Int64),
        sqlite_strict=True,
    )
    op.create_index("sellers_shard", "sellers", ["shard_id", "seller_id"])
    op.create_table(
        "user_offer_presets",
        sa.Column("seller_id", BinaryText, primary_key=True),
        sa.Column("preset_id", Int32, primary_key=True, autoincrement=False),
        sa.Column("create_time", Int64, primary_key=True, autoincrement=False),
        sa.Column("offer_id", Text, primary_key=True),
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
    op.create_table(
        "user_offer_presets_count",
        sa.Column("seller_id", BinaryText, primary_key=True),
        sa.Column("preset_id", Int32, primary_key=True, autoincrement=False),
        sa.Column("seq_no", Int32, primary_key=True, autoincrement=False),
        sa.Column("offers", Int64, nullable=False),
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
    op.create_table(
        "user_total_counters",
        sa.Column("seller_id", BinaryText, primary_key=True),
        sa.Column("counter_id", Text, primary_key=True),
        sa.Column("seq_no", Int32, primary_key=True, autoincrement=False),
        sa.Column("counter_value", Int64, nullable=False),
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
    op.create_table(
        "sold_offers",
        sa.Column("seller_id", BinaryText, primary_key=True),
        sa.Column("offer_id", Text, primary_key=True),
        sa.Column("currency", Text, nullable=False),
        sa.Column("amount", Int64, nullable=False),
        sa.Column("sold_at_us", Int64, nullable=False),
        sqlite_strict=True,
    )
    op.create_table(
        "offer_presets",
        sa.Column("preset_id", Int32, primary_key=True, autoincrement=False),
        sa.Column("name", Text, nullable=False),
        sa.Column("definition", Text, nullable=False),
        sa.Column("state", Text, nullable=False),
        sa.Column("since_us", Int64, nullable=False),
        sqlite_strict=True,
    )
    op.create_table(
        "listing_walks",
        sa.Column("walk", Text, primary_key=True),
        sa.Column("shard_id", Int32, primary_key=True, autoincrement=False),
        sa.Column("upto_seller", BinaryText, nullable=False),
        sa.Column("upto_offer", Text, nullable=False),
        sa.Column("is_done", Int32, nullable=False),
        sa.Column("moved_at_us", Int64, nullable=False),
        sqlite_strict=True,
    )
    op.create_table(
        "feed",
        sa.Column("seller_id", BinaryText, primary_key=True),
        sa.Column("external_id", BinaryText, primary_key=True),
        sa.Column("offer_id", Text, nullable=False),
        sa.Column("task_id", Int64, nullable=False),
        sa.Column("removed_at_us", Int64),
        sqlite_strict=True,
    )
    op.create_index(
        "feed_task",
        "feed",
        ["seller_id", "task_id"],
        sqlite_where=sa.text("removed_at_us IS NULL"),
        postgresql_where=sa.text("removed_at_us IS NULL"),
    )
    op.create_index(
        "feed_removed",
        "feed",
        ["removed_at_us"],
        sqlite_where=sa.text("removed_at_us IS NOT NULL"),
        postgresql_where=sa.text("removed_at_us IS NOT NULL"),
    )
    op.create_table(
        "feed_tasks",
        sa.Column("seller_id", BinaryText, primary_key=True),
        sa.Column("task_id", Int64, primary_key=True, autoincrement=False),
        sa.Column("version", Int64, nullable=False),
        sa.Column("shard_id", Int32, nullable=False),
        sa.Column("stage", Text, nullable=False),
        sa.Column("is_staged", Int32, nullable=False),
        sa.Column("position", Int64, nullable=False),
        sa.Column("counts", Text, nullable=False),
        sa.Column("upto", BinaryText, nullable=False),
        sa.Column("reason", Text, nullable=False),
        sa.Column("begun_at_us", Int64, nullable=False),
        sa.Column("moved_at_us", Int64, nullable=False),
        sqlite_strict=True,
    )
    op.create_index("feed_tasks_stage", "feed_tasks", ["shard_id", "stage", "moved_at_us"])
    op.create_index(
        "feed_tasks_staged",
        "feed_tasks",
        ["stage"],
        sqlite_where=sa.text("is_staged = 1"),
        postgresql_where=sa.text("is_staged = 1"),
    )
    op.create_table(
        "feed_items",
        sa.Column("seller_id", BinaryText, primary_key=True),
        sa.Column("task_id", Int64, primary_key=True, autoincrement=False),
        sa.Column("external_id", BinaryText, primary_key=True),
        sa.Column("number", Int64, nullable=False),
        sa.Column("body", Text, nullable=False),
        sqlite_strict=True,
    )
    op.create_table(
        "feed_problems",
        sa.Column("seller_id", BinaryText, primary_key=True),
        sa.Column("task_id", Int64, primary_key=True, autoincrement=False),
        sa.Column("place", BinaryText, primary_key=True),
        sa.Column("external_id", Text, nullable=False),
        sa.Column("reason", Text, nullable=False),
        sqlite_strict=True,
    )
