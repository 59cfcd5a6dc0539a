"""Bounded, decaying counters of a profile: a library without I/O, usable alone."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keyfold.counters.catalog import Catalog, Counter, Group, Kind
    from keyfold.counters.compile import load as load_catalog
    from keyfold.counters.counters import Counters, MutableCounters, Value
    from keyfold.counters.packs import arrays, read

__all__ = [
    "Catalog",
    "Counter",
    "Counters",
    "Group",
    "Kind",
    "MutableCounters",
    "Value",
    "arrays",
    "load_catalog",
    "read",
]

_PLACES = {
    "Catalog": "catalog:Catalog",
    "Counter": "catalog:Counter",
    "Counters": "counters:Counters",
    "Group": "catalog:Group",
    "Kind": "catalog:Kind",
    "MutableCounters": "counters:MutableCounters",
    "Value": "counters:Value",
    "arrays": "packs:arrays",
    "load_catalog": "compile:load",
    "read": "packs:read",
}


def __getattr__(name: str) -> Any:
    """NumPy and protobuf take a tenth of a second to import: the command line does not wait for them."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _PLACES[name].partition(":")
    return getattr(import_module(f"{__name__}.{module}"), attribute)
