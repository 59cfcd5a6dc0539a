"""What a topic must do, whether it lives in the store or in Kafka: outbox → relay → topic → consumer."""

import contextlib
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from keyfold.core import consumer, deadletters, outbox, pace
from keyfold.core.clock import SECOND_US, ManualClock
from keyfold.core.consumer import Consumer, ConsumerWorker
from keyfold.core.context import Context
from keyfold.core.errors import BadInput, OffsetGone, PartitionStopped, StoreBusy, TopicChanged
from keyfold.core.janitor import Janitor
from keyfold.core.relay import Relay
from keyfold.core.store import Store, Transaction, shapes
from keyfold.core.tables import MESSAGES, PARKED_KEYS, PROGRESS
from keyfold.core.topics import embedded
from keyfold.core.topics.topic import Payloads, Record, TopicSpec, partition_of, payloads_of
from keyfold.tally.tables import TALLIES
from tests.product import consume_all, consumer_worker, message, opened, put, read_all, relay_all

pytestmark = [pytest.mark.spec("CORE-05", "CORE-06"), pytest.mark.xdist_group("kafka")]

BACKENDS = ("embedded on sqlite", "embedded on postgresql", "kafka")


class Trial:
    """A product with one topic on one backend."""

    def __init__(self, context: Context, topic: str) -> None:
        self.context = context
        self.topic = topic
        self.relay = Relay(context, topic, "w1")

    def publish(self, *messages: object) -> None:
        put(self.context, self.topic, messages)  # type: ignore[arg-type]
        relay_all(self.relay)

    def records(self) -> dict[int, list[Record]]:
        return read_all(self.context, self.topic)


@pytest.fixture(params=BACKENDS)
def trial(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Trial]:
    topic = f"trial-{uuid.uuid4().hex[:8]}"
    url = f"sqlite:///{tmp_path / 'keyfold.db'}"
    options: dict[str, object] = {}
    if request.param == "embedded on postgresql":
        url = request.getfixturevalue("postgres_url")
    if request.param == "kafka":
        server = request.getfixturevalue("kafka_server")
        server.create_topic(topic, 3)
        options = {"topics__kind": "kafka", "topics__kafka": server.bootstrap}
    with opened(url, [TopicSpec(topic, "a trial", 3)], **options) as context:
        yield Trial(context, topic)


def count_into_tallies(tx: Transaction, records: Sequence[Record]) -> None:
    """A consumer that counts messages by key; it knows of no duplicates, so its position must."""
    keys = [record.message.key for record in records]
    if any(record.message.payload == b"poison" for record in records):
        raise ValueError("this message cannot be applied")
    ones = [1] * len(keys)
    shapes.increment(tx, TALLIES, {"key": keys, "value": ones, "version": ones, "event_version": [0] * len(keys)})


def tallies(context: Context) -> dict[str, int]:
    return {row.key: row.value for row in context.store.read(lambda tx: tx.execute(sa.select(TALLIES)).all())}


def test_a_message_arrives_as_it_was_put_in_the_partition_of_its_key(trial: Trial) -> None:
    sent = message("ключ", 7, b"\x00\xffbytes", kind="photo")
    trial.publish(sent)
    ((partition, records),) = [(p, r) for p, r in trial.records().items() if r]
    assert partition == partition_of("ключ", 3)
    assert [record.message for record in records] == [sent]


def test_nothing_is_published_of_a_transaction_that_rolled_back(trial: Trial) -> None:
    def work(tx: Transaction) -> None:
        outbox.put(tx, trial.context.topics, trial.topic, [message("a", 1)])
        raise RuntimeError

    with pytest.raises(RuntimeError):
        trial.context.store.transact(work)
    relay_all(trial.relay)
    assert not any(trial.records().values())


def test_messages_of_concurrent_writers_all_arrive_in_version_order_per_key(trial: Trial) -> None:
    keys = [f"k{number}" for number in range(12)]

    def write(_: int) -> None:
        for _ in range(20):
            trial.context.store.transact(change)

    def change(tx: Transaction) -> None:
        ones = [1] * len(keys)
        columns = {"key": keys, "value": ones, "version": ones, "event_version": [0] * len(keys)}
        after = shapes.increment(tx, TALLIES, columns, returning=["version"])
        outbox.put(tx, trial.context.topics, trial.topic, [message(key, row[0]) for (key,), row in after.items()])

    with ThreadPoolExecutor(4) as pool:
        writing = [pool.submit(write, number) for number in range(3)]
        while not all(each.done() for each in writing):
            trial.relay.step()
        for each in writing:
            each.result()
    relay_all(trial.relay)
    versions: dict[str, list[int]] = {key: [] for key in keys}
    for records in trial.records().values():
        for record in records:
            versions[record.message.key].append(record.message.version)
    assert versions == {key: list(range(1, 61)) for key in keys}


