"""A small run of profiles on one store: events counted by request and from a topic, owned data held and released.

It is what the kill sweep kills and the crash states are recorded from; `scenario.py` runs it in a process of its own.
Every batch is one transaction, and the same in a run that goes on where another died.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa

from keyfold.core import outbox
from keyfold.core.clock import ManualClock
from keyfold.core.consumer import ConsumerWorker
from keyfold.core.context import Context
from keyfold.core.errors import DataRefused
from keyfold.core.relay import Relay
from keyfold.core.settings import Settings, load
from keyfold.core.store import Transaction
from keyfold.core.tables import MESSAGES
from keyfold.core.topics.topic import Message
from keyfold.core.workers import consumer_named
from keyfold.profiles.model import event_of
from keyfold.profiles.part import PART
from keyfold.profiles.service import counting, product
from keyfold.profiles.service.product import PROFILES_TOPIC
from keyfold.profiles.settings import ProfilesSettings
from keyfold.profiles.worker import consumer_name
from tests.faults.killsweep import Inspected, WritePath, shrunk, soundness
from tests.faults.profile_ledger import LOG, Book
from tests.faults.scenario import LEASE_SECONDS, Ack, Order, Say
from tests.faults.stage import patched
from tests.profiles import EXAMPLE, HANDLERS, OFFER, catalog, event

EXACT = 602
TOPIC = f"{LOG}-log"
A, B = "a.example", "b.example"

# One transaction each. Repeats stand in later batches; the last events confirm what waits, or do not.
ASKED, SENT = "asked", "sent"
E1 = event("e1", "u", [OFFER, 1], [EXACT, 1, 7])
E4 = event("e4", "u", [EXACT, 2, 6, B])
E6 = event("e6", "w", [EXACT, 4, 1, A], [EXACT, 5, 1])
Batch = tuple[dict[str, Any], ...]
BATCHES: tuple[tuple[str, Batch], ...] = (
    (ASKED, (E1, event("e2", "u", [EXACT, 2, 5, A]), event("e3", "v", [OFFER, 1]))),
    (SENT, (E4, E1, event("e5", "v", [OFFER, 3, 1, A]))),
    (ASKED, (E4, E6)),
    (SENT, (event("e7", "v", [OFFER, 3]), event("e8", "w", [EXACT, 5, 2, B]), E6)),
)


class Worker:
    """Everything one process does for profiles, each step by hand."""

    def __init__(self, context: Context, name: str) -> None:
        self.context = context
        self.product = product.opened(context)
        self.log = Relay(context, TOPIC, name)
        self.consumer = ConsumerWorker(context, consumer_named(context, consumer_name(LOG)), name)
        self.changes = Relay(context, PROFILES_TOPIC.name, name)

    def ask(self, batch: Batch) -> None:
        events = [(LOG, event_of(fields)) for fields in batch]
        self.context.store.transact(
            lambda tx: counting.count_events(tx, self.product, events, marked=True) and None, name="count"
        )

    def put(self, number: int, batch: Batch) -> None:
        """Put a batch that an earlier run may have put; the same id is refused, and with it the whole batch."""
        topics = self.context.topics
        messages = [
            Message(key=f"{number}/{at}", version=1, event_time_us=0, schema="event/1", payload=payload)
            for at, payload in enumerate(map(msgspec.json.encode, batch))
        ]
        with contextlib.suppress(DataRefused):
            self.context.store.transact(lambda tx: outbox.put(tx, topics, TOPIC, messages), name="put")

    def stop(self) -> None:
        for each in (self.log, self.consumer, self.changes):
            each.stop()


def run(order: Order, say: Say) -> None:
    """Do the whole scenario, stopping and starting in the middle, and acknowledge each step that has committed."""
    clock = ManualClock()
    half = len(BATCHES) // 2
    for numbers in (range(half), range(half, len(BATCHES))):
        with opened(order.url, clock) as context:
            worker = Worker(context, order.worker)
            for number in numbers:
                _do(worker, number, say)
            worker.stop()


def _do(worker: Worker, number: int, say: Say) -> None:
    way, batch = BATCHES[number]
    if way == ASKED:
        say(Ack("profiles"))
        worker.ask(batch)
    else:
        say(Ack("ground"))
        worker.put(number, batch)
        worker.log.step()
        say(Ack("profiles", counts(worker.context)))
        worker.consumer.step()
    say(Ack("ground", counts(worker.context)))
    worker.changes.step()
    say(Ack("ground", counts(worker.context)))


def finish(url: str) -> None:
    """Start anew after a crash, when the dead worker's leases have passed: all of it again, in the same order."""
    clock = ManualClock()
    clock.advance(10 * LEASE_SECONDS)
    with opened(url, clock) as context:
        worker = Worker(context, "w2")
        for number in range(len(BATCHES)):
            _do(worker, number, lambda _: None)


@contextlib.contextmanager
def opened(url: str, clock: ManualClock) -> Iterator[Context]:
    context = Context.open(settings(url), [PART], clock=clock)
    try:
        with patched([(product, "catalog_of", lambda _: catalog())]):  # compiled once, not in every run
            product.opened(context)
        yield context
    finally:
        context.close()


def settings(url: str) -> Settings:
    options = {
        "store.url": url,
        "topics.partitions": 1,
        "leases.lease_seconds": LEASE_SECONDS,
        "profiles.catalog": str(EXAMPLE),
        "profiles.handlers": str(HANDLERS),
        "profiles.kernel": "numpy",
    }
    return load(parts={"profiles": ProfilesSettings}, environ={}, options=options)  # type: ignore[arg-type]


def warm_up() -> None:
    """Import and compile what a run would otherwise do between its counted calls."""
    import keyfold.counters.bulk.by_numpy

    assert keyfold.counters.bulk.by_numpy
    catalog()


def counts(context: Context) -> list[int]:
    """How far the work has come, in numbers that only grow."""
    return context.store.snapshot(_counts)


def _counts(tx: Transaction) -> list[int]:
    marks = tx.driver("SELECT count(*) FROM event_marks").scalar_one()
    versions = tx.driver("SELECT coalesce(sum(version), 0) FROM profiles").scalar_one()
    rows = tx.execute(sa.select(MESSAGES.c.topic, MESSAGES.c.position)).all()
    of = [[row.position for row in rows if row.topic == topic] for topic in (TOPIC, PROFILES_TOPIC.name)]
    published = [sum(position is not None for position in each) for each in of]
    return [marks, versions, *map(len, of), *published]


def inspect(path: Path, told: list[int] | None, at_the_end: bool) -> Inspected:
    """Fold the batches whose marks are there, and compare."""
    broken = soundness(path)
    clock = ManualClock()
    with opened(f"sqlite:///{path}", clock) as context:
        book = Book(product.opened(context))
        there = context.store.snapshot(book.look)
        for _, batch in BATCHES:
            fresh = [each for each in batch if each["event_id"] not in book.counted]
            marked = [each for each in fresh if each["event_id"] in there.marks]
            if len(marked) not in (0, len(fresh)) or (at_the_end and not marked):
                broken.append(f"X1: of the events {[each['event_id'] for each in fresh]}, only {marked} are marked")
            book.commit(clock.now_us(), [(each, "counted") for each in marked])
        now = context.store.snapshot(_counts)
        broken += book.broken + book.compare(context.store.snapshot(book.look)) + shrunk(now, told)
        if at_the_end and now[2:4] != now[4:6]:
            broken.append(f"G2: {now[2:4]} messages were committed, {now[4:6]} published")
        return Inspected(broken, tuple(now))


PROFILES = WritePath("profiles", finish, inspect)
