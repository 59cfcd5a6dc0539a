"""Order intake: completed orders with four identities each, exactly once, against the document's transaction.

Orders have a random id of 32 hex digits, a phone, an account, a card and a device, each of 30,000 equally likely, and
one of 6 tariffs, 3 brands and 3 payment types, by Zipf 1. Every round starts from an empty store. Ours is the service's
`must_be_orders` and `count_orders` in transactions of what the HTTP door gathers (`limits.gather_items_max` orders),
orders decoded beforehand; "two connections" are two threads of one process, as `keyfold serve` has two lanes, each with
half of the orders. Every commit is synced.

Peers are on the bare driver (psycopg), one connection, on the document's two tables. "one order a transaction" is the
document's transaction mended as it means: the order id into `processed_orders`, then four upserts, as prepared
statements. It is too slow for the whole stream, so it counts the first 2,000 orders. "batch SQL by hand" takes the same
batches as ours in two statements: the ids with ON CONFLICT DO NOTHING RETURNING, and one upsert from `unnest` of the
orders that are new, spread to identities, aggregated and sorted by the server. It keeps no content of an order, so it
cannot tell a repeat from a conflict, has no late orders and no reservations, and cannot take an order back; it knows
neither starts nor slices. On SQLite the same is done with `executemany`, aggregated in Python.

After every run all cells are compared with a plain count, and ours is sent a batch again, which must change nothing.
"""

import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import psycopg
import sqlalchemy as sa

from bench import stores
from bench.b2_profile_updates import undisturbed_rate
from bench.harness import Goal, Race, Side
from bench.serving import prepared
from keyfold.core import memory
from keyfold.core.context import Context
from keyfold.core.limits import Limits
from keyfold.core.settings import load
from keyfold.core.store import Transaction
from keyfold.core.store.sqlite import driver as sqlite_driver
from keyfold.orders.model import CompletedOrder
from keyfold.orders.part import PART
from keyfold.orders.service.counting import Verdict, count_orders, must_be_orders
from keyfold.orders.service.unit import Unit, opened
from keyfold.orders.settings import RIDES_DIMENSIONS, RIDES_IDENTITIES, OrdersSettings

IDENTITIES = 30_000  # of each type
TARIFFS = ("econom", "comfort", "comfortplus", "business", "minivan", "start")
BRANDS = ("yataxi", "uber", "yango")
PAYMENTS = ("card", "cash", "corp")
STREAM_SECONDS = 86_400
TRANSACTION_ORDERS = Limits().gather_items_max
ONE_BY_ONE = 2_000
UNIT = "rides"

OURS, OURS_TWICE = "count_orders, one connection", "count_orders, two connections"
ONE, BATCH = "one order a transaction", "batch SQL by hand"

Cells = Counter[tuple[str, ...]]  # identity type and value, tariff, brand, payment type

DOCUMENT_SCHEMA = """
CREATE TYPE identity_type AS ENUM ('phone_id', 'yandex_uid', 'card_id', 'device_id');
CREATE TABLE orders_counters (
  id UUID PRIMARY KEY DEFAULT gen_random_uuid(),
  created_at TIMESTAMPTZ NOT NULL DEFAULT now(),
  updated_at TIMESTAMPTZ NOT NULL DEFAULT now(),
  identity_type_name identity_type NOT NULL,
  identity_value TEXT NOT NULL,
  counter_value INTEGER NOT NULL,
  counted_from TIMESTAMPTZ NOT NULL,
  counted_to TIMESTAMPTZ NOT NULL,
  tariff TEXT NOT NULL,
  brand TEXT NOT NULL,
  payment_method_type TEXT NOT NULL
);
CREATE UNIQUE INDEX orders_counter_idx_tariff_brand_payment_type
  ON orders_counters (identity_value, identity_type_name, tariff, brand, payment_method_type)
  INCLUDE (counter_value);
CREATE TABLE processed_orders (
  id BIGSERIAL PRIMARY KEY,
  order_id TEXT NOT NULL UNIQUE,
  created_at TIMESTAMPTZ NOT NULL DEFAULT now()
);
"""

