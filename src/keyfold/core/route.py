"""An endpoint as data: what it takes, what it answers, who may call it. The HTTP door mounts it and documents it."""

from collections.abc import Callable
from typing import Any, Literal

from msgspec import Struct

from keyfold.core.errors import KeyfoldError
from keyfold.core.gather import Ask, Operation, Outcome

Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]


class Lines(Struct, frozen=True):
    """Some lines of a streamed body; `first` is the number of the first of them in the body, from 0."""

    first: int
    lines: list[bytes]


class Route(Struct, frozen=True, kw_only=True):
    """`run` is either a gathered operation or a function that a worker thread calls for one request.

    A route with `lines` takes a body of any length, one JSON document a line. Its `run` is called for a bounded number
    of lines after the other, with `Lines` as the body; each call commits by itself, and the last one is answered.
    """

    method: Method
    path: str  # "/v1/tallies/{key}"; parts of the path arrive in Ask.path as text
    summary: str
    scope: str
    run: Operation | Callable[[Ask], Outcome]
    body: type[Struct] | None = None
    lines: type[Struct] | None = None  # what a line is meant to be; whether it is, `run` sees to
    path_type: type[Struct] | None = None  # what the parts of the path must be
    query: type[Struct] | None = None
    answer: Any = None
    status: int = 200
    if_match: bool = False  # an edit: If-Match with the version is needed
    idempotent: bool = False  # a write: Idempotency-Key is taken
    judges_items: bool = False  # of a body that may hold any JSON: an item with too large a number is refused alone
    errors: tuple[type[KeyfoldError], ...] = ()
    media: tuple[str, ...] = ()  # what it can answer besides JSON, chosen by Accept
    pace: Callable[[Ask], float] | None = None  # the answer leaves at a multiple of these seconds; 0: at once
    description: str = ""
    tag: str = ""  # in the documentation; the part's name where it is empty
