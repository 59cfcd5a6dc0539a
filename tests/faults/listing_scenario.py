"""A small run of listings on one store: sold by hand, edited, judged, aged, fed, put into other presets, and exported.

It is what the kill sweep kills and the crash states are recorded from; `scenario.py` runs it in a process of its own.
Every step looks first whether an earlier run has done it, or is harmless when it comes again.
"""

import contextlib
import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from keyfold.core import outbox
from keyfold.core.clock import ManualClock
from keyfold.core.consumer import ConsumerWorker
from keyfold.core.context import Context
from keyfold.core.errors import Conflict, DataRefused
from keyfold.core.relay import Relay
from keyfold.core.settings import Settings, load
from keyfold.core.topics.topic import Message
from keyfold.listings import model, worker
from keyfold.listings.model import Price, offer_id_of
from keyfold.listings.part import PART
from keyfold.listings.service import drafting, offers, presets, saving, walking
from keyfold.listings.service.drafting import Filled, Opening, Publishing
from keyfold.listings.service.feeds import reporting, staging, sweeping, tasks
from keyfold.listings.service.listings import Listings
from keyfold.listings.service.offers import Edit, Move
from keyfold.listings.settings import ListingsSettings
from keyfold.listings.worker import Scheduler
from tests.faults.killsweep import Inspected, WritePath, shrunk, soundness
from tests.faults.listing_ledger import DAY_US, Book, Found
from tests.faults.listing_simulator import PRESETS, anyone, feed_line
from tests.faults.scenario import LEASE_SECONDS, Ack, Order, Say
from tests.faults.stage import patched
from tests.listings import CAR

OFFERS, REQUESTS, OPINIONS = "offers", "photo-requests", "moderation-opinions"
SHARDS = 2
SOLD = {"7": 2, "8": 1}  # how many offers each seller makes by hand
URL = "https://photos.example.com/1.jpg"
FEEDS: dict[int, tuple[str, ...]] = {1: ("a", "b", "c"), 2: ("b", "d")}
FED = "7"
BANNED_VERSIONS = {1: True, 2: False, 3: True}


class Worker:
    """Everything one process does for listings, each step by hand."""

    def __init__(self, context: Context, name: str, clock: ManualClock) -> None:
        self.context = context
        self.store = context.store
        self.clock = clock
        self.book = Book(shards=SHARDS)
        self.listings = Listings.opened(context)
        self.scheduler = Scheduler(context, self.listings, name)
        self.opinions = ConsumerWorker(context, worker.consumers(context)[0], name)
        self.relays = [Relay(context, topic, name) for topic in (OPINIONS, OFFERS, REQUESTS)]

    def found(self) -> Found:
        return self.store.snapshot(self.book.look)

    def do(self, verb: Callable[..., Any], *given: Any) -> Any:
        return self.store.transact(lambda tx: verb(tx, self.listings, *given), name=f"listings {verb.__name__}")

    def sell(self, seller: str, number: int) -> None:
        by_hand = _by_hand(self.found())
        if by_hand[seller] >= number:
            return
        draft = self.do(drafting.open_drafts, Opening(seller_id=seller, category="cars"))
        if not draft.filled.content:
            filled = Filled(category="cars", content=dict(CAR), price=Price(number, "EUR"))
            draft = self.do(drafting.fill, seller, draft.draft_id, draft.version, filled)
        self.do(drafting.publish, [Publishing(owner_id=seller, draft_id=draft.draft_id, version=draft.version)])

    def edit(self) -> None:
        filled = Filled(category="cars", content={**CAR, "year": 2001}, price=Price(7, "EUR"), photos=(URL,))
        for offer_id, seller in sorted(self.found().ids.items()):
            saved = self.store.read(lambda tx, offer_id=offer_id: saving.load_by_id(tx, [offer_id]))[offer_id]  # type: ignore[misc]
            if not saved.offer.external_id and seller == "7":
                self.do(offers.edit, [Edit(offer_id=offer_id, version=saved.version, filled=filled, may_see=anyone)])

    def move(self, seller: str, status: Any) -> None:
        """The first offer of a seller; where it is not possible any more, an earlier run has done it."""
        first = sorted(offer_id for offer_id, owner in self.found().ids.items() if owner == seller)[0]
        self.do(offers.move, [Move(offer_id=first, status=status, may_see=anyone)])

    def judge(self) -> None:
        """All opinions of one offer, put into the topic at once, and applied from it."""
        first = min(offer_id for offer_id, owner in self.found().ids.items() if owner == "8")
        messages = [
            Message(
                key=first,
                version=version,
                event_time_us=0,
                schema="opinion/1",
                payload=msgspec.json.encode({"offer_id": first, "version": version, "is_banned": is_banned}),
            )
            for version, is_banned in BANNED_VERSIONS.items()
        ]
        with contextlib.suppress(DataRefused):  # an earlier run has put them
            self.store.transact(lambda tx: outbox.put(tx, self.context.topics, OPINIONS, messages), name="put")
        self.relays[0].step()
        while self.opinions.step():
            pass

    def feed(self, task_id: int) -> None:
        lines = [feed_line(name, task_id, is_valid=True) for name in FEEDS[task_id]]
        with contextlib.suppress(Conflict):  # a newer one has ended
            staging.take_lines(self.store, self.listings, FED, task_id, 0, lines)
            self.do(tasks.end_task, FED, task_id, len(lines))

    def approve(self) -> None:
        for (seller, task_id), task in self.found().tasks.items():
            if task.stage == "held":
                self.do(tasks.approve, seller, task_id, "x")

    def schedule(self) -> None:
        for _ in range(2):
            self.clock.advance(LEASE_SECONDS / 2)
            while self.scheduler.step():
                pass
            self.approve()

    def change_presets(self) -> None:
        chosen = msgspec.structs.replace(self.listings.settings, presets=PRESETS[1])
        self.store.transact(lambda tx: presets.adopt(tx, chosen), name="listings presets")
        self.clock.advance(1_000)

    def relay(self) -> None:
        for relay in self.relays:
            relay.step()

    def steps(self) -> list[tuple[str, Callable[[], object]]]:
        """All that is done, and whose code it runs."""
        return [
            *(
                ("listings", lambda seller=seller, number=number: self.sell(seller, number))  # type: ignore[misc]
                for seller, most in SOLD.items()
                for number in range(1, most + 1)
            ),
            ("listings", self.edit),
            ("listings", self.judge),
            ("ground", self.relay),
            ("listings", lambda: self.feed(1)),
            ("listings", self.schedule),
            ("listings", lambda: self.move("7", "sold")),
            ("listings", lambda: self.feed(2)),
            ("listings", self.schedule),
            ("listings", self.change_presets),
            ("listings", self.schedule),
            ("listings", lambda: self.clock.advance(61 * DAY_US / 1_000_000)),
            ("listings", self.schedule),
            ("ground", self.relay),
        ]

    def stop(self) -> None:
        self.scheduler.stop()
        self.opinions.stop()
        for relay in self.relays:
            relay.stop()


