"""Whatever the interleaving of orders, crashes, history and jumps of the clock: an order counts once, where it must."""

from pathlib import Path

import pytest

from tests.faults.effort import TIMEOUT_SECONDS
from tests.faults.matrix import Hit
from tests.faults.order_simulator import OrderSimulation
from tests.faults.seeds import every_seed_obeys, one_seed_gives_one_run, shared

pytestmark = [
    pytest.mark.spec("ORD-01", "ORD-04", "ORD-05", "ORD-06", "ORD-07", "ORD-08", "ORD-10", "ORD-14", "ORD-16"),
    pytest.mark.timeout(TIMEOUT_SECONDS),
]

SEEDS = 180


@pytest.mark.fault("crash between two steps", "orders")
@pytest.mark.fault("message delivered twice", "orders")
@pytest.mark.fault("acknowledgement lost", "orders")
@pytest.mark.fault("holder paused past its lease", "orders")
@pytest.mark.fault("poison message", "orders")
@pytest.mark.fault("clock jumped", "orders")
@shared
def test_every_interleaving_obeys_the_laws_of_orders(share: int, template: Path, fast_path: Path, hit: Hit) -> None:
    every_seed_obeys(OrderSimulation, share, template, fast_path, hit, seeds=SEEDS)


def test_the_same_seed_gives_the_same_run_of_orders(template: Path, fast_path: Path) -> None:
    one_seed_gives_one_run(OrderSimulation, template, fast_path, steps_min=50)
