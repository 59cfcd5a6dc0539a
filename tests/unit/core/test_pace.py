"""How many messages a consumer takes at once follows the time that its batches take."""

from hypothesis import given
from hypothesis import strategies as st

from keyfold.core.pace import COUNT_MIN, COUNT_START, Pace

QUICK, FAIR, SLOW = 0.1, 0.4, 0.6


def test_full_batches_that_are_quick_double_it_up_to_the_limit() -> None:
    pace = Pace(50_000, 0.5)
    counts = []
    for _ in range(4):
        counts.append(pace.count)
        pace.went(pace.count, QUICK)
    assert counts == [COUNT_START, 2 * COUNT_START, 4 * COUNT_START, 50_000]


def test_a_batch_that_was_not_full_says_nothing() -> None:
    pace = Pace(50_000, 0.5)
    pace.went(COUNT_START - 1, QUICK)
    pace.went(COUNT_START, FAIR)
    for _ in range(20):
        pace.went(3, SLOW)
    assert pace.count == COUNT_START


def test_what_every_step_costs_however_small_does_not_lead_to_single_messages() -> None:
    pace = Pace(50_000, 0.5)
    for _ in range(20):
        pace.went(pace.count, SLOW)
    assert pace.count == COUNT_MIN
    few = Pace(7, 0.5)
    few.went(7, SLOW)
    assert few.count == 7


def test_what_is_too_much_as_a_whole_is_halved_down_to_one() -> None:
    pace = Pace(50_000, 0.5)
    for _ in range(20):
        pace.set_back()
    assert pace.count == 1


def test_after_a_slow_batch_it_halves_and_then_grows_with_care() -> None:
    pace = Pace(50_000, 0.5)
    pace.went(COUNT_START, SLOW)
    assert pace.count == COUNT_START // 2
    pace.went(pace.count, QUICK)
    assert pace.count == COUNT_START // 2 * 9 // 8


@given(count_max=st.integers(1, 100_000), seconds=st.lists(st.sampled_from([QUICK, FAIR, SLOW, None]), max_size=60))
def test_it_stays_between_one_and_the_limit_and_comes_back_from_any_setback(
    count_max: int, seconds: list[float | None]
) -> None:
    pace = Pace(count_max, 0.5)
    for each in seconds:
        if each is None:
            pace.set_back()
        else:
            pace.went(pace.count, each)
        assert 1 <= pace.count <= count_max
    for _ in range(120):
        pace.went(pace.count, QUICK)
    assert pace.count == count_max
