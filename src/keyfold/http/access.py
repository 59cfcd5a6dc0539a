"""Who calls: the bearer token of a request, checked against the store and remembered for a few seconds."""

import asyncio
import hashlib
import ipaddress
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from keyfold.core import access
from keyfold.core.access import ANYONE, Client
from keyfold.core.errors import Unauthenticated, Unavailable
from keyfold.core.limits import Limits
from keyfold.core.store import Store
from keyfold.http.rates import Rates, exceeded
from keyfold.http.wire import Call

T = TypeVar("T")

ACCESS_CACHE_SECONDS = 5.0
KNOWN_MAX = 10_000
REFUSED_MAX = 1_000
CHECKS_MAX = 1_000  # look-ups waiting for the store; beyond that the store is what is slow
THREADS = 2

HINT = "Send Authorization: Bearer <token>; `keyfold token create` makes one"
LOOPBACK_NAMES = (b"127.0.0.1", b"localhost", b"[::1]")


class Access:
    """Remembers who a token is, by its hash: the text of a token stays nowhere in memory."""

    def __init__(self, store: Store, limits: Limits, *, demo: bool) -> None:
        self._store = store
        self._demo = demo
        self._refusals = Rates(limits.refusals_per_second_max)
        self._known: dict[bytes, tuple[Client, float]] = {}
        self._refused: dict[bytes, tuple[Unauthenticated, float]] = {}
        self._checks: dict[bytes, asyncio.Task[Client]] = {}
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="access")

    def known(self, call: Call) -> Client | None:
        """The client, where its token was checked a moment ago: the way of nearly every request."""
        given = call.headers.get(b"authorization")
        if given is None:
            return None
        found = self._known.get(_digest(given))
        return found[0] if found is not None and found[1] > time.monotonic() else None

    async def checked(self, call: Call) -> Client:
        """The client whose token this is; 401 for any other text, 429 where an address tries too many."""
        try:
            return await self._client(call)
        except Unauthenticated:
            wait = self._refusals.take(_network(call.remote))
            if wait:
                raise self._too_many(wait) from None
            raise

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    async def _client(self, call: Call) -> Client:
        given = call.headers.get(b"authorization")
        if given is None:
            return self._anonymous(call)
        digest, now = _digest(given), time.monotonic()
        refused = self._refused.get(digest)
        if refused is not None and refused[1] > now:
            raise refused[0]
        # A token that was good before is looked at whatever else its address does; others wait for the flood to end.
        if digest not in self._known and self._refusals.is_empty(_network(call.remote)):
            raise self._too_many(0.0)
        return await self._looked_up(digest, _bearer(given))

    def _anonymous(self, call: Call) -> Client:
        # A page of another site that points its name at this machine would carry that name as the host.
        if self._demo and _host(call) in LOOPBACK_NAMES:
            return ANYONE
        raise Unauthenticated("there is no token in the request", hint=HINT)

    async def _looked_up(self, digest: bytes, token: str) -> Client:
        """Ask the store once for all who wait for the same answer; one of them going away does not disturb it."""
        check = self._checks.get(digest)
        if check is None:
            if len(self._checks) >= CHECKS_MAX:
                raise Unavailable("too many tokens wait to be checked", retry_after_seconds=1)
            check = asyncio.create_task(self._ask_store(digest, token))
            self._checks[digest] = check
            check.add_done_callback(lambda done: self._forget_check(digest, done))
        return await asyncio.shield(check)

    def _forget_check(self, digest: bytes, check: "asyncio.Task[Client]") -> None:
        del self._checks[digest]
        if not check.cancelled():
            check.exception()  # seen, also where everybody who waited has gone

    async def _ask_store(self, digest: bytes, token: str) -> Client:
        loop = asyncio.get_running_loop()
        try:
            client, until_us = await loop.run_in_executor(self._pool, access.client_of, self._store, token)
        except Unauthenticated as error:
            self._known.pop(digest, None)
            refusal = Unauthenticated(error.detail, hint=error.hint or HINT)
            _remember(self._refused, digest, (refusal, time.monotonic() + ACCESS_CACHE_SECONDS), REFUSED_MAX)
            raise refusal from None
        except Unavailable as error:
            # Whoever asks is not known yet, so nothing is said of the store but that it does not answer.
            raise type(error)("the token cannot be checked now", retry_after_seconds=1) from error
        seconds = min(ACCESS_CACHE_SECONDS, until_us / 1e6 - time.time())
        _remember(self._known, digest, (client, time.monotonic() + seconds), KNOWN_MAX)
        return client

    def _too_many(self, wait_seconds: float) -> Exception:
        return exceeded(self._refusals.per_second, "failed authentications from one address", wait_seconds)


def _remember(kept: dict[bytes, T], digest: bytes, entry: T, entries_max: int) -> None:
    kept.pop(digest, None)
    if len(kept) >= entries_max:
        del kept[next(iter(kept))]
    kept[digest] = entry


def _digest(given: bytes) -> bytes:
    return hashlib.sha256(given).digest()


def _bearer(given: bytes) -> str:
    scheme, _, token = given.partition(b" ")
    if scheme.lower() != b"bearer" or not token.isascii():
        raise Unauthenticated("the Authorization header is not a bearer token", hint=HINT)
    return token.decode()


def _host(call: Call) -> bytes:
    host = call.headers.get(b"host", b"").lower()
    return host[: host.index(b"]") + 1] if host.startswith(b"[") and b"]" in host else host.partition(b":")[0]


def _network(remote: str) -> str:
    """An address, or of an IPv6 address the half that one subscriber has as a whole."""
    return str(ipaddress.ip_network((remote, 64), strict=False)) if ":" in remote else remote
