"""Adding a dimension while everything goes on: old cells are split by history into cells that have it.

From the switch on live orders carry the dimension, so old cells change no more (but for corrections). A cell is split
only where history has exactly as many orders as the cell counts; it goes in the transaction in which its parts come, so
every read sums right. What history cannot explain stays, is told, and the dimension stays pending.
"""

import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial

import msgspec
import sqlalchemy as sa
from msgspec import Struct, structs

from keyfold.core.clock import SECOND_US
from keyfold.core.errors import BadInput, Conflict, Internal
from keyfold.core.store import Store, Transaction, batch
from keyfold.core.store.batch import Columns
from keyfold.core.store.shapes import delete, increment, load, update
from keyfold.orders.model import (
    APPLICATION,
    UNKNOWN,
    IdentityType,
    Part,
    Slice,
    Splitting,
    UnitState,
    kept_by_history,
    moved_of,
)
from keyfold.orders.service.excluding import Excluded, corrected
from keyfold.orders.service.filling import Report, behind, keep_slices, must_not_be_splitting, silent
from keyfold.orders.service.history import History, HistoryCell
from keyfold.orders.service.jobs import Job, Progress, progress_of
from keyfold.orders.service.reading import PARTS
from keyfold.orders.service.unit import DAY_US, Unit
from keyfold.orders.settings import why_not_name
from keyfold.orders.tables import NEVER_FROM_US, NEVER_TO_US

CELLS_MAX = 2_000  # in one transaction
ROWS_MAX = 20_000  # of history, read for one transaction
SHOWN_MAX = 100

Place = tuple[str, int]  # identity, slice
OldCell = tuple[Part, Part]  # live, history


class Unexplained(Struct, frozen=True):
    """A cell that history does not explain: it stays as it is."""

    identity_type: str
    identity_value: str
    properties: Mapping[str, str]
    live_count: int
    live_in_history: int
    history_count: int
    history_in_history: int


class SplitType(Struct):
    """What was done for one identity type. Orders before and after are counted in the same transactions."""

    identity: str
    cells: int = 0
    orders_before: int = 0
    orders_after: int = 0
    left: int = 0

    @property
    def is_conserved(self) -> bool:
        return self.orders_before == self.orders_after


class Split(Struct):
    """What adding a dimension has done so far."""

    dimension: str
    is_done: bool
    types: list[SplitType]
    unexplained: list[Unexplained]  # some of those that are left


def switch(store: Store, unit: Unit, dimension: str, column: str | None = None) -> Splitting | None:
    """Let live orders carry the dimension from now on; None where it has been added already.

    Begun without a column of history, as where all is to be unknown, it may be gone on with by one.
    """
    _must_be_name(unit, dimension)

    def work(tx: Transaction) -> Splitting | None:
        stood = unit.stood(tx)
        state = stood.state
        if state.splitting is not None and state.splitting.dimension == dimension:
            if column is not None and dimension not in state.columns:
                unit.change(tx, stood, structs.replace(state, columns={**state.columns, dimension: column}))
            else:
                _must_be_same_column(state, dimension, column)
            return state.splitting
        must_not_be_splitting(state)
        if dimension in state.dimensions:
            return None
        if why := why_not_name(dimension, [*state.by_name, *state.dimensions]):
            raise BadInput(why)
        _must_be_filled(state)
        _must_not_be_filling(tx, unit)
        # Marks go a day behind the watermark: every order from then on that is counted live has one.
        begun = Splitting(dimension, tx.now_us, stood.late_before_us - DAY_US)
        columns = {**state.columns, **({dimension: column} if column else {})}
        dimensions = [*state.dimensions, dimension]
        unit.change(tx, stood, structs.replace(state, dimensions=dimensions, splitting=begun, columns=columns))
        return begun

    return store.transact(work, name="switch dimension")


def _must_be_same_column(state: UnitState, dimension: str, column: str | None) -> None:
    begun = state.columns.get(dimension)
    if column not in (None, begun):
        raise Conflict(
            f"the dimension {dimension!r} is being added from the column {begun!r}, not {column!r}",
            hint="Go on with that, or let history have the right values in it",
        )


def _must_be_filled(state: UnitState) -> None:
    """A history that is half counted would leave cells that nothing explains, and could not be finished meanwhile."""
    for each in state.identities:
        if each.source == "backfill" and each.filled_at_us is None:
            raise Conflict(
                f"the history of {each.name} has to be counted to its end first",
                hint=f"Run: keyfold orders backfill --identity {each.name}",
            )


