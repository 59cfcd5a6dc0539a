"""Forgetting what feeds leave behind, in bounded steps; several may sweep at once."""

from collections.abc import Callable, Sequence

import sqlalchemy as sa

from keyfold.core.store import Store, Transaction
from keyfold.core.store.batch import relation
from keyfold.core.store.shapes import delete
from keyfold.listings.model import SHARDS
from keyfold.listings.service.feeds.tasks import FINISHED
from keyfold.listings.service.listings import DAY_US, Listings
from keyfold.listings.tables import FEED, FEED_ITEMS, FEED_PROBLEMS, FEED_TASKS

TASKS_MAX = 100  # that one step looks at


def forget(store: Store, listings: Listings, rows_max: int) -> bool:
    """One step of everything that ages; True where there may be more."""
    steps = (_give_up, _forget_items, _forget_tasks, _forget_removed)
    left = [_run(store, listings, rows_max, step) for step in steps]
    return any(left)


def _run(store: Store, listings: Listings, rows_max: int, step: Callable[[Transaction, Listings, int], bool]) -> bool:
    return store.transact(lambda tx: step(tx, listings, rows_max), name="feed sweep")


def _give_up(tx: Transaction, listings: Listings, rows_max: int) -> bool:
    """Feeds whose end, or whose approval, has not come for as long as a report is kept."""
    old = _tasks(tx, ("taking", "held"), tx.now_us - listings.settings.feed_days * DAY_US)
    for seller_id, task_id, version in old:
        tx.execute(
            sa.update(FEED_TASKS)
            .where(
                FEED_TASKS.c.seller_id == seller_id, FEED_TASKS.c.task_id == task_id, FEED_TASKS.c.version == version
            )
            .values(
                version=version + 1,
                stage="superseded",
                reason="it was given up: it waited too long",
                moved_at_us=tx.now_us,
            )
        )
    return len(old) == TASKS_MAX


def _forget_items(tx: Transaction, listings: Listings, rows_max: int) -> bool:
    """The staged items of tasks that are finished. Finished tasks take no items, so nothing comes after."""
    finished = tx.execute(
        sa.select(FEED_TASKS.c.seller_id, FEED_TASKS.c.task_id)
        .where(FEED_TASKS.c.is_staged == sa.literal_column("1"), FEED_TASKS.c.stage.in_(FINISHED))
        .limit(TASKS_MAX)
    ).all()
    left = rows_max
    for row in finished:
        seller_id, task_id = row.seller_id, row.task_id
        if not left:
            return True
        names = (
            tx.execute(
                sa.select(FEED_ITEMS.c.external_id)
                .where(FEED_ITEMS.c.seller_id == seller_id, FEED_ITEMS.c.task_id == task_id)
                .order_by(FEED_ITEMS.c.external_id)
                .limit(left)
            )
            .scalars()
            .all()
        )
        keys = {"seller_id": [seller_id] * len(names), "task_id": [task_id] * len(names), "external_id": names}
        delete(tx, FEED_ITEMS, keys)
        if len(names) < left:
            here = sa.and_(FEED_TASKS.c.seller_id == seller_id, FEED_TASKS.c.task_id == task_id)
            tx.execute(sa.update(FEED_TASKS).where(here).values(is_staged=0, version=FEED_TASKS.c.version + 1))
        left -= len(names)
    return not left or len(finished) == TASKS_MAX


def _forget_tasks(tx: Transaction, listings: Listings, rows_max: int) -> bool:
    """Reports of long ago: the problems first, and the task when it has none."""
    old = _tasks(tx, FINISHED, tx.now_us - listings.settings.feed_days * DAY_US)
    left = rows_max
    for seller_id, task_id, _ in old:
        if not left:
            return True
        places = (
            tx.execute(
                sa.select(FEED_PROBLEMS.c.place)
                .where(FEED_PROBLEMS.c.seller_id == seller_id, FEED_PROBLEMS.c.task_id == task_id)
                .order_by(FEED_PROBLEMS.c.place)
                .limit(left)
            )
            .scalars()
            .all()
        )
        delete(
            tx,
            FEED_PROBLEMS,
            {"seller_id": [seller_id] * len(places), "task_id": [task_id] * len(places), "place": places},
        )
        if len(places) < left:
            here = sa.and_(FEED_TASKS.c.seller_id == seller_id, FEED_TASKS.c.task_id == task_id)
            tx.execute(sa.delete(FEED_TASKS).where(here, FEED_TASKS.c.is_staged == sa.literal_column("0")))
        left -= len(places)
    return not left or len(old) == TASKS_MAX


def _forget_removed(tx: Transaction, listings: Listings, rows_max: int) -> bool:
    """Rows of offers that can no longer return. The time is asked again by the DELETE: a feed may just have returned
    one of them."""
    before_us = tx.now_us - listings.settings.return_days * DAY_US
    is_over = sa.and_(FEED.c.removed_at_us.is_not(None), FEED.c.removed_at_us < before_us)
    found = tx.execute(
        sa.select(FEED.c.seller_id, FEED.c.external_id).where(is_over).order_by(FEED.c.removed_at_us).limit(rows_max)
    ).all()
    if not found:
        return False
    keys = {"seller_id": [row.seller_id for row in found], "external_id": [row.external_id for row in found]}
    batch = relation(tx, FEED, keys)
    listed = sa.select(batch.c.seller_id, batch.c.external_id)
    tx.execute(sa.delete(FEED).where(is_over, sa.tuple_(FEED.c.seller_id, FEED.c.external_id).in_(listed)))
    return len(found) == rows_max


def _tasks(tx: Transaction, stages: Sequence[str], before_us: int) -> list[tuple[str, int, int]]:
    """Tasks that have stood in a stage for long; every shard is named, so that the index serves."""
    rows = tx.execute(
        sa.select(FEED_TASKS.c.seller_id, FEED_TASKS.c.task_id, FEED_TASKS.c.version)
        .where(
            FEED_TASKS.c.shard_id.in_(range(SHARDS)),
            FEED_TASKS.c.stage.in_(stages),
            FEED_TASKS.c.moved_at_us < before_us,
        )
        .limit(TASKS_MAX)
    )
    return [(row.seller_id, row.task_id, row.version) for row in rows]
