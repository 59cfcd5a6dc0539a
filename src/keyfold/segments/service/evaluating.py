"""Evaluation: the users who meet a segment's condition become its next snapshot; of tables in place, a new version."""

import structlog

from keyfold.core.context import Context
from keyfold.core.errors import BadInput, Conflict, KeyfoldError, LeaseLost, Unavailable
from keyfold.core.leases.holding import Holding
from keyfold.core.store import Transaction
from keyfold.segments import metrics
from keyfold.segments.service import queueing, snapshots, sources
from keyfold.segments.service.describing import Segment, described
from keyfold.segments.service.queueing import Queued
from keyfold.segments.service.snapshots import Location, Snapshots
from keyfold.segments.settings import SegmentsSettings

log = structlog.get_logger(__name__)


class Overtaken(Conflict):
    """The evaluation is not the newest any more"""


class Evaluator:
    """Evaluates segments, one at a time."""

    def __init__(self, context: Context, settings: SegmentsSettings) -> None:
        self._context = context
        self._store = context.store
        self._settings = settings
        self._snapshots = Snapshots.of(context, settings)

    def step(self, holder: str) -> bool:
        """Evaluate what was asked for first; whether there was anything."""
        for segment_id in self._store.read(lambda tx: queueing.to_evaluate(tx, 100)):
            try:
                if self.evaluate(segment_id, holder, only_if_wanted=True) is not None:
                    return True
            except (LeaseLost, Unavailable):
                raise  # nothing is wrong with the segment
            except Overtaken as error:
                log.info("an evaluation was overtaken", segment=segment_id, reason=str(error))
                return True
            except Exception as error:  # whatever it is, the segments behind it get their turn
                self._fail(segment_id, _said(error))
                return True
        return False

    def evaluate(self, segment_id: str, holder: str, *, only_if_wanted: bool = False) -> Queued | None:
        """Evaluate one segment now; None where another worker is at it, or was."""
        self._store.read(lambda tx: _to_evaluate(tx, segment_id))
        name, seconds = f"segments/{segment_id}/evaluation", self._context.settings.leases.lease_seconds
        leases = self._context.leases.acquire([name], holder, seconds)
        if not leases:
            return None
        with Holding(self._context.leases, leases[0], seconds) as holding:
            segment, began = self._store.read(lambda tx: _to_evaluate(tx, segment_id))
            if only_if_wanted and not began.is_evaluation_wanted:
                return None
            location, rows, version = self._evaluated(segment, began)
            holding.must_be_held()
            if version == began.evaluation_version:
                return self._store.transact(lambda tx: _nothing_new(tx, segment_id), name="segment evaluate")
            return self._store.transact(
                lambda tx: _accepted(tx, began, location, rows, version), name="segment evaluate", once=True
            )

    def _evaluated(self, segment: Segment, began: Queued) -> tuple[Location, int, int]:
        own = self._settings.tables.get(segment.source_table)
        if own is not None and own.segment_id:
            version, rows = sources.newest_in_place(self._settings, segment.source_table, segment.segment_id)
            location = Location(table=segment.source_table, segment_id=segment.segment_id, version=version)
            if version < began.evaluation_version:
                raise BadInput(
                    f"{segment.source_table} has version {version}, {began.evaluation_version} was evaluated before"
                )
            return location, rows, version
        batches = sources.evaluated(self._settings, segment.source_table, segment.condition, self._settings.batch_rows)
        written = self._snapshots.write(segment.segment_id, batches, "the evaluation")
        metrics.EVALUATIONS.labels("done").inc()
        return written.location, written.rows, began.evaluation_version + 1

    def _fail(self, segment_id: str, reason: str) -> None:
        def work(tx: Transaction) -> None:
            row = queueing.one(tx, segment_id)
            stage = "failed" if row.stage == "evaluation" else row.stage
            queueing.save(tx, row, stage=stage, is_evaluation_wanted=0, reason=reason)

        self._store.transact(work, name="segment evaluate")
        metrics.EVALUATIONS.labels("failed").inc()
        log.error("an evaluation has failed", segment=segment_id, reason=reason)


def want(tx: Transaction, segment_id: str) -> Queued:
    """Ask for an evaluation; a worker does it."""
    _to_evaluate(tx, segment_id)
    return queueing.want_evaluation(tx, segment_id)


def _to_evaluate(tx: Transaction, segment_id: str) -> tuple[Segment, Queued]:
    row = queueing.one(tx, segment_id)
    queueing.must_be_on(row)
    segment = described(tx, [segment_id])[segment_id]
    if not segment.source_table:
        raise Conflict(f"{segment_id} has no table to be evaluated over", hint="Its snapshots are uploaded")
    return segment, row


def _accepted(tx: Transaction, began: Queued, location: Location, rows: int, version: int) -> Queued:
    row = queueing.one(tx, began.segment_id)
    queueing.must_be_on(row)
    if row.evaluation_version != began.evaluation_version:
        raise Overtaken(f"{began.segment_id} was evaluated by somebody else meanwhile")
    return snapshots.take(tx, row, version, location, rows)


def _nothing_new(tx: Transaction, segment_id: str) -> Queued:
    row = queueing.one(tx, segment_id)
    stage = row.stage
    if stage == "evaluation" and row.diff_version == row.evaluation_version:
        stage = "done"
    elif stage == "evaluation" and row.evaluation_version > max(row.diff_version or 0, row.minimal_valid_version - 1):
        stage = "awaiting_diff"  # its diff has failed, and the table may have been mended
    reason = f"its table has no version newer than {row.evaluation_version}" if stage == "evaluation" else row.reason
    return queueing.save(tx, row, is_evaluation_wanted=0, stage=stage, reason=reason)


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, KeyfoldError) else f"{type(error).__name__}: {error}"
