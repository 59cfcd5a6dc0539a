"""The relay: publishes the oldest messages of the outbox in order, and marks what was acknowledged.

Embedded, publishing is numbering: one transaction moves the guard rows and sets the positions, and no message leaves
the store. With Kafka the run is sent first and the acknowledged prefix is marked after, so a crash between the two
sends again and loses nothing.
"""

import time
from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import Any

import structlog

from keyfold.core import metrics, progress
from keyfold.core.context import Context
from keyfold.core.errors import LeaseLost, LostRace, TopicUnreachable
from keyfold.core.leases.lease import Lease
from keyfold.core.loops import Loop
from keyfold.core.shards import Shards
from keyfold.core.store import Transaction
from keyfold.core.store.schema import key_names
from keyfold.core.store.shapes import update
from keyfold.core.tables import MESSAGES
from keyfold.core.topics.embedded import relay_job
from keyfold.core.topics.topic import Message, Pending, Sink

log = structlog.get_logger(__name__)

# Partitions numbered in one transaction: bounds it to this many batches.
TOGETHER = 8


class Relay:
    """Publishes one topic; several relays share its partitions, each under a ticket."""

    def __init__(self, context: Context, topic: str, worker: str) -> None:
        self._store = context.store
        self._limits = context.limits
        self._topic = topic
        self._sink = context.topics.sink(topic)
        self._job = relay_job(topic)
        self._shards = Shards(
            context.leases,
            self._job,
            context.topics.partitions(topic),
            worker,
            context.settings.leases.lease_seconds,
        )
        self._places: dict[int, _Place] = {}
        self._wake = context.topics.listen(f"pending/{topic}")
        self._ring = context.topics.ring

    def loop(self) -> Loop:
        return Loop(name=self._job, step=self.step, wake=self._wake, stop=self.stop)

    def step(self) -> bool:
        """Publish one batch of every partition held; whether there may be more."""
        with self._shards.at_work():
            return self._publish_held()

    def _publish_held(self) -> bool:
        held = sorted(self._shards.held.items())
        # What Kafka has acknowledged is marked at once, so a run that stalls delays no mark of another.
        together = TOGETHER if self._sink is None else 1
        more = False
        for start in range(0, len(held), together):
            more |= self._publish(held[start : start + together])
        return more

    def stop(self) -> None:
        self._shards.release_all()
        if self._sink:
            self._sink.close()

    def _publish(self, held: list[tuple[int, Lease]]) -> bool:
        """Publish the oldest batch of each of these partitions; one that is lost does not keep back the others."""
        try:
            for partition, lease in held:
                self._adopt(partition, lease)
            partitions = [partition for partition, _ in held]
            return self._number(partitions) if self._sink is None else self._send(self._sink, *partitions)
        except LeaseLost as error:
            if len(held) == 1:
                log.warning("partition lost", topic=self._topic, partition=held[0][0], error=str(error))
                self._places.pop(held[0][0], None)
                return False
        more = False
        for each in held:
            more |= self._publish([each])
        return more

    def _adopt(self, partition: int, lease: Lease) -> None:
        place = self._places.get(partition)
        if place is None or place.ticket != lease.ticket:
            done = self._store.transact(
                lambda tx: progress.adopt(tx, self._job, partition, lease.ticket, ""), name="relay adopt"
            )
            self._places[partition] = _Place(lease.ticket, done, _Hint(2 * self._limits.transaction_seconds_max))

    def _number(self, partitions: list[int]) -> bool:
        """Give the oldest messages their positions, by one statement a partition and one commit for all of them.

        Neighbours in the outbox belong to different partitions: numbered together, a page of theirs is written once
        (SQLite, four partitions: 230,000 messages/s against 120,000 with a commit each).
        """
        looked_at = time.monotonic()
        counts = self._store.read(lambda tx: self._counts_pending(tx, partitions))
        if not counts:
            return False

        def work(tx: Transaction) -> dict[int, int | None]:
            for partition, count in counts.items():
                self._advance(tx, partition, count)
            return {each: self._number_oldest(tx, each, count, looked_at) for each, count in counts.items()}

        for partition, last_id in self._store.transact(work, name="relay").items():
            self._published(partition, counts[partition], last_id, looked_at)
        return max(counts.values()) >= self._limits.relay_batch_max

    def _send(self, sink: Sink, partition: int) -> bool:
        """Send, then mark. What was on the wire when we gave up may still arrive, as a duplicate, never as a first."""
        looked_at = time.monotonic()
        pending = self._store.read(lambda tx: self._pending(tx, partition))
        if not pending:
            return False
        positions = sink.publish(partition, pending)
        if not positions:
            raise TopicUnreachable(f"no message of {self._topic}/{partition} was acknowledged")
        acknowledged = pending[: len(positions)]

        def work(tx: Transaction) -> None:
            self._advance(tx, partition, len(positions))
            self._mark(tx, partition, acknowledged, positions)

        self._store.transact(work, name="relay")
        self._published(partition, len(positions), acknowledged[-1].id, looked_at)
        return len(positions) >= self._limits.relay_batch_max

    def _advance(self, tx: Transaction, partition: int, count: int) -> None:
        place = self._places[partition]
        progress.advance(tx, self._job, partition, place.ticket, place.done, place.done + count)

    def _published(self, partition: int, count: int, last_id: int | None, looked_at: float) -> None:
        place = self._places[partition]
        place.done += count
        if last_id is not None:
            place.hint.published(last_id, looked_at)
        metrics.RELAYED.labels(self._topic).inc(count)
        self._ring(f"published/{self._topic}")

    def _counts_pending(self, tx: Transaction, partitions: list[int]) -> dict[int, int]:
        """How many messages wait in each partition, up to a batch; those without any are left out."""
        sql = _count_sql(_mark(tx))
        counts = {each: int(tx.driver(sql, self._oldest(each)).scalar_one()) for each in partitions}
        return {partition: count for partition, count in counts.items() if count}

    def _pending(self, tx: Transaction, partition: int) -> list[Pending]:
        rows: Sequence[Any] = tx.driver(_pending_sql(_mark(tx)), self._oldest(partition)).all()
        return [
            Pending(
                row_id,
                Message(key=key, version=version, event_time_us=time_us, schema=schema, payload=payload, kind=kind),
            )
            for row_id, key, kind, version, time_us, schema, payload in rows
        ]

    def _oldest(self, partition: int) -> tuple[object, ...]:
        return (self._topic, partition, self._places[partition].hint.id, self._limits.relay_batch_max)

    def _number_oldest(self, tx: Transaction, partition: int, count: int, looked_at: float) -> int | None:
        """Number exactly as many as the guard row was moved by; returns the id of the last where the hint is due.

        They were counted before: one with a lower id that came since takes the place of a younger one.
        """
        place = self._places[partition]
        parameters = (place.done, self._published_at(tx, partition), self._topic, partition, place.hint.id, count)
        numbered = tx.driver(_number_sql(tx), parameters).rowcount
        if numbered != count:
            raise LostRace(f"{count - numbered} messages vanished while they were published")
        if not place.hint.is_due(looked_at):
            return None
        last = (self._topic, partition, place.done + count - 1)
        return int(tx.driver(_id_sql(_mark(tx)), last).scalar_one())

    def _mark(self, tx: Transaction, partition: int, pending: list[Pending], positions: list[int]) -> None:
        marked = update(
            tx,
            MESSAGES,
            {
                "topic": [self._topic] * len(pending),
                "key": [each.message.key for each in pending],
                "kind": [each.message.kind for each in pending],
                "version": [each.message.version for each in pending],
                "position": positions,
                "published_at_us": [self._published_at(tx, partition)] * len(pending),
            },
        )
        if marked != len(pending):
            raise LostRace(f"{len(pending) - marked} messages vanished while they were published")

    def _published_at(self, tx: Transaction, partition: int) -> int:
        """Publication times grow with positions, whatever the clock does; nobody else publishes under our ticket."""
        place = self._places[partition]
        if place.published_at_us is None:
            place.published_at_us = tx.driver(_last_time_sql(_mark(tx)), (self._topic, partition)).scalar() or 0
        place.published_at_us = max(tx.now_us, place.published_at_us)
        return place.published_at_us


