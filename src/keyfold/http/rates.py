"""How often a name may call: a bucket of tokens each, refilled by a clock that never jumps."""

import time
from collections.abc import Callable

from keyfold.core.errors import RateExceeded

NAMES_MAX = 10_000


class Rates:
    """At most `per_second` a second for each name, at once or spread; the names remembered are bounded.

    A bucket is one number: the time at which it will be full again. It is empty where that is a second away.
    """

    def __init__(
        self, per_second: int, *, names_max: int = NAMES_MAX, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_second = per_second
        self._token_seconds = 1.0 / per_second
        self._wait_seconds_max = 1.0 - self._token_seconds + 1e-9
        self._names_max = names_max
        self._clock = clock
        self._full_at: dict[str, float] = {}

    def take(self, name: str) -> float:
        """Take a token; returns 0, or how many seconds to wait for one."""
        now = self._clock()
        # Popped and put back, so that the dictionary stays in order of use and the first is the one to forget.
        full_at = self._full_at.pop(name, now)
        if full_at < now:
            full_at = now
        wait = full_at - now - self._wait_seconds_max
        if wait > 0:
            self._full_at[name] = full_at
            return wait
        if len(self._full_at) >= self._names_max:
            del self._full_at[next(iter(self._full_at))]
        self._full_at[name] = full_at + self._token_seconds
        return 0.0

    def is_empty(self, name: str) -> bool:
        """Whether a token would have to be waited for; takes none."""
        return self._full_at.get(name, 0.0) - self._clock() > self._wait_seconds_max

    def must_take(self, name: str, what: str) -> None:
        wait = self.take(name)
        if wait:
            raise exceeded(self._per_second, what, wait)

    @property
    def per_second(self) -> int:
        return self._per_second


def exceeded(per_second: int, what: str, wait_seconds: float = 0.0) -> RateExceeded:
    return RateExceeded(
        f"more than {per_second} {what} a second",
        hint="Wait as long as Retry-After says, and send several items in one request",
        retry_after_seconds=max(1, round(wait_seconds + 0.5)),
    )
