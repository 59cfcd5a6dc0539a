"""Adding an identity type: it gets a start of its own, and a backfill that touches nothing else."""

from msgspec import structs

from keyfold.core.clock import SECOND_US
from keyfold.core.errors import BadInput, Conflict
from keyfold.core.store import Store, Transaction
from keyfold.orders.model import IdentityType
from keyfold.orders.service.filling import must_not_be_splitting
from keyfold.orders.service.jobs import give_up
from keyfold.orders.service.unit import Stood, Unit, must_lie_ahead
from keyfold.orders.settings import why_not_name


def add_identity(
    store: Store, unit: Unit, name: str, start_us: int | None = None, column: str | None = None
) -> IdentityType:
    """Count by a further identity type, live from its start on; asked for again, no more than its column can change."""
    if not name.isidentifier() or not name.isascii() or len(name) > 63:
        raise BadInput(f"{name!r} cannot be the name of an identity type", hint="Use letters, digits and _")

    def work(tx: Transaction) -> IdentityType:
        stood = unit.stood(tx)
        state = stood.state
        known = next((each for each in state.identities if each.name == name), None)
        if known is not None:
            if start_us in (None, known.start_us):
                return _read_from(tx, unit, stood, known, column)
            raise Conflict(f"the identity type {name!r} is there, with another start, which cannot change")
        must_not_be_splitting(state)
        if why := why_not_name(name, [*state.by_name, *state.dimensions]):
            raise BadInput(why)
        lead = unit.settings.start_lead_seconds_min
        # A whole second: history may have no finer times, and would have orders from behind the start before it.
        soon_us = -(-tx.now_us // SECOND_US) * SECOND_US + (lead + 60) * SECOND_US
        chosen = start_us if start_us is not None else soon_us
        must_lie_ahead(unit, chosen, tx.now_us, "start")
        added = IdentityType(name, 1 + max(each.type_id for each in state.identities), chosen)
        columns = {**state.columns, **({name: column} if column else {})}
        unit.change(tx, stood, structs.replace(state, identities=[*state.identities, added], columns=columns))
        return added

    return store.transact(work, name="add identity type")


def _read_from(tx: Transaction, unit: Unit, stood: Stood, kind: IdentityType, column: str | None) -> IdentityType:
    """The type with another column of history, if one is named: what was counted of it has to be counted anew."""
    state = stood.state
    if column in (None, {**unit.settings.columns, **state.columns}.get(kind.name, kind.name)):
        return kind
    must_not_be_splitting(state)
    give_up(tx, unit, f"backfill {kind.name}")
    changed = structs.replace(kind, filled_at_us=None) if kind.source == "backfill" else kind
    types = [changed if each.name == kind.name else each for each in state.identities]
    columns = {**state.columns, kind.name: str(column)}
    unit.change(tx, stood, structs.replace(state, identities=types, columns=columns))
    return changed
