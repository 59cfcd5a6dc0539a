"""The HTTP application: finds what is mounted at a path, answers through it, and turns every error into a problem."""

import asyncio
import time
from collections.abc import Mapping, Sequence

import structlog
from falcon.routing import CompiledRouter
from prometheus_client import Counter, Histogram

from keyfold.core import metrics
from keyfold.core.context import Context
from keyfold.core.errors import KeyfoldError, MethodNotAllowed, NotFound
from keyfold.core.gather import Gatherer
from keyfold.core.route import Route
from keyfold.http import health, openapi, page, problems
from keyfold.http.access import Access
from keyfold.http.body import drain
from keyfold.http.deadlines import Deadlines
from keyfold.http.mount import Guards, Mounted
from keyfold.http.rates import Rates
from keyfold.http.threads import Threads
from keyfold.http.wire import Answer, Call, Endpoint, Headers, Receive, Scope, Send

log = structlog.get_logger(__name__)

SLOW_SECONDS = 1.0
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT")
CLOSE: tuple[bytes, bytes] = (b"connection", b"close")


class Door:
    """An ASGI application with the routes of every part. Falcon finds the path; the rest of the way is ours.

    Falcon's own application receives the body before it looks at the request, which costs a third of the time of a
    GET and lets anybody hold a connection without a token; here nothing is received before a caller is known.
    """

    def __init__(self, guards: Guards, state: health.State) -> None:
        self._guards = guards
        self._state = state
        self._router = CompiledRouter()
        self._nothing = Nothing(guards)
        self._deadlines = guards.deadlines
        self.under_way = 0
        self._meters: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}

    def mount(self, path: str, by_method: Mapping[str, Endpoint]) -> None:
        self._router.add_route(path, Methods(path, by_method, self._guards))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        started = time.monotonic()
        call = Call(scope, receive)
        structlog.contextvars.bind_contextvars(request_id=call.request_id)
        self.under_way += 1
        try:
            template, answer = await self._answered(call, scope, started)
            await _send(send, answer, self._closing_headers(call))
        finally:
            self.under_way -= 1
        self._note(call, template, answer.status, time.monotonic() - started)
        if answer.status >= 400:
            await drain(call)

    async def _answered(self, call: Call, scope: Scope, started: float) -> tuple[str, Answer]:
        """The answer, whatever happens, and the template of the path it came from."""
        endpoint: Endpoint = self._nothing
        self._deadlines.begin(call, started)
        try:
            call.take_address(scope)
            call.must_not_repeat(scope)
            endpoint, params = self._find(call)
            answer = await endpoint.answer(call, params)
        except KeyfoldError as error:
            answer = self._refusal(error, call)
        except asyncio.CancelledError:
            if call.fate is None:
                raise
            answer = self._refusal(call.fate, call)
        except Exception as error:
            answer = self._refusal(problems.unexpected(error), call)
        finally:
            self._deadlines.end(call)
        return endpoint.template, answer

    def stop(self) -> None:
        """From now on every answer closes its connection, and /readyz says that we go."""
        self._state.stopping = True

    def end_all(self) -> None:
        """Answer 503 to whatever is still under way."""
        self._deadlines.end_all()

    def close(self) -> None:
        self._guards.access.close()
        self._guards.threads.close()

    def _find(self, call: Call) -> tuple[Endpoint, Mapping[str, str]]:
        # The router overlooks slashes too many at the front; an address has one spelling.
        found = None if call.path.startswith("//") else self._router.find(call.path)
        if found is None:
            return self._nothing, {}
        methods, _, params, _ = found
        assert isinstance(methods, Methods)
        return methods.by_method.get(call.method, methods.wrong), params

    def _refusal(self, error: KeyfoldError, call: Call) -> Answer:
        extra = error.headers if isinstance(error, WrongMethod) else None
        if error.status >= 500:
            call.error = f"{error.slug}: {error}"
        return problems.answer(error, call.request_id, extra)

    def _closing_headers(self, call: Call) -> Headers:
        own = (b"x-request-id", call.request_id.encode())
        return [own, CLOSE] if self._state.stopping else [own]

    def _note(self, call: Call, template: str, status: int, seconds: float) -> None:
        method = call.method if call.method in METHODS else "OTHER"
        meters = self._meters.get((method, template, status))
        if meters is None:
            meters = (
                metrics.REQUESTS.labels(method, template, str(status)),
                metrics.REQUEST_SECONDS.labels(method, template),
            )
            self._meters[method, template, status] = meters
        meters[0].inc()
        meters[1].observe(seconds)
        write = log.info if status >= 500 or seconds > SLOW_SECONDS else log.debug
        told = {"error": call.error} if call.error else {}
        milliseconds = round(seconds * 1000, 1)
        write(
            "request",
            method=method,
            route=template,
            status=status,
            milliseconds=milliseconds,
            client=call.client,
            **told,
        )


