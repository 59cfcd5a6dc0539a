"""Export: messages to the embedded topic (SQLite, PostgreSQL) and to Kafka, in batches, against one at a time.

Ours is the product's way: `outbox.put` in transactions of 1,000 messages, then the relay, until all are published.
The peer writes SQL by hand on the bare driver, to the same tables of the same store, one message and one durable
acknowledgement at a time. "put + relay" goes from nothing to published; the peer on the embedded topic needs only
one commit for it (it numbers the message as it inserts it), with Kafka an insert, an acknowledgement of the broker,
and a mark. "relay alone" starts from an outbox that is full. All messages are ordered per key. Every side has sent
a few messages before the clock starts, so that nobody pays for opening connections.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import confluent_kafka
import sqlalchemy as sa

from bench import stores
from bench.harness import Goal, Race, Side, rate
from keyfold.core import outbox
from keyfold.core.context import Context
from keyfold.core.relay import Relay
from keyfold.core.store.sqlite import driver as sqlite_driver
from keyfold.core.topics.topic import Message, TopicSpec, partition_of
from tests.product import opened, relay_all
from tests.servers.kafka import KafkaServer

KEYS = 2_000
PARTITIONS = 4
PAYLOAD_BYTES = 200
PUT_BATCH = 1_000
WARM = 64
MUST, MOONSHOT = 30, 60

_topics = itertools.count(1)


class Sizes:
    def __init__(self, quick: bool) -> None:
        self.batched = 8_000 if quick else 40_000
        self.single = 300 if quick else 2_000


def races(quick: bool) -> Iterator[Race]:
    sizes = Sizes(quick)
    with stores.each_kind() as kinds:
        for kind, new_url in kinds.items():
            yield _race(f"embedded topic on {kind}", Embedded(new_url), sizes)
        with KafkaServer() as broker:
            yield _race("Kafka, outbox on SQLite", Kafka(kinds["SQLite"], broker), sizes)
            yield _race("Kafka, outbox on PostgreSQL", Kafka(kinds["PostgreSQL"], broker), sizes)


def _race(where: str, place: "Place", sizes: Sizes) -> Race:
    whole, relay = "put + relay", "relay alone"
    whole_single, relay_single = "one at a time, put + publish", "one at a time, publish alone"
    sides = [
        Side(whole, lambda: _ours(place, sizes.batched, put_counts=True)),
        Side(relay, lambda: _ours(place, sizes.batched, put_counts=False)),
        Side(whole_single, lambda: _theirs(place, sizes.single, put_counts=True)),
        Side(relay_single, lambda: _theirs(place, sizes.single, put_counts=False)),
    ]
    goals = [
        Goal(side=whole, against=whole_single, must=MUST, moonshot=MOONSHOT),
        Goal(side=relay, against=relay_single, must=MUST, moonshot=MOONSHOT),
    ]
    return Race(title=f"messages → {where}", unit="messages/s", sides=sides, goals=goals)


def _messages(count: int) -> tuple[list[Message], list[Message]]:
    """A few to warm up with, then keys by chance, versions growing per key, as a service would put them."""
    chance = random.Random(12)
    versions: dict[str, int] = {}
    made = []
    for number in range(WARM + count):
        key = f"key-{chance.randrange(KEYS)}"
        versions[key] = versions.get(key, 0) + 1
        payload = chance.randbytes(PAYLOAD_BYTES // 2).hex().encode()
        made.append(Message(key=key, version=versions[key], event_time_us=number, schema="bench/1", payload=payload))
    return made[:WARM], made[WARM:]


class Embedded:
    """The topic lives in the store."""

    def __init__(self, new_url: stores.NewUrl) -> None:
        self._new_url = new_url

    @contextmanager
    def open(self) -> Iterator[tuple[Context, str]]:
        with opened(self._new_url(), [TopicSpec("bench", "a benchmark", PARTITIONS)]) as context:
            yield context, "bench"

    @contextmanager
    def publisher(self, topic: str) -> Iterator[None]:
        """Publishing is numbering: nothing else acknowledges."""
        yield None


class Kafka:
    """The outbox lives in the store, the topic in a broker."""

    def __init__(self, new_url: stores.NewUrl, broker: KafkaServer) -> None:
        self._new_url = new_url
        self._broker = broker

    @contextmanager
    def open(self) -> Iterator[tuple[Context, str]]:
        topic = f"bench-{next(_topics)}"
        self._broker.create_topic(topic, PARTITIONS)
        options = {"topics__kind": "kafka", "topics__kafka": self._broker.bootstrap}
        with opened(self._new_url(), [TopicSpec(topic, "a benchmark", PARTITIONS)], **options) as context:
            yield context, topic

    @contextmanager
    def publisher(self, topic: str) -> Iterator["Acknowledged"]:
        yield Acknowledged(self._broker.bootstrap, topic)


Place = Embedded | Kafka


class Acknowledged:
    """One message sent and acknowledged before the next."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._topic = topic
        self._producer = confluent_kafka.Producer(
            {"bootstrap.servers": bootstrap, "enable.idempotence": True, "acks": "all", "linger.ms": 0}
        )
        self._position = -1
        self._producer.list_topics(topic, 10)

    def send(self, partition: int, key: bytes, payload: bytes) -> int:
        self._producer.produce(self._topic, payload, key, partition, on_delivery=self._delivered)
        self._producer.flush()
        return self._position

    def _delivered(self, error: object, message: confluent_kafka.Message) -> None:
        assert error is None
        self._position = message.offset() or 0


