"""Topics on Kafka: runs published in order by an idempotent producer, records read at explicit offsets."""

import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import confluent_kafka as kafka
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ListOffsetsResultInfo,
    NewTopic,
    OffsetSpec,
    TopicDescription,
)

from keyfold.core.errors import KeyfoldError, OffsetGone, SettingsWrong, TopicChanged, TopicUnreachable
from keyfold.core.topics.topic import Bounds, Message, Pending, Record

# Headers of a message. Every value is text, so that any language and any tool can read it.
VERSION = "keyfold.version"
KIND = "keyfold.kind"
EVENT_TIME_US = "keyfold.event_time_us"
SCHEMA = "keyfold.schema"

T = TypeVar("T")
Property = str | int | float | bool

REQUEST_SECONDS = 5.0  # longest wait for one answer of the brokers
CREATE_SECONDS = 30.0
OPEN_SECONDS_MIN = 2.0
FLUSH_SECONDS = 0.15
LEADER_SECONDS = 0.05
IDENTITY_SECONDS = 1.0  # an idle reader asks at most this often whether the topic is still the same
ACQUAINTED_SECONDS = 60.0  # far below producer.id.expiration.ms, after which a broker forgets a producer
SLICE_COUNT_MAX = 10_000
SLICE_BYTES_MAX = 32 * 1024 * 1024
READ_AHEAD_BYTES_MAX = 16 * 1024 * 1024
RECORD_OVERHEAD_BYTES = 400
DIGITS_MAX = 20

# An operator may override these by `topics.kafka_options`.
CLIENT_DEFAULTS: dict[str, Property] = {
    "client.id": "keyfold",
    "reconnect.backoff.max.ms": 1_000,
    "socket.timeout.ms": 10_000,
    "log.connection.close": False,
}
PRODUCER_DEFAULTS: dict[str, Property] = {
    # A run of 2,000 messages is gathered into one request; waiting for the run sends what is left at once.
    "linger.ms": 5,
    "compression.type": "lz4",
}
CONSUMER_DEFAULTS: dict[str, Property] = {
    "group.id": "keyfold",  # the client insists on one; positions are kept in the store
    "check.crcs": True,
    "queued.min.messages": 20_000,
    "queued.max.messages.kbytes": 16_384,
    "fetch.queue.backoff.ms": 50,
    "fetch.wait.max.ms": 100,  # a jump waits until the poll that is under way returns
}

# Order rests on these; nobody overrides them. What the broker stores of one producer and partition is a run without
# gaps, in the order of `publish`, because
# - it refuses a batch that does not follow the last one, unless it does not know the producer yet: then it takes any
#   (Kafka's ProducerAppendInfo.checkSequence). librdkafka may send the second batch right after the first was refused
#   (a request that waits in its out-queue is not held back), so the first message for a partition goes alone;
# - a failure for good stops the producer (gapless guarantee), as purging does, so that nothing jumps over it. Messages
#   that time out are outside that guarantee and would leave a gap, so they never time out: the deadline is ours;
# - retries do not run out, for the same reason, and one request at a time is in flight, because a failed one among
#   several makes librdkafka start a new epoch that stores the others again (its issue 4953).
# A producer that is thrown away may have one request on the wire, which a broker may store late, or twice after a
# lost answer. Such leftovers and every later try are each a gapless run that starts no later than the first message
# that was not acknowledged when it began. Where version v comes first in one of them, every version before v either
# stands before it in the same run or was acknowledged before that run began. So first occurrences grow, and what comes
# again is a duplicate that consumers skip by its version.
PRODUCER_GUARANTEES: dict[str, Property] = {
    "enable.idempotence": True,
    "enable.gapless.guarantee": True,
    "acks": "all",
    "max.in.flight.requests.per.connection": 1,
    "message.send.max.retries": 2**31 - 1,
    "message.timeout.ms": 0,
}
CONSUMER_GUARANTEES: dict[str, Property] = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",
    "enable.partition.eof": True,
    "max.poll.interval.ms": 86_400_000,
}

