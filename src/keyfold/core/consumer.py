"""Consumers: messages applied to state in the transaction that moves their position, each exactly once.

The position is a guard row: it moves by compare-and-set from the batch's first position under the holder's ticket,
so a redelivered batch, or a consumer that lost its partition, changes nothing. A message that cannot be applied is
set aside with its reason; the rest of its batch commits; later messages of its key wait behind it.
"""

import random
import time
from collections.abc import Sequence

import structlog
from msgspec import Struct

from keyfold.core import deadletters, metrics, progress
from keyfold.core.context import Context
from keyfold.core.deadletters import Apply
from keyfold.core.errors import LeaseLost, PartitionStopped, StoreBusy, Unavailable
from keyfold.core.leases.lease import Lease
from keyfold.core.loops import Loop
from keyfold.core.pace import Pace
from keyfold.core.shards import Shards
from keyfold.core.store import Transaction
from keyfold.core.topics import embedded
from keyfold.core.topics.topic import Record

log = structlog.get_logger(__name__)


class Consumer(Struct, frozen=True, kw_only=True):
    """Who applies a topic's messages. `apply` has no effect outside the transaction and may be called again.

    With `replayable`, applying a message again changes nothing (it is compared by version or mark), so that the
    position may be set back. With `payload_only` it looks at nothing else of a message, which need not be read then.
    """

    name: str
    topic: str
    apply: Apply
    ordered: bool = True
    replayable: bool = False
    payload_only: bool = False

    def __post_init__(self) -> None:
        if self.ordered and self.payload_only:
            raise ValueError(f"the consumer {self.name} needs keys, because order is by key")

    @property
    def job(self) -> str:
        return consumer_job(self.name, self.topic)


def consumer_job(name: str, topic: str) -> str:
    return f"consumer/{topic}/{name}"


