"""The write shapes (increment, insert_new, compare_and_set) against hand-written SQL for the same batch and store.

What the helper costs: it aggregates, sorts, checks and renders every batch. The peer gets its rows sorted and ready
as tuples and columns, and runs one `executemany` on SQLite, one `unnest` statement on PostgreSQL, on the bare driver
with one commit a batch, as ours has. Both fill the same table; half of every batch is there already. The peer says
nothing of which rows were new or changed except where the work is wrong without it (compare-and-set counts rows).
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

from bench import stores
from bench.harness import Goal, Race, Side, rate
from keyfold.core.context import Context
from keyfold.core.store import Transaction, shapes
from keyfold.core.store.batch import Columns
from keyfold.core.store.sqlite import driver as sqlite_driver
from keyfold.tally.tables import TALLIES
from tests.product import opened

BATCH = 1_000
NAMES = ("key", "value", "version", "event_version")
TYPES = ("text", "bigint", "bigint", "bigint")
Rows = list[tuple[str, int, int, int]]

ADD_UP = (
    "ON CONFLICT (key) DO UPDATE SET value = tallies.value + excluded.value,"
    " version = tallies.version + excluded.version, event_version = tallies.event_version + excluded.event_version"
)


def races(quick: bool) -> Iterator[Race]:
    batches = 10 if quick else 60
    with stores.each_kind() as kinds:
        for kind, new_url in kinds.items():
            for shape in SHAPES:
                yield _race(kind, new_url, shape, batches)


def _race(kind: str, new_url: stores.NewUrl, shape: "Shape", batches: int) -> Race:
    ours, theirs = f"shapes.{shape.name}", "by hand"
    sides = [
        Side(ours, lambda: _ours(new_url, shape, batches)),
        Side(theirs, lambda: _theirs(new_url, shape, batches)),
    ]
    return Race(
        title=f"{shape.name}, batches of {BATCH}, {kind}",
        unit="rows/s",
        sides=sides,
        goals=[Goal(side=ours, against=theirs, note="what the helper leaves")],
    )


class Shape:
    """One write shape, our way and by hand."""

    def __init__(
        self, name: str, ours: Callable[[Transaction, Columns], object], by_hand: dict[str, str], *, version: int
    ) -> None:
        self.name = name
        self.ours = ours
        self.by_hand = by_hand
        self.version = version  # of the rows in a batch


def _columns(rows: Rows) -> dict[str, list[Any]]:
    return {name: list(column) for name, column in zip(NAMES, zip(*rows, strict=True), strict=True)}


_UNNEST = "SELECT * FROM unnest({}) AS rows (key, value, version, event_version)".format(
    ", ".join(f"%s::{kind}[]" for kind in TYPES)
)
_INTO = "INSERT INTO tallies (key, value, version, event_version)"

SHAPES = (
    Shape(
        "increment",
        lambda tx, columns: shapes.increment(tx, TALLIES, columns),
        {
            "sqlite": f"{_INTO} VALUES (?, ?, ?, ?) {ADD_UP}",
            "postgresql": f"{_INTO} {_UNNEST} {ADD_UP}",
        },
        version=1,
    ),
    Shape(
        "insert_new",
        lambda tx, columns: shapes.insert_new(tx, TALLIES, columns),
        {
            "sqlite": f"{_INTO} VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
            "postgresql": f"{_INTO} {_UNNEST} ON CONFLICT DO NOTHING",
        },
        version=1,
    ),
    Shape(
        "compare_and_set",
        lambda tx, columns: shapes.compare_and_set(tx, TALLIES, columns),
        {
            "sqlite": "UPDATE tallies SET value = ?2, event_version = ?4, version = version + 1"
            " WHERE key = ?1 AND version = ?3",
            "postgresql": "UPDATE tallies SET value = rows.value, event_version = rows.event_version,"
            f" version = tallies.version + 1 FROM ({_UNNEST}) AS rows"
            " WHERE tallies.key = rows.key AND tallies.version = rows.version",
        },
        version=1,
    ),
)


def _batches(shape: Shape, batches: int) -> tuple[Rows, list[Rows]]:
    """Rows that are there before, and batches of keys by chance; compare-and-set needs rows that are all there."""
    chance = random.Random(7)
    keys = [f"key-{number:07}" for number in range(batches * BATCH)]
    chance.shuffle(keys)
    cut = [keys[start : start + BATCH] for start in range(0, len(keys), BATCH)]
    rows = [[(key, 1, shape.version, 0) for key in sorted(some)] for some in cut]
    there = keys if shape.name == "compare_and_set" else keys[::2]
    return [(key, 0, 1, 0) for key in sorted(there)], rows


@contextmanager
def _filled(new_url: stores.NewUrl, rows: Rows) -> Iterator[Context]:
    with opened(new_url()) as context:
        context.store.transact(lambda tx: shapes.insert_new(tx, TALLIES, _columns(rows)))
        yield context


def _ours(new_url: stores.NewUrl, shape: Shape, batches: int) -> float:
    before, work = _batches(shape, batches)
    ready = [_columns(rows) for rows in work]

    def run() -> None:
        for columns in ready:
            context.store.transact(lambda tx, columns=columns: shape.ours(tx, columns))  # type: ignore[misc]

    with _filled(new_url, before) as context:
        return rate(batches * BATCH, run)


def _theirs(new_url: stores.NewUrl, shape: Shape, batches: int) -> float:
    before, work = _batches(shape, batches)
    with _filled(new_url, before) as context:
        url = sa.make_url(context.settings.store.url)
        is_sqlite = url.get_backend_name() == "sqlite"
        run = _by_hand_sqlite if is_sqlite else _by_hand_postgres
        place = str(url.database) if is_sqlite else context.settings.store.url
        return run(place, shape, work)


def _by_hand_sqlite(path: str, shape: Shape, work: list[Rows]) -> float:
    connection = sqlite_driver().connect(path, isolation_level=None)
    for pragma in ("journal_mode = WAL", "synchronous = FULL", "cache_size = -65536"):
        connection.execute(f"PRAGMA {pragma}")
    sql = shape.by_hand["sqlite"]

    def run() -> None:
        for rows in work:
            connection.execute("BEGIN IMMEDIATE")
            changed = connection.executemany(sql, rows).rowcount
            assert shape.name != "compare_and_set" or changed == len(rows)
            connection.execute("COMMIT")

    try:
        return rate(len(work) * BATCH, run)
    finally:
        connection.close()


def _by_hand_postgres(url: str, shape: Shape, work: list[Rows]) -> float:
    import psycopg

    sql = shape.by_hand["postgresql"]
    columns = [[list(column) for column in zip(*rows, strict=True)] for rows in work]
    with psycopg.connect(url) as connection:

        def run() -> None:
            for each in columns:
                changed = connection.execute(sql, each).rowcount
                assert shape.name != "compare_and_set" or changed == len(each[0])
                connection.commit()

        return rate(len(work) * BATCH, run)
