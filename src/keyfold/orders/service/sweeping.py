"""What ages: marks behind the watermark, orders kept for a window, places nobody took. All in bounded steps."""

import sqlalchemy as sa

from keyfold.core.clock import SECOND_US
from keyfold.core.store import Transaction
from keyfold.orders.service.unit import DAY_US, STATE, Unit


def move_watermark(tx: Transaction, unit: Unit) -> bool:
    """Orders of a day that lies `dedupe_days` back are late from now on. It never moves back; whether it moved.

    While a dimension is being added it stands still: the marks tell which orders are counted without it.
    """
    stood = unit.stood(tx)
    edge = (tx.now_us // DAY_US - unit.settings.dedupe_days) * DAY_US
    if stood.late_before_us >= edge or stood.state.splitting is not None:
        return False
    changed = sa.update(unit.tables.state).where(unit.tables.state.c.name == STATE)
    newer = unit.tables.state.c.late_before_us < edge
    # Whoever has read the state to change it must see this: the marks that are left are part of what they decide by.
    moved = changed.where(newer).values(late_before_us=edge, version=unit.tables.state.c.version + 1)
    return tx.execute(moved).rowcount == 1


def purge_marks(tx: Transaction, unit: Unit, rows_max: int) -> int:
    """Delete marks a whole day behind the watermark: every transaction that saw an older one has long ended."""
    stood = unit.stood(tx)
    if stood.state.splitting is not None:
        return 0
    return _delete_oldest(
        tx, unit.tables.marks, unit.tables.marks.c.created_at_us, stood.late_before_us - DAY_US, rows_max
    )


def purge_kept(tx: Transaction, unit: Unit, rows_max: int) -> int:
    """Not before an order is late that was left to history: by its moment, which may have been ahead of its coming.

    Until then another one under its id is told from it by what is kept.
    """
    keep_days = max(unit.settings.keep_days, unit.settings.dedupe_days)
    before = tx.now_us - keep_days * DAY_US - unit.settings.future_seconds_max * SECOND_US
    return _delete_oldest(tx, unit.tables.kept, unit.tables.kept.c.kept_at_us, before, rows_max)


def purge_reservations(tx: Transaction, unit: Unit, rows_max: int) -> int:
    """Places whose time is over had no effect since that moment."""
    reservations = unit.tables.reservations
    return _delete_oldest(tx, reservations, reservations.c.expires_at_us, tx.now_us, rows_max)


def purge_gates(tx: Transaction, unit: Unit, rows_max: int) -> int:
    """A gate only keeps two apart at one moment: where nothing is held it may go, whoever waits makes it anew."""
    gates, held = unit.tables.gates, unit.tables.reservations
    same = sa.and_(held.c.identity_type == gates.c.identity_type, held.c.identity_value == gates.c.identity_value)
    idle = sa.select(gates.c.identity_type, gates.c.identity_value).where(~sa.exists().where(same)).limit(rows_max)
    key = sa.tuple_(gates.c.identity_type, gates.c.identity_value)
    return tx.execute(sa.delete(gates).where(key.in_(idle))).rowcount


def _delete_oldest(tx: Transaction, table: sa.Table, column: sa.Column[int], before: int, rows_max: int) -> int:
    """Delete rows from before a moment, the oldest first, at most `rows_max` at once."""
    return tx.execute(_oldest_deleted(table, column, before, rows_max)).rowcount


def _oldest_deleted(table: sa.Table, column: sa.Column[int], before: int, rows_max: int) -> sa.Delete:
    """By their keys, since any number may be of one moment; who finds some of them deleted meanwhile passes them by.

    The moment is asked for twice: a row that was given a later one since it was listed is looked at again, and stays.
    """
    key = list(table.primary_key)
    oldest = sa.select(*key).where(column < before).order_by(column).limit(rows_max)
    listed = (sa.tuple_(*key) if len(key) > 1 else key[0]).in_(oldest)
    return sa.delete(table).where(listed, column < before)


PURGES = (purge_marks, purge_kept, purge_reservations, purge_gates)
