"""Tables that segments are evaluated over: Parquet files or anything that Ibis connects to, one engine at a time."""

import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from keyfold.core.errors import BadInput
from keyfold.segments.settings import SegmentsSettings, TableSettings

if TYPE_CHECKING:
    import ibis.expr.types as ir
    import pyarrow as pa


class InPlace(Protocol):
    """What names the rows of a table that are a snapshot."""

    @property
    def table(self) -> str: ...
    @property
    def segment_id(self) -> str: ...
    @property
    def version(self) -> int: ...


def evaluated(settings: SegmentsSettings, table: str, condition: str, batch_rows: int) -> "Iterator[pa.Array]":
    """The user ids that meet a condition, each once, in order."""
    must_be_condition(condition)
    own = _settings_of(settings, table)
    opened = _opened(settings, own, table)
    try:
        chosen = _chosen(opened, condition)
        users = chosen.select(user_id=_user_id(chosen, own, table))
        users = users.filter(users.user_id.notnull()).distinct().order_by("user_id")
        with users.to_pyarrow_batches(chunk_size=batch_rows) as batches:
            for batch in batches:
                yield batch.column(0)
    except BadInput:
        raise
    except Exception as error:  # each engine has its own
        raise BadInput(f"the evaluation over {table} failed: {_first_line(error)}", place="condition") from None


def newest_in_place(settings: SegmentsSettings, table: str, segment_id: str) -> tuple[int, int]:
    """The newest evaluation of a segment that a table has, and its rows; (0, 0) where it has none."""
    own = _settings_of(settings, table)
    opened = _opened(settings, own, table)
    mine = opened.filter(opened[own.segment_id].cast("string") == segment_id)
    version = mine[own.version].max().execute()
    if version is None or version != version:  # null, in the engine's own way
        return 0, 0
    return int(version), int(mine.filter(mine[own.version] == int(version)).count().execute())


def ids_in_place(
    settings: SegmentsSettings, location: InPlace, after: str | None, batch_rows: int
) -> "Iterator[pa.Array]":
    """The user ids of a snapshot that is read where it lies, in order."""
    users = _in_place(settings, location)
    if after is not None:
        import ibis

        users = users.filter(users.user_id > ibis.literal(_as(users, after), type=users.user_id.type()))
    with users.order_by("user_id").to_pyarrow_batches(chunk_size=batch_rows) as batches:
        for batch in batches:
            yield batch.column(0)


def contains(settings: SegmentsSettings, location: InPlace, user_id: str) -> bool:
    users = _in_place(settings, location)
    if users.user_id.type().is_integer() and not user_id.isdigit():
        return False
    return int(users.filter(users.user_id == _as(users, user_id)).count().execute()) > 0


def must_be_condition(condition: str) -> None:
    """One expression over the columns of the table: nothing that reads another table, or a file."""
    import sqlglot
    from sqlglot import exp

    try:
        parsed = sqlglot.parse_one(f"SELECT 1 FROM t WHERE ({condition})", read="duckdb")  # noqa: S608
    except sqlglot.errors.SqlglotError as error:
        raise BadInput(f"the condition is not SQL: {_first_line(error)}", place="condition") from None
    where = parsed.args.get("where")
    is_one = isinstance(parsed, exp.Select) and where is not None and isinstance(where.this, exp.Paren)
    others = {"with_", "with", "group", "order", "limit", "having", "joins", "laterals", "qualify", "windows"}
    if not is_one or any(parsed.args.get(each) for each in others):
        raise BadInput("the condition is more than one expression", place="condition")
    assert where is not None
    for each in where.find_all(exp.Select, exp.Table, exp.Subquery, exp.Union, exp.UDTF, exp.Command):
        raise BadInput(
            f"the condition may only look at columns of its table, not at {each.sql(dialect='duckdb')[:50]!r}",
            place="condition",
        )
    for call in where.find_all(exp.Anonymous):
        if str(call.this).lower().startswith(("read_", "getenv", "glob", "parquet_", "sniff_")):
            raise BadInput(f"the condition may not call {call.this}", place="condition")


def _settings_of(settings: SegmentsSettings, table: str) -> TableSettings:
    if table not in settings.tables:
        raise BadInput(f"there is no table {table!r} in segments.tables", hint="It was there when the segment was made")
    return settings.tables[table]


def _opened(settings: SegmentsSettings, own: TableSettings, table: str) -> "ir.Table":
    try:
        import ibis
    except ImportError:
        raise BadInput("an evaluation needs Ibis and DuckDB", hint="pip install 'keyfold[bulk]'") from None
    try:
        if "://" in own.url:
            return ibis.connect(own.url).table(own.name)
        if settings.engine == "spark":
            return _spark().read_parquet(own.url)
        connection = ibis.duckdb.connect()
        scratch = Path(tempfile.gettempdir()) / f"keyfold-segments-{uuid.uuid4().hex}"
        for name, value in (
            ("TimeZone", "UTC"),
            ("memory_limit", f"{settings.engine_megabytes_max}MB"),
            ("temp_directory", str(scratch)),
        ):
            connection.raw_sql(f"SET {name} = '{value}'")
        return connection.read_parquet(own.url)
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(
            f"the table {table} cannot be opened: {_first_line(error)}", place=f"segments.tables.{table}"
        ) from None


def _spark() -> Any:
    try:
        import ibis
        from pyspark.sql import SparkSession
    except ImportError:
        raise BadInput(
            "segments.engine is spark, which is not installed", hint="pip install 'keyfold[spark]'"
        ) from None
    session = (
        SparkSession.builder.appName("keyfold segments")
        .master(os.environ.get("SPARK_MASTER", "local[*]"))
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.ui.enabled", "false")
        .getOrCreate()
    )
    return ibis.pyspark.connect(session)


def _user_id(opened: "ir.Table", own: TableSettings, table: str) -> Any:
    """The user ids in a type whose order is ours: unsigned where the engine has it, bytes of text."""
    if own.user_id not in opened.columns:
        raise BadInput(
            f"{table} has no column {own.user_id!r}",
            place=f"segments.tables.{table}",
            hint=f"It has {', '.join(opened.columns)}",
        )
    column = opened[own.user_id]
    if column.type().is_string():
        return column
    if not column.type().is_integer() and not (column.type().is_decimal() and column.type().scale == 0):
        raise BadInput(
            f"{own.user_id} of {table} is {column.type()}, not whole numbers or text", place=f"segments.tables.{table}"
        )
    is_spark = opened.get_backend().name == "pyspark"
    return column.cast("decimal(20, 0)" if is_spark else "uint64")


def _chosen(opened: "ir.Table", condition: str) -> "ir.Table":
    """The rows that meet a condition, which is written in DuckDB's SQL and translated for the engine."""
    name = f"keyfold_{uuid.uuid4().hex}"
    return opened.alias(name).sql(f"SELECT * FROM {name} WHERE ({condition})", dialect="duckdb")  # noqa: S608


def _in_place(settings: SegmentsSettings, location: InPlace) -> "ir.Table":
    own = _settings_of(settings, location.table)
    opened = _opened(settings, own, location.table)
    mine = opened.filter(
        opened[own.segment_id].cast("string") == location.segment_id, opened[own.version] == location.version
    )
    return mine.select(user_id=_user_id(mine, own, location.table))


def _as(users: "ir.Table", user_id: str) -> Any:
    return user_id if users.user_id.type().is_string() else int(user_id)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]
