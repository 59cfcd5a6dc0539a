"""Counting completed orders: marks, cells, reservations and what is kept of a batch commit together.

An order is marked if and only if it counts for every one of its identities whose type had started. The mark is
inserted first: two writers of one order meet there, and the second sees the first.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain, compress, count, islice
from operator import eq
from typing import Any

import msgspec
from msgspec import Struct, structs

from keyfold.core.clock import SECOND_US
from keyfold.core.errors import LostRace
from keyfold.core.store import Transaction
from keyfold.core.store.batch import Columns, Row
from keyfold.core.store.shapes import (
    Statement,
    delete,
    increment,
    increments,
    insert_new,
    insert_new_meanwhile,
    load,
    update,
)
from keyfold.orders import metrics
from keyfold.orders.model import (
    CompletedOrder,
    NotPlaced,
    Order,
    Slice,
    Status,
    UnitState,
    Why,
    checked,
    dimension_values,
    fingerprint,
    left_types,
    live_identities,
    micros,
)
from keyfold.orders.service.unit import Stood, Unit
from keyfold.orders.tables import NEVER_FROM_US, NEVER_TO_US


class Verdict(Struct, frozen=True, gc=False):
    """What became of an order."""

    order_id: str
    status: Status
    reason: str = ""


def must_be_orders(tx: Transaction, unit: Unit, orders: Sequence[CompletedOrder], place: str = "orders") -> None:
    """Refuse a batch of which an order is wrong, before any of it is counted."""
    must_be_order = order_check(tx, unit)
    for index, order in enumerate(orders):
        must_be_order(order, f"{place}[{index}]")


def order_check(tx: Transaction, unit: Unit) -> Callable[[CompletedOrder, str], None]:
    """What refuses a wrong order, by the state of the unit as it stands now; it is told the order's place."""
    state, brands = unit.stood(tx).state, unit.settings.application_brands
    future_us = unit.settings.future_seconds_max * SECOND_US
    return lambda order, place: checked(order, state, brands, tx.now_us, future_us, place)


def count_orders(tx: Transaction, unit: Unit, orders: Sequence[CompletedOrder]) -> list[Verdict]:
    """Count orders that were checked, each once; the verdicts are in their order."""
    stood = unit.stood(tx)
    verdicts: list[Verdict | None] = [None] * len(orders)
    late_before_us = unit.late_before_us(stood, tx.now_us)
    arrived: list[tuple[int, Order]] = []
    slices: dict[int, Slice] = {}
    by_properties: dict[tuple[tuple[str, str], ...], Slice] = {}
    refused: dict[int, Why] = {}
    for index, sent in enumerate(orders):
        created_at_us = micros(sent.created_at)
        if created_at_us < late_before_us:
            verdicts[index] = Verdict(sent.order_id, "late", "created before the window in which orders are known")
            refused[index] = "late"
            continue
        try:
            order, slice_ = _placed(unit, stood.state, sent, created_at_us, by_properties)
        except NotPlaced as error:
            verdicts[index] = Verdict(sent.order_id, "set_aside", str(error))
            refused[index] = "set_aside"
            continue
        arrived.append((index, order))
        if order.identities:
            slices[slice_.slice_id] = slice_
    marked, adding = _marked(tx, unit, _with_room(tx, unit, arrived, slices, refused, verdicts), verdicts)
    counted, has_history = marked, stood.state.live_ids is None
    if has_history:
        counted = _told_from_left(tx, unit, arrived, marked, verdicts)
    if counted:
        unit.keep_slices(tx, [slices[each] for each in {order.slice_id for order in counted}])
        _add(tx, unit, counted, adding if len(counted) == len(marked) else None)
        _free_reservations(tx, unit, [order.order_id for order in counted])
    if refused:
        _keep_refused(tx, unit, orders, arrived, refused, verdicts)
    left = _leave(tx, unit, stood, arrived, verdicts) if has_history else 0
    found = [each for each in verdicts if each is not None]
    assert len(found) == len(orders)
    tx.after_commit.append(lambda: _measure(unit, found, left))
    return found


