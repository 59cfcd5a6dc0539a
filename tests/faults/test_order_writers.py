"""Workers that meet on the same orders count each once, a lost COMMIT costs nothing, and history counts what is its."""

from pathlib import Path

import pytest

from tests.faults.effort import TIMEOUT_SECONDS, effort
from tests.faults.matrix import Hit
from tests.faults.order_writers import (
    OPTIONS,
    ROUNDS,
    WITH_HISTORY,
    from_history,
    last_place,
    taken_back_by_two,
    writing_at,
)
from tests.faults.part_writers import busy, survives_kills, survives_lost_commits
from tests.orders import opened
from tests.servers.postgres import PostgresServer

pytestmark = [pytest.mark.spec("ORD-05", "CORE-04"), pytest.mark.timeout(TIMEOUT_SECONDS)]


@pytest.mark.fault("many writers of one key", "orders")
def test_two_workers_that_were_sent_the_same_orders_of_one_phone_count_each_once(store_url: str, hit: Hit) -> None:
    with writing_at(store_url) as writing:
        found = busy(writing, batches=effort(25, 1_000))
        assert not found.broken
        hit("orders", found.items)


@pytest.mark.spec("ORD-14")
@pytest.mark.fault("many writers of one key", "orders")
def test_of_two_who_ask_at_once_one_gets_the_only_place(postgres_url: str, hit: Hit) -> None:
    with opened(postgres_url, **OPTIONS) as orders:
        assert not last_place(orders, rounds=effort(ROUNDS, 1_000))
        hit("orders", ROUNDS)


@pytest.mark.spec("ORD-16")
@pytest.mark.fault("many writers of one key", "orders")
def test_of_two_who_take_an_order_back_at_once_one_does(postgres_url: str, hit: Hit) -> None:
    with opened(postgres_url, **OPTIONS) as orders:
        assert not taken_back_by_two(orders, rounds=effort(ROUNDS, 1_000))
        hit("orders", ROUNDS)


@pytest.mark.spec("ORD-07", "ORD-08", "ORD-10", "ORD-16")
def test_history_and_live_orders_part_exactly_at_the_start_and_a_split_conserves_both(tmp_path: Path) -> None:
    """What planted bugs in the reading of Parquet are caught by."""
    with opened(f"sqlite:///{tmp_path / 'keyfold.db'}", **WITH_HISTORY) as orders:
        assert not from_history(orders, tmp_path)


@pytest.mark.fault("answer to COMMIT lost", "orders")
@pytest.mark.fault("COMMIT never arrived", "orders")
def test_a_batch_of_orders_asked_for_again_after_a_lost_commit_counts_once(
    postgres_server: PostgresServer, postgres_url: str, hit: Hit
) -> None:
    """The marks tell what became of it: no token, no Idempotency-Key."""
    survives_lost_commits(writing_at, postgres_server, postgres_url, hit)


@pytest.mark.fault("server killed", "orders")
def test_a_server_killed_while_orders_are_counted_keeps_every_one_that_was_acknowledged_once(
    server: PostgresServer, hit: Hit
) -> None:
    survives_kills(writing_at, server, hit)
