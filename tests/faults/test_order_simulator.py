"""Whatever the interleaving of orders, crashes, history and jumps of the clock: an order counts once, where it must."""

import itertools
from collections import Counter
from pathlib import Path

import pytest

from tests.faults.effort import TIMEOUT_SECONDS, effort, seed
from tests.faults.matrix import Hit
from tests.faults.order_simulator import OrderSimulation, simulate

pytestmark = [
    pytest.mark.spec("ORD-01", "ORD-04", "ORD-05", "ORD-06", "ORD-07", "ORD-08", "ORD-10", "ORD-14", "ORD-16"),
    pytest.mark.timeout(TIMEOUT_SECONDS),
]

SEEDS, SEEDS_LONG = 240, 20_000
# Split, so that several test processes share the work.
SHARES = 4


@pytest.mark.fault("crash between two steps", "orders")
@pytest.mark.fault("message delivered twice", "orders")
@pytest.mark.fault("acknowledgement lost", "orders")
@pytest.mark.fault("holder paused past its lease", "orders")
@pytest.mark.fault("poison message", "orders")
@pytest.mark.fault("clock jumped", "orders")
@pytest.mark.parametrize("share", range(SHARES))
def test_every_interleaving_obeys_the_laws_of_orders(share: int, template: Path, fast_path: Path, hit: Hit) -> None:
    """One seed is one interleaving; with KEYFOLD_FAULTS_SEED the run begins at that one."""
    first = seed()
    print(f"seeds {first + share}, {first + share + SHARES}, …")
    struck: Counter[tuple[str, str]] = Counter()
    for number in itertools.islice(itertools.count(first + share, SHARES), effort(SEEDS, SEEDS_LONG) // SHARES):
        struck += simulate(number, template, fast_path)
    for (fault, part), times in struck.items():
        hit(part, times, fault=fault)


def test_the_same_seed_gives_the_same_run_of_orders(template: Path, fast_path: Path) -> None:
    """Otherwise a seed that failed could not be looked at."""
    traces = []
    for _ in range(2):
        simulation = OrderSimulation(7, template, fast_path)
        simulation.run()
        traces.append(simulation.trace)
    assert traces[0] == traces[1]
    assert len(traces[0]) > 50
