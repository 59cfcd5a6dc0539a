"""The process of a real server, which tests start, pause and kill, and which never outlives them."""

import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import ClassVar, NoReturn, Self

import psutil

START_SECONDS_MAX = 90
STOP_SECONDS_MAX = 30
POLL_SECONDS = 0.02
LOG_LINES_SHOWN = 40

# The kernel sends a parent-death signal when the *thread* that started the child ends, not the process, so a server
# started by a short-lived thread of a test would die with it. This thread lives as long as the test process.
_starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="server-starter")


class ServerUnavailable(Exception):
    """What the server needs is not on this machine."""


class ServerFailed(Exception):
    """The server did not do what it was told; the message ends with the end of its log."""


class ServerProcess(ABC):
    """A server with one data directory and fixed ports, however often it is killed and started."""

    name: ClassVar[str]
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    # Options of setpriv that give up root, for a server that refuses it.
    identity: Sequence[str] = ()

    def __init__(self, temporary_directory: Path | None = None) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix=f"keyfold-{self.name}-", dir=temporary_directory))
        self.log = self.directory / "server.log"
        self._prepared = False
        self._process: subprocess.Popen[bytes] | None = None
        self._mourner: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    @abstractmethod
    def _prepare(self) -> None:
        """Lay out the data directory, once, before the first start."""

    @abstractmethod
    def _command(self) -> list[str]:
        """The command that runs the server in the foreground."""

    @abstractmethod
    def _answers(self) -> bool:
        """Whether a client that really connects is served."""

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def is_paused(self) -> bool:
        return self._mourner is not None

    def start(self) -> None:
        """Serve, on the same port and data as before; a running server is only resumed."""
        if self.is_running:
            self.resume()
            return
        if not self._prepared:
            self._prepare()
            self._prepared = True
        self._process = self._spawn(self._command())
        deadline = time.monotonic() + START_SECONDS_MAX
        while not self._answers():
            if self._process.poll() is not None:
                self._fail(f"exited with status {self._process.returncode} instead of starting")
            if time.monotonic() > deadline:
                self._fail(f"did not answer within {START_SECONDS_MAX} s")
            time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """Shut down in order; what does not end in time is killed."""
        self.resume()
        if self._process is not None:
            self._process.send_signal(self.stop_signal)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS_MAX)
        self.kill()

    def kill(self) -> None:
        """End every process of the server at once, as a crash would."""
        if self._process is None:
            return
        if self.is_running:
            # A main process that still ran could fork between the look at its children and their end.
            self._process.send_signal(signal.SIGSTOP)
            processes = self.processes()
            for process in reversed(processes):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self._process.wait()
            wait_until(lambda: all(map(is_dead, processes)))
        self._process = None
        self._dismiss_mourner()

    def pause(self) -> None:
        """Freeze every process: connections stay open and nothing answers. Returns when all of them stand still."""
        assert self.is_running, f"{self.name} does not run, so it cannot be paused"
        self._dismiss_mourner()
        wait_until(self._suspend)
        # A frozen child cannot notice that its frozen parent was killed, so someone else has to end it.
        self._mourner = subprocess.Popen(
            ["sh", "-c", 'read -r _; kill -KILL "$@"', "sh", *(str(process.pid) for process in self.processes())],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def resume(self) -> None:
        """Let a paused server go on."""
        self._dismiss_mourner()
        if self.is_running:
            for process in reversed(self.processes()):
                with suppress(psutil.NoSuchProcess):
                    process.resume()

    def discard(self) -> None:
        """Kill the server and delete its data."""
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def processes(self) -> list[psutil.Process]:
        """The main process and all that descend from it."""
        if self._process is None:
            return []
        main = psutil.Process(self._process.pid)
        return [main, *main.children(recursive=True)]

    def _run(self, command: Sequence[str]) -> None:
        """Run a tool of the server to its end."""
        process = self._spawn(command)
        try:
            status = process.wait(START_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            self._fail(f"could not be prepared: {command[0]} took more than {START_SECONDS_MAX} s")
        if status != 0:
            self._fail(f"could not be prepared: {command[0]} exited with status {status}")

    def _spawn(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        def popen() -> subprocess.Popen[bytes]:
            with self.log.open("ab") as log:
                return subprocess.Popen(
                    # setpriv sets the parent-death signal after the change of user, which would clear it.
                    ["setpriv", *self.identity, "--pdeathsig", "KILL", *command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=self.directory,
                    # Only these: PGPORT or JAVA_TOOL_OPTIONS of the person who runs the tests must not count.
                    env={"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "LC_ALL": "C.UTF-8"},
                    # Away from the terminal, whose Ctrl-C is for pytest.
                    start_new_session=True,
                )

        return _starter.submit(popen).result()

    def _suspend(self) -> bool:
        processes = self.processes()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        return all(map(_is_frozen, processes))

    def _dismiss_mourner(self) -> None:
        if self._mourner is not None:
            self._mourner.kill()
            self._mourner.communicate()
            self._mourner = None

    def _fail(self, reason: str) -> NoReturn:
        self.kill()
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
        raise ServerFailed(f"{self.name} {reason}; {self.log} ends with:\n" + "\n".join(lines))


def free_port() -> int:
    """A loopback port that a killed server will find free again.

    It lies below the range from which the kernel picks the near end of outgoing connections: one of those could
    otherwise sit on the port between kill and start.
    """
    while True:
        port = random.randrange(20_000, 32_000)
        with closing(socket.socket()) as candidate, suppress(OSError):
            candidate.bind(("127.0.0.1", port))
            return port


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for what follows a signal."""
    deadline = time.monotonic() + STOP_SECONDS_MAX
    while not condition():
        if time.monotonic() > deadline:
            raise ServerFailed(f"the processes of the server did not heed a signal within {STOP_SECONDS_MAX} s")
        time.sleep(POLL_SECONDS)


def is_dead(process: psutil.Process) -> bool:
    """Whether a process runs no more."""
    try:
        # A zombie has released its memory, files and ports; in a container it may be long before someone reaps it.
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _is_frozen(process: psutil.Process) -> bool:
    try:
        # Each thread by itself: the state of a process is only that of its first thread.
        stats = [stat.read_text() for stat in Path(f"/proc/{process.pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return all(stat.rpartition(")")[2].split()[0] in "TZX" for stat in stats)
