"""A full disk refuses writes whole, goes on answering reads, and takes writes again when there is room."""

from pathlib import Path

import pytest

from tests.faults.matrix import Hit
from tests.faults.smalldisk import (
    ROOM_BYTES,
    broken_when_counting_fills_it,
    broken_when_full,
    changing_offers,
    counting_events,
    counting_orders,
    diffing,
)

pytestmark = pytest.mark.spec("CORE-02")


@pytest.mark.parametrize(
    ("write", "part"),
    [
        pytest.param("put", "ground", marks=pytest.mark.fault("disk full", "ground")),
        pytest.param("relay", "ground", marks=pytest.mark.fault("disk full", "ground")),
        pytest.param("consume", "tally", marks=pytest.mark.fault("disk full", "tally")),
        pytest.param("announce", "tally", marks=pytest.mark.fault("disk full", "tally")),
    ],
)
def test_a_full_disk_refuses_whole_transactions_and_reads_go_on_until_there_is_room(
    small_disk: Path, template: Path, write: str, part: str, hit: Hit
) -> None:
    """The disk fills under each kind of write in turn; then room is made and the work goes on to its end."""
    assert not broken_when_full(small_disk, template, write)
    hit(part)


@pytest.mark.spec("PRO-02")
@pytest.mark.fault("disk full", "profiles")
def test_a_full_disk_refuses_whole_batches_of_events_and_profiles_are_read_until_there_is_room(
    small_disk: Path, template: Path, hit: Hit
) -> None:
    assert not broken_when_counting_fills_it(small_disk, template, counting_events)
    hit("profiles")


@pytest.mark.spec("ORD-05")
@pytest.mark.fault("disk full", "orders")
def test_a_full_disk_refuses_whole_batches_of_orders_and_counts_are_right_until_there_is_room(
    small_disk: Path, template: Path, hit: Hit
) -> None:
    assert not broken_when_counting_fills_it(small_disk, template, counting_orders, room_bytes=10 * ROOM_BYTES)
    hit("orders")


@pytest.mark.spec("SEG-04", "SEG-06")
@pytest.mark.fault("disk full", "segments")
def test_a_full_disk_refuses_whole_chunks_and_snapshots_and_the_diff_goes_on_when_there_is_room(
    small_disk: Path, template: Path, hit: Hit
) -> None:
    assert not broken_when_counting_fills_it(small_disk, template, diffing, room_bytes=20 * ROOM_BYTES)
    hit("segments")


@pytest.mark.spec("LST-08", "LST-11")
@pytest.mark.fault("disk full", "listings")
def test_a_full_disk_refuses_whole_offers_and_counts_are_right_until_there_is_room(
    small_disk: Path, template: Path, hit: Hit
) -> None:
    assert not broken_when_counting_fills_it(small_disk, template, changing_offers, room_bytes=20 * ROOM_BYTES)
    hit("listings")
