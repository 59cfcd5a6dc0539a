"""Every planted bug is caught: a harness that lets one pass would prove nothing about the code without it."""

import itertools
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from keyfold.core.context import Context
from keyfold.core.errors import BadInput, DataRefused, StoreBusy
from tests.faults import (
    crashstates,
    killsweep,
    listing_plants,
    listing_writers,
    lostcommit,
    numbering_masters,
    numbering_plants,
    order_plants,
    order_writers,
    plants,
    profile_plants,
    profile_writers,
    segment_plants,
    segment_writers,
    smalldisk,
    writers,
)
from tests.faults.effort import LONG, TIMEOUT_SECONDS, rotation, seed
from tests.faults.killsweep import WritePath
from tests.faults.listing_scenario import LISTINGS
from tests.faults.listing_simulator import ListingSimulation
from tests.faults.lostcommit import through
from tests.faults.matrix import Hit
from tests.faults.numbering_masters import numbering_at
from tests.faults.numbering_scenario import NUMBERING
from tests.faults.numbering_simulator import NumberingSimulation
from tests.faults.nursery import Desk, Nursery
from tests.faults.order_scenario import ORDERS
from tests.faults.order_simulator import OrderSimulation
from tests.faults.part_writers import busy
from tests.faults.pgproxy import Cut
from tests.faults.plants import PLANTS, Plant, Plot
from tests.faults.profile_scenario import PROFILES
from tests.faults.profile_simulator import ProfileSimulation
from tests.faults.seeds import Play, simulate
from tests.faults.segment_scenario import SEGMENTS
from tests.faults.segment_simulator import SegmentSimulation
from tests.faults.simulator import Simulation
from tests.faults.stage import Violated
from tests.orders import Orders
from tests.orders import opened as opened_orders
from tests.servers.postgres import PostgresServer

pytestmark = pytest.mark.timeout(TIMEOUT_SECONDS)

SEEDS_MAX = 400
STATES_MAX = 300
POINTS_MAX = 300
# A law, or the store, the decoder or a look-up that refuses what is wrong; by anything else a plant is not caught.
REFUSED = "DataRefused|DecodeError|MultipleResultsFound|Internal|StoreBusy"
CAUGHT = re.compile(rf"seed \d+: ([XGNCOS]\d|{REFUSED}): ")
# In `make test` every fourth plant of each harness, those of today; all of them in `make faults`.
QUARTERS = 4


def rotating(harness: str) -> pytest.MarkDecorator:
    """The plants of this harness whose turn it is."""
    every = [plant for plant in PLANTS if plant.harness == harness]
    chosen = every if LONG else every[rotation() % min(QUARTERS, len(every)) :: QUARTERS]
    marked = [
        pytest.param(plant, id=plant.name, marks=pytest.mark.fault("planted bug", plant.part)) for plant in chosen
    ]
    return pytest.mark.parametrize("plant", marked)


def is_used(uses: int) -> None:
    assert uses, "this plant no longer fits the code: nothing of it was ever run"


def _was_caught(plant: Plant, plot: Plot, caught: object, hit: Hit) -> None:
    is_used(plot.uses)
    assert caught
    print(caught)
    hit(plant.part)


@rotating("simulator")
def test_the_simulator_catches_this_bug(plant: Plant, template: Path, fast_path: Path, hit: Hit) -> None:
    _must_be_caught(plant, Simulation, template, fast_path)
    hit(plant.part)


@rotating(profile_plants.SIMULATOR)
def test_the_simulator_of_profiles_catches_this_bug(plant: Plant, template: Path, fast_path: Path, hit: Hit) -> None:
    _must_be_caught(plant, ProfileSimulation, template, fast_path)
    hit(plant.part)


@rotating(order_plants.SIMULATOR)
def test_the_simulator_of_orders_catches_this_bug(plant: Plant, template: Path, fast_path: Path, hit: Hit) -> None:
    _must_be_caught(plant, OrderSimulation, template, fast_path)
    hit(plant.part)


@rotating(segment_plants.SIMULATOR)
def test_the_simulator_of_segments_catches_this_bug(plant: Plant, template: Path, fast_path: Path, hit: Hit) -> None:
    _must_be_caught(plant, SegmentSimulation, template, fast_path)
    hit(plant.part)


@rotating(numbering_plants.SIMULATOR)
def test_the_simulator_of_numbering_catches_this_bug(plant: Plant, template: Path, fast_path: Path, hit: Hit) -> None:
    _must_be_caught(plant, NumberingSimulation, template, fast_path)
    hit(plant.part)


