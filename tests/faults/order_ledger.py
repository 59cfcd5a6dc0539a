"""What order statistics must be after a fault: the accepted orders, recounted by hand and slowly.

A `Book` is told of every commit, in order: which orders were given and what was said of each, what was taken back and
held. It recounts, and compares a store with that. Each broken law is a sentence that begins with its invariant.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import sqlalchemy as sa

from keyfold.core.errors import KeyfoldError
from keyfold.core.store import Store, Transaction
from keyfold.core.tables import AUDIT
from keyfold.orders.model import CompletedOrder, IdentityType, UnitState, micros
from keyfold.orders.service.checking import Check, Checked
from keyfold.orders.service.correcting import Corrected
from keyfold.orders.service.excluding import ORDER_ID, Excluded
from keyfold.orders.service.history import HistoryCell
from keyfold.orders.service.reading import is_complete
from keyfold.orders.service.splitting import Split
from keyfold.orders.service.unit import Unit
from tests.orders import DAY

UNKNOWN = "unknown"
CITY = "city"  # the dimension that is added
DAY_US = DAY * 1_000_000

Values = tuple[tuple[str, str], ...]
Whose = tuple[str, str]  # identity type, identity value
Place = tuple[str, str, Values]
Span = tuple[int, int]


class Listed:
    """A table of history in memory, as whoever reads the Parquet files would be given it."""

    def __init__(self, orders: Sequence[CompletedOrder], dimensions: Sequence[str], book: "Book") -> None:
        self.source = f"{len(orders)} orders"
        self.is_fixed = True
        self.dimensions = list(dimensions)
        self._orders = list(orders)
        self._book = book

    def must_be_sound(self) -> None:
        assert len({each.order_id for each in self._orders}) == len(self._orders)

    def cut_us(self, start_us: int) -> int | None:
        """Its times are those of the orders themselves."""
        return None

    def column_of(self, name: str) -> str:
        return name

    def must_be_same(self) -> None:
        """It is a list of its own."""

    def cells(self, kind: IdentityType, after: str | None, without: Excluded) -> Iterator[HistoryCell]:
        orders = self._of(kind, after, without)
        yield from self._grouped(kind, [each for each in orders if not kind.takes(micros(each.created_at))])

    def cells_of(self, kind: IdentityType, identities: Sequence[str], without: Excluded) -> Iterator[HistoryCell]:
        return (each for each in self.cells(kind, None, without) if each.identity in identities)

    def identities_of(
        self, kind: IdentityType, excluded: Excluded, before: Excluded, after: str | None, limit: int
    ) -> list[str]:
        wanted = _ids(excluded) - _ids(before)
        found = {each.identities.get(kind.name, "") for each in self._orders if each.order_id in wanted}
        return sorted(each for each in found if each > (after or ""))[:limit]

    def all_cells(
        self, kind: IdentityType, after: str | None, without: Excluded, *, single_from_us: int
    ) -> Iterator[HistoryCell]:
        orders = self._of(kind, after, without)
        live = [each for each in orders if kind.takes(micros(each.created_at))]
        single = [each for each in live if micros(each.created_at) >= single_from_us]
        found = [*self._grouped(kind, [each for each in orders if each not in live])]
        found += self._grouped(kind, [each for each in live if each not in single], is_live=True)
        for each in single:
            found += self._grouped(kind, [each], order_id=each.order_id, is_live=True)
        yield from sorted(found, key=lambda each: each.identity)

    def lacking(self, kind: IdentityType, order_ids: Sequence[str]) -> list[str]:
        there = [each for each in self._orders if kind.name in each.identities]
        return sorted(set(order_ids) - {each.order_id for each in there if not kind.takes(micros(each.created_at))})

    def _of(self, kind: IdentityType, after: str | None, without: Excluded) -> list[CompletedOrder]:
        gone = _ids(without)
        left = [each for each in self._orders if each.order_id not in gone]
        self._book.told(kind.name, left)
        return [each for each in left if kind.name in each.identities and each.identities[kind.name] > (after or "")]

    def _grouped(
        self, kind: IdentityType, orders: Sequence[CompletedOrder], *, order_id: str = "", is_live: bool = False
    ) -> Iterator[HistoryCell]:
        groups: dict[tuple[str, tuple[str, ...]], list[int]] = defaultdict(list)
        for each in orders:
            values = tuple(each.properties.get(name, UNKNOWN) for name in self.dimensions)
            groups[each.identities[kind.name], values].append(micros(each.created_at))
        for (identity, values), created in sorted(groups.items()):
            yield HistoryCell(identity, values, len(created), min(created), max(created), order_id, is_live)


def _ids(excluded: Excluded) -> set[str]:
    return set(excluded.files().to_table()[ORDER_ID].to_pylist())


class Cell(NamedTuple):
    whose: Whose
    values: dict[str, str]
    live: int
    live_span: Span
    history: int
    history_span: Span


class Found:
    """What a store holds of a unit at one moment."""

    def __init__(self, tx: Transaction, unit: Unit) -> None:
        tables = unit.tables
        self.now_us = tx.now_us
        state = tx.execute(sa.select(tables.state)).one()
        self.watermark = state.late_before_us
        self.state = msgspec.json.decode(state.body)
        names = {each["type_id"]: each["name"] for each in self.state["identities"]}
        slices = tx.execute(sa.select(tables.slices))
        values = {row.slice_id: msgspec.json.decode(row.dimension_values) for row in slices}
        self.cells = [
            Cell(
                (names[row.identity_type], row.identity_value),
                values[row.slice_id],
                row.live_count,
                (row.live_from_us, row.live_to_us),
                row.history_count,
                (row.history_from_us, row.history_to_us),
            )
            for row in tx.execute(sa.select(tables.cells))
        ]
        self.marks = {row.order_id: row.created_at_us for row in tx.execute(sa.select(tables.marks))}
        kept = tx.execute(sa.select(tables.kept)).all()
        self.kept = {(row.order_id, row.why) for row in kept}
        decode = msgspec.json.Decoder(CompletedOrder).decode
        self.left = [decode(row.body) for row in kept if row.why == "before_start"]
        self.corrections = {row.order_id for row in tx.execute(sa.select(tables.corrections))}
        self.held = {
            (row.order_id, (names[row.identity_type], row.identity_value)): row.expires_at_us
            for row in tx.execute(sa.select(tables.reservations))
        }
        acts = tx.execute(sa.select(AUDIT.c.detail).where(AUDIT.c.act == "order taken back")).scalars()
        self.audited = sorted(each.partition(":")[0].rpartition(" ")[2] for each in acts)

    def history(self) -> dict[Whose, Counter[Values]]:
        """The history part of every identity, without the dimension that is added."""
        found: dict[Whose, Counter[Values]] = defaultdict(Counter)
        for cell in self.cells:
            if cell.history:
                found[cell.whose][_values(cell.values, CITY)] += cell.history
        return found

    def history_of(self, whose: Whose) -> int:
        return sum(cell.history for cell in self.cells if cell.whose == whose)


class Book:
    """Every order that was accepted, and what follows from that."""

    def __init__(self, unit: Unit, starts: Mapping[str, int | None]) -> None:
        self._unit = unit
        self._starts = starts  # by identity type, in microseconds
        self._dedupe_us = unit.settings.dedupe_days * DAY_US
        self._watermark = 0
        self._told: dict[str, list[dict[str, Counter[Values]]]] = {name: [] for name in starts}
        self._held: dict[tuple[str, Whose], int] = {}
        self._with_city: set[str] = set()  # counted since the switch
        self._unexplained: set[Place] = set()
        self.has_switched = False
        self.is_splitting = False
        self.latest_us = 0  # the latest that any clock showed
        self._marked_from_us = 0  # at the switch: live orders from here on have a mark
        self.counted: dict[str, CompletedOrder] = {}
        self.corrected: set[str] = set()
        self.kept: set[tuple[str, str]] = set()
        self._late: dict[str, CompletedOrder] = {}
        self.left: dict[str, CompletedOrder] = {}  # to history, by some of its identities at least
        self.broken: list[str] = []

    # What happens -----------------------------------------------------------------------------------------------------

    def commit(self, now_us: int, given: Sequence[tuple[CompletedOrder, str]]) -> None:
        """A transaction has committed in which these orders were given, with what was said of each."""
        for order, status in given:
            right = self._right(order, now_us)
            if status != right:
                self.broken.append(f"{_law(right)}: {order.order_id} is said to be {status}, it is {right}")
            if status == "late":
                self.kept.add((order.order_id, "late"))
                self._late.setdefault(order.order_id, order)
            elif status != "conflict" and len(self.live(order)) < len(order.identities):
                self.kept.add((order.order_id, "before_start"))
                self.left.setdefault(order.order_id, order)
            if status == "accepted":
                self.counted.setdefault(order.order_id, order)
                self._with_city |= {order.order_id} if self.has_switched else set()
                self._held = {key: until for key, until in self._held.items() if key[0] != order.order_id}

    def commit_rightly(self, now_us: int, orders: Sequence[CompletedOrder]) -> None:
        """These were given, and nobody heard what was said."""
        for each in orders:
            self.commit(now_us, [(each, self._right(each, now_us))])

    def adopt(self, found: Found, *, with_city: Sequence[str] = ()) -> None:
        """Take over what a dead run has done beside counting, as far as one cannot tell when it did."""
        self._watermark = found.watermark
        self.corrected = found.corrections & self.counted.keys()
        self.has_switched = CITY in found.state["dimensions"]
        self._with_city = set(with_city)
        self._held = {key: until for key, until in found.held.items() if key[0] not in self.counted}

    def correct(self, given: Sequence[Corrected]) -> None:
        for order_id, status in [(each.order_id, each.status) for each in given]:
            known = self.counted.get(order_id)
            if status == "corrected" and (known is None or order_id in self.corrected):
                self.broken.append(f"X2: {order_id} was taken back, and was not counted, or taken back before")
            if status == "corrected before" and order_id not in self.corrected:
                self.broken.append(f"X1: {order_id} is said to be taken back before, nobody did")
            if status == "not known" and known is not None and micros(known.created_at) >= self._watermark:
                self.broken.append(f"X1: {order_id} was counted and is not known")
            self.corrected |= {order_id} if status == "corrected" else set()

    def check(self, check: Check, answer: Checked | KeyfoldError, found: Found) -> None:
        """What was answered to whoever wants a place, and what was there then."""
        if isinstance(answer, KeyfoldError):
            if check.order_id not in self.counted:
                self.broken.append(f"X1: {check.order_id} is said to be counted: {answer}")
            return
        live = self._by_identity()
        sums = []
        for each in answer.identities:
            whose = (each.identity.type, each.identity.value)
            count = live[whose] + found.history_of(whose)
            held = [until for (id_, who), until in self._held.items() if who == whose and id_ != check.order_id]
            least = sum(until > self.latest_us for until in held)
            most = sum(until > found.now_us for until in held)
            if each.counter_value != count or not least <= each.reserved <= most:
                self.broken.append(
                    f"O1: {whose} is checked as {each.counter_value} and {each.reserved}, it is {count}, {least}-{most}"
                )
            sums.append(count + least)
        if answer.allowed and max(sums) >= (check.fewer_than or 0):
            self.broken.append(f"O1: {check.order_id} got a place, and there are {sums} of {check.fewer_than}")
        if answer.allowed and check.order_id is not None:
            until = found.now_us + check.reserve_seconds * 1_000_000
            for each in answer.identities:
                key = (check.order_id, (each.identity.type, each.identity.value))
                self._held[key] = max(until, self._held.get(key, 0))

    def move_watermark(self, now_us: int) -> None:
        """It stands still while a dimension is being added."""
        if not self.is_splitting:
            self._watermark = max(self._watermark, (now_us // DAY_US) * DAY_US - self._dedupe_us)

    def switch(self) -> None:
        if not self.has_switched:
            self.has_switched = self.is_splitting = True
            self._marked_from_us = self._watermark - DAY_US

    def told(self, kind: str, orders: Sequence[CompletedOrder]) -> None:
        """History was read: this is what an identity may have from now on."""
        by_identity: dict[str, Counter[Values]] = defaultdict(Counter)
        for each in orders:
            if kind in each.identities and not self._is_live(kind, each):
                by_identity[each.identities[kind]][_values_of(each)] += 1
        if by_identity not in self._told[kind]:
            self._told[kind].append(by_identity)

    def split(self, done: Split, made: Sequence[CompletedOrder], found: Found) -> None:
        """What a split by all orders could not explain has a reason.

        Something there was late, or came in spite of that when the clock had gone back; or the history part is of
        another history.
        """
        history, parts = self._history_by_place(made), found.history()
        for each in done.unexplained:
            place = (each.identity_type, each.identity_value, _values(each.properties, CITY))
            self._unexplained.add(place)
            whose, there = place[:2], [order for order in made if _is_at(order, place)]
            never = [
                order
                for order in there
                if self._is_live(whose[0], order)
                and order.order_id not in self.corrected
                and micros(order.created_at) < self._marked_from_us
                and (order.order_id not in self.counted or order.order_id in self._with_city)
            ]
            if not never and parts.get(whose, Counter())[place[2]] == len(history[place]):
                self.broken.append(f"O5: history explains {place}, and it was not split")

    # What must be -----------------------------------------------------------------------------------------------------

    def live(self, order: CompletedOrder) -> dict[str, str]:
        return {name: value for name, value in order.identities.items() if self._is_live(name, order)}

    def look(self, tx: Transaction) -> Found:
        return Found(tx, self._unit)

    def broken_in(self, store: Store) -> list[str]:
        return self.broken + self.compare(store.snapshot(self.look))

    def compare(self, found: Found) -> list[str]:
        return [
            *self._marks(found),
            *self._live_cells(found),
            *self._spans(found),
            *self._history_cells(found),
            *self._complete(found),
            *self._rest(found),
        ]

    def compare_slices(self, found: Found, made: Sequence[CompletedOrder]) -> list[str]:
        """At the end, when history was counted whole and the dimension added: every cell, with its city."""
        cities = {each.order_id: each.properties.get(CITY, UNKNOWN) for each in made}
        live = Counter(
            (*whose, self._full(each, (*whose, _values_of(each)), cities))
            for each in self._alive()
            for whose in self.live(each).items()
        )
        there = Counter[Place]()
        history: dict[Place, tuple[int, Span]] = {}
        for cell in found.cells:
            place = (*cell.whose, _values(cell.values))
            there[place] += cell.live
            if cell.history:
                history[place] = (cell.history, cell.history_span)
        created = self._history_by_place(made, city=True)
        right = {place: (len(each), (min(each), max(each))) for place, each in created.items()}
        broken = _differences("O5: the live part", there, live) + _differences("O3: the history of", history, right)
        if found.state["splitting"]:
            broken.append("O5: the dimension is still being added")
        return broken

    def _right(self, order: CompletedOrder, now_us: int) -> str:
        known = self.counted.get(order.order_id, self.left.get(order.order_id, order))
        if micros(order.created_at) < self._late_before(now_us):
            return "late" if self._late.get(order.order_id, order) == order else "conflict"
        if known != order:
            return "conflict"
        if not self.live(order):
            return "before_start"
        return "duplicate" if order.order_id in self.counted else "accepted"

    def _late_before(self, now_us: int) -> int:
        return max(self._watermark, now_us - self._dedupe_us)

    def _is_live(self, kind: str, order: CompletedOrder) -> bool:
        start_us = self._starts[kind]
        return start_us is None or micros(order.created_at) >= start_us

    def _alive(self) -> list[CompletedOrder]:
        return [each for order_id, each in self.counted.items() if order_id not in self.corrected]

    def _by_identity(self) -> Counter[Whose]:
        return Counter(whose for each in self._alive() for whose in self.live(each).items())

    def _full(self, order: CompletedOrder, place: Place, cities: Mapping[str, str]) -> Values:
        """The values of an order where it is counted, the city with them."""
        if order.order_id in self._with_city:
            city = order.properties.get(CITY, UNKNOWN)
        else:
            city = UNKNOWN if place in self._unexplained else cities[order.order_id]
        return _values({**dict(place[2]), CITY: city})

    def _history_by_place(self, made: Sequence[CompletedOrder], *, city: bool = False) -> dict[Place, list[int]]:
        """When the orders of each cell were created that history must count."""
        found: dict[Place, list[int]] = defaultdict(list)
        for each in made:
            values = dict(_values_of(each)) | ({CITY: each.properties[CITY]} if city else {})
            for name, value in each.identities.items():
                if each.order_id not in self.corrected and not self._is_live(name, each):
                    found[name, value, _values(values)].append(micros(each.created_at))
        return found

    def _marks(self, found: Found) -> list[str]:
        """O2, O4: marked is what was counted, until a day behind the watermark, which only grows."""
        broken = [f"O2: {each} is marked and was never counted" for each in found.marks.keys() - self.counted.keys()]
        for order_id, each in self.counted.items():
            if order_id not in found.marks and micros(each.created_at) >= self._watermark - DAY_US:
                broken.append(f"O2: {order_id} was counted and is not marked")
        if found.watermark != self._watermark:
            broken.append(f"O4: the watermark is {found.watermark}, it was {self._watermark}")
        return broken

    def _live_cells(self, found: Found) -> list[str]:
        """O1, O5: without the dimension that is added, whatever it has come to."""
        right = Counter((*whose, _values_of(each)) for each in self._alive() for whose in self.live(each).items())
        there = Counter[Place]()
        for cell in found.cells:
            there[(*cell.whose, _values(cell.values, CITY))] += cell.live
        return _differences("O1:", there, right)

    def _spans(self, found: Found) -> list[str]:
        """O3, for identities of which nothing was taken back."""
        moments: dict[Whose, list[int]] = defaultdict(list)
        spoilt = set()
        for each in self.counted.values():
            for whose in self.live(each).items():
                moments[whose].append(micros(each.created_at))
                spoilt |= {whose} if each.order_id in self.corrected else set()
        broken = []
        for whose, created in moments.items():
            spans = [cell.live_span for cell in found.cells if cell.whose == whose and cell.live]
            there = (min(first for first, _ in spans), max(last for _, last in spans)) if spans else None
            if whose not in spoilt and there != (min(created), max(created)):
                broken.append(f"O3: {whose} is counted from and to {there}, it is {min(created)}, {max(created)}")
        return broken

    def _history_cells(self, found: Found) -> list[str]:
        """O1: an identity has all of what some reading of history said of it, and nothing else."""
        return [
            f"O1: the history of {kind} {value} is {dict(there)}, which no history says"
            for (kind, value), there in found.history().items()
            if not any(told.get(value) == there for told in self._told[kind])
        ]

    def _complete(self, found: Found) -> list[str]:
        """O1: where history is said to be complete, it counts every order that was left to it."""
        history = found.history()
        complete = [each.name for each in msgspec.convert(found.state, UnitState).identities if is_complete(each)]
        left = Counter(
            (name, each.identities[name], _values_of(each))
            for each in found.left
            for name in complete
            if name in each.identities and not self._is_live(name, each) and each.order_id not in self.corrected
        )
        return [
            f"O1: the history of {place} is complete with {history.get(place[:2], Counter())[place[2]]} of {count}"
            for place, count in left.items()
            if history.get(place[:2], Counter())[place[2]] < count
        ]

    def _rest(self, found: Found) -> list[str]:
        broken = []
        if found.kept != self.kept:
            broken.append(f"O4: kept are {sorted(found.kept)}, it should be {sorted(self.kept)}")
        if found.corrections != self.corrected or found.audited != sorted(self.corrected):
            broken.append(f"X1: {sorted(found.corrections)} are taken back, it should be {sorted(self.corrected)}")
        least = {key: until for key, until in self._held.items() if until > self.latest_us}
        if not least.items() <= found.held.items() or not found.held.items() <= self._held.items():
            broken.append(f"O1: held are {found.held}, it should be {least}")
        return broken


def _is_at(order: CompletedOrder, place: Place) -> bool:
    return order.identities.get(place[0]) == place[1] and _values_of(order) == place[2]


def _values_of(order: CompletedOrder) -> Values:
    """Without the dimension that is added."""
    return (("tariff", order.properties.get("tariff", UNKNOWN)),)


def _values(values: Mapping[str, str], without: str = "") -> Values:
    return tuple(sorted((name, value) for name, value in values.items() if name != without))


def _differences(what: str, there: Mapping[Place, object], right: Mapping[Place, object]) -> list[str]:
    return [
        f"{what} {place} has {there.get(place)}, it is {right.get(place)}"
        for place in sorted({*there, *right})
        if (there.get(place) or 0) != (right.get(place) or 0)
    ]


def _law(right: str) -> str:
    return {"late": "O4", "before_start": "O2"}.get(right, "X2")
