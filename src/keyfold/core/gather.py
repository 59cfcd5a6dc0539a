"""Gathered requests: concurrent calls of one operation become one batch, one transaction, one commit.

A lane is a thread with a connection. While it commits, further requests queue up and become its next batch, so the
cost of a commit is shared by all who wait for it. A bad request fails alone: the batch is halved until it stands by
itself. Keys are hashed to lanes, so that one key's writes do not meet each other on two connections; reads, which wait
for nobody, take turns.
"""

import asyncio
import hashlib
import itertools
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
import structlog
from msgspec import Struct
from prometheus_client import Histogram

from keyfold.core import metrics
from keyfold.core.access import Client
from keyfold.core.errors import (
    IdempotencyConflict,
    Internal,
    KeyfoldError,
    LostRace,
    QueueFull,
    Stopping,
    Unavailable,
)
from keyfold.core.limits import Limits
from keyfold.core.store import Store, Transaction
from keyfold.core.store.batch import Columns
from keyfold.core.store.shapes import insert_new, load
from keyfold.core.tables import ANSWERS

log = structlog.get_logger(__name__)

LANES = 2  # of an operation, on a store that works in processes of its own


class Ask(Struct, frozen=True, kw_only=True):
    """One request as an operation sees it: validated, and by a known client."""

    client: Client
    body: Any = None
    path: Mapping[str, str] = {}
    query: Any = None
    if_match: int | None = None
    idempotency_key: str | None = None
    fingerprint: bytes = b""  # of method, path and body: what a repeat must equal
    media: str = "application/json"  # what the caller wants, of what the route can answer


class Reply(Struct, frozen=True):
    """What goes back: encoded once, in the lane, and kept as it is for a repeat."""

    body: bytes
    status: int = 200
    version: int | None = None  # sent as ETag, expected back in If-Match
    media: str = "application/json"


class Versioned(Struct, frozen=True):
    """An answer with the version that an edit must name."""

    answer: Any
    version: int


class Encoded(Struct, frozen=True):
    """An answer in a form of its own, for a route that says so in `media`."""

    body: bytes
    media: str


class Question(Struct, frozen=True):
    """A read of one small statement. `answered` is told its rows; None means that they do not suffice."""

    sql: str
    parameters: tuple[str, ...]
    answered: Callable[[list[tuple[Any, ...]]], "Outcome | None"]


Outcome = Any  # a struct to encode, a Versioned, an Encoded, or a KeyfoldError for this request alone
Apply = Callable[[Transaction, Sequence[Ask]], Sequence[Outcome]]


def _accept(_: Ask) -> None:
    return None


def _one(_: Ask) -> int:
    return 1


def _no_key(_: Ask) -> str:
    return ""


def _never(_: Ask) -> bool:
    return False


class Operation(Struct, frozen=True, kw_only=True):
    """Something many clients ask for at once. `apply` answers each request of a batch, in order."""

    name: str
    apply: Apply
    writes: bool
    status: int = 200
    check: Callable[[Ask], None] = _accept  # refuses a request before it joins a batch
    weight: Callable[[Ask], int] = _one
    key: Callable[[Ask], str] = _no_key
    is_apart: Callable[[Ask], bool] = _never  # gathered with its like only: the others do not wait for what it takes
    needs_snapshot: Callable[[Ask], bool] = _never  # of a read: all its statements are to see one moment
    # Of a read: how a request that is alone is answered without a lane, if that takes one small statement.
    question: Callable[[Ask], Question | None] | None = None


@cache
def _meters(name: str) -> tuple[Histogram, Histogram]:
    """Items and seconds of the batches of an operation; looking them up takes longer than using them."""
    return metrics.GATHERED_ITEMS.labels(name), metrics.GATHER_SECONDS.labels(name)


