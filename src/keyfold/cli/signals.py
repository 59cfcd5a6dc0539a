"""Stopping in order: a signal is noted, and looked at between two pieces of work instead of inside one."""

import os
import signal
import time
from types import FrameType

LOOK_SECONDS = 0.1


class Stopping:
    """Whether a signal has come.

    An event of `threading` would not do: a handler that sets it waits for ever where its thread was just about to wait
    for it, and a wait without an end is not woken by a signal that came a moment before it.
    """

    def __init__(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True

    def wait(self, seconds: float = float("inf")) -> bool:
        deadline = time.monotonic() + seconds
        while not self._is_set and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(LOOK_SECONDS, left))
        return self._is_set


def stop_on_signals() -> Stopping:
    """What SIGTERM or SIGINT sets; a second signal ends the process at once."""
    stopping = Stopping()

    def stop(number: int, _: FrameType | None) -> None:
        if stopping.is_set():
            os._exit(128 + number)
        stopping.set()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    return stopping
