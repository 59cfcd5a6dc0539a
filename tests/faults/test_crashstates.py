"""A disk that lost its power holds all that was acknowledged, whole, whatever part of the unsynced writes it kept."""

import pytest

from tests.faults.crashstates import explore, record
from tests.faults.effort import TIMEOUT_SECONDS, effort, seed
from tests.faults.matrix import Hit
from tests.faults.nursery import Desk, Nursery
from tests.faults.order_scenario import ORDERS
from tests.faults.profile_scenario import PROFILES

pytestmark = [pytest.mark.spec("CORE-02", "CORE-06", "CORE-08"), pytest.mark.timeout(TIMEOUT_SECONDS)]

ACTS = ("make", "write", "truncate", "sync", "sync directory", "unlink", "ack")
STATES, STATES_LONG = 2_000, 1_000_000
PART_STATES, PART_STATES_LONG = 300, 100_000


@pytest.mark.fault("power lost", "ground", "tally")
def test_a_disk_that_lost_its_power_keeps_what_was_acknowledged_and_nothing_by_half(
    nursery: Nursery, desk: Desk, hit: Hit
) -> None:
    chosen = seed()
    print(f"KEYFOLD_FAULTS_SEED={chosen}")
    operations = record(nursery, desk)
    assert {each.act for each in operations} == set(ACTS)
    for number, state in enumerate(explore(desk, operations, effort(STATES, STATES_LONG), chosen)):
        assert not state.broken, f"state {number} of KEYFOLD_FAULTS_SEED={chosen}: {state.broken}"
        if state.sectors_lost:
            hit(state.part)


@pytest.mark.spec("PRO-01", "PRO-02", "PRO-04", "PRO-13")
@pytest.mark.fault("power lost", "profiles")
def test_a_disk_that_lost_its_power_holds_every_event_that_was_acknowledged_once(
    nursery: Nursery, desk: Desk, hit: Hit
) -> None:
    chosen = seed()
    print(f"KEYFOLD_FAULTS_SEED={chosen}")
    operations = record(nursery, desk, path=PROFILES)
    count = effort(PART_STATES, PART_STATES_LONG)
    for number, state in enumerate(explore(desk, operations, count, chosen, path=PROFILES)):
        assert not state.broken, f"state {number} of KEYFOLD_FAULTS_SEED={chosen}: {state.broken}"
        if state.sectors_lost and state.part == "profiles":
            hit("profiles")


@pytest.mark.spec("ORD-05", "ORD-08", "ORD-10", "ORD-14", "ORD-16")
@pytest.mark.fault("power lost", "orders")
def test_a_disk_that_lost_its_power_holds_every_order_that_was_acknowledged_once(
    nursery: Nursery, desk: Desk, hit: Hit
) -> None:
    chosen = seed()
    print(f"KEYFOLD_FAULTS_SEED={chosen}")
    operations = record(nursery, desk, path=ORDERS)
    count = effort(PART_STATES, PART_STATES_LONG)
    for number, state in enumerate(explore(desk, operations, count, chosen, path=ORDERS)):
        assert not state.broken, f"state {number} of KEYFOLD_FAULTS_SEED={chosen}: {state.broken}"
        if state.sectors_lost and state.part == "orders":
            hit("orders")
