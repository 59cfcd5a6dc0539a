"""Numbers as the compiled loop writes them: byte for byte as msgspec does."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfold.counters.bulk import reading
from keyfold.counters.catalog import Catalog, Counter, Kind
from tests.unit.counters.test_bulk import HAS_NUMBA

pytestmark = pytest.mark.skipif(not HAS_NUMBA, reason="Numba is not installed")

CATALOG = Catalog(
    [
        Counter(id=1, name="real", kind=Kind.DOUBLE, namespace="n"),
        Counter(id=2, name="whole", kind=Kind.FIXED64, namespace="n"),
    ]
)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
WHOLE = st.one_of(st.integers(0, 2**64 - 1), st.integers(0, 64).flatmap(lambda bits: st.just(2**bits - 1)))


def must_be_written_as_by_msgspec(reals: list[float], wholes: list[int]) -> None:
    """One profile with one pack of each, beside one that is left alone."""
    from keyfold.counters.bulk.by_numba_writing import write

    plan = reading.plan_of(CATALOG, frozenset({1, 2}))
    codes = [place << reading.CODE_BITS | 1 for place in range(2)]
    counts = [len(reals), len(wholes)]
    words = [*range(len(reals)), *range(len(wholes)), *wholes]
    columns = (np.array(each, np.int64) for each in ([2, -1, 0], codes, counts))
    numbers = np.array(words, np.uint64), np.array(reals, np.float64)
    text, ends = write(plan.kinds, plan.firsts, *columns, *numbers)
    expected = msgspec.json.encode(
        [
            {"counter_ids": [1], "keys": range_of(reals), "values": [{"double_values": {"value": reals}}]},
            {"counter_ids": [2], "keys": range_of(wholes), "values": [{"fixed64_values": {"value": wholes}}]},
        ]
    )
    assert text.tobytes() == expected + b"[]"
    assert ends.tolist() == [len(expected), len(expected), len(expected) + 2]


def range_of(numbers: list[float] | list[int]) -> list[int]:
    return list(range(len(numbers)))


@settings(max_examples=300, deadline=None)
@given(reals=st.lists(FINITE, min_size=1), wholes=st.lists(WHOLE, min_size=1))
def test_any_numbers(reals: list[float], wholes: list[int]) -> None:
    must_be_written_as_by_msgspec(reals, wholes)


def test_the_edges_of_every_power_of_two_and_ten() -> None:
    powers = [2.0**each for each in range(-1074, 1024)] + [float(f"1e{each}") for each in range(-323, 309)]
    around = [float(np.nextafter(each, to)) for each in powers for to in (0.0, 1e308)]
    must_be_written_as_by_msgspec([*powers, *around, *(-each for each in around), 0.0, -0.0], [0])


@pytest.mark.parametrize("seed", range(4))
def test_many_numbers_of_every_size_of_both_widths(seed: int) -> None:
    chance = np.random.default_rng(seed)
    doubles = chance.integers(0, 2**64, 50_000, dtype=np.uint64).view(np.float64)
    floats = chance.integers(0, 2**32, 50_000, dtype=np.uint32).view(np.float32)
    decimals = np.round(chance.random(50_000) * 10.0 ** chance.integers(-9, 19, 50_000), 3)
    reals = np.concatenate([doubles, floats[np.isfinite(floats)], decimals])
    wholes = chance.integers(0, 2**64, 10_000, dtype=np.uint64) >> chance.integers(0, 64, 10_000, dtype=np.uint64)
    must_be_written_as_by_msgspec(reals[np.isfinite(reals)].tolist(), wholes.tolist())


def test_the_room_that_is_made_is_enough_for_the_longest_of_everything() -> None:
    must_be_written_as_by_msgspec([-2.2250738585072014e-308] * 1_000, [2**64 - 1] * 1_000)
