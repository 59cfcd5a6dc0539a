"""Publishing to Kafka and reading from it, on a real broker that is killed, paused and cut off."""

import random
import threading
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from keyfold.core.errors import OffsetGone, SettingsWrong, TopicChanged, TopicUnreachable
from keyfold.core.topics import kafka
from keyfold.core.topics.kafka import KafkaSink, KafkaSource, create_topic
from keyfold.core.topics.topic import Bounds, Message, Pending, Record
from tests.faults.proxy import Proxy
from tests.servers.fixtures import running
from tests.servers.kafka import KafkaServer
from tests.servers.process import free_port, wait_until

pytestmark = [pytest.mark.spec("CORE-05", "CORE-06"), pytest.mark.xdist_group("kafka")]

ANSWER_SECONDS = 30
TRIES_MAX = 100
SMALL_BATCHES = {"batch.num.messages": "50"}


class ProxiedKafkaServer(KafkaServer):
    """A broker with a second door, whose clients are told to come through the proxy."""

    def __init__(self, proxy: Proxy) -> None:
        super().__init__()
        self.proxied_bootstrap = f"127.0.0.1:{proxy.port}"
        self._proxy, self._door = proxy, free_port()
        self._settings["listeners"] += f",PROXIED://127.0.0.1:{self._door}"
        self._settings["advertised.listeners"] += f",PROXIED://{self.proxied_bootstrap}"
        self._settings["listener.security.protocol.map"] += ",PROXIED:PLAINTEXT"
        proxy.start(self._door)


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    with Proxy() as proxy:
        yield proxy


@pytest.fixture(scope="module")
def proxied_server(proxy: Proxy) -> Iterator[ProxiedKafkaServer]:
    yield from running(lambda: ProxiedKafkaServer(proxy))


@pytest.fixture
def server(kafka_server: KafkaServer) -> KafkaServer:
    # The test before may have left it killed or paused.
    kafka_server.start()
    return kafka_server


@pytest.fixture
def topic(server: KafkaServer) -> str:
    return new_topic(server)


@pytest.fixture
def sink(server: KafkaServer, topic: str) -> Iterator[KafkaSink]:
    with closing(sink_of(server.bootstrap, topic)) as sink:
        yield sink


@pytest.fixture
def source(server: KafkaServer, topic: str) -> Iterator[KafkaSource]:
    with closing(source_of(server.bootstrap, topic)) as source:
        yield source


# What is published is what is read --------------------------------------------------------------------------------


def test_every_field_of_a_message_arrives(sink: KafkaSink, source: KafkaSource) -> None:
    messages = [
        Message(key="a", version=1, event_time_us=1_700_000_000_123_457, schema="offer/1", payload=b"{}"),
        Message(key="ключ 🔑", version=2**63 - 1, event_time_us=0, schema="", payload=b"", kind="priced"),
        Message(key="", version=3, event_time_us=-5, schema="x", payload=bytes(range(256))),
    ]
    sink.publish(1, [Pending(number, message) for number, message in enumerate(messages)])
    assert [record.message for record in read_all(source, 1)] == messages


def test_messages_stay_in_order_and_the_positions_are_those_of_the_broker(sink: KafkaSink, source: KafkaSource) -> None:
    first, second = pending_of(3_000), pending_of(3_000, version_first=1_001)
    positions = sink.publish(0, first) + sink.publish(0, second)
    records = read_all(source, 0)
    assert [record.position for record in records] == positions == list(range(6_000))
    assert [record.message for record in records] == [each.message for each in first + second]


def test_a_run_larger_than_the_client_takes_at_once_is_published_whole(
    sink: KafkaSink, source: KafkaSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka, "SLICE_COUNT_MAX", 700)
    pending = pending_of(5_000)
    assert sink.publish(0, pending) == list(range(5_000))
    assert [record.message for record in read_all(source, 0)] == [each.message for each in pending]


def test_a_message_goes_to_the_partition_it_was_given(sink: KafkaSink, source: KafkaSource) -> None:
    sink.publish(1, pending_of(3))
    assert source.bounds(0) == Bounds(0, 0)
    assert source.bounds(1) == Bounds(0, 3)


