"""Replay: a consumer's position set back, or what Kafka was sent sent again; either leaves an audit record."""

from collections.abc import Callable

import sqlalchemy as sa
from msgspec import Struct

from keyfold.core import audit, progress
from keyfold.core.consumer import Consumer
from keyfold.core.context import Context
from keyfold.core.errors import BadInput, Conflict, OffsetGone, TopicUnreachable
from keyfold.core.store import Transaction
from keyfold.core.tables import DEAD_LETTERS, MESSAGES
from keyfold.core.topics.embedded import message_of
from keyfold.core.topics.topic import Pending, Sink


class Start(Struct, frozen=True, kw_only=True):
    """Where to begin: a position or a time of publication, in one partition or in all."""

    position: int | None = None
    time_us: int | None = None
    partition: int | None = None

    def __str__(self) -> str:
        where = "" if self.partition is None else f" of partition {self.partition}"
        return f"position {self.position}{where}" if self.position is not None else f"time {self.time_us}{where}"


class SetBack(Struct, frozen=True):
    """Where a consumer stood in a partition, and from where it reads again."""

    partition: int
    before: int
    after: int


class SentAgain(Struct, frozen=True):
    """How many messages of a partition were published once more."""

    partition: int
    messages: int


def set_back(context: Context, consumer: Consumer, start: Start, *, actor: str) -> list[SetBack]:
    """Let a consumer read again from `start`. Never forward: that would skip messages."""
    if not consumer.replayable:
        raise Conflict(
            f"the consumer {consumer.name} cannot be set back: it would apply messages a second time",
            hint="Only a consumer that compares versions or marks declares itself replayable",
        )
    source = context.topics.source(consumer.topic)
    try:
        wanted: dict[int, int] = {}
        for partition in _partitions(context, consumer.topic, start):
            bounds = source.bounds(partition)
            position = source.position_at(partition, start.time_us) if start.time_us is not None else start.position
            assert position is not None
            if position < bounds.first:
                raise OffsetGone(
                    f"position {position} was purged; the first one kept is {bounds.first}",
                    place=f"{consumer.topic}/{partition}",
                    hint="Begin at a later position, or by time",
                )
            wanted[partition] = position
    finally:
        source.close()

    def work(tx: Transaction) -> list[SetBack]:
        moved = []
        for partition, stood in progress.positions(tx, consumer.job).items():
            if partition in wanted:
                after = min(stood.position, wanted[partition])
                if after < stood.position:
                    # Before the look: the row's lock keeps the consumer from setting a message aside after it.
                    progress.rewind(tx, consumer.job, partition, after)
                    if consumer.ordered:  # elsewhere nothing waits behind a letter, and it is kept once
                        _must_be_free_of_letters(tx, consumer, partition, after)
                moved.append(SetBack(partition, stood.position, after))
        audit.record(tx, actor, "consumer set back", f"{consumer.name} of {consumer.topic} to {start}")
        return moved

    return context.store.transact(work, name="set back", once=True)


def send_again(
    context: Context, topic: str, start: Start, *, actor: str, report: Callable[[SentAgain], None] = lambda sent: None
) -> list[SentAgain]:
    """Publish the retained messages of a topic once more, in their order; consumers drop what is not newer."""
    if context.topics.embedded:
        raise BadInput(
            f"{topic} is an embedded topic: whoever reads it does so by position, so nothing needs to be sent again",
            hint="Set a consumer back with --consumer NAME, or read on your own: keyfold topics tail --from-position N",
        )
    partitions = _partitions(context, topic, start)
    context.store.transact(lambda tx: audit.record(tx, actor, "topic sent again", f"{topic} from {start}"), once=True)
    sink = context.topics.sink(topic)
    assert sink is not None
    try:
        done = []
        for partition in partitions:
            done.append(SentAgain(partition, _send_partition(context, sink, topic, partition, start)))
            report(done[-1])
        return done
    finally:
        sink.close()


def _partitions(context: Context, topic: str, start: Start) -> list[int]:
    count = context.topics.partitions(topic)
    if start.partition is None:
        return list(range(count))
    if not 0 <= start.partition < count:
        raise BadInput(f"{topic} has no partition {start.partition}", hint=f"It has 0 to {count - 1}")
    return [start.partition]


def _must_be_free_of_letters(tx: Transaction, consumer: Consumer, partition: int, position: int) -> None:
    """A message that is set aside would come a second time and stand in its own way."""
    inside = sa.select(sa.func.count()).where(
        DEAD_LETTERS.c.consumer == consumer.name,
        DEAD_LETTERS.c.topic == consumer.topic,
        DEAD_LETTERS.c.partition == partition,
        DEAD_LETTERS.c.position >= position,
    )
    if letters := tx.execute(inside).scalar_one():
        raise Conflict(
            f"{letters} of the messages to read again are set aside",
            place=f"{consumer.topic}/{partition}",
            hint=f"First: keyfold topics redrive {consumer.name}",
        )


def _send_partition(context: Context, sink: Sink, topic: str, partition: int, start: Start) -> int:
    here = [MESSAGES.c.topic == topic, MESSAGES.c.partition == partition, MESSAGES.c.position.is_not(None)]
    if start.time_us is not None:
        here.append(MESSAGES.c.published_at_us >= start.time_us)
    else:
        here.append(MESSAGES.c.position >= start.position)
    # What is published meanwhile is no part of a replay.
    last = sa.select(sa.func.max(MESSAGES.c.id)).where(*here)
    last_id = context.store.read(lambda tx: tx.execute(last).scalar())
    sent, after_id = 0, -1
    while last_id is not None and after_id < last_id:
        page = sa.select(MESSAGES).where(*here, MESSAGES.c.id > after_id, MESSAGES.c.id <= last_id)
        pending = _page(context, page)
        if not pending:
            break
        acknowledged = len(sink.publish(partition, pending))
        if not acknowledged:
            raise TopicUnreachable(
                f"no message of {topic}/{partition} was acknowledged", hint=f"{sent} were; repeat when it answers"
            )
        sent, after_id = sent + acknowledged, pending[acknowledged - 1].id
    return sent


def _page(context: Context, wanted: sa.Select[tuple[object, ...]]) -> list[Pending]:
    page = wanted.order_by(MESSAGES.c.id).limit(context.limits.relay_batch_max)
    return [Pending(row.id, message_of(row)) for row in context.store.read(lambda tx: tx.execute(page).all())]
