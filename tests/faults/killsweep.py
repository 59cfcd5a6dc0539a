"""A fault at every write-path system call, death or an error: the points, and what is found after each."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pysqlite3.dbapi2 as sqlite

from tests.faults import ledger, scenario
from tests.faults.ledger import Ledger
from tests.faults.nursery import Desk, Nursery, Run
from tests.faults.scenario import Order

# The calls that change a file, its name, or who may write it; and those that say when a change is safe.
FILES = ("write", "mkdir", "rename", "link", "unlinkat", "rmdir")  # of files beside the store
KINDS = ("pwrite64", "fsync", "ftruncate", "unlink", "openat", "fcntl", "flock", "mmap", "close", *FILES)
# Those that a failing disk answers with an error.
FAILING = ("pwrite64", "fsync", "ftruncate", "write", "mkdir", "rename", "link")
ERRORS = ("EIO", "ENOSPC")
KILLED = -9


class Point(NamedTuple):
    """The nth call of its kind on the store's files, and whose turn it is then; the kernel does not do that call."""

    kind: str
    number: int
    part: str


class Inspected(NamedTuple):
    """What a store is like that was left behind: the laws broken; equal fingerprints where the same follows."""

    broken: list[str]
    fingerprint: object


class WritePath(NamedTuple):
    """A run that is killed: its name for the nursery, how it is finished, and how what it left is inspected."""

    name: str
    finish: Callable[[str], None]
    inspect: Callable[[Path, list[int] | None, bool], Inspected]  # what was acknowledged; whether all has run dry


class Struck(NamedTuple):
    """A fault at a point, and the laws that were broken after it."""

    point: Point
    broken: list[str]


def soundness(path: Path) -> list[str]:
    """Open a store that was left behind, as SQLite recovers it: whether the file is sound."""
    connection = sqlite.connect(path)
    try:
        verdict = connection.execute("PRAGMA integrity_check").fetchone()[0]
        return [] if verdict == "ok" else [f"X1: the file is not sound: {verdict}"]
    finally:
        connection.close()


def shrunk(there: list[int], told: list[int] | None) -> list[str]:
    """X1: less is there than was acknowledged."""
    if told and any(now < then for now, then in zip(there, told, strict=True)):
        return [f"X1: {told} was acknowledged, {there} is there"]
    return []


def _inspect_tallies(path: Path, counts: list[int] | None, at_the_end: bool) -> Inspected:
    broken = soundness(path)
    connection = sqlite.connect(path)
    try:
        found = Ledger(connection.execute)
    finally:
        connection.close()
    broken += ledger.broken_now(found)
    broken += ledger.torn(found, [{(each.key, each.version) for each in batch} for batch in scenario.messages()])
    broken += shrunk(found.counts(), counts)
    broken += ledger.broken_at_the_end(found, scenario.payloads()) if at_the_end else []
    return Inspected(broken, found.fingerprint())


TALLY = WritePath("tally", scenario.finish, _inspect_tallies)


def points(nursery: Nursery, desk: Desk, *, plant: str = "", path: WritePath = TALLY) -> list[Point]:
    """Every point of the scenario's writing, counted in a run that lives."""
    trace = desk.path.parent / "trace"
    desk.clear()
    options = ["-y", "-s", "1000", "-o", str(trace), "-e", f"trace={','.join(KINDS)}"]
    run = nursery.run(Order(desk.url, path.name, plant=plant), options)
    assert run.status == 0, "the scenario fails by itself"
    calls: Counter[str] = Counter()
    found = []
    part = "ground"
    desk.beside.clear()
    for line in trace.read_text().splitlines():
        kind = line.partition("(")[0]
        if said := re.search(r'"ack .*part\\":\\"(\w+)', line):
            part = said[1]
        elif kind in KINDS and str(desk.path.parent) in line:
            calls[kind] += 1
            found.append(Point(kind, calls[kind], part))
            desk.beside.update(re.findall(rf'[<"]({desk.folder}[^>"]*)[>"]', line))
    return sorted(found)


def sweep(
    nursery: Nursery, desk: Desk, chosen: Iterable[Point], *, plant: str = "", path: WritePath = TALLY
) -> Iterator[Struck]:
    """Kill at each point, look, run to the end without a fault, and look again."""
    for point in chosen:
        run, _ = _run(nursery, desk, point, "signal=SIGKILL", path, plant)
        assert run.status == KILLED, f"the kill at {point} never happened: the run ended with {run.status}"
        yield Struck(point, broken_after(desk, run, path))


def sweep_errors(
    nursery: Nursery, desk: Desk, chosen: Iterable[tuple[Point, str]], *, path: WritePath = TALLY
) -> Iterator[Struck]:
    """Let the call at each point fail with an error. The run copes with it, or ends by saying what is wrong."""
    for point, error in chosen:
        run, has_struck = _run(nursery, desk, point, f"error={error}", path)
        assert has_struck, f"{error} at {point} never happened: the run ended with {run.status}"
        if run.status == 0 or (run.status == scenario.FAILED and run.refusal):
            yield Struck(point, broken_after(desk, run, path))
        else:
            yield Struck(point, [f"{error} ended the run with {run.status} and no word of ours"])


def _run(nursery: Nursery, desk: Desk, point: Point, effect: str, path: WritePath, plant: str = "") -> tuple[Run, bool]:
    """A run with an effect at one point, and whether strace says that it had it."""
    desk.clear()
    trace = desk.path.parent / "trace"
    inject = f"inject={point.kind}:{effect}:when={point.number}"
    options = ["-o", str(trace), "-e", f"trace={point.kind}", "-e", inject, *_paths(desk)]
    run = nursery.run(Order(desk.url, path.name, plant=plant), options)
    return run, "INJECTED" in trace.read_text()


def broken_after(desk: Desk, run: Run, path: WritePath) -> list[str]:
    """The laws broken by a store that a dead run left, as it is and when everything has run dry."""
    try:
        broken = path.inspect(desk.path, run.counts, False).broken
        path.finish(desk.url)
        return broken + path.inspect(desk.path, run.counts, True).broken
    except Exception as error:
        return [f"X1: the store cannot be used: {error!r}"]


def _paths(desk: Desk) -> list[str]:
    return [option for path in (*desk.files, desk.path.parent, *sorted(desk.beside)) for option in ("-P", str(path))]
