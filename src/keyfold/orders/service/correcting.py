"""Corrections: an order that was counted by mistake is taken back by its id, exactly once, and leaves an audit record.

Its mark stays, so that within the window it cannot be counted again; that it was taken back is known for ever, because
history still has the order.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import msgspec
from msgspec import Struct, structs

from keyfold.core import audit
from keyfold.core.errors import LostRace
from keyfold.core.store import Transaction
from keyfold.core.store.batch import Columns
from keyfold.core.store.shapes import insert_new, load, update
from keyfold.orders import metrics
from keyfold.orders.model import UNKNOWN, IdentityType, Splitting, UnitState, kept_by_history, moved_of
from keyfold.orders.service.counting import take_back
from keyfold.orders.service.reading import CellKey, columns_of
from keyfold.orders.service.unit import DAY_US, Stood, Unit

CORRECTIONS_MAX = 100  # each has a row of the audit


class Corrected(Struct, frozen=True):
    """What became of the wish to take an order back."""

    order_id: str
    status: Literal["corrected", "corrected before", "not known"]


class Mark(Struct, frozen=True):
    """Where an order counts: for which identities, in which slice, and where a new dimension has moved it."""

    created_at_us: int
    slice_id: int
    moved: dict[int, int]
    identities: dict[int, str]


Cell = tuple[int, str, int]  # identity type, identity value, slice


def correct_orders(tx: Transaction, unit: Unit, order_ids: Sequence[str], reason: str, actor: str) -> list[Corrected]:
    """Take orders back. One that has no mark was not counted live, or so long ago that it is not known any more."""
    wanted = sorted(set(order_ids))
    stood = unit.stood(tx)
    marks = _marks(tx, unit, wanted, stood.late_before_us - DAY_US)
    cells = _cells(tx, unit, stood, marks)
    marks = {order_id: mark for order_id, mark in marks.items() if order_id in cells}
    rows: Columns = {
        "order_id": list(marks),
        "corrected_at_us": [tx.now_us] * len(marks),
        "reason": [reason] * len(marks),
    }
    # Two who take back one order meet here, and the second sees the first.
    new = {order_id for (order_id,) in insert_new(tx, unit.tables.corrections, rows)}
    _take(tx, unit, {order_id: cells[order_id] for order_id in new})
    _count_history_again(tx, unit, stood, {order_id: marks[order_id] for order_id in new})
    before = {order_id for (order_id,) in load(tx, unit.tables.corrections, {"order_id": wanted}, ())}
    for order_id in sorted(new):
        audit.record(tx, actor, "order taken back", f"{unit.name} {order_id}: {reason}")
    tx.after_commit.append(lambda: metrics.CORRECTED.labels(unit.name).inc(len(new)))
    is_first = [each not in order_ids[:at] for at, each in enumerate(order_ids)]  # they are few
    return [
        Corrected(each, "corrected" if first and each in new else "corrected before" if each in before else "not known")
        for each, first in zip(order_ids, is_first, strict=True)
    ]


def _marks(tx: Transaction, unit: Unit, order_ids: Sequence[str], from_us: int) -> dict[str, Mark]:
    """The marks of orders that are counted; one that is old enough to be purged at any moment counts as gone."""
    wanted = ("created_at_us", "slice_id", "moved", "identities", "is_corrected")
    decode = msgspec.json.Decoder(dict[int, str]).decode
    return {
        order_id: Mark(created_at_us, slice_id, moved_of(moved), decode(identities))
        for (order_id,), (created_at_us, slice_id, moved, identities, is_corrected) in load(
            tx, unit.tables.marks, {"order_id": order_ids}, wanted
        ).items()
        if created_at_us >= from_us and not is_corrected
    }


def _take(tx: Transaction, unit: Unit, cells: Mapping[str, Sequence[Cell]]) -> None:
    if not cells:
        return
    update(tx, unit.tables.marks, {"order_id": list(cells), "is_corrected": [1] * len(cells)})
    left = take_back(tx, unit, [cell for own in cells.values() for cell in own])
    if any(count < 0 for count in left.values()):
        raise LostRace("a cell was split by a new dimension meanwhile")


def _cells(tx: Transaction, unit: Unit, stood: Stood, marks: Mapping[str, Mark]) -> dict[str, list[Cell]]:
    """Where each order is counted; nothing of one that is nowhere to be found."""
    keys = [key for mark in marks.values() for key in mark.identities.items()]
    found = load(tx, unit.tables.cells, columns_of(keys), ("live_count",))
    by_identity: dict[CellKey, set[int]] = {}
    for (type_id, value, slice_id), (count,) in found.items():
        if count > 0:
            by_identity.setdefault((type_id, value), set()).add(slice_id)
    values = unit.values_of(tx, [*(key[2] for key in found), *(mark.slice_id for mark in marks.values())])
    placed: dict[str, list[Cell]] = {}
    for order_id, mark in marks.items():
        slices = {key: _slice_now(by_identity.get(key, set()), mark, key[0], values) for key in mark.identities.items()}
        known = [(*key, slice_id) for key, slice_id in slices.items() if slice_id is not None]
        if len(known) == len(slices):
            placed[order_id] = known
        elif stood.state.splitting is not None:
            raise LostRace("the cell of the order was split by a new dimension meanwhile")
    return placed


def _slice_now(there: Collection[int], mark: Mark, type_id: int, values: Mapping[int, Mapping[str, str]]) -> int | None:
    """Where a new dimension has moved the order; the slice of its mark; or where it went because nobody knew better."""
    placed = mark.moved.get(type_id, mark.slice_id)
    if placed in there:
        return placed
    known = values[placed].items() if placed in values else values[mark.slice_id].items()
    for each in there:
        more = dict(values[each].items() - known)
        if known <= values[each].items() and set(more.values()) == {UNKNOWN}:
            return each
    return None


def _count_history_again(tx: Transaction, unit: Unit, stood: Stood, marks: Mapping[str, Mark]) -> None:
    """An order may also be in the history part of identity types that started later: that has to be counted anew.

    Where there are none the state is held: a type that is added now would not learn of the order.
    """
    state = stood.state
    later = {order_id: found for order_id, mark in marks.items() if (found := _later_types(state, mark))}
    again = {name for found in later.values() for name in found.values()}
    if again:
        if state.splitting is not None:
            _keep_in_history(tx, unit, state.splitting, later, marks)
        types = [_recounted(each) if each.name in again else each for each in state.identities]
        unit.change(tx, stood, structs.replace(state, identities=types))
    elif marks:
        unit.hold(tx, stood)


def _later_types(state: UnitState, mark: Mark) -> dict[int, str]:
    return {
        each.type_id: each.name
        for each in state.identities
        if each.type_id not in mark.identities and not each.takes(mark.created_at_us)
    }


def _keep_in_history(
    tx: Transaction,
    unit: Unit,
    splitting: Splitting,
    later: Mapping[str, Mapping[int, str]],
    marks: Mapping[str, Mark],
) -> None:
    """No backfill runs while a dimension is added: whoever splits the history part finds the order counted there."""
    kept = kept_by_history(splitting.dimension)
    moved = [{**marks[order_id].moved, **dict.fromkeys(types, kept)} for order_id, types in later.items()]
    columns: Columns = {"order_id": list(later), "moved": [msgspec.json.encode(each).decode() for each in moved]}
    update(tx, unit.tables.marks, columns)


def _recounted(kind: IdentityType) -> IdentityType:
    filled_at_us = None if kind.source == "backfill" else kind.filled_at_us
    return structs.replace(kind, taken_back=kind.taken_back + 1, filled_at_us=filled_at_us)
