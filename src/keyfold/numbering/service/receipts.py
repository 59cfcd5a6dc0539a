"""Marks of what was published, on the clusters themselves: by them a coordinator that was set back is found out.

Of its folders a state cannot tell whether it was ever published: one that a dead master left looks the same. A mark is
a name beside the states of a type, made when the pointer has moved, and made up for by the next master where it is
missing. Names are not written over: a master that was paused puts no older mark in the place of a newer one.
"""

import re
from typing import NamedTuple

from keyfold.bulk.folders import Root
from keyfold.numbering.model import Published, Version

MARKS = ".published"
_NAME = re.compile(r"(\d{1,10}\.\d{1,10}\.\d{1,10}\.\d{1,10})-(\d{1,18})", re.ASCII)


class Mark(NamedTuple):
    """A publication of a type: they follow each other in the order of V, G and run."""

    rebuild: int
    generation: int
    run: int
    version: str

    @property
    def name(self) -> str:
        return f"{self.version}-{self.run}"


def of(state: Published) -> Mark:
    return _mark(state.version, state.run)


def found(root: Root, type_name: str) -> list[Mark]:
    """The marks that a cluster has of a type."""
    named = (_NAME.fullmatch(name) for name in root.names(_folder(type_name)))
    return sorted(_mark(each[1], int(each[2])) for each in named if each)


def leave(root: Root, type_name: str, mark: Mark) -> None:
    """Make a mark, and drop those that it makes needless."""
    there = found(root, type_name)
    if mark not in there:
        root.write(f"{_folder(type_name)}/{mark.name}", mark.name.encode())
    for older in there:
        if older < mark:
            root.drop(f"{_folder(type_name)}/{older.name}")


def _folder(type_name: str) -> str:
    return f"{type_name}{MARKS}"


def _mark(version: str, run: int) -> Mark:
    parsed = Version.parse(version)
    return Mark(parsed.rebuild, parsed.generation, run, version)
