"""What the verbs of profiles stand on: the catalog in force, the handlers, the settings; opened once a product."""

import weakref
from typing import Any

from keyfold.core.context import Context
from keyfold.core.errors import SettingsWrong
from keyfold.core.settings import Settings
from keyfold.core.store import Transaction
from keyfold.core.store.shapes import insert_new, load
from keyfold.core.topics.registry import Topics
from keyfold.core.topics.topic import TopicSpec
from keyfold.counters.catalog import Catalog
from keyfold.counters.errors import CatalogWrong
from keyfold.profiles import handlers as handlers_of
from keyfold.profiles.handlers import Handlers
from keyfold.profiles.settings import ProfilesSettings
from keyfold.profiles.tables import COUNTER_KINDS

PROFILES_TOPIC = TopicSpec("profiles", "every profile that changed, whole: Profile, keyed by TYPE/ID")


class Product:
    """Profiles as they are set up here."""

    def __init__(self, settings: ProfilesSettings, catalog: Catalog, handlers: Handlers, topics: Topics) -> None:
        self.settings = settings
        self.catalog = catalog
        self.handlers = handlers
        self.topics = topics
        self.writing = handlers.writing(catalog)
        self.delayed = {
            counter_id: group
            for group in catalog.groups.values()
            if group.delayed_records_max is not None
            for counter_id in group.counter_ids
        }
        for log in handlers.logs:
            if unknown := handlers.types_of(log) - set(catalog.profile_types):
                raise SettingsWrong(
                    f"a handler of the log {log} feeds profiles of type {min(unknown)}, which no counter has",
                    place="profiles.handlers",
                )

    def knows_type(self, profile_type: str) -> bool:
        return self.is_set_up and profile_type in (*self.catalog.profile_types, self.settings.segments_type)

    @property
    def is_set_up(self) -> bool:
        return bool(self.settings.catalog)

    def topic_of(self, log: str) -> str:
        return topic_of(self.settings, log)


def opened(context: Context) -> Product:
    """The one of this product; the catalog is compared with what the store has seen before anything is counted."""
    product = _opened.get(context)
    if product is None:
        settings = section(context.settings)
        catalog = catalog_of(settings)
        product = Product(settings, catalog, handlers_of.load(settings.handlers), context.topics)
        if settings.profile_bytes_max > context.limits.message_bytes_max:
            raise SettingsWrong("profiles.profile_bytes_max must not exceed limits.message_bytes_max")
        if catalog.counters:
            context.store.transact(lambda tx: keep_kinds(tx, catalog), name="counter kinds")
        _opened[context] = product
    return product


def section(settings: Settings) -> ProfilesSettings:
    return settings.section("profiles", ProfilesSettings)


def catalog_of(settings: ProfilesSettings) -> Catalog:
    if not settings.catalog:
        return Catalog([])
    from keyfold.counters.compile import load as load_catalog

    return load_catalog(settings.catalog)


def topics(settings: Settings) -> list[TopicSpec]:
    """The topics of this set-up: one for each log that a handler reads, the segments', and what changed."""
    own = section(settings)
    if not own.catalog:
        if own.handlers:
            raise SettingsWrong("handlers need a catalog of counters", place="profiles.catalog")
        return []
    logs = handlers_of.load(own.handlers).logs
    specs = [
        TopicSpec(topic_of(own, log), f"events of the log {log}: {{event_id, profile_id, time, …}}") for log in logs
    ]
    return [*specs, TopicSpec(own.segments_topic, "the segments of a user, whole, by version"), PROFILES_TOPIC]


def topic_of(settings: ProfilesSettings, log: str) -> str:
    return settings.topics.get(log, f"{log}-log")


def keep_kinds(tx: Transaction, catalog: Catalog) -> None:
    """Remember the kind of every counter; one that was of another kind is refused by name."""
    rows: dict[str, list[Any]] = {
        "counter_id": list(catalog.counters),
        "name": [counter.name for counter in catalog.counters.values()],
        "kind": [counter.kind.name for counter in catalog.counters.values()],
    }
    known = load(tx, COUNTER_KINDS, {"counter_id": rows["counter_id"]}, ("name", "kind"))
    wrong = [
        f"{counter.name}: counter {counter.id} was {known[counter.id,][1].lower()} here, now it is "
        f"{counter.kind.name.lower()}"
        for counter in catalog.counters.values()
        if (counter.id,) in known and known[counter.id,][1] != counter.kind.name
    ]
    if wrong:
        raise CatalogWrong(wrong, place="profiles.catalog")
    if len(known) < len(catalog.counters):
        insert_new(tx, COUNTER_KINDS, rows)


_opened: "weakref.WeakKeyDictionary[Context, Product]" = weakref.WeakKeyDictionary()
