"""Power lost at any moment of a recorded run: the disks that may be left, and the laws that each of them breaks."""

import random
from collections.abc import Iterator
from typing import NamedTuple

from tests.faults import disk, scenario
from tests.faults.killsweep import broken_in, look
from tests.faults.nursery import Desk, Nursery
from tests.faults.scenario import Order


class State(NamedTuple):
    """A disk after a crash: whose turn it was, how many unsynced sectors were lost, the laws broken."""

    part: str
    sectors_lost: int
    broken: list[str]


def record(nursery: Nursery, desk: Desk, *, plant: str = "") -> list[disk.Operation]:
    trace = desk.path.parent / "trace"
    desk.clear()
    run = nursery.run(Order(desk.url, plant=plant), disk.recording_options(trace))
    assert run.status == 0, "the scenario fails by itself"
    return disk.recorded(trace, desk.path.parent)


def explore(desk: Desk, operations: list[disk.Operation], count: int, seed: int) -> Iterator[State]:
    """Look at that many disks; one of every kind is also run to its end."""
    finished: set[object] = set()
    for crash in disk.crashes(operations, desk.path.name, desk.template, count, random.Random(seed)):
        desk.lay(crash.files)
        told = crash.ack.counts if crash.ack else None
        try:
            found, verdict = look(desk.path)
            broken = broken_in(found, verdict, told)
            if found.fingerprint() not in finished:
                finished.add(found.fingerprint())
                scenario.finish(desk.url)
                broken += broken_in(*look(desk.path), told, at_the_end=True)
        except Exception as error:
            broken = [f"X1: the store cannot be used: {error!r}"]
        yield State(crash.part, crash.sectors_lost, broken)
