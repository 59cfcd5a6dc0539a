"""One chunk of a diff in one transaction: sets read, changed, collected, saved under new versions, and announced."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct

from keyfold.core import outbox
from keyfold.core.clock import SECOND_US
from keyfold.core.store import Transaction
from keyfold.core.store.batch import Columns
from keyfold.core.store.shapes import compare_and_set, load
from keyfold.core.topics.registry import Topics
from keyfold.core.topics.topic import Message
from keyfold.segments.difference import Chunk
from keyfold.segments.model import Change, Collector, Entry, Why, departures_after, payload_of
from keyfold.segments.tables import USER_SEGMENTS

SCHEMA = "segments/1"
Fold = Callable[[str], tuple[str, list[tuple[Entry, Why]]]]  # a set before → after, and what it lost


class Applied(Struct, frozen=True):
    """What became of the users of a chunk."""

    changed: int = 0
    entered: int = 0
    left: int = 0
    expired: int = 0
    pushed_out: int = 0


class _Row(Struct, frozen=True, gc=False):
    version: int
    segments: str
    departures: str


_NO_ROW = _Row(0, "", "")


def apply_chunk(tx: Transaction, topics: Topics, topic: str, change: Change, chunk: Chunk) -> Applied:
    """Add or remove one segment for the users of a chunk.

    Right under concurrency by compare-and-set: of two segments that change one user, the second to save runs again on
    what the first has saved. A set that comes out as it was gets no new version and no message, so applying a chunk
    again changes nothing.
    """
    rows = _loaded(tx, chunk.user_ids)
    added, removed = change.added, change.removed
    folds = (
        (user, added if is_added else removed) for user, is_added in zip(chunk.user_ids, chunk.is_added, strict=True)
    )
    return _saved(tx, topics, topic, rows, folds)


def collect_users(
    tx: Transaction, topics: Topics, topic: str, collector: Collector, user_ids: Sequence[str]
) -> Applied:
    """Collect the garbage of users that nothing else touches."""
    fold = collector.collected
    return _saved(tx, topics, topic, _loaded(tx, user_ids), ((user, fold) for user in user_ids))


def _loaded(tx: Transaction, user_ids: Sequence[str]) -> dict[str, _Row]:
    found = load(tx, USER_SEGMENTS, {"user_id": user_ids}, ("version", "segments", "departures"))
    return {user: _Row(*row) for (user,), row in found.items()}


def _saved(
    tx: Transaction, topics: Topics, topic: str, rows: Mapping[str, _Row], folds: Iterator[tuple[str, Fold]]
) -> Applied:
    at = tx.now_us // SECOND_US
    users: list[str] = []
    versions: list[int] = []
    bodies: list[str] = []
    departed: list[str] = []
    messages: list[Message] = []
    entered = 0
    lost: dict[Why, int] = {"left": 0, "expired": 0, "pushed_out": 0}
    for user, fold in folds:
        row = rows.get(user, _NO_ROW)
        body, gone = fold(row.segments)
        if body == row.segments:
            continue
        version = row.version + 1
        users.append(user)
        versions.append(row.version)
        bodies.append(body)
        departed.append(departures_after(row.departures, gone, version, at) if gone else row.departures)
        entered += body.count("\n") + len(gone) - row.segments.count("\n")
        for _, why in gone:
            lost[why] += 1
        messages.append(
            Message(
                key=user,
                version=version,
                event_time_us=tx.now_us,
                schema=SCHEMA,
                payload=payload_of(body, row.segments, gone),
            )
        )
    columns: Columns = {"user_id": users, "version": versions, "segments": bodies, "departures": departed}
    if users:
        compare_and_set(tx, USER_SEGMENTS, columns)
        outbox.put(tx, topics, topic, messages)
    return Applied(len(users), entered, lost["left"], lost["expired"], lost["pushed_out"])
