"""Backfill: the history part of every cell from a table of historical orders, while live orders keep arriving.

It takes exactly the orders created before the start of an identity type, live counting exactly the others: neither can
count what the other does. Each step sets some identities whole and commits how far it came, so it can be stopped
anywhere and run again at any time, also when history has caught up.
"""

from collections.abc import Sequence
from contextlib import closing
from functools import partial

import msgspec
import sqlalchemy as sa
from msgspec import Struct, structs

from keyfold.core.errors import BadInput, Conflict, Internal
from keyfold.core.store import Store, Transaction
from keyfold.core.store.shapes import load
from keyfold.core.times import iso
from keyfold.orders.model import IdentityType
from keyfold.orders.service.excluding import Excluded, corrected
from keyfold.orders.service.filling import (
    Filled,
    Report,
    behind,
    claim,
    claimable,
    finish,
    history_part,
    left_to_history,
    look_anew,
    must_have_dimensions,
    set_cells,
    set_identities,
    silent,
    vanished,
    whole_identities,
)
from keyfold.orders.service.history import History, HistoryCell
from keyfold.orders.service.jobs import Job, Progress
from keyfold.orders.service.unit import Unit

CELLS_MAX = 10_000  # in one transaction
IDENTITIES_MAX = 1_000  # of orders that were taken back, set anew in one transaction
CUT_MAX = 10_000  # orders at the one moment that the start would be in a history of coarse times
LOOKS_MAX = 5  # while orders that are left to history keep arriving
SHOWN_MAX = 100


class Backfilled(Struct, frozen=True):
    """What the backfill of an identity type has set."""

    identity: str
    orders: int  # in the history part of all cells
    cells: int
    steps: int
    lacking: int  # orders that arrived live, were left to history, and are not in it
    lacking_orders: list[str]  # some of them
    is_behind: bool  # more were left to history meanwhile, and nobody knows whether they are in it


def backfill(
    store: Store,
    unit: Unit,
    history: History,
    names: Sequence[str],
    report: Report = silent,
    *,
    cells_max: int = CELLS_MAX,
) -> list[Backfilled]:
    """Fill the history part of identity types, one after the other."""
    history.must_be_sound()
    _must_tell_sides(store, unit, history, store.read(lambda tx: claimable(tx, unit, names, "backfill")))
    kinds = claim(store, unit, names, "backfill")
    done: list[Backfilled] = []
    for kind in kinds:
        tell = behind(report, sum(each.orders for each in done))
        with closing(_Filler(store, unit, history, kind, tell, cells_max)) as filler:
            done.append(filler.run())
    return done


def _must_tell_sides(store: Store, unit: Unit, history: History, kinds: Sequence[IdentityType]) -> None:
    """Refuse times that are cut to a unit within which a type starts, where an order at the cut has counted live."""
    cuts_us = {start_us: history.cut_us(start_us) for start_us in {kind.start_us or 0 for kind in kinds}}
    wrong = []
    for kind in kinds:
        cut_us = cuts_us[kind.start_us or 0]
        if cut_us is None:
            continue
        ids = history.ids_at(kind, cut_us, CUT_MAX + 1)
        is_too_coarse = len(ids) > CUT_MAX
        counted = ids if is_too_coarse else store.read(partial(_counted_live, unit=unit, kind=kind, order_ids=ids))
        if counted:
            many = f"more than {CUT_MAX}" if is_too_coarse else f"{len(counted)}"
            wrong.append(f"{many} orders with {kind.name} that counted live have the time {iso(cut_us)}")
    if wrong:
        raise BadInput(
            f"{'; '.join(wrong)}: history has no finer times, and would count them before the start once more",
            place="history",
            hint="Write their times as live orders have them",
        )


def _counted_live(tx: Transaction, unit: Unit, kind: IdentityType, order_ids: Sequence[str]) -> list[str]:
    """Those that are known to have counted for an identity type from its start on."""
    marks = load(tx, unit.tables.marks, {"order_id": order_ids}, ("created_at_us", "identities"))
    decode = msgspec.json.Decoder(dict[int, str]).decode
    return [
        order_id
        for (order_id,), (created_at_us, identities) in marks.items()
        if kind.takes(created_at_us) and kind.type_id in decode(identities)
    ]


