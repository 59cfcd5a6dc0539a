"""The rules of order statistics, pure: what an order must be, where it counts, how cells are read and split."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from keyfold.core.errors import BadInput, Conflict

UNKNOWN = "unknown"
APPLICATION, BRAND = "application", "brand"
IDENTITIES_MAX = 50

Text = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[^\x00]*$")]
Value = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[^\x00]*$", description="a value, as text")]
Moment = Annotated[datetime, Meta(tz=True, description="ISO 8601 with a zone")]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_encode_sorted = msgspec.json.Encoder(order="sorted").encode

Status = Literal["accepted", "duplicate", "conflict", "late", "before_start", "set_aside"]
Why = Literal["late", "before_start", "set_aside"]


class DimensionPending(Conflict):
    """The dimension is being added; until that is done it cannot be filtered or grouped by"""

    slug = "dimension-pending"


class CompletedOrder(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """An order whose status has changed to completed, as it is sent."""

    order_id: Text
    created_at: Moment
    identities: Annotated[
        dict[str, Value],
        Meta(description="the identities it has, by type: `phone_id`, …", min_length=1, max_length=IDENTITIES_MAX),
    ]
    properties: Annotated[
        dict[str, Value], Meta(description="its dimensions by name; `application` stands for the brand", max_length=50)
    ] = {}


class Identity(Struct, frozen=True, forbid_unknown_fields=True):
    """Whose orders."""

    type: Text
    value: Value


class Property(Struct, frozen=True, forbid_unknown_fields=True):
    """A dimension and its value."""

    name: Text
    value: Value


class IdentityType(Struct, frozen=True):
    """A type of identities of a unit. Without a start there is no history: every order counts live."""

    name: str
    type_id: int
    start_us: int | None = None
    source: Literal["", "backfill", "import"] = ""  # what filled the history part, which nothing else may do
    filled_at_us: int | None = None  # when it was last filled to the end
    lacking: int = 0  # orders that arrived live, were left to history, and were not in it
    # Raised with every order taken back that may be in its history; zero: there was none.
    taken_back: int = 1
    is_behind: bool = False  # more were left to history since it was looked through for them

    @property
    def has_history(self) -> bool:
        return self.start_us is not None

    def takes(self, created_at_us: int) -> bool:
        """Whether an order of that moment counts live."""
        return self.start_us is None or created_at_us >= self.start_us


class Splitting(Struct, frozen=True):
    """A dimension that is being added."""

    dimension: str
    switched_at_us: int
    marked_from_us: int  # every live order created from here on has a mark, which tells where it counts


class UnitState(Struct, frozen=True, dict=True):
    """What a unit counts by, as stored: it changes live, by commands."""

    identities: list[IdentityType]
    dimensions: list[str]
    splitting: Splitting | None = None
    columns: dict[str, str] = {}  # what history calls identity types and dimensions that were added

    @cached_property
    def by_name(self) -> dict[str, IdentityType]:
        return {each.name: each for each in self.identities}

    @cached_property
    def live_ids(self) -> dict[str, int] | None:
        """The ids of the types by name, where none has a start: then every order counts for all of them."""
        if any(each.has_history for each in self.identities):
            return None
        return {each.name: each.type_id for each in self.identities}

    def identity(self, name: str, place: str) -> IdentityType:
        if name in self.by_name:
            return self.by_name[name]
        known = ", ".join(each.name for each in self.identities)
        raise BadInput(f"there is no identity type {name!r}", place=place, hint=f"Known: {known}")

    def must_be_dimension(self, name: str, place: str) -> None:
        if name not in self.dimensions:
            raise BadInput(f"there is no property {name!r}", place=place, hint=f"Known: {', '.join(self.dimensions)}")
        if self.splitting is not None and self.splitting.dimension == name:
            raise DimensionPending(
                f"the property {name!r} is being added", place=place, hint="`keyfold orders status` tells how far it is"
            )


class Order(Struct, frozen=True, gc=False):
    """An order that was checked: its identities by type id, its slice."""

    order_id: str
    created_at_us: int
    identities: dict[int, str]
    slice_id: int
    sent: CompletedOrder
    left: tuple[str, ...] = ()  # the types of its other identities: for those history counts it


class Slice(Struct, frozen=True, gc=False):
    """Values of all dimensions; its id is the same wherever it is computed."""

    slice_id: int
    text: str

    @property
    def values(self) -> dict[str, str]:
        return msgspec.json.decode(self.text, type=dict[str, str])


class NotPlaced(Exception):
    """The order is well formed, but cannot be placed as the unit is set up."""


class LeftOut(NotPlaced):
    """The hook of the unit does not want the order counted."""


def micros(moment: datetime) -> int:
    passed = moment - _EPOCH
    return (passed.days * 86_400 + passed.seconds) * 1_000_000 + passed.microseconds  # half the cost of a division


def slice_of(values: Mapping[str, str]) -> Slice:
    """The slice of dimension values: eight bytes of a hash of their JSON, so that no writer waits for a number."""
    text = msgspec.json.encode(values, order="sorted").decode()
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return Slice(int.from_bytes(digest, "big", signed=True), text)


def fingerprint(order: CompletedOrder, created_at_us: int) -> int:
    """What an order says, whatever the order of its fields: it tells a repeat from a conflict."""
    said = _encode_sorted((created_at_us, order.identities, order.properties))
    return int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "big", signed=True)


def checked(
    order: CompletedOrder, state: UnitState, brands: Mapping[str, str], now_us: int, future_us: int, place: str
) -> None:
    """Refuse what is wrong with an order whatever the unit has counted so far."""
    if not order.identities:
        raise BadInput("an order needs at least one identity", place=f"{place}.identities")
    for name in order.identities:
        if name not in state.by_name:
            state.identity(name, f"{place}.identities.{name}")
    for name in order.properties:
        if name not in state.dimensions and not (name == APPLICATION and brands):
            known = ", ".join([*state.dimensions, *([APPLICATION] if brands else [])])
            raise BadInput(f"there is no property {name!r}", place=f"{place}.properties.{name}", hint=f"Known: {known}")
    created_at_us = micros(order.created_at)
    if created_at_us < 0:
        raise BadInput("the order was created before 1970", place=f"{place}.created_at")
    if created_at_us > now_us + future_us:
        raise BadInput("the order was created in the future", place=f"{place}.created_at")


def dimension_values(
    properties: Mapping[str, str], dimensions: Sequence[str], brands: Mapping[str, str]
) -> dict[str, str]:
    """The value of every dimension; the brand comes from the application, a missing value is `unknown`."""
    values = {name: properties.get(name, UNKNOWN) for name in dimensions}
    application = properties.get(APPLICATION)
    if application is not None:
        brand = brands.get(application)
        if brand is None:
            raise NotPlaced(f"the application {application!r} has no brand")
        if values[BRAND] not in (UNKNOWN, brand):
            raise NotPlaced(f"the application {application!r} belongs to {brand!r}, the order says {values[BRAND]!r}")
        values[BRAND] = brand
    return values


def live_identities(order: CompletedOrder, state: UnitState) -> dict[int, str]:
    """The identities for which the order counts live, by type id."""
    live_ids = state.live_ids
    if live_ids is not None:
        return {live_ids[name]: value for name, value in order.identities.items()}
    created_at_us = micros(order.created_at)
    by_name = state.by_name
    return {
        by_name[name].type_id: value for name, value in order.identities.items() if by_name[name].takes(created_at_us)
    }


def left_types(order: CompletedOrder, state: UnitState) -> tuple[str, ...]:
    """The types of identities for which history counts the order, not live counting."""
    created_at_us = micros(order.created_at)
    return tuple(name for name in order.identities if not state.by_name[name].takes(created_at_us))


# Reading ----------------------------------------------------------------------------------------------------------


class DataItem(Struct, frozen=True, gc=False):
    """How many orders have these values."""

    properties: list[Property]
    counter_value: int


def must_be_query(state: UnitState, filters: Sequence[Property], group_by: Sequence[str]) -> None:
    """Refuse what cannot be asked."""
    seen: set[str] = set()
    for index, each in enumerate(filters):
        state.must_be_dimension(each.name, f"filters[{index}].name")
        if each.name in seen:
            raise BadInput(f"the property {each.name!r} is filtered twice", place=f"filters[{index}].name")
        seen.add(each.name)
    for index, name in enumerate(group_by):
        state.must_be_dimension(name, f"group_by[{index}]")
        if name in group_by[:index]:
            raise BadInput(f"the property {name!r} stands twice", place=f"group_by[{index}]")


def matches(values: Mapping[str, str], filters: Sequence[Property]) -> bool:
    return all(values.get(each.name, UNKNOWN) == each.value for each in filters)


class View:
    """Slices as all queries with one set of filters and groups see them.

    The values of a slice never change, so what it is to such a query is found out once.
    """

    def __init__(self, filters: Sequence[Property], group_by: Sequence[str]) -> None:
        self._filters = filters
        self._group_by = group_by
        self._groups: dict[int, tuple[str, ...] | None] = {}  # by slice; None: the filters leave it out
        self._properties: dict[tuple[str, ...], list[Property]] = {}

    def grouped(self, cells: Iterable[tuple[int, int]], values_of: Mapping[int, Mapping[str, str]]) -> list[DataItem]:
        """The counts of one identity, given by slice, in the order of their groups; nothing where there are none."""
        sums: dict[tuple[str, ...], int] = {}
        for slice_id, count in cells:
            group = self._groups[slice_id] if slice_id in self._groups else self._see(slice_id, values_of[slice_id])
            if group is not None:
                sums[group] = sums.get(group, 0) + count
        return [DataItem(self._properties[group], sums[group]) for group in sorted(sums) if sums[group]]

    def _see(self, slice_id: int, values: Mapping[str, str]) -> tuple[str, ...] | None:
        group = None
        if matches(values, self._filters):
            group = tuple([values.get(name, UNKNOWN) for name in self._group_by])
            self._properties[group] = [Property(*each) for each in zip(self._group_by, group, strict=True)]
        self._groups[slice_id] = group
        return group


# First-N ----------------------------------------------------------------------------------------------------------


def could_both_match(left: Mapping[str, str], right: Mapping[str, str]) -> bool:
    """Whether an order could satisfy both filters: it could unless they ask one property for two values."""
    return all(right.get(name, value) == value for name, value in left.items())


def moved_of(text: str) -> dict[int, int]:
    """Of a mark: the slices that its order was moved to, by identity type."""
    return _MOVED.decode(text)


def kept_by_history(dimension: str) -> int:
    """Of a mark, where else a slice stands: its order was taken back while this dimension was being added.

    The history part of the type counts it until the next backfill. It is no slice: no order has an empty value.
    """
    return slice_of({dimension: ""}).slice_id


_MOVED = msgspec.json.Decoder(dict[int, int])


# Splitting by a new dimension -------------------------------------------------------------------------------------


class Part(Struct, gc=False):
    """A number of orders, and the moments of the first and the last."""

    count: int
    from_us: int
    to_us: int

    def add(self, other: "Part") -> None:
        self.count += other.count
        self.from_us = min(self.from_us, other.from_us)
        self.to_us = max(self.to_us, other.to_us)
