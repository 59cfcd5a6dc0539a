"""The loops of segments: diffs side by side, evaluations, and what is measured and cleaned up."""

import time
from collections.abc import Iterator
from functools import partial

from keyfold.core.context import Context
from keyfold.core.loops import Loop
from keyfold.core.workers import worker_name
from keyfold.segments import metrics
from keyfold.segments.service import queueing
from keyfold.segments.service.evaluating import Evaluator
from keyfold.segments.service.snapshots import GRACE_SECONDS, Snapshots
from keyfold.segments.service.ticking import Differ
from keyfold.segments.service.uploading import forget_finished
from keyfold.segments.settings import SegmentsSettings

STEP_SECONDS = 1.0


def loops(context: Context) -> list[Loop]:
    settings = context.settings.section("segments", SegmentsSettings)
    worker = worker_name()
    differs = [DiffLoop(context, settings, f"{worker}-{number}") for number in range(settings.workers)]
    evaluator, upkeep = Evaluator(context, settings), Upkeep(context, settings)
    return [
        *(
            Loop(
                name=f"segments diff {number}",
                step=differ.step,
                stop=differ.stop,
                idle_seconds=0.2,
                idle_seconds_max=2.0,
            )
            for number, differ in enumerate(differs, 1)
        ),
        Loop(name="segments evaluate", step=partial(evaluator.step, worker), idle_seconds=0.5, idle_seconds_max=5.0),
        Loop(name="segments upkeep", step=upkeep.step, idle_seconds=5.0, idle_seconds_max=30.0),
    ]


class DiffLoop:
    """Runs one tick after the other, a second at a time, so that it can be stopped between."""

    def __init__(self, context: Context, settings: SegmentsSettings, holder: str) -> None:
        self._differ = Differ(context, settings)
        self._holder = holder
        self._tick: Iterator[None] | None = None

    def step(self) -> bool:
        """Whether there was anything to do."""
        if self._tick is None:
            self._tick = self._differ.next(self._holder)
            if self._tick is None:
                return False
        tick, deadline = self._tick, time.monotonic() + STEP_SECONDS
        self._tick = None  # a tick that fails is over; another try begins anew
        for _ in tick:
            if time.monotonic() >= deadline:
                self._tick = tick
                return True
        return True

    def stop(self) -> None:
        """Hand back what is held; whoever takes it goes on where this one was."""
        tick, self._tick = self._tick, None
        if tick is not None:
            tick.close()  # type: ignore[attr-defined]


class Upkeep:
    """Measures the queue, and deletes snapshots and uploads that nobody needs."""

    def __init__(self, context: Context, settings: SegmentsSettings) -> None:
        self._store = context.store
        self._settings = settings
        self._snapshots = Snapshots.of(context, settings)
        self._rows_max = context.limits.purge_rows_max
        self._collect_at = 0.0

    def step(self) -> bool:
        figures = self._store.read(lambda tx: queueing.figures(tx, self._settings.stuck_seconds))
        for each in figures.stages:
            metrics.STAGES.labels(each.stage).set(each.segments)
            metrics.OLDEST_SECONDS.labels(each.stage).set(each.oldest_seconds)
        metrics.STUCK.set(len(figures.stuck))
        if time.monotonic() >= self._collect_at:
            self._collect_at = time.monotonic() + 60
            self._snapshots.collect(self._store, GRACE_SECONDS, self._settings.upload_hours * 3600)
            self._store.transact(lambda tx: forget_finished(tx, self._rows_max), name="segment uploads")
        return False
