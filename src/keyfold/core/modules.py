"""Modules that users write and name in the settings: handlers, hooks."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from keyfold.core.errors import SettingsWrong

_MARKS = "__keyfold_marks__"

T = TypeVar("T")


def mark(function: Callable[..., Any], what: object) -> None:
    """Leave a mark at a function, and in its module, where it is missed once no name leads to the function."""
    setattr(function, _MARKS, (*_marks_of(function), what))
    own: dict[str, Any] = getattr(function, "__globals__", {})
    own.setdefault(_MARKS, []).append((function, what))


def marked(module: ModuleType, kind: type[T], place: str) -> list[tuple[Callable[..., Any], T]]:
    """What is marked in a module, or was imported to it; refused where nothing would call what was marked."""
    found = [(value, each) for value in vars(module).values() for each in _marks_of(value)]
    reached = {id(what) for _, what in found}
    for function, what in vars(module).get(_MARKS, ()):
        if id(what) not in reached:
            raise SettingsWrong(
                f"nothing would call {function.__name__} of line {function.__code__.co_firstlineno}: "
                f"no name of {module.__name__} leads to it any more",
                place=place,
                hint="Give each function a name of its own, at the top level of the module",
            )
    return [(value, each) for value, each in found if isinstance(each, kind)]


def _marks_of(value: object) -> tuple[object, ...]:
    marks = getattr(value, _MARKS, ())
    return marks if isinstance(marks, tuple) else ()  # some objects of a module have every attribute


def load(where: str, place: str) -> ModuleType:
    """A module by its name, or by its file (ending in .py); `place` is the setting that names it."""
    try:
        if not where.endswith(".py"):
            _import_from(Path.cwd())
            return importlib.import_module(where)
        path = Path(where).resolve()
        _import_from(path.parent)
        spec = importlib.util.spec_from_file_location(f"keyfold_{place.replace('.', '_')}_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    except (Exception, SystemExit) as error:
        what = place.rpartition(".")[2]
        raise SettingsWrong(f"the {what} cannot be loaded: {type(error).__name__}: {error}", place=place) from error


def _import_from(folder: Path) -> None:
    """Such a module, and what lies beside it, is found as if Python had been started there."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
