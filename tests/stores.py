"""Fixtures of the stores: the same test runs on SQLite and on the PostgreSQL versions that we support."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from keyfold.core.part import named_tables
from keyfold.core.settings import load
from keyfold.core.store import Store, migrate
from keyfold.parts import PARTS, settings_of_parts

STORES = ("sqlite", "postgresql-18", "postgresql-15")


def made_ready(store: Store) -> None:
    """The schema of the product as it is by default, with the tables that its settings name."""
    migrate.upgrade(store, named_tables(PARTS, load(parts=settings_of_parts(), environ={})))


@pytest.fixture(params=STORES)
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty store of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'keyfold.db'}"
    return str(
        request.getfixturevalue({"postgresql-18": "postgres_url", "postgresql-15": "postgres_15_url"}[request.param])
    )


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    """A store of each kind with our schema."""
    opened = Store.open(store_url)
    migrate.upgrade(opened)
    yield opened
    opened.close()


@pytest.fixture
def sqlite_store(tmp_path: Path) -> Iterator[Store]:
    """An embedded store with our schema, where the kind does not matter."""
    opened = Store.open(f"sqlite:///{tmp_path / 'keyfold.db'}")
    migrate.upgrade(opened)
    yield opened
    opened.close()
