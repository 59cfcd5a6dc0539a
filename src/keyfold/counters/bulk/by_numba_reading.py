"""Reading as a compiled loop: every body is checked whole, and the counters asked for are decoded on the way.

Only the form that we write ourselves is understood, and only packs that are answered as they lie: whatever else a body
holds makes its profile ASIDE, and it is read by protobuf. The few functions that read the wire stand here as well as
in `by_numba`, because Numba keeps what it compiled until the very file changes that it was compiled from.
All unsigned numbers are kept in np.uint64: mixed with a signed one, Numba would turn them into floats.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np

from keyfold.counters.bulk import reading
from keyfold.counters.bulk.columns import Bytes, Floats, Ints, Words

Function = TypeVar("Function", bound=Callable[..., Any])


def _int64(number: int) -> int:
    """For each plain number that is handed to a function, Numba would compile the function anew."""
    return cast(int, np.int64(number))


FLOAT, DOUBLE, FIXED32 = 1, 2, 3
PROFILE_PACK, PACK_IDS, PACK_KEYS = _int64(0x1A), _int64(0x0A), _int64(0x12)
PACK_VALUES, ROW_VALUES = _int64(0x1A), _int64(0x0A)
KIND, GROUP, BIT, IS_TIME = 0, 1, 2, 3  # the columns of `counters`; the bit is 0 where nobody wants the counter
RECORDS_MAX, EXPIRE_SECONDS, IS_TIMED = 0, 1, 2  # the columns of `groups`
CODE_BITS = 32  # a pack is told by its group and, in the lower bits, the wanted counters that stand in it
PACK_BYTES_MIN = 18  # one counter, one key, one value of four bytes

_NONE, _MISSING = _int64(0), _int64(-1)
_REAL = np.uint64(DOUBLE)  # kinds up to this one
_SEVEN, _LOW, _MORE, _HALF, _ZERO = np.uint64(7), np.uint64(0x7F), np.uint64(0x80), np.uint64(32), np.uint64(0)

# See by_numba: no counting of references, no way in from Python.
_INNER: dict[str, Any] = {"nogil": True, "_nrt": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def _compiled(function: Function) -> Function:
    """For what only compiled code calls."""
    return cast(Function, numba.njit(**_INNER)(function))


def _compiled_and_kept(function: Function) -> Function:
    """For what is called from Python: kept on disk with all that it calls."""
    return cast(Function, numba.njit(cache=True, nogil=True)(function))


@_compiled_and_kept
def decode(buffer: Bytes, starts: Ints, ids: Words, counters: Ints, groups: Ints, now: int) -> Any:
    """Of each profile the number of its packs (-1: ASIDE); of each pack its code and number of keys; all numbers.

    The numbers stand one after another, those of a pack together: its keys among the words, then the values of each
    wanted counter by id, real ones among the floats and whole ones among the words.
    """
    profiles, size = len(starts) - 1, starts[-1]
    packs_of = np.empty(profiles, np.int64)
    codes = np.empty(size // PACK_BYTES_MIN + 1, np.int64)
    counts = np.empty(size // PACK_BYTES_MIN + 1, np.int64)
    words = np.empty(size + 1, np.uint64)  # no number takes less than a byte
    floats = np.empty(size // 4 + 1, np.float64)
    places = np.empty(len(ids) + 1, np.int64)
    bits32, bits64 = np.empty(1, np.uint32), np.empty(1, np.uint64)
    box32, box64 = bits32.view(np.float32), bits64.view(np.float64)
    packs, words_at, floats_at = _NONE, _NONE, _NONE
    for profile in range(profiles):
        # What an ASIDE profile has put in is overwritten by the next.
        found, new_words, new_floats = _profile(
            buffer,
            starts[profile],
            starts[profile + 1],
            ids,
            counters,
            groups,
            now,
            codes[packs:],
            counts[packs:],
            words,
            words_at,
            floats,
            floats_at,
            places,
            bits32,
            box32,
            bits64,
            box64,
        )
        packs_of[profile] = found
        if found > 0:
            packs, words_at, floats_at = packs + found, new_words, new_floats
    return packs_of, codes[:packs], counts[:packs], words[:words_at], floats[:floats_at]


@_compiled_and_kept
def listed(
    buffer: Bytes, starts: Ints, ids: Words, counters: Ints, groups: Ints, now: int, members: Words, firsts: Ints
) -> Any:
    """What `decode` finds, a row a number: packs of each profile, then profile, counter, key, value and count of rows.

    `members` are the wanted counters of each group, one after another; `firsts` says where those of a group begin.
    """
    packs_of, codes, counts, words, floats = decode(buffer, starts, ids, counters, groups, now)
    rows = len(floats) + len(words)  # some of the words are keys
    profiles, values = np.empty(rows, np.int64), np.empty(rows, np.float64)
    owners, keys, wholes = np.empty(rows, np.uint64), np.empty(rows, np.uint64), np.empty(rows, np.uint64)
    at, pack, words_at, floats_at = _NONE, _NONE, _NONE, _NONE
    for profile in range(len(packs_of)):
        for _ in range(packs_of[profile]):
            code, count = codes[pack], counts[pack]
            keys_at = words_at
            pack, words_at = pack + 1, words_at + count
            member, bits = firsts[code >> CODE_BITS], code & ((1 << CODE_BITS) - 1)
            while bits:
                if bits & 1:
                    is_real = members[member, 1] <= _REAL
                    for index in range(count):
                        profiles[at], owners[at], keys[at] = profile, members[member, 0], words[keys_at + index]
                        if is_real:
                            values[at], wholes[at] = floats[floats_at + index], _ZERO
                        else:
                            wholes[at] = words[words_at + index]
                            values[at] = np.float64(wholes[at])
                        at += 1
                    if is_real:
                        floats_at += count
                    else:
                        words_at += count
                bits, member = bits >> 1, member + 1
    return packs_of, profiles[:at], owners[:at], keys[:at], values[:at], wholes[:at]


@_compiled
def _profile(
    buffer: Bytes,
    at: int,
    end: int,
    ids: Words,
    counters: Ints,
    groups: Ints,
    now: int,
    codes: Ints,
    counts: Ints,
    words: Words,
    words_at: int,
    floats: Floats,
    floats_at: int,
    places: Ints,
    bits32: Any,
    box32: Any,
    bits64: Words,
    box64: Floats,
) -> Any:
    """The packs of one body; how many are wanted, or -1, and how far the numbers reach."""
    packs, last_group = _NONE, _MISSING
    while at < end:
        at, pack_end = _opened(buffer, at, end, PROFILE_PACK)
        if at < 0:
            return _MISSING, words_at, floats_at
        ids_at, ids_end = _opened(buffer, at, pack_end, PACK_IDS)
        if ids_at < 0:
            return _MISSING, words_at, floats_at
        keys_at, keys_end = _opened(buffer, ids_end, pack_end, PACK_KEYS)
        if keys_at < 0:
            return _MISSING, words_at, floats_at
        rows, group, mask = _counters(buffer, ids_at, ids_end, ids, counters, groups, places)
        if rows < 1 or group <= last_group:
            return _MISSING, words_at, floats_at
        last_group = group
        # Keys that nobody wants are checked all the same, and overwritten.
        count = _keys(buffer, keys_at, keys_end, words, words_at)
        if count < 1 or (mask and count > groups[group, RECORDS_MAX]):
            return _MISSING, words_at, floats_at
        if mask:
            codes[packs], counts[packs] = (group << CODE_BITS) | mask, count
            packs += 1
            words_at += count
        at = keys_end
        for row in range(rows):
            counter = places[row]
            kind = counters[counter, KIND]
            values_at, at = _values(buffer, at, pack_end, kind, count)
            if values_at < 0:
                return _MISSING, words_at, floats_at
            if mask and counters[counter, IS_TIME]:
                oldest = now - groups[group, EXPIRE_SECONDS]
                if oldest > 0 and not _are_live(buffer, values_at, count, oldest):
                    return _MISSING, words_at, floats_at
            if not counters[counter, BIT]:
                continue
            if kind == FLOAT:
                for index in range(count):
                    bits32[0] = _word32(buffer, values_at + 4 * index)
                    floats[floats_at + index] = np.float64(box32[0])
                if not _are_finite(floats, floats_at, count):
                    return _MISSING, words_at, floats_at
                floats_at += count
            elif kind == DOUBLE:
                for index in range(count):
                    bits64[0] = _word64(buffer, values_at + 8 * index)
                    floats[floats_at + index] = box64[0]
                if not _are_finite(floats, floats_at, count):
                    return _MISSING, words_at, floats_at
                floats_at += count
            elif kind == FIXED32:
                for index in range(count):
                    words[words_at + index] = np.uint64(_word32(buffer, values_at + 4 * index))
                words_at += count
            else:
                for index in range(count):
                    words[words_at + index] = _word64(buffer, values_at + 8 * index)
                words_at += count
        if at != pack_end:
            return _MISSING, words_at, floats_at
    return packs, words_at, floats_at


@_compiled
def _counters(buffer: Bytes, at: int, end: int, ids: Words, counters: Ints, groups: Ints, places: Ints) -> Any:
    """Which counters stand in a pack: how many, their group, which are wanted; -1 where they are not of one group."""
    rows, group, mask, last_id, has_time = _NONE, _MISSING, _NONE, _ZERO, False
    while at < end:
        counter_id, at = _varint(buffer, at, end)
        if at < 0 or counter_id <= last_id:
            return _MISSING, group, mask
        last_id = counter_id
        counter = _place(ids, counter_id)
        if counter < 0 or (rows > 0 and counters[counter, GROUP] != group):
            return _MISSING, group, mask
        group = counters[counter, GROUP]
        mask |= counters[counter, BIT]
        has_time |= counters[counter, IS_TIME] != 0
        places[rows] = counter
        rows += 1
    if rows == 0 or (groups[group, IS_TIMED] and not has_time):
        return _MISSING, group, mask
    return rows, group, mask


@_compiled
def _keys(buffer: Bytes, at: int, end: int, words: Words, first: int) -> int:
    """Decode the keys of a pack; how many, or -1 where they are not ascending and in their shortest form."""
    place, last = first, _ZERO
    while at < end:
        key, at = _varint(buffer, at, end)
        if at < 0 or (place > first and key <= last):
            return _MISSING
        words[place] = last = key
        place += 1
    return place - first


@_compiled
def _values(buffer: Bytes, at: int, end: int, kind: int, count: int) -> Any:
    """Where the values of a row lie, and where the row ends; -1 where it is not a whole row of this kind."""
    row_at, row_end = _opened(buffer, at, end, PACK_VALUES)
    if row_at < 0:
        return _MISSING, _MISSING
    kind_at, kind_end = _opened(buffer, row_at, row_end, (kind << 3) | 2)
    if kind_at < 0 or kind_end != row_end:
        return _MISSING, _MISSING
    values_at, values_end = _opened(buffer, kind_at, kind_end, ROW_VALUES)
    width = 4 if kind in (FLOAT, FIXED32) else 8
    if values_at < 0 or values_end != kind_end or values_end - values_at != count * width:
        return _MISSING, _MISSING
    return values_at, row_end


@_compiled
def _are_live(buffer: Bytes, at: int, count: int, oldest: int) -> bool:
    expired = False
    for index in range(count):
        expired |= bool(np.int64(_word32(buffer, at + 4 * index)) < oldest)
    return not expired


@_compiled
def _are_finite(floats: Floats, at: int, count: int) -> bool:
    total = 0.0
    for index in range(count):
        total += floats[at + index] * 0.0  # 0, or not a number from the first that is not finite
    return bool(total == 0.0)


@_compiled
def _place(ids: Words, wanted: np.uint64) -> int:
    """Where a counter stands in the catalog, or -1."""
    low, high = _NONE, len(ids)
    while low < high:
        middle = (low + high) >> 1
        if ids[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low if low < len(ids) and ids[low] == wanted else _MISSING


@_compiled
def _varint(buffer: Bytes, at: int, end: int) -> Any:
    """A number in its shortest form and where it ends; -1 for anything else."""
    byte = np.uint64(buffer[at]) if at < end else _MORE
    if byte < _MORE:
        return byte, at + 1
    number = byte & _LOW
    shift = _SEVEN
    for place in range(at + 1, min(end, at + 10)):
        byte = np.uint64(buffer[place])
        number |= (byte & _LOW) << shift
        if byte < _MORE:
            if byte == 0 or (place == at + 9 and byte > 1):
                return number, -1
            return number, place + 1
        shift += _SEVEN
    return number, -1


@_compiled
def _opened(buffer: Bytes, at: int, end: int, tag: int) -> Any:
    """The start and the end of a field with this tag; -1 where there is none, or it does not fit."""
    if at >= end or buffer[at] != tag:
        return -1, -1
    size, start = _varint(buffer, at + 1, end)
    if start < 0 or size > np.uint64(end - start):
        return -1, -1
    return start, start + np.int64(size)


@_compiled
def _word32(buffer: Bytes, at: int) -> Any:
    return (
        np.uint32(buffer[at])
        | np.uint32(buffer[at + 1]) << np.uint32(8)
        | np.uint32(buffer[at + 2]) << np.uint32(16)
        | np.uint32(buffer[at + 3]) << np.uint32(24)
    )


@_compiled
def _word64(buffer: Bytes, at: int) -> Any:
    return np.uint64(_word32(buffer, at)) | np.uint64(_word32(buffer, at + 4)) << _HALF


assert CODE_BITS == reading.CODE_BITS  # `Plan.shape` takes codes apart
