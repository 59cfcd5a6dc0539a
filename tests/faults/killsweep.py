"""SIGKILL at every write-path system call: the points, and what is found after each."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pysqlite3.dbapi2 as sqlite

from tests.faults import ledger, scenario
from tests.faults.ledger import Ledger
from tests.faults.nursery import Desk, Nursery, Run
from tests.faults.scenario import Order

# The calls that change a file, its name, or who may write it; and those that say when a change is safe.
KINDS = ("pwrite64", "fsync", "ftruncate", "unlink", "openat", "fcntl", "flock", "mmap", "close")
KILLED = -9


class Point(NamedTuple):
    """The nth call of its kind on the store's files; the process dies before the kernel does it."""

    kind: str
    number: int


class Struck(NamedTuple):
    """A kill, whose turn it was, and the laws that were broken after it."""

    point: Point
    part: str
    broken: list[str]


def points(nursery: Nursery, desk: Desk, *, plant: str = "") -> list[Point]:
    """Every kill point of the scenario, counted in a run that lives."""
    trace = desk.path.parent / "trace"
    desk.clear()
    run = nursery.run(Order(desk.url, plant=plant), ["-o", str(trace), "-e", f"trace={','.join(KINDS)}", *_paths(desk)])
    assert run.status == 0, "the scenario fails by itself"
    calls = Counter(match[1] for line in trace.read_text().splitlines() if (match := re.match(r"(\w+)\(", line)))
    return [Point(kind, number) for kind in KINDS for number in range(1, calls[kind] + 1)]


def sweep(nursery: Nursery, desk: Desk, chosen: Iterable[Point], *, plant: str = "") -> Iterator[Struck]:
    """Kill at each point, look, run to the end without a fault, and look again."""
    for point in chosen:
        desk.clear()
        inject = f"inject={point.kind}:signal=SIGKILL:when={point.number}"
        options = ["-o", "/dev/null", "-e", f"trace={point.kind}", "-e", inject, *_paths(desk)]
        run = nursery.run(Order(desk.url, plant=plant), options)
        if run.status != KILLED:
            yield Struck(point, run.part, [f"the kill never happened: the run ended with {run.status}"])
            continue
        yield Struck(point, run.part, broken_after(desk, run))


def broken_after(desk: Desk, run: Run) -> list[str]:
    """The laws broken by a store that a dead run left, as it is and when everything has run dry."""
    try:
        broken = broken_in(*look(desk.path), run.counts)
        scenario.finish(desk.url)
        return broken + broken_in(*look(desk.path), run.counts, at_the_end=True)
    except Exception as error:
        return [f"X1: the store cannot be used: {error!r}"]


def look(path: Path) -> tuple[Ledger, str]:
    """Open a store that was left behind, as SQLite recovers it: what it holds, and whether the file is sound."""
    connection = sqlite.connect(path)
    try:
        verdict = connection.execute("PRAGMA integrity_check").fetchone()[0]
        return Ledger(connection.execute), verdict
    finally:
        connection.close()


def broken_in(found: Ledger, verdict: str, counts: list[int] | None, *, at_the_end: bool = False) -> list[str]:
    """The laws broken in a store that had acknowledged so much."""
    broken = [] if verdict == "ok" else [f"X1: the file is not sound: {verdict}"]
    broken += ledger.broken_now(found)
    broken += ledger.torn(found, [{(each.key, each.version) for each in batch} for batch in scenario.messages()])
    if counts and any(there < told for there, told in zip(found.counts(), counts, strict=True)):
        broken.append(f"X1: {counts} was acknowledged, {found.counts()} is there")
    return broken + (ledger.broken_at_the_end(found, scenario.payloads()) if at_the_end else [])


def _paths(desk: Desk) -> list[str]:
    return [option for path in (*desk.files, desk.path.parent) for option in ("-P", str(path))]
