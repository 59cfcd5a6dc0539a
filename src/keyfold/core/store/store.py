"""One API over both stores: a transaction that runs again when it loses a race, and reads of one statement each."""

import random
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine.interfaces import DBAPIModule

from keyfold.core import metrics
from keyfold.core.clock import Clock
from keyfold.core.errors import (
    CommitUnknown,
    DataRefused,
    KeyfoldError,
    LostRace,
    StoreBusy,
    StoreRefused,
    StoreUnreachable,
)
from keyfold.core.limits import Limits
from keyfold.core.store.readers import Readers

if TYPE_CHECKING:
    from keyfold.core.store.loopreader import LoopReader

T = TypeVar("T")

BACKOFF_SECONDS_MIN = 0.002
BACKOFF_SECONDS_MAX = 0.5


class Engine(Protocol):
    """What a database brings: connections, commit, its clock, and the meaning of its errors."""

    name: str
    joins_bytes: bool  # whether many rows may come as one (`onerow`)
    readers: Readers
    loop_reader: "LoopReader | None"  # where the event loop need not hand a small read to a thread

    def unnest(self, connection: sa.Connection) -> bool: ...
    def bound_pipeline(self, connection: Any) -> None: ...
    def write(self) -> Any: ...
    def snapshot(self) -> Any: ...
    def commit(self, connection: sa.Connection) -> None: ...
    def rollback(self, connection: sa.Connection) -> None: ...
    def now_us(self, connection: sa.Connection) -> int: ...
    def about_now_us(self, connection: sa.Connection) -> int: ...
    def cursor(self, connection: Any) -> Any: ...
    def meaning(self, error: sa.exc.DBAPIError) -> KeyfoldError | None: ...
    def close(self) -> None: ...


class Transaction:
    """What work inside a transaction may use. `now_us` is the database's clock, read once."""

    def __init__(
        self,
        connection: sa.Connection,
        engine: Engine,
        clock: Clock | None,
        *,
        is_read: bool = False,
        cursor: Any = None,
    ) -> None:
        self._is_read = is_read
        self._cursor = cursor
        self.connection = connection
        self.dialect = connection.dialect
        self.engine = engine
        self._clock = clock
        self._now_us: int | None = None
        self.after_commit: list[Callable[[], object]] = []  # wake-ups; they must not fail
        self._is_bounded = True

    @property
    def is_sqlite(self) -> bool:
        return self.engine.name == "sqlite"

    @property
    def unnest(self) -> bool:
        """Whether a batch goes to the server as arrays."""
        return self.engine.unnest(self.connection)

    def execute(self, statement: sa.Executable, parameters: Any = None) -> sa.CursorResult[Any]:
        try:
            return self.connection.execute(statement, parameters)
        except (OverflowError, UnicodeError) as error:
            raise DataRefused(str(error)) from error

    def driver(self, sql: str, parameters: Any = None) -> sa.CursorResult[Any]:
        """Run the driver's own SQL; a list of tuples runs it once for each."""
        try:
            return self.connection.exec_driver_sql(sql, parameters)
        except (OverflowError, UnicodeError) as error:
            raise DataRefused(str(error)) from error

    def rows(self, sql: str, parameters: Any = None) -> list[tuple[Any, ...]]:
        """The rows of the driver's own SQL, as the driver gives them, by the driver's own cursor.

        SQLAlchemy's way costs some 70 µs a statement, more than a read of a few keys.
        """
        if self._cursor is None:
            self._cursor = self.engine.cursor(self.connection.connection.dbapi_connection)
        try:
            return list(self._cursor.execute(sql, parameters or ()).fetchall())
        except (OverflowError, UnicodeError) as error:
            raise DataRefused(str(error)) from error
        except self.dialect.loaded_dbapi.Error as error:
            raise self._told(sql, error) from error

    def rows_meanwhile(
        self, statements: Iterable[tuple[str, Any]], work: Callable[[], T]
    ) -> tuple[list[tuple[Any, ...]], T]:
        """The rows of statements, on a server, which is at each while the next is made, and then while `work` is done.

        Neither the making nor `work` may touch the store. Where one fails, its error names the last that was sent.
        """
        connection: Any = self.connection.connection.dbapi_connection
        sql = ""
        try:
            with connection.pipeline():
                if self._is_bounded:
                    self.engine.bound_pipeline(connection)
                cursors = []
                for sql, parameters in statements:
                    cursors.append(self.engine.cursor(connection).execute(sql, parameters))
                made = work()
            return [row for cursor in cursors if cursor.description for row in cursor.fetchall()], made
        except (OverflowError, UnicodeError) as error:
            raise DataRefused(str(error)) from error
        except self.dialect.loaded_dbapi.Error as error:
            raise self._told(sql, error) from error

    def run_meanwhile(self, statements: Iterable[tuple[str, Any]]) -> None:
        """Run statements, on a server, each while the next is made."""
        self.rows_meanwhile(statements, lambda: None)

    def _told(self, sql: str, error: DBAPIModule.Error) -> sa.exc.DBAPIError:
        """The error as SQLAlchemy would have raised it."""
        if self.dialect.is_disconnect(error, self.connection.connection.dbapi_connection, None):
            try:
                self.connection.exec_driver_sql("SELECT 1")  # fails: so the pool learns that its connections are gone
            except sa.exc.DBAPIError as known:
                return known
        told = sa.exc.DBAPIError.instance(sql, None, error, self.dialect.loaded_dbapi.Error, hide_parameters=True)
        assert isinstance(told, sa.exc.DBAPIError)
        return told

    def copy(self, sql: str, kinds: Sequence[str], columns: Sequence[Sequence[Any]]) -> None:
        """Send columns of these types by PostgreSQL's COPY in its binary form: bytes go as they are, not as digits."""
        connection: Any = self.connection.connection.dbapi_connection
        try:
            with connection.cursor() as cursor, cursor.copy(sql) as copying:
                copying.set_types([kind.lower() for kind in kinds])
                for row in zip(*columns, strict=True):
                    copying.write_row(row)
        except (OverflowError, UnicodeError) as error:
            raise DataRefused(str(error)) from error
        except self.dialect.loaded_dbapi.Error as error:
            raise self._told(sql, error) from error

    @property
    def is_bounded(self) -> bool:
        """Whether it is rolled back when it takes too long."""
        return self._is_bounded

    def unbound(self) -> None:
        """May take as long as it takes: for work that leaves neither messages nor marks, as a migration does."""
        self._is_bounded = False
        if not self.is_sqlite:
            self.driver("SET LOCAL statement_timeout = 0")

    @property
    def now_us(self) -> int:
        if self._now_us is None:
            asked = self.engine.about_now_us if self._is_read else self.engine.now_us
            self._now_us = self._clock.now_us() if self._clock else asked(self.connection)
        return self._now_us


