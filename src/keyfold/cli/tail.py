"""Reading a topic for a person: from a place on, the partitions merged by event time, and on as messages come."""

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from keyfold.cli.signals import Stopping
from keyfold.core.answer import printable
from keyfold.core.times import iso
from keyfold.core.topics.topic import Record, Source

PAGE = 500
IDLE_SECONDS = 0.2
WAIT_SECONDS = 5.0


class Shown(Struct, frozen=True, omit_defaults=True):
    """A message for programs; a payload that is not JSON stands in `payload_base64`."""

    partition: int
    position: int
    key: str
    kind: str
    version: int
    event_time: str
    schema: str
    payload: Any = UNSET
    payload_base64: bytes | UnsetType = UNSET


def shown(record: Record) -> Shown:
    message = record.message
    place = (record.partition, record.position, message.key, message.kind, message.version)
    try:
        payload = msgspec.json.decode(message.payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Shown(*place, iso(message.event_time_us), message.schema, payload_base64=message.payload)
    return Shown(*place, iso(message.event_time_us), message.schema, payload)


def line(record: Record) -> str:
    """A message for people, on one line."""
    message = record.message
    kind = f" {message.kind}" if message.kind else ""
    payload = message.payload.decode(errors="backslashreplace")
    return printable(
        f"{record.partition}/{record.position}  {iso(message.event_time_us)}  {message.key}{kind} v{message.version}"
        f"  {message.schema}  {payload}"
    )


def until_now(source: Source, starts: dict[int, int]) -> Iterator[Record]:
    """What is published at this moment, from the given positions on; moves `starts` along."""
    ends = {partition: source.bounds(partition).next for partition in starts}
    yield from heapq.merge(
        *(_partition(source, partition, starts, ends[partition]) for partition in starts),
        key=lambda record: record.message.event_time_us,
    )


def last(source: Source, starts: dict[int, int], count: int) -> Iterator[Record]:
    """The last `count` messages of these partitions together; sets `starts` behind them."""
    for partition in starts:
        bounds = source.bounds(partition)
        starts[partition] = max(bounds.first, bounds.next - count)
    yield from deque(until_now(source, starts), maxlen=count)


def from_now_on(source: Source, starts: dict[int, int], stopping: Stopping) -> Iterator[Record]:
    """What comes, as it comes, until told to stop."""
    while not stopping.is_set():
        fresh = [record for partition in starts for record in source.fetch(partition, starts[partition], PAGE, 0.0)]
        for record in sorted(fresh, key=lambda record: record.message.event_time_us):
            yield record
        for record in fresh:
            starts[record.partition] = max(starts[record.partition], record.position + 1)
        if not fresh:
            stopping.wait(IDLE_SECONDS)


def _partition(source: Source, partition: int, starts: dict[int, int], end: int) -> Iterator[Record]:
    while starts[partition] < end:
        records = source.fetch(partition, starts[partition], PAGE, WAIT_SECONDS)
        if not records:
            return
        for record in records:
            if record.position >= end:
                return
            starts[partition] = record.position + 1
            yield record
