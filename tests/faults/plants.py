"""Planted bugs: mistakes that somebody could make, each of which a harness must catch."""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from keyfold.core.store import sqlite

Patch = tuple[object, str, object]  # where, which name, what instead


class Plant(NamedTuple):
    """A bug, as a sentence and as what it puts in place of our code."""

    name: str
    harness: str
    patches: Callable[[], list[Patch]]

    def plant(self) -> None:
        """For good: in a process that lives for one run."""
        for place, name, instead in self.patches():
            setattr(place, name, instead)

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        before = [(place, name, getattr(place, name)) for place, name, _ in self.patches()]
        try:
            self.plant()
            yield
        finally:
            for place, name, original in before:
                setattr(place, name, original)


def _pragma(pragma: str) -> Callable[[], list[Patch]]:
    prepare = sqlite._prepare_connection

    def prepare_wrongly(connection: object, record: object) -> None:
        prepare(connection, record)  # type: ignore[arg-type]
        connection.execute(f"PRAGMA {pragma}")  # type: ignore[attr-defined]

    return lambda: [(sqlite, "_prepare_connection", prepare_wrongly)]


PLANTS = [
    Plant("synchronous=NORMAL", "crash states", _pragma("synchronous = NORMAL")),
]
BY_NAME = {plant.name: plant for plant in PLANTS}
