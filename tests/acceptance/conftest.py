"""Servers for the tests that need one: fresh ones, one with odd routes, and one that many tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.served import KEYFOLD, LOGS, PROFILES, TRIAL, TYPES, UNITS, Served, Start, serving


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `keyfold serve` and stops it after the test."""
    started: list[Served] = []

    def run(*arguments: str, ready: bool = True, **environ: str) -> Served:
        store = {"KEYFOLD_STORE_URL": f"sqlite:///{tmp_path / 'keyfold.db'}"}
        served = Served([*KEYFOLD, "serve", "--port", "0", *arguments], tmp_path, {**LOGS, **store, **environ})
        started.append(served)
        return served.wait_until_ready() if ready else served

    yield run
    for served in started:
        served.stop()


@pytest.fixture
def start_trial(tmp_path: Path) -> Iterator[Start]:
    """Starts a server with the trial part, which has slow and broken routes."""
    started: list[Served] = []

    def run(**options: object) -> Served:
        named = {"store_url": f"sqlite:///{tmp_path / 'trial.db'}", "http_port": 0, "log_level": "debug", **options}
        served = Served([*TRIAL, *(f"{name}={value}" for name, value in named.items())], tmp_path, {})
        started.append(served)
        return served.wait_until_ready()

    yield run
    for served in started:
        served.stop()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all the tests that leave it as it was; `shared.token` may do everything."""
    limits = {"KEYFOLD_LIMITS_REQUEST_SECONDS_MAX": "2", "KEYFOLD_LIMITS_BODY_BYTES_MAX": "2000000"}
    with serving(tmp_path_factory.mktemp("shared"), {**PROFILES, **UNITS, **TYPES, **limits}) as served:
        yield served
