"""The tasks of feeds, one row each: whoever changes anything of a task locks its row first.

The end of a task first takes the row of the seller, so that the ends of one seller come one after the other; it then
marks the older tasks. A step of an older task that is under way commits before that, or finds itself superseded.
"""

from typing import Literal

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from keyfold.core import audit
from keyfold.core.errors import Conflict, NotFound
from keyfold.core.store import Transaction
from keyfold.core.store.batch import Columns
from keyfold.core.store.shapes import compare_and_set, load, locking_load, update
from keyfold.listings.model import FeedPlan, is_task_new, shard_of
from keyfold.listings.service import saving
from keyfold.listings.service.listings import Listings
from keyfold.listings.tables import FEED_TASKS, SELLERS

Stage = Literal["taking", "ended", "held", "applying", "removing", "done", "superseded"]
AT_WORK: tuple[Stage, ...] = ("ended", "applying", "removing")  # what a step goes on with
UNFINISHED: tuple[Stage, ...] = ("taking", "held", *AT_WORK)
FINISHED: tuple[Stage, ...] = ("done", "superseded")
ENDED = "listings/ended"  # rung for the scheduler when there is something to apply


class Taken(Struct, frozen=True):
    """What was seen when the items were taken in."""

    invalid: int = 0
    unreadable: int = 0  # of these not even the external id is known
    repeated: int = 0


class Done(Struct, frozen=True):
    """What a task has done so far."""

    created: int = 0
    updated: int = 0
    unchanged: int = 0
    returned: int = 0
    kept: int = 0  # invalid items whose offers stay as they are
    sold: int = 0  # items whose offers were sold and archived
    ignored: int = 0
    removed: int = 0


class Counts(Struct, frozen=True, omit_defaults=True):
    """The column `counts`."""

    taken: Taken = Taken()
    problems: int = 0  # stored in FEED_PROBLEMS
    untold: int = 0  # problems for which there was no room
    has_ended: bool = False
    approved_by: str = ""
    plan: FeedPlan | None = None
    done: Done = Done()


class Task(Struct, frozen=True, kw_only=True):
    """A row of FEED_TASKS."""

    seller_id: str
    task_id: int
    version: int
    stage: Stage
    is_staged: bool
    position: int
    counts: Counts
    upto: str
    reason: str
    begun_at_us: int
    moved_at_us: int


class FeedShown(Struct, frozen=True):
    """A task as its seller sees it. `position` is how many items were taken: where a cut feed goes on."""

    seller_id: str
    task_id: int
    stage: Stage
    reason: str  # why it is held or superseded
    position: int
    has_ended: bool
    taken: Taken
    plan: FeedPlan | None
    done: Done
    approved_by: str
    problems_untold: int
    begun_at_us: int
    moved_at_us: int


_WANTED = ("version", "stage", "is_staged", "position", "counts", "upto", "reason", "begun_at_us", "moved_at_us")
_read_counts = msgspec.json.Decoder(Counts).decode


def shown(task: Task) -> FeedShown:
    counts = task.counts
    return FeedShown(
        seller_id=task.seller_id,
        task_id=task.task_id,
        stage=task.stage,
        reason=task.reason,
        position=task.position,
        has_ended=counts.has_ended,
        taken=counts.taken,
        plan=counts.plan,
        done=counts.done,
        approved_by=counts.approved_by,
        problems_untold=counts.untold,
        begun_at_us=task.begun_at_us,
        moved_at_us=task.moved_at_us,
    )


def find(tx: Transaction, seller_id: str, task_id: int) -> Task | None:
    rows = load(tx, FEED_TASKS, {"seller_id": [seller_id], "task_id": [task_id]}, _WANTED)
    return _task((seller_id, task_id), rows.get((seller_id, task_id)))


def must_find(tx: Transaction, seller_id: str, task_id: int) -> Task:
    task = find(tx, seller_id, task_id)
    if task is None:
        raise NotFound(f"the seller {seller_id!r} has no feed {task_id}")
    return task


def newest(tx: Transaction, seller_id: str, count_max: int) -> list[FeedShown]:
    """The newest tasks of a seller."""
    chosen = sa.select(FEED_TASKS.c.task_id).where(FEED_TASKS.c.seller_id == seller_id)
    ids = list(tx.execute(chosen.order_by(FEED_TASKS.c.task_id.desc()).limit(count_max)).scalars())
    found = (find(tx, seller_id, task_id) for task_id in ids)
    return [shown(task) for task in found if task is not None]


def lock(tx: Transaction, seller_id: str, task_id: int) -> Task | None:
    """The task as it is now; nobody else changes it until this transaction ends."""
    rows = locking_load(tx, FEED_TASKS, {"seller_id": [seller_id], "task_id": [task_id]}, _WANTED)
    return _task((seller_id, task_id), rows.get((seller_id, task_id)))


def must_have_room(tx: Transaction, listings: Listings, seller_id: str) -> None:
    """Refuse yet another feed beside those that were begun and never ended."""
    begun = sa.select(sa.func.count()).where(FEED_TASKS.c.seller_id == seller_id, FEED_TASKS.c.stage == "taking")
    if tx.execute(begun).scalar_one() >= listings.settings.feed_tasks_max:
        raise Conflict(
            f"{listings.settings.feed_tasks_max} feeds of {seller_id!r} were begun and have no end",
            hint="End one of them: those before it are superseded",
        )


