"""A unit as it is set up here: its settings, its tables, its state in the store, and the slices it has seen."""

import threading
import time
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec
import sqlalchemy as sa
from msgspec import structs

from keyfold.core.clock import SECOND_US
from keyfold.core.context import Context
from keyfold.core.errors import Internal, LostRace, NotFound, SettingsWrong
from keyfold.core.settings import Settings
from keyfold.core.store import Store, Transaction
from keyfold.core.store.batch import Columns
from keyfold.core.store.shapes import compare_and_set, insert_new, load
from keyfold.core.times import iso, moment_us
from keyfold.core.topics.topic import TopicSpec
from keyfold.orders import hooks
from keyfold.orders.model import (
    CompletedOrder,
    IdentityType,
    LeftOut,
    NotPlaced,
    Property,
    Slice,
    UnitState,
    View,
    checked,
    slice_of,
)
from keyfold.orders.settings import OrdersSettings, UnitSettings
from keyfold.orders.tables import UnitTables, tables_of

DAY_US = 86_400 * SECOND_US
STATE = "unit"
# Who reads counts may go by a state that is this old: what a type or a dimension is called does not change. Whether
# history is complete does, so evidence and checks go by the state of their moment.
SEEN_US_MAX = SECOND_US
VIEWS_MAX = 64


class Stood(msgspec.Struct, frozen=True):
    """The state of a unit as one transaction saw it."""

    state: UnitState
    version: int
    late_before_us: int