MISSING = frozenset(
    {
        kafka.KafkaError.UNKNOWN_TOPIC_OR_PART,
        kafka.KafkaError.UNKNOWN_TOPIC_ID,
        kafka.KafkaError._UNKNOWN_TOPIC,
        kafka.KafkaError._UNKNOWN_PARTITION,
    }
)
PURGED = frozenset({kafka.KafkaError._PURGE_QUEUE, kafka.KafkaError._PURGE_INFLIGHT})
LEADER_CHANGES = frozenset(
    {
        kafka.KafkaError._NOENT,
        kafka.KafkaError.NOT_LEADER_FOR_PARTITION,
        kafka.KafkaError.LEADER_NOT_AVAILABLE,
        kafka.KafkaError.FENCED_LEADER_EPOCH,
        kafka.KafkaError.UNKNOWN_LEADER_EPOCH,
        kafka.KafkaError.OFFSET_NOT_AVAILABLE,
    }
)
REFUSED = frozenset(
    {
        kafka.KafkaError.TOPIC_EXCEPTION,
        kafka.KafkaError.INVALID_REPLICATION_FACTOR,
        kafka.KafkaError.INVALID_PARTITIONS,
        kafka.KafkaError.POLICY_VIOLATION,
    }
)
FORBIDDEN = frozenset(
    {
        kafka.KafkaError.TOPIC_AUTHORIZATION_FAILED,
        kafka.KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        kafka.KafkaError.GROUP_AUTHORIZATION_FAILED,
    }
)

EARLIEST = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
LATEST = OffsetSpec.latest()  # type: ignore[no-untyped-call]

# librdkafka would write every lost connection to stderr; what matters is in our errors.
_silent = logging.Logger("librdkafka")
_silent.addHandler(logging.NullHandler())


