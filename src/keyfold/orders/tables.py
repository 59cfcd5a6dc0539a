"""The tables of one unit. Each unit has its own, so that a change to one touches no other.

A cell is the count of one identity in one slice. Its live part counts orders created from the start of its identity
type on, its history part those created before; each part has one writer, so neither can spoil the other.
"""

from collections.abc import Mapping
from functools import cache

import sqlalchemy as sa
from msgspec import Struct

from keyfold.core.store.schema import EVERYWHERE, BinaryText, Int32, Int64, Text, table

# Of an empty part: whatever comes is earlier than this, and later than that.
NEVER_FROM_US = 2**62
NEVER_TO_US = -(2**62)


class UnitTables(Struct, frozen=True):
    state: sa.Table
    slices: sa.Table
    cells: sa.Table
    marks: sa.Table
    kept: sa.Table
    corrections: sa.Table
    gates: sa.Table
    reservations: sa.Table
    jobs: sa.Table

    @property
    def all(self) -> list[sa.Table]:
        return [getattr(self, name) for name in self.__struct_fields__]


@cache
def tables_of(unit: str) -> UnitTables:
    """The tables of a unit, by its name."""
    metadata = sa.MetaData()

    def own(name: str, *items: sa.schema.SchemaItem, by: str, indexes: Mapping[str, str] = {}) -> sa.Table:
        """A table of this unit; `indexes`: the column of each, by what follows the table in its name."""
        full = f"orders_{unit}_{name}"
        declared = table(full, *items, distribute_by=by, with_rowid=False, metadata=metadata)
        for suffix, column in indexes.items():
            sa.Index(f"{full}_{suffix}", declared.c[column])
        return declared

    return UnitTables(
        # One row: identity types with their starts, dimensions; and the watermark, which only grows.
        state=own(
            "state",
            sa.Column("name", Text, primary_key=True),
            sa.Column("version", Int64, nullable=False),
            sa.Column("body", Text, nullable=False),
            sa.Column("late_before_us", Int64, nullable=False),
            by=EVERYWHERE,
        ),
        # The dictionary of dimension values. A new dimension is new slices, not a new column.
        slices=own(
            "slices",
            sa.Column("slice_id", Int64, primary_key=True, autoincrement=False),
            sa.Column("dimension_values", Text, nullable=False),
            by=EVERYWHERE,
        ),
        # Covering on PostgreSQL: a read of counts touches the index alone. On SQLite the table is its own index.
        cells=own(
            "cells",
            sa.Column("identity_type", Int32, nullable=False),
            sa.Column("identity_value", BinaryText, nullable=False),
            sa.Column("slice_id", Int64, nullable=False),
            sa.Column("live_count", Int64, nullable=False, server_default="0"),
            sa.Column("live_from_us", Int64, nullable=False, server_default=sa.text(str(NEVER_FROM_US))),
            sa.Column("live_to_us", Int64, nullable=False, server_default=sa.text(str(NEVER_TO_US))),
            sa.Column("history_count", Int64, nullable=False, server_default="0"),
            sa.Column("history_from_us", Int64, nullable=False, server_default=sa.text(str(NEVER_FROM_US))),
            sa.Column("history_to_us", Int64, nullable=False, server_default=sa.text(str(NEVER_TO_US))),
            sa.PrimaryKeyConstraint(
                "identity_type",
                "identity_value",
                "slice_id",
                name=f"orders_{unit}_cells_key",
                postgresql_include=["live_count", "history_count"],
            ),
            by="identity_value",
        ),
        # An order that was counted: where, so that it can be taken back, and what it said, so that a repeat is known.
        marks=own(
            "marks",
            sa.Column("order_id", Text, primary_key=True),
            sa.Column("created_at_us", Int64, nullable=False),
            sa.Column("fingerprint", Int64, nullable=False),
            sa.Column("slice_id", Int64, nullable=False),
            # JSON: by identity type, the slice that a new dimension moved it to, or that history still counts it
            sa.Column("moved", Text, nullable=False),
            sa.Column("identities", Text, nullable=False),
            sa.Column("is_corrected", Int32, nullable=False),
            by="order_id",
            indexes={"created": "created_at_us"},
        ),
        # Orders that were not counted, or not for all identities: late, before the start, or not to be placed.
        kept=own(
            "kept",
            sa.Column("order_id", Text, primary_key=True),
            sa.Column("why", Text, primary_key=True),
            sa.Column("created_at_us", Int64, nullable=False),
            sa.Column("kept_at_us", Int64, nullable=False),
            sa.Column("body", Text, nullable=False),
            by="order_id",
            indexes={"kept_at": "kept_at_us"},
        ),
        # Orders that were taken back; never purged, because history still has them.
        corrections=own(
            "corrections",
            sa.Column("order_id", Text, primary_key=True),
            sa.Column("corrected_at_us", Int64, nullable=False),
            sa.Column("reason", Text, nullable=False),
            by="order_id",
        ),
        # Whoever reserves for an identity holds its gate: two cannot take the last place.
        gates=own(
            "gates",
            sa.Column("identity_type", Int32, primary_key=True, autoincrement=False),
            sa.Column("identity_value", BinaryText, primary_key=True),
            sa.Column("version", Int64, nullable=False),
            by="identity_value",
        ),
        reservations=own(
            "reservations",
            sa.Column("identity_type", Int32, primary_key=True, autoincrement=False),
            sa.Column("identity_value", BinaryText, primary_key=True),
            sa.Column("order_id", Text, primary_key=True),
            sa.Column("filters", Text, primary_key=True),
            sa.Column("expires_at_us", Int64, nullable=False),
            by="identity_value",
            indexes={"order": "order_id", "expires": "expires_at_us"},
        ),
        # One row a piece of long work: whose run it is, and how far it came.
        jobs=own(
            "jobs",
            sa.Column("name", Text, primary_key=True),
            sa.Column("version", Int64, nullable=False),
            sa.Column("run", Text, nullable=False),
            sa.Column("body", Text, nullable=False),
            by=EVERYWHERE,
        ),
    )
