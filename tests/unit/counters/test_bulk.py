"""The columnar fold, both kernels, against the slow reference."""

import importlib.util
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keyfold.core.errors import KeyfoldError
from keyfold.counters.bulk import NEVER, Folded, KernelName, Updates, fold
from keyfold.counters.catalog import Catalog, Counter, Kind
from keyfold.counters.counters import MutableCounters
from keyfold.counters.errors import (
    CounterOverflow,
    CounterReadOnly,
    CounterUnknown,
    KeyTwice,
    KindUnknown,
    PackWrong,
    RowLengthWrong,
    TimeWrong,
    ValueNotFinite,
    ValueWrong,
)
from keyfold.counters.messages_pb2 import Profile
from keyfold.counters.packs import read
from tests.unit.counters.reference import Reference, Update

HAS_NUMBA = importlib.util.find_spec("numba") is not None
KERNELS: list[KernelName] = ["numpy", "numba"] if HAS_NUMBA else ["numpy"]
kernels = pytest.mark.parametrize("kernel", KERNELS)

DAY = 86_400
NOW = 1_700_000_000
BIG_ID = 2**64 - 1

SPENT, SEEN, OPENED, SCORE, RATE, ONLY_TIME, LONE, LONE_EXACT = 11, 13, 14, 20, 31, 50, 300, 42


def _counter(counter_id: int, kind: Kind, **options: object) -> Counter:
    return Counter(id=counter_id, name=f"c{counter_id}", kind=kind, namespace="n", **options)  # type: ignore[arg-type]


def _catalog(*more: Counter) -> Catalog:
    return Catalog(
        [
            _counter(12, Kind.FIXED32, records_max=4, expire_days=3),
            _counter(SPENT, Kind.FLOAT, decay=1.0, time_counter_id=12),
            _counter(SEEN, Kind.DOUBLE, decay=0.25, time_counter_id=12),
            _counter(OPENED, Kind.FIXED64, time_counter_id=12),
            _counter(15, Kind.FIXED32, time_counter_id=12),
            _counter(5, Kind.FIXED32),
            _counter(SCORE, Kind.FLOAT, decay=40.0, time_counter_id=5),
            _counter(21, Kind.FLOAT, time_counter_id=5),
            _counter(30, Kind.FIXED32, records_max=2, no_operation=True),
            _counter(RATE, Kind.DOUBLE, decay=0.5, time_counter_id=30),
            _counter(ONLY_TIME, Kind.FIXED32, expire_days=1),
            _counter(LONE, Kind.FLOAT),
            _counter(41, Kind.DOUBLE),
            _counter(LONE_EXACT, Kind.FIXED64),
            *more,
        ]
    )


CATALOG = _catalog()
WIDE = _catalog(_counter(BIG_ID, Kind.FLOAT))
# Without a VF_FIXED64, so that the compiled checks judge the rows themselves.
INEXACT = Catalog([counter for counter in CATALOG.counters.values() if counter.kind is not Kind.FIXED64])
WRITABLE = [counter for counter in WIDE.counters.values() if not counter.no_operation]

KEYS = st.sampled_from([0, 1, 2, 127, 128, 300, 2**56, 2**63, 2**64 - 1])
REALS = st.one_of(st.sampled_from([0.0, 1.0, -1.0, 1e30, -1e30, 1e-30]), st.floats(-1000, 1000, width=32))
COUNTS = st.one_of(st.integers(0, 1000), st.sampled_from([2**53 + 1, 2**63, 2**64 - 1]))


@st.composite
def _rows(draw: st.DrawFn) -> tuple[int, int, int, float, int]:
    """A profile, a counter, a key, a value and how long ago."""
    counter = draw(st.sampled_from(WRITABLE))
    value = {Kind.FIXED32: st.just(1), Kind.FIXED64: COUNTS}.get(counter.kind, REALS)
    ago = draw(st.one_of(st.integers(-DAY, 5 * DAY), st.sampled_from([0, DAY, DAY + 1, 3 * DAY, 3 * DAY + 1])))
    return draw(st.integers(0, 2)), counter.id, draw(KEYS), draw(value), ago


COMMITS = st.tuples(st.integers(0, 2 * DAY), st.lists(_rows(), max_size=14))
HISTORIES = st.lists(COMMITS, min_size=1, max_size=5)

