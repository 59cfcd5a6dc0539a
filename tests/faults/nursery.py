"""Runs of the scenario in processes of their own, under strace: counted, recorded, or killed at a system call."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import msgspec
from msgspec import Struct

from keyfold.core.clock import ManualClock
from tests.faults.scenario import Ack, Order

ROOT = Path(__file__).parents[2]
STRACE = shutil.which("strace")
# Of every file that is laid: a crash keeps what a sync has written, its time included.
FILE_TIME = 1_700_000_000
# What SQLite and the turnstile lay beside a database.
ENDINGS = ("-wal", "-shm", "-journal", "-next", "-writer")


class Run(Struct, frozen=True):
    """How a run went: its exit status (−9: killed), and all it said."""

    status: int
    acks: list[Ack]

    @property
    def counts(self) -> list[int] | None:
        """The last thing it acknowledged."""
        return next((ack.counts for ack in reversed(self.acks) if ack.counts), None)

    @property
    def refusal(self) -> str:
        """The error of ours that ended it."""
        return self.acks[-1].refusal if self.acks else ""


class Nursery:
    """A process that forks a child for every run."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.scenario"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def run(self, order: Order, strace: Sequence[str] = ()) -> Run:
        """Run the scenario to its end or to its death; `strace` are options under which it is traced."""
        self._tell(msgspec.json.encode(order))
        word, _, pid = self._hear().partition(b" ")
        assert word == b"pid", f"the child failed before it began: {word!r} {pid!r}"
        tracer = attached(int(pid), strace) if strace else None
        self._tell(b"go")
        acks = []
        while True:
            word, _, rest = self._hear().partition(b" ")
            if word == b"end":
                break
            acks.append(msgspec.json.decode(rest, type=Ack))
        if tracer:
            tracer.communicate()
        return Run(int(rest), acks)

    def _tell(self, line: bytes) -> None:
        assert self._process.stdin
        self._process.stdin.write(line + b"\n")
        self._process.stdin.flush()

    def _hear(self) -> bytes:
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, "the nursery has died"
        return line.strip()


def attached(pid: int, options: Sequence[str]) -> "subprocess.Popen[bytes]":
    """An strace that holds the process; returns when it does."""
    assert STRACE
    tracer = subprocess.Popen([STRACE, "-p", str(pid), *options], stderr=subprocess.PIPE)
    assert tracer.stderr
    while b"attached" not in (line := tracer.stderr.readline()):
        assert line, f"strace ended with {tracer.wait()} before it was attached"
    return tracer


def migrated(path: Path) -> Path:
    """A closed store with our schema, the scenario's topics, a unit of orders and some segments, to be copied."""
    from tests.faults import order_scenario, segment_scenario
    from tests.faults.scenario import opened

    with opened(f"sqlite:///{path}", ManualClock()):
        pass
    order_scenario.set_up(f"sqlite:///{path}")
    segment_scenario.set_up(f"sqlite:///{path}")
    return path


class Desk:
    """A directory in which one run after another finds a fresh copy of the same store."""

    def __init__(self, template: Path, directory: Path) -> None:
        self.template = template.read_bytes()
        self.path = directory / "run.db"
        self.url = f"sqlite:///{self.path}"
        self.folder = self.path.with_suffix(".snapshots")
        self.beside: set[str] = set()  # what a run touches of that folder

    def clear(self) -> None:
        self.lay({self.path.name: self.template})

    def lay(self, files: Mapping[str, bytes]) -> None:
        """Put these files in place of all that was there."""
        for file in self.files:
            file.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        for name, content in files.items():
            path = self.path.parent / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            os.utime(path, (FILE_TIME, FILE_TIME))

    @property
    def files(self) -> list[Path]:
        """The files of the store, whether they are there yet or not."""
        return [self.path, *(self.path.with_name(self.path.name + end) for end in ENDINGS)]
