"""A product opened for a test: its own part, its own topics, workers that the test steps by hand."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from keyfold.core import outbox
from keyfold.core.clock import Clock
from keyfold.core.consumer import Consumer, ConsumerWorker
from keyfold.core.context import Context
from keyfold.core.part import Part
from keyfold.core.relay import Relay
from keyfold.core.settings import load
from keyfold.core.store import Transaction
from keyfold.core.topics.topic import Message, Record, TopicSpec


@contextmanager
def opened(
    url: str, topics: Sequence[TopicSpec] = (), *, clock: Clock | None = None, **options: object
) -> Iterator[Context]:
    """A context on the store at `url`; options are settings with `__` for the dot (`topics__kind="kafka"`)."""
    from keyfold.core.store import Store, migrate

    store = Store.open(url)
    migrate.upgrade(store)
    store.close()
    given = {name.replace("__", "."): value for name, value in options.items()}
    context = Context.open(
        load(environ={}, options={"store.url": url, **given}),
        [Part(name="trial", summary="a part of a test", topics=tuple(topics))],
        clock=clock,
    )
    try:
        yield context
    finally:
        context.close()


def message(key: str, version: int, payload: bytes = b"{}", kind: str = "") -> Message:
    return Message(key=key, version=version, event_time_us=version, schema="trial/1", payload=payload, kind=kind)


def put(context: Context, topic: str, messages: Sequence[Message]) -> None:
    context.store.transact(lambda tx: outbox.put(tx, context.topics, topic, messages))


def relay_all(relay: Relay) -> None:
    """Step until nothing is left."""
    while relay.step():
        pass
    relay.step()


def read_all(context: Context, topic: str) -> dict[int, list[Record]]:
    """Everything the topic keeps, by partition."""
    source = context.topics.source(topic)
    try:
        found: dict[int, list[Record]] = {}
        for partition in range(source.partitions):
            position, end = source.bounds(partition).first, source.bounds(partition).next
            found[partition] = []
            while position < end:
                records = source.fetch(partition, position, 1000, 5.0)
                found[partition].extend(records)
                position = records[-1].position + 1
        return found
    finally:
        source.close()


def consumer_worker(
    context: Context,
    topic: str,
    apply: Callable[[Transaction, Sequence[Record]], None],
    *,
    name: str = "trial",
    worker: str = "w1",
    ordered: bool = True,
) -> ConsumerWorker:
    return ConsumerWorker(context, Consumer(name=name, topic=topic, apply=apply, ordered=ordered), worker)


def consume_all(worker: ConsumerWorker) -> None:
    while worker.step():
        pass