_ADD_UP = """
ON CONFLICT (identity_value, identity_type_name, tariff, brand, payment_method_type) DO UPDATE SET
  counter_value = orders_counters.counter_value + excluded.counter_value,
  counted_from = {least}(orders_counters.counted_from, excluded.counted_from),
  counted_to = {greatest}(orders_counters.counted_to, excluded.counted_to)
"""
_INTO = """
INSERT INTO orders_counters
  (identity_type_name, identity_value, counter_value, counted_from, counted_to, tariff, brand, payment_method_type)
"""
_ADD_UP_POSTGRES = _ADD_UP.format(least="least", greatest="greatest")

MARK_ONE = "INSERT INTO processed_orders (order_id) VALUES (%s)"
COUNT_ONE = f"{_INTO} VALUES (%s, %s, 1, %s, %s, %s, %s, %s) {_ADD_UP_POSTGRES}"
MARK_BATCH = """
INSERT INTO processed_orders (order_id) SELECT * FROM unnest(%s::text[]) AS rows (order_id) ORDER BY order_id
ON CONFLICT DO NOTHING RETURNING order_id
"""
COUNT_BATCH = f"""
{_INTO}
SELECT each.type, each.value, count(*), min(created), max(created), tariff, brand, payment
FROM unnest(%s::text[], %s::timestamptz[], %s::text[], %s::text[], %s::text[], %s::text[], %s::text[], %s::text[],
            %s::text[]) AS rows (order_id, created, phone, account, card, device, tariff, brand, payment),
  LATERAL (VALUES ('phone_id'::identity_type, phone), ('yandex_uid', account), ('card_id', card),
                  ('device_id', device)) AS each (type, value)
GROUP BY each.type, each.value, tariff, brand, payment
ORDER BY each.value, each.type, tariff, brand, payment
{_ADD_UP_POSTGRES}
"""

SQLITE_SCHEMA = """
CREATE TABLE orders_counters (
  identity_type_name TEXT NOT NULL,
  identity_value TEXT NOT NULL,
  counter_value INTEGER NOT NULL,
  counted_from INTEGER NOT NULL,
  counted_to INTEGER NOT NULL,
  tariff TEXT NOT NULL,
  brand TEXT NOT NULL,
  payment_method_type TEXT NOT NULL,
  PRIMARY KEY (identity_value, identity_type_name, tariff, brand, payment_method_type)
) WITHOUT ROWID;
CREATE TABLE processed_orders (order_id TEXT PRIMARY KEY, created_at INTEGER NOT NULL) WITHOUT ROWID;
"""
SQLITE_MARK = "INSERT INTO processed_orders (order_id, created_at) VALUES (?, unixepoch())"
SQLITE_COUNT = f"{_INTO} VALUES (?, ?, ?, ?, ?, ?, ?, ?) {_ADD_UP.format(least='min', greatest='max')}"

CELLS = "SELECT identity_type_name, identity_value, tariff, brand, payment_method_type, counter_value"


@contextmanager
def orders_at(url: str, **options: object) -> Iterator[tuple[Context, Unit]]:
    """The product with order statistics on the store at `url`; options are settings of the unit."""
    prepared(url)
    given = {"store.url": url, "orders.units": {UNIT: options}}
    context = Context.open(load(parts={"orders": OrdersSettings}, environ={}, options=given), [PART])
    try:
        yield context, opened(context)[UNIT]
    finally:
        context.close()


