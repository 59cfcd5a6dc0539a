"""A route of a part, mounted: everything between the wire and the operation, prepared once, in one order."""

import asyncio
import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from urllib.parse import parse_qsl, unquote

import msgspec
from msgspec import Struct

from keyfold.core.access import SCOPES, Client
from keyfold.core.errors import BadInput, KeyfoldError, NotFound, VersionNeeded
from keyfold.core.gather import Ask, Gatherer, Operation, Outcome, Reply, Versioned, fingerprint
from keyfold.core.limits import Limits
from keyfold.core.route import Route
from keyfold.http import body as bodies
from keyfold.http.access import Access
from keyfold.http.deadlines import Deadlines
from keyfold.http.problems import refused_input
from keyfold.http.rates import Rates
from keyfold.http.shapes import float_names, must_be_strict
from keyfold.http.threads import Threads
from keyfold.http.wire import ANSWER_HEADERS, JSON_HEADERS, Answer, Call

QUERY_NAMES_MAX = 50
JSON_MEDIA = "application/json"

_ETAG = re.compile(rb'"(0|[1-9][0-9]{0,18})"')
_KEY = re.compile(rb"[\x21-\x7e]{1,200}")
_HALF_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_TEMPLATE = re.compile(r"(/([a-z0-9._-]+|\{[a-z_]+\}))+")


class Guards(Struct, frozen=True):
    """What every request passes before its route sees it."""

    access: Access
    rates: Rates
    gatherer: Gatherer
    threads: Threads
    deadlines: Deadlines
    limits: Limits

    async def admit(self, call: Call) -> Client:
        """A caller that is known and does not call too often."""
        client = self.access.known(call) or await self.access.checked(call)
        call.client = client.name
        self.rates.must_take(client.client_id, "requests")
        return client


class Mounted:
    """One route behind the guards."""

    def __init__(self, route: Route, guards: Guards) -> None:
        must_be_sound(route)
        self.route = route
        self.template = route.path
        self._guards = guards
        self._gatherer = guards.gatherer
        self._under_way = guards.deadlines
        self._bytes_max = guards.limits.body_bytes_max
        self._decode: bodies.Decoder | None = None
        if route.body is not None:
            self._decode = bodies.Decoder(route.body, guards.limits, judges_items=route.judges_items)
        self._takes_key = route.idempotent
        self._is_write = is_write(route)
        self._floats = float_names(route.query) if route.query is not None else []
        self._no_query = no_query(route.query) if route.query is not None else None

    async def answer(self, call: Call, params: Mapping[str, str]) -> Answer:
        route = self.route
        client = await self._guards.admit(call)
        client.must_have(route.scope)
        if not self._takes_key and self._is_write:
            must_have_no_key(call)
        raw, body = b"", None
        if route.lines is not None:
            return await self._streamed(call, client, params)
        if self._decode is None:
            bodies.must_be_absent(call)
        else:
            raw = await bodies.read(call, self._bytes_max)
            body = self._decode(raw)
        key = idempotency_key(call) if self._takes_key else None
        ask = Ask(
            client=client,
            body=body,
            path=self._path(params) if params else params,
            query=self._query(call.query),
            if_match=version_expected(call) if route.if_match else None,
            idempotency_key=key,
            fingerprint=_fingerprint(call, raw) if key is not None else b"",
            media=media_wanted(call, route.media) if route.media else JSON_MEDIA,
        )
        if route.pace is not None and (pace := route.pace(ask)):
            return await _paced(self._ran(ask), pace)
        return await self._ran(ask)

    async def _streamed(self, call: Call, client: Client, params: Mapping[str, str]) -> Answer:
        """Lines are handed over as they come; who hands them over has time for the next ones."""
        run, deadlines = self.route.run, self._guards.deadlines
        assert not isinstance(run, Operation)
        ask = Ask(client=client, path=self._path(params), query=self._query(call.query))
        wait_seconds_max = self._guards.limits.request_seconds_max / 3
        reply: Reply | None = None
        async for lines in bodies.read_lines(call, self._bytes_max, wait_seconds_max):
            if lines.lines or reply is None:
                reply = await self._called(run, msgspec.structs.replace(ask, body=lines))
                deadlines.renew(call)
        assert reply is not None
        return _answer(reply)

    async def _ran(self, ask: Ask) -> Answer:
        run = self.route.run
        if isinstance(run, Operation):
            return _answer(await self._gatherer.ask(run, ask, is_alone=len(self._under_way) == 1))
        return _answer(await self._called(run, ask))

    async def _called(self, run: Callable[[Ask], Outcome], ask: Ask) -> Reply:
        outcome = await self._guards.threads.run(lambda: run(ask))
        if isinstance(outcome, KeyfoldError):
            raise outcome
        if isinstance(outcome, Versioned):
            return Reply(msgspec.json.encode(outcome.answer), self.route.status, outcome.version)
        return Reply(msgspec.json.encode(outcome), self.route.status)

    def _path(self, params: Mapping[str, str]) -> Mapping[str, str]:
        parts = path_parts(params)
        if self.route.path_type is not None:
            try:
                msgspec.convert(parts, self.route.path_type, strict=False)
            except msgspec.ValidationError as error:
                refusal = refused_input(error, "the path")
                raise BadInput(refusal.detail, place=(refusal.place or "").replace("$.", "path ", 1)) from None
        return parts

    def _query(self, text: bytes) -> Struct | None:
        kind = self.route.query
        if not text and (kind is None or self._no_query is not None):
            return self._no_query
        pairs = query_pairs(text)
        if kind is None:
            raise BadInput("this call takes no query", place=f"query {pairs[0][0]}" if pairs else "query")
        try:
            query = msgspec.convert(dict(pairs), kind, strict=False)
        except msgspec.ValidationError as error:
            refusal = refused_input(error, "the query")
            raise BadInput(refusal.detail, place=(refusal.place or "").replace("$.", "query ", 1)) from None
        for name in self._floats:
            value = getattr(query, name)
            if isinstance(value, float) and not math.isfinite(value):
                raise BadInput("a finite number is needed", place=f"query {name}")
        return query


