"""Doing what a feed says, in bounded steps, each of them one transaction.

A step locks the row of its task, which holds how far it has come; a process that dies between two steps, or within
one, leaves a task that the next step goes on with.
"""

from collections.abc import Callable, Sequence

import msgspec
import sqlalchemy as sa
import structlog

from keyfold.core.errors import BadInput, LeaseLost
from keyfold.core.store import Store, Transaction
from keyfold.core.store.batch import Columns
from keyfold.core.store.shapes import increment, load, update
from keyfold.listings.model import (
    Decided,
    FeedPlan,
    FeedRow,
    Item,
    Offer,
    decide_item,
    is_meaningful,
    removed_by_feed,
    why_held,
)
from keyfold.listings.service import saving
from keyfold.listings.service.feeds import planning, reporting, tasks
from keyfold.listings.service.feeds.items import REASON_MAX
from keyfold.listings.service.feeds.reporting import Problems, place_of_item
from keyfold.listings.service.feeds.tasks import AT_WORK, Done, Task
from keyfold.listings.service.listings import DAY_US, Listings
from keyfold.listings.service.saving import Change, Saved
from keyfold.listings.tables import FEED, FEED_ITEMS, FEED_TASKS

log = structlog.get_logger(__name__)

Guard = Callable[[Transaction], None]  # refuses where another scheduler has the shard by now

STEP_ITEMS = 500
STEP_REMOVALS = 1_000

_decode_offer = msgspec.json.Decoder(Offer).decode


def step(store: Store, listings: Listings, shard_id: int, guard: Guard) -> bool:
    """Do one piece of work for the task of this shard that has waited longest; False where there is none."""
    found = store.read(lambda tx: _longest_waiting(tx, shard_id))
    if found is None:
        return False
    plan: FeedPlan | None = None

    def work(tx: Transaction) -> None:
        guard(tx)
        task = _locked(tx, found)
        if task is None:
            return
        if plan is not None:
            task = _planned(listings, task, plan) if task.version == found.version + 1 else task
        elif task.stage == "applying":
            task = _applied(tx, listings, task)
        elif task.stage == "removing":
            task = _removed(tx, listings, task)
        tasks.save(tx, task)

    # One seller's feed must not stand in the way of the others of its shard.
    try:
        if found.stage == "ended":
            # This may take a while; nothing is locked meanwhile, and the plan of a task that has changed is dropped.
            plan = store.snapshot(lambda tx: planning.plan_of(tx, found))
        store.transact(work, name="feed step")
    except LeaseLost:
        raise
    except BadInput as error:
        log.error("a feed could not be applied", seller=found.seller_id, task=found.task_id, exc_info=error)
        why = f"it could not be applied: {error}"[:REASON_MAX]
        store.transact(lambda tx: _set_aside(tx, found, guard, why), name="feed set aside")
    except Exception:
        store.transact(lambda tx: _put_behind(tx, found, guard), name="feed put behind")
        raise
    return True


def _longest_waiting(tx: Transaction, shard_id: int) -> Task | None:
    """Every step moves its task to the end of the queue, so that a large feed does not keep small ones waiting."""
    row = tx.execute(
        sa.select(FEED_TASKS.c.seller_id, FEED_TASKS.c.task_id)
        .where(FEED_TASKS.c.shard_id == shard_id, FEED_TASKS.c.stage.in_(AT_WORK))
        .order_by(FEED_TASKS.c.moved_at_us, FEED_TASKS.c.seller_id, FEED_TASKS.c.task_id)
        .limit(1)
    ).one_or_none()
    return tasks.find(tx, row.seller_id, row.task_id) if row is not None else None


def _locked(tx: Transaction, found: Task) -> Task | None:
    """The task, locked, if there is still something to do for it."""
    task = tasks.lock(tx, found.seller_id, found.task_id)
    if task is None or task.stage not in AT_WORK:
        return None
    newest = tasks.ended_task_id(tx, task.seller_id)
    if newest is not None and newest > task.task_id:
        tasks.save(tx, msgspec.structs.replace(task, stage="superseded", reason=f"feed {newest} has ended"))
        return None
    return task


