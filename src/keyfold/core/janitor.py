"""Whoever enforces the ages: purges what has outlived its window, in bounded steps, and measures what waits."""

from collections.abc import Callable
from functools import partial

import sqlalchemy as sa

from keyfold.core import metrics
from keyfold.core.clock import SECOND_US
from keyfold.core.context import Context
from keyfold.core.loops import Loop
from keyfold.core.store import Transaction
from keyfold.core.tables import ANSWERS, BATCH_TOKENS, DEAD_LETTERS, MEMBERS, MESSAGES, PROGRESS
from keyfold.core.topics.embedded import bounds, position_at

# A batch token answers one question, seconds after its COMMIT was lost.
BATCH_TOKEN_SECONDS = 3600


class Janitor:
    """Purging is idempotent, so several janitors may run at once."""

    def __init__(self, context: Context) -> None:
        self._store = context.store
        self._topics = context.topics
        self._rows_max = context.limits.purge_rows_max
        self._replay_us = context.settings.topics.replay_seconds * SECOND_US
        self._answers_us = context.settings.idempotency.keep_seconds * SECOND_US

    def loop(self) -> Loop:
        return Loop(name="janitor", step=self.step, idle_seconds=5.0, idle_seconds_max=5.0)

    def step(self) -> bool:
        self.measure()
        return self.purge() >= self._rows_max

    def purge(self) -> int:
        """One bounded step of everything that ages; returns the most rows removed from one table."""
        removed = [
            self._step(lambda tx: self._purge_older(tx, ANSWERS, self._answers_us)),
            self._step(lambda tx: self._purge_older(tx, BATCH_TOKENS, BATCH_TOKEN_SECONDS * SECOND_US)),
            self._step(_purge_members),
        ]
        for topic in self._topics.names:
            for partition in range(self._topics.partitions(topic)):
                removed.append(self._step(partial(self._purge_messages, topic=topic, partition=partition)))
        return max(removed)

    def _step(self, work: Callable[[Transaction], int]) -> int:
        return self._store.transact(work, name="purge")

    def measure(self) -> None:
        """Set the gauges of what waits."""

        def look(tx: Transaction) -> None:
            now_us = tx.now_us
            waiting = {row.topic: row for row in tx.execute(_WAITING)}
            for topic in self._topics.names:
                row = waiting.get(topic)
                metrics.OUTBOX_PENDING.labels(topic).set(row.pending if row else 0)
                metrics.OUTBOX_LAG_SECONDS.labels(topic).set((now_us - row.oldest_us) / SECOND_US if row else 0)
            for row in tx.execute(_SET_ASIDE):
                metrics.DEAD_LETTERS.labels(row.consumer, row.state).set(row.letters)
            if self._topics.embedded:
                positions = {(row.job, row.shard): row.position for row in tx.execute(sa.select(PROGRESS))}
                lags: dict[tuple[str, str], int] = {}
                for (job, shard), position in positions.items():
                    if job.startswith("consumer/"):
                        _, topic, name = job.split("/", 2)
                        behind = positions.get((f"relay/{topic}", shard), 0) - position
                        lags[name, topic] = lags.get((name, topic), 0) + max(0, behind)
                for (name, topic), lag in lags.items():
                    metrics.CONSUMER_LAG.labels(name, topic).set(lag)

        self._store.read(look)

    def _purge_older(self, tx: Transaction, table: sa.Table, age_us: int) -> int:
        """Oldest first, so a step that is cut short leaves a clean edge."""
        edge = (
            sa.select(table.c.stored_at_us)
            .where(table.c.stored_at_us < tx.now_us - age_us)
            .order_by(table.c.stored_at_us)
            .limit(1)
            .offset(self._rows_max - 1)
        )
        newest = tx.execute(edge).scalar()
        before = tx.now_us - age_us if newest is None else newest + 1
        return tx.execute(sa.delete(table).where(table.c.stored_at_us < before)).rowcount

    def _purge_messages(self, tx: Transaction, topic: str, partition: int) -> int:
        """Published messages beyond the replay window, but none that a consumer of this store has yet to read."""
        here = (MESSAGES.c.topic == topic, MESSAGES.c.partition == partition, MESSAGES.c.position.is_not(None))
        if not self._topics.embedded:
            old = sa.select(sa.func.min(MESSAGES.c.position)).where(
                *here, MESSAGES.c.published_at_us < tx.now_us - self._replay_us
            )
            first = tx.execute(old).scalar()
            if first is None:
                return 0
            aged = MESSAGES.c.published_at_us < tx.now_us - self._replay_us
            return tx.execute(
                sa.delete(MESSAGES).where(*here, aged, MESSAGES.c.position < first + self._rows_max)
            ).rowcount
        end = position_at(tx, topic, partition, tx.now_us - self._replay_us)
        slowest = tx.execute(
            sa.select(sa.func.min(PROGRESS.c.position)).where(
                PROGRESS.c.job.like(f"consumer/{topic}/%"), PROGRESS.c.shard == partition
            )
        ).scalar()
        end = end if slowest is None else min(end, slowest)
        first = bounds(tx, topic, partition).first
        end = min(end, first + self._rows_max)
        if end <= first:
            return 0
        return tx.execute(sa.delete(MESSAGES).where(*here, MESSAGES.c.position < end)).rowcount


def _purge_members(tx: Transaction) -> int:
    return tx.execute(sa.delete(MEMBERS).where(MEMBERS.c.expires_at_us < tx.now_us - 3600 * SECOND_US)).rowcount


_WAITING = (
    sa.select(
        MESSAGES.c.topic,
        sa.func.count().label("pending"),
        sa.func.min(MESSAGES.c.queued_at_us).label("oldest_us"),
    )
    .where(MESSAGES.c.position.is_(None))
    .group_by(MESSAGES.c.topic)
)
_SET_ASIDE = sa.select(DEAD_LETTERS.c.consumer, DEAD_LETTERS.c.state, sa.func.count().label("letters")).group_by(
    DEAD_LETTERS.c.consumer, DEAD_LETTERS.c.state
)
