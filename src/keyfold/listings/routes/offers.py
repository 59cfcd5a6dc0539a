"""The endpoints of offers by id: the site's bulk read, a seller's edits, stages and moderation."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from keyfold.core.context import Context
from keyfold.core.errors import Conflict, NotFound, VersionStale
from keyfold.core.gather import Ask, Operation, Outcome, Versioned
from keyfold.core.route import Route
from keyfold.core.store import Transaction
from keyfold.listings.categories import ContentRefused
from keyfold.listings.model import Photo
from keyfold.listings.routes.shapes import OfferPath, OfferShown, may_see, shown_outcome
from keyfold.listings.service import keeping, offers
from keyfold.listings.service.drafting import Filled
from keyfold.listings.service.keeping import Judged, OfferId, Opinion, StageState
from keyfold.listings.service.listings import Listings
from keyfold.listings.service.offers import Edit, Move, not_there
from keyfold.listings.service.saving import MODERATION_KIND, PHOTOS_KIND, Photos

READ_MAX = 1_000
OPINIONS_MAX = 1_000
READ_WEIGHT = 10  # of an offer in a batch: with 100 KB each, a batch of them is what is held in memory
JUDGE_WEIGHT = 10  # of an opinion: it may ban, which takes as long as an edit


class ReadBody(Struct, frozen=True, forbid_unknown_fields=True):
    offer_ids: Annotated[list[OfferId], Meta(min_length=1, max_length=READ_MAX)]


class OffersAnswer(Struct, frozen=True):
    """The offers that there are, each once, in the order asked for; `missing` are the others."""

    offers: list[OfferShown]
    missing: list[str]


class _RawOffers(Struct, frozen=True):
    """The same, of bodies as they are stored."""

    offers: list[msgspec.Raw]
    missing: list[str]


class Judgement(Struct, frozen=True):
    """What a seller is told of moderation's last opinion."""

    is_banned: bool
    reason: str


class OfferWhole(Struct, frozen=True):
    """An offer with what became of its photos, and moderation's last opinion. What stages keep is theirs alone."""

    offer: OfferShown
    photos: list[Photo]
    moderation: Judgement | None


class _RawWhole(Struct, frozen=True):
    offer: msgspec.Raw
    photos: list[Photo]
    moderation: Judgement | None


class MoveBody(Struct, frozen=True, forbid_unknown_fields=True):
    status: Literal["active", "sold", "removed"]
    reason: Annotated[str, Meta(max_length=500, description="why it is removed")] = ""
    version: Annotated[
        Annotated[int, Meta(ge=1, le=2**63 - 1)] | None, Meta(description="only if it is at this version")
    ] = None


class StagePath(Struct, frozen=True):
    offer_id: OfferId
    stage: Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_-]{0,49}(?!\n)$")]


class StageBody(Struct, frozen=True, forbid_unknown_fields=True):
    state: Annotated[Any, Meta(description="the stage's own affair")]


class OpinionsBody(Struct, frozen=True, forbid_unknown_fields=True):
    opinions: Annotated[list[Opinion], Meta(min_length=1, max_length=OPINIONS_MAX)]


class OpinionsAnswer(Struct, frozen=True):
    opinions: list[Judged]


def offer_routes(context: Context, listings: Listings) -> list[Route]:
    doors = Doors(context, listings)
    one = partial(Route, path_type=OfferPath)
    stage = partial(Route, path="/v1/offers/{offer_id}/stages/{stage}", path_type=StagePath, answer=StageState)
    return [
        Route(
            method="POST",
            path="/v1/offers",
            summary="Read offers by their ids",
            scope="read",
            body=ReadBody,
            answer=OffersAnswer,
            run=doors.reading(),
        ),
        one(
            method="GET",
            path="/v1/offers/{offer_id}",
            summary="Read an offer with its photos and moderation's opinion",
            scope="read",
            answer=OfferWhole,
            run=doors.whole,
            errors=(NotFound,),
        ),
        one(
            method="PUT",
            path="/v1/offers/{offer_id}",
            summary="Edit an offer",
            scope="listings.write",
            body=Filled,
            answer=OfferShown,
            run=doors.editing(),
            if_match=True,
            idempotent=True,
            errors=(NotFound, VersionStale, ContentRefused),
        ),
        one(
            method="POST",
            path="/v1/offers/{offer_id}/status",
            summary="Move an offer to another status",
            scope="listings.write",
            body=MoveBody,
            answer=OfferShown,
            run=doors.moving(),
            idempotent=True,
            errors=(NotFound, Conflict, VersionStale),
        ),
        stage(
            method="GET", summary="Read what a stage keeps", scope="ingest", run=doors.read_stage, errors=(NotFound,)
        ),
        stage(
            method="PUT",
            summary="Keep the state of a stage",
            scope="ingest",
            body=StageBody,
            run=doors.writing_stage(),
            if_match=True,
            idempotent=True,
            errors=(NotFound, VersionStale),
        ),
        Route(
            method="POST",
            path="/v1/opinions",
            summary="Send opinions of moderation",
            description="They also arrive by topic. Of each offer the newest version counts.",
            scope="moderate",
            body=OpinionsBody,
            answer=OpinionsAnswer,
            run=doors.judging(),
            idempotent=True,
        ),
    ]