@rotating(listing_plants.SIMULATOR)
def test_the_simulator_of_listings_catches_this_bug(plant: Plant, template: Path, fast_path: Path, hit: Hit) -> None:
    _must_be_caught(plant, ListingSimulation, template, fast_path)
    hit(plant.part)


def _must_be_caught(plant: Plant, play: Play, template: Path, fast_path: Path) -> None:
    first, other = seed(), ""
    with plant.planted() as plot:
        for violation in _violations(play, range(first, first + SEEDS_MAX), template, fast_path):
            if CAUGHT.search(violation):
                break
            other = violation
        else:
            violation = ""
    is_used(plot.uses)
    assert violation, f"{SEEDS_MAX} seeds from {first} obeyed every law; what else came of the plant: {other or '-'}"
    print(violation)


def _violations(play: Play, seeds: range, template: Path, fast_path: Path) -> Iterator[str]:
    for number in seeds:
        try:
            simulate(play, number, template, fast_path)
        except Violated as violated:
            yield f"seed {number}: {violated.broken[0]}"


@rotating("kill sweep")
def test_the_kill_sweep_catches_this_bug(plant: Plant, nursery: Nursery, desk: Desk, hit: Hit) -> None:
    every = killsweep.points(nursery, desk, plant=plant.name)
    chosen = random.Random(seed()).sample(every, POINTS_MAX)
    struck = killsweep.sweep(nursery, desk, chosen, plant=plant.name)
    caught = next((each for each in struck if each.broken), None)
    assert caught, f"{POINTS_MAX} kills obeyed every law"
    print(caught)
    hit(plant.part)


@rotating(profile_plants.KILLS)
def test_the_kill_sweep_of_profiles_catches_this_bug(plant: Plant, nursery: Nursery, desk: Desk, hit: Hit) -> None:
    _some_kill_must_catch(plant, nursery, desk, PROFILES)
    hit(plant.part)


@rotating(order_plants.KILLS)
def test_the_kill_sweep_of_orders_catches_this_bug(plant: Plant, nursery: Nursery, desk: Desk, hit: Hit) -> None:
    _some_kill_must_catch(plant, nursery, desk, ORDERS)
    hit(plant.part)


@rotating(segment_plants.KILLS)
def test_the_kill_sweep_of_segments_catches_this_bug(plant: Plant, nursery: Nursery, desk: Desk, hit: Hit) -> None:
    _some_kill_must_catch(plant, nursery, desk, SEGMENTS)
    hit(plant.part)


@rotating(numbering_plants.KILLS)
def test_the_kill_sweep_of_numbering_catches_this_bug(plant: Plant, nursery: Nursery, desk: Desk, hit: Hit) -> None:
    _some_kill_must_catch(plant, nursery, desk, NUMBERING)
    hit(plant.part)


@rotating(listing_plants.KILLS)
def test_the_kill_sweep_of_listings_catches_this_bug(plant: Plant, nursery: Nursery, desk: Desk, hit: Hit) -> None:
    _some_kill_must_catch(plant, nursery, desk, LISTINGS)
    hit(plant.part)


def _some_kill_must_catch(plant: Plant, nursery: Nursery, desk: Desk, path: WritePath) -> None:
    every = killsweep.points(nursery, desk, plant=plant.name, path=path)
    own = [point for point in every if point.part == plant.part]
    random.Random(seed()).shuffle(own)
    struck = killsweep.sweep(nursery, desk, own, plant=plant.name, path=path)
    caught = next((each for each in struck if each.broken), None)
    assert caught, f"{len(own)} kills obeyed every law"
    print(caught)


@rotating("crash states")
def test_the_crash_states_catch_this_bug(plant: Plant, nursery: Nursery, desk: Desk, hit: Hit) -> None:
    """With synchronous=NORMAL every second disk lacks something that was acknowledged."""
    _some_disk_must_catch(plant, nursery, desk, killsweep.TALLY)
    hit(plant.part)


@rotating(segment_plants.STATES)
def test_the_crash_states_of_segments_catch_this_bug(plant: Plant, nursery: Nursery, desk: Desk, hit: Hit) -> None:
    _some_disk_must_catch(plant, nursery, desk, SEGMENTS)
    hit(plant.part)


@rotating(numbering_plants.STATES)
def test_the_crash_states_of_numbering_catch_this_bug(plant: Plant, nursery: Nursery, desk: Desk, hit: Hit) -> None:
    _some_disk_must_catch(plant, nursery, desk, NUMBERING)
    hit(plant.part)


def _some_disk_must_catch(plant: Plant, nursery: Nursery, desk: Desk, path: WritePath) -> None:
    operations = crashstates.record(nursery, desk, plant=plant.name, path=path)
    states = crashstates.explore(desk, operations, STATES_MAX, seed(), path=path)
    caught = next((state for state in states if state.broken), None)
    assert caught, f"{STATES_MAX} disks obeyed every law"
    print(caught)


