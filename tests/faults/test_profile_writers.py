"""Workers that meet on one profile lose and double nothing, others go on meanwhile, and a lost COMMIT costs nothing."""

import pytest

from tests.faults.effort import TIMEOUT_SECONDS, effort
from tests.faults.matrix import Hit
from tests.faults.part_writers import busy, survives_kills, survives_lost_commits
from tests.faults.profile_writers import others_go_on, writing_at
from tests.profiles import opened
from tests.servers.postgres import PostgresServer

pytestmark = [pytest.mark.spec("PRO-02", "PRO-04", "CORE-04"), pytest.mark.timeout(TIMEOUT_SECONDS)]


@pytest.mark.fault("many writers of one key", "profiles")
def test_nine_in_ten_events_for_one_profile_give_right_sums_and_every_change_is_published(
    store_url: str, hit: Hit
) -> None:
    """Each event once, also those that both workers were sent; owners confirm each other across the workers."""
    with writing_at(store_url) as writing:
        found = busy(writing, batches=effort(25, 1_000))
        assert not found.broken
        hit("profiles", found.items)


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
    survives_lost_commits(writing_at, postgres_server, postgres_url, hit)


@pytest.mark.fault("server killed", "profiles")
def test_a_server_killed_while_events_are_counted_keeps_every_one_that_was_acknowledged_once(
    server: PostgresServer, hit: Hit
) -> None:
    survives_kills(writing_at, server, hit)
