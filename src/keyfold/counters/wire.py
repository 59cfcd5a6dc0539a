"""The wire form of packs where the protobuf library would copy: fields by their place in the body."""

from collections.abc import Iterator

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from keyfold.counters.errors import BodyUnreadable

Span = tuple[int, int]

VARINT, FIXED64, LENGTH, GROUP, GROUP_END, FIXED32 = 0, 1, 2, 3, 4, 5
# Of each kind of row, by its field, how a value is written that is not packed.
UNPACKED = {1: FIXED32, 2: FIXED64, 3: FIXED32, 4: FIXED64}


class RowPlace(Struct):
    """Where the values of one row lie; `field` is their kind."""

    field: int
    spans: list[Span]


class PackPlace(Struct):
    """Where the parts of one pack lie. A row of a kind that is unknown here is None."""

    counter_ids: NDArray[np.uint64]
    keys: list[Span]
    rows: list[RowPlace | None]


def packs(body: bytes) -> Iterator[PackPlace]:
    """The packs of a profile, and its older single counters as packs of one."""
    for number, kind, start, end in _fields(body, 0, len(body)):
        if number == 3 and kind == LENGTH:
            yield _pack(body, start, end)
        elif number == 4 and kind == LENGTH:
            yield _counter(body, start, end)


def varints(body: bytes, spans: list[Span]) -> NDArray[np.uint64]:
    """Unsigned numbers, seven bits a byte, the least first; decoded for all at once."""
    raw = np.concatenate([np.frombuffer(body, np.uint8, end - start, start) for start, end in spans] or [_NOTHING])
    if not len(raw):
        return np.empty(0, np.uint64)
    if any(body[end - 1] >= 0x80 for start, end in spans if start < end):
        raise BodyUnreadable("a number is cut off")
    last = raw < 0x80
    ends = np.flatnonzero(last)
    starts = np.concatenate(([0], ends[:-1] + 1))
    lengths = ends - starts + 1
    if lengths.max() > 10:
        raise BodyUnreadable("a number is longer than 64 bits")
    places = np.arange(len(raw)) - np.repeat(starts, lengths)
    bits = (raw & 0x7F).astype(np.uint64) << (places * 7).astype(np.uint64)
    return np.add.reduceat(bits, starts)


def fixed(body: bytes, spans: list[Span], dtype: str) -> NDArray[np.generic]:
    """Numbers of a fixed width: a view of the body, unless they were written in several pieces."""
    width = np.dtype(dtype).itemsize
    if any((end - start) % width for start, end in spans):
        raise BodyUnreadable("a value is cut off")
    views = [np.frombuffer(body, dtype, (end - start) // width, start) for start, end in spans]
    return views[0] if len(views) == 1 else np.concatenate(views or [np.empty(0, dtype)])


def text_field(number: int, text: str) -> bytes:
    """A field of text; an empty one is left out, as proto3 does."""
    raw = text.encode()
    return encoded(number << 3 | LENGTH) + encoded(len(raw)) + raw if raw else b""


def number_field(number: int, value: int) -> bytes:
    """A field that is an unsigned number; 0 is left out, as proto3 does."""
    return encoded(number << 3 | VARINT) + encoded(value) if value else b""


def encoded(value: int) -> bytes:
    """An unsigned number, seven bits a byte, the least first."""
    if value < 0x80:
        return _SINGLE[value]
    raw = bytearray()
    while value > 0x7F:
        raw.append(value & 0x7F | 0x80)
        value >>= 7
    raw.append(value)
    return bytes(raw)


def _pack(body: bytes, start: int, end: int) -> PackPlace:
    ids, keys, rows = list[Span](), list[Span](), list[RowPlace | None]()
    for number, kind, first, last in _fields(body, start, end):
        if number == 1 and kind in (VARINT, LENGTH):
            ids.append((first, last))
        elif number == 2 and kind in (VARINT, LENGTH):
            keys.append((first, last))
        elif number == 3 and kind == LENGTH:
            rows.append(_row(body, [(first, last)]))
    return PackPlace(varints(body, ids), keys, rows)


def _counter(body: bytes, start: int, end: int) -> PackPlace:
    """The older form, whose id and values are no lists: of several ids the last counts, values are put together."""
    ids, keys, rows = list[Span](), list[Span](), list[Span]()
    for number, kind, first, last in _fields(body, start, end):
        if number == 1 and kind == VARINT:
            ids = [(first, last)]
        elif number == 2 and kind in (VARINT, LENGTH):
            keys.append((first, last))
        elif number == 3 and kind == LENGTH:
            rows.append((first, last))
    return PackPlace(varints(body, ids) if ids else np.zeros(1, np.uint64), keys, [_row(body, rows)])


def _row(body: bytes, pieces: list[Span]) -> RowPlace | None:
    row: RowPlace | None = None
    for number, kind, first, last in (each for start, end in pieces for each in _fields(body, start, end)):
        if number in UNPACKED and kind == LENGTH:
            if row is None or row.field != number:
                row = RowPlace(number, [])  # the last kind that was written is the one that counts
            of_values = (LENGTH, UNPACKED[number])
            row.spans += [(a, b) for inner, how, a, b in _fields(body, first, last) if inner == 1 and how in of_values]
    return row


def _fields(body: bytes, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """(number, wire type, start and end of its content) of each field of a message."""
    at = start
    while at < end:
        tag, at = _varint(body, at, end)
        number, kind = tag >> 3, tag & 7
        if number == 0:
            raise BodyUnreadable("there is no field 0")
        first, at = _content(body, at, end, kind) if kind != GROUP else (at, _group_end(body, at, end, number))
        yield number, kind, first, at


def _content(body: bytes, at: int, end: int, kind: int) -> Span:
    """Where the content of a field begins and ends, by what stands behind its tag."""
    first = at
    if kind == VARINT:
        _, at = _varint(body, at, end)
    elif kind == LENGTH:
        length, first = _varint(body, at, end)
        at = first + length
    elif kind in (FIXED64, FIXED32):
        at += 8 if kind == FIXED64 else 4
    else:
        raise BodyUnreadable(f"there is no wire type {kind} here")
    if at > end:
        raise BodyUnreadable("a field is cut off")
    return first, at


def _group_end(body: bytes, at: int, end: int, number: int) -> int:
    """Where a group ends, with the groups inside it. We have none: it is a field of a later format."""
    opened = [number]
    while opened:
        tag, at = _varint(body, at, end)
        if tag & 7 == GROUP:
            opened.append(tag >> 3)
        elif tag & 7 != GROUP_END:
            _, at = _content(body, at, end, tag & 7)
        elif opened.pop() != tag >> 3:
            raise BodyUnreadable("a group ends that was not begun")
    return at


def _varint(body: bytes, at: int, end: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            break
        byte = body[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise BodyUnreadable("a number is cut off")


_NOTHING = np.empty(0, np.uint8)
_SINGLE = [bytes((value,)) for value in range(0x80)]