RESTART = 7


def run(order: Order, say: Say) -> None:
    """Do the whole scenario, stopping and starting in the middle, and acknowledge each step that has committed."""
    clock = ManualClock()
    with alike(order.worker, clock):
        for part_of_run in (slice(RESTART), slice(RESTART, None)):
            with opened(order.url, clock) as context:
                worker = Worker(context, order.worker, clock)
                for part, step in worker.steps()[part_of_run]:
                    say(Ack(part))
                    step()
                    say(Ack("ground", counts(worker.found())))
                worker.stop()


def finish(url: str) -> None:
    """Start anew after a crash, when the dead worker's leases have passed: all that is left, in the same order."""
    clock = ManualClock()
    clock.advance(100 * 86_400)
    with alike("w2", clock), opened(url, clock) as context:
        worker = Worker(context, "w2", clock)
        for _, step in worker.steps():
            step()


@contextlib.contextmanager
def alike(worker_name: str, clock: ManualClock) -> Iterator[None]:
    """Names, ids and rows of counters are the same in every run, so that a call can be found again; few shards."""
    numbers = itertools.count()

    def digest() -> str:
        return hashlib.md5(f"{worker_name}/{next(numbers)}".encode(), usedforsecurity=False).hexdigest()

    time = SimpleNamespace(monotonic=lambda: clock.now_us() / 1_000_000)
    with patched(
        [
            *((place, "SHARDS", SHARDS) for place in (model, worker, walking, sweeping, reporting)),
            (worker, "time", time),
            (saving, "random", SimpleNamespace(randrange=lambda _: next(numbers) % 3)),
            (drafting, "secrets", SimpleNamespace(token_hex=lambda _: digest())),
            (Listings, "new_offer_id", lambda _: offer_id_of(int(digest(), 16) % 10**15)),
        ]
    ):
        yield


def opened(url: str, clock: ManualClock) -> contextlib.closing[Context]:
    return contextlib.closing(Context.open(settings(url), [PART], clock=clock))


def settings(url: str) -> Settings:
    options = {
        "store.url": url,
        "topics.partitions": 1,
        "leases.lease_seconds": LEASE_SECONDS,
        "listings.feed_days": 365,
        "listings.draft_days": 365,
        "listings.presets": msgspec.to_builtins(PRESETS[0]),
    }
    return load(parts={"listings": ListingsSettings}, environ={}, options=options)  # type: ignore[arg-type]


def counts(found: Found) -> list[int]:
    """How far the work has come, in numbers that only grow."""
    told = [each for messages in (*found.messages.values(), *found.requests.values()) for each in messages]
    return [
        len(told),
        sum(each.place is not None for each in told),
        len(found.ids),
        sum(bool(draft.offer_id) for draft in found.drafts.values()),
        sum(task_id or 0 for task_id in found.ended.values()),
    ]


def _by_hand(found: Found) -> Counter[str]:
    return Counter(seller for offer_id, seller in found.ids.items() if not found.history(offer_id)[0]["external_id"])


def inspect(path: Path, told: list[int] | None, at_the_end: bool) -> Inspected:
    """What is told says what must be there; at the end every offer was made once, and the last feed is done."""
    broken = soundness(path)
    clock = ManualClock()
    with opened(f"sqlite:///{path}", clock) as context:
        book = Book(shards=SHARDS)
        found = context.store.snapshot(book.look)
        book.feeds = {
            (FED, task_id): dict.fromkeys(names, True)
            for task_id, names in FEEDS.items()
            if task_id <= (found.ended.get(FED) or 0)
        }
        broken += book.compare(found) + shrunk(counts(found), told)
        if at_the_end:
            broken += book.ends(found, 0)
            if (made := _by_hand(found)) != SOLD:
                broken.append(f"X2: by hand were made {made}, not {SOLD}")
            if (last := found.tasks.get((FED, max(FEEDS)))) is None or last.stage != "done":
                broken.append(f"G5: the last feed is {last}")
        return Inspected(broken, found.fingerprint())


LISTINGS = WritePath("listings", finish, inspect)