class Stream:
    """The orders of a run, the same for every side."""

    def __init__(self, count: int) -> None:
        chance = np.random.default_rng(4)
        first = datetime.now(UTC) - timedelta(seconds=STREAM_SECONDS)
        seconds = np.sort(chance.integers(0, STREAM_SECONDS - 60, count)).tolist()
        people = [chance.integers(0, IDENTITIES, count).tolist() for _ in RIDES_IDENTITIES]
        values = [_chosen(chance, each, count) for each in (TARIFFS, BRANDS, PAYMENTS)]
        self.count = count
        self.orders = [
            CompletedOrder(
                uuid.UUID(bytes=chance.bytes(16)).hex,
                first + timedelta(seconds=seconds[at]),
                {name: f"{name}-{each[at]:08d}" for name, each in zip(RIDES_IDENTITIES, people, strict=True)},
                {name: each[at] for name, each in zip(RIDES_DIMENSIONS, values, strict=True)},
            )
            for at in range(count)
        ]

    def expected(self, count: int | None = None) -> Cells:
        """Every order once for each identity that it has."""
        return Cells(
            (name, value, *[order.properties[each] for each in RIDES_DIMENSIONS])
            for order in self.orders[:count]
            for name, value in order.identities.items()
        )


def _chosen(chance: np.random.Generator, values: Sequence[str], count: int) -> list[str]:
    weights = 1.0 / np.arange(1, len(values) + 1)
    return [values[at] for at in chance.choice(len(values), count, p=weights / weights.sum())]


def batches(orders: Sequence[CompletedOrder], size: int = TRANSACTION_ORDERS) -> Iterator[Sequence[CompletedOrder]]:
    for start in range(0, len(orders), size):
        yield orders[start : start + size]


def take_in(context: Context, unit: Unit, orders: Sequence[CompletedOrder]) -> list[Verdict]:
    """Count orders in one transaction, as the doors do."""

    def work(tx: Transaction) -> list[Verdict]:
        must_be_orders(tx, unit, orders)
        return count_orders(tx, unit, orders)

    return context.store.transact(work)


def take_in_all(context: Context, unit: Unit, orders: Sequence[CompletedOrder], size: int = TRANSACTION_ORDERS) -> None:
    for some in batches(orders, size):
        assert all(verdict.status == "accepted" for verdict in take_in(context, unit, some))


def races(quick: bool) -> Iterator[Race]:
    memory.settle()  # as every server and worker does when it starts
    stream = Stream(10_000 if quick else 100_000)
    with stores.each_kind() as kinds:
        for kind in ("PostgreSQL", "SQLite"):
            ours = Ours(kinds[kind], stream)
            theirs = PostgresPeer(kinds[kind], stream) if kind == "PostgreSQL" else SqlitePeer(kinds[kind], stream)
            yield _race(kind, ours, theirs)


def _race(kind: str, ours: "Ours", theirs: "PostgresPeer | SqlitePeer") -> Race:
    on_postgres = kind == "PostgreSQL"
    sides = [
        Side(OURS, ours.one_connection),
        *([Side(OURS_TWICE, ours.two_connections)] if on_postgres else []),
        Side(ONE, theirs.one_by_one),
        Side(BATCH, theirs.in_batches),
    ]
    if on_postgres:
        goals = [
            Goal(side=OURS, against=ONE, must=40, moonshot=60),
            Goal(side=OURS, against=BATCH, must=0.8, moonshot=1),
            Goal(side=OURS_TWICE, against=ONE, must=40, moonshot=60, note="two connections against one"),
            Goal(side=OURS_TWICE, against=BATCH, note="two connections against one"),
        ]
    else:
        goals = [Goal(side=OURS, against=each) for each in (ONE, BATCH)]
    batch = f"batches of {TRANSACTION_ORDERS:,}"
    return Race(title=f"{ours.count:,} orders × 4, {kind}, {batch}", unit="orders/s", sides=sides, goals=goals)


