"""Whether the server lives, whether it can work, and its figures."""

import asyncio
import time
from collections.abc import Mapping

import msgspec
from msgspec import Struct
from prometheus_client import generate_latest

from keyfold.core import metrics
from keyfold.core.errors import KeyfoldError, Stopping, Unavailable
from keyfold.core.store import Store, migrate
from keyfold.http.body import must_be_absent
from keyfold.http.mount import Guards
from keyfold.http.threads import Threads
from keyfold.http.wire import ANSWER_HEADERS, JSON_HEADERS, Answer, Call

# Anybody may ask, so the store is asked at most this often, however many do.
READY_SECONDS = 1.0
READY_SECONDS_MAX = 5.0
METRICS_TEXT = b"text/plain; version=0.0.4; charset=utf-8"


class Health(Struct, frozen=True):
    status: str


class State:
    """What the door knows of itself."""

    stopping = False


class Alive:
    """The process answers; nothing else is asked."""

    template = "/healthz"

    async def answer(self, call: Call, params: Mapping[str, str]) -> Answer:
        return Answer(200, msgspec.json.encode(Health("alive")), JSON_HEADERS)


class Ready:
    """The store answers, its schema is ours, and we are not about to go."""

    template = "/readyz"

    def __init__(self, store: Store, threads: Threads, state: State) -> None:
        self._store = store
        self._threads = threads
        self._state = state
        self._looked_at = float("-inf")
        self._fault: KeyfoldError | None = None
        self._look: asyncio.Task[None] | None = None

    async def answer(self, call: Call, params: Mapping[str, str]) -> Answer:
        if self._state.stopping:
            raise Stopping("the server is stopping", retry_after_seconds=1)
        if time.monotonic() - self._looked_at > READY_SECONDS:
            if self._look is None or self._look.done():
                self._look = asyncio.create_task(self._look_at_store())
            await asyncio.shield(self._look)
        if self._fault is not None:
            raise self._fault
        return Answer(200, msgspec.json.encode(Health("ready")), JSON_HEADERS)

    async def _look_at_store(self) -> None:
        try:
            async with asyncio.timeout(READY_SECONDS_MAX):
                self._fault = await self._threads.run(lambda: _fault(self._store))
        except TimeoutError:
            self._fault = Unavailable(f"the store did not answer within {READY_SECONDS_MAX:g} seconds")
        except KeyfoldError as error:
            self._fault = error
        self._looked_at = time.monotonic()


class Metrics:
    """The figures of this process, for Prometheus."""

    template = "/metrics"

    def __init__(self, guards: Guards) -> None:
        self._guards = guards

    async def answer(self, call: Call, params: Mapping[str, str]) -> Answer:
        client = await self._guards.admit(call)
        client.must_have("metrics")
        must_be_absent(call)
        text = generate_latest(metrics.REGISTRY)
        return Answer(200, text, [(b"content-type", METRICS_TEXT), *ANSWER_HEADERS])


def _fault(store: Store) -> KeyfoldError | None:
    """What keeps the store from working, in words that anybody may read."""
    try:
        found = migrate.status(store)
    except KeyfoldError as error:
        return Unavailable(f"the store does not answer ({error.slug})")
    if found.state != "current":
        return Unavailable(
            f"the store's schema is {found.current or 'missing'}, this program needs {found.known}",
            hint="Run: keyfold store upgrade",
        )
    return None
