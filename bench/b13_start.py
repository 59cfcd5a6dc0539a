"""Start: seconds of `keyfold --version`, and of `keyfold serve` to the first successful /readyz on a SQLite store.

The store is there already, with its schema. A bare `python -c pass` of the same interpreter shows what nobody can
get below. /readyz is asked every millisecond, by a new connection each time.
"""

import subprocess
import sys
from collections.abc import Iterator

from bench import stores
from bench.harness import Goal, Race, Side, seconds
from bench.serving import keyfold, prepared, served

VERSION, SERVE, BARE = "keyfold --version", "keyfold serve to ready", "python -c pass"


def races(quick: bool) -> Iterator[Race]:
    times = 3 if quick else 10
    with stores.sqlite() as new_url:
        url = prepared(new_url())
        with served(url):
            pass  # topics are made, bytecode is compiled: every later start finds them
        yield Race(
            title="start of a process",
            unit="s",
            better="less",
            sides=[
                Side(VERSION, lambda: _mean(times, [keyfold(), "--version"])),
                Side(SERVE, lambda: _to_ready(url)),
                Side(BARE, lambda: _mean(times, [sys.executable, "-c", "pass"])),
            ],
            goals=[
                Goal(side=VERSION, against=None, must=0.2, moonshot=0.1),
                Goal(side=SERVE, against=None, must=1.0, moonshot=0.5),
            ],
        )


def _mean(times: int, command: list[str]) -> float:
    return seconds(lambda: [subprocess.run(command, check=True, capture_output=True) for _ in range(times)]) / times


def _to_ready(url: str) -> float:
    with served(url) as (_, taken):
        return taken
