"""The opened product: settings, store, topics and leases, as every door and every part gets them."""

from collections.abc import Sequence

import sqlalchemy as sa

from keyfold.core.clock import Clock
from keyfold.core.leases.lease import Leases
from keyfold.core.part import Part, named_tables
from keyfold.core.settings import Settings
from keyfold.core.store import Store, migrate
from keyfold.core.topics.registry import Topics


class Context:
    """Made once at start by `open`; closed once at the end."""

    def __init__(self, settings: Settings, store: Store, topics: Topics, leases: Leases, parts: Sequence[Part]) -> None:
        self.settings = settings
        self.limits = settings.limits
        self.store = store
        self.topics = topics
        self.leases = leases
        self.parts = list(parts)

    @classmethod
    def open(cls, settings: Settings, parts: Sequence[Part], *, clock: Clock | None = None) -> "Context":
        """Open the store (making a new, empty SQLite file ready), its topics and its leases."""
        store = open_store(settings, clock=clock)
        try:
            named = named_tables(parts, settings)
            if store.is_sqlite and _lacks_something(store, named):
                migrate.upgrade(store, named)
            migrate.must_be_current(store, settings.store.url, named)
            topics = Topics.open(store, settings, [spec for part in parts for spec in part.topics_of(settings)])
            return cls(settings, store, topics, open_leases(settings, store), parts)
        except BaseException:
            store.close()
            raise

    def close(self) -> None:
        self.leases.close()
        self.topics.close()
        self.store.close()


def _lacks_something(store: Store, named: Sequence[sa.Table]) -> bool:
    """A new file gets the whole schema, one of today what the settings have named since; an older one is refused."""
    state = migrate.status(store).state
    return state == "empty" or (state == "current" and bool(migrate.missing(store, named)))


def open_store(settings: Settings, *, clock: Clock | None = None) -> Store:
    return Store.open(
        settings.store.url, limits=settings.limits, clock=clock, connections_max=settings.store.connections_max
    )


def open_leases(settings: Settings, store: Store) -> Leases:
    if settings.leases.kind == "zookeeper":
        from keyfold.core.leases.zookeeper import ZooKeeperLeases

        return ZooKeeperLeases(settings.leases.zookeeper, session_seconds=settings.leases.lease_seconds)
    from keyfold.core.leases.sql import SqlLeases

    return SqlLeases(store)
