"""The laws of segments (S1 to S4, X1, X2, N3, G2), folded by hand from the rows of the store and the files beside it.

A `Book` is told what every snapshot holds and, where somebody watches, of every commit: it then replays the stretch of
users that the queue's row says was dealt with, through the slow reference of a set. Where a run was killed, nobody
watched: `Book.compare_history` then counts how often each user may have changed.
"""

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from keyfold.core.store import Store, Transaction
from keyfold.segments.service import queueing
from keyfold.segments.service.queueing import Queued
from tests.faults.ledger import Entry
from tests.unit.segments.reference import Entries, changed

Users = Sequence[int]


class Message(NamedTuple):
    version: int
    entries: Entries
    is_published: bool


class Found:
    """What is committed at one moment."""

    def __init__(self, tx: Transaction, topic: str) -> None:
        self.sets: dict[int, tuple[int, Entries]] = {}
        for user, version, segments in tx.driver("SELECT user_id, version, segments FROM user_segments"):
            self.sets[int(user)] = (version, _entries(segments))
        self.messages: dict[int, list[Message]] = defaultdict(list)
        rows = tx.driver("SELECT topic, key, version, payload, position FROM messages ORDER BY id")
        for told, key, version, payload, position in rows:
            if told == topic:
                self.messages[int(key)].append(Message(version, told_in(bytes(payload)), position is not None))
        names = [name for (name,) in tx.driver("SELECT segment_id FROM segment_queue")]
        self.rows = queueing.queued(tx, names)
        self.snapshots: dict[tuple[str, int], str] = {
            (name, version): json.loads(location)["folder"]
            for name, version, location in tx.driver(
                "SELECT segment_id, evaluation_version, location FROM segment_snapshots"
            )
        }

    def fingerprint(self) -> object:
        """Equal where the same follows."""
        moved = [(row.segment_id, row.stage, row.is_on, row.target_version, row.upto) for row in self.rows.values()]
        counts = [sum(each.is_published for each in told) for told in self.messages.values()]
        return tuple(sorted(moved, key=str)), tuple(sorted(self.snapshots)), sum(counts)


