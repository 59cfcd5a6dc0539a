"""Loops of a worker: each a step that is called again and again in a thread, backing off when idle or failing."""

import random
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import structlog
from msgspec import Struct

from keyfold.core import metrics
from keyfold.core.errors import KeyfoldError

log = structlog.get_logger(__name__)

FAILURE_SECONDS_MAX = 10.0
# After a wake-up, the time for more work to gather, so that a busy writer is not followed commit by commit.
LINGER_SECONDS = 0.02


class Loop(Struct, frozen=True, kw_only=True):
    """`step` does a bounded piece of work and says whether there may be more; `stop` hands back what it holds.

    A loop with nothing to do looks ever less often, down to once in `idle_seconds_max`; `wake` makes it look at once.
    """

    name: str
    step: Callable[[], bool]
    idle_seconds: float = 0.05
    idle_seconds_max: float = 1.0
    wake: threading.Event = msgspec.field(default_factory=threading.Event)
    stop: Callable[[], None] = lambda: None


class Runner:
    """Runs loops until told to stop; the step in hand is finished, then leases are handed back."""

    def __init__(self, loops: Sequence[Loop]) -> None:
        self._stopping = threading.Event()
        self._loops = list(loops)
        self._threads = [
            threading.Thread(target=self._run, args=(loop,), name=loop.name, daemon=True) for loop in self._loops
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, seconds_max: float) -> bool:
        """Whether every loop ended in time."""
        self._stopping.set()
        for loop in self._loops:
            loop.wake.set()
        deadline = time.monotonic() + seconds_max
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, loop: Loop) -> None:
        failures, idle = 0, 0
        while not self._stopping.is_set():
            try:
                more = loop.step()
                failures, idle = 0, 0 if more else idle + 1
            except Exception as error:
                more, failures = False, failures + 1
                metrics.LOOP_FAILURES.labels(loop.name).inc()
                expected = isinstance(error, KeyfoldError)
                log.warning("step failed", loop=loop.name, error=str(error), exc_info=None if expected else error)
            if more or self._stopping.is_set():
                continue
            if failures:
                self._stopping.wait(_jittered(min(FAILURE_SECONDS_MAX, 0.1 * 2 ** min(failures, 10))))
            elif loop.wake.wait(_jittered(min(loop.idle_seconds_max, loop.idle_seconds * 2 ** min(idle - 1, 10)))):
                loop.wake.clear()
                idle = 0
                self._stopping.wait(LINGER_SECONDS)
        try:
            loop.stop()
        except Exception as error:
            log.warning("handing back failed", loop=loop.name, error=str(error))


def run_until_idle(loops: Sequence[Loop]) -> int:
    """Step every loop in turn until none has anything left to do, then hand back; returns how many rounds it took.

    A failure ends it: whoever asked for all the work wants to know that some of it could not be done.
    """
    rounds, quiet = 0, 0
    try:
        while quiet < 2:  # what the last loop of a round did may be work for the first
            rounds += 1
            busy = [loop.step() or loop.wake.is_set() for loop in loops]
            for loop in loops:
                loop.wake.clear()
            quiet = 0 if any(busy) else quiet + 1
    finally:
        for loop in loops:
            loop.stop()
    return rounds


def _jittered(longest: float) -> float:
    """Never in step with the others."""
    return random.uniform(longest / 2, longest)  # noqa: S311
