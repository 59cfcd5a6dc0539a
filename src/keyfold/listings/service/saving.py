"""Saving offers: the rows, their presets and counts, the counters, the photos and the messages, in one transaction.

Every change of an offer goes through `save`. Rows are compared and set by their version, so that an offer has one
history; counts are changed by what was really put in and taken out, so that they cannot differ from the rows.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from keyfold.core import outbox
from keyfold.core.errors import BadInput, LostRace, TooLarge
from keyfold.core.store import Transaction
from keyfold.core.store.batch import Columns, Row, relation
from keyfold.core.store.shapes import compare_and_set, delete_there, increment, insert, insert_new, load
from keyfold.core.topics.topic import Message
from keyfold.listings import metrics
from keyfold.listings.model import (
    SEQ_NOS,
    SOLD,
    Offer,
    Photo,
    counter_changes,
    due_at_us,
    is_meaningful,
    photos_after,
    shard_of,
    shown,
    stamped,
)
from keyfold.listings.service import presets
from keyfold.listings.service.listings import Listings
from keyfold.listings.service.presets import InForce
from keyfold.listings.tables import (
    OFFER,
    OFFER_IDS,
    SELLERS,
    SOLD_OFFERS,
    USER_OFFER_PRESETS,
    USER_OFFER_PRESETS_COUNT,
    USER_TOTAL_COUNTERS,
)

OFFER_KIND, PHOTOS_KIND, MODERATION_KIND, BILLING_KIND = "offer", "photos", "moderation", "billing"
STEP_BYTES_MAX = 8 * 1024 * 1024  # of the offers that one step of the scheduler changes
STEP_OFFERS_MAX = 1_000
ALWAYS_FIT = 10  # of the largest that the settings allow
OFFER_SCHEMA, PHOTO_REQUEST_SCHEMA = "offer/1", "photo-request/1"

_encode = msgspec.json.Encoder().encode
_decode_offer = msgspec.json.Decoder(Offer).decode


class Saved(Struct, frozen=True):
    """An offer as it is stored; `body` is what stands in the store."""

    offer: Offer
    version: int
    body: bytes

    @property
    def key(self) -> tuple[str, str]:
        return self.offer.seller_id, self.offer.offer_id


class Change(Struct, frozen=True):
    """What becomes of an offer; `before` is None for a new one."""

    before: Saved | None
    after: Offer


class Photos(Struct, frozen=True):
    """The body of the kind `photos`."""

    photos: list[Photo] = []


class PhotoRequest(Struct, frozen=True):
    """What the photo service is asked for; it answers with `offer_id` and each `url`."""

    offer_id: str
    urls: list[str]


_decode_photos = msgspec.json.Decoder(Photos).decode


# Reading for a change ------------------------------------------------------------------------------------------------


def sellers_of(tx: Transaction, offer_ids: Sequence[str]) -> dict[str, str]:
    """Who has the offers that there are."""
    rows = load(tx, OFFER_IDS, {"offer_id": sorted(set(offer_ids))}, ("seller_id",))
    return {offer_id: seller_id for (offer_id,), (seller_id,) in rows.items()}


def load_offers(tx: Transaction, keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Saved]:
    """The offers that there are, by seller and id."""
    rows = load_kind(tx, keys, OFFER_KIND)
    return {key: Saved(_decode_offer(body), version, body.encode()) for key, (version, body) in rows.items()}


def load_by_id(tx: Transaction, offer_ids: Sequence[str]) -> dict[str, Saved]:
    """The offers that there are, by id, whoever has them."""
    sellers = sellers_of(tx, offer_ids)
    found = load_offers(tx, [(seller, offer_id) for offer_id, seller in sellers.items()])
    return {offer_id: saved for (_, offer_id), saved in found.items()}


def fitting(
    tx: Transaction, keys: Sequence[tuple[str, str]], kind: str = OFFER_KIND, beside: Sequence[int] = ()
) -> Sequence[tuple[str, str]]:
    """So many of the offers, from the first on, as one transaction may hold: decoded they are ten times their size.

    `beside` are the bytes that come with each of them.
    """
    if not keys:
        return keys
    columns: Columns = {"seller_id": [seller for seller, _ in keys], "offer_id": [offer_id for _, offer_id in keys]}
    batch = relation(tx, OFFER, columns)
    bytes_of = sa.func.length(OFFER.c.body) if tx.is_sqlite else sa.func.octet_length(OFFER.c.body)
    found = tx.execute(
        sa.select(OFFER.c.seller_id, OFFER.c.offer_id, bytes_of.label("size"))
        .join(batch, sa.and_(OFFER.c.seller_id == batch.c.seller_id, OFFER.c.offer_id == batch.c.offer_id))
        .where(OFFER.c.kind == kind)
    )
    sizes = {(row.seller_id, row.offer_id): row.size for row in found}
    total = 0
    for at, key in enumerate(keys):
        total += sizes.get(key, 0) + (beside[at] if beside else 0)
        if at and total > STEP_BYTES_MAX:
            return keys[:at]
    return keys


def steps_of(tx: Transaction, keys: Sequence[tuple[str, str]]) -> list[Sequence[tuple[str, str]]]:
    """The offers in runs of so many as may be held at once."""
    steps: list[Sequence[tuple[str, str]]] = []
    while keys:
        steps.append(fitting(tx, keys[:STEP_OFFERS_MAX]))
        keys = keys[len(steps[-1]) :]
    return steps


def must_fit_together(tx: Transaction, keys: Sequence[tuple[str, str]], kind: str = OFFER_KIND) -> None:
    """Refuse more offers than may be held at once: whoever gathered them halves them until they are."""
    if len(keys) > ALWAYS_FIT and len(fitting(tx, keys[:STEP_OFFERS_MAX], kind)) < len(keys):
        raise TooLarge(f"{len(keys)} offers are more than one transaction may hold", hint="Send fewer at once")


def load_kind(tx: Transaction, keys: Sequence[tuple[str, str]], kind: str) -> dict[tuple[str, str], tuple[int, str]]:
    """Version and body of one kind."""
    ordered = sorted(set(keys))
    wanted: Columns = {
        "seller_id": [seller for seller, _ in ordered],
        "offer_id": [offer_id for _, offer_id in ordered],
        "kind": [kind] * len(ordered),
    }
    rows = load(tx, OFFER, wanted, ("version", "body"))
    return {(seller, offer_id): (version, body) for (seller, offer_id, _), (version, body) in rows.items()}


# Saving --------------------------------------------------------------------------------------------------------------


def must_fit(listings: Listings, offer: Offer) -> None:
    """Refuse what is larger than an offer may be; counted is what its owner has written."""
    if len(offer.photos) > listings.settings.photos_max:
        raise BadInput(
            f"{len(offer.photos)} photos, {listings.settings.photos_max} are allowed at most", place="photos"
        )
    size = len(_encode((offer.content, offer.price, offer.photos)))
    if size > listings.settings.offer_bytes_max:
        raise TooLarge(f"the offer has {size} bytes, {listings.settings.offer_bytes_max} are allowed", place="content")


def save(tx: Transaction, listings: Listings, changes: Sequence[Change]) -> list[Saved]:
    """Store the changes, each of another offer, and return what is stored now, in order.

    What changes nothing is left alone: it gets no version and no message.
    """
    saved: list[Saved] = []
    real: list[tuple[Saved | None, Saved]] = []
    for change in changes:
        before = change.before
        if before is not None and not is_meaningful(before.offer, change.after):
            saved.append(before)
            continue
        after = stamped(before.offer if before else None, change.after, tx.now_us)
        if before is None:
            after = msgspec.structs.replace(after, offer_id=listings.new_offer_id())
        saved.append(Saved(after, before.version + 1 if before else 1, _encode(after)))
        real.append((before, saved[-1]))
    if real:
        _store(tx, listings, real)
    return saved


def _store(tx: Transaction, listings: Listings, changes: Sequence[tuple[Saved | None, Saved]]) -> None:
    photos = _Photos(tx, changes)
    _store_rows(tx, listings, changes, photos)
    made = [after.offer for before, after in changes if before is None]
    _store_new(tx, made)
    _store_presets(tx, presets.in_force(tx), changes)
    _store_counters(tx, changes)
    messages = [
        Message(
            key=after.offer.offer_id,
            kind=OFFER_KIND,
            version=after.version,
            event_time_us=after.offer.updated_at_us,
            schema=OFFER_SCHEMA,
            payload=told(after.body, after.version, shown(after.offer)),
            route=after.offer.seller_id,
        )
        for _, after in changes
    ]
    outbox.put(tx, listings.topics, listings.settings.topic, [*messages, *photos.messages(tx)])
    outbox.put(tx, listings.topics, listings.settings.photo_requests_topic, photos.requests(tx))
    metrics.CHANGES.inc(len(changes))


def told(body: bytes, version: int, status: str) -> bytes:
    """An offer as it is answered and exported: its body, what is shown of it, and its version."""
    return b'%b,"shown":"%b","version":%d}' % (body[:-1], status.encode(), version)


def _store_rows(
    tx: Transaction,
    listings: Listings,
    changes: Sequence[tuple[Saved | None, Saved]],
    photos: "_Photos",
) -> None:
    offers = [after.offer for _, after in changes]
    width = len(photos.changed)
    columns: dict[str, list[Any]] = {
        "seller_id": [offer.seller_id for offer in offers] + [each.seller_id for each in photos.changed],
        "offer_id": [offer.offer_id for offer in offers] + [each.offer_id for each in photos.changed],
        "kind": [OFFER_KIND] * len(offers) + [PHOTOS_KIND] * width,
        "version": [after.version - 1 for _, after in changes] + [each.version - 1 for each in photos.changed],
        "shown": [shown(offer) for offer in offers] + [None] * width,
        "shard_id": [shard_of(offer.seller_id) for offer in offers] + [None] * width,
        "due_at_us": [due_at_us(offer, listings.ages) for offer in offers] + [None] * width,
        "body": [after.body.decode() for _, after in changes] + [each.body.decode() for each in photos.changed],
    }
    compare_and_set(tx, OFFER, columns)


def _store_new(tx: Transaction, made: Sequence[Offer]) -> None:
    """The directory of ids, and the row of each seller."""
    if not made:
        return
    owners = {"offer_id": [offer.offer_id for offer in made], "seller_id": [offer.seller_id for offer in made]}
    if len(set(owners["offer_id"])) < len(made) or len(insert_new(tx, OFFER_IDS, owners)) < len(made):
        raise LostRace("an offer id was taken")  # another one is drawn
    store_sellers(tx, [offer.seller_id for offer in made])


def store_sellers(tx: Transaction, sellers: Sequence[str]) -> None:
    """Make the rows of sellers that are new."""
    ordered = sorted(set(sellers))
    there = load(tx, SELLERS, {"seller_id": ordered}, ())
    fresh = [seller for seller in ordered if (seller,) not in there]
    insert_new(
        tx,
        SELLERS,
        {"seller_id": fresh, "shard_id": [shard_of(seller) for seller in fresh], "repairs": [0] * len(fresh)},
    )


def _store_presets(tx: Transaction, force: InForce, changes: Sequence[tuple[Saved | None, Saved]]) -> None:
    entered: list[Row] = []
    left: list[Row] = []
    for before, after in changes:
        offer = after.offer
        old, new = force.of(before.offer if before else None), force.of(offer)
        place = (offer.created_at_us, offer.offer_id)
        entered += [(offer.seller_id, number, *place) for number in new if number not in old or number in force.unsure]
        if before is not None:
            left += [(offer.seller_id, number, *place) for number in (old | force.unsure) - new]
    change_presets(tx, entered, left)


def change_presets(tx: Transaction, entered: Sequence[Row], left: Sequence[Row]) -> None:
    """Put offers into presets and take them out (seller, preset, time, offer); counted is what was really changed."""
    added = insert_new(tx, USER_OFFER_PRESETS, _preset_columns(entered)) if entered else set()
    taken = delete_there(tx, USER_OFFER_PRESETS, _preset_columns(left)) if left else set()
    counts: dict[tuple[str, int], int] = {}
    for rows, one in ((added, 1), (taken, -1)):
        for seller, number, _, _ in rows:
            counts[seller, number] = counts.get((seller, number), 0) + one
    _add(tx, USER_OFFER_PRESETS_COUNT, counts, "preset_id", "offers")


def _preset_columns(rows: Sequence[Row]) -> dict[str, list[Any]]:
    names = ("seller_id", "preset_id", "create_time", "offer_id")
    return {name: [row[at] for row in rows] for at, name in enumerate(names)}


def _store_counters(tx: Transaction, changes: Sequence[tuple[Saved | None, Saved]]) -> None:
    sums: dict[tuple[str, str], int] = {}
    sold: list[Offer] = []
    for before, after in changes:
        added = counter_changes(before.offer if before else None, after.offer)
        for name, change in added.items():
            key = (after.offer.seller_id, name)
            sums[key] = sums.get(key, 0) + change
        if SOLD in added:
            sold.append(after.offer)
    _add(tx, USER_TOTAL_COUNTERS, sums, "counter_id", "counter_value")
    if sold:
        prices = [offer.price for offer in sold]
        insert(
            tx,
            SOLD_OFFERS,
            {
                "seller_id": [offer.seller_id for offer in sold],
                "offer_id": [offer.offer_id for offer in sold],
                "currency": [price.currency if price else "" for price in prices],
                "amount": [price.amount if price else 0 for price in prices],
                "sold_at_us": [offer.status_at_us for offer in sold],
            },
        )


def _add(tx: Transaction, table: sa.Table, sums: Mapping[tuple[str, Any], int], name: str, value: str) -> None:
    """Add to counts of sellers, in one of the rows of each: so the writers of one seller do not all wait for one."""
    moved = {key: change for key, change in sums.items() if change}
    if moved:
        columns: Columns = {
            "seller_id": [seller for seller, _ in moved],
            name: [counted for _, counted in moved],
            "seq_no": [random.randrange(SEQ_NOS)] * len(moved),  # noqa: S311
            value: list(moved.values()),
        }
        increment(tx, table, columns)


class _PhotoRow(Struct, frozen=True):
    seller_id: str
    offer_id: str
    version: int
    body: bytes
    asked: list[str]


class _Photos:
    """The photos of offers whose addresses have changed."""

    def __init__(self, tx: Transaction, changes: Sequence[tuple[Saved | None, Saved]]) -> None:
        touched = [
            after.offer
            for before, after in changes
            if after.offer.photos != (before.offer.photos if before is not None else ())
        ]
        new = {after.key for before, after in changes if before is None}
        keys = [(offer.seller_id, offer.offer_id) for offer in touched]
        there = load_kind(tx, [key for key in keys if key not in new], PHOTOS_KIND)
        self.changed: list[_PhotoRow] = []
        for offer, key in zip(touched, keys, strict=True):
            version, body = there.get(key, (0, None))
            known = _decode_photos(body).photos if body is not None else []
            photos, asked = photos_after(known, offer.photos)
            self.changed.append(_PhotoRow(*key, version + 1, _encode(Photos(photos)), asked))

    def messages(self, tx: Transaction) -> list[Message]:
        return [
            kind_message(tx, each.seller_id, each.offer_id, PHOTOS_KIND, each.version, each.body)
            for each in self.changed
        ]

    def requests(self, tx: Transaction) -> list[Message]:
        return [
            Message(
                key=each.offer_id,
                version=each.version,
                event_time_us=tx.now_us,
                schema=PHOTO_REQUEST_SCHEMA,
                payload=_encode(PhotoRequest(each.offer_id, each.asked)),
                route=each.seller_id,
            )
            for each in self.changed
            if each.asked
        ]


def kind_message(tx: Transaction, seller_id: str, offer_id: str, kind: str, version: int, body: bytes) -> Message:
    """A change of another kind than the offer itself, as it is exported: whose it is, and its body."""
    head = _encode({"offer_id": offer_id, "seller_id": seller_id, "kind": kind, "version": version})
    return Message(
        key=offer_id,
        kind=kind,
        version=version,
        event_time_us=tx.now_us,
        schema=f"{kind.partition(':')[0]}/1",
        payload=b'%b,"body":%b}' % (head[:-1], body),
        route=seller_id,
    )


def rounds(items: Sequence[tuple[str, int]]) -> list[list[int]]:
    """Indexes of a batch, so that no key stands twice in one round; a key's items keep their order."""
    at: dict[str, int] = {}
    made: list[list[int]] = []
    for key, index in items:
        number = at.get(key, 0)
        at[key] = number + 1
        if number == len(made):
            made.append([])
        made[number].append(index)
    return made
