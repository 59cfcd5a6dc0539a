"""The body of a request: read no further than the limit, checked, and decoded into the type of its route."""

import asyncio
import json
import re

import msgspec
from msgspec import Struct

from keyfold.core.errors import BadInput, TooDeep, TooLarge, WrongMediaType
from keyfold.core.limits import Limits
from keyfold.http.problems import refused_input
from keyfold.http.shapes import is_open
from keyfold.http.wire import Call

DRAIN_BYTES_MAX = 64 * 1024 * 1024
DRAIN_SECONDS_MAX = 2.0

_JSON_TYPE = re.compile(rb'application/json\s*(;\s*charset\s*=\s*"?utf-8"?\s*)?;?', re.IGNORECASE)
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')
_HALF = re.compile(rb"\\u[dD](?:[89abAB]\w\w(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]\w\w\\u[dD])[c-fC-F])")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_decode_any = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


class Decoder:
    """Turns the bytes of a body into the struct of a route, or says what is wrong and where."""

    def __init__(self, kind: type[Struct], limits: Limits) -> None:
        self._decode = msgspec.json.Decoder(kind).decode
        # A closed type is as deep as its declaration; only where it takes any JSON does depth depend on the caller.
        self._depth_max = limits.depth_max if is_open(kind) else None

    def __call__(self, body: bytes) -> Struct:
        try:
            decoded = self._decode(body)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            must_hold_whole_characters(body)
            raise refused_input(error, "the body") from None
        if self._depth_max is not None:
            must_not_be_deeper(body, self._depth_max)
        must_hold_no_nul(body)
        must_not_repeat_names(body)
        return decoded


async def read(call: Call, bytes_max: int) -> bytes:
    """The body, which must be JSON; never more than `bytes_max` of it is held, whatever its length claims to be."""
    must_be_json(call)
    expected = declared_bytes(call)
    if expected is not None and expected > bytes_max:
        raise TooLarge(f"the body has {expected} bytes, {bytes_max} are allowed")
    if expected == 0:
        call.body_read = True
        raise BadInput("the body is empty; JSON is needed")
    call.reading = True
    try:
        return await _read(call, expected, bytes_max)
    finally:
        call.reading = False


async def _read(call: Call, expected: int | None, bytes_max: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        event = await call.receive()
        if event["type"] != "http.request":
            call.body_read = True
            raise BadInput("the body broke off, or its chunks are malformed")
        chunk = event.get("body", b"")
        size += len(chunk)
        if size > bytes_max:
            raise TooLarge(f"the body has more than the {bytes_max} bytes that are allowed")
        if expected is not None and size > expected:
            raise BadInput("the body is longer than its Content-Length")
        chunks.append(chunk)
        # The server's last event is an empty one: where the length is known it need not be waited for.
        if size == expected or not event.get("more_body", False):
            break
    call.body_read = True
    if expected is not None and size < expected:
        raise BadInput("the body is shorter than its Content-Length")
    if not size:
        raise BadInput("the body is empty; JSON is needed")
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def must_be_absent(call: Call) -> None:
    if call.headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in call.headers:
        raise BadInput("this call takes no body")


def must_be_json(call: Call) -> None:
    given = call.headers.get(b"content-type")
    if given is None or (given != b"application/json" and not _JSON_TYPE.fullmatch(given)):
        what = "has no Content-Type" if given is None else f"is {given.decode('latin-1')[:100]}"
        raise WrongMediaType(f"the body {what}", hint="Send Content-Type: application/json")
    encoding = call.headers.get(b"content-encoding")
    if encoding is not None and encoding != b"identity":
        raise WrongMediaType(f"the body is encoded as {encoding.decode('latin-1')[:100]}", hint="Send plain JSON")


def declared_bytes(call: Call) -> int | None:
    given = call.headers.get(b"content-length")
    if given is None:
        return None
    if not given.isdigit() or len(given) > 18:
        raise BadInput("Content-Length is not a number of bytes", place="header content-length")
    return int(given)


async def drain(call: Call) -> None:
    """After the answer, let a refused body run out, within reason.

    A caller that is still sending when its connection closes may never read the answer that lies waiting for it.
    """
    if call.body_read or call.fate is not None or b"expect" in call.headers:
        return
    if b"transfer-encoding" not in call.headers and call.headers.get(b"content-length", b"0") == b"0":
        return
    size = 0
    try:
        async with asyncio.timeout(DRAIN_SECONDS_MAX):
            while size < DRAIN_BYTES_MAX:
                event = await call.receive()
                if event["type"] != "http.request" or not event.get("more_body", False):
                    return
                size += len(event.get("body", b""))
    except TimeoutError:
        return


def must_hold_no_nul(body: bytes) -> None:
    """PostgreSQL has no NUL in text, so nobody may send one."""
    if b"\\u0000" in body and (found := _NUL.search(body)):
        raise BadInput("text may not contain NUL (\\u0000)", place=f"byte {found.end() - 6}")


def must_hold_whole_characters(body: bytes) -> None:
    """The decoder calls half a surrogate pair a truncated body, which would send the caller looking elsewhere."""
    if found := _HALF.search(body):
        raise BadInput("a \\u escape is half of a surrogate pair", place=f"byte {found.start()}")


def must_not_repeat_names(body: bytes) -> None:
    """A name twice in one object means different things to different readers, so it means nothing to us.

    A dictionary keeps one of the two, so what was decoded and encoded again has fewer colons: this needs no look at
    the names, and costs about as much as decoding. Only an escaped colon could hide one; then the names are looked at.
    """
    hidden = b"\\u003" in body
    if hidden or _encode(_decode_any(body)).count(b":") < body.count(b":"):
        json.loads(body, object_pairs_hook=_must_be_distinct)


def _must_be_distinct(pairs: list[tuple[str, object]]) -> None:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise BadInput(f"the name {twice[:100]!r} appears twice in one object")


def must_not_be_deeper(body: bytes, depth_max: int) -> None:
    """Refuse valid JSON that nests deeper: of its brackets alone, each pass takes away the innermost level."""
    if body.count(b"[") + body.count(b"{") <= depth_max:
        return
    brackets = _STRING.sub(b"", body).translate(_ONE_KIND, _NOT_BRACKETS)
    for _ in range(depth_max):
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise TooDeep(f"the body nests deeper than {depth_max} levels")
