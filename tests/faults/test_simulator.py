"""Whatever the order of steps, crashes, pauses and repeats: nothing is lost, doubled, reordered or written unasked."""

from pathlib import Path

import pytest

from tests.faults.effort import TIMEOUT_SECONDS
from tests.faults.matrix import Hit
from tests.faults.seeds import every_seed_obeys, one_seed_gives_one_run, shared
from tests.faults.simulator import Simulation

pytestmark = [
    pytest.mark.spec("CORE-02", "CORE-06", "CORE-07", "CORE-08", "CORE-09", "CORE-10"),
    pytest.mark.timeout(TIMEOUT_SECONDS),
]

SEEDS = 520


@pytest.mark.fault("crash between two steps", "ground", "tally")
@pytest.mark.fault("message delivered twice", "ground", "tally")
@pytest.mark.fault("acknowledgement lost", "ground", "tally")
@pytest.mark.fault("holder paused past its lease", "ground", "tally")
@pytest.mark.fault("poison message", "ground", "tally")
@shared
def test_every_interleaving_obeys_the_laws(share: int, template: Path, fast_path: Path, hit: Hit) -> None:
    every_seed_obeys(Simulation, share, template, fast_path, hit, seeds=SEEDS)


def test_the_same_seed_gives_the_same_run(template: Path, fast_path: Path) -> None:
    one_seed_gives_one_run(Simulation, template, fast_path, steps_min=100)
