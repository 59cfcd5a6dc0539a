"""Columns as PostgreSQL's arrays in their binary form.

The server takes a column of numbers in a third of the time that it takes to read their digits, and bytes as they are.
"""

import struct
from collections.abc import Sequence
from itertools import chain
from typing import Any

import sqlalchemy as sa

from keyfold.core.errors import DataRefused
from keyfold.core.store.schema import UInt64

LENGTHS_KEPT = 4096
ROWS_MIN = 64  # fewer are sooner written as digits than as an array of NumPy's

_HEAD = struct.Struct(">iiIii")  # dimensions, whether any is NULL, the type, how many, the first index


class _Lengths(dict[int, bytes]):
    """Lengths as the server reads them; those of short strings are kept."""

    def __missing__(self, length: int) -> bytes:
        found = struct.pack(">i", length)
        if length < LENGTHS_KEPT:
            self[length] = found
        return found


_lengths = _Lengths()


class Array(bytes):
    """The binary form of an array; `type_oid` and `array_oid` are the server's numbers of what it holds and is."""

    type_oid = 0
    array_oid = 0


class Int32Array(Array):
    type_oid, array_oid = 23, 1007


class Int64Array(Array):
    type_oid, array_oid = 20, 1016


class TextArray(Array):
    type_oid, array_oid = 25, 1009


class BytesArray(Array):
    type_oid, array_oid = 17, 1001


KINDS = (Int32Array, Int64Array, TextArray, BytesArray)


def packed(kind: sa.types.TypeEngine[Any], values: Sequence[Any]) -> Array | None:
    """None where the column is better, or only, written as text: it is short, of another type, or something is NULL."""
    if len(values) < ROWS_MIN:
        return None
    if isinstance(kind, sa.Integer | UInt64):
        return _numbers(Int64Array if isinstance(kind, sa.BigInteger | UInt64) else Int32Array, values)
    if None in values:
        return None
    try:
        if isinstance(kind, sa.Text):
            return _strings(TextArray, list(map(str.encode, values)))
        if isinstance(kind, sa.LargeBinary):
            return _strings(BytesArray, values)
    except UnicodeError as error:
        raise DataRefused(str(error)) from error
    return None


def _numbers(kind: type[Array], values: Sequence[Any]) -> Array | None:
    import numpy as np  # takes 70 ms, and a store of SQLite has no use for it

    column = np.array(values)
    if column.dtype != np.int64:  # whatever else it is: not numbers of this size alone
        return None
    size = 4 if kind is Int32Array else 8
    if size == 4 and (column != column.astype(np.int32)).any():
        return None
    rows = np.empty(len(column), [("length", ">i4"), ("value", f">i{size}")])
    rows["length"], rows["value"] = size, column
    return kind(_head(kind, len(column)) + rows.tobytes())


def _strings(kind: type[Array], values: Sequence[bytes]) -> Array:
    lengths = map(_lengths.__getitem__, map(len, values))
    return kind(b"".join([_head(kind, len(values)), *chain.from_iterable(zip(lengths, values, strict=True))]))


def _head(kind: type[Array], count: int) -> bytes:
    return _HEAD.pack(1, 0, kind.type_oid, count, 1)


def teach_driver() -> None:
    """Let psycopg send arrays as they are; known to all connections that are made from then on."""
    import psycopg
    from psycopg.adapt import Dumper
    from psycopg.pq import Format

    class ArrayDumper(Dumper):
        format = Format.BINARY

        def dump(self, obj: Array) -> Array:
            return obj

    for kind in KINDS:
        dumper = type(f"{kind.__name__}Dumper", (ArrayDumper,), {"oid": kind.array_oid})
        psycopg.adapters.register_dumper(kind, dumper)
