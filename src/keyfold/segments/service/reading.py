"""What is known of a user: the set, its history within the replay window, and why a segment is or is not in it."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import sqlalchemy as sa
import structlog
from msgspec import Struct

from keyfold.core.clock import SECOND_US
from keyfold.core.store import Store, Transaction
from keyfold.core.store.shapes import load
from keyfold.core.tables import MESSAGES
from keyfold.core.times import iso
from keyfold.segments.model import Departure, Entry, departures_of, entries_of
from keyfold.segments.service import queueing, snapshots
from keyfold.segments.service.snapshots import Snapshot, Snapshots
from keyfold.segments.settings import SegmentsSettings
from keyfold.segments.tables import USER_SEGMENTS

log = structlog.get_logger(__name__)

HISTORY_MAX = 1_000


class UserSet(Struct, frozen=True):
    """The segments of a user in the order of entry; the version rises with every change, 0 means that there was none.

    What has expired since the last change is left out, as the next change would.
    """

    user_id: str
    version: int
    segments: list[Entry]


class Change(Struct, frozen=True):
    """One version of a set: when, what came and went, and the whole set after it."""

    version: int
    at: str
    entered: list[str]
    left: list[str]
    expired: list[str]
    pushed_out: list[str]
    segments: list[Entry]


class Because(Struct, frozen=True):
    """Why a user is, or is not, in a segment.

    `state` is `in`, `expired` (in the set, but no longer valid: gone with the next change), `left`, `pushed_out`, or
    `never` (no trace of it).
    """

    user_id: str
    segment_id: str
    state: Literal["in", "left", "expired", "pushed_out", "never"]
    evaluation_version: int | None  # that put the user in, last
    version: int | None  # of the set, at which it happened
    at: str | None
    in_snapshot: bool | None  # of the version that was diffed last; None where there is none, or it cannot be read
    explanation: str


def read_sets(tx: Transaction, user_ids: Sequence[str]) -> dict[str, UserSet]:
    """The sets of users, each as a reader should see it."""
    rows = load(tx, USER_SEGMENTS, {"user_id": sorted(set(user_ids))}, ("version", "segments"))
    minimal = queueing.minimal_valid_versions(tx) if rows else {}
    found: dict[str, UserSet] = {}
    for user in user_ids:
        version, body = rows.get((user,), (0, ""))
        valid = [each for each in entries_of(body) if each.evaluation_version >= minimal.get(each.segment_id, 0)]
        found[user] = UserSet(user, version, valid)
    return found


class _Message(Struct, frozen=True):
    segments: list[Entry]
    entered: list[str] = []
    left: list[str] = []
    expired: list[str] = []
    pushed_out: list[str] = []


def history(
    tx: Transaction, topic: str, user_id: str, *, before: int | None = None, count_max: int = 100
) -> list[Change]:
    """The versions of a set that the replay window still holds, the newest first."""
    messages = MESSAGES.c
    chosen = sa.select(messages.version, messages.queued_at_us, messages.payload).where(
        messages.topic == topic, messages.key == user_id, messages.kind == ""
    )
    if before is not None:
        chosen = chosen.where(messages.version < before)
    rows = tx.execute(chosen.order_by(messages.version.desc()).limit(min(count_max, HISTORY_MAX)))
    return [_change(row) for row in rows]


def why(store: Store, found: Snapshots, settings: SegmentsSettings, user_id: str, segment_id: str) -> Because:
    """Why a user is or is not in a segment. The snapshot, slow to read, keeps no connection of the store."""
    told, applied = store.read(lambda tx: _known(tx, settings, user_id, segment_id))
    if applied is None:
        return told
    try:
        in_snapshot = found.contains(applied, user_id)
    except Exception as error:  # each engine has its own; what is known without it is told all the same
        log.warning("a snapshot was not read", segment=segment_id, error=str(error))
        return told
    if in_snapshot and told.state == "never":
        told = msgspec.structs.replace(told, explanation=_FORGOTTEN)
    return msgspec.structs.replace(told, in_snapshot=in_snapshot)


def without_versions(told: Because) -> Because:
    """For those who may not see the whole set: its version counts the changes of all segments."""
    explanation = _LEFT if told.state == "left" else told.explanation
    return msgspec.structs.replace(told, version=None, explanation=explanation)


_LEFT = "was no longer in the snapshot"
_FORGOTTEN = "is in the snapshot, but there is no trace of an entry: it left longer ago than is remembered"


def _known(
    tx: Transaction, settings: SegmentsSettings, user_id: str, segment_id: str
) -> tuple[Because, Snapshot | None]:
    """What the store knows, and the snapshot that was applied last."""
    row = queueing.one(tx, segment_id)
    applied = None if row.diff_version is None else snapshots.known(tx, segment_id, row.diff_version)
    return _because(tx, settings, row, user_id), applied


def _because(tx: Transaction, settings: SegmentsSettings, row: queueing.Queued, user_id: str) -> Because:
    segment_id = row.segment_id
    rows = load(tx, USER_SEGMENTS, {"user_id": [user_id]}, ("version", "segments", "departures"))
    _, body, departed = next(iter(rows.values()), (0, "", ""))
    entry = next((each for each in entries_of(body) if each.segment_id == segment_id), None)
    last = next((each for each in reversed(departures_of(departed)) if each.segment_id == segment_id), None)
    if entry is None:
        return _why_not(row, user_id, last)
    change = _when_entered(tx, settings.topic, user_id, segment_id)
    told = Because(
        user_id,
        segment_id,
        "in",
        entry.evaluation_version,
        None if change is None else change.version,
        None if change is None else change.at,
        None,
        f"entered with evaluation {entry.evaluation_version}",
    )
    if entry.evaluation_version >= row.minimal_valid_version:
        return told
    return msgspec.structs.replace(
        told,
        state="expired",
        explanation=f"entered with evaluation {entry.evaluation_version}, which is older than"
        f" {row.minimal_valid_version}, the oldest valid one: it goes with the next change of the set, or with a sweep",
    )


def _why_not(row: queueing.Queued, user_id: str, last: Departure | None) -> Because:
    if last is None:
        if row.diff_version is None:
            words = "no snapshot of the segment has been applied"
        else:
            words = f"was not in the snapshot of evaluation {row.diff_version}, and is not known to have been before"
        return Because(user_id, row.segment_id, "never", None, None, None, None, words)
    reasons = {
        "left": f"{_LEFT} when version {last.version} of the set was made",
        "expired": "the segment was turned off, or its evaluation was no longer valid",
        "pushed_out": "newer segments filled the set, and the oldest made room; it does not come back by itself",
    }
    return Because(
        user_id,
        row.segment_id,
        last.why,
        last.evaluation_version,
        last.version,
        iso(last.at * SECOND_US),
        None,
        reasons[last.why],
    )


def _when_entered(tx: Transaction, topic: str, user_id: str, segment_id: str) -> Change | None:
    for change in history(tx, topic, user_id, count_max=HISTORY_MAX):
        if segment_id in change.entered:
            return change
    return None


def _change(row: Any) -> Change:
    told = msgspec.json.decode(bytes(row.payload), type=_Message)
    return Change(
        row.version, iso(row.queued_at_us), told.entered, told.left, told.expired, told.pushed_out, told.segments
    )