class Unit:
    """One business whose orders are counted apart from all others."""

    def __init__(self, name: str, settings: UnitSettings) -> None:
        self.name = name
        self.settings = settings
        self.tables: UnitTables = tables_of(name)
        self.hooks = hooks.load(settings.hooks, f"orders.units.{name}.hooks")
        self.topic = topic_of(name, settings)
        self.any_reservation = f"SELECT 1 FROM {self.tables.reservations.name} LIMIT 1"  # noqa: S608
        self._guard = threading.Lock()
        self._slices: dict[int, Mapping[str, str]] = {}  # those that are committed
        self._views: dict[tuple[tuple[Property, ...], tuple[str, ...]], View] = {}
        self._by_values: dict[tuple[str, ...], Slice] = {}
        self._seen: tuple[int, Stood] | None = None
        self._seen_at = 0.0  # by the clock of this process, which only goes ahead

    # The state ----------------------------------------------------------------------------------------------------

    def stood(self, tx: Transaction) -> Stood:
        """The state as this transaction sees it; it may have changed it itself, so nothing of it is remembered."""
        found = load(tx, self.tables.state, {"name": [STATE]}, ("version", "body", "late_before_us"))
        if not found:
            raise Internal(f"the unit {self.name} has no state")
        ((version, body, late_before_us),) = found.values()
        seen = self._seen
        if seen is not None and seen[1].version == version and seen[1].late_before_us == late_before_us:
            return seen[1]
        return Stood(msgspec.json.decode(body, type=UnitState), version, late_before_us)

    def seen(self, tx: Transaction) -> Stood:
        """The state for a reader: of this moment, or of a second ago."""
        seen = self._seen
        if seen is not None and 0 <= tx.now_us - seen[0] < SEEN_US_MAX:
            return seen[1]
        asked_at = time.monotonic()
        stood = self.stood(tx)
        self._seen, self._seen_at = (tx.now_us, stood), asked_at
        return stood

    def remembered(self) -> UnitState | None:
        """The state that a reader saw within the last second, if one did."""
        seen = self._seen
        is_fresh = time.monotonic() - self._seen_at < SEEN_US_MAX / SECOND_US
        return seen[1].state if seen is not None and is_fresh else None

    def change(self, tx: Transaction, stood: Stood, state: UnitState) -> None:
        """Store a changed state; whoever changed it meanwhile makes this transaction run again."""
        compare_and_set(
            tx,
            self.tables.state,
            {
                "name": [STATE],
                "version": [stood.version],
                "body": [msgspec.json.encode(state).decode()],
            },
        )
        self._seen = None

    def hold(self, tx: Transaction, stood: Stood) -> None:
        """Let nobody change the state until this transaction has ended; others may hold it as well.

        Whoever changes the state afterwards then sees all that was written by it. SQLite has one writer at a time.
        """
        if tx.is_sqlite:
            return
        held = tx.rows(f"SELECT version FROM {self.tables.state.name} WHERE name = %s FOR SHARE", (STATE,))  # noqa: S608
        if held != [(stood.version,)]:
            raise LostRace(f"the state of the unit {self.name} has changed")

    def late_before_us(self, stood: Stood, now_us: int) -> int:
        """Orders created before this are late: by the stored watermark, which marks are purged by, and by the clock."""
        return max(stood.late_before_us, now_us - self.settings.dedupe_days * DAY_US)

    # The hook -----------------------------------------------------------------------------------------------------

    def hooked(self, state: UnitState, sent: CompletedOrder) -> CompletedOrder:
        """The order as the hook of the unit wants it counted; a hook that fails concerns this order, and no other.

        Its id and its moment stay: by them repeats are known, and live counting and history tell who counts it.
        """
        if self.hooks.completed is None:
            return sent
        try:
            order = self.hooks.completed(_copied(sent))
            if order is not None:
                # As it could have been sent: what is no text in UTF-8 fails here, and not in the batch.
                order = msgspec.json.decode(msgspec.json.encode(order), type=CompletedOrder)
                checked(order, state, self.settings.application_brands, 2**62, 0, "the order of the hook")
        except Exception as error:
            raise NotPlaced(f"the hook of the unit failed: {type(error).__name__}: {error}") from error
        if order is None:
            raise LeftOut("the hook of the unit left it out")
        for name in ("order_id", "created_at"):
            if getattr(order, name) != getattr(sent, name):
                raise NotPlaced(f"the hook of the unit failed: it changed {name}")
        return order

    def counted_as(self, state: UnitState, sent: CompletedOrder) -> CompletedOrder | None:
        """An order as history has it: none that the hook leaves out, as it was sent where the hook fails."""
        try:
            return self.hooked(state, sent)
        except LeftOut:
            return None
        except NotPlaced:
            return sent

    # Slices -------------------------------------------------------------------------------------------------------

    def slice_of(self, values: Mapping[str, str]) -> Slice:
        key = tuple([each for pair in values.items() for each in pair])
        found = self._by_values.get(key)
        if found is None:
            if len(self._by_values) > 2 * self.settings.slices_max:
                self._by_values.clear()
            found = self._by_values[key] = slice_of(values)
        return found

    def keep_slices(self, tx: Transaction, wanted: Collection[Slice]) -> None:
        """Store slices that are not stored yet."""
        fresh = {each.slice_id: each for each in wanted if each.slice_id not in self._slices}
        if not fresh:
            return
        known = self._load_slices(tx, list(fresh))
        for slice_id, text in known.items():
            if text != fresh[slice_id].text:
                raise Internal(f"two slices have one id: {text} and {fresh[slice_id].text}")
        new = [each for each in fresh.values() if each.slice_id not in known]
        if new:
            rows: Columns = {
                "slice_id": [each.slice_id for each in new],
                "dimension_values": [each.text for each in new],
            }
            insert_new(tx, self.tables.slices, rows)
        tx.after_commit.append(lambda: self._slices.update({each.slice_id: each.values for each in fresh.values()}))

    def without_room(self, tx: Transaction, wanted: Collection[Slice]) -> set[int]:
        """Values come from outside: their combinations are bounded, or they would fill the store."""
        fresh = {each.slice_id for each in wanted if each.slice_id not in self._slices}
        if not fresh or not (unknown := fresh - set(self._load_slices(tx, list(fresh)))):
            return set()
        count = tx.execute(sa.select(sa.func.count()).select_from(self.tables.slices)).scalar_one()
        return set(sorted(unknown)[max(0, self.settings.slices_max - count) :])

    def values_of(self, tx: Transaction, slice_ids: Collection[int]) -> Mapping[int, Mapping[str, str]]:
        """The dimension values of slices; they never change."""
        if unknown := [each for each in set(slice_ids) if each not in self._slices]:
            decode = msgspec.json.Decoder(dict[str, str]).decode
            with self._guard:
                self._slices.update({each: decode(text) for each, text in self._load_slices(tx, unknown).items()})
        return self._slices

    def known_values(self, slice_ids: Collection[int]) -> Mapping[int, Mapping[str, str]] | None:
        """The same without a look into the store; None where a slice is not known here yet."""
        return self._slices if all(each in self._slices for each in slice_ids) else None

    def view(self, filters: Sequence[Property], group_by: Sequence[str]) -> View:
        """How queries with these filters and groups see slices. They come from outside, so few are remembered."""
        key = (tuple(filters), tuple(group_by))
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= VIEWS_MAX:
                self._views.clear()
            found = self._views[key] = View(filters, group_by)
        return found

    def _load_slices(self, tx: Transaction, slice_ids: Sequence[int]) -> dict[int, str]:
        found = load(tx, self.tables.slices, {"slice_id": slice_ids}, ("dimension_values",))
        return {slice_id: text for (slice_id,), (text,) in found.items()}


