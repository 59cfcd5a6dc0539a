"""`keyfold store`: the schema of the store, and its way up and out."""

import sqlalchemy as sa
import typer
from msgspec import Struct

from keyfold.cli.run import safe
from keyfold.cli.session import must_be_there, session_of
from keyfold.core import audit, progress
from keyfold.core.answer import Answer
from keyfold.core.errors import Conflict
from keyfold.core.part import named_tables
from keyfold.core.shards import lease_name
from keyfold.core.store import Store, Transaction, migrate
from keyfold.core.store.distribute import Placement, distribute, in_order, is_cluster, placements
from keyfold.core.store.schema import EVERYWHERE
from keyfold.core.tables import PROGRESS
from keyfold.parts import PARTS

app = typer.Typer(no_args_is_help=True, help="The store: its schema, and its way up and out.")

NEXT = {
    "empty": "Nothing is in it yet. Run: keyfold store upgrade",
    "old": "It has an older schema. Run: keyfold store upgrade",
    "unknown": "Its schema is not of this program. Use the newer keyfold that made it, or name another store.",
}


class StoreStatus(Struct, frozen=True):
    """Where a store stands. `state` is current, empty, old or unknown."""

    store: str
    server: str
    schema: str | None
    known: str
    state: str
    tables: list[Placement]


class Upgraded(Struct, frozen=True):
    store: str
    before: str | None
    after: str | None
    changed: bool


@app.command()
def upgrade(ctx: typer.Context) -> Answer:
    """Bring the store to the schema of this program.

    An empty store gets all of it; a repeat changes nothing.
    """
    store, settings = session_of(ctx).store()
    before, named = migrate.status(store), named_tables(PARTS, settings)
    lacking = migrate.missing(store, named)
    after = migrate.upgrade(store, named)
    changed = before.current != after.current or bool(lacking)
    done = Upgraded(safe(settings.store.url), before.current, after.current, changed)
    line = f"{done.store}: schema {done.before or 'empty'} → {done.after}"
    if before.current == after.current and lacking:
        line = f"{done.store}: schema {done.after}, {len(lacking)} tables that the settings name were made"
    return Answer(data=done, lines=[line if done.changed else f"{done.store}: schema {done.after}, nothing to do"])


@app.command()
def status(ctx: typer.Context) -> Answer:
    """Show which store this is and its schema.

    On Citus also where its tables lie.
    """
    session = session_of(ctx)
    must_be_there(session.settings().store.url)
    store, settings = session.store()
    found = migrate.status(store)
    tables = placements(store, named_tables(PARTS, settings)) if is_cluster(store) and found.state != "empty" else []
    state = StoreStatus(safe(settings.store.url), _server(store), found.current, found.known, found.state, list(tables))
    lines = [
        f"store    {state.store}",
        f"server   {state.server}",
        f"schema   {state.schema or 'none'} ({state.state}; this program has {state.known})",
    ]
    if tables:
        lines.append("")
        lines.extend(f"{each.table:<16} {_place(each)}" for each in tables)
    if any(not each.by for each in tables):
        lines.append("Not every table is spread over the nodes. Run: keyfold store distribute")
    if found.state in NEXT:
        lines.append(NEXT[found.state])
    return Answer(data=state, lines=lines)


@app.command(name="distribute")
def distribute_tables(ctx: typer.Context) -> Answer:
    """Spread the tables over a Citus cluster.

    Rows that are there already are copied to the nodes, and writers wait meanwhile. A repeat changes nothing.
    """
    session = session_of(ctx)
    store, settings = session.store()
    named = named_tables(PARTS, settings)
    if not store.is_sqlite:
        migrate.must_be_current(store, settings.store.url, named)
    with session.steps("Spreading", len(in_order(named))) as steps:
        done = distribute(store, lambda spread: steps.step(spread.table), named)
    changed = sum(spread.changed for spread in done)
    rows = [
        {
            "table": each.table,
            "spread by": "every node" if each.by == EVERYWHERE else each.by,
            "": "now" if each.changed else "before",
        }
        for each in done
    ]
    return Answer(data=done, table=rows, lines=[f"{changed} of {len(done)} tables were spread now."])


def _place(placement: Placement) -> str:
    if not placement.by:
        return "on the coordinator only"
    if placement.by == EVERYWHERE:
        return "on every node"
    return f"by {placement.by}, {placement.shards} shards, colocation {placement.colocation}"


def _server(store: Store) -> str:
    if store.is_sqlite:
        version = store.read(lambda tx: tx.driver("SELECT sqlite_version()").scalar_one())
        return f"SQLite {version}"
    version = store.read(lambda tx: tx.driver("SHOW server_version").scalar_one())
    if not is_cluster(store):
        return f"PostgreSQL {version}"
    citus = store.read(lambda tx: tx.driver("SELECT extversion FROM pg_extension WHERE extname = 'citus'").scalar_one())
    return f"PostgreSQL {version} with Citus {citus}"


@app.command(name="reset-tickets")
def reset_tickets(ctx: typer.Context) -> Answer:
    """Forget the tickets of all guard rows, after the lease service was changed or wiped.

    Tickets of another service may be lower than those stored, and would be refused for ever. Stop all workers first:
    it is refused while anybody holds a lease.
    """
    context = session_of(ctx).product()
    rows = context.store.read(lambda tx: tx.execute(sa.select(PROGRESS.c.job, PROGRESS.c.shard)).all())
    held = context.leases.held([lease_name(row.job, row.shard) for row in rows])
    if held:
        raise Conflict(f"{held[0].holder} works on {held[0].name}", hint="Stop all workers, then repeat")

    def work(tx: Transaction) -> int:
        changed = progress.reset_tickets(tx)
        audit.record(tx, "command line", "tickets reset", f"{changed} guard rows")
        return changed

    changed = context.store.transact(work, name="reset tickets", once=True)
    return Answer(data={"guard_rows": changed}, lines=[f"{changed} guard rows start anew."])
