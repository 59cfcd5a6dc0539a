"""A disk so small that it fills: work on it until it is full, and after room was made."""

import os
from collections.abc import Callable
from pathlib import Path

from keyfold.core.clock import ManualClock
from keyfold.core.errors import StoreFull
from keyfold.core.topics.topic import Message
from keyfold.tally import service
from tests.faults import ledger, order_scenario, profile_scenario, scenario
from tests.faults.ledger import Ledger
from tests.faults.profile_ledger import Book
from tests.faults.scenario import Worker
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


def broken_when_counting_fills_it(directory: Path, template: Path) -> list[str]:
    """Count events until the disk is full, look, make room, and go on: the laws broken on the way."""
    ballast = Ballast(directory)
    path = directory / "run.db"
    path.write_bytes(template.read_bytes())
    clock = ManualClock()
    with profile_scenario.opened(f"sqlite:///{path}", clock) as context:
        worker = profile_scenario.Worker(context, "w1")
        book = Book(worker.product)

        def count_many() -> None:
            for _ in range(EVENTS_MAX):
                number = len(book.counted)
                batch = tuple(
                    event(f"e{number}/{each}", each, [OFFER, number % 20], [OFFER, 50 + number % 20, 1, "a.example"])
                    for each in range(3)
                )
                worker.ask(batch)
                book.commit(clock.now_us(), [(fields, "counted") for fields in batch])

        ballast.leave(ROOM_BYTES)
        broken = _refused(count_many)
        broken += book.broken_in(context.store)
        ballast.free()
        more = (event("at last", 1, [OFFER, 50]),)
        worker.ask(more)
        book.commit(clock.now_us(), [(more[0], "counted")])
        return broken + book.broken_in(context.store)


def broken_when_orders_fill_it(directory: Path, template: Path) -> list[str]:
    """Count orders until the disk is full, look, make room, and go on: the laws broken on the way."""
    ballast = Ballast(directory)
    path = directory / "run.db"
    path.write_bytes(template.read_bytes())
    now = order_scenario.NOW
    clock = ManualClock(now * 1_000_000)
    with order_scenario.opened(f"sqlite:///{path}", clock) as context:
        worker = order_scenario.Worker(context, "w1")

        def count_many() -> None:
            for _ in range(EVENTS_MAX):
                number = len(worker.book.counted)
                batch = [
                    order(f"o{number}/{each}", now - each, {"phone_id": f"p{number}", "card_id": "c"}, tariff="x")
                    for each in range(3)
                ]
                worker.book.commit(clock.now_us(), [*zip(batch, worker.ask(batch), strict=True)])

        ballast.leave(10 * ROOM_BYTES)
        broken = _refused(count_many)
        broken += worker.book.broken_in(context.store)
        ballast.free()
        more = order_scenario.ASKED[1]
        worker.book.commit(clock.now_us(), [*zip(more, worker.ask(more), strict=True)])
        return broken + worker.book.broken_in(context.store)


def _refused(work: Callable[[], object]) -> list[str]:
    try:
        work()
    except StoreFull:
        return []
    return ["X1: a full disk took everything"]