def begin(tx: Transaction, seller_id: str, task_id: int) -> Task:
    """A new task; of two who begin it at once one runs again."""
    task = Task(
        seller_id=seller_id,
        task_id=task_id,
        version=1,
        stage="taking",
        is_staged=False,
        position=0,
        counts=Counts(),
        upto="",
        reason="",
        begun_at_us=tx.now_us,
        moved_at_us=tx.now_us,
    )
    columns: Columns = {
        **_columns(task),
        "version": [0],
        "shard_id": [shard_of(seller_id)],
        "begun_at_us": [task.begun_at_us],
    }
    compare_and_set(tx, FEED_TASKS, columns)
    return task


def save(tx: Transaction, task: Task) -> Task:
    """Store a task that this transaction has locked."""
    task = msgspec.structs.replace(task, moved_at_us=tx.now_us)
    update(tx, FEED_TASKS, _columns(task))
    return task


def ended_task_id(tx: Transaction, seller_id: str) -> int | None:
    """The newest task of a seller whose end has come."""
    rows = load(tx, SELLERS, {"seller_id": [seller_id]}, ("ended_task_id",))
    return rows[seller_id,][0] if rows else None


def must_be_new(task_id: int, ended: int | None) -> None:
    if not is_task_new(task_id, ended):
        raise Conflict(
            f"feed {ended} of this seller has ended, so feed {task_id} changes nothing",
            hint="Send a feed with a greater task id",
        )


def end_task(tx: Transaction, listings: Listings, seller_id: str, task_id: int, items: int) -> FeedShown:
    """The end has come: of `items` items, all of which must have been taken. Older tasks are superseded."""
    ended = lock_seller(tx, seller_id)
    task = lock(tx, seller_id, task_id)
    if task is None or not task.counts.has_ended:
        must_be_new(task_id, ended)
    position = task.position if task is not None else 0
    if items != position:
        raise Conflict(
            f"{position} items were taken, {items} were sent: the feed was cut",
            hint=f"Send the items from {position} on, then the end" if items > position else None,
        )
    if task is not None and task.counts.has_ended:
        return shown(task)
    if task is not None and task.stage != "taking":
        # Its items may be gone already: applied, it would remove every offer.
        raise Conflict(f"feed {task_id} has no end any more, it is {task.stage}", hint=task.reason or None)
    task = task or begin(tx, seller_id, task_id)
    counts = msgspec.structs.replace(task.counts, has_ended=True)
    tx.execute(sa.update(SELLERS).where(SELLERS.c.seller_id == seller_id).values(ended_task_id=task_id))
    supersede(tx, seller_id, f"feed {task_id} has ended", before=task_id)
    tx.after_commit.append(lambda: listings.topics.ring(ENDED))
    return shown(save(tx, msgspec.structs.replace(task, stage="ended", counts=counts)))


def approve(tx: Transaction, listings: Listings, seller_id: str, task_id: int, actor: str) -> FeedShown:
    """Let a task go on that is held; a repeat answers as the first."""
    task = lock(tx, seller_id, task_id)
    if task is None:
        raise NotFound(f"the seller {seller_id!r} has no feed {task_id}")
    if task.stage != "held":
        if task.counts.approved_by and task.stage != "superseded":
            return shown(task)
        raise Conflict(f"feed {task_id} is not held, it is {task.stage}", hint=task.reason or None)
    audit.record(tx, actor, "feed approved", f"{seller_id} {task_id}: {task.reason}")
    counts = msgspec.structs.replace(task.counts, approved_by=actor)
    return shown(save(tx, msgspec.structs.replace(task, stage="applying", reason="", counts=counts)))


def lock_seller(tx: Transaction, seller_id: str) -> int | None:
    """The newest task of a seller whose end has come; no other comes to its end until this transaction ends."""
    saving.store_sellers(tx, [seller_id])
    there = SELLERS.c.seller_id == seller_id
    locked = sa.update(SELLERS).where(there).values(ended_task_id=SELLERS.c.ended_task_id)
    ended: int | None = tx.execute(locked.returning(SELLERS.c.ended_task_id)).scalar_one()
    return ended


def supersede(tx: Transaction, seller_id: str, reason: str, before: int | None = None) -> int:
    """Give up the unfinished tasks of a seller, or those before another; returns how many."""
    older = [FEED_TASKS.c.task_id < before] if before is not None else []
    chosen = (FEED_TASKS.c.seller_id == seller_id, FEED_TASKS.c.stage.in_(UNFINISHED), *older)
    changes = {"stage": "superseded", "reason": reason, "moved_at_us": tx.now_us}
    return tx.execute(sa.update(FEED_TASKS).where(*chosen).values(version=FEED_TASKS.c.version + 1, **changes)).rowcount


def _task(key: tuple[str, int], row: tuple[object, ...] | None) -> Task | None:
    if row is None:
        return None
    given = dict(zip(_WANTED, row, strict=True))
    given["is_staged"] = bool(given["is_staged"])
    given["counts"] = _read_counts(str(given["counts"]))
    return Task(seller_id=key[0], task_id=key[1], **given)  # type: ignore[arg-type]


def _columns(task: Task) -> Columns:
    return {
        "seller_id": [task.seller_id],
        "task_id": [task.task_id],
        "stage": [task.stage],
        "is_staged": [int(task.is_staged)],
        "position": [task.position],
        "counts": [msgspec.json.encode(task.counts).decode()],
        "upto": [task.upto],
        "reason": [task.reason],
        "moved_at_us": [task.moved_at_us],
    }
