"""What holds an owned update back and what releases it, against the sentence of the specification."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfold.core.errors import BadInput
from keyfold.profiles.model import Held, event_of, events_of, fingerprint, profile_id_of, released_by_merge, settled

MERGE = 100

STEPS = st.lists(
    st.one_of(
        st.integers(1, 600),
        st.builds(lambda owner, time: (owner, time), st.integers(1, 3), st.integers(1, 600)),
    ),
    max_size=10,
)


def as_steps(given_steps: list[int | tuple[int, int]]) -> list[Held | int]:
    return [
        step if isinstance(step, int) else Held(1, 1, 1.0, step[1], step[0], f"e{number}", "log", 0, 0)
        for number, step in enumerate(given_steps)
    ]


def one_by_one(
    steps: list[Held | int], held: Sequence[Held] = (), public: int | None = None
) -> tuple[set[str], set[str]]:
    """The slow reference: at the beginning and after every step, look at every pair, all over again."""
    waiting = {each.event_id: each for each in held}
    released: set[str] = set()
    for step in (None, *steps):
        if step is None:
            pass
        elif isinstance(step, int):
            public = step if public is None else max(public, step)
        else:
            waiting[step.event_id] = step
        while True:
            free = set()
            for name, held in waiting.items():
                sources = [other.time for other in waiting.values() if other.owner != held.owner]
                sources += [] if public is None else [public]
                if any(abs(held.time - source) < MERGE for source in sources):
                    free.add(name)
            if not free:
                break
            for name in free:
                held = waiting.pop(name)
                public = held.time if public is None else max(public, held.time)
            released |= free
    return released, set(waiting)


@pytest.mark.spec("PRO-04")
@settings(max_examples=300, deadline=None)
@given(given_steps=STEPS, cut=st.integers(0, 10))
def test_updates_are_released_as_the_reference_says_however_they_are_gathered(
    given_steps: list[int | tuple[int, int]], cut: int
) -> None:
    steps = as_steps(given_steps)
    released, waiting = one_by_one(steps)
    whole = settled([], None, steps, merge_seconds=MERGE, expired_before=None)
    assert {each.event_id for each in whole.released} == released
    assert {each.event_id for each in whole.waiting} == waiting
    first = settled([], None, steps[:cut], merge_seconds=MERGE, expired_before=None)
    times = [step for step in steps[:cut] if isinstance(step, int)] + [each.time for each in first.released]
    second = settled(first.waiting, max(times, default=None), steps[cut:], merge_seconds=MERGE, expired_before=None)
    assert {each.event_id for each in (*first.released, *second.released)} == released


@pytest.mark.spec("PRO-04")
@settings(max_examples=300, deadline=None)
@given(given_steps=STEPS, waiting_before=st.integers(0, 10), public=st.none() | st.integers(1, 600))
def test_what_waits_is_settled_whatever_it_has_come_to_beside_each_other(
    given_steps: list[int | tuple[int, int]], waiting_before: int, public: int | None
) -> None:
    """A clock that goes back, or a longer period, gives a source to what had none when it came."""
    steps = as_steps(given_steps)
    held = [step for step in steps[:waiting_before] if isinstance(step, Held)]
    released, waiting = one_by_one(steps[waiting_before:], held, public)
    found = settled(held, public, steps[waiting_before:], merge_seconds=MERGE)
    assert {each.event_id for each in found.released} == released
    assert {each.event_id for each in found.waiting} == waiting


@pytest.mark.spec("PRO-07")
@settings(max_examples=300, deadline=None)
@given(given_steps=STEPS, chance=st.randoms())
def test_a_merge_releases_the_same_whatever_the_order_of_ids_and_all_that_has_a_source(
    given_steps: list[int | tuple[int, int]], chance: Any
) -> None:
    waiting = [step for step in as_steps(given_steps) if isinstance(step, Held)]
    mixed = chance.sample(waiting, len(waiting))
    released = {each.event_id for each in released_by_merge(waiting, MERGE)}
    assert {each.event_id for each in released_by_merge(mixed, MERGE)} == released
    assert released == one_by_one([], waiting)[0]


@pytest.mark.spec("PRO-04")
def test_a_public_update_too_old_to_be_kept_releases_nothing() -> None:
    held = as_steps([(1, 50)])
    for time, released in ((40, 0), (60, 1)):
        result = settled(held, None, [time], merge_seconds=MERGE, expired_before=45)  # type: ignore[arg-type]
        assert len(result.released) == released


@pytest.mark.spec("PRO-04")
@pytest.mark.parametrize(("apart", "released"), [(MERGE - 1, 1), (MERGE, 0), (-MERGE + 1, 1), (-MERGE, 0)])
def test_an_owned_update_needs_a_public_key_strictly_closer_than_the_period_whichever_came_first(
    apart: int, released: int
) -> None:
    (owned,) = as_steps([(1, 300 + apart)])
    for steps in ([300, owned], [owned, 300]):
        assert len(settled([], None, steps, merge_seconds=MERGE).released) == released


@pytest.mark.spec("PRO-02")
def test_an_event_is_the_same_whatever_the_order_of_its_fields() -> None:
    assert fingerprint({"a": 1, "b": [1, {"c": 2, "d": 3}]}) == fingerprint({"b": [1, {"d": 3, "c": 2}], "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": "1"})
    assert 0 <= fingerprint({}) < 2**32


@pytest.mark.spec("PRO-02", "PRO-12")
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"event_id": "a"},
        {"event_id": "a", "time": "1"},
        {"event_id": "a" * 201, "time": 1},
        {"event_id": 1, "time": 1},
        {"event_id": "", "time": 1},
        {"event_id": "a\0b", "time": 1},
        {"event_id": "a", "time": True},
        {"event_id": "a", "time": 1.0},
    ],
)
def test_what_lacks_an_id_or_a_time_is_no_event_alone_or_among_others(fields: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        event_of(fields)
    with pytest.raises(BadInput):
        events_of([{"event_id": "b", "time": 2}, fields, {"event_id": "c", "time": 3}])


@pytest.mark.spec("PRO-02")
def test_many_events_are_those_that_each_would_be() -> None:
    sent = [{"event_id": "é" * 200, "time": 2**40, "key": 1}, {"event_id": " ", "time": -1}]
    assert [(each.id, each.time, each.fields) for each in events_of(sent)] == [
        (each.id, each.time, each.fields) for each in map(event_of, sent)
    ]
    assert events_of([]) == []


@pytest.mark.spec("PRO-12")
def test_a_profile_id_is_text_or_a_64_bit_number() -> None:
    assert [profile_id_of(each) for each in (5, "5", -1, 2**64 - 1)] == ["5", "5", "-1", "18446744073709551615"]
    for wrong in (None, "", "x" * 401, "ж" * 201, "a\0b", 1.5, True, 2**64, -(2**63) - 1, []):
        with pytest.raises(BadInput):
            profile_id_of(wrong)
