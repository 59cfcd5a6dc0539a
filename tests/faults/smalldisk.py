"""A disk so small that it fills: work on it until it is full, and after room was made."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from keyfold.core.clock import ManualClock
from keyfold.core.errors import StoreFull
from keyfold.core.store import Store
from keyfold.core.topics.topic import Message
from keyfold.listings.model import Offer
from keyfold.listings.service import saving
from keyfold.listings.service.saving import Change
from keyfold.orders.model import CompletedOrder
from keyfold.segments.service import uploading
from keyfold.tally import service
from tests.faults import (
    ledger,
    listing_scenario,
    order_scenario,
    profile_ledger,
    profile_scenario,
    scenario,
    segment_scenario,
)
from tests.faults.book import Book
from tests.faults.ledger import Ledger
from tests.faults.scenario import LEASE_SECONDS, Worker
from tests.listings import car
from tests.orders import order
from tests.profiles import OFFER, event

DISK_BYTES = 2 * 1024 * 1024
ROOM_BYTES = 16 * 1024
EVENTS_MAX = 4_000
WRITES = ("put", "relay", "consume", "announce")


class Ballast:
    """A file that leaves the disk just so much room."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "ballast"

    def leave(self, room_bytes: int) -> None:
        self.free()
        room = os.statvfs(self._path.parent)
        size = room.f_bavail * room.f_frsize - room_bytes
        if size > 0:
            with self._path.open("wb") as file:
                file.write(bytes(size))

    def free(self) -> None:
        self._path.unlink(missing_ok=True)


