"""Whatever the order of steps, crashes, pauses and repeats: nothing is lost, doubled, reordered or written unasked."""

import itertools
from collections import Counter
from pathlib import Path

import pytest

from tests.faults.effort import TIMEOUT_SECONDS, effort, seed
from tests.faults.matrix import Hit
from tests.faults.simulator import Simulation, simulate

pytestmark = [
    pytest.mark.spec("CORE-02", "CORE-06", "CORE-07", "CORE-08", "CORE-09", "CORE-10"),
    pytest.mark.timeout(TIMEOUT_SECONDS),
]

SEEDS, SEEDS_LONG = 1_000, 20_000
# Split, so that several test processes share the work.
SHARES = 4


@pytest.mark.fault("crash between two steps", "ground", "tally")
@pytest.mark.fault("message delivered twice", "ground", "tally")
@pytest.mark.fault("acknowledgement lost", "ground", "tally")
@pytest.mark.fault("holder paused past its lease", "ground", "tally")
@pytest.mark.fault("poison message", "ground", "tally")
@pytest.mark.parametrize("share", range(SHARES))
def test_every_interleaving_obeys_the_laws(share: int, template: Path, fast_path: Path, hit: Hit) -> None:
    """One seed is one interleaving; with KEYFOLD_FAULTS_SEED the run begins at that one."""
    first = seed()
    print(f"seeds {first + share}, {first + share + SHARES}, …")
    struck: Counter[tuple[str, str]] = Counter()
    for number in itertools.islice(itertools.count(first + share, SHARES), effort(SEEDS, SEEDS_LONG) // SHARES):
        struck += simulate(number, template, fast_path)
    for (fault, part), times in struck.items():
        hit(part, times, fault=fault)


def test_the_same_seed_gives_the_same_run(template: Path, fast_path: Path) -> None:
    """Otherwise a seed that failed could not be looked at."""
    traces = []
    for _ in range(2):
        simulation = Simulation(7, template, fast_path)
        simulation.run()
        traces.append(simulation.trace)
    assert traces[0] == traces[1]
    assert len(traces[0]) > 100
