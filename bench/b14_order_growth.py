"""Growth of order statistics: orders/s taken in and the p99 of a read, on stores of 0.1 M and 1 M cells, and of 10 M.

Set KEYFOLD_BENCH_GROWTH=full for the store of 10 M (gigabytes of disk a kind of store, and a long fill). The stores
of all sizes stand side by side and take turns. They are filled directly, as in b5_order_read: people with four
identities and 5 cells each, under values that are scattered over the key space and arrive in no order. Orders come in
transactions of `limits.gather_items_max`, with the four identities of one person and one of the five slices that this
person has, everybody equally likely: every order changes four cells that are there, the hardest for a cache. Reads are
four identities, one filter and two group-bys, in process, one caller. "flat within 1.5×" is a ratio of at least 0.67
between the two largest. Marks of earlier rounds stay, equally many in each store. A small store has so few people that
a transaction meets many of their cells twice, which flatters it: 0.1 M cells are those of 5,000 people.
"""

import itertools
import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime

import numpy as np

from bench import stores
from bench.b2_profile_updates import undisturbed_rate
from bench.b4_order_intake import BRANDS, TRANSACTION_ORDERS, orders_at, take_in_all
from bench.b5_order_read import CELLS_OF_PERSON, GROUP_BY, fill, identity, slices_of
from bench.b14_growth import FULL, MOONSHOT, MUST, OPTION, QUICK, USUAL
from bench.harness import Goal, Race, Side
from keyfold.core import memory
from keyfold.core.context import Context
from keyfold.orders.model import CompletedOrder, Identity, Property
from keyfold.orders.service.reading import Query, read_orders
from keyfold.orders.service.unit import Unit
from keyfold.orders.settings import RIDES_IDENTITIES


class Sizes:
    def __init__(self, quick: bool) -> None:
        self.cells = QUICK if quick else FULL if os.environ.get(OPTION) == "full" else USUAL
        self.transactions = 1 if quick else 5
        self.reads = 200 if quick else 2_000


def races(quick: bool) -> Iterator[Race]:
    memory.settle()  # as every server and worker does when it starts
    sizes = Sizes(quick)
    with stores.each_kind() as kinds:
        for kind, new_url in kinds.items():
            with ExitStack() as stack:
                grown = []
                for count in sizes.cells:
                    url = new_url()
                    context, unit = stack.enter_context(orders_at(url))
                    fill(url, count // CELLS_OF_PERSON)
                    grown.append(Grown(context, unit, count))
                intake = [Side(_size(each.count), lambda each=each: each.take_in(sizes.transactions)) for each in grown]  # type: ignore[misc]
                reads = [Side(_size(each.count), lambda each=each: each.read(sizes.reads)) for each in grown]  # type: ignore[misc]
                goals = _goals(sizes.cells)
                yield Race(title=f"order intake, {kind}", unit="orders/s", sides=intake, goals=goals)
                yield Race(title=f"p99 of an order read, {kind}", unit="ms", sides=reads, goals=goals, better="less")


def _goals(counts: Sequence[int]) -> list[Goal]:
    """What the table asks for is the step from 1 M to 10 M; a smaller one is shown without a grade."""
    before, last = counts[-2:]
    if (before, last) == FULL[-2:]:
        return [Goal(side=_size(last), against=_size(before), must=MUST, moonshot=MOONSHOT)]
    return [Goal(side=_size(last), against=_size(before), note=f"the step to 10 M needs {OPTION}=full")]


def _size(count: int) -> str:
    return f"{count / 1_000_000:g} M cells"


class Grown:
    """A store that holds so many cells."""

    def __init__(self, context: Context, unit: Unit, count: int) -> None:
        self.count = count
        self._context = context
        self._unit = unit
        self._ids = itertools.count()
        self._chance = random.Random(14)
        self.take_in(1)
        self.read(20)

    def take_in(self, transactions: int) -> float:
        orders = [self._order() for _ in range(transactions * TRANSACTION_ORDERS)]
        return undisturbed_rate(len(orders), lambda: take_in_all(self._context, self._unit, orders))

    def read(self, requests: int) -> float:
        """The p99 in milliseconds."""
        taken = []
        for _ in range(requests):
            value = identity(self._person())
            query = Query(
                [Identity(name, value) for name in RIDES_IDENTITIES],
                [Property("brand", self._chance.choice(BRANDS))],
                GROUP_BY,
            )
            started = time.perf_counter()
            answer = self._context.store.read(lambda tx, query=query: read_orders(tx, self._unit, query))  # type: ignore[misc]
            taken.append(time.perf_counter() - started)
            assert len(answer) == len(RIDES_IDENTITIES)
        return float(np.percentile(taken, 99)) * 1000

    def _person(self) -> int:
        return self._chance.randrange(self.count // CELLS_OF_PERSON)

    def _order(self) -> CompletedOrder:
        person = self._person()
        return CompletedOrder(
            f"{self._chance.getrandbits(96):024x}-{next(self._ids)}",
            datetime.now(UTC),
            dict.fromkeys(RIDES_IDENTITIES, identity(person)),
            self._chance.choice(slices_of(person)).values,
        )
