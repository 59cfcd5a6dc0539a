"""A process killed at any system call of its writing leaves a store in which nothing is lost, doubled or torn."""

import itertools
from collections.abc import Collection, Iterable

import pytest

from tests.faults.effort import LONG, TENTHS, TIMEOUT_SECONDS, rotation
from tests.faults.killsweep import ERRORS, FAILING, TALLY, Point, Struck, WritePath, points, sweep, sweep_errors
from tests.faults.listing_scenario import LISTINGS
from tests.faults.matrix import Hit
from tests.faults.numbering_scenario import NUMBERING
from tests.faults.nursery import Desk, Nursery
from tests.faults.order_scenario import ORDERS
from tests.faults.profile_scenario import PROFILES
from tests.faults.segment_scenario import SEGMENTS

# A run of segments takes a quarter of a second, and has some 1,500 points.
SEGMENTS_THIN = 6
# A run of numbering takes two seconds with what follows it, and has some 1,310 points.
NUMBERING_THIN = 30
NUMBERING_ERRORS_THIN = 4
# A run of listings takes a third of a second, and what follows it as much again.
LISTINGS_THIN = 12
LISTINGS_ERRORS_THIN = 6

pytestmark = [pytest.mark.spec("CORE-02", "CORE-06", "CORE-08"), pytest.mark.timeout(TIMEOUT_SECONDS)]


@pytest.mark.fault("killed at a system call", "ground", "tally")
def test_a_process_killed_at_any_write_path_call_loses_and_doubles_nothing(
    nursery: Nursery, desk: Desk, hit: Hit
) -> None:
    """Events are put, relayed, applied to tallies and their changes relayed; each call is a point to die at."""
    kinds = {point.kind for point in points(nursery, desk)}
    assert kinds >= {"pwrite64", "fsync", "ftruncate", "unlink", "openat", "fcntl", "flock"}
    _survives_kills(nursery, desk, TALLY, ("ground", "tally"), hit)


@pytest.mark.fault("I/O error", "ground", "tally")
def test_a_disk_that_fails_at_any_write_leaves_nothing_by_half(nursery: Nursery, desk: Desk, hit: Hit) -> None:
    """A write or sync that fails is tried again, or the run ends and says why; either way the laws hold."""
    _survives_errors(nursery, desk, TALLY, ("ground", "tally"), hit)


@pytest.mark.spec("PRO-01", "PRO-02", "PRO-04", "PRO-13")
@pytest.mark.fault("killed at a system call", "profiles")
def test_a_process_killed_while_it_counts_events_leaves_each_counted_once_or_not_at_all(
    nursery: Nursery, desk: Desk, hit: Hit
) -> None:
    """Marks, profiles, held-back and released updates, and messages; the ground's own points are killed at above."""
    _survives_kills(nursery, desk, PROFILES, ("profiles",), hit)


@pytest.mark.spec("PRO-02")
@pytest.mark.fault("I/O error", "profiles")
def test_a_disk_that_fails_while_events_are_counted_leaves_none_by_half(nursery: Nursery, desk: Desk, hit: Hit) -> None:
    _survives_errors(nursery, desk, PROFILES, ("profiles",), hit)


@pytest.mark.spec("ORD-05", "ORD-08", "ORD-10", "ORD-14", "ORD-16")
@pytest.mark.fault("killed at a system call", "orders")
def test_a_process_killed_while_it_counts_orders_leaves_each_counted_once_or_not_at_all(
    nursery: Nursery, desk: Desk, hit: Hit
) -> None:
    """Marks, cells, places, what was taken back, the steps of a backfill and of a dimension that is added."""
    _survives_kills(nursery, desk, ORDERS, ("orders",), hit)


@pytest.mark.spec("ORD-05", "ORD-08", "ORD-10")
@pytest.mark.fault("I/O error", "orders")
def test_a_disk_that_fails_while_orders_are_counted_leaves_none_by_half(nursery: Nursery, desk: Desk, hit: Hit) -> None:
    _survives_errors(nursery, desk, ORDERS, ("orders",), hit)


@pytest.mark.spec("SEG-02", "SEG-04", "SEG-06", "SEG-08", "SEG-09")
@pytest.mark.fault("killed at a system call", "segments")
def test_a_process_killed_within_a_diff_or_an_upload_leaves_what_another_goes_on_with(
    nursery: Nursery, desk: Desk, hit: Hit
) -> None:
    """Chunks, versions and messages of sets, the queue's row, and the files of snapshots whole and in parts."""
    _survives_kills(nursery, desk, SEGMENTS, ("segments",), hit, thin=SEGMENTS_THIN)


