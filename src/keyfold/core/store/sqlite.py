"""The embedded store: one SQLite file in WAL mode, synced on every commit, with one writer at a time.

`BEGIN IMMEDIATE` always: a deferred transaction that upgrades to writing can fail in a way no wait mends.
Between processes a two-file turnstile decides who writes next; SQLite's own busy wait starves a second process.
"""

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.pool import QueuePool

from keyfold.core.errors import (
    DataRefused,
    KeyfoldError,
    LostRace,
    StoreBusy,
    StoreFull,
    StoreRefused,
    StoreUnreachable,
)
from keyfold.core.limits import Limits
from keyfold.core.store import onerow
from keyfold.core.store.readers import Readers

if TYPE_CHECKING:
    from keyfold.core.store.loopreader import LoopReader

# 3.51.3 mended the WAL-reset bug that can corrupt a file with two writers.
VERSION_MIN = (3, 51, 3)
READERS_MAX = 8
READERS_KEPT = 4


def driver() -> ModuleType:
    """The newest SQLite at hand: the bundled one, or the interpreter's own where it is new enough."""
    modules: list[ModuleType] = []
    with contextlib.suppress(ImportError):
        import pysqlite3.dbapi2

        modules.append(pysqlite3.dbapi2)
    import sqlite3

    modules.append(sqlite3)
    newest = max(modules, key=lambda module: tuple(module.sqlite_version_info))
    if tuple(newest.sqlite_version_info) < VERSION_MIN:
        raise StoreRefused(
            f"SQLite {newest.sqlite_version} can corrupt its file (WAL-reset bug, fixed in 3.51.3)",
            hint="Install pysqlite3, which bundles a newer one",
        )
    return newest


class SqliteEngine:
    """Opens connections to one file and says what its errors mean."""

    name = "sqlite"

    def __init__(self, url: sa.URL, limits: Limits, connections_max: int) -> None:
        if not url.database or url.database == ":memory:":
            raise StoreRefused("a SQLite store needs a file", hint="Write sqlite:///keyfold.db")
        self.path = Path(url.database).absolute()
        if not self.path.parent.is_dir():
            raise StoreRefused(f"there is no directory {self.path.parent}", hint="Make it, or name another file")
        self._module = driver()
        self.joins_bytes = onerow.joins_bytes(self._module)
        self._turnstile = Turnstile(self.path, limits.lock_seconds_max)
        options: dict[str, Any] = {
            "module": self._module,
            "connect_args": {"check_same_thread": False, "isolation_level": None, "timeout": limits.lock_seconds_max},
            "poolclass": QueuePool,
            "pool_reset_on_return": None,
            "hide_parameters": True,  # errors are logged; what they were about may be anyone's
        }
        self._writer = sa.create_engine(url, pool_size=1, max_overflow=1, **options)
        self._reader = sa.create_engine(url, pool_size=READERS_MAX, max_overflow=READERS_MAX, **options)
        for engine in (self._writer, self._reader):
            sa.event.listen(engine, "connect", _prepare_connection)
        self.loop_reader: LoopReader | None = None  # a read is done in this process, where it would hold up the loop
        self.readers = Readers(self._reader.connect, self.cursor, READERS_KEPT)

    @contextlib.contextmanager
    def write(self) -> Iterator[sa.Connection]:
        with self._turnstile, self._writer.connect() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            yield connection

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[sa.Connection]:
        with self._reader.connect() as connection:
            connection.exec_driver_sql("BEGIN")
            try:
                yield connection
            finally:
                connection.exec_driver_sql("ROLLBACK")

    def commit(self, connection: sa.Connection) -> None:
        connection.exec_driver_sql("COMMIT")

    def rollback(self, connection: sa.Connection) -> None:
        raw = connection.connection.dbapi_connection
        if raw is not None and getattr(raw, "in_transaction", False):
            connection.exec_driver_sql("ROLLBACK")

    def unnest(self, connection: sa.Connection) -> bool:
        return False

    def bound_pipeline(self, connection: Any) -> None:
        """Nothing: statements are never sent ahead."""

    def now_us(self, connection: sa.Connection) -> int:
        return time.time_ns() // 1_000

    def about_now_us(self, connection: sa.Connection) -> int:
        return self.now_us(connection)

    def cursor(self, connection: Any) -> Any:
        return connection.cursor()

    def meaning(self, error: sa.exc.DBAPIError) -> KeyfoldError | None:
        """What a driver's error means to us; LostRace and StoreUnreachable are tried again."""
        code = getattr(error.orig, "sqlite_errorcode", 0) or 0
        text = str(error.orig)
        primary = code & 0xFF
        if primary in {5, 6} or "locked" in text:  # BUSY, LOCKED
            return LostRace(text)
        if primary == 13 or "disk is full" in text:  # FULL
            return StoreFull("the disk of the store is full", hint="Free room; nothing was changed")
        if primary in {10, 14}:  # IOERR, CANTOPEN
            return StoreUnreachable(f"the store's file cannot be used: {text}", hint=f"Look at {self.path}")
        if primary in {8, 23}:  # READONLY, AUTH
            return StoreRefused(f"the store's file cannot be written: {text}", hint=f"Look at {self.path}")
        if primary in {11, 26}:  # CORRUPT, NOTADB
            return StoreRefused(f"{self.path} is not a sound SQLite file: {text}")
        if "cannot store REAL value in INTEGER column" in text:  # a sum beyond 64 bits turns into a float
            return DataRefused("a number does not fit in 64 bits", place=text.rpartition(" ")[2])
        if isinstance(error, sa.exc.IntegrityError | sa.exc.DataError) or primary in {18, 19, 20}:
            return DataRefused(text)
        return None

    def close(self) -> None:
        self.readers.close()
        self._writer.dispose()
        self._reader.dispose()
        self._turnstile.close()