def _placed(
    unit: Unit,
    state: UnitState,
    sent: CompletedOrder,
    created_at_us: int,
    by_properties: dict[tuple[tuple[str, str], ...], Slice],
) -> tuple[Order, Slice]:
    """Where an order counts, by the state of the unit and its hook; slices are remembered by properties."""
    order = unit.hooked(state, sent) if unit.hooks.completed is not None else sent
    said = tuple(order.properties.items())
    slice_ = by_properties.get(said)
    if slice_ is None:
        values = dimension_values(order.properties, state.dimensions, unit.settings.application_brands)
        slice_ = by_properties[said] = unit.slice_of(values)
    identities = live_identities(order, state)
    return (
        Order(
            order_id=sent.order_id,
            created_at_us=created_at_us,
            identities=identities,
            slice_id=slice_.slice_id,
            sent=sent,
            left=() if len(identities) == len(order.identities) else left_types(order, state),
        ),
        slice_,
    )


def _with_room(
    tx: Transaction,
    unit: Unit,
    arrived: Sequence[tuple[int, Order]],
    slices: dict[int, Slice],
    refused: dict[int, Why],
    verdicts: list[Verdict | None],
) -> list[tuple[int, Order]]:
    full = unit.without_room(tx, list(slices.values()))
    for index, order in arrived:
        if order.slice_id in full and order.identities:
            reason = f"the unit may have {unit.settings.slices_max} combinations of values, and has them"
            verdicts[index] = Verdict(order.order_id, "set_aside", reason)
            refused[index] = "set_aside"
    return [(index, order) for index, order in arrived if verdicts[index] is None]


def _marked(
    tx: Transaction, unit: Unit, arrived: Sequence[tuple[int, Order]], verdicts: list[Verdict | None]
) -> tuple[list[Order], Iterator[Statement] | None]:
    """Mark the orders that are new; of the others, tell a repeat from another order under the same id.

    Returns those that are new and, if all are, which is usual, what adds them to cells, begun while a server marked.
    """
    first: dict[str, tuple[int, Order]] = {}
    for index, order in arrived:
        first.setdefault(order.order_id, (index, order))
    listed = [first[order_id][1] for order_id in sorted(first)]
    inserted, adding = insert_new_meanwhile(tx, unit.tables.marks, listed, _marks, lambda: _adding(tx, unit, listed))
    if len(inserted) == len(arrived):
        for index, order in arrived:
            verdicts[index] = Verdict(order.order_id, "accepted")
        return listed, adding
    new = {order_id for (order_id,) in inserted}
    known = [order.order_id for order in listed if order.order_id not in new]
    before = {
        order_id: mark
        for (order_id,), (mark,) in load(tx, unit.tables.marks, {"order_id": known}, ("fingerprint",)).items()
    }
    for index, order in arrived:
        is_first = first[order.order_id][0] == index
        if is_first and order.order_id in new:
            verdicts[index] = Verdict(order.order_id, "accepted")
            continue
        earlier = first[order.order_id][1]
        said = before[order.order_id] if order.order_id in before else _said(earlier)
        verdicts[index] = (
            Verdict(order.order_id, "duplicate")
            if said == _said(order)
            else Verdict(order.order_id, "conflict", "an order of this id was counted that said something else")
        )
    counted = [order for order in listed if order.order_id in new]
    return counted, adding if len(counted) == len(listed) else None


def _marks(orders: Sequence[Order]) -> Columns:
    encode = msgspec.json.Encoder().encode
    return {
        "order_id": [order.order_id for order in orders],
        "created_at_us": [order.created_at_us for order in orders],
        "fingerprint": [_said(order) for order in orders],
        "slice_id": [order.slice_id for order in orders],
        "moved": ["{}"] * len(orders),
        "identities": [encode(order.identities).decode() for order in orders],
        "is_corrected": [0] * len(orders),
    }


def _said(order: Order) -> int:
    """What an order said, to be compared: as dear as all else of placing it, so made up while a server marks others."""
    return fingerprint(order.sent, order.created_at_us)


