"""The body of a request: read no further than the limit, checked, and decoded into the type of its route."""

import asyncio
import re
import time
from collections.abc import AsyncIterator

import msgspec
from msgspec import Struct

from keyfold.core.errors import BadInput, TooLarge, WrongMediaType
from keyfold.core.jsontext import (
    must_hold_64_bits,
    must_hold_no_nul,
    must_hold_whole_characters,
    must_not_be_deeper,
    must_not_repeat_names,
)
from keyfold.core.limits import Limits
from keyfold.core.route import Lines
from keyfold.http.problems import refused_input
from keyfold.http.shapes import is_open
from keyfold.http.wire import Call

DRAIN_BYTES_MAX = 64 * 1024 * 1024
DRAIN_SECONDS_MAX = 2.0
LINES_MEDIA = "application/x-ndjson"
LINES_MAX = 1_000  # handed over at once
LINES_BYTES = 1024 * 1024

_LINES_TYPE = re.compile(rb'application/x-ndjson\s*(;\s*charset\s*=\s*"?utf-8"?\s*)?;?', re.IGNORECASE)
_JSON_TYPE = re.compile(rb'application/json\s*(;\s*charset\s*=\s*"?utf-8"?\s*)?;?', re.IGNORECASE)


class Decoder:
    """Turns the bytes of a body into the struct of a route, or says what is wrong and where."""

    def __init__(self, kind: type[Struct], limits: Limits, *, judges_items: bool = False) -> None:
        self._decode = msgspec.json.Decoder(kind).decode
        # A closed type is as deep as its declaration, and its numbers have bounds; only where it takes any JSON do
        # these depend on the caller.
        self._depth_max = limits.depth_max if is_open(kind) else None
        self._is_bounded = is_open(kind) and not judges_items

    def __call__(self, body: bytes) -> Struct:
        try:
            decoded = self._decode(body)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            must_hold_whole_characters(body)
            raise refused_input(error, "the body") from None
        if self._depth_max is not None:
            must_not_be_deeper(body, self._depth_max)
        if self._is_bounded:
            must_hold_64_bits(body)
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


async def read_lines(call: Call, line_bytes_max: int, wait_seconds_max: float) -> AsyncIterator[Lines]:
    """The lines of a body, some at a time: as many as are handed over at once, or as came within the time.

    Never more is held than one hand-over, one line and what the server received at once, however long the body is.
    Lines without anything in them are left out, and not counted. The last hand-over may be empty.
    """
    must_be_lines(call)
    expected = declared_bytes(call)
    splitter = _Splitter(line_bytes_max)
    size, more = 0, expected != 0
    since = time.monotonic()
    while more:
        chunk, more = await _received(call)
        size += len(chunk)
        if expected is not None and size > expected:
            raise BadInput("the body is longer than its Content-Length")
        more = more and size != expected
        splitter.add(chunk)
        while splitter.is_full or (more and splitter.lines and time.monotonic() - since > wait_seconds_max):
            yield splitter.taken()
            since = time.monotonic()
    call.body_read = True
    if expected is not None and size < expected:
        raise BadInput("the body is shorter than its Content-Length")
    splitter.end()
    yield splitter.taken()


async def _received(call: Call) -> tuple[bytes, bool]:
    """The next piece of a body, and whether more comes behind it."""
    call.reading = True
    try:
        event = await call.receive()
    finally:
        call.reading = False
    if event["type"] != "http.request":
        call.body_read = True
        raise BadInput("the body broke off, or its chunks are malformed")
    return event.get("body", b""), event.get("more_body", False)


class _Splitter:
    """Pieces go in as they come, lines come out."""

    def __init__(self, line_bytes_max: int) -> None:
        self.lines: list[bytes] = []
        self._first = 0  # the number of the first of them
        self._bytes = 0
        self._open: list[bytes] = []  # pieces of the line whose end has not come
        self._open_bytes = 0
        self._line_bytes_max = line_bytes_max

    @property
    def is_full(self) -> bool:
        return len(self.lines) >= LINES_MAX or self._bytes >= LINES_BYTES

    def add(self, chunk: bytes) -> None:
        head, newline, rest = chunk.partition(b"\n")
        self._keep_open(head)
        if not newline:
            return
        self.end()
        *whole, tail = rest.split(b"\n")
        for line in whole:
            self._add_line(line)
        self._keep_open(tail)

    def end(self) -> None:
        """The open line ends here."""
        line = self._open[0] if len(self._open) == 1 else b"".join(self._open)
        self._open, self._open_bytes = [], 0
        self._add_line(line)

    def taken(self) -> Lines:
        """So many of the lines as are handed over at once."""
        size, count = 0, 0
        for line in self.lines[:LINES_MAX]:
            size += len(line)
            count += 1
            if size >= LINES_BYTES:
                break
        taken = Lines(self._first, self.lines[:count])
        self.lines = self.lines[count:]
        self._first += count
        self._bytes -= size
        return taken

    def _keep_open(self, piece: bytes) -> None:
        self._open_bytes += len(piece)
        self._must_not_be_longer(self._open_bytes)
        if piece:
            self._open.append(piece)

    def _add_line(self, line: bytes) -> None:
        self._must_not_be_longer(len(line))
        if line and not line.isspace():
            self.lines.append(line)
            self._bytes += len(line)

    def _must_not_be_longer(self, size: int) -> None:
        if size > self._line_bytes_max:
            raise TooLarge(
                f"the line has more than the {self._line_bytes_max} bytes that are allowed", place=self._here
            )

    @property
    def _here(self) -> str:
        return f"line {self._first + len(self.lines)}"


def must_be_absent(call: Call) -> None:
    if call.headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in call.headers:
        raise BadInput("this call takes no body")


def must_be_json(call: Call) -> None:
    given = call.headers.get(b"content-type")
    if given != b"application/json":
        _must_match(given, _JSON_TYPE, "application/json")
    _must_be_plain(call)


def must_be_lines(call: Call) -> None:
    _must_match(call.headers.get(b"content-type"), _LINES_TYPE, LINES_MEDIA)
    _must_be_plain(call)


def _must_match(given: bytes | None, kind: re.Pattern[bytes], name: str) -> None:
    if given is None or not kind.fullmatch(given):
        what = "has no Content-Type" if given is None else f"is {given.decode('latin-1')[:100]}"
        raise WrongMediaType(f"the body {what}", hint=f"Send Content-Type: {name}")


def _must_be_plain(call: Call) -> None:
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
