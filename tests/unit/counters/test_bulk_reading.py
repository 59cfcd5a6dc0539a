"""Reading many profiles at once: what is passed on is what protobuf and `Counters` find, and the rest is left alone."""

import gc
import random
import weakref
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keyfold.counters.bulk import KernelName, fold, reading
from keyfold.counters.catalog import Catalog, Counter, Kind
from keyfold.counters.counters import Counters, MutableCounters
from keyfold.counters.messages_pb2 import Profile
from tests.unit.counters.test_bulk import (
    CATALOG,
    DAY,
    HAS_NUMBA,
    HISTORIES,
    LONE,
    NOW,
    ONLY_TIME,
    OPENED,
    SEEN,
    SPENT,
    WIDE,
    _mutations,
    _reordered,
    _updates,
    kernels,
)

History = list[tuple[int, list[tuple[int, int, int, float, int]]]]
IDS = st.sets(st.sampled_from(list(WIDE.counters)), min_size=1)
ALL = frozenset(WIDE.counters)
only_numba = pytest.mark.skipif(not HAS_NUMBA, reason="Numba is not installed")


def _stored(history: History) -> tuple[list[bytes], int]:
    """Three profiles as the fold writes them, and the time of the last commit."""
    bodies, now = [b""] * 3, NOW
    for passed, rows in history:
        now += passed
        bodies = fold(WIDE, bodies, _updates(rows, now), now=now, kernel="numpy").bodies
    return bodies, now


def _expected(body: bytes, wanted: frozenset[int], now: int) -> list[reading.Pack]:
    """What `Counters` finds, key by key, of a profile in which nothing is too much."""
    counters = Counters(WIDE, body, now)
    packs = []
    for group in counters.groups():
        ids = [each for each in counters.counter_ids(group) if each in wanted]
        keys = counters.keys(group)
        if ids and keys:
            rows = [(WIDE[each].kind, counters.column(WIDE[each], group, keys)) for each in ids]
            packs.append(reading.Pack(ids, keys, rows))
    return packs


def _numbers(packs: list[reading.Pack] | None) -> Iterator[tuple[Kind, object]]:
    for pack in packs or ():
        yield from ((Kind.FIXED64, key) for key in pack.keys)
        yield from ((kind, value) for kind, values in pack.rows for value in values)


@pytest.mark.spec("CNT-08", "PRO-08")
@kernels
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(history=HISTORIES, wanted=IDS)
def test_a_committed_profile_is_passed_on_as_counters_finds_it(
    kernel: KernelName, history: History, wanted: set[int]
) -> None:
    bodies, now = _stored(history)
    for body, packs in zip(bodies, reading.read(WIDE, bodies, frozenset(wanted), now, kernel=kernel), strict=True):
        if packs is None:  # a profile that the last commits did not touch
            assert MutableCounters(WIDE, body, now).expires_at
            continue
        assert packs == _expected(body, frozenset(wanted), now)
        for kind, number in _numbers(packs):
            assert type(number) is (float if kind in (Kind.FLOAT, Kind.DOUBLE) else int)


@pytest.mark.spec("CNT-12", "CNT-15")
@kernels
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(history=HISTORIES, wanted=IDS, chunk=st.sampled_from([1, 1 << 18]))
def test_arrays_hold_the_numbers_of_the_packs_in_their_order(
    kernel: KernelName, history: History, wanted: set[int], chunk: int
) -> None:
    bodies, now = _stored(history)
    bodies = [bodies[0], b"\xff", *bodies[1:], b""]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "CHUNK_BYTES", chunk)
        found, others = reading.numbers(WIDE, bodies, frozenset(wanted), now, kernel=kernel)
    packs = reading.read(WIDE, bodies, frozenset(wanted), now, kernel=kernel)
    assert set(others) == {at for at, each in enumerate(packs) if each is None} >= {1}
    expected = [
        (at, counter_id, key, float(value), 0 if WIDE[counter_id].kind in reading.REAL else value)
        for at, each in enumerate(packs)
        for pack in each or ()
        for counter_id, (_, values) in zip(pack.counter_ids, pack.rows, strict=True)
        for key, value in zip(pack.keys, values, strict=True)
    ]
    columns = (found.profile, found.counter, found.key, found.value, found.count)
    assert list(zip(*(each.tolist() for each in columns), strict=True)) == expected
    assert [each.dtype for each in columns] == ["int64", "uint64", "uint64", "float64", "uint64"]


@only_numba
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(history=HISTORIES.map(lambda given: given[:1]), wanted=IDS)
def test_what_was_just_written_never_leaves_the_compiled_loop(history: History, wanted: set[int]) -> None:
    bodies, now = _stored(history)
    plan = reading.plan_of(WIDE, frozenset(wanted))
    assert None not in reading._by_numba(plan, bodies, now)


