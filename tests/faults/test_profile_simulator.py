"""Whatever the order of events, crashes, repeats and jumps of the clock: an event counts once, owned data is held."""

from pathlib import Path

import pytest

from tests.faults.effort import TIMEOUT_SECONDS
from tests.faults.matrix import Hit
from tests.faults.profile_simulator import ProfileSimulation
from tests.faults.seeds import every_seed_obeys, one_seed_gives_one_run, shared

pytestmark = [
    pytest.mark.spec("PRO-01", "PRO-02", "PRO-04", "PRO-05", "PRO-06", "PRO-13", "CNT-05", "CNT-07", "CNT-08"),
    pytest.mark.timeout(TIMEOUT_SECONDS),
]

SEEDS = 200


@pytest.mark.fault("crash between two steps", "profiles")
@pytest.mark.fault("message delivered twice", "profiles")
@pytest.mark.fault("acknowledgement lost", "profiles")
@pytest.mark.fault("holder paused past its lease", "profiles")
@pytest.mark.fault("poison message", "profiles")
@pytest.mark.fault("clock jumped", "profiles")
@shared
def test_every_interleaving_obeys_the_laws_of_profiles(share: int, template: Path, fast_path: Path, hit: Hit) -> None:
    every_seed_obeys(ProfileSimulation, share, template, fast_path, hit, seeds=SEEDS)


def test_the_same_seed_gives_the_same_run_of_profiles(template: Path, fast_path: Path) -> None:
    one_seed_gives_one_run(ProfileSimulation, template, fast_path, steps_min=50)
