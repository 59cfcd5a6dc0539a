"""Logs: one line an event on stderr, JSON or text, with the request's id, and never a secret."""

import contextlib
import logging
import re
import sys
from collections.abc import Callable, Mapping, MutableMapping
from typing import TextIO, cast

import msgspec
import structlog

from keyfold.core.settings import LogSettings

BLOT = "***"
DEPTH_MAX = 6  # an event nests little; what lies deeper is written as text

# Names under which a value is a secret whatever it looks like.
SECRET_NAMES = re.compile(r"authorization|cookie|password|passwd|secret|^token$|api_?key", re.IGNORECASE)
SECRETS: tuple[tuple[re.Pattern[str], str], ...] = (
    # A token keeps its id, by which `keyfold token list` knows it.
    (re.compile(r"\b(kf_[0-9A-Za-z]{1,64}_)[0-9A-Za-z_\-]+"), rf"\1{BLOT}"),
    # The password of a URL reaches to the last @ before the host ends.
    (re.compile(r"(://[^:/@\s]*:)[^\s/]*@"), rf"\1{BLOT}@"),
    (re.compile(r"\b(bearer|basic)(\s+)[0-9A-Za-z._~+/=\-]{4,}", re.IGNORECASE), rf"\1\2{BLOT}"),
    (
        re.compile(r"""\b(password|passwd|secret|sasl\.password)(['"]?\s*[=:]\s*['"]?)[^\s'",;&)]+""", re.IGNORECASE),
        rf"\1\2{BLOT}",
    ),
)

Event = MutableMapping[str, object]
Processor = Callable[[object, str, Event], Event]


def configure(settings: LogSettings, stream: TextIO | None = None) -> None:
    """Send our own events and those of the libraries to stderr; the libraries speak from warnings up."""
    out = cast(TextIO, Unheard(stream or sys.stderr))
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    render = _json if settings.form == "json" else _text(out)
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
    ]
    closing: list[Processor] = [structlog.processors.format_exc_info, redact_event]
    structlog.configure(
        processors=[*shared, *closing, render],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(out),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *closing, render],
        )
    )
    logging.basicConfig(handlers=[handler], level=max(level, logging.WARNING), force=True)


class Unheard:
    """A stream whose reader may go away, or whose disk may fill: a line that nobody can read stops no work."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()


def redact(text: str) -> str:
    """The text without tokens, passwords and Authorization values."""
    for pattern, blotted in SECRETS:
        text = pattern.sub(blotted, text)
    return text


def redact_event(_logger: object, _name: str, event: Event) -> Event:
    """Blot out every secret in an event, however nested, exception text included."""
    return {key: _redacted(key, value, DEPTH_MAX) for key, value in event.items()}


def _redacted(name: str, value: object, depth: int) -> object:
    if value is None or isinstance(value, bool | int | float):
        return value
    if SECRET_NAMES.search(name):
        return BLOT
    if depth and isinstance(value, Mapping):
        return {redact(str(key)): _redacted(str(key), item, depth - 1) for key, item in value.items()}
    if depth and isinstance(value, list | tuple | set | frozenset):
        return [_redacted("", item, depth - 1) for item in value]
    if isinstance(value, bytes):
        return redact(value.decode("latin-1"))
    return redact(str(value))


def _json(_logger: object, _name: str, event: Event) -> str:
    return msgspec.json.encode(event).decode()


def _text(out: TextIO) -> "Callable[[object, str, Event], str]":
    console = structlog.dev.ConsoleRenderer(
        colors=out.isatty(), timestamp_key="at", exception_formatter=structlog.dev.plain_traceback, pad_event_to=0
    )
    return lambda logger, name, event: str(console(logger, name, event))