def test_the_same_version_of_a_key_cannot_be_put_twice(trial: Trial) -> None:
    put(trial.context, trial.topic, [message("a", 1)])
    with pytest.raises(BadInput):
        put(trial.context, trial.topic, [message("a", 1)])
    put(trial.context, trial.topic, [message("a", 1, kind="other")])


@pytest.mark.spec("CORE-14")
def test_a_message_above_the_limit_is_refused_with_its_key(trial: Trial) -> None:
    with pytest.raises(BadInput, match="big"):
        put(trial.context, trial.topic, [message("big", 1, b"x" * 900_001)])


@pytest.mark.spec("CORE-08")
def test_a_consumer_applies_every_message_once_whoever_runs_it(trial: Trial) -> None:
    trial.publish(*(message(f"k{number % 10}", number) for number in range(1, 201)))
    consume_all(first := consumer_worker(trial.context, trial.topic, count_into_tallies))
    first.stop()
    trial.publish(*(message(f"k{number % 10}", number) for number in range(201, 301)))
    consume_all(consumer_worker(trial.context, trial.topic, count_into_tallies, worker="w2"))
    assert tallies(trial.context) == {f"k{number}": 30 for number in range(10)}


@pytest.mark.spec("CORE-02", "CORE-08")
def test_a_consumer_that_lost_its_partition_changes_nothing(trial: Trial) -> None:
    trial.publish(*(message("a", number) for number in range(1, 6)))
    partition = partition_of("a", 3)
    zombie = consumer_worker(trial.context, trial.topic, count_into_tallies)
    zombie._shards.tick()
    lease = zombie._shards.held[partition]
    zombie._positions[partition] = (lease.ticket, 0)
    trial.context.store.transact(
        lambda tx: tx.execute(sa.update(PROGRESS).values(ticket=lease.ticket + 1, position=5)) and None
    )
    zombie.step()
    assert tallies(trial.context) == {}


@pytest.mark.spec("CORE-09")
def test_a_poison_message_is_set_aside_and_the_rest_of_its_batch_commits(trial: Trial) -> None:
    trial.publish(
        message("a", 1), message("b", 1), message("b", 2, b"poison"), message("b", 3), message("c", 1), message("a", 2)
    )
    consume_all(worker := consumer_worker(trial.context, trial.topic, count_into_tallies))
    assert tallies(trial.context) == {"a": 2, "b": 1, "c": 1}
    letters = trial.context.store.read(deadletters.listed)
    assert [(letter.key, letter.version, letter.state) for letter in letters] == [("b", 2, "dead"), ("b", 3, "parked")]
    assert letters[0].reason == "ValueError: this message cannot be applied"
    trial.publish(message("b", 4))
    consume_all(worker)
    assert tallies(trial.context)["b"] == 1


@pytest.mark.spec("CORE-09")
def test_a_redrive_applies_what_waited_in_order_and_the_key_flows_again(trial: Trial) -> None:
    trial.publish(message("b", 1, b"poison"), message("b", 2), message("b", 3))
    consume_all(worker := consumer_worker(trial.context, trial.topic, count_into_tallies))
    store = trial.context.store

    failed = deadletters.redrive(store, "trial", trial.topic, count_into_tallies, ordered=True)
    assert (failed.applied, [letter.version for letter in failed.failed]) == (0, [1])
    assert [letter.tries for letter in store.read(deadletters.listed)] == [4, 0, 0]

    order: list[int] = []

    def mended(tx: Transaction, records: Sequence[Record]) -> None:
        order.extend(record.message.version for record in records)

    assert deadletters.redrive(store, "trial", trial.topic, mended, ordered=True).applied == 3
    assert order == [1, 2, 3]
    assert store.read(deadletters.listed) == []
    trial.publish(message("b", 4))
    consume_all(worker)
    assert tallies(trial.context) == {"b": 1}


@pytest.mark.spec("CORE-09")
def test_a_discarded_letter_lets_its_key_flow_again(trial: Trial) -> None:
    trial.publish(message("b", 1, b"poison"))
    consume_all(worker := consumer_worker(trial.context, trial.topic, count_into_tallies))
    (letter,) = trial.context.store.read(deadletters.listed)
    deadletters.discard(trial.context.store, "trial", trial.topic, letter.partition, letter.position, actor="a test")
    trial.publish(message("b", 2))
    consume_all(worker)
    assert tallies(trial.context) == {"b": 1}


