"""Connections that stay open for reads: nothing is begun, reset or prepared again for a read of one statement."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import sqlalchemy as sa

CURSOR = "reader"


class Reader:
    """A connection without a transaction, and the driver's own cursor on it."""

    __slots__ = ("connection", "cursor")

    def __init__(self, connection: sa.Connection, cursor: Any) -> None:
        self.connection = connection
        self.cursor = cursor


class Readers:
    """Takes readers from a pool and keeps a few of them: the pool's own way out and back costs 140 µs a read.

    What is kept is out of the pool, so it is a share of it at most. Whatever failed on a reader, it goes back to the
    pool, which mends or replaces it.
    """

    def __init__(self, connect: Callable[[], sa.Connection], cursor: Callable[[Any], Any], kept_max: int) -> None:
        """`cursor` makes one on a connection of the driver, which has it as long as it is open."""
        self._connect = connect
        self._cursor = cursor
        self._kept_max = kept_max
        self._kept: deque[Reader] = deque()

    @contextlib.contextmanager
    def taken(self) -> Iterator[Reader]:
        """A reader that nobody else has meanwhile; the one used last comes first."""
        try:
            reader = self._kept.pop()
        except IndexError:
            reader = self._opened()
        try:
            yield reader
        except BaseException:
            reader.connection.close()
            raise
        if len(self._kept) < self._kept_max:
            self._kept.append(reader)
        else:
            reader.connection.close()

    def give_back(self) -> None:
        """Give all that are kept back to the pool, because one of them turned out to be broken."""
        while self._kept:
            with contextlib.suppress(IndexError):  # taken meanwhile
                self._kept.pop().connection.close()

    def close(self) -> None:
        self._kept_max = 0  # a read that is still under way keeps nothing behind us
        self.give_back()

    def _opened(self) -> Reader:
        connection = self._connect()
        try:
            if CURSOR not in connection.info:
                connection.info[CURSOR] = self._cursor(connection.connection.dbapi_connection)
            return Reader(connection, connection.info[CURSOR])
        except BaseException:
            connection.close()
            raise
