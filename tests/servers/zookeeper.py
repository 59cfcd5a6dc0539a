"""A real ZooKeeper server for tests: one process, standalone."""

import socket
from collections.abc import Mapping
from contextlib import closing

from tests.servers.java import find_jars, find_java, java_command
from tests.servers.process import ServerProcess, free_port

HEAP_MEGABYTES = 128
SETTINGS = {
    # Sessions end on a tick, so a short one lets tests see them end soon.
    "tickTime": "200",
    "minSessionTimeout": "400",
    # 20 ticks by default, which is less than a usual session asks for.
    "maxSessionTimeout": "60000",
    "maxClientCnxns": "0",
    "admin.enableServer": "false",
    # Kilobytes laid out for the log of transactions at each start; 64 MB by default.
    "preAllocSize": "1024",
}


class ZooKeeperServer(ServerProcess):
    """One standalone server; `settings` are lines of its zoo.cfg."""

    name = "zookeeper"

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        self._java, self._jars = find_java(), find_jars("zookeeper")
        super().__init__()
        self.port = free_port()
        self.hosts = f"127.0.0.1:{self.port}"
        self._settings = {
            **SETTINGS,
            "dataDir": str(self.directory / "data"),
            "clientPort": str(self.port),
            "clientPortAddress": "127.0.0.1",
            **(settings or {}),
        }
        self._configuration = self.directory / "zoo.cfg"

    def _prepare(self) -> None:
        (self.directory / "tmp").mkdir()
        self._configuration.write_text("".join(f"{name}={value}\n" for name, value in self._settings.items()))

    def _command(self) -> list[str]:
        main = ("org.apache.zookeeper.server.ZooKeeperServerMain", str(self._configuration))
        return java_command(self._java, self._jars, self.directory / "tmp", HEAP_MEGABYTES, *main)

    def _answers(self) -> bool:
        try:
            with closing(socket.create_connection(("127.0.0.1", self.port), timeout=2)) as connection:
                connection.sendall(b"srvr")
                # A server that has not loaded its data yet answers too, with another sentence.
                return b"Mode: standalone" in connection.makefile("rb").read()
        except OSError:
            return False
