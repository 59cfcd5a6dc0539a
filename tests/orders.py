"""Order statistics opened for a test, a clock that it moves, history as Parquet, and a slow recount to compare with."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from keyfold.core.clock import ManualClock
from keyfold.core.consumer import ConsumerWorker
from keyfold.core.context import Context, open_store
from keyfold.core.part import named_tables
from keyfold.core.relay import Relay
from keyfold.core.settings import load
from keyfold.core.store import migrate
from keyfold.core.workers import consumer_named
from keyfold.orders.model import CompletedOrder, Identity, Property
from keyfold.orders.part import PART
from keyfold.orders.service.backfilling import Backfilled, backfill
from keyfold.orders.service.counting import Verdict, count_orders, must_be_orders
from keyfold.orders.service.history import History, names_of
from keyfold.orders.service.history import opened as history_of
from keyfold.orders.service.reading import IdentityData, Query, must_be_known, read_orders
from keyfold.orders.service.splitting import Split, split, switch, wait_for_writers
from keyfold.orders.service.unit import Unit
from keyfold.orders.service.unit import opened as units_of
from keyfold.orders.settings import OrdersSettings
from tests.product import consume_all, message, put, relay_all

NOW = 1_700_000_000
DAY = 86_400
HOUR = 3_600
START = NOW + 2 * HOUR


def iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def order(
    order_id: str,
    created: float = NOW,
    identities: Mapping[str, str] | None = None,
    **properties: str,
) -> CompletedOrder:
    return CompletedOrder(
        order_id, datetime.fromtimestamp(created, UTC), dict(identities or {"phone_id": "p1"}), properties
    )


class Orders:
    """A product with order statistics, whose clock the test moves."""

    def __init__(self, context: Context, clock: ManualClock, unit: str) -> None:
        self.context = context
        self.store = context.store
        self.clock = clock
        self.unit: Unit = units_of(context)[unit]
        self.sent = 0

    def verdicts(self, *orders: CompletedOrder) -> list[Verdict]:
        """Count orders in one transaction, as the doors do."""

        def work(tx: Any) -> list[Verdict]:
            must_be_orders(tx, self.unit, orders)
            return count_orders(tx, self.unit, orders)

        return self.store.transact(work)

    def count(self, *orders: CompletedOrder) -> list[str]:
        return [each.status for each in self.verdicts(*orders)]

    def read(
        self,
        *identities: tuple[str, str],
        group_by: Sequence[str] = (),
        filters: Mapping[str, str] | None = None,
    ) -> list[IdentityData]:
        query = Query(
            [Identity(*each) for each in identities],
            [Property(name, value) for name, value in (filters or {}).items()],
            list(group_by),
        )
        self.store.read(lambda tx: must_be_known(self.unit.stood(tx).state, query))
        return self.store.read(lambda tx: read_orders(tx, self.unit, query))

    def total(self, identity_type: str, value: str, **filters: str) -> int:
        (read,) = self.read((identity_type, value), filters=filters)
        return sum(each.counter_value for each in read.data)

    def history(self, path: Path | str, identities: Sequence[str] | None = None) -> History:
        state = self.store.read(self.unit.stood).state
        return history_of(self.unit, str(path), names_of(self.unit, state, identities))

    def backfill(self, path: Path, *names: str, **more: Any) -> list[Backfilled]:
        chosen = list(names) or [each.name for each in self.store.read(self.unit.stood).state.identities]
        return backfill(self.store, self.unit, self.history(path, chosen), chosen, **more)

    def add_dimension(self, name: str, path: Path, column: str | None = None, **more: Any) -> Split:
        begun = switch(self.store, self.unit, name, column)
        assert begun is not None
        wait_for_writers(self.store, begun, sleep=self.clock.advance)
        return split(self.store, self.unit, begun, self.history(path), **more)

    def send(self, *orders: CompletedOrder | bytes) -> None:
        """Publish orders to the topic of the unit and let its consumer read them."""
        topic = self.unit.topic
        sent = [
            message(str(number), 0, each if isinstance(each, bytes) else msgspec.json.encode(each), kind=str(number))
            for number, each in enumerate(orders, self.sent)
        ]
        self.sent += len(sent)
        put(self.context, topic, sent)
        relay_all(relay := Relay(self.context, topic, "w"))
        relay.stop()
        consume_all(
            worker := ConsumerWorker(self.context, consumer_named(self.context, f"orders-{self.unit.name}"), "w")
        )
        worker.stop()

    def cells(self) -> Counter[tuple[str, str, tuple[tuple[str, str], ...]]]:
        """Every cell that counts anything, live and history together."""

        def look(tx: Any) -> Counter[tuple[str, str, tuple[tuple[str, str], ...]]]:
            names = {each.type_id: each.name for each in self.unit.stood(tx).state.identities}
            rows = tx.execute(self.unit.tables.cells.select()).all()
            values = self.unit.values_of(tx, [row.slice_id for row in rows])
            found: Counter[tuple[str, str, tuple[tuple[str, str], ...]]] = Counter()
            for row in rows:
                if count := row.live_count + row.history_count:
                    key = (names[row.identity_type], row.identity_value, tuple(sorted(values[row.slice_id].items())))
                    found[key] += count
            return found

        return self.store.read(look)


def recount(
    orders: Sequence[CompletedOrder], dimensions: Sequence[str], identities: Sequence[str]
) -> Counter[tuple[str, str, tuple[tuple[str, str], ...]]]:
    """The slow reference: every distinct order once for each identity that it has."""
    found: Counter[tuple[str, str, tuple[tuple[str, str], ...]]] = Counter()
    for each in {one.order_id: one for one in orders}.values():
        values = tuple(sorted((name, each.properties.get(name, "unknown")) for name in dimensions))
        for name, value in each.identities.items():
            if name in identities:
                found[name, value, values] += 1
    return found


COLUMNS = {
    "order_id": "id",
    "created_at": "created_proc",
    "phone_id": "user_phone_id",
    "device_id": "device_id",
    "card_id": "payment_tech_main_card_persistent_id",
    "yandex_uid": "user_uid",
    "payment_method_type": "payment_tech_type",
    "tariff": "performer_tariff_class",
    "brand": "brand",
    "city": "city",
}


def write_history(path: Path, orders: Sequence[CompletedOrder], without: Sequence[str] = ()) -> Path:
    """Orders as the table of finished rides, under the document's names."""
    names = {**COLUMNS, **{name: name for each in orders for name in each.identities if name not in COLUMNS}}
    columns: dict[str, Any] = {
        "id": pa.array([each.order_id for each in orders], pa.string()),
        "created_proc": pa.array([each.created_at for each in orders], pa.timestamp("us", tz="UTC")),
    }
    for name, column in names.items():
        if column not in columns:
            given = [each.identities.get(name, each.properties.get(name)) for each in orders]
            columns[column] = pa.array(given, pa.string())
    applications = [each.properties.get("application") for each in orders]
    if any(applications):
        columns["statistics"] = pa.array(
            [{"application": each} for each in applications], pa.struct([("application", pa.string())])
        )
    pq.write_table(pa.table({name: values for name, values in columns.items() if name not in without}), path)
    return path


@contextmanager
def opened(url: str, *, unit: str = "rides", clock: ManualClock | None = None, **options: object) -> Iterator[Orders]:
    """Order statistics on the store at `url`; options are settings of the unit, or others with `__` for the dot."""
    own = {name: value for name, value in options.items() if "__" not in name}
    given = {name.replace("__", "."): value for name, value in options.items() if "__" in name}
    settings = load(
        parts={"orders": OrdersSettings},
        environ={},
        options={"store.url": url, "orders.units": {unit: own}, **given},
    )
    store = open_store(settings)
    migrate.upgrade(store, named_tables([PART], settings))
    store.close()
    moved = clock or ManualClock(NOW * 1_000_000)
    context = Context.open(settings, [PART], clock=moved)
    try:
        yield Orders(context, moved, unit)
    finally:
        context.close()