@pytest.mark.spec("CORE-09")
def test_where_order_does_not_matter_nothing_waits(trial: Trial) -> None:
    trial.publish(message("b", 1, b"poison"), message("b", 2), message("b", 3))
    consume_all(consumer_worker(trial.context, trial.topic, count_into_tallies, ordered=False))
    assert tallies(trial.context) == {"b": 2}
    assert [letter.state for letter in trial.context.store.read(deadletters.listed)] == ["dead"]


@pytest.mark.spec("CORE-04", "CORE-08")
def test_a_batch_that_loses_every_race_is_tried_with_fewer_messages_and_then_with_more_again(trial: Trial) -> None:
    sizes: list[int] = []

    def contended(tx: Transaction, records: Sequence[Record]) -> None:
        if len(records) > 5 and len(sizes) < 2:
            raise StoreBusy("every race was lost")
        sizes.append(len(records))
        count_into_tallies(tx, records)

    trial.publish(*(message("a", version) for version in range(1, 41)))
    worker = consumer_worker(trial.context, trial.topic, contended)
    for _ in range(60):
        with contextlib.suppress(StoreBusy):
            worker.step()
    assert tallies(trial.context) == {"a": 40}
    assert sizes == [4, 4, 8, 16, 8]


@pytest.mark.spec("CORE-03", "CORE-09")
def test_batches_grow_while_they_are_quick_and_shrink_when_one_is_too_much_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "COUNT_START", 4)
    sizes: list[int] = []

    def bounded(tx: Transaction, records: Sequence[Record]) -> None:
        sizes.append(len(records))
        if len(records) > 8:
            raise BadInput("too many at once")
        count_into_tallies(tx, records)

    with opened(
        f"sqlite:///{tmp_path / 'keyfold.db'}",
        [TopicSpec("t", "a trial", 1)],
        limits__consumer_batch_milliseconds=2**31,  # however slow the machine
    ) as context:
        trial = Trial(context, "t")
        trial.publish(*(message("a", version) for version in range(1, 46)))
        consume_all(consumer_worker(context, "t", bounded))
        assert sizes == [4, 8, 16, 8, 8, 8, 9, 4, 5]
        assert tallies(context) == {"a": 45}
        assert context.store.read(deadletters.listed) == []


