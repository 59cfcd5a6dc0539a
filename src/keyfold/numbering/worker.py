"""The loops of numbering: the consumer of exported offers, and what is measured and forgotten."""

import time

from keyfold.core.consumer import Consumer
from keyfold.core.context import Context
from keyfold.core.loops import Loop
from keyfold.numbering.service import building
from keyfold.numbering.settings import NumberingSettings

REST_SECONDS = 600.0


def consumers(context: Context) -> list[Consumer]:
    topic = context.settings.section("numbering", NumberingSettings).offers_topic
    if not topic:
        return []
    # The newest version wins, whatever the order.
    return [Consumer(name="numbering-offers", topic=topic, apply=building.take_offers, ordered=False, replayable=True)]


def loops(context: Context) -> list[Loop]:
    if not context.settings.section("numbering", NumberingSettings).offers_topic:
        return []
    return [Loop(name="numbering upkeep", step=Upkeep(context).step, idle_seconds=5.0, idle_seconds_max=60.0)]


class Upkeep:
    """Forgets offers that are gone, a bounded number at a time."""

    def __init__(self, context: Context) -> None:
        self._store = context.store
        self._rows_max = context.limits.purge_rows_max
        self._at = 0.0

    def step(self) -> bool:
        if time.monotonic() < self._at:
            return False
        forgotten = self._store.transact(lambda tx: building.forget_dead(tx, self._rows_max), name="numbering offers")
        if forgotten < self._rows_max:
            self._at = time.monotonic() + REST_SECONDS
        return forgotten > 0
