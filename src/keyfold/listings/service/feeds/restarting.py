"""A way back for a seller whose feed had far too great a task id: every later one would be older, and change nothing.

Done in steps, and again from the start where it was killed or a feed came meanwhile; only the last step lets feeds in.
"""

import sqlalchemy as sa
from msgspec import Struct

from keyfold.core import audit
from keyfold.core.errors import Conflict, NotFound
from keyfold.core.store import Store, Transaction
from keyfold.core.store.shapes import update
from keyfold.listings.service.feeds import tasks
from keyfold.listings.tables import FEED, SELLERS

BEFORE_ALL = -1  # older than any task
STEP_ROWS = 1_000


class Restarted(Struct, frozen=True):
    """What was given up: the task that was the last to end, and those that were not done."""

    seller_id: str
    ended_task_id: int | None
    superseded: int
    offers: int  # which the next feed that ends may update, or remove


def restart(store: Store, seller_id: str, actor: str) -> Restarted:
    """Let the feeds of a seller begin again with any task id that was not used; its offers stay as they are."""
    ended, superseded = store.transact(lambda tx: _stop(tx, seller_id), name="feeds restart")
    after, rows = "", 0
    while listed := store.transact(lambda tx, after=after: _age(tx, seller_id, after), name="feeds restart"):  # type: ignore[misc]
        after, rows = listed[-1], rows + len(listed)
    restarted = Restarted(seller_id, ended, superseded, rows)
    store.transact(lambda tx: _begin_again(tx, restarted, actor), name="feeds restart", once=True)
    return restarted


def _stop(tx: Transaction, seller_id: str) -> tuple[int | None, int]:
    """From here on no step of a feed changes anything: those under way have ended, or find themselves superseded."""
    if not tx.execute(sa.select(SELLERS.c.seller_id).where(SELLERS.c.seller_id == seller_id)).first():
        raise NotFound(f"there is no seller {seller_id!r}")
    ended = tasks.lock_seller(tx, seller_id)
    return ended, tasks.supersede(tx, seller_id, "the feeds of this seller were restarted")


def _age(tx: Transaction, seller_id: str, after: str) -> list[str]:
    """Let some offers be older than any feed; returns their external ids."""
    own = sa.select(FEED.c.external_id).where(FEED.c.seller_id == seller_id, FEED.c.external_id > after)
    listed = list(tx.execute(own.order_by(FEED.c.external_id).limit(STEP_ROWS)).scalars())
    if listed:
        keys = {"seller_id": [seller_id] * len(listed), "external_id": listed}
        update(tx, FEED, {**keys, "task_id": [BEFORE_ALL] * len(listed)})
    return listed


def _begin_again(tx: Transaction, restarted: Restarted, actor: str) -> None:
    if tasks.lock_seller(tx, restarted.seller_id) != restarted.ended_task_id:
        raise Conflict("a feed has ended meanwhile, so nothing was restarted", hint="Do it again")
    there = SELLERS.c.seller_id == restarted.seller_id
    tx.execute(sa.update(SELLERS).where(there).values(ended_task_id=None))
    audit.record(tx, actor, "feeds restarted", f"{restarted.seller_id}: feed {restarted.ended_task_id} was the last")