def _must_not_be_filling(tx: Transaction, unit: Unit) -> None:
    """A backfill that was stopped half way leaves identities of two histories."""
    for name, progress in sorted(progress_of(tx, unit).items()):
        if name.startswith(("backfill ", "import ")) and not progress.is_done:
            raise Conflict(f"the {name} was not finished", hint=f"Run it to its end: keyfold orders {name.split()[0]}")


def _must_be_name(unit: Unit, dimension: str) -> None:
    if not dimension.isidentifier() or not dimension.isascii() or dimension == APPLICATION or len(dimension) > 63:
        raise BadInput(f"{dimension!r} cannot be the name of a dimension", hint="Use letters, digits and _")


def wait_for_writers(
    store: Store,
    splitting: Splitting,
    sleep: Callable[[float], object] = time.sleep,
    report: Report = silent,
) -> None:
    """Until every transaction that began before the switch has ended. SQLite has one writer: there is none."""
    if store.is_sqlite:
        return
    until_us = splitting.switched_at_us + (store.limits.transaction_seconds_max + 1) * SECOND_US
    while (left_us := until_us - store.read(lambda tx: tx.now_us)) > 0:
        report(0, f"waiting {left_us // SECOND_US + 1} s for writers that began before the switch")
        sleep(min(5.0, left_us / SECOND_US))


def split(
    store: Store,
    unit: Unit,
    splitting: Splitting,
    history: History | None,
    report: Report = silent,
    *,
    rest_as_unknown: bool = False,
    cells_max: int = CELLS_MAX,
) -> Split:
    """Split what there is of old cells; done where nothing is left."""
    if history is not None:
        history.must_be_sound()
    done = Split(splitting.dimension, False, [], [])
    kinds = store.read(unit.stood).state.identities
    # All are taken over before any is split: a mark tells of all types, and has one writer.
    for one in [_Splitter(store, unit, splitting, history, kind, cells_max, rest_as_unknown) for kind in kinds]:
        before = sum(each.cells + each.left for each in done.types)
        done.types.append(one.run(behind(report, before)))
        done.unexplained += one.unexplained[: SHOWN_MAX - len(done.unexplained)]
    if not any(each.left for each in done.types):
        done.is_done = store.transact(lambda tx: _finished(tx, unit, splitting), name="finish dimension")
    return done


def _finished(tx: Transaction, unit: Unit, splitting: Splitting) -> bool:
    """The dimension may be asked for, unless an old cell is there after all."""
    stood = unit.stood(tx)
    if stood.state.splitting != splitting:
        raise Conflict("the dimension was finished, or begun anew, by another run")
    if _next_cells(tx, unit, splitting.dimension, None, None, 1):
        return False
    unit.change(tx, stood, structs.replace(stood.state, splitting=None))
    return True


def old_slices(tx: Transaction, unit: Unit, dimension: str) -> dict[int, Mapping[str, str]]:
    """The slices that lack the dimension."""
    slices = unit.tables.slices
    known = unit.values_of(tx, list(tx.execute(sa.select(slices.c.slice_id)).scalars()))
    return {slice_id: values for slice_id, values in known.items() if dimension not in values}


def cells_to_split(store: Store, unit: Unit, dimension: str) -> int:
    """How many cells lack the dimension."""
    count = sa.select(sa.func.count()).select_from(unit.tables.cells)
    return int(
        store.read(
            lambda tx: tx.execute(count.where(_is_one_of(tx, unit, old_slices(tx, unit, dimension)))).scalar_one()
        )
    )


def _is_one_of(tx: Transaction, unit: Unit, slices: Iterable[int]) -> sa.ColumnElement[bool]:
    listed = batch.relation(tx, unit.tables.slices, {"slice_id": list(slices)}, "old")
    return unit.tables.cells.c.slice_id.in_(sa.select(listed.c.slice_id))


def _next_cells(
    tx: Transaction, unit: Unit, dimension: str, type_id: int | None, after: str | None, limit: int
) -> list[Place]:
    """The next old cells in the order of their identities."""
    cells = unit.tables.cells
    wanted = sa.select(cells.c.identity_value, cells.c.slice_id).where(
        _is_one_of(tx, unit, old_slices(tx, unit, dimension))
    )
    if type_id is not None:
        wanted = wanted.where(cells.c.identity_type == type_id).order_by(cells.c.identity_value, cells.c.slice_id)
    if after is not None:
        wanted = wanted.where(cells.c.identity_value > after)
    return [(row.identity_value, row.slice_id) for row in tx.execute(wanted.limit(limit))]


