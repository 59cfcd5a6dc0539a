"""A disk that lost its power: rebuilt from a recorded run, with any part of what was not synced yet.

What was synced is there. Of later writes any subset of 512-byte sectors is, in any combination; of names made or
removed since their directory was synced, any first few. The shared-memory file and the lock files do not outlive a
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
RECORDED = "openat,pwrite64,pwritev,write,fsync,fdatasync,ftruncate,fallocate,unlink,unlinkat,rename,link,mkdir,rmdir"
# How much of what was not synced survives: power fails early, late, or anywhere between.
SURVIVAL = (0.0, 0.1, 0.5, 0.5, 0.9, 1.0)

_CALL = re.compile(
    r'(\w+)\((?:AT_FDCWD<[^>]*>, |\d+<([^>]*)>(?:\(deleted\))?)?(?:, )?(?:"([^"]*)")?(?:\.\.\.)?(.*)\)\s+= (-?\d+)'
)


class Write(NamedTuple):
    offset: int | None  # None: at the end
    data: bytes


class Truncate(NamedTuple):
    size: int


class Operation(NamedTuple):
    """One recorded act: make (directory), rename, link, unlink, write, truncate, sync (directory), or acknowledge."""

    act: str
    name: str = ""  # below the directory that is looked at
    to: str = ""
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
        if call == "unlinkat" and opened:
            path /= _bytes(text).decode()
        if call == "write" and directory not in path.parents:
            word, _, ack = _bytes(text).partition(b" ")
            if word == b"ack":
                found.append(Operation("ack", ack=msgspec.json.decode(ack, type=Ack)))
        elif path == directory:
            if call == "fsync":
                found.append(Operation("sync directory"))
        elif directory in path.parents and not path.name.endswith(("-shm", "-next", "-writer")):
            found.extend(_act(call, str(path.relative_to(directory)), text, rest, directory))
    return found


def _act(call: str, name: str, text: str | None, rest: str, directory: Path) -> Iterator[Operation]:
    if call == "openat":
        if "O_CREAT" in rest:
            yield Operation("make", name)
    elif call == "mkdir":
        yield Operation("make directory", name)
    elif call in {"rename", "link"}:
        to = Path(_bytes(rest.strip(', "')).decode())
        yield Operation(call, name, str(to.relative_to(directory)))
    elif call in {"fsync", "fdatasync"}:
        yield Operation("sync", name)
    elif call in {"unlink", "unlinkat", "rmdir"}:
        yield Operation("unlink", name)
    elif call == "ftruncate":
        yield Operation("truncate", name, change=Truncate(int(rest.split(",")[-1])))
    elif call == "pwrite64":
        data = _bytes(text or "")
        count, offset = map(int, rest.split(",")[-2:])
        assert len(data) == count, f"strace left off {count - len(data)} bytes"
        yield Operation("write", name, change=Write(offset, data))
    elif call == "write":
        yield Operation("write", name, change=Write(None, _bytes(text or "")))
    else:
        raise AssertionError(f"the model of the disk does not know {call} of {name}")


def _bytes(escaped: str) -> bytes:
    return bytes.fromhex(escaped.replace("\\x", ""))


class _File:
    def __init__(self, content: bytes = b"") -> None:
        self.durable = bytearray(content)
        self.pending: list[Write | Truncate] = []
        self.size = len(content)

    def change(self, change: Write | Truncate) -> None:
        if isinstance(change, Write):
            change = Write(self.size if change.offset is None else change.offset, change.data)
            self.size = max(self.size, _begin(change) + len(change.data))
        else:
            self.size = change.size
        self.pending.append(change)

    def sync(self) -> None:
        for change in self.pending:
            _apply(self.durable, change)
        self.pending.clear()


class _Directory:
    def __init__(self) -> None:
        self.durable: dict[str, _File | _Directory] = {}
        self.live: dict[str, _File | _Directory] = {}
        self.pending: list[dict[str, _File | _Directory | None]] = []  # names made, or removed: None

    def change(self, names: "dict[str, _File | _Directory | None]") -> None:
        self.pending.append(names)
        _name(self.live, names)

    def sync(self) -> None:
        self.durable = dict(self.live)
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
        self._root = _Directory()
        self._root.change({name: _File(content)})
        self._root.sync()
        self._ack: Ack | None = None
        self._part = "ground"

    def do(self, operation: Operation) -> None:
        act, path, to, change, ack = operation
        directory, name = self._place(path)
        if ack is not None:
            self._part = ack.part
            self._ack = ack if ack.counts else self._ack
        elif act in ("make", "make directory"):
            if name not in directory.live:
                directory.change({name: _File() if act == "make" else _Directory()})
        elif act == "unlink":
            directory.change({name: None})
        elif act == "rename":
            other, new = self._place(to)
            if other is directory:
                directory.change({name: None, new: directory.live[name]})
            else:  # each directory is synced by itself: a crash may leave both names, or none
                other.change({new: directory.live[name]})
                directory.change({name: None})
        elif act == "link":
            other, new = self._place(to)
            other.change({new: directory.live[name]})
        elif act == "sync directory":
            self._root.sync()
        elif act == "sync":
            directory.live[name].sync()
        elif change is not None:
            self._file(directory.live[name]).change(change)

    def _place(self, path: str) -> tuple[_Directory, str]:
        *above, name = path.split("/")
        directory = self._root
        for each in above:
            below = directory.live[each]
            assert isinstance(below, _Directory)
            directory = below
        return directory, name

    def _file(self, found: _File | _Directory) -> _File:
        assert isinstance(found, _File)
        return found

    def crash(self, chance: random.Random) -> Crash:
        files: dict[str, bytes] = {}
        lost = self._left(self._root, "", chance.choice(SURVIVAL), chance, files)
        return Crash(files, self._ack, self._part, lost)

    def _left(
        self, directory: _Directory, above: str, survival: float, chance: random.Random, files: dict[str, bytes]
    ) -> int:
        """Put what a crash leaves of a directory into `files`; returns how many sectors were lost."""
        names = dict(directory.durable)
        for each in directory.pending[: chance.randint(0, len(directory.pending))]:
            _name(names, each)
        lost = 0
        for name, found in names.items():
            if isinstance(found, _Directory):
                lost += self._left(found, f"{above}{name}/", survival, chance, files)
                continue
            content = bytearray(found.durable)
            for change in found.pending:
                for piece in _sectors(change):
                    if chance.random() < survival:
                        _apply(content, piece)
                    else:
                        lost += 1
            files[above + name] = bytes(content)
        return lost


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
    begin = start = _begin(change)
    end = begin + len(change.data)
    while start < end:
        following = min(end, (start // SECTOR_BYTES + 1) * SECTOR_BYTES)
        yield Write(start, change.data[start - begin : following - begin])
        start = following


def _apply(content: bytearray, change: Write | Truncate) -> None:
    if isinstance(change, Truncate):
        del content[change.size :]
        content.extend(bytes(change.size - len(content)))
    else:
        begin = _begin(change)
        content.extend(bytes(max(0, begin - len(content))))
        content[begin : begin + len(change.data)] = change.data


def _begin(change: Write) -> int:
    assert change.offset is not None, "where a write goes is known once it is done"
    return change.offset


def _name(names: "dict[str, _File | _Directory]", changes: "dict[str, _File | _Directory | None]") -> None:
    for name, found in changes.items():
        if found is None:
            del names[name]
        else:
            names[name] = found