def test_only_what_has_no_gap_before_it_counts_as_acknowledged() -> None:
    run = kafka._Run(5)
    for index, position in ((1, 11), (0, 10), (3, 13), (2, -1)):
        run.report(index, None, confluent_kafka.Message(offset=position))
    assert run.prefix() == [10, 11]
    assert run.has_all_before(2)
    assert not run.has_all_before(3)


def test_publishing_nothing_needs_no_broker() -> None:
    with closing(sink_of(nowhere(), "topic")) as sink:
        assert sink.publish(0, []) == []


def test_an_operator_cannot_weaken_what_order_rests_on(server: KafkaServer, topic: str, source: KafkaSource) -> None:
    options = {"request.required.acks": "0", "delivery.timeout.ms": "1", "retries": "0", "max.in.flight": "1000"}
    with closing(sink_of(server.bootstrap, topic, options)) as sink:
        assert sink.publish(0, pending_of(1_000)) == list(range(1_000))


def test_a_refused_message_lets_nothing_pass_behind_it(server: KafkaServer) -> None:
    topic = new_topic(server, {"max.message.bytes": "2000"})
    pending = pending_of(6)
    pending[3] = Pending(3, large(pending[3].message))
    with closing(sink_of(server.bootstrap, topic, {"batch.num.messages": "1"})) as sink:
        assert sink.publish(0, pending) == [0, 1, 2]
        with pytest.raises(SettingsWrong, match=r"too large.*max\.message\.bytes"):
            sink.publish(0, pending[3:])
        assert sink.publish(0, pending_of(1, version_first=9)) == [3]
    with closing(source_of(server.bootstrap, topic)) as source:
        assert [record.message.version for record in read_all(source, 0)] == [1, 1, 1, 9]


def test_nothing_passes_behind_the_first_message_of_a_new_producer_when_that_is_refused(server: KafkaServer) -> None:
    """A broker takes any batch of a producer that it does not know yet, and librdkafka sends it one too many."""
    topic = new_topic(server, {"max.message.bytes": "2000"})
    pending = pending_of(6)
    pending[0] = Pending(0, large(pending[0].message))
    with closing(sink_of(server.bootstrap, topic, {"batch.num.messages": "1"})) as sink:
        for _ in range(3):
            with pytest.raises(SettingsWrong, match="too large"):
                sink.publish(0, pending)
    with closing(source_of(server.bootstrap, topic)) as source:
        assert source.bounds(0) == Bounds(0, 0)


# Reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("CORE-08")
def test_a_reader_that_does_not_wait_still_gets_what_is_there(sink: KafkaSink, source: KafkaSource) -> None:
    for position in range(20):
        sink.publish(0, pending_of(1, version_first=position + 1))
        assert [record.message.version for record in source.fetch(0, position, 10, 0)] == [position + 1]
        assert source.fetch(0, position + 1, 10, 0) == []


@pytest.mark.spec("CORE-08")
def test_a_reader_waits_for_what_is_published_later(sink: KafkaSink, source: KafkaSource) -> None:
    assert source.fetch(0, 0, 10, 0) == []
    later = threading.Timer(0.3, sink.publish, (0, pending_of(1)))
    later.start()
    assert len(source.fetch(0, 0, 10, ANSWER_SECONDS)) == 1
    later.join()


@pytest.mark.spec("CORE-08")
def test_a_reader_gets_no_more_than_it_asked_for(sink: KafkaSink, source: KafkaSource) -> None:
    sink.publish(0, pending_of(10))
    assert [record.position for record in source.fetch(0, 2, 3, ANSWER_SECONDS)] == [2, 3, 4]


@pytest.mark.spec("CORE-07", "CORE-08")
def test_a_reader_that_jumps_finds_what_is_there(sink: KafkaSink, source: KafkaSource) -> None:
    sink.publish(0, pending_of(3_000))
    sink.publish(1, pending_of(3_000))
    chance = random.Random(7)
    for _ in range(40):
        partition, position, count = chance.randrange(2), chance.randrange(3_000), chance.randrange(1, 400)
        for _ in range(chance.randrange(1, 4)):
            records = source.fetch(partition, position, count, 0)
            expected = range(position, min(3_000, position + len(records)))
            assert [(record.partition, record.position) for record in records] == [(partition, at) for at in expected]
            assert records or position == 3_000
            position += len(records)