def no_query(kind: type[Struct]) -> Struct | None:
    """What a request without a query asks for; None where it must be refused, or where an operation could change it."""
    try:
        return msgspec.convert({}, kind) if kind.__struct_config__.frozen else None
    except msgspec.ValidationError:
        return None


def must_be_sound(route: Route) -> None:
    """Refuse at start what would be wrong on every request."""
    where = f"{route.method} {route.path}"
    if not _TEMPLATE.fullmatch(route.path):
        raise TypeError(f"{where}: the path must look like /v1/things/{{key}}")
    if route.scope not in SCOPES:
        raise TypeError(f"{where}: there is no scope {route.scope!r}")
    for kind in (route.body, route.lines, route.query):
        if kind is not None:
            must_be_strict(kind, where)
    if route.lines is not None and (route.body is not None or route.if_match or route.pace is not None):
        raise TypeError(f"{where}: lines are the whole body, and no edit")
    if route.lines is not None and isinstance(route.run, Operation):
        raise TypeError(f"{where}: lines go to a function, some at a time, and are not gathered")
    if isinstance(route.run, Operation):
        if route.run.status != route.status:
            raise TypeError(f"{where}: the route answers {route.status}, its operation {route.run.status}")
        if route.idempotent and not route.run.writes:
            raise TypeError(f"{where}: only a write takes an Idempotency-Key")
        if route.idempotent and route.media:
            raise TypeError(f"{where}: an answer that is kept for a repeat is JSON")
    elif route.media:
        raise TypeError(f"{where}: only a gathered operation answers in another form than JSON")
    elif route.idempotent:
        raise TypeError(f"{where}: only a gathered operation keeps its answer, so only it takes an Idempotency-Key")


def version_expected(call: Call) -> int:
    """The version that an edit was made from."""
    given = call.headers.get(b"if-match")
    if given is None:
        raise VersionNeeded("the header If-Match is missing", hint='Send If-Match with the ETag last read, such as "7"')
    found = _ETAG.fullmatch(given)
    version = int(found[1]) if found else 2**63
    if version >= 2**63:
        raise BadInput('If-Match must be one ETag of ours, such as "7"', place="header if-match")
    return version


