"""A process killed at any system call of its writing leaves a store in which nothing is lost, doubled or torn."""

import pytest

from tests.faults.effort import LONG, TENTHS, rotation
from tests.faults.killsweep import KINDS, Point, points, sweep
from tests.faults.matrix import Hit
from tests.faults.nursery import Desk, Nursery

pytestmark = pytest.mark.spec("CORE-02", "CORE-06", "CORE-08", "CORE-20")


@pytest.mark.fault("killed at a system call", "ground", "tally")
def test_a_process_killed_at_any_write_path_call_loses_and_doubles_nothing(
    nursery: Nursery, desk: Desk, hit: Hit
) -> None:
    """Events are put, relayed, applied to tallies and their changes relayed; each call is a point to die at."""
    every = points(nursery, desk)
    kinds = {point.kind for point in every}
    assert kinds >= {"pwrite64", "fsync", "ftruncate", "unlink", "openat", "fcntl", "flock"}
    chosen = every if LONG else _tenth(every)
    broken = []
    for struck in sweep(nursery, desk, chosen):
        hit(struck.part)
        broken += [f"{struck.point}: {law}" for law in struck.broken]
    assert not broken, "\n".join(broken[:20])


def _tenth(every: list[Point]) -> list[Point]:
    """Every tenth point of each kind, so that no kind is ever left out of the rotation for long."""
    turn = rotation()
    print(
        f"KEYFOLD_FAULTS_ROTATION={turn}: points {turn}, {turn + TENTHS}, … of {len(every)}; kinds {', '.join(KINDS)}"
    )
    return every[turn::TENTHS]
