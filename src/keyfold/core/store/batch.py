"""A batch of rows as named columns: aggregated by key, sorted by key, and rendered for each database.

Every write goes through here. Sorting gives all writers one lock order (188,000 against 800 events/s with four
writers on PostgreSQL), aggregating keeps one key from standing twice in a statement, which `ON CONFLICT` refuses.
"""

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from keyfold.core.errors import DataRefused
from keyfold.core.store import arrays
from keyfold.core.store.schema import SIGN_BIT, UInt64
from keyfold.core.store.store import Transaction

Columns = Mapping[str, Sequence[Any]]
Row = tuple[Any, ...]
Fold = Callable[[Any, Any], Any]


def add(before: Any, more: Any) -> Any:
    return before + more


def latest(_: Any, more: Any) -> Any:
    return more


def aggregated(columns: Columns, key: Sequence[str], folds: Mapping[str, Fold]) -> dict[str, list[Any]]:
    """One row a key, sorted by key; each further column is folded with the rows of the same key, in their order."""
    rest = [name for name in columns if name not in key]
    if missing := [name for name in rest if name not in folds]:
        raise ValueError(f"no fold for {', '.join(missing)}")
    by_key: dict[Row, list[Any]] = {}
    fold = [folds[name] for name in rest]
    for row_key, values in zip(_rows(columns, key), _rows(columns, rest), strict=True):
        before = by_key.get(row_key)
        if before is None:
            by_key[row_key] = list(values)
        else:
            for index, value in enumerate(values):
                before[index] = fold[index](before[index], value)
    ordered = sorted(by_key)
    result: dict[str, list[Any]] = {name: [row_key[index] for row_key in ordered] for index, name in enumerate(key)}
    for index, name in enumerate(rest):
        result[name] = [by_key[row_key][index] for row_key in ordered]
    return result


def in_key_order(columns: Columns, key: Sequence[str]) -> dict[str, list[Any]]:
    """The rows sorted by key; a key that stands twice is a mistake of the caller."""
    names = [*key, *(name for name in columns if name not in key)]
    keys = list(_rows(columns, key))
    if _ascend(keys):
        return {name: list(columns[name]) for name in names}
    order = sorted(range(len(keys)), key=keys.__getitem__)
    ordered = [keys[index] for index in order]
    if not _ascend(ordered):
        twice = next(later for earlier, later in itertools.pairwise(ordered) if earlier == later)
        raise ValueError(f"the key {twice!r} stands twice in one batch")
    return {name: [columns[name][index] for index in order] for name in names}


def _ascend(keys: Sequence[Row]) -> bool:
    return all(map(operator.lt, keys, itertools.islice(keys, 1, None)))


def stored(table: sa.Table, columns: Columns) -> list[Sequence[Any]]:
    """The columns as the driver takes them; NUL in text is refused here, because SQLite would take it."""
    ready: list[Sequence[Any]] = []
    for name, values in columns.items():
        kind = table.c[name].type
        if isinstance(kind, UInt64):
            ready.append([None if value is None else value - SIGN_BIT for value in values])
            continue
        if isinstance(kind, sa.Text) and "\0" in "".join(filter(None, values)):
            raise DataRefused(f"{table.name}.{name} cannot hold a NUL character")
        ready.append(values)
    return ready


# A statement of PostgreSQL takes 65,535 parameters; arrays and JSON are one parameter a column or a batch.
PARAMETERS_MAX = 65_000


def slices(tx: Transaction, columns: Columns) -> Iterator[Columns]:
    """The batch in pieces that fit into one statement, in order; one piece unless it is rendered as VALUES."""
    count = len(next(iter(columns.values())))
    size = count if tx.is_sqlite or tx.unnest else PARAMETERS_MAX // len(columns)
    if count <= size:
        yield columns
        return
    for start in range(0, count, size):
        yield {name: values[start : start + size] for name, values in columns.items()}


