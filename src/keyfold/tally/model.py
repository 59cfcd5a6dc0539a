"""The rules of the tally, pure: what an addition is, how additions of one key fold, which events are new."""

from collections.abc import Iterable, Mapping
from typing import Annotated

from msgspec import Meta, Struct

from keyfold.core.errors import BadInput

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

Key = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[^\x00]*$", description="what is tallied")]
Value = Annotated[int, Meta(ge=INT64_MIN, le=INT64_MAX, description="a signed 64-bit number")]


class Addition(Struct, frozen=True, forbid_unknown_fields=True):
    """Add a number to the tally of a key."""

    key: Key
    add: Value = 1


class Tally(Struct, frozen=True):
    """The tally of a key; the version rises with every change, 0 means that there was none."""

    key: str
    value: int
    version: int


class Event(Struct, frozen=True, forbid_unknown_fields=True):
    """What a message of the topic `tally-events` says of its key."""

    add: Value


def folded(additions: Iterable[Addition]) -> dict[str, int]:
    """One sum a key; a sum that leaves 64 bits is refused before anything is written."""
    sums: dict[str, int] = {}
    for addition in additions:
        sums[addition.key] = sums.get(addition.key, 0) + addition.add
    for key, total in sums.items():
        if not INT64_MIN <= total <= INT64_MAX:
            raise BadInput(f"the additions to {key!r} do not fit in 64 bits")
    return sums


def newer(versions: Iterable[tuple[str, int]], applied: Mapping[str, int]) -> list[bool]:
    """For each (key, version) in order: whether it is newer than what was applied, here or before it in the list."""
    seen = dict(applied)
    verdicts = []
    for key, version in versions:
        fresh = version > seen.get(key, 0)
        if fresh:
            seen[key] = version
        verdicts.append(fresh)
    return verdicts
