"""Handlers: a user's functions that turn an event of a log into updates of a profile's counters."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from msgspec import Struct

from keyfold.core.errors import SettingsWrong
from keyfold.counters.catalog import Catalog, Counter
from keyfold.counters.errors import UpdateRefused, ValueWrong
from keyfold.counters.keys import owner_of
from keyfold.counters.model import Number

_MARK = "__keyfold_handlers__"


class Event:
    """One event of a log, as a handler sees it: what every event has, and its own fields by name."""

    __slots__ = ("fields", "id", "time")

    def __init__(self, id: str, time: int, fields: Mapping[str, Any]) -> None:
        self.id = id
        self.time = time
        self.fields = fields

    def __getitem__(self, name: str) -> Any:
        try:
            return self.fields[name]
        except KeyError:
            raise UpdateRefused(f"the event has no field {name!r}") from None

    def get(self, name: str, default: Any = None) -> Any:
        return self.fields.get(name, default)


Update = tuple[Counter, int, Number, int]  # counter, key, value, owner (0: none)


class Updates:
    """Where a handler says what is to be counted. `owner` is a domain, or the number that `owner_of` gives for it."""

    __slots__ = ("_catalog", "rows")

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self.rows: list[Update] = []

    def one(self, counter: int | str, key: int, value: Number = 1, owner: str | int | None = None) -> None:
        """One key."""
        self.rows.append((self._catalog[counter], key, value, 0 if owner is None else _owner(owner)))

    def many(
        self,
        counter: int | str,
        keys: Iterable[int],
        values: Number | Sequence[Number] = 1,
        owner: str | int | None = None,
    ) -> None:
        """Many keys, with one value or with one each."""
        described, number = self._catalog[counter], 0 if owner is None else _owner(owner)
        listed = list(keys)
        each = values if isinstance(values, Sequence) else [values] * len(listed)
        if len(each) != len(listed):
            raise ValueWrong(f"{described.name} was given {len(listed)} keys and {len(each)} values")
        self.rows += [(described, key, value, number) for key, value in zip(listed, each, strict=True)]


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

    def register(function: H) -> H:
        made = [*getattr(function, _MARK, ()), Handler(log, profile_type, profile_id, function)]
        setattr(function, _MARK, made)
        return function

    return register


class Handlers:
    """The handlers of a product, by log."""

    def __init__(self, handlers: Iterable[Handler] = ()) -> None:
        self.by_log: dict[str, list[Handler]] = {}
        for each in handlers:
            self.by_log.setdefault(each.log, []).append(each)

    @property
    def logs(self) -> list[str]:
        return sorted(self.by_log)

    def types_of(self, log: str) -> set[str]:
        return {each.profile_type for each in self.by_log.get(log, ())}


def load(where: str) -> Handlers:
    """The handlers of a module, by its name or its file."""
    if not where:
        return Handlers()
    module = _module(where)
    found = [each for value in vars(module).values() for each in getattr(value, _MARK, ())]
    if not found:
        raise SettingsWrong(
            f"there are no handlers in {where}", place="profiles.handlers", hint="Decorate functions with @handler"
        )
    return Handlers({id(each): each for each in found}.values())


def _module(where: str) -> ModuleType:
    try:
        if not where.endswith(".py"):
            return importlib.import_module(where)
        path = Path(where).resolve()
        spec = importlib.util.spec_from_file_location(f"keyfold_handlers_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    except Exception as error:
        raise SettingsWrong(
            f"the handlers cannot be loaded: {type(error).__name__}: {error}", place="profiles.handlers"
        ) from error


def _owner(owner: str | int) -> int:
    """An owner that is empty is a mistake, not the lack of one: its data would be public."""
    if isinstance(owner, str):
        return owner_of(owner)
    if not isinstance(owner, int) or not 0 < owner < 2**64:
        raise ValueWrong(f"the owner {owner!r} is neither a domain nor a number that owner_of gives")
    return owner
