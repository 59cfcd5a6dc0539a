"""Profiles: counters of a person, a banner, a page, folded from logs, with owned data held back; read online."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keyfold.profiles.handlers import Event, Updates, handler

__all__ = ["Event", "Updates", "handler"]


def __getattr__(name: str) -> Any:
    """What a module of handlers imports; the command line does not wait for it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.handlers"), name)