@pytest.mark.spec("SEG-02", "SEG-06")
@pytest.mark.fault("I/O error", "segments")
def test_a_disk_that_fails_within_a_diff_or_an_upload_leaves_none_by_half(
    nursery: Nursery, desk: Desk, hit: Hit
) -> None:
    _survives_errors(nursery, desk, SEGMENTS, ("segments",), hit, thin=SEGMENTS_THIN)


@pytest.mark.spec("NUM-09", "NUM-10", "NUM-11", "NUM-15")
@pytest.mark.fault("killed at a system call", "numbering")
def test_a_master_killed_at_any_call_leaves_the_pointer_at_the_old_state_or_the_new_and_either_whole(
    nursery: Nursery, desk: Desk, hit: Hit
) -> None:
    """While it copies, runs, writes and publishes; the next master goes on, and nothing stays lying about."""
    _survives_kills(nursery, desk, NUMBERING, ("numbering",), hit, thin=NUMBERING_THIN)


@pytest.mark.spec("NUM-09", "NUM-15")
@pytest.mark.fault("I/O error", "numbering")
def test_a_disk_that_fails_while_a_state_is_written_or_copied_publishes_none_by_half(
    nursery: Nursery, desk: Desk, hit: Hit
) -> None:
    _survives_errors(nursery, desk, NUMBERING, ("numbering",), hit, thin=NUMBERING_ERRORS_THIN)


@pytest.mark.spec("LST-02", "LST-06", "LST-07", "LST-08", "LST-11", "LST-12", "LST-15")
@pytest.mark.fault("killed at a system call", "listings")
def test_a_process_killed_while_offers_change_leaves_rows_counts_and_messages_alike(
    nursery: Nursery, desk: Desk, hit: Hit
) -> None:
    """Drafts published, offers edited, judged, aged, fed and put into other presets; the export is the ground's."""
    _survives_kills(nursery, desk, LISTINGS, ("listings",), hit, thin=LISTINGS_THIN)


@pytest.mark.spec("LST-08", "LST-11")
@pytest.mark.fault("I/O error", "listings")
def test_a_disk_that_fails_while_offers_change_leaves_none_by_half(nursery: Nursery, desk: Desk, hit: Hit) -> None:
    _survives_errors(nursery, desk, LISTINGS, ("listings",), hit, thin=LISTINGS_ERRORS_THIN)


def _survives_kills(
    nursery: Nursery, desk: Desk, path: WritePath, parts: Collection[str], hit: Hit, *, thin: int = 1
) -> None:
    """Every point is killed at, or today's share of those of these parts, of which one in `thin` is taken."""
    every = points(nursery, desk, path=path)
    chosen = every if LONG else _tenth(_of(every, parts))[::thin]
    _must_hold(sweep(nursery, desk, chosen, path=path), parts, hit)


def _survives_errors(
    nursery: Nursery, desk: Desk, path: WritePath, parts: Collection[str], hit: Hit, *, thin: int = 1
) -> None:
    every = [point for point in _of(points(nursery, desk, path=path), parts) if point.kind in FAILING]
    chosen = list(itertools.product(every, ERRORS)) if LONG else _today(every)[::thin]
    _must_hold(sweep_errors(nursery, desk, chosen, path=path), parts, hit)


def _must_hold(found: Iterable[Struck], parts: Collection[str], hit: Hit) -> None:
    broken = []
    for struck in found:
        if struck.point.part in parts:
            hit(struck.point.part)
        broken += [f"{struck.point}: {law}" for law in struck.broken]
    assert not broken, "\n".join(broken[:20])


def _of(every: list[Point], parts: Collection[str]) -> list[Point]:
    return [point for point in every if point.part in parts]


def _tenth(every: list[Point]) -> list[Point]:
    """Today's share of the points, spread over the whole run and over every kind."""
    turn = rotation()
    print(f"KEYFOLD_FAULTS_ROTATION={turn}: points {turn}, {turn + TENTHS}, … of {len(every)}")
    return every[turn::TENTHS]


def _today(every: list[Point]) -> list[tuple[Point, str]]:
    return [(point, ERRORS[index % len(ERRORS)]) for index, point in enumerate(_tenth(every))]
