"""The ground: messages, progress, leases, dead letters, tokens, answers, audit; and the tally."""

import sqlalchemy as sa
from alembic import op

from keyfold.core.store.schema import Bytes, Int32, Int64, Text

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "messages",
        sa.Column("topic", Text, primary_key=True),
        sa.Column("key", Text, primary_key=True),
        sa.Column("kind", Text, primary_key=True),
        sa.Column("version", Int64, primary_key=True, autoincrement=False),
        sa.Column("id", Int64, nullable=False),
        sa.Column("partition", Int32, nullable=False),
        sa.Column("schema_name", Text, nullable=False),
        sa.Column("event_time_us", Int64, nullable=False),
        sa.Column("payload", Bytes, nullable=False),
        sa.Column("queued_at_us", Int64, nullable=False),
        sa.Column("position", Int64, nullable=True),
        sa.Column("published_at_us", Int64, nullable=True),
        sqlite_strict=True,
    )
    op.create_index(
        "messages_pending",
        "messages",
        ["topic", "partition", "id"],
        sqlite_where=sa.text("position IS NULL"),
        postgresql_where=sa.text("position IS NULL"),
    )
    op.create_index(
        "messages_published",
        "messages",
        ["topic", "partition", "position"],
        sqlite_where=sa.text("position IS NOT NULL"),
        postgresql_where=sa.text("position IS NOT NULL"),
    )
    op.create_table(
        "topics",
        sa.Column("topic", Text, primary_key=True),
        sa.Column("partitions", Int32, nullable=False),
        sa.Column("identity", Text, nullable=False),
        sa.Column("made_at_us", Int64, nullable=False),
        sqlite_strict=True,
    )
    op.create_table(
        "progress",
        sa.Column("job", Text, primary_key=True),
        sa.Column("shard", Int32, primary_key=True, autoincrement=False),
        sa.Column("ticket", Int64, nullable=False),
        sa.Column("position", Int64, nullable=False),
        sa.Column("source", Text, nullable=False),
        sa.Column("moved_at_us", Int64, nullable=False),
        sqlite_strict=True,
    )
    op.create_table(
        "leases",
        sa.Column("name", Text, primary_key=True),
        sa.Column("holder", Text, nullable=False),
        sa.Column("ticket", Int64, nullable=False),
        sa.Column("expires_at_us", Int64, nullable=False),
        sqlite_strict=True,
    )
    op.create_table(
        "members",
        sa.Column("job", Text, primary_key=True),
        sa.Column("member", Text, primary_key=True),
        sa.Column("expires_at_us", Int64, nullable=False),
        sqlite_strict=True,
    )
    op.create_table(
        "dead_letters",
        sa.Column("key", Text, primary_key=True),
        sa.Column("consumer", Text, primary_key=True),
        sa.Column("topic", Text, primary_key=True),
        sa.Column("partition", Int32, primary_key=True, autoincrement=False),
        sa.Column("position", Int64, primary_key=True, autoincrement=False),
        sa.Column("kind", Text, nullable=False),
        sa.Column("version", Int64, nullable=False),
        sa.Column("schema_name", Text, nullable=False),
        sa.Column("event_time_us", Int64, nullable=False),
        sa.Column("payload", Bytes, nullable=False),
        sa.Column("state", Text, nullable=False),
        sa.Column("reason", Text, nullable=False),
        sa.Column("tries", Int32, nullable=False),
        sa.Column("set_aside_at_us", Int64, nullable=False),
        sqlite_strict=True,
    )
    op.create_table(
        "parked_keys",
        sa.Column("key", Text, primary_key=True),
        sa.Column("consumer", Text, primary_key=True),
        sa.Column("topic", Text, primary_key=True),
        sa.Column("partition", Int32, nullable=False),
        sa.Column("waiting", Int64, nullable=False),
        sqlite_strict=True,
    )
    op.create_table(
        "tokens",
        sa.Column("token_id", Text, primary_key=True),
        sa.Column("client_id", Text, nullable=False),
        sa.Column("name", Text, nullable=False),
        sa.Column("secret_hash", Bytes, nullable=False),
        sa.Column("scopes", Text, nullable=False),
        sa.Column("grants", Text, nullable=False),
        sa.Column("made_at_us", Int64, nullable=False),
        sa.Column("expires_at_us", Int64, nullable=False),
        sa.Column("revoked_at_us", Int64, nullable=True),
        sqlite_strict=True,
    )
    op.create_table(
        "answers",
        sa.Column("client_id", Text, primary_key=True),
        sa.Column("key", Text, primary_key=True),
        sa.Column("body_hash", Bytes, nullable=False),
        sa.Column("status", Int32, nullable=False),
        sa.Column("etag", Text, nullable=False),
        sa.Column("answer", Bytes, nullable=False),
        sa.Column("stored_at_us", Int64, nullable=False),
        sqlite_strict=True,
    )
    op.create_index("ix_answers_stored_at_us", "answers", ["stored_at_us"])
    op.create_table(
        "batch_tokens",
        sa.Column("token", Text, primary_key=True),
        sa.Column("stored_at_us", Int64, nullable=False),
        sqlite_strict=True,
    )
    op.create_index("ix_batch_tokens_stored_at_us", "batch_tokens", ["stored_at_us"])
    op.create_table(
        "numbers",
        sa.Column("name", Text, primary_key=True),
        sa.Column("next", Int64, nullable=False),
        sqlite_strict=True,
    )
    op.create_table(
        "audit",
        sa.Column("number", Int64, primary_key=True, autoincrement=False),
        sa.Column("at_us", Int64, nullable=False),
        sa.Column("actor", Text, nullable=False),
        sa.Column("act", Text, nullable=False),
        sa.Column("detail", Text, nullable=False),
        sa.Column("hash", Bytes, nullable=False),
        sqlite_strict=True,
    )
    op.create_table(
        "tallies",
        sa.Column("key", Text, primary_key=True),
        sa.Column("value", Int64, nullable=False),
        sa.Column("version", Int64, nullable=False),
        sa.Column("event_version", Int64, nullable=False),
        sqlite_strict=True,
    )
    if op.get_bind().dialect.name == "postgresql":
        op.execute(sa.schema.CreateSequence(sa.Sequence("messages_numbers")))
