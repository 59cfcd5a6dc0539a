"""The queue: where each segment stands, under which versions, and who may move it.

A row is changed by compare-and-set on its version, so that an act of a person (turning off, approving) and a step of
a diff exclude each other: whichever commits second runs again, sees the other, and gives way.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec import Struct, structs

from keyfold.core.errors import Conflict, NotFound, TicketRefused
from keyfold.core.store import Transaction
from keyfold.core.store.batch import Columns
from keyfold.core.store.shapes import compare_and_set, load
from keyfold.segments.difference import Counts
from keyfold.segments.model import STAGES, Stage
from keyfold.segments.tables import SEGMENT_QUEUE


class Checked(Struct, frozen=True):
    """What the first pass of a diff found, and of which snapshots: chunks of others are not applied under it."""

    target_version: int
    counts: Counts
    old: str  # the snapshots' fingerprints
    new: str


class Queued(Struct, frozen=True, kw_only=True):
    """One segment in the queue."""

    segment_id: str
    version: int = 0
    stage: Stage = "evaluation"
    is_on: int = 1
    is_evaluation_wanted: int = 0
    evaluation_version: int = 0
    diff_version: int | None = None
    minimal_valid_version: int = 0
    target_version: int | None = None
    approved_version: int | None = None
    upto: str | None = None
    chunks: int = 0
    counts: str = ""
    ticket: int = 0
    tries: int = 0
    reason: str = ""
    queued_at_us: int
    moved_at_us: int

    @property
    def checked(self) -> Checked | None:
        return msgspec.json.decode(self.counts, type=Checked) if self.counts else None

    @property
    def is_waiting(self) -> bool:
        return self.stage in ("awaiting_diff", "diffing")


REASON_MAX = 1_000
FIELDS = tuple(name for name in Queued.__struct_fields__ if name != "segment_id")


def queued(tx: Transaction, segment_ids: Sequence[str]) -> dict[str, Queued]:
    """The rows of these segments, those that are there."""
    rows = load(tx, SEGMENT_QUEUE, {"segment_id": sorted(set(segment_ids))}, FIELDS)
    return {key: Queued(segment_id=key, **dict(zip(FIELDS, row, strict=True))) for (key,), row in rows.items()}


def one(tx: Transaction, segment_id: str) -> Queued:
    found = queued(tx, [segment_id])
    if segment_id not in found:
        raise NotFound(f"there is no segment {segment_id!r}", hint="`keyfold segments status` lists them")
    return found[segment_id]


def save(tx: Transaction, row: Queued, **changes: Any) -> Queued:
    """Change a row that was loaded in this transaction, and say when. Stages that differ count as newly queued."""
    if changes.get("stage", row.stage) != row.stage:
        changes = {"queued_at_us": tx.now_us, **changes}
    changed = structs.replace(row, **{"moved_at_us": tx.now_us, **changes})
    changed = structs.replace(changed, reason=changed.reason[:REASON_MAX])
    columns: Columns = {name: [getattr(changed, name)] for name in Queued.__struct_fields__}
    compare_and_set(tx, SEGMENT_QUEUE, columns)
    return structs.replace(changed, version=row.version + 1)


def waiting(tx: Transaction, count_max: int) -> list[str]:
    """Segments to diff, those first that wait longest."""
    queue = SEGMENT_QUEUE.c
    chosen = sa.select(queue.segment_id).where(queue.stage.in_(["awaiting_diff", "diffing"]), queue.is_on == 1)
    return list(tx.execute(chosen.order_by(queue.queued_at_us, queue.segment_id).limit(count_max)).scalars())


def to_evaluate(tx: Transaction, count_max: int) -> list[str]:
    """Segments whose evaluation somebody asked for."""
    queue = SEGMENT_QUEUE.c
    chosen = sa.select(queue.segment_id).where(queue.is_evaluation_wanted == 1, queue.is_on == 1)
    return list(tx.execute(chosen.order_by(queue.moved_at_us, queue.segment_id).limit(count_max)).scalars())


def minimal_valid_versions(tx: Transaction) -> dict[str, int]:
    """Of the segments that were ever turned off: entries below are garbage."""
    queue = SEGMENT_QUEUE.c
    rows = tx.execute(sa.select(queue.segment_id, queue.minimal_valid_version).where(queue.minimal_valid_version > 0))
    return {row.segment_id: row.minimal_valid_version for row in rows}


class StageFigures(Struct, frozen=True):
    """How many segments are in a stage, and since when the first of them."""

    stage: Stage
    segments: int
    oldest_seconds: int


class QueueFigures(Struct, frozen=True):
    """The figures for graphs of the queue."""

    stages: list[StageFigures]
    stuck: list[str]  # at most some


STUCK_SHOWN_MAX = 100


def figures(tx: Transaction, stuck_seconds: int) -> QueueFigures:
    queue, now_us = SEGMENT_QUEUE.c, tx.now_us
    rows = tx.execute(
        sa.select(queue.stage, sa.func.count().label("segments"), sa.func.min(queue.queued_at_us).label("oldest_us"))
        .where(queue.is_on == 1)
        .group_by(queue.stage)
    )
    found = {row.stage: row for row in rows}
    stuck = tx.execute(
        sa.select(queue.segment_id)
        .where(is_stuck(now_us, stuck_seconds))
        .order_by(queue.moved_at_us, queue.segment_id)
        .limit(STUCK_SHOWN_MAX)
    ).scalars()
    return QueueFigures(
        [
            StageFigures(stage, found[stage].segments, max(0, now_us - found[stage].oldest_us) // 1_000_000)
            if stage in found
            else StageFigures(stage, 0, 0)
            for stage in STAGES
        ],
        list(stuck),
    )


def is_stuck(now_us: int, stuck_seconds: int) -> sa.ColumnElement[bool]:
    """Work is due, and nothing has moved: it waits for somebody, or for nobody."""
    queue = SEGMENT_QUEUE.c
    due = queue.stage.in_(["awaiting_diff", "diffing", "failed", "held"]) | (queue.is_evaluation_wanted == 1)
    return (queue.is_on == 1) & due & (queue.moved_at_us < now_us - stuck_seconds * 1_000_000)


def arrived(tx: Transaction, row: Queued, evaluation_version: int) -> Queued:
    """A new snapshot is there. A diff that has begun is finished first; what was held or has failed is queued again."""
    stage = row.stage if row.stage == "diffing" else "awaiting_diff"
    return save(tx, row, stage=stage, evaluation_version=evaluation_version, is_evaluation_wanted=0, reason="", tries=0)


def retry(tx: Transaction, segment_id: str) -> Queued:
    """Try again what has failed or is stuck; a worker that still holds it is refused at its next step."""
    row = one(tx, segment_id)
    must_be_on(row)
    if row.stage == "held":
        raise Conflict(f"{segment_id} is held: {row.reason}", hint=f"keyfold segments approve {segment_id}")
    if row.is_waiting or (row.stage == "failed" and row.evaluation_version > (row.diff_version or 0)):
        return save(tx, row, stage="awaiting_diff", tries=0, reason="")
    if row.stage == "failed":
        return save(tx, row, stage="evaluation", is_evaluation_wanted=1, tries=0, reason="")
    raise Conflict(f"{segment_id} has nothing to try again: it is {_said(row.stage)}")


def approve(tx: Transaction, segment_id: str, evaluation_version: int | None = None) -> Queued:
    """Let a held diff go on; with a version, only if that is what is held."""
    row = one(tx, segment_id)
    if row.stage != "held" or row.checked is None:
        raise Conflict(f"{segment_id} is not held: it is {_said(row.stage)}")
    held = row.checked.target_version
    if evaluation_version is not None and evaluation_version != held:
        raise Conflict(f"version {held} of {segment_id} is held, not {evaluation_version}", hint="Look at it again")
    return save(tx, row, stage="awaiting_diff", approved_version=held, reason="")


def want_evaluation(tx: Transaction, segment_id: str) -> Queued:
    row = one(tx, segment_id)
    must_be_on(row)
    stage = "evaluation" if row.stage in ("done", "failed") and row.target_version is None else row.stage
    return save(tx, row, is_evaluation_wanted=1, stage=stage, reason="" if stage == "evaluation" else row.reason)


def turn_off(tx: Transaction, segment_id: str) -> Queued:
    """Every entry of the segment becomes garbage at once; a diff under way is refused at its next chunk."""
    row = one(tx, segment_id)
    if not row.is_on:
        return row
    return save(
        tx,
        row,
        stage="done",
        is_on=0,
        is_evaluation_wanted=0,
        minimal_valid_version=row.evaluation_version + 1,
        reason="turned off",
        **NO_DIFF,
        diff_version=None,
        approved_version=None,
    )


# Of a segment that no diff was begun for.
NO_DIFF: dict[str, Any] = {"target_version": None, "upto": None, "chunks": 0, "counts": "", "tries": 0}


class Ticketed:
    """The row of one segment in the hands of one worker: every step is refused once anybody else has moved it."""

    def __init__(self, row: Queued) -> None:
        self.row = row

    @classmethod
    def adopt(cls, tx: Transaction, segment_id: str, ticket: int) -> "Ticketed | None":
        """Put the row under a ticket; None where there is nothing to diff any more."""
        row = one(tx, segment_id)
        if row.ticket > ticket:
            raise TicketRefused(f"{segment_id} is under ticket {row.ticket}, newer than {ticket}")
        if not row.is_waiting or not row.is_on:
            return None
        target = row.target_version or row.evaluation_version
        # To take up again what others have left is not to move: where every try dies, it is stuck, and must show.
        moved_at_us = row.moved_at_us if row.stage == "diffing" else tx.now_us
        return cls(save(tx, row, stage="diffing", ticket=ticket, target_version=target, moved_at_us=moved_at_us))

    def step(self, tx: Transaction, **changes: Any) -> Queued:
        """Move on, first of all in its transaction. The caller keeps what this returns once it is committed."""
        found = one(tx, self.row.segment_id)
        if found.version != self.row.version:
            held = (found.ticket, found.stage, found.target_version, found.upto)
            if held != (self.row.ticket, "diffing", self.row.target_version, self.row.upto):
                raise TicketRefused(
                    f"{self.row.segment_id} was moved by somebody else (stage {found.stage}, ticket {found.ticket})"
                )
        return save(tx, found, **changes)

    def stepped(self, row: Queued) -> None:
        self.row = row


def must_be_on(row: Queued) -> None:
    if not row.is_on:
        raise Conflict(f"{row.segment_id} is turned off", hint=f"keyfold segments on {row.segment_id}")


def _said(stage: Stage) -> str:
    return stage.replace("_", " ")
