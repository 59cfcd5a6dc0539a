"""A proxy between psycopg and PostgreSQL that knows a COMMIT when it sees one, and cuts the connection around it."""

import enum
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Self

CHUNK_BYTES = 65536
CONNECT_SECONDS = 10

# PostgreSQL messages: https://www.postgresql.org/docs/18/protocol-message-formats.html
QUERY, COMMAND_COMPLETE = b"Q", b"C"
COMMIT = b"COMMIT\0"


class Cut(enum.Enum):
    """What happens to a COMMIT."""

    NONE = "it passes, and so does its answer"
    BEFORE = "it never reaches the server"
    AFTER = "the server has committed, and the answer is lost"
    DURING = "it is on its way to the server when the client loses the connection"


Plan = Callable[[], Cut]


class CommitProxy:
    """Asks `plan` what to do with every COMMIT, and counts what was done."""

    def __init__(self, upstream_port: int, plan: Plan) -> None:
        self.plan = plan
        self.cuts: Counter[Cut] = Counter()
        self._upstream_port = upstream_port
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=100)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, name="pgproxy", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def url_of(self, url: str) -> str:
        """The same database, through the proxy. Without encryption: it has to read along."""
        return f"{url.replace(f':{self._upstream_port}/', f':{self.port}/')}?sslmode=disable&gssencmode=disable"

    def decide(self) -> Cut:
        with self._lock:
            cut = self.plan()
            self.cuts[cut] += 1
            return cut

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._upstream_port), CONNECT_SECONDS)
                except OSError:
                    _reset(client)
                    continue
                server.settimeout(None)
                for each in (client, server):
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _Conversation(self, client, server).start()


class _Conversation:
    """One connection: both directions, message by message."""

    def __init__(self, proxy: CommitProxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._cut = Cut.NONE

    def start(self) -> None:
        for pump in (self._requests, self._answers):
            threading.Thread(target=pump, name="pgproxy", daemon=True).start()

    def _requests(self) -> None:
        waiting = _Messages(has_greeting=True)
        with suppress(OSError):
            while chunk := self._client.recv(CHUNK_BYTES):
                for kind, message in waiting.whole(chunk):
                    if kind == QUERY and message.endswith(COMMIT):
                        self._cut = self._proxy.decide()
                        if self._cut is Cut.BEFORE:
                            self._end()
                            return
                        if self._cut is Cut.DURING:
                            self._server.sendall(message)
                            _reset(self._client)
                            return  # the answer ends the other half
                    self._server.sendall(message)
        self._end()

    def _answers(self) -> None:
        waiting = _Messages(has_greeting=False)
        with suppress(OSError):
            while chunk := self._server.recv(CHUNK_BYTES):
                messages = waiting.whole(chunk)
                if self._cut in (Cut.AFTER, Cut.DURING):
                    if any(kind == COMMAND_COMPLETE and message.endswith(COMMIT) for kind, message in messages):
                        break
                elif messages:
                    self._client.sendall(b"".join(message for _, message in messages))
        self._end()

    def _end(self) -> None:
        _reset(self._client)
        _reset(self._server)


class _Messages:
    """Puts messages together from what a socket gives. A client's first one has no type."""

    def __init__(self, *, has_greeting: bool) -> None:
        self._greeting = has_greeting
        self._bytes = b""

    def whole(self, chunk: bytes) -> list[tuple[bytes, bytes]]:
        self._bytes += chunk
        found = []
        while True:
            start = 0 if self._greeting else 1
            if len(self._bytes) < start + 4:
                return found
            (length,) = struct.unpack_from("!I", self._bytes, start)
            end = start + length
            if len(self._bytes) < end:
                return found
            found.append((b"" if self._greeting else self._bytes[:1], self._bytes[:end]))
            self._bytes, self._greeting = self._bytes[end:], False


def _reset(one: socket.socket) -> None:
    """Cut without a word, as a broken network does: both halves of the conversation wake up."""
    with suppress(OSError):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
