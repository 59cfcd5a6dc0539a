"""The scheduler's walks: offers that are due, presets that are built, counts that are compared.

Work is shared by shards of sellers. Every transaction first proves that the shard is still this worker's (`guard`).
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa
import structlog
from msgspec import Struct

from keyfold.core.clock import SECOND_US
from keyfold.core.errors import Unavailable
from keyfold.core.store import Store, Transaction
from keyfold.core.store.batch import Columns
from keyfold.core.store.shapes import hold, increment, update
from keyfold.listings import metrics
from keyfold.listings.model import SHARDS, aged, due_at_us
from keyfold.listings.service import drafting, presets, repairing, saving
from keyfold.listings.service.listings import Listings
from keyfold.listings.service.presets import DROPPING, READY, PresetRow
from keyfold.listings.service.repairing import Drift
from keyfold.listings.service.saving import OFFER_KIND, Change, Saved
from keyfold.listings.tables import LISTING_WALKS, OFFER, SELLERS

log = structlog.get_logger(__name__)

DUE_MAX = 500
WALK_MAX = 500
SELLERS_MAX = 50
SCRUB = "scrub"
ALL_OFFERS = "z"  # behind every offer of a seller: letters follow digits in any collation

Guard = Callable[[Transaction], None]


class Place(Struct, frozen=True):
    """How far a walk has come in a shard."""

    seller_id: str = ""
    offer_id: str = ""
    is_done: bool = False
    moved_at_us: int = 0


# Ages ----------------------------------------------------------------------------------------------------------------


def age(store: Store, listings: Listings, shard_id: int, guard: Guard) -> bool:
    """Move some offers of a shard that are due; whether there may be more."""
    if not store.read(lambda tx: _due(tx, shard_id, 1)):
        return False  # the usual case, which writes nothing

    def work(tx: Transaction) -> bool:
        guard(tx)
        listed = _due(tx, shard_id, DUE_MAX)
        keys = saving.fitting(tx, listed)
        found = saving.load_offers(tx, keys)
        changes = [Change(saved, aged(saved.offer, listings.ages, tx.now_us)) for saved in found.values()]
        moved = [change for change in changes if change.before is not None and change.after != change.before.offer]
        saving.save(tx, listings, moved)
        # Due by a rule of before: the ages of the settings have changed, so that it is due at another time.
        _put_off(tx, listings, [change.before for change in changes if change.before and change not in moved])
        for change in moved:
            metrics.MOVED.labels(change.after.status).inc()
        return len(keys) < len(listed) or len(listed) == DUE_MAX

    return store.transact(work, name="listings ages")


def _due(tx: Transaction, shard_id: int, count_max: int) -> list[tuple[str, str]]:
    mark = "?" if tx.is_sqlite else "%s"
    return [
        (seller_id, offer_id)
        for seller_id, offer_id in tx.rows(
            f"SELECT seller_id, offer_id FROM offer WHERE shard_id = {mark} AND due_at_us <= {mark}"
            f" ORDER BY due_at_us LIMIT {mark}",
            (shard_id, tx.now_us, count_max),
        )
    ]


def _put_off(tx: Transaction, listings: Listings, offers: Sequence[Saved]) -> None:
    if offers:
        rows = _rows_of(offers)
        hold(tx, OFFER, {**rows, "version": [each.version for each in offers]})
        update(tx, OFFER, {**rows, "due_at_us": [due_at_us(each.offer, listings.ages) for each in offers]})


def _rows_of(offers: Sequence[Saved]) -> dict[str, list[Any]]:
    return {
        "seller_id": [each.offer.seller_id for each in offers],
        "offer_id": [each.offer.offer_id for each in offers],
        "kind": [OFFER_KIND] * len(offers),
    }


def overdue_seconds(tx: Transaction) -> float:
    """For how long the oldest offer has been due.

    Asked shard by shard, of which the index has the oldest at hand; of all at once it would be read whole.
    """
    mark = "?" if tx.is_sqlite else "%s"
    oldest = f"SELECT due_at_us FROM offer WHERE shard_id = {mark} AND due_at_us IS NOT NULL ORDER BY due_at_us LIMIT 1"
    found = [row[0] for shard_id in range(SHARDS) for row in tx.rows(oldest, (shard_id,))]
    return max(0.0, (tx.now_us - min(found)) / SECOND_US) if found else 0.0


# Presets -------------------------------------------------------------------------------------------------------------


class Patience:
    """How long this process has seen a preset. Whoever has read the presets before it was there has ended after the
    longest that a transaction may last, whatever the clocks of others say."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._seen_at: dict[str, float] = {}

    def is_over(self, row: PresetRow) -> bool:
        now = time.monotonic()
        return now > self._seen_at.setdefault(row.walk, now) + self._seconds


