"""Drafts: opened, filled and published. An owner, anonymous or logged in, has one current draft at most."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import sqlalchemy as sa
from msgspec import Meta, Struct

from keyfold.core.errors import BadInput, Conflict, KeyfoldError, LostRace, NotFound, TooLarge
from keyfold.core.store import Transaction
from keyfold.core.store.batch import Columns, relation, slices, source
from keyfold.core.store.shapes import compare_and_set, delete, hold, insert, insert_new, load, locking_load
from keyfold.listings.model import Draft, Offer, Price, business_of, is_alike, must_be_photo_url, open_draft
from keyfold.listings.service import saving
from keyfold.listings.service.listings import DAY_US, Listings
from keyfold.listings.service.saving import Change, Saved
from keyfold.listings.tables import CURRENT_DRAFT, DRAFT

_COLUMNS = ("version", "body", "offer_id", "updated_at_us")


class Filled(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an owner has written so far. Nothing of it is checked against the category before it is published."""

    category: Annotated[str, Meta(max_length=100)] = ""
    content: Annotated[dict[str, Any], Meta(description="the offer itself, as its category has it")] = {}
    price: Annotated[Price | None, Meta(description="none: not told")] = None
    photos: Annotated[tuple[str, ...], Meta(max_length=1_000, description="where they come from")] = ()
    warehouse_id: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0


class DraftShown(Struct, frozen=True, kw_only=True):
    """A draft as it stands; with `offer_id` it was published."""

    draft_id: str
    owner_id: str
    version: int
    filled: Filled
    offer_id: str = ""
    updated_at_us: int


class Opening(Struct, frozen=True, kw_only=True):
    """Who opens a draft: a visitor, somebody who has logged in, or one who was the other before."""

    anonymous_id: str = ""
    seller_id: str = ""
    category: str = ""  # empty: whichever there is

    @property
    def owners(self) -> list[str]:
        return [owner for owner in (self.seller_id, self.anonymous_id) if owner]


class Publishing(Struct, frozen=True, kw_only=True):
    """A draft to publish, as its owner saw it."""

    owner_id: str
    draft_id: str
    version: int


def open_drafts(tx: Transaction, listings: Listings, opening: Opening) -> DraftShown:
    """The draft that somebody goes on with. Two who open at once queue at the row of the current draft."""
    if not opening.owners:
        raise BadInput("a draft has an owner", hint="Give anonymous_id, seller_id or both")
    if opening.category:
        listings.categories.newest(opening.category)
    current = _current(tx, opening.owners)
    found = {owner: _draft(current[owner]) for owner in opening.owners if owner in current}
    opened = open_draft(
        opening.category or None,
        found.get(opening.anonymous_id),
        found.get(opening.seller_id) if opening.seller_id else None,
        opening.anonymous_id,
        opening.seller_id or None,
    )
    if opened.draft is None:
        return _create(tx, opened.owner_id, opening.category)
    # Whoever fills one of them in at this moment has done so before we chose, or finds it gone.
    _hold(tx, list(current.values()))
    if opened.deleted is not None:
        _delete(tx, opened.deleted.owner_id, opened.deleted.draft_id)
    was = next(each for each in current.values() if each.draft_id == opened.draft.draft_id)
    filled = Filled(category=opened.draft.category) if opened.act == "reset" else was.filled
    if was.owner_id == opened.owner_id:
        return was if _is_same(filled, was.filled) else _write(tx, was, filled)
    _delete(tx, was.owner_id, was.draft_id)
    # The version goes on: to whoever saw the draft under its former owner it has changed.
    moved = msgspec.structs.replace(was, owner_id=opened.owner_id, filled=filled, version=was.version + 1)
    _insert(tx, moved)
    return moved


def read_draft(tx: Transaction, owner_id: str, draft_id: str) -> DraftShown:
    return _one(_load(tx, [(owner_id, draft_id)]), owner_id, draft_id)


def fill(tx: Transaction, listings: Listings, owner_id: str, draft_id: str, version: int, filled: Filled) -> DraftShown:
    """Write what the owner has filled in; refused where the draft has changed since `version`."""
    was = _one(_load(tx, [(owner_id, draft_id)]), owner_id, draft_id)
    if was.offer_id:
        raise Conflict("this draft was published", place="draft_id", hint=f"It is the offer {was.offer_id}")
    _must_be_at(was, version)
    if filled.category:
        listings.categories.newest(filled.category)
    size = len(msgspec.json.encode(filled))
    if size > listings.settings.offer_bytes_max + 1_000:
        raise TooLarge(f"the draft has {size} bytes", place="content")
    return was if _is_same(filled, was.filled) else _write(tx, was, filled)