class ConsumerWorker:
    """Runs one consumer; several workers share the topic's partitions, each under a ticket."""

    def __init__(self, context: Context, consumer: Consumer, worker: str) -> None:
        self._store = context.store
        self._limits = context.limits
        self._consumer = consumer
        self._source = context.topics.source(consumer.topic, payload_only=consumer.payload_only)
        self._shards = Shards(
            context.leases,
            consumer.job,
            context.topics.partitions(consumer.topic),
            worker,
            context.settings.leases.lease_seconds,
        )
        self._began = 0.0  # when the last try of a batch had the store: waiting for it is not the batch's own time
        self._positions: dict[int, tuple[int, int]] = {}  # partition -> ticket, next position
        self._pace = Pace(context.limits.consumer_batch_max, context.limits.consumer_batch_milliseconds / 1_000)
        self._batches_max: dict[int, int] = {}  # partition -> messages, where fewer are taken for now
        self._wake = context.topics.listen(f"published/{consumer.topic}")
        # A broker does not ring: what others publish is found by looking.
        self._idle_seconds_max = 1.0 if context.topics.embedded else 0.2
        self._consumed = metrics.CONSUMED.labels(consumer.name, consumer.topic)

    def loop(self) -> Loop:
        return Loop(
            name=self._consumer.job,
            step=self.step,
            idle_seconds_max=self._idle_seconds_max,
            wake=self._wake,
            stop=self.stop,
        )

    def step(self) -> bool:
        """Apply one batch of every partition held; whether there may be more. A failing partition stops no other."""
        with self._shards.at_work():
            return self._consume_held()

    def _consume_held(self) -> bool:
        more = False
        failure: Exception | None = None
        for partition, lease in self._shards.held.items():
            try:
                more |= self.consume(partition, lease) > 0
            except LeaseLost as error:
                log.warning("partition lost", consumer=self._consumer.name, partition=partition, error=str(error))
                self._positions.pop(partition, None)
            except Exception as error:
                if isinstance(error, StoreBusy):
                    self._take_fewer(partition)
                self._positions.pop(partition, None)
                failure = error
        if failure is not None:
            raise failure
        return more

    def stop(self) -> None:
        self._shards.release_all()
        self._source.close()

    def consume(self, partition: int, lease: Lease) -> int:
        """Apply the next batch of a partition; returns how many messages it moved past."""
        ticket, position = self._positions.get(partition, (0, 0))
        if ticket != lease.ticket:
            identity = self._source.identity()
            position = self._store.transact(
                lambda tx: progress.adopt(tx, self._consumer.job, partition, lease.ticket, identity),
                name="consumer adopt",
            )
            self._positions[partition] = (lease.ticket, position)
        records = self._source.fetch(partition, position, self._count_max(partition), 0.0)
        if records:
            if self._apply(partition, lease.ticket, position, records):
                self._pace.went(len(records), time.monotonic() - self._began)
            else:
                self._pace.set_back()
            self._take_more(partition)
        elif self._was_set_back(partition, position):
            self._positions.pop(partition)
        return len(records)

    def _count_max(self, partition: int) -> int:
        return min(self._pace.count, self._batches_max.get(partition, self._pace.count))

    def _take_fewer(self, partition: int) -> None:
        """A batch that lost every race, or took too long, would do so again: half of it is done sooner."""
        self._batches_max[partition] = max(1, self._count_max(partition) // 2)

    def _take_more(self, partition: int) -> None:
        count_max = 2 * self._batches_max.pop(partition, self._pace.count)
        if count_max < self._pace.count:
            self._batches_max[partition] = count_max

    def _was_set_back(self, partition: int, position: int) -> bool:
        """Where messages arrive, a replay shows at the guard row; where none do, only a look at it shows it."""
        stored = self._store.read(lambda tx: progress.positions(tx, self._consumer.job)).get(partition)
        return stored is not None and stored.position < position

    def _apply(self, partition: int, ticket: int, position: int, records: Sequence[Record]) -> bool:
        """Apply a run of records; where it fails, halve it, left before right, until the poison stands alone.

        Returns whether it was applied as a whole.
        """
        end = records[-1].position + 1
        tries = self._limits.message_tries_max if len(records) == 1 else 1
        for attempt in range(tries):
            if attempt:
                time.sleep(random.uniform(0.01, 0.05) * 2**attempt)  # noqa: S311
            try:
                self._store.transact(
                    lambda tx: self._fold(tx, partition, ticket, position, end, records), name=self._consumer.name
                )
                self._positions[partition] = (ticket, end)
                self._consumed.inc(len(records))
                return True
            except (Unavailable, LeaseLost, PartitionStopped):
                raise
            except Exception as error:
                reason = error
        if len(records) == 1:
            self._set_aside(partition, ticket, position, end, records[0], reason)
            return False
        middle = len(records) // 2
        self._apply(partition, ticket, position, records[:middle])
        self._apply(partition, ticket, records[middle - 1].position + 1, records[middle:])
        return False

    def _fold(
        self, tx: Transaction, partition: int, ticket: int, position: int, end: int, records: Sequence[Record]
    ) -> None:
        self._began = time.monotonic()
        progress.advance(tx, self._consumer.job, partition, ticket, position, end)
        free = (
            deadletters.park(tx, self._consumer.name, self._consumer.topic, records)
            if self._consumer.ordered
            else records
        )
        for refusal in (self._consumer.apply(tx, free) or ()) if free else ():
            self._keep(tx, refusal.record, refusal.reason, tries=1)

    def _keep(self, tx: Transaction, record: Record, reason: str, tries: int) -> Record:
        record = embedded.whole(tx, self._consumer.topic, record)
        deadletters.set_aside(
            tx,
            self._consumer.name,
            self._consumer.topic,
            record,
            reason,
            tries=tries,
            parked_keys_max=self._limits.parked_keys_max if self._consumer.ordered else None,
        )
        return record

    def _set_aside(
        self, partition: int, ticket: int, position: int, end: int, record: Record, reason: Exception
    ) -> None:
        def work(tx: Transaction) -> Record:
            progress.advance(tx, self._consumer.job, partition, ticket, position, end)
            return self._keep(tx, record, f"{type(reason).__name__}: {reason}", self._limits.message_tries_max)

        kept = self._store.transact(work, name="set aside")
        self._positions[partition] = (ticket, end)
        log.error(
            "message set aside",
            consumer=self._consumer.name,
            topic=self._consumer.topic,
            partition=partition,
            position=kept.position,
            key=kept.message.key,
            reason=str(reason),
        )
