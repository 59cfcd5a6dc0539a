"""Offers by id: read in bulk, edited, moved to another status, with what others keep at them."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec
from msgspec import Struct

from keyfold.core.errors import KeyfoldError, NotFound, VersionStale
from keyfold.core.store import Transaction
from keyfold.core.store.batch import Columns
from keyfold.core.store.shapes import load, load_rows
from keyfold.listings.model import Offer, Status, moved
from keyfold.listings.service import saving
from keyfold.listings.service.drafting import Filled, offer_of
from keyfold.listings.service.listings import Listings
from keyfold.listings.service.saving import OFFER_KIND, Change, Saved, told
from keyfold.listings.tables import OFFER

Wish = TypeVar("Wish", "Edit", "Move")
MaySee = Callable[[str], bool]  # whether a caller may see the offers of this seller


class Edit(Struct, frozen=True, kw_only=True):
    """New content of an offer, as it was seen at `version`."""

    offer_id: str
    version: int
    filled: Filled
    may_see: MaySee


class Move(Struct, frozen=True, kw_only=True):
    """Another status for an offer; `version` None moves it wherever it stands."""

    offer_id: str
    status: Status
    reason: str = ""
    version: int | None = None
    may_see: MaySee


class Told(Struct, frozen=True):
    """An offer as it is answered."""

    offer_id: str
    seller_id: str
    version: int
    body: bytes


def read(tx: Transaction, offer_ids: Sequence[str], may_see: MaySee = lambda _: True) -> dict[str, Told]:
    """The offers that there are, as they are told; of sellers whom nobody here may see not even the body is read."""
    sellers = saving.sellers_of(tx, offer_ids)
    return read_of(tx, [(seller, offer_id) for offer_id, seller in sellers.items() if may_see(seller)])


def read_each(tx: Transaction, wanted: Sequence[tuple[Iterable[str], MaySee]]) -> list[list[Told]]:
    """As `read`, for several callers at once: of each the offers that there are for this caller, in order."""
    wanted = [(list(dict.fromkeys(offer_ids)), may_see) for offer_ids, may_see in wanted]
    sellers = saving.sellers_of(tx, [each for offer_ids, _ in wanted for each in offer_ids])
    seen = [[each for each in ids if each in sellers and may_see(sellers[each])] for ids, may_see in wanted]
    found = read_of(tx, {(sellers[each], each) for ids in seen for each in ids})
    return [[found[each] for each in ids if each in found] for ids in seen]


def read_of(tx: Transaction, keys: Iterable[tuple[str, str]]) -> dict[str, Told]:
    """As `read`, where the seller is known."""
    ordered = sorted(keys)
    wanted: Columns = {
        "seller_id": [seller for seller, _ in ordered],
        "offer_id": [offer_id for _, offer_id in ordered],
        "kind": [OFFER_KIND] * len(ordered),
    }
    rows = load(tx, OFFER, wanted, ("version", "shown", "body"))
    return {
        offer_id: Told(offer_id, seller, version, told(body.encode(), version, status))
        for (seller, offer_id, _), (version, status, body) in rows.items()
    }


class KindShown(Struct, frozen=True):
    """What is kept at an offer beside the offer itself."""

    kind: str
    version: int
    body: msgspec.Raw


def kinds_of(tx: Transaction, seller_id: str, offer_id: str) -> list[KindShown]:
    """Everything that is kept at an offer."""
    rows = load_rows(tx, OFFER, {"seller_id": [seller_id], "offer_id": [offer_id]}, ("kind", "version", "body"))
    return [KindShown(kind, version, msgspec.Raw(body.encode())) for kind, version, body in sorted(rows)]


def edit(tx: Transaction, listings: Listings, edits: Sequence[Edit]) -> list[Saved | KeyfoldError]:
    """Put new content into offers; each answer by itself."""

    def after(saved: Saved, one: Edit) -> Offer:
        if saved.version != one.version:
            raise VersionStale(f"the offer is at version {saved.version}, not {one.version}", hint="Read it again")
        fresh = offer_of(listings, saved.offer.seller_id, one.filled)
        return msgspec.structs.replace(
            saved.offer,
            category=fresh.category,
            schema_version=fresh.schema_version,
            content=fresh.content,
            price=fresh.price,
            photos=fresh.photos,
            warehouse_id=fresh.warehouse_id,
        )

    return _changed(tx, listings, edits, after)


def move(tx: Transaction, listings: Listings, moves: Sequence[Move]) -> list[Saved | KeyfoldError]:
    """Move offers to another status, as their sellers wish. One that has it already stays as it is."""

    def after(saved: Saved, one: Move) -> Offer:
        if one.version is not None and saved.version != one.version:
            raise VersionStale(f"the offer is at version {saved.version}, not {one.version}", hint="Read it again")
        if saved.offer.status == one.status:
            return saved.offer
        return moved(saved.offer, one.status, "seller", one.reason)

    return _changed(tx, listings, moves, after)


def _changed(
    tx: Transaction, listings: Listings, wishes: Sequence[Wish], after: Callable[[Saved, Wish], Offer]
) -> list[Saved | KeyfoldError]:
    """Wishes for one offer take their turns; all others are saved together."""
    outcomes: list[Saved | KeyfoldError] = [not_there("")] * len(wishes)
    for turn in saving.rounds([(each.offer_id, at) for at, each in enumerate(wishes)]):
        sellers = saving.sellers_of(tx, [wishes[at].offer_id for at in turn])
        seen = {
            (seller, wishes[at].offer_id)
            for at in turn
            if (seller := sellers.get(wishes[at].offer_id)) is not None and wishes[at].may_see(seller)
        }
        saving.must_fit_together(tx, sorted(seen))
        found = {offer_id: saved for (_, offer_id), saved in saving.load_offers(tx, sorted(seen)).items()}
        ready: list[tuple[int, Change]] = []
        for at in turn:
            saved = found.get(wishes[at].offer_id)
            if saved is None:
                outcomes[at] = not_there(wishes[at].offer_id)
                continue
            try:
                ready.append((at, Change(saved, after(saved, wishes[at]))))
            except KeyfoldError as error:
                outcomes[at] = error
        for (at, _), each in zip(ready, saving.save(tx, listings, [change for _, change in ready]), strict=True):
            outcomes[at] = each
    return outcomes


def not_there(offer_id: str) -> NotFound:
    return NotFound(f"there is no offer {offer_id!r}")