def _set_aside(tx: Transaction, found: Task, guard: Guard, why: str) -> None:
    guard(tx)
    task = _locked(tx, found)
    if task is not None:
        tasks.save(tx, msgspec.structs.replace(task, stage="held", reason=why.replace("\0", "\\0")))


def _put_behind(tx: Transaction, found: Task, guard: Guard) -> None:
    """What failed for now is tried again when the others had their turn."""
    guard(tx)
    task = _locked(tx, found)
    if task is not None:
        tasks.save(tx, task)


def _planned(listings: Listings, task: Task, plan: FeedPlan) -> Task:
    why = why_held(plan, listings.settings.feed_delete_share_max)
    counts = msgspec.structs.replace(task.counts, plan=plan)
    return msgspec.structs.replace(task, stage="held" if why else "applying", reason=why, counts=counts)


# Items ---------------------------------------------------------------------------------------------------------------


def _applied(tx: Transaction, listings: Listings, task: Task) -> Task:
    """The next items of a task, in the order of their external ids."""
    items = _next_items(tx, task)
    if not items:
        return msgspec.structs.replace(task, stage="removing")
    rows = _feed_rows(tx, task, items)
    keys = [(task.seller_id, rows[name].offer_id if name in rows else "") for name, _, _ in items]
    # What is stored counts, too: an item of a few bytes may meet an offer of 100 KB.
    keys = list(saving.fitting(tx, keys, beside=[len(body) for _, _, body in items]))
    items = items[: len(keys)]
    names = [external_id for external_id, _, _ in items]
    offers = saving.load_offers(tx, [key for key in keys if key[1]])
    since_us = tx.now_us - listings.settings.return_days * DAY_US
    there: list[Saved | None] = []
    decided: list[Decided] = []
    for external_id, _, body in items:
        row = rows.get(external_id)
        there.append(offers.get((task.seller_id, row.offer_id)) if row is not None else None)
        offer = there[-1].offer if there[-1] is not None else None
        item = Item(external_id=external_id, offer=_decode_offer(body) if body else None)
        decided.append(decide_item(item, task.task_id, row=row, there=offer, returns_since_us=since_us))
    saved = _saved(tx, listings, there, decided)
    kept = [at for at, each in enumerate(decided) if each.is_in_feed]
    feed: Columns = {
        "seller_id": [task.seller_id] * len(kept),
        "external_id": [names[at] for at in kept],
        "offer_id": [saved[at] for at in kept],
        "task_id": [task.task_id] * len(kept),
        "removed_at_us": [None] * len(kept),
    }
    increment(tx, FEED, feed, latest=("offer_id", "task_id", "removed_at_us"))
    problems: Problems = {
        place_of_item(number): (external_id, each.why)
        for (external_id, number, body), each in zip(items, decided, strict=True)
        if each.why and body  # what is wrong with an invalid item was told when it was taken
    }
    counts = msgspec.structs.replace(
        reporting.tell(tx, listings, task, problems), done=_counted(task.counts.done, there, decided)
    )
    return msgspec.structs.replace(task, upto=names[-1], counts=counts)


def _feed_rows(tx: Transaction, task: Task, items: Sequence[tuple[str, int, str]]) -> dict[str, FeedRow]:
    """Which offers the items meet, by external id."""
    keys: Columns = {"seller_id": [task.seller_id] * len(items), "external_id": [name for name, _, _ in items]}
    found = load(tx, FEED, keys, ("offer_id", "task_id"))
    return {external_id: FeedRow(*row) for (_, external_id), row in found.items()}


