"""Whatever the interleaving of diffs, uploads, people and crashes: sets are the committed changes, each told once."""

from pathlib import Path

import pytest

from tests.faults.effort import TIMEOUT_SECONDS
from tests.faults.matrix import Hit
from tests.faults.seeds import every_seed_obeys, one_seed_gives_one_run, shared
from tests.faults.segment_simulator import SegmentSimulation

pytestmark = [
    pytest.mark.spec("SEG-01", "SEG-04", "SEG-05", "SEG-06", "SEG-07", "SEG-08", "SEG-09", "SEG-11"),
    pytest.mark.timeout(TIMEOUT_SECONDS),
]

SEEDS = 60


@pytest.mark.fault("crash between two steps", "segments")
@pytest.mark.fault("message delivered twice", "segments")
@pytest.mark.fault("acknowledgement lost", "segments")
@pytest.mark.fault("holder paused past its lease", "segments")
@pytest.mark.fault("poison message", "segments")
@shared
def test_every_interleaving_obeys_the_laws_of_segments(share: int, template: Path, fast_path: Path, hit: Hit) -> None:
    """A message that comes twice is a snapshot sent again; a poison one is spoilt on the disk."""
    every_seed_obeys(SegmentSimulation, share, template, fast_path, hit, seeds=SEEDS)


def test_the_same_seed_gives_the_same_run_of_segments(template: Path, fast_path: Path) -> None:
    one_seed_gives_one_run(SegmentSimulation, template, fast_path, steps_min=100)