def source(
    tx: Transaction, table: sa.Table, columns: Columns, rows_max: int = 0, *, inserted: bool = False
) -> tuple[str, Any]:
    """A `SELECT` or `VALUES` of the batch for the driver, and its parameters; `rows_max` or fewer are `VALUES`.

    What is only `inserted` is not joined: then no column of it is laid aside first. Keys, numbers and text only:
    SQLite's JSON holds 64-bit integers exactly but rounds floats its own way.
    """
    names = tuple(columns)
    values = stored(table, columns)
    if tx.is_sqlite:
        return _json_source(table, names), (_as_json(table, names, values),)
    count = len(values[0])
    if tx.unnest and count > rows_max:
        return _array_source(table, names, inserted), tuple(
            _array(table.c[name].type, column) for name, column in zip(names, values, strict=True)
        )
    return values_sql(table, names, count), _values_parameters(values)


def values_parameters(table: sa.Table, columns: Columns) -> tuple[Any, ...]:
    """The parameters of `values_sql`, on PostgreSQL."""
    return _values_parameters(stored(table, columns))


def _values_parameters(values: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    """A number as text takes the type of its column: by its size it would be one of three, each a plan of its own."""
    return tuple([str(value) if type(value) is int else value for each in zip(*values, strict=True) for value in each])


def values_sql(table: sa.Table, names: tuple[str, ...], count: int) -> str:
    """So many rows as `VALUES`, on PostgreSQL."""
    return "VALUES " + ", ".join([_values_row(table, names)] * count)


def listed(tx: Transaction, table: sa.Table, name: str, values: Sequence[Any]) -> bytes | str:
    """The values of one column as one parameter, for `listed_source` or `array_source`."""
    (ready,) = stored(table, {name: values})
    if not tx.is_sqlite:
        return _array(table.c[name].type, ready)
    if isinstance(table.c[name].type, sa.LargeBinary):
        return msgspec.json.encode([each.hex() for each in ready])
    return msgspec.json.encode(ready)


def listed_source(table: sa.Table, name: str) -> str:
    """A `SELECT` of one column as `value`, on SQLite."""
    if isinstance(table.c[name].type, sa.LargeBinary):
        return "SELECT unhex(value) AS value FROM json_each(?)"
    return "SELECT value FROM json_each(?)"


def array_source(table: sa.Table, name: str) -> str:
    """The same as an array, on PostgreSQL."""
    return f"%s::{postgres_type(table, name)}[]"


def relation(tx: Transaction, table: sa.Table, columns: Columns, name: str = "batch") -> sa.FromClause:
    """The batch as something a SQLAlchemy statement can select from or join; columns are typed as in `table`."""
    typed = {column: table.c[column].type for column in columns}
    if tx.is_sqlite:
        values = _as_json(table, tuple(columns), stored(table, columns))
        each = sa.func.json_each(sa.bindparam(f"{name}_rows", values, sa.LargeBinary())).table_valued("value")
        picked = [
            sa.type_coerce(_json_item(each.c.value, index, kind), kind).label(column)
            for index, (column, kind) in enumerate(typed.items())
        ]
        return sa.select(*picked).subquery(name)
    if tx.unnest:
        arrays = [
            sa.cast(sa.bindparam(f"{name}_{column}", list(values)), postgresql.ARRAY(_plain(kind)))
            for (column, kind), values in zip(typed.items(), stored(table, columns), strict=True)
        ]
        listed = [sa.column(column, kind) for column, kind in typed.items()]
        return sa.func.unnest(*arrays).table_valued(*listed, name=name).render_derived()
    listed = [sa.column(column, kind) for column, kind in typed.items()]
    rows = list(zip(*columns.values(), strict=True))
    return sa.values(*listed, name=name).data(rows)


@contextlib.contextmanager
def hashed(tx: Transaction) -> Iterator[None]:
    """Let PostgreSQL compare rows with a batch by their hashes: for a statement that has found the rows by an index.

    Of a table that was not analyzed since it was filled it expects a row or two, and compares each with each: 10,000
    cells with 10,000 took a second.
    """
    if tx.is_sqlite:
        yield
        return
    tx.driver("SET LOCAL enable_nestloop = off")
    yield
    tx.driver("SET LOCAL enable_nestloop TO DEFAULT")


def is_among(tx: Transaction, table: sa.Table, columns: Columns, name: str = "batch") -> sa.ColumnElement[bool]:
    """Whether a row of the table has the values of a row of the batch."""
    listed = relation(tx, table, columns, name)
    if tx.is_sqlite:
        # Listed once. EXISTS would read the whole batch anew for each row: 6 s instead of 6 ms for 6,000 of 6,000.
        return sa.tuple_(*[table.c[column] for column in columns]).in_(sa.select(*[listed.c[each] for each in columns]))
    # A join, also where it is negated. NOT IN would compare each with each as soon as its hash has no room.
    return sa.exists().where(*[listed.c[column] == table.c[column] for column in columns])


def _rows(columns: Columns, names: Sequence[str]) -> Iterable[Row]:
    if not names:
        return [()] * len(next(iter(columns.values())))
    return zip(*(columns[name] for name in names), strict=True)


def _as_json(table: sa.Table, names: tuple[str, ...], values: list[Sequence[Any]]) -> bytes:
    ready = [
        [None if value is None else value.hex() for value in column]
        if isinstance(table.c[name].type, sa.LargeBinary)
        else column
        for name, column in zip(names, values, strict=True)
    ]
    return msgspec.json.encode(list(zip(*ready, strict=True)))


def _json_item(value: Any, index: int, kind: sa.types.TypeEngine[Any]) -> Any:
    item = sa.func.json_extract(value, f"$[{index}]")
    return sa.func.unhex(item) if isinstance(kind, sa.LargeBinary) else item


def _plain(kind: sa.types.TypeEngine[Any]) -> sa.types.TypeEngine[Any]:
    return sa.BigInteger() if isinstance(kind, UInt64) else sa.Text() if isinstance(kind, sa.Text) else kind


def _array(kind: sa.types.TypeEngine[Any], values: Sequence[Any]) -> arrays.Array | str:
    """An array as PostgreSQL reads it, item by item: by the driver's own way it costs twice as much and more."""
    found = arrays.packed(kind, values)
    return _array_text(kind, values) if found is None else found


def _array_text(kind: sa.types.TypeEngine[Any], values: Sequence[Any]) -> str:
    """The same as text."""
    if None in values:
        return "{" + ",".join(["NULL" if value is None else _array_item(kind, value) for value in values]) + "}"
    if isinstance(kind, sa.Text) and len(values):
        # The usual text has nothing to escape, so all of it is quoted at once.
        joined = '","'.join(values)
        if "\\" not in joined and joined.count('"') == 2 * (len(values) - 1):
            return '{"' + joined + '"}'
    if isinstance(kind, sa.Text | sa.LargeBinary):
        return "{" + ",".join([_array_item(kind, value) for value in values]) + "}"
    return "{" + ",".join(map(str, values)) + "}"


def _array_item(kind: sa.types.TypeEngine[Any], value: Any) -> str:
    if isinstance(kind, sa.Text):
        return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(kind, sa.LargeBinary):
        return f'"\\\\x{value.hex()}"'
    return str(value)


@cache
def _json_source(table: sa.Table, names: tuple[str, ...]) -> str:
    picked = []
    for index, name in enumerate(names):
        item = f"value ->> {index}"
        picked.append(f"unhex({item})" if isinstance(table.c[name].type, sa.LargeBinary) else item)
    return (
        "SELECT "
        + ", ".join(f"{item} AS {name}" for item, name in zip(picked, names, strict=True))
        + (
            " FROM json_each(?) WHERE true"  # `WHERE true` keeps ON CONFLICT from being read as a join condition
        )
    )


@cache
def _array_source(table: sa.Table, names: tuple[str, ...], inserted: bool) -> str:
    each = [f"%s::{postgres_type(table, name)}[]" for name in names]
    if inserted:
        return f"SELECT {', '.join(f'unnest({array})' for array in each)}"
    return f"SELECT * FROM unnest({', '.join(each)}) AS rows ({', '.join(names)})"


@cache
def _values_row(table: sa.Table, names: tuple[str, ...]) -> str:
    return "(" + ", ".join(f"%s::{postgres_type(table, name)}" for name in names) + ")"


@cache
def postgres_type(table: sa.Table, name: str) -> str:
    if isinstance(table.c[name].type, sa.Text):
        return "TEXT"  # without a collation of its own, which an array cannot have
    return str(table.c[name].type.compile(dialect=postgresql.dialect()))  # type: ignore[no-untyped-call]
