"""What a seller is told of a feed: the task, and its problems by page; what everybody is told: how many there are."""

import hashlib
from collections.abc import Sequence

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from keyfold.core.store import Transaction
from keyfold.core.store.batch import Columns
from keyfold.core.store.shapes import insert_new, load
from keyfold.listings import metrics
from keyfold.listings.model import SHARDS
from keyfold.listings.service.feeds import tasks
from keyfold.listings.service.feeds.items import REASON_MAX
from keyfold.listings.service.feeds.tasks import Counts, FeedShown, Task
from keyfold.listings.service.listings import Listings
from keyfold.listings.tables import FEED, FEED_PROBLEMS, FEED_TASKS

Problems = dict[str, tuple[str, str]]  # by place: external id, reason
PhotoError = tuple[str, str, str, str, str]  # seller, offer, external id, URL, error


class Problem(Struct, frozen=True):
    """One thing that was wrong. `place` is `item NUMBER`, counted from 0, or a photo."""

    place: str
    external_id: str
    reason: str


class FeedReport(Struct, frozen=True):
    """A task and a page of its problems; `next_after` asks for the page behind it."""

    feed: FeedShown
    problems: list[Problem]
    next_after: str | None


def place_of_item(number: int) -> str:
    """With its zeros, so that places are in the order of the items."""
    return f"item {number:09}"


def tell(tx: Transaction, listings: Listings, task: Task, problems: Problems) -> Counts:
    """Store problems of a task that is locked, as far as there is room; of one place the first is told."""
    room = listings.settings.feed_problems_max - task.counts.problems
    places = sorted(problems)
    told = places[: max(0, room)]
    new = _insert(tx, [(task.seller_id, task.task_id, place, *problems[place]) for place in told])
    return msgspec.structs.replace(
        task.counts, problems=task.counts.problems + new, untold=task.counts.untold + len(places) - len(told)
    )


def report(
    tx: Transaction, listings: Listings, seller_id: str, task_id: int, after: str = "", limit: int = 100
) -> FeedReport:
    """The task, and the problems behind `after`."""
    task = tasks.must_find(tx, seller_id, task_id)
    found = tx.execute(
        sa.select(FEED_PROBLEMS.c.place, FEED_PROBLEMS.c.external_id, FEED_PROBLEMS.c.reason)
        .where(
            FEED_PROBLEMS.c.seller_id == seller_id,
            FEED_PROBLEMS.c.task_id == task_id,
            FEED_PROBLEMS.c.place > after,
        )
        .order_by(FEED_PROBLEMS.c.place)
        .limit(limit + 1)
    ).all()
    page = [Problem(row.place, row.external_id, row.reason) for row in found[:limit]]
    return FeedReport(tasks.shown(task), page, page[-1].place if len(found) > limit else None)


def tell_photo_errors(tx: Transaction, listings: Listings, errors: Sequence[PhotoError]) -> None:
    """Put errors of photos into the report of the task that last had the offer, each once.

    Tasks are not locked for this: photos fail by the thousand, long after their task was done. So several consumers
    may tell some problems more than there is room for.
    """
    keys = sorted({(seller, external_id) for seller, _, external_id, _, _ in errors if external_id})
    rows = load(
        tx, FEED, {"seller_id": [key[0] for key in keys], "external_id": [key[1] for key in keys]}, ("task_id",)
    )
    at = {key: row[0] for key, row in rows.items()}
    room = _room(tx, listings, sorted({(seller, task_id) for (seller, _), task_id in at.items()}))
    told: dict[tuple[str, int, str], tuple[str, int, str, str, str]] = {}
    for seller, offer_id, external_id, url, error in errors:
        key = (seller, at.get((seller, external_id), 0))
        place = f"photo {offer_id} {hashlib.sha256(url.encode()).hexdigest()[:16]}"
        if room.get(key, 0) > 0 and (*key, place) not in told:
            room[key] -= 1
            reason = f"the photo {url}: {error}".replace("\0", "\\0")[:REASON_MAX]
            told[*key, place] = (*key, place, external_id, reason)
    _insert(tx, list(told.values()))


def _room(tx: Transaction, listings: Listings, keys: Sequence[tuple[str, int]]) -> dict[tuple[str, int], int]:
    """How many problems each of the tasks that are still known has room for."""
    columns: Columns = {"seller_id": [key[0] for key in keys], "task_id": [key[1] for key in keys]}
    there = load(tx, FEED_TASKS, columns, ())
    told: dict[tuple[str, int], int] = {}
    if there:
        counted = (
            sa.select(FEED_PROBLEMS.c.seller_id, FEED_PROBLEMS.c.task_id, sa.func.count().label("told"))
            .where(sa.tuple_(FEED_PROBLEMS.c.seller_id, FEED_PROBLEMS.c.task_id).in_(sorted(there)))
            .group_by(FEED_PROBLEMS.c.seller_id, FEED_PROBLEMS.c.task_id)
        )
        told = {(row.seller_id, row.task_id): row.told for row in tx.execute(counted)}
    most = listings.settings.feed_problems_max
    return {(seller, task_id): most - told.get((seller, task_id), 0) for seller, task_id in there}


def figures(tx: Transaction) -> dict[str, int]:
    """How many feeds there are in each stage that is not the last; the gauge says the same."""
    counted = (
        sa.select(FEED_TASKS.c.stage, sa.func.count().label("feeds"))
        .where(FEED_TASKS.c.shard_id.in_(range(SHARDS)), FEED_TASKS.c.stage.in_(tasks.UNFINISHED))
        .group_by(FEED_TASKS.c.stage)
    )
    found: dict[str, int] = dict.fromkeys(tasks.UNFINISHED, 0)
    found.update({row.stage: row.feeds for row in tx.execute(counted)})
    for stage, count in found.items():
        metrics.FEEDS.labels(stage).set(count)
    return found


def _insert(tx: Transaction, rows: Sequence[tuple[str, int, str, str, str]]) -> int:
    names = ("seller_id", "task_id", "place", "external_id", "reason")
    return len(insert_new(tx, FEED_PROBLEMS, {name: [row[at] for row in rows] for at, name in enumerate(names)}))
