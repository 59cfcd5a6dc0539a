"""Handlers: a user's functions that turn an event of a log into updates of a profile's counters."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from typing import Any, TypeVar

from msgspec import Struct

from keyfold.core import modules
from keyfold.core.errors import KeyfoldError, SettingsWrong
from keyfold.counters.catalog import UINT64_MAX, Catalog, Counter, Kind
from keyfold.counters.errors import CounterReadOnly, CounterUnknown, UpdateRefused, ValueWrong
from keyfold.counters.keys import owner_of
from keyfold.counters.model import VALUE_MAX, Number, must_be_value

_WHOLE_MIN, _WHOLE_MAX = -int(VALUE_MAX), int(VALUE_MAX)  # a whole number is compared quicker with its like
_CHECKED_FROM = Kind.FIXED32  # kinds that take only some of the finite numbers


def _is_number(value: object) -> bool:
    return isinstance(value, float | int) and -VALUE_MAX <= value <= VALUE_MAX


class Event(Struct, eq=False):
    """One event of a log, as a handler sees it: what every event has, and its own fields by name."""

    id: str
    time: int
    fields: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        try:
            return self.fields[name]
        except KeyError:
            raise UpdateRefused(f"the event has no field {name!r}") from None

    def get(self, name: str, default: Any = None) -> Any:
        return self.fields.get(name, default)


Update = tuple[Counter, int, Number, int]  # counter, key, value, owner (0: none)


class Writable:
    """The counters that the handlers of a log may write in profiles of a type, by id and by name."""

    def __init__(self, catalog: Catalog, log: str, profile_type: str) -> None:
        self.catalog = catalog
        self.log = log
        self.profile_type = profile_type
        fitting = [c for c in catalog.counters.values() if self._reason(c) is None]
        self.counters: dict[int | str, Counter] = {name: c for c in fitting for name in (c.id, c.name)}
        self.delayed = {c.id for c in fitting if catalog.group_of(c.id).delayed_records_max is not None}

    def why_not(self, counter: int | str) -> KeyfoldError:
        """Why a counter is not among them."""
        try:
            described = self.catalog[counter]
        except CounterUnknown as error:
            return error
        if described.no_operation:
            return CounterReadOnly(f"{described.name} is kept by the counters under it, handlers do not write it")
        return UpdateRefused(f"{described.name} {self._reason(described)}")

    def _reason(self, counter: Counter) -> str | None:
        if counter.no_operation:
            return "is marked NoOperation"
        if counter.profile_type != self.profile_type:
            return f"belongs to profiles of type {counter.profile_type}, not {self.profile_type}"
        if counter.input_types and self.log not in counter.input_types:
            return f"does not accept the log {self.log}, only {', '.join(counter.input_types)}"
        return None


class Updates:
    """Where a handler says what is to be counted. `owner` is a domain, or the number that `owner_of` gives for it.

    What cannot be kept is refused here, with the whole event: an event counts whole or not at all.
    """

    __slots__ = ("_counters", "_writable", "is_owned", "rows")

    def __init__(self, writable: Writable, rows: list[Update] | None = None) -> None:
        self._writable = writable
        self._counters = writable.counters
        self.rows: list[Update] = [] if rows is None else rows
        self.is_owned = False

    def one(self, counter: int | str, key: int, value: Number = 1, owner: str | int | None = None) -> None:
        """One key."""
        described = self._counters.get(counter)
        if described is None:
            raise self._writable.why_not(counter)
        # This is called for every update: what is usual passes by comparisons alone.
        if type(key) is not int or not 0 <= key <= UINT64_MAX:
            raise ValueWrong(f"the key {key!r:.50} of {described.name} is not an unsigned 64-bit number")
        if (type(value) is not int or not _WHOLE_MIN <= value <= _WHOLE_MAX) and not _is_number(value):
            raise ValueWrong(f"{described.name} takes finite numbers up to {VALUE_MAX:g}, not {value!r:.50}")
        if described.kind >= _CHECKED_FROM:
            must_be_value(described, value)
        self.rows.append((described, key, value, 0 if owner is None else self._owner(described, owner)))

    def many(
        self,
        counter: int | str,
        keys: Iterable[int],
        values: Number | Sequence[Number] = 1,
        owner: str | int | None = None,
    ) -> None:
        """Many keys, with one value or with one each."""
        listed = list(keys)
        each = values if isinstance(values, Sequence) else [values] * len(listed)
        if len(each) != len(listed):
            raise ValueWrong(f"counter {counter} was given {len(listed)} keys and {len(each)} values")
        for key, value in zip(listed, each, strict=True):
            self.one(counter, key, value, owner)

    def _owner(self, counter: Counter, owner: str | int) -> int:
        """An owner that is empty is a mistake, not the lack of one: its data would be public."""
        self.is_owned = True
        if counter.id not in self._writable.delayed:
            raise UpdateRefused(
                f"{counter.name} has no MaxDelayedRecords, so it cannot take data that is owned",
                hint="Set it in the CleanUpSettings of its time counter",
            )
        if isinstance(owner, str):
            return owner_of(owner)
        if type(owner) is not int or not 0 < owner <= UINT64_MAX:  # True is no owner
            raise ValueWrong(f"the owner {owner!r:.50} is neither a domain nor a number that owner_of gives")
        return owner


Handle = Callable[[Event, Updates], None]
H = TypeVar("H", bound=Handle)


class Handler(Struct, frozen=True):
    """A function, the log it reads, and the profile it feeds: `id_field` is where the event names that profile."""

    log: str
    profile_type: str
    id_field: str
    handle: Handle


def handler(log: str, profile_type: str = "user", *, profile_id: str = "profile_id") -> Callable[[H], H]:
    """Register a function for a log and a profile type; it may be registered for several."""
    if not all(isinstance(each, str) and each for each in (log, profile_type, profile_id)):
        raise TypeError('a handler names its log, the type of its profiles and their field as text: @handler("visit")')

    def register(function: H) -> H:
        if any(waits(function) for waits in (iscoroutinefunction, isgeneratorfunction, isasyncgenfunction)):
            raise TypeError(
                f"the handler {function.__name__} is called and not awaited or iterated, so nothing of it would run; "
                "write it with def, without async and yield"
            )
        modules.mark(function, Handler(log, profile_type, profile_id, function))
        return function

    return register


class Handlers:
    """The handlers of a product, by log."""

    def __init__(self, handlers: Iterable[Handler] = ()) -> None:
        self.by_log: dict[str, list[Handler]] = {}
        for each in handlers:
            self.by_log.setdefault(each.log, []).append(each)

    def writing(self, catalog: Catalog) -> dict[str, list[tuple[Handler, Writable]]]:
        """Each handler with the counters that it may write."""
        return {
            log: [(each, Writable(catalog, log, each.profile_type)) for each in own] for log, own in self.by_log.items()
        }

    @property
    def logs(self) -> list[str]:
        return sorted(self.by_log)

    def types_of(self, log: str) -> set[str]:
        return {each.profile_type for each in self.by_log.get(log, ())}


def load(where: str) -> Handlers:
    """The handlers of a module, by its name or its file."""
    if not where:
        return Handlers()
    module = modules.load(where, "profiles.handlers")
    found = [each for _, each in modules.marked(module, Handler, "profiles.handlers")]
    if not found:
        raise SettingsWrong(
            f"there are no handlers in {where}", place="profiles.handlers", hint="Decorate functions with @handler"
        )
    return Handlers({id(each): each for each in found}.values())