def _ours(place: Place, count: int, *, put_counts: bool) -> float:
    warm, messages = _messages(count)
    with place.open() as (context, topic):
        relay = Relay(context, topic, "bench")
        _put_and_relay(context, topic, warm, relay)
        if put_counts:
            result = rate(count, lambda: _put_and_relay(context, topic, messages, relay))
        else:
            _put(context, topic, messages)
            result = rate(count, lambda: relay_all(relay))
        _must_be_published(context, count)
        relay.stop()
        return result


def _put_and_relay(context: Context, topic: str, messages: Sequence[Message], relay: Relay) -> None:
    _put(context, topic, messages)
    relay_all(relay)


def _put(context: Context, topic: str, messages: Sequence[Message]) -> None:
    for start in range(0, len(messages), PUT_BATCH):
        some = messages[start : start + PUT_BATCH]
        context.store.transact(lambda tx, some=some: outbox.put(tx, context.topics, topic, some))  # type: ignore[misc]


def _theirs(place: Place, count: int, *, put_counts: bool) -> float:
    warm, messages = _messages(count)
    with place.open() as (context, topic), ExitStack() as stack:
        by_hand = ByHand(context, topic, stack.enter_context(place.publisher(topic)))
        stack.callback(by_hand.close)
        by_hand.make_counters()
        by_hand.put_and_publish(warm)
        if put_counts:
            result = rate(count, lambda: by_hand.put_and_publish(messages))
        else:
            _put(context, topic, messages)
            result = rate(count, by_hand.publish_pending)
        _must_be_published(context, count)
        return result


def _must_be_published(context: Context, count: int) -> None:
    sql = "SELECT count(*) FROM messages WHERE position IS NOT NULL"
    assert context.store.read(lambda tx: tx.driver(sql).scalar_one()) == WARM + count


class ByHand:
    """One message a transaction, on the bare driver."""

    def __init__(self, context: Context, topic: str, broker: Acknowledged | None) -> None:
        self._topic = topic
        self._broker = broker
        self._ids = itertools.count(1)
        self._connection, self._mark = _bare_connection(context)
        self._execute: Callable[..., Any] = self._connection.cursor().execute

    def close(self) -> None:
        self._connection.close()

    def make_counters(self) -> None:
        for partition in range(PARTITIONS):
            self._run("INSERT INTO progress VALUES (?, ?, 1, 0, '', 0) ON CONFLICT DO NOTHING", "by hand", partition)

    def put_and_publish(self, messages: Sequence[Message]) -> None:
        publish = self._number_at_once if self._broker is None else self._put_send_mark
        for message in messages:
            publish(message, partition_of(message.key, PARTITIONS))

    def _number_at_once(self, message: Message, partition: int) -> None:
        self._run(BEGIN)
        self._insert(message, partition, self._next_position(partition))
        self._run("COMMIT")

    def _put_send_mark(self, message: Message, partition: int) -> None:
        assert self._broker is not None
        self._run(BEGIN)
        self._insert(message, partition, None)
        self._run("COMMIT")
        position = self._broker.send(partition, message.key.encode(), message.payload)
        self._run(BEGIN)
        self._publish(message.key, message.version, position)
        self._run("COMMIT")

    def publish_pending(self) -> None:
        for partition in range(PARTITIONS):
            after = -1
            while row := self._run(OLDEST, self._topic, partition, after).fetchone():
                key, version, after, payload = row
                position = self._broker.send(partition, key.encode(), bytes(payload)) if self._broker else None
                self._run(BEGIN)
                self._publish(key, version, self._next_position(partition) if position is None else position)
                self._run("COMMIT")

    def _next_position(self, partition: int) -> int:
        return int(self._run(NEXT, "by hand", partition).fetchone()[0])

    def _insert(self, message: Message, partition: int, position: int | None) -> None:
        self._run(
            INSERT,
            *(self._topic, message.key, message.kind, message.version, next(self._ids), partition),
            *(message.schema, message.event_time_us, message.payload, 0, position, None if position is None else 0),
        )

    def _publish(self, key: str, version: int, position: int) -> None:
        self._run(MARK, position, 0, self._topic, key, version)

    def _run(self, sql: str, *parameters: object) -> Any:
        if self._mark == "%s":
            return self._execute("BEGIN" if sql == BEGIN else sql.replace("?", "%s"), parameters)
        return self._execute(sql, parameters)


BEGIN = "BEGIN IMMEDIATE"
NEXT = "UPDATE progress SET position = position + 1 WHERE job = ? AND shard = ? RETURNING position - 1"
INSERT = "INSERT INTO messages VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
OLDEST = (
    "SELECT key, version, id, payload FROM messages"
    " WHERE topic = ? AND partition = ? AND position IS NULL AND id > ? ORDER BY id LIMIT 1"
)
MARK = "UPDATE messages SET position = ?, published_at_us = ? WHERE topic = ? AND key = ? AND kind = '' AND version = ?"


def _bare_connection(context: Context) -> tuple[Any, str]:
    url = sa.make_url(context.settings.store.url)
    if url.get_backend_name() == "sqlite":
        connection = sqlite_driver().connect(url.database, isolation_level=None)
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "cache_size = -65536"):
            connection.execute(f"PRAGMA {pragma}")
        return connection, "?"
    import psycopg

    return psycopg.connect(context.settings.store.url, autocommit=True), "%s"