@pytest.mark.spec("CNT-08")
@kernels
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(history=HISTORIES, passed=st.one_of(st.integers(0, 6 * DAY), st.sampled_from([DAY, DAY + 1, 3 * DAY])))
def test_nothing_expired_is_ever_passed_on(kernel: KernelName, history: History, passed: int) -> None:
    bodies, now = _stored(history)
    now += passed
    for body, packs in zip(bodies, reading.read(WIDE, bodies, ALL, now, kernel=kernel), strict=True):
        if packs is not None:
            cleaned = MutableCounters(WIDE, body, now)
            cleaned.cleanup()
            assert packs == _expected(cleaned.serialise(), ALL, now)


@pytest.mark.spec("CNT-08")
@kernels
def test_a_key_is_passed_on_until_the_second_of_its_expiry(kernel: KernelName) -> None:
    (body,) = fold(CATALOG, [b""], _updates([(0, ONLY_TIME, 1, 1, 0), (0, SPENT, 2, 1.0, 0)], NOW), now=NOW).bodies
    for wanted, days in ((ONLY_TIME, 1), (SPENT, 3)):
        last = NOW + days * DAY
        for now, is_there in ((last - 1, True), (last, True), (last + 1, False), (2**40, False)):
            (packs,) = reading.read(CATALOG, [body], frozenset({wanted}), now, kernel=kernel)
            assert (packs is not None) is is_there
    assert reading.read(CATALOG, [body], frozenset({SPENT}), NOW + 2 * DAY, kernel=kernel) != [None], (
        "what expired in a group that nobody asked for is no reason to look closer"
    )


@pytest.mark.spec("CNT-07")
@kernels
def test_a_pack_with_more_keys_than_max_records_is_left_alone(kernel: KernelName) -> None:
    roomy = Catalog(
        [c if c.id != 12 else Counter(id=12, name="t", kind=Kind.FIXED32, namespace="n") for c in _all(CATALOG)]
    )
    for count in (4, 5):
        rows = [(0, SPENT, key, 1.0, 0) for key in range(count)]
        (body,) = fold(roomy, [b""], _updates(rows, NOW), now=NOW).bodies
        (packs,) = reading.read(CATALOG, [body], frozenset({SPENT}), NOW, kernel=kernel)
        assert (packs is None) is (count > 4)
        assert reading.read(CATALOG, [body], frozenset({LONE}), NOW, kernel=kernel) == [[]]


def _all(catalog: Catalog) -> list[Counter]:
    return list(catalog.counters.values())


@kernels
def test_keys_and_exact_values_keep_all_their_bits(kernel: KernelName) -> None:
    keys = [0, 1, 127, 128, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1]
    rows = [(0, 42, key, key, 0) for key in keys]
    (body,) = fold(WIDE, [b""], _updates(rows, NOW), now=NOW).bodies
    (packs,) = reading.read(WIDE, [body], frozenset({42}), NOW, kernel=kernel)
    assert packs == [reading.Pack([42], keys, [(Kind.FIXED64, keys)])]


@pytest.mark.spec("CNT-10")
@kernels
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(history=HISTORIES, wanted=IDS, chance=st.randoms(use_true_random=False))
def test_the_order_of_packs_rows_and_keys_changes_nothing_but_the_order(
    kernel: KernelName, history: History, wanted: set[int], chance: random.Random
) -> None:
    bodies, now = _stored(history)
    others = [_reordered(body, chance) for body in bodies]
    ours = reading.read(WIDE, bodies, frozenset(wanted), now, kernel=kernel)
    theirs = reading.read(WIDE, others, frozenset(wanted), now, kernel=kernel)
    for one, other in zip(ours, theirs, strict=True):
        assert other is None or _as_set(one) == _as_set(other)


def _as_set(packs: list[reading.Pack] | None) -> set[tuple[int, int, object]] | None:
    if packs is None:
        return None
    return {
        (counter_id, key, value)
        for pack in packs
        for counter_id, (_, values) in zip(pack.counter_ids, pack.rows, strict=True)
        for key, value in zip(pack.keys, values, strict=True)
    }


@pytest.mark.spec("CNT-09")
@settings(max_examples=300, deadline=None)
@given(bodies=st.lists(_mutations(), min_size=1, max_size=6), wanted=IDS)
def test_no_body_crashes_a_read_and_with_or_without_numba_it_is_judged_alike(
    bodies: list[bytes], wanted: set[int]
) -> None:
    found = [reading.read(CATALOG, bodies, frozenset(wanted), NOW, kernel=kernel) for kernel in ("numpy", "auto")]
    for one, other in zip(*found, strict=True):
        assert one is None or other is None or one == other


