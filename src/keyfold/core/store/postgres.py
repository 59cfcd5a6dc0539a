"""The server store: PostgreSQL 15 or newer through psycopg 3, alone or as a Citus cluster.

READ COMMITTED throughout: no invariant rests on the isolation level. Statement, lock and idle time-outs bound
every transaction on the server's side, so that a stuck client cannot hold a row for longer than the settings say. Only
between the statements of a pipeline no such time runs before PostgreSQL 17, which bounds transactions as a whole.
"""

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from keyfold.core.errors import (
    DataRefused,
    KeyfoldError,
    LostRace,
    StoreFull,
    StoreRefused,
    StoreUnreachable,
)
from keyfold.core.limits import Limits
from keyfold.core.store import arrays
from keyfold.core.store.readers import Readers

if TYPE_CHECKING:
    import psycopg

    from keyfold.core.store.loopreader import LoopReader

VERSION_MIN = 150_000
TRANSACTION_TIMEOUT_MIN = 170_000  # the first version that bounds whole transactions
READERS_SHARE = 4  # of so many connections, one is kept for reads
LOOP_READER_MIN = 8  # of so many connections or more, one is the event loop's

RETRY_STATES = {"40001", "40P01", "55P03", "57014", "25P03"}
FULL_STATES = {"53100", "53200"}
GONE_STATES = {"57P01", "57P02", "57P03", "53300"}


class PostgresEngine:
    """Opens connections to one database and says what its errors mean."""

    name = "postgresql"
    joins_bytes = False

    def __init__(self, url: sa.URL, limits: Limits, connections_max: int) -> None:
        try:
            from keyfold.core.store.pqcursor import PqCursor
        except ImportError:
            raise StoreRefused("psycopg is not installed", hint="pip install 'keyfold[postgres]'") from None
        arrays.teach_driver()
        # Its warnings, of a pipeline that ends by an error which is told anyway, have the values of rows in them.
        logging.getLogger("psycopg").setLevel(logging.ERROR)
        milliseconds = {
            "statement_timeout": limits.transaction_seconds_max * 1000,
            "lock_timeout": limits.lock_seconds_max * 1000,
            "idle_in_transaction_session_timeout": limits.transaction_seconds_max * 1000,
        }
        options = " ".join(f"-c {name}={value}" for name, value in milliseconds.items())
        self._bound = f"SET LOCAL transaction_timeout = {limits.transaction_seconds_max * 1000}"
        self._ahead = (0, float("-inf"))  # the server's clock minus ours, and when that was found out
        self._connect_args: dict[str, Any] = {
            "options": options,
            "connect_timeout": limits.lock_seconds_max,
            "application_name": "keyfold",
            "client_encoding": "utf8",  # text is sent as its bytes
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": limits.transaction_seconds_max * 1000,
        }
        has_loop_reader = connections_max >= LOOP_READER_MIN
        self._engine = sa.create_engine(
            url.set(drivername="postgresql+psycopg"),
            pool_size=connections_max - has_loop_reader,
            max_overflow=0,
            hide_parameters=True,  # errors are logged; what they were about may be anyone's
            pool_timeout=limits.lock_seconds_max,
            connect_args=self._connect_args,
        )
        reader = self._engine.execution_options(isolation_level="AUTOCOMMIT")
        self.readers = Readers(reader.connect, PqCursor, connections_max // READERS_SHARE)
        self._citus: bool | None = None
        self.loop_reader: LoopReader | None = self._loop_reader() if has_loop_reader else None

    def _loop_reader(self) -> "LoopReader":
        import psycopg

        from keyfold.core.store.loopreader import LoopReader

        async def connect() -> "psycopg.AsyncConnection[tuple[Any, ...]]":
            _, named = self._engine.dialect.create_connect_args(self._engine.url)
            return await psycopg.AsyncConnection.connect(**{**named, **self._connect_args}, autocommit=True)

        return LoopReader(connect)

    def bound_pipeline(self, connection: "psycopg.Connection[Any]") -> None:
        """Bound what begins on a connection in pipeline mode: between its statements other timers stand still."""
        if connection.info.server_version >= TRANSACTION_TIMEOUT_MIN:
            connection.execute(self._bound)

    def unnest(self, connection: sa.Connection) -> bool:
        """Arrays render a batch best, except on Citus, where rows of VALUES route and unnest does not.

        Asked on the connection that the caller has: if all who begin at once took a second one, the pool would be
        empty and each would wait for the others.
        """
        if self._citus is None:
            sql = "SELECT count(*) FROM pg_extension WHERE extname = 'citus'"
            self._citus = bool(connection.exec_driver_sql(sql).scalar())
        return not self._citus

    @contextlib.contextmanager
    def write(self) -> Iterator[sa.Connection]:
        with self._engine.connect() as connection:
            connection.begin()  # also where the first statement goes past SQLAlchemy, there is something to commit
            yield connection

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[sa.Connection]:
        with self._engine.connect() as connection:
            connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            yield connection
            connection.rollback()

    def commit(self, connection: sa.Connection) -> None:
        connection.commit()

    def rollback(self, connection: sa.Connection) -> None:
        connection.rollback()

    def now_us(self, connection: sa.Connection) -> int:
        """The server's clock: workers on skewed machines agree on it."""
        return int(
            connection.exec_driver_sql("SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint").scalar_one()
        )

    def about_now_us(self, connection: sa.Connection) -> int:
        """The server's clock for reads, by how far ours was from it within the last second: a question less each."""
        ours, monotonic = time.time_ns() // 1_000, time.monotonic()
        ahead_us, asked_at = self._ahead
        if monotonic - asked_at > 1.0:
            ahead_us = self.now_us(connection) - ours
            self._ahead = (ahead_us, monotonic)
        return ours + ahead_us

    def cursor(self, connection: "psycopg.Connection[tuple[Any, ...]]") -> "psycopg.Cursor[tuple[Any, ...]]":
        """Answers come in binary: numbers and bytes are read faster than their text."""
        return connection.cursor(binary=True)

    def meaning(self, error: sa.exc.DBAPIError) -> KeyfoldError | None:
        """What a driver's error means to us; LostRace and StoreUnreachable are tried again."""
        state = getattr(error.orig, "sqlstate", None) or ""
        text = str(error.orig).strip().splitlines()[0] if str(error.orig).strip() else type(error.orig).__name__
        if state in RETRY_STATES:
            return LostRace(text)
        if state in FULL_STATES:
            return StoreFull("the store has no room", hint="Free room; nothing was changed")
        if state in GONE_STATES or state.startswith("08") or error.connection_invalidated:
            return StoreUnreachable(text)
        if state in {"28P01", "28000", "3D000", "42501"}:
            return StoreRefused(text, hint="Look at store.url")
        if state == "22003":
            return DataRefused("a number does not fit in 64 bits")
        # 54000: a value is too long for an index, which nobody sees before it is stored.
        if state[:2] in {"22", "23"} or state == "54000" or isinstance(error, sa.exc.DataError):
            return DataRefused(text)
        if not state and isinstance(error, sa.exc.OperationalError):
            return StoreUnreachable(text)
        return None

    def close(self) -> None:
        if self.loop_reader is not None:
            self.loop_reader.close()
        self.readers.close()
        self._engine.dispose()
