"""Workers that diff the same users lose and double nothing, through lost COMMITs, killed servers and long pauses."""

import random
import threading
import time
from pathlib import Path

import pytest

from tests.faults.effort import TIMEOUT_SECONDS, effort, seed
from tests.faults.matrix import Hit
from tests.faults.part_writers import CUTS
from tests.faults.pgproxy import CommitProxy, Cut
from tests.faults.segment_writers import diffed_at_once, diffing_at, overtaken, races, taken_up_again
from tests.servers.postgres import PostgresServer

pytestmark = [pytest.mark.spec("SEG-04", "SEG-05", "SEG-06", "SEG-08"), pytest.mark.timeout(TIMEOUT_SECONDS)]

LOST, LOST_LONG = 8, 10_000
CYCLES, CYCLES_LONG = 3, 300
PAUSES_LONG = 500


@pytest.mark.fault("many writers of one key", "segments")
def test_two_workers_at_segments_of_the_same_users_lose_no_change_and_double_none(
    postgres_url: str, fast_path: Path, hit: Hit
) -> None:
    before = races()
    with diffing_at(postgres_url, fast_path) as diffing:
        assert not diffed_at_once(diffing, effort(6, 500))
    hit("segments", races() - before)


@pytest.mark.fault("answer to COMMIT lost", "segments")
@pytest.mark.fault("COMMIT never arrived", "segments")
def test_a_diff_whose_commits_get_lost_goes_on_where_it_was(
    postgres_server: PostgresServer, postgres_url: str, fast_path: Path, hit: Hit
) -> None:
    """Nobody knows what became of the chunk: the queue's row does."""
    chosen = seed()
    print(f"KEYFOLD_FAULTS_SEED={chosen}")
    chance = random.Random(chosen)
    lost = effort(LOST, LOST_LONG)
    with (
        CommitProxy(postgres_server.port, lambda: Cut.NONE) as proxy,
        diffing_at(proxy.url_of(postgres_url), fast_path) as diffing,
    ):
        diffing.create()
        number = 0
        while min(proxy.cuts[Cut.AFTER] + proxy.cuts[Cut.DURING], proxy.cuts[Cut.BEFORE]) < lost:
            number += 1
            proxy.plan = lambda: chance.choice(CUTS)
            diffing.round(number, workers=1)
            proxy.plan = lambda: Cut.NONE
            assert not diffing.broken()
        hit("segments", proxy.cuts[Cut.AFTER] + proxy.cuts[Cut.DURING], fault="answer to COMMIT lost")
        hit("segments", proxy.cuts[Cut.BEFORE], fault="COMMIT never arrived")


@pytest.mark.fault("server killed", "segments")
def test_a_server_killed_while_sets_change_leaves_every_diff_to_be_finished(
    server: PostgresServer, fast_path: Path, hit: Hit
) -> None:
    chosen = seed()
    print(f"KEYFOLD_FAULTS_SEED={chosen}")
    chance = random.Random(chosen)
    has_ended = threading.Event()
    with diffing_at(server.create_database("killed"), fast_path) as diffing:
        diffing.create()

        def go_on() -> None:
            number = 0
            while not has_ended.is_set():
                number += 1
                diffing.round(number)

        working = threading.Thread(target=go_on)
        working.start()
        try:
            for cycle in range(10 * effort(CYCLES, CYCLES_LONG)):
                # A kill between two transactions is not even noticed: go on until one struck.
                if cycle >= effort(CYCLES, CYCLES_LONG) and diffing.refused:
                    break
                time.sleep(chance.uniform(0.2, 0.6))
                server.kill()
                server.start()
        finally:
            has_ended.set()
            working.join()
        assert not diffing.broken()
        hit("segments", diffing.refused)


@pytest.mark.fault("holder paused past its lease", "segments")
def test_of_a_worker_paused_past_its_lease_and_the_one_after_it_only_one_ticket_commits(
    postgres_server: PostgresServer, fast_path: Path, hit: Hit
) -> None:
    """Stopped by a signal after it has looked at its lease: the ticket alone refuses it."""
    for number in range(effort(1, PAUSES_LONG)):
        name = f"paused{number}"
        said, broken = overtaken(postgres_server.create_database(name), fast_path / name)
        assert not broken
        assert said == "ticket-refused"
        hit("segments")
        postgres_server.drop_database(name)


@pytest.mark.spec("SEG-06")
def test_a_diff_taken_up_again_is_finished_before_the_newer_snapshot_is_diffed(tmp_path: Path) -> None:
    """What a planted bug in taking up is caught by."""
    with diffing_at(f"sqlite:///{tmp_path / 'keyfold.db'}", tmp_path) as diffing:
        assert not taken_up_again(diffing)
