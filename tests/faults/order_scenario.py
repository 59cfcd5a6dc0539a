"""A small run of order statistics on one store: counted by request and from a topic, held, taken back, from history.

It is what the kill sweep kills and the crash states are recorded from; `scenario.py` runs it in a process of its own.
Every step is the same in a run that goes on where another died.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import sqlalchemy as sa

from keyfold.core import outbox
from keyfold.core.clock import ManualClock
from keyfold.core.consumer import ConsumerWorker
from keyfold.core.context import Context
from keyfold.core.errors import Conflict, DataRefused
from keyfold.core.relay import Relay
from keyfold.core.settings import Settings, load
from keyfold.core.store import Transaction
from keyfold.core.tables import MESSAGES
from keyfold.core.topics.topic import Message
from keyfold.core.workers import consumer_named
from keyfold.orders.model import CompletedOrder, Identity
from keyfold.orders.part import PART
from keyfold.orders.service.backfilling import backfill
from keyfold.orders.service.checking import Check, check_orders
from keyfold.orders.service.correcting import correct_orders
from keyfold.orders.service.counting import count_orders
from keyfold.orders.service.identities import add_identity
from keyfold.orders.service.lagging import consumer_name
from keyfold.orders.service.splitting import split, switch
from keyfold.orders.service.unit import opened as units_of
from keyfold.orders.settings import OrdersSettings
from keyfold.orders.worker import Sweep
from tests.faults.killsweep import Inspected, WritePath, shrunk, soundness
from tests.faults.order_ledger import CITY, Book, Listed
from tests.faults.scenario import LEASE_SECONDS, Ack, Order, Say
from tests.orders import DAY, HOUR, iso, order
from tests.orders import NOW as SET_UP

UNIT = "trips"
TOPIC = f"{UNIT}-orders-completed"
DEDUPE_DAYS = 3
START = (SET_UP // HOUR + 2) * HOUR
CARD_START = START + DAY
STARTS: dict[str, int | None] = {"phone_id": START * 1_000_000, "card_id": CARD_START * 1_000_000}
TYPES = list(STARTS)
NOW = START + 2 * DAY

A, B, C = ({"phone_id": f"p{name}", "card_id": f"c{name}"} for name in "abc")
# As history has them; nobody says the city of an order before the switch.
HISTORY = [
    order("h1", START - HOUR, A, tariff="x", city="r"),
    order("h2", START - 1, {"phone_id": "pb"}, tariff="y", city="s"),
    order("both", START + HOUR, A, tariff="x", city="s"),  # live for the phone, history for the card
    order("first", START, B, tariff="x", city="r"),
    order("o1", CARD_START, A, tariff="x", city="r"),
    order("o2", NOW - HOUR, A, tariff="x", city="s"),
    order("o3", NOW - HOUR, C, tariff="y", city="s"),
    order("o4", NOW - HOUR, B, tariff="y", city="r"),
]
BY_ID = {each.order_id: each for each in HISTORY}
LATE = order("late", START - 2 * DAY, A, tariff="x")


def without_city(sent: CompletedOrder) -> CompletedOrder:
    left = {name: value for name, value in sent.properties.items() if name != CITY}
    return msgspec.structs.replace(sent, properties=left)


def _batch(*names: str) -> list[CompletedOrder]:
    return [without_city(BY_ID[name]) for name in names]


# One transaction each. Repeats stand in later batches.
ASKED = (_batch("h1", "both", "first"), [LATE, *_batch("first", "o1", "o2")], _batch("o2", "o4"))
SENT = (_batch("o1", "o3", "h2"), _batch("o4", "both"))
BATCHES = (ASKED[0], ASKED[1], SENT[0], SENT[1], ASKED[2])
SINCE_THE_SWITCH = ("o4",)
TAKEN_BACK = ("o3", "both")


class Worker:
    """Everything one process does for order statistics, each step by hand."""

    def __init__(self, context: Context, name: str, book: Book | None = None) -> None:
        self.context = context
        self.store = context.store
        self.units = units_of(context)
        self.unit = self.units[UNIT]
        self.book = book or Book(self.unit, STARTS)
        self.relay = Relay(context, TOPIC, name)
        self.consumer = ConsumerWorker(context, consumer_named(context, consumer_name(UNIT)), name)

    def ask(self, batch: list[CompletedOrder]) -> list[str]:
        verdicts = self.store.transact(lambda tx: count_orders(tx, self.unit, batch), name="count")
        return [each.status for each in verdicts]

    def put(self, number: int, batch: list[CompletedOrder]) -> None:
        """Put a batch that an earlier run may have put; the same id is refused, and with it the whole batch."""
        messages = [
            Message(key=f"{number}/{at}", version=1, event_time_us=0, schema="order/1", payload=payload)
            for at, payload in enumerate(map(msgspec.json.encode, batch))
        ]
        topics = self.context.topics
        with contextlib.suppress(DataRefused):
            self.store.transact(lambda tx: outbox.put(tx, topics, TOPIC, messages), name="put")

    def hold(self, order_id: str) -> None:
        """A place for an order that is counted later, of which the identities are known."""
        check = Check(
            [Identity(*each) for each in BY_ID[order_id].identities.items()],
            fewer_than=10,
            order_id=order_id,
            reserve_seconds=HOUR,
            allow_incomplete=True,
        )
        self.store.transact(lambda tx: check_orders(tx, self.unit, [check]) and None, name="check")

    def take_back(self, order_id: str) -> None:
        self.store.transact(
            lambda tx: correct_orders(tx, self.unit, [order_id], "refund", "x") and None, name="correct"
        )

    def backfill(self, *, cells_max: int = 10) -> None:
        """Not while a dimension is being added, which a run that died may have begun."""
        with contextlib.suppress(Conflict):
            backfill(self.store, self.unit, self._history(), TYPES, cells_max=cells_max)  # type: ignore[arg-type]

    def add_city(self) -> None:
        if begun := switch(self.store, self.unit, CITY):
            split(self.store, self.unit, begun, self._history(), cells_max=2)  # type: ignore[arg-type]

    def sweep(self) -> None:
        Sweep(self.context, self.units).step()

    def steps(self) -> list[tuple[str, Callable[[], object]]]:
        """All that is done, and whose code it runs."""
        return [
            ("orders", lambda: self.hold("o2")),
            ("orders", lambda: self.ask(ASKED[0])),
            ("orders", lambda: self.ask(ASKED[1])),
            ("ground", lambda: (self.put(0, SENT[0]), self.relay.step())),
            ("orders", self.consumer.step),
            ("orders", lambda: self.take_back(TAKEN_BACK[0])),
            ("orders", lambda: self.backfill(cells_max=1)),
            ("orders", self.sweep),
            ("orders", self.add_city),
            ("orders", lambda: self.take_back(TAKEN_BACK[1])),
            ("orders", lambda: self.hold("o4")),
            ("ground", lambda: (self.put(1, SENT[1]), self.relay.step())),
            ("orders", self.consumer.step),
            ("orders", lambda: self.ask(ASKED[2])),
            ("orders", self.backfill),
        ]

    def stop(self) -> None:
        for each in (self.relay, self.consumer):
            each.stop()

    def _history(self) -> Listed:
        return Listed(HISTORY, self.store.read(self.unit.stood).state.dimensions, self.book)


def run(order: Order, say: Say) -> None:
    """Do the whole scenario, stopping and starting in the middle, and acknowledge each step that has committed."""
    clock = ManualClock(NOW * 1_000_000)
    half = 7
    for part_of_run in (slice(half), slice(half, None)):
        with opened(order.url, clock) as context:
            worker = Worker(context, order.worker)
            for part, step in worker.steps()[part_of_run]:
                say(Ack(part))
                step()
                say(Ack("ground", counts(worker)))
            worker.stop()


def finish(url: str) -> None:
    """Start anew after a crash, when the dead worker's leases have passed: all of it again, in the same order."""
    clock = ManualClock(NOW * 1_000_000)
    clock.advance(10 * LEASE_SECONDS)
    with opened(url, clock) as context:
        worker = Worker(context, "w2")
        for _, step in worker.steps():
            step()


