"""The server: the door on Granian in this process, the loops beside it, and an orderly end of both."""

import asyncio
import contextlib
import ipaddress
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import structlog
import uvloop
from granian._granian import SocketHolder
from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.server.embed import Server

from keyfold.core import access, memory
from keyfold.core.context import Context
from keyfold.core.errors import SettingsWrong
from keyfold.core.gather import Gatherer
from keyfold.core.limits import Limits
from keyfold.core.loops import Loop, Runner
from keyfold.http.app import Door, create_app

log = structlog.get_logger(__name__)

BACKLOG = 1_024
HEAD_BYTES_MAX = 64 * 1024
# Of the time to stop, what is kept for closing the lanes, the loops and the store after the last answer.
CLOSING_SHARE = 0.25
# A connection that was opened at the very moment of the stop is missed by Granian's farewell; nobody waits for it.
FAREWELL_SECONDS = 1.0


def serve(
    context: Context, *, loops: Sequence[Loop] = (), ready: Callable[[str], None] = lambda text: log.info(text)
) -> None:
    """Serve until SIGTERM or SIGINT, then stop in order and close the context; `ready` gets the one line to show."""
    try:
        listener = listen(context)
        clean = uvloop.run(Serving(context, listener, loops, ready).run())
    except BaseException:
        context.close()
        raise
    if not clean:
        # A thread that hangs would keep the interpreter from ending; what it did not commit is rolled back.
        sys.stderr.flush()
        os._exit(1)


