"""Fresh stores for the sides of a race: a SQLite file, or a database on a PostgreSQL 18 that syncs every commit."""

import itertools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.servers.postgres import PostgresServer

NewUrl = Callable[[], str]

# A checkpoint in the middle of one side would be charged to that side alone.
POSTGRES_SETTINGS = {"shared_buffers": "512MB", "max_wal_size": "8GB", "checkpoint_timeout": "1h"}

_numbers = itertools.count(1)


@contextmanager
def sqlite() -> Iterator[NewUrl]:
    """URLs of new SQLite files, gone afterwards. The store syncs every commit (`synchronous=FULL`)."""
    with tempfile.TemporaryDirectory(prefix="keyfold-bench-") as directory:
        yield lambda: f"sqlite:///{Path(directory) / f'{next(_numbers)}.db'}"


@contextmanager
def postgres() -> Iterator[NewUrl]:
    """URLs of new databases on one server with `fsync` and `synchronous_commit` on, gone afterwards."""
    with PostgresServer(settings=POSTGRES_SETTINGS) as server:
        yield lambda: server.create_database(f"bench_{next(_numbers)}")


@contextmanager
def each_kind() -> Iterator[dict[str, NewUrl]]:
    """Both stores by their name."""
    with ExitStack() as stack:
        yield {"SQLite": stack.enter_context(sqlite()), "PostgreSQL": stack.enter_context(postgres())}