class Book:
    """What must be there."""

    def __init__(self, topic: str, root: Path, *, segments_max: int = 600) -> None:
        self.broken: list[str] = []
        self.counted: dict[tuple[str, int], Users] = {}  # the snapshots, by segment and version
        self.approved: set[tuple[str, int]] = set()
        self.rotten: set[tuple[str, int]] = set()  # spoilt on the disk, on purpose
        self.sets: dict[int, Entries] = {}
        self.versions: dict[int, int] = defaultdict(int)
        self.rows: dict[str, Queued] = {}
        self._topic = topic
        self._root = root
        self._segments_max = segments_max

    # What happens -----------------------------------------------------------------------------------------------------

    def commit(self, now_us: int, rows: Mapping[str, Queued]) -> None:
        """A transaction has committed, and this is the queue after it."""
        minimal = {name: row.minimal_valid_version for name, row in rows.items()}
        for name, after in rows.items():
            before = self.rows.get(name, after)
            if after.ticket < before.ticket:
                self.broken.append(f"N3: {name} went from ticket {before.ticket} back to {after.ticket}")
            if after.version < before.version:
                self.broken.append(f"X1: the row of {name} went back from {before.version} to {after.version}")
            if after.upto is not None and after.upto != before.upto:
                self._replay(before, after, minimal)
        self.rows = dict(rows)

    def _replay(self, before: Queued, after: Queued, minimal: Mapping[str, int]) -> None:
        name, target = after.segment_id, after.target_version
        if target is None:
            self.broken.append(f"S1: {name} went on to {after.upto} with no snapshot to go to")
            return
        if before.target_version not in (None, target):
            self.broken.append(f"S1: {name} went from target {before.target_version} to {target} in the middle")
        old, new = self._users(name, after.diff_version), self._users(name, target)
        begin, end = -1 if before.upto is None else int(before.upto), int(after.upto or 0)
        if begin < 0 and (name, target) not in self.approved and len(old - new) * 2 > len(old):
            self.broken.append(f"S1: {len(old - new)} of {len(old)} left {name} and nobody has approved it")
        for user in sorted(old ^ new):
            if begin < user <= end:
                self._change(user, name, target, user in new, minimal)

    def collect(self, users: Iterable[int]) -> None:
        """A sweep went over these users."""
        minimal = {name: row.minimal_valid_version for name, row in self.rows.items()}
        for user in users:
            if user in self.sets:
                self._change(user, "", 0, False, minimal)

    def _change(self, user: int, name: str, version: int, is_added: bool, minimal: Mapping[str, int]) -> None:
        before = self.sets.get(user, [])
        after = changed(before, name, version, is_added, minimal, self._segments_max)
        if after != before:
            self.sets[user] = after
            self.versions[user] += 1

    # What is there ----------------------------------------------------------------------------------------------------

    def look(self, tx: Transaction) -> Found:
        return Found(tx, self._topic)

    def broken_in(self, store: Store) -> list[str]:
        return self.broken + self.compare(store.snapshot(self.look))

    def compare(self, found: Found) -> list[str]:
        """Where every commit was watched."""
        broken = [f"S1: {user} is in {found.sets.get(user)}, not in {self.sets[user]}" for user in self._wrong(found)]
        broken += [f"S1: nobody put {user} into a set" for user in found.sets if user not in self.sets]
        return broken + self.compare_now(found)

    def _wrong(self, found: Found) -> list[int]:
        expected = {user: (self.versions[user], entries) for user, entries in self.sets.items()}
        return [user for user, each in expected.items() if found.sets.get(user) != each]

    def compare_now(self, found: Found) -> list[str]:
        """What holds between any two commits, whoever looks."""
        broken = []
        for user, (version, entries) in found.sets.items():
            told = found.messages[user]
            if [each.version for each in told] != list(range(1, version + 1)):
                broken.append(f"S2: {user} is at version {version}, told were {[each.version for each in told]}")
            elif told[-1].entries != entries:
                broken.append(f"S2: {user} is in {entries}, told was {told[-1].entries}")
            broken += [f"S3: {user} got a version for nothing: {two}" for one, two in _pairs(told) if one == two]
            if len({name for name, _ in entries}) < len(entries):
                broken.append(f"S1: {user} is twice in one segment: {entries}")
            if len(entries) > self._segments_max:
                broken.append(f"S1: {user} is in more segments than fit: {entries}")
        broken += [f"G2: {user} was told of and has no set" for user in found.messages if user not in found.sets]
        return broken + self._compare_queue(found)

    def _compare_queue(self, found: Found) -> list[str]:
        broken = []
        for name, row in found.rows.items():
            wanted = {row.diff_version, row.target_version, row.evaluation_version or None} - {None}
            broken += [f"X1: {name} has no snapshot {each}" for each in wanted if (name, each) not in found.snapshots]
            if row.stage == "failed" and not any(each[0] == name for each in self.rotten):
                broken.append(f"X1: {name} has failed, with nothing wrong: {row.reason}")
        for (name, version), folder in found.snapshots.items():
            if (name, version) in self.counted and (name, version) not in self.rotten:
                there = _ids_in(self._root / folder)
                if there != list(self.counted[name, version]):
                    broken.append(f"X1: the snapshot {version} of {name} has {there}, not what was sent")
        return broken

    def compare_history(self, found: Found, again: Iterable[tuple[str, int]] = ()) -> list[str]:
        """Where nobody watched, nothing was pushed out, and every snapshot is diffed in turn.

        `again` are the snapshots that everybody in them entered anew, because the segment had been off.
        """
        broken = []
        anew = set(again)
        for user in sorted({user for users in self.counted.values() for user in users} | set(found.sets)):
            version, entries = found.sets.get(user, (0, []))
            times = 0
            for name, row in found.rows.items():
                is_in, changes = self._followed(user, row, anew)
                times += changes
                valid = [each for each in entries if each[0] == name and each[1] >= row.minimal_valid_version]
                if is_in != bool(valid):
                    broken.append(f"S1: {user} {'is not' if is_in else 'is'} in {name}: {entries}, {row}")
            if times != version:
                broken.append(f"X2: {user} has changed {version} times, not {times}")
        return broken

    def _followed(self, user: int, row: Queued, anew: set[tuple[str, int]]) -> tuple[bool, int]:
        """Whether a user is in a segment now, and how often they came and went."""
        is_in, changes = False, 0
        dealt = row.target_version or 0 if row.upto is not None and user <= int(row.upto) else 0
        upto = max(row.diff_version or 0, dealt, self._off_at(row))
        for (name, version), users in sorted(self.counted.items()):
            if name == row.segment_id and version <= upto:
                changes += (user in users) != is_in or ((name, version) in anew and user in users)
                is_in = user in users
        return is_in and upto >= row.minimal_valid_version, changes

    def _off_at(self, row: Queued) -> int:
        """What had been dealt with when the segment was turned off."""
        return row.minimal_valid_version - 1 if row.diff_version is None else 0

    def ends(self, found: Found) -> list[str]:
        """Everything has run dry: every segment is where its last snapshot says, and all of it was published."""
        broken = [f"X1: {name} is {row.stage}: {row.reason}" for name, row in found.rows.items() if _is_due(row)]
        broken += [
            f"G2: version {each.version} of {user} was never published"
            for user, told in found.messages.items()
            for each in told
            if not each.is_published
        ]
        if self._segments_max < len(found.rows):
            return broken  # what was pushed out does not come back by itself
        for name, row in found.rows.items():
            expected = self._users(name, row.evaluation_version) if row.is_on and row.evaluation_version else set()
            is_in = {
                user
                for user, (_, entries) in found.sets.items()
                if any(each == name and version >= row.minimal_valid_version for each, version in entries)
            }
            if is_in != expected:
                broken.append(f"S1: in {name} are {sorted(is_in)}, in its last snapshot {sorted(expected)}")
        return broken

    def _users(self, name: str, version: int | None) -> set[int]:
        return set() if version is None else set(self.counted[name, version])