class Doors:
    """What the endpoints do; an offer of a seller that a token does not name is not there."""

    def __init__(self, context: Context, listings: Listings) -> None:
        self._store = context.store
        self._listings = listings

    def reading(self) -> Operation:
        def apply(tx: Transaction, asks: Sequence[Ask]) -> list[Outcome]:
            answers: list[Outcome] = []
            # Each once: a short question must not have an answer of any length.
            for ask, there in zip(
                asks, offers.read_each(tx, [(ask.body.offer_ids, may_see(ask)) for ask in asks]), strict=True
            ):
                known = {told.offer_id for told in there}
                missing = [each for each in dict.fromkeys(ask.body.offer_ids) if each not in known]
                answers.append(_RawOffers([msgspec.Raw(told.body) for told in there], missing))
            return answers

        return Operation(
            name="listings read", apply=apply, writes=False, weight=lambda ask: READ_WEIGHT * len(ask.body.offer_ids)
        )

    def whole(self, ask: Ask) -> Outcome:
        offer_id = ask.path["offer_id"]

        def look(tx: Transaction) -> Outcome:
            told = offers.read(tx, [offer_id], may_see(ask)).get(offer_id)
            if told is None:
                return not_there(offer_id)
            kinds = {each.kind: each.body for each in offers.kinds_of(tx, told.seller_id, offer_id)}
            photos = msgspec.json.decode(kinds[PHOTOS_KIND], type=Photos).photos if PHOTOS_KIND in kinds else []
            judged = msgspec.json.decode(kinds[MODERATION_KIND], type=Judgement) if MODERATION_KIND in kinds else None
            return Versioned(_RawWhole(msgspec.Raw(told.body), photos, judged), told.version)

        return self._store.read(look)

    def editing(self) -> Operation:
        def apply(tx: Transaction, asks: Sequence[Ask]) -> list[Outcome]:
            edits = [
                Edit(offer_id=ask.path["offer_id"], version=ask.if_match or 0, filled=ask.body, may_see=may_see(ask))
                for ask in asks
            ]
            return [shown_outcome(each) for each in offers.edit(tx, self._listings, edits)]

        return Operation(name="listings edit", apply=apply, writes=True, key=_offer_id)

    def moving(self) -> Operation:
        def apply(tx: Transaction, asks: Sequence[Ask]) -> list[Outcome]:
            moves = [
                Move(
                    offer_id=ask.path["offer_id"],
                    status=ask.body.status,
                    reason=ask.body.reason,
                    version=ask.body.version,
                    may_see=may_see(ask),
                )
                for ask in asks
            ]
            return [shown_outcome(each) for each in offers.move(tx, self._listings, moves)]

        return Operation(name="listings move", apply=apply, writes=True, key=_offer_id)

    def read_stage(self, ask: Ask) -> Outcome:
        state = self._store.read(
            lambda tx: keeping.read_stage(tx, ask.path["offer_id"], ask.path["stage"], may_see(ask))
        )
        return Versioned(state, state.version)

    def writing_stage(self) -> Operation:
        def apply(tx: Transaction, asks: Sequence[Ask]) -> list[Outcome]:
            return [self._write_stage(tx, ask) for ask in asks]

        return Operation(name="listings stage", apply=apply, writes=True, key=_offer_id)

    def _write_stage(self, tx: Transaction, ask: Ask) -> Outcome:
        try:
            state = keeping.write_stage(
                tx,
                self._listings,
                ask.path["offer_id"],
                ask.path["stage"],
                ask.if_match or 0,
                ask.body.state,
                may_see(ask),
            )
        except (NotFound, VersionStale) as error:
            return error
        return Versioned(state, state.version)

    def judging(self) -> Operation:
        def apply(tx: Transaction, asks: Sequence[Ask]) -> list[Outcome]:
            return [OpinionsAnswer(keeping.judge(tx, self._listings, ask.body.opinions, may_see(ask))) for ask in asks]

        return Operation(
            name="listings judge",
            apply=apply,
            writes=True,
            weight=lambda ask: JUDGE_WEIGHT * len(ask.body.opinions),
            key=lambda ask: ask.body.opinions[0].offer_id,
        )


def _offer_id(ask: Ask) -> str:
    return ask.path["offer_id"]
