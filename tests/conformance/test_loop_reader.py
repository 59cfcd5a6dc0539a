"""Reads by the event loop itself: right rows, no harm from what goes wrong, and no lane for a read that is alone."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import psycopg
import pytest

from keyfold.core import metrics
from keyfold.core.access import ANYONE
from keyfold.core.errors import BadInput, NotFound
from keyfold.core.gather import Ask, Gatherer, Operation, Outcome, Question, Reply
from keyfold.core.limits import Limits
from keyfold.core.store import Store, Transaction, loopreader
from keyfold.core.store.loopreader import LoopReader
from tests.conformance.test_readers import end_all_sessions

pytestmark = pytest.mark.spec("CORE-01", "CORE-03")

SAID = "SELECT %s::text, %s::bigint"


@pytest.fixture
def store(postgres_url: str) -> Iterator[Store]:
    store = Store.open(postgres_url, limits=Limits(transaction_seconds_max=2, lock_seconds_max=1))
    yield store
    store.close()


def reader_of(store: Store) -> LoopReader:
    reader = store.engine.loop_reader
    assert reader is not None
    return reader


async def until_free(reader: LoopReader) -> None:
    for _ in range(1_000):
        if reader.is_free():
            return
        await asyncio.sleep(0.01)
    pytest.fail("it was not opened")


def sessions(url: str) -> int:
    """Those of the store: one that asked here before may not have ended yet."""
    with psycopg.connect(url) as connection:
        ours = "datname = current_database() AND application_name = 'keyfold'"
        row = connection.execute(f"SELECT count(*) FROM pg_stat_activity WHERE {ours}").fetchone()
        assert row is not None
        return int(row[0])


def test_rows_are_those_of_the_statement_however_odd_its_text(store: Store) -> None:
    async def work(reader: LoopReader) -> None:
        for _ in range(3):
            for text in ("a", "", "é 'quoted' \\ \" % $1", "x" * 100_000):
                assert await reader.rows(SAID, (text, "-9223372036854775808")) == [(text, -(2**63))]
        assert await reader.rows("SELECT 1 WHERE %s::text = 'b'", ("a",)) == []
        assert await reader.rows(SAID, ("a\0b", "1")) is None, "never cut off at the NUL"

    run(store, work)


def test_a_statement_that_fails_is_no_answer_and_does_not_hurt_the_next(store: Store) -> None:
    async def work(reader: LoopReader) -> None:
        for sql, parameter in (("SELECT nonsense, %s", "a"), ("SELECT %s::bigint", "no number")):
            assert await reader.rows(sql, (parameter,)) is None
            await until_free(reader)
        assert await reader.rows(SAID, ("a", "1")) == [("a", 1)]

    run(store, work)


def test_a_connection_that_the_server_ended_is_opened_again(store: Store, postgres_url: str) -> None:
    async def work(reader: LoopReader) -> None:
        for is_noticed in (True, False):
            assert await reader.rows(SAID, ("a", "1")) == [("a", 1)]
            end_all_sessions(postgres_url)
            if is_noticed:
                await asyncio.sleep(0.1)
                assert not reader.is_free()
            else:
                assert await reader.rows(SAID, ("a", "1")) is None
            await until_free(reader)
        assert await reader.rows(SAID, ("b", "2")) == [("b", 2)]

    run(store, work)


def test_a_caller_that_goes_away_is_not_waited_for_and_leaves_its_answer_to_nobody(store: Store) -> None:
    async def work(reader: LoopReader) -> None:
        slow = asyncio.create_task(reader.rows("SELECT 'slow' || pg_sleep(1.5)::text WHERE %s::int = 1", ("1",)))
        await asyncio.sleep(0.1)
        assert not reader.is_free()
        assert await reader.rows(SAID, ("second", "2")) is None
        started = time.monotonic()
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        assert time.monotonic() - started < 0.5
        await until_free(reader)
        assert await reader.rows(SAID, ("a", "1")) == [("a", 1)]

    run(store, work)


def test_a_statement_that_takes_too_long_is_ended_by_the_server(store: Store) -> None:
    async def work(reader: LoopReader) -> None:
        assert await reader.rows("SELECT pg_sleep(30) WHERE %s::int = 1", ("1",)) is None

    run(store, work)


def test_a_store_that_does_not_answer_leaves_reads_to_the_usual_way() -> None:
    store = Store.open("postgresql://nobody@127.0.0.1:1/none", limits=Limits(lock_seconds_max=1))

    async def work() -> None:
        reader = reader_of(store)
        for _ in range(3):
            assert not reader.is_free()
            assert await reader.rows(SAID, ("a", "1")) is None
            await asyncio.sleep(0.05)

    asyncio.run(work())
    store.close()


def test_it_is_opened_also_where_the_url_has_options_of_its_own(postgres_url: str) -> None:
    store = Store.open(f"{postgres_url}?application_name=mine&client_encoding=latin1")

    async def work(reader: LoopReader) -> None:
        await until_free(reader)
        assert await reader.rows(SAID, ("ключ", "1")) == [("ключ", 1)]

    asyncio.run(work(reader_of(store)))
    store.close()


@pytest.mark.parametrize("is_loop_over", [True, False])
def test_closing_the_store_ends_the_connection(postgres_url: str, is_loop_over: bool) -> None:
    store = Store.open(postgres_url)

    async def work() -> None:
        await until_free(reader_of(store))
        assert sessions(postgres_url) == 1
        if not is_loop_over:
            await asyncio.to_thread(store.close)
            assert not reader_of(store).is_free()

    asyncio.run(work())
    store.close()
    deadline = time.monotonic() + 10
    while sessions(postgres_url) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sessions(postgres_url) == 0


def test_a_second_loop_gets_a_connection_when_the_first_has_ended(store: Store) -> None:
    async def work(reader: LoopReader) -> None:
        assert await reader.rows(SAID, ("a", "1")) == [("a", 1)]
        assert not await asyncio.to_thread(lambda: asyncio.run(_is_free(reader))), "it is the other loop's"

    run(store, work)
    run(store, work)


async def _is_free(reader: LoopReader) -> bool:
    return reader.is_free()


def test_a_store_of_few_connections_keeps_them_all(postgres_url: str) -> None:
    store = Store.open(postgres_url, connections_max=4)
    assert store.engine.loop_reader is None
    store.close()


# An answer that is watched for ------------------------------------------------------------------------------------


SLOW = "SELECT 'slow' || pg_sleep(0.2)::text WHERE %s::int = 1"


async def goes_on_beside(reader: LoopReader, *, is_alone: bool) -> bool:
    """Whether the loop did something else while a slow answer was waited for."""
    beside = asyncio.Event()
    asyncio.get_running_loop().call_soon(beside.set)
    assert await reader.rows(SLOW, ("1",), is_alone=is_alone) == [("slow",)]
    return beside.is_set()


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets how long an answer is watched for, and how long not after that was in vain."""

    def set_seconds(*, watch: float = loopreader.WATCH_SECONDS, again: float = 0.0) -> None:
        monkeypatch.setattr(loopreader, "WATCH_SECONDS", watch)
        monkeypatch.setattr(loopreader, "WATCH_AGAIN_SECONDS", again)

    set_seconds()
    return set_seconds


