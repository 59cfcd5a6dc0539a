"""A real Spark cluster for tests: a standalone master and two workers, from the PySpark package itself."""

import importlib.util
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from tests.servers.java import find_java, java_command
from tests.servers.process import ServerProcess, ServerUnavailable, free_port

HEAP_MEGABYTES = 192
WORKERS = 2
# Room for two drivers at once, each with one small executor on each worker.
WORKER_CORES = 2
WORKER_MEGABYTES = 1024
DRIVER_SETTINGS = {
    "spark.cores.max": str(WORKERS),
    "spark.executor.cores": "1",
    "spark.executor.memory": "512m",
    "spark.driver.memory": "512m",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # As a cluster of older jobs may have it.
    "spark.sql.ansi.enabled": "false",
    # 200 by default: a task each, which is most of the time of a test.
    "spark.sql.shuffle.partitions": "2",
    # Compiling a query, and what was compiled once more, takes longer than a test's few rows.
    "spark.sql.codegen.wholeStage": "false",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


def find_spark() -> Path:
    """The folder of the PySpark package, which is a whole Spark."""
    found = importlib.util.find_spec("pyspark")
    if found is None or found.origin is None:
        raise ServerUnavailable("PySpark is not installed: run `make venv`")
    return Path(found.origin).parent


class _SparkProcess(ServerProcess):
    """A daemon of Spark on loopback."""

    def __init__(self, temporary_directory: Path | None = None) -> None:
        self._java, self._home = find_java(), find_spark()
        super().__init__(temporary_directory)
        self.port, self._page_port = free_port(), free_port()

    def _prepare(self) -> None:
        (self.directory / "tmp").mkdir()

    def _run_class(self, name: str, *arguments: str) -> list[str]:
        main = (
            f"org.apache.spark.deploy.{name}",
            *("--host", "127.0.0.1", "--port", str(self.port), "--webui-port", str(self._page_port)),
            *arguments,
        )
        java = java_command(self._java, self._home / "jars", self.directory / "tmp", HEAP_MEGABYTES, *main)
        return ["env", "SPARK_LOCAL_IP=127.0.0.1", *self._for_executors(), *java]

    def _for_executors(self) -> list[str]:
        """What a worker must know to start them; the scripts of Spark would find it out."""
        core = next((self._home / "jars").glob("spark-core_*.jar")).name
        return [f"SPARK_HOME={self._home}", f"SPARK_SCALA_VERSION={core.removeprefix('spark-core_').partition('-')[0]}"]


class SparkWorker(_SparkProcess):
    """A worker, which starts executors as processes of its own."""

    name = "spark-worker"

    def __init__(self, master: "SparkCluster") -> None:
        super().__init__(master.directory)
        self._master = master

    def _command(self) -> list[str]:
        size = (
            "--cores",
            str(WORKER_CORES),
            "--memory",
            f"{WORKER_MEGABYTES}m",
            "--work-dir",
            str(self.directory / "work"),
        )
        return self._run_class("worker.Worker", *size, self._master.url)

    def _answers(self) -> bool:
        workers = self._master.status().get("workers", [])
        return any(each["port"] == self.port and each["state"] == "ALIVE" for each in workers)


class SparkCluster(_SparkProcess):
    """A master, and the workers that are registered with it."""

    name = "spark"

    def __init__(self) -> None:
        super().__init__()
        self.url = f"spark://127.0.0.1:{self.port}"
        self.workers = [SparkWorker(self) for _ in range(WORKERS)]

    def start(self) -> None:
        super().start()
        with ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(SparkWorker.start, self.workers))

    def kill(self) -> None:
        super().kill()
        for worker in self.workers:
            worker.kill()

    def processes(self) -> list[psutil.Process]:
        """Those of the master and of its workers."""
        return [*super().processes(), *(process for worker in self.workers for process in worker.processes())]

    def status(self) -> dict[str, Any]:
        """What the master says of itself; nothing while it does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._page_port}/json/", timeout=2) as answer:
                found: dict[str, Any] = json.load(answer)
        except (OSError, ValueError):
            return {}
        return found

    def write_defaults(self, folder: Path) -> None:
        """A folder for SPARK_CONF_DIR, with the settings of a driver that uses this cluster."""
        settings = {"spark.master": self.url, **DRIVER_SETTINGS}
        (folder / "spark-defaults.conf").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))

    def _command(self) -> list[str]:
        return self._run_class("master.Master")

    def _answers(self) -> bool:
        return self.status().get("status") == "ALIVE"
