"""The walking example on every store: state, messages and positions move together."""

from collections.abc import Iterator

import msgspec
import pytest

from keyfold.core import progress
from keyfold.core.consumer import ConsumerWorker
from keyfold.core.context import Context
from keyfold.core.errors import VersionStale
from keyfold.core.relay import Relay
from keyfold.core.store import Transaction
from keyfold.core.workers import consumer_named
from keyfold.tally import service
from keyfold.tally.model import Addition, Tally
from keyfold.tally.part import PART
from tests.product import consume_all, message, opened, put, read_all, relay_all

pytestmark = pytest.mark.spec("CORE-01", "CORE-02", "CORE-06", "CORE-08")


@pytest.fixture
def product(store_url: str) -> Iterator[Context]:
    with opened(store_url, [service.EVENTS, service.CHANGES]) as context:
        context.parts = [PART]
        yield context


def published(product: Context) -> list[Tally]:
    relay_all(relay := Relay(product, service.CHANGES.name, "w"))
    relay.stop()
    records = [record for each in read_all(product, service.CHANGES.name).values() for record in each]
    return [msgspec.json.decode(record.message.payload, type=Tally) for record in records]


def test_every_change_is_announced_with_its_version(product: Context) -> None:
    for amount in (5, -2):
        product.store.transact(
            lambda tx, n=amount: service.add(tx, product.topics, [Addition("a", n), Addition("a", 1)])
        )
    assert published(product) == [Tally("a", 6, 1), Tally("a", 5, 2)]
    assert product.store.read(lambda tx: service.read(tx, ["a", "none"])) == {
        "a": Tally("a", 5, 2),
        "none": Tally("none", 0, 0),
    }


def test_a_tally_is_replaced_only_at_the_version_that_was_seen(product: Context) -> None:
    product.store.transact(lambda tx: service.replace(tx, product.topics, "a", 10, 0))
    with pytest.raises(VersionStale, match="at version 1, not 0"):
        product.store.transact(lambda tx: service.replace(tx, product.topics, "a", 11, 0))
    product.store.transact(lambda tx: service.replace(tx, product.topics, "a", 12, 1))
    assert published(product) == [Tally("a", 10, 1), Tally("a", 12, 2)]


def test_events_from_a_topic_count_once_also_when_they_are_sent_and_read_again(product: Context) -> None:
    events = [message(f"k{n % 3}", n, b'{"add": 2}') for n in range(1, 31)]
    put(product, service.EVENTS.name, events)
    relay_all(Relay(product, service.EVENTS.name, "w"))
    consume_all(worker := ConsumerWorker(product, consumer_named(product, "tally"), "w"))
    expected = {f"k{n}": Tally(f"k{n}", 20, 1) for n in range(3)}
    assert product.store.read(lambda tx: service.read(tx, list(expected))) == expected

    def rewind(tx: Transaction) -> None:
        job = consumer_named(product, "tally").job
        for shard in progress.positions(tx, job):
            progress.rewind(tx, job, shard, 0)

    product.store.transact(rewind)
    for _ in range(3):
        worker.step()
    consume_all(worker)
    assert product.store.read(lambda tx: service.read(tx, list(expected))) == expected
