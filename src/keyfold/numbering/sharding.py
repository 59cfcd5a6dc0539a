"""The library of sharding schemes: a key and its parameters give a shard, alike in Python and in every engine.

A scheme has a number, the S of a version, which stands for one rule and one count of shards for ever. The rule takes
24 bits of an MD5, because the engines' own hash functions differ from each other.

>>> from keyfold.numbering.model import Key
>>> shard_of(Scheme(number=0, by="offer", shards=8), Key(7, "chair", 5, 1))
3
"""

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta, Struct

from keyfold.numbering.model import VERSION_PART_MAX, Key

if TYPE_CHECKING:
    import ibis.expr.types as ir

By = Literal["offer", "business", "shop_tier"]
DIGITS = 6  # hexadecimal ones of the MD5: with 65,536 shards none is more than 0.4 % fuller for it
SHARDS_MAX = 65_536
LARGE = "large"


class Scheme(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One sharding scheme.

    `offer` spreads every offer by its whole key; `business` keeps a business together; `shop_tier` spreads the offers
    of shops whose parameter `tier` is "large" and keeps every other shop together.
    """

    number: Annotated[int, Meta(ge=0, le=VERSION_PART_MAX)]
    by: By
    shards: Annotated[int, Meta(ge=1, le=SHARDS_MAX)]

    def __str__(self) -> str:
        return f"scheme {self.number} (by {self.by}, {self.shards} shards)"


# What a scheme must know of an offer besides its key: columns of the offers, or of the shops file.
PARAMETERS: Mapping[By, tuple[str, ...]] = {"offer": (), "business": (), "shop_tier": ("tier",)}


def shard_of(scheme: Scheme, key: Key, parameters: Mapping[str, str] | None = None) -> int:
    """The shard of one offer. A parameter that is not known counts as empty."""
    tier = (parameters or {}).get("tier", "")
    digest = hashlib.md5(_text(scheme.by, key, tier).encode(), usedforsecurity=False).hexdigest()
    return int(digest[:DIGITS], 16) % scheme.shards


def shard_column(scheme: Scheme, offers: "ir.Table") -> "ir.IntegerColumn":
    """The same of a table of offers, whose columns are those of the key and the scheme's parameters."""
    import ibis

    digest = _text_column(scheme.by, offers).hexdigest("md5")
    alphabet = ibis.literal("0123456789abcdef")
    bits = ibis.literal(0, type="int64")
    for place in range(DIGITS):
        bits = bits * 16 + alphabet.find(digest.substr(place, 1)).cast("int64")
    return (bits % scheme.shards).cast("int32")


def _text(by: By, key: Key, tier: str) -> str:
    """What is hashed. Only the last part can hold a slash, so that no two keys give one text."""
    whole = f"{key.business_id}/{key.shop_id}/{key.warehouse_id}/{key.offer_id}"
    if by == "offer":
        return whole
    if by == "business":
        return str(key.business_id)
    return whole if tier == LARGE else f"shop/{key.shop_id}"


def _text_column(by: By, offers: "ir.Table") -> "ir.StringColumn":
    import ibis

    business, shop, warehouse = (offers[name].cast("string") for name in ("business_id", "shop_id", "warehouse_id"))
    whole = business + "/" + shop + "/" + warehouse + "/" + offers.offer_id
    if by == "offer":
        return whole
    if by == "business":
        return business
    return ibis.ifelse(ibis.coalesce(offers.tier, ibis.literal("")) == LARGE, whole, ibis.literal("shop/") + shop)
