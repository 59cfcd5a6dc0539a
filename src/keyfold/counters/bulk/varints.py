"""Varints of the protobuf wire, many at once: eight bytes of each are handled as one word."""

import numpy as np

from keyfold.counters.bulk.columns import Bools, Bytes, Ints, Words

_LOW_BITS = np.uint64(0x7F7F7F7F7F7F7F7F)
_STOP_BITS = np.uint64(0x8080808080808080)
_ONE, _TWO, _FOUR = np.uint64(1), np.uint64(2), np.uint64(4)
# How many of the low bytes belong to a varint of a length, and which of them say that more follow.
_BYTES = np.array([(1 << (8 * min(length, 8))) - 1 for length in range(12)], np.uint64)
_MORE = np.array([0x8080808080808080 & ((1 << (8 * min(max(n - 1, 0), 8))) - 1) for n in range(12)], np.uint64)
_LONGER = np.array([1 << (7 * count) for count in range(1, 10)], np.uint64)


def words64(buffer: Bytes) -> Words:
    """The eight bytes at every place of a buffer, as a view."""
    return np.ndarray((max(len(buffer) - 7, 0),), "<u8", buffer.data, 0, (1,))


def words32(buffer: Bytes) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """The four bytes at every place of a buffer, as a view."""
    return np.ndarray((max(len(buffer) - 3, 0),), "<u4", buffer.data, 0, (1,))


def lengths_of(numbers: Words) -> Ints:
    """How many bytes each takes."""
    return np.searchsorted(_LONGER, numbers, side="right") + 1


def lengths_at(buffer: Bytes, words: Words, at: Ints) -> Ints:
    """The length of the varint that begins at each place; 11 where it does not end within ten bytes."""
    stops = ~words[at] & _STOP_BITS
    lengths = (np.bitwise_count((stops & (~stops + _ONE)) - _ONE) // 8 + 1).astype(np.int64)
    if not stops.all():
        long = np.flatnonzero(stops == 0)
        after = at[long] + 8
        lengths[long] = np.where(buffer[after] < 0x80, 9, np.where(buffer[after + 1] < 0x80, 10, 11))
    return lengths


def read(buffer: Bytes, words: Words, at: Ints, lengths: Ints) -> tuple[Words, Bools]:
    """The numbers at places, and which of them are in their shortest form."""
    word = words[at] & _BYTES[lengths] & _LOW_BITS
    word = (word & np.uint64(0x007F007F007F007F)) | ((word & np.uint64(0x7F007F007F007F00)) >> _ONE)
    word = (word & np.uint64(0x00003FFF00003FFF)) | ((word & np.uint64(0x3FFF00003FFF0000)) >> _TWO)
    word = (word & np.uint64(0x000000000FFFFFFF)) | ((word & np.uint64(0x0FFFFFFF00000000)) >> _FOUR)
    good = (lengths == 1) | (buffer[at + lengths - 1] != 0)
    if len(lengths) and int(lengths.max()) > 8:
        long = np.flatnonzero(lengths > 8)
        word[long] |= (buffer[at[long] + 8] & 0x7F).astype(np.uint64) << np.uint64(56)
        longest = long[lengths[long] > 9]
        last = buffer[at[longest] + 9]
        word[longest] |= last.astype(np.uint64) << np.uint64(63)
        good[longest] &= (last == 1) & (lengths[longest] == 10)
    return word, good


def write(buffer: Bytes, words: Words, at: Ints, numbers: Words, lengths: Ints) -> None:
    """Write numbers at ascending places. Up to seven bytes after each are spoilt: what follows is written later."""
    word = numbers & np.uint64(0x00FFFFFFFFFFFFFF)
    word = (word & np.uint64(0x000000000FFFFFFF)) | ((word & np.uint64(0x00FFFFFFF0000000)) << _FOUR)
    word = (word & np.uint64(0x00003FFF00003FFF)) | ((word & np.uint64(0x0FFFC0000FFFC000)) << _TWO)
    word = (word & np.uint64(0x007F007F007F007F)) | ((word & np.uint64(0x3F803F803F803F80)) << _ONE)
    words[at] = word | _MORE[lengths]
    if len(lengths) and int(lengths.max()) > 8:
        long = np.flatnonzero(lengths > 8)
        ninth = ((numbers[long] >> np.uint64(56)) & np.uint64(0x7F)).astype(np.uint8)
        buffer[at[long] + 8] = ninth | np.where(lengths[long] > 9, 0x80, 0).astype(np.uint8)
        longest = long[lengths[long] > 9]
        buffer[at[longest] + 9] = 1