def _is_same(filled: Filled, before: Filled) -> bool:
    return filled == before and is_alike(filled.content, before.content)


def publish(tx: Transaction, listings: Listings, asked: Sequence[Publishing]) -> list[Saved | KeyfoldError]:
    """Make offers of drafts. A draft that was published is answered by its offer; one that is refused stays."""
    outcomes: list[Saved | KeyfoldError] = [Conflict("the draft was not looked at")] * len(asked)
    for turn in saving.rounds([(f"{each.owner_id}\n{each.draft_id}", at) for at, each in enumerate(asked)]):
        drafts = _load(tx, [(asked[at].owner_id, asked[at].draft_id) for at in turn])
        known = saving.load_by_id(tx, [each.offer_id for each in drafts.values() if each.offer_id])
        ready: list[tuple[int, DraftShown, Offer]] = []
        for at in turn:
            one = asked[at]
            try:
                draft = _one(drafts, one.owner_id, one.draft_id)
                if draft.offer_id:
                    outcomes[at] = known[draft.offer_id]
                    continue
                _must_be_at(draft, one.version)
                ready.append((at, draft, offer_of(listings, one.owner_id, draft.filled)))
            except KeyfoldError as error:
                outcomes[at] = error
        saved = saving.save(tx, listings, [Change(None, offer) for _, _, offer in ready])
        _publish_rows(tx, [draft for _, draft, _ in ready], saved)
        for (at, _, _), each in zip(ready, saved, strict=True):
            outcomes[at] = each
    return outcomes


def offer_of(listings: Listings, seller_id: str, filled: Filled) -> Offer:
    """An offer as it was filled in, checked: the schema of its category, the photos, the size."""
    category = listings.categories.newest(filled.category)
    number = business_of(seller_id)
    offer = Offer(
        seller_id=seller_id,
        category=category.name,
        schema_version=category.version,
        content=filled.content,
        price=filled.price,
        photos=tuple(dict.fromkeys(filled.photos)),
        business_id=number,
        shop_id=number,
        warehouse_id=filled.warehouse_id,
    )
    saving.must_fit(listings, offer)  # first: to say what is wrong with megabytes takes long
    category.must_hold(filled.content)
    for url in filled.photos:
        must_be_photo_url(url)
    return offer


def forget(tx: Transaction, listings: Listings, rows_max: int) -> int:
    """Delete drafts that nobody has touched for long; returns how many.

    The time is asked again by the DELETE: somebody may just have gone on with one of them.
    """
    is_old = DRAFT.c.updated_at_us < tx.now_us - listings.settings.draft_days * DAY_US
    old = sa.select(DRAFT.c.owner_id, DRAFT.c.draft_id).where(is_old)
    rows = [tuple(row) for row in tx.execute(old.order_by(DRAFT.c.updated_at_us).limit(rows_max))]
    if not rows:
        return 0
    batch = relation(tx, DRAFT, {"owner_id": [row[0] for row in rows], "draft_id": [row[1] for row in rows]})
    listed = sa.tuple_(DRAFT.c.owner_id, DRAFT.c.draft_id).in_(sa.select(batch.c.owner_id, batch.c.draft_id))
    deleted = sa.delete(DRAFT).where(is_old, listed).returning(DRAFT.c.owner_id, DRAFT.c.draft_id)
    gone = [(row.owner_id, row.draft_id) for row in tx.execute(deleted)]
    _delete_current(tx, gone)
    return len(gone)


# Rows ----------------------------------------------------------------------------------------------------------------


def _current(tx: Transaction, owners: Sequence[str]) -> dict[str, DraftShown]:
    """The current drafts of owners; their rows are locked until the transaction ends."""
    rows = locking_load(tx, CURRENT_DRAFT, {"owner_id": sorted(set(owners))}, ("draft_id",))
    named = [(owner, draft_id) for (owner,), (draft_id,) in rows.items()]
    drafts = _load(tx, named)
    _delete_current(tx, [key for key in named if key not in drafts])
    return {owner: draft for (owner, _), draft in drafts.items()}


