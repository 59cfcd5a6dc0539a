"""Growth of order statistics: orders/s taken in and the p99 of a read, on stores of 0.1 M and 1 M cells, and of 10 M.

Set KEYFOLD_BENCH_GROWTH=full for the store of 10 M (gigabytes of disk a kind of store, and a long fill). The stores
of all sizes stand side by side and take turns. They are filled directly, as in b5_order_read: people with four
identities and 5 cells each, under values that are scattered over the key space and arrive in no order. Orders come with
the four identities of one person and one of the five slices that this person has, everybody equally likely: every order
changes four cells that are there, the hardest for a cache. Transactions are of 1,000 orders, and of what the door
gathers at most (`limits.gather_items_max`). The larger ones flatter small stores: 40,000 cells lie on nine of ten pages
of SQLite's 1 M, two on each, but all on pages of their own among 10 M. Reads are four identities, one filter and two
group-bys, in process, one caller. "flat within 1.5×" is a ratio of at least 0.67 between the two largest. Marks of
earlier rounds stay, equally many in each store.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from bench import growth
from bench.b2_profile_updates import undisturbed_rate
from bench.b4_order_intake import BRANDS, TRANSACTION_ORDERS, orders_at, take_in_all
from bench.b5_order_read import CELLS_OF_PERSON, GROUP_BY, fill, identity, slices_of
from bench.harness import Race
from keyfold.core.context import Context
from keyfold.core.store import Transaction
from keyfold.orders.model import CompletedOrder, Identity, Property
from keyfold.orders.service.reading import IdentityData, Query, read_orders
from keyfold.orders.service.unit import Unit
from keyfold.orders.settings import RIDES_IDENTITIES

SIZES = (1_000, TRANSACTION_ORDERS)
TITLES = growth.Titles("cells", "order intake", "orders/s", "an order read")


def races(quick: bool) -> Iterator[Race]:
    return growth.races(
        quick, TITLES, grown_at, transactions={size: (10_000 if quick else 50_000) // size for size in SIZES}
    )


@contextmanager
def grown_at(url: str, count: int) -> Iterator["Grown"]:
    with orders_at(url) as (context, unit):
        fill(url, count // CELLS_OF_PERSON)
        yield Grown(context, unit, count)


class Grown(growth.Grown[list[IdentityData]]):
    """A store that holds so many cells."""

    def __init__(self, context: Context, unit: Unit, count: int) -> None:
        super().__init__(context, count)
        self._unit = unit

    def write(self, transactions: int, size: int) -> float:
        orders = [self._order() for _ in range(transactions * size)]
        return undisturbed_rate(len(orders), lambda: take_in_all(self._context, self._unit, orders, size))

    def _question(self) -> Callable[[Transaction], list[IdentityData]]:
        value = identity(self._person())
        brand = self._chance.choice(BRANDS)
        query = Query([Identity(name, value) for name in RIDES_IDENTITIES], [Property("brand", brand)], GROUP_BY)
        return lambda tx: read_orders(tx, self._unit, query)

    def _is_whole(self, answer: list[IdentityData]) -> bool:
        return len(answer) == len(RIDES_IDENTITIES)

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
