"""What a replay must do, whether the topic lives in the store or in Kafka."""

import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import sqlalchemy as sa

from keyfold.core import audit, deadletters, progress
from keyfold.core.clock import ManualClock
from keyfold.core.consumer import Consumer, ConsumerWorker
from keyfold.core.context import Context
from keyfold.core.errors import BadInput, Conflict, NotFound, OffsetGone
from keyfold.core.relay import Relay
from keyfold.core.replay import SentAgain, SetBack, Start, send_again, set_back
from keyfold.core.store import Transaction
from keyfold.core.tables import AUDIT, MESSAGES
from keyfold.core.topics.topic import Record, TopicSpec
from tests.product import consume_all, message, opened, put, read_all, relay_all

pytestmark = [pytest.mark.spec("CORE-07"), pytest.mark.xdist_group("kafka")]

BACKENDS = ("embedded on sqlite", "embedded on postgresql", "kafka")
VERSIONS = range(1, 7)


class Trial:
    """A topic of one partition with six messages of one key, all of them read by one consumer."""

    def __init__(self, context: Context, topic: str, clock: ManualClock) -> None:
        self.context = context
        self.topic = topic
        self.seen: list[int] = []
        self.consumer = Consumer(name="reader", topic=topic, apply=self._apply, replayable=True)
        self.relay = Relay(context, topic, "w1")
        self.published_at_us: dict[int, int] = {}
        for version in VERSIONS:
            put(context, topic, [message("k", version)])
            relay_all(self.relay)
            self.published_at_us[version] = clock.now_us()
            clock.advance(1)
        self.consume()

    def consume(self) -> list[int]:
        """Let a worker of the consumer read what there is; the versions that it was given."""
        self.seen.clear()
        worker = ConsumerWorker(self.context, self.consumer, "w1")
        consume_all(worker)
        worker.stop()
        return list(self.seen)

    def audited(self) -> list[tuple[str, str]]:
        rows = self.context.store.read(lambda tx: tx.execute(sa.select(AUDIT).order_by(AUDIT.c.number)).all())
        return [(row.actor, row.act) for row in rows]

    def _apply(self, _: Transaction, records: Sequence[Record]) -> None:
        self.seen.extend(record.message.version for record in records)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def topic() -> str:
    return f"trial-{uuid.uuid4().hex[:8]}"


@pytest.fixture(params=BACKENDS)
def trial(request: pytest.FixtureRequest, tmp_path: Path, topic: str, clock: ManualClock) -> Iterator[Trial]:
    url = f"sqlite:///{tmp_path / 'keyfold.db'}"
    options: dict[str, object] = {}
    if request.param == "embedded on postgresql":
        url = request.getfixturevalue("postgres_url")
    if request.param == "kafka":
        server = request.getfixturevalue("kafka_server")
        server.create_topic(topic, 1)
        options = {"topics__kind": "kafka", "topics__kafka": server.bootstrap}
    with opened(url, [TopicSpec(topic, "a trial", 1)], clock=clock, **options) as context:
        yield Trial(context, topic, clock)


@pytest.fixture
def embedded(tmp_path: Path, topic: str, clock: ManualClock) -> Iterator[Trial]:
    with opened(f"sqlite:///{tmp_path / 'keyfold.db'}", [TopicSpec(topic, "a trial", 1)], clock=clock) as context:
        yield Trial(context, topic, clock)


@pytest.fixture
def kafka(request: pytest.FixtureRequest, tmp_path: Path, topic: str, clock: ManualClock) -> Iterator[Trial]:
    server = request.getfixturevalue("kafka_server")
    server.create_topic(topic, 1)
    options = {"topics__kind": "kafka", "topics__kafka": server.bootstrap}
    url = f"sqlite:///{tmp_path / 'keyfold.db'}"
    with opened(url, [TopicSpec(topic, "a trial", 1)], clock=clock, **options) as context:
        yield Trial(context, topic, clock)


def test_a_consumer_set_back_to_a_position_reads_again_from_there(trial: Trial) -> None:
    assert set_back(trial.context, trial.consumer, Start(position=2), actor="ann") == [SetBack(0, 6, 2)]
    assert trial.consume() == [3, 4, 5, 6]
    assert trial.audited() == [("ann", "consumer set back")]
    assert trial.context.store.read(audit.broken) is None


def test_a_live_worker_that_was_set_back_reads_again_with_the_next_message(trial: Trial) -> None:
    """Its next step is refused by the guard row, and then it goes on where it was put."""
    worker = ConsumerWorker(trial.context, trial.consumer, "w1")
    consume_all(worker)
    set_back(trial.context, trial.consumer, Start(position=2), actor="ann")
    put(trial.context, trial.topic, [message("k", 7)])
    relay_all(trial.relay)
    trial.seen.clear()
    # Two steps at the least: one that is refused, one that reads.
    while trial.seen[-1:] != [7]:
        worker.step()
    worker.stop()
    assert trial.seen == [3, 4, 5, 6, 7]


