"""Claims about sharding: what a scheme's number stands for never changes, in Python and in every engine."""

import doctest
from pathlib import Path

import pytest

from keyfold.bulk import engines
from keyfold.bulk.engines import EngineName
from keyfold.numbering import sharding
from keyfold.numbering.model import Key
from keyfold.numbering.sharding import By, Scheme, shard_column, shard_of

MOST = 2**63 - 1
# Published states are sharded by these; none may ever be changed. They were computed by md5sum, not by this code.
VECTORS: list[tuple[By, int, Key, str | None, int]] = [
    ("offer", 8, Key(7, "chair", 5, 1), None, 3),
    ("offer", 8, Key(0, "a", 0, 0), None, 4),
    ("offer", 1, Key(7, "chair", 5, 1), None, 0),
    ("offer", 65536, Key(7, "chair", 5, 1), None, 64811),
    ("offer", 3, Key(MOST, "z", MOST, MOST), None, 1),
    ("offer", 1000, Key(7, "стул", 5, 1), None, 614),
    ("offer", 1000, Key(7, "😀", 5, 1), None, 515),
    ("offer", 1000, Key(7, "e\u0301", 5, 1), None, 197),
    ("offer", 1000, Key(7, "é", 5, 1), None, 613),
    ("offer", 1000, Key(7, 'it\'s "a"/b\\%', 5, 1), None, 399),
    ("offer", 1000, Key(7, "\n\t ", 5, 1), None, 271),
    ("offer", 1000, Key(7, "1/chair", 5, 2), None, 69),
    ("offer", 1000, Key(7, "chair", 5, 1), "large", 699),
    ("business", 8, Key(7, "chair", 5, 1), None, 4),
    ("business", 8, Key(7, "table", 6, 2), "large", 4),
    ("business", 65536, Key(MOST, "a", 0, 0), None, 30331),
    ("business", 65536, Key(0, "a", 0, 0), None, 52512),
    ("shop_tier", 1000, Key(7, "chair", 5, 1), None, 249),
    ("shop_tier", 1000, Key(7, "chair", 5, 1), "", 249),
    ("shop_tier", 1000, Key(8, "table", 5, 2), "small", 249),
    ("shop_tier", 1000, Key(7, "chair", 5, 1), "large", 699),
    ("shop_tier", 1000, Key(7, "chair", 5, 1), "Large", 249),
    ("shop_tier", 1000, Key(7, "chair", 5, 1), "large ", 249),
    ("shop_tier", 1000, Key(7, "table", 5, 1), "large", 430),
    ("shop_tier", 65536, Key(MOST, "日本", MOST, MOST), "large", 243),
    ("shop_tier", 65536, Key(MOST, "日本", MOST, MOST), None, 22541),
]


@pytest.mark.spec("NUM-07")
@pytest.mark.parametrize(("by", "shards", "key", "tier", "shard"), VECTORS)
def test_python_gives_the_shards_of_the_table(by: By, shards: int, key: Key, tier: str | None, shard: int) -> None:
    scheme = Scheme(number=0, by=by, shards=shards)
    assert shard_of(scheme, key, {"tier": tier} if tier is not None else None) == shard


@pytest.mark.spec("NUM-07", "NUM-09")
@pytest.mark.xdist_group("spark")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["duckdb", "spark"])
def test_engines_give_the_shards_of_the_table(
    engine: EngineName, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if engine == "spark":
        request.getfixturevalue("spark_session")
    kinds = dict.fromkeys(Key._fields, "int64") | dict.fromkeys(("offer_id", "tier"), "string") | {"shard": "int32"}
    with engines.opened(engine, job="test", megabytes_max=500, scratch=tmp_path) as opened:
        for scheme in sorted({(by, shards) for by, shards, *_ in VECTORS}):
            rows = [(*key, tier, shard) for by, shards, key, tier, shard in VECTORS if (by, shards) == scheme]
            columns = dict(zip([*Key._fields, "tier", "shard"], zip(*rows, strict=True), strict=True))
            table = engines.rows_of(kinds, columns)
            by, shards = scheme
            computed = table.select("shard", found=shard_column(Scheme(number=0, by=by, shards=shards), table))
            assert all(row["found"] == row["shard"] for row in opened.rows(computed)), scheme


@pytest.mark.spec("NUM-07")
def test_the_examples_of_the_library_are_true() -> None:
    assert doctest.testmod(sharding) == (0, 2)


@pytest.mark.spec("NUM-07")
@pytest.mark.parametrize("by", ["offer", "business", "shop_tier"])
def test_no_shard_is_much_fuller_than_another(by: By) -> None:
    scheme = Scheme(number=0, by=by, shards=8)
    found = [0] * 8
    for number in range(8_000):
        found[shard_of(scheme, Key(number, "chair", number, 0))] += 1
    assert 850 < min(found) <= max(found) < 1150