def _load(tx: Transaction, keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], DraftShown]:
    ordered = sorted(set(keys))
    wanted: Columns = {"owner_id": [owner for owner, _ in ordered], "draft_id": [draft for _, draft in ordered]}
    rows = load(tx, DRAFT, wanted, _COLUMNS)
    return {
        (owner, draft): DraftShown(
            draft_id=draft,
            owner_id=owner,
            version=version,
            filled=msgspec.json.decode(body, type=Filled),
            offer_id=offer_id,
            updated_at_us=updated,
        )
        for (owner, draft), (version, body, offer_id, updated) in rows.items()
    }


def _draft(shown: DraftShown) -> Draft:
    return Draft(shown.draft_id, shown.owner_id, shown.filled.category, shown.filled.content, shown.updated_at_us)


def _one(drafts: Mapping[tuple[str, str], DraftShown], owner_id: str, draft_id: str) -> DraftShown:
    found = drafts.get((owner_id, draft_id))
    if found is None:
        raise NotFound(f"there is no draft {draft_id!r}")
    return found


def _must_be_at(draft: DraftShown, version: int) -> None:
    if draft.version != version:
        raise Conflict(f"the draft is at version {draft.version}, not {version}", place="version", hint="Read it again")


def _create(tx: Transaction, owner_id: str, category: str) -> DraftShown:
    made = DraftShown(
        draft_id=secrets.token_hex(16),
        owner_id=owner_id,
        version=1,
        filled=Filled(category=category),
        updated_at_us=tx.now_us,
    )
    _insert(tx, made)
    return made


def _insert(tx: Transaction, draft: DraftShown) -> None:
    """Store a draft as the current one of its owner."""
    row: Columns = {"owner_id": [draft.owner_id], "version": [1], "draft_id": [draft.draft_id]}
    if not insert_new(tx, CURRENT_DRAFT, row):
        raise LostRace(f"{draft.owner_id!r} has opened a draft meanwhile")  # which is taken, next time
    insert(tx, DRAFT, _columns([draft], [draft.version]))


def _write(tx: Transaction, was: DraftShown, filled: Filled) -> DraftShown:
    now_us = max(tx.now_us, was.updated_at_us)
    after = msgspec.structs.replace(was, filled=filled, version=was.version + 1, updated_at_us=now_us)
    _save(tx, [after], [was.version])
    return after


def _publish_rows(tx: Transaction, drafts: Sequence[DraftShown], saved: Sequence[Saved]) -> None:
    """What is left of a published draft is which offer it became: a repeat is answered by it."""
    if not drafts:
        return
    after = [
        msgspec.structs.replace(draft, filled=Filled(), offer_id=each.offer.offer_id, updated_at_us=tx.now_us)
        for draft, each in zip(drafts, saved, strict=True)
    ]
    _save(tx, after, [draft.version for draft in drafts])
    _delete_current(tx, [(draft.owner_id, draft.draft_id) for draft in drafts])


def _save(tx: Transaction, drafts: Sequence[DraftShown], versions: Sequence[int]) -> None:
    compare_and_set(tx, DRAFT, _columns(drafts, versions))


def _columns(drafts: Sequence[DraftShown], versions: Sequence[int]) -> Columns:
    return {
        "owner_id": [draft.owner_id for draft in drafts],
        "draft_id": [draft.draft_id for draft in drafts],
        "version": list(versions),
        "body": [msgspec.json.encode(draft.filled).decode() for draft in drafts],
        "offer_id": [draft.offer_id for draft in drafts],
        "updated_at_us": [draft.updated_at_us for draft in drafts],
    }


def _hold(tx: Transaction, drafts: Sequence[DraftShown]) -> None:
    """Lock drafts as they were loaded."""
    rows: Columns = {
        "owner_id": [draft.owner_id for draft in drafts],
        "draft_id": [draft.draft_id for draft in drafts],
        "version": [draft.version for draft in drafts],
    }
    hold(tx, DRAFT, rows)


def _delete(tx: Transaction, owner_id: str, draft_id: str) -> None:
    delete(tx, DRAFT, {"owner_id": [owner_id], "draft_id": [draft_id]})
    _delete_current(tx, [(owner_id, draft_id)])


def _delete_current(tx: Transaction, drafts: Sequence[tuple[str, str]]) -> None:
    """Owners whose current draft is this one have none any more."""
    if not drafts:
        return
    columns: Columns = {"owner_id": [owner for owner, _ in drafts], "draft_id": [draft for _, draft in drafts]}
    for piece in slices(tx, columns):
        rendered, parameters = source(tx, CURRENT_DRAFT, piece)
        tx.driver(f"DELETE FROM current_draft WHERE (owner_id, draft_id) IN ({rendered})", parameters)
