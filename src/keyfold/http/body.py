"""The body of a request: read no further than the limit, checked, and decoded into the type of its route."""

import asyncio
import re

import msgspec
from msgspec import Struct

from keyfold.core.errors import BadInput, TooLarge, WrongMediaType
from keyfold.core.jsontext import (
    must_hold_no_nul,
    must_hold_whole_characters,
    must_not_be_deeper,
    must_not_repeat_names,
)
from keyfold.core.limits import Limits
from keyfold.http.problems import refused_input
from keyfold.http.shapes import is_open
from keyfold.http.wire import Call

DRAIN_BYTES_MAX = 64 * 1024 * 1024
DRAIN_SECONDS_MAX = 2.0

_JSON_TYPE = re.compile(rb'application/json\s*(;\s*charset\s*=\s*"?utf-8"?\s*)?;?', re.IGNORECASE)


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
