"""How many completed orders wait in the topic of a unit: part of what a count rests on."""

import threading
import time

import structlog

from keyfold.core import progress
from keyfold.core.consumer import consumer_job
from keyfold.core.context import Context
from keyfold.core.topics.topic import Source
from keyfold.orders.service.unit import Unit

log = structlog.get_logger(__name__)

KNOWN_SECONDS_MAX = 1.0


def consumer_name(unit: str) -> str:
    return f"orders-{unit}"


class Lag:
    """Looked up at most once a second; None where the topic does not answer."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._guard = threading.Lock()
        self._sources: dict[str, Source] = {}
        self._known: dict[str, tuple[float, int | None]] = {}

    def messages(self, unit: Unit) -> int | None:
        with self._guard:
            looked_at, known = self._known.get(unit.topic, (float("-inf"), None))
            if time.monotonic() - looked_at > KNOWN_SECONDS_MAX:
                known = self._look(unit)
                self._known[unit.topic] = (time.monotonic(), known)
            return known

    def _look(self, unit: Unit) -> int | None:
        try:
            source = self._sources.get(unit.topic) or self._context.topics.source(unit.topic)
            self._sources[unit.topic] = source
            job = consumer_job(consumer_name(unit.name), unit.topic)
            stored = self._context.store.read(lambda tx: progress.positions(tx, job))
            waiting = 0
            for partition in range(source.partitions):
                bounds = source.bounds(partition)
                at = stored[partition].position if partition in stored else bounds.first
                waiting += max(0, bounds.next - at)
            return waiting
        except Exception as error:
            log.warning("the lag of completed orders is not known", unit=unit.name, error=str(error))
            return None
