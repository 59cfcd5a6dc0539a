"""Backfill: the history part of every cell from a table of historical orders, while live orders keep arriving.

It takes exactly the orders created before the start of an identity type, live counting exactly the others: neither can
count what the other does. Each step sets some identities whole and commits how far it came, so it can be stopped
anywhere and run again at any time, also when history has caught up.
"""

from collections.abc import Generator, Sequence
from contextlib import closing

import sqlalchemy as sa
from msgspec import Struct, structs

from keyfold.core.errors import Conflict, Internal
from keyfold.core.store import Store, Transaction
from keyfold.orders.model import IdentityType
from keyfold.orders.service.filling import (
    Filled,
    Report,
    behind,
    claim,
    finish,
    is_behind,
    left_to_history,
    look_anew,
    must_have_dimensions,
    set_cells,
    silent,
    whole_identities,
)
from keyfold.orders.service.history import History
from keyfold.orders.service.jobs import Job, Progress
from keyfold.orders.service.unit import Unit

CELLS_MAX = 10_000  # in one transaction
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
    kinds = claim(store, unit, names, "backfill")
    without = store.read(lambda tx: corrected(tx, unit))
    done: list[Backfilled] = []
    for kind in kinds:
        tell = behind(report, sum(each.orders for each in done))
        done.append(_filled(store, unit, history, kind, without, tell, cells_max))
    return done


def orders_to_count(history: History, kinds: Sequence[IdentityType]) -> int:
    """How many orders a backfill of identity types has to count, each once for each type."""
    return sum(history.count_before_start(kind) for kind in kinds)


def _filled(
    store: Store,
    unit: Unit,
    history: History,
    kind: IdentityType,
    without: Sequence[str],
    report: Report,
    cells_max: int,
) -> Backfilled:
    started_at_us = store.read(lambda tx: tx.now_us)
    source = f"{history.source} {','.join(history.dimensions)} {kind.start_us} {len(without)}"
    job = Job.begin(store, unit, f"backfill {kind.name}", source)
    # Before it is read: what it gains meanwhile is not counted, so it must be called lacking.
    lacking = _looked_through(store, unit, history, kind, job)
    after, steps = job.progress.after, 0
    with closing(_cells(unit, history, kind, after, without)) as cells:
        for piece in whole_identities(cells, cells_max):
            _step(store, unit, history, kind, job, piece, piece[-1].identity)
            steps += 1
            report(job.progress.numbers["orders"], f"orders by {kind.name}")
    if not history.is_fixed:
        lacking |= _lacking(store, unit, history, kind)
    looks = LOOKS_MAX if history.is_fixed else 1
    for look in range(1, looks + 1):
        history.must_be_same()
        is_known = _end(
            store, unit, history, kind, job, started_at_us, len(lacking), len(without), is_last=look == looks
        )
        if job.progress.is_done:
            break
        lacking = _looked_through(store, unit, history, kind, job)
    numbers = job.progress.numbers
    return Backfilled(
        identity=kind.name,
        orders=numbers.get("orders", 0),
        cells=numbers.get("cells", 0),
        steps=steps,
        lacking=len(lacking),
        lacking_orders=sorted(lacking)[:SHOWN_MAX],
        is_behind=not is_known,
    )


def _cells(
    unit: Unit, history: History, kind: IdentityType, after: str | None, without: Sequence[str]
) -> Generator[Filled]:
    for each in history.cells(kind, after, without):
        slice_ = unit.slice_of(dict(zip(history.dimensions, each.values, strict=True)))
        yield Filled(each.identity, slice_, each.count, each.from_us, each.to_us)


def _step(
    store: Store, unit: Unit, history: History, kind: IdentityType, job: Job, piece: Sequence[Filled], upto: str
) -> None:
    """Set some identities whole."""
    before = job.progress
    counted = before.adding(orders=sum([each.count for each in piece]), cells=len(piece))
    progress = Progress(before.source, upto, False, counted)

    def work(tx: Transaction) -> None:
        job.step(tx, progress)
        must_have_dimensions(tx, unit, history.dimensions)
        set_cells(tx, unit, kind, piece, after=before.after, upto=upto)

    store.transact(work, name="backfill", once=True)
    job.stepped(progress)


def _end(
    store: Store,
    unit: Unit,
    history: History,
    kind: IdentityType,
    job: Job,
    started_at_us: int,
    lacking: int,
    left_out: int,
    *,
    is_last: bool,
) -> bool:
    """Empty what lies behind the last identity, and say that history is counted, if nobody has taken over.

    False where orders were left to history since it was looked through: then it is not said, unless nobody will look
    again; and it is not complete.
    """
    progress = structs.replace(job.progress, is_done=True)

    def work(tx: Transaction) -> tuple[bool, Progress]:
        is_known = not is_behind(tx, unit, kind)
        if not is_known and not is_last:
            return False, job.progress
        job.step(tx, progress)
        must_have_dimensions(tx, unit, history.dimensions)
        set_cells(tx, unit, kind, [], after=progress.after, upto=None)
        if len(corrected(tx, unit)) != left_out:
            raise Conflict("orders were taken back meanwhile, which history still counts", hint="Run it again")
        _must_be_conserved(tx, unit, kind, progress.numbers.get("orders", 0))
        finish(tx, unit, kind, started_at_us, lacking)
        return is_known, progress

    is_known, stepped = store.transact(work, name="backfill", once=True)
    job.stepped(stepped)
    return is_known


def corrected(tx: Transaction, unit: Unit) -> list[str]:
    """Orders that were taken back; history still has them."""
    return list(tx.execute(sa.select(unit.tables.corrections.c.order_id)).scalars())


def _looked_through(store: Store, unit: Unit, history: History, kind: IdentityType, job: Job) -> set[str]:
    """The orders that history lacks of those left to it so far; whoever leaves one from now on says so."""

    def work(tx: Transaction) -> None:
        job.step(tx, job.progress)
        look_anew(tx, unit, kind)

    store.transact(work, name="look", once=True)
    return _lacking(store, unit, history, kind)


def _lacking(store: Store, unit: Unit, history: History, kind: IdentityType) -> set[str]:
    """Orders that arrived live, were left to history, and do not count there."""
    return {each for left in left_to_history(store, unit, kind) for each in history.lacking(kind, left)}


def _must_be_conserved(tx: Transaction, unit: Unit, kind: IdentityType, orders: int) -> None:
    """The history parts of all cells together are the orders that were read."""
    cells = unit.tables.cells
    total = sa.select(sa.func.coalesce(sa.func.sum(cells.c.history_count), 0)).where(
        cells.c.identity_type == kind.type_id
    )
    stored = int(tx.execute(total).scalar_one())
    if stored != orders:
        raise Internal(f"the cells of {kind.name} have {stored} historical orders, {orders} were read")