def _next_items(tx: Transaction, task: Task) -> list[tuple[str, int, str]]:
    """External id, number and body of so many items as a transaction may hold."""
    size = sa.func.length(FEED_ITEMS.c.body) if tx.is_sqlite else sa.func.octet_length(FEED_ITEMS.c.body)
    here = sa.and_(
        FEED_ITEMS.c.seller_id == task.seller_id,
        FEED_ITEMS.c.task_id == task.task_id,
        FEED_ITEMS.c.external_id > task.upto,
    )
    sizes = tx.execute(
        sa.select(FEED_ITEMS.c.external_id, size.label("size"))
        .where(here)
        .order_by(FEED_ITEMS.c.external_id)
        .limit(STEP_ITEMS)
    ).all()
    if not sizes:
        return []
    last, total = sizes[0].external_id, sizes[0].size
    for row in sizes[1:]:
        total += row.size
        if total > saving.STEP_BYTES_MAX:
            break
        last = row.external_id
    rows = tx.execute(
        sa.select(FEED_ITEMS.c.external_id, FEED_ITEMS.c.number, FEED_ITEMS.c.body)
        .where(here, FEED_ITEMS.c.external_id <= last)
        .order_by(FEED_ITEMS.c.external_id)
    )
    return [(row.external_id, row.number, row.body) for row in rows]


def _saved(tx: Transaction, listings: Listings, there: Sequence[Saved | None], decided: Sequence[Decided]) -> list[str]:
    """Save what is to be, and say which offer each item has now."""
    ids = [each.offer.offer_id if each is not None else "" for each in there]
    at = [index for index, each in enumerate(decided) if each.act in ("create", "update", "return")]
    changes = []
    for index in at:
        before, after = there[index], decided[index].offer
        assert after is not None
        changes.append(Change(None if decided[index].act == "create" else before, after))
    for index, saved in zip(at, saving.save(tx, listings, changes), strict=True):
        ids[index] = saved.offer.offer_id
    return ids


def _counted(done: Done, there: Sequence[Saved | None], decided: Sequence[Decided]) -> Done:
    counts = msgspec.structs.asdict(done)
    names = {"create": "created", "return": "returned", "keep": "kept", "sold": "sold", "ignore": "ignored"}
    for before, each in zip(there, decided, strict=True):
        if each.act == "update":
            assert each.offer is not None
            is_changed = before is None or is_meaningful(before.offer, each.offer)
            counts["updated" if is_changed else "unchanged"] += 1
        else:
            counts[names[each.act]] += 1
    return Done(**counts)


# Removals ------------------------------------------------------------------------------------------------------------


def _removed(tx: Transaction, listings: Listings, task: Task) -> Task:
    """The next offers that the task lacks.

    Their rows are marked in any case: of an offer that was sold, or that its seller has removed, there is nothing to
    remove, and the row goes as the others do.
    """
    gone = tx.execute(
        sa.select(FEED.c.external_id, FEED.c.offer_id)
        .where(FEED.c.seller_id == task.seller_id, FEED.c.task_id < task.task_id, FEED.c.removed_at_us.is_(None))
        .order_by(FEED.c.task_id)
        .limit(STEP_REMOVALS)
    ).all()
    if not gone:
        return msgspec.structs.replace(task, stage="done")
    keys = saving.fitting(tx, [(task.seller_id, row.offer_id) for row in gone])
    gone = gone[: len(keys)]
    offers = saving.load_offers(tx, keys)
    changes = [Change(saved, removed_by_feed(saved.offer)) for saved in offers.values()]
    saving.save(tx, listings, changes)
    marks: Columns = {
        "seller_id": [task.seller_id] * len(gone),
        "external_id": [row.external_id for row in gone],
        "removed_at_us": [tx.now_us] * len(gone),
    }
    update(tx, FEED, marks)
    removed = sum(change.before is not None and change.before.offer != change.after for change in changes)
    done = msgspec.structs.replace(task.counts.done, removed=task.counts.done.removed + removed)
    return msgspec.structs.replace(task, counts=msgspec.structs.replace(task.counts, done=done))