def opened(url: str, clock: ManualClock) -> contextlib.closing[Context]:
    return contextlib.closing(Context.open(settings(url), [PART], clock=clock))


def set_up(url: str) -> None:
    """Make the unit, of which every run finds a copy; the cards come later than the phones."""
    with opened(url, ManualClock(SET_UP * 1_000_000)) as context:
        add_identity(context.store, units_of(context)[UNIT], "card_id", CARD_START * 1_000_000)


def settings(url: str) -> Settings:
    unit = {
        "identities": ["phone_id"],
        "dimensions": ["tariff"],
        "start": iso(START),
        "dedupe_days": DEDUPE_DAYS,
        "keep_days": 3650,
    }
    options = {
        "store.url": url,
        "topics.partitions": 1,
        "leases.lease_seconds": LEASE_SECONDS,
        "orders.units": {UNIT: unit},
    }
    return load(parts={"orders": OrdersSettings}, environ={}, options=options)  # type: ignore[arg-type]


def counts(worker: Worker) -> list[int]:
    """How far the work has come, in numbers that only grow."""
    return worker.store.snapshot(lambda tx: _counts(tx, worker))


def _counts(tx: Transaction, worker: Worker) -> list[int]:
    found = worker.book.look(tx)
    messages = tx.execute(sa.select(MESSAGES.c.position).where(MESSAGES.c.topic == TOPIC)).scalars().all()
    published = [each for each in messages if each is not None]
    dimensions = len(found.state["dimensions"])
    return [len(found.marks), len(found.kept), len(found.corrections), dimensions, len(messages), len(published)]


def inspect(path: Path, told: list[int] | None, at_the_end: bool) -> Inspected:
    """Count the batches whose marks are there, and compare."""
    broken = soundness(path)
    with opened(f"sqlite:///{path}", ManualClock(NOW * 1_000_000)) as context:
        worker = Worker(context, "looking")
        book, found = worker.book, context.store.snapshot(worker.book.look)
        for batch in BATCHES:
            fresh = {each.order_id for each in batch if book.live(each) and each != LATE} - book.counted.keys()
            marked = fresh & found.marks.keys()
            if marked not in (set(), fresh) or (at_the_end and marked != fresh):
                broken.append(f"X1: of the orders {sorted(fresh)}, only {sorted(marked)} are marked")
            if marked:
                book.commit_rightly(NOW * 1_000_000, batch)
        for without in ([], TAKEN_BACK[:1], TAKEN_BACK):
            for kind in TYPES:
                book.told(kind, [each for each in HISTORY if each.order_id not in without])
        book.adopt(found, with_city=SINCE_THE_SWITCH)
        now = counts(worker)
        broken += book.broken_in(context.store) + shrunk(now, told)
        if at_the_end:
            broken += [f"X1: {each} was not taken back" for each in set(TAKEN_BACK) - found.corrections]
            broken += [f"O1: a place is still held for {each}" for each in found.held]
            broken += book.compare_slices(found, HISTORY)
        return Inspected(broken, tuple(now))


ORDERS = WritePath("orders", finish, inspect)
