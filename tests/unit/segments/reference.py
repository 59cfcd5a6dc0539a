"""The slow reference of a user's set: plain lists and loops, written from the specification alone."""

from collections.abc import Mapping, Sequence

Entries = list[tuple[str, int]]


def changed(
    entries: Sequence[tuple[str, int]],
    segment: str,
    version: int,
    is_added: bool,
    minimal: Mapping[str, int],
    segments_max: int,
) -> Entries:
    """Add or remove a segment, drop what has expired, then the oldest that are too many."""
    after = [each for each in entries if each[1] >= minimal.get(each[0], 0)]
    if is_added and segment not in [name for name, _ in after]:
        after.append((segment, version))
    if not is_added:
        after = [each for each in after if each[0] != segment]
    after = [each for each in after if each[1] >= minimal.get(each[0], 0)]
    return after[max(0, len(after) - segments_max) :]


def apart(old: Sequence[object], new: Sequence[object]) -> tuple[list[object], list[object]]:
    """What is added and what is removed, each in the order of its snapshot."""
    return [each for each in new if each not in set(old)], [each for each in old if each not in set(new)]
