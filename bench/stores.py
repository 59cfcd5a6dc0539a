"""Fresh stores for the sides of a race: a SQLite file, or a database on a PostgreSQL 18 that syncs every commit."""

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg
import sqlalchemy as sa

from keyfold.core.store.batch import Columns
from keyfold.core.store.sqlite import driver as sqlite_driver
from tests.servers.postgres import PostgresServer

NewUrl = Callable[[], str]

MEMORY_MEGABYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20

# A quarter of the memory, as PostgreSQL's manual advises. A checkpoint in the middle of one side would be charged to
# that side alone. A server that has run for a while writes into segments of its log that it has used before; a new one
# makes each anew, and whoever commits waits for 16 MB of zeros. So there are used ones when a race begins.
SEGMENTS = 128
POSTGRES_SETTINGS = {
    "shared_buffers": f"{MEMORY_MEGABYTES // 4}MB",
    "min_wal_size": f"{SEGMENTS * 16}MB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "1h",
}

# One row a page, in memory alone: a server that has run for a while has used every one of its buffers before. A new one
# is given the memory of each by the kernel when it is first used, which was a tenth of the time of an intake of orders.
TOUCH = """
CREATE UNLOGGED TABLE touched (filler text);
ALTER TABLE touched ALTER COLUMN filler SET STORAGE PLAIN;
INSERT INTO touched
SELECT repeat('x', 8000)
FROM generate_series(1, pg_size_bytes(current_setting('shared_buffers')) / current_setting('block_size')::int);
DROP TABLE touched
"""

_numbers = itertools.count(1)


@contextmanager
def sqlite() -> Iterator[NewUrl]:
    """URLs of new SQLite files, gone afterwards. The store syncs every commit (`synchronous=FULL`)."""
    with tempfile.TemporaryDirectory(prefix="keyfold-bench-") as directory:
        yield lambda: f"sqlite:///{Path(directory) / f'{next(_numbers)}.db'}"


@contextmanager
def postgres() -> Iterator[NewUrl]:
    """URLs of new databases on one server with `fsync` and `synchronous_commit` on, gone afterwards."""
    with PostgresServer(settings=POSTGRES_SETTINGS) as server, psycopg.connect(server.url, autocommit=True) as own:
        own.execute(TOUCH)
        for _ in range(SEGMENTS):
            own.execute("SELECT pg_logical_emit_message(false, 'bench', ''), pg_switch_wal()")

        def new_url() -> str:
            own.execute("CHECKPOINT")  # the segments that were used come back
            return server.create_database(f"bench_{next(_numbers)}")

        yield new_url


KINDS = {"SQLite": sqlite, "PostgreSQL": postgres}


@contextmanager
def each_kind() -> Iterator[dict[str, NewUrl]]:
    """Both stores by their name."""
    with ExitStack() as stack:
        yield {kind: stack.enter_context(opened()) for kind, opened in KINDS.items()}


def filling(url: str, table: str) -> "SqliteFill | PostgresFill":
    """Rows of a table on the bare driver, before a race; `close` leaves the store as it would be after some time."""
    return SqliteFill(url, table) if url.startswith("sqlite") else PostgresFill(url, table)


class SqliteFill:
    """Not synced while the file is filled; the checkpoint at the end is."""

    def __init__(self, url: str, table: str) -> None:
        self._table = table
        self._connection = sqlite_driver().connect(sa.make_url(url).database, isolation_level=None)
        for pragma in ("synchronous = OFF", "cache_size = -1000000"):
            self._connection.execute(f"PRAGMA {pragma}")

    def insert(self, columns: Columns) -> None:
        into = f"INSERT INTO {self._table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.executemany(into, zip(*columns.values(), strict=True))
        self._connection.execute("COMMIT")

    def close(self) -> None:
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._connection.close()


class PostgresFill:
    """By COPY; vacuumed and analyzed at the end, as the server's own worker would in time."""

    def __init__(self, url: str, table: str) -> None:
        self._table = table
        self._connection = psycopg.connect(url, autocommit=True)

    def insert(self, columns: Columns) -> None:
        with self._connection.cursor().copy(f"COPY {self._table} ({', '.join(columns)}) FROM STDIN") as copying:
            for row in zip(*columns.values(), strict=True):
                copying.write_row(row)

    def close(self) -> None:
        self._connection.execute(f"VACUUM ANALYZE {self._table}")
        self._connection.close()


# The whole of a database, tables first: each relation that has rows of its own.
WARM = """
SELECT coalesce(sum(pg_prewarm(c.oid::regclass)), 0)
FROM pg_class AS c
WHERE c.relkind IN ('r', 'i', 't') AND c.relnamespace <> 'pg_catalog'::regnamespace
  AND pg_database_size(current_database()) < pg_size_bytes(current_setting('shared_buffers')) * 3 / 4
"""


def warm(url: str) -> None:
    """Bring a store into the buffers of PostgreSQL, if it fits, as it would be after some time.

    COPY and VACUUM leave next to nothing there: each first read of a page would be charged with fetching it, which a
    small store has behind it after a few requests and a large one has not.
    """
    if url.startswith("postgresql"):
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE EXTENSION IF NOT EXISTS pg_prewarm")
            connection.execute(WARM)