@pytest.mark.spec("CORE-08")
def test_what_is_read_ahead_of_another_partition_is_bounded_and_not_lost(
    sink: KafkaSink, source: KafkaSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka, "READ_AHEAD_BYTES_MAX", 100_000)
    for partition in range(2):
        sink.publish(partition, pending_of(2_000))
    assert [record.position for record in source.fetch(1, 0, 1, ANSWER_SECONDS)] == [0]
    assert len(read_all(source, 0)) == 2_000
    assert source._streams[1].ahead_bytes < 110_000
    assert [record.position for record in read_all(source, 1, position=1)] == list(range(1, 2_000))


@pytest.mark.spec("CORE-07")
def test_a_time_leads_to_the_first_message_published_then_or_later(sink: KafkaSink, source: KafkaSource) -> None:
    assert source.position_at(0, 0) == 0
    sink.publish(0, pending_of(1))
    published_us = published_ms(source, 0, 0) * 1_000
    wait_until(lambda: published_ms(source, 0, sink.publish(0, pending_of(1))[0]) > published_us // 1_000)
    end = source.bounds(0).next
    assert source.position_at(0, 0) == 0
    assert source.position_at(0, published_us) == 0
    assert source.position_at(0, published_ms(source, 0, end - 1) * 1_000) == end - 1
    assert source.position_at(0, published_us + 10**15) == end
    assert source.position_at(0, -1) == 0


@pytest.mark.spec("CORE-08")
def test_a_position_that_is_no_longer_kept_is_gone(
    server: KafkaServer, topic: str, sink: KafkaSink, source: KafkaSource
) -> None:
    sink.publish(0, pending_of(10))
    assert len(source.fetch(0, 0, 3, ANSWER_SECONDS)) == 3
    delete_before(server, topic, 6)
    assert source.bounds(0) == Bounds(6, 10)
    with pytest.raises(OffsetGone, match="position 5 is gone, the first is 6"):
        source.fetch(0, 5, 10, 0)
    assert [record.position for record in source.fetch(0, 6, 10, ANSWER_SECONDS)] == [6, 7, 8, 9]


@pytest.mark.spec("CORE-08")
def test_a_reader_that_was_overtaken_by_deletion_is_told(
    server: KafkaServer, topic: str, sink: KafkaSink, source: KafkaSource
) -> None:
    assert source.fetch(0, 0, 10, 0) == []
    source._unassign(source._streams[0])
    sink.publish(0, pending_of(10))
    delete_before(server, topic, 10)
    with pytest.raises(OffsetGone):
        source.fetch(0, 0, 10, ANSWER_SECONDS)


@pytest.mark.spec("CORE-08")
def test_a_position_after_the_end_means_another_topic(sink: KafkaSink, source: KafkaSource) -> None:
    sink.publish(0, pending_of(10))
    with pytest.raises(TopicChanged, match="position 11 lies after the end, 10") as raised:
        source.fetch(0, 11, 10, 0)
    assert not isinstance(raised.value, OffsetGone)
    assert source.fetch(0, 10, 10, 0) == []


@pytest.mark.spec("CORE-08")
def test_a_topic_that_was_made_anew_has_another_identity_and_stops_its_readers(
    server: KafkaServer, topic: str, sink: KafkaSink, source: KafkaSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka, "IDENTITY_SECONDS", 0)
    sink.publish(0, pending_of(5))
    before = source.identity()
    assert before == sink.identity() == source.identity()
    assert len(source.fetch(0, 0, 10, ANSWER_SECONDS)) == 5
    remake(server, topic)
    with closing(sink_of(server.bootstrap, topic)) as another:
        another.publish(0, pending_of(5))
    with pytest.raises(TopicChanged):
        source.fetch(0, 5, 10, 0)
    assert sink.identity() == source.identity() != before
    assert len(read_all(source, 0)) == 5


def test_messages_of_other_programs_are_read(server: KafkaServer, topic: str, source: KafkaSource) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": server.bootstrap})
    headers = {kafka.VERSION: "1.2.3", kafka.EVENT_TIME_US: "9" * 30, kafka.KIND: None, "other": b"\xff"}
    producer.produce(topic, b"plain", b"key", partition=0, timestamp=1_700_000_000_123)
    producer.produce(topic, None, None, partition=0, timestamp=1)
    producer.produce(topic, b"", b"\xff\x00", partition=0, timestamp=2, headers=headers)
    assert producer.flush(ANSWER_SECONDS) == 0
    assert [record.message for record in read_all(source, 0)] == [
        Message(key="key", version=1, event_time_us=1_700_000_000_123_000, schema="", payload=b"plain"),
        Message(key="", version=2, event_time_us=1_000, schema="", payload=b""),
        Message(key="\\xff\\x00", version=3, event_time_us=2_000, schema="", payload=b""),
    ]


def test_a_reader_passes_over_the_marks_of_foreign_transactions(
    server: KafkaServer, topic: str, source: KafkaSource
) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": server.bootstrap, "transactional.id": uuid.uuid4().hex})
    producer.init_transactions(ANSWER_SECONDS)
    for commit in (True, False):
        producer.begin_transaction()
        producer.produce(topic, b"kept" if commit else b"aborted", partition=0)
        producer.flush(ANSWER_SECONDS)
        (producer.commit_transaction if commit else producer.abort_transaction)(ANSWER_SECONDS)
    assert [record.message.payload for record in source.fetch(0, 0, 10, ANSWER_SECONDS)] == [b"kept"]
    assert source.fetch(0, 1, 10, 0) == []
    assert source.fetch(0, 1, 10, 0.1) == []


# Topics that are missing, and brokers that are ---------------------------------------------------------------------


def test_a_topic_is_made_once(server: KafkaServer) -> None:
    name = f"topic-{uuid.uuid4().hex}"
    assert create_topic(server.bootstrap, name, 3, {}, 1, keep_seconds=3_600)
    assert not create_topic(server.bootstrap, name, 3, {}, 1)
    with pytest.raises(SettingsWrong, match="has 3 partitions in Kafka and 4 here"):
        create_topic(server.bootstrap, name, 4, {}, 1)
    with pytest.raises(SettingsWrong, match="replication factor"):
        create_topic(server.bootstrap, f"another-{name}", 3, {}, 7)
    with closing(KafkaSink(server.bootstrap, name, 3, {}, timeout_seconds=ANSWER_SECONDS)) as sink:
        assert sink.publish(2, pending_of(1)) == [0]


def test_a_topic_that_nobody_made_is_refused_with_the_command_that_makes_it(server: KafkaServer) -> None:
    name = f"topic-{uuid.uuid4().hex}"
    with closing(sink_of(server.bootstrap, name)) as sink, closing(source_of(server.bootstrap, name)) as source:
        for call in calls_of(sink, source):
            with pytest.raises(SettingsWrong, match=f"{name} is not in Kafka.*keyfold topics create"):
                call()


def test_a_topic_with_another_number_of_partitions_is_refused(server: KafkaServer, topic: str) -> None:
    with (
        closing(KafkaSink(server.bootstrap, topic, 3, {}, timeout_seconds=ANSWER_SECONDS)) as sink,
        closing(KafkaSource(server.bootstrap, topic, 3, {})) as source,
    ):
        for call in (lambda: sink.publish(0, pending_of(1)), lambda: source.fetch(0, 0, 1, 0), source.identity):
            with pytest.raises(SettingsWrong, match="has 2 partitions in Kafka and 3 here"):
                call()


def test_a_property_that_the_client_does_not_know_is_named(server: KafkaServer, topic: str) -> None:
    source = source_of(server.bootstrap, topic, {"no.such.property": "1"})
    with pytest.raises(SettingsWrong, match=r'"no\.such\.property".*kafka_options'):
        source.identity()


def test_a_broker_that_is_not_there_is_unreachable_and_leaves_no_threads_and_no_noise(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kafka, "REQUEST_SECONDS", 1.0)
    monkeypatch.setattr(kafka, "CREATE_SECONDS", 1.0)
    before = thread_count()
    sink, source = sink_of(nowhere(), "topic", timeout_seconds=1), source_of(nowhere(), "topic")
    for call in calls_of(sink, source):
        with pytest.raises(TopicUnreachable, match=r"topic topic: .*refused"):
            call()
    with pytest.raises(TopicUnreachable):
        create_topic(nowhere(), "topic", 1, {}, 1)
    sink.close()
    source.close()
    assert thread_count() == before
    assert capfd.readouterr() == ("", "")


def test_a_broker_that_died_is_unreachable_until_it_is_back(
    server: KafkaServer,
    sink: KafkaSink,
    source: KafkaSource,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    sink.publish(0, pending_of(5))
    assert len(source.fetch(0, 0, 10, ANSWER_SECONDS)) == 5
    with monkeypatch.context() as shorter:
        shorter.setattr(kafka, "REQUEST_SECONDS", 1.0)
        server.kill()
        sink._timeout_seconds = 1
        for call in (lambda: sink.publish(0, pending_of(1)), lambda: source.fetch(0, 5, 10, 0.1), source.identity):
            with pytest.raises(TopicUnreachable):
                call()
    server.start()
    sink._timeout_seconds = ANSWER_SECONDS
    insist(sink, pending_of(5))
    assert len(read_all(source, 0, position=5)) == 5
    assert capfd.readouterr() == ("", "")


def test_a_broker_that_stands_still_is_unreachable_and_what_it_got_is_no_disorder(
    server: KafkaServer, topic: str, sink: KafkaSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending = pending_of(400)
    acknowledged = insist(sink, pending[:100])
    sink._timeout_seconds = 1
    server.pause()
    with pytest.raises(TopicUnreachable):
        sink.publish(0, pending[100:300])
    with pytest.raises(TopicUnreachable):
        sink.publish(0, pending[100:])
    sink.close()
    server.resume()
    sink._timeout_seconds = ANSWER_SECONDS
    acknowledged.update(insist(sink, pending[100:]))
    with closing(source_of(server.bootstrap, topic)) as source:
        assert_order_and_no_loss(read_all(source, 0), pending, acknowledged)


def test_closing_releases_every_thread(server: KafkaServer, topic: str) -> None:
    before = thread_count()
    sink, source = sink_of(server.bootstrap, topic), source_of(server.bootstrap, topic)
    sink.publish(0, pending_of(10))
    source.fetch(0, 0, 10, ANSWER_SECONDS)
    assert thread_count() > before
    for client in (sink, source, sink, source):
        client.close()
    assert thread_count() == before


# Faults: nothing acknowledged is lost, and first occurrences stay in order -------------------------------------------


def test_a_broker_killed_while_publishing_loses_and_reorders_nothing(server: KafkaServer, topic: str) -> None:
    pending = pending_of(200_000)
    acknowledged: dict[int, int] = {}
    chance = random.Random(11)
    enough = threading.Event()

    def relay() -> None:
        with closing(sink_of(server.bootstrap, topic, SMALL_BATCHES)) as sink:
            while not enough.is_set():
                start = len(acknowledged)
                acknowledged.update(insist(sink, pending[start : start + chance.randrange(1, 2_000)], tries_max=1))

    with ThreadPoolExecutor(1) as pool:
        relayed = pool.submit(relay)
        for _ in range(3):
            before_kill = len(acknowledged) + chance.randrange(1, 3_000)
            wait_until(lambda count=before_kill: len(acknowledged) >= count or relayed.done())
            server.kill()
            server.start()
        enough.set()
        relayed.result()
    with closing(source_of(server.bootstrap, topic)) as source:
        assert_order_and_no_loss(read_all(source, 0), pending, acknowledged)


def test_a_swallowed_acknowledgement_makes_duplicates_and_no_disorder(
    proxied_server: ProxiedKafkaServer, proxy: Proxy
) -> None:
    topic = new_topic(proxied_server)
    pending = pending_of(2_000)
    with closing(sink_of(proxied_server.proxied_bootstrap, topic, SMALL_BATCHES)) as sink:
        acknowledged = insist(sink, pending[:10])
        sink._timeout_seconds = 1
        for start in (10, 500, 1_000):
            proxy.deafen()
            with pytest.raises(TopicUnreachable):
                sink.publish(0, pending[start:])
            acknowledged.update(insist(sink, pending[start : start + 500]))
        sink._timeout_seconds = ANSWER_SECONDS
        acknowledged.update(insist(sink, pending[1_500:]))
    with closing(source_of(proxied_server.bootstrap, topic)) as source:
        records = read_all(source, 0)
    assert len(records) > len(pending)
    assert_order_and_no_loss(records, pending, acknowledged)
    assert len(acknowledged) == len(pending)


def test_a_lost_acknowledgement_that_the_client_asks_for_again_makes_no_duplicate(
    proxied_server: ProxiedKafkaServer, proxy: Proxy
) -> None:
    topic = new_topic(proxied_server)
    pending = pending_of(1_000)
    with closing(sink_of(proxied_server.proxied_bootstrap, topic, SMALL_BATCHES)) as sink:
        positions = sink.publish(0, pending[:10])
        proxy.cut_at_reply(5)
        positions += sink.publish(0, pending[10:])
    assert not proxy.is_armed
    assert positions == list(range(1_000))


def test_connections_cut_anywhere_in_a_run_lose_and_reorder_nothing(
    proxied_server: ProxiedKafkaServer, proxy: Proxy
) -> None:
    topic = new_topic(proxied_server)
    pending = pending_of(4_000)
    acknowledged: dict[int, int] = {}
    chance = random.Random(3)
    with closing(sink_of(proxied_server.proxied_bootstrap, topic, SMALL_BATCHES, timeout_seconds=2)) as sink:
        while len(acknowledged) < len(pending):
            start = len(acknowledged)
            (proxy.cut_at_byte if chance.random() < 0.5 else proxy.cut_at_reply)(chance.randrange(12))
            if chance.random() < 0.3:
                proxy.deafen()
            acknowledged.update(insist(sink, pending[start : start + chance.randrange(1, 300)], tries_max=1))
    with closing(source_of(proxied_server.bootstrap, topic)) as source:
        assert_order_and_no_loss(read_all(source, 0), pending, acknowledged)


def test_a_run_that_arrives_after_its_producer_was_thrown_away_is_only_a_duplicate(
    proxied_server: ProxiedKafkaServer, proxy: Proxy
) -> None:
    topic = new_topic(proxied_server)
    pending = pending_of(300)
    with (
        closing(sink_of(proxied_server.proxied_bootstrap, topic)) as sink,
        closing(source_of(proxied_server.bootstrap, topic)) as source,
    ):
        acknowledged = insist(sink, pending[:100])
        proxy.freeze()
        sink._timeout_seconds = 1
        with pytest.raises(TopicUnreachable):
            sink.publish(0, pending[100:])
        sink._timeout_seconds = ANSWER_SECONDS
        acknowledged.update(insist(sink, pending[100:200]))
        proxy.thaw()
        wait_until(lambda: source.bounds(0).next >= 400)
        acknowledged.update(insist(sink, pending[200:]))
        records = read_all(source, 0)
    assert [record.message for record in records[200:400]] == [each.message for each in pending[100:]]
    assert_order_and_no_loss(records, pending, acknowledged)


def test_batches_refused_at_first_are_stored_in_order_when_the_broker_takes_them_again(server: KafkaServer) -> None:
    """A broker takes any batch of a producer that it does not know yet, also the second one before the first."""
    for _ in range(5):
        topic = new_topic(server, {"min.insync.replicas": "2"})
        pending = pending_of(1_000)
        healed = threading.Timer(0.5, lambda name=topic: alter(server, name, "min.insync.replicas", "1"))
        healed.start()
        with closing(sink_of(server.bootstrap, topic, {"batch.num.messages": "10", "retry.backoff.ms": "1"})) as sink:
            acknowledged = insist(sink, pending)
        healed.join()
        with closing(source_of(server.bootstrap, topic)) as source:
            assert_order_and_no_loss(read_all(source, 0), pending, acknowledged)


# Tools ------------------------------------------------------------------------------------------------------------


def sink_of(
    bootstrap: str, topic: str, options: dict[str, str] | None = None, timeout_seconds: float = ANSWER_SECONDS
) -> KafkaSink:
    return KafkaSink(bootstrap, topic, 2, options or {}, timeout_seconds=timeout_seconds)


def source_of(bootstrap: str, topic: str, options: dict[str, str] | None = None) -> KafkaSource:
    return KafkaSource(bootstrap, topic, 2, options or {})


def calls_of(sink: KafkaSink, source: KafkaSource):  # type: ignore[no-untyped-def]
    """Everything that needs a broker."""
    return (
        sink.identity,
        lambda: sink.publish(0, pending_of(1)),
        source.identity,
        lambda: source.bounds(0),
        lambda: source.position_at(0, 0),
        lambda: source.fetch(0, 0, 1, 0.1),
    )


def new_topic(server: KafkaServer, config: dict[str, str] | None = None) -> str:
    name = f"topic-{uuid.uuid4().hex}"
    server.create_topic(name, 2, config)
    return name


def nowhere() -> str:
    return f"127.0.0.1:{free_port()}"


def pending_of(count: int, *, keys: int = 3, version_first: int = 1) -> list[Pending]:
    """Messages of a few keys in turn, each key's versions growing by one."""
    return [
        Pending(
            number,
            Message(
                key=f"key-{number % keys}",
                version=version_first + number // keys,
                event_time_us=number,
                schema="trial/1",
                payload=b"%d" % number,
            ),
        )
        for number in range(count)
    ]


def large(message: Message) -> Message:
    return Message(
        key=message.key,
        version=message.version,
        event_time_us=0,
        schema="",
        payload=random.Random(1).randbytes(5_000),
    )


def insist(sink: KafkaSink, pending: Sequence[Pending], *, tries_max: int = TRIES_MAX) -> dict[int, int]:
    """Publish as the relay does: what was not acknowledged is sent again. The position of each id."""
    acknowledged: dict[int, int] = {}
    for _ in range(tries_max):
        rest = pending[len(acknowledged) :]
        if not rest:
            break
        try:
            positions = sink.publish(0, rest)
        except TopicUnreachable:
            continue
        acknowledged.update(zip((each.id for each in rest), positions, strict=False))
    return acknowledged


def read_all(source: KafkaSource, partition: int, position: int = 0) -> list[Record]:
    records: list[Record] = []
    while found := source.fetch(partition, position, 2_000, 0):
        records += found
        position = found[-1].position + 1
    return records


def assert_order_and_no_loss(
    records: Sequence[Record], pending: Sequence[Pending], acknowledged: dict[int, int]
) -> None:
    """Every acknowledged message stands at its position, and each key's versions first appear one after the other."""
    by_position = {record.position: record.message for record in records}
    for each in pending[: len(acknowledged)]:
        assert by_position[acknowledged[each.id]] == each.message
    newest: defaultdict[str, int] = defaultdict(int)
    for record in records:
        key, version = record.message.key, record.message.version
        assert version <= newest[key] + 1, f"{key} has version {version} right after {newest[key]}"
        newest[key] = max(newest[key], version)


def thread_count() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def delete_before(server: KafkaServer, topic: str, position: int) -> None:
    with AdminClient({"bootstrap.servers": server.bootstrap}) as admin:
        for done in admin.delete_records([confluent_kafka.TopicPartition(topic, 0, position)]).values():
            done.result(ANSWER_SECONDS)


def remake(server: KafkaServer, topic: str) -> None:
    with AdminClient({"bootstrap.servers": server.bootstrap}) as admin:
        admin.delete_topics([topic], operation_timeout=ANSWER_SECONDS)[topic].result(ANSWER_SECONDS)
    server.create_topic(topic, 2)


def alter(server: KafkaServer, topic: str, name: str, value: str) -> None:
    entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    with AdminClient({"bootstrap.servers": server.bootstrap}) as admin:
        for done in admin.incremental_alter_configs([resource]).values():
            done.result(ANSWER_SECONDS)


def published_ms(source: KafkaSource, partition: int, position: int) -> int:
    """The time of publication that Kafka keeps of a message."""
    settings = {"bootstrap.servers": source._cluster._bootstrap, "group.id": "test"}
    with closing(confluent_kafka.Consumer(settings)) as consumer:
        consumer.assign([confluent_kafka.TopicPartition(source.name, partition, position)])
        message = consumer.poll(ANSWER_SECONDS)
        assert message is not None
        return message.timestamp()[1]