def _told_from_left(
    tx: Transaction,
    unit: Unit,
    arrived: Sequence[tuple[int, Order]],
    marked: Sequence[Order],
    verdicts: list[Verdict | None],
) -> list[Order]:
    """Those of newly marked orders that count: not what is left to history, nor another order under such an id.

    An order that is left is marked like any other and the mark taken back, so that whoever counts another one under
    its id at the same time waits for it, and then sees what was kept.
    """
    ids = [order.order_id for order in marked]
    said = _said_by_kept(tx, unit, ids, "before_start")
    other = {order.order_id for order in marked if order.order_id in said and said[order.order_id] != _said(order)}
    delete(
        tx,
        unit.tables.marks,
        {"order_id": [order.order_id for order in marked if order.order_id in other or not order.identities]},
    )
    for index, order in arrived:
        verdict = verdicts[index]
        is_other = order.order_id in other
        if is_other and _said(order) != said[order.order_id]:
            reason = "an order of this id was left to the backfill that said something else"
            verdicts[index] = Verdict(order.order_id, "conflict", reason)
        elif not order.identities and (is_other or (verdict is not None and verdict.status != "conflict")):
            # Also behind another order under its id in this batch: it is what was left that it is compared with.
            reason = "created before the start: left to the backfill"
            verdicts[index] = Verdict(order.order_id, "before_start", reason)
    return [order for order in marked if order.order_id not in other and order.identities]


def _said_by_kept(tx: Transaction, unit: Unit, order_ids: Sequence[str], why: Why) -> dict[str, int]:
    """What the orders said that are kept under these ids."""
    kept = load(tx, unit.tables.kept, {"order_id": order_ids, "why": [why] * len(order_ids)}, ("body",))
    decode = msgspec.json.Decoder(CompletedOrder).decode
    return {order_id: _said_as_sent(decode(body)) for (order_id, _), (body,) in kept.items()}


def _said_as_sent(sent: CompletedOrder) -> int:
    return fingerprint(sent, micros(sent.created_at))


def _keep_refused(
    tx: Transaction,
    unit: Unit,
    orders: Sequence[CompletedOrder],
    arrived: Sequence[tuple[int, Order]],
    refused: dict[int, Why],
    verdicts: list[Verdict | None],
) -> None:
    """Keep orders that are late or cannot be placed; of them, take out and tell what is known, and what conflicts."""

    def tell(found: Mapping[int, Verdict]) -> None:
        for index, verdict in found.items():
            verdicts[index] = verdict
            del refused[index]

    tell(_known_otherwise(tx, unit, orders, arrived, refused, verdicts))
    tell(_kept_otherwise(tx, unit, orders, refused))


def _known_otherwise(
    tx: Transaction,
    unit: Unit,
    orders: Sequence[CompletedOrder],
    arrived: Sequence[tuple[int, Order]],
    refused: Mapping[int, Why],
    verdicts: Sequence[Verdict | None],
) -> dict[int, Verdict]:
    """What is to be said of orders that cannot be placed and whose ids were counted, or left to history.

    One that lacks room and is live for a type was left to history for others only: it is set aside until there is room.
    """
    aside = [index for index, why in refused.items() if why == "set_aside"]
    ids = sorted({orders[index].order_id for index in aside})
    marks = load(tx, unit.tables.marks, {"order_id": ids}, ("fingerprint",))
    left = {order.order_id: _said(order) for index, order in arrived if _has_status(verdicts[index], "before_start")}
    left |= _said_by_kept(tx, unit, ids, "before_start")
    known: dict[str, tuple[int, Status, str]] = {
        **{order_id: (said, "before_start", "left to the backfill") for order_id, said in left.items()},
        **{order_id: (said, "duplicate", "counted") for (order_id,), (said,) in marks.items()},
    }
    is_live = {index for index, order in arrived if order.identities}
    found: dict[int, Verdict] = {}
    for index in aside:
        sent = orders[index]
        if sent.order_id not in known:
            continue
        said, status, what = known[sent.order_id]
        if said != _said_as_sent(sent):
            reason = f"an order of this id was {what} that said something else"
            found[index] = Verdict(sent.order_id, "conflict", reason)
        elif status == "duplicate" or index not in is_live:
            found[index] = Verdict(sent.order_id, status)
    return found


