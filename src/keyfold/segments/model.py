"""The rules of a user's set, pure: who is in, in which order, what is collected as garbage, and what is told of it.

A set is text, one line an entry in the order of entry: `\\nsports:4\\nnews:7`. Ids of segments hold neither a colon nor
a line break, so an entry is found, cut out and appended without taking the text apart: a change costs 1 to 2 µs where a
user is in 20 segments and 4 to 5 µs in 300, its message 2 and 18.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct

# The documents' own limit; whoever consumes the sets keeps fewer, so that some may leave without a gap.
SET_SEGMENTS_MAX = 600
DEPARTURES_MAX = 50
USER_ID_BYTES_MAX = 200
SEGMENT_ID_MAX = 100

SegmentId = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=SEGMENT_ID_MAX,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(?!\n)$",  # `$` alone lets a line break through: sets would tear
        description="the segment: letters, digits, dot, underscore, hyphen",
    ),
]
UserId = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=USER_ID_BYTES_MAX,
        pattern=r"^[^\x00]*$",
        description="the user; a number is written in decimal digits",
    ),
]
Version = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Why = Literal["left", "expired", "pushed_out"]
WHYS: tuple[Why, ...] = ("left", "expired", "pushed_out")

# Where a segment stands in the queue.
Stage = Literal["evaluation", "awaiting_diff", "diffing", "held", "done", "failed"]
STAGES: tuple[Stage, ...] = ("evaluation", "awaiting_diff", "diffing", "held", "done", "failed")


class Entry(Struct, frozen=True):
    """A segment that a user is in, and the evaluation that put them there."""

    segment_id: str
    evaluation_version: int


class Departure(Struct, frozen=True):
    """How a segment left a set: at which version of the set, and when."""

    segment_id: str
    evaluation_version: int
    why: Why
    version: int
    at: int  # unix seconds


class Collector:
    """Garbage collection as it is in force: what each segment's oldest valid version is, and how many entries fit."""

    def __init__(self, minimal_valid_versions: Mapping[str, int], segments_max: int = SET_SEGMENTS_MAX) -> None:
        self._minimal = {name: version for name, version in minimal_valid_versions.items() if version > 0}
        self._needles = [(f"\n{name}:", version) for name, version in self._minimal.items()]
        self._segments_max = segments_max

    def is_valid(self, segment_id: str, version: int) -> bool:
        return version >= self._minimal.get(segment_id, 0)

    def collected(self, body: str) -> tuple[str, list[tuple[Entry, Why]]]:
        """The set without stale entries, then without the oldest that are too many; and what was dropped."""
        gone: list[tuple[Entry, Why]] = []
        if self._has_stale(body):
            kept = []
            for entry in entries_of(body):
                if self.is_valid(entry.segment_id, entry.evaluation_version):
                    kept.append(entry)
                else:
                    gone.append((entry, "expired"))
            body = body_of(kept)
        if body.count("\n") > self._segments_max:
            every = list(entries_of(body))
            gone.extend((entry, "pushed_out") for entry in every[: -self._segments_max])
            body = body_of(every[-self._segments_max :])
        return body, gone

    def _has_stale(self, body: str) -> bool:
        if len(self._needles) <= 10:
            return any(
                (at := body.find(needle)) >= 0 and _number(body, at + len(needle)) < version
                for needle, version in self._needles
            )
        return any(not self.is_valid(entry.segment_id, entry.evaluation_version) for entry in entries_of(body))


