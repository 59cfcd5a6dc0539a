"""The schema's version: what the store has, what this program knows, and the way up."""

import importlib.resources
from collections.abc import Sequence

import sqlalchemy as sa
from msgspec import Struct

from keyfold.core.errors import SchemaUnknown, StoreRefused
from keyfold.core.store.schema import HEAD, METADATA
from keyfold.core.store.store import Store, Transaction

ADVISORY_LOCK = 0x6B657966  # "keyf": two upgrades of one PostgreSQL database run one after the other


class SchemaStatus(Struct, frozen=True):
    """Where the store stands. `state` is empty, current, old or unknown."""

    current: str | None
    known: str
    state: str


def status(store: Store) -> SchemaStatus:
    """Compare the store's schema with ours, by one look and without Alembic."""

    def look(tx: Transaction) -> SchemaStatus:
        tables = set(sa.inspect(tx.connection).get_table_names())
        if "alembic_version" not in tables:
            if tables & set(METADATA.tables):
                return SchemaStatus(None, HEAD, "unknown")
            return SchemaStatus(None, HEAD, "empty")
        current = tx.driver("SELECT version_num FROM alembic_version").scalar()
        if current is None:
            return SchemaStatus(None, HEAD, "empty")
        state = "current" if current == HEAD else "old" if str(current) < HEAD else "unknown"
        return SchemaStatus(str(current), HEAD, state)

    return store.read(look)


def must_be_current(store: Store, url: str, named: Sequence[sa.Table] = ()) -> None:
    """Refuse to work on a schema that is not ours, or without the tables that the settings name; say what to do."""
    found = status(store)
    if found.state == "current":
        if lacking := missing(store, named):
            raise SchemaUnknown(
                f"the store lacks {lacking[0]}, which the settings name",
                hint=f"Run: keyfold store upgrade --store {url}",
            )
        return
    if found.state == "unknown":
        raise SchemaUnknown(
            f"the store has schema {found.current or 'of unknown origin'}, this program knows {HEAD}",
            hint="Use the newer keyfold that made it, or name another store",
        )
    what = "is empty" if found.state == "empty" else f"has schema {found.current}, this program needs {HEAD}"
    raise SchemaUnknown(f"the store {what}", hint=f"Run: keyfold store upgrade --store {url}")


def missing(store: Store, named: Sequence[sa.Table]) -> list[str]:
    """The tables that the settings name and the store does not have."""
    if not named:
        return []
    there = store.read(lambda tx: set(sa.inspect(tx.connection).get_table_names()))
    return [str(each.name) for each in named if each.name not in there]


def upgrade(store: Store, named: Sequence[sa.Table] = ()) -> SchemaStatus:
    """Bring the store to the newest schema, with the tables that the settings name, in one transaction.

    A repeat changes nothing.
    """
    before = status(store)
    if before.state == "current" and not missing(store, named):
        return before
    if before.state == "unknown":
        raise SchemaUnknown(
            f"the store has schema {before.current or 'of unknown origin'}, this program knows {HEAD}",
            hint="Nothing was changed",
        )
    _must_be_new_enough(store)
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(importlib.resources.files("keyfold.core.store") / "migrations"))
    config.set_main_option("path_separator", "os")

    def work(tx: Transaction) -> None:
        tx.unbound()
        if not tx.is_sqlite:
            tx.driver("SELECT pg_advisory_xact_lock(%s)", (ADVISORY_LOCK,))
        config.attributes["connection"] = tx.connection
        command.upgrade(config, "head")
        for each in named:
            each.create(tx.connection, checkfirst=True)

    store.transact(work, name="store upgrade")
    return status(store)


def _must_be_new_enough(store: Store) -> None:
    if store.is_sqlite:
        return
    from keyfold.core.store.postgres import VERSION_MIN

    version = int(store.read(lambda tx: tx.driver("SHOW server_version_num").scalar_one()))
    if version < VERSION_MIN:
        raise StoreRefused(f"PostgreSQL {version // 10000} is too old", hint=f"Use {VERSION_MIN // 10000} or newer")