@kernels
def test_a_profile_that_is_left_alone_does_not_disturb_its_neighbours(kernel: KernelName) -> None:
    rows = [(0, SPENT, 1, 1.0, 0), (0, SEEN, 2, 5.0, 0), (0, OPENED, 7, 3, 0), (0, LONE, 300, 2.5, 0)]
    (body,) = fold(CATALOG, [b""], _updates(rows, NOW), now=NOW).bodies
    broken = body[:-1]  # cut in its last pack, when the others have been decoded
    found = reading.read(CATALOG, [body, broken, b"", body], ALL, NOW, kernel=kernel)
    assert found[1] is None
    assert found[2] == []
    assert found[0] == found[3] == _expected(body, ALL, NOW)


@kernels
def test_in_runs_of_a_bounded_size_the_same_is_read(kernel: KernelName, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(profile, SPENT, profile, 1.0, 0) for profile in range(9)]
    bodies = fold(CATALOG, [b""] * 9, _updates(rows, NOW), now=NOW).bodies
    whole = reading.read(CATALOG, bodies, ALL, NOW, kernel=kernel)
    for size in (1, len(bodies[0]), 3 * len(bodies[0]) + 1):
        monkeypatch.setattr(reading, "CHUNK_BYTES", size)
        assert reading.read(CATALOG, bodies, ALL, NOW, kernel=kernel) == whole
    assert reading.read(CATALOG, [], ALL, NOW, kernel=kernel) == []


@kernels
def test_a_group_of_more_counters_than_a_code_has_bits_is_read_all_the_same(kernel: KernelName) -> None:
    time = Counter(id=1, name="time", kind=Kind.FIXED32, namespace="n")
    members = [
        Counter(id=each, name=f"c{each}", kind=Kind.FLOAT, namespace="n", time_counter_id=1) for each in range(2, 42)
    ]
    catalog = Catalog([time, *members])
    (body,) = fold(catalog, [b""], _updates([(0, each.id, 5, 1.0, 0) for each in members], NOW), now=NOW).bodies
    for wanted in (range(1, 42), range(1, 32), range(11, 42)):
        (packs,) = reading.read(catalog, [body], frozenset(wanted), NOW, kernel=kernel)
        assert packs is not None
        assert packs[0].counter_ids == list(wanted)


@kernels
def test_a_later_catalog_s_counters_are_no_reason_to_look_closer(kernel: KernelName) -> None:
    profile = Profile()
    profile.packed_counters.add(counter_ids=[777], keys=[3]).values.add().float_values.value.extend([1.5])
    (body,) = fold(CATALOG, [b""], _updates([(0, LONE, 300, 2.5, 0)], NOW), now=NOW).bodies
    found = reading.read(CATALOG, [body + profile.SerializeToString()], ALL, NOW, kernel=kernel)
    assert found == [[reading.Pack([LONE], [300], [(Kind.FLOAT, [2.5])])]]


def test_without_numba_protobuf_reads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    (body,) = fold(CATALOG, [b""], _updates([(0, LONE, 300, 2.5, 0)], NOW), now=NOW).bodies
    found = reading.read(CATALOG, [body], ALL, NOW)
    monkeypatch.setattr(reading, "has_numba", lambda: False)
    monkeypatch.delattr(reading, "_by_numba")
    assert reading.read(CATALOG, [body], ALL, NOW) == found == [_expected(body, ALL, NOW)]


def test_plans_and_layouts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PLANS_MAX", 2)
    monkeypatch.setattr(reading, "LAYOUTS_MAX", 2)
    catalog = Catalog([Counter(id=each, name=f"c{each}", kind=Kind.FLOAT, namespace="n") for each in range(1, 9)])
    for each in range(1, 9):
        profile = Profile()
        profile.packed_counters.add(counter_ids=[each], keys=[3]).values.add().float_values.value.extend([1.5])
        for wanted in (1, each):
            reading.read(catalog, [profile.SerializeToString()], frozenset({wanted}), NOW, kernel="numpy")
        assert len(reading._plans[catalog]) <= 2
        assert all(len(plan.layouts) <= 2 for plan in reading._plans[catalog].values())


@kernels
def test_warming_needs_no_profile_and_no_counter(kernel: KernelName) -> None:
    reading.warm(CATALOG, kernel=kernel)
    reading.warm(Catalog([]), kernel=kernel)


@kernels
def test_a_catalog_that_nobody_uses_any_more_goes_with_all_that_was_worked_out_for_it(kernel: KernelName) -> None:
    catalog = Catalog(list(CATALOG.counters.values()))
    reading.read(catalog, [b""], frozenset({LONE}), NOW, kernel=kernel)
    alive = weakref.ref(catalog)
    del catalog
    gc.collect()
    assert alive() is None
