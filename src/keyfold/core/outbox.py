"""The outbox: a change and its message commit together; the relay publishes it afterwards."""

from collections.abc import Sequence
from operator import attrgetter

from keyfold.core.errors import BadInput
from keyfold.core.store import Transaction
from keyfold.core.store.batch import Columns
from keyfold.core.store.shapes import insert, next_numbers
from keyfold.core.tables import MESSAGES
from keyfold.core.topics.registry import Topics
from keyfold.core.topics.topic import Message, partition_of


def put(tx: Transaction, topics: Topics, topic: str, messages: Sequence[Message]) -> None:
    """Insert the messages of this transaction's changes.

    A message's version comes from state that the transaction has read or locked, so whoever writes the next version
    of a key saw this one committed; ids taken here therefore grow in commit order for each key.
    """
    if not messages:
        return
    partitions = topics.partitions(topic)
    _must_fit(messages, topics)
    ordered = sorted(messages, key=attrgetter("key", "kind", "version"))
    columns: Columns = {
        "topic": [topic] * len(ordered),
        "key": [message.key for message in ordered],
        "kind": [message.kind for message in ordered],
        "version": [message.version for message in ordered],
        "id": next_numbers(tx, "messages", len(ordered)),
        "partition": [partition_of(message.route or message.key, partitions) for message in ordered],
        "schema_name": [message.schema for message in ordered],
        "event_time_us": [message.event_time_us for message in ordered],
        "payload": [message.payload for message in ordered],
        "queued_at_us": [tx.now_us] * len(ordered),
    }
    insert(tx, MESSAGES, columns)
    tx.after_commit.append(lambda: topics.ring(f"pending/{topic}"))


def _must_fit(messages: Sequence[Message], topics: Topics) -> None:
    """Keys are short by nature: their bytes are counted only where they may be too many, at four a character."""
    key_max, payload_max = topics.limits.key_bytes_max, topics.limits.message_bytes_max
    for message in messages:
        if len(message.key) * 4 > key_max and len(message.key.encode()) > key_max:
            raise BadInput(f"the key {message.key[:50]!r}… is longer than {key_max} bytes")
        if (size := len(message.payload)) > payload_max:
            raise BadInput(f"the message of {message.key!r} has {size} bytes, {payload_max} are allowed")
