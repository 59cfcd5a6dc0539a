"""Columns that go to PostgreSQL as binary arrays come out as they went in, and what cannot go so goes as text."""

from collections.abc import Sequence
from typing import Any

import pytest
import sqlalchemy as sa

from keyfold.core.errors import DataRefused
from keyfold.core.store import Store, arrays, batch
from keyfold.core.store.schema import Bytes, Int32, Int64, Real64, Text

pytestmark = pytest.mark.spec("CORE-01")

MANY = arrays.ROWS_MIN
TEXTS = ["", "a", '"quoted"', "back\\slash", "{1,2}", "NULL", "naïve", "日本", "\u0001\n\t", "x" * 5_000]
NUMBERS = [0, 1, -1, 2**31 - 1, -(2**31), 2**31, 2**63 - 1, -(2**63)]
SMALL = [0, 1, -1, 2**31 - 1, -(2**31)]
BYTES = [b"", b"\0", b"\\x41", bytes(range(256)), b"x" * 5_000]


def many(values: Sequence[Any]) -> list[Any]:
    return [values[at % len(values)] for at in range(MANY + 3)]


def column(kind: Any) -> sa.Table:
    return sa.Table("arrays", sa.MetaData(), sa.Column("value", kind))


@pytest.mark.parametrize(
    ("kind", "values", "packed"),
    [
        (Int64, NUMBERS, arrays.Int64Array),
        (Int32, SMALL, arrays.Int32Array),
        (Text, TEXTS, arrays.TextArray),
        (Bytes, BYTES, arrays.BytesArray),
        (Int64, [1, None], None),
        (Text, ["a", None], None),
        (Bytes, [b"a", None], None),
        (Real64, [0.1, -1e300], None),
    ],
)
def test_a_column_comes_out_as_it_went_in(
    postgres_url: str, kind: Any, values: list[Any], packed: type[arrays.Array] | None
) -> None:
    table = column(kind)
    store = Store.open(postgres_url)
    try:
        for given in (many(values), values):  # few are written as text
            array = arrays.packed(table.c.value.type, given)
            assert type(array) is (packed or type(None) if len(given) >= MANY else type(None))
            for is_inserted in (False, True):

                def through(tx: Any, given: Any = given, is_inserted: bool = is_inserted) -> list[Any]:
                    sql, parameters = batch.source(tx, table, {"value": given}, inserted=is_inserted)
                    return [value for (value,) in tx.rows(sql, parameters)]

                assert store.transact(through) == given
    finally:
        store.close()


@pytest.mark.parametrize(
    ("kind", "wrong"), [(Int32, 2**31), (Int64, 2**63), (Int64, 1.5), (Text, "\ud800"), (Text, "a\0b")]
)
def test_what_a_column_cannot_hold_is_refused_among_many_as_it_is_among_few(
    postgres_url: str, kind: Any, wrong: Any
) -> None:
    table, right = column(kind), "a" if kind is Text else 1
    store = Store.open(postgres_url)
    try:
        for count in (1, MANY):

            def send(tx: Any, count: int = count) -> None:
                sql, parameters = batch.source(tx, table, {"value": [right] * count + [wrong]})
                tx.rows(sql, parameters)

            with pytest.raises(DataRefused):
                store.transact(send)
    finally:
        store.close()
