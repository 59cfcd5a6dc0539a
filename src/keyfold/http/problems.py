"""What a caller reads when a request fails: RFC 9457 problem details, the same shape for every error."""

import re

import msgspec
import structlog
from msgspec import Struct

from keyfold.core.errors import BadInput, Internal, KeyfoldError, TooDeep
from keyfold.core.logs import redact
from keyfold.http.wire import ANSWER_HEADERS, Answer, Headers

log = structlog.get_logger(__name__)

PROBLEM_JSON = b"application/problem+json"
RETRY_SECONDS = 1
RETRYABLE = frozenset({429, 503})

_HEADERS: Headers = [(b"content-type", PROBLEM_JSON), *ANSWER_HEADERS]
_PLACE = re.compile(r" - at `(?P<place>[^`]*)`$")
_BYTE = re.compile(r" \((?P<place>byte \d+)\)$")


class Problem(Struct, frozen=True, omit_defaults=True):
    """Why a request failed. Programs read `type`, people read `detail`, support asks for `request_id`."""

    type: str
    title: str
    status: int
    detail: str
    request_id: str
    place: str | None = None
    hint: str | None = None


def type_of(error: type[KeyfoldError] | KeyfoldError) -> str:
    return f"/problems/{error.slug}"


def problem(error: KeyfoldError, request_id: str) -> Problem:
    """The problem of an error. What a server says of itself may quote a store's URL, so it is redacted."""
    ours = error.status >= 500
    return Problem(
        type=type_of(error),
        title=error.title(),
        status=error.status,
        detail=redact(error.detail) if ours else error.detail,
        request_id=request_id,
        place=error.place,
        hint=redact(error.hint) if ours and error.hint else error.hint,
    )


def answer(error: KeyfoldError, request_id: str, extra: Headers | None = None) -> Answer:
    headers = [*_HEADERS, *(extra or ())]
    if error.status in RETRYABLE or error.retry_after_seconds is not None:
        headers.append((b"retry-after", str(error.retry_after_seconds or RETRY_SECONDS).encode()))
    if error.status == 401:
        headers.append((b"www-authenticate", b'Bearer realm="keyfold"'))
    return Answer(error.status, msgspec.json.encode(problem(error, request_id)), headers)


def unexpected(error: Exception) -> KeyfoldError:
    """What nobody foresaw: logged with its stack under the request's id, answered without it."""
    log.error("request failed unexpectedly", exc_info=error)
    return Internal("the server met an unexpected fault", hint="Quote the request_id to whoever runs this server")


def refused_input(error: Exception, source: str) -> BadInput:
    """What a decoder refused, as the place and the reason; `source` says what was decoded."""
    if isinstance(error, RecursionError):
        return TooDeep(f"{source} is nested too deeply")
    if isinstance(error, UnicodeDecodeError):
        return BadInput(f"{source} is not UTF-8: {error.reason}")
    text = str(error)
    if isinstance(error, msgspec.ValidationError):
        found = _PLACE.search(text)
        return BadInput(_PLACE.sub("", text), place=found["place"] if found else "$")
    found = _BYTE.search(text)
    reason = _BYTE.sub("", text).removeprefix("JSON is malformed: ")
    return BadInput(f"{source} is not valid JSON: {reason}", place=found["place"] if found else None)
