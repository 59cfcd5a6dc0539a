"""A real Redis for the peers of a race, on a free port, in a folder of its own, syncing its log once a second."""

import shutil

import redis

from tests.servers.process import ServerProcess, ServerUnavailable, free_port

MISSING = (
    "There is no redis-server on this machine, and this race means nothing without its peer. As root, run"
    " `bash bench/install` (it installs Debian's redis-server and starts no service); elsewhere, put the"
    " redis-server of a Redis 7 on the PATH."
)


class RedisServer(ServerProcess):
    """One Redis with `appendonly yes` and `appendfsync everysec`; nothing is saved or rewritten during a race."""

    name = "redis"

    def __init__(self) -> None:
        found = shutil.which("redis-server")
        if found is None:
            raise ServerUnavailable(MISSING)
        super().__init__()
        self._binary = found
        self.port = free_port()

    def client(self) -> redis.Redis:
        return redis.Redis(host="127.0.0.1", port=self.port)

    def version(self) -> str:
        with self.client() as client:
            return str(client.info("server")["redis_version"])

    def _prepare(self) -> None:
        """Nothing: the options are all on the command line."""

    def _command(self) -> list[str]:
        # A rewrite of the log, or a snapshot, in the middle of one side would be charged to that side alone.
        options = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": str(self.directory),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "auto-aof-rewrite-percentage": "0",
            "save": "",
        }
        return [self._binary, *(word for name, value in options.items() for word in (f"--{name}", value))]

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.ConnectionError:
            return False
