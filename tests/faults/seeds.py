"""Seeds played on a stage: each is one interleaving that must obey the laws; what a test of any simulator does."""

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.effort import effort, seed
from tests.faults.matrix import Hit
from tests.faults.stage import Stage

SEEDS_LONG = 20_000
# Split, so that several test processes share the work.
SHARES = 4
shared = pytest.mark.parametrize("share", range(SHARES))

Play = Callable[[int, Path, Path], Stage]  # a seed, the store to copy, where to put the copy


def simulate(play: Play, number: int, template: Path, directory: Path) -> Counter[tuple[str, str]]:
    """Run one seed; returns what struck whom."""
    simulation = play(number, template, directory)
    simulation.run()
    return simulation.struck


def every_seed_obeys(play: Play, share: int, template: Path, directory: Path, hit: Hit, *, seeds: int) -> None:
    """One seed is one interleaving; with KEYFOLD_FAULTS_SEED the run begins at that one."""
    first = seed()
    print(f"seeds {first + share}, {first + share + SHARES}, …")
    struck: Counter[tuple[str, str]] = Counter()
    for number in itertools.islice(itertools.count(first + share, SHARES), effort(seeds, SEEDS_LONG) // SHARES):
        struck += simulate(play, number, template, directory)
    for (fault, part), times in struck.items():
        hit(part, times, fault=fault)


def one_seed_gives_one_run(play: Play, template: Path, directory: Path, *, steps_min: int) -> None:
    """Otherwise a seed that failed could not be looked at."""
    traces = []
    for _ in range(2):
        simulation = play(7, template, directory)
        simulation.run()
        traces.append(simulation.trace)
    assert traces[0] == traces[1]
    assert len(traces[0]) > steps_min