Rows = Sequence[tuple[int, int, int, float, int]]


def _updates(rows: Rows, now: int, *, owner: Sequence[int] | None = None) -> Updates:
    """Rows with the time they have at `now`; whole numbers go in the exact column too."""
    exact = [int(value) if isinstance(value, int) or value.is_integer() else 0 for _, _, _, value, _ in rows]
    return Updates(
        profile=np.array([row[0] for row in rows], np.int64),
        counter=np.array([row[1] for row in rows], np.uint64),
        key=np.array([row[2] for row in rows], np.uint64),
        value=np.array([float(row[3]) for row in rows], np.float64),
        time=np.array([now - row[4] for row in rows], np.int64),
        count=np.array([each if 0 <= each < 2**64 else 0 for each in exact], np.uint64),
        owner=np.array(owner, np.uint64) if owner is not None else None,
    )


def _of(rows: Rows, profile: int, now: int) -> list[Update]:
    return [(counter, key, value, now - ago) for own, counter, key, value, ago in rows if own == profile]


Decoded = dict[int, dict[int, tuple[float, int | None]]]


def _decoded(catalog: Catalog, body: bytes) -> Decoded:
    """What a body holds, by protobuf."""
    found: Decoded = {}
    for pack in Profile.FromString(body).packed_counters:
        rows = {
            counter_id: list(getattr(row, row.WhichOneof("value") or "").value)
            for counter_id, row in zip(pack.counter_ids, pack.values, strict=True)
        }
        for counter_id, values in rows.items():
            time = catalog.group_of(counter_id).time
            times = rows[time.id] if time else [None] * len(values)
            found[counter_id] = dict(zip(pack.keys, zip(values, times, strict=True), strict=True))
    return found


def _is_canonical(body: bytes) -> bool:
    return Profile.FromString(body).SerializeToString(deterministic=True) == body


def _must_agree(catalog: Catalog, body: bytes, reference: Reference) -> None:
    """Keys, times and exact sums are the same; decayed sums lie within the published bound."""
    found, wanted = _decoded(catalog, body), reference.read(0)  # at 0, nothing has expired
    assert {c: {k: t for k, (_, t) in keys.items()} for c, keys in found.items()} == {
        c: {k: t for k, (_, t) in keys.items()} for c, keys in wanted.items()
    }
    sizes = reference.magnitudes()
    for counter_id, keys in wanted.items():
        kind = catalog[counter_id].kind
        for key, (value, _) in keys.items():
            stored = found[counter_id][key][0]
            if kind in (Kind.FIXED32, Kind.FIXED64):
                assert stored == value
                continue
            bound = (reference.commits + 1) * (2.0**-24 if kind is Kind.FLOAT else 2.0**-45)
            least = 1e-44 if kind is Kind.FLOAT else 1e-300
            assert abs(stored - float(value)) <= bound * float(sizes[counter_id, key]) + least * (reference.commits + 1)


def _must_match(catalog: Catalog, one: Folded, other: Folded, references: Sequence[Reference]) -> None:
    """Two kernels: the same answers, floats within one step of float32 (where values cancel, of what cancelled)."""
    assert one.dropped == other.dropped
    assert one.refused.keys() == other.refused.keys()
    assert one.broken.keys() == other.broken.keys()
    assert one.expires_at.tolist() == other.expires_at.tolist()
    assert one.bill.keys() == other.bill.keys()
    for body, same, reference in zip(one.bodies, other.bodies, references, strict=True):
        left, right, sizes = _decoded(catalog, body), _decoded(catalog, same), reference.magnitudes()
        assert {c: list(keys) for c, keys in left.items()} == {c: list(keys) for c, keys in right.items()}
        for counter_id, keys in left.items():
            for key, (value, time) in keys.items():
                other_value, other_time = right[counter_id][key]
                assert time == other_time
                if catalog[counter_id].kind in (Kind.FIXED32, Kind.FIXED64):
                    assert value == other_value
                    continue
                step = abs(float(np.spacing(np.float32(value))))
                assert abs(value - other_value) <= max(step, 2.0**-48 * float(sizes[counter_id, key]))