class KafkaSource:
    """A reader of one topic, for one thread. One consumer reads ahead in every partition that was asked for."""

    def __init__(self, bootstrap: str, name: str, partitions: int, options: Mapping[str, str]) -> None:
        self.name = name
        self.partitions = partitions
        self._cluster = _Cluster(bootstrap, name, partitions, options)
        self._consumer: kafka.Consumer | None = None
        self._streams: dict[int, _Stream] = {}
        self._identity: str | None = None
        self._identity_at = 0.0

    def identity(self) -> str:
        found = self._cluster.identity(REQUEST_SECONDS)
        if found != self._identity:
            self._forget()
        self._identity, self._identity_at = found, time.monotonic()
        return found

    def bounds(self, partition: int) -> Bounds:
        return self._cluster.bounds(partition)

    def position_at(self, partition: int, time_us: int) -> int:
        # Kafka keeps the time of publication in milliseconds, rounded down; so is the question, which may bring
        # messages of the same millisecond but leaves none out.
        return self._cluster.position_at(partition, max(0, time_us) // 1_000)

    def fetch(self, partition: int, position: int, count_max: int, wait_seconds: float) -> list[Record]:
        stream = self._stream_at(partition, position)
        if not stream.ahead:
            self._read(stream, count_max, wait_seconds)
        if not stream.ahead and not self._is_at_end(stream):
            self._read(stream, count_max, REQUEST_SECONDS)
            if not stream.ahead and not self._is_at_end(stream):
                raise self._cluster.unreachable(f"partition {partition} has records but sends none")
        return stream.take(count_max)

    def close(self) -> None:
        self._forget()
        self._cluster.close()

    def _stream_at(self, partition: int, position: int) -> "_Stream":
        stream = self._streams.get(partition)
        if stream is None or stream.position != position:
            if self._identity is None:
                self.identity()
            self._must_hold(partition, position)
            if stream is not None:
                self._unassign(stream)
            stream = self._streams[partition] = _Stream(partition, position)
        if not stream.assigned and not stream.ahead:
            self._assign(stream)
        return stream

    def _must_hold(self, partition: int, position: int) -> Bounds:
        bounds = self._cluster.bounds(partition)
        if position < bounds.first:
            raise OffsetGone(
                f"topic {self.name}, partition {partition}: position {position} is gone, the first is {bounds.first}"
            )
        if position > bounds.next:
            raise TopicChanged(
                f"topic {self.name}, partition {partition}: position {position} lies after the end, {bounds.next}",
                hint="The topic was made anew, or lost its end",
            )
        return bounds

    def _must_be_the_same(self) -> None:
        before = self._identity
        if self.identity() != before:
            raise TopicChanged(f"topic {self.name} was made anew: it was {before} and is {self._identity}")

    def _is_at_end(self, stream: "_Stream") -> bool:
        """Whether the broker itself says that there is no more: an empty answer never means that nobody was there."""
        if time.monotonic() - self._identity_at > IDENTITY_SECONDS:
            self._must_be_the_same()
        return self._must_hold(stream.partition, stream.position).next <= max(stream.position, stream.end)

    def _read(self, stream: "_Stream", count_max: int, wait_seconds: float) -> None:
        """Wait for the first record, then take what has arrived: asking for many at once would wait for all of them."""
        deadline = time.monotonic() + wait_seconds
        while True:
            arrived = self._consume(1, max(0.0, deadline - time.monotonic()))
            if arrived and count_max > 1:
                arrived += self._consume(min(count_max, SLICE_COUNT_MAX) - 1, 0)
            for message in arrived:
                self._keep(message, stream)
            if stream.failure is not None and not stream.ahead:
                self._fail(stream, stream.failure)
            if stream.ahead or stream.end > stream.position or time.monotonic() >= deadline:
                return

    def _consume(self, count_max: int, wait_seconds: float) -> list[kafka.Message]:
        try:
            return self._opened().consume(count_max, wait_seconds)
        except kafka.KafkaException as error:
            self._forget()
            raise self._cluster.error(_kafka_error(error)) from None

    def _keep(self, message: kafka.Message, wanted: "_Stream") -> None:
        partition, error = message.partition(), message.error()
        stream = self._streams.get(-1 if partition is None else partition)
        if stream is None or not stream.assigned:
            if error is not None:
                self._cluster.heard(error)
        elif error is None:
            stream.put(message)
            if stream is not wanted and stream.ahead_bytes > READ_AHEAD_BYTES_MAX:
                self._unassign(stream)
        elif error.code() == kafka.KafkaError._PARTITION_EOF:
            stream.end = message.offset() or 0
        else:
            stream.failure = error

    def _fail(self, stream: "_Stream", error: kafka.KafkaError) -> None:
        """After an error the client leaves the partition alone, even if told to seek; the next call assigns it anew."""
        self._unassign(stream)
        del self._streams[stream.partition]
        self._must_be_the_same()
        self._must_hold(stream.partition, stream.position)
        raise self._cluster.error(error)

    def _opened(self) -> kafka.Consumer:
        if self._consumer is None:
            self._consumer = self._cluster.consumer()
        return self._consumer

    def _assign(self, stream: "_Stream") -> None:
        place = kafka.TopicPartition(self.name, stream.partition, stream.read_to)
        try:
            self._opened().incremental_assign([place])
        except kafka.KafkaException as error:
            raise self._cluster.error(_kafka_error(error)) from None
        stream.assigned = True

    def _unassign(self, stream: "_Stream") -> None:
        if not stream.assigned:
            return
        stream.assigned = False
        try:
            self._opened().incremental_unassign([kafka.TopicPartition(self.name, stream.partition)])
        except kafka.KafkaException as error:
            raise self._cluster.error(_kafka_error(error)) from None

    def _forget(self) -> None:
        self._streams.clear()
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None


class KafkaSink:
    """Publishes runs of messages in order, for one thread."""

    def __init__(
        self, bootstrap: str, name: str, partitions: int, options: Mapping[str, str], *, timeout_seconds: float
    ) -> None:
        self.name = name
        self.partitions = partitions
        self._timeout_seconds = timeout_seconds
        self._cluster = _Cluster(bootstrap, name, partitions, options)
        self._producer: kafka.Producer | None = None
        self._acquainted_at: dict[int, float] = {}

    def identity(self) -> str:
        return self._cluster.identity(REQUEST_SECONDS)

    def publish(self, partition: int, pending: Sequence[Pending]) -> list[int]:
        """Where nothing at all was acknowledged, the error says why; where something was, the next call will."""
        if not pending:
            return []
        run = _Run(len(pending))
        try:
            deadline = self._open()
            for start, stop in self._slices(partition, pending):
                self._send(partition, pending, start, stop, run)
                self._settle(deadline, run)
                if run.failure is not None or not run.has_all_before(stop):
                    break
        finally:
            if not run.has_all_before(len(pending)):
                self._discard()
        positions = run.prefix()
        if positions:
            return positions
        if run.failure is not None:
            raise self._cluster.error(run.failure)
        raise self._cluster.unreachable(f"nothing was acknowledged within {self._timeout_seconds:g} s")

    def close(self) -> None:
        self._discard()

    def _open(self) -> float:
        """Until when the run may take. The rest of the time-out is for throwing the producer away."""
        seconds = self._timeout_seconds * 0.9
        if self._producer is None:
            # librdkafka takes half a second to be given an id as a producer; with less it would never get one.
            seconds = max(seconds, OPEN_SECONDS_MIN)
            deadline = time.monotonic() + seconds
            # A producer would wait for a topic that is not there, or have the broker make it with other partitions.
            self._cluster.identity(seconds)
            self._producer = self._cluster.producer()
            return deadline
        return time.monotonic() + seconds

    def _slices(self, partition: int, pending: Sequence[Pending]) -> Iterator[tuple[int, int]]:
        """Parts that are settled one after the other; the first message alone where the broker may not know us."""
        start = size = 0
        for stop, message in enumerate((each.message for each in pending), 1):
            size += len(message.payload)
            full = stop - start >= SLICE_COUNT_MAX or size >= SLICE_BYTES_MAX
            if full or stop == len(pending) or (stop == 1 and not self._is_acquainted(partition)):
                yield start, stop
                start, size = stop, 0
                self._acquainted_at[partition] = time.monotonic()

    def _is_acquainted(self, partition: int) -> bool:
        at = self._acquainted_at.get(partition)
        return at is not None and time.monotonic() - at < ACQUAINTED_SECONDS

    def _send(self, partition: int, pending: Sequence[Pending], start: int, stop: int, run: "_Run") -> None:
        assert self._producer is not None
        try:
            for index in range(start, stop):
                message = pending[index].message
                self._producer.produce(
                    self.name,
                    message.payload,
                    message.key.encode(),
                    partition,
                    on_delivery=partial(run.report, index),
                    headers=_headers(message),
                )
        except (kafka.KafkaException, BufferError) as error:
            run.failure = run.failure or _kafka_error(error)

    def _settle(self, deadline: float, run: "_Run | None" = None) -> None:
        """Wait until every message is reported on, or one of the run has failed, or the time is up."""
        assert self._producer is not None
        while len(self._producer) and not (run and run.failure) and (seconds := deadline - time.monotonic()) > 0:
            try:
                # In short waits: a longer one goes on after a fatal error, calling reports with the error raised.
                self._producer.flush(min(FLUSH_SECONDS, seconds))
            except kafka.KafkaException as fatal:
                self._cluster.heard(_kafka_error(fatal))

    def _discard(self) -> None:
        """Throw the producer away with all it holds, so that nothing more of it leaves this process."""
        self._acquainted_at.clear()
        self._cluster.close()
        if self._producer is None:
            return
        try:
            # It only begins here, whatever its argument `blocking` says; the wait is for the reports of what it threw.
            self._producer.purge()
            self._settle(time.monotonic() + max(FLUSH_SECONDS, self._timeout_seconds * 0.1))
            if not len(self._producer):
                # With messages left it would wait for them without end; then the last reference ends the producer.
                self._producer.close()
        finally:
            self._producer = None


def create_topic(
    bootstrap: str,
    name: str,
    partitions: int,
    options: Mapping[str, str],
    replication: int,
    *,
    keep_seconds: int | None = None,
) -> bool:
    """Make a topic where there is none; whether it was made. One that is there must have as many partitions."""
    cluster = _Cluster(bootstrap, name, partitions, options)
    try:
        made = cluster.create(replication, keep_seconds)
        cluster.identity(REQUEST_SECONDS)
        return made
    finally:
        cluster.close()


class _Run:
    """What became of each message of one `publish`."""

    def __init__(self, count: int) -> None:
        self._positions: list[int | None] = [None] * count
        self._acknowledged = 0  # length of the prefix
        self.failure: kafka.KafkaError | None = None

    def report(self, index: int, error: kafka.KafkaError | None, message: kafka.Message) -> None:
        position = message.offset()
        if error is None and position is not None and position >= 0:
            self._positions[index] = position
            while self._acknowledged < len(self._positions) and self._positions[self._acknowledged] is not None:
                self._acknowledged += 1
        elif error is not None and self.failure is None and error.code() not in PURGED:
            self.failure = error

    def has_all_before(self, stop: int) -> bool:
        return self._acknowledged >= stop

    def prefix(self) -> list[int]:
        return [position for position in self._positions[: self._acknowledged] if position is not None]


class _Stream:
    """What was read ahead of one partition."""

    def __init__(self, partition: int, position: int) -> None:
        self.partition = partition
        self.position = position  # of the next record to hand out
        self.read_to = position  # where the client goes on reading
        self.end = position  # where the client last met the end of the partition
        self.ahead: deque[kafka.Message] = deque()
        self.ahead_bytes = 0
        self.assigned = False
        self.failure: kafka.KafkaError | None = None

    def put(self, message: kafka.Message) -> None:
        self.ahead.append(message)
        self.ahead_bytes += len(message) + RECORD_OVERHEAD_BYTES
        self.read_to = (message.offset() or 0) + 1

    def take(self, count_max: int) -> list[Record]:
        taken = [self.ahead.popleft() for _ in range(min(count_max, len(self.ahead)))]
        self.ahead_bytes -= sum(map(len, taken)) + RECORD_OVERHEAD_BYTES * len(taken)
        records = [_record(self.partition, message) for message in taken]
        if records:
            self.position = records[-1].position + 1
        return records


class _Cluster:
    """The brokers of one topic: clients to them, what they say of the topic, and our errors for theirs."""

    def __init__(self, bootstrap: str, name: str, partitions: int, options: Mapping[str, str]) -> None:
        self._bootstrap = bootstrap
        self._name = name
        self._partitions = partitions
        self._options = options
        self._opened_admin: AdminClient | None = None
        self._last_heard = ""

    def producer(self) -> kafka.Producer:
        with _refusing():
            return kafka.Producer(
                self._settings(PRODUCER_DEFAULTS, PRODUCER_GUARANTEES), logger=_silent, error_cb=self.heard
            )

    def consumer(self) -> kafka.Consumer:
        with _refusing():
            return kafka.Consumer(
                self._settings(CONSUMER_DEFAULTS, CONSUMER_GUARANTEES), logger=_silent, error_cb=self.heard
            )

    def identity(self, timeout_seconds: float) -> str:
        """The ids of cluster and topic; refuses a topic that is not there or has other partitions than ours."""
        deadline = time.monotonic() + timeout_seconds
        asked = self._admin().describe_topics(kafka.TopicCollection([self._name]), request_timeout=timeout_seconds)
        topic: TopicDescription = self._answer(asked[self._name], timeout_seconds)
        if len(topic.partitions) != self._partitions:
            raise SettingsWrong(
                f"topic {self._name} has {len(topic.partitions)} partitions in Kafka and {self._partitions} here",
                place=self._bootstrap,
                hint=f"The partition of a key depends on their number: make the topic anew with {self._partitions}",
            )
        cluster = self._admin().cluster_id(max(0.1, deadline - time.monotonic()))
        if not cluster:
            raise self.unreachable("the cluster does not tell its id")
        return f"{cluster}/{topic.topic_id}"

    def bounds(self, partition: int) -> Bounds:
        # Not asked by the consumer: on its connection a question waits behind the long poll for new records.
        return Bounds(self._offset(partition, EARLIEST), self._offset(partition, LATEST))

    def position_at(self, partition: int, time_ms: int) -> int:
        found = self._offset(partition, OffsetSpec.for_timestamp(time_ms))
        return found if found >= 0 else self.bounds(partition).next

    def create(self, replication: int, keep_seconds: int | None) -> bool:
        config = {} if keep_seconds is None else {"retention.ms": str(keep_seconds * 1_000)}
        topic = NewTopic(self._name, self._partitions, replication, config=config)
        made = self._admin().create_topics([topic], operation_timeout=CREATE_SECONDS, request_timeout=CREATE_SECONDS)
        try:
            made[self._name].result(CREATE_SECONDS + REQUEST_SECONDS)
        except kafka.KafkaException as error:
            if _kafka_error(error).code() == kafka.KafkaError.TOPIC_ALREADY_EXISTS:
                return False
            raise self.error(_kafka_error(error)) from None
        except TimeoutError:
            raise self.unreachable("it was not made in time") from None
        self._await_leaders(time.monotonic() + CREATE_SECONDS)
        return True

    def _await_leaders(self, deadline: float) -> None:
        """Brokers learn of a new topic one after the other; until then they say that there is none."""
        while time.monotonic() < deadline:
            try:
                found = self._admin().list_topics(self._name, timeout=REQUEST_SECONDS).topics[self._name]
            except kafka.KafkaException as error:
                raise self.error(_kafka_error(error)) from None
            if found.error is None and all(partition.leader >= 0 for partition in found.partitions.values()):
                return
            time.sleep(LEADER_SECONDS)

    def heard(self, error: kafka.KafkaError) -> None:
        """Keep what the client last complained of: a wait that ends without an answer is explained by it."""
        if error.code() != kafka.KafkaError._ALL_BROKERS_DOWN or not self._last_heard:
            self._last_heard = error.str()

    def error(self, error: kafka.KafkaError) -> KeyfoldError:
        if error.code() in MISSING:
            return SettingsWrong(
                f"topic {self._name} is not in Kafka",
                place=self._bootstrap,
                hint=f"`keyfold topics create` makes it with {self._partitions} partitions",
            )
        if error.code() in FORBIDDEN:
            return SettingsWrong(
                f"topic {self._name}: {error.str()}",
                place=self._bootstrap,
                hint="Grant the user of topics.kafka_options the right to describe, read and write it",
            )
        if error.code() in REFUSED:
            return SettingsWrong(f"topic {self._name}: {error.str()}", place=self._bootstrap)
        if error.code() == kafka.KafkaError.MSG_SIZE_TOO_LARGE:
            return SettingsWrong(
                f"topic {self._name} refuses a batch of messages as too large",
                place=self._bootstrap,
                hint="Raise max.message.bytes of the topic and message.max.bytes in topics.kafka_options,"
                " or lower batch.size there",
            )
        return self.unreachable(error.str())

    def unreachable(self, reason: str) -> TopicUnreachable:
        heard = f" ({self._last_heard})" if self._last_heard and self._last_heard != reason else ""
        return TopicUnreachable(f"topic {self._name}: {reason}{heard}", place=self._bootstrap)

    def close(self) -> None:
        if self._opened_admin is not None:
            self._opened_admin.__exit__(None, None, None)
            self._opened_admin = None

    def _admin(self) -> AdminClient:
        if self._opened_admin is None:
            with _refusing():
                self._opened_admin = AdminClient(self._settings({}, {}), logger=_silent, error_cb=self.heard)
        return self._opened_admin

    def _settings(self, defaults: Mapping[str, Property], guarantees: Mapping[str, Property]) -> dict[str, Property]:
        """Later properties win, also over an alias of theirs, so a guarantee stands after what the operator wrote."""
        last = {**guarantees, "bootstrap.servers": self._bootstrap}
        chosen = {**CLIENT_DEFAULTS, **defaults, **self._options}
        return {name: value for name, value in chosen.items() if name not in last} | last

    def _offset(self, partition: int, spec: OffsetSpec) -> int:
        """Asked again while the leader of the partition changes, as it also does when a topic has just been made."""
        deadline = time.monotonic() + REQUEST_SECONDS
        place = kafka.TopicPartition(self._name, partition)
        while True:
            asked: dict[kafka.TopicPartition, Future[ListOffsetsResultInfo]] = self._admin().list_offsets(
                {place: spec}, isolation_level=kafka.IsolationLevel.READ_COMMITTED, request_timeout=REQUEST_SECONDS
            )
            try:
                return self._answer(asked[place], REQUEST_SECONDS).offset
            except _LeaderChanges as changes:
                self.identity(REQUEST_SECONDS)  # says so where the topic is gone
                if time.monotonic() > deadline:
                    raise self.unreachable(f"partition {partition}: {changes}") from None
                time.sleep(LEADER_SECONDS)

    def _answer(self, asked: "Future[T]", timeout_seconds: float) -> T:
        try:
            answer = asked.result(timeout_seconds + 1)
            self._last_heard = ""
            return answer
        except kafka.KafkaException as raised:
            error = _kafka_error(raised)
        except TimeoutError:
            error = kafka.KafkaError(kafka.KafkaError._TIMED_OUT, "the broker does not answer")
        self._admin().poll(0)  # brings what the client complained of
        self.close()  # the next question takes a new connection: this one may be dead without anyone having said so
        if error.code() in LEADER_CHANGES:
            raise _LeaderChanges(error.str())
        raise self.error(error)


class _LeaderChanges(Exception):
    """Nobody answers for a partition at the moment, or not the one who was asked."""


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except kafka.KafkaException as error:
        raise SettingsWrong(
            f"Kafka's client refuses its settings: {_kafka_error(error).str()}",
            place="topics.kafka_options",
            hint="They are librdkafka's configuration properties",
        ) from None


def _kafka_error(raised: kafka.KafkaException | BufferError) -> kafka.KafkaError:
    first = raised.args[0] if raised.args else None
    return first if isinstance(first, kafka.KafkaError) else kafka.KafkaError(kafka.KafkaError._QUEUE_FULL, str(raised))


def _headers(message: Message) -> list[tuple[str, str | bytes | None]]:
    return [
        (VERSION, str(message.version)),
        (KIND, message.kind),
        (EVENT_TIME_US, str(message.event_time_us)),
        (SCHEMA, message.schema),
    ]


def _record(partition: int, raw: kafka.Message) -> Record:
    """A record of any producer: what another program wrote has no headers of ours, maybe no key and no payload."""
    position = raw.offset() or 0
    headers = dict(raw.headers() or ())
    version = _number(headers.get(VERSION))
    event_time_us = _number(headers.get(EVENT_TIME_US))
    if event_time_us is None:
        kind, time_ms = raw.timestamp()
        event_time_us = 0 if kind == kafka.TIMESTAMP_NOT_AVAILABLE else time_ms * 1_000
    message = Message(
        key=_text(raw.key()),
        version=position + 1 if version is None else version,
        event_time_us=event_time_us,
        schema=_text(headers.get(SCHEMA)),
        payload=raw.value() or b"",
        kind=_text(headers.get(KIND)),
    )
    return Record(partition, position, message)


def _text(raw: str | bytes | None) -> str:
    # Bytes that are no text stay apart from each other, as keys must.
    text = raw.decode(errors="backslashreplace") if isinstance(raw, bytes) else raw or ""
    # No store takes NUL in text, so such a key could not even be set aside.
    return text.replace("\0", "\\x00")


def _number(raw: str | bytes | None) -> int | None:
    try:
        number = int(raw) if raw is not None and len(raw) <= DIGITS_MAX else None
    except ValueError:
        return None
    return number if number is not None and -(2**63) <= number < 2**63 else None
