"""Fixtures of the stores: the same test runs on SQLite and on the PostgreSQL versions that we support.

Where KEYFOLD_CITUS_URL names a database with the Citus extension, to which nodes were added, also on that cluster.
"""

import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from keyfold.core.part import named_tables
from keyfold.core.settings import load
from keyfold.core.store import Store, migrate
from keyfold.core.store.distribute import distribute, in_order
from keyfold.parts import PARTS, settings_of_parts
from tests.faults.effort import LONG, rotation
from tests.servers.fixtures import fresh_database
from tests.servers.postgres import PostgresServer

STORES = ("sqlite", "postgresql-18", "postgresql-15")
CITUS_URL = os.environ.get("KEYFOLD_CITUS_URL", "")
CLUSTERS = [pytest.param("citus", marks=pytest.mark.xdist_group("citus"))] if CITUS_URL else []


# Laws of one server: a statement sees one snapshot, the schema is exactly ours, its version can be spoilt.
OF_ONE_SERVER = "conformance/test_store.py"
OLDEST = "postgresql-15"
SHARES_OF_OLDEST = 5


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On the oldest server every fifth test, those of today; all of them by name, or with KEYFOLD_FAULTS=long."""
    is_whole = LONG or bool(config.getoption("keyword"))
    chosen, others = [], []
    for item in items:
        is_due = is_whole or zlib.crc32(item.nodeid.encode()) % SHARES_OF_OLDEST == rotation() % SHARES_OF_OLDEST
        is_left_out = (OLDEST in item.nodeid and not is_due) or (OF_ONE_SERVER in item.nodeid and "citus" in item.name)
        (others if is_left_out else chosen).append(item)
    items[:] = chosen
    config.hook.pytest_deselected(items=others)


def made_ready(store: Store) -> None:
    """The schema of the product as it is by default, with the tables that its settings name."""
    migrate.upgrade(store, _named())


def _named() -> list[sa.Table]:
    return list(named_tables(PARTS, load(parts=settings_of_parts(), environ={})))


@pytest.fixture(params=STORES)
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty store of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'keyfold.db'}"
    return str(
        request.getfixturevalue({"postgresql-18": "postgres_url", "postgresql-15": "postgres_15_url"}[request.param])
    )


@pytest.fixture(params=[*STORES, *CLUSTERS])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a store of each kind with our schema, a copy of one that was made once."""
    if request.param == "citus":
        request.getfixturevalue("citus_cluster")
        _emptied(CITUS_URL)
        yield CITUS_URL
        return
    if request.param == "sqlite":
        file = tmp_path / "keyfold.db"
        shutil.copyfile(request.getfixturevalue("sqlite_template"), file)
        yield f"sqlite:///{file}"
        return
    server: PostgresServer = request.getfixturevalue(
        {"postgresql-18": "postgres_server", "postgresql-15": "postgres_15_server"}[request.param]
    )
    with fresh_database(server, _template(server)) as url:
        yield url


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An embedded store with our schema, to be copied."""
    file = tmp_path_factory.mktemp("template") / "keyfold.db"
    _migrated(f"sqlite:///{file}")
    return file


@pytest.fixture(scope="session")
def citus_cluster() -> None:
    """The cluster with our schema, spread."""
    opened = Store.open(CITUS_URL)
    made_ready(opened)
    distribute(opened, named=_named())
    opened.close()


def _emptied(url: str) -> None:
    """Take everything from the cluster that a test may have left, also the tables of its own units."""
    ours = {table.name for table in in_order(_named())}
    engine = sa.create_engine(sa.make_url(url).set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        there = set(connection.dialect.get_table_names(connection)) - {"alembic_version"}
        for name in sorted(there - ours):
            connection.exec_driver_sql(f"DROP TABLE {name}")
        connection.exec_driver_sql(f"TRUNCATE {', '.join(sorted(ours))}")
    engine.dispose()


_templates: dict[int, str] = {}  # by the port of a server: the database that has our schema


def _template(server: PostgresServer) -> str:
    if server.port not in _templates:
        name = "keyfold_template"
        _migrated(server.create_database(name))
        _templates[server.port] = name
    return _templates[server.port]


def _migrated(url: str) -> None:
    store = Store.open(url)
    migrate.upgrade(store)
    store.close()


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    """A store of each kind with our schema."""
    opened = Store.open(store_url)
    yield opened
    opened.close()


@pytest.fixture
def sqlite_store(tmp_path: Path, sqlite_template: Path) -> Iterator[Store]:
    """An embedded store with our schema, where the kind does not matter."""
    shutil.copyfile(sqlite_template, tmp_path / "keyfold.db")
    opened = Store.open(f"sqlite:///{tmp_path / 'keyfold.db'}")
    yield opened
    opened.close()
