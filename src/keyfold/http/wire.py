"""One request and one answer, as the door hands them from room to room."""

import itertools
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, TypedDict

from msgspec import Struct

from keyfold.core.errors import AddressTooLong, BadInput, KeyfoldError

Headers = list[tuple[bytes, bytes]]


class Scope(TypedDict):
    """What ASGI says of a request, as far as we read it."""

    type: str
    method: str
    raw_path: bytes
    query_string: bytes
    headers: Headers
    client: tuple[str, str | int] | None


class Event(TypedDict, total=False):
    """What ASGI sends along: pieces of a body, a disconnect, and our answer."""

    type: str
    body: bytes
    more_body: bool
    status: int
    headers: Headers


Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]

ADDRESS_BYTES_MAX = 8_192
JSON = b"application/json"
# Nothing that the API answers may be kept by a browser or a proxy, or be taken for another type.
ANSWER_HEADERS: Headers = [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
JSON_HEADERS: Headers = [(b"content-type", JSON), *ANSWER_HEADERS]

# Headers that mean one thing; a repeated one is refused, so that no two readers of a request can disagree.
SINGLE = frozenset({b"authorization", b"content-length", b"content-type", b"idempotency-key", b"if-match", b"host"})

_SANE_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_HERE = secrets.token_hex(4)
_numbers = itertools.count(1)


class Call:
    """One request. `fate` is set by whoever ends it early: the deadline, or the stop of the server."""

    __slots__ = (
        "body_read",
        "client",
        "error",
        "fate",
        "headers",
        "method",
        "path",
        "query",
        "reading",
        "receive",
        "remote",
        "request_id",
    )

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.headers: Mapping[bytes, bytes] = dict(scope["headers"])
        self.request_id = request_id(self.headers.get(b"x-request-id"))
        self.method = scope["method"]
        self.receive = receive
        self.remote = scope["client"][0] if scope["client"] else ""
        self.client = ""
        self.error = ""
        self.path = ""
        self.query = b""
        self.reading = False
        self.body_read = False
        self.fate: KeyfoldError | None = None

    def take_address(self, scope: Scope) -> None:
        """Read the path as it was sent: servers decode it leniently, which would turn one key into another."""
        raw = scope["raw_path"]
        self.query = scope["query_string"]
        if len(raw) + len(self.query) > ADDRESS_BYTES_MAX:
            raise AddressTooLong(f"the address has {len(raw) + len(self.query)} bytes, {ADDRESS_BYTES_MAX} are allowed")
        try:
            self.path = raw.decode()
        except UnicodeDecodeError:
            raise BadInput("the path is not UTF-8", place="path") from None

    def must_not_repeat(self, scope: Scope) -> None:
        if len(scope["headers"]) == len(self.headers):
            return
        names = [name for name, _ in scope["headers"]]
        for name in SINGLE:
            if names.count(name) > 1:
                raise BadInput("the header was sent more than once", place=f"header {name.decode()}")


class Answer(Struct, frozen=True):
    status: int
    body: bytes
    headers: Headers


class Endpoint(Protocol):
    """Something mounted at a path. `template` is its name in metrics and logs, never the path itself."""

    template: str

    async def answer(self, call: Call, params: Mapping[str, str]) -> Answer: ...


def request_id(given: bytes | None) -> str:
    """The caller's id where it is sane, else one of ours, unique among all processes."""
    if given is not None and _SANE_ID.fullmatch(given):
        return given.decode()
    return f"{_HERE}-{next(_numbers):x}"
