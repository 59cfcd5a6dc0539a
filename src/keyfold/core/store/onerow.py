"""Many rows of SQLite as one row of columns.

The driver lets go of the interpreter for each row and waits to have it back, which takes longer than the row where
other threads are at work (20 profiles a request, 96 callers over HTTP: 1,790 requests a second row by row, 2,420 by
one row). Numbers and text come as JSON, which holds 64-bit integers exactly; bytes come joined, with their lengths.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
import sqlalchemy as sa

from keyfold.core.store.batch import Row


@cache
def picked(table: sa.Table, names: tuple[str, ...]) -> str:
    """What a SELECT picks instead of these columns."""
    columns = []
    for name in names:
        column = f"{table.name}.{name}"
        if isinstance(table.c[name].type, sa.Numeric):
            raise TypeError(f"{column} is not whole: JSON would round it")
        if _is_bytes(table, name):
            columns.append(f"CAST(group_concat(CAST({column} AS TEXT), '') AS BLOB)")
            columns.append(f"json_group_array(length({column}))")
        else:
            columns.append(f"json_group_array({column})")
    return ", ".join(columns)


def rows(table: sa.Table, names: Sequence[str], row: Row) -> list[Row]:
    """The rows that the one row stands for."""
    given = iter(row)
    columns = [
        _cut(next(given) or b"", msgspec.json.decode(next(given)))
        if _is_bytes(table, name)
        else msgspec.json.decode(next(given))
        for name in names
    ]
    return list(zip(*columns, strict=True))


def joins_bytes(driver: Any) -> bool:
    """Whether the SQLite of a driver joins bytes whole, also behind a NUL: it is nowhere promised."""
    some = b"\0\xff\0a"
    connection = driver.connect(":memory:")
    try:
        sql = "SELECT CAST(group_concat(CAST(column1 AS TEXT), '') AS BLOB) FROM (VALUES (?), (?))"
        return bool(connection.execute(sql, (some, some)).fetchone()[0] == some + some)
    finally:
        connection.close()


def _cut(joined: bytes, lengths: list[int | None]) -> list[bytes | None]:
    at = 0
    return [None if length is None else joined[at : (at := at + length)] for length in lengths]


@cache
def _is_bytes(table: sa.Table, name: str) -> bool:
    return isinstance(table.c[name].type, sa.LargeBinary)
