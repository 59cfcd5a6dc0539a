"""The rules of a user's set, against a slow reference."""

import json
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyfold.segments.model import (
    DEPARTURES_MAX,
    Change,
    Collector,
    Entry,
    Guard,
    body_of,
    departures_after,
    departures_of,
    entries_of,
    payload_of,
)
from tests.unit.segments.reference import Entries, changed

# Names that are parts of each other, so that a sloppy search would find the wrong entry.
NAMES = st.sampled_from(["a", "aa", "a.b", "b", "ba", "1", "11", "a-1", "c", "d", "e", "f", "g"])
SETS = st.lists(st.tuples(NAMES, st.integers(0, 12)), unique_by=lambda each: each[0], max_size=9)
MINIMAL = st.dictionaries(NAMES, st.integers(0, 12), max_size=13)


def body(entries: Entries) -> str:
    return body_of([Entry(*each) for each in entries])


@pytest.mark.spec("SEG-04", "SEG-07")
@given(SETS, NAMES, st.integers(1, 12), st.booleans(), MINIMAL, st.integers(1, 8))
def test_a_change_is_what_the_slow_reference_says(
    entries: Entries, segment: str, version: int, is_added: bool, minimal: Mapping[str, int], segments_max: int
) -> None:
    change = Change(segment, version, Collector(minimal, segments_max))
    after, gone = (change.added if is_added else change.removed)(body(entries))
    expected = changed(entries, segment, version, is_added, minimal, segments_max)
    assert [(each.segment_id, each.evaluation_version) for each in entries_of(after)] == expected
    # Whatever was there is still there, or its going is told once with its reason.
    told = [(entry.segment_id, entry.evaluation_version) for entry, _ in gone]
    assert sorted(told) == sorted(each for each in entries if each not in expected)
    for entry, why in gone:
        is_stale = entry.evaluation_version < minimal.get(entry.segment_id, 0)
        assert why == (
            "expired" if is_stale else "left" if entry.segment_id == segment and not is_added else "pushed_out"
        )


@pytest.mark.spec("SEG-06")
@given(SETS, NAMES, st.integers(1, 12), st.booleans(), MINIMAL, st.integers(1, 8))
def test_a_change_made_twice_is_made_once(
    entries: Entries, segment: str, version: int, is_added: bool, minimal: Mapping[str, int], segments_max: int
) -> None:
    """Of a set within its bound: one above it (because the bound was lowered) may lose the very segment first."""
    change = Change(segment, version, Collector(minimal, segments_max))
    fold = change.added if is_added else change.removed
    once, _ = fold(body(entries[:segments_max]))
    assert fold(once) == (once, [])


@pytest.mark.spec("SEG-07")
def test_a_stale_entry_that_is_added_again_goes_to_the_end() -> None:
    change = Change("a", 5, Collector({"a": 5}))
    assert change.added("\na:1\nb:2") == ("\nb:2\na:5", [(Entry("a", 1), "expired")])


@pytest.mark.spec("SEG-07")
def test_the_oldest_of_601_makes_room() -> None:
    full = body_of([Entry(f"s{number}", 1) for number in range(600)])
    after, gone = Change("new", 2, Collector({})).added(full)
    assert gone == [(Entry("s0", 1), "pushed_out")]
    assert [each.segment_id for each in entries_of(after)] == [*(f"s{number}" for number in range(1, 600)), "new"]


@pytest.mark.spec("SEG-08")
@given(SETS, NAMES, st.integers(1, 12), st.booleans(), MINIMAL, st.integers(1, 8))
def test_a_message_tells_the_whole_set_and_what_changed(
    entries: Entries, segment: str, version: int, is_added: bool, minimal: Mapping[str, int], segments_max: int
) -> None:
    change = Change(segment, version, Collector(minimal, segments_max))
    before = body(entries)
    after, gone = (change.added if is_added else change.removed)(before)
    told = json.loads(payload_of(after, before, gone))
    assert told.pop("segments") == [
        {"segment_id": each.segment_id, "evaluation_version": each.evaluation_version} for each in entries_of(after)
    ]
    assert told.pop("entered", []) == [
        each.segment_id for each in entries_of(after) if (each.segment_id, each.evaluation_version) not in entries
    ]
    assert sorted(name for names in told.values() for name in names) == sorted(entry.segment_id for entry, _ in gone)


@pytest.mark.spec("SEG-12")
def test_departures_are_remembered_up_to_a_bound() -> None:
    remembered = ""
    for number in range(DEPARTURES_MAX + 7):
        remembered = departures_after(remembered, [(Entry(f"s{number}", number), "left")], number + 1, 1_700_000_000)
    found = departures_of(remembered)
    assert [each.segment_id for each in found] == [f"s{number}" for number in range(7, DEPARTURES_MAX + 7)]
    assert (found[-1].why, found[-1].version, found[-1].at) == ("left", DEPARTURES_MAX + 7, 1_700_000_000)


@pytest.mark.spec("SEG-11")
@pytest.mark.parametrize(
    ("old", "new", "removed", "is_held"),
    [(0, 5, 0, False), (10, 5, 5, False), (10, 4, 6, True), (10, 0, 10, True), (0, 0, 0, True), (3, 3, 0, False)],
)
def test_a_diff_is_held_where_it_removes_too_much_or_meets_nothing(
    old: int, new: int, removed: int, is_held: bool
) -> None:
    assert (Guard(0.5).objection(old, new, removed) is not None) == is_held
