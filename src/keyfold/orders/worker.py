"""The loops of order statistics: a consumer of completed orders for each unit, and the sweep."""

from collections.abc import Callable, Sequence

import msgspec

from keyfold.core.clock import SECOND_US
from keyfold.core.consumer import Consumer
from keyfold.core.context import Context
from keyfold.core.deadletters import Refusal
from keyfold.core.errors import KeyfoldError
from keyfold.core.loops import Loop
from keyfold.core.store import Transaction
from keyfold.core.topics.topic import Record
from keyfold.orders.model import CompletedOrder
from keyfold.orders.service import sweeping
from keyfold.orders.service.counting import count_orders, order_check
from keyfold.orders.service.lagging import consumer_name
from keyfold.orders.service.unit import Unit, Units, opened

_decoded = msgspec.json.Decoder(CompletedOrder).decode


def consumers(context: Context) -> list[Consumer]:
    return [_consumer(unit) for unit in opened(context)]


def _consumer(unit: Unit) -> Consumer:
    # Counts do not mind the order of orders, so nothing needs to wait behind a poison message.
    return Consumer(
        name=consumer_name(unit.name),
        topic=unit.topic,
        apply=lambda tx, records: apply_orders(tx, unit, records),
        ordered=False,
        replayable=True,
    )


def apply_orders(tx: Transaction, unit: Unit, records: Sequence[Record]) -> list[Refusal]:
    """Count the orders of a topic; those that are wrong or in conflict are returned with the reason.

    Late ones, and those that cannot be placed, are kept with the unit.
    """
    must_be_order = order_check(tx, unit)
    refused: list[Refusal] = []
    orders: list[CompletedOrder] = []
    read: list[Record] = []
    for record in records:
        try:
            order = _decoded(record.message.payload)
            must_be_order(order, "the order")
            orders.append(order)
            read.append(record)
        except (KeyfoldError, msgspec.DecodeError, UnicodeError, RecursionError) as error:
            refused.append(Refusal(record, f"{type(error).__name__}: {error}"))
    for record, verdict in zip(read, count_orders(tx, unit, orders), strict=True):
        if verdict.status == "conflict":
            refused.append(Refusal(record, f"{verdict.status}: {verdict.reason}"))
    return refused


def loops(context: Context) -> list[Loop]:
    sweep = Sweep(context, opened(context))
    return [Loop(name="orders sweep", step=sweep.step, idle_seconds=5.0, idle_seconds_max=60.0)]


class Sweep:
    """Deletes what has outlived its time, in bounded steps; several may run at once."""

    def __init__(self, context: Context, units: Units) -> None:
        self._store = context.store
        self._units = units
        self._rows_max = context.limits.purge_rows_max
        self._settle_us = (context.limits.transaction_seconds_max + 1) * SECOND_US
        self._watermarks: dict[str, tuple[int, int]] = {}  # of each unit, and since when it stands there

    def step(self) -> bool:
        """Whether there may be more."""
        swept = [self._swept(unit) for unit in self._units]
        return max(swept, default=0) >= self._rows_max

    def _swept(self, unit: Unit) -> int:
        """One bounded step of everything that ages; the most rows removed from one table."""
        self._store.transact(lambda tx: sweeping.move_watermark(tx, unit), name="orders watermark")
        purges = [purge for purge in sweeping.PURGES if purge is not sweeping.purge_marks or self._has_settled(unit)]
        return max(self._purged(unit, purge) for purge in purges)

    def _has_settled(self, unit: Unit) -> bool:
        """Whether every transaction that saw an older watermark has ended, however far it has moved."""
        stands, now_us = self._store.read(lambda tx: (unit.stood(tx).late_before_us, tx.now_us))
        if self._watermarks.get(unit.name, (None, 0))[0] != stands:
            self._watermarks[unit.name] = (stands, now_us)
        return now_us - self._watermarks[unit.name][1] > self._settle_us

    def _purged(self, unit: Unit, purge: Callable[[Transaction, Unit, int], int]) -> int:
        return self._store.transact(lambda tx: purge(tx, unit, self._rows_max), name="orders purge")
