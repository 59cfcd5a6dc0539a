"""The verbs of the tally, each a batch inside a transaction: state, marks and messages commit together."""

from collections.abc import Sequence

import msgspec

from keyfold.core import outbox
from keyfold.core.errors import VersionStale
from keyfold.core.store import Transaction
from keyfold.core.store.batch import Columns
from keyfold.core.store.shapes import compare_and_set, increment, load
from keyfold.core.topics.registry import Topics
from keyfold.core.topics.topic import Message, Record, TopicSpec
from keyfold.tally.model import Addition, Event, Tally, folded, newer
from keyfold.tally.tables import TALLIES

EVENTS = TopicSpec("tally-events", "additions to tallies, keyed by tally: {add}")
CHANGES = TopicSpec("tally-changes", "every new value of a tally: {key, value, version}")


def add(
    tx: Transaction, topics: Topics, additions: Sequence[Addition], event_versions: dict[str, int] | None = None
) -> dict[str, Tally]:
    """Add to the tallies and announce the new values."""
    sums = folded(additions)
    columns: Columns = {
        "key": list(sums),
        "value": list(sums.values()),
        "version": [1] * len(sums),
        "event_version": [(event_versions or {}).get(key, 0) for key in sums],
    }
    rows = increment(tx, TALLIES, columns, greatest=["event_version"], returning=["value", "version"])
    changed = {key: Tally(key, value, version) for (key,), (value, version) in rows.items()}
    _announce(tx, topics, list(changed.values()))
    return changed


def replace(tx: Transaction, topics: Topics, key: str, value: int, version: int) -> Tally:
    """Set a tally that the caller has seen at `version` (0: not there yet)."""
    found = load(tx, TALLIES, {"key": [key]}, ("version", "event_version"))
    current, event_version = found.get((key,), (0, 0))
    if current != version:
        raise VersionStale(f"the tally {key!r} is at version {current}, not {version}", hint="Read it again")
    row: Columns = {"key": [key], "value": [value], "version": [version], "event_version": [event_version]}
    compare_and_set(tx, TALLIES, row)
    changed = Tally(key, value, version + 1)
    _announce(tx, topics, [changed])
    return changed


def read(tx: Transaction, keys: Sequence[str]) -> dict[str, Tally]:
    """The tallies of the keys; a key that was never changed is at 0."""
    rows = load(tx, TALLIES, {"key": sorted(set(keys))}, ("value", "version"))
    return {key: Tally(key, *rows.get((key,), (0, 0))) for key in keys}


def apply_events(tx: Transaction, topics: Topics, records: Sequence[Record]) -> None:
    """Add what the messages say; a message no newer than the last one of its key changes nothing."""
    messages = [record.message for record in records]
    rows = load(tx, TALLIES, {"key": sorted({message.key for message in messages})}, ("event_version",))
    verdicts = newer(((m.key, m.version) for m in messages), {key: version for (key,), (version,) in rows.items()})
    fresh = [message for message, is_new in zip(messages, verdicts, strict=True) if is_new]
    additions = [Addition(m.key, msgspec.json.decode(m.payload, type=Event).add) for m in fresh]
    add(tx, topics, additions, {message.key: message.version for message in fresh})


def _announce(tx: Transaction, topics: Topics, changed: Sequence[Tally]) -> None:
    encode = msgspec.json.Encoder().encode
    messages = [
        Message(key=t.key, version=t.version, event_time_us=tx.now_us, schema="tally/1", payload=encode(t))
        for t in changed
    ]
    outbox.put(tx, topics, CHANGES.name, messages)
