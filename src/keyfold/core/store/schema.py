"""How tables are declared: portable column types, a distribution key for every table, the schema version we know."""

from functools import cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite

METADATA = sa.MetaData()

# The newest migration. A server compares it with the store by one SELECT, without importing Alembic (460 ms);
# a test keeps it equal to the head of the migration scripts.
HEAD = "0006"

# STRICT tables on SQLite take only these names; without STRICT, 2**63 would become a float silently.
Int64 = sa.BigInteger().with_variant(sqlite.INTEGER(), "sqlite")
Int32 = sa.Integer()
Text = sa.Text()
# Ordered by its bytes everywhere, whatever the collation of the database: for keys that are walked in order.
BinaryText = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
Bytes = sa.LargeBinary()
Real64: sa.types.TypeEngine[float] = sa.Double().with_variant(sqlite.REAL(), "sqlite")

SIGN_BIT = 1 << 63


class UInt64(sa.types.TypeDecorator[int]):
    """An unsigned 64-bit number in a signed column: the sign bit is flipped, so that order is kept."""

    impl = sa.BigInteger
    cache_ok = True

    def load_dialect_impl(self, dialect: sa.Dialect) -> sa.types.TypeEngine[Any]:
        return dialect.type_descriptor(sqlite.INTEGER() if dialect.name == "sqlite" else sa.BigInteger())

    def process_bind_param(self, value: int | None, dialect: sa.Dialect) -> int | None:
        return None if value is None else value - SIGN_BIT

    def process_result_value(self, value: int | None, dialect: sa.Dialect) -> int | None:
        return None if value is None else value + SIGN_BIT


# Small tables that every node of a cluster holds whole.
EVERYWHERE = "*"


def table(
    name: str,
    *columns: sa.schema.SchemaItem,
    distribute_by: str,
    with_rowid: bool = True,
    metadata: sa.MetaData = METADATA,
) -> sa.Table:
    """Declare a table; on Citus its rows are spread by `distribute_by` (or EVERYWHERE), which unique keys contain.

    Without a row id, SQLite keeps the rows in the primary key itself: one tree instead of two, for narrow rows.
    Tables that the settings name have a `metadata` of their own: `store upgrade` makes them, no migration does.
    """
    declared = sa.Table(
        name,
        metadata,
        *columns,
        info={"distribute_by": distribute_by},
        sqlite_strict=True,
        sqlite_with_rowid=with_rowid,
    )
    if distribute_by != EVERYWHERE:
        for constraint in declared.constraints:
            if isinstance(constraint, sa.PrimaryKeyConstraint | sa.UniqueConstraint) and constraint.columns:
                assert distribute_by in constraint.columns, f"{name}: {constraint} lacks {distribute_by}"
    return declared


@cache
def key_names(declared: sa.Table) -> tuple[str, ...]:
    """The columns of the primary key, in order."""
    return tuple(column.name for column in declared.primary_key.columns)
