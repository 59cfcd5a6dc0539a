"""Workers that meet on the same orders count each once, a lost COMMIT costs nothing, and history counts what is its."""

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faults.effort import TIMEOUT_SECONDS, effort, seed
from tests.faults.matrix import Hit
from tests.faults.order_writers import (
    NAME,
    OPTIONS,
    ROUNDS,
    WITH_HISTORY,
    WORKERS,
    broken_in,
    busy_identity,
    from_history,
    insisting,
    last_place,
    taken_back_by_two,
)
from tests.faults.pgproxy import CommitProxy, Cut
from tests.faults.profile_writers import interrupted
from tests.orders import opened
from tests.servers.fixtures import running
from tests.servers.postgres import PostgresServer

pytestmark = [pytest.mark.spec("ORD-05", "CORE-04"), pytest.mark.timeout(TIMEOUT_SECONDS)]

LOST, LOST_LONG = 30, 20_000
CYCLES, CYCLES_LONG = 3, 300


@pytest.mark.fault("many writers of one key", "orders")
def test_two_workers_that_were_sent_the_same_orders_of_one_phone_count_each_once(store_url: str, hit: Hit) -> None:
    with opened(store_url, **OPTIONS) as orders:
        busy = busy_identity(orders, batches=effort(25, 1_000))
        assert not busy.broken
        hit("orders", busy.orders)


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
    chosen = seed()
    print(f"KEYFOLD_FAULTS_SEED={chosen}")
    chance = random.Random(chosen)
    cuts = (Cut.AFTER, Cut.DURING, Cut.BEFORE, Cut.NONE, Cut.NONE, Cut.NONE)
    lost = effort(LOST, LOST_LONG)
    with (
        CommitProxy(postgres_server.port, lambda: Cut.NONE) as proxy,
        opened(proxy.url_of(postgres_url), **OPTIONS) as orders,
    ):

        def is_enough() -> bool:
            return min(proxy.cuts[Cut.AFTER] + proxy.cuts[Cut.DURING], proxy.cuts[Cut.BEFORE]) >= lost

        proxy.plan = lambda: chance.choice(cuts)
        sent = insisting(orders, is_enough)
        proxy.plan = lambda: Cut.NONE
        assert not broken_in(orders, sent)
        hit("orders", proxy.cuts[Cut.AFTER] + proxy.cuts[Cut.DURING], fault="answer to COMMIT lost")
        hit("orders", proxy.cuts[Cut.BEFORE], fault="COMMIT never arrived")


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    """A server of its own, which is killed."""
    yield from running(PostgresServer)


@pytest.mark.fault("server killed", "orders")
def test_a_server_killed_while_orders_are_counted_keeps_every_one_that_was_acknowledged_once(
    server: PostgresServer, hit: Hit
) -> None:
    """Two callers insist through every kill; nobody is told to stop."""
    chosen = seed()
    print(f"KEYFOLD_FAULTS_SEED={chosen}")
    chance = random.Random(chosen)
    has_ended = threading.Event()
    with opened(server.create_database("orders"), **OPTIONS) as orders, ThreadPoolExecutor(WORKERS) as pool:
        first = [number * 10_000_000 for number in range(WORKERS)]
        asking = [pool.submit(insisting, orders, has_ended.is_set, first=each) for each in first]
        try:
            for _ in range(effort(CYCLES, CYCLES_LONG)):
                before = interrupted(NAME)
                time.sleep(chance.uniform(0.2, 0.6))
                server.kill()
                server.start()
                hit("orders", interrupted(NAME) - before)
        finally:
            has_ended.set()
        assert not broken_in(orders, [order for each in asking for order in each.result()])