async def prepared(reader: LoopReader) -> None:
    """A statement that is new is prepared first, which is always waited for."""
    await reader.rows(SLOW, ("0",))


@pytest.mark.parametrize("is_alone", [True, False])
def test_rows_are_the_same_whether_or_not_their_read_is_alone(store: Store, is_alone: bool) -> None:
    async def work(reader: LoopReader) -> None:
        for number in range(200):
            text = f"{number} " + "x" * (number * 500)
            assert await reader.rows(SAID, (text, f"{number}"), is_alone=is_alone) == [(text, number)]

    run(store, work)


def test_an_answer_that_does_not_come_at_once_stops_nobody(store: Store, watching: Callable[..., None]) -> None:
    async def work(reader: LoopReader) -> None:
        await prepared(reader)
        watching(again=60.0)
        assert await goes_on_beside(reader, is_alone=True)
        watching(watch=60.0)
        assert await goes_on_beside(reader, is_alone=True), "the next is expected to take as long"

    run(store, work)


def test_only_a_read_that_is_alone_keeps_the_loop_to_itself(store: Store, watching: Callable[..., None]) -> None:
    async def work(reader: LoopReader) -> None:
        await prepared(reader)
        watching(watch=60.0)
        assert not await goes_on_beside(reader, is_alone=True)
        assert await goes_on_beside(reader, is_alone=False)
        assert not await goes_on_beside(reader, is_alone=True)
        watching(watch=60.0, again=60.0)
        assert await goes_on_beside(reader, is_alone=False)
        assert await goes_on_beside(reader, is_alone=True), "others were about a moment ago"

    run(store, work)


