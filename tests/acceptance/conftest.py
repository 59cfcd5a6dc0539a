"""Servers for the tests that need one: fresh ones, one with odd routes, and one that many tests share."""

import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from keyfold.cli.run import run as run_command
from tests.acceptance.served import KEYFOLD, LOGS, PROFILES, TRIAL, TYPES, UNITS, Served, Start, serving
from tests.servers.fixtures import fresh_database


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
def in_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """The command line within this process, which has imported what it stands on already."""
    stopping, logging = signal.getsignal(signal.SIGTERM), structlog.get_config()

    def configure(**given: Any) -> None:
        """A logger that remembered this configuration would go on by it in the tests that follow."""
        structlog.configure(**given | {"cache_logger_on_first_use": False})

    def run(*arguments: str, **environ: str) -> "subprocess.CompletedProcess[str]":
        with monkeypatch.context() as patch:
            patch.setattr("keyfold.core.logs.structlog", SimpleNamespace(**vars(structlog) | {"configure": configure}))
            patch.chdir(tmp_path)
            for name, value in environ.items():
                patch.setenv(name, value)
            capfd.readouterr()
            try:
                code = run_command(list(arguments))
            except SystemExit as ended:
                code = int(ended.code or 0)
            finally:
                signal.signal(signal.SIGTERM, stopping)
                structlog.configure(**logging)
            said = capfd.readouterr()
        return subprocess.CompletedProcess(arguments, code, said.out, said.err)

    return run


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


# A group a kind: one worker of the tests serves each, where otherwise every worker would serve both.
KINDS = [pytest.param(kind, marks=pytest.mark.xdist_group(f"served on {kind}")) for kind in ("sqlite", "postgresql")]


@pytest.fixture(scope="module", params=KINDS)
def module_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an empty store of each kind, for all the tests of a module."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path_factory.mktemp('store') / 'keyfold.db'}"
        return
    with fresh_database(request.getfixturevalue("postgres_server")) as url:
        yield url


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all the tests that leave it as it was; `shared.token` may do everything."""
    limits = {"KEYFOLD_LIMITS_REQUEST_SECONDS_MAX": "2", "KEYFOLD_LIMITS_BODY_BYTES_MAX": "2000000"}
    with serving(tmp_path_factory.mktemp("shared"), {**PROFILES, **UNITS, **TYPES, **limits}) as served:
        yield served