class _Place:
    """How far a partition is published, under which ticket."""

    def __init__(self, ticket: int, done: int, hint: "_Hint") -> None:
        self.ticket = ticket
        self.done = done
        self.hint = hint
        self.published_at_us: int | None = None  # of the last message; unknown until the first that we publish


class _Hint:
    """An id below which nothing unpublished can appear any more, so that scans skip what was published.

    Ids are taken inside transactions, and a transaction lasts a bounded time: what was published longer ago than
    that has no unfinished neighbour below it. A shorter memory could publish a key's second version before its first.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._seen: deque[tuple[float, int]] = deque()
        self.id = -1

    def is_due(self, looked_at: float) -> bool:
        """Whether it is worth finding out up to where everything is out: once a second is enough."""
        return not self._seen or looked_at - self._seen[-1][0] >= 1.0

    def published(self, up_to_id: int, looked_at: float) -> None:
        """Everything visible at `looked_at` with an id up to this one is out."""
        if self.is_due(looked_at):
            self._seen.append((looked_at, up_to_id))
        while self._seen and looked_at - self._seen[0][0] > self._seconds:
            self.id = max(self.id, min(self._seen.popleft()[1], up_to_id))


def _mark(tx: Transaction) -> str:
    return "?" if tx.is_sqlite else "%s"


def _pending_sql(mark: str, wanted: str = "id, key, kind, version, event_time_us, schema_name, payload") -> str:
    return (
        f"SELECT {wanted} FROM messages"
        f" WHERE topic = {mark} AND partition = {mark} AND position IS NULL AND id > {mark} ORDER BY id LIMIT {mark}"
    )


def _count_sql(mark: str) -> str:
    return f"SELECT count(*) FROM ({_pending_sql(mark, 'id')}) AS oldest"


def _id_sql(mark: str) -> str:
    return f"SELECT id FROM messages WHERE topic = {mark} AND partition = {mark} AND position = {mark}"


def _last_time_sql(mark: str) -> str:
    return (
        "SELECT published_at_us FROM messages"
        f" WHERE topic = {mark} AND partition = {mark} AND position IS NOT NULL ORDER BY position DESC LIMIT 1"
    )


def _number_sql(tx: Transaction) -> str:
    """Positions for the oldest pending messages of a partition, in the order of their ids."""
    return _number_by(_mark(tx), ("rowid",) if tx.is_sqlite else key_names(MESSAGES))


@cache
def _number_by(mark: str, row: tuple[str, ...]) -> str:
    picked = ", ".join(f"{name} AS this_{name}" for name in row)
    joined = " AND ".join(f"messages.{name} = oldest.this_{name}" for name in row)
    return (
        f"UPDATE messages SET position = {mark} + oldest.place - 1, published_at_us = {mark}"
        f" FROM ({_pending_sql(mark, f'{picked}, row_number() OVER (ORDER BY id) AS place')}) AS oldest"
        f" WHERE {joined}"
    )
