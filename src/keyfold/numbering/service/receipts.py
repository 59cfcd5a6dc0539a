"""Receipts of what was published, on the clusters themselves: by them a coordinator that was set back is found out.

A state does not tell by its files whether it was ever published: one that a dead master left looks the same. A receipt
is a name beside the states of a type, left when the pointer has moved, and made up for by the next master where it is
missing. Names are not written over: a master that was paused puts no older receipt in the place of a newer one.
"""

import re
from typing import NamedTuple

from keyfold.bulk.folders import Root
from keyfold.numbering.model import Published, Version

RECEIPTS = ".published"
_NAME = re.compile(r"(\d{1,10}\.\d{1,10}\.\d{1,10}\.\d{1,10})-(\d{1,18})", re.ASCII)


class Receipt(NamedTuple):
    """A publication of a type: they follow each other in the order of V, G and run."""

    rebuild: int
    generation: int
    run: int
    version: str

    @property
    def name(self) -> str:
        return f"{self.version}-{self.run}"


def of(state: Published) -> Receipt:
    return _receipt(state.version, state.run)


def found(root: Root, type_name: str) -> list[Receipt]:
    """The receipts that a cluster has of a type."""
    named = (_NAME.fullmatch(name) for name in root.names(_folder(type_name)))
    return sorted(_receipt(each[1], int(each[2])) for each in named if each)


def leave(root: Root, type_name: str, receipt: Receipt) -> None:
    """Leave a receipt, and drop those that it makes needless."""
    there = found(root, type_name)
    if receipt not in there:
        root.write(f"{_folder(type_name)}/{receipt.name}", receipt.name.encode())
    for older in there:
        if older < receipt:
            root.drop(f"{_folder(type_name)}/{older.name}")


def _folder(type_name: str) -> str:
    return f"{type_name}{RECEIPTS}"


def _receipt(version: str, run: int) -> Receipt:
    parsed = Version.parse(version)
    return Receipt(parsed.rebuild, parsed.generation, run, version)
