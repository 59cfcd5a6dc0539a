"""Windows of time from decaying counters: the true number never leaves the bounds."""

import math
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from keyfold.counters.errors import ValueWrong
from keyfold.counters.windows import Estimate, window

WEEK, DAY, HOUR = 604_800, 86_400, 3_600

Event = tuple[float, float]  # value, age at T in seconds
AGES = st.one_of(st.just(0.0), st.floats(0, 100), st.floats(0, 2 * DAY), st.floats(0, 10 * WEEK))
EVENTS = st.lists(st.tuples(st.one_of(st.just(1.0), st.floats(0, 100)), AGES), min_size=1, max_size=12)
DECAYS = st.lists(st.sampled_from([0, 0.1, 0.5, 1, 2, 7, 28, 168, 1000]), min_size=1, max_size=4, unique=True)


def counts_of(events: list[Event], decays: list[float]) -> list[tuple[float, float]]:
    return [(d, sum(v * math.exp(-d * u / WEEK) for v, u in events)) for d in decays]


@pytest.mark.spec("CNT-17")
@given(EVENTS, DECAYS, st.floats(1, 12 * WEEK), st.floats(0, 1.2))
@example([(1.0, 0.0)], [1000], 9.0 * WEEK, 0.0)  # faded to nothing within the window
@example([(1.0, 0.0), (1.0, 100.0)], [1, 7], 100.0, 0.0)  # an event on the edge counts
def test_no_history_leaves_the_bounds(events: list[Event], decays: list[float], seconds: float, share: float) -> None:
    age = share * seconds
    true = sum(v for v, u in events if u <= seconds - age)
    found = window(counts_of(events, decays), age, seconds)
    assert found.low <= true <= found.high
    assert found.low <= found.value <= found.high


@pytest.mark.spec("CNT-17")
@given(EVENTS, DECAYS, st.floats(1, 12 * WEEK))
def test_the_bounds_hold_for_values_stored_as_floats(events: list[Event], decays: list[float], seconds: float) -> None:
    stored = [(d, struct.unpack("f", struct.pack("f", v))[0]) for d, v in counts_of(events, decays)]
    found = window(stored, 0, seconds)
    assert found.low <= sum(v for v, u in events if u <= seconds) <= found.high


@pytest.mark.spec("CNT-17")
@pytest.mark.parametrize(
    ("events", "reaches"),
    [
        ([(3.0, 0.0), (2.0, DAY + 1e-3)], "low"),
        ([(3.0, 0.0), (2.0, DAY)], "high"),
        ([(2.0, DAY)], "high"),
    ],
)
def test_with_two_counters_some_history_reaches_each_bound(events: list[Event], reaches: str) -> None:
    true = sum(v for v, u in events if u <= DAY)
    found = window(counts_of(events, [1, 7]), 0, DAY, relative_error=1e-12)
    assert getattr(found, reaches) == pytest.approx(true, rel=1e-6)


@pytest.mark.spec("CNT-17")
def test_another_counter_never_widens_the_bounds() -> None:
    events = [(1.0, hours * 3600.0) for hours in (0, 1, 2, 5, 30, 31, 80, 200)]
    decays = [1, 7, 168, 0.5]
    widths = [
        found.high - found.low
        for found in (window(counts_of(events, decays[:n]), 60, DAY) for n in range(1, len(decays) + 1))
    ]
    assert widths == sorted(widths, reverse=True)


@pytest.mark.spec("CNT-17")
@pytest.mark.parametrize("seconds", [HOUR, DAY, WEEK])
def test_a_steady_stream_is_estimated_within_a_tenth(seconds: int) -> None:
    """Twenty events a window at equal distance, and the counters of the example: decay 1, 7 and 168."""
    step = seconds / 20
    events = [(1.0, i * step) for i in range(round(8 * WEEK / step) if seconds > HOUR else 20_000)]
    found = window(counts_of(events, [1, 7, 168]), step / 2, seconds)
    assert found.value == pytest.approx(20, rel=0.1)


@pytest.mark.spec("CNT-17")
def test_after_a_silence_as_long_as_the_window_the_answer_is_exactly_0() -> None:
    assert window([(1, 5.0), (7, 4.0)], HOUR + 1, HOUR) == Estimate(0, 0, 0)


@pytest.mark.spec("CNT-17")
def test_a_lone_total_says_only_that_it_cannot_be_more() -> None:
    found = window([(0, 10.0)], 0, HOUR, relative_error=0)
    assert (found.value, found.low, found.high) == (5.0, 0.0, pytest.approx(10.0))


@pytest.mark.spec("CNT-17")
def test_a_time_in_the_future_counts_as_now() -> None:
    counts = [(1, 5.0), (7, 4.0)]
    assert window(counts, -100, HOUR) == window(counts, 0, HOUR)


@pytest.mark.spec("CNT-17")
@pytest.mark.parametrize(
    ("counts", "seconds", "says"),
    [
        ([], HOUR, "at least one counter"),
        ([(1, 1.0)], 0, "window of 0 seconds"),
        ([(1, -1.0)], HOUR, "at least 0"),
        ([(-1, 1.0)], HOUR, "at least 0"),
        ([(1, math.nan)], HOUR, "at least 0"),
        ([(7, 1.0), (7, 1.0)], HOUR, "two counters have decay 7"),
        ([(1, 1.0), (7, 2.0)], HOUR, "not counted the same events"),
    ],
)
def test_what_no_history_can_have_left_is_refused(counts: list[tuple[float, float]], seconds: float, says: str) -> None:
    with pytest.raises(ValueWrong, match=says):
        window(counts, 0, seconds)
