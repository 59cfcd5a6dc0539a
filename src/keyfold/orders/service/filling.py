"""The history part of cells: set whole identity by identity, so that setting it again is right whatever was there."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal

import msgspec
import sqlalchemy as sa
from msgspec import Struct, structs

from keyfold.core.errors import BadInput, Conflict
from keyfold.core.store import Store, Transaction, batch
from keyfold.core.store.batch import Columns
from keyfold.core.store.shapes import increment, load
from keyfold.orders.model import CompletedOrder, IdentityType, Slice, UnitState, micros
from keyfold.orders.service.jobs import give_up
from keyfold.orders.service.unit import Stood, Unit
from keyfold.orders.tables import NEVER_FROM_US, NEVER_TO_US

KEPT_ROWS = 50_000  # looked at in one read

Source = Literal["backfill", "import"]


class Filled(Struct, frozen=True, gc=False):
    """The history part of one cell."""

    identity: str
    slice_: Slice
    count: int
    from_us: int
    to_us: int


def set_cells(
    tx: Transaction, unit: Unit, kind: IdentityType, filled: Sequence[Filled], *, after: str | None, upto: str | None
) -> None:
    """Set the history part of every cell of the identities behind `after` up to `upto`; what is not given is zero."""
    _put(tx, unit, kind, filled)
    with batch.hashed(tx):
        _zero(tx, unit, kind, filled, _within(unit.tables.cells.c.identity_value, after, upto))


def vanished(
    tx: Transaction,
    unit: Unit,
    kind: IdentityType,
    there: Sequence[str],
    *,
    after: str | None,
    upto: str | None,
    limit: int,
) -> list[str]:
    """The next identities behind `after` up to `upto` with a history part that are not there any more."""
    cells = unit.tables.cells
    value = cells.c.identity_value
    gone = sa.select(value).distinct().where(cells.c.identity_type == kind.type_id, cells.c.history_count != 0)
    gone = gone.where(*_within(value, after, upto))
    if there:
        gone = gone.where(~batch.is_among(tx, cells, {"identity_value": list(there)}))
    with batch.hashed(tx):
        return list(tx.execute(gone.order_by(value).limit(limit)).scalars())


def _within(value: sa.Column[str], after: str | None, upto: str | None) -> list[sa.ColumnElement[bool]]:
    return [*([value > after] if after is not None else []), *([value <= upto] if upto is not None else [])]


def set_identities(
    tx: Transaction, unit: Unit, kind: IdentityType, identities: Sequence[str], filled: Sequence[Filled]
) -> None:
    """Set the history part of every cell of the given identities."""
    _put(tx, unit, kind, filled)
    if identities:
        chosen = batch.is_among(tx, unit.tables.cells, {"identity_value": list(identities)}, "wanted")
        _zero(tx, unit, kind, filled, [chosen])


def history_part(tx: Transaction, unit: Unit, kind: IdentityType, identities: Sequence[str]) -> tuple[int, int]:
    """How many orders the history part of identities has, and in how many cells."""
    keys: Columns = {"identity_type": [kind.type_id] * len(identities), "identity_value": list(identities)}
    counts = [count for (count,) in load(tx, unit.tables.cells, keys, ("history_count",)).values()]
    return sum(counts), sum(count != 0 for count in counts)


def _put(tx: Transaction, unit: Unit, kind: IdentityType, filled: Sequence[Filled]) -> None:
    if not filled:
        return
    keep_slices(tx, unit, [each.slice_ for each in filled])
    columns: Columns = {
        **_keys(kind, filled),
        "history_count": [each.count for each in filled],
        "history_from_us": [each.from_us for each in filled],
        "history_to_us": [each.to_us for each in filled],
    }
    increment(tx, unit.tables.cells, columns, latest=["history_count", "history_from_us", "history_to_us"])


def keep_slices(tx: Transaction, unit: Unit, found: Iterable[Slice]) -> None:
    """Store the slices of history that are new, where there is room for them."""
    slices = list({each.slice_id: each for each in found}.values())
    if unit.without_room(tx, slices):
        raise BadInput(
            f"history has more combinations of values than {unit.settings.slices_max}",
            hint=f"orders.units.{unit.name}.slices_max bounds them",
        )
    unit.keep_slices(tx, slices)


def _zero(
    tx: Transaction,
    unit: Unit,
    kind: IdentityType,
    filled: Sequence[Filled],
    bounds: Sequence[sa.ColumnElement[bool]],
) -> None:
    """Empty the history part of the cells within the bounds that were not given."""
    cells = unit.tables.cells
    where = [cells.c.identity_type == kind.type_id, cells.c.history_count != 0, *bounds]
    if filled:
        where.append(~batch.is_among(tx, cells, _keys(kind, filled), "given"))
    empty = {"history_count": 0, "history_from_us": NEVER_FROM_US, "history_to_us": NEVER_TO_US}
    tx.execute(sa.update(cells).where(*where).values(**empty))


def _keys(kind: IdentityType, filled: Sequence[Filled]) -> dict[str, list[object]]:
    return {
        "identity_type": [kind.type_id] * len(filled),
        "identity_value": [each.identity for each in filled],
        "slice_id": [each.slice_.slice_id for each in filled],
    }


def whole_identities(cells: Iterable[Filled], cells_max: int) -> Iterator[list[Filled]]:
    """The cells in pieces of about `cells_max`, never with an identity in two of them."""
    piece: list[Filled] = []
    for each in cells:
        if len(piece) >= cells_max and piece[-1].identity != each.identity:
            yield piece
            piece = []
        piece.append(each)
    if piece:
        yield piece


def claim(store: Store, unit: Unit, names: Sequence[str], source: Source) -> list[IdentityType]:
    """Say what fills the history part of identity types: backfill and import exclude each other."""

    def work(tx: Transaction) -> list[IdentityType]:
        stood = unit.stood(tx)
        types = _claimable(stood.state, names, source)
        fresh = [kind.name for kind in types if kind.source != source]
        _change(tx, unit, stood, {name: {"source": source} for name in fresh})
        for name in fresh:
            # The other may have been begun, and has filled nothing; now it never will.
            give_up(tx, unit, f"{'import' if source == 'backfill' else 'backfill'} {name}")
        return [structs.replace(kind, source=source) for kind in types]

    return store.transact(work, name=f"claim {source}")


def claimable(tx: Transaction, unit: Unit, names: Sequence[str], source: Source) -> list[IdentityType]:
    """The identity types, where nothing else fills the history part of any."""
    return _claimable(unit.stood(tx).state, names, source)


def _claimable(state: UnitState, names: Sequence[str], source: Source) -> list[IdentityType]:
    must_not_be_splitting(state)
    types = [state.identity(name, "identity") for name in names]
    for kind in types:
        if not kind.has_history:
            raise Conflict(
                f"{kind.name} has no start: every order of it counts live, history would count them twice",
                hint="A start is set when the unit, or the identity type, is made",
            )
        if kind.source not in ("", source):
            raise Conflict(f"the history of {kind.name} comes from {kind.source}, which excludes {source}")
    return types


def look_anew(tx: Transaction, unit: Unit, kind: IdentityType) -> None:
    """History is about to be looked through for the orders left to it: whoever leaves one from now on says so.

    It waits for all who hold the state, so that every order left before is seen by who looks now.
    """
    stood = unit.stood(tx)
    known = stood.state.by_name[kind.name]
    # It lacks at least one until somebody has looked to the end: who looks now may be stopped.
    _change(tx, unit, stood, {kind.name: {"is_behind": False, "lacking": max(known.lacking, int(known.is_behind))}})


def left_to_history(store: Store, unit: Unit, kind: IdentityType) -> Iterator[list[str]]:
    """The orders that arrived live and were left to the history of an identity type, in bounded pages.

    Without those that were taken back since: whoever counts history leaves them out of it, so none is lacking.
    """
    after: str | None = ""
    while after is not None:
        after, left = store.read(partial(_page_of_left, unit=unit, kind=kind, after=after))
        yield store.read(partial(_not_taken_back, unit=unit, name=kind.name, order_ids=left))


def _not_taken_back(tx: Transaction, unit: Unit, name: str, order_ids: Sequence[str]) -> list[str]:
    if not order_ids or not unit.stood(tx).state.by_name[name].taken_back:
        return list(order_ids)
    taken_back = load(tx, unit.tables.corrections, {"order_id": list(order_ids)}, ())
    return [each for each in order_ids if (each,) not in taken_back]


def _page_of_left(tx: Transaction, unit: Unit, kind: IdentityType, after: str) -> tuple[str | None, list[str]]:
    """The next of them; and where to go on."""
    kept = unit.tables.kept
    wanted = sa.select(kept.c.order_id, kept.c.body).where(kept.c.why == "before_start", kept.c.order_id > after)
    page = tx.execute(wanted.order_by(kept.c.order_id).limit(KEPT_ROWS)).all()
    decode = msgspec.json.Decoder(CompletedOrder).decode
    state = unit.stood(tx).state
    orders = [(row.order_id, unit.counted_as(state, decode(row.body))) for row in page]
    left = [
        order_id
        for order_id, order in orders
        if order is not None and kind.name in order.identities and not kind.takes(micros(order.created_at))
    ]
    return (page[-1].order_id if len(page) == KEPT_ROWS else None), left


def finish(tx: Transaction, unit: Unit, stood: Stood, kind: IdentityType, filled_at_us: int, lacking: int) -> None:
    """The history part of a type was filled to its end; a state newer than what was decided by is a lost race."""
    must_not_be_splitting(stood.state)
    _change(tx, unit, stood, {kind.name: {"filled_at_us": filled_at_us, "lacking": lacking}})


def lack(tx: Transaction, unit: Unit, name: str, lacking: int) -> None:
    """The history part of a type lacks at least so many, until somebody has filled it to its end."""
    stood = unit.stood(tx)
    if lacking > stood.state.by_name[name].lacking:
        _change(tx, unit, stood, {name: {"lacking": lacking}})


def must_not_be_splitting(state: UnitState) -> None:
    if state.splitting is not None:
        raise Conflict(
            f"the dimension {state.splitting.dimension!r} is being added",
            hint="Finish that first: keyfold orders add-dimension",
        )


def must_have_dimensions(tx: Transaction, unit: Unit, dimensions: Sequence[str]) -> None:
    """A dimension that was added meanwhile makes what was read of history worthless."""
    state = unit.stood(tx).state
    must_not_be_splitting(state)
    if state.dimensions != list(dimensions):
        raise Conflict("a dimension was added meanwhile", hint="Run it again")


def _change(tx: Transaction, unit: Unit, stood: Stood, changes: Mapping[str, Mapping[str, object]]) -> None:
    if changes:
        types = [structs.replace(each, **changes.get(each.name, {})) for each in stood.state.identities]
        unit.change(tx, stood, structs.replace(stood.state, identities=types))


Report = Callable[[int, str], None]  # how many are done, and what


def silent(done: int, what: str) -> None:
    """Tell nobody."""


def behind(report: Report, before: int) -> Report:
    """Tell of the next piece of work as of what follows so many."""
    return lambda done, what: report(before + done, what)
