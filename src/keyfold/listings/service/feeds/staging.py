"""Taking items in: rows of the task until its end has come, committed with the position they reach."""

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from keyfold.core.errors import Conflict, TooLarge
from keyfold.core.store import Store, Transaction
from keyfold.core.store.shapes import increment, load
from keyfold.listings.service.feeds import reporting, tasks
from keyfold.listings.service.feeds.items import Read, read_line
from keyfold.listings.service.feeds.reporting import Problems, place_of_item
from keyfold.listings.service.feeds.tasks import Taken, Task
from keyfold.listings.service.listings import Listings
from keyfold.listings.tables import FEED_ITEMS


class Position(Struct, frozen=True):
    """How far a feed was taken in: where the next items begin."""

    position: int
    taken: Taken


def take_lines(
    store: Store, listings: Listings, seller_id: str, task_id: int, position: int, lines: Sequence[bytes]
) -> Position:
    """Read the lines, then take them in one transaction: while they are read and checked, nobody waits."""
    read = [read_line(listings, seller_id, line) for line in lines]
    return store.transact(lambda tx: take_items(tx, listings, seller_id, task_id, position, read), name="feed items")


def take_items(
    tx: Transaction, listings: Listings, seller_id: str, task_id: int, position: int, items: Sequence[Read]
) -> Position:
    """Stage items, the first of which is number `position` of the task, counted from 0.

    What was taken before is skipped, so that a repeat is harmless; a gap is refused with the position to go on from.
    """
    task = tasks.lock(tx, seller_id, task_id)
    if task is None or task.stage == "taking":
        tasks.must_be_new(task_id, tasks.ended_task_id(tx, seller_id))
    if task is None:
        tasks.must_have_room(tx, listings, seller_id)
        task = tasks.begin(tx, seller_id, task_id)
    if task.stage != "taking":
        raise Conflict(f"feed {task_id} takes no more items, it is {task.stage}", hint=task.reason or None)
    if position > task.position:
        raise Conflict(
            f"the items begin at {position}, {task.position} were taken so far",
            place="query position",
            hint=f"Send the items from {task.position} on",
        )
    fresh = items[task.position - position :]
    if not fresh:
        return Position(task.position, task.counts.taken)
    if task.position + len(fresh) > listings.settings.feed_items_max:
        raise TooLarge(f"a feed has {listings.settings.feed_items_max} items at most")
    task = tasks.save(tx, _staged(tx, listings, task, fresh))
    return Position(task.position, task.counts.taken)


def _staged(tx: Transaction, listings: Listings, task: Task, fresh: Sequence[Read]) -> Task:
    named = sorted({item.external_id for item in fresh if item.external_id})
    keys = _keys(task, named)
    numbers: dict[str, int] = {key[2]: row[0] for key, row in load(tx, FEED_ITEMS, keys, ("number",)).items()}
    last: dict[str, tuple[int, Read]] = {}
    problems: Problems = {}
    repeated = 0
    for number, item in enumerate(fresh, task.position):
        if item.reason:
            problems[place_of_item(number)] = (item.external_id, item.reason)
        if not item.external_id:
            continue
        earlier = numbers.get(item.external_id)
        if earlier is not None:
            repeated += 1
            why = f"item {number} has the same external id and takes its place"
            problems.setdefault(place_of_item(earlier), (item.external_id, why))
        numbers[item.external_id] = number
        last[item.external_id] = (number, item)
    names = sorted(last)
    rows = {
        **_keys(task, names),
        "number": [last[name][0] for name in names],
        "body": [last[name][1].body for name in names],
    }
    increment(tx, FEED_ITEMS, rows, latest=("number", "body"))
    taken = task.counts.taken
    taken = Taken(
        invalid=taken.invalid + sum(bool(item.reason and item.external_id) for item in fresh),
        unreadable=taken.unreadable + sum(not item.external_id for item in fresh),
        repeated=taken.repeated + repeated,
    )
    counts = reporting.tell(tx, listings, task, problems)
    return msgspec.structs.replace(
        task,
        position=task.position + len(fresh),
        is_staged=True,
        counts=msgspec.structs.replace(counts, taken=taken),
    )


def _keys(task: Task, external_ids: Sequence[str]) -> dict[str, Sequence[object]]:
    count = len(external_ids)
    return {"seller_id": [task.seller_id] * count, "task_id": [task.task_id] * count, "external_id": external_ids}
