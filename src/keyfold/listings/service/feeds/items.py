"""One line of a feed: read, checked, and made an offer, or what is wrong with it. Nothing here touches the store."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from keyfold.core.errors import BadInput
from keyfold.core.jsontext import (
    must_hold_64_bits,
    must_hold_no_nul,
    must_hold_whole_characters,
    must_not_be_deeper,
    must_not_repeat_names,
)
from keyfold.listings.model import Offer, Price, external_id_of
from keyfold.listings.service.drafting import Filled, offer_of
from keyfold.listings.service.listings import Listings

EXTERNAL_ID_MAX = 200
REASON_MAX = 1_000

ExternalId = Annotated[str, Meta(min_length=1, max_length=EXTERNAL_ID_MAX, description="the partner's own id")]
Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class FeedItem(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line. Without `external_id` the content itself says which offer it is."""

    external_id: ExternalId | None = None
    category: Annotated[str, Meta(min_length=1, max_length=100)]
    content: dict[str, Any]
    price: Price | None = None
    photos: tuple[str, ...] = ()
    business_id: Number | None = None  # the seller, where it is not told
    shop_id: Number | None = None
    warehouse_id: Number = 0


class Read(Struct, frozen=True):
    """What a line says. `body` is the offer as JSON; where it is empty, `reason` tells what is wrong."""

    external_id: str  # empty: it cannot be read
    body: str = ""
    reason: str = ""


class _Named(Struct, frozen=True):
    external_id: ExternalId | None = None
    content: Any = None


_REFUSALS = (BadInput, msgspec.MsgspecError, ValueError, OverflowError, RecursionError)
_decode = msgspec.json.Decoder(FeedItem).decode
_decode_named = msgspec.json.Decoder(_Named).decode
_encode = msgspec.json.Encoder().encode


def read_line(listings: Listings, seller_id: str, line: bytes) -> Read:
    """Whatever the line is, this says what it is."""
    try:
        item = _decoded(line)
        must_not_be_deeper(line, listings.topics.limits.depth_max)
        must_hold_64_bits(line)
        must_hold_no_nul(line)
        must_not_repeat_names(line)
        offer = _offer(listings, seller_id, item)
        return Read(offer.external_id, _encode(offer).decode())
    except _REFUSALS as error:
        # A message may quote a name of the line, and a name may hold what no store takes.
        return Read(_external_id(line), reason=str(error).replace("\0", "\\0")[:REASON_MAX] or type(error).__name__)


def _decoded(line: bytes) -> FeedItem:
    try:
        return _decode(line)
    except msgspec.DecodeError:
        must_hold_whole_characters(line)  # which tells better what is wrong
        raise


def _offer(listings: Listings, seller_id: str, item: FeedItem) -> Offer:
    filled = Filled(
        category=item.category,
        content=item.content,
        price=item.price,
        photos=item.photos,
        warehouse_id=item.warehouse_id,
    )
    offer = offer_of(listings, seller_id, filled)
    return msgspec.structs.replace(
        offer,
        external_id=external_id_of(item.external_id, item.content),
        business_id=offer.business_id if item.business_id is None else item.business_id,
        shop_id=offer.shop_id if item.shop_id is None else item.shop_id,
    )


def _external_id(line: bytes) -> str:
    """The external id of a line that is not valid, if it can be read all the same."""
    try:
        named = _decode_named(line)
        if named.external_id is not None:
            return "" if "\0" in named.external_id else named.external_id
        return external_id_of(None, named.content) if isinstance(named.content, Mapping) else ""
    except _REFUSALS:
        return ""