@rotating("disk full")
def test_the_full_disk_catches_this_bug(plant: Plant, small_disk: Path, template: Path, hit: Hit) -> None:
    with plant.planted() as plot:
        try:
            broken = smalldisk.broken_when_full(small_disk, template, "put")
        except sa.exc.OperationalError as error:
            broken = [repr(error)]  # the transaction that did not end is in the way of the next
    _was_caught(plant, plot, broken, hit)


WRITERS: dict[str, Callable[[Context], object]] = {
    "cursor polling: what commits later with a lower id is passed over": writers.late_commit,
    # The more keys, the longer a statement takes its rows, and the surer two of them meet in a circle.
    "unsorted batch": lambda context: writers.crossing(context, transactions=100, keys=300, until_tried_again=True)[1],
    "an increment that reads and then writes": lambda context: writers.hot_key(context)[0],
    "compare-and-set that does not compare": lambda context: writers.replacing(context, times=30),
}


@rotating("writers")
def test_writers_at_once_catch_this_bug(plant: Plant, postgres_url: str, hit: Hit) -> None:
    with writers.opened(postgres_url) as context, plant.planted() as plot:
        try:
            caught = WRITERS[plant.name](context)
        except DataRefused as refusal:
            caught = refusal  # two changes of one version, which the outbox takes only once
    _was_caught(plant, plot, caught, hit)


@rotating(profile_plants.WRITERS)
def test_workers_at_once_on_one_profile_catch_this_bug(plant: Plant, postgres_url: str, hit: Hit) -> None:
    with profile_writers.writing_at(postgres_url) as writing, plant.planted() as plot:
        try:
            caught: object = busy(writing).broken
        except DataRefused as refusal:
            caught = refusal  # two changes of one version, which the outbox takes only once
    _was_caught(plant, plot, caught, hit)


ORDER_WRITERS: dict[str, Callable[[Orders], list[str]]] = {
    "marks of orders are looked for, and then inserted": lambda orders: busy(order_writers.writing_of(orders)).broken,
    "whoever reserves takes no gate": lambda orders: order_writers.last_place(orders, rounds=100),
    "whoever reserves takes the gate of the first identity alone": lambda orders: order_writers.last_place(
        orders, rounds=100
    ),
    "corrections are looked for, and then inserted": lambda orders: order_writers.taken_back_by_two(orders, rounds=50),
}


@rotating(order_plants.WRITERS)
def test_workers_at_once_on_the_same_orders_catch_this_bug(plant: Plant, postgres_url: str, hit: Hit) -> None:
    with opened_orders(postgres_url, **order_writers.OPTIONS) as orders, plant.planted() as plot:
        try:
            caught: object = ORDER_WRITERS[plant.name](orders)
        except StoreBusy as refusal:
            caught = refusal  # a cell from which more was taken than it had
    _was_caught(plant, plot, caught, hit)


@rotating(order_plants.HISTORY)
def test_a_count_of_history_catches_this_bug(plant: Plant, tmp_path: Path, hit: Hit) -> None:
    with (
        opened_orders(f"sqlite:///{tmp_path / 'keyfold.db'}", **order_writers.WITH_HISTORY) as orders,
        plant.planted() as plot,
    ):
        caught = order_writers.from_history(orders, tmp_path)
    _was_caught(plant, plot, caught, hit)


@rotating(segment_plants.WRITERS)
def test_workers_at_once_on_the_same_users_catch_this_bug(
    plant: Plant, postgres_url: str, fast_path: Path, hit: Hit
) -> None:
    with segment_writers.diffing_at(postgres_url, fast_path) as diffing, plant.planted() as plot:
        caught = segment_writers.diffed_at_once(diffing, 30)
    _was_caught(plant, plot, caught, hit)


@rotating(segment_plants.PAUSED)
def test_a_pause_past_the_lease_catches_this_bug(plant: Plant, postgres_url: str, fast_path: Path, hit: Hit) -> None:
    said, broken = segment_writers.overtaken(postgres_url, fast_path, plant=plant.name)
    assert broken, f"the worker that was overtaken says {said!r}"
    print(said, broken[0])
    hit(plant.part)


@rotating(segment_plants.RESUMED)
def test_a_diff_taken_up_again_catches_this_bug(plant: Plant, tmp_path: Path, hit: Hit) -> None:
    with (
        segment_writers.diffing_at(f"sqlite:///{tmp_path / 'keyfold.db'}", tmp_path) as diffing,
        plant.planted() as plot,
    ):
        caught = segment_writers.taken_up_again(diffing)
    _was_caught(plant, plot, caught, hit)


