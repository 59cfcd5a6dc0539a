"""Every interleaving of masters, operators and pruners that a seed can think of obeys the laws of numbering."""

from pathlib import Path

import pytest

from tests.faults.effort import TIMEOUT_SECONDS
from tests.faults.matrix import Hit
from tests.faults.numbering_simulator import NumberingSimulation
from tests.faults.seeds import every_seed_obeys, one_seed_gives_one_run, shared

pytestmark = [
    pytest.mark.spec("NUM-01", "NUM-02", "NUM-03", "NUM-05", "NUM-10", "NUM-11", "NUM-14", "NUM-15"),
    pytest.mark.timeout(TIMEOUT_SECONDS),
]

SEEDS = 30


@pytest.mark.fault("crash between two steps", "numbering")
@pytest.mark.fault("holder paused past its lease", "numbering")
@pytest.mark.fault("file spoilt", "numbering")
@shared
def test_every_interleaving_obeys_the_laws_of_numbering(share: int, template: Path, fast_path: Path, hit: Hit) -> None:
    every_seed_obeys(NumberingSimulation, share, template, fast_path, hit, seeds=SEEDS)


def test_the_same_seed_gives_the_same_run_of_numbering(template: Path, fast_path: Path) -> None:
    one_seed_gives_one_run(NumberingSimulation, template, fast_path, steps_min=100)
