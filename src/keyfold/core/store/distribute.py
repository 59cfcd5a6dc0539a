"""Spreading a PostgreSQL store over a Citus cluster: each table by its distribution column, small ones everywhere.

A table is spread in a transaction of its own, so a run that was cut short is simply run again. Tables whose
distribution columns have the same type and collation are colocated: equal values lie on the same node, and a
transaction about one key stays on one node.
"""

from collections.abc import Callable, Mapping, Sequence

import sqlalchemy as sa
from msgspec import Struct
from sqlalchemy.dialects import postgresql

from keyfold.core.errors import StoreRefused
from keyfold.core.store.schema import EVERYWHERE, METADATA
from keyfold.core.store.store import Store, Transaction


class Placement(Struct, frozen=True):
    """Where the rows of a table lie. `by` is its distribution column, EVERYWHERE, or empty on one node only."""

    table: str
    by: str
    shards: int
    colocation: int


class Spread(Struct, frozen=True):
    """What was done about one table: `changed` is false where it was spread before."""

    table: str
    by: str
    changed: bool


def distribute(
    store: Store, report: Callable[[Spread], None] = lambda spread: None, named: Sequence[sa.Table] = ()
) -> list[Spread]:
    """Spread every table that is not spread yet, also those that the settings name; a repeat changes nothing."""
    tables = in_order(named)
    placed = {placement.table: placement for placement in placements(store, named)}
    for table in tables:
        _must_agree(table, placed[table.name])
    done = []
    for table in tables:
        spread = Spread(str(table.name), table.info["distribute_by"], changed=not placed[table.name].by)
        if spread.changed:
            _spread(store, table, _anchor(table, tables, placed))
            placed = {placement.table: placement for placement in placements(store, named)}
        done.append(spread)
        report(spread)
    return done


def placements(store: Store, named: Sequence[sa.Table] = ()) -> list[Placement]:
    """Where the tables lie now, in the order in which they are spread."""
    _must_have_citus(store)
    rows = store.read(lambda tx: tx.driver(_PLACED).all())
    found = {
        row.name: Placement(row.name, EVERYWHERE if row.kind == "reference" else row.by, row.shards, row.colocation)
        for row in rows
        if row.kind in {"reference", "distributed"}
    }
    return [found.get(table.name, Placement(str(table.name), "", 1, 0)) for table in in_order(named)]


_PLACED = """
    SELECT table_name::text   AS name,
           citus_table_type   AS kind,
           distribution_column AS by,
           shard_count        AS shards,
           colocation_id      AS colocation
      FROM citus_tables
"""


def is_cluster(store: Store) -> bool:
    """Whether the store is a PostgreSQL database with the Citus extension."""
    return not store.is_sqlite and not store.read(lambda tx: tx.unnest)


def in_order(named: Sequence[sa.Table] = ()) -> Sequence[sa.Table]:
    """Those that every node holds first, because others may refer to them; then by name."""
    return sorted(
        [*METADATA.tables.values(), *named], key=lambda table: (table.info["distribute_by"] != EVERYWHERE, table.name)
    )


def _must_have_citus(store: Store) -> None:
    if store.is_sqlite:
        raise StoreRefused(
            "a SQLite file cannot be spread over nodes", hint="Name a PostgreSQL database with the Citus extension"
        )
    if not is_cluster(store):
        raise StoreRefused(
            "this PostgreSQL database has no Citus extension",
            hint="Install Citus, CREATE EXTENSION citus on every node, add the nodes with citus_add_node, and repeat",
        )


def _must_agree(table: sa.Table, placement: Placement) -> None:
    wanted = table.info["distribute_by"]
    if placement.by not in {"", wanted}:
        raise StoreRefused(
            f"the table {table.name} is spread by {placement.by}, this program needs {wanted}",
            hint=f"Run: SELECT undistribute_table('{table.name}'), then repeat",
        )


def _anchor(table: sa.Table, tables: Sequence[sa.Table], placed: Mapping[str, Placement]) -> str:
    """A spread table whose distribution column has the same type and collation, or `none` where this is the first."""
    kind = _column_type(table)
    for other in tables:
        if kind is not None and kind == _column_type(other) and placed[other.name].by:
            return other.name
    return "none"


def _column_type(table: sa.Table) -> str | None:
    by = table.info["distribute_by"]
    return None if by == EVERYWHERE else str(table.c[by].type.compile(dialect=postgresql.dialect()))  # type: ignore[no-untyped-call]


def _spread(store: Store, table: sa.Table, anchor: str) -> None:
    """Rows that are there already are copied to the nodes while writers wait, however long that takes."""
    by = table.info["distribute_by"]

    def work(tx: Transaction) -> None:
        for bound in ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout"):
            tx.driver(f"SET LOCAL {bound} = 0")
        if by == EVERYWHERE:
            tx.driver("SELECT create_reference_table(%s)", (table.name,))
        else:
            tx.driver("SELECT create_distributed_table(%s, %s, colocate_with => %s)", (table.name, by, anchor))
        # The coordinator keeps the rows from before as a hidden copy that nothing reads.
        tx.driver("SELECT truncate_local_data_after_distributing_table(%s)", (table.name,))

    store.transact(work, name="store distribute")
