"""The catalog: which counters there are, how each folds, and which share their keys and times."""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import IntEnum
from functools import cached_property

from msgspec import Struct

from keyfold.counters.errors import CatalogWrong, CounterUnknown

UINT64_MAX = 2**64 - 1
DAY_SECONDS = 86_400
DIGITS_MAX = 20


class Kind(IntEnum):
    """How values are stored: the number is that of the field in `ValueType`."""

    FLOAT = 1
    DOUBLE = 2
    FIXED32 = 3
    FIXED64 = 4


VALUE_FUNCTIONS = {
    "VF_FLOAT": Kind.FLOAT,
    "VF_DOUBLE": Kind.DOUBLE,
    "VF_AGE": Kind.FIXED32,
    "VF_FIXED64": Kind.FIXED64,
}
ID_FUNCTIONS = ("IF_ID", "IF_POLY2")
DECAYING = (Kind.FLOAT, Kind.DOUBLE)


class Counter(Struct, frozen=True, kw_only=True):
    """One counter as the catalog describes it."""

    id: int
    name: str
    kind: Kind
    namespace: str
    secondary_namespace: str | None = None
    id_function: str = "IF_ID"
    decay: float = 0.0
    time_counter_id: int | None = None
    input_types: tuple[str, ...] = ()
    description: str = ""
    restriction: str | None = None
    profile_type: str = "user"
    no_operation: bool = False
    not_glued: bool = False
    idf: bool = False
    records_max: int | None = None
    expire_days: int | None = None
    delayed_records_max: int | None = None


class Group(Struct, frozen=True, kw_only=True):
    """Counters that share keys and times: a time counter with the value counters under it.

    A value counter without a time counter is a group of its own; `id` is then its id, and nothing expires.
    """

    id: int
    profile_type: str
    time: Counter | None
    values: tuple[Counter, ...]  # by id

    @property
    def records_max(self) -> int | None:
        return self.time.records_max if self.time else None

    @property
    def expire_seconds(self) -> int | None:
        return self.time.expire_days * DAY_SECONDS if self.time and self.time.expire_days else None

    @property
    def delayed_records_max(self) -> int | None:
        return self.time.delayed_records_max if self.time else None

    @property
    def counter_ids(self) -> tuple[int, ...]:
        return tuple(sorted([counter.id for counter in self.values] + ([self.time.id] if self.time else [])))


def id_or_name(given: str) -> int | str:
    """What a person wrote to name a counter; what no number of a counter can be is a name that nothing has."""
    return int(given) if given.isascii() and given.isdecimal() and len(given) <= DIGITS_MAX else given


class Catalog:
    """Counters by id and by name, and their groups. Checked when it is made: all mistakes are reported at once."""

    def __init__(self, counters: Sequence[Counter], *, namespaces: Iterable[str] | None = None) -> None:
        if found := list(mistakes(counters, namespaces)):
            raise CatalogWrong(found)
        self.counters: dict[int, Counter] = {c.id: c for c in sorted(counters, key=lambda c: c.id)}
        self.by_name: dict[str, Counter] = {counter.name: counter for counter in self.counters.values()}
        self.groups: dict[int, Group] = {group.id: group for group in _groups(self.counters)}
        self._group_ids = {cid: group.id for group in self.groups.values() for cid in group.counter_ids}

    def __getitem__(self, which: int | str) -> Counter:
        found = self.counters.get(which) if isinstance(which, int) else self.by_name.get(which)
        if found is None:
            raise CounterUnknown(f"there is no counter {which!s:.100}", hint="`keyfold counters show` lists them")
        return found

    def __contains__(self, counter_id: int) -> bool:
        return counter_id in self.counters

    def group_of(self, counter_id: int) -> Group:
        return self.groups[self._group_ids[self[counter_id].id]]

    @cached_property
    def profile_types(self) -> tuple[str, ...]:
        return tuple(sorted({counter.profile_type for counter in self.counters.values()}))


def mistakes(
    counters: Sequence[Counter], namespaces: Iterable[str] | None, unreadable: Collection[int] = ()
) -> Iterator[str]:
    """Everything that is wrong with a catalog, each by the name of its counter.

    `namespaces` are those that there are, None where any will do; `unreadable` are ids of counters that could not be
    read, and whose mistakes were reported elsewhere.
    """
    known = None if namespaces is None else set(namespaces)
    by_id: dict[int, Counter] = {}
    names: set[str] = set()
    for counter in counters:
        if counter.id in by_id:
            yield f"{counter.name}: the id {counter.id} is that of {by_id[counter.id].name} already"
        if counter.name in names:
            yield f"{counter.name}: there are two counters of this name"
        by_id.setdefault(counter.id, counter)
        names.add(counter.name)
    for counter in counters:
        time_mistakes = () if counter.time_counter_id in unreadable else _time_mistakes(counter, by_id)
        for mistake in (*_own_mistakes(counter, known), *time_mistakes):
            yield f"{counter.name}: {mistake}"
    yield from _group_mistakes(by_id)