class Gatherer:
    """The lanes of one server."""

    def __init__(self, store: Store, limits: Limits) -> None:
        self._store = store
        self._limits = limits
        self._lanes: dict[tuple[str, bool, int], _Lane] = {}
        self._guard = threading.Lock()
        self._reads = itertools.count()
        self._in_lanes = 0  # reads
        self._closed = False

    async def ask(self, operation: Operation, ask: Ask, *, is_alone: bool = False) -> Reply:
        """Queue a request and wait for its batch. A caller that goes away before its batch began changes nothing.

        `is_alone`: the server has no other request under way.
        """
        if self._closed:
            raise Stopping("the server is stopping", retry_after_seconds=1)
        operation.check(ask)
        if operation.writes:
            return await self._gathered(operation, ask)
        if operation.question is not None and not self._in_lanes:
            reply = await self._alone(operation, operation.question, ask, is_alone)
            if reply is not None:
                return reply
        self._in_lanes += 1
        try:
            return await self._gathered(operation, ask)
        finally:
            self._in_lanes -= 1

    async def _gathered(self, operation: Operation, ask: Ask) -> Reply:
        lane = self._lane(operation, ask)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        lane.put(_Waiting(ask, future, operation.weight(ask)))
        return await future

    async def _alone(
        self, operation: Operation, question_of: Callable[[Ask], Question | None], ask: Ask, is_alone: bool
    ) -> Reply | None:
        """The answer to a read that no other read is beside, found in the event loop; None where a lane is needed."""
        reader = self._store.engine.loop_reader
        if reader is None or not reader.is_free():
            return None
        question = question_of(ask)
        if question is None:
            return None
        started = time.monotonic()
        rows = await reader.rows(question.sql, question.parameters, is_alone=is_alone)
        outcome = None if rows is None else question.answered(rows)
        if outcome is None:
            return None
        (reply,) = _encoded(operation, [outcome])
        items, seconds = _meters(operation.name)
        items.observe(1)
        seconds.observe(time.monotonic() - started)
        if isinstance(reply, KeyfoldError):
            raise reply
        return reply

    def close(self) -> None:
        """Refuse what is new, finish what waits."""
        with self._guard:
            self._closed = True
            lanes = list(self._lanes.values())
        for lane in lanes:
            lane.close()

    def _lane(self, operation: Operation, ask: Ask) -> "_Lane":
        number = self._number(operation, ask)
        place = (operation.name, operation.is_apart(ask), number)
        lane = self._lanes.get(place)
        if lane is None:
            with self._guard:
                if self._closed:
                    raise Stopping("the server is stopping", retry_after_seconds=1)
                lane = self._lanes.setdefault(place, _Lane(operation, self._store, self._limits, number))
        return lane

    def _number(self, operation: Operation, ask: Ask) -> int:
        if self._store.is_sqlite:  # its work is done in this process, where a second lane would wait for the first
            return 0
        place = zlib.crc32(operation.key(ask).encode()) if operation.writes else next(self._reads)
        return place % LANES


class _Waiting:
    __slots__ = ("ask", "future", "loop", "weight")

    def __init__(self, ask: Ask, future: "asyncio.Future[Reply]", weight: int) -> None:
        self.ask = ask
        self.future = future
        self.loop = future.get_loop()
        self.weight = weight


class _Lane:
    """One thread that turns what waits into batches."""

    def __init__(self, operation: Operation, store: Store, limits: Limits, number: int) -> None:
        self._operation = operation
        self._store = store
        self._limits = limits
        self._queue: deque[_Waiting] = deque()
        self._wake = threading.Event()
        self._closed = False
        self._items, self._seconds = _meters(operation.name)
        self._depth = metrics.QUEUE_DEPTH.labels(operation.name)
        self._thread = threading.Thread(target=self._run, name=f"{operation.name}-{number}", daemon=True)
        self._thread.start()

    def put(self, waiting: _Waiting) -> None:
        if len(self._queue) >= self._limits.gather_queue_max:
            raise QueueFull(
                f"{len(self._queue)} requests are waiting for {self._operation.name}", retry_after_seconds=1
            )
        if self._closed:
            raise Stopping("the server is stopping", retry_after_seconds=1)
        self._queue.append(waiting)
        if not self._wake.is_set():
            self._wake.set()

    def close(self) -> None:
        self._closed = True
        self._wake.set()
        self._thread.join(self._limits.transaction_seconds_max)

    def _run(self) -> None:
        gathered = 1
        while True:
            self._wake.wait()
            self._wake.clear()
            if not self._queue and self._closed:
                return
            # One caller alone is not made to wait; where several came together last time, others are on their way.
            if gathered > 1 and self._limits.gather_wait_milliseconds_max and not self._closed:
                self._wait_for_company(gathered)
            while self._queue:
                batch = self._take()
                gathered = len(batch)
                if batch:
                    self._answer(batch)
            if self._closed:
                self._wake.set()

    def _wait_for_company(self, expected: int) -> None:
        deadline = time.monotonic() + self._limits.gather_wait_milliseconds_max / 1000
        while len(self._queue) < expected and time.monotonic() < deadline:
            time.sleep(0.0002)

    def _take(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        weight = 0
        while self._queue:
            if batch and weight + self._queue[0].weight > self._limits.gather_items_max:
                break
            waiting = self._queue.popleft()
            if not waiting.future.done():  # a caller that has gone away must not change anything
                batch.append(waiting)
                weight += waiting.weight
        self._depth.set(len(self._queue))
        return batch

    def _answer(self, batch: list[_Waiting]) -> None:
        started = time.monotonic()
        self._items.observe(len(batch))
        results = self._results([waiting.ask for waiting in batch])
        self._seconds.observe(time.monotonic() - started)
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Reply], Reply | KeyfoldError]]] = {}
        for waiting, result in zip(batch, results, strict=True):
            by_loop.setdefault(waiting.loop, []).append((waiting.future, result))
        for loop, answers in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_deliver, answers)

    def _results(self, asks: list[Ask]) -> list[Reply | KeyfoldError]:
        """Answer the batch; where one request makes it fail, halve it until that one stands alone."""
        try:
            if self._operation.writes:
                return self._store.transact(
                    lambda tx: answers_once(tx, self._operation, asks), name=self._operation.name, once=True
                )
            read = self._store.snapshot if any(map(self._operation.needs_snapshot, asks)) else self._store.read
            return read(lambda tx: _encoded(self._operation, self._operation.apply(tx, asks)))
        except Unavailable as error:
            return [error] * len(asks)
        except Exception as error:
            if len(asks) > 1:
                middle = len(asks) // 2
                return self._results(asks[:middle]) + self._results(asks[middle:])
            if isinstance(error, KeyfoldError):
                return [error]
            log.error("operation failed", operation=self._operation.name, exc_info=error)
            return [Internal("the operation failed unexpectedly")]


