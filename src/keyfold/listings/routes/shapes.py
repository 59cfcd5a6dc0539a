"""What several endpoints of listings take and answer."""

from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from keyfold.core.errors import KeyfoldError
from keyfold.core.gather import Ask, Outcome, Versioned
from keyfold.listings.model import Offer, Shown, shown
from keyfold.listings.service.keeping import OfferId
from keyfold.listings.service.offers import MaySee
from keyfold.listings.service.saving import Saved, told

SELLER = "seller"  # the kind of grants

SellerId = Annotated[
    str,
    Meta(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@-]*(?!\n)$", description="whose offers"),
]
Version = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class OfferPath(Struct, frozen=True):
    offer_id: OfferId


class SellerPath(Struct, frozen=True):
    seller: SellerId


class OfferShown(Offer, frozen=True, kw_only=True):
    """An offer, what is shown of its status, and its version."""

    shown: Shown
    version: int


def may_see(ask: Ask) -> MaySee:
    """Whether a caller may know of a seller's offers."""
    return partial(ask.client.may, SELLER)


def shown_outcome(saved: Saved | KeyfoldError) -> Outcome:
    """An offer that was saved, with the version that its next edit must name."""
    if isinstance(saved, KeyfoldError):
        return saved
    return Versioned(msgspec.Raw(told(saved.body, saved.version, shown(saved.offer))), saved.version)
