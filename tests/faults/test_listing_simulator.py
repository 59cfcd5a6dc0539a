"""Whatever the interleaving of schedulers, sellers, feeds, opinions and crashes: counts are rows, changes are told."""

from pathlib import Path

import pytest

from tests.faults.effort import TIMEOUT_SECONDS
from tests.faults.listing_simulator import ListingSimulation
from tests.faults.matrix import Hit
from tests.faults.seeds import every_seed_obeys, one_seed_gives_one_run, shared

pytestmark = [
    pytest.mark.spec("LST-02", "LST-06", "LST-07", "LST-08", "LST-09", "LST-10", "LST-11", "LST-12", "LST-15"),
    pytest.mark.timeout(TIMEOUT_SECONDS),
]

SEEDS = 40


@pytest.mark.fault("crash between two steps", "listings")
@pytest.mark.fault("message delivered twice", "listings")
@pytest.mark.fault("acknowledgement lost", "listings")
@pytest.mark.fault("holder paused past its lease", "listings")
@pytest.mark.fault("poison message", "listings")
@pytest.mark.fault("clock jumped", "listings")
@shared
def test_every_interleaving_obeys_the_laws_of_listings(share: int, template: Path, fast_path: Path, hit: Hit) -> None:
    """A message that comes twice is an opinion; a poison one speaks of no offer of ours, or cannot be read."""
    every_seed_obeys(ListingSimulation, share, template, fast_path, hit, seeds=SEEDS)


def test_the_same_seed_gives_the_same_run_of_listings(template: Path, fast_path: Path) -> None:
    one_seed_gives_one_run(ListingSimulation, template, fast_path, steps_min=100)
