"""Stopping in order: a signal is noted, and looked at between two pieces of work instead of inside one."""

import os
import signal
import threading
from types import FrameType


def stop_on_signals() -> threading.Event:
    """An event that SIGTERM or SIGINT sets; a second signal ends the process at once."""
    stopping = threading.Event()

    def stop(number: int, _: FrameType | None) -> None:
        if stopping.is_set():
            os._exit(128 + number)
        stopping.set()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    return stopping
