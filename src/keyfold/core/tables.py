"""The tables of the ground: messages, progress, leases, dead letters, tokens, answers, audit."""

import sqlalchemy as sa

from keyfold.core.store.schema import EVERYWHERE, METADATA, Bytes, Int32, Int64, Text, table

# One table is the outbox, the embedded topic and the replay window. A service inserts a row without a position in
# its transaction; the relay alone sets positions, in commit order per key, without gaps.
MESSAGES = table(
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
    sa.Column("position", Int64),
    sa.Column("published_at_us", Int64),
    distribute_by="key",
)
_PENDING = MESSAGES.c.position.is_(None)
_PUBLISHED = MESSAGES.c.position.is_not(None)
sa.Index(
    "messages_pending",
    MESSAGES.c.topic,
    MESSAGES.c.partition,
    MESSAGES.c.id,
    sqlite_where=_PENDING,
    postgresql_where=_PENDING,
)
sa.Index(
    "messages_published",
    MESSAGES.c.topic,
    MESSAGES.c.partition,
    MESSAGES.c.position,
    sqlite_where=_PUBLISHED,
    postgresql_where=_PUBLISHED,
)

TOPICS = table(
    "topics",
    sa.Column("topic", Text, primary_key=True),
    sa.Column("partitions", Int32, nullable=False),
    sa.Column("identity", Text, nullable=False),
    sa.Column("made_at_us", Int64, nullable=False),
    distribute_by=EVERYWHERE,
)

# How far a guarded job has come in one shard, and the ticket it must show.
PROGRESS = table(
    "progress",
    sa.Column("job", Text, primary_key=True),
    sa.Column("shard", Int32, primary_key=True, autoincrement=False),
    sa.Column("ticket", Int64, nullable=False),
    sa.Column("position", Int64, nullable=False),
    sa.Column("source", Text, nullable=False),
    sa.Column("moved_at_us", Int64, nullable=False),
    distribute_by="job",
)

LEASES = table(
    "leases",
    sa.Column("name", Text, primary_key=True),
    sa.Column("holder", Text, nullable=False),
    sa.Column("ticket", Int64, nullable=False),
    sa.Column("expires_at_us", Int64, nullable=False),
    distribute_by="name",
)

MEMBERS = table(
    "members",
    sa.Column("job", Text, primary_key=True),
    sa.Column("member", Text, primary_key=True),
    sa.Column("expires_at_us", Int64, nullable=False),
    distribute_by="job",
)

# Small documents that a lease guards: where something lies, and what is known of it.
POINTERS = table(
    "pointers",
    sa.Column("name", Text, primary_key=True),
    sa.Column("version", Int64, nullable=False),
    sa.Column("data", Bytes, nullable=False),
    distribute_by="name",
)

# Poison messages (state 'dead') and, where order matters, the later messages of their keys (state 'parked').
DEAD_LETTERS = table(
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
    distribute_by="key",
)

# The gate of a key that waits: a consumer parks behind it and a redrive drains it by updating this one row.
PARKED_KEYS = table(
    "parked_keys",
    sa.Column("key", Text, primary_key=True),
    sa.Column("consumer", Text, primary_key=True),
    sa.Column("topic", Text, primary_key=True),
    sa.Column("partition", Int32, nullable=False),
    sa.Column("waiting", Int64, nullable=False),
    distribute_by="key",
)

TOKENS = table(
    "tokens",
    sa.Column("token_id", Text, primary_key=True),
    sa.Column("client_id", Text, nullable=False),
    sa.Column("name", Text, nullable=False),
    sa.Column("secret_hash", Bytes, nullable=False),
    sa.Column("scopes", Text, nullable=False),
    sa.Column("grants", Text, nullable=False),
    sa.Column("made_at_us", Int64, nullable=False),
    sa.Column("expires_at_us", Int64, nullable=False),
    sa.Column("revoked_at_us", Int64),
    distribute_by=EVERYWHERE,
)

# The first answer to an Idempotency-Key, kept for a repeat.
ANSWERS = table(
    "answers",
    sa.Column("client_id", Text, primary_key=True),
    sa.Column("key", Text, primary_key=True),
    sa.Column("body_hash", Bytes, nullable=False),
    sa.Column("status", Int32, nullable=False),
    sa.Column("etag", Text, nullable=False),
    sa.Column("answer", Bytes, nullable=False),
    sa.Column("stored_at_us", Int64, nullable=False, index=True),
    distribute_by="key",
)

# Tells, when the answer to COMMIT was lost, whether the batch is in.
BATCH_TOKENS = table(
    "batch_tokens",
    sa.Column("token", Text, primary_key=True),
    sa.Column("stored_at_us", Int64, nullable=False, index=True),
    distribute_by="token",
)

# Sequences of the embedded store; PostgreSQL has its own.
NUMBERS = table(
    "numbers",
    sa.Column("name", Text, primary_key=True),
    sa.Column("next", Int64, nullable=False),
    distribute_by=EVERYWHERE,
)
MESSAGE_NUMBERS = sa.Sequence("messages_numbers", metadata=METADATA)

# Administrative acts; each row carries the hash of the one before it.
AUDIT = table(
    "audit",
    sa.Column("number", Int64, primary_key=True, autoincrement=False),
    sa.Column("at_us", Int64, nullable=False),
    sa.Column("actor", Text, nullable=False),
    sa.Column("act", Text, nullable=False),
    sa.Column("detail", Text, nullable=False),
    sa.Column("hash", Bytes, nullable=False),
    distribute_by=EVERYWHERE,
)
