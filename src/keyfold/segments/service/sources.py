"""Tables that segments are evaluated over: Parquet files or anything that Ibis connects to, one engine at a time."""

import itertools
import tempfile
import uuid
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from keyfold.bulk import engines
from keyfold.core.errors import BadInput
from keyfold.segments.difference import is_number
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
        users = users.filter(users.user_id > _as(users, after))
    with users.order_by("user_id").to_pyarrow_batches(chunk_size=batch_rows) as batches:
        for batch in batches:
            yield batch.column(0)


def contains(settings: SegmentsSettings, location: InPlace, user_id: str) -> bool:
    users = _in_place(settings, location)
    if not users.user_id.type().is_string() and not is_number(user_id):
        return False
    return int(users.filter(users.user_id == _as(users, user_id)).count().execute()) > 0


def must_be_condition(condition: str) -> None:
    """One expression over the columns of the table: nothing that reads another table, or a file.

    It may go to any engine, and what their functions can do nobody can list (`query_to_xml` of PostgreSQL runs a query,
    `java_method` of Spark any code): so only those may be called that are known, DuckDB's own of values.
    """
    engines.ibis()  # brings what follows
    import sqlglot
    from sqlglot import exp

    try:
        parsed = sqlglot.parse_one(f"SELECT 1 FROM t WHERE ({condition})", read="duckdb")  # noqa: S608
        tokens = sqlglot.tokenize(condition, read="duckdb")
    except sqlglot.errors.SqlglotError as error:
        raise BadInput(f"the condition is not SQL: {_first_line(error)}", place="condition") from None
    except RecursionError:
        raise BadInput("the condition is nested too deeply", place="condition") from None
    where = parsed.args.get("where")
    is_one = isinstance(parsed, exp.Select) and where is not None and isinstance(where.this, exp.Paren)
    others = {name for name, value in parsed.args.items() if value} - {"expressions", "from", "from_", "where"}
    if not is_one or others:
        raise BadInput("the condition is more than one expression", place="condition")
    assert where is not None
    for each in where.find_all(exp.Select, exp.Table, exp.Subquery, exp.Union, exp.UDTF, exp.Command):
        raise BadInput(
            f"the condition may only look at columns of its table, not at {each.sql(dialect='duckdb')[:50]!r}",
            place="condition",
        )
    for token, following in itertools.pairwise(tokens):
        called = token.text.lower()
        is_word = called[:1].isalpha() or called[:1] == "_" or token.token_type.name == "IDENTIFIER"
        if following.text == "(" and is_word and called not in _WORDS and called not in _functions():
            raise BadInput(
                f"the condition may not call {token.text[:50]}",
                place="condition",
                hint="It may call the scalar functions of DuckDB",
            )


# What may stand before a parenthesis without being a function: operators, syntax, types with a length.
_WORDS = frozenset(
    """and or not in any all some is like ilike glob between similar to escape case when then else end if as distinct
    cast try_cast try extract coalesce nullif substring position trim overlay interval array struct map row lambda
    columns exclude from by collate numeric decimal dec varchar char bpchar text string bit time timestamp float
    enum union date""".split()  # noqa: SIM905
)
# Of DuckDB's scalar functions, those that look at more than their arguments, or wait.
_FORBIDDEN = (
    "current_query",
    "current_setting",
    "currval",
    "getenv",
    "getvariable",
    "nextval",
    "sleep_ms",
    "write_log",
)


@cache
def _functions() -> frozenset[str]:
    engines.ibis()
    import duckdb

    with duckdb.connect() as connection:
        rows = connection.execute(
            "SELECT DISTINCT function_name FROM duckdb_functions()"
            " WHERE schema_name = 'main' AND function_type IN ('scalar', 'macro')"
        ).fetchall()
    return frozenset(name.lower() for (name,) in rows).difference(_FORBIDDEN)


def _settings_of(settings: SegmentsSettings, table: str) -> TableSettings:
    if table not in settings.tables:
        raise BadInput(f"there is no table {table!r} in segments.tables", hint="It was there when the segment was made")
    return settings.tables[table]


def _opened(settings: SegmentsSettings, own: TableSettings, table: str) -> "ir.Table":
    try:
        if "://" in own.url:
            return engines.ibis().connect(_read_only(own.url)).table(own.name)
        if settings.engine == "spark":
            return engines.spark_connection("segments").read_parquet(own.url)
        scratch = Path(tempfile.gettempdir()) / f"keyfold-segments-{uuid.uuid4().hex}"
        return engines.duckdb_connection(settings.engine_megabytes_max, scratch).read_parquet(own.url)
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(
            f"the table {table} cannot be opened: {_first_line(error)}", place=f"segments.tables.{table}"
        ) from None


def _read_only(url: str) -> str:
    """DuckDB lets one process write or many read: we only read."""
    if not url.startswith("duckdb://") or "read_only" in url or url.rstrip("/") == "duckdb:":
        return url
    return f"{url}{'&' if '?' in url else '?'}read_only=1"


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
    return _unsigned(column, "decimal(20, 0)" if opened.get_backend().name == "pyspark" else "uint64")


def _unsigned(column: Any, kind: str) -> Any:
    """Numbers as unsigned; a negative one, from a signed column, is the upper half."""
    if not column.type().is_signed_integer():
        return column.cast(kind)
    import ibis

    upper = (column.cast("decimal(38, 0)") + ibis.literal(2**64, type="decimal(38, 0)")).cast(kind)
    return ibis.ifelse(column < 0, upper, ibis.greatest(column, 0).cast(kind))


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
    """As a value of the column's type: Ibis takes a plain number above 2**63 for one that equals no id."""
    import ibis

    kind = users.user_id.type()
    return ibis.literal(user_id if kind.is_string() else int(user_id), type=kind)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]
