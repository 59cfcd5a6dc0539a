"""Times and spans as people write them, and times as we print them."""

import re
from datetime import UTC, datetime

from keyfold.core.clock import SECOND_US
from keyfold.core.errors import BadInput

UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
TIME_FORMS = "Write 2026-11-15T20:30:00Z, 2026-11-15T20:30:00+03:00, -2h or '2h ago' (s, m, h, d, w)"


def moment_us(text: str, now_us: int) -> int:
    """A point in time, in microseconds: ISO 8601 with a zone, or a span before now (`-2h`, `2h ago`)."""
    relative = re.fullmatch(r"(?:-\s*(?P<minus>\S+)|(?P<ago>\S+)\s+ago)", text.strip())
    if relative:
        return now_us - span_seconds(relative["minus"] or relative["ago"]) * SECOND_US
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise BadInput(f"{text!r} is not a time", hint=TIME_FORMS) from None
    if moment.tzinfo is None:
        raise BadInput(f"the time {text!r} names no zone", hint=TIME_FORMS)
    elapsed = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (elapsed.days * 86400 + elapsed.seconds) * SECOND_US + elapsed.microseconds


def span_seconds(text: str) -> int:
    """A length of time: a number and its unit, or several (`90s`, `1d`, `1h30m`)."""
    if not re.fullmatch(r"(\d+[smhdw])+", text.strip()):
        raise BadInput(f"{text!r} is not a length of time", hint="Write a number with s, m, h, d or w: 90s, 1h30m, 1d")
    return sum(int(number) * UNIT_SECONDS[unit] for number, unit in re.findall(r"(\d+)([smhdw])", text))


def iso(time_us: int) -> str:
    """A time as ISO 8601 in UTC, with microseconds only where there are some."""
    seconds, rest = divmod(time_us, SECOND_US)
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S") + (f".{rest:06}Z" if rest else "Z")
