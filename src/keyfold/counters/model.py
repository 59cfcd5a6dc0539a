"""The rules of a counter as functions of values: decay, liveness, which keys survive, what an update may be."""

import math
from collections.abc import Mapping

from keyfold.counters.catalog import UINT64_MAX, Counter, Group, Kind
from keyfold.counters.errors import CounterReadOnly, TimeWrong, ValueWrong

WEEK_SECONDS = 604_800
TIME_MAX = 2**32 - 1
VALUE_MAX = 1e30
NEVER = 2**62
FUTURE_SECONDS_MAX = 86_400

FLOAT32_MAX = (2 - 2**-23) * 2.0**127
FLOAT64_MAX = (2 - 2**-52) * 2.0**1023

Number = float | int


def decayed(value: float, decay: float, seconds: float) -> float:
    """What a value weighs `seconds` later: a week multiplies it by exp(−decay)."""
    return value * math.exp(-decay * seconds / WEEK_SECONDS) if decay and seconds else value


def is_live(group: Group, time: int, now: int) -> bool:
    """Whether a key last touched at `time` has not expired."""
    return group.expire_seconds is None or now - time <= group.expire_seconds


def survivors(times: Mapping[int, int], count_max: int) -> set[int]:
    """The newest keys by (time, key): a tie keeps the larger unsigned key."""
    return set(sorted(times, key=lambda key: (times[key], key), reverse=True)[:count_max])


def storable(value: float, kind: Kind) -> float:
    """A sum that leaves its kind stays at the largest finite number of that kind."""
    limit = FLOAT32_MAX if kind is Kind.FLOAT else FLOAT64_MAX
    return min(max(value, -limit), limit)


def must_be_update(
    counter: Counter, key: int, value: Number, time: int, now: int, future_seconds_max: int = FUTURE_SECONDS_MAX
) -> None:
    """Refuse an update that a counter could not keep."""
    if counter.no_operation:
        raise CounterReadOnly(f"{counter.name} is kept by the counters it belongs to and is not written by handlers")
    if not 0 <= key <= UINT64_MAX:
        raise ValueWrong(f"the key {_shown(key)} of {counter.name} is not an unsigned 64-bit number")
    must_be_time(time, now, future_seconds_max)
    must_be_value(counter, value)


def must_be_value(counter: Counter, value: Number) -> None:
    """Refuse a value that the kind of a counter cannot keep."""
    # Ranges first: a whole number of Python may be too large to become a float.
    if counter.kind is Kind.FIXED64:
        if not 0 <= value <= UINT64_MAX:
            raise ValueWrong(f"{counter.name} takes unsigned 64-bit numbers, not {_shown(value)}")
        if value != int(value):
            raise ValueWrong(f"{counter.name} takes whole numbers, not {value}")
    elif counter.kind is Kind.FIXED32:
        if value != 1:
            raise ValueWrong(f"{counter.name} records the time of its event and takes no value, not {_shown(value)}")
    elif not abs(value) <= VALUE_MAX:  # so that NaN is wrong
        raise ValueWrong(f"{counter.name} takes finite numbers up to {VALUE_MAX:g}, not {_shown(value)}")


def must_be_time(time: int, now: int, future_seconds_max: int = FUTURE_SECONDS_MAX) -> None:
    """Times are unix seconds in 32 bits, and not far ahead of the clock."""
    if not 1 <= time <= TIME_MAX:
        hint = "Times are unix seconds, not milliseconds" if time > TIME_MAX else None
        raise TimeWrong(f"the time {_shown(time)} is not unix seconds between 1 and {TIME_MAX}", hint=hint)
    if time > now + future_seconds_max:
        raise TimeWrong(f"the time {time} is {time - now} seconds ahead of now, {future_seconds_max} are allowed")


def _shown(number: Number) -> str:
    """A number in a message; Python does not write out those of some thousand digits."""
    if isinstance(number, int) and number.bit_length() > 100:
        return f"a number of {number.bit_length()} bits"
    return str(number)
