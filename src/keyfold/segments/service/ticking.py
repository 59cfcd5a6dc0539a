"""One tick: a segment that awaits its diff is streamed twice, first to check and count, then to change the sets.

A tick is a generator that stops after every bounded piece of work, so that whoever runs it can be told to stop. All
that it has done is in the segment's row of the queue, moved first in every transaction under the ticket of its lease:
a tick that dies is taken up where it was.
"""

from collections.abc import Iterator

import msgspec
import structlog
from msgspec import Struct

from keyfold.core.context import Context
from keyfold.core.errors import BadInput, KeyfoldError, LeaseLost, NotFound, Unavailable
from keyfold.core.leases.holding import Holding
from keyfold.core.leases.lease import Lease
from keyfold.core.store import Transaction
from keyfold.segments import metrics
from keyfold.segments.difference import Chunk, Counts, Piece, SnapshotWrong, chunked, difference
from keyfold.segments.model import Change, Collector, Guard
from keyfold.segments.service import queueing, snapshots
from keyfold.segments.service.applying import Applied, apply_chunk
from keyfold.segments.service.describing import Segment, described
from keyfold.segments.service.queueing import NO_DIFF, Checked, Queued, Ticketed
from keyfold.segments.service.snapshots import UNKNOWN, Reading, Snapshot, Snapshots
from keyfold.segments.settings import SegmentsSettings

log = structlog.get_logger(__name__)


class Pair(Struct, frozen=True):
    """What is compared: no old snapshot is an empty one."""

    old: Snapshot | None
    new: Snapshot


class Differ:
    """Runs ticks."""

    def __init__(self, context: Context, settings: SegmentsSettings) -> None:
        self._context = context
        self._store = context.store
        self._settings = settings
        self._snapshots = Snapshots.of(context, settings)

    def next(self, holder: str) -> "Iterator[None] | None":
        """The tick of the segment that waits longest and that nobody is at, or None."""
        names = {lease_name(each): each for each in self._store.read(lambda tx: queueing.waiting(tx, 100))}
        busy = {lease.name for lease in self._context.leases.held(list(names))}
        seconds = self._context.settings.leases.lease_seconds
        for name, segment_id in names.items():
            if name not in busy and (leases := self._context.leases.acquire([name], holder, seconds)):
                return self._tick(segment_id, leases[0])
        return None

    def _tick(self, segment_id: str, lease: Lease) -> Iterator[None]:
        with Holding(self._context.leases, lease, self._context.settings.leases.lease_seconds) as holding:
            tick = Tick(self._context, self._settings, self._snapshots, segment_id, holding)
            yield from tick.run()


