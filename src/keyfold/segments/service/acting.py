"""What people do to a segment: each act is recorded with who did it."""

from keyfold.core import audit
from keyfold.core.store import Transaction
from keyfold.segments.service import describing, queueing, snapshots
from keyfold.segments.service.queueing import Queued


def approve(tx: Transaction, segment_id: str, evaluation_version: int | None, actor: str) -> Queued:
    """Let a held diff go on; with a version, only if that is what is held."""
    row = queueing.approve(tx, segment_id, evaluation_version)
    audit.record(tx, actor, "segment approved", f"{segment_id} {row.approved_version}")
    return row


def retry(tx: Transaction, segment_id: str, actor: str) -> Queued:
    """Try again what has failed or is stuck."""
    row = queueing.retry(tx, segment_id)
    audit.record(tx, actor, "segment tried again", segment_id)
    return row


def turn_off(tx: Transaction, segment_id: str, actor: str) -> Queued:
    """Nobody is in the segment any more."""
    row = queueing.turn_off(tx, segment_id)
    snapshots.forget(tx, row)
    audit.record(tx, actor, "segment turned off", segment_id)
    return row


def turn_on(tx: Transaction, segment_id: str, actor: str) -> Queued:
    """Evaluate it anew, or take the last snapshot again under a new version: everybody in it enters again."""
    row = queueing.one(tx, segment_id)
    if row.is_on:
        return row
    audit.record(tx, actor, "segment turned on", segment_id)
    if describing.described(tx, [segment_id])[segment_id].source_table:
        return queueing.save(tx, row, is_on=1, stage="evaluation", is_evaluation_wanted=1, reason="")
    version = row.evaluation_version + 1
    last = snapshots.known(tx, segment_id, row.evaluation_version)
    if last is None:
        return queueing.save(tx, row, is_on=1, stage="evaluation", reason="")
    snapshots.name(tx, segment_id, version, last.location, last.rows)
    return queueing.save(tx, row, is_on=1, stage="awaiting_diff", evaluation_version=version, reason="")
