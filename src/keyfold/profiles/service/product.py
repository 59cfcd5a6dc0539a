"""What the verbs of profiles stand on: the catalog in force, the handlers, the settings; opened once a product."""

import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from msgspec import structs

from keyfold.core.context import Context
from keyfold.core.errors import SettingsWrong
from keyfold.core.limits import Limits
from keyfold.core.settings import Settings
from keyfold.core.store import Transaction
from keyfold.core.store.shapes import insert_new, load
from keyfold.core.topics.registry import Topics
from keyfold.core.topics.topic import TopicSpec
from keyfold.counters.catalog import Catalog, Counter
from keyfold.counters.errors import CatalogWrong
from keyfold.profiles import handlers as handlers_of
from keyfold.profiles.handlers import Handlers
from keyfold.profiles.model import PROFILE_ID_BYTES_MAX
from keyfold.profiles.settings import ProfilesSettings
from keyfold.profiles.tables import COUNTER_KINDS

SEGMENT_ID_MAX = 100  # characters
SEGMENT_BYTES_MAX = 4 * SEGMENT_ID_MAX + 30
PROFILES_TOPIC = TopicSpec("profiles", "every profile that changed, whole: Profile, keyed by TYPE/ID")


class Product:
    """Profiles as they are set up here."""

    def __init__(self, settings: ProfilesSettings, catalog: Catalog, handlers: Handlers, topics: Topics) -> None:
        self.settings = settings
        self.catalog = catalog
        self.handlers = handlers
        self.topics = topics
        self.writing = handlers.writing(catalog)
        # What is folded was judged when a handler asked for it: what waited since then may be NoOperation by now.
        self.writable = Catalog([structs.replace(each, no_operation=False) for each in catalog.counters.values()])
        self.delayed = {
            counter_id: group
            for group in catalog.groups.values()
            if group.delayed_records_max is not None
            for counter_id in group.counter_ids
        }
        self._pinned: set[int] = set()
        if found := list(_mistakes(settings, catalog, handlers)):
            raise SettingsWrong("; ".join(found), place="profiles")

    def knows_type(self, profile_type: str) -> bool:
        return self.is_set_up and profile_type in (*self.catalog.profile_types, self.settings.segments_type)

    def pin(self, tx: Transaction, counter_ids: Collection[int]) -> None:
        """Remember the kind of counters that are about to be stored, from the first time on."""
        fresh = {each: self.catalog[each] for each in counter_ids if each not in self._pinned}
        for counter in list(fresh.values()):
            if counter.time_counter_id is not None:
                fresh[counter.time_counter_id] = self.catalog[counter.time_counter_id]
        if fresh:
            keep_kinds(tx, list(fresh.values()))
            tx.after_commit.append(lambda: self._pinned.update(fresh))

    def held_oldest_us(self, now_us: int) -> int:
        """What was held back at this moment or before has no effect any more, by the setting of today."""
        return now_us - self.settings.delete_us

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
        _must_fit(settings, catalog, context.limits)
        if catalog.counters:
            context.store.read(lambda tx: must_keep_kinds(tx, list(catalog.counters.values())))
        _opened[context] = product
    return product


def section(settings: Settings) -> ProfilesSettings:
    return settings.section("profiles", ProfilesSettings)


def catalog_of(settings: ProfilesSettings) -> Catalog:
    if not settings.catalog:
        return Catalog([])
    from keyfold.counters.compile import load as load_catalog

    try:
        return load_catalog(settings.catalog)
    except CatalogWrong as error:
        error.place = error.place or "profiles.catalog"
        raise


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


def must_keep_kinds(tx: Transaction, counters: Sequence[Counter]) -> int:
    """Refuse counters of which something was stored in another kind; returns how many are known."""
    known = load(tx, COUNTER_KINDS, {"counter_id": sorted(c.id for c in counters)}, ("name", "kind"))
    wrong = [
        f"{c.name}: counter {c.id} was {known[c.id,][1].lower()} here, now it is {c.kind.name.lower()}"
        for c in counters
        if (c.id,) in known and known[c.id,][1] != c.kind.name
    ]
    if wrong:
        raise CatalogWrong(wrong, place="profiles.catalog", hint="Use a new id for the new kind")
    return len(known)


def keep_kinds(tx: Transaction, counters: Sequence[Counter]) -> None:
    """Remember the kinds of counters; another process may have been first, with another catalog."""
    if must_keep_kinds(tx, counters) < len(counters):
        rows: dict[str, list[Any]] = {
            "counter_id": [counter.id for counter in counters],
            "name": [counter.name for counter in counters],
            "kind": [counter.kind.name for counter in counters],
        }
        insert_new(tx, COUNTER_KINDS, rows)
        must_keep_kinds(tx, counters)


def _mistakes(settings: ProfilesSettings, catalog: Catalog, handlers: Handlers) -> Iterator[str]:
    """What in the settings names something that is not there."""
    for log in handlers.logs:
        for unknown in sorted(handlers.types_of(log) - set(catalog.profile_types)):
            yield f"a handler of the log {log} feeds profiles of type {unknown}, which no counter has"
    for name, logs in (("by_position", settings.by_position), ("topics", list(settings.topics))):
        for log in sorted(set(logs) - set(handlers.logs)):
            yield f"{name} names the log {log}, which no handler reads"
    names = [topic_of(settings, log) for log in handlers.logs]
    for topic in (*names, settings.segments_topic, PROFILES_TOPIC.name):
        if (*names, settings.segments_topic, PROFILES_TOPIC.name).count(topic) > 1:
            yield f"the topic {topic} is used twice"
    if "segments" in handlers.logs:
        yield "a log may not be named segments: its consumer would have the name of that of the segments"
    restrictions = {counter.restriction for counter in catalog.counters.values()}
    for client, view in settings.clients.items():
        for each in view.counters or ():
            if each not in catalog.counters and each not in catalog.by_name:
                yield f"the client {client} names the counter {each}, which is not in the catalog"
        for each in sorted(set(view.types or ()) - {*catalog.profile_types, settings.segments_type}):
            yield f"the client {client} names the profile type {each}, which no counter has"
        for each in sorted(set(view.restrictions) - restrictions):
            yield f"the client {client} names the restriction {each}, which no counter has"


def _must_fit(settings: ProfilesSettings, catalog: Catalog, limits: Limits) -> None:
    """A profile that may be stored must also fit into the message that tells of it."""
    if not settings.publish:
        return
    message = settings.profile_bytes_max + settings.segments_max * SEGMENT_BYTES_MAX + 1_000
    if message > limits.message_bytes_max:
        raise SettingsWrong(
            f"a profile may have {settings.profile_bytes_max} bytes and {settings.segments_max} segments, "
            f"which does not fit into a message of {limits.message_bytes_max}",
            place="limits.message_bytes_max",
        )
    longest = max((len(each.encode()) for each in (*catalog.profile_types, settings.segments_type)), default=0)
    if longest + 1 + PROFILE_ID_BYTES_MAX > limits.key_bytes_max:
        raise SettingsWrong(
            f"the key of a message may have {limits.key_bytes_max} bytes, "
            f"a profile's may take {longest + 1 + PROFILE_ID_BYTES_MAX}",
            place="limits.key_bytes_max",
        )


_opened: "weakref.WeakKeyDictionary[Context, Product]" = weakref.WeakKeyDictionary()