def _kept_otherwise(
    tx: Transaction, unit: Unit, orders: Sequence[CompletedOrder], refused: Mapping[int, Why]
) -> dict[int, Verdict]:
    """Keep orders, under an id one for a reason: another one is a conflict, or it would be gone without a word.

    Of two who keep one at once, the second waits for the first, and sees it here.
    """
    new = keep(tx, unit, [(orders[index], why) for index, why in refused.items()])
    times = Counter((orders[index].order_id, why) for index, why in refused.items())
    known = {key for key, count in times.items() if count > 1 or key not in new}
    said = {
        (order_id, why): each
        for why in {why for _, why in known}
        for order_id, each in _said_by_kept(tx, unit, sorted(key[0] for key in known if key[1] == why), why).items()
    }
    if known - said.keys():
        raise LostRace("an order that was kept is gone")
    reason = "an order of this id is kept that said something else"
    return {
        index: Verdict(orders[index].order_id, "conflict", reason)
        for index, why in refused.items()
        if (key := (orders[index].order_id, why)) in known and said[key] != _said_as_sent(orders[index])
    }


def _leave(
    tx: Transaction,
    unit: Unit,
    stood: Stood,
    arrived: Sequence[tuple[int, Order]],
    verdicts: Sequence[Verdict | None],
) -> int:
    """Keep the orders that history has to count, and tell it of new ones; returns how many are new.

    Late ones are not among them: what is too old to be told from a repeat, or has a time that is none, would make a
    history incomplete that was whole, and nothing could settle that.
    """
    waiting = [order for index, order in arrived if _is_left(order, verdicts[index])]
    left = {order.order_id: order.left for order in reversed(waiting)}
    new = keep(tx, unit, [(order.sent, "before_start") for order in waiting])
    _tell_history(tx, unit, stood, {name for order_id, _ in new for name in left[order_id]})
    return len(new)


def _has_status(verdict: Verdict | None, status: Status) -> bool:
    return verdict is not None and verdict.status == status


def _is_left(order: Order, verdict: Verdict | None) -> bool:
    """Whether history has to count an order, for some of its identities at least."""
    return bool(order.left) and verdict is not None and verdict.status != "conflict"


def _cells(orders: Sequence[Order]) -> Columns:
    """One more in the live part for each identity that an order counts for: each cell once, in key order."""
    of_types = [_cells_of_type(*each) for each in _found_by_type(orders)]
    return {name: list(chain.from_iterable(each[name] for each in of_types)) for name in of_types[0]}


def _found_by_type(orders: Sequence[Order]) -> list[tuple[int, list[tuple[str, int, int]]]]:
    """By identity type, in order: the identity, slice and moment of every order that counts for one of the type."""
    by_type: dict[int, list[tuple[str, int, int]]] = defaultdict(list)
    for order in orders:
        created_at_us, slice_id = order.created_at_us, order.slice_id
        for type_id, value in order.identities.items():
            by_type[type_id].append((value, slice_id, created_at_us))
    return sorted(by_type.items())


def _cells_of_type(type_id: int, found: Sequence[tuple[str, int, int]]) -> Columns:
    columns = _each_once(sorted(found))
    names = ("identity_value", "slice_id", "live_count", "live_from_us", "live_to_us")
    return {"identity_type": [type_id] * len(columns[0]), **dict(zip(names, columns, strict=True))}


def _each_once(found: Sequence[tuple[str, int, int]]) -> tuple[Sequence[Any], ...]:
    """The cells of what stands in order, with their counts, first and last moments; few of them are found twice."""
    values, slices, moments = zip(*found, strict=True)
    counts, last = [1] * len(found), list(moments)
    again = compress(count(1), map(eq, values, islice(values, 1, None)))
    alike = [at for at in again if slices[at] == slices[at - 1]]
    for at in reversed(alike):  # the moments of a cell ascend
        counts[at - 1] += counts[at]
        last[at - 1] = last[at]
    cells = (values, slices, counts, moments, last)
    if not alike:
        return cells
    is_first = bytearray(b"\1") * len(found)
    for at in alike:
        is_first[at] = 0
    return tuple(list(compress(column, is_first)) for column in cells)


def _adding(tx: Transaction, unit: Unit, orders: Sequence[Order]) -> Iterator[Statement]:
    """What adds orders to their cells, type by type, which is in key order: the first is made up, others when asked."""
    statements = _added_by_type(tx, unit, orders)
    return chain(list(islice(statements, 1)), statements)


def _added_by_type(tx: Transaction, unit: Unit, orders: Sequence[Order]) -> Iterator[Statement]:
    for type_id, found in _found_by_type(orders):
        yield from _added(tx, unit, _cells_of_type(type_id, found))


