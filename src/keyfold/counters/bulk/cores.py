"""Parts of one large batch on several cores: compiled loops and large arrays do without Python's lock."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

ROWS_MIN = 1 << 18  # of a batch that is worth the threads; those of the service are smaller
CORES_MAX = 16


def cores_for(rows: int) -> int:
    if rows < ROWS_MIN:
        return 1
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, CORES_MAX)


def shares(rows: int, cores: int) -> list[tuple[int, int]]:
    """Rows as runs of nearly one length, one for each core."""
    return [(rows * core // cores, rows * (core + 1) // cores) for core in range(cores)]


def on_cores(cores: int, works: Sequence[Callable[[], Result]]) -> list[Result]:
    """Do all of these, so many at a time; what they return, in their order."""
    if cores == 1 or len(works) < 2:
        return [work() for work in works]
    with ThreadPoolExecutor(min(cores, len(works))) as pool:
        return [each.result() for each in [pool.submit(work) for work in works]]
