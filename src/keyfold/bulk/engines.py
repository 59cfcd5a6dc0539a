"""The engines of bulk work: DuckDB in the process, or Spark, behind the few verbs that a job needs."""

import contextlib
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from keyfold.bulk.folders import FolderUnreachable
from keyfold.core.errors import BadInput, KeyfoldError

if TYPE_CHECKING:
    import ibis.expr.types as ir
    import pyarrow as pa

EngineName = Literal["duckdb", "spark"]
ROW_GROUP_ROWS = 122_880


class Engine(Protocol):
    """Where expressions are computed."""

    def read(self, files: Sequence[str]) -> "ir.Table":
        """Parquet files of this machine as one table."""
        ...

    def keep(self, expression: "ir.Table") -> "ir.Table":
        """Compute now, and use the result several times."""
        ...

    def write(self, expression: "ir.Table", folder: Path) -> None:
        """Compute into Parquet files of a new folder."""
        ...

    def rows(self, expression: "ir.Table") -> list[dict[str, Any]]:
        """Compute a few rows."""
        ...


@contextlib.contextmanager
def opened(engine: EngineName, *, job: str, megabytes_max: int, scratch: Path | None = None) -> "Iterator[Engine]":
    """An engine for one job. What does not fit into memory goes to `scratch`."""
    if engine == "spark":
        yield Spark(spark_connection(job))
        return
    with scratch_folder(f"keyfold-{job}", scratch) as folder:
        connection = duckdb_connection(megabytes_max, folder)
        try:
            yield DuckDB(connection)
        finally:
            connection.disconnect()


@contextlib.contextmanager
def failing(engine: EngineName) -> Iterator[None]:
    """The failures of an engine, and of the disk under it, in our words."""
    try:
        yield
    except (KeyfoldError, MemoryError):
        raise
    except OSError as error:
        raise FolderUnreachable(f"{error.filename or engine}: {error.strerror or error}") from error
    except Exception as error:
        if type(error).__name__ == "IOException":  # DuckDB's word for a disk that is full, or fails
            raise FolderUnreachable(f"{engine}: {first_line(error)}") from error
        if type(error).__module__.partition(".")[0] in ("_duckdb", "duckdb", "pyspark", "py4j", "pyarrow", "ibis"):
            raise BadInput(f"{engine} failed: {first_line(error)}") from error
        raise


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]


