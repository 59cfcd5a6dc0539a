"""The catalog of counters as a part of the product: commands alone."""

from keyfold.core.part import Part

PART = Part(
    name="counters",
    summary="the catalog of counters: show it, and lint a change of it",
    commands="keyfold.counters.commands:app",
)