class Turnstile:
    """Who writes next: threads by a lock, processes by two lock files.

    A process waits in `next` while it polls `writer`, so the process that has just written cannot overtake it.
    Polling bounds the wait: a stopped process that holds the file gives the others StoreBusy, not a hang.
    """

    POLL_SECONDS = 0.0005

    def __init__(self, path: Path, wait_seconds: float) -> None:
        self._wait_seconds = wait_seconds
        self._threads = threading.Lock()
        self._next, self._writer = (
            _open_lock_file(path.with_name(f"{path.name}-{name}")) for name in ("next", "writer")
        )

    def __enter__(self) -> None:
        deadline = time.monotonic() + self._wait_seconds
        if not self._threads.acquire(timeout=self._wait_seconds):
            raise self._busy()
        try:
            self._lock(self._next, deadline)
            try:
                self._lock(self._writer, deadline)
            finally:
                fcntl.flock(self._next, fcntl.LOCK_UN)
        except BaseException:
            self._threads.release()
            raise

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._writer, fcntl.LOCK_UN)
        self._threads.release()

    def close(self) -> None:
        for descriptor in (self._next, self._writer):
            if descriptor >= 0:
                os.close(descriptor)
        self._next = self._writer = -1

    def _lock(self, descriptor: int, deadline: float) -> None:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise self._busy() from None
                time.sleep(self.POLL_SECONDS)

    def _busy(self) -> StoreBusy:
        return StoreBusy(f"another writer held the store for {self._wait_seconds:g} seconds", retry_after_seconds=1)


def _open_lock_file(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StoreRefused(f"cannot open {path}: {error.strerror}", hint="The directory must be writable") from None


def _prepare_connection(connection: DBAPIConnection, _: object) -> None:
    cursor = connection.cursor()
    for pragma in (
        "journal_mode = WAL",
        "synchronous = FULL",
        "foreign_keys = ON",
        "cache_size = -65536",
        "temp_store = MEMORY",
        "journal_size_limit = 67108864",
        # 32 MB: a large batch fills the default 4 MB by itself, and its pages would be written again at every commit.
        "wal_autocheckpoint = 8000",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()