class Ticks:
    """A clock that stands still unless somebody takes time."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def take_long(self) -> None:
        self.now += 60.0


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Ticks:
    monkeypatch.setattr(pace, "COUNT_START", 8)
    monkeypatch.setattr(pace, "COUNT_MIN", 2)
    ticks = Ticks()
    monkeypatch.setattr(consumer, "time", ticks)
    return ticks


@pytest.mark.spec("CORE-03")
def test_a_batch_that_takes_long_is_followed_by_smaller_ones(trial: Trial, ticks: Ticks) -> None:
    sizes: list[int] = []

    def slow(tx: Transaction, records: Sequence[Record]) -> None:
        sizes.append(len(records))
        ticks.take_long()
        count_into_tallies(tx, records)

    trial.publish(*(message("a", version) for version in range(1, 19)))
    consume_all(consumer_worker(trial.context, trial.topic, slow))
    assert sizes == [8, 4, 2, 2, 2]


@pytest.mark.spec("CORE-03")
def test_that_a_batch_had_to_wait_for_the_store_makes_no_later_one_smaller(
    trial: Trial, ticks: Ticks, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    transact = Store.transact

    def waited(self: Store, *given: Any, **options: Any) -> Any:
        ticks.take_long()
        return transact(self, *given, **options)

    def quick(tx: Transaction, records: Sequence[Record]) -> None:
        sizes.append(len(records))
        count_into_tallies(tx, records)

    trial.publish(*(message("a", version) for version in range(1, 25)))
    monkeypatch.setattr(Store, "transact", waited)
    consume_all(consumer_worker(trial.context, trial.topic, quick))
    assert sizes == [8, 16]


@pytest.mark.spec("CORE-09")
def test_too_many_waiting_keys_stop_the_partition_loudly_and_lose_nothing(tmp_path: Path) -> None:
    with opened(
        f"sqlite:///{tmp_path / 'keyfold.db'}", [TopicSpec("t", "a trial", 1)], limits__parked_keys_max=2
    ) as context:
        trial = Trial(context, "t")
        trial.publish(*(message(f"k{number}", 1, b"poison") for number in range(3)), message("z", 1))
        worker = consumer_worker(context, "t", count_into_tallies)
        with pytest.raises(PartitionStopped, match="keyfold topics redrive trial"):
            consume_all(worker)
        assert len(context.store.read(deadletters.listed)) == 2
        assert tallies(context) == {}
        deadletters.redrive(context.store, "trial", "t", lambda tx, records: None, ordered=True)
        consume_all(worker)
        assert tallies(context) == {"z": 1}


@pytest.mark.spec("CORE-05")
def test_positions_outside_the_topic_are_named_errors(trial: Trial) -> None:
    trial.publish(message("a", 1))
    source = trial.context.topics.source(trial.topic)
    with pytest.raises(TopicChanged):
        source.fetch(partition_of("a", 3), 100, 10, 1.0)
    assert source.fetch(partition_of("a", 3), 1, 10, 0.0) == []
    source.close()


@pytest.mark.spec("CORE-07")
def test_published_messages_are_kept_for_the_window_and_no_longer(tmp_path: Path) -> None:
    clock = ManualClock()
    url = f"sqlite:///{tmp_path / 'keyfold.db'}"
    with opened(url, [TopicSpec("t", "a trial", 1)], clock=clock, topics__replay_seconds=600) as context:
        trial = Trial(context, "t")
        trial.publish(message("old", 1))
        clock.advance(500)
        trial.publish(message("new", 1))
        source = context.topics.source("t")
        assert source.position_at(0, clock.now_us()) == 1
        assert source.position_at(0, clock.now_us() + SECOND_US) == 2
        clock.advance(200)
        put(context, "t", [message("pending", 1)])
        Janitor(context).purge()
        assert [record.message.key for record in source.fetch(0, 1, 10, 0)] == ["new"]
        for each in (source, context.topics.source("t", payload_only=True)):
            with pytest.raises(OffsetGone, match="the first one kept is 1"):
                each.fetch(0, 0, 10, 0)
        relay_all(trial.relay)
        assert [record.position for record in source.fetch(0, 1, 10, 0)] == [1, 2]


@pytest.mark.spec("CORE-07", "CORE-08")
def test_what_a_consumer_has_yet_to_read_is_not_purged(tmp_path: Path) -> None:
    clock = ManualClock()
    url = f"sqlite:///{tmp_path / 'keyfold.db'}"
    with opened(url, [TopicSpec("t", "a trial", 1)], clock=clock, topics__replay_seconds=60) as context:
        trial = Trial(context, "t")
        trial.publish(message("a", 1))
        consume_all(worker := consumer_worker(context, "t", count_into_tallies))
        trial.publish(message("a", 2))
        clock.advance(1000)
        Janitor(context).purge()
        worker._shards._next_at = float("-inf")
        worker._shards._lease_seconds = 10**6
        consume_all(worker)
        assert tallies(context) == {"a": 2}


def test_two_relays_share_a_topic_and_neither_repeats_nor_loses(trial: Trial) -> None:
    second = Relay(trial.context, trial.topic, "w2")
    put(trial.context, trial.topic, [message(f"k{number}", 1) for number in range(300)])
    for relay in (trial.relay, second, trial.relay, second):
        relay._shards.tick(force=True)
    held = [set(relay._shards.held) for relay in (trial.relay, second)]
    assert sorted(len(each) for each in held) == [1, 2]
    relay_all(trial.relay)
    relay_all(second)
    keys = [record.message.key for records in trial.records().values() for record in records]
    assert sorted(keys) == sorted(f"k{number}" for number in range(300))


def test_every_published_row_has_a_position_and_none_is_left(trial: Trial) -> None:
    trial.publish(*(message(f"k{number}", 1) for number in range(50)))
    unpublished = sa.select(sa.func.count()).where(MESSAGES.c.position.is_(None))
    assert trial.context.store.read(lambda tx: tx.execute(unpublished).scalar_one()) == 0
    for records in trial.records().values():
        assert [record.position for record in records] == list(range(len(records)))


@pytest.mark.spec("CORE-14", "CORE-16")
def test_a_key_above_the_limit_is_refused(trial: Trial) -> None:
    put(trial.context, trial.topic, [message("ж" * 256, 1)])
    with pytest.raises(BadInput, match="longer than 512 bytes"):
        put(trial.context, trial.topic, [message("ж" * 257, 1)])


@pytest.mark.spec("CORE-08", "CORE-09")
def test_a_message_that_was_set_aside_may_be_delivered_again(trial: Trial) -> None:
    """A consumer that is set back meets its dead letters anew; neither they nor their gates are doubled."""
    trial.publish(message("b", 1, b"poison"), message("b", 2))
    consume_all(worker := consumer_worker(trial.context, trial.topic, count_into_tallies))
    set_back = sa.update(PROGRESS).where(PROGRESS.c.job.like("consumer/%")).values(position=0)
    trial.context.store.transact(lambda tx: tx.execute(set_back) and None)
    worker._positions.clear()
    worker._shards.tick()
    for _ in range(3):
        worker.step()
    store = trial.context.store
    assert len(store.read(deadletters.listed)) == 2
    assert deadletters.redrive(store, "trial", trial.topic, lambda tx, records: None, ordered=True).applied == 2
    assert store.read(lambda tx: tx.execute(sa.select(sa.func.count()).select_from(PARKED_KEYS)).scalar_one()) == 0


def test_a_consumer_of_payloads_sets_aside_whole_messages(trial: Trial) -> None:
    """What it cannot apply and what fails is kept with its key and version, though neither was looked at."""
    sent = [message("a", 1, b"1"), message("b", 2, b"refused"), message("b", 3, b"failing"), message("c", 4, b"4")]
    seen: list[bytes] = []

    def apply(_: Transaction, records: Sequence[Record]) -> list[deadletters.Refusal]:
        payloads = [record.message.payload for record in records]
        if b"failing" in payloads:
            raise ValueError("this message cannot be applied")
        seen.extend(payloads)
        return [deadletters.Refusal(record, "no") for record in records if record.message.payload == b"refused"]

    consumer = Consumer(name="trial", topic=trial.topic, apply=apply, ordered=False, payload_only=True)
    worker = ConsumerWorker(trial.context, consumer, "w1")
    trial.publish(*sent)
    consume_all(worker)
    worker.stop()
    assert sorted(seen) == [b"1", b"4", b"refused"]
    letters = trial.context.store.read(lambda tx: deadletters.listed(tx))
    assert sorted((each.key, each.version, each.payload) for each in letters) == [
        ("b", 2, b"refused"),
        ("b", 3, b"failing"),
    ]


def test_payloads_are_the_records_of_their_positions_however_they_are_cut() -> None:
    payloads = Payloads(2, 40, [b"a", b"b", b"c"])
    assert [(each.partition, each.position, each.message.payload) for each in payloads[1:]] == [
        (2, 41, b"b"),
        (2, 42, b"c"),
    ]
    assert payloads[-1] == payloads[1:][1] == list(payloads)[2]
    assert payloads_of(payloads[:2]) == payloads_of(list(payloads)[:2]) == [b"a", b"b"]
    with pytest.raises(ValueError, match="follow one another"):
        payloads[::2]


@pytest.mark.parametrize("payload_only", [True, False])
def test_a_fetch_ends_before_a_position_that_cannot_be_seen(trial: Trial, payload_only: bool) -> None:
    """On a cluster the messages that were numbered together may be seen one after another."""
    if not trial.context.topics.embedded:
        pytest.skip("positions of the store")
    trial.publish(*(message("a", number, b"%d" % number) for number in range(1, 6)))
    source = trial.context.topics.source(trial.topic, payload_only=payload_only)
    partition = partition_of("a", 3)
    unseen = sa.delete(MESSAGES).where(MESSAGES.c.topic == trial.topic, MESSAGES.c.position == 3)
    trial.context.store.transact(lambda tx: tx.execute(unseen))
    assert payloads_of(source.fetch(partition, 0, 10, 0)) == [b"1", b"2", b"3"]


def test_a_fetch_reads_page_by_page_and_ends_after_so_many_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "PAGE_COUNT", 3)
    with opened(f"sqlite:///{tmp_path / 'keyfold.db'}", [TopicSpec("t", "a trial", 1)]) as context:
        put(context, "t", [message("a", number, b"0123456789") for number in range(1, 12)])
        relay_all(Relay(context, "t", "w1"))
        for source in (context.topics.source("t"), context.topics.source("t", payload_only=True)):
            assert [record.position for record in source.fetch(0, 1, 7, 0)] == list(range(1, 8))
            assert [record.position for record in source.fetch(0, 1, 100, 0)] == list(range(1, 11))
            with monkeypatch.context() as few:
                few.setattr(embedded, "FETCH_BYTES_MAX", 40)
                assert [record.position for record in source.fetch(0, 1, 100, 0)] == list(range(1, 7))


def test_a_consumer_that_keeps_order_cannot_do_without_keys() -> None:
    with pytest.raises(ValueError, match="order is by key"):
        Consumer(name="trial", topic="t", apply=lambda *_: None, payload_only=True)
