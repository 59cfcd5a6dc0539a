"""Reading counts: one statement for all identities asked for, over the index alone; evidence on request."""

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from keyfold.core.errors import Internal, TooLarge
from keyfold.core.store import Transaction
from keyfold.core.store.batch import Columns, Row
from keyfold.core.store.shapes import Lookup, load, load_rows, lookup
from keyfold.core.times import iso
from keyfold.orders.model import DataItem, Identity, IdentityType, Property, UnitState, View, must_be_query
from keyfold.orders.service.unit import Unit
from keyfold.orders.tables import NEVER_FROM_US, NEVER_TO_US

ITEMS_MAX = 100_000  # counts in one answer
CellKey = tuple[int, str]  # identity type, identity value
Cells = Mapping[CellKey, list[tuple[int, int]]]  # slices, and the number of orders, live and history together
SliceValues = Mapping[int, Mapping[str, str]]
COUNTED = ("identity_type", "identity_value", "slice_id", "live_count", "history_count")
PARTS = ("live_count", "live_from_us", "live_to_us", "history_count", "history_from_us", "history_to_us")


class Query(Struct, frozen=True):
    """Which orders of whom, and by what their number is to be told apart."""

    identities: Sequence[Identity]
    filters: Sequence[Property] = ()
    group_by: Sequence[str] = ()


class Evidence(Struct, frozen=True):
    """What a count rests on, so that whoever relies on it can refuse where it does not suffice."""

    counted_from: str | None  # creation of the earliest order counted; None: none was
    counted_to: str | None
    start: str | None  # from here on orders count live; None: all do
    history: str  # "none" is needed, "pending", "backfilled" or "imported"
    filled_at: str | None  # when history was last counted to its end
    is_complete: bool  # nothing of history is missing
    lag_messages: int | None  # completed orders that wait in the topic; None: not known


class IdentityData(Struct, frozen=True, omit_defaults=True):
    """The counts of one identity."""

    identity: Identity
    data: list[DataItem]
    evidence: Evidence | None = None


# Of the rows of a look-up; None where they name slices that are not known here yet.
Answered = Callable[[list[Row]], list[IdentityData] | None]


def read_orders(tx: Transaction, unit: Unit, query: Query) -> list[IdentityData]:
    """The counts of each identity, in the order asked for."""
    return read_many(tx, unit, [query])[0]


def read_many(tx: Transaction, unit: Unit, queries: Sequence[Query]) -> list[list[IdentityData]]:
    """Several queries by one statement; each was checked."""
    state = unit.seen(tx).state
    ids = {each.name: each.type_id for each in state.identities}
    cells, values = cells_of(
        tx, unit, [(ids[each.type], each.value) for query in queries for each in query.identities if each.type in ids]
    )
    return [_answered(query, unit.view(query.filters, query.group_by), ids, cells, values) for query in queries]


def lookup_of(unit: Unit, query: Query) -> tuple[Lookup, Answered] | None:
    """A query of few identities as one statement, and what its rows mean; None where that does not suffice."""
    state = unit.remembered()
    if state is None:
        return None
    must_be_known(state, query)
    ids = {each.name: each.type_id for each in state.identities}
    few = lookup(unit.tables.cells, columns_of([(ids[each.type], each.value) for each in query.identities]), COUNTED)
    if few is None:
        return None
    view = unit.view(query.filters, query.group_by)

    def answered(rows: list[Row]) -> list[IdentityData] | None:
        cells, slice_ids = _by_identity(rows)
        values = unit.known_values(slice_ids)
        return None if values is None else _answered(query, view, ids, cells, values)

    return few, answered


def _answered(
    query: Query, view: View, ids: Mapping[str, int], cells: Cells, values: SliceValues
) -> list[IdentityData]:
    """The answer to one query. A few bytes may ask for much: what is answered is bounded as what is asked."""
    answers: list[IdentityData] = []
    items = 0
    for each in query.identities:
        data = view.grouped(cells.get((ids[each.type], each.value), ()), values)
        answers.append(IdentityData(each, data))
        items += len(data)
        if items > ITEMS_MAX:
            raise TooLarge(
                f"the answer would have more than {ITEMS_MAX} counts", place="identities", hint="Ask for fewer at once"
            )
    return answers


