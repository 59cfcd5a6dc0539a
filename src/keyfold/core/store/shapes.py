"""The write shapes that every part uses: increment, insert what is new, compare-and-set, locking load, delete.

Each is one statement (or one executemany on SQLite) for the whole batch, in key order, over the primary key.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import sqlalchemy as sa
from msgspec import Struct

from keyfold.core.errors import LostRace
from keyfold.core.store import batch, onerow
from keyfold.core.store.batch import Columns, Row
from keyfold.core.store.schema import SIGN_BIT, UInt64, key_names
from keyfold.core.store.store import Transaction

R = TypeVar("R")
T = TypeVar("T")
Statement = tuple[str, Any]  # the driver's own SQL, and its parameters

VERSION = "version"
STEP_ROWS = 50
MEANWHILE_ROWS_MIN = 500  # below it the further round trip costs more than the work saves
MEANWHILE_ROWS = 2_500  # in one statement, while those of the next are made
# Below both, the further round trip of a COPY costs more than it saves. Bytes count: in an array they go as digits.
COPY_ROWS_MIN = 50
COPY_BYTES_MIN = 16_000
# Of a load: so few keys are VALUES, whose plan PostgreSQL keeps (60 µs for four keys); with arrays, whose lengths it
# looks at, it plans each time anew (120 µs).
LOAD_ROWS = 8
# Of a load from SQLite: with so many keys its rows come as one. With fewer there is little to wait for.
ONE_ROW_KEYS_MIN = 64


def increment(
    tx: Transaction,
    table: sa.Table,
    columns: Columns,
    *,
    least: Sequence[str] = (),
    greatest: Sequence[str] = (),
    latest: Sequence[str] = (),
    returning: Sequence[str] = (),
) -> dict[Row, Row]:
    """Add the batch to the stored rows, making those that are missing; columns not named otherwise are summed.

    Right under concurrency because the database adds to what is there when it holds the row.
    Returns the chosen columns by key, as they are after the change.
    """
    key = key_names(table)
    folds: dict[str, batch.Fold] = {name: batch.add for name in columns if name not in key}
    folds |= dict.fromkeys(least, min) | dict.fromkeys(greatest, max) | dict.fromkeys(latest, batch.latest)
    rows = batch.aggregated(columns, key, folds)
    return increment_ordered(tx, table, rows, least=least, greatest=greatest, latest=latest, returning=returning)


def increment_ordered(
    tx: Transaction,
    table: sa.Table,
    rows: Columns,
    *,
    least: Sequence[str] = (),
    greatest: Sequence[str] = (),
    latest: Sequence[str] = (),
    returning: Sequence[str] = (),
) -> dict[Row, Row]:
    """As `increment`, of rows that are aggregated: each key once, in key order, its columns first."""
    key = key_names(table)
    if not rows[key[0]]:
        return {}
    after: dict[Row, Row] = {}
    for sql, parameters in increments(
        tx, table, rows, least=least, greatest=greatest, latest=latest, returning=returning
    ):
        if returning and not tx.is_sqlite:
            after |= _by_key(tx.rows(sql, parameters), table, key, returning)
        else:
            tx.driver(sql, parameters)
    return load(tx, table, {name: rows[name] for name in key}, returning) if returning and tx.is_sqlite else after


def increments(
    tx: Transaction,
    table: sa.Table,
    rows: Columns,
    *,
    least: Sequence[str] = (),
    greatest: Sequence[str] = (),
    latest: Sequence[str] = (),
    returning: Sequence[str] = (),
) -> list[Statement]:
    """What `increment_ordered` sends, to be made up ahead of it."""
    key = key_names(table)
    how = tuple((name, _how(name, least, greatest, latest)) for name in rows if name not in key)
    into = _into(table, tuple(rows))
    if tx.is_sqlite:
        values = list(zip(*batch.stored(table, rows), strict=True))
        return [(f"{into} VALUES ({', '.join('?' * len(rows))}) {_add_up(table, how, True)}", values)]
    answer = f" RETURNING {_qualified(table, (*key, *returning))}" if returning else ""
    sources = [batch.source(tx, table, piece, inserted=True) for piece in batch.slices(tx, rows)]
    return [(f"{into} {rendered} {_add_up(table, how, False)}{answer}", parameters) for rendered, parameters in sources]


def insert_new(tx: Transaction, table: sa.Table, columns: Columns) -> set[Row]:
    """Insert the rows whose key is not there yet, and return the keys that were new. A mark is such a row.

    Two writers of one key: the second waits for the first to commit or roll back, and then sees it.
    """
    key = key_names(table)
    rows = batch.in_key_order(columns, key)
    if not rows[key[0]]:
        return set()
    if tx.is_sqlite and _insert_all(tx, table, rows):
        return set(zip(*(rows[name] for name in key), strict=True))
    found = [row for sql, parameters in _inserts_new(tx, table, rows) for row in tx.rows(sql, parameters)]
    return set(_by_key(found, table, key, ()))


def insert_new_meanwhile(
    tx: Transaction,
    table: sa.Table,
    items: Sequence[R],
    columns_of: Callable[[Sequence[R]], Columns],
    work: Callable[[], T],
) -> tuple[set[Row], T | None]:
    """As `insert_new`, of items in the order of their keys, and what `work` makes; None where little is to wait for.

    A server inserts some of the items while the columns of the next are made, and the last while `work` is done.
    """
    if tx.is_sqlite or len(items) < MEANWHILE_ROWS_MIN:
        return insert_new(tx, table, columns_of(items)), None
    size = MEANWHILE_ROWS if tx.unnest else len(items)
    key = key_names(table)

    def statements() -> Iterator[Statement]:
        for start in range(0, len(items), size):
            yield from _inserts_new(tx, table, batch.in_key_order(columns_of(items[start : start + size]), key))

    found, made = tx.rows_meanwhile(statements(), work)
    return set(_by_key(found, table, key, ())), made


def _inserts_new(tx: Transaction, table: sa.Table, rows: Columns) -> Iterator[Statement]:
    """On a server one statement, unless the rows are too many for it; it returns the keys that were new."""
    behind = f"ON CONFLICT DO NOTHING RETURNING {', '.join(key_names(table))}"
    for piece in batch.slices(tx, rows):
        rendered, parameters = batch.source(tx, table, piece, inserted=True)
        yield f"{_into(table, tuple(rows))} {rendered} {behind}", parameters


def _insert_all(tx: Transaction, table: sa.Table, rows: Mapping[str, Sequence[Any]]) -> bool:
    """The usual case on SQLite (2.9 µs a mark instead of 4.9): every row is new. Otherwise nothing is inserted.

    Fifty rows a step: for rows as small as a mark a step costs as much as the row (0.6 instead of 1.2 µs).
    """
    count, width = len(next(iter(rows.values()))), len(rows)
    flat = tuple(itertools.chain.from_iterable(zip(*batch.stored(table, rows), strict=True)))
    whole = count - count % STEP_ROWS
    tx.driver("SAVEPOINT all_new")
    inserted = 0
    for begin, end, step in ((0, whole, STEP_ROWS), (whole, count, 1)):
        if begin < end:
            values = [flat[at * width : (at + step) * width] for at in range(begin, end, step)]
            inserted += tx.driver(_insert_sql(table, tuple(rows), step), values).rowcount
    is_whole = inserted == count
    if not is_whole:
        tx.driver("ROLLBACK TO all_new")
    tx.driver("RELEASE all_new")
    return is_whole


def insert(tx: Transaction, table: sa.Table, columns: Columns) -> None:
    """Insert rows whose keys cannot be there."""
    key = key_names(table)
    rows = batch.in_key_order(columns, key)
    if not rows[key[0]]:
        return
    if tx.is_sqlite:
        values = list(zip(*batch.stored(table, rows), strict=True))
        tx.driver(f"{_into(table, tuple(rows))} VALUES ({', '.join('?' * len(rows))})", values)
        return
    if len(rows[key[0]]) >= COPY_ROWS_MIN or _bytes(table, rows) >= COPY_BYTES_MIN:
        names = tuple(rows)
        kinds = [batch.postgres_type(table, name) for name in names]
        tx.copy(f"COPY {table.name} ({', '.join(names)}) FROM STDIN (FORMAT BINARY)", kinds, batch.stored(table, rows))
        return
    rendered, parameters = batch.source(tx, table, rows, inserted=True)
    tx.driver(f"{_into(table, tuple(rows))} {rendered}", parameters)


def _bytes(table: sa.Table, rows: Columns) -> int:
    binary = (values for name, values in rows.items() if isinstance(table.c[name].type, sa.LargeBinary))
    return sum(len(value) for values in binary for value in values if value is not None)


def load(tx: Transaction, table: sa.Table, keys: Columns, wanted: Sequence[str]) -> dict[Row, Row]:
    """The wanted columns of the rows that are there, by key. `keys` may name a prefix of the primary key only if
    the rows it selects are meant all."""
    key = key_names(table)
    if tuple(keys) == key and (alike := _alike(tx, keys)):
        place = key.index(alike)
        before, behind = ([keys[name][0] for name in names] for names in (key[:place], key[place + 1 :]))
        rows = _load_alike(tx, table, keys, (alike, *wanted), alike)
        return {(*before, row[0], *behind): row[1:] for row in rows}
    width = len(key)
    return {row[:width]: row[width:] for row in load_rows(tx, table, keys, (*key, *wanted))}


class Lookup(Struct, frozen=True):
    """A `load_rows` of few keys as one statement of PostgreSQL."""

    sql: str
    parameters: tuple[str, ...]


def lookup(table: sa.Table, keys: Columns, wanted: tuple[str, ...]) -> Lookup | None:
    """None where the keys are too many, or none. For keys of text and numbers; unsigned columns come back as stored."""
    count = len(next(iter(keys.values())))
    if not 0 < count <= LOAD_ROWS:
        return None
    return Lookup(_lookup_sql(table, tuple(keys), wanted, count), batch.values_parameters(table, keys))


@cache
def _lookup_sql(table: sa.Table, keys: tuple[str, ...], wanted: tuple[str, ...], count: int) -> str:
    joined = _load_sql(table, keys, is_sqlite=False)
    return f"SELECT {_qualified(table, wanted)} FROM ({batch.values_sql(table, keys, count)}{joined}"


def load_rows(tx: Transaction, table: sa.Table, keys: Columns, wanted: tuple[str, ...]) -> list[Row]:
    """As `load`, the wanted columns alone, row by row."""
    if not next(iter(keys.values())):
        return []
    if not tx.is_sqlite and (few := lookup(table, keys, wanted)) is not None:
        return _signed_back(tx.rows(few.sql, few.parameters), table, wanted)
    if alike := _alike(tx, keys):
        return _load_alike(tx, table, keys, wanted, alike)
    joined = _load_sql(table, tuple(keys), tx.is_sqlite)
    found: list[Row] = []
    for piece in batch.slices(tx, keys):
        rendered, parameters = batch.source(tx, table, piece, LOAD_ROWS)
        count = len(next(iter(piece.values())))
        found += _fetched(tx, table, wanted, f" FROM ({rendered}{joined}", parameters, count)
    return _signed_back(found, table, wanted)


@cache
def _load_sql(table: sa.Table, keys: tuple[str, ...], is_sqlite: bool) -> str:
    """What stands behind the batch."""
    joined = " AND ".join(f"{table.name}.{name} = batch.{name}" for name in keys)
    alias = "" if is_sqlite else f" ({', '.join(keys)})"
    return f") AS batch{alias} JOIN {table.name} ON {joined}"


def _fetched(
    tx: Transaction, table: sa.Table, wanted: tuple[str, ...], source: str, parameters: Any, keys: int
) -> list[Row]:
    """The wanted columns of so many keys; `source` follows them in the statement."""
    if tx.engine.joins_bytes and keys >= ONE_ROW_KEYS_MIN:
        with contextlib.suppress(sa.exc.DataError):  # more than SQLite joins: row by row they may yet fit
            (row,) = tx.rows(f"SELECT {onerow.picked(table, wanted)}{source}", parameters)
            return onerow.rows(table, wanted, row)
    return tx.rows(f"SELECT {_qualified(table, wanted)}{source}", parameters)


def _alike(tx: Transaction, keys: Columns) -> str:
    """The one column in which the keys differ, if there is just one and a list of its values is what is read best."""
    count = len(next(iter(keys.values())))
    if not (tx.is_sqlite or (count > LOAD_ROWS and tx.unnest)):
        return ""
    names = [name for name, values in keys.items() if values and values.count(values[0]) < count]
    return names[0] if len(names) == 1 else ""


def _load_alike(
    tx: Transaction, table: sa.Table, keys: Columns, wanted: tuple[str, ...], differing: str
) -> list[tuple[Any, ...]]:
    """The usual case: a list of values is read faster than rows (twenty keys on SQLite: 70 µs instead of 90)."""
    same = tuple(name for name in keys if name != differing)
    given = [values[0] for values in batch.stored(table, {name: keys[name][:1] for name in same})]
    parameters = (batch.listed(tx, table, differing, keys[differing]), *given)
    source = _alike_sql(table, same, differing, tx.is_sqlite)
    return _signed_back(_fetched(tx, table, wanted, source, parameters, len(keys[differing])), table, wanted)


@cache
def _alike_sql(table: sa.Table, same: tuple[str, ...], differing: str, is_sqlite: bool) -> str:
    """What follows the columns. CROSS, because SQLite, which sees that the other columns are given, would else go
    through the table first."""
    mark = "?" if is_sqlite else "%s"
    given = "".join(f" AND {table.name}.{name} = {mark}" for name in same)
    if is_sqlite:
        listed = batch.listed_source(table, differing)
        return f" FROM ({listed}) AS batch CROSS JOIN {table.name} ON {table.name}.{differing} = batch.value{given}"
    any_of = batch.array_source(table, differing)
    return f" FROM {table.name} WHERE {table.name}.{differing} = ANY({any_of}){given}"


def locking_load(tx: Transaction, table: sa.Table, keys: Columns, wanted: Sequence[str]) -> dict[Row, Row]:
    """Raise the version of the rows that are there, which locks them, and return the wanted columns by key.

    For hot keys: nobody else can pass between this load and the save of the same transaction.
    """
    key = key_names(table)
    ordered = batch.in_key_order(keys, key)
    if not ordered[key[0]]:
        return {}
    joined = " AND ".join(f"{table.name}.{name} = batch.{name}" for name in key)
    found: dict[Row, Row] = {}
    for piece in batch.slices(tx, ordered):
        rendered, parameters = batch.source(tx, table, piece)
        rows = tx.rows(
            f"UPDATE {table.name} SET {VERSION} = {table.name}.{VERSION} + 1"
            f" FROM (SELECT * FROM ({rendered}) AS listed{_alias(tx, ordered)}"
            f" ORDER BY {_in_order(tx, table, key)}) AS batch"
            f" WHERE {joined} RETURNING {_qualified(table, (*key, *wanted))}",
            parameters,
        )
        found |= _by_key(rows, table, key, wanted)
    return found


def compare_and_set(tx: Transaction, table: sa.Table, columns: Columns) -> None:
    """Save rows that were loaded at `version` (0: not there yet) as `version + 1`; a changed row is a lost race.

    The whole transaction then rolls back and runs again: reloading inside it would deadlock.
    """
    key = key_names(table)
    rows = batch.in_key_order(columns, key)
    versions = rows[VERSION]
    fresh = [index for index, version in enumerate(versions) if version == 0]
    known = [index for index, version in enumerate(versions) if version != 0]
    saved = 0
    if fresh:
        made = {name: [values[index] for index in fresh] for name, values in rows.items()}
        made[VERSION] = [1] * len(fresh)
        saved += _insert_counted(tx, table, made)
    if known:
        changed = {name: [values[index] for index in known] for name, values in rows.items()}
        raised = f"{VERSION} = {table.name}.{VERSION} + 1"
        saved += _update_counted(tx, table, changed, (*key, VERSION), raised)
    if saved != len(versions):
        raise LostRace(f"{len(versions) - saved} of {len(versions)} rows of {table.name} had changed")


def update(tx: Transaction, table: sa.Table, columns: Columns) -> int:
    """Set the given columns of rows that are there, by key; returns how many were."""
    key = key_names(table)
    rows = batch.in_key_order(columns, key)
    return _update_counted(tx, table, rows, key) if rows[key[0]] else 0


def delete(tx: Transaction, table: sa.Table, keys: Columns) -> int:
    """Delete the rows of these keys (or of a prefix of the key); returns how many."""
    if not next(iter(keys.values())):
        return 0
    key = [name for name in key_names(table) if name in keys]
    removed = 0
    for piece in batch.slices(tx, batch.in_key_order(keys, key)):
        rendered, parameters = batch.source(tx, table, piece)
        listed = f"SELECT {', '.join(key)} FROM ({rendered}) AS batch{_alias(tx, dict.fromkeys(key, ()))}"
        removed += tx.driver(f"DELETE FROM {table.name} WHERE ({', '.join(key)}) IN ({listed})", parameters).rowcount
    return removed


def delete_there(tx: Transaction, table: sa.Table, keys: Columns) -> set[Row]:
    """Delete the rows of these keys, and return the keys that were there."""
    key = key_names(table)
    gone: set[Row] = set()
    if not keys[key[0]]:
        return gone
    for piece in batch.slices(tx, batch.in_key_order(keys, key)):
        rendered, parameters = batch.source(tx, table, piece)
        listed = f"SELECT {', '.join(key)} FROM ({rendered}) AS batch{_alias(tx, piece)}"
        rows = tx.rows(
            f"DELETE FROM {table.name} WHERE ({', '.join(key)}) IN ({listed}) RETURNING {', '.join(key)}", parameters
        )
        gone |= set(_by_key(rows, table, key, ()))
    return gone


def hold(tx: Transaction, table: sa.Table, columns: Columns) -> None:
    """Lock rows that were loaded at `version`, and leave them as they are; a changed row is a lost race."""
    rows = batch.in_key_order(columns, key_names(table))
    if not rows[VERSION]:
        return
    held = _update_counted(tx, table, rows, (*key_names(table), VERSION), f"{VERSION} = {table.name}.{VERSION}")
    if held != len(rows[VERSION]):
        raise LostRace(f"{len(rows[VERSION]) - held} of {len(rows[VERSION])} rows of {table.name} had changed")


def next_numbers(tx: Transaction, name: str, count: int) -> Sequence[int]:
    """Take `count` growing numbers. On PostgreSQL from a sequence, so that writers do not queue for it."""
    if not tx.is_sqlite:
        taken = tx.driver(f"SELECT nextval('{name}_numbers') FROM generate_series(1, %s)", (count,))
        return sorted(taken.scalars())
    sql = (
        "INSERT INTO numbers (name, next) VALUES (?, 1 + ?)"
        " ON CONFLICT (name) DO UPDATE SET next = next + ? RETURNING next"
    )
    end = int(tx.driver(sql, (name, count, count)).scalar_one())
    return range(end - count, end)


def _insert_counted(tx: Transaction, table: sa.Table, rows: Mapping[str, Sequence[Any]]) -> int:
    into = _into(table, tuple(rows))
    if tx.is_sqlite:
        values = list(zip(*batch.stored(table, rows), strict=True))
        return tx.driver(f"{into} VALUES ({', '.join('?' * len(rows))}) ON CONFLICT DO NOTHING", values).rowcount
    inserted = 0
    for piece in batch.slices(tx, rows):
        rendered, parameters = batch.source(tx, table, piece)
        inserted += tx.driver(f"{into} {rendered} ON CONFLICT DO NOTHING", parameters).rowcount
    return inserted


def _update_counted(
    tx: Transaction, table: sa.Table, rows: Mapping[str, Sequence[Any]], matched: Sequence[str], extra: str = ""
) -> int:
    """Update rows by the matched columns, setting all others; `extra` is a further assignment."""
    body = [name for name in rows if name not in matched]
    if tx.is_sqlite:
        ordered = {name: rows[name] for name in (*body, *matched)}
        changes = ", ".join([*(f"{name} = ?" for name in body), *([extra] if extra else [])])
        where = " AND ".join(f"{name} = ?" for name in matched)
        values = list(zip(*batch.stored(table, ordered), strict=True))
        return tx.driver(f"UPDATE {table.name} SET {changes} WHERE {where}", values).rowcount
    changes = ", ".join([*(f"{name} = batch.{name}" for name in body), *([extra] if extra else [])])
    where = " AND ".join(f"{table.name}.{name} = batch.{name}" for name in matched)
    changed = 0
    for piece in batch.slices(tx, rows):
        rendered, parameters = batch.source(tx, table, piece)
        changed += tx.driver(
            f"UPDATE {table.name} SET {changes} FROM ({rendered}) AS batch{_alias(tx, rows)} WHERE {where}", parameters
        ).rowcount
    return changed


def _by_key(rows: list[tuple[Any, ...]], table: sa.Table, key: Sequence[str], wanted: Sequence[str]) -> dict[Row, Row]:
    width = len(key)
    return {row[:width]: row[width:] for row in _signed_back(rows, table, (*key, *wanted))}


def _signed_back(rows: list[Row], table: sa.Table, names: tuple[str, ...]) -> list[Row]:
    """Rows as they come from the driver, with unsigned numbers as they were."""
    unsigned = _unsigned(table, names)
    if not unsigned:
        return rows
    return [
        tuple(value + SIGN_BIT if at in unsigned and value is not None else value for at, value in enumerate(row))
        for row in rows
    ]


@cache
def _unsigned(table: sa.Table, names: tuple[str, ...]) -> frozenset[int]:
    return frozenset(at for at, name in enumerate(names) if isinstance(table.c[name].type, UInt64))


def _how(name: str, least: Sequence[str], greatest: Sequence[str], latest: Sequence[str]) -> str:
    return "least" if name in least else "greatest" if name in greatest else "latest" if name in latest else "add"


@cache
def _insert_sql(table: sa.Table, names: tuple[str, ...], rows: int) -> str:
    row = f"({', '.join('?' * len(names))})"
    return f"{_into(table, names)} VALUES {', '.join([row] * rows)} ON CONFLICT DO NOTHING"


@cache
def _into(table: sa.Table, names: tuple[str, ...]) -> str:
    return f"INSERT INTO {table.name} ({', '.join(names)})"


@cache
def _add_up(table: sa.Table, how: tuple[tuple[str, str], ...], is_sqlite: bool) -> str:
    forms = {
        "add": "{n} = {t}.{n} + excluded.{n}",
        "least": "{n} = " + ("min" if is_sqlite else "least") + "({t}.{n}, excluded.{n})",
        "greatest": "{n} = " + ("max" if is_sqlite else "greatest") + "({t}.{n}, excluded.{n})",
        "latest": "{n} = excluded.{n}",
    }
    changes = ", ".join(forms[form].format(n=name, t=table.name) for name, form in how)
    return f"ON CONFLICT ({', '.join(key_names(table))}) DO UPDATE SET {changes}"


@cache
def _qualified(table: sa.Table, names: tuple[str, ...]) -> str:
    return ", ".join(f"{table.name}.{name}" for name in names)


def _in_order(tx: Transaction, table: sa.Table, names: Sequence[str]) -> str:
    """The order that Python sorts in, whatever the database's collation: all writers lock alike."""
    binary = "" if tx.is_sqlite else ' COLLATE "C"'
    return ", ".join(f"{name}{binary if isinstance(table.c[name].type, sa.Text) else ''}" for name in names)


def _alias(tx: Transaction, names: Mapping[str, Any]) -> str:
    """SQLite names the columns inside the SELECT and takes no list after the alias."""
    return "" if tx.is_sqlite else f" ({', '.join(names)})"