class _Splitter:
    """Splits the cells of one identity type, a range of identities at a time."""

    def __init__(
        self,
        store: Store,
        unit: Unit,
        splitting: Splitting,
        history: History | None,
        kind: IdentityType,
        cells_max: int,
        rest_as_unknown: bool,
    ) -> None:
        self._store = store
        self._unit = unit
        self._splitting = splitting
        self._history = history
        self._kind = kind
        self._cells_max = cells_max
        self._rest_as_unknown = rest_as_unknown
        self.unexplained: list[Unexplained] = []
        source = history.source if history is not None else ""
        named = f"split {splitting.dimension} {kind.name}"
        self._job = Job.begin(store, unit, named, f"{source} {splitting.dimension} {rest_as_unknown}")

    def run(self, report: Report) -> SplitType:
        job = self._job
        # What is not read to its end is closed here, not whenever Python finds it: another query may run by then.
        with closing(self._read_history(job.progress.after)) as cells:
            stream = _Ranges(cells, ROWS_MAX)
            while identities := self._next_identities(job.progress.after):
                upto, explained = stream.take(identities)
                if self._history is not None:
                    self._history.must_be_same()
                self.unexplained += self._step(upto, explained)
                looked_at = job.progress.numbers["cells"] + job.progress.numbers["left"]
                report(looked_at, f"cells of {self._kind.name} by {self._splitting.dimension}")
        progress = structs.replace(job.progress, is_done=True)
        self._store.transact(lambda tx: job.step(tx, progress), name="split done")
        numbers = progress.numbers
        return SplitType(
            self._kind.name,
            numbers.get("cells", 0),
            numbers.get("orders_before", 0),
            numbers.get("orders_after", 0),
            numbers.get("left", 0),
        )

    def _read_history(self, after: str | None) -> Generator[HistoryCell]:
        if self._history is None:
            return
        marked_from_us = self._splitting.marked_from_us
        with closing(Excluded(self._taken_back())) as without:
            yield from self._history.all_cells(self._kind, after, without, single_from_us=marked_from_us)

    def _taken_back(self) -> Iterator[list[str]]:
        """The orders that were taken back, but for those that the history part counts until its next backfill."""
        kept = kept_by_history(self._splitting.dimension)
        for page in corrected(self._store, self._unit):
            marks = self._store.read(
                partial(load, table=self._unit.tables.marks, keys={"order_id": page}, wanted=("moved",))
            )
            counted = {
                order_id for (order_id,), (moved,) in marks.items() if moved_of(moved).get(self._kind.type_id) == kept
            }
            yield [each for each in page if each not in counted]

    def _next_identities(self, after: str | None) -> list[str]:
        """The next identities that have old cells, in order: as many whole ones as fit into one transaction."""
        found = self._store.read(
            lambda tx: _next_cells(
                tx, self._unit, self._splitting.dimension, self._kind.type_id, after, self._cells_max
            )
        )
        identities = list(dict.fromkeys(identity for identity, _ in found))
        is_cut = len(found) == self._cells_max and len(identities) > 1
        return identities[:-1] if is_cut else identities

    def _step(self, upto: str, explained: Sequence[HistoryCell]) -> list[Unexplained]:
        job, before = self._job, self._job.progress

        def work(tx: Transaction) -> tuple[Progress, list[Unexplained]]:
            if self._unit.stood(tx).state.splitting != self._splitting:
                raise Conflict("the dimension was finished, or begun anew, by another run")
            numbers, left = self._split_range(tx, before.after, upto, explained)
            progress = Progress(before.source, upto, False, before.adding(**numbers))
            job.step(tx, progress)
            return progress, left

        progress, left = self._store.transact(work, name="split", once=True)
        job.stepped(progress)
        return left

    def _split_range(
        self, tx: Transaction, after: str | None, upto: str, explained: Sequence[HistoryCell]
    ) -> tuple[dict[str, int], list[Unexplained]]:
        olds = old_slices(tx, self._unit, self._splitting.dimension)
        cells = self._locked(tx, after, upto, olds)
        pieces, moved = self._pieces(tx, explained)
        gone: list[Place] = []
        live_at: set[Place] = set()
        added: dict[tuple[str, Slice], OldCell] = {}
        left: list[Unexplained] = []
        totals = {"cells": 0, "orders_before": 0, "orders_after": 0, "left": 0}
        for place, cell in sorted(cells.items()):
            parts = pieces.get(place, {})
            is_live, is_history = _is_explained(cell, parts)
            if not (is_live and is_history):
                left.append(self._told(place, cell, parts, olds))
                if not self._rest_as_unknown:
                    continue
                parts = _with_rest(cell, parts, self._slice(olds[place[1]], UNKNOWN))
            gone.append(place)
            if is_live:
                live_at.add(place)
            totals["orders_before"] += cell[0].count + cell[1].count
            for slice_, (live, history) in parts.items():
                # History that no backfill has counted is not in the cell, so it is not moved either.
                counted = history if cell[1].count else _empty()
                here = added.setdefault((place[0], slice_), (_empty(), _empty()))
                here[0].add(live)
                here[1].add(counted)
                totals["orders_after"] += live.count + counted.count
        if totals["orders_before"] != totals["orders_after"]:
            raise Internal(f"{totals['orders_before']} orders would become {totals['orders_after']}")
        self._replace(tx, gone, added)
        self._mark_moved(tx, self._moves(moved, set(gone), live_at, olds))
        totals["cells"] = len(gone)
        totals["left"] = 0 if self._rest_as_unknown else len(left)
        return totals, left

    def _locked(
        self, tx: Transaction, after: str | None, upto: str, olds: Mapping[int, Mapping[str, str]]
    ) -> dict[Place, OldCell]:
        """The old cells of a range, as they are while this transaction holds them: corrections wait."""
        cells = self._unit.tables.cells
        wanted = sa.select(cells.c.identity_value, cells.c.slice_id).where(
            cells.c.identity_type == self._kind.type_id,
            cells.c.identity_value <= upto,
            _is_one_of(tx, self._unit, olds),
        )
        if after is not None:
            wanted = wanted.where(cells.c.identity_value > after)
        places = [(row.identity_value, row.slice_id) for row in tx.execute(wanted)]
        touched: Columns = {
            **self._keys(places),
            "live_count": [0] * len(places),
            "live_from_us": [NEVER_FROM_US] * len(places),
            "live_to_us": [NEVER_TO_US] * len(places),
        }
        held = increment(tx, cells, touched, least=["live_from_us"], greatest=["live_to_us"], returning=PARTS)
        return {(key[1], key[2]): (Part(*row[:3]), Part(*row[3:])) for key, row in held.items()}

    def _pieces(
        self, tx: Transaction, explained: Sequence[HistoryCell]
    ) -> tuple[dict[Place, dict[Slice, OldCell]], dict[str, tuple[Place, int]]]:
        """What history says of each old cell, by the slice that its orders go to; and where marked orders go."""
        assert self._history is not None or not explained
        single = [each.order_id for each in explained if each.order_id]
        counted = self._places_of(tx, single)
        pieces: dict[Place, dict[Slice, OldCell]] = {}
        moved: dict[str, tuple[Place, int]] = {}
        for each in explained:
            values = dict(zip(self._history.dimensions if self._history else (), each.values, strict=True))
            target = self._unit.slice_of(values)
            old = {name: value for name, value in values.items() if name != self._splitting.dimension}
            place = (each.identity, self._unit.slice_of(old).slice_id)
            if each.order_id and counted.get(each.order_id) != place:
                continue
            here = pieces.setdefault(place, {}).setdefault(target, (_empty(), _empty()))
            here[0 if each.is_live else 1].add(Part(each.count, each.from_us, each.to_us))
            if each.order_id:
                moved[each.order_id] = (place, target.slice_id)
        return pieces, moved

    def _places_of(self, tx: Transaction, order_ids: Sequence[str]) -> dict[str, Place]:
        """The cell in which each of the orders counts for this identity type; nothing of those that do not.

        Marks say which: history may have given an order another identity since, or one where it had none.
        """
        wanted = ("slice_id", "moved", "identities", "is_corrected")
        marks = load(tx, self._unit.tables.marks, {"order_id": order_ids}, wanted)
        type_id, decode = self._kind.type_id, msgspec.json.Decoder(dict[int, str]).decode
        return {
            order_id: (identity, int(moved_of(moved).get(type_id) or slice_id))
            for (order_id,), (slice_id, moved, identities, is_corrected) in marks.items()
            if not is_corrected and (identity := decode(identities).get(type_id)) is not None
        }

    def _replace(self, tx: Transaction, gone: Sequence[Place], added: Mapping[tuple[str, Slice], OldCell]) -> None:
        if not gone:
            return
        cells = self._unit.tables.cells
        delete(tx, cells, self._keys(gone))
        fresh = {key: parts for key, parts in added.items() if parts[0].count or parts[1].count}
        if not fresh:
            return
        keep_slices(tx, self._unit, [slice_ for _, slice_ in fresh])
        increment(
            tx,
            cells,
            {
                **self._keys([(identity, slice_.slice_id) for identity, slice_ in fresh]),
                "live_count": [live.count for live, _ in fresh.values()],
                "live_from_us": [live.from_us for live, _ in fresh.values()],
                "live_to_us": [live.to_us for live, _ in fresh.values()],
                "history_count": [history.count for _, history in fresh.values()],
                "history_from_us": [history.from_us for _, history in fresh.values()],
                "history_to_us": [history.to_us for _, history in fresh.values()],
            },
            least=["live_from_us", "history_from_us"],
            greatest=["live_to_us", "history_to_us"],
        )

    def _moves(
        self,
        moved: Mapping[str, tuple[Place, int]],
        gone: Collection[Place],
        live_at: Collection[Place],
        olds: Mapping[int, Mapping[str, str]],
    ) -> dict[str, int]:
        """Where orders have gone: as history says, or, where that does not suffice, to what is called unknown."""
        return {
            order_id: target if place in live_at else self._slice(olds[place[1]], UNKNOWN).slice_id
            for order_id, (place, target) in moved.items()
            if place in gone
        }

    def _mark_moved(self, tx: Transaction, moved: Mapping[str, int]) -> None:
        """Remember where orders went, so that they can still be taken back."""
        if not moved:
            return
        found = load(tx, self._unit.tables.marks, {"order_id": sorted(moved)}, ("moved",))
        rows = [
            (order_id, msgspec.json.encode({**moved_of(before), self._kind.type_id: moved[order_id]}).decode())
            for (order_id,), (before,) in found.items()
        ]
        columns = dict(zip(("order_id", "moved"), zip(*rows, strict=True), strict=True))
        update(tx, self._unit.tables.marks, columns)

    def _slice(self, old: Mapping[str, str], value: str) -> Slice:
        """The slice of old values with the new one; its values stand in the order of the unit's dimensions."""
        return self._unit.slice_of({**old, self._splitting.dimension: value})

    def _told(
        self,
        place: Place,
        cell: OldCell,
        parts: Mapping[Slice, OldCell],
        olds: Mapping[int, Mapping[str, str]],
    ) -> Unexplained:
        return Unexplained(
            identity_type=self._kind.name,
            identity_value=place[0],
            properties=olds[place[1]],
            live_count=cell[0].count,
            live_in_history=sum(live.count for live, _ in parts.values()),
            history_count=cell[1].count,
            history_in_history=sum(history.count for _, history in parts.values()),
        )

    def _keys(self, places: Iterable[Place]) -> dict[str, list[object]]:
        listed = list(places)
        return {
            "identity_type": [self._kind.type_id] * len(listed),
            "identity_value": [identity for identity, _ in listed],
            "slice_id": [slice_id for _, slice_id in listed],
        }


