"""Corrections: an order that was counted by mistake is taken back by its id, exactly once, and leaves an audit record.

Its mark stays, so that within the window it cannot be counted again; that it was taken back is known for ever, because
history still has the order.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from keyfold.core import audit
from keyfold.core.errors import LostRace
from keyfold.core.store import Transaction
from keyfold.core.store.batch import Columns
from keyfold.core.store.shapes import insert_new, load, update
from keyfold.orders import metrics
from keyfold.orders.model import UNKNOWN
from keyfold.orders.service.counting import take_back
from keyfold.orders.service.reading import CellKey, columns_of
from keyfold.orders.service.unit import Unit

CORRECTIONS_MAX = 100  # each has a row of the audit


class Corrected(Struct, frozen=True):
    """What became of the wish to take an order back."""

    order_id: str
    status: Literal["corrected", "corrected before", "not known"]


Mark = tuple[int, int, str]  # slice, the slice it moved to, identities
Cell = tuple[int, str, int]  # identity type, identity value, slice


def correct_orders(tx: Transaction, unit: Unit, order_ids: Sequence[str], reason: str, actor: str) -> list[Corrected]:
    """Take orders back. One that has no mark was not counted live, or so long ago that it is not known any more."""
    wanted = sorted(set(order_ids))
    found = load(tx, unit.tables.marks, {"order_id": wanted}, ("slice_id", "moved_to_slice_id", "identities"))
    marks: dict[str, Mark] = {order_id: (row[0], row[1], row[2]) for (order_id,), row in found.items()}
    rows: Columns = {
        "order_id": list(marks),
        "corrected_at_us": [tx.now_us] * len(marks),
        "reason": [reason] * len(marks),
    }
    # Two who take back one order meet here, and the second sees the first.
    new = [order_id for (order_id,) in insert_new(tx, unit.tables.corrections, rows)]
    _take(tx, unit, {order_id: marks[order_id] for order_id in new})
    before = {order_id for (order_id,) in load(tx, unit.tables.corrections, {"order_id": wanted}, ())}
    for order_id in sorted(new):
        audit.record(tx, actor, "order taken back", f"{unit.name} {order_id}: {reason}")
    tx.after_commit.append(lambda: metrics.CORRECTED.labels(unit.name).inc(len(new)))
    return [
        Corrected(each, "corrected" if each in new else "corrected before" if each in before else "not known")
        for each in order_ids
    ]


def _take(tx: Transaction, unit: Unit, marks: Mapping[str, Mark]) -> None:
    if not marks:
        return
    update(tx, unit.tables.marks, {"order_id": list(marks), "is_corrected": [1] * len(marks)})
    left = take_back(tx, unit, _cells(tx, unit, marks))
    if any(count < 0 for count in left.values()):
        raise LostRace("a cell was split by a new dimension meanwhile")


def _cells(tx: Transaction, unit: Unit, marks: Mapping[str, Mark]) -> list[Cell]:
    """Where the orders are counted."""
    decode = msgspec.json.Decoder(dict[int, str]).decode
    places = [
        ((type_id, value), slice_id, moved_to)
        for slice_id, moved_to, identities in marks.values()
        for type_id, value in decode(identities).items()
    ]
    found = load(tx, unit.tables.cells, columns_of([key for key, _, _ in places]), ("live_count",))
    by_identity: dict[CellKey, set[int]] = {}
    for (type_id, value, slice_id), (count,) in found.items():
        if count > 0:
            by_identity.setdefault((type_id, value), set()).add(slice_id)
    values = unit.values_of(tx, [*(key[2] for key in found), *(slice_id for _, slice_id, _ in places)])
    return [
        (*key, _slice_now(by_identity.get(key, set()), slice_id, moved_to, values))
        for key, slice_id, moved_to in places
    ]


def _slice_now(there: Collection[int], slice_id: int, moved_to: int, values: Mapping[int, Mapping[str, str]]) -> int:
    """The slice of the mark; where a new dimension has moved the order; or where it went because nobody knew better."""
    for each in (slice_id, moved_to):
        if each in there:
            return each
    known = values[slice_id].items()
    for each in there:
        more = dict(values[each].items() - known)
        if known <= values[each].items() and set(more.values()) == {UNKNOWN}:
            return each
    raise LostRace("the cell of the order was split by a new dimension meanwhile")
