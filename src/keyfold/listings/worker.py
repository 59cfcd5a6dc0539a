"""The scheduler: what is due, presets, counts and feeds by shards of sellers, and the consumers of its topics.

The export itself is the relay of the topic (keyfold.core.relay), which every worker runs.
"""

import time
from collections.abc import Callable
from functools import partial

import structlog

from keyfold.core import progress
from keyfold.core.consumer import Consumer
from keyfold.core.context import Context
from keyfold.core.errors import LeaseLost
from keyfold.core.leases.lease import Lease
from keyfold.core.loops import Loop
from keyfold.core.shards import Shards
from keyfold.core.store import Transaction
from keyfold.core.workers import worker_name
from keyfold.listings import metrics
from keyfold.listings.model import SHARDS
from keyfold.listings.service import keeping, walking
from keyfold.listings.service.feeds import applying, reporting, sweeping
from keyfold.listings.service.feeds.tasks import ENDED
from keyfold.listings.service.listings import Listings
from keyfold.listings.service.walking import Guard, Patience, Scrubber

log = structlog.get_logger(__name__)

JOB = "listings"
MEASURE_SECONDS = 10.0


def consumers(context: Context) -> list[Consumer]:
    listings = Listings.opened(context)
    # Both apply by version or change nothing when they come again, whatever the order.
    return [
        Consumer(
            name="listings-opinions",
            topic=listings.settings.opinions_topic,
            apply=keeping.take_opinions(listings),
            ordered=False,
            replayable=True,
        ),
        Consumer(
            name="listings-photos",
            topic=listings.settings.photo_answers_topic,
            apply=keeping.take_answers(listings),
            ordered=False,
            replayable=True,
        ),
    ]


def loops(context: Context) -> list[Loop]:
    patience = Patience(context.limits.transaction_seconds_max + 1)
    scheduler = Scheduler(context, Listings.opened(context), worker_name(), patience)
    return [
        Loop(
            name="listings scheduler",
            step=scheduler.step,
            stop=scheduler.stop,
            idle_seconds=0.2,
            idle_seconds_max=2.0,
            wake=context.topics.listen(ENDED),
        )
    ]


class Scheduler:
    """One worker's share of the shards; whoever dies leaves its shards to the others."""

    def __init__(self, context: Context, listings: Listings, worker: str, patience: Patience | None = None) -> None:
        self._store = context.store
        self._listings = listings
        self._rows_max = context.limits.purge_rows_max
        self._shards = Shards(context.leases, JOB, SHARDS, worker, context.settings.leases.lease_seconds)
        scrubber = Scrubber(context.store, listings)
        self._work: list[Callable[[int, Guard], bool]] = [
            lambda shard, guard: walking.age(self._store, self._listings, shard, guard),
            lambda shard, guard: applying.step(self._store, self._listings, shard, guard),
            lambda shard, guard: walking.build(self._store, self._listings, shard, guard, patience),
            scrubber.step,
        ]
        self._measure_at = 0.0
        self._is_sweeping = False

    def step(self) -> bool:
        """One piece of each kind of work in every shard held; what fails stops nothing else."""
        more = False
        failure: Exception | None = None
        with self._shards.at_work():
            for shard_id in list(self._shards.held):
                lease = self._shards.tick().get(shard_id)
                if lease is None:
                    continue  # handed back, or lost, while the shards before it had their turn
                try:
                    more |= self._work_on(shard_id, lease)
                except Exception as error:
                    failure = error
        if self._is_sweeping or time.monotonic() >= self._measure_at:
            self._is_sweeping = self._sweep()
            more |= self._is_sweeping
        if time.monotonic() >= self._measure_at:
            self._measure_at = time.monotonic() + MEASURE_SECONDS
            self._measure()
        if failure is not None:
            raise failure
        return more

    def _work_on(self, shard_id: int, lease: Lease) -> bool:
        guard = partial(_must_hold, shard_id, lease.ticket)
        more = False
        failure: Exception | None = None
        for work in self._work:
            try:
                more |= work(shard_id, guard)
            except LeaseLost as error:
                log.warning("shard lost", job=JOB, shard=shard_id, error=str(error))
                break
            except Exception as error:
                failure = error
        if failure is not None:
            raise failure
        return more

    def stop(self) -> None:
        self._shards.release_all()

    def _measure(self) -> None:
        metrics.OVERDUE.set(self._store.read(walking.overdue_seconds))
        self._store.read(reporting.figures)

    def _sweep(self) -> bool:
        """Forget some of what is old; whether there may be more, which waits for the next step."""
        drafts = walking.forget(self._store, self._listings, self._rows_max)
        return sweeping.forget(self._store, self._listings, self._rows_max) or drafts


def _must_hold(shard_id: int, ticket: int, tx: Transaction) -> None:
    """Refuses a worker that was overtaken while it slept; holds off whoever would overtake it now."""
    progress.adopt(tx, JOB, shard_id, ticket, JOB)
    progress.advance(tx, JOB, shard_id, ticket, 0, 0)