@rotating(listing_plants.WRITERS)
def test_two_who_judge_one_offer_catch_this_bug(plant: Plant, postgres_url: str, hit: Hit) -> None:
    with listing_writers.writing_at(postgres_url) as writing, plant.planted() as plot:
        caught = busy(writing, batches=100).broken  # whether two meet is chance
    _was_caught(plant, plot, caught, hit)


@rotating(listing_plants.ALL_AT_ONCE)
def test_all_who_change_the_offers_of_a_seller_catch_this_bug(plant: Plant, postgres_url: str, hit: Hit) -> None:
    with plant.planted() as plot:
        caught = listing_writers.all_at_once(postgres_url, 60)
    _was_caught(plant, plot, caught, hit)


@rotating(numbering_plants.RUNS)
def test_runs_one_after_another_catch_this_bug(plant: Plant, fast_path: Path, hit: Hit) -> None:
    url = f"sqlite:///{fast_path / 'keyfold.db'}"
    with numbering_at(url, fast_path, rebuild_ratio=3.0, is_indexed=False) as numbering, plant.planted() as plot:
        caught = numbering_masters.run_one_after_another(numbering, 10)
    _was_caught(plant, plot, caught, hit)


@rotating(numbering_plants.SPOILT)
def test_a_spoilt_state_catches_this_bug(plant: Plant, fast_path: Path, hit: Hit) -> None:
    url = f"sqlite:///{fast_path / 'keyfold.db'}"
    with numbering_at(url, fast_path, is_indexed=False) as numbering, plant.planted() as plot:
        try:
            caught: object = numbering_masters.spoilt(numbering, fast_path, "new_docs", "altered")
        except BadInput as refusal:
            caught = refusal  # DuckDB's word for what it was made to read
    _was_caught(plant, plot, caught, hit)


@rotating(numbering_plants.PAUSED)
def test_a_master_paused_past_its_lease_catches_this_bug(plant: Plant, fast_path: Path, hit: Hit) -> None:
    url = f"sqlite:///{fast_path / 'keyfold.db'}"
    said, broken = numbering_masters.overtaken(url, fast_path, "copied to", plant=plant.name)
    assert broken, f"the master that was overtaken says {said!r}"
    print(said, broken[0])
    hit(plant.part)


@rotating(numbering_plants.LOST)
def test_lost_answers_to_masters_catch_this_bug(
    plant: Plant, postgres_server: PostgresServer, postgres_url: str, fast_path: Path, hit: Hit
) -> None:
    with plant.planted() as plot:
        caught, _ = numbering_masters.through_lost_commits(
            postgres_server, postgres_url, fast_path, random.Random(seed()), POINTS_MAX
        )
    _was_caught(plant, plot, caught, hit)


@rotating("lost answers")
def test_lost_answers_catch_this_bug(
    plant: Plant, postgres_server: PostgresServer, postgres_url: str, hit: Hit
) -> None:
    cuts = itertools.cycle([Cut.AFTER, Cut.NONE, Cut.NONE])
    keyed = plant.name.startswith("the answer")
    limits = lostcommit.ONE_TRY if keyed else None
    with through(postgres_server, postgres_url, lambda: next(cuts), limits=limits) as product, plant.planted() as plot:
        broken = lostcommit.asking(product, 10)[0] if keyed else lostcommit.adding(product, 10)
    _was_caught(plant, plot, broken, hit)


def test_every_plant_has_a_harness_and_at_least_ten_are_tried_each_time() -> None:
    harnesses = {"simulator", "kill sweep", "crash states", "disk full", "writers", "lost answers"}
    for module in (profile_plants, order_plants, segment_plants, listing_plants):
        harnesses |= {module.SIMULATOR, module.KILLS, module.WRITERS}
    harnesses |= {order_plants.HISTORY, segment_plants.STATES, segment_plants.PAUSED, segment_plants.RESUMED}
    harnesses |= {numbering_plants.SIMULATOR, numbering_plants.KILLS, numbering_plants.STATES, numbering_plants.RUNS}
    harnesses |= {listing_plants.ALL_AT_ONCE}
    harnesses |= {numbering_plants.SPOILT, numbering_plants.PAUSED, numbering_plants.LOST}
    assert {plant.harness for plant in plants.PLANTS} == harnesses
    assert set(WRITERS) == {plant.name for plant in PLANTS if plant.harness == "writers"}
    assert set(ORDER_WRITERS) == {plant.name for plant in PLANTS if plant.harness == order_plants.WRITERS}
    counts = [sum(plant.harness == harness for plant in PLANTS) for harness in harnesses]
    assert sum(max(1, count // QUARTERS) for count in counts) >= 10
