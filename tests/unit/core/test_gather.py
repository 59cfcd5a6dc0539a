"""Concurrent requests share a transaction; each gets its own answer, and a bad one fails alone."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from keyfold.core.access import ANYONE
from keyfold.core.errors import BadInput, IdempotencyConflict, Internal, QueueFull, Stopping
from keyfold.core.gather import Ask, Gatherer, Operation, Outcome, Reply
from keyfold.core.limits import Limits
from keyfold.core.store import Store, Transaction, shapes
from keyfold.tally.tables import TALLIES

pytestmark = pytest.mark.spec("CORE-03")


def add(tx: Transaction, asks: Sequence[Ask]) -> list[Outcome]:
    keys = [ask.body for ask in asks]
    if "bad" in keys:
        raise BadInput("a bad key")
    if "bug" in keys:
        raise ZeroDivisionError
    count = len(keys)
    rows = {"key": keys, "value": [1] * count, "version": [1] * count, "event_version": [0] * count}
    after = shapes.increment(tx, TALLIES, rows, returning=["value"])
    return [after[key,][0] for key in keys]


ADD = Operation(name="add", apply=add, writes=True, key=lambda ask: str(ask.body))


def ask(key: str, idempotency_key: str | None = None, fingerprint: bytes = b"f") -> Ask:
    return Ask(client=ANYONE, body=key, idempotency_key=idempotency_key, fingerprint=fingerprint)


def run(store: Store, work: Callable[[Gatherer], object], limits: Limits | None = None) -> object:
    async def main() -> object:
        gatherer = Gatherer(store, limits or Limits())
        try:
            return await work(gatherer)  # type: ignore[misc]
        finally:
            await asyncio.to_thread(gatherer.close)

    return asyncio.run(main())


def value(store: Store, key: str) -> int:
    rows = store.read(lambda tx: shapes.load(tx, TALLIES, {"key": [key]}, ["value"]))
    return int(rows[key,][0]) if rows else 0


def test_concurrent_requests_share_transactions_and_none_is_lost(store: Store) -> None:
    batches: list[int] = []

    def counted(tx: Transaction, asks: Sequence[Ask]) -> list[Outcome]:
        batches.append(len(asks))
        return add(tx, asks)

    operation = Operation(name="counted", apply=counted, writes=True)

    async def work(gatherer: Gatherer) -> list[Reply]:
        return await asyncio.gather(*(gatherer.ask(operation, ask("a")) for _ in range(500)))

    replies = run(store, work)
    assert len(replies) == 500
    assert value(store, "a") == 500
    assert len(batches) < 100


def test_bad_requests_fail_alone_and_the_rest_of_their_batch_commits(store: Store) -> None:
    async def work(gatherer: Gatherer) -> list[object]:
        keys = ["a", "bad", "a", "bug", "a", "a"]
        return await asyncio.gather(*(gatherer.ask(ADD, ask(key)) for key in keys), return_exceptions=True)

    answers = run(store, work)
    assert [type(answer) for answer in answers] == [Reply, BadInput, Reply, Internal, Reply, Reply]
    assert value(store, "a") == 4
    assert value(store, "bad") == 0


def test_a_caller_that_went_away_does_not_keep_the_others_waiting(store: Store) -> None:
    async def work(gatherer: Gatherer) -> int:
        tasks = [asyncio.ensure_future(gatherer.ask(ADD, ask("a"))) for _ in range(50)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        return sum(isinstance(answer, Reply) for answer in answers)

    answered = run(store, work)
    assert answered == 25
    assert 25 <= value(store, "a") <= 50


@pytest.mark.spec("CORE-16")
def test_a_full_queue_refuses_with_a_time_to_come_back(sqlite_store: Store) -> None:
    blocked = threading.Event()

    def slow(tx: Transaction, asks: Sequence[Ask]) -> list[Outcome]:
        blocked.wait(30)
        return add(tx, asks)

    operation = Operation(name="slow", apply=slow, writes=True)

    async def work(gatherer: Gatherer) -> list[object]:
        tasks = [asyncio.ensure_future(gatherer.ask(operation, ask("a"))) for _ in range(30)]
        await asyncio.sleep(0.05)
        refused = [task for task in tasks if task.done()]
        blocked.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        return [task.exception() for task in refused]

    refusals = run(sqlite_store, work, Limits(gather_queue_max=10))
    assert refusals
    assert all(isinstance(each, QueueFull) and each.retry_after_seconds for each in refusals)
    assert value(sqlite_store, "a") == 30 - len(refusals)


@pytest.mark.spec("CORE-22")
def test_a_repeat_with_the_same_key_gets_the_first_answer_and_changes_nothing(store: Store) -> None:
    async def work(gatherer: Gatherer) -> tuple[Reply, Reply, object, Reply]:
        first = await gatherer.ask(ADD, ask("a", "k1"))
        await gatherer.ask(ADD, ask("a"))
        again = await gatherer.ask(ADD, ask("a", "k1"))
        other = await asyncio.gather(gatherer.ask(ADD, ask("b", "k1", b"other")), return_exceptions=True)
        new = await gatherer.ask(ADD, ask("a", "k2"))
        return first, again, other[0], new

    first, again, other, new = run(store, work)
    assert first == again
    assert isinstance(other, IdempotencyConflict)
    assert msgspec.json.decode(new.body) == 3
    assert value(store, "a") == 3
    assert value(store, "b") == 0


@pytest.mark.spec("CORE-22")
def test_concurrent_repeats_through_two_servers_count_once(store: Store) -> None:
    async def work(gatherer: Gatherer) -> list[Reply]:
        second = Gatherer(store, Limits())
        try:
            keys = [f"k{number}" for number in range(20)] * 3
            return await asyncio.gather(
                *(server.ask(ADD, ask(key, key)) for key in keys for server in (gatherer, second))
            )
        finally:
            await asyncio.to_thread(second.close)

    replies = run(store, work)
    assert {reply.body for reply in replies} == {b"1"}
    assert [value(store, f"k{number}") for number in range(20)] == [1] * 20


@pytest.mark.spec("CORE-22")
def test_the_same_key_of_two_clients_are_two_requests(sqlite_store: Store) -> None:
    async def work(gatherer: Gatherer) -> None:
        for client_id in ("one", "two"):
            client = msgspec.structs.replace(ANYONE, client_id=client_id)
            await gatherer.ask(ADD, Ask(client=client, body="a", idempotency_key="k", fingerprint=b"f"))

    run(sqlite_store, work)
    assert value(sqlite_store, "a") == 2


@pytest.mark.spec("CORE-20")
def test_closing_finishes_what_waits_and_refuses_what_is_new(sqlite_store: Store) -> None:
    async def work(gatherer: Gatherer) -> list[object]:
        tasks = [asyncio.ensure_future(gatherer.ask(ADD, ask("a"))) for _ in range(100)]
        await asyncio.sleep(0)
        closing = asyncio.create_task(asyncio.to_thread(gatherer.close))
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        await closing
        late = await asyncio.gather(gatherer.ask(ADD, ask("a")), return_exceptions=True)
        return [*answers, *late]

    answers = run(sqlite_store, work)
    assert isinstance(answers[-1], Stopping)
    assert value(sqlite_store, "a") == sum(isinstance(answer, Reply) for answer in answers)


def test_reads_are_gathered_too(tmp_path: Path, store: Store) -> None:
    batches: list[int] = []

    def read(tx: Transaction, asks: Sequence[Ask]) -> list[Outcome]:
        batches.append(len(asks))
        rows = shapes.load(tx, TALLIES, {"key": sorted({ask.body for ask in asks})}, ["value"])
        return [rows.get((each.body,), (0,))[0] for each in asks]

    operation = Operation(name="read", apply=read, writes=False)

    async def work(gatherer: Gatherer) -> list[Reply]:
        return await asyncio.gather(*(gatherer.ask(operation, ask("a")) for _ in range(200)))

    assert {reply.body for reply in run(store, work)} == {b"0"}
    assert len(batches) < 50


def test_a_read_does_not_wait_for_one_that_is_gathered_apart(store: Store) -> None:
    goes_on = threading.Event()

    def read(tx: Transaction, asks: Sequence[Ask]) -> list[Outcome]:
        if any(each.body == "slow" for each in asks):
            assert goes_on.wait(10)
        return [len({each.body for each in asks})] * len(asks)

    operation = Operation(name="read apart", apply=read, writes=False, is_apart=lambda ask: ask.body == "slow")

    async def work(gatherer: Gatherer) -> list[bytes]:
        slow = [asyncio.create_task(gatherer.ask(operation, ask("slow"))) for _ in range(20)]
        quick = await asyncio.wait_for(asyncio.gather(*(gatherer.ask(operation, ask("quick")) for _ in range(20))), 5)
        goes_on.set()
        return [reply.body for reply in (*quick, *await asyncio.gather(*slow))]

    assert run(store, work) == [b"1"] * 40, "no batch had both"
