"""The longest a request may take: one sweep over those under way, which costs less than a timer for each."""

import asyncio
import time
from collections.abc import Callable

from keyfold.core.errors import KeyfoldError, Stopping, TooSlow, Unavailable
from keyfold.http.wire import Call

SWEEP_SECONDS = 0.25


class Deadlines:
    """Every request under way, the oldest first, with its task."""

    def __init__(self, seconds_max: float) -> None:
        self._seconds_max = seconds_max
        self._under_way: dict[Call, tuple[asyncio.Task[object], float]] = {}
        self._armed = False

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(self, call: Call, now: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._under_way[call] = (task, now + self._seconds_max)
        if not self._armed:
            self._arm()

    def renew(self, call: Call) -> None:
        """A call that comes along piece by piece has as much time for the next one."""
        task, _ = self._under_way.pop(call)
        self._under_way[call] = (task, time.monotonic() + self._seconds_max)

    def end(self, call: Call) -> None:
        del self._under_way[call]

    def end_all(self) -> None:
        """The server stops and will not wait any longer."""
        self._cancel(list(self._under_way), lambda _: Stopping("the server stopped before it could answer"))

    def _arm(self) -> None:
        self._armed = True
        asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep)

    def _sweep(self) -> None:
        now = time.monotonic()
        late: list[Call] = []
        for call, (_, ends) in self._under_way.items():
            if ends > now:
                break  # all have the same time to live, so those behind it are younger
            late.append(call)
        self._cancel(late, self._too_late)
        self._armed = False
        if self._under_way:
            self._arm()

    def _cancel(self, calls: list[Call], fate: Callable[[Call], KeyfoldError]) -> None:
        for call in calls:
            if call.fate is None:
                call.fate = fate(call)
                self._under_way[call][0].cancel()

    def _too_late(self, call: Call) -> KeyfoldError:
        if call.reading:
            return TooSlow(f"the body did not arrive within {self._seconds_max:g} seconds")
        return Unavailable(
            f"there was no answer within {self._seconds_max:g} seconds",
            hint="A change may have been made: ask again with the same Idempotency-Key",
            retry_after_seconds=1,
        )
