"""The settings of order statistics: units, each with its identity types, dimensions, history and windows."""

import re
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from keyfold.core.settings import Section
from keyfold.orders.model import Value

UNIT_NAME = r"^[a-z][a-z0-9_]{0,29}$"
Name = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,62}$")]

OWN_PREFIX = "_keyfold_"  # of columns that are ours wherever history is read


def why_not_name(name: str, others: Iterable[str]) -> str:
    """Why an identity type or a dimension cannot be called this; nothing where it can.

    It is a column of history beside others, and engines do not tell capital letters from small ones.
    """
    if name.lower().startswith(OWN_PREFIX):
        return f"names that begin with {OWN_PREFIX} are not to be had"
    if name.lower() in ("order_id", "created_at", "application"):
        return f"`{name}` is what history calls something else"
    if name.lower() in (each.lower() for each in others):
        return f"`{name}` is the name of another one"
    return ""


# What the table of finished rides calls its columns; `statistics.application` is a field of a struct.
RIDES_COLUMNS = {
    "order_id": "id",
    "created_at": "created_proc",
    "phone_id": "user_phone_id",
    "device_id": "device_id",
    "card_id": "payment_tech_main_card_persistent_id",
    "yandex_uid": "user_uid",
    "application": "statistics.application",
    "payment_method_type": "payment_tech_type",
    "tariff": "performer_tariff_class",
}


RIDES_IDENTITIES = ("phone_id", "yandex_uid", "card_id", "device_id")
RIDES_DIMENSIONS = ("tariff", "brand", "payment_method_type")


class UnitSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One business whose orders are counted apart from all others."""

    identities: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=30)] = RIDES_IDENTITIES
    dimensions: Annotated[tuple[Name, ...], Meta(max_length=30)] = RIDES_DIMENSIONS
    start: str = ""  # ISO 8601: where there is history, live counting begins with orders created from then on
    application_brands: dict[str, Value] = {}  # the brand of an application
    mixed_brand: str = ""  # in older documents: the brand of counts that name none
    dedupe_days: Annotated[int, Meta(ge=1, le=3650)] = 30  # an order is known for so long; older ones are late
    keep_days: Annotated[int, Meta(ge=1, le=3650)] = 90  # how long orders that were not counted can be listed
    future_seconds_max: Annotated[int, Meta(ge=0, le=86_400)] = 300
    start_lead_seconds_min: Annotated[int, Meta(ge=0, le=30 * 86_400)] = (
        900  # a start lies this far ahead when it is set
    )
    slices_max: Annotated[int, Meta(ge=1, le=10_000_000)] = 100_000  # most combinations of dimension values
    reserve_seconds_max: Annotated[int, Meta(ge=1, le=30 * 86_400)] = 86_400
    history: str = ""  # Parquet files of completed orders: a path or a pattern
    columns: dict[str, str] = msgspec.field(
        default_factory=lambda: dict(RIDES_COLUMNS)
    )  # what the history calls order_id, created_at, identities and properties
    history_megabytes_max: Annotated[int, Meta(ge=100, le=1_000_000)] = 1_000  # memory of the engine that reads it
    hooks: str = ""  # a module of hooks, or a file ending in .py
    topic: str = ""  # where completed orders arrive; UNIT-orders-completed where it is empty

    def __post_init__(self) -> None:
        for listed, what in ((self.identities, "identities"), (self.dimensions, "dimensions")):
            if len(set(listed)) != len(listed):
                raise ValueError(f"{what}: a name stands twice")
        if "application" in self.dimensions:
            raise ValueError("dimensions: `application` is what a brand comes from, it cannot be a dimension")
        every = (*self.identities, *self.dimensions)
        for at, name in enumerate(every):
            if why := why_not_name(name, every[:at]):
                raise ValueError(f"{'identities' if at < len(self.identities) else 'dimensions'}: {why}")
        if self.application_brands and "brand" not in self.dimensions:
            raise ValueError("application_brands: there is no dimension `brand`")
        if self.start_lead_seconds_min < self.future_seconds_max:
            raise ValueError("start_lead_seconds_min must not be less than future_seconds_max")


class OrdersSettings(Section, frozen=True, kw_only=True):
    units: Annotated[
        dict[str, UnitSettings], Meta(description="the units by name; `rides` is there unless others are named")
    ] = msgspec.field(default_factory=lambda: {"rides": UnitSettings()})

    def __post_init__(self) -> None:
        for name in self.units:
            if not re.fullmatch(UNIT_NAME, name):
                raise ValueError(f"units: {name!r} must match {UNIT_NAME}")