def answers_once(tx: Transaction, operation: Operation, asks: Sequence[Ask]) -> list[Reply | KeyfoldError]:
    """Answer each request, those with an Idempotency-Key by their first answer where there is one."""
    results: list[Reply | KeyfoldError | None] = [None] * len(asks)
    first: dict[tuple[str, str], int] = {}
    keyed = [index for index, ask in enumerate(asks) if ask.idempotency_key]
    for index, known in _first_answers(tx, asks, keyed).items():
        results[index] = known
    todo: list[int] = []
    for index, ask in enumerate(asks):
        if results[index] is not None:
            continue
        if ask.idempotency_key:
            if (ask.client.client_id, ask.idempotency_key) in first:
                continue  # the same key twice in one batch: answered from the first below
            first[ask.client.client_id, ask.idempotency_key] = index
        todo.append(index)
    if todo:
        outcomes = operation.apply(tx, [asks[index] for index in todo])
        for index, reply in zip(todo, _encoded(operation, outcomes), strict=True):
            results[index] = reply
        _keep_answers(tx, asks, results, [index for index in todo if asks[index].idempotency_key])
    for index, ask in enumerate(asks):
        if results[index] is None and ask.idempotency_key:
            original = first[ask.client.client_id, ask.idempotency_key]
            same = asks[original].fingerprint == ask.fingerprint
            results[index] = results[original] if same else _other_body(ask)
    return [result for result in results if result is not None]


def fingerprint(method: str, path: str, body: bytes) -> bytes:
    """What must be equal for a repeat to be a repeat."""
    return hashlib.sha256(f"{method} {path}\n".encode() + body).digest()


def _first_answers(tx: Transaction, asks: Sequence[Ask], keyed: Sequence[int]) -> dict[int, Reply | KeyfoldError]:
    if not keyed:
        return {}
    pairs = sorted({(asks[index].client.client_id, asks[index].idempotency_key or "") for index in keyed})
    keys = {"client_id": [pair[0] for pair in pairs], "key": [pair[1] for pair in pairs]}
    kept = load(tx, ANSWERS, keys, ("body_hash", "status", "etag", "answer"))
    found: dict[int, Reply | KeyfoldError] = {}
    for index in keyed:
        ask = asks[index]
        row = kept.get((ask.client.client_id, ask.idempotency_key))
        if row is not None:
            body_hash, status, etag, answer = row
            same = bytes(body_hash) == ask.fingerprint
            reply = Reply(bytes(answer), status, int(etag) if etag else None)
            found[index] = reply if same else _other_body(ask)
    return found


def _keep_answers(
    tx: Transaction, asks: Sequence[Ask], results: Sequence[Reply | KeyfoldError | None], keyed: Sequence[int]
) -> None:
    """Only what changed something is kept: a refusal changed nothing and may be tried again."""
    kept = [(asks[index], reply) for index in keyed if isinstance(reply := results[index], Reply)]
    columns: Columns = {
        "client_id": [ask.client.client_id for ask, _ in kept],
        "key": [ask.idempotency_key for ask, _ in kept],
        "body_hash": [ask.fingerprint for ask, _ in kept],
        "status": [reply.status for _, reply in kept],
        "etag": ["" if reply.version is None else str(reply.version) for _, reply in kept],
        "answer": [reply.body for _, reply in kept],
        "stored_at_us": [tx.now_us for _ in kept],
    }
    if len(insert_new(tx, ANSWERS, columns)) != len(kept):
        raise LostRace("the same Idempotency-Key is being used by another request")


def _other_body(ask: Ask) -> IdempotencyConflict:
    return IdempotencyConflict(
        f"the Idempotency-Key {ask.idempotency_key!r} was used with another request", hint="Use a new key"
    )


def _encoded(operation: Operation, outcomes: Sequence[Outcome]) -> list[Reply | KeyfoldError]:
    replies: list[Reply | KeyfoldError] = []
    for outcome in outcomes:
        if isinstance(outcome, KeyfoldError):
            replies.append(outcome)
        elif isinstance(outcome, Versioned):
            replies.append(Reply(msgspec.json.encode(outcome.answer), operation.status, outcome.version))
        elif isinstance(outcome, Encoded):
            replies.append(Reply(outcome.body, operation.status, media=outcome.media))
        else:
            replies.append(Reply(msgspec.json.encode(outcome), operation.status))
    return replies


def _deliver(answers: "list[tuple[asyncio.Future[Reply], Reply | KeyfoldError]]") -> None:
    for future, result in answers:
        if future.done():  # a cancelled waiter must not keep the others from their answers
            continue
        if isinstance(result, KeyfoldError):
            future.set_exception(result)
        else:
            future.set_result(result)