def must_be_known(state: UnitState, query: Query) -> None:
    """Refuse a query that names what the unit does not have."""
    known = {each.name for each in state.identities}
    for index, each in enumerate(query.identities):
        if each.type not in known:
            state.identity(each.type, f"identities[{index}].type")
    must_be_query(state, query.filters, query.group_by)


def columns_of(keys: Sequence[CellKey]) -> Columns:
    """Identities as the columns of a batch, each once."""
    wanted = list(dict.fromkeys(keys))
    return {"identity_type": [each for each, _ in wanted], "identity_value": [each for _, each in wanted]}


def cells_of(tx: Transaction, unit: Unit, keys: Sequence[CellKey]) -> tuple[Cells, SliceValues]:
    """The cells of identities, and the values of their slices."""
    cells, slice_ids = _by_identity(load_rows(tx, unit.tables.cells, columns_of(keys), COUNTED))
    values = unit.values_of(tx, slice_ids)
    if lost := [each for each in slice_ids if each not in values]:
        raise Internal(f"the slice {lost[0]} of unit {unit.name} is lost")
    return cells, values


def _by_identity(rows: Sequence[Row]) -> tuple[Cells, set[int]]:
    """Rows of COUNTED by identity, and their slices."""
    cells: dict[CellKey, list[tuple[int, int]]] = {}
    slice_ids: set[int] = set()
    for type_id, value, slice_id, live, history in rows:
        slice_ids.add(slice_id)
        cells.setdefault((type_id, value), []).append((slice_id, live + history))
    return cells, slice_ids


def evidence_of(
    tx: Transaction, unit: Unit, identities: Sequence[Identity], lag_messages: int | None
) -> list[Evidence]:
    """What the counts of identities rest on, by the state of this moment: an older one may call complete what is not.

    For counts that are read after it: history that is filled in between would vouch for counts without it.
    """
    state = unit.stood(tx).state
    types = {each.name: each for each in state.identities}
    keys = columns_of([(types[each.type].type_id, each.value) for each in identities])
    spans: dict[CellKey, tuple[int, int]] = {}
    for (type_id, value, _), row in load(tx, unit.tables.cells, keys, PARTS).items():
        for count, from_us, to_us in (row[:3], row[3:]):
            if count:
                first, last = spans.get((type_id, value), (NEVER_FROM_US, NEVER_TO_US))
                spans[type_id, value] = (min(first, from_us), max(last, to_us))
    return [
        _evidence(
            types[each.type],
            spans.get((types[each.type].type_id, each.value), (NEVER_FROM_US, NEVER_TO_US)),
            lag_messages,
        )
        for each in identities
    ]


def _evidence(kind: IdentityType, span: tuple[int, int], lag_messages: int | None) -> Evidence:
    return Evidence(
        counted_from=None if span[0] == NEVER_FROM_US else iso(span[0]),
        counted_to=None if span[1] == NEVER_TO_US else iso(span[1]),
        start=None if kind.start_us is None else iso(kind.start_us),
        history=_history(kind),
        filled_at=None if kind.filled_at_us is None else iso(kind.filled_at_us),
        is_complete=is_complete(kind),
        lag_messages=lag_messages,
    )


def _history(kind: IdentityType) -> str:
    if not kind.has_history:
        return "none"
    if kind.filled_at_us is None:
        return "pending"
    return "imported" if kind.source == "import" else "backfilled"


def is_complete(kind: IdentityType) -> bool:
    """Whether all of history is counted: filled to its end after the start had passed, and nothing is lacking."""
    if kind.start_us is None:
        return True
    is_filled = kind.filled_at_us is not None and kind.filled_at_us >= kind.start_us
    return is_filled and not kind.lacking and not kind.is_behind