@contextlib.contextmanager
def scratch_folder(name: str, above: Path | None = None) -> Iterator[Path]:
    """A folder that goes when the work is done."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=above))
    except OSError as error:
        where = above or tempfile.gettempdir()
        raise FolderUnreachable(
            f"nothing can be written to the scratch folder {where}: {error.strerror}", hint="numbering.scratch names it"
        ) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class DuckDB:
    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def read(self, files: Sequence[str]) -> "ir.Table":
        # A folder called generation=7 would otherwise be the column of this name.
        return self._connection.read_parquet([exactly(file) for file in files], hive_partitioning=False)

    def keep(self, expression: "ir.Table") -> "ir.Table":
        name = f"kept_{uuid.uuid4().hex}"
        return self._connection.create_table(name, expression, temp=True)

    def write(self, expression: "ir.Table", folder: Path) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Ibis' own to_parquet fails where there is a quote in the path.
        self._connection._run_pre_execute_hooks(expression)
        self._connection.raw_sql(
            f"COPY ({self._connection.compile(expression)}) TO {quoted(str(folder))}"
            f" (FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE {ROW_GROUP_ROWS}, PER_THREAD_OUTPUT true)"
        )

    def rows(self, expression: "ir.Table") -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._connection.to_pyarrow(expression).to_pylist()
        return found


_SPARK_PATTERN = re.compile(r"[\\*?\[\]{}]")
_ESCAPED = r"\\\g<0>"


class Spark:
    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def read(self, files: Sequence[str]) -> "ir.Table":
        name = f"read_{uuid.uuid4().hex}"
        urls = [f"file://{_SPARK_PATTERN.sub(_ESCAPED, file)}" for file in files]
        self._connection._session.read.parquet(*urls).createOrReplaceTempView(name)
        return self._connection.table(name)

    def keep(self, expression: "ir.Table") -> "ir.Table":
        # A cache alone would be computed anew, and perhaps otherwise, if a worker is lost.
        name = f"kept_{uuid.uuid4().hex}"
        computed = self._connection._session.sql(self._compiled(expression)).localCheckpoint(eager=True)
        computed.createOrReplaceTempView(name)
        return self._connection.table(name)

    def write(self, expression: "ir.Table", folder: Path) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        written = self._connection._session.sql(self._compiled(expression)).write
        # Not as_uri: Spark would take its %20 for what the folder is called.
        written.option("compression", "zstd").parquet(f"file://{folder.absolute()}")

    def rows(self, expression: "ir.Table") -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._connection.to_pyarrow(expression).to_pylist()
        return found

    def _compiled(self, expression: "ir.Table") -> str:
        self._connection._run_pre_execute_hooks(expression)
        return str(self._connection.compile(expression))


def exactly(file: str) -> str:
    """The pattern by which DuckDB reads this file and no other."""
    pattern = re.sub(r"[*?\[]", r"[\g<0>]", file)
    if pattern != file and "\\" in file:
        # In a pattern a backslash parts folders, and nothing escapes it.
        raise BadInput(f"DuckDB cannot read {file!r}: it has a backslash, and one of * ? [")
    return pattern


def quoted(text: str) -> str:
    """Text as SQL of DuckDB."""
    return "'" + text.replace("'", "''") + "'"


def table_of(rows: "pa.Table") -> "ir.Table":
    """Rows of this process as a table of an expression."""
    return ibis().memtable(rows)


def rows_of(types: Mapping[str, str], columns: Mapping[str, Sequence[Any]]) -> "ir.Table":
    """Columns of plain values as a table of an expression, of given types also where it is empty."""
    import pyarrow as pa

    schema = ibis().schema(types).to_pyarrow()
    return table_of(pa.table({name: list(columns[name]) for name in types}, schema=schema))


def empty(types: Mapping[str, str]) -> "ir.Table":
    return rows_of(types, dict.fromkeys(types, ()))


def duckdb_connection(megabytes_max: int, scratch: Path) -> Any:
    """DuckDB with bounded memory, in UTC."""
    connection = ibis().duckdb.connect()
    for name, value in (
        ("TimeZone", "UTC"),
        ("memory_limit", f"{megabytes_max}MB"),
        ("temp_directory", str(scratch)),
    ):
        connection.raw_sql(f"SET {name} = {quoted(value)}")
    # The order of rows is nobody's business, and keeping it costs memory.
    connection.raw_sql("SET preserve_insertion_order = false")
    return connection


def spark_connection(job: str) -> Any:
    """The Spark session of this process, configured as Spark is: by SPARK_CONF_DIR, or SPARK_MASTER alone."""
    module = ibis()
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        raise BadInput("the engine is spark, which is not installed", hint="pip install 'keyfold[spark]'") from None
    builder = (
        SparkSession.builder.appName(f"keyfold {job}")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.ui.enabled", "false")
        # Otherwise a number that does not fit becomes another.
        .config("spark.sql.ansi.enabled", "true")
    )
    # Without either the session computes on this machine.
    if master := os.environ.get("SPARK_MASTER"):
        builder = builder.master(master)
    return module.pyspark.connect(builder.getOrCreate())


def ibis() -> Any:
    """Ibis, where it is installed with DuckDB."""
    try:
        import duckdb  # noqa: F401
        import ibis as module
    except ImportError:
        raise BadInput("bulk work needs Ibis and DuckDB", hint="pip install 'keyfold[bulk]'") from None
    return module