def is_write(route: Route) -> bool:
    if isinstance(route.run, Operation):
        return route.run.writes
    return route.method != "GET" and route.scope != "read"


def must_have_no_key(call: Call) -> None:
    """Who sends a key relies on it: where no answer is kept for a repeat, that must not be passed over in silence."""
    if b"idempotency-key" in call.headers:
        raise BadInput(
            "this call keeps no answer for an Idempotency-Key",
            place="header idempotency-key",
            hint="Send it without one; its description says what a repeat does",
        )


def idempotency_key(call: Call) -> str | None:
    given = call.headers.get(b"idempotency-key")
    if given is None:
        return None
    if not _KEY.fullmatch(given):
        raise BadInput("Idempotency-Key must be 1 to 200 visible ASCII characters", place="header idempotency-key")
    return given.decode()


def path_parts(params: Mapping[str, str]) -> Mapping[str, str]:
    """The parts of the path, decoded strictly: a byte that is not UTF-8 must not become another key."""
    return {name: _unescaped(text, f"path {name}") for name, text in params.items()}


def query_pairs(text: bytes) -> list[tuple[str, str]]:
    """The names and values of a query; each name once."""
    try:
        decoded = text.decode()
        if _HALF_ESCAPE.search(decoded):
            raise BadInput("a percent sign must be followed by two hexadecimal digits", place="query")
        pairs = parse_qsl(
            decoded, keep_blank_values=True, strict_parsing=True, errors="strict", max_num_fields=QUERY_NAMES_MAX
        )
    except UnicodeDecodeError:
        raise BadInput("the query is not UTF-8", place="query") from None
    except ValueError as error:
        raise BadInput(f"the query cannot be read: {error}", place="query") from None
    seen: set[str] = set()
    for name, value in pairs:
        if name in seen:
            raise BadInput("the name was given more than once", place=f"query {name}")
        if "\0" in value or "\0" in name:
            raise BadInput("text may not contain NUL", place=f"query {name}")
        seen.add(name)
    return pairs


def _unescaped(text: str, place: str) -> str:
    if not text:
        raise NotFound("there is nothing at this address", hint="A part of the path is empty")
    if "%" not in text:
        return text
    if _HALF_ESCAPE.search(text):
        raise BadInput("a percent sign must be followed by two hexadecimal digits", place=place)
    try:
        decoded = unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise BadInput("this is not UTF-8", place=place) from None
    if "\0" in decoded:
        raise BadInput("text may not contain NUL", place=place)
    return decoded


def _fingerprint(call: Call, raw: bytes) -> bytes:
    path = f"{call.path}?{call.query.decode('latin-1')}" if call.query else call.path
    return fingerprint(call.method, path, raw)


def media_wanted(call: Call, offered: Sequence[str]) -> str:
    """The first type of Accept that the route can answer; JSON where none is named."""
    for each in call.headers.get(b"accept", b"").split(b","):
        name = each.partition(b";")[0].strip().lower().decode("latin-1")
        if name in (JSON_MEDIA, "*/*"):
            return JSON_MEDIA
        if name in offered:
            return name
    return JSON_MEDIA


async def _paced(answering: Awaitable[Answer], pace: float) -> Answer:
    """Whatever the answer is, it leaves at a multiple of `pace`: how long it took to find shows only so far."""
    started = time.monotonic()
    try:
        return await answering
    finally:
        await asyncio.sleep(pace - (time.monotonic() - started) % pace)


def _answer(reply: Reply) -> Answer:
    if reply.status == 204:
        return Answer(204, b"", ANSWER_HEADERS)
    if reply.media != JSON_MEDIA:
        return Answer(reply.status, reply.body, [(b"content-type", reply.media.encode()), *ANSWER_HEADERS])
    if reply.version is None:
        return Answer(reply.status, reply.body, JSON_HEADERS)
    return Answer(reply.status, reply.body, [*JSON_HEADERS, (b"etag", b'"%d"' % reply.version)])
