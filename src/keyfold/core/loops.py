"""Loops of a worker: each a step that is called again and again in a thread, backing off when idle or failing."""

import random
import threading
import time
from collections.abc import Callable, Sequence

import structlog
from msgspec import Struct

from keyfold.core import metrics
from keyfold.core.errors import KeyfoldError

log = structlog.get_logger(__name__)

FAILURE_SECONDS_MAX = 10.0


class Loop(Struct, frozen=True, kw_only=True):
    """`step` does a bounded piece of work and says whether there may be more; `stop` hands back what it holds."""

    name: str
    step: Callable[[], bool]
    idle_seconds: float = 0.2
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
        deadline = time.monotonic() + seconds_max
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, loop: Loop) -> None:
        failures = 0
        while not self._stopping.is_set():
            try:
                more = loop.step()
                failures = 0
            except Exception as error:
                failures += 1
                metrics.LOOP_FAILURES.labels(loop.name).inc()
                expected = isinstance(error, KeyfoldError)
                log.warning("step failed", loop=loop.name, error=str(error), exc_info=None if expected else error)
                more = False
            if not more:
                longest = loop.idle_seconds if not failures else min(FAILURE_SECONDS_MAX, 0.1 * 2**failures)
                self._stopping.wait(random.uniform(longest / 2, longest))  # noqa: S311
        try:
            loop.stop()
        except Exception as error:
            log.warning("handing back failed", loop=loop.name, error=str(error))
