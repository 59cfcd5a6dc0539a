"""The guard row of a job's shard: how far it has come, and the ticket that may move it.

Every guarded transaction moves this row *first*, by compare-and-set on ticket and position. The row lock then keeps
a newer holder from taking over until this transaction has ended, and an older holder from committing after it: a
check that only reads the lease let an old holder commit after a takeover.

After a refusal the holder drops its batch and adopts the row again in a fresh transaction: if a newer ticket stands
there, the shard is lost; if not (somebody rewound it), `adopt` answers where to go on reading.
"""

from typing import NamedTuple

from keyfold.core.errors import KeyfoldError, NotFound, TicketRefused, TopicChanged
from keyfold.core.store.store import Transaction


class Progress(NamedTuple):
    """How far one shard has come, under which ticket, and when it last moved."""

    position: int
    ticket: int
    moved_at_us: int


def adopt(tx: Transaction, job: str, shard: int, ticket: int, source: str) -> int:
    """Put the row under this ticket and return its position; a new row starts at 0.

    `source` names the very topic (or table) that positions count in; a recreated one has another name.
    """
    mark = _mark(tx)
    position = tx.driver(
        "INSERT INTO progress (job, shard, ticket, position, source, moved_at_us)"
        f" VALUES ({mark}, {mark}, {mark}, 0, {mark}, {mark})"
        " ON CONFLICT (job, shard) DO UPDATE"
        " SET ticket = excluded.ticket,"
        " source = CASE WHEN progress.source = '' THEN excluded.source ELSE progress.source END"
        " WHERE progress.ticket <= excluded.ticket AND progress.source IN ('', excluded.source)"
        " RETURNING position",
        (job, shard, ticket, source, tx.now_us),
    ).scalar_one_or_none()
    if position is None:
        raise _why_refused(tx, job, shard, ticket, source)
    return int(position)


def advance(tx: Transaction, job: str, shard: int, ticket: int, expected: int, position: int) -> None:
    """Move from `expected` to `position` under this ticket, or refuse; the first act of a guarded transaction.

    Standing still (`position == expected`) guards a transaction that reads nothing from a source.
    """
    if position < expected:
        raise ValueError(f"a position does not go back from {expected} to {position}: use rewind")
    mark = _mark(tx)
    moved = tx.driver(
        f"UPDATE progress SET position = {mark}, moved_at_us = {mark}"
        f" WHERE job = {mark} AND shard = {mark} AND ticket = {mark} AND position = {mark}",
        (position, tx.now_us, job, shard, ticket, expected),
    ).rowcount
    if moved != 1:
        raise TicketRefused(
            f"ticket {ticket} at position {expected} no longer moves shard {shard} of {job}",
            hint="Drop the batch and adopt the shard again",
        )


def positions(tx: Transaction, job: str) -> dict[int, Progress]:
    """Every shard of the job that was ever worked on."""
    rows = tx.driver(
        f"SELECT shard, position, ticket, moved_at_us FROM progress WHERE job = {_mark(tx)} ORDER BY shard", (job,)
    )
    return {row.shard: Progress(row.position, row.ticket, row.moved_at_us) for row in rows}


def rewind(tx: Transaction, job: str, shard: int, position: int, *, source: str | None = None) -> None:
    """Make the shard read again from `position`. With `source`, also accept a recreated topic under its new name.

    The ticket stays: the live holder's next `advance` expects another position, is refused, and reads the new one.
    """
    if position < 0:
        raise ValueError(f"a position is not negative: {position}")
    mark = _mark(tx)
    moved = tx.driver(
        f"UPDATE progress SET position = {mark}, moved_at_us = {mark}, source = coalesce({mark}, source)"
        f" WHERE job = {mark} AND shard = {mark}",
        (position, tx.now_us, source, job, shard),
    ).rowcount
    if moved != 1:
        raise NotFound(f"nobody has worked on shard {shard} of {job}")


def reset_tickets(tx: Transaction) -> int:
    """Forget every ticket, for a lease service that begins anew (another kind, or wiped); no worker may run."""
    return tx.driver("UPDATE progress SET ticket = 0 WHERE ticket > 0").rowcount


def _why_refused(tx: Transaction, job: str, shard: int, ticket: int, source: str) -> KeyfoldError:
    """The refused INSERT holds the row's lock, so this reads what it was refused by."""
    mark = _mark(tx)
    stored = tx.driver(f"SELECT ticket, source FROM progress WHERE job = {mark} AND shard = {mark}", (job, shard)).one()
    if stored.ticket > ticket:
        return TicketRefused(f"shard {shard} of {job} is under ticket {stored.ticket}, newer than {ticket}")
    return TopicChanged(
        f"shard {shard} of {job} was read from {stored.source}, which is now {source or 'unnamed'}",
        hint="If the new one is meant, rewind the shard and name it",
    )


def _mark(tx: Transaction) -> str:
    return "?" if tx.is_sqlite else "%s"