def test_a_connection_that_ends_while_its_answer_is_watched_for_is_no_answer(
    store: Store, watching: Callable[..., None]
) -> None:
    async def work(reader: LoopReader) -> None:
        watching(watch=60.0)
        ended = "SELECT pg_terminate_backend(pg_backend_pid()) WHERE %s::int = 1"
        assert await reader.rows(ended, ("1",), is_alone=True) is None
        await until_free(reader)
        assert await reader.rows(SAID, ("a", "1"), is_alone=True) == [("a", 1)]

    run(store, work)


# In front of lanes ------------------------------------------------------------------------------------------------


class Reading:
    """A read that tells which thread it was answered in."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.refusal: Exception | None = None
        self.operation = Operation(name="said", apply=self.apply, writes=False, question=self.question)

    def apply(self, tx: Transaction, asks: Sequence[Ask]) -> list[Outcome]:
        self.asked.append(threading.current_thread().name)
        if self.refusal:
            raise self.refusal
        return [tx.rows(SAID, (ask.body, 1))[0][0] for ask in asks]

    def question(self, ask: Ask) -> Question | None:
        if ask.body == "no question":
            return None
        sql = "SELECT nonsense, %s, %s" if ask.body == "fails" else SAID
        return Question(sql, (ask.body, "1"), lambda rows: self.answered(rows[0][0]))

    def answered(self, text: str) -> Outcome | None:
        if text == "not found":
            return NotFound("it is not there")
        return None if text == "does not suffice" else text


def gathering(store: Store, work: Callable[[Gatherer], Awaitable[None]]) -> None:
    async def main() -> None:
        await until_free(reader_of(store))
        gatherer = Gatherer(store, Limits())
        try:
            await work(gatherer)
        finally:
            await asyncio.to_thread(gatherer.close)

    asyncio.run(main())


def ask(text: str) -> Ask:
    return Ask(client=ANYONE, body=text)


def test_a_read_that_is_alone_needs_no_lane(store: Store) -> None:
    reading = Reading()

    async def work(gatherer: Gatherer) -> None:
        for number in range(5):
            assert await gatherer.ask(reading.operation, ask(f"{number}")) == Reply(b'"%d"' % number)
        with pytest.raises(NotFound):
            await gatherer.ask(reading.operation, ask("not found"))
        assert not reading.asked

    before = batches_of_one()
    gathering(store, work)
    assert batches_of_one() == before + 6, "it is counted as a batch of one"


def batches_of_one() -> float:
    return metrics.REGISTRY.get_sample_value("keyfold_gathered_items_sum", {"operation": "said"}) or 0.0


@pytest.mark.parametrize("text", ["no question", "fails", "does not suffice"])
def test_what_the_loop_cannot_answer_a_lane_does(store: Store, text: str) -> None:
    reading = Reading()

    async def work(gatherer: Gatherer) -> None:
        assert await gatherer.ask(reading.operation, ask(text)) == Reply(b'"%b"' % text.encode())
        assert reading.asked == ["said-0"]
        reading.refusal = BadInput("wrong")
        with pytest.raises(BadInput):
            await gatherer.ask(reading.operation, ask(text))

    gathering(store, work)


def test_reads_that_come_together_are_gathered_and_each_gets_its_own_answer(store: Store) -> None:
    reading = Reading()

    async def work(gatherer: Gatherer) -> None:
        for _ in range(5):
            asked = [gatherer.ask(reading.operation, ask(f"{number}")) for number in range(100)]
            assert [each.body for each in await asyncio.gather(*asked)] == [b'"%d"' % number for number in range(100)]
        assert 0 < len(reading.asked) < 100

    gathering(store, work)


def run(store: Store, work: Callable[[LoopReader], Any]) -> None:
    async def main() -> None:
        reader = reader_of(store)
        await until_free(reader)
        await work(reader)

    asyncio.run(main())
