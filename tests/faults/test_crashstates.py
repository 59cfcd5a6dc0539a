"""A disk that lost its power holds all that was acknowledged, whole, whatever part of the unsynced writes it kept."""

from collections.abc import Collection

import pytest

from tests.faults.crashstates import explore, record
from tests.faults.effort import TIMEOUT_SECONDS, effort, seed
from tests.faults.killsweep import TALLY, WritePath
from tests.faults.listing_scenario import LISTINGS
from tests.faults.matrix import Hit
from tests.faults.numbering_scenario import NUMBERING
from tests.faults.nursery import Desk, Nursery
from tests.faults.order_scenario import ORDERS
from tests.faults.profile_scenario import PROFILES
from tests.faults.segment_scenario import SEGMENTS

pytestmark = [pytest.mark.spec("CORE-02", "CORE-06", "CORE-08"), pytest.mark.timeout(TIMEOUT_SECONDS)]

ACTS = ("make", "write", "truncate", "sync", "sync directory", "unlink", "ack")
STATES = effort(2_000, 1_000_000)
PART_STATES = effort(300, 100_000)


@pytest.mark.fault("power lost", "ground", "tally")
def test_a_disk_that_lost_its_power_keeps_what_was_acknowledged_and_nothing_by_half(
    nursery: Nursery, desk: Desk, hit: Hit
) -> None:
    acts = _survives_loss_of_power(nursery, desk, TALLY, ("ground", "tally"), hit, disks=STATES)
    assert acts == set(ACTS)


@pytest.mark.spec("PRO-01", "PRO-02", "PRO-04", "PRO-13")
@pytest.mark.fault("power lost", "profiles")
def test_a_disk_that_lost_its_power_holds_every_event_that_was_acknowledged_once(
    nursery: Nursery, desk: Desk, hit: Hit
) -> None:
    _survives_loss_of_power(nursery, desk, PROFILES, ("profiles",), hit)


@pytest.mark.spec("ORD-05", "ORD-08", "ORD-10", "ORD-14", "ORD-16")
@pytest.mark.fault("power lost", "orders")
def test_a_disk_that_lost_its_power_holds_every_order_that_was_acknowledged_once(
    nursery: Nursery, desk: Desk, hit: Hit
) -> None:
    _survives_loss_of_power(nursery, desk, ORDERS, ("orders",), hit)


@pytest.mark.spec("SEG-02", "SEG-04", "SEG-06", "SEG-08")
@pytest.mark.fault("power lost", "segments")
def test_a_disk_that_lost_its_power_holds_every_snapshot_that_was_taken_and_every_chunk_whole(
    nursery: Nursery, desk: Desk, hit: Hit
) -> None:
    """The files of snapshots are on that disk too, with the names of their folders."""
    acts = _survives_loss_of_power(nursery, desk, SEGMENTS, ("segments",), hit, disks=effort(150, 100_000))
    assert acts >= {"make directory", "rename"}


@pytest.mark.spec("NUM-09", "NUM-10", "NUM-15")
@pytest.mark.fault("power lost", "numbering")
def test_a_disk_that_lost_its_power_holds_every_state_that_was_published_whole_on_both_clusters(
    nursery: Nursery, desk: Desk, hit: Hit
) -> None:
    """The pointer is synced by the store, the state by its master: neither may be there without the other."""
    acts = _survives_loss_of_power(nursery, desk, NUMBERING, ("numbering",), hit, disks=effort(120, 100_000))
    assert acts >= {"make directory", "rename", "link"}


@pytest.mark.spec("LST-02", "LST-08", "LST-11", "LST-12")
@pytest.mark.fault("power lost", "listings")
def test_a_disk_that_lost_its_power_holds_every_change_of_an_offer_with_its_counts_and_its_message(
    nursery: Nursery, desk: Desk, hit: Hit
) -> None:
    _survives_loss_of_power(nursery, desk, LISTINGS, ("listings",), hit, disks=effort(150, 100_000))


def _survives_loss_of_power(
    nursery: Nursery, desk: Desk, path: WritePath, parts: Collection[str], hit: Hit, *, disks: int = PART_STATES
) -> set[str]:
    """Look at so many disks, struck in the work of these parts; returns what was done to them before."""
    chosen = seed()
    print(f"KEYFOLD_FAULTS_SEED={chosen}")
    operations = record(nursery, desk, path=path)
    for number, state in enumerate(explore(desk, operations, disks, chosen, path=path)):
        assert not state.broken, f"state {number} of KEYFOLD_FAULTS_SEED={chosen}: {state.broken}"
        if state.sectors_lost and state.part in parts:
            hit(state.part)
    return {each.act for each in operations}
