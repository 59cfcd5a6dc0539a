"""What a command answers, printed for people or for programs.

A command returns its answer and this module prints it. A struct is one thing, a list of structs a table, an iterator
a stream, printed as it comes; `Answer` is for those whose form for people is not that of the data.
"""

import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from typing import Any

import msgspec
from msgspec import Struct

from keyfold.core.answer import Answer, Row, printable


def show(answer: object, *, as_json: bool) -> None:
    """Print an answer, whatever it is; None says nothing."""
    if isinstance(answer, Iterator):
        with closing(answer) if isinstance(answer, Generator) else nullcontext():
            for each in answer:
                _show_one(each, as_json, in_stream=True)
        return
    _show_one(answer, as_json, in_stream=False)
    if isinstance(answer, Answer) and answer.exit_code:
        import typer

        sys.stdout.flush()
        raise typer.Exit(answer.exit_code)


def _show_one(answer: object, as_json: bool, *, in_stream: bool) -> None:
    if answer is None:
        return
    if as_json:
        data = msgspec.json.encode(answer.data if isinstance(answer, Answer) else answer)
        if sys.stdout.isatty() and not in_stream:
            data = msgspec.json.format(data, indent=2)
        print(data.decode(), flush=in_stream)
    elif isinstance(answer, Answer):
        if answer.table is not None:
            print_table(answer.table)
        for line in answer.lines:
            print(line, flush=in_stream)
        sys.stdout.flush()
        for note in answer.notes:
            print(note, file=sys.stderr)
    else:
        things = answer if isinstance(answer, list) else [answer]
        print_table([msgspec.structs.asdict(thing) if isinstance(thing, Struct) else {"": thing} for thing in things])


def print_table(rows: Sequence[Row]) -> None:
    """A Rich table on a terminal, aligned text otherwise; numbers stand to the right."""
    if not rows:
        return
    names = list(rows[0])
    right = [all(isinstance(row[name], int) and not isinstance(row[name], bool) for row in rows) for name in names]
    titles = [name.replace("_", " ") for name in names]
    cells = [[as_text(row[name]) for name in names] for row in rows]
    if sys.stdout.isatty():
        _print_rich(titles, cells, right)
    else:
        _print_plain([title.upper() for title in titles], cells, right)


def as_text(value: object) -> str:
    """A value as people read it."""
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case Mapping():
            return " ".join(f"{key}={as_text(item)}" for key, item in value.items())
        case str():
            return printable(value)
        case Sequence():
            return ",".join(as_text(item) for item in value)
        case _:
            return str(value)


def _print_plain(titles: list[str], cells: list[list[str]], right: list[bool]) -> None:
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    for line in [titles, *cells]:
        aligned = [
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(line, widths, right, strict=True)
        ]
        print("  ".join(aligned).rstrip())


def _print_rich(titles: list[str], cells: list[list[str]], right: list[bool]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for index, (title, is_right) in enumerate(zip(titles, right, strict=True)):
        table.add_column(title, justify="right" if is_right else "left", overflow="fold", no_wrap=index == 0)
    for line in cells:
        table.add_row(*map(Text, line))
    Console().print(table)


LINE_SECONDS = 2.0


class Steps:
    """Progress of long work on stderr: a bar on a terminal, a line a step otherwise."""

    def __init__(self, label: str, total: int | None, *, silent: bool) -> None:
        self._label = label
        self._total = total
        self._silent = silent
        self._done = 0
        self._bar: Any = None
        self._said_at = float("-inf")

    def __enter__(self) -> "Steps":
        if not self._silent and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.start()
            self._bar.add_task(self._label, total=self._total)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, what: str) -> None:
        """One more is done."""
        self._done += 1
        if self._bar is not None:
            self._bar.update(0, advance=1, description=f"{self._label}: {what}")
        elif not self._silent:
            print(f"{self._label}: {what}{self._so_far()}", file=sys.stderr, flush=True)

    def at(self, done: int, what: str) -> None:
        """So many are done; without a terminal it is said now and then, and at the end."""
        self._done = done
        if self._bar is not None:
            self._bar.update(0, completed=done, description=f"{self._label}: {what}")
        elif not self._silent and (done >= (self._total or 0) or time.monotonic() - self._said_at >= LINE_SECONDS):
            self._said_at = time.monotonic()
            print(f"{self._label}: {what}{self._so_far()}", file=sys.stderr, flush=True)

    def _so_far(self) -> str:
        """How many are done, where it is known how many there are."""
        return "" if self._total is None else f" ({self._done} of {self._total})"