def build(store: Store, listings: Listings, shard_id: int, guard: Guard, patience: Patience | None = None) -> bool:
    """Put some more offers of a shard into presets that are being built; whether there may be more."""
    rows = store.read(presets.stored)
    more = False
    for row in rows:
        if row.state == READY or (patience is not None and not patience.is_over(row)):
            continue
        if not store.read(lambda tx, row=row: _may_begin(tx, store, row)):  # type: ignore[misc]
            continue
        more |= store.transact(lambda tx, row=row: _build(tx, row, shard_id, guard), name="listings presets")  # type: ignore[misc]
    return more


def _may_begin(tx: Transaction, store: Store, row: PresetRow) -> bool:
    """Whoever has read the presets before this one was there has ended by now.

    It may have taken as long to commit after its time was read, and others as long who began just before that.
    """
    return tx.now_us > row.since_us + (2 * store.limits.transaction_seconds_max + 1) * SECOND_US


def _build(tx: Transaction, row: PresetRow, shard_id: int, guard: Guard) -> bool:
    guard(tx)
    if row not in presets.stored(tx):
        return False  # changed once more
    place = _place(tx, row.walk, shard_id)
    if not place.is_done:
        listed, upto = _next_offers(tx, shard_id, place)
        keys = saving.fitting(tx, listed)
        if keys:
            _put_into(tx, row, keys)
        if len(keys) < len(listed):
            upto = Place(*keys[-1])
        _move(tx, row.walk, shard_id, upto)
        if not upto.is_done:
            return True
    # Asked again by every shard that is done: two that end at once do not see each other.
    done = sa.select(sa.func.count()).where(LISTING_WALKS.c.walk == row.walk, LISTING_WALKS.c.is_done == 1)
    if tx.execute(done).scalar_one() == SHARDS:
        presets.finish(tx, row)
    return False


def _put_into(tx: Transaction, row: PresetRow, keys: Sequence[tuple[str, str]]) -> None:
    found = saving.load_offers(tx, keys)
    held = list(found.values())
    hold(tx, OFFER, {**_rows_of(held), "version": [each.version for each in held]})
    force = presets.in_force(tx)
    places = {
        each.key: (each.offer.seller_id, row.number, each.offer.created_at_us, each.offer.offer_id) for each in held
    }
    inside = {each.key for each in held if row.state != DROPPING and row.number in force.of(each.offer)}
    saving.change_presets(
        tx, [places[key] for key in places if key in inside], [places[key] for key in places if key not in inside]
    )


def _next_offers(tx: Transaction, shard_id: int, place: Place) -> tuple[list[tuple[str, str]], Place]:
    """The offers behind a place, by seller and id, and the place behind them."""
    mark = "?" if tx.is_sqlite else "%s"
    rest = WALK_MAX
    found: list[tuple[str, str]] = []
    if place.seller_id:
        found = _offers_of(tx, place.seller_id, place.offer_id, rest)
        rest -= len(found)
    if not rest:
        return found, Place(*found[-1])
    sellers = tx.rows(
        f"SELECT seller_id FROM sellers WHERE shard_id = {mark} AND seller_id > {mark} ORDER BY seller_id LIMIT {mark}",
        (shard_id, place.seller_id, SELLERS_MAX),
    )
    for (seller_id,) in sellers:
        listed = _offers_of(tx, seller_id, "", rest)
        found += listed
        rest -= len(listed)
        if not rest:
            return found, Place(*found[-1])
    if sellers:
        return found, Place(sellers[-1][0], ALL_OFFERS)
    return found, Place(place.seller_id, place.offer_id, is_done=True)


def _offers_of(tx: Transaction, seller_id: str, after: str, count_max: int) -> list[tuple[str, str]]:
    mark = "?" if tx.is_sqlite else "%s"
    rows = tx.rows(
        f"SELECT offer_id FROM offer WHERE seller_id = {mark} AND offer_id > {mark} AND kind = '{OFFER_KIND}'"
        f" ORDER BY offer_id LIMIT {mark}",
        (seller_id, after, count_max),
    )
    return [(seller_id, offer_id) for (offer_id,) in rows]


