"""A seeded simulator of order statistics: workers of the topic, requests, sweeps, history, stopped around commits.

Orders come twice, in any order, by topic and by request, late, from before the start, and as another thing under a
known id. Places are held, orders taken back, history is counted by two at once, and a dimension is added meanwhile;
the clock jumps over the window, and back. A `Book` is told of every commit.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import msgspec

from keyfold.core import outbox
from keyfold.core.clock import SECOND_US, ManualClock
from keyfold.core.errors import Conflict, LeaseLost
from keyfold.core.relay import Relay
from keyfold.core.store import Store, Transaction
from keyfold.core.topics.topic import Message
from keyfold.orders import worker
from keyfold.orders.model import CompletedOrder, Identity
from keyfold.orders.part import PART
from keyfold.orders.service import counting
from keyfold.orders.service.backfilling import backfill
from keyfold.orders.service.checking import Check, check_orders
from keyfold.orders.service.correcting import correct_orders
from keyfold.orders.service.counting import Verdict
from keyfold.orders.service.splitting import split, switch
from keyfold.orders.service.unit import Unit
from keyfold.orders.service.unit import opened as units_of
from keyfold.orders.worker import Sweep
from tests.faults.log_stage import DAY, LogStage
from tests.faults.order_ledger import CITY, Book, Found, Listed
from tests.faults.order_scenario import (
    CARD_START,
    DEDUPE_DAYS,
    START,
    STARTS,
    TOPIC,
    TYPES,
    UNIT,
    settings,
    without_city,
)
from tests.orders import HOUR, order

BACK_SECONDS_MAX = 2 * DAY
LEASING = ("log", "relay")
PEOPLE = ("a", "b")


class OrderSimulation(LogStage[CompletedOrder]):
    """Orders of two people, who share a card."""

    steps = 160
    look_every_steps = 40
    test = "test_order_simulator.py"
    part = PART
    log_topic = relayed_topic = TOPIC
    outside = (TOPIC,)
    sent_max, batches_max, sweeper_rests = 14, 5, 2

    book: Book

    def __init__(self, seed: int, template: Path, directory: Path) -> None:
        super().__init__(seed, template, directory, settings, ManualClock((CARD_START + 3 * HOUR) * SECOND_US))
        self._unit = self._unit_of_a_process()
        self._consumer = worker._consumer(self._unit)
        self.book = Book(self._unit, STARTS)
        # What history has; what is sent of it, which may lack the city.
        self._made: list[CompletedOrder] = []
        self._bodies: list[CompletedOrder] = []

    # The run ----------------------------------------------------------------------------------------------------------

    def _kinds(self) -> Sequence[str]:
        return (
            "log",
            "log",
            "asker0",
            "asker1",
            "sender",
            "relay",
            "relay",
            "sweeper",
            "historian",
            "historian",
            "operator",
        )

    def _own_bodies(self) -> Mapping[str, Callable[[], None]]:
        return {"historian": self._keep_history, "operator": self._operate}

    def _one_step(self) -> None:
        draw = self.chance.random()
        if draw < 0.04:
            self._crash(self.chance.choice(self._actors))
        elif draw < 0.07:
            leasing = [actor for actor in self._actors if actor.kind in LEASING]
            self._sleep(self.chance.choice([each for each in leasing if self._is_at_work(each)] or leasing))
        elif draw < 0.11:
            self._move_clock(self.chance.choice((1, HOUR, DAY / 2, DAY, DAY, 2 * DAY)))
        elif draw < 0.12 and self._back_seconds < BACK_SECONDS_MAX:
            self._move_clock(-BACK_SECONDS_MAX / 2)
        elif draw < 0.14:
            self._rewind()
        else:
            self._anybodys_turn()

    def _run_dry(self) -> None:
        paused = self._all_but_paused_die("log")
        self._send_and_ask_the_rest(self._caller())
        relay_last = Relay(self._context(), TOPIC, "last")
        self._tame(relay_last)
        while relay_last.step():
            pass
        self._read_to_the_end(paused)
        self._finish_history()
        self._age((DEDUPE_DAYS + 3) * DAY)
        self._asking["asker0"] = list(self._bodies)
        self._ask("asker0", self._caller())

    def _finish_history(self) -> None:
        """All of history, and what it cannot explain is called unknown."""
        unit = self._unit_of_a_process()
        if not self.book.has_switched:
            backfill(self._store, unit, self._history(unit, len(self._made)), TYPES)  # type: ignore[arg-type]
        if begun := switch(self._store, unit, CITY):
            history = self._history(unit, len(self._made))
            if not split(self._store, unit, begun, history).is_done:  # type: ignore[arg-type]
                before = self._store.snapshot(self.book.look)
                done = split(self._store, unit, begun, history, rest_as_unknown=True)  # type: ignore[arg-type]
                self.book.split(done, self._made, before)
                if not done.is_done:
                    raise self._violated(["O5: the dimension cannot be added, all cells were split"])
        self._correct(unit)
        backfill(self._store, unit, self._history(unit, len(self._made)), TYPES)  # type: ignore[arg-type]

    def _age(self, seconds: float) -> None:
        self._move_clock(seconds)
        sweep = self._sweep()
        sweep.step()
        self._move_clock(self._store.limits.transaction_seconds_max + 2)  # whoever saw an older watermark has ended
        while sweep.step():
            pass

    def _sweep(self) -> Sweep:
        context = self._context()
        return Sweep(context, units_of(context))

    # The actors -------------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        """Put an order in the topic, or in its outbox; poison now and then."""
        poisoned = self.faulty and self.chance.random() < 0.05
        payload = b"{}" if poisoned else msgspec.json.encode(self._item())
        message = Message(key=f"{self._sent}", version=1, event_time_us=0, schema="order/1", payload=payload)
        self._sent += 1
        if self.chance.random() < 0.45:
            self._outside[TOPIC].logs[self.chance.randrange(self.partitions)].append(message)
            return
        self._store.transact(lambda tx: outbox.put(tx, self._topics, TOPIC, [message]), name="put")

    def _caller(self) -> Callable[[Sequence[CompletedOrder]], Mapping[str, str]]:
        unit = self._unit_of_a_process()

        def count(batch: Sequence[CompletedOrder]) -> Mapping[str, str]:
            verdicts = self._store.transact(lambda tx: counting.count_orders(tx, unit, batch), name="count")
            return {each.order_id: each.status for each in verdicts if each.status in ("accepted", "duplicate")}

        return count

    def _keep_history(self) -> None:
        """Count history, as much of it as there is, or add the dimension; another may be at it too."""
        unit = self._unit_of_a_process()
        while True:
            self.pause("resting")
            with contextlib.suppress(Conflict, LeaseLost):
                if self.chance.random() < 0.3:
                    self._add_city(unit)
                else:
                    upto = self.chance.randint(len(self._made) // 2, len(self._made))
                    backfill(self._store, unit, self._history(unit, upto), TYPES, cells_max=1)  # type: ignore[arg-type]

    def _add_city(self, unit: Unit) -> None:
        if begun := switch(self._store, unit, CITY):
            history = self._history(unit, len(self._made))
            split(self._store, unit, begun, history, cells_max=1)  # type: ignore[arg-type]

    def _operate(self) -> None:
        unit = self._unit_of_a_process()
        while True:
            self.pause("looking")
            self.chance.choice((self._redrive, lambda: self._correct(unit), lambda: self._check(unit)))()

    def _correct(self, unit: Unit) -> None:
        if self._made:
            chosen = self.chance.sample(self._made, min(2, len(self._made)))
            ids = [each.order_id for each in chosen]
            self._store.transact(lambda tx: correct_orders(tx, unit, ids, "refund", "operator"), name="correct")

    def _check(self, unit: Unit) -> None:
        """Ask for a place for the next order, or for one that is under way."""
        chance = self.chance
        check = Check(
            [Identity("phone_id", chance.choice(PEOPLE)), Identity("card_id", "c")][: chance.randint(1, 2)],
            fewer_than=chance.randint(1, 5),
            order_id=f"o{chance.randint(max(0, len(self._made) - 3), len(self._made))}",
            reserve_seconds=chance.choice((60, DAY)),
            allow_incomplete=True,
        )
        self._store.transact(lambda tx: (check, check_orders(tx, unit, [check])[0], Found(tx, unit)), name="check")

    def _item(self) -> CompletedOrder:
        """An order: a new one, one that came before, or another thing under an id that was counted or left."""
        chance = self.chance
        draw = chance.random()
        if self._made and draw < 0.3:
            return chance.choice(self._bodies)
        if self.book.counted and draw < 0.36:
            return _otherwise(chance.choice(list(self.book.counted.values())), draw < 0.33)
        if self.book.left and draw < 0.39:
            known = chance.choice(list(self.book.left.values()))
            return msgspec.structs.replace(known, created_at=self._new_order().created_at)
        made = self._new_order()
        body = made if self.book.has_switched and chance.random() < 0.7 else without_city(made)
        self._made.append(made)
        self._bodies.append(body)
        return body

    def _new_order(self) -> CompletedOrder:
        # Whole hours, so that orders are also created exactly at a start, and at the edge of the window.
        chance, now = self.chance, self._clock.now_us() // SECOND_US // HOUR * HOUR
        edges = [each for each in (START, CARD_START, now - DEDUPE_DAYS * DAY) if each <= now]
        created = chance.choice((*edges, *(now - hours * HOUR for hours in (0, 0, 1, 24, 26, 60, 75, 200))))
        identities = {"phone_id": chance.choice(PEOPLE), "card_id": "c"}
        if chance.random() < 0.3:
            del identities[chance.choice(TYPES)]
        values = {"tariff": chance.choice("xy"), CITY: chance.choice("rs")}
        return order(f"o{len(self._made)}", created, identities, **values)

    def _unit_of_a_process(self) -> Unit:
        return units_of(self._context())[UNIT]

    def _history(self, unit: Unit, upto: int) -> Listed:
        return Listed(self._made[:upto], Store.read(self._store, unit.stood).state.dimensions, self.book)

    # What is looked at ------------------------------------------------------------------------------------------------

    def _broken_besides(self, found: Found, at_the_end: bool) -> list[str]:
        if not at_the_end:
            return []
        settled = {*self.book.counted, *(order_id for order_id, _ in self.book.kept)}
        lost = [each.order_id for each in self._made if each.order_id not in settled]
        broken = [f"X1: {each} was sent and nobody said a word" for each in lost]
        broken += self.book.compare_slices(found, self._made)
        return broken + [f"O2: the mark of {each} was never purged" for each in found.marks]

    def _spies(self) -> contextlib.AbstractContextManager[None]:
        """Hear what is said of every order."""
        count_orders = counting.count_orders

        def watch_count(tx: Transaction, unit: Unit, orders: Sequence[CompletedOrder]) -> list[Verdict]:
            verdicts = count_orders(tx, unit, orders)
            said = [(order, str(verdict.status)) for order, verdict in zip(orders, verdicts, strict=True)]
            self._said.append((tx, said))
            return verdicts

        return self._heard([(counting, "count_orders", watch_count), (worker, "count_orders", watch_count)])

    def _committed(self, name: str, tx: Transaction, result: object) -> None:
        super()._committed(name, tx, result)
        self.book.latest_us = max(self.book.latest_us, tx.now_us)
        if name == "orders watermark":
            self.book.move_watermark(tx.now_us)
        elif name == "switch dimension" and result is not None:
            self.book.switch()
        elif name == "finish dimension" and result is True:
            self.book.is_splitting = False
        elif name == "correct":
            self.book.correct(result)  # type: ignore[arg-type]
        elif name == "check":
            self.book.check(*result)  # type: ignore[misc]


def _otherwise(known: CompletedOrder, earlier: bool) -> CompletedOrder:
    """Another thing under a known id, never younger than it: its mark may be gone when it is late itself."""
    if earlier:
        return msgspec.structs.replace(known, created_at=known.created_at - timedelta(hours=1))
    return msgspec.structs.replace(known, properties={"tariff": "z"})
