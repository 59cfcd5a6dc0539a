"""One injected clock; time is whole microseconds since 1970 in UTC, and no rule reads it by itself."""

import time
from typing import Protocol

SECOND_US = 1_000_000


class Clock(Protocol):
    def now_us(self) -> int: ...


class SystemClock:
    def now_us(self) -> int:
        return time.time_ns() // 1_000


class ManualClock:
    """A clock that tests move by hand."""

    def __init__(self, now_us: int = 1_700_000_000 * SECOND_US) -> None:
        self._now_us = now_us

    def now_us(self) -> int:
        return self._now_us

    def advance(self, seconds: float) -> None:
        self._now_us += round(seconds * SECOND_US)
