"""What stands where in the topics: positions, what waits in the outbox, how far consumers are behind."""

import sqlalchemy as sa
from msgspec import Struct

from keyfold.core import progress
from keyfold.core.clock import SECOND_US
from keyfold.core.consumer import Consumer
from keyfold.core.context import Context
from keyfold.core.store import Transaction
from keyfold.core.tables import DEAD_LETTERS, MESSAGES
from keyfold.core.topics.topic import Bounds
from keyfold.core.workers import consumers


class PartitionState(Struct, frozen=True):
    partition: int
    first: int
    next: int


class ConsumerState(Struct, frozen=True):
    """`lag` counts messages published and not applied; `dead` and `parked` those set aside."""

    name: str
    lag: int
    dead: int
    parked: int
    positions: dict[int, int]


class TopicState(Struct, frozen=True):
    topic: str
    description: str
    kept: int
    pending: int
    oldest_pending_seconds: float
    partitions: list[PartitionState]
    consumers: list[ConsumerState]


def overview(context: Context) -> list[TopicState]:
    """Every topic of the store, also of parts that this program does not have."""
    descriptions = {spec.name: spec.description for part in context.parts for spec in part.topics_of(context.settings)}
    known = [consumer for part in context.parts for consumer in consumers(context, part)]
    waiting = context.store.read(_waiting)
    aside = context.store.read(_set_aside)
    states = []
    for topic in context.topics.names:
        source = context.topics.source(topic)
        bounds = [source.bounds(partition) for partition in range(source.partitions)]
        source.close()
        pending, oldest_seconds = waiting.get(topic, (0, 0.0))
        states.append(
            TopicState(
                topic,
                descriptions.get(topic, ""),
                sum(each.next - each.first for each in bounds),
                pending,
                oldest_seconds,
                [PartitionState(partition, each.first, each.next) for partition, each in enumerate(bounds)],
                [_consumer_state(context, each, bounds, aside) for each in known if each.topic == topic],
            )
        )
    return states


def _consumer_state(
    context: Context, consumer: Consumer, bounds: list[Bounds], aside: dict[tuple[str, str, str], int]
) -> ConsumerState:
    stood = context.store.read(lambda tx: progress.positions(tx, consumer.job))
    positions = {
        partition: stood[partition].position if partition in stood else each.first
        for partition, each in enumerate(bounds)
    }
    return ConsumerState(
        consumer.name,
        sum(max(0, each.next - positions[partition]) for partition, each in enumerate(bounds)),
        aside.get((consumer.name, consumer.topic, "dead"), 0),
        aside.get((consumer.name, consumer.topic, "parked"), 0),
        positions,
    )


def _waiting(tx: Transaction) -> dict[str, tuple[int, float]]:
    """For each topic with a full outbox: how many messages, and how old the oldest is."""
    query = (
        sa.select(MESSAGES.c.topic, sa.func.count().label("pending"), sa.func.min(MESSAGES.c.queued_at_us).label("at"))
        .where(MESSAGES.c.position.is_(None))
        .group_by(MESSAGES.c.topic)
    )
    now_us = tx.now_us
    return {row.topic: (row.pending, max(0, now_us - row.at) / SECOND_US) for row in tx.execute(query)}


def _set_aside(tx: Transaction) -> dict[tuple[str, str, str], int]:
    columns = (DEAD_LETTERS.c.consumer, DEAD_LETTERS.c.topic, DEAD_LETTERS.c.state)
    query = sa.select(*columns, sa.func.count().label("letters")).group_by(*columns)
    return {(row.consumer, row.topic, row.state): row.letters for row in tx.execute(query)}