class _Ranges:
    """A stream of cells in the order of their identities, taken range by range."""

    def __init__(self, cells: Iterator[HistoryCell], rows_max: int) -> None:
        self._cells = cells
        self._rows_max = rows_max
        self._next: HistoryCell | None = next(cells, None)

    def take(self, identities: Sequence[str]) -> tuple[str, list[HistoryCell]]:
        """What history has of the identities, which are in order, up to the one that makes too many rows; and that one.

        Of an identity all is taken. What lies between them is passed over.
        """
        wanted, taken = set(identities), list[HistoryCell]()
        while self._next is not None and self._next.identity <= identities[-1]:
            if len(taken) >= self._rows_max and self._next.identity != taken[-1].identity:
                return taken[-1].identity, taken
            if self._next.identity in wanted:
                taken.append(self._next)
            self._next = next(self._cells, None)
        return identities[-1], taken


def _empty() -> Part:
    return Part(0, NEVER_FROM_US, NEVER_TO_US)


def _is_explained(cell: OldCell, parts: Mapping[Slice, OldCell]) -> tuple[bool, bool]:
    """Whether history has as many orders as the live and the history part; of one not counted nothing is asked."""
    live = sum(one.count for one, _ in parts.values())
    history = sum(two.count for _, two in parts.values())
    return cell[0].count == live, cell[1].count in (0, history)


def _with_rest(cell: OldCell, parts: Mapping[Slice, OldCell], unknown: Slice) -> dict[Slice, OldCell]:
    """A cell by the slices its orders go to: a part that is not explained to the unknown one, and it alone."""
    is_live, is_history = _is_explained(cell, parts)
    found = {
        slice_: (live if is_live else _empty(), history if is_history else _empty())
        for slice_, (live, history) in parts.items()
    }
    here = found.get(unknown, (_empty(), _empty()))
    found[unknown] = (here[0] if is_live else cell[0], here[1] if is_history else cell[1])
    return found
