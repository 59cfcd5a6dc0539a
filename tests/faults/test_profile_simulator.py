"""Whatever the order of events, crashes, repeats and jumps of the clock: an event counts once, owned data is held."""

import itertools
from collections import Counter
from pathlib import Path

import pytest

from tests.faults.effort import TIMEOUT_SECONDS, effort, seed
from tests.faults.matrix import Hit
from tests.faults.profile_simulator import ProfileSimulation, simulate

pytestmark = [
    pytest.mark.spec("PRO-01", "PRO-02", "PRO-04", "PRO-05", "PRO-06", "PRO-13", "CNT-05", "CNT-07", "CNT-08"),
    pytest.mark.timeout(TIMEOUT_SECONDS),
]

SEEDS, SEEDS_LONG = 600, 20_000
# Split, so that several test processes share the work.
SHARES = 4


@pytest.mark.fault("crash between two steps", "profiles")
@pytest.mark.fault("message delivered twice", "profiles")
@pytest.mark.fault("acknowledgement lost", "profiles")
@pytest.mark.fault("holder paused past its lease", "profiles")
@pytest.mark.fault("poison message", "profiles")
@pytest.mark.fault("clock jumped", "profiles")
@pytest.mark.parametrize("share", range(SHARES))
def test_every_interleaving_obeys_the_laws_of_profiles(share: int, template: Path, fast_path: Path, hit: Hit) -> None:
    """One seed is one interleaving; with KEYFOLD_FAULTS_SEED the run begins at that one."""
    first = seed()
    print(f"seeds {first + share}, {first + share + SHARES}, …")
    struck: Counter[tuple[str, str]] = Counter()
    for number in itertools.islice(itertools.count(first + share, SHARES), effort(SEEDS, SEEDS_LONG) // SHARES):
        struck += simulate(number, template, fast_path)
    for (fault, part), times in struck.items():
        hit(part, times, fault=fault)


def test_the_same_seed_gives_the_same_run_of_profiles(template: Path, fast_path: Path) -> None:
    """Otherwise a seed that failed could not be looked at."""
    traces = []
    for _ in range(2):
        simulation = ProfileSimulation(7, template, fast_path)
        simulation.run()
        traces.append(simulation.trace)
    assert traces[0] == traces[1]
    assert len(traces[0]) > 50
