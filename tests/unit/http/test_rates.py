"""A name may call so often and no oftener, and the names remembered are bounded."""

import pytest

from keyfold.core.errors import RateExceeded
from keyfold.http.rates import Rates

pytestmark = pytest.mark.spec("CORE-16")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def allowed(rates: Rates, name: str, tries: int) -> int:
    return sum(rates.take(name) == 0.0 for _ in range(tries))


@pytest.mark.parametrize("per_second", [1, 3, 50, 20_000])
def test_a_second_holds_as_many_as_the_limit(clock: Clock, per_second: int) -> None:
    assert allowed(Rates(per_second, clock=clock), "a", per_second * 2) == per_second


def test_the_bucket_refills_with_time(clock: Clock) -> None:
    rates = Rates(10, clock=clock)
    assert allowed(rates, "a", 20) == 10
    clock.now += 0.5
    assert allowed(rates, "a", 20) == 5
    clock.now += 60
    assert allowed(rates, "a", 20) == 10


def test_one_name_does_not_use_up_anothers(clock: Clock) -> None:
    rates = Rates(2, clock=clock)
    assert allowed(rates, "a", 5) == 2
    assert allowed(rates, "b", 5) == 2


def test_a_refusal_says_how_long_to_wait(clock: Clock) -> None:
    rates = Rates(1, clock=clock)
    rates.must_take("a", "requests")
    with pytest.raises(RateExceeded, match="more than 1 requests a second") as caught:
        rates.must_take("a", "requests")
    assert caught.value.retry_after_seconds is not None
    clock.now += caught.value.retry_after_seconds
    rates.must_take("a", "requests")


def test_a_flood_of_names_is_forgotten_from_the_least_used(clock: Clock) -> None:
    rates = Rates(1, names_max=100, clock=clock)
    rates.take("kept")
    for number in range(1_000):
        rates.take(f"name-{number}")
        rates.take("kept")
    assert len(rates._full_at) <= 100
    assert rates.is_empty("kept")


def test_looking_takes_nothing(clock: Clock) -> None:
    rates = Rates(1, clock=clock)
    assert not rates.is_empty("a")
    assert not rates.is_empty("a")
    assert rates.take("a") == 0.0
    assert rates.is_empty("a")
