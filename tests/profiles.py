"""Profiles opened for a test: the example catalog, handlers of which an event says itself what it counts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

import keyfold.counters
from keyfold.core.clock import Clock, ManualClock
from keyfold.core.consumer import ConsumerWorker
from keyfold.core.context import Context
from keyfold.core.part import Part
from keyfold.core.relay import Relay
from keyfold.core.settings import load
from keyfold.core.store import Store, migrate
from keyfold.core.workers import consumer_named
from keyfold.counters.catalog import Catalog
from keyfold.counters.compile import load as load_catalog
from keyfold.counters.counters import Counters
from keyfold.profiles.model import ProfileKey, Verdict, event_of
from keyfold.profiles.part import PART
from keyfold.profiles.service.counting import count_events
from keyfold.profiles.service.product import Product
from keyfold.profiles.service.product import opened as product_of
from keyfold.profiles.service.reading import Read, View, read_profiles, view_of
from keyfold.profiles.settings import ClientView, ProfilesSettings
from tests.product import consume_all, message, put, relay_all

EXAMPLE = Path(keyfold.counters.__file__).parent / "examples" / "marketplace.proto"
HANDLERS = Path(__file__).parent / "profile_handlers.py"
NOW = 1_700_000_000
DAY = 86_400
PUBLIC, PUBLIC_TIME = 156, 159
OFFER, OFFER_TIME = 600, 603  # owned updates wait here
UNRESTRICTED = ClientView(restrictions=("UR_METRIKA_OWNED",))


@cache
def catalog() -> Catalog:
    return load_catalog(EXAMPLE)


class Profiles:
    """A product with profiles, whose clock the test moves."""

    def __init__(self, context: Context, clock: ManualClock) -> None:
        self.context = context
        self.clock = clock
        self.product: Product = product_of(context)

    def count(self, *events: dict[str, Any], log: str = "visit", marked: bool = True) -> list[Verdict]:
        """Count events in one transaction."""
        given = [(log, event_of(fields)) for fields in events]
        return self.context.store.transact(lambda tx: count_events(tx, self.product, given, marked=marked))

    def statuses(self, *events: dict[str, Any], log: str = "visit") -> list[str]:
        return [verdict.status for verdict in self.count(*events, log=log)]

    def read(self, *ids: object, view: View | None = None, profile_type: str = "user") -> Read:
        keys: list[ProfileKey] = [(profile_type, str(each)) for each in ids]
        seen = view or view_of(self.product, UNRESTRICTED, None)
        return self.context.store.read(lambda tx: read_profiles(tx, self.product, [(keys, seen)]))[0]

    def values(self, *ids: object, counter: int = OFFER, profile_type: str = "user") -> dict[int, float]:
        """The values of a counter by key, as they are read."""
        for pack in self.read(*ids, profile_type=profile_type).packs:
            if counter in pack.counter_ids:
                return dict(zip(pack.keys, pack.rows[pack.counter_ids.index(counter)][1], strict=True))
        return {}

    def send(self, log: str, *events: dict[str, Any]) -> None:
        """Publish events to the topic of a log and let its consumer read them."""
        topic = self.product.topic_of(log)
        sent = [
            message(str(fields.get("profile_id", "")), 0, msgspec.json.encode(fields), kind=str(fields.get("event_id")))
            for fields in events
        ]
        put(self.context, topic, sent)
        self.relay(topic)
        self.consume(f"profiles-{log}")

    def relay(self, topic: str) -> None:
        relay_all(relay := Relay(self.context, topic, "w"))
        relay.stop()

    def consume(self, name: str) -> None:
        consume_all(worker := ConsumerWorker(self.context, consumer_named(self.context, name), "w"))
        worker.stop()

    def counters(self, body: bytes) -> Counters:
        return Counters(self.product.catalog, body, self.clock.now_us() // 1_000_000)


def event(
    event_id: str, profile_id: object = 1, *updates: Sequence[object], time: int = NOW, **more: object
) -> dict[str, Any]:
    return {"event_id": event_id, "profile_id": profile_id, "time": time, "updates": list(updates), **more}


@contextmanager
def opened(
    url: str, *, clock: Clock | None = None, parts: Sequence[Part] = (PART,), **options: object
) -> Iterator[Profiles]:
    """Profiles on the store at `url`; options are settings of profiles, or others with `__` for the dot."""
    store = Store.open(url)
    migrate.upgrade(store)
    store.close()
    given = {"profiles.catalog": str(EXAMPLE), "profiles.handlers": str(HANDLERS)}
    given |= {(name.replace("__", ".") if "__" in name else f"profiles.{name}"): v for name, v in options.items()}
    moved = clock or ManualClock(NOW * 1_000_000)
    settings = load(
        parts={"profiles": ProfilesSettings},
        environ={},
        options={"store.url": url, **given},  # type: ignore[dict-item]
    )
    context = Context.open(settings, list(parts), clock=moved)
    try:
        assert isinstance(moved, ManualClock)
        yield Profiles(context, moved)
    finally:
        context.close()