def compare_log(found: Found, logs: Iterable[Sequence[Entry]], at_the_end: bool) -> list[str]:
    """What a topic outside the store has: of every user growing versions at their first time, and nothing else."""
    broken = []
    seen: dict[int, list[int]] = defaultdict(list)
    for entry in (entry for log in logs for entry in log):
        user = int(entry.key)
        if entry.version not in seen[user]:
            seen[user].append(entry.version)
        told = {each.version: each.entries for each in found.messages[user]}
        if told.get(entry.version) != told_in(entry.payload):
            broken.append(f"G2: version {entry.version} of {user} was published and never committed")
    for user, versions in seen.items():
        if versions != list(range(1, len(versions) + 1)):
            broken.append(f"G3: of {user} were published {versions}")
    if at_the_end:
        broken += [
            f"S2: {user} is at version {version}, the topic at {len(seen[user])}"
            for user, (version, _) in found.sets.items()
            if len(seen[user]) != version
        ]
    return broken


def told_in(payload: bytes) -> Entries:
    return [(each["segment_id"], each["evaluation_version"]) for each in json.loads(payload)["segments"]]


def _entries(text: str) -> Entries:
    lines = [line.split(":") for line in text.split("\n")[1:]]
    return [(name, int(version)) for name, version in lines]


def _pairs(told: Sequence[Message]) -> list[tuple[Entries, Entries]]:
    entries = [[], *(each.entries for each in told)]
    return list(itertools.pairwise(entries))


def _is_due(row: Queued) -> bool:
    return bool(row.is_on) and row.stage not in ("done", "evaluation")


def _ids_in(folder: Path) -> Any:
    if not folder.is_dir():
        return "no folder"
    try:
        return [
            user
            for path in sorted(folder.glob("*.parquet"))
            for user in pq.read_table(path, use_threads=False).column(0).to_pylist()
        ]
    except (OSError, pa.ArrowException) as error:
        return f"a file that cannot be read: {error}"
