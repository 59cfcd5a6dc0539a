"""Hooks: what is special about a unit stands in a module of its users, never in a branch on its name.

A hook of live orders needs one of history that does the same, or the two parts would count different things.
"""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from msgspec import Struct

from keyfold.core import modules
from keyfold.core.errors import SettingsWrong
from keyfold.orders.model import CompletedOrder

Completed = Callable[[CompletedOrder], CompletedOrder | None]
History = Callable[[Any], Any]  # an Ibis table to an Ibis table
H = TypeVar("H", bound=Callable[..., Any])


class _Hook(Struct, frozen=True):
    """The mark of a hook."""

    kind: str


def completed(function: H) -> H:
    """Every completed order passes through it before it is counted: changed, or set aside by None.

    Identities and properties may change; the id of the order and its moment may not.
    """
    modules.mark(function, _Hook("completed"))
    return function


def history(function: H) -> H:
    """The table of history passes through it before it is read, with the columns named as in the settings."""
    modules.mark(function, _Hook("history"))
    return function


class Hooks:
    """The hooks of one unit."""

    def __init__(self, completed: Completed | None = None, history: History | None = None, source: str = "") -> None:
        self.completed = completed
        self.history = history
        self.source = source  # what their modules say, as they were loaded


def load(where: str, place: str) -> Hooks:
    """The hooks of a module; none where no module is named."""
    if not where:
        return Hooks()
    module = modules.load(where, place)
    found = _marked(module, place)
    if not found:
        raise SettingsWrong(f"there are no hooks in {where}", place=place, hint="Decorate functions with @completed")
    return Hooks(found.get("completed"), found.get("history"), _source(module, found.values()))


def _source(module: ModuleType, hooks: Iterable[Callable[..., Any]]) -> str:
    """The text of the module, and of those that its hooks come from; of one that has none, its name."""
    every = dict.fromkeys([module, *(sys.modules.get(each.__module__, module) for each in hooks)])
    return "\n".join(_text(each) for each in every)


def _text(module: ModuleType) -> str:
    try:
        return Path(getattr(module, "__file__", None) or "").read_text(encoding="utf-8", errors="replace")
    except OSError:  # it has no file of its own, as within an archive
        return module.__name__


def _marked(module: ModuleType, place: str) -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {}
    for function, hook in modules.marked(module, _Hook, place):
        if found.get(hook.kind, function) is not function:
            raise SettingsWrong(f"there are two hooks of kind {hook.kind}", place=module.__name__)
        found[hook.kind] = function
    return found
