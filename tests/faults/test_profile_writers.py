"""Workers that meet on one profile lose and double nothing, others go on meanwhile, and a lost COMMIT costs nothing."""

import random

import pytest

from tests.faults.effort import TIMEOUT_SECONDS, effort, seed
from tests.faults.matrix import Hit
from tests.faults.pgproxy import CommitProxy, Cut
from tests.faults.profile_writers import busy_profile, insisting, others_go_on
from tests.profiles import opened
from tests.servers.postgres import PostgresServer

pytestmark = [pytest.mark.spec("PRO-02", "PRO-04", "CORE-04"), pytest.mark.timeout(TIMEOUT_SECONDS)]

LOST, LOST_LONG = 30, 20_000


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
        broken = insisting(profiles, is_enough, batches_max=50 * lost)
        proxy.plan = lambda: Cut.NONE
        assert not broken
        assert is_enough()
        hit("profiles", proxy.cuts[Cut.AFTER] + proxy.cuts[Cut.DURING], fault="answer to COMMIT lost")
        hit("profiles", proxy.cuts[Cut.BEFORE], fault="COMMIT never arrived")
