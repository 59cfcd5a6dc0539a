"""A disk that lost its power holds all that was acknowledged, whole, whatever part of the unsynced writes it kept."""

from collections import Counter
from pathlib import Path

import pytest
from tests.faults.crashstates import explore, record
from tests.faults.effort import effort, seed
from tests.faults.matrix import Hit
from tests.faults.nursery import Desk, Nursery

pytestmark = pytest.mark.spec("CORE-02", "CORE-06", "CORE-08")

STATES, STATES_LONG = 2_000, 1_000_000
# Of as many states, synchronous=NORMAL loses an acknowledged change in most; a few hundred show it surely.
STATES_OF_A_PLANT = 300


@pytest.fixture
def desk(template: Path, fast_path: Path) -> Desk:
    return Desk(template, fast_path)


@pytest.mark.fault("power lost", "ground", "tally")
def test_a_disk_that_lost_its_power_keeps_what_was_acknowledged_and_nothing_by_half(
    nursery: Nursery, desk: Desk, hit: Hit
) -> None:
    chosen = seed()
    print(f"KEYFOLD_FAULTS_SEED={chosen}")
    for number, state in enumerate(explore(desk, record(nursery, desk), effort(STATES, STATES_LONG), chosen)):
        assert not state.broken, f"state {number} of KEYFOLD_FAULTS_SEED={chosen}: {state.broken}"
        if state.sectors_lost:
            hit(state.part)


@pytest.mark.fault("planted bug", "ground", "tally")
def test_the_crash_states_show_that_synchronous_normal_loses_what_was_acknowledged(
    nursery: Nursery, desk: Desk, hit: Hit
) -> None:
    """A harness that cannot see the difference between FULL and NORMAL would prove nothing."""
    operations = record(nursery, desk, plant="synchronous=NORMAL")
    laws: Counter[str] = Counter()
    for state in explore(desk, operations, STATES_OF_A_PLANT, seed()):
        laws.update({law[:2] for law in state.broken})
        if state.broken:
            hit(state.part)
    print(f"of {STATES_OF_A_PLANT} states: {dict(laws)}")
    assert laws["X1"] > 0