def orders_to_count(history: History, kinds: Sequence[IdentityType]) -> int:
    """How many orders a backfill of identity types has to count, each once for each type."""
    return sum(history.count_before_start(kind) for kind in kinds)


class _Filler:
    """Fills the history part of one identity type, some identities at a time."""

    def __init__(
        self, store: Store, unit: Unit, history: History, kind: IdentityType, report: Report, cells_max: int
    ) -> None:
        self._store = store
        self._unit = unit
        self._history = history
        self._kind = kind
        self._report = report
        self._cells_max = cells_max
        self._started_at_us = store.read(lambda tx: tx.now_us)
        self._taken_back = self._number_of_taken_back()
        read = f"{history.source} {','.join(history.dimensions)} {kind.start_us} {self._taken_back}"
        self._job = Job.begin(store, unit, f"backfill {kind.name}", read)
        self._without = self._excluded()

    def close(self) -> None:
        self._without.close()

    def run(self) -> Backfilled:
        # Before it is read: what it gains meanwhile is not counted, so it must be called lacking.
        lacking = self._looked_through()
        steps = self._set_all()
        if not self._history.is_fixed:
            lacking |= self._lacking()
        self._empty([], None)
        for look in range(1, LOOKS_MAX + 1):
            self._history.must_be_same()
            is_known = self._end(len(lacking), is_last=look == LOOKS_MAX)
            if self._job.progress.is_done:
                break
            self._leave_out_more()
            if self._history.is_fixed:
                lacking = self._looked_through()
        numbers = self._job.progress.numbers
        return Backfilled(
            identity=self._kind.name,
            orders=numbers.get("orders", 0),
            cells=numbers.get("cells", 0),
            steps=steps,
            lacking=len(lacking),
            lacking_orders=sorted(lacking)[:SHOWN_MAX],
            is_behind=not is_known,
        )

    def _must_be_named_alike(self, tx: Transaction) -> None:
        """A dimension that was added meanwhile, or another column, makes what was read of history worthless."""
        must_have_dimensions(tx, self._unit, self._history.dimensions)
        name = self._kind.name
        read = self._history.column_of(name)
        if self._unit.stood(tx).state.columns.get(name, read) != read:
            raise Conflict(f"another column was named for {name} meanwhile", hint="Run it again")

    def _number_of_taken_back(self) -> int:
        """The number that every order of its history raises that is taken back."""
        return self._store.read(self._unit.stood).state.by_name[self._kind.name].taken_back

    def _excluded(self) -> Excluded:
        """What was taken back when the number was read, and perhaps since: then it has changed, and that is seen."""
        return Excluded(corrected(self._store, self._unit) if self._taken_back else ())

    def _looked_through(self) -> set[str]:
        """The orders that history lacks of those left to it so far; whoever leaves one from now on says so."""

        def work(tx: Transaction) -> None:
            self._job.step(tx, self._job.progress)
            look_anew(tx, self._unit, self._kind)

        self._store.transact(work, name="look", once=True)
        return self._lacking()

    def _lacking(self) -> set[str]:
        """Orders that arrived live, were left to history, and do not count there."""
        pages = left_to_history(self._store, self._unit, self._kind)
        return {each for left in pages for each in self._history.lacking(self._kind, left)}

    def _set_all(self) -> int:
        """Set all identities, from where the last run was; in so many steps."""
        steps = 0
        # What is not read to its end is closed here, not whenever Python finds it.
        with closing(self._history.cells(self._kind, self._job.progress.after, self._without)) as cells:
            for piece in whole_identities(map(self._filled, cells), self._cells_max):
                self._step(piece, piece[-1].identity)
                steps += 1
                self._report(self._job.progress.numbers["orders"], f"orders by {self._kind.name}")
        return steps

    def _filled(self, cell: HistoryCell) -> Filled:
        slice_ = self._unit.slice_of(dict(zip(self._history.dimensions, cell.values, strict=True)))
        return Filled(cell.identity, slice_, cell.count, cell.from_us, cell.to_us)

    def _empty(self, there: Sequence[str], upto: str | None) -> None:
        """Of identities that vanished from history, leave no more than one transaction can pass."""

        after = self._job.progress.after

        def gone(tx: Transaction) -> list[str]:
            return vanished(tx, self._unit, self._kind, there, after=after, upto=upto, limit=self._cells_max)

        def work(tx: Transaction, identities: Sequence[str]) -> None:
            self._job.step(tx, self._job.progress)
            self._must_be_named_alike(tx)
            set_identities(tx, self._unit, self._kind, identities, [])

        while len(found := self._store.read(gone)) == self._cells_max:
            self._store.transact(partial(work, identities=found), name="backfill", once=True)
            after = found[-1]

    def _step(self, piece: Sequence[Filled], upto: str) -> None:
        """Set some identities whole."""
        self._empty(list(dict.fromkeys(each.identity for each in piece)), upto)
        before = self._job.progress
        counted = before.adding(orders=sum([each.count for each in piece]), cells=len(piece))
        progress = Progress(before.source, upto, False, counted)

        def work(tx: Transaction) -> None:
            self._job.step(tx, progress)
            self._must_be_named_alike(tx)
            set_cells(tx, self._unit, self._kind, piece, after=before.after, upto=upto)

        self._store.transact(work, name="backfill", once=True)
        self._job.stepped(progress)

    def _leave_out_more(self) -> None:
        """Set the identities anew of which orders were taken back since it began."""
        number, before = self._number_of_taken_back(), self._without
        if number == self._taken_back:
            return
        with closing(before):
            self._taken_back = number
            self._without = self._excluded()
            after: str | None = None
            while some := self._history.identities_of(self._kind, self._without, before, after, IDENTITIES_MAX):
                cells = self._history.cells_of(self._kind, some, self._without)
                self._set_again(some, [self._filled(each) for each in cells])
                after = some[-1]

    def _set_again(self, identities: Sequence[str], filled: Sequence[Filled]) -> None:
        before = self._job.progress

        def work(tx: Transaction) -> Progress:
            orders, cells = history_part(tx, self._unit, self._kind, identities)
            more = before.adding(orders=sum(each.count for each in filled) - orders, cells=len(filled) - cells)
            progress = structs.replace(before, numbers=more)
            self._job.step(tx, progress)
            self._must_be_named_alike(tx)
            set_identities(tx, self._unit, self._kind, identities, filled)
            return progress

        self._job.stepped(self._store.transact(work, name="backfill", once=True))

    def _end(self, lacking: int, *, is_last: bool) -> bool:
        """Empty what lies behind the last identity, and say that history is counted, if nobody has taken over.

        False where orders were left to history since it was looked through: then it is said only if nobody can look
        again, and it is not complete. Where orders of it were taken back, nothing is said.
        """
        progress = structs.replace(self._job.progress, is_done=True)
        goes_on = self._history.is_fixed and not is_last

        def work(tx: Transaction) -> tuple[bool, Progress]:
            stood = self._unit.stood(tx)
            stands = stood.state.by_name[self._kind.name]
            is_changed = stands.taken_back != self._taken_back
            if is_changed and is_last:
                raise Conflict("orders of history are being taken back meanwhile", hint="Run it again")
            if is_changed or (stands.is_behind and goes_on):
                return False, self._job.progress
            self._job.step(tx, progress)
            self._must_be_named_alike(tx)
            set_cells(tx, self._unit, self._kind, [], after=progress.after, upto=None)
            _must_be_conserved(tx, self._unit, self._kind, progress.numbers.get("orders", 0))
            finish(tx, self._unit, stood, self._kind, self._started_at_us, lacking)
            return not stands.is_behind, progress

        is_known, stepped = self._store.transact(work, name="backfill", once=True)
        self._job.stepped(stepped)
        return is_known


def _must_be_conserved(tx: Transaction, unit: Unit, kind: IdentityType, orders: int) -> None:
    """The history parts of all cells together are the orders that were read."""
    cells = unit.tables.cells
    total = sa.select(sa.func.coalesce(sa.func.sum(cells.c.history_count), 0)).where(
        cells.c.identity_type == kind.type_id
    )
    stored = int(tx.execute(total).scalar_one())
    if stored != orders:
        raise Internal(f"the cells of {kind.name} have {stored} historical orders, {orders} were read")
