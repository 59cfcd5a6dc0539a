"""Reads by libpq's own calls: a prepared statement is run and its rows are loaded, without the driver's machinery.

That machinery, which can be interrupted and runs on any loop, costs some 60 µs a statement: a quarter of what reading
twenty rows by their keys takes.
"""

import itertools
import re
from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import errors, pq
from psycopg.adapt import PyFormat, Transformer

from keyfold.core.store.batch import Row

BINARY = 1
PREPARED_MAX = 200  # statements a connection

_PLACE = re.compile("%%|%s")
_names = itertools.count()  # a connection comes back from the pool with what was prepared on it


def numbered(sql: str) -> bytes:
    """A statement with its places as the server writes them."""
    places = itertools.count(1)
    return _PLACE.sub(lambda found: "%" if found[0] == "%%" else f"${next(places)}", sql).encode()


def as_text(parameters: Sequence[Any]) -> list[bytes] | None:
    """Parameters as libpq sends text; None where one is something else, or has a NUL, at which libpq would end it."""
    if not {str}.issuperset(map(type, parameters)) or "\0" in "".join(parameters):
        return None
    return [each.encode() for each in parameters]


class PqCursor:
    """A cursor for reads on a connection that nobody else uses meanwhile and that has no transaction.

    A statement that comes again is prepared. A call waits within libpq until the server answers, which its statement
    time-out sees to, or until the system gives the connection up.
    """

    def __init__(self, connection: "psycopg.Connection[Row]") -> None:
        self._connection = connection
        self._pgconn = connection.pgconn
        self._usual = connection.cursor(binary=True)
        self._prepared: dict[tuple[str, tuple[int, ...]], bytes] = {}  # without a name: it was asked for once
        self._rows: list[Row] = []

    def execute(self, sql: str, parameters: Sequence[Any]) -> "PqCursor":
        transformer = Transformer(self._connection)
        values: Any = as_text(parameters)
        types = (0,) * len(parameters)  # of text the server finds out what it is
        if values is None:
            values = transformer.dump_sequence(parameters, [PyFormat.AUTO] * len(parameters))
            types = transformer.types or ()
        statement = (sql, types)
        name = self._prepared.get(statement)
        if name is None:
            if len(self._prepared) < PREPARED_MAX:
                self._prepared[statement] = b""
            return self._run_usually(sql, parameters)
        try:
            name = name or self._prepare(*statement)
            result = self._pgconn.exec_prepared(name, values, transformer.formats, BINARY)
            _must_be_well(result)
        except MemoryError:  # so the driver says that libpq gave no result, which it does where nothing can be sent
            raise psycopg.OperationalError(self._pgconn.get_error_message()) from None
        except (errors.FeatureNotSupported, errors.InvalidSqlStatementName):
            # The table was changed since, or another session has the connection: prepared again when it comes again.
            del self._prepared[statement]
            return self._run_usually(sql, parameters)
        transformer.set_pgresult(result)
        self._rows = transformer.load_rows(0, result.ntuples, tuple)
        return self

    def _prepare(self, sql: str, types: tuple[int, ...]) -> bytes:
        name = b"keyfold_%d" % next(_names)
        _must_be_well(self._pgconn.prepare(name, numbered(sql), types))
        self._prepared[sql, types] = name
        return name

    def _run_usually(self, sql: str, parameters: Sequence[Any]) -> "PqCursor":
        self._rows = self._usual.execute(sql, parameters).fetchall()
        return self

    def fetchall(self) -> list[Row]:
        rows, self._rows = self._rows, []
        return rows


def _must_be_well(result: "pq.abc.PGresult") -> None:
    if result.status not in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK):
        raise errors.error_from_result(result)
