"""A connection that the event loop reads by itself, one small statement at a time, without a thread.

Where nobody else is about, handing a read to a thread and back costs as much as the read. Whatever goes wrong here is
no answer: it is then read the usual way, which knows what errors mean and when to try again.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence

import psycopg
import structlog
from psycopg import pq
from psycopg.adapt import Transformer

from keyfold.core.store.batch import Row
from keyfold.core.store.pqcursor import BINARY, as_text, numbered

log = structlog.get_logger(__name__)

OPEN_AGAIN_SECONDS = 1.0
# Waking up for an answer takes about as long as PostgreSQL needs for it. Nothing else runs in the loop meanwhile.
WATCH_SECONDS = 0.0003
WATCH_AGAIN_SECONDS = 0.02


class LoopConnection:
    """A connection of the driver, spoken to by libpq's own calls: none of them waits.

    Each statement is prepared once, so there must be few of them; parameters are text.
    """

    def __init__(self, connection: "psycopg.AsyncConnection[Row]", loop: asyncio.AbstractEventLoop) -> None:
        self._connection = connection
        self._pgconn = connection.pgconn
        self._loop = loop
        self._socket = self._pgconn.socket
        self._waiting: asyncio.Future[None] | None = None
        self._watch_at = 0.0
        self._prepared: dict[str, bytes] = {}
        self.is_lost = False
        loop.add_reader(self._socket, self._readable)

    async def rows(self, sql: str, values: Sequence[bytes], *, is_alone: bool) -> list[Row]:
        name = self._prepared.get(sql)
        if name is None:
            name = b"loop_%d" % len(self._prepared)
            self._pgconn.send_prepare(name, numbered(sql))
            self._flush()
            await self._result()
            self._prepared[sql] = name
        self._pgconn.send_query_prepared(name, values, result_format=BINARY)
        self._flush()
        self._watch(is_alone)
        result = await self._result()
        transformer = Transformer(self._connection)
        transformer.set_pgresult(result)
        return transformer.load_rows(0, result.ntuples, tuple)

    def close(self) -> None:
        if not self.is_lost:
            self.is_lost = True
            if not self._loop.is_closed():
                self._loop.remove_reader(self._socket)
            self._pgconn.finish()

    def _flush(self) -> None:
        if self._pgconn.flush():
            raise psycopg.OperationalError("the socket does not take a small statement: the server does not read")

    def _watch(self, is_alone: bool) -> None:
        """Look for the answer for a moment rather than sleep until it comes, where that keeps nobody else waiting.

        Where others were about a moment ago, or an answer took longer than that, more of the same is to come.
        """
        now = time.monotonic()
        if is_alone and now < self._watch_at:
            return
        until = now + WATCH_SECONDS if is_alone else now
        while self._pgconn.is_busy():
            if now >= until:
                self._watch_at = now + WATCH_AGAIN_SECONDS
                return
            os.sched_yield()  # on a machine of one core PostgreSQL could not answer otherwise
            self._pgconn.consume_input()
            now = time.monotonic()

    async def _result(self) -> "pq.abc.PGresult":
        """What the statement that was sent gave."""
        last: pq.abc.PGresult | None = None
        while True:
            while self._pgconn.is_busy():
                self._waiting = self._loop.create_future()
                try:
                    await self._waiting
                finally:
                    self._waiting = None
                self._pgconn.consume_input()
            result = self._pgconn.get_result()
            if result is None:
                break
            if result.status not in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK):
                raise psycopg.OperationalError(result.get_error_message())
            last = result
        assert last is not None
        return last

    def _readable(self) -> None:
        if self._waiting is None:
            self.close()  # what comes unasked is the server's farewell
        elif not self._waiting.done():
            self._waiting.set_result(None)


class LoopReader:
    """Opens its connection beside the reads that it is asked for, and again where it was lost."""

    def __init__(self, connect: Callable[[], Awaitable["psycopg.AsyncConnection[Row]"]]) -> None:
        self._connect = connect
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening: asyncio.Task[None] | None = None
        self._open_at = 0.0
        self._connection: LoopConnection | None = None
        self._is_busy = False
        self._is_closed = False

    def is_free(self) -> bool:
        """Whether a read would be done here and now; a connection that is lacking is being opened."""
        if self._is_busy or self._is_closed:
            return False
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            if self._loop is not None and not self._loop.is_closed():
                return False  # it is another loop's
            self._drop()
            self._loop, self._opening = loop, None
        if self._connection is not None and not self._connection.is_lost:
            return True
        if self._opening is None and time.monotonic() >= self._open_at:
            self._opening = loop.create_task(self._open(loop))
        return False

    async def rows(self, sql: str, parameters: Sequence[str], *, is_alone: bool = False) -> list[Row] | None:
        """The rows of one statement; None where they must be read the usual way.

        `is_alone`: nobody else waits for the loop, so that it may look out for the answer.
        """
        connection = self._connection
        values = as_text(parameters)
        if connection is None or connection.is_lost or self._is_busy or values is None:
            return None
        self._is_busy = True
        is_whole = False
        try:
            found = await connection.rows(sql, values, is_alone=is_alone)
            is_whole = True
            return found
        except psycopg.Error as error:
            log.debug("a read in the event loop failed", exc_info=error)
            return None
        finally:
            self._is_busy = False
            if not is_whole or self._is_closed:  # also where the caller went away: an answer is still to come
                self._drop()

    def close(self) -> None:
        """From any thread; a read under way ends first."""
        self._is_closed = True
        loop = self._loop
        if loop is None or loop.is_closed():
            self._drop()
            return
        try:
            loop.call_soon_threadsafe(self._close)
        except RuntimeError:  # it was closed meanwhile
            self._drop()

    def _close(self) -> None:
        if not self._is_busy:
            self._drop()

    async def _open(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            connection = LoopConnection(await self._connect(), loop)
            if self._is_closed:
                connection.close()
            else:
                self._connection = connection
        except (psycopg.Error, OSError) as error:
            log.debug("the event loop's connection was not opened", exc_info=error)
        finally:
            self._opening = None
            self._open_at = time.monotonic() + OPEN_AGAIN_SECONDS

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
