"""Bugs that the harnesses found, each as the smallest run that shows it."""

import threading
import time
from pathlib import Path

import pytest

from keyfold.core import deadletters, outbox, progress, replay
from keyfold.core.consumer import Consumer, ConsumerWorker
from keyfold.core.errors import StoreBusy
from keyfold.core.relay import Relay
from keyfold.core.store import Transaction
from keyfold.core.topics.topic import Record, TopicSpec
from tests.product import consume_all, message, opened, put, relay_all

TOPIC = TopicSpec("t", "a trial", 1)


@pytest.mark.spec("CORE-07")
def test_a_consumer_that_was_set_back_reads_again_also_where_nothing_new_arrives(tmp_path: Path) -> None:
    """It learnt of a replay only from the next message, or from a new lease."""
    applied: list[int] = []

    def apply(tx: Transaction, records: list[Record]) -> None:
        applied.extend(record.position for record in records)

    with opened(f"sqlite:///{tmp_path / 'keyfold.db'}", [TOPIC]) as context:
        put(context, "t", [message("a", version) for version in (1, 2, 3)])
        relay_all(Relay(context, "t", "w"))
        consumer = Consumer(name="trial", topic="t", apply=apply, replayable=True)
        consume_all(worker := ConsumerWorker(context, consumer, "w"))
        replay.set_back(context, consumer, replay.Start(position=1), actor="test")
        worker.step()
        consume_all(worker)
        assert applied == [0, 1, 2, 1, 2]


@pytest.mark.spec("CORE-07", "CORE-09")
def test_a_message_set_aside_while_its_consumer_is_set_back_does_not_stand_in_its_own_way(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look for letters came before the lock, so one set aside in between stopped the partition for good."""

    def apply(tx: Transaction, records: list[Record]) -> None:
        if any(record.message.payload == b"poison" for record in records):
            raise ValueError("this message cannot be applied")

    with opened(postgres_url, [TOPIC]) as context:
        relay = Relay(context, "t", "w")
        consumer = Consumer(name="trial", topic="t", apply=apply, replayable=True)
        worker = ConsumerWorker(context, consumer, "w")
        put(context, "t", [message("a", 1)])
        relay_all(relay)
        consume_all(worker)
        put(context, "t", [message("a", 2, b"poison")])
        relay_all(relay)
        looked = replay._must_be_free_of_letters
        consuming = threading.Thread(target=worker.step)

        def look_then_let_it_consume(*given: object) -> None:
            looked(*given)  # type: ignore[arg-type]
            consuming.start()
            consuming.join(0.5)

        monkeypatch.setattr(replay, "_must_be_free_of_letters", look_then_let_it_consume)
        replay.set_back(context, consumer, replay.Start(position=0), actor="test")
        consuming.join()
        for _ in range(3):
            worker.step()
        assert context.store.read(lambda tx: progress.positions(tx, consumer.job))[0].position == 2
        assert [letter.version for letter in context.store.read(deadletters.listed)] == [2]


@pytest.mark.spec("CORE-06")
def test_a_transaction_that_outlasts_its_limit_does_not_commit_behind_the_back_of_the_relay(postgres_url: str) -> None:
    """The relay passes over ids that no open transaction can still hold; one that stayed open could.

    A statement's time-out does not end it, nor does an idle session's, while it goes on in short statements.
    """
    with opened(postgres_url, [TOPIC], limits__transaction_seconds_max=1, limits__lock_seconds_max=1) as context:
        relay = Relay(context, "t", "w")
        relay_all(relay)
        has_its_id, outcome = threading.Event(), list[object]()

        def take_long(tx: Transaction) -> None:
            outbox.put(tx, context.topics, "t", [message("late", 1)])
            has_its_id.set()
            for _ in range(12):
                time.sleep(0.3)
                tx.driver("SELECT 1")

        def write() -> None:
            try:
                outcome.append(context.store.transact(take_long, name="long trial"))
            except StoreBusy as refusal:
                outcome.append(refusal)

        writer = threading.Thread(target=write)
        writer.start()
        has_its_id.wait()
        version = 0
        while writer.is_alive():
            version += 1
            put(context, "t", [message("other", version)])
            relay_all(relay)
            time.sleep(0.1)
        relay_all(relay)
        waiting = "SELECT count(*) FROM messages WHERE position IS NULL"
        assert context.store.read(lambda tx: tx.driver(waiting).scalar_one()) == 0, "a message waits for ever"
