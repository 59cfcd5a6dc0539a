"""Listings opened for a test: a product driven by hand, with a clock that moves, and what the topics say."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from keyfold.core.clock import ManualClock
from keyfold.core.context import Context, open_store
from keyfold.core.part import Part
from keyfold.core.relay import Relay
from keyfold.core.settings import load
from keyfold.core.store import Transaction, migrate
from keyfold.listings.model import Offer, Price, business_of
from keyfold.listings.part import PART
from keyfold.listings.service import saving
from keyfold.listings.service.listings import Listings
from keyfold.listings.service.saving import Change, Saved
from tests.product import read_all, relay_all

T = TypeVar("T")
DAY_US = 86_400_000_000
CAR: Mapping[str, Any] = {"make": "Volvo", "model": "240", "year": 1989, "mileage_km": 312_000}


class Product:
    """A product with listings, driven by hand."""

    def __init__(self, context: Context, clock: ManualClock | None) -> None:
        self.context = context
        self.store = context.store
        self.clock = clock
        self.listings = Listings.opened(context)

    def do(self, work: Callable[..., T], *given: Any, **named: Any) -> T:
        """Run a verb of the part in a transaction of its own."""
        return self.store.transact(lambda tx: work(tx, self.listings, *given, **named))

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        return self.store.read(lambda tx: tx.rows(sql))

    def make(self, *offers: Offer) -> list[Saved]:
        return self.do(saving.save, [Change(None, offer) for offer in offers])

    def change(self, offer_id: str, **changes: Any) -> Saved:
        def work(tx: Transaction) -> Saved:
            saved = saving.load_by_id(tx, [offer_id])[offer_id]
            after = msgspec.structs.replace(saved.offer, **changes)
            return saving.save(tx, self.listings, [Change(saved, after)])[0]

        return self.store.transact(work)

    def counts(self, seller_id: str) -> dict[int, int]:
        """What the counts of presets say."""
        rows = self.rows(
            "SELECT preset_id, sum(offers) FROM user_offer_presets_count"
            f" WHERE seller_id = '{seller_id}' GROUP BY preset_id"
        )
        return {number: int(count) for number, count in rows if count}

    def listed(self, seller_id: str) -> dict[int, int]:
        """How many rows there are."""
        rows = self.rows(
            f"SELECT preset_id, count(*) FROM user_offer_presets WHERE seller_id = '{seller_id}' GROUP BY preset_id"
        )
        return dict(rows)

    def counters(self, seller_id: str) -> dict[str, int]:
        rows = self.rows(
            "SELECT counter_id, sum(counter_value) FROM user_total_counters"
            f" WHERE seller_id = '{seller_id}' GROUP BY counter_id"
        )
        return {name: int(value) for name, value in rows if value}

    def told(self, topic: str = "offers") -> list[tuple[str, str, int, Any]]:
        """What a topic says: key, kind, version and payload, in the order of each partition."""
        relay_all(Relay(self.context, topic, "test"))
        return [
            (each.message.key, each.message.kind, each.message.version, msgspec.json.decode(each.message.payload))
            for records in read_all(self.context, topic).values()
            for each in records
        ]

    def pass_days(self, days: float) -> None:
        assert self.clock is not None
        self.clock.advance(days * 86_400)


def car(seller_id: str = "7", **more: Any) -> Offer:
    """An offer of a car, ready to be stored."""
    given = {"content": dict(CAR), "price": Price(5_000_00, "EUR"), "schema_version": 2, **more}
    number = business_of(seller_id)
    return Offer(seller_id=seller_id, category="cars", business_id=number, shop_id=number, **given)


@contextmanager
def opened(
    url: str, *, clock: ManualClock | None = None, parts: Sequence[Part] = (), **options: object
) -> Iterator[Product]:
    """Settings are given with `__` for the dot, as `listings__expire_days=1`; `parts` are further parts."""
    settings = load(
        parts={part.name: part.settings for part in (PART, *parts) if part.settings is not None},
        environ={},
        options={"store.url": url, **{name.replace("__", "."): value for name, value in options.items()}},
    )
    store = open_store(settings)
    migrate.upgrade(store)
    store.close()
    context = Context.open(settings, [PART, *parts], clock=clock)
    try:
        yield Product(context, clock)
    finally:
        context.close()


def kinds(told: Sequence[tuple[str, str, int, Any]], kind: str) -> list[tuple[str, str, int, Any]]:
    return [each for each in told if each[1] == kind]