class Serving:
    """One server from its first connection to its last."""

    def __init__(
        self, context: Context, listener: socket.socket, loops: Sequence[Loop], ready: Callable[[str], None]
    ) -> None:
        self._context = context
        self._listener = listener
        self._ready = ready
        self._runner = Runner(loops)
        self._gatherer = Gatherer(context.store, context.limits)
        self._door: Door = create_app(context, self._gatherer)
        self._stop = asyncio.Event()

    async def run(self) -> bool:
        """Serve, stop, close; whether all of it went as it should."""
        url = address(self._listener)
        server = OnSocket(self._door, self._listener, self._context.limits)
        with _signals(self._signalled):
            serving = asyncio.create_task(server.serve())
            await _answers(url, serving)
            memory.settle()
            self._runner.start()
            self._ready(f"Keyfold listens on {url}")
            stopped = asyncio.create_task(self._stop.wait())
            await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not self._stop.is_set():
                log.error("the server ended by itself", exc_info=serving.exception())
            return await self._end(server, serving) and self._stop.is_set()

    def _signalled(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            log.warning("stopped at once by a second signal", signal=number.name)
            sys.stderr.flush()
            os._exit(128 + number)
        self._stop.set()
        log.info("stopping", signal=number.name)

    async def _end(self, server: Server, serving: "asyncio.Task[None]") -> bool:
        seconds = float(self._context.settings.http.stop_seconds_max)
        deadline = time.monotonic() + seconds
        self._door.stop()
        server.stop()  # type: ignore[no-untyped-call]
        await self._last_answers(serving, deadline - seconds * CLOSING_SHARE)
        steps: list[tuple[str, Callable[[], bool | None]]] = [
            ("requests", self._gatherer.close),
            ("loops", lambda: self._runner.stop(max(0.1, deadline - time.monotonic()))),
            ("routes", self._door.close),
            ("store", self._context.close),
        ]
        late = [name for name, step in steps if not await _in_thread(step, deadline)]
        if late:
            log.error("did not stop in time or not well", what=late, seconds=seconds)
        else:
            log.info("stopped")
        return not late

    async def _last_answers(self, serving: "asyncio.Task[None]", deadline: float) -> None:
        """Let the requests under way end; those that cannot are told so, rather than cut off."""
        idle_since: float | None = None
        while not serving.done() and time.monotonic() < deadline:
            await asyncio.wait({serving}, timeout=0.02)
            if self._door.under_way:
                idle_since = None
            elif idle_since is None:
                idle_since = time.monotonic()
            elif time.monotonic() - idle_since > FAREWELL_SECONDS:
                break
        if self._door.under_way:
            self._door.end_all()
            await asyncio.wait({serving}, timeout=FAREWELL_SECONDS)
        if not serving.done():
            serving.cancel()


class OnSocket(Server):
    """Granian on a socket that is ours alone.

    Granian binds with SO_REUSEPORT: a second server on the same port would start without a word and take half of the
    connections of the first. A socket bound here says that the address is taken, and knows its port when asked for 0.
    """

    def __init__(self, door: Door, listener: socket.socket, limits: Limits) -> None:
        super().__init__(
            door,
            interface=Interfaces.ASGINL,
            http=HTTPModes.http1,
            http1_settings=HTTP1Settings(
                header_read_timeout=limits.silence_seconds_max * 1000, max_buffer_size=HEAD_BYTES_MAX
            ),
            websockets=False,
            backlog=BACKLOG,
            backpressure=limits.connections_max,
            log_enabled=False,
        )
        self._listener = listener

    def _init_shared_socket(self) -> None:
        # The stub of SocketHolder lacks the backlog that it takes on Linux.
        self._shd = SocketHolder(self._listener.detach(), False, BACKLOG)  # type: ignore[call-arg,assignment]


def listen(context: Context) -> socket.socket:
    """A listening socket at the address of the settings, where that address is safe to listen on."""
    http = context.settings.http
    family, host = _resolved(http.host)
    if not ipaddress.ip_address(host).is_loopback:
        if http.demo:
            raise SettingsWrong(
                f"demo mode asks for no token and may not listen on {http.host}", hint="Use http.host = 127.0.0.1"
            )
        if not access.any_token(context.store):
            raise SettingsWrong(
                f"there is no client token yet, so nobody could use {http.host} but to attack it",
                hint="Make one: keyfold token create NAME --scope read",
            )
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((host, http.port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise SettingsWrong(
            f"cannot listen on {http.host}:{http.port}: {os.strerror(error.errno or 0)}",
            hint="Choose another with http.host and http.port; port 0 takes a free one",
        ) from None
    return listener


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _resolved(host: str) -> tuple[socket.AddressFamily, str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise SettingsWrong(f"http.host {host!r} is no address of this machine") from None
    family, _, _, _, place = found[0]
    return family, str(place[0])


async def _answers(url: str, serving: "asyncio.Task[None]") -> None:
    """Wait until a request is really answered, or the server has ended before it could."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    host = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host).strip("[]")  # noqa: S104
    request = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    while not serving.done():
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(request)
            answered = await reader.read()
            writer.close()
            if answered.startswith(b"HTTP/1.1 200"):
                return
        await asyncio.sleep(0.01)


@contextlib.contextmanager
def _signals(handler: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Hear SIGTERM and SIGINT; a server in another thread of a program hears none."""
    heard = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
    loop = asyncio.get_running_loop()
    for number in heard:
        loop.add_signal_handler(number, handler, number)
    try:
        yield
    finally:
        for number in heard:
            loop.remove_signal_handler(number)


async def _in_thread(step: Callable[[], bool | None], deadline: float) -> bool:
    """Whether a step was done in time. Its thread is a daemon: if it hangs, it does not hold up the end."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[bool] = loop.create_future()

    def run() -> None:
        try:
            well = step() is not False
        except Exception as error:
            log.error("a step of the stop failed", exc_info=error)
            well = False
        with contextlib.suppress(RuntimeError):  # the loop has gone: nobody waits any more
            loop.call_soon_threadsafe(_settle, done, well)

    threading.Thread(target=run, name="stop", daemon=True).start()
    try:
        async with asyncio.timeout(max(0.1, deadline - time.monotonic())):
            return await done
    except TimeoutError:
        return False


def _settle(done: "asyncio.Future[bool]", well: bool) -> None:
    if not done.done():  # nobody waits for a step that came too late
        done.set_result(well)
