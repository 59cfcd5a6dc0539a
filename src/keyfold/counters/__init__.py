"""Bounded, decaying counters of a profile: a library without I/O, usable alone."""

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
