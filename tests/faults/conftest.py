"""What the fault tests share: where they work, how long, and the count of what they struck."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import matrix
from tests.faults.matrix import hit as hit  # a fixture
from tests.faults.nursery import STRACE, Desk, Nursery, migrated
from tests.faults.smalldisk import DISK_BYTES
from tests.servers.fixtures import running
from tests.servers.postgres import PostgresServer


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fault(name, *parts): the fault that this test inflicts, and on which parts")
    if not config.pluginmanager.has_plugin(matrix.__name__):
        config.pluginmanager.register(matrix, matrix.__name__)


@pytest.fixture
def fast_path() -> Iterator[Path]:
    """A directory in memory, where syncing costs nothing: what these tests lose, they lose on purpose."""
    memory = Path("/dev/shm")
    directory = Path(tempfile.mkdtemp(prefix="keyfold-", dir=memory if os.access(memory, os.W_OK) else None))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two megabytes."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "keyfold", str(tmp_path)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    """A server of its own, which is killed, with fsync on as in production."""
    yield from running(PostgresServer)


@pytest.fixture
def desk(template: Path, fast_path: Path) -> Desk:
    """Where runs in processes of their own find a fresh store."""
    return Desk(template, fast_path)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty store with our schema, to copy."""
    return migrated(tmp_path_factory.mktemp("template") / "template.db")


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    if STRACE is None:
        if os.environ.get("CI"):
            pytest.fail("strace is not installed", pytrace=False)
        pytest.skip("strace is not installed: run `make servers` as root")
    with Nursery() as running:
        yield running
