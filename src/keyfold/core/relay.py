"""The relay: publishes the oldest messages of the outbox in order, and marks what was acknowledged.

Embedded, publishing is numbering: one transaction moves the guard row and sets the positions. With Kafka the run is
sent first and the acknowledged prefix is marked after, so a crash between the two sends again and loses nothing.
"""

import time
from collections import deque

import sqlalchemy as sa

from keyfold.core import metrics, progress
from keyfold.core.context import Context
from keyfold.core.errors import LeaseLost, LostRace, TopicUnreachable
from keyfold.core.leases.lease import Lease
from keyfold.core.loops import Loop
from keyfold.core.shards import Shards
from keyfold.core.store import Transaction
from keyfold.core.store.shapes import update
from keyfold.core.tables import MESSAGES
from keyfold.core.topics.embedded import message_of, relay_job
from keyfold.core.topics.topic import Pending, Sink


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
        self._positions: dict[int, tuple[int, int]] = {}  # partition -> ticket, messages relayed
        self._hints: dict[int, _Hint] = {}

    def loop(self) -> Loop:
        return Loop(name=self._job, step=self.step, idle_seconds=0.05, stop=self.stop)

    def step(self) -> bool:
        """Publish one batch of every partition held; whether there may be more."""
        self._shards.tick()
        full = False
        for partition, lease in self._shards.held.items():
            try:
                full |= self.relay(partition, lease) >= self._limits.relay_batch_max
            except LeaseLost:
                self._positions.pop(partition, None)
        return full

    def stop(self) -> None:
        self._shards.release_all()
        if self._sink:
            self._sink.close()

    def relay(self, partition: int, lease: Lease) -> int:
        """Publish the oldest batch of a partition; returns how many messages."""
        ticket, done = self._positions.get(partition, (0, 0))
        if ticket != lease.ticket:
            done = self._store.transact(
                lambda tx: progress.adopt(tx, self._job, partition, lease.ticket, ""), name="relay adopt"
            )
            self._positions[partition] = (lease.ticket, done)
            self._hints[partition] = _Hint(2 * self._limits.transaction_seconds_max)
        hint = self._hints[partition]
        looked_at = time.monotonic()
        pending = self._store.read(lambda tx: self._pending(tx, partition, hint.id))
        if not pending:
            return 0
        count = (
            self._number(partition, lease, done, pending)
            if self._sink is None
            else self._send(self._sink, partition, lease, done, pending)
        )
        hint.published(pending[count - 1].id, looked_at)
        self._positions[partition] = (lease.ticket, done + count)
        metrics.RELAYED.labels(self._topic).inc(count)
        return count

    def _number(self, partition: int, lease: Lease, done: int, pending: list[Pending]) -> int:
        def work(tx: Transaction) -> None:
            progress.advance(tx, self._job, partition, lease.ticket, done, done + len(pending))
            self._mark(tx, partition, pending, range(done, done + len(pending)))

        self._store.transact(work, name="relay")
        return len(pending)

    def _send(self, sink: Sink, partition: int, lease: Lease, done: int, pending: list[Pending]) -> int:
        """The sink's time-out is shorter than the lease, so nothing of ours arrives after the lease has passed on."""
        positions = sink.publish(partition, pending)
        if not positions:
            raise TopicUnreachable(f"no message of {self._topic}/{partition} was acknowledged")

        def work(tx: Transaction) -> None:
            progress.advance(tx, self._job, partition, lease.ticket, done, done + len(positions))
            self._mark(tx, partition, pending[: len(positions)], positions)

        self._store.transact(work, name="relay")
        return len(positions)

    def _pending(self, tx: Transaction, partition: int, after_id: int) -> list[Pending]:
        rows = tx.execute(
            _PENDING,
            {"t": self._topic, "p": partition, "after_id": after_id, "count_max": self._limits.relay_batch_max},
        )
        return [Pending(row.id, message_of(row)) for row in rows]

    def _mark(self, tx: Transaction, partition: int, pending: list[Pending], positions: range | list[int]) -> None:
        last = tx.execute(_LAST_PUBLISHED_AT, {"t": self._topic, "p": partition}).scalar() or 0
        at = max(tx.now_us, last)  # publication times grow with positions, whatever the clock does
        marked = update(
            tx,
            MESSAGES,
            {
                "topic": [self._topic] * len(pending),
                "key": [each.message.key for each in pending],
                "kind": [each.message.kind for each in pending],
                "version": [each.message.version for each in pending],
                "position": list(positions),
                "published_at_us": [at] * len(pending),
            },
        )
        if marked != len(pending):
            raise LostRace(f"{len(pending) - marked} messages vanished while they were published")


class _Hint:
    """An id below which nothing unpublished can appear any more, so that scans skip what was published.

    Ids are taken inside transactions, and a transaction lasts a bounded time: what was published longer ago than
    that has no unfinished neighbour below it. A shorter memory could publish a key's second version before its first.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._seen: deque[tuple[float, int]] = deque()
        self.id = -1

    def published(self, up_to_id: int, looked_at: float) -> None:
        """Everything visible at `looked_at` with an id up to this one is out."""
        if not self._seen or looked_at - self._seen[-1][0] >= 1.0:
            self._seen.append((looked_at, up_to_id))
        while self._seen and looked_at - self._seen[0][0] > self._seconds:
            self.id = max(self.id, min(self._seen.popleft()[1], up_to_id))


_HERE = (MESSAGES.c.topic == sa.bindparam("t"), MESSAGES.c.partition == sa.bindparam("p"))

_PENDING = (
    sa.select(MESSAGES)
    .where(*_HERE, MESSAGES.c.position.is_(None), MESSAGES.c.id > sa.bindparam("after_id"))
    .order_by(MESSAGES.c.id)
    .limit(sa.bindparam("count_max"))
)
_LAST_PUBLISHED_AT = (
    sa.select(MESSAGES.c.published_at_us)
    .where(*_HERE, MESSAGES.c.position.is_not(None))
    .order_by(MESSAGES.c.position.desc())
    .limit(1)
)