class Tick:
    """The diff of one segment under one ticket."""

    def __init__(
        self, context: Context, settings: SegmentsSettings, found: Snapshots, segment_id: str, holding: Holding
    ) -> None:
        self._context = context
        self._store = context.store
        self._settings = settings
        self._snapshots = found
        self._segment_id = segment_id
        self._holding = holding

    def run(self) -> Iterator[None]:
        ticket = self._holding.lease.ticket
        held = self._store.transact(lambda tx: Ticketed.adopt(tx, self._segment_id, ticket), name="segment adopt")
        if held is None:
            return
        try:
            yield from self._diff(held)
        except (LeaseLost, Unavailable):
            raise  # nothing is wrong with the segment
        except (BadInput, NotFound) as error:
            self._fail(held, str(error))
        except Exception as error:
            self._failed_once(held, error)
            raise

    def _diff(self, held: Ticketed) -> Iterator[None]:
        segment, pair = self._store.read(lambda tx: _compared(tx, held.row))
        yield from self._check(held, pair)
        if held.row.stage == "held" or not self._may_go_on(held, segment):
            return
        yield from self._apply(held, pair)
        self._finish(held)

    def _check(self, held: Ticketed, pair: Pair) -> Iterator[None]:
        """The first pass: is everything in order, and what does it come to? Not done again for the same files."""
        row, known, before = held.row, held.row.checked, self._fingerprints(pair)
        if known is not None and (known.target_version, known.old, known.new) == (row.target_version, *before):
            return
        old, new = self._readings(pair, None)
        counts = Counts()
        for piece in self._pieces(old, new, "check"):
            counts = counts.plus(piece)
            yield
        read = (old.fingerprint(), new.fingerprint())
        if any(one not in (UNKNOWN, two) for one, two in zip(before, read, strict=True)):
            raise SnapshotWrong("a snapshot has changed while it was read", hint="Retry it")
        _old_must_be_what_was_applied(row, pair, counts, read[0])
        if not row.chunks:
            self._move(held, counts=_json(Checked(row.target_version or 0, counts, *read)))
        elif known is None or (known.old, known.new) != read:
            raise SnapshotWrong(
                f"a snapshot has changed after {row.chunks} chunks of it were applied", hint=_OFF_AND_ON
            )

    def _may_go_on(self, held: Ticketed, segment: Segment) -> bool:
        """Whether the diff is within what it may do unasked, or somebody has approved it."""
        row, checked = held.row, held.row.checked
        assert checked is not None, "a diff is checked before it is applied"
        if row.chunks or row.approved_version == checked.target_version:
            return True
        share = self._settings.remove_share_max if segment.remove_share_max is None else segment.remove_share_max
        counts = checked.counts
        objection = Guard(share).objection(counts.old_rows, counts.new_rows, counts.removed)
        if objection is None:
            return True
        self._move(held, stage="held", target_version=None, reason=objection)
        metrics.DIFFS.labels("held").inc()
        log.warning("a diff is held", segment=self._segment_id, reason=objection)
        return False

    def _apply(self, held: Ticketed, pair: Pair) -> Iterator[None]:
        """The second pass: from where the last committed chunk ended."""
        checked = held.row.checked
        assert checked is not None
        old, new = self._readings(pair, held.row.upto)
        for chunk in chunked(self._pieces(old, new, "apply"), self._settings.chunk_users_max):
            self._must_be_as_checked(checked, self._fingerprints(pair))
            self._apply_one(held, chunk)
            yield
        self._must_be_as_checked(checked, (old.fingerprint(), new.fingerprint()))

    def _must_be_as_checked(self, checked: Checked, now: tuple[str, str]) -> None:
        if any(one not in (UNKNOWN, two) for one, two in zip(now, (checked.old, checked.new), strict=True)):
            raise SnapshotWrong("a snapshot has changed while it was applied", hint=_OFF_AND_ON)

    def _fingerprints(self, pair: Pair) -> tuple[str, str]:
        return self._snapshots.fingerprint(pair.old), self._snapshots.fingerprint(pair.new)

    def _readings(self, pair: Pair, after: str | None) -> tuple[Reading, Reading]:
        return (
            Reading(self._snapshots, pair.old, "the old snapshot", after),
            Reading(self._snapshots, pair.new, "the new snapshot", after),
        )

    def _apply_one(self, held: Ticketed, chunk: Chunk) -> None:
        self._holding.must_be_held()

        def work(tx: Transaction) -> tuple[Queued, Applied]:
            row = held.step(tx, upto=chunk.upto, chunks=held.row.chunks + 1, tries=0, reason="")
            collector = Collector(queueing.minimal_valid_versions(tx), self._settings.segments_max)
            change = Change(self._segment_id, row.target_version or 0, collector)
            return row, apply_chunk(tx, self._context.topics, self._settings.topic, change, chunk)

        row, applied = self._store.transact(work, name="segment chunk")
        held.stepped(row)
        metrics.CHUNKS.inc()
        for what in ("entered", "left", "expired", "pushed_out"):
            metrics.USERS.labels(what).inc(getattr(applied, what))

    def _finish(self, held: Ticketed) -> None:
        def work(tx: Transaction) -> Queued:
            target = held.row.target_version
            row = held.step(tx)
            stage = "awaiting_diff" if row.evaluation_version > (target or 0) else "done"
            done = queueing.save(
                tx,
                row,
                stage=stage,
                diff_version=target,
                approved_version=None,
                reason="",
                **{**NO_DIFF, "counts": row.counts},
            )
            snapshots.forget(tx, done)
            return done

        done = self._store.transact(work, name="segment finish")
        held.stepped(done)
        metrics.DIFFS.labels("done").inc()
        log.info("a segment was diffed", segment=self._segment_id, version=done.diff_version)

    def _fail(self, held: Ticketed, reason: str) -> None:
        """Nothing that a further try would mend; a diff that was begun stays begun."""
        changes = {} if held.row.chunks else {"target_version": None}
        self._move(held, stage="failed", reason=reason, **changes)
        metrics.DIFFS.labels("failed").inc()
        log.error("a diff has failed", segment=self._segment_id, reason=reason)

    def _failed_once(self, held: Ticketed, error: Exception) -> None:
        tries = held.row.tries + 1
        if tries >= self._settings.tries_max:
            self._fail(held, f"{type(error).__name__}: {error}")
            return
        try:
            self._move(held, tries=tries, reason=f"{type(error).__name__}: {error}")
        except KeyfoldError as again:
            log.warning("a failure was not recorded", segment=self._segment_id, error=str(again))

    def _move(self, held: Ticketed, **changes: object) -> None:
        held.stepped(self._store.transact(lambda tx: held.step(tx, **changes), name="segment step"))

    def _pieces(self, old: Reading, new: Reading, phase: str) -> Iterator[Piece]:
        rows = metrics.ROWS.labels(phase)
        for piece in difference(old.keys(), new.keys()):
            self._holding.must_be_held()
            rows.inc(piece.old_rows + piece.new_rows)
            yield piece


_OFF_AND_ON = "Put it back and retry, or turn the segment off and on"


def lease_name(segment_id: str) -> str:
    return f"segments/{segment_id}"


def _compared(tx: Transaction, row: Queued) -> tuple[Segment, Pair]:
    old = None if row.diff_version is None else snapshots.find(tx, row.segment_id, row.diff_version)
    new = snapshots.find(tx, row.segment_id, row.target_version or 0)
    return described(tx, [row.segment_id])[row.segment_id], Pair(old, new)


def _old_must_be_what_was_applied(row: Queued, pair: Pair, counts: Counts, fingerprint: str) -> None:
    """Whom an old snapshot has lost since it was applied, no diff would ever remove again.

    Files may be restored, with other times, so their rows are compared; of a table, all that was read.
    """
    known = row.checked
    if pair.old is None or known is None:
        return
    is_last = known.target_version == row.diff_version
    applied = (known.counts.new_rows, known.new) if is_last else (known.counts.old_rows, known.old)
    if counts.old_rows != applied[0] or (pair.old.location.table and fingerprint != applied[1]):
        raise SnapshotWrong(
            f"the old snapshot has {counts.old_rows} users that are not the {applied[0]} that were applied",
            hint=_OFF_AND_ON,
        )


def _json(checked: Checked) -> str:
    return msgspec.json.encode(checked).decode()
