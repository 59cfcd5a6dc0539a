"""Workers that meet on one profile lose and double nothing, others go on meanwhile, and a lost COMMIT costs nothing."""

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.faults.effort import TIMEOUT_SECONDS, effort, seed
from tests.faults.matrix import Hit
from tests.faults.pgproxy import CommitProxy, Cut
from tests.faults.profile_writers import WORKERS, broken_in, busy_profile, insisting, interrupted, others_go_on
from tests.profiles import opened
from tests.servers.fixtures import running
from tests.servers.postgres import PostgresServer

pytestmark = [pytest.mark.spec("PRO-02", "PRO-04", "CORE-04"), pytest.mark.timeout(TIMEOUT_SECONDS)]

LOST, LOST_LONG = 30, 20_000
CYCLES, CYCLES_LONG = 3, 300


@pytest.mark.fault("many writers of one key", "profiles")
def test_nine_in_ten_events_for_one_profile_give_right_sums_and_every_change_is_published(
    store_url: str, hit: Hit
) -> None:
    """Each event once, also those that both workers were sent; owners confirm each other across the workers."""
    with opened(store_url, kernel="numpy") as profiles:
        busy = busy_profile(profiles, batches=effort(25, 1_000))
        assert not busy.broken
        hit("profiles", busy.events)


@pytest.mark.fault("many writers of one key", "profiles")
def test_other_profiles_are_counted_while_somebody_is_long_at_work_on_one(postgres_url: str, hit: Hit) -> None:
    with opened(postgres_url, kernel="numpy") as profiles:
        assert not others_go_on(profiles)
        hit("profiles")


@pytest.mark.fault("answer to COMMIT lost", "profiles")
@pytest.mark.fault("COMMIT never arrived", "profiles")
def test_a_batch_of_events_asked_for_again_after_a_lost_commit_counts_once(
    postgres_server: PostgresServer, postgres_url: str, hit: Hit
) -> None:
    """The marks tell what became of it: no token, no Idempotency-Key."""
    chosen = seed()
    print(f"KEYFOLD_FAULTS_SEED={chosen}")
    chance = random.Random(chosen)
    cuts = (Cut.AFTER, Cut.DURING, Cut.BEFORE, Cut.NONE, Cut.NONE, Cut.NONE)
    lost = effort(LOST, LOST_LONG)
    with (
        CommitProxy(postgres_server.port, lambda: Cut.NONE) as proxy,
        opened(proxy.url_of(postgres_url), kernel="numpy") as profiles,
    ):

        def is_enough() -> bool:
            return min(proxy.cuts[Cut.AFTER] + proxy.cuts[Cut.DURING], proxy.cuts[Cut.BEFORE]) >= lost

        proxy.plan = lambda: chance.choice(cuts)
        sent = insisting(profiles, is_enough)
        proxy.plan = lambda: Cut.NONE
        assert not broken_in(profiles, sent)
        hit("profiles", proxy.cuts[Cut.AFTER] + proxy.cuts[Cut.DURING], fault="answer to COMMIT lost")
        hit("profiles", proxy.cuts[Cut.BEFORE], fault="COMMIT never arrived")


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    """A server of its own, which is killed."""
    yield from running(PostgresServer)


@pytest.mark.fault("server killed", "profiles")
def test_a_server_killed_while_events_are_counted_keeps_every_one_that_was_acknowledged_once(
    server: PostgresServer, hit: Hit
) -> None:
    """Two callers insist through every kill; nobody is told to stop."""
    chosen = seed()
    print(f"KEYFOLD_FAULTS_SEED={chosen}")
    chance = random.Random(chosen)
    has_ended = threading.Event()
    with (
        opened(server.create_database("profiles"), kernel="numpy") as profiles,
        ThreadPoolExecutor(WORKERS) as pool,
    ):
        first = [number * 10_000_000 for number in range(WORKERS)]
        asking = [pool.submit(insisting, profiles, has_ended.is_set, first=each) for each in first]
        try:
            for _ in range(effort(CYCLES, CYCLES_LONG)):
                before = interrupted()
                time.sleep(chance.uniform(0.2, 0.6))
                server.kill()
                server.start()
                hit("profiles", interrupted() - before)
        finally:
            has_ended.set()
        assert not broken_in(profiles, [fields for each in asking for fields in each.result()])