def _own_mistakes(counter: Counter, namespaces: set[str] | None) -> Iterator[str]:
    if not 0 < counter.id <= UINT64_MAX:
        yield f"the id {counter.id} is not a positive 64-bit number"
    for name in (counter.namespace, counter.secondary_namespace):
        if name is not None and namespaces is not None and name not in namespaces:
            yield f"unknown namespace {name}"
    if counter.id_function not in ID_FUNCTIONS:
        yield f"IdFunction is {counter.id_function}, and must be one of {', '.join(ID_FUNCTIONS)}"
    if counter.id_function == "IF_POLY2" and counter.secondary_namespace is None:
        yield "IF_POLY2 needs a SecondaryEngineNamespace"
    if counter.id_function == "IF_ID" and counter.secondary_namespace is not None:
        yield "SecondaryEngineNamespace needs IdFunction IF_POLY2"
    if not math.isfinite(counter.decay) or counter.decay < 0:
        yield f"DecayFactor {counter.decay} must be a finite number of at least 0"
    elif counter.decay and counter.kind not in DECAYING:
        yield "DecayFactor needs ValueFunction VF_FLOAT or VF_DOUBLE"
    if not all(counter.input_types):
        yield "an InputTypes is empty"
    limits = {
        "MaxRecords": counter.records_max,
        "ExpireDays": counter.expire_days,
        "MaxDelayedRecords": counter.delayed_records_max,
    }
    for name, value in limits.items():
        if value is not None and not 1 <= value <= 10_000_000:
            yield f"{name} {value} must be between 1 and 10000000"
    if any(value is not None for value in limits.values()):
        if counter.time_counter_id is not None:
            yield "CleanUpSettings stand on the time counter, not on a counter that has one"
        elif counter.kind is not Kind.FIXED32:
            yield "CleanUpSettings (MaxRecords, ExpireDays, MaxDelayedRecords) need a time counter"


def _time_mistakes(counter: Counter, by_id: dict[int, Counter]) -> Iterator[str]:
    if counter.time_counter_id is None:
        if counter.decay and counter.kind in DECAYING:
            yield "DecayFactor needs a TimeCounterId"
        return
    time = by_id.get(counter.time_counter_id)
    if time is None:
        yield f"TimeCounterId {counter.time_counter_id} is unknown"
        return
    if time.id == counter.id:
        yield "TimeCounterId names the counter itself"
        return
    if time.kind is not Kind.FIXED32:
        yield f"its time counter {time.name} must have ValueFunction VF_AGE"
    if time.time_counter_id is not None:
        yield f"its time counter {time.name} has a time counter of its own"
    for what, own, its in (
        ("EngineNamespace", counter.namespace, time.namespace),
        ("SecondaryEngineNamespace", counter.secondary_namespace, time.secondary_namespace),
        ("IdFunction", counter.id_function, time.id_function),
        ("ProfileType", counter.profile_type, time.profile_type),
    ):
        if own != its:
            yield f"{what} {own} differs from {its} of its time counter {time.name}"
    if time.not_glued and not counter.not_glued:
        yield f"its time counter {time.name} is NotGlued, so it must be NotGlued too"


def _group_mistakes(by_id: dict[int, Counter]) -> Iterator[str]:
    """Siblings share their keys: where one of them is restricted, another would give its keys away."""
    for group in _groups(by_id):
        members = (group.time, *group.values) if group.time else group.values
        if len({member.restriction for member in members}) > 1:
            listed = ", ".join(f"{member.name} {member.restriction or 'none'}" for member in members)
            yield f"counters that share keys must have one UsageRestriction: {listed}"


def _groups(by_id: dict[int, Counter]) -> list[Group]:
    values: dict[int, list[Counter]] = {}
    alone: list[Group] = []
    for counter in sorted(by_id.values(), key=lambda c: c.id):
        if counter.time_counter_id is not None:
            values.setdefault(counter.time_counter_id, []).append(counter)
        elif counter.kind is not Kind.FIXED32:
            alone.append(Group(id=counter.id, profile_type=counter.profile_type, time=None, values=(counter,)))
    timed = [
        Group(id=c.id, profile_type=c.profile_type, time=c, values=tuple(values.get(c.id, ())))
        for c in by_id.values()
        if c.kind is Kind.FIXED32 and c.time_counter_id is None
    ]
    return sorted(alone + timed, key=lambda group: group.id)
