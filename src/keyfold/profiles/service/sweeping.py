"""What ages: held-back updates nobody confirmed, marks behind the watermark, profiles that have expired whole."""

from functools import partial
from typing import Any

import sqlalchemy as sa
from msgspec import Struct

from keyfold.core.store import Transaction
from keyfold.core.store.batch import Columns
from keyfold.core.store.shapes import delete, increment, load
from keyfold.counters.counters import Bill, MutableCounters
from keyfold.counters.errors import PackWrong
from keyfold.profiles import metrics
from keyfold.profiles.model import ProfileKey
from keyfold.profiles.service.product import Product
from keyfold.profiles.service.storing import COUNTED, Stored, keys_of, loaded, next_profiles, publish, save
from keyfold.profiles.tables import EVENT_MARKS, EVENT_WATERMARKS, HELD_UPDATES, PROFILE_FLOORS, PROFILES

DAY_SECONDS = 86_400
JUDGED = ("public_version", "expires_at", "held_at_us", "segments_version")


def delete_unconfirmed(tx: Transaction, product: Product, rows_max: int) -> int:
    """Delete held-back updates past their period, oldest first; they had no effect since that moment."""
    before = product.held_oldest_us(tx.now_us)
    edge = (
        sa.select(HELD_UPDATES.c.committed_at_us)
        .where(HELD_UPDATES.c.committed_at_us <= before)
        .order_by(HELD_UPDATES.c.committed_at_us)
        .limit(1)
        .offset(rows_max - 1)
    )
    newest = tx.execute(edge).scalar()
    until = before if newest is None else min(before, newest)
    removed = tx.execute(sa.delete(HELD_UPDATES).where(HELD_UPDATES.c.committed_at_us <= until)).rowcount
    tx.after_commit.append(lambda: metrics.DELETED.inc(removed))
    return removed


def move_watermarks(tx: Transaction, product: Product) -> list[str]:
    """Events of a day that lies `event_days` back are late from now on. A watermark never moves back.

    Returns the logs whose watermark moved.
    """
    logs = product.handlers.logs
    edge = (tx.now_us // 1_000_000 // DAY_SECONDS - product.settings.event_days) * DAY_SECONDS
    stands = load(tx, EVENT_WATERMARKS, {"log": logs}, ("time",))
    behind = [log for log in logs if stands.get((log,), (0,))[0] < edge]
    if behind:
        increment(tx, EVENT_WATERMARKS, {"log": behind, "time": [edge] * len(behind)}, greatest=["time"])
    return behind


def purge_marks(tx: Transaction, log: str, after: str, rows_max: int) -> str | None:
    """Look at the next marks of a log, and delete those a whole day behind its watermark; returns where to go on.

    Every transaction that saw an older watermark has long ended. There is no index of times: it would cost every
    event more than its mark does, and a walk a day does the same.
    """
    ((watermark,),) = load(tx, EVENT_WATERMARKS, {"log": [log]}, ("time",)).values() or [(0,)]
    page = tx.execute(
        sa.select(EVENT_MARKS.c.event_id, EVENT_MARKS.c.time)
        .where(EVENT_MARKS.c.log == log, EVENT_MARKS.c.event_id > after)
        .order_by(EVENT_MARKS.c.event_id)
        .limit(rows_max)
    ).all()
    old = [row.event_id for row in page if row.time < watermark - DAY_SECONDS]
    delete(tx, EVENT_MARKS, {"log": [log] * len(old), "event_id": old})
    return page[-1].event_id if len(page) == rows_max else None


class Step(Struct, frozen=True):
    """How far a walk over all profiles came; None: to the end."""

    after: ProfileKey | None
    removed: int


def delete_expired(tx: Transaction, product: Product, after: ProfileKey, rows_max: int) -> Step:
    """Look at the next profiles, and let those go of which nothing public is left. Readers saw nothing of it."""
    now, oldest_us = tx.now_us // 1_000_000, product.held_oldest_us(tx.now_us)
    page, last = next_profiles(tx, after, JUDGED, sa.true(), rows_max, product.settings.write_bytes_max)
    gone = [(row.profile_type, row.profile_id) for row in page if _may_go(row, now, oldest_us)]
    stored = loaded(tx, product, gone, items=1)
    # Judged again under the row's lock, and by the catalog of today: an update may have come, an expiry been raised.
    may_go = {key: row for key, row in stored.items() if _may_go(row, now, oldest_us)}
    bills = {key: bill for key, row in may_go.items() if (bill := _bill(product, row, now)) is not None}
    _let_go(tx, product, {key: stored[key] for key in bills})
    _leave_for_a_day(tx, {key: row for key, row in may_go.items() if row.version and key not in bills}, now)
    tx.after_commit.extend(partial(metrics.count_lost, product.catalog, bill) for bill in bills.values())
    return Step(last, len(bills))


def _may_go(row: Stored | sa.Row[Any], now: int, oldest_us: int) -> bool:
    """A public part goes whatever keeps its row: if it stayed, it would tell that something waits.

    What has segments stays; to load it for writing, only to find that out, would write its row at every walk.
    """
    if row.has_segments:
        return False
    return row.expires_at < now and (row.public_version > 0 or not _is_kept(row, oldest_us))


def _is_kept(row: Stored | sa.Row[Any], oldest_us: int) -> bool:
    """Whether a row is needed without anything public: something waits, or an older set of segments may come again."""
    return bool(row.held_at_us > oldest_us or row.segments_version)


def _bill(product: Product, row: Stored, now: int) -> Bill | None:
    """What a profile has lost by now, if nothing of it is left.

    What the catalog does not know, or what cannot be read, is nobody's to delete.
    """
    if not row.version:
        return None
    try:
        counters = MutableCounters(product.catalog, row.body, now)
        counters.cleanup()
        return None if counters.serialise() else counters.bill
    except PackWrong:
        return None


def _let_go(tx: Transaction, product: Product, rows: dict[ProfileKey, Stored]) -> None:
    """Delete profiles of which nothing public is left; a row that is kept for something else is emptied."""
    public = {key: row for key, row in rows.items() if row.public_version}
    for row in public.values():
        row.public_version, row.body = row.public_version + 1, b""
    _raise_floors(tx, public)
    if public and product.settings.publish:
        publish(tx, product, public)
    kept = {key: row for key, row in public.items() if _is_kept(row, product.held_oldest_us(tx.now_us))}
    for row in kept.values():
        row.public_version, row.expires_at = 0, 0
    save(tx, kept, COUNTED)
    delete(tx, PROFILES, keys_of(key for key in rows if key not in kept))
    tx.after_commit.append(lambda: metrics.PROFILES_EXPIRED.inc(len(public)))


def _leave_for_a_day(tx: Transaction, rows: dict[ProfileKey, Stored], now: int) -> None:
    """What has proved to stay would be loaded for writing at every walk, only to find that out again."""
    for row in rows.values():
        row.expires_at = now + DAY_SECONDS
    save(tx, rows, ("expires_at",))


def _raise_floors(tx: Transaction, public: dict[ProfileKey, Stored]) -> None:
    if public:
        floors: Columns = {
            "profile_type": [key[0] for key in public],
            "version": [row.public_version for row in public.values()],
        }
        increment(tx, PROFILE_FLOORS, floors, greatest=["version"])
