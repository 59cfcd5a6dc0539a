"""The contract of a topic: what a message is, how the relay publishes, how a consumer fetches."""

import zlib
from collections.abc import Sequence
from typing import Protocol, overload

from msgspec import Struct

FIRST = 0


class TopicSpec(Struct, frozen=True):
    """A topic that a part uses. Its number of partitions is fixed when it is made."""

    name: str
    description: str
    partitions: int | None = None  # None: the setting topics.partitions


class Message(Struct, frozen=True, kw_only=True, gc=False):
    """What a service puts in the outbox. Versions grow per (key, kind); a consumer applies a message if it is newer."""

    key: str
    version: int
    event_time_us: int
    schema: str
    payload: bytes
    kind: str = ""
    route: str | None = None  # what the partition is chosen by, where it is not the key itself


class PayloadOnly(Message, frozen=True, kw_only=True, gc=False):
    """A message of which nothing but the payload was read, because its reader needs nothing else."""

    key: str = ""
    version: int = 0
    event_time_us: int = 0
    schema: str = ""


class Record(Struct, frozen=True, gc=False):
    """A message at its place in a topic."""

    partition: int
    position: int
    message: Message


class Payloads(Sequence[Record]):
    """The payloads of messages that follow one another in a partition, for a reader who needs nothing else of them.

    As records they are made only when they are looked at: of a small message the objects cost more than the bytes.
    """

    __slots__ = ("_partition", "_position", "payloads")

    def __init__(self, partition: int, position: int, payloads: list[bytes]) -> None:
        self._partition = partition
        self._position = position  # of the first
        self.payloads = payloads

    def __len__(self) -> int:
        return len(self.payloads)

    @overload
    def __getitem__(self, at: int) -> Record: ...
    @overload
    def __getitem__(self, at: slice) -> "Payloads": ...
    def __getitem__(self, at: int | slice) -> "Record | Payloads":
        if isinstance(at, int):
            position = range(self._position, self._position + len(self.payloads))[at]
            return Record(self._partition, position, PayloadOnly(payload=self.payloads[at]))
        begin, _, step = at.indices(len(self.payloads))
        if step != 1:
            raise ValueError("only messages that follow one another can be cut out")
        return Payloads(self._partition, self._position + begin, self.payloads[at])


def payloads_of(records: Sequence[Record]) -> list[bytes]:
    return records.payloads if isinstance(records, Payloads) else [record.message.payload for record in records]


class Pending(Struct, frozen=True, gc=False):
    """A message of the outbox that was not published yet; `id` grows in commit order for each key."""

    id: int
    message: Message


class Bounds(Struct, frozen=True):
    """The first position still kept, and the position the next message will get."""

    first: int
    next: int


class Source(Protocol):
    """Where a consumer reads."""

    name: str
    partitions: int

    def identity(self) -> str:
        """Which topic this is; another value under the same name means that it was made anew."""
        ...

    def bounds(self, partition: int) -> Bounds: ...

    def fetch(self, partition: int, position: int, count_max: int, wait_seconds: float) -> Sequence[Record]:
        """Records from `position` on, at most `count_max`; waits up to `wait_seconds` where there are none.

        Raises OffsetGone where `position` lies before what is kept, TopicChanged where it lies after the end.
        """
        ...

    def position_at(self, partition: int, time_us: int) -> int:
        """The first position published at or after a time; the next position where there is none."""
        ...

    def close(self) -> None: ...


class Sink(Protocol):
    """Where the relay publishes messages that live outside the store."""

    name: str
    partitions: int

    def identity(self) -> str: ...

    def publish(self, partition: int, pending: Sequence[Pending]) -> list[int]:
        """Send in order and wait. Returns the positions of the longest acknowledged prefix; never reorders a key.

        Where only a prefix was acknowledged, nothing of the rest may still arrive later from this sink.
        """
        ...

    def close(self) -> None: ...


def partition_of(route: str, partitions: int) -> int:
    """The partition of a key: CRC-32 of its UTF-8 bytes, so that every language finds the same."""
    return zlib.crc32(route.encode()) % partitions
