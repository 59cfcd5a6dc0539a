"""`Counters` and `MutableCounters` against the slow reference: decay, siblings, expiry, caps, merge."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfold.counters import Catalog, Counters, Kind, MutableCounters
from keyfold.counters.catalog import Counter
from keyfold.counters.errors import CounterOverflow, CounterReadOnly, CounterUnknown, TimeWrong, ValueWrong
from keyfold.counters.messages_pb2 import Profile
from keyfold.counters.model import FLOAT32_MAX, FLOAT64_MAX, decayed
from tests.unit.counters.reference import Reference, Update

NOW = 1_700_000_000
DAY = 86_400


def counter(id: int, kind: Kind, **more: object) -> Counter:
    return Counter(id=id, name=f"CI_{id}", kind=kind, namespace="EN", **more)  # type: ignore[arg-type]


CATALOG = Catalog(
    [
        counter(1, Kind.FLOAT, decay=1.0, time_counter_id=10),
        counter(2, Kind.DOUBLE, decay=0.25, time_counter_id=10),
        counter(3, Kind.FIXED64, time_counter_id=10),
        counter(4, Kind.FIXED32, time_counter_id=10),
        counter(10, Kind.FIXED32, records_max=4, expire_days=30, no_operation=True),
        counter(20, Kind.DOUBLE),
        counter(30, Kind.FIXED32, records_max=3, expire_days=5),
        counter(40, Kind.FLOAT, decay=2.0, time_counter_id=41, not_glued=True),
        counter(41, Kind.FIXED32, records_max=100, expire_days=3650, no_operation=True),
    ]
)
WRITABLE = (1, 2, 3, 4, 20, 30, 40)


def value_of(draw_value: float, counter_id: int) -> float:
    kind = CATALOG[counter_id].kind
    return 1 if kind is Kind.FIXED32 else abs(int(draw_value)) if kind is Kind.FIXED64 else draw_value


UPDATES = st.builds(
    lambda cid, key, value, age: (cid, key, value_of(value, cid), NOW - age),
    st.sampled_from(WRITABLE),
    st.sampled_from([0, 1, 2, 3, 5, 2**63, 2**64 - 1]),
    st.floats(-1000, 1000, width=32),
    st.one_of(st.integers(0, 40 * DAY), st.sampled_from([-100, 0, 30 * DAY, 30 * DAY + 1, 5 * DAY])),
)
HISTORIES = st.lists(st.lists(UPDATES, max_size=8), max_size=5)


def folded(history: list[list[Update]], *, body: bytes = b"", step: int = 3600, cleanup: bool = True) -> bytes:
    """The history, each batch a commit of its own, an hour apart; a batch is a set, so the fresh come first."""
    for number, batch in enumerate(history):
        counters = MutableCounters(CATALOG, body, NOW + number * step)
        added = [counters.update(*update) for update in sorted(batch, key=lambda update: -update[3])]
        if cleanup and any(added):
            counters.cleanup()
        body = counters.serialise() if any(added) else body
    return body


def must_agree(body: bytes, reference: Reference, now: int) -> None:
    """Keys, times and exact sums are equal; decayed sums are within the published bound."""
    counters = Counters(CATALOG, body, now)
    expected = reference.read(now)
    found = {
        counter_id: dict(counters.items(counter_id))
        for group in counters.groups()
        for counter_id in counters.counter_ids(group)
        if counters.keys(group)
    }
    sizes = reference.magnitudes()
    assert {each: set(keys) for each, keys in found.items()} == {each: set(keys) for each, keys in expected.items()}
    for counter_id, keys in expected.items():
        for key, (value, time) in keys.items():
            got = found[counter_id][key]
            assert got.time == time
            bound = (reference.commits + 1) * 2**-24 * float(sizes[counter_id, key])
            exact = CATALOG[counter_id].kind in (Kind.FIXED32, Kind.FIXED64)
            assert got.value == value if exact else abs(got.value - float(value)) <= bound + 1e-30


@pytest.mark.spec("CNT-01", "CNT-04", "CNT-05", "CNT-06", "CNT-07", "CNT-08")
@settings(max_examples=150, deadline=None)
@given(history=HISTORIES)
def test_any_history_folds_as_the_reference_says(history: list[list[Update]]) -> None:
    reference = Reference(CATALOG)
    for number, batch in enumerate(history):
        reference.commit(batch, NOW + number * 3600)
    must_agree(folded(history), reference, NOW + 5 * 3600)


@pytest.mark.spec("CNT-05")
@settings(max_examples=80, deadline=None)
@given(events=st.lists(UPDATES.filter(lambda u: u[3] > NOW - 4 * DAY), max_size=12), seed=st.integers(0, 2**32))
def test_any_order_split_and_merge_gives_the_same_where_nothing_was_evicted(events: list[Update], seed: int) -> None:
    # Few keys, so that no cap is reached; and nothing that a merge leaves behind.
    events = [update for update in events if update[1] < 4 and update[0] != 40]
    rng = random.Random(seed)
    shuffled = rng.sample(events, len(events))
    cut = rng.randint(0, len(events))
    reference = Reference(CATALOG)
    reference.commit(events, NOW)
    reference.commits = len(events) + 2  # one for each update of one part, one for the other part, one for the merge
    one, other = folded([[u] for u in shuffled[:cut]], step=0), folded([shuffled[cut:]], step=0)
    merged = MutableCounters(CATALOG, b"", NOW)
    merged.absorb(Counters(CATALOG, one, NOW))
    merged.absorb(Counters(CATALOG, other, NOW))
    must_agree(merged.serialise(), reference, NOW)


@pytest.mark.spec("CNT-04")
def test_an_event_a_week_ago_weighs_as_much_as_the_decayed_value_now() -> None:
    counters = MutableCounters(CATALOG, b"", NOW)
    counters.update(1, 7, 1.0, NOW - 604_800)
    assert counters.get(1, 7) == 1.0
    assert counters.get(1, 7, at=NOW) == pytest.approx(decayed(1.0, 1.0, 604_800)) == pytest.approx(0.36787944)
    counters.update(1, 7, 1.0, NOW)
    assert counters.get(1, 7) == pytest.approx(1.36787944)


@pytest.mark.spec("CNT-06")
def test_siblings_decay_when_one_moves_the_time_and_late_events_move_nothing() -> None:
    counters = MutableCounters(CATALOG, b"", NOW)
    counters.update(1, 7, 1.0, NOW - 7 * DAY)
    counters.update(2, 7, 1.0, NOW)
    assert counters.get(1, 7) == pytest.approx(decayed(1.0, 1.0, 7 * DAY))
    counters.update(1, 7, 1.0, NOW - 7 * DAY)
    assert counters.find(2, 7) == (1.0, NOW)
    assert counters.get(1, 7) == pytest.approx(2 * decayed(1.0, 1.0, 7 * DAY))
    counters.update(2, 8, 5.0, NOW)
    assert dict(counters.items(1))[8] == (0, NOW), "a key new to a sibling is there with 0"


@pytest.mark.spec("CNT-07")
def test_cleanup_keeps_the_newest_and_of_a_tie_the_larger_unsigned_key() -> None:
    counters = MutableCounters(CATALOG, b"", NOW)
    for key in (1, 2**63, 2**64 - 1, 5, 6):
        counters.update(1, key, 1.0, NOW)
    counters.cleanup(enforce_max_records=False)
    assert len(counters.keys(CATALOG.groups[10])) == 5
    counters.cleanup()
    assert counters.keys(CATALOG.groups[10]) == [5, 6, 2**63, 2**64 - 1]
    assert counters.bill[1] == [1.0, 0.0]


@pytest.mark.spec("CNT-08")
def test_an_expired_key_is_not_returned_nor_added_to_whether_cleanup_ran_or_not() -> None:
    body = folded([[(1, 7, 5.0, NOW - 30 * DAY)]])
    assert Counters(CATALOG, body, NOW).get(1, 7) == 5.0
    assert Counters(CATALOG, body, NOW + 1).find(1, 7) is None
    assert list(Counters(CATALOG, body, NOW + 1).items(1)) == []
    later = MutableCounters(CATALOG, body, NOW + 1)
    assert not later.update(1, 7, 1.0, NOW - 30 * DAY), "too old, and its key is not live"
    assert later.update(1, 7, 1.0, NOW)
    assert later.get(1, 7) == 1.0
    assert later.bill[1][1] == pytest.approx(5.0 * decayed(1.0, 1.0, 30 * DAY + 1))


@pytest.mark.spec("CNT-18")
def test_the_eviction_bill_agrees_with_the_reference() -> None:
    rng = random.Random(7)
    body, reference = b"", Reference(CATALOG)
    bill: dict[int, list[float]] = {}
    for commit in range(30):
        now = NOW + commit * (1 if commit < 15 else 12) * DAY
        batch = [
            (rng.choice((1, 2, 20)), rng.randrange(9), rng.uniform(0, 5), now - rng.randrange(20 * DAY))
            for _ in range(4)
        ]
        counters = MutableCounters(CATALOG, body, now)
        for update in sorted(batch, key=lambda one: -one[3]):
            counters.update(*update)
        counters.cleanup()
        body = counters.serialise()
        reference.commit(batch, now)
        for counter_id, lost in counters.bill.items():
            total = bill.setdefault(counter_id, [0.0, 0.0])
            bill[counter_id] = [total[0] + lost[0], total[1] + lost[1]]
    for counter_id, lost in reference.bill.items():
        assert bill[counter_id] == [pytest.approx(float(each), rel=1e-5) for each in lost]
    assert bill[1][0] > 0
    assert bill[1][1] > 0


@pytest.mark.spec("CNT-03")
def test_each_kind_takes_only_what_it_can_keep() -> None:
    counters = MutableCounters(CATALOG, b"", NOW)
    for value in (float("nan"), float("inf"), -float("inf"), 1e31):
        with pytest.raises(ValueWrong):
            counters.update(1, 1, value, NOW)
    for value in (-1, 0.5, 2**64):
        with pytest.raises(ValueWrong):
            counters.update(3, 1, value, NOW)
    with pytest.raises(ValueWrong, match="takes no value"):
        counters.update(30, 1, 5, NOW)
    with pytest.raises(ValueWrong, match="unsigned 64-bit"):
        counters.update(1, -1, 1.0, NOW)
    counters.update(3, 1, 2**64 - 1, NOW)
    with pytest.raises(CounterOverflow, match="64 bits"):
        counters.update(3, 1, 1, NOW)
    assert counters.get(3, 1) == 2**64 - 1
    with pytest.raises(CounterReadOnly):
        counters.update(10, 1, 1, NOW)
    with pytest.raises(CounterUnknown):
        counters.update(999, 1, 1, NOW)
    with pytest.raises(CounterUnknown):
        counters.get("CI_NONE", 1)


@pytest.mark.spec("CNT-03")
@pytest.mark.parametrize("huge", [10**400, -(10**400), 10**5000], ids=["large", "negative", "unprintable"])
def test_a_number_too_large_for_anything_is_refused_like_any_other(huge: int) -> None:
    counters = MutableCounters(CATALOG, b"", NOW)
    for counter_id in WRITABLE:
        with pytest.raises(ValueWrong, match="not a number of"):
            counters.update(counter_id, 1, huge, NOW)
    with pytest.raises(ValueWrong, match="64-bit"):
        counters.update(1, huge, 1.0, NOW)
    with pytest.raises(TimeWrong, match="unix seconds"):
        counters.update(1, 1, 1.0, huge)


@pytest.mark.spec("CNT-03")
@pytest.mark.parametrize("time", [0, -1, 2**32, NOW + DAY + 1, NOW * 1000])
def test_a_time_that_cannot_be_kept_is_refused(time: int) -> None:
    with pytest.raises(TimeWrong):
        MutableCounters(CATALOG, b"", NOW).update(1, 1, 1.0, time)


def test_a_sum_that_leaves_its_kind_stays_at_the_largest_number() -> None:
    counters = MutableCounters(CATALOG, b"", NOW)
    counters.update(1, 1, 1e30, NOW)
    counters._table(CATALOG.groups[10]).values[1][1] = 1e300
    again = Counters(CATALOG, counters.serialise(), NOW)
    assert again.get(1, 1) == pytest.approx(3.4028235e38)


@pytest.mark.spec("CNT-16")
def test_not_glued_counters_stay_behind_when_profiles_merge() -> None:
    one, other = folded([[(40, 1, 1.0, NOW), (1, 1, 2.0, NOW)]]), folded([[(40, 1, 1.0, NOW), (1, 1, 3.0, NOW)]])
    merged = MutableCounters(CATALOG, b"", NOW)
    for body in (one, other):
        merged.absorb(Counters(CATALOG, body, NOW))
    assert merged.get(1, 1) == 5.0
    assert merged.get(40, 1) == 0


@pytest.mark.spec("CNT-05", "CNT-08")
@pytest.mark.parametrize("cleaned", [False, True])
def test_a_merge_does_not_depend_on_which_side_holds_an_expired_key(cleaned: bool) -> None:
    old, new = folded([[(3, 7, 5, NOW - 29 * DAY)]]), folded([[(3, 7, 1, NOW)]])
    now = NOW + 2 * DAY
    for one, other in ((old, new), (new, old)):
        merged = MutableCounters(CATALOG, one, now)
        if cleaned:
            merged.cleanup()
        merged.absorb(Counters(CATALOG, other, now))
        assert dict(merged.items(3)) == {7: (1, NOW)}
        assert merged.bill.get(3, [0.0, 0.0])[1] == (5.0 if one is old else 0.0), "its own key expired, as in an update"
        merged.cleanup()
        assert dict(Counters(CATALOG, merged.serialise(), now).items(3)) == {7: (1, NOW)}


@pytest.mark.spec("CNT-08")
def test_what_has_expired_for_the_receiver_is_not_taken_over_whatever_the_other_thinks() -> None:
    old = folded([[(3, 7, 5, NOW - 29 * DAY), (3, 8, 5, NOW - 27 * DAY)]])
    merged = MutableCounters(CATALOG, b"", NOW + 2 * DAY)
    merged.update(1, 9, 1.0, NOW)
    merged.absorb(Counters(CATALOG, old))  # as of 1970, nothing has expired
    assert merged.get(3, 7) == 0
    merged.update(3, 7, 1, NOW)
    merged.update(3, 8, 1, NOW)
    assert (merged.get(3, 7), merged.get(3, 8)) == (1, 6)


@pytest.mark.spec("CNT-03")
def test_a_merged_sum_that_leaves_its_kind_stays_at_the_largest_number() -> None:
    profile = Profile()
    profile.packed_counters.add(counter_ids=[20], keys=[1]).values.add().double_values.value.extend([1.7e308])
    pack = profile.packed_counters.add(counter_ids=[1, 10], keys=[1])
    pack.values.add().float_values.value.extend([3.4e38])
    pack.values.add().fixed32_values.value.extend([NOW])
    merged = MutableCounters(CATALOG, b"", NOW)
    for _ in range(2):
        merged.absorb(Counters(CATALOG, profile.SerializeToString(), NOW))
    merged.absorb_update(CATALOG[1], 1, 1e30, NOW)
    assert (merged.get(20, 1), merged.get(1, 1)) == (FLOAT64_MAX, FLOAT32_MAX)


@pytest.mark.spec("PRO-07")
@settings(max_examples=60, deadline=None)
@given(parts=st.lists(HISTORIES, min_size=2, max_size=4))
def test_a_merge_of_profiles_is_the_merge_of_the_reference(parts: list[list[list[Update]]]) -> None:
    now = NOW + 5 * 3600
    references, merged = [], MutableCounters(CATALOG, b"", now)
    for history in parts:
        reference = Reference(CATALOG)
        for number, batch in enumerate(history):
            reference.commit(batch, NOW + number * 3600)
        references.append(reference)
        merged.absorb(Counters(CATALOG, folded(history), now))
    merged.cleanup()
    whole = Reference(CATALOG)
    whole.merge(references, now)
    whole.commits = 30
    must_agree(merged.serialise(), whole, now)


@pytest.mark.spec("CNT-13")
def test_without_a_change_the_very_bytes_come_back() -> None:
    body = folded([[(1, 1, 1.0, NOW)]])
    counters = MutableCounters(CATALOG, body, NOW)
    counters.get(1, 1)
    assert counters.serialise() is body
    assert MutableCounters(CATALOG, b"", NOW).serialise() == b""


@pytest.mark.spec("CNT-13")
def test_a_profile_knows_when_all_of_it_has_expired() -> None:
    counters = MutableCounters(CATALOG, b"", NOW)
    assert counters.expires_at == 0
    counters.update(1, 1, 1.0, NOW)
    assert counters.expires_at == NOW + 30 * DAY
    counters.update(20, 1, 1.0, NOW)
    assert counters.expires_at == 2**62
