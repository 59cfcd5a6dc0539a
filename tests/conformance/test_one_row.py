"""Many rows that come from the store as one are what they are row by row, on every store."""

import sqlite3
from random import Random
from typing import Any

import pytest
import sqlalchemy as sa

from keyfold.core.store import Store, Transaction, onerow, shapes
from keyfold.core.store.batch import Columns
from keyfold.core.store.schema import Bytes, Int32, Int64, Text, UInt64, table
from keyfold.core.store.sqlite import driver

pytestmark = pytest.mark.spec("CORE-01", "CORE-02")

THINGS = table(
    "things",
    sa.Column("kind", Text, primary_key=True),
    sa.Column("name", Text, primary_key=True),
    sa.Column("body", Bytes, nullable=False),
    sa.Column("more", Bytes),
    sa.Column("number", Int64, nullable=False),
    sa.Column("unsigned", UInt64),
    sa.Column("small", Int32),
    sa.Column("text", Text, nullable=False),
    distribute_by="name",
    metadata=sa.MetaData(),
)
WANTED = ("body", "more", "number", "unsigned", "small", "text")
TEXTS = ("", "a", "é 'quoted' \\ \" \n % {} ,", "\x01\x1f\x7f", "\u2028 \U0001f697", "null", '["a"]', "1.50")


def some_bytes(chance: Random) -> bytes:
    return chance.choice((b"", b"\0", b"\0\0a\0", b"\xff\xfe", "é".encode(), chance.randbytes(chance.randrange(3_000))))


def things(chance: Random, count: int) -> Columns:
    return {
        "kind": ["a" if number % 7 else "b" for number in range(count)],
        "name": [f"{chance.choice(TEXTS)}{number}" for number in range(count)],
        "body": [some_bytes(chance) for _ in range(count)],
        "more": [chance.choice((None, some_bytes(chance))) for _ in range(count)],
        "number": [chance.choice((0, -1, 2**63 - 1, -(2**63), 2**53 + 1)) for _ in range(count)],
        "unsigned": [chance.choice((None, 0, 2**64 - 1, 2**63, 2**63 - 1)) for _ in range(count)],
        "small": [chance.choice((None, 0, -(2**31))) for _ in range(count)],
        "text": [chance.choice(TEXTS) for _ in range(count)],
    }


@pytest.mark.parametrize("seed", range(3))
def test_a_load_of_many_keys_finds_what_was_stored(store: Store, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = Random(seed)
    stored = things(chance, 300)
    store.transact(lambda tx: THINGS.create(tx.connection))
    store.transact(lambda tx: shapes.insert(tx, THINGS, stored))
    rows = dict(
        zip(
            zip(stored["kind"], stored["name"], strict=True),
            zip(*[stored[name] for name in WANTED], strict=True),
            strict=True,
        )
    )
    names = [*stored["name"], *[f"missing {number}" for number in range(20)]]
    chance.shuffle(names)
    for count in (1, shapes.ONE_ROW_KEYS_MIN - 1, shapes.ONE_ROW_KEYS_MIN, len(names)):
        asked = names[:count]
        expected = {("a", name): rows["a", name] for name in asked if ("a", name) in rows}
        assert store.read(lambda tx, asked=asked: load(tx, asked)) == expected  # type: ignore[misc]
        assert store.transact(lambda tx, asked=asked: load(tx, asked)) == expected  # type: ignore[misc]
    assert store.read(lambda tx: load(tx, [f"missing {number}" for number in range(200)])) == {}
    both = {"kind": ["a", "b"] * len(names), "name": [name for name in names for _ in "ab"]}
    assert store.read(lambda tx: shapes.load(tx, THINGS, both, WANTED)) == rows
    expected = {key: row for key, row in rows.items() if key[0] == "a"}
    monkeypatch.setattr(onerow, "rows", too_big)
    assert store.read(lambda tx: load(tx, names)) == expected


def load(tx: Transaction, names: list[str]) -> dict[Any, Any]:
    return shapes.load(tx, THINGS, {"kind": ["a"] * len(names), "name": names}, WANTED)


def too_big(*_: object) -> list[tuple[Any, ...]]:
    raise sa.exc.DataError("SELECT", None, Exception("string or blob too big"))


def test_rows_come_as_one_where_bytes_are_joined_whole(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    if not store.is_sqlite:
        assert not store.engine.joins_bytes
        return
    assert store.engine.joins_bytes == onerow.joins_bytes(driver())
    store.transact(lambda tx: THINGS.create(tx.connection))
    store.transact(lambda tx: shapes.insert(tx, THINGS, things(Random(1), 100)))
    cut: list[int] = []
    rows = onerow.rows
    monkeypatch.setattr(onerow, "rows", lambda *given: (cut.append(1), rows(*given))[1])
    for count in (shapes.ONE_ROW_KEYS_MIN - 1, shapes.ONE_ROW_KEYS_MIN):
        store.read(lambda tx, count=count: load(tx, [str(each) for each in range(count)]))  # type: ignore[misc]
    assert len(cut) == int(store.engine.joins_bytes)


@pytest.mark.parametrize("module", [driver(), sqlite3])
def test_whether_bytes_are_joined_whole_is_found_out(module: Any) -> None:
    """Whatever it says must be so."""
    connection = module.connect(":memory:")
    joined = connection.execute(
        "SELECT CAST(group_concat(CAST(column1 AS TEXT), '') AS BLOB) FROM (VALUES (x'610062'), (x'00ff'))"
    ).fetchone()[0]
    assert onerow.joins_bytes(module) == (joined == b"a\0b\0\xff")
    connection.close()