class Store:
    """State, marks, positions and messages, in one file or one database."""

    def __init__(self, engine: Engine, limits: Limits, clock: Clock | None) -> None:
        self.engine = engine
        self.limits = limits
        self._clock = clock

    @classmethod
    def open(
        cls, url: str, *, limits: Limits | None = None, clock: Clock | None = None, connections_max: int = 12
    ) -> "Store":
        """Open the store that a URL names. With a clock, its time replaces the database's (tests)."""
        limits = limits or Limits()
        try:
            parsed = sa.make_url(url)
        except (sa.exc.ArgumentError, ValueError):
            raise StoreRefused(
                "this is not the URL of a store", hint="Write sqlite:///FILE or postgresql://…"
            ) from None
        kind = parsed.drivername.partition("+")[0]
        engine: Engine
        if kind == "sqlite":
            from keyfold.core.store.sqlite import SqliteEngine

            engine = SqliteEngine(parsed, limits, connections_max)
        elif kind in {"postgresql", "postgres"}:
            from keyfold.core.store.postgres import PostgresEngine

            engine = PostgresEngine(parsed, limits, connections_max)
        else:
            raise StoreRefused(f"there is no store of kind {kind}", hint="Write sqlite:///FILE or postgresql://…")
        return cls(engine, limits, clock)

    @property
    def is_sqlite(self) -> bool:
        return self.engine.name == "sqlite"

    def transact(self, work: Callable[[Transaction], T], *, name: str = "work", once: bool = False) -> T:
        """Run `work` in one transaction and commit; a lost race runs the whole of it again, a bounded number of times.

        `work` may run several times and must have no effect outside the transaction. With `once`, a token is stored
        with the changes: when the answer to COMMIT is lost, the token tells whether it committed, so the result is
        still known. Without it a lost answer is `CommitUnknown`.
        """
        token = uuid.uuid4().hex if once and not self.is_sqlite else None
        unknown: list[T] = []
        refusal: KeyfoldError = StoreBusy("the store stayed contended")
        for attempt in range(self.limits.transaction_tries_max):
            if attempt:
                metrics.RETRIES.labels(name, refusal.slug).inc()
                _pause(attempt)
            try:
                return self._attempt(work, token, unknown)
            except (LostRace, StoreUnreachable, CommitUnknown) as error:
                if isinstance(error, CommitUnknown) and token is None:
                    raise
                refusal = error
        if isinstance(refusal, StoreUnreachable | CommitUnknown):
            raise refusal
        raise StoreBusy(
            f"{name} lost every race of {self.limits.transaction_tries_max}: {refusal.detail}", retry_after_seconds=1
        )

    def read(self, work: Callable[[Transaction], T]) -> T:
        """Run reads, each statement seeing its own snapshot; a dropped connection is tried again."""

        def once() -> T:
            with self.engine.readers.taken() as reader:
                return work(
                    Transaction(reader.connection, self.engine, self._clock, is_read=True, cursor=reader.cursor)
                )

        return self._reading(once)

    def snapshot(self, work: Callable[[Transaction], T]) -> T:
        """Run reads that all see one snapshot (on Citus: one snapshot a shard)."""

        def once() -> T:
            with self.engine.snapshot() as connection:
                return work(Transaction(connection, self.engine, self._clock, is_read=True))

        return self._reading(once)

    def close(self) -> None:
        self.engine.close()

    def _attempt(self, work: Callable[[Transaction], T], token: str | None, unknown: list[T]) -> T:
        try:
            with self.engine.write() as connection:
                started = time.monotonic()
                try:
                    transaction = Transaction(connection, self.engine, self._clock)
                    if token and not _claim(transaction, token):
                        self.engine.rollback(connection)
                        return unknown[-1]
                    result = work(transaction)
                    if transaction.is_bounded:
                        self._must_be_in_time(started)
                except BaseException:
                    self._roll_back_quietly(connection)
                    raise
                try:
                    self.engine.commit(connection)
                except sa.exc.DBAPIError as error:
                    meaning = self.engine.meaning(error)
                    if isinstance(meaning, StoreUnreachable) and not self.is_sqlite:
                        unknown.append(result)
                        raise CommitUnknown(
                            f"the store went away while committing: {meaning.detail}",
                            hint="Ask again with the same Idempotency-Key",
                        ) from error
                    self._roll_back_quietly(connection)
                    raise
            for wake in transaction.after_commit:
                wake()
            return result
        except sa.exc.DBAPIError as error:
            raise self._meaning(error) from error
        except sa.exc.TimeoutError as error:
            raise StoreBusy("no connection to the store became free", retry_after_seconds=1) from error

    def _must_be_in_time(self, started: float) -> None:
        """Transactions are bounded: purges and the relay's lower bound rest on none being older than this."""
        if time.monotonic() - started > self.limits.transaction_seconds_max:
            raise StoreBusy(
                f"the transaction ran longer than {self.limits.transaction_seconds_max} seconds and was rolled back",
                hint="Send smaller batches",
                retry_after_seconds=1,
            )

    def _reading(self, once: Callable[[], T]) -> T:
        for attempt in range(self.limits.transaction_tries_max):
            if attempt:
                _pause(attempt)
            try:
                return once()
            except sa.exc.TimeoutError as error:
                raise StoreBusy("no connection to the store became free", retry_after_seconds=1) from error
            except sa.exc.DBAPIError as error:
                meaning = self._meaning(error)
                if isinstance(meaning, StoreUnreachable):
                    self.engine.readers.give_back()  # they broke together; the pool replaces them
                if not isinstance(meaning, LostRace | StoreUnreachable) or attempt >= 2:
                    raise meaning from error
        raise StoreUnreachable("the store does not answer")

    def _meaning(self, error: sa.exc.DBAPIError) -> Exception:
        return self.engine.meaning(error) or error

    def _roll_back_quietly(self, connection: sa.Connection) -> None:
        """A failed rollback must not hide why we rolled back; the server undoes what a lost connection began."""
        try:
            self.engine.rollback(connection)
        except sa.exc.DBAPIError:
            connection.invalidate()


_CLAIM: Mapping[str, str] = {
    "postgresql": "INSERT INTO batch_tokens (token, stored_at_us) VALUES (%s, %s) ON CONFLICT DO NOTHING",
}


def _claim(transaction: Transaction, token: str) -> bool:
    """False where an earlier try of this very batch did commit."""
    return transaction.driver(_CLAIM[transaction.engine.name], (token, time.time_ns() // 1_000)).rowcount == 1


def _pause(attempt: int) -> None:
    """Wait longer with every try, and never in step with the others."""
    longest = min(BACKOFF_SECONDS_MAX, BACKOFF_SECONDS_MIN * 2**attempt)
    time.sleep(random.uniform(longest / 4, longest))  # noqa: S311