class WrongMethod(MethodNotAllowed):
    __doc__ = MethodNotAllowed.__doc__

    def __init__(self, method: str, allowed: str) -> None:
        super().__init__(f"{method[:20]} is not allowed here", hint=f"Allowed: {allowed}")
        self.headers: Headers = [(b"allow", allowed.encode())]


class Methods:
    """What is mounted at one path. HEAD is GET; the server leaves the body out."""

    def __init__(self, path: str, by_method: Mapping[str, Endpoint], guards: Guards) -> None:
        self.by_method = dict(by_method)
        if "GET" in self.by_method:
            self.by_method["HEAD"] = self.by_method["GET"]
        self.wrong = Other(path, ", ".join(sorted(self.by_method)), guards)


class Other:
    """Every method that a path does not take, and only for callers that are known."""

    def __init__(self, path: str, allowed: str, guards: Guards) -> None:
        self.template = path
        self._allowed = allowed
        self._guards = guards

    async def answer(self, call: Call, params: Mapping[str, str]) -> Answer:
        await self._guards.admit(call)
        raise WrongMethod(call.method, self._allowed)


class Nothing:
    """Every path that is not there; who has no token does not learn even that."""

    template = "(none)"

    def __init__(self, guards: Guards) -> None:
        self._guards = guards

    async def answer(self, call: Call, params: Mapping[str, str]) -> Answer:
        await self._guards.admit(call)
        raise NotFound("there is nothing at this address", hint="GET /openapi.json lists what there is")


def create_app(context: Context, gatherer: Gatherer) -> Door:
    """The door of the opened product: the routes of its parts, its documentation, its health."""
    access = Access(context.store, context.limits, demo=context.settings.http.demo)
    threads = Threads(context.settings.store.connections_max, context.limits.gather_queue_max)
    rates, deadlines = Rates(context.limits.requests_per_second_max), Deadlines(context.limits.request_seconds_max)
    guards = Guards(access, rates, gatherer, threads, deadlines, context.limits)
    state = health.State()
    door = Door(guards, state)
    routes = [route for part in context.parts if part.routes for route in part.routes(context)]
    for path, by_method in _by_path(routes).items():
        door.mount(path, {method: Mounted(route, guards) for method, route in by_method.items()})
    pages: dict[str, Endpoint] = {
        "/": page.Home(),
        "/docs": page.Docs(),
        "/openapi.json": openapi.Document(routes),
        "/healthz": health.Alive(),
        "/readyz": health.Ready(context.store, threads, state),
        "/metrics": health.Metrics(guards),
    }
    for path, endpoint in pages.items():
        door.mount(path, {"GET": endpoint})
    return door


def _by_path(routes: Sequence[Route]) -> dict[str, dict[str, Route]]:
    paths: dict[str, dict[str, Route]] = {}
    for route in routes:
        by_method = paths.setdefault(route.path, {})
        if route.method in by_method:
            raise TypeError(f"{route.method} {route.path} is mounted twice")
        by_method[route.method] = route
    return paths


async def _send(send: Send, answer: Answer, extra: Headers) -> None:
    await send({"type": "http.response.start", "status": answer.status, "headers": [*answer.headers, *extra]})
    await send({"type": "http.response.body", "body": answer.body})
