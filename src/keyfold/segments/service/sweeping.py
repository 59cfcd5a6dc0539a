"""A sweep over all users: what has expired is collected also from sets that no diff touches."""

from collections.abc import Callable

import sqlalchemy as sa
from msgspec import Struct

from keyfold.core.context import Context
from keyfold.core.store import Transaction
from keyfold.segments import metrics
from keyfold.segments.model import Collector
from keyfold.segments.service import queueing
from keyfold.segments.service.applying import collect_users
from keyfold.segments.settings import SegmentsSettings
from keyfold.segments.tables import USER_SEGMENTS


class Swept(Struct, frozen=True):
    """One bounded step: how many users were looked at, how many changed, and where to go on; None at the end."""

    users: int
    changed: int
    upto: str | None


def sweep_step(tx: Transaction, context: Context, settings: SegmentsSettings, after: str, users_max: int) -> Swept:
    """Collect the garbage of the next users. Doing it again changes nothing."""
    users = USER_SEGMENTS.c
    chosen = sa.select(users.user_id, users.segments).where(users.user_id > after)
    rows = tx.execute(chosen.order_by(users.user_id).limit(users_max)).all()
    collector = Collector(queueing.minimal_valid_versions(tx), settings.segments_max)
    dirty = [row.user_id for row in rows if collector.collected(row.segments)[0] != row.segments]
    applied = collect_users(tx, context.topics, settings.topic, collector, dirty)
    upto = rows[-1].user_id if len(rows) == users_max else None
    return Swept(len(rows), applied.changed, upto)


def sweep(
    context: Context, settings: SegmentsSettings, report: Callable[[int, str], None], *, after: str = ""
) -> Swept:
    """Sweep all users, in steps of a transaction each."""
    users = changed = 0
    while True:
        step = context.store.transact(
            lambda tx, after=after: sweep_step(tx, context, settings, after, settings.chunk_users_max),  # type: ignore[misc]
            name="segment sweep",
        )
        users, changed = users + step.users, changed + step.changed
        metrics.USERS.labels("swept").inc(step.changed)
        report(users, f"{changed} changed")
        if step.upto is None:
            return Swept(users, changed, None)
        after = step.upto


def users_about(tx: Transaction) -> int:
    """How many users have a set."""
    return int(tx.execute(sa.select(sa.func.count()).select_from(USER_SEGMENTS)).scalar_one())
