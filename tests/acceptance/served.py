"""A server in a process of its own, as a user starts it, and what it wrote."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests

from keyfold.core import access
from keyfold.core.access import SCOPES
from keyfold.core.store import Store

ROOT = Path(__file__).parents[2]
KEYFOLD = [sys.executable, "-m", "keyfold.cli.main"]
TRIAL = [sys.executable, "-m", "tests.unit.http.trial"]
START_SECONDS_MAX = 60.0
LOGS = {"KEYFOLD_LOG_LEVEL": "debug", "KEYFOLD_LOG_FORM": "json"}
# The example catalog, with the handlers of the tests.
PROFILES = {
    "KEYFOLD_PROFILES_CATALOG": str(ROOT / "src/keyfold/counters/examples/marketplace.proto"),
    "KEYFOLD_PROFILES_HANDLERS": str(ROOT / "tests/profile_handlers.py"),
}
UNITS = {"KEYFOLD_ORDERS_UNITS": '{"rides": {}, "food": {"identities": ["phone_id"], "dimensions": ["place"]}}'}
TYPES = {"KEYFOLD_NUMBERING_TYPES": '{"a": {"number": 1}, "hers": {"number": 2}, "his": {"number": 3}}'}
# For tests that call faster than any client may.
QUIET_LIMITS = {
    "KEYFOLD_LIMITS_REFUSALS_PER_SECOND_MAX": "1000000",
    "KEYFOLD_LIMITS_REQUESTS_PER_SECOND_MAX": "1000000",
}


class Served:
    """`keyfold serve` on a free port; `log` is all that it wrote, on both streams."""

    def __init__(self, command: Sequence[str], directory: Path, environ: Mapping[str, str]) -> None:
        self._out = directory / f"server-{time.monotonic_ns()}.log"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("KEYFOLD_")}
        with self._out.open("wb") as out:
            self.process = subprocess.Popen(
                command,
                cwd=directory,
                env={**inherited, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PYTHONUNBUFFERED": "1", **environ},
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self.url = ""
        self.store_url = ""
        self.token = ""

    @property
    def log(self) -> str:
        return self._out.read_text()

    def wait_until_ready(self) -> "Served":
        deadline = time.monotonic() + START_SECONDS_MAX
        while " listens on " not in self.log:
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.02)
        self.url = self.log.partition(" listens on ")[2].split()[0].rstrip(".")
        return self

    def call(self, method: str, path: str, token: str | None = None, **request: Any) -> requests.Response:
        headers = {**({"Authorization": f"Bearer {token}"} if token else {}), **request.pop("headers", {})}
        return requests.request(method, self.url + path, headers=headers, timeout=30, **request)

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self, seconds_max: float = 40.0) -> int:
        return self.process.wait(seconds_max)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.signal()
        try:
            return self.wait()
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)


def token_for(store_url: str, scopes: Sequence[str] = tuple(SCOPES), **grants: Sequence[str]) -> str:
    """A token made beside the server, as an operator makes one."""
    store = Store.open(store_url)
    try:
        return access.create(store, "acceptance", scopes, grants or None)
    finally:
        store.close()


@contextmanager
def serving(directory: Path, environ: Mapping[str, str] = {}) -> Iterator[Served]:
    """A server for many tests, with its store in `directory` unless another is named; its `token` may do everything."""
    url = environ.get("KEYFOLD_STORE_URL", f"sqlite:///{directory / 'keyfold.db'}")
    given = {**LOGS, **QUIET_LIMITS, "KEYFOLD_STORE_URL": url, **environ}
    if not url.startswith("sqlite:"):
        upgrade = Served([*KEYFOLD, "store", "upgrade"], directory, given)
        assert upgrade.wait() == 0, upgrade.log
    served = Served([*KEYFOLD, "serve", "--port", "0"], directory, given)
    try:
        served.wait_until_ready()
        served.store_url, served.token = url, token_for(url)
        yield served
    finally:
        served.stop()


def tally(served: Served, token: str, key: str) -> tuple[int, int]:
    """The value and the version of a tally, as the API tells them."""
    [found] = served.call("POST", "/v1/tallies/read", token, json={"keys": [key]}).json()["tallies"]
    return found["value"], found["version"]


Start = Callable[..., Served]
