"""Power lost at any moment of a recorded run: the disks that may be left, and the laws that each of them breaks."""

import random
from collections.abc import Iterator
from typing import NamedTuple

from tests.faults import disk
from tests.faults.killsweep import TALLY, WritePath
from tests.faults.nursery import Desk, Nursery
from tests.faults.scenario import Order


class State(NamedTuple):
    """A disk after a crash: whose turn it was, how many unsynced sectors were lost, the laws broken."""

    part: str
    sectors_lost: int
    broken: list[str]


def record(nursery: Nursery, desk: Desk, *, plant: str = "", path: WritePath = TALLY) -> list[disk.Operation]:
    trace = desk.path.parent / "trace"
    desk.clear()
    run = nursery.run(Order(desk.url, path.name, plant=plant), disk.recording_options(trace))
    assert run.status == 0, "the scenario fails by itself"
    return disk.recorded(trace, desk.path.parent)


def explore(
    desk: Desk, operations: list[disk.Operation], count: int, seed: int, *, path: WritePath = TALLY
) -> Iterator[State]:
    """Look at that many disks; one of every kind is also run to its end."""
    finished: set[object] = set()
    for crash in disk.crashes(operations, desk.path.name, desk.template, count, random.Random(seed)):
        desk.lay(crash.files)
        told = crash.ack.counts if crash.ack else None
        try:
            broken, fingerprint = path.inspect(desk.path, told, False)
            if fingerprint not in finished:
                finished.add(fingerprint)
                path.finish(desk.url)
                broken = broken + path.inspect(desk.path, told, True).broken
        except Exception as error:
            broken = [f"X1: the store cannot be used: {error!r}"]
        yield State(crash.part, crash.sectors_lost, broken)
