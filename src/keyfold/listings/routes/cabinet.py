"""The endpoints of a seller's cabinet."""

from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from keyfold.core.context import Context
from keyfold.core.errors import NotFound
from keyfold.core.gather import Ask, Outcome
from keyfold.core.route import Route
from keyfold.core.store import Transaction
from keyfold.listings.routes.shapes import SELLER, OfferShown, SellerId, SellerPath
from keyfold.listings.service import cabinet
from keyfold.listings.service.cabinet import PresetCount
from keyfold.listings.service.listings import Listings


class PresetPath(Struct, frozen=True):
    seller: SellerId
    preset: Annotated[str, Meta(min_length=1, max_length=100)]


class PageQuery(Struct, frozen=True, forbid_unknown_fields=True):
    cursor: Annotated[str, Meta(max_length=200, description="of the page before; none: the first page")] = ""
    limit: Annotated[int, Meta(ge=1, le=1_000)] = 20


class PageAnswer(Struct, frozen=True):
    """A page of a cabinet, the newest offers first. `cursor` leads to the next page; empty: this was the last."""

    preset: str
    count: int
    is_complete: bool
    cursor: str
    offers: list[OfferShown]


class _RawPage(Struct, frozen=True):
    preset: str
    count: int
    is_complete: bool
    cursor: str
    offers: list[msgspec.Raw]


class CountersAnswer(Struct, frozen=True):
    """What is counted of a seller: `Sold` and `MoneyEarned.CURRENCY` only grow, the others are of now."""

    counters: dict[str, int]
    presets: list[PresetCount]


def cabinet_routes(context: Context, listings: Listings) -> list[Route]:
    doors = Doors(context, listings)
    get = partial(Route, method="GET", scope="read")
    return [
        get(
            path="/v1/sellers/{seller}/presets/{preset}",
            summary="A page of a seller's offers",
            path_type=PresetPath,
            query=PageQuery,
            answer=PageAnswer,
            run=doors.page,
            errors=(NotFound,),
        ),
        get(
            path="/v1/sellers/{seller}/counters",
            summary="What is counted of a seller",
            path_type=SellerPath,
            answer=CountersAnswer,
            run=doors.counters,
        ),
    ]


class Doors:
    """What the endpoints do; a seller that a token does not name is not there."""

    def __init__(self, context: Context, listings: Listings) -> None:
        self._store = context.store
        self._listings = listings

    def page(self, ask: Ask) -> Outcome:
        seller = self._seller(ask)
        limit = min(ask.query.limit, self._listings.settings.page_offers_max)

        def look(tx: Transaction) -> _RawPage:
            found = cabinet.page(tx, seller, ask.path["preset"], ask.query.cursor, limit)
            bodies = [msgspec.Raw(told.body) for told in found.offers]
            return _RawPage(found.preset, found.count, found.is_complete, found.cursor, bodies)

        return self._store.read(look)

    def counters(self, ask: Ask) -> Outcome:
        seller = self._seller(ask)
        return self._store.read(
            lambda tx: CountersAnswer(cabinet.counters(tx, seller), cabinet.preset_counts(tx, seller))
        )

    def _seller(self, ask: Ask) -> str:
        seller = ask.path["seller"]
        ask.client.must_see(SELLER, [seller])
        return seller
