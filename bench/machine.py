"""What the numbers were measured on: cores, memory, kernel, the answers of a disk and of a process, and versions."""

import importlib.metadata
import os
import platform
import socket
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from msgspec import Struct

PACKAGES = (
    "sqlalchemy",
    "psycopg",
    "confluent-kafka",
    "msgspec",
    "falcon",
    "granian",
    "uvloop",
    "pysqlite3",
    "numpy",
    "numba",
    "protobuf",
    "fastapi",
    "uvicorn",
    "redis",
    "hiredis",
)
PROBE_SYNCS = 300
PROBE_BYTES = 4096
PROBE_MESSAGES = 2_000


class Machine(Struct, frozen=True, kw_only=True):
    cores: int
    processor: str
    memory_gigabytes: float
    kernel: str
    sync_microseconds_median: float
    sync_microseconds_high: float
    round_trip_microseconds: float = 0.0  # of older results it is not known
    load_before: float
    versions: dict[str, str]
    commit: str


def look(directory: Path) -> Machine:
    """Look at the machine now; the disk is the one that `directory` lies on."""
    median, high = _sync_microseconds(directory)
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        processor=_processor(),
        memory_gigabytes=round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        kernel=platform.release(),
        sync_microseconds_median=round(median, 1),
        sync_microseconds_high=round(high, 1),
        round_trip_microseconds=round(_round_trip_microseconds(), 1),
        load_before=os.getloadavg()[0],
        versions=_versions(),
        commit=_commit(directory),
    )


def _sync_microseconds(directory: Path) -> tuple[float, float]:
    """Append a page and sync, as a commit does; the median and the 99th of a hundred."""
    taken = []
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        for _ in range(PROBE_SYNCS):
            os.write(file.fileno(), b"x" * PROBE_BYTES)
            started = time.perf_counter()
            os.fdatasync(file.fileno())
            taken.append((time.perf_counter() - started) * 1e6)
    return statistics.median(taken), statistics.quantiles(taken, n=100)[-1]


def _round_trip_microseconds() -> float:
    """A byte to another process and back, both asleep until it comes: what peers that ask one by one wait for.

    On a virtual machine that does not watch for work before it halts a core, several times that of one that does.
    """
    ours, theirs = socket.socketpair()
    child = os.fork()
    if not child:
        ours.close()
        while said := theirs.recv(1):
            theirs.send(said)
        os._exit(0)
    theirs.close()
    taken = []
    with ours:
        for _ in range(PROBE_MESSAGES):
            started = time.perf_counter()
            ours.send(b"x")
            ours.recv(1)
            taken.append((time.perf_counter() - started) * 1e6)
    os.waitpid(child, 0)
    return statistics.median(taken)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _versions() -> dict[str, str]:
    from keyfold.core.store.sqlite import driver

    found = {"python": platform.python_version(), "sqlite": str(driver().sqlite_version)}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit(directory: Path) -> str:
    command = ["git", "-C", str(directory), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
