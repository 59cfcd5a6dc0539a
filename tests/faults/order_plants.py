"""Planted bugs of order statistics, each with the harness that must catch it; planted as those in plants.py are."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa
from msgspec import structs

from keyfold.core import audit
from keyfold.core.store import Transaction
from keyfold.orders.model import CompletedOrder, micros
from keyfold.orders.service import backfilling, checking, correcting, counting, filling, splitting, sweeping
from keyfold.orders.service.history import History
from keyfold.orders.service.jobs import Job
from keyfold.orders.service.unit import DAY_US, Unit
from keyfold.orders.worker import Sweep
from tests.faults.plants import Plot, commit, commit_after, look_then_insert, not_there, plant

SIMULATOR, KILLS, WRITERS, HISTORY = "order simulator", "order kill sweep", "order writers", "order history"


def _is(table: sa.Table, name: str) -> bool:
    return table.name.endswith(f"_{name}")


def _only(place: Any, name: str, instead: Callable[..., set[Any]]) -> Callable[..., set[Any]]:
    """An `insert_new` that is another for the table of this name."""
    insert_new = place.insert_new
    return lambda tx, table, columns: (instead if _is(table, name) else insert_new)(tx, table, columns)


def _marking(instead: Callable[..., set[Any]]) -> Callable[..., tuple[set[Any], None]]:
    """Another way to insert marks of orders, with which nothing is made up meanwhile."""
    return lambda tx, table, orders, columns_of, _: (instead(tx, table, columns_of(orders)), None)


# Marks ---------------------------------------------------------------------------------------------------------------


@plant("an order leaves no mark", SIMULATOR, "orders")
def _(plot: Plot) -> None:
    plot.name(counting, "insert_new_meanwhile", _marking(not_there))


@plant("the fingerprint of an order is not looked at", SIMULATOR, "orders")
def _(plot: Plot) -> None:
    plot.name(counting, "fingerprint", lambda *_: 0)


@plant("a late order is counted", SIMULATOR, "orders")
def _(plot: Plot) -> None:
    plot.name(Unit, "late_before_us", lambda *_: 0)


@plant("what is late goes by the clock alone", SIMULATOR, "orders")
def _(plot: Plot) -> None:
    plot.name(Unit, "late_before_us", lambda unit, stood, now_us: now_us - unit.settings.dedupe_days * DAY_US)


@plant("the watermark of orders moves back", SIMULATOR, "orders")
def _(plot: Plot) -> None:
    def move(tx: Transaction, unit: Unit) -> bool:
        edge = (tx.now_us // DAY_US - unit.settings.dedupe_days) * DAY_US
        tx.execute(sa.update(unit.tables.state).values(late_before_us=edge))
        return True

    plot.name(sweeping, "move_watermark", move)


@plant("marks of orders are purged ahead of the watermark", SIMULATOR, "orders")
def _(plot: Plot) -> None:
    delete_oldest = sweeping._delete_oldest

    def delete(tx: Transaction, table: sa.Table, column: Any, before: int, rows_max: int) -> int:
        return delete_oldest(tx, table, column, before + 2 * DAY_US if _is(table, "marks") else before, rows_max)

    plot.name(sweeping, "_delete_oldest", delete)


@plant("an order that is left to history is marked", SIMULATOR, "orders")
def _(plot: Plot) -> None:
    keep, insert_new = counting.keep, counting.insert_new

    def keep_and_mark(tx: Transaction, unit: Unit, orders: Sequence[tuple[CompletedOrder, str]]) -> Any:
        kept = keep(tx, unit, orders)  # type: ignore[arg-type]
        for sent in [sent for sent, why in orders if why == "before_start"]:
            mark = {"order_id": sent.order_id, "created_at_us": micros(sent.created_at)}
            mark |= dict.fromkeys(("identities", "moved"), "{}")
            numbers = dict.fromkeys(("fingerprint", "slice_id", "is_corrected"), 0)
            insert_new(tx, unit.tables.marks, {name: [value] for name, value in {**mark, **numbers}.items()})
        return kept

    plot.name(counting, "keep", keep_and_mark)


@plant("marks of orders are committed before what they vouch for", KILLS, "orders")
def _(plot: Plot) -> None:
    commit_after(plot, counting, "insert_new_meanwhile")


@plant("marks of orders are committed after what they vouch for", KILLS, "orders")
def _(plot: Plot) -> None:
    insert_new, add, kept = counting.insert_new, counting._add, list[tuple[Any, Any]]()

    def mark_later(tx: Transaction, table: sa.Table, columns: Any) -> set[Any]:
        kept[:] = [(table, columns)]
        return not_there(tx, table, columns)

    def add_commit_and_mark(tx: Transaction, *given: Any) -> None:
        add(tx, *given)
        commit(tx)
        insert_new(tx, *kept[0])

    plot.name(counting, "insert_new_meanwhile", _marking(mark_later))
    plot.name(counting, "_add", add_commit_and_mark)


@plant("marks of orders are looked for, and then inserted", WRITERS, "orders")
def _(plot: Plot) -> None:
    plot.name(counting, "insert_new_meanwhile", _marking(look_then_insert(counting.insert_new)))


# Cells ---------------------------------------------------------------------------------------------------------------


@plant("one identity of an order is dropped", SIMULATOR, "orders")
def _(plot: Plot) -> None:
    add = counting._add

    def add_first(tx: Transaction, unit: Unit, counted: Sequence[Any], _: Any) -> None:
        first = [dict([next(iter(each.identities.items()))]) for each in counted]
        add(tx, unit, [structs.replace(each, identities=one) for each, one in zip(counted, first, strict=True)], None)

    plot.name(counting, "_add", add_first)


@plant("an order from before the start counts live", SIMULATOR, "orders")
def _(plot: Plot) -> None:
    def every_identity(order: CompletedOrder, state: Any) -> dict[int, str]:
        return {each.type_id: order.identities[each.name] for each in state.identities if each.name in order.identities}

    plot.name(counting, "live_identities", every_identity)


@plant("the interval counted is that of the last order", SIMULATOR, "orders")
def _(plot: Plot) -> None:
    increments = counting.increments

    def overwrite(tx: Transaction, table: sa.Table, columns: Any, **_: Any) -> Any:
        return increments(tx, table, columns, latest=["live_from_us", "live_to_us"])

    plot.name(counting, "increments", overwrite)


@plant("what was late is not kept", SIMULATOR, "orders")
def _(plot: Plot) -> None:
    plot.name(counting, "keep", lambda *_: [])


# Places --------------------------------------------------------------------------------------------------------------


@plant("a place goes on being held for an order that was counted", SIMULATOR, "orders")
def _(plot: Plot) -> None:
    plot.name(counting, "_free_reservations", lambda *_: None)


@plant("places that are held are not counted", SIMULATOR, "orders")
def _(plot: Plot) -> None:
    plot.name(checking, "_held_by_others", lambda *_: 0)


@plant("whoever reserves takes no gate", WRITERS, "orders")
def _(plot: Plot) -> None:
    increment = checking.increment

    def pass_by(tx: Transaction, table: sa.Table, columns: Any, **named: Any) -> Any:
        return {} if _is(table, "gates") else increment(tx, table, columns, **named)

    plot.name(checking, "increment", pass_by)


@plant("whoever reserves takes the gate of the first identity alone", WRITERS, "orders")
def _(plot: Plot) -> None:
    increment = checking.increment

    def take_first(tx: Transaction, table: sa.Table, columns: Any, **named: Any) -> Any:
        first = {name: values[:1] for name, values in columns.items()}
        return increment(tx, table, first if _is(table, "gates") else columns, **named)

    plot.name(checking, "increment", take_first)


# Corrections ---------------------------------------------------------------------------------------------------------


@plant("an order is taken back as often as asked", SIMULATOR, "orders")
def _(plot: Plot) -> None:
    insert_new = correcting.insert_new

    def insert(tx: Transaction, table: sa.Table, columns: Any) -> set[Any]:
        insert_new(tx, table, columns)
        return {(each,) for each in columns["order_id"]}

    plot.name(correcting, "insert_new", insert)
    plot.name(correcting, "update", lambda *_: 0)  # the mark itself says so as well


@plant("corrections are looked for, and then inserted", WRITERS, "orders")
def _(plot: Plot) -> None:
    plot.name(correcting, "insert_new", _only(correcting, "corrections", look_then_insert(correcting.insert_new)))


@plant("an order is taken back without an audit record", SIMULATOR, "orders")
def _(plot: Plot) -> None:
    plot.name(audit, "record", lambda *_: None)


@plant("history counts an order that was taken back", SIMULATOR, "orders")
def _(plot: Plot) -> None:
    plot.name(backfilling, "corrected", lambda *_: [])


# History -------------------------------------------------------------------------------------------------------------


@plant("a backfill adds instead of setting", SIMULATOR, "orders")
def _(plot: Plot) -> None:
    increment = filling.increment

    def add(tx: Transaction, table: sa.Table, columns: Any, *, latest: Sequence[str]) -> Any:
        return increment(tx, table, columns, latest=[name for name in latest if name != "history_count"])

    plot.name(filling, "increment", add)


@plant("cells that vanished from history are not emptied", SIMULATOR, "orders")
def _(plot: Plot) -> None:
    plot.name(filling, "_zero", lambda *_: None)


@plant("what is left to history meets no order that was counted under its id", SIMULATOR, "orders")
def _(plot: Plot) -> None:
    def leave_all(tx: Transaction, unit: Unit, arrived: Any, marked: Any, verdicts: Any) -> Any:
        for index, order in arrived:
            if not order.identities:
                verdicts[index] = counting.Verdict(order.order_id, "before_start")
        return [order for order in marked if order.identities]

    plot.name(counting, "_told_from_left", leave_all)


@plant("a run moves on before its step has committed", KILLS, "orders")
def _(plot: Plot) -> None:
    commit_after(plot, Job, "step")


@plant("a backfill takes orders that were created at the start", HISTORY, "orders")
def _(plot: Plot) -> None:
    cells = History.cells

    def too_many(history: History, kind: Any, *given: Any) -> Any:
        return cells(history, structs.replace(kind, start_us=kind.start_us + 1), *given)

    plot.name(History, "cells", too_many)


@plant("a split takes orders from before the start for live ones", HISTORY, "orders")
def _(plot: Plot) -> None:
    all_cells = History.all_cells

    def all_live(history: History, kind: Any, *given: Any, **named: Any) -> Any:
        return (structs.replace(each, is_live=True) for each in all_cells(history, kind, *given, **named))

    plot.name(History, "all_cells", all_live)


# A new dimension -----------------------------------------------------------------------------------------------------


@plant("a cell is split that history does not explain", SIMULATOR, "orders")
def _(plot: Plot) -> None:
    plot.name(splitting, "_is_explained", lambda cell, parts: bool(parts))


@plant("an old cell goes before its parts come", KILLS, "orders")
def _(plot: Plot) -> None:
    commit_after(plot, splitting, "delete")


@plant("an old cell stays beside its parts", SIMULATOR, "orders")
def _(plot: Plot) -> None:
    plot.name(splitting, "delete", lambda *_: 0)


@plant("orders are swept while a dimension is added", SIMULATOR, "orders")
def _(plot: Plot) -> None:
    swept, stood = Sweep._swept, Unit.stood

    def sweep_blindly(sweep: Sweep, unit: Unit) -> int:
        blind = copy.copy(unit)

        def stood_before(tx: Transaction) -> Any:
            found = stood(unit, tx)
            return structs.replace(found, state=structs.replace(found.state, splitting=None))

        blind.stood = stood_before  # type: ignore[method-assign]
        return swept(sweep, blind)

    plot.name(Sweep, "_swept", sweep_blindly)


@plant("where a split moved an order is not remembered", SIMULATOR, "orders")
def _(plot: Plot) -> None:
    plot.name(splitting._Splitter, "_mark_moved", lambda *_: None)
