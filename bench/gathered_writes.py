"""Requests/s of a one-row increment (POST /v1/tallies, one item), gathered, against one transaction a request.

Both sides are the same server, code and load; the peer's batches hold one request (`limits.gather_items_max=1`).
"""

import asyncio
import itertools
import random
import time
from collections.abc import Iterator

from bench import stores
from bench.harness import Goal, Race, Side
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


def races(quick: bool) -> Iterator[Race]:
    seconds = 1.0 if quick else 4.0
    with stores.each_kind() as kinds:
        for kind, new_url in kinds.items():
            yield _in_process(kind, new_url, seconds)


def _in_process(kind: str, new_url: stores.NewUrl, seconds: float) -> Race:
    gathered, single = "gathered", "one transaction a request"
    return Race(
        title=f"in process, {CLIENTS} callers, {kind}",
        unit="requests/s",
        sides=[
            Side(gathered, lambda: _called(new_url, Limits(), seconds)),
            Side(single, lambda: _called(new_url, Limits(batch_items_max=10, gather_items_max=1), seconds)),
        ],
        goals=[Goal(side=gathered, against=single, must=MUST[kind])],
    )


def _called(new_url: stores.NewUrl, limits: Limits, seconds: float) -> float:
    with opened(new_url(), [CHANGES]) as context:
        operation = next(route.run for route in routes(context) if route.path == "/v1/tallies")
        assert isinstance(operation, Operation)
        return asyncio.run(_load(context, limits, operation, seconds))


async def _load(context: Context, limits: Limits, operation: Operation, seconds: float) -> float:
    gatherer = Gatherer(context.store, limits)
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