def _must_be_billed(
    bill: dict[int, tuple[float, float]], references: Sequence[Reference], sizes: dict[int, float]
) -> None:
    """Weights may cancel, so an error is relative to all that ever came in (`sizes`)."""
    for counter_id in bill.keys() | {each for reference in references for each in reference.bill}:
        for cause in (0, 1):
            wanted = sum(float(reference.bill.get(counter_id, (0, 0))[cause]) for reference in references)
            assert bill.get(counter_id, (0.0, 0.0))[cause] == pytest.approx(
                wanted, abs=1e-6 * sizes.get(counter_id, 0.0), rel=1e-9
            )


@pytest.mark.spec("CNT-15", "CNT-04", "CNT-05", "CNT-06", "CNT-07", "CNT-08", "CNT-18")
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(HISTORIES, st.sampled_from([CATALOG, WIDE]))
def test_any_history_folds_as_the_reference_has_it(
    history: list[tuple[int, list[tuple[int, int, int, float, int]]]], catalog: Catalog
) -> None:
    bodies, now = [b""] * 3, NOW
    references = [Reference(catalog) for _ in bodies]
    bill: dict[int, tuple[float, float]] = {}
    sizes: dict[int, float] = {}
    dropped = 0
    for passed, drawn in history:
        now += passed
        rows = [row for row in drawn if row[1] in catalog]
        for _, counter_id, _, value, _ in rows:
            sizes[counter_id] = sizes.get(counter_id, 0.0) + abs(value)
        folds = [fold(catalog, bodies, _updates(rows, now), now=now, kernel=kernel) for kernel in KERNELS]
        folded = folds[-1]
        added = [reference.commit(_of(rows, p, now), now) for p, reference in enumerate(references)]
        _must_match(catalog, folds[0], folds[-1], references)
        for profile, reference in enumerate(references):
            _must_agree(catalog, folded.bodies[profile], reference)
            assert _is_canonical(folded.bodies[profile])
            assert folded.expires_at[profile] == reference.expires_at
            if not added[profile]:
                assert folded.bodies[profile] is bodies[profile]
        assert folded.changed.tolist() == [new != old for new, old in zip(folded.bodies, bodies, strict=True)]
        dropped += folded.dropped
        for counter_id, lost in folded.bill.items():
            before = bill.get(counter_id, (0.0, 0.0))
            bill[counter_id] = (before[0] + lost[0], before[1] + lost[1])
        assert len(folded.refused) == sum(len(r.refused) for r in references)
        assert all(isinstance(error, CounterOverflow) for error in folded.refused.values())
        for reference in references:
            reference.refused.clear()
        bodies = folded.bodies
    assert dropped == sum(reference.dropped for reference in references)
    _must_be_billed(bill, references, sizes)


@pytest.mark.spec("CNT-15", "CNT-05")
@kernels
@settings(max_examples=30, deadline=None)
@given(st.lists(_rows(), max_size=20), st.randoms(use_true_random=False))
def test_the_order_of_a_batch_does_not_matter(
    kernel: KernelName, rows: list[tuple[int, int, int, float, int]], chance: random.Random
) -> None:
    shuffled = list(rows)
    chance.shuffle(shuffled)
    one, other = (fold(WIDE, [b""] * 3, _updates(each, NOW), now=NOW, kernel=kernel) for each in (rows, shuffled))
    references = [Reference(WIDE) for _ in range(3)]
    for profile, reference in enumerate(references):
        reference.commit(_of(rows, profile, NOW), NOW)
        _must_agree(WIDE, one.bodies[profile], reference)
        _must_agree(WIDE, other.bodies[profile], reference)


@pytest.mark.spec("CNT-15", "CNT-05")
@kernels
@settings(max_examples=30, deadline=None)
@given(st.lists(_rows(), max_size=20), st.integers(0, 20))
def test_a_batch_in_two_parts_gives_the_same_where_nothing_was_evicted(
    kernel: KernelName, rows: list[tuple[int, int, int, float, int]], cut: int
) -> None:
    rows = [row for row in rows if row[1] in (SCORE, 21, LONE, 41, 5)]  # groups without limits
    bodies = fold(WIDE, [b""] * 3, _updates(rows[:cut], NOW), now=NOW, kernel=kernel).bodies
    bodies = fold(WIDE, bodies, _updates(rows[cut:], NOW), now=NOW, kernel=kernel).bodies
    for profile in range(3):
        reference = Reference(WIDE)
        reference.commit(_of(rows, profile, NOW), NOW)
        reference.commits += 1
        _must_agree(WIDE, bodies[profile], reference)