class Change:
    """A segment at the version that a diff goes to: added to or removed from the sets of many users."""

    def __init__(self, segment_id: str, version: int, collector: Collector) -> None:
        self._segment_id = segment_id
        self._needle = f"\n{segment_id}:"
        self._line = f"\n{segment_id}:{version}"
        self._is_valid = collector.is_valid(segment_id, version)
        self._collector = collector

    def added(self, body: str) -> tuple[str, list[tuple[Entry, Why]]]:
        """Whoever is in stays where they are; a stale entry counts as none, and is replaced at the end."""
        if not self._is_valid:
            return self._collector.collected(body)
        at = body.find(self._needle)
        if at >= 0:
            if self._collector.is_valid(self._segment_id, _number(body, at + len(self._needle))):
                return self._collector.collected(body)
            body, stale = self._without(body, at)
            body, gone = self._collector.collected(body + self._line)
            return body, [(stale, "expired"), *gone]
        return self._collector.collected(body + self._line)

    def removed(self, body: str) -> tuple[str, list[tuple[Entry, Why]]]:
        at = body.find(self._needle)
        if at < 0:
            return self._collector.collected(body)
        body, entry = self._without(body, at)
        is_valid = self._collector.is_valid(entry.segment_id, entry.evaluation_version)
        body, gone = self._collector.collected(body)
        return body, [(entry, "left" if is_valid else "expired"), *gone]

    def _without(self, body: str, at: int) -> tuple[str, Entry]:
        end = body.find("\n", at + 1)
        end = len(body) if end < 0 else end
        return body[:at] + body[end:], Entry(self._segment_id, int(body[at + len(self._needle) : end]))


def entries_of(body: str) -> Iterator[Entry]:
    """The entries of a set, the oldest first."""
    for line in body.split("\n")[1:]:
        name, _, version = line.partition(":")
        yield Entry(name, int(version))


def body_of(entries: Sequence[Entry]) -> str:
    return "".join(f"\n{each.segment_id}:{each.evaluation_version}" for each in entries)


def payload_of(body: str, before: str, gone: Sequence[tuple[Entry, Why]]) -> bytes:
    """The message of a changed set: all of it, in the order of entry, and what the change was."""
    listed = body.replace(":", '","evaluation_version":').replace("\n", '},{"segment_id":"')
    segments = f"{listed[2:]}}}" if body else ""
    told = _told(body, before, gone)
    return f'{{"segments":[{segments}]{told}}}'.encode()


def departures_after(departures: str, gone: Sequence[tuple[Entry, Why]], version: int, at: int) -> str:
    """The departures of a set with those of one more change; the oldest make room."""
    lines = "".join(f"\n{each.segment_id}:{each.evaluation_version}:{why}:{version}:{at}" for each, why in gone)
    departures += lines
    surplus = departures.count("\n") - DEPARTURES_MAX
    return departures if surplus <= 0 else "\n" + departures.split("\n", surplus + 1)[-1]


def departures_of(departures: str) -> list[Departure]:
    """What is remembered of segments that left a set, the oldest first."""
    found = []
    for line in departures.split("\n")[1:]:
        name, evaluation_version, why, version, at = line.split(":")
        found.append(Departure(name, int(evaluation_version), _why(why), int(version), int(at)))
    return found


class Guard(Struct, frozen=True):
    """What a diff may do without being asked about: the largest share of the old snapshot that it may remove."""

    remove_share_max: float

    def objection(self, old_rows: int, new_rows: int, removed: int) -> str | None:
        """Why a diff must wait for somebody's approval, or None."""
        if new_rows == 0:
            return "the new snapshot is empty"
        if old_rows and removed > self.remove_share_max * old_rows:
            return f"{removed} of {old_rows} users would leave, more than {self.remove_share_max:.0%}"
        return None


_DIGITS = re.compile(r"\d+")


def _number(body: str, at: int) -> int:
    found = _DIGITS.match(body, at)
    assert found is not None, f"no version at {at} of a set"
    return int(found[0])


def _why(text: str) -> Why:
    for why in WHYS:
        if why == text:
            return why
    raise ValueError(f"{text!r} is no reason to leave a set")


def _told(body: str, before: str, gone: Sequence[tuple[Entry, Why]]) -> str:
    """What came and what went. Only the last entry can be new: a change adds one segment, at the end."""
    told = ""
    last = body.rpartition("\n")[2]
    if body and f"\n{last}\n" not in f"{before}\n":
        told += f',"entered":["{last.partition(":")[0]}"]'
    for why in WHYS if gone else ():
        if names := [f'"{entry.segment_id}"' for entry, each in gone if each == why]:
            told += f',"{why}":[{",".join(names)}]'
    return told
