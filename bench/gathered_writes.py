"""Requests/s of a one-row increment (POST /v1/tallies, one item), gathered, against one transaction a request.

Both sides are the same server, code, store and load; the peer's batches hold one request (`limits.gather_items_max`
is 1), so that every request pays for its own commit. On PostgreSQL, where commits of several connections can share
a sync, a second peer has twelve lanes, one a connection. "over HTTP" is `keyfold serve` with its workers inside, and
`wrk` with 96 connections on the same machine (no load generator in Python is fast enough to be left out of the
measure, and on two cores even wrk is not); "in process" is the gatherer alone, called by 96 coroutines.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterator

from bench import stores
from bench.harness import Goal, Race, Side
from bench.serving import prepared, requests_per_second, served
from keyfold.core.access import ANYONE
from keyfold.core.context import Context
from keyfold.core.gather import Ask, Gatherer, Operation
from keyfold.core.limits import Limits
from keyfold.tally.model import Addition
from keyfold.tally.routes import AddBody, routes
from keyfold.tally.service import CHANGES
from tests.product import opened

MUST = {"SQLite": 6, "PostgreSQL": 4}
CLIENTS = 96
KEYS = 20_000
LANES = 12

GATHERED, SINGLE, SINGLE_WIDE = "gathered", "one transaction a request", f"one transaction a request, {LANES} lanes"

SINGLE_LIMITS = {"batch_items_max": 10, "gather_items_max": 1}
WIDE = f"from keyfold.core.gather import Gatherer\nGatherer._lane_count = lambda self, operation: {LANES}"

SCRIPT = f"""
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
function request()
  return wrk.format(nil, nil, nil, string.format('{{"items":[{{"key":"key-%d","add":1}}]}}', math.random({KEYS})))
end
"""

Run = Callable[[bool, bool], float]  # gathered or not, many lanes or not


def races(quick: bool) -> Iterator[Race]:
    seconds = 1 if quick else 5
    with stores.each_kind() as kinds:
        for kind, new_url in kinds.items():
            yield _race(f"over HTTP, {kind}", kind, _over_http(new_url, seconds))
        for kind, new_url in kinds.items():
            yield _race(f"in process, {kind}", kind, _in_process(new_url, seconds))


def _race(title: str, kind: str, run: Run) -> Race:
    sides = [Side(GATHERED, lambda: run(True, False)), Side(SINGLE, lambda: run(False, False))]
    goals = [Goal(side=GATHERED, against=SINGLE, must=MUST[kind])]
    if kind == "PostgreSQL":
        sides.append(Side(SINGLE_WIDE, lambda: run(False, True)))
        goals.append(Goal(side=GATHERED, against=SINGLE_WIDE, must=MUST[kind]))
    return Race(title=f"{title}, {CLIENTS} callers", unit="requests/s", sides=sides, goals=goals)


def _over_http(new_url: stores.NewUrl, seconds: int) -> Run:
    def run(gathered: bool, wide: bool) -> float:
        limits = {} if gathered else {f"KEYFOLD_LIMITS_{name}".upper(): str(n) for name, n in SINGLE_LIMITS.items()}
        with served(prepared(new_url()), limits, WIDE if wide else "") as (port, _):
            requests_per_second(port, "/v1/tallies", SCRIPT, connections=CLIENTS, seconds=1)
            return requests_per_second(port, "/v1/tallies", SCRIPT, connections=CLIENTS, seconds=seconds)

    return run


def _in_process(new_url: stores.NewUrl, seconds: int) -> Run:
    def run(gathered: bool, wide: bool) -> float:
        limits = Limits() if gathered else Limits(**SINGLE_LIMITS)
        with opened(new_url(), [CHANGES]) as context:
            operation = next(route.run for route in routes(context) if route.path == "/v1/tallies")
            assert isinstance(operation, Operation)
            gatherer = WideGatherer(context.store, limits) if wide else Gatherer(context.store, limits)
            return asyncio.run(_load(context, gatherer, operation, seconds))

    return run


class WideGatherer(Gatherer):
    def _lane_count(self, operation: Operation) -> int:
        return LANES


async def _load(context: Context, gatherer: Gatherer, operation: Operation, seconds: float) -> float:
    chance = random.Random(3)
    asks = [Ask(client=ANYONE, body=AddBody([Addition(f"key-{chance.randrange(KEYS)}")])) for _ in range(KEYS)]
    endless = itertools.cycle(asks)
    await asyncio.gather(*(gatherer.ask(operation, ask) for ask in asks[:CLIENTS]))
    answered = 0
    until = time.perf_counter() + seconds

    async def client() -> None:
        nonlocal answered
        while time.perf_counter() < until:
            await gatherer.ask(operation, next(endless))
            answered += 1

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    result = answered / (time.perf_counter() - started)
    await asyncio.to_thread(gatherer.close)
    return result
