"""A TCP proxy between a client and a server, whose connections a test cuts, deafens and freezes."""

import socket
import struct
import threading
from contextlib import suppress
from typing import Self

CHUNK_BYTES = 65536
CONNECT_SECONDS = 10


class Proxy:
    """Passes bytes on until told otherwise. Faults strike the connections that are open; later ones pass freely."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._upstream_port = 0
        self._is_blocked = False
        self._lock = threading.Lock()
        self._connections: list[_Connection] = []
        self._bytes_left: int | None = None
        self._replies_left: int | None = None

    def start(self, upstream_port: int) -> Self:
        self._upstream_port = upstream_port
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Reset every open connection."""
        for connection in self._open():
            connection.cut()

    def block(self) -> None:
        """Reset every open connection, and every later one until it is unblocked."""
        self._is_blocked = True
        self.cut()

    def unblock(self) -> None:
        self._is_blocked = False

    def cut_at_byte(self, count: int) -> None:
        """Pass `count` more bytes to the server, wherever in a request that is, then reset every connection."""
        with self._lock:
            self._bytes_left = count

    def cut_at_reply(self, count: int) -> None:
        """Pass `count` more replies to clients, then reset every connection in place of passing the next."""
        with self._lock:
            self._replies_left = count

    @property
    def is_armed(self) -> bool:
        """Whether a cut that was ordered has not happened yet."""
        with self._lock:
            return self._bytes_left is not None or self._replies_left is not None

    def deafen(self) -> None:
        """Let requests pass on the open connections, and swallow the replies."""
        for connection in self._open():
            connection.deaf = True

    def freeze(self) -> None:
        """Keep what clients send on the open connections, as a network that delivers late does."""
        for connection in self._open():
            connection.frozen = True

    def thaw(self) -> None:
        """Deliver to the server what was kept, also from clients that have hung up since."""
        for connection in self._open():
            connection.thaw()

    def _open(self) -> "list[_Connection]":
        with self._lock:
            return [connection for connection in self._connections if not connection.closed]

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self._is_blocked:
                    reset(client)
                    continue
                try:
                    server = socket.create_connection(("127.0.0.1", self._upstream_port), CONNECT_SECONDS)
                except OSError:
                    reset(client)
                    continue
                server.settimeout(None)
                connection = _Connection(client, server)
                with self._lock:
                    self._connections.append(connection)
                for pump in (self._pump_requests, self._pump_replies):
                    threading.Thread(target=pump, args=(connection,), name="proxy", daemon=True).start()

    def _pump_requests(self, connection: "_Connection") -> None:
        with suppress(OSError):
            while chunk := connection.client.recv(CHUNK_BYTES):
                allowed = self._allowed(len(chunk))
                connection.send(chunk[:allowed])
                if allowed is not None:
                    self.cut()
        connection.hang_up()

    def _pump_replies(self, connection: "_Connection") -> None:
        with suppress(OSError):
            while chunk := connection.server.recv(CHUNK_BYTES):
                if self._is_last_reply():
                    self.cut()
                elif not connection.deaf:
                    connection.client.sendall(chunk)
        connection.cut()

    def _allowed(self, count: int) -> int | None:
        """How many of the bytes still pass before the cut; None where it is not their turn."""
        with self._lock:
            if self._bytes_left is None:
                return None
            if count < self._bytes_left:
                self._bytes_left -= count
                return None
            allowed, self._bytes_left = self._bytes_left, None
            return allowed

    def _is_last_reply(self) -> bool:
        with self._lock:
            if self._replies_left is None:
                return False
            self._replies_left = self._replies_left - 1 if self._replies_left else None
            return self._replies_left is None


class _Connection:
    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.deaf = False
        self.frozen = False
        self.closed = False
        self._kept = b""
        self._hung_up = False
        self._lock = threading.Lock()

    def send(self, chunk: bytes) -> None:
        with self._lock:
            if self.frozen:
                self._kept += chunk
            else:
                self.server.sendall(chunk)

    def thaw(self) -> None:
        with self._lock, suppress(OSError):
            self.frozen = False
            self.server.sendall(self._kept)
            self._kept = b""
            if self._hung_up:
                self.server.shutdown(socket.SHUT_WR)

    def hang_up(self) -> None:
        """The client has gone; the server learns of it after the last byte that was sent."""
        with self._lock, suppress(OSError):
            self._hung_up = True
            if not self.frozen:
                self.server.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        self.closed = True
        reset(self.client)
        reset(self.server)


def reset(connection: socket.socket) -> None:
    """Close without waiting for anything on the way, and wake whoever reads."""
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
