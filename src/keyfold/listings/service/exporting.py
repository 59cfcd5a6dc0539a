"""How far the export of offers has come: what waits, by shard of the topic, and for how long."""

import sqlalchemy as sa
from msgspec import Struct

from keyfold.core.clock import SECOND_US
from keyfold.core.store import Transaction
from keyfold.core.tables import MESSAGES


class ShardStatus(Struct, frozen=True):
    """One shard of the queue, which is a partition of the topic."""

    shard: int
    pending: int
    oldest_seconds: float
    published: int  # within the replay window


def status(tx: Transaction, topic: str, partitions: int) -> list[ShardStatus]:
    """Every shard of a topic."""
    is_pending = MESSAGES.c.position.is_(None)
    waiting = sa.select(
        MESSAGES.c.partition, sa.func.count().label("count"), sa.func.min(MESSAGES.c.queued_at_us).label("oldest")
    ).where(MESSAGES.c.topic == topic, is_pending)
    pending = {row.partition: row for row in tx.execute(waiting.group_by(MESSAGES.c.partition))}
    done = sa.select(MESSAGES.c.partition, sa.func.count().label("count")).where(
        MESSAGES.c.topic == topic, sa.not_(is_pending)
    )
    published = {row.partition: row._mapping["count"] for row in tx.execute(done.group_by(MESSAGES.c.partition))}
    return [
        ShardStatus(
            shard,
            pending[shard]._mapping["count"] if shard in pending else 0,
            max(0.0, (tx.now_us - pending[shard].oldest) / SECOND_US) if shard in pending else 0.0,
            published.get(shard, 0),
        )
        for shard in range(partitions)
    ]
