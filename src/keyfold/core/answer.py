"""What a command answers where its form for people is not that of the data."""

from collections.abc import Mapping, Sequence

from msgspec import Struct

Row = Mapping[str, object]


class Answer(Struct, frozen=True, kw_only=True):
    """`data` is for programs, the rest for people: a table, then lines; notes go to stderr."""

    data: object
    table: Sequence[Row] | None = None
    lines: Sequence[str] = ()
    notes: Sequence[str] = ()
    exit_code: int = 0


def printable(text: str) -> str:
    """Keys and reasons come from outside: what could steer a terminal is shown escaped."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
