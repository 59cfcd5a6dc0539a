"""A `keyfold serve` in a process of its own, on a store that is ready, and the load that `wrk` puts on it."""

import http.client
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from keyfold.core.part import named_tables
from keyfold.core.settings import load
from keyfold.core.store import Store, migrate
from keyfold.parts import PARTS, settings_of_parts
from tests.servers.process import free_port

START_SECONDS_MAX = 90.0
STOP_SECONDS_MAX = 30.0
POLL_SECONDS = 0.001

# Only ever answered by this machine, so one caller may ask as fast as it can.
ENVIRONMENT = {"KEYFOLD_HTTP_DEMO": "true", "KEYFOLD_LIMITS_REQUESTS_PER_SECOND_MAX": "1000000"}


class LoadFailed(Exception):
    """The load met errors, so its figure would mean nothing."""


def prepared(url: str) -> str:
    """The store at `url`, with the newest schema and the tables that the settings name by default."""
    store = Store.open(url)
    migrate.upgrade(store, named_tables(PARTS, load(parts=settings_of_parts(), environ={})))
    store.close()
    return url


@contextmanager
def served(url: str, settings: Mapping[str, str] | None = None, before: str = "") -> Iterator[tuple[int, float]]:
    """The port of a server on the store, and the seconds until it was ready; `before` is Python that runs first."""
    port = free_port()
    environment = {
        # The options of benchmarks are no settings of the server, which would refuse them.
        **{name: value for name, value in os.environ.items() if not name.startswith("KEYFOLD_BENCH_")},
        **ENVIRONMENT,
        "KEYFOLD_STORE_URL": url,
        "KEYFOLD_HTTP_PORT": str(port),
        **(settings or {}),
    }
    with tempfile.TemporaryDirectory(prefix="keyfold-bench-") as directory:
        log = Path(directory) / "log"
        with log.open("wb") as output:
            started = time.perf_counter()
            process = subprocess.Popen(
                _command(before), cwd=directory, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
            try:
                _wait_until_ready(process, port, log)
                yield port, time.perf_counter() - started
            finally:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(STOP_SECONDS_MAX)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def keyfold() -> str:
    """The command as it was installed beside this interpreter."""
    return str(Path(sys.executable).with_name("keyfold"))


def _command(before: str) -> list[str]:
    if not before:
        return [keyfold(), "serve"]
    program = (
        f"import sys\n{before}\nfrom keyfold.cli.main import main\nsys.argv = ['keyfold', 'serve']\nsys.exit(main())"
    )
    return [sys.executable, "-c", program]


def _wait_until_ready(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS_MAX
    while not _is_ready(port):
        if process.poll() is not None or time.monotonic() > deadline:
            raise LoadFailed(f"the server did not become ready:\n{log.read_text(errors='replace')[-4000:]}")
        time.sleep(POLL_SECONDS)


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def requests_per_second(port: int, path: str, script: str, *, connections: int, seconds: int) -> float:
    """What `wrk` measures with one thread and so many connections; any answer but 2xx spoils the run."""
    wrk = shutil.which("wrk")
    if wrk is None:
        raise LoadFailed("wrk is needed, because no load generator in Python is fast enough: apt-get install -y wrk")
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as file:
        file.write(script)
        file.flush()
        url = f"http://127.0.0.1:{port}{path}"
        command = [wrk, "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "20s", "-s", file.name, url]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "Non-2xx" in said or "Socket errors" in said:
        raise LoadFailed(said)
    found = re.search(r"Requests/sec:\s+([0-9.]+)", said)
    if found is None or not float(found[1]):
        raise LoadFailed(said)
    return float(found[1])