class Filling:
    """Events put one by one, remembered when they were acknowledged."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.sent: list[bytes] = []

    def put(self) -> None:
        version = len(self.sent) + 1
        payload = b'{"add":%d}' % version
        self._worker.put([Message(key="a", version=version, event_time_us=0, schema="event/1", payload=payload)])
        self.sent.append(payload)

    def put_many(self) -> None:
        for _ in range(EVENTS_MAX):
            self.put()


def broken_when_full(directory: Path, template: Path, write: str) -> list[str]:
    """Fill the disk under this kind of write, look, make room, and go on to the end: the laws broken on the way."""
    ballast = Ballast(directory)
    path = directory / "run.db"
    path.write_bytes(template.read_bytes())
    with scenario.opened(f"sqlite:///{path}", ManualClock()) as context:
        worker = Worker(context, "w1")
        worker.run_dry()  # leases are held from here on
        filling = Filling(worker)
        for _ in range(20):
            filling.put()
        works: dict[str, Callable[[], object]] = {
            "put": filling.put_many,
            "relay": worker.events.step,
            "consume": worker.tally.step,
            "announce": worker.changes.step,
        }
        for earlier in WRITES[1 : WRITES.index(write)]:
            works[earlier]()
        before = Ledger.of(context.store)
        ballast.leave(ROOM_BYTES if write == "put" else 0)
        broken = _refused(works[write])

        after = Ledger.of(context.store)
        broken += ledger.broken_now(after)
        if [row.entry.payload for row in after.messages[ledger.EVENTS]] != filling.sent:
            broken.append("X1: the events there are not those acknowledged")
        if after.counts()[1:] != before.counts()[1:]:
            broken.append(f"X1: a part of what was refused is there: {before.counts()} became {after.counts()}")
        if "a" in before.tallies:
            read = context.store.read(lambda tx: service.read(tx, ["a"]))["a"]
            broken += [] if read.value == before.tallies["a"].value else [f"X1: a full disk gives {read}"]

        ballast.free()
        filling.put()
        worker.run_dry()
        found = Ledger.of(context.store)
        return broken + ledger.broken_now(found) + ledger.broken_at_the_end(found, {"a": filling.sent})


class Counting(NamedTuple):
    """A part at work on the small disk: batches by the number of what was counted, and one for when there is room."""

    store: Store
    book: Book
    batch: Callable[[int], Any]
    count_batch: Callable[[Any], None]  # and tell the book of it
    last: Any


def broken_when_counting_fills_it(
    directory: Path,
    template: Path,
    counting_at: Callable[[str], AbstractContextManager[Counting]],
    *,
    room_bytes: int = ROOM_BYTES,
) -> list[str]:
    """Count until the disk is full, look, make room, and go on: the laws broken on the way."""
    ballast = Ballast(directory)
    path = directory / "run.db"
    path.write_bytes(template.read_bytes())
    with counting_at(f"sqlite:///{path}") as (store, book, batch, count, last):

        def count_many() -> None:
            for _ in range(EVENTS_MAX):
                count(batch(len(book.counted)))

        ballast.leave(room_bytes)
        broken = _refused(count_many)
        broken += book.broken_in(store)
        ballast.free()
        count(last)
        return broken + book.broken_in(store)


@contextmanager
def counting_events(url: str) -> Iterator[Counting]:
    clock = ManualClock()
    with profile_scenario.opened(url, clock) as context:
        worker = profile_scenario.Worker(context, "w1")
        book = profile_ledger.Book(worker.product)

        def batch(number: int) -> profile_scenario.Batch:
            updates = ([OFFER, number % 20], [OFFER, 50 + number % 20, 1, "a.example"])
            return tuple(event(f"e{number}/{each}", each, *updates) for each in range(3))

        def count(events: profile_scenario.Batch) -> None:
            worker.ask(events)
            book.commit(clock.now_us(), [(fields, "counted") for fields in events])

        yield Counting(context.store, book, batch, count, (event("at last", 1, [OFFER, 50]),))


@contextmanager
def counting_orders(url: str) -> Iterator[Counting]:
    now = order_scenario.NOW
    clock = ManualClock(now * 1_000_000)
    with order_scenario.opened(url, clock) as context:
        worker = order_scenario.Worker(context, "w1")

        def batch(number: int) -> list[CompletedOrder]:
            identities = {"phone_id": f"p{number}", "card_id": "c"}
            return [order(f"o{number}/{each}", now - each, identities, tariff="x") for each in range(3)]

        def count(orders: list[CompletedOrder]) -> None:
            worker.book.commit(clock.now_us(), [*zip(orders, worker.ask(orders), strict=True)])

        yield Counting(context.store, worker.book, batch, count, order_scenario.ASKED[1])


@contextmanager
def diffing(url: str) -> Iterator[Counting]:
    """Snapshots of one segment, of which a quarter goes and a quarter comes; they lie on the small disk too."""
    clock = ManualClock()
    with segment_scenario.opened(url, clock) as context:
        worker = segment_scenario.Worker(context, "w1")
        book = worker.book

        def batch(number: int) -> list[int]:
            return [*range(30), *range(100 * (number % 2) + 30, 100 * (number % 2) + 40)]

        def diff(users: list[int]) -> None:
            clock.advance(10 * LEASE_SECONDS)  # a lease may not have been handed back
            try:
                ids = [pa.array(users, pa.uint64())]
                row = uploading.upload(context.store, worker.snapshots, "a", ids, "the upload")
                book.counted["a", row.evaluation_version] = users
                while tick := worker.differ.next("w1"):
                    for _ in tick:
                        book.commit(clock.now_us(), {"a": worker.row("a")})
            finally:
                book.commit(clock.now_us(), {"a": worker.row("a")})

        book.commit(clock.now_us(), {"a": worker.row("a")})
        yield Counting(context.store, book, batch, diff, batch(7))


@contextmanager
def changing_offers(url: str) -> Iterator[Counting]:
    """New offers, three in a transaction."""
    clock = ManualClock()
    with listing_scenario.alike("w1", clock), listing_scenario.opened(url, clock) as context:
        worker = listing_scenario.Worker(context, "w1", clock)

        def batch(number: int) -> list[Offer]:
            return [car(str(number % 5)) for _ in range(3)]

        def make(made: list[Offer]) -> None:
            saved = worker.do(saving.save, [Change(None, offer) for offer in made])
            worker.book.commit(clock.now_us(), [(each.offer.offer_id, "offer", each.version) for each in saved])

        yield Counting(context.store, worker.book, batch, make, [car("at last")])


def _refused(work: Callable[[], object]) -> list[str]:
    try:
        work()
    except StoreFull:
        return []
    return ["X1: a full disk took everything"]
