"""A call that is repeated in the background while work is in hand."""

import threading
import weakref
from collections.abc import Callable

import structlog

log = structlog.get_logger(__name__)


class Heartbeat:
    """Calls `beat` every `seconds` between `begin` and `end`.

    One thread for all pieces of work, because steps are short and many, and starting a thread waits for it to run. It
    does not keep its owner alive: a worker that is dropped without a word takes the thread along.
    """

    def __init__(self, beat: Callable[[], None], seconds: float, name: str) -> None:
        self._beat = weakref.WeakMethod(beat)
        self._seconds = seconds
        self._name = name
        self._is_at_work = threading.Event()
        self._stopped: threading.Event | None = None  # of the thread that runs

    def begin(self) -> None:
        self._is_at_work.set()
        if self._stopped is None:
            self._stopped = threading.Event()
            arguments = (self._beat, self._seconds, self._is_at_work, self._stopped)
            threading.Thread(target=_run, args=arguments, name=self._name, daemon=True).start()
            weakref.finalize(self, self._stopped.set)

    def end(self) -> None:
        self._is_at_work.clear()

    def stop(self) -> None:
        """The thread ends; another `begin` starts a new one."""
        self.end()
        if self._stopped is not None:
            self._stopped.set()
            self._stopped = None


def _run(
    beat: "weakref.WeakMethod[Callable[[], None]]",
    seconds: float,
    is_at_work: threading.Event,
    stopped: threading.Event,
) -> None:
    while not stopped.wait(seconds):
        call = beat() if is_at_work.is_set() else None
        if call is None:
            continue
        try:
            call()
        except Exception as error:
            log.error("a heartbeat failed", exc_info=error)  # the next may do better
        del call  # or this thread would keep its owner
