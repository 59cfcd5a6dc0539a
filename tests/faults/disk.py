"""A disk that lost its power: rebuilt from a recorded run, with any part of what was not synced yet.

What was synced is there. Of later writes any subset of 512-byte sectors is, in any combination; of names made or
removed since the directory was synced, any first few. The shared-memory file and the lock files do not outlive a
crash by design and are left out.
"""

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from tests.faults.scenario import Ack

SECTOR_BYTES = 512
RECORDED = "openat,pwrite64,pwritev,write,fsync,fdatasync,ftruncate,fallocate,unlink,unlinkat,rename"
# How much of what was not synced survives: power fails early, late, or anywhere between.
SURVIVAL = (0.0, 0.1, 0.5, 0.5, 0.9, 1.0)

_CALL = re.compile(r'(\w+)\((?:AT_FDCWD<[^>]*>, |\d+<([^>]*)>)?(?:, )?(?:"([^"]*)")?(?:\.\.\.)?(.*)\)\s+= (-?\d+)')


class Write(NamedTuple):
    offset: int
    data: bytes


class Truncate(NamedTuple):
    size: int


class Operation(NamedTuple):
    """One recorded act: make, unlink, write, truncate, sync, sync directory, or acknowledge."""

    act: str
    name: str = ""
    change: Write | Truncate | None = None
    ack: Ack | None = None


def recording_options(trace: Path) -> list[str]:
    return ["-y", "-xx", "-s", "1000000", "-o", str(trace), "-e", f"trace={RECORDED}"]


def recorded(trace: Path, directory: Path) -> list[Operation]:
    """The acts on the database's files and the acknowledgements of a traced run, in order."""
    found = []
    for line in trace.read_text().splitlines():
        match = _CALL.match(line)
        if not match or match[5].startswith("-"):
            continue
        call, opened, text, rest, _ = match.groups()
        path = Path(_bytes(opened or text or "").decode())
        if call == "write" and path.parent != directory:
            word, _, ack = _bytes(text).partition(b" ")
            if word == b"ack":
                found.append(Operation("ack", ack=msgspec.json.decode(ack, type=Ack)))
        elif path == directory:
            if call == "fsync":
                found.append(Operation("sync directory"))
        elif path.parent == directory and not path.name.endswith(("-shm", "-next", "-writer")):
            found.extend(_act(call, path.name, text, rest))
    return found


def _act(call: str, name: str, text: str | None, rest: str) -> Iterator[Operation]:
    if call == "openat":
        if "O_CREAT" in rest:
            yield Operation("make", name)
    elif call in {"fsync", "fdatasync"}:
        yield Operation("sync", name)
    elif call == "unlink":
        yield Operation("unlink", name)
    elif call == "ftruncate":
        yield Operation("truncate", name, Truncate(int(rest.split(",")[-1])))
    elif call == "pwrite64":
        data = _bytes(text or "")
        count, offset = map(int, rest.split(",")[-2:])
        assert len(data) == count, f"strace left off {count - len(data)} bytes"
        yield Operation("write", name, Write(offset, data))
    else:
        raise AssertionError(f"the model of the disk does not know {call} of {name}")


def _bytes(escaped: str) -> bytes:
    return bytes.fromhex(escaped.replace("\\x", ""))


class _File:
    def __init__(self, content: bytes = b"") -> None:
        self.durable = bytearray(content)
        self.pending: list[Write | Truncate] = []

    def sync(self) -> None:
        for change in self.pending:
            _apply(self.durable, change)
        self.pending.clear()


class Crash(NamedTuple):
    """What is on the disk after a crash, and what had been acknowledged before it."""

    files: dict[str, bytes]
    ack: Ack | None
    part: str
    sectors_lost: int


class Disk:
    """Follows a recording, and crashes at any point of it."""

    def __init__(self, name: str, content: bytes) -> None:
        self._made: list[tuple[str, _File | None]] = []  # names made (or removed: None) since the directory's sync
        self._names: dict[str, _File] = {name: _File(content)}
        self._live = dict(self._names)
        self._ack: Ack | None = None
        self._part = "ground"

    def do(self, operation: Operation) -> None:
        act, name, change, ack = operation
        if ack is not None:
            self._part = ack.part
            self._ack = ack if ack.counts else self._ack
        elif act == "make":
            if name not in self._live:
                self._live[name] = _File()
                self._made.append((name, self._live[name]))
        elif act == "unlink":
            del self._live[name]
            self._made.append((name, None))
        elif act == "sync directory":
            self._names = dict(self._live)
            self._made.clear()
        elif act == "sync":
            self._live[name].sync()
        elif change is not None:
            self._live[name].pending.append(change)

    def crash(self, chance: random.Random) -> Crash:
        names: dict[str, _File | None] = dict(self._names)
        names.update(self._made[: chance.randint(0, len(self._made))])
        survival = chance.choice(SURVIVAL)
        lost = 0
        files = {}
        for name, file in names.items():
            if file is None:
                continue
            content = bytearray(file.durable)
            for change in file.pending:
                for piece in _sectors(change):
                    if chance.random() < survival:
                        _apply(content, piece)
                    else:
                        lost += 1
            files[name] = bytes(content)
        return Crash(files, self._ack, self._part, lost)


def crashes(
    operations: Sequence[Operation], name: str, content: bytes, count: int, chance: random.Random
) -> Iterator[Crash]:
    """That many crashes, at points spread over the whole recording, in order."""
    disk = Disk(name, content)
    cuts = sorted(chance.randrange(1, len(operations) + 1) for _ in range(count))
    done = 0
    for cut in cuts:
        for operation in operations[done:cut]:
            disk.do(operation)
        done = cut
        yield disk.crash(chance)


def _sectors(change: Write | Truncate) -> Iterator[Write | Truncate]:
    """A write as the disk takes it: sector by sector, whole ones only between its ends."""
    if isinstance(change, Truncate):
        yield change
        return
    start, end = change.offset, change.offset + len(change.data)
    while start < end:
        following = min(end, (start // SECTOR_BYTES + 1) * SECTOR_BYTES)
        yield Write(start, change.data[start - change.offset : following - change.offset])
        start = following


def _apply(content: bytearray, change: Write | Truncate) -> None:
    if isinstance(change, Truncate):
        del content[change.size :]
        content.extend(bytes(change.size - len(content)))
    else:
        content.extend(bytes(max(0, change.offset - len(content))))
        content[change.offset : change.offset + len(change.data)] = change.data
