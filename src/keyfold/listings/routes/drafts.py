"""The endpoints of drafts."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated

from msgspec import Meta, Struct

from keyfold.core.context import Context
from keyfold.core.errors import BadInput, Conflict, NotFound
from keyfold.core.gather import Ask, Operation, Outcome
from keyfold.core.route import Route
from keyfold.core.store import Transaction
from keyfold.listings.categories import ContentRefused
from keyfold.listings.routes.shapes import SELLER, OfferShown, SellerId, Version, shown_outcome
from keyfold.listings.service import drafting
from keyfold.listings.service.drafting import DraftShown, Filled, Opening, Publishing
from keyfold.listings.service.listings import Listings

DRAFT_WEIGHT = 100  # in a batch, where each is done by statements of its own: a hundred of them share a commit
DraftId = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}(?!\n)$")]


class OpenBody(Struct, frozen=True, forbid_unknown_fields=True):
    anonymous_id: Annotated[SellerId | None, Meta(description="a visitor who has not logged in")] = None
    seller_id: Annotated[SellerId | None, Meta(description="who has logged in")] = None
    category: Annotated[str, Meta(max_length=100, description="what is wished; empty: whichever there is")] = ""


class DraftPath(Struct, frozen=True):
    draft_id: DraftId


class OwnerQuery(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    owner_id: SellerId


class FillBody(Struct, frozen=True, forbid_unknown_fields=True):
    owner_id: SellerId
    version: Version
    filled: Filled


class PublishBody(Struct, frozen=True, forbid_unknown_fields=True):
    owner_id: SellerId
    version: Version


def draft_routes(context: Context, listings: Listings) -> list[Route]:
    doors = Doors(context, listings)
    one = partial(Route, path_type=DraftPath, scope="listings.write", errors=(NotFound, Conflict))
    return [
        Route(
            method="POST",
            path="/v1/drafts",
            summary="Open a draft",
            description="The one draft that its owner goes on with: found, taken over at log-in, reset or made.",
            scope="listings.write",
            body=OpenBody,
            answer=DraftShown,
            run=doors.opening(),
            idempotent=True,
        ),
        one(
            method="GET",
            path="/v1/drafts/{draft_id}",
            summary="Read a draft",
            query=OwnerQuery,
            answer=DraftShown,
            run=doors.read,
        ),
        one(
            method="PUT",
            path="/v1/drafts/{draft_id}",
            summary="Fill in a draft",
            body=FillBody,
            answer=DraftShown,
            run=doors.filling(),
            idempotent=True,
        ),
        one(
            method="POST",
            path="/v1/drafts/{draft_id}/publish",
            summary="Publish a draft",
            description="A repeat is answered by the offer that it became. A draft that is refused stays.",
            body=PublishBody,
            answer=OfferShown,
            run=doors.publishing(),
            idempotent=True,
            errors=(NotFound, Conflict, ContentRefused),
        ),
    ]


def _opening(ask: Ask) -> Opening:
    body: OpenBody = ask.body
    return Opening(anonymous_id=body.anonymous_id or "", seller_id=body.seller_id or "", category=body.category)


class Doors:
    """What the endpoints do; an owner that a token does not name has no drafts."""

    def __init__(self, context: Context, listings: Listings) -> None:
        self._store = context.store
        self._listings = listings

    def opening(self) -> Operation:
        def check(ask: Ask) -> None:
            owners = _opening(ask).owners
            if len(set(owners)) < len(owners):
                raise BadInput("anonymous_id and seller_id are the same", place="seller_id")
            ask.client.must_see(SELLER, owners)

        def apply(tx: Transaction, asks: Sequence[Ask]) -> list[Outcome]:
            return [drafting.open_drafts(tx, self._listings, _opening(ask)) for ask in asks]

        return Operation(
            name="listings draft open",
            apply=apply,
            writes=True,
            check=check,
            weight=lambda _: DRAFT_WEIGHT,
            key=lambda ask: ask.body.seller_id or ask.body.anonymous_id or "",
        )

    def read(self, ask: Ask) -> Outcome:
        owner_id = ask.query.owner_id
        ask.client.must_see(SELLER, [owner_id])
        return self._store.read(lambda tx: drafting.read_draft(tx, owner_id, ask.path["draft_id"]))

    def filling(self) -> Operation:
        def check(ask: Ask) -> None:
            ask.client.must_see(SELLER, [ask.body.owner_id])

        def apply(tx: Transaction, asks: Sequence[Ask]) -> list[Outcome]:
            return [
                drafting.fill(
                    tx, self._listings, ask.body.owner_id, ask.path["draft_id"], ask.body.version, ask.body.filled
                )
                for ask in asks
            ]

        return Operation(
            name="listings draft fill",
            apply=apply,
            writes=True,
            check=check,
            weight=lambda _: DRAFT_WEIGHT,
            key=lambda ask: ask.body.owner_id,
        )

    def publishing(self) -> Operation:
        def check(ask: Ask) -> None:
            ask.client.must_see(SELLER, [ask.body.owner_id])

        def apply(tx: Transaction, asks: Sequence[Ask]) -> list[Outcome]:
            asked = [
                Publishing(owner_id=ask.body.owner_id, draft_id=ask.path["draft_id"], version=ask.body.version)
                for ask in asks
            ]
            return [shown_outcome(each) for each in drafting.publish(tx, self._listings, asked)]

        return Operation(
            name="listings publish", apply=apply, writes=True, check=check, key=lambda ask: ask.body.owner_id
        )