@pytest.mark.spec("CNT-15")
@kernels
def test_the_same_input_gives_the_same_bytes_in_chunks_and_whole(
    kernel: KernelName, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(3)
    rows = [
        (
            chance.randrange(40),
            chance.choice([SPENT, SEEN, SCORE, LONE]),
            chance.randrange(9),
            1.5,
            chance.randrange(DAY),
        )
        for _ in range(900)
    ]
    whole = fold(CATALOG, [b""] * 40, _updates(rows, NOW), now=NOW, kernel=kernel)
    monkeypatch.setattr("keyfold.counters.bulk.folding.CHUNK_ROWS", 50)
    cut = fold(CATALOG, [b""] * 40, _updates(rows, NOW), now=NOW, kernel=kernel)
    assert cut.bodies == whole.bodies
    assert {each: pytest.approx(lost) for each, lost in cut.bill.items()} == whole.bill


@pytest.mark.spec("CNT-15")
@kernels
@pytest.mark.parametrize("wrong", [False, True])
def test_the_same_input_gives_the_same_answer_on_any_number_of_cores(
    kernel: KernelName, wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(4)
    rows = [
        (chance.randrange(40), chance.choice([SPENT, SEEN, SCORE]), chance.randrange(2**40), 1.5, chance.randrange(DAY))
        for _ in range(3_000)
    ]
    rows = [
        (profile, counter, key, 1.0 if counter == SEEN else value, age) for profile, counter, key, value, age in rows
    ]
    if wrong:
        rows[0] = (0, 0, 1, 1.0, 0)
        rows[700] = (3, SPENT, 1, math.nan, 0)
    monkeypatch.setattr("keyfold.counters.bulk.folding.CHUNK_ROWS", 50)
    monkeypatch.setattr("keyfold.counters.bulk.checks.SLICE_ROWS", 64)
    bodies = [b""] * 39 + [b"not a profile"]
    alone = fold(CATALOG, bodies, _updates(rows, NOW), now=NOW, kernel=kernel, cores=1)
    assert list(alone.refused)[: 2 * wrong] == [0, 700][: 2 * wrong]
    for cores in (2, 5):
        shared = fold(CATALOG, bodies, _updates(rows, NOW), now=NOW, kernel=kernel, cores=cores)
        assert (shared.bodies, shared.bill, shared.dropped) == (alone.bodies, alone.bill, alone.dropped)
        assert shared.changed.tolist() == alone.changed.tolist()
        assert shared.expires_at.tolist() == alone.expires_at.tolist()
        assert shared.refused.keys() == alone.refused.keys()
        assert shared.broken.keys() == alone.broken.keys()


@pytest.mark.spec("CNT-15")
@kernels
def test_many_keys_of_one_profile_are_put_in_order(kernel: KernelName) -> None:
    """Also more than are ranked."""
    chance = random.Random(5)
    for count in (2, 256, 257, 900):
        keys = chance.sample(range(2**50), count)
        folded = fold(CATALOG, [b""], _updates([(0, LONE, key, 1.0, 0) for key in keys], NOW), now=NOW, kernel=kernel)
        assert list(_decoded(CATALOG, folded.bodies[0])[LONE]) == sorted(keys)


@pytest.mark.spec("CNT-15")
@pytest.mark.skipif(not HAS_NUMBA, reason="the other kernel sorts")
def test_keys_of_any_pattern_spread_over_the_table_of_a_profile() -> None:
    """Where they share a place, a fold of many keys takes the square of their number."""
    from keyfold.counters.bulk import by_numba

    count, inverse = 4096, pow(0x9E3779B97F4A7C15, -1, 2**64)
    patterns = [lambda j, by=by: j << by for by in (0, 16, 32, 40, 48)] + [lambda j: inverse * j, lambda j: -j]
    for pattern in patterns:
        keys = np.array([pattern(j) % 2**64 for j in range(count)], np.uint64)
        for group in (0, 5):
            places = by_numba._spread.py_func(keys, np.full(count, group, np.uint64)) & np.uint64(2 * count - 1)
            assert len(np.unique(places)) > 0.7 * count  # of random ones, 0.787


@pytest.mark.spec("CNT-15")
@kernels
def test_owned_rows_come_back_apart_and_are_never_folded(kernel: KernelName) -> None:
    rows = [(0, SPENT, 1, 1.0, 0), (0, SPENT, 2, math.nan, 0), (0, SPENT, 3, 1.0, 0)]
    folded = fold(CATALOG, [b""], _updates(rows, NOW, owner=[7, 2**64 - 1, 0]), now=NOW, kernel=kernel)
    assert folded.owned.tolist() == [0, 1]
    assert not folded.refused
    assert list(_decoded(CATALOG, folded.bodies[0])[SPENT]) == [3]


@pytest.mark.spec("CNT-15")
@kernels
@pytest.mark.parametrize("column", ["counter", "key", "value", "time", "count", "owner"])
@pytest.mark.parametrize("catalog", [CATALOG, INEXACT], ids=["exact", "inexact"])
def test_columns_of_different_lengths_are_refused_before_anything_is_read(
    kernel: KernelName, column: str, catalog: Catalog
) -> None:
    updates = _updates([(0, SPENT, key, 1.0, 0) for key in range(5)], NOW, owner=[0] * 5)
    if column != "owner":
        updates.owner = None  # an owner sends the rows another way
    for length in (4, 1):
        setattr(updates, column, getattr(updates, column)[:length].copy())
        with pytest.raises(ValueError, match="one length"):
            fold(catalog, [b""], updates, now=NOW, kernel=kernel)


@pytest.mark.spec("CNT-15")
@kernels
@pytest.mark.parametrize("profile", [-1, 1, 2**62])
def test_a_row_of_a_profile_that_was_not_given_is_refused(kernel: KernelName, profile: int) -> None:
    with pytest.raises(ValueError, match="outside the 1 bodies"):
        fold(INEXACT, [b""], _updates([(profile, SPENT, 1, 1.0, 0)], NOW), now=NOW, kernel=kernel)


@pytest.mark.spec("CNT-15")
@kernels
@pytest.mark.parametrize("cores", [0, -1])
def test_a_fold_on_no_core_at_all_is_refused(kernel: KernelName, cores: int) -> None:
    with pytest.raises(ValueError, match="cores"):
        fold(INEXACT, [b""], _updates([(0, SPENT, 1, 1.0, 0)], NOW), now=NOW, kernel=kernel, cores=cores)


@pytest.mark.spec("CNT-15", "CNT-03")
@kernels
@pytest.mark.parametrize("catalog", [CATALOG, INEXACT], ids=["exact", "inexact"])
def test_a_wrong_row_is_refused_by_name_and_the_others_are_folded(kernel: KernelName, catalog: Catalog) -> None:
    every: list[tuple[tuple[int, int, int, float, int], type[KeyfoldError]]] = [
        ((0, 999, 1, 1.0, 0), CounterUnknown),
        ((0, 30, 1, 1.0, 0), CounterReadOnly),
        ((0, SPENT, 1, math.nan, 0), ValueWrong),
        ((0, SPENT, 1, -math.inf, 0), ValueWrong),
        ((0, SPENT, 1, 1.1e30, 0), ValueWrong),
        ((0, OPENED, 1, -1.0, 0), ValueWrong),
        ((0, OPENED, 1, 0.5, 0), ValueWrong),
        ((0, OPENED, 1, 2.0**64, 0), ValueWrong),
        ((0, 15, 1, 2.0, 0), ValueWrong),
        ((0, SPENT, 1, 1.0, NOW), TimeWrong),
        ((0, SPENT, 1, 1.0, -DAY - 1), TimeWrong),
        ((0, SPENT, 1, 1.0, NOW - 2**32), TimeWrong),
    ]
    wrong = [(row, error) for row, error in every if catalog is CATALOG or row[1] != OPENED]
    for some in (wrong, *([each] for each in wrong)):  # alone, none hides that another is let through
        rows = [row for row, _ in some] + [(0, SPENT, 9, 1.0, 0)]
        updates = Updates(
            profile=np.array([row[0] for row in rows]),
            counter=np.array([row[1] for row in rows], np.uint64),
            key=np.array([row[2] for row in rows], np.uint64),
            value=np.array([row[3] for row in rows]),
            time=np.array([NOW - row[4] for row in rows]),
        )
        folded = fold(catalog, [b""], updates, now=NOW, kernel=kernel)
        assert {row: type(error) for row, error in folded.refused.items()} == {
            row: error for row, (_, error) in enumerate(some)
        }
        assert list(_decoded(catalog, folded.bodies[0])) == [SPENT, 12]


@pytest.mark.spec("CNT-15", "CNT-03")
@kernels
def test_the_update_that_would_leave_64_bits_is_refused_and_nothing_else(kernel: KernelName) -> None:
    rows = [(0, LONE_EXACT, 1, 2**64 - 1, 5), (0, LONE_EXACT, 1, 1, 0), (0, LONE, 1, 2.0, 0), (1, LONE_EXACT, 1, 3, 0)]
    folded = fold(CATALOG, [b"", b""], _updates(rows, NOW), now=NOW, kernel=kernel)
    assert {row: type(error) for row, error in folded.refused.items()} == {0: CounterOverflow}
    assert _decoded(CATALOG, folded.bodies[0]) == {LONE_EXACT: {1: (1, None)}, LONE: {1: (2.0, None)}}
    assert _decoded(CATALOG, folded.bodies[1]) == {LONE_EXACT: {1: (3, None)}}


@pytest.mark.spec("CNT-15")
@kernels
def test_a_sum_beyond_its_kind_stays_at_the_largest_number(kernel: KernelName) -> None:
    largest = float(np.finfo(np.float32).max)
    pack = Profile()
    row = pack.packed_counters.add(counter_ids=[LONE], keys=[1, 2]).values.add()
    row.float_values.value.extend([largest, -largest])
    rows = [(0, LONE, 1, 1e30, 0)] * 100 + [(0, LONE, 2, -1e30, 0)] * 100
    folded = fold(CATALOG, [pack.SerializeToString()], _updates(rows, NOW), now=NOW, kernel=kernel)
    assert _decoded(CATALOG, folded.bodies[0])[LONE] == {1: (largest, None), 2: (-largest, None)}


@pytest.mark.spec("CNT-07", "CNT-08")
@kernels
def test_a_profile_with_only_dropped_updates_is_left_as_it_is(kernel: KernelName) -> None:
    first = fold(CATALOG, [b""], _updates([(0, SPENT, 1, 1.0, 0), (0, LONE, 5, 1.0, 0)], NOW), now=NOW, kernel=kernel)
    later = NOW + 10 * DAY
    folded = fold(CATALOG, first.bodies, _updates([(0, SPENT, 1, 1.0, 4 * DAY)], later), now=later, kernel=kernel)
    assert folded.bodies[0] is first.bodies[0]
    assert (folded.dropped, folded.bill, folded.expires_at.tolist()) == (1, {}, [NEVER])


# Bodies that we did not write ---------------------------------------------------------------------------------------


def _some_body() -> bytes:
    rows = [(0, SPENT, 1, 1.0, 0), (0, SEEN, 2**64 - 1, 1.0, 9), (0, OPENED, 7, 3, 0), (0, LONE, 300, 2.5, 0)]
    rows += [(0, SCORE, key, 1.0, key) for key in range(3)]
    return fold(CATALOG, [b""], _updates(rows, NOW), now=NOW, kernel="numpy").bodies[0]


@pytest.mark.spec("CNT-13", "CNT-15")
@kernels
def test_an_update_of_a_counter_in_a_kind_of_a_later_version_is_refused_and_nothing_else(kernel: KernelName) -> None:
    profile = Profile.FromString(_some_body())
    (pack,) = (each for each in profile.packed_counters if LONE in each.counter_ids)
    pack.values[0].ParseFromString(b"\x7a\x03abc")  # field 15
    rows = [(0, LONE, 300, 1.0, 0), (0, LONE, 301, 1.0, 0), (0, SPENT, 1, 1.0, 0), (1, LONE, 300, 1.0, 0)]
    bodies = [profile.SerializeToString(), _some_body()]
    folded = fold(CATALOG, bodies, _updates(rows, NOW), now=NOW, kernel=kernel)
    assert {row: type(error) for row, error in folded.refused.items()} == {0: KindUnknown, 1: KindUnknown}
    assert (folded.broken, folded.changed.tolist()) == ({}, [True, True])
    again = MutableCounters(CATALOG, folded.bodies[0], NOW)
    assert again.get(SPENT, 1) == 2.0
    assert b"\x7a\x03abc" in again.serialise()


LATER_FIELD = b"\x7a\x03abc"  # number 15, three bytes: a body that begins so is folded by protobuf


def _mutations() -> st.SearchStrategy[bytes]:
    body = _some_body()
    places = st.integers(0, len(body) - 1)
    flipped = st.builds(
        lambda changes: bytes(dict(changes).get(place, byte) for place, byte in enumerate(body)),
        st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=3),
    )
    cut = st.builds(lambda start, end: body[: min(start, end)] + body[max(start, end) :], places, places)
    return st.one_of(flipped, cut, st.builds(lambda at: body[:at], places), st.binary(max_size=60))


@pytest.mark.spec("CNT-15", "CNT-09")
@settings(max_examples=300, deadline=None)
@given(st.lists(_mutations(), min_size=1, max_size=6))
def test_no_body_crashes_a_fold_and_both_kernels_and_the_slow_path_judge_it_alike(bodies: list[bytes]) -> None:
    rows = [(profile, SPENT, 1, 1.0, 0) for profile in range(len(bodies))]
    folds = [fold(CATALOG, bodies, _updates(rows, NOW), now=NOW, kernel=kernel) for kernel in KERNELS]
    slow = fold(CATALOG, [LATER_FIELD + body for body in bodies], _updates(rows, NOW), now=NOW, kernel="numpy")
    for folded in folds:
        assert all(isinstance(error, PackWrong) for error in folded.broken.values())
        for profile in folded.broken:
            assert folded.bodies[profile] is bodies[profile]
        assert folded.broken.keys() == slow.broken.keys()
        assert folded.dropped == slow.dropped
        assert folded.expires_at.tolist() == slow.expires_at.tolist()
        assert folded.bill == {each: pytest.approx(lost, rel=1e-6, nan_ok=True) for each, lost in slow.bill.items()}
        for profile in set(range(len(bodies))) - folded.broken.keys():
            left, right = (_all_values(each.bodies[profile]) for each in (folded, slow))
            assert left == pytest.approx(right, rel=1e-6, nan_ok=True)
    assert folds[0].bodies == folds[-1].bodies


def _all_values(body: bytes) -> dict[tuple[int, int], float]:
    return {(counter_id, key): value for counter_id, key, value in read(body)}


@pytest.mark.spec("CNT-18")
@kernels
def test_a_key_without_a_time_is_billed_alike_whatever_form_its_body_has(kernel: KernelName) -> None:
    """To its counters with what they held, and not to the time counter, which never had it."""
    catalog = _catalog(_counter(32, Kind.FLOAT, time_counter_id=30))
    profile = Profile()
    pack = profile.packed_counters.add(counter_ids=[30, 32], keys=[1, 2])
    pack.values.add().fixed32_values.value.extend([0, 0])
    pack.values.add().float_values.value.extend([1.0, 2.0])
    body = profile.SerializeToString()
    for bodies in ([body], [LATER_FIELD + body]):
        folded = fold(catalog, bodies, _updates([(0, 32, 8, 1.0, 0), (0, 32, 9, 1.0, 0)], NOW), now=NOW, kernel=kernel)
        assert folded.bill == {32: (3.0, 0.0)}


@pytest.mark.spec("CNT-15", "CNT-09")
@kernels
def test_a_broken_body_is_named_and_its_neighbours_are_folded(kernel: KernelName) -> None:
    short, twice = Profile(), Profile()
    short.packed_counters.add(counter_ids=[LONE], keys=[1, 2]).values.add().float_values.value.extend([1.0])
    twice.packed_counters.add(counter_ids=[LONE], keys=[1, 1]).values.add().float_values.value.extend([1.0, 2.0])
    bodies = [short.SerializeToString(), b"", twice.SerializeToString()]
    rows = [(profile, LONE, 1, 1.0, 0) for profile in range(3)]
    folded = fold(CATALOG, bodies, _updates(rows, NOW), now=NOW, kernel=kernel)
    assert {profile: type(error) for profile, error in folded.broken.items()} == {0: RowLengthWrong, 2: KeyTwice}
    assert folded.changed.tolist() == [False, True, False]
    assert folded.expires_at[0] == NEVER


@pytest.mark.spec("CNT-15", "CNT-09")
@kernels
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_stored_value_that_is_not_a_number_is_named(kernel: KernelName, value: float) -> None:
    profile = Profile()
    pack = profile.packed_counters.add(counter_ids=[SPENT, 12], keys=[1])
    pack.values.add().float_values.value.extend([value])
    pack.values.add().fixed32_values.value.extend([NOW])
    folded = fold(
        CATALOG, [profile.SerializeToString()], _updates([(0, SPENT, 2, 1.0, 0)], NOW), now=NOW, kernel=kernel
    )
    assert [type(error) for error in folded.broken.values()] == [ValueNotFinite]


@pytest.mark.spec("CNT-15", "CNT-10")
@kernels
@settings(max_examples=25, deadline=None)
@given(
    st.lists(_rows(), min_size=1, max_size=12),
    st.lists(_rows(), min_size=1, max_size=8),
    st.integers(0, 5 * DAY),
    st.randoms(use_true_random=False),
)
def test_a_body_in_any_order_folds_as_ours_does(
    kernel: KernelName,
    before: list[tuple[int, int, int, float, int]],
    rows: list[tuple[int, int, int, float, int]],
    passed: int,
    chance: random.Random,
) -> None:
    now = NOW + passed
    bodies = fold(WIDE, [b""] * 3, _updates(before, NOW), now=NOW, kernel=kernel).bodies
    foreign = [_reordered(body, chance) for body in bodies]
    ours = fold(WIDE, bodies, _updates(rows, now), now=now, kernel=kernel)
    theirs = fold(WIDE, foreign, _updates(rows, now), now=now, kernel=kernel)
    assert ours.dropped == theirs.dropped
    assert ours.expires_at.tolist() == theirs.expires_at.tolist()
    for profile in range(3):
        reference = Reference(WIDE)
        reference.commit(_of(before, profile, NOW), NOW)
        reference.commit(_of(rows, profile, now), now)
        _must_agree(WIDE, ours.bodies[profile], reference)
        _must_agree(WIDE, theirs.bodies[profile], reference)


def _reordered(body: bytes, chance: random.Random) -> bytes:
    profile, other = Profile.FromString(body), Profile()
    for pack in chance.sample(list(profile.packed_counters), len(profile.packed_counters)):
        rows = chance.sample(range(len(pack.counter_ids)), len(pack.counter_ids))
        places = chance.sample(range(len(pack.keys)), len(pack.keys))
        new = other.packed_counters.add(
            counter_ids=[pack.counter_ids[row] for row in rows], keys=[pack.keys[place] for place in places]
        )
        for row in rows:
            kind = pack.values[row].WhichOneof("value") or ""
            values = getattr(pack.values[row], kind).value
            getattr(new.values.add(), kind).value.extend([values[place] for place in places])
    return other.SerializeToString()


@pytest.mark.spec("CNT-15", "CNT-13")
@kernels
def test_what_is_unknown_passes_through_a_fold_unharmed(kernel: KernelName) -> None:
    unknown = Profile()
    unknown.packed_counters.add(counter_ids=[777], keys=[3]).values.add().float_values.value.extend([1.5])
    field_of_later = bytes([0x7A, 3]) + b"abc"  # number 15, three bytes
    body = _some_body() + unknown.SerializeToString() + field_of_later
    folded = fold(CATALOG, [body], _updates([(0, LONE, 300, 1.0, 0)], NOW), now=NOW, kernel=kernel)
    assert not folded.broken
    assert folded.changed.tolist() == [True]
    assert field_of_later in folded.bodies[0]
    packs = Profile.FromString(folded.bodies[0]).packed_counters
    assert [list(pack.keys) for pack in packs if 777 in pack.counter_ids] == [[3]]
    values = {c: list(p.values[i].float_values.value) for p in packs for i, c in enumerate(p.counter_ids)}
    assert values[LONE] == [3.5]
    assert values[777] == [1.5]