class Ours:
    """The order service on fresh stores of one kind."""

    def __init__(self, new_url: stores.NewUrl, stream: Stream) -> None:
        self._new_url = new_url
        self._orders = stream.orders
        self._expected = stream.expected()
        self.count = stream.count

    def one_connection(self) -> float:
        with orders_at(self._new_url()) as (context, unit):
            self._warm(context, unit)
            result = undisturbed_rate(self.count, lambda: take_in_all(context, unit, self._orders))
            self._must_be_counted(context, unit)
            return result

    def two_connections(self) -> float:
        halves = [self._orders[: self.count // 2], self._orders[self.count // 2 :]]
        with orders_at(self._new_url()) as (context, unit), ThreadPoolExecutor(2) as threads:
            self._warm(context, unit)
            result = undisturbed_rate(
                self.count, lambda: list(threads.map(lambda half: take_in_all(context, unit, half), halves))
            )
            self._must_be_counted(context, unit)
            return result

    def _warm(self, context: Context, unit: Unit) -> None:
        """Open the connections, with orders that are late: they leave the cells empty."""
        long_ago = datetime.now(UTC) - timedelta(days=1_000)
        warm = CompletedOrder("warm", long_ago, {"phone_id": "warm"}, {})
        assert [each.status for each in take_in(context, unit, [warm])] == ["late"]

    def _must_be_counted(self, context: Context, unit: Unit) -> None:
        repeated = next(batches(self._orders))
        assert {each.status for each in take_in(context, unit, repeated)} == {"duplicate"}
        found = context.store.read(lambda tx: cells_of(tx, unit))
        assert found == self._expected


def cells_of(tx: Transaction, unit: Unit) -> Cells:
    cells = unit.tables.cells
    names = {each.type_id: each.name for each in unit.stood(tx).state.identities}
    rows = tx.rows(f"SELECT identity_type, identity_value, slice_id, live_count FROM {cells.name}")
    values = unit.values_of(tx, {row[2] for row in rows})
    found = Cells()
    for type_id, value, slice_id, count in rows:
        found[names[type_id], value, *[values[slice_id][each] for each in RIDES_DIMENSIONS]] = count
    return found


class PostgresPeer:
    """The document's tables in a new database a run, on the bare driver."""

    def __init__(self, new_url: stores.NewUrl, stream: Stream) -> None:
        self._new_url = new_url
        self._expected = stream.expected()
        self._expected_few = stream.expected(ONE_BY_ONE)
        # As ready for the driver as ours are for the service.
        self._few = [_single(order) for order in stream.orders[:ONE_BY_ONE]]
        self._columns = [_columns(some) for some in batches(stream.orders)]
        self._count = stream.count

    def one_by_one(self) -> float:
        with self._connected() as connection:
            result = undisturbed_rate(len(self._few), lambda: self._count_singly(connection))
            self._must_be_counted(connection, self._expected_few)
            return result

    def in_batches(self) -> float:
        with self._connected() as connection:
            result = undisturbed_rate(self._count, lambda: self._count_batches(connection))
            self._count_batches(connection)
            self._must_be_counted(connection, self._expected)
            return result

    @contextmanager
    def _connected(self) -> Iterator["psycopg.Connection[Any]"]:
        with psycopg.connect(self._new_url(), autocommit=True) as connection:
            connection.execute(DOCUMENT_SCHEMA)
            yield connection

    def _count_singly(self, connection: "psycopg.Connection[Any]") -> None:
        for order_id, rows in self._few:
            with connection.transaction():
                connection.execute(MARK_ONE, (order_id,), prepare=True)
                for row in rows:
                    connection.execute(COUNT_ONE, row, prepare=True)

    def _count_batches(self, connection: "psycopg.Connection[Any]") -> None:
        for columns in self._columns:
            with connection.transaction():
                marked = connection.execute(MARK_BATCH, (columns[0],), prepare=True).fetchall()
                if len(marked) < len(columns[0]):
                    new = {order_id for (order_id,) in marked}
                    picked = [at for at, order_id in enumerate(columns[0]) if order_id in new]
                    columns = [[column[at] for at in picked] for column in columns]
                connection.execute(COUNT_BATCH, columns, prepare=True)

    def _must_be_counted(self, connection: "psycopg.Connection[Any]", expected: Cells) -> None:
        rows = connection.execute(f"{CELLS} FROM orders_counters").fetchall()
        assert Cells({row[:5]: row[5] for row in rows}) == expected


def _single(order: CompletedOrder) -> tuple[str, list[tuple[Any, ...]]]:
    """Parameters of the document's transaction."""
    values = [order.properties[each] for each in RIDES_DIMENSIONS]
    return order.order_id, [
        (name, value, order.created_at, order.created_at, *values) for name, value in order.identities.items()
    ]


def _columns(orders: Sequence[CompletedOrder]) -> list[list[Any]]:
    return [
        [order.order_id for order in orders],
        [order.created_at for order in orders],
        *[[order.identities[name] for order in orders] for name in RIDES_IDENTITIES],
        *[[order.properties[name] for order in orders] for name in RIDES_DIMENSIONS],
    ]


class SqlitePeer:
    """The same tables in a new file a run, every commit synced."""

    def __init__(self, new_url: stores.NewUrl, stream: Stream) -> None:
        self._new_url = new_url
        self._expected = stream.expected()
        self._expected_few = stream.expected(ONE_BY_ONE)
        self._rows = [_single(order) for order in stream.orders]
        self._count = stream.count

    def one_by_one(self) -> float:
        connection = self._connected()
        result = undisturbed_rate(ONE_BY_ONE, lambda: self._count_singly(connection))
        self._must_be_counted(connection, self._expected_few)
        return result

    def in_batches(self) -> float:
        connection = self._connected()
        result = undisturbed_rate(self._count, lambda: self._count_batches(connection))
        self._must_be_counted(connection, self._expected)
        return result

    def _connected(self) -> Any:
        connection = sqlite_driver().connect(sa.make_url(self._new_url()).database, isolation_level=None)
        for pragma in ("journal_mode = WAL", "synchronous = FULL"):
            connection.execute(f"PRAGMA {pragma}")
        connection.executescript(SQLITE_SCHEMA)
        return connection

    def _count_singly(self, connection: Any) -> None:
        for order_id, rows in self._rows[:ONE_BY_ONE]:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(SQLITE_MARK, (order_id,))
            for name, value, created, _, *values in rows:
                at = int(created.timestamp())
                connection.execute(SQLITE_COUNT, (name, value, 1, at, at, *values))
            connection.execute("COMMIT")

    def _count_batches(self, connection: Any) -> None:
        for start in range(0, self._count, TRANSACTION_ORDERS):
            some = self._rows[start : start + TRANSACTION_ORDERS]
            connection.execute("BEGIN IMMEDIATE")
            new = [
                rows
                for order_id, rows in some
                if connection.execute(f"{SQLITE_MARK} ON CONFLICT DO NOTHING", (order_id,)).rowcount
            ]
            sums: dict[tuple[Any, ...], list[int]] = {}
            for rows in new:
                at = int(rows[0][2].timestamp())
                for name, value, _, _, *values in rows:
                    found = sums.setdefault((value, name, *values), [0, at, at])
                    found[0] += 1
                    found[1] = min(found[1], at)
                    found[2] = max(found[2], at)
            connection.executemany(
                SQLITE_COUNT,
                [
                    (name, value, count, least, greatest, *values)
                    for (value, name, *values), (count, least, greatest) in sorted(sums.items())
                ],
            )
            connection.execute("COMMIT")

    def _must_be_counted(self, connection: Any, expected: Cells) -> None:
        rows = connection.execute(f"{CELLS} FROM orders_counters").fetchall()
        assert Cells({row[:5]: row[5] for row in rows}) == expected
        connection.close()
