"""Writers of the same offers lose and double nothing, through lost COMMITs and killed servers."""

import pytest

from tests.faults.effort import TIMEOUT_SECONDS, effort
from tests.faults.listing_writers import all_at_once, writing_at
from tests.faults.matrix import Hit
from tests.faults.part_writers import busy, survives_kills, survives_lost_commits
from tests.servers.postgres import PostgresServer

pytestmark = [pytest.mark.spec("LST-08", "LST-10", "LST-11", "LST-15"), pytest.mark.timeout(TIMEOUT_SECONDS)]


@pytest.mark.fault("many writers of one key", "listings")
def test_two_who_judge_one_offer_leave_the_newest_opinion_and_counts_that_are_the_rows(
    postgres_url: str, hit: Hit
) -> None:
    with writing_at(postgres_url) as writing:
        broken, items = busy(writing, batches=effort(25, 1_000))
    assert not broken
    hit("listings", items)


@pytest.mark.spec("LST-07", "LST-09")
def test_offers_that_change_while_presets_are_built_and_counts_repaired_leave_both_right(postgres_url: str) -> None:
    assert not all_at_once(postgres_url, effort(6, 500))


@pytest.mark.fault("answer to COMMIT lost", "listings")
@pytest.mark.fault("COMMIT never arrived", "listings")
def test_changes_whose_commits_get_lost_are_there_once(
    postgres_server: PostgresServer, postgres_url: str, hit: Hit
) -> None:
    survives_lost_commits(writing_at, postgres_server, postgres_url, hit)


@pytest.mark.fault("server killed", "listings")
def test_a_server_killed_while_offers_change_keeps_every_change_that_was_answered(
    server: PostgresServer, hit: Hit
) -> None:
    survives_kills(writing_at, server, hit)
