"""Segments as people see them: made, and listed with where they stand."""

from collections.abc import Sequence

import sqlalchemy as sa
from msgspec import Struct

from keyfold.core import audit
from keyfold.core.errors import BadInput, Conflict
from keyfold.core.store import Transaction
from keyfold.core.store.batch import Columns
from keyfold.core.store.shapes import insert, insert_new, load
from keyfold.core.times import iso
from keyfold.segments.difference import Counts
from keyfold.segments.model import Stage
from keyfold.segments.service import queueing
from keyfold.segments.service.queueing import Queued
from keyfold.segments.settings import SegmentsSettings
from keyfold.segments.tables import SEGMENT_QUEUE, SEGMENTS


class Segment(Struct, frozen=True, kw_only=True):
    """What a segment is: where its users come from, and what its diffs may do unasked."""

    segment_id: str
    title: str = ""
    source_table: str = ""
    condition: str = ""
    remove_share_max: float | None = None


class SegmentShown(Struct, frozen=True, kw_only=True):
    """A segment and where it stands."""

    segment_id: str
    title: str
    source_table: str
    condition: str
    remove_share_max: float | None
    stage: Stage
    is_on: bool
    is_stuck: bool
    is_evaluation_wanted: bool
    evaluation_version: int
    diff_version: int | None
    minimal_valid_version: int
    target_version: int | None
    chunks: int
    counts: Counts | None
    reason: str
    in_stage_since: str
    moved_at: str
    version: int


def create(tx: Transaction, settings: SegmentsSettings, segment: Segment, actor: str) -> SegmentShown:
    """Make a segment; the same again changes nothing."""
    if segment.source_table and segment.source_table not in settings.tables:
        known = ", ".join(settings.tables) or "none"
        raise BadInput(
            f"there is no table {segment.source_table!r}", place="source_table", hint=f"segments.tables has: {known}"
        )
    if segment.condition and not segment.source_table:
        raise BadInput("a condition needs a table", place="condition", hint="Name one of segments.tables")
    if segment.source_table and not segment.condition and not settings.tables[segment.source_table].segment_id:
        raise BadInput("a table needs a condition", place="condition", hint="Write `true` to take every user")
    row: Columns = {
        **{name: [getattr(segment, name)] for name in Segment.__struct_fields__},
        "made_at_us": [tx.now_us],
    }
    if not insert_new(tx, SEGMENTS, row):
        if described(tx, [segment.segment_id])[segment.segment_id] != segment:
            raise Conflict(f"there is another segment {segment.segment_id!r}", hint="Ids of segments are not reused")
        return shown(tx, settings, [segment.segment_id])[0]
    fresh = Queued(segment_id=segment.segment_id, version=1, queued_at_us=tx.now_us, moved_at_us=tx.now_us)
    insert(tx, SEGMENT_QUEUE, {name: [getattr(fresh, name)] for name in Queued.__struct_fields__})
    audit.record(tx, actor, "segment created", segment.segment_id)
    return shown(tx, settings, [segment.segment_id])[0]


def described(tx: Transaction, segment_ids: Sequence[str]) -> dict[str, Segment]:
    names = [name for name in Segment.__struct_fields__ if name != "segment_id"]
    rows = load(tx, SEGMENTS, {"segment_id": sorted(set(segment_ids))}, names)
    return {key: Segment(segment_id=key, **dict(zip(names, row, strict=True))) for (key,), row in rows.items()}


def listed(
    tx: Transaction,
    *,
    stage: Stage | None,
    only: Sequence[str] | None,
    after: str,
    count_max: int,
    stuck_seconds: int | None,
) -> list[str]:
    """Ids of segments in their order: of a stage, of those that a caller may see, of those that are stuck."""
    queue = SEGMENT_QUEUE.c
    chosen = sa.select(queue.segment_id).where(queue.segment_id > after)
    if stage is not None:
        chosen = chosen.where(queue.stage == stage)
    if only is not None:
        chosen = chosen.where(queue.segment_id.in_(list(only)))
    if stuck_seconds is not None:
        chosen = chosen.where(queueing.is_stuck(tx.now_us, stuck_seconds))
    return list(tx.execute(chosen.order_by(queue.segment_id).limit(count_max)).scalars())


def shown(tx: Transaction, settings: SegmentsSettings, segment_ids: Sequence[str]) -> list[SegmentShown]:
    """Segments with where they stand, in the order asked for."""
    segments, rows = described(tx, segment_ids), queueing.queued(tx, segment_ids)
    return [
        _shown(segments[each], rows[each], tx.now_us, settings.stuck_seconds) for each in segment_ids if each in rows
    ]


def _shown(segment: Segment, row: Queued, now_us: int, stuck_seconds: int) -> SegmentShown:
    due = row.stage in ("awaiting_diff", "diffing", "failed", "held") or bool(row.is_evaluation_wanted)
    checked = row.checked
    return SegmentShown(
        segment_id=segment.segment_id,
        title=segment.title,
        source_table=segment.source_table,
        condition=segment.condition,
        remove_share_max=segment.remove_share_max,
        stage=row.stage,
        is_on=bool(row.is_on),
        is_stuck=bool(row.is_on) and due and row.moved_at_us < now_us - stuck_seconds * 1_000_000,
        is_evaluation_wanted=bool(row.is_evaluation_wanted),
        evaluation_version=row.evaluation_version,
        diff_version=row.diff_version,
        minimal_valid_version=row.minimal_valid_version,
        target_version=row.target_version,
        chunks=row.chunks,
        counts=None if checked is None else checked.counts,
        reason=row.reason,
        in_stage_since=iso(row.queued_at_us),
        moved_at=iso(row.moved_at_us),
        version=row.version,
    )