def test_an_idle_worker_that_was_set_back_reads_again_without_a_new_message(trial: Trial) -> None:
    worker = ConsumerWorker(trial.context, trial.consumer, "w1")
    consume_all(worker)
    set_back(trial.context, trial.consumer, Start(position=2), actor="ann")
    trial.seen.clear()
    while trial.seen[-1:] != [6]:
        worker.step()
    worker.stop()
    assert trial.seen == [3, 4, 5, 6]


def test_a_consumer_set_back_to_a_time_reads_what_was_published_since(embedded: Trial) -> None:
    start = Start(time_us=embedded.published_at_us[4])
    assert set_back(embedded.context, embedded.consumer, start, actor="ann") == [SetBack(0, 6, 3)]
    assert embedded.consume() == [4, 5, 6]


def test_a_consumer_is_never_moved_forward(trial: Trial) -> None:
    """A place beyond where it stands changes nothing: messages would be skipped."""
    set_back(trial.context, trial.consumer, Start(position=1), actor="ann")
    assert set_back(trial.context, trial.consumer, Start(position=4), actor="ann") == [SetBack(0, 1, 1)]
    assert trial.consume() == [2, 3, 4, 5, 6]


def test_a_consumer_that_would_count_twice_is_not_set_back(trial: Trial) -> None:
    counting = Consumer(name="reader", topic=trial.topic, apply=trial.consumer.apply, replayable=False)
    with pytest.raises(Conflict, match="a second time"):
        set_back(trial.context, counting, Start(position=0), actor="ann")
    assert trial.consume() == []
    assert trial.audited() == []


def test_a_partition_that_is_not_there_is_refused(embedded: Trial) -> None:
    with pytest.raises(BadInput, match="no partition 1"):
        set_back(embedded.context, embedded.consumer, Start(position=0, partition=1), actor="ann")


def test_a_purged_position_is_refused_with_the_first_kept(embedded: Trial) -> None:
    embedded.context.store.transact(lambda tx: tx.execute(sa.delete(MESSAGES).where(MESSAGES.c.position < 3)))
    with pytest.raises(OffsetGone, match="the first one kept is 3"):
        set_back(embedded.context, embedded.consumer, Start(position=2), actor="ann")


def test_a_consumer_is_not_set_back_over_messages_that_are_set_aside(embedded: Trial) -> None:
    """Such a message would come a second time and stand in its own way."""
    (record,) = [each for each in read_all(embedded.context, embedded.topic)[0] if each.position == 3]
    embedded.context.store.transact(
        lambda tx: deadletters.set_aside(tx, "reader", embedded.topic, record, "poison", tries=1, parked_keys_max=10)
    )
    with pytest.raises(Conflict, match="set aside"):
        set_back(embedded.context, embedded.consumer, Start(position=0), actor="ann")
    assert set_back(embedded.context, embedded.consumer, Start(position=4), actor="ann") == [SetBack(0, 6, 4)]


def test_a_consumer_that_never_read_has_nothing_to_be_set_back(embedded: Trial) -> None:
    fresh = Consumer(name="fresh", topic=embedded.topic, apply=embedded.consumer.apply, replayable=True)
    assert set_back(embedded.context, fresh, Start(position=0), actor="ann") == []
    assert embedded.context.store.read(lambda tx: progress.positions(tx, fresh.job)) == {}


def test_an_embedded_topic_needs_no_sending_again_and_says_what_to_do(embedded: Trial) -> None:
    with pytest.raises(BadInput) as refusal:
        send_again(embedded.context, embedded.topic, Start(position=0), actor="ann")
    assert "--consumer" in str(refusal.value)
    assert embedded.audited() == []


def test_kafka_is_sent_the_kept_messages_again_in_their_order(kafka: Trial) -> None:
    (first, *_) = read_all(kafka.context, kafka.topic)[0]
    start = Start(position=first.position + 2)
    assert send_again(kafka.context, kafka.topic, start, actor="ann") == [SentAgain(0, 4)]
    versions = [record.message.version for record in read_all(kafka.context, kafka.topic)[0]]
    assert versions == [1, 2, 3, 4, 5, 6, 3, 4, 5, 6]
    assert kafka.audited() == [("ann", "topic sent again")]
    assert send_again(kafka.context, kafka.topic, start, actor="ann") == [SentAgain(0, 4)]


def test_kafka_is_sent_again_what_was_published_since_a_time(kafka: Trial) -> None:
    start = Start(time_us=kafka.published_at_us[5])
    assert send_again(kafka.context, kafka.topic, start, actor="ann") == [SentAgain(0, 2)]


def test_a_topic_that_is_not_there_is_refused_before_anything_is_recorded(kafka: Trial) -> None:
    with pytest.raises(NotFound):
        send_again(kafka.context, "absent", Start(position=0), actor="ann")
    assert kafka.audited() == []