# Counts --------------------------------------------------------------------------------------------------------------


class Scrubber:
    """Compares the counts of all sellers of a shard, some at a time; one round in `scrub_seconds`."""

    def __init__(self, store: Store, listings: Listings) -> None:
        self._store = store
        self._listings = listings
        self._found: dict[int, list[Drift]] = {}

    def step(self, shard_id: int, guard: Guard) -> bool:
        """Look at some sellers; whether there may be more in this round."""
        place, now_us = self._store.read(lambda tx: (_place(tx, SCRUB, shard_id), tx.now_us))
        if place.is_done:
            if now_us < place.moved_at_us + self._listings.settings.scrub_seconds * SECOND_US:
                return False
            place = Place()
        if not place.seller_id:
            self._found[shard_id] = []
        sellers = self._store.read(lambda tx: _sellers(tx, shard_id, place.seller_id))
        if not sellers and not place.seller_id:
            return False  # nobody is there: nothing is written
        for seller_id in sellers:
            try:
                self._found.setdefault(shard_id, []).extend(self._compared(seller_id))
            except Unavailable:
                raise
            except Exception as error:
                # The round goes on: all other sellers of the shard are behind this one.
                log.error("the counts of a seller cannot be compared", seller=seller_id, exc_info=error)
        is_done = len(sellers) < SELLERS_MAX
        after = Place(sellers[-1] if sellers else place.seller_id, is_done=is_done)
        self._store.transact(lambda tx: self._moved(tx, shard_id, guard, after), name="listings scrub")
        for what in (repairing.PRESETS, repairing.COUNTERS):
            every = [abs(each.missing) for found in self._found.values() for each in found if each.what == what]
            metrics.DRIFT.labels(what).set(sum(every))
        return not is_done

    def _compared(self, seller_id: str) -> list[Drift]:
        found = self._store.read(lambda tx: repairing.drift(tx, seller_id))
        if not found or not self._listings.settings.scrub_repairs:
            return found
        return self._store.transact(
            lambda tx: repairing.repair(tx, seller_id, "scrubber"),
            name="listings repair",
        )

    def _moved(self, tx: Transaction, shard_id: int, guard: Guard, place: Place) -> None:
        guard(tx)
        _move(tx, SCRUB, shard_id, place)


def _sellers(tx: Transaction, shard_id: int, after: str) -> list[str]:
    chosen = sa.select(SELLERS.c.seller_id).where(SELLERS.c.shard_id == shard_id, SELLERS.c.seller_id > after)
    return list(tx.execute(chosen.order_by(SELLERS.c.seller_id).limit(SELLERS_MAX)).scalars())


def is_seller(tx: Transaction, seller_id: str) -> bool:
    return tx.execute(sa.select(SELLERS.c.seller_id).where(SELLERS.c.seller_id == seller_id)).first() is not None


def sellers_after(tx: Transaction, after: str, count_max: int) -> list[str]:
    """Sellers of all shards, in the order of their ids."""
    chosen = sa.select(SELLERS.c.seller_id).where(SELLERS.c.seller_id > after)
    return list(tx.execute(chosen.order_by(SELLERS.c.seller_id).limit(count_max)).scalars())


# Places --------------------------------------------------------------------------------------------------------------


def _place(tx: Transaction, walk: str, shard_id: int) -> Place:
    row = tx.execute(
        sa.select(LISTING_WALKS).where(LISTING_WALKS.c.walk == walk, LISTING_WALKS.c.shard_id == shard_id)
    ).one_or_none()
    return Place() if row is None else Place(row.upto_seller, row.upto_offer, bool(row.is_done), row.moved_at_us)


def _move(tx: Transaction, walk: str, shard_id: int, place: Place) -> None:
    row: Columns = {
        "walk": [walk],
        "shard_id": [shard_id],
        "upto_seller": [place.seller_id],
        "upto_offer": [place.offer_id],
        "is_done": [int(place.is_done)],
        "moved_at_us": [tx.now_us],
    }
    increment(tx, LISTING_WALKS, row, latest=["upto_seller", "upto_offer", "is_done", "moved_at_us"])


def forget(store: Store, listings: Listings, rows_max: int) -> bool:
    """Delete drafts that nobody touches any more; whether there may be more."""
    return store.transact(lambda tx: drafting.forget(tx, listings, rows_max), name="listings drafts") == rows_max
