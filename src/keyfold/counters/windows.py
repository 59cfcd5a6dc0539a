"""How many in the last hour, day or week: what counters with different decay on one key say about a window of time.

A counter with decay d knows S = Σ vᵢ·exp(−λ·uᵢ), with λ = d/604800 and uᵢ the age of event i at T, the last time of
its key. A window asks for N = Σ vᵢ over uᵢ ≤ W. For any numbers c with f(u) = Σ cⱼ·exp(−λⱼ·u) at least 1 up to W and at
least 0 beyond, N ≤ Σ cⱼ·Sⱼ; with f at most 1 up to W and at most 0 beyond, N ≥ Σ cⱼ·Sⱼ. The best such f for one and
for two counters are known in closed form, so that no history can leave the bounds, and with one or two counters some
history reaches them.
"""

import math
from collections.abc import Sequence
from itertools import combinations, pairwise

from msgspec import Struct

from keyfold.counters.errors import ValueWrong
from keyfold.counters.model import WEEK_SECONDS

# What fifteen commits do to a VF_FLOAT: (commits + 1)·2⁻²⁴. It also covers the rounding of the arithmetic here.
RELATIVE_ERROR = 2.0**-20
# Below this a VF_FLOAT has fewer digits, and in the end none: what has faded to 0 may still have been there.
SMALLEST = 2.0**-126


class Estimate(Struct, frozen=True):
    """The likely number, and the bounds that the true one cannot leave."""

    value: float
    low: float
    high: float


class _Sum(Struct, frozen=True, order=True):
    """What one counter knows: the rate of its decay a second, and its value at T, give or take."""

    rate: float
    least: float
    value: float
    most: float


def window(
    counts: Sequence[tuple[float, float]],
    age_seconds: float,
    window_seconds: float,
    *,
    relative_error: float = RELATIVE_ERROR,
) -> Estimate:
    """The sum of the events of the last `window_seconds`, from (decay, value) of counters under one time counter.

    The values are those stored, as of T; `age_seconds` is now − T, and a T in the future counts as now. Each counter
    must have counted the same events, none of them negative; `relative_error` is how far its value may be off.
    """
    sums = _checked(counts, window_seconds, relative_error)
    if age_seconds > window_seconds:
        return Estimate(0.0, 0.0, 0.0)
    reach = window_seconds - max(age_seconds, 0.0)
    low, high = _low(sums, reach), _high(sums, reach)
    return Estimate(min(max(_likely(sums, reach), low), high), low, high)


def _low(sums: Sequence[_Sum], reach: float) -> float:
    """The most that a slow and a fast counter prove, with f(0) = 1 and f(W) = 0."""
    proven = [0.0]
    for slow, fast in combinations(sums, 2):
        kept = math.exp(-(fast.rate - slow.rate) * reach)
        if kept < 1:
            proven.append((fast.least - kept * slow.most) / -math.expm1(-(fast.rate - slow.rate) * reach))
    return max(proven)


def _high(sums: Sequence[_Sum], reach: float) -> float:
    """The least of what one counter proves, f(W) = 1, and of what two prove, f(0) = f(W) = 1."""
    proven = [_faded(each.most, -each.rate * reach) for each in sums]
    for slow, fast in combinations(sums, 2):
        ratio = -math.expm1(-(fast.rate - slow.rate) * reach)  # 1 − b/a, with a and b what each keeps of an event at W
        if ratio:
            of_slow = -math.expm1(-fast.rate * reach) * slow.most
            of_fast = -math.expm1(-slow.rate * reach) * fast.least
            proven.append(_faded((of_slow - of_fast) / ratio, -slow.rate * reach))
    return min(proven)


def _likely(sums: Sequence[_Sum], reach: float) -> float:
    """The number, if events came at a rate that grew or fell exponentially: the one such history with these sums."""
    if len(sums) == 1:
        (only,) = sums
        return only.value * only.rate * reach if only.rate else only.value / 2
    slow, fast = min(pairwise(sums), key=lambda pair: _distance(pair[0], reach) + _distance(pair[1], reach))
    apart = slow.value - fast.value
    growth = (fast.rate * fast.value - slow.rate * slow.value) / apart if apart > 0 else math.inf
    if growth == math.inf:
        return slow.value  # all of it at T
    at_last = (fast.rate - slow.rate) * slow.value / apart * fast.value
    if at_last == 0 or abs(growth * reach) < 1e-9:
        return at_last * reach
    return at_last * -_exp_minus_one(-growth * reach) / growth


def _distance(counter: _Sum, reach: float) -> float:
    """How far a counter is from one that fades just once in the window, which says most about it."""
    return abs(math.log(max(counter.rate * reach, 1e-3)))


def _checked(counts: Sequence[tuple[float, float]], window_seconds: float, relative_error: float) -> list[_Sum]:
    if not window_seconds > 0:
        raise ValueWrong(f"a window of {window_seconds} seconds is none")
    if not counts:
        raise ValueWrong("a window needs at least one counter")
    for decay, value in counts:
        if not (math.isfinite(decay) and decay >= 0 and math.isfinite(value) and value >= 0):
            raise ValueWrong(f"a window needs decays and values of at least 0, not decay {decay} and value {value}")
    sums = sorted(
        _Sum(
            decay / WEEK_SECONDS,
            max(value * (1 - relative_error) - SMALLEST, 0.0),
            value,
            value * (1 + relative_error) + SMALLEST,
        )
        for decay, value in counts
    )
    for slow, fast in pairwise(sums):
        if slow.rate == fast.rate:
            raise ValueWrong(f"two counters have decay {slow.rate * WEEK_SECONDS:g}: a window needs different ones")
        if fast.least > slow.most:
            raise ValueWrong(
                f"the counter that fades faster holds more ({fast.value:g}) than the slower one ({slow.value:g})",
                hint="They have not counted the same events: was one of them added later?",
            )
    return sums


def _faded(value: float, exponent: float) -> float:
    """value / exp(exponent), without overflow."""
    return 0.0 if value <= 0 else value * math.exp(-exponent) if -exponent < 700 else math.inf


def _exp_minus_one(exponent: float) -> float:
    return math.expm1(exponent) if exponent < 700 else math.inf