def _copied(sent: CompletedOrder) -> CompletedOrder:
    """The same order, for a hook to change as it likes: what was sent is compared with repeats, and hooked again."""
    return structs.replace(sent, identities=dict(sent.identities), properties=dict(sent.properties))


class Units:
    """The units of one product."""

    def __init__(self, units: Mapping[str, Unit]) -> None:
        self._units = dict(units)

    def __getitem__(self, name: str) -> Unit:
        if name not in self._units:
            raise NotFound(f"there is no unit {name!r}")
        return self._units[name]

    def __iter__(self) -> Iterator[Unit]:
        return iter(self._units.values())


def topic_of(name: str, settings: UnitSettings) -> str:
    return settings.topic or f"{name}-orders-completed"


def section(settings: Settings) -> OrdersSettings:
    return settings.section("orders", OrdersSettings)


def topics(settings: Settings) -> list[TopicSpec]:
    return [
        TopicSpec(topic_of(name, unit), f"completed orders of {name}: {{order_id, created_at, identities, properties}}")
        for name, unit in section(settings).units.items()
    ]


def tables(settings: Settings) -> list[sa.Table]:
    return [each for name in section(settings).units for each in tables_of(name).all]


def opened(context: Context) -> Units:
    """The units of this product; one that is new to the store is registered with what its settings say."""
    units = _opened.get(context)
    if units is None:
        given = section(context.settings).units
        units = Units({name: Unit(name, settings) for name, settings in given.items()})
        for name, settings in given.items():
            _register(context.store, units[name], settings)
        _opened[context] = units
    return units


def _register(store: Store, unit: Unit, settings: UnitSettings) -> None:
    def work(tx: Transaction) -> None:
        if load(tx, unit.tables.state, {"name": [STATE]}, ()):
            return
        start_us = _start_us(unit, settings.start, tx.now_us)
        named = enumerate(settings.identities, 1)
        types = [IdentityType(name, number, start_us, taken_back=0) for number, name in named]
        state = UnitState(types, list(settings.dimensions))
        row: Columns = {
            "name": [STATE],
            "version": [1],
            "body": [msgspec.json.encode(state).decode()],
            "late_before_us": [0],
        }
        insert_new(tx, unit.tables.state, row)

    if not store.read(lambda tx: load(tx, unit.tables.state, {"name": [STATE]}, ())):
        store.transact(work, name="register unit")
    _must_agree(unit, settings, store.read(unit.stood).state)


def _start_us(unit: Unit, start: str, now_us: int) -> int | None:
    if not start:
        return None
    start_us = moment_us(start, now_us)
    must_lie_ahead(unit, start_us, now_us, f"orders.units.{unit.name}.start")
    return start_us


def must_lie_ahead(unit: Unit, start_us: int, now_us: int, place: str) -> None:
    """Whoever counts right now must not know less than an order that was created after the start."""
    lead = unit.settings.start_lead_seconds_min
    if start_us < now_us + lead * SECOND_US:
        raise SettingsWrong(
            f"a start must lie at least {lead} seconds ahead of now, which is {iso(now_us)}", place=place
        )


def _must_agree(unit: Unit, settings: UnitSettings, state: UnitState) -> None:
    """What the settings name and the store does not have is added by a command, never by a restart."""
    place = f"orders.units.{unit.name}"
    known = {each.name: each for each in state.identities}
    for name in settings.identities:
        if name not in known:
            raise SettingsWrong(
                f"the identity type {name!r} is new to the store",
                place=f"{place}.identities",
                hint=f"Run without it: keyfold orders add-identity {name} --unit {unit.name}",
            )
    for name in settings.dimensions:
        if name not in state.dimensions:
            raise SettingsWrong(
                f"the dimension {name!r} is new to the store",
                place=f"{place}.dimensions",
                hint=f"Run without it: keyfold orders add-dimension {name} --unit {unit.name} --from TABLE.COLUMN",
            )
    first = state.identities[0]  # the settings may name one before it that was added with a start of its own
    if settings.start and first.start_us != moment_us(settings.start, 0):
        has = "none" if first.start_us is None else iso(first.start_us)
        raise SettingsWrong(f"the start cannot change: the store has {has}", place=f"{place}.start")


_opened: "weakref.WeakKeyDictionary[Context, Units]" = weakref.WeakKeyDictionary()