def _added(tx: Transaction, unit: Unit, cells: Columns) -> list[Statement]:
    return increments(tx, unit.tables.cells, cells, least=["live_from_us"], greatest=["live_to_us"])


def _add(tx: Transaction, unit: Unit, counted: Sequence[Order], adding: Iterator[Statement] | None) -> None:
    """Add orders to their cells, by what is made up here unless it is at hand."""
    if adding is not None:
        tx.run_meanwhile(adding)
        return
    for sql, parameters in _added(tx, unit, _cells(counted)):
        tx.driver(sql, parameters)


def take_back(tx: Transaction, unit: Unit, cells: Sequence[tuple[int, str, int]]) -> dict[tuple[int, str, int], int]:
    """Take one order from the live part of each cell; returns what is left. The interval of what is left stays."""
    rows = increment(
        tx,
        unit.tables.cells,
        {
            **_keys_of(cells),
            "live_count": [-1] * len(cells),
            "live_from_us": [NEVER_FROM_US] * len(cells),
            "live_to_us": [NEVER_TO_US] * len(cells),
        },
        least=["live_from_us"],
        greatest=["live_to_us"],
        returning=["live_count"],
    )
    left = {(key[0], key[1], key[2]): count for key, (count,) in rows.items()}
    _forget_intervals(tx, unit, [cell for cell, count in left.items() if count == 0])
    return left


def _forget_intervals(tx: Transaction, unit: Unit, emptied: Sequence[tuple[int, str, int]]) -> None:
    """The next order of a cell of which nothing is left is its first and its last."""
    columns: Columns = {
        **_keys_of(emptied),
        "live_from_us": [NEVER_FROM_US] * len(emptied),
        "live_to_us": [NEVER_TO_US] * len(emptied),
    }
    update(tx, unit.tables.cells, columns)


def _keys_of(cells: Sequence[tuple[int, str, int]]) -> dict[str, list[Any]]:
    return {
        "identity_type": [each[0] for each in cells],
        "identity_value": [each[1] for each in cells],
        "slice_id": [each[2] for each in cells],
    }


def _free_reservations(tx: Transaction, unit: Unit, order_ids: Sequence[str]) -> None:
    """A place that was held for an order is taken by the order itself."""
    if tx.rows(unit.any_reservation):
        delete(tx, unit.tables.reservations, {"order_id": order_ids})


def keep(tx: Transaction, unit: Unit, orders: Sequence[tuple[CompletedOrder, Why]]) -> set[Row]:
    """Remember orders that were not counted, or not for all their identities, so that they can be listed.

    Returns the ids of those that were not known yet, each with why it is kept.
    """
    by_key: dict[tuple[str, Why], CompletedOrder] = {}
    for sent, why in orders:
        by_key.setdefault((sent.order_id, why), sent)
    if not by_key:
        return set()
    encode = msgspec.json.Encoder().encode
    return insert_new(
        tx,
        unit.tables.kept,
        {
            "order_id": [order_id for order_id, _ in by_key],
            "why": [why for _, why in by_key],
            "created_at_us": [micros(sent.created_at) for sent in by_key.values()],
            "kept_at_us": [tx.now_us] * len(by_key),
            "body": [encode(sent).decode() for sent in by_key.values()],
        },
    )


def _tell_history(tx: Transaction, unit: Unit, stood: Stood, left: Collection[str]) -> None:
    """Whoever counts the history of types learns that orders were left to it: what was looked through may lack them.

    Where that is known, or nobody has begun, the state is held as it is: who looks from then on sees the orders.
    """
    if not left:
        return
    behind = {kind.name for kind in stood.state.identities if kind.source and not kind.is_behind and kind.name in left}
    if not behind:
        unit.hold(tx, stood)
        return
    types = [structs.replace(each, is_behind=True) if each.name in behind else each for each in stood.state.identities]
    unit.change(tx, stood, structs.replace(stood.state, identities=types))


def _measure(unit: Unit, verdicts: Sequence[Verdict], left_to_history: int) -> None:
    metrics.LEFT_TO_HISTORY.labels(unit.name).inc(left_to_history)
    for status, times in Counter(each.status for each in verdicts).items():
        metrics.ORDERS.labels(unit.name, status).inc(times)
