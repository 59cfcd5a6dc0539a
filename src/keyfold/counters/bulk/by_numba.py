"""The fold as compiled loops: each profile is scanned, folded and written in one go while it is in the cache.

Numba is optional (the extra `kernels`); `by_numpy` gives the same answers without it. Only the form that we write
ourselves is understood here; whatever else a body holds makes its profile FOREIGN, and it is folded by protobuf.
All unsigned numbers are kept in np.uint64: mixed with a signed one, Numba would turn them into floats.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import numba
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from keyfold.counters.bulk.checks import Checked, check, check_lengths
from keyfold.counters.bulk.columns import (
    FOREIGN,
    NEVER,
    UNCHANGED,
    WRITTEN,
    Bools,
    Bytes,
    Done,
    Floats,
    Ints,
    Updates,
    Words,
    Work,
)
from keyfold.counters.bulk.cores import on_cores, shares
from keyfold.counters.bulk.tables import NO_LIMIT, Tables
from keyfold.counters.model import TIME_MAX, VALUE_MAX

Function = TypeVar("Function", bound=Callable[..., Any])

WEEK_SECONDS = 604_800.0
FLOAT32_MAX = float(np.finfo(np.float32).max)
FLOAT64_MAX = float(np.finfo(np.float64).max)
FLOAT, DOUBLE, FIXED32, FIXED64 = 1, 2, 3, 4


def _int64(number: int) -> int:
    """For each plain number that is handed to a function, Numba would compile the function anew."""
    return cast(int, np.int64(number))


RANKED_MAX = 256  # entries of a group; more of them are sorted
_NONE, _SINGLE, _MISSING = _int64(0), _int64(1), _int64(-1)
BY_MAX_RECORDS, BY_EXPIRE_DAYS = _int64(0), _int64(1)
PROFILE_PACK, PACK_IDS, PACK_KEYS = _int64(0x1A), _int64(0x0A), _int64(0x12)
PACK_VALUES, ROW_VALUES = _int64(0x1A), _int64(0x0A)
GROUP, START, END, FIRST_KEY, COUNT = 0, 1, 2, 3, 4  # the columns of `Stored.packs`
# The columns of `Rows`: a value is real, or whole where its counter is exact; the counter stands above the time.
KEY, VALUE, COUNTER_TIME, ROW_WORDS = 0, 1, 2, 3

_SEVEN = np.uint64(7)
_LOW = np.uint64(0x7F)
_MORE = np.uint64(0x80)
_MIX = np.uint64(0x9E3779B97F4A7C15)
_MIX_GROUP = np.uint64(0xC2B2AE3D27D4EB4F)
_ZERO, _ONE, _HALF, _LOW32 = np.uint64(0), np.uint64(1), np.uint64(32), np.uint64(0xFFFFFFFF)


# Without the counting of references, which took more time than the work (such code may not make arrays), and without
# a way in from Python, which takes long to compile.
_INNER: dict[str, Any] = {"nogil": True, "_nrt": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def _compiled(function: Function) -> Function:
    """For what only compiled code calls."""
    return cast(Function, numba.njit(**_INNER)(function))


def _compiled_and_kept(function: Function) -> Function:
    """For what is called from Python: kept on disk with all that it calls."""
    return cast(Function, numba.njit(cache=True, nogil=True)(function))


class Known(NamedTuple):
    """The tables of the catalog, the way compiled code takes them."""

    ids: Words
    kinds: Ints
    decays: Floats
    group: Ints
    slot: Ints
    members: Ints
    first: Ints
    time_slot: Ints
    records_max: Ints
    expire_seconds: Ints


class Rows(NamedTuple):
    """The rows of the batch, by profile: a row's numbers stand together, since each place is a miss of the cache."""

    words: Words
    reals: Floats  # the same memory


class Stored(NamedTuple):
    """The packs of one profile, and where the rows of each counter lie (-1: nowhere)."""

    packs: Ints  # one row a pack
    pack_of: Ints  # by group, or -1
    row_at: Ints  # by member; of packs that are there only
    keys: Words


class Entries(NamedTuple):
    """The rows of one profile, one entry for each group and key."""

    table: NDArray[np.int32]  # a hash table of entries, from 1
    of_row: NDArray[np.int32]
    key: Words
    group: Ints
    time: Ints
    stored: Ints  # the place of its key in the pack where that is live, or -1
    rows: Ints
    good: Bools  # not dropped
    order: Ints  # by group and key
    begin: Ints  # of each group in `order`


class Kept(NamedTuple):
    """What is left of one group, by key: a stored key as it is, or an entry."""

    stored: Ints
    entry: Ints
    time: Ints
    rank: Words


class Box(NamedTuple):
    """Arrays of one element seen as two types: the only way to turn bits into a float here."""

    bits32: NDArray[np.uint32]
    float32: NDArray[np.float32]
    bits64: Words
    float64: Floats


class Batch(Struct, kw_only=True):
    starts: Ints
    rows: Rows
    known: Known

    def fold(self, work: Work) -> Done:
        own = self.starts[work.begin : work.end + 1]
        buffer, starts, status, expires_at, bill, dropped = _fold_all(
            work.buffer, work.starts, own, self.rows, work.now, self.known
        )
        return Done(buffer=buffer, starts=starts, status=status, expires_at=expires_at, bill=bill, dropped=int(dropped))


def checked(tables: Tables, updates: Updates, profiles: int, now: int, future_seconds_max: int, cores: int) -> Checked:
    """One look at each row; where one is refused or has an owner, or an exact number has to be made, arrays do it."""
    check_lengths(updates)
    length = len(updates.profile)
    if updates.owner is not None or FIXED64 in tables.kinds:
        return check(tables, updates, profiles, now, future_seconds_max, cores)
    profile, counter = np.ascontiguousarray(updates.profile), np.ascontiguousarray(updates.counter)
    value, time = np.ascontiguousarray(updates.value), np.ascontiguousarray(updates.time)
    place, time_latest = np.empty(length, np.int32), min(TIME_MAX, now + future_seconds_max)
    known, parts = _known(tables), shares(length, cores)
    judge = partial(_are_good, profile, counter, value, time, profiles, time_latest, known, tables.read_only, place)
    if not all(on_cores(cores, [partial(judge, begin, end) for begin, end in parts])):
        return check(tables, updates, profiles, now, future_seconds_max, cores)
    return Checked(counter=place, exact=np.empty(0, np.uint64), good=None, owned=np.empty(0, np.int64), refused={})


def gathered(updates: Updates, checked: Checked, profiles: int, tables: Tables, cores: int) -> Batch:
    """A counting sort that moves the rows themselves; each core takes a share of them, in their order."""
    profile, key = np.ascontiguousarray(updates.profile), np.ascontiguousarray(updates.key)
    value, time = np.ascontiguousarray(updates.value), np.ascontiguousarray(updates.time)
    good = checked.good if checked.good is not None else np.empty(0, np.bool_)
    parts = shares(len(profile), cores)
    counts = np.zeros((len(parts), profiles), np.int64)
    on_cores(cores, [partial(_count, profile, good, part[0], part[1], counts[at]) for at, part in enumerate(parts)])
    starts = np.zeros(profiles + 1, np.int64)
    np.cumsum(counts.sum(axis=0), out=starts[1:])
    places = starts[:-1] + np.cumsum(counts, axis=0) - counts
    words = np.empty((int(starts[-1]), ROW_WORDS), np.uint64)  # by NumPy, which asks for large pages
    rows, known = Rows(words, words.view(np.float64)), _known(tables)
    columns = (checked.counter, key, value, checked.exact, time)
    on_cores(
        cores,
        [
            partial(_move, profile, good, part[0], part[1], *columns, known.kinds, places[at], rows)
            for at, part in enumerate(parts)
        ],
    )
    return Batch(starts=starts, rows=rows, known=known)


def _known(tables: Tables) -> Known:
    return Known(
        tables.ids,
        tables.kinds,
        tables.decays,
        tables.group,
        tables.slot,
        tables.members,
        tables.first,
        tables.time_slot,
        tables.records_max,
        tables.expire_seconds,
    )


@_compiled_and_kept
def _are_good(
    profile: Ints,
    counter: Words,
    value: Floats,
    time: Ints,
    profiles: int,
    time_latest: int,
    known: Known,
    read_only: Bools,
    place: NDArray[np.int32],
    begin: int,
    end: int,
) -> bool:
    """Put in the place of each row's counter; False where a row is not as `checks` would have it."""
    last_id, last_place, is_time, bad = _ZERO, _MISSING, False, False
    for row in range(begin, end):
        if counter[row] != last_id or last_place < 0:
            last_id = counter[row]
            last_place = _place(known.ids, _NONE, len(known.ids), last_id)
            if last_place < 0 or read_only[last_place]:
                return False
            is_time = known.kinds[last_place] == FIXED32
        place[row] = last_place
        bad |= (profile[row] < 0) | (profile[row] >= profiles) | (time[row] < 1) | (time[row] > time_latest)
        bad |= (not abs(value[row]) <= VALUE_MAX) | (is_time & (value[row] != 1.0))
    return not bad


@_compiled_and_kept
def _count(profile: Ints, good: Bools, begin: int, end: int, counts: Ints) -> None:
    all_good = len(good) == 0
    for row in range(begin, end):
        if all_good or good[row]:
            counts[profile[row]] += 1


@_compiled_and_kept
def _move(
    profile: Ints,
    good: Bools,
    begin: int,
    end: int,
    counter: NDArray[np.int32],
    key: Words,
    value: Floats,
    exact: Words,
    time: Ints,
    kinds: Ints,
    places: Ints,
    rows: Rows,
) -> None:
    all_good, any_exact = len(good) == 0, len(exact) > 0
    for row in range(begin, end):
        if all_good or good[row]:
            place = places[profile[row]]
            places[profile[row]] = place + 1
            rows.words[place, KEY] = key[row]
            if any_exact and kinds[counter[row]] == FIXED64:
                rows.words[place, VALUE] = exact[row]
            else:
                rows.reals[place, VALUE] = value[row]
            rows.words[place, COUNTER_TIME] = np.uint64(counter[row]) << _HALF | np.uint64(time[row])


# Reading the wire ---------------------------------------------------------------------------------------------------


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


@_compiled
def _all_finite(buffer: Bytes, at: int, count: int, kind: int) -> bool:
    wrong = False
    if kind == FLOAT:
        for index in range(count):
            wrong |= (_word32(buffer, at + 4 * index) & np.uint32(0x7F800000)) == np.uint32(0x7F800000)
    elif kind == DOUBLE:
        for index in range(count):
            wrong |= (_word32(buffer, at + 8 * index + 4) & np.uint32(0x7FF00000)) == np.uint32(0x7FF00000)
    return not wrong


@_compiled
def _width(kind: int) -> int:
    return 4 if kind in (FLOAT, FIXED32) else 8


@_compiled
def _place(numbers: Words, begin: int, count: int, wanted: np.uint64) -> int:
    """Where a number stands among `count` ascending ones, or -1."""
    low, high = begin, begin + count
    while low < high:
        middle = (low + high) >> 1
        if numbers[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low - begin if low < begin + count and numbers[low] == wanted else -1


@_compiled
def _scan(buffer: Bytes, at: int, end: int, known: Known, stored: Stored) -> int:
    """Find the packs of a body and decode their keys; the number of packs, or -1 where the form is not ours."""
    count, keys_count, last_group = _NONE, _NONE, _MISSING
    stored.pack_of[:] = -1
    while at < end:
        pack_start = at
        at, pack_end = _opened(buffer, at, end, PROFILE_PACK)
        if at < 0:
            return -1
        ids_at, ids_end = _opened(buffer, at, pack_end, PACK_IDS)
        if ids_at < 0:
            return -1
        keys_at, keys_end = _opened(buffer, ids_end, pack_end, PACK_KEYS)
        if keys_at < 0:
            return -1
        size = _scan_keys(buffer, keys_at, keys_end, stored.keys, keys_count)
        if size < 1:
            return -1
        group = _scan_rows(buffer, ids_at, ids_end, keys_end, pack_end, size, known, stored.row_at)
        if group <= last_group:
            return -1
        last_group = group
        stored.pack_of[group] = count
        stored.packs[count, GROUP] = group
        stored.packs[count, START] = pack_start
        stored.packs[count, END] = pack_end
        stored.packs[count, FIRST_KEY] = keys_count
        stored.packs[count, COUNT] = size
        keys_count += size
        count += 1
        at = pack_end
    return count


@_compiled
def _scan_keys(buffer: Bytes, at: int, end: int, keys: Words, first: int) -> int:
    """Decode the keys of a pack; how many, or -1 where they are not ascending and in their shortest form."""
    count = first
    while at < end:
        key, at = _varint(buffer, at, end)
        if at < 0 or (count > first and key <= keys[count - 1]):
            return -1
        keys[count] = key
        count += 1
    return count - first


@_compiled
def _scan_rows(
    buffer: Bytes, ids_at: int, ids_end: int, at: int, end: int, size: int, known: Known, row_at: Ints
) -> int:
    """Find the rows of a pack; its group, or -1 where the rows are not those of one group in order."""
    group, last_id = -1, _ZERO
    while ids_at < ids_end:
        counter_id, ids_at = _varint(buffer, ids_at, ids_end)
        if ids_at < 0 or counter_id <= last_id:
            return -1
        last_id = counter_id
        counter = _place(known.ids, _NONE, len(known.ids), counter_id)
        if counter < 0:
            return -1
        if group < 0:
            group = known.group[counter]
            row_at[known.first[group] : known.first[group + 1]] = -1
        values_at, at = _scan_row(buffer, at, end, known.kinds[counter], size)
        if values_at < 0 or known.group[counter] != group:
            return -1
        row_at[known.slot[counter]] = values_at
    if group < 0 or at != end or (known.time_slot[group] >= 0 and row_at[known.time_slot[group]] < 0):
        return -1
    return group


@_compiled
def _scan_row(buffer: Bytes, at: int, end: int, kind: int, size: int) -> Any:
    """Where the values of a row lie, and where the row ends; -1 where it is not a whole row of this kind."""
    row_at, row_end = _opened(buffer, at, end, PACK_VALUES)
    if row_at < 0:
        return -1, -1
    kind_at, kind_end = _opened(buffer, row_at, row_end, (kind << 3) | 2)
    if kind_at < 0 or kind_end != row_end:
        return -1, -1
    values_at, values_end = _opened(buffer, kind_at, kind_end, ROW_VALUES)
    if values_at < 0 or values_end != kind_end or values_end - values_at != size * _width(kind):
        return -1, -1
    if not _all_finite(buffer, values_at, size, kind):
        return -1, -1
    return values_at, row_end


# Writing the wire ---------------------------------------------------------------------------------------------------


@_compiled
def _varint_size(number: np.uint64) -> int:
    size = 1
    while number >= _MORE:
        number >>= _SEVEN
        size += 1
    return size


@_compiled
def _put_varint(out: Bytes, at: int, number: np.uint64) -> int:
    while number >= _MORE:
        out[at] = np.uint8((number & _LOW) | _MORE)
        number >>= _SEVEN
        at += 1
    out[at] = np.uint8(number)
    return at + 1


@_compiled
def _put_open(out: Bytes, at: int, tag: int, size: int) -> int:
    out[at] = tag
    return _put_varint(out, at + 1, np.uint64(size))


@_compiled
def _field_size(size: int) -> int:
    return 1 + _varint_size(np.uint64(size)) + size


@_compiled
def _put32(out: Bytes, at: int, word: np.uint32) -> None:
    out[at] = np.uint8(word)
    out[at + 1] = np.uint8(word >> np.uint32(8))
    out[at + 2] = np.uint8(word >> np.uint32(16))
    out[at + 3] = np.uint8(word >> np.uint32(24))


@_compiled
def _put64(out: Bytes, at: int, word: np.uint64) -> None:
    _put32(out, at, np.uint32(word & _LOW32))
    _put32(out, at + 4, np.uint32(word >> _HALF))


@_compiled_and_kept
def _grown(out: Bytes, used: int, more: int) -> Bytes:
    if used + more <= len(out):
        return out
    larger = np.empty((used + more) * 2, np.uint8)
    larger[:used] = out[:used]
    return larger


# Folding ------------------------------------------------------------------------------------------------------------


@_compiled_and_kept
def _fold_all(buffer: Bytes, starts: Ints, row_starts: Ints, rows: Rows, now: int, known: Known) -> Any:
    profiles, groups = len(starts) - 1, len(known.first) - 1
    body_max, rows_max, columns = _SINGLE, _SINGLE, _SINGLE
    for profile in range(profiles):
        body_max = max(body_max, starts[profile + 1] - starts[profile])
        rows_max = max(rows_max, row_starts[profile + 1] - row_starts[profile])
    for group in range(groups):
        columns = max(columns, known.first[group + 1] - known.first[group])

    out = np.empty(starts[profiles] + 64 * (profiles + 16), np.uint8)
    out_starts = np.zeros(profiles + 1, np.int64)
    status = np.zeros(profiles, np.int8)
    expires_at = np.zeros(profiles, np.int64)
    bill = np.zeros((len(known.ids), 2), np.float64)
    dropped, used = _NONE, _NONE

    stored = Stored(
        np.empty((groups + 1, 5), np.int64),
        np.full(groups, -1, np.int64),
        np.full(len(known.ids), -1, np.int64),
        np.empty(body_max, np.uint64),
    )
    entries = Entries(
        np.zeros(_table_size(rows_max), np.int32),
        np.empty(rows_max, np.int32),
        np.empty(rows_max, np.uint64),
        np.empty(rows_max, np.int64),
        np.empty(rows_max, np.int64),
        np.empty(rows_max, np.int64),
        np.empty(rows_max, np.int64),
        np.empty(rows_max, np.bool_),
        np.empty(rows_max, np.int64),
        np.zeros(groups + 2, np.int64),
    )
    kept = Kept(
        np.empty(body_max + rows_max, np.int64),
        np.empty(body_max + rows_max, np.int64),
        np.empty(body_max + rows_max, np.int64),
        np.empty(body_max + rows_max, np.uint64),
    )
    bits32, bits64 = np.zeros(1, np.uint32), np.zeros(1, np.uint64)
    box = Box(bits32, bits32.view(np.float32), bits64, bits64.view(np.float64))
    values = np.empty(256, np.float64)
    stands = np.zeros(len(known.ids), np.bool_)

    for profile in range(profiles):
        out_starts[profile] = used
        packs = _scan(buffer, starts[profile], starts[profile + 1], known, stored)
        if packs < 0:
            status[profile] = FOREIGN
            continue
        begin, end = row_starts[profile], row_starts[profile + 1]
        count = _gather(rows, begin, end, known, entries)
        good, own_dropped = _judge(buffer, now, count, known, stored, entries)
        if good == 0:
            dropped += own_dropped
            status[profile] = UNCHANGED
            expires_at[profile] = _expiry_of_stored(buffer, packs, known, stored)
            continue
        if count * columns > len(values):
            values = np.empty(count * columns * 2, np.float64)
        stands[:] = False
        _start_values(buffer, count, columns, known, stored, entries, values, box)
        if not _add_rows(rows, begin, end, columns, known, entries, values, stands):
            status[profile] = FOREIGN  # which of the updates is refused is the slow path's to say
            continue
        status[profile] = WRITTEN
        dropped += own_dropped
        _put_in_order(count, groups, entries, kept)
        for group in range(groups):
            pack = stored.pack_of[group]
            if pack < 0 and entries.begin[group] == entries.begin[group + 1]:
                continue
            left, touched = _merge(buffer, now, group, known, stored, entries, kept, stands, bill, box)
            if left > known.records_max[group]:
                left = _cap(buffer, now, group, left, columns, known, stored, entries, values, kept, bill, box)
                touched = True
            if left == 0:
                continue
            expires_at[profile] = max(expires_at[profile], _expiry(group, left, known, kept))
            if touched:
                size = _pack_size(group, left, known, stored, entries, kept, stands)
                out = _grown(out, used, size + 11)
                used = _put_pack(
                    out, used, buffer, group, left, columns, size, known, stored, entries, values, kept, stands, box
                )
            else:
                start, size = stored.packs[pack, START], stored.packs[pack, END] - stored.packs[pack, START]
                out = _grown(out, used, size)
                out[used : used + size] = buffer[start : start + size]
                used += size
    out_starts[profiles] = used
    return out, out_starts, status, expires_at, bill, dropped


@_compiled
def _table_size(rows: int) -> int:
    size = 4
    while size < 2 * rows:
        size *= 2
    return size


@_compiled
def _counter_time(rows: Rows, row: int) -> Any:
    word = rows.words[row, COUNTER_TIME]
    return np.int64(word >> _HALF), np.int64(word & _LOW32)


@_compiled
def _spread(key: np.uint64, group: np.uint64) -> Any:
    """A hash any of whose bits will do: keys come in patterns, high bits alone among them."""
    word = (key ^ (group * _MIX_GROUP)) * _MIX
    word = (word ^ (word >> _HALF)) * _MIX_GROUP
    return word ^ (word >> _HALF)


@_compiled
def _gather(rows: Rows, begin: int, end: int, known: Known, entries: Entries) -> int:
    """Make one entry of the rows of each group and key; how many."""
    size = _table_size(end - begin)
    entries.table[:size] = 0
    mask = np.uint64(size - 1)
    count = 0
    for row in range(begin, end):
        counter, time = _counter_time(rows, row)
        group, key = known.group[counter], rows.words[row, KEY]
        place = _spread(key, np.uint64(group)) & mask
        entry = int(entries.table[place]) - 1
        while entry >= 0 and (entries.key[entry] != key or entries.group[entry] != group):
            place = (place + _ONE) & mask
            entry = int(entries.table[place]) - 1
        if entry < 0:
            entry = count
            count += 1
            entries.table[place] = count
            entries.key[entry] = key
            entries.group[entry] = group
            entries.time[entry] = time
            entries.rows[entry] = 0
        entries.rows[entry] += 1
        entries.time[entry] = max(entries.time[entry], time)
        entries.of_row[row - begin] = entry
    return count


@_compiled
def _judge(buffer: Bytes, now: int, count: int, known: Known, stored: Stored, entries: Entries) -> Any:
    """Find the stored key of each entry and the time it moves to; how many are taken, and how many rows dropped."""
    good, dropped = 0, 0
    for entry in range(count):
        group = entries.group[entry]
        pack, expiry = stored.pack_of[group], known.expire_seconds[group]
        place = -1
        if pack >= 0:
            place = _place(stored.keys, stored.packs[pack, FIRST_KEY], stored.packs[pack, COUNT], entries.key[entry])
        if known.time_slot[group] < 0:
            entries.time[entry] = 0
        elif place >= 0:
            time = _stored_time(buffer, group, place, known, stored)
            if now - time > expiry:
                place = -1
            else:
                entries.time[entry] = max(entries.time[entry], time)
        entries.stored[entry] = place
        entries.good[entry] = now - entries.time[entry] <= expiry
        if entries.good[entry]:
            good += 1
        else:
            dropped += entries.rows[entry]
    return good, dropped


@_compiled
def _start_values(
    buffer: Bytes, count: int, columns: int, known: Known, stored: Stored, entries: Entries, values: Floats, box: Box
) -> None:
    """What each entry has before its rows: the stored values, decayed to its time. Whole numbers lie as their bits."""
    whole = values.view(np.uint64)
    for entry in range(count):
        group, place = entries.group[entry], entries.stored[entry]
        first = known.first[group]
        age = 0
        if place >= 0 and known.time_slot[group] >= 0:
            age = entries.time[entry] - _stored_time(buffer, group, place, known, stored)
        for member in range(first, known.first[group + 1]):
            at, counter = entry * columns + member - first, known.members[member]
            kind = known.kinds[counter]
            if place < 0 or stored.row_at[member] < 0:
                whole[at] = _ZERO
            elif kind in (FLOAT, DOUBLE):
                before = _stored_float(buffer, stored.row_at[member], place, kind, box)
                values[at] = before * _factor(known.decays[counter], age)
            else:
                whole[at] = _stored_whole(buffer, stored.row_at[member], place, kind)


@_compiled
def _add_rows(
    rows: Rows, begin: int, end: int, columns: int, known: Known, entries: Entries, values: Floats, stands: Bools
) -> bool:
    """Add the rows to their entries; False where an exact sum would leave 64 bits."""
    whole = values.view(np.uint64)
    for row in range(begin, end):
        entry = int(entries.of_row[row - begin])
        if not entries.good[entry]:
            continue
        counter, time = _counter_time(rows, row)
        member, kind = known.slot[counter], known.kinds[counter]
        at = entry * columns + member - known.first[entries.group[entry]]
        stands[member] = True
        if kind in (FLOAT, DOUBLE):
            values[at] += rows.reals[row, VALUE] * _factor(known.decays[counter], entries.time[entry] - time)
        elif kind == FIXED32:
            whole[at] = max(whole[at], np.uint64(time))
        else:
            exact = rows.words[row, VALUE]
            whole[at] += exact
            if whole[at] < exact:
                return False
    return True


@_compiled
def _put_in_order(count: int, groups: int, entries: Entries, kept: Kept) -> None:
    """Entries by group, then key."""
    entries.begin[:] = 0
    for entry in range(count):
        entries.begin[entries.group[entry] + 2] += 1
    for group in range(groups):
        entries.begin[group + 2] += entries.begin[group + 1]
    for entry in range(count):
        group = entries.group[entry]
        entries.order[entries.begin[group + 1]] = entry
        entries.begin[group + 1] += 1
    for group in range(groups):
        first, size = entries.begin[group], entries.begin[group + 1] - entries.begin[group]
        if size > RANKED_MAX:
            _sort_by_key(entries.order[first : first + size], entries.key)
        elif size > 1:
            _rank_by_key(entries.order[first : first + size], entries.key, kept)


@_compiled
def _rank_by_key(order: Ints, key: Words, kept: Kept) -> None:
    """Each entry to the place that is the number of smaller keys: no branch to guess, and many compared at a time."""
    size = len(order)
    for index in range(size):
        kept.entry[index] = order[index]
        kept.rank[index] = key[order[index]]
    for index in range(size):
        own, place = kept.rank[index], 0
        for other in range(size):
            place += kept.rank[other] < own
        order[place] = kept.entry[index]


@_compiled
def _sort_by_key(order: Ints, key: Words) -> None:
    """Shell's sort: short, and in place."""
    gap = 1
    while gap < len(order) // 3:
        gap = gap * 3 + 1
    while gap > 0:
        for index in range(gap, len(order)):
            entry, place = order[index], index
            while place >= gap and key[order[place - gap]] > key[entry]:
                order[place] = order[place - gap]
                place -= gap
            order[place] = entry
        gap //= 3


@_compiled
def _merge(
    buffer: Bytes,
    now: int,
    group: int,
    known: Known,
    stored: Stored,
    entries: Entries,
    kept: Kept,
    stands: Bools,
    bill: Floats,
    box: Box,
) -> Any:
    """Stored keys and entries of a group by key, without what has expired; how many, and whether that is news."""
    pack = stored.pack_of[group]
    first_key = stored.packs[pack, FIRST_KEY] if pack >= 0 else 0
    places = stored.packs[pack, COUNT] if pack >= 0 else 0
    at, end = entries.begin[group], entries.begin[group + 1]
    count, place, touched, any_live = _NONE, _NONE, False, False
    while place < places or at < end:
        entry = entries.order[at] if at < end else -1
        key = entries.key[entry] if entry >= 0 else _ZERO
        stored_key = stored.keys[first_key + place] if place < places else _ZERO
        take_stored = place < places and (entry < 0 or stored_key <= key)
        take_entry = entry >= 0 and (place >= places or key <= stored_key)
        if take_stored:
            time = _stored_time(buffer, group, place, known, stored) if known.time_slot[group] >= 0 else 0
            if now - time > known.expire_seconds[group]:
                touched = True
                _charge_stored(buffer, now, group, place, time, BY_EXPIRE_DAYS, known, stored, bill, box)
            else:
                any_live = True
                if not take_entry:
                    kept.stored[count], kept.entry[count], kept.time[count] = place, -1, time
                    count += 1
            place += 1
        if take_entry:
            if entries.good[entry]:
                touched = True
                kept.stored[count], kept.entry[count], kept.time[count] = -1, entry, entries.time[entry]
                count += 1
            at += 1
    # Rows stand in the new pack where they stood in one with a live key; the time counter always does.
    for member in range(known.first[group], known.first[group + 1]):
        stands[member] |= (any_live and stored.row_at[member] >= 0) or member == known.time_slot[group]
    return count, touched


@_compiled
def _cap(
    buffer: Bytes,
    now: int,
    group: int,
    count: int,
    columns: int,
    known: Known,
    stored: Stored,
    entries: Entries,
    values: Floats,
    kept: Kept,
    bill: Floats,
    box: Box,
) -> int:
    """Keep the newest; at equal times the larger key, which is the later place. Returns how many are left."""
    gone = count - known.records_max[group]
    for index in range(count):
        kept.rank[index] = np.uint64(kept.time[index]) << _HALF | np.uint64(index)
    limit = _smallest(kept.rank, count, gone)
    left = 0
    for index in range(count):
        if np.uint64(kept.time[index]) << _HALF | np.uint64(index) >= limit:
            kept.stored[left], kept.entry[left] = kept.stored[index], kept.entry[index]
            kept.time[left] = kept.time[index]
            left += 1
        elif kept.entry[index] >= 0:
            _charge_entry(now, group, kept.entry[index], columns, known, entries, values, bill)
        else:
            place, time = kept.stored[index], kept.time[index]
            _charge_stored(buffer, now, group, place, time, BY_MAX_RECORDS, known, stored, bill, box)
    return left


@_compiled
def _smallest(numbers: Words, count: int, place: int) -> Any:
    """The number that would stand at a place if the first `count` were sorted: Hoare's selection."""
    low, high = 0, count - 1
    while low < high:
        pivot = numbers[(low + high) >> 1]
        left, right = low, high
        while left <= right:
            while numbers[left] < pivot:
                left += 1
            while numbers[right] > pivot:
                right -= 1
            if left <= right:
                numbers[left], numbers[right] = numbers[right], numbers[left]
                left += 1
                right -= 1
        if place <= right:
            high = right
        elif place >= left:
            low = left
        else:
            break
    return numbers[place]


@_compiled
def _charge_stored(
    buffer: Bytes,
    now: int,
    group: int,
    place: int,
    time: int,
    cause: int,
    known: Known,
    stored: Stored,
    bill: Floats,
    box: Box,
) -> None:
    """Times have no weight: of a counter that keeps times, the keys are counted."""
    for member in range(known.first[group], known.first[group + 1]):
        at, counter = stored.row_at[member], known.members[member]
        kind = known.kinds[counter]
        if at < 0:
            continue
        if kind in (FLOAT, DOUBLE):
            value = _stored_float(buffer, at, place, kind, box)
            bill[counter, cause] += value * _factor(known.decays[counter], max(now - time, 0))
        else:
            whole = _stored_whole(buffer, at, place, kind)
            bill[counter, cause] += np.float64(whole if kind == FIXED64 else min(whole, _ONE))


@_compiled
def _charge_entry(
    now: int, group: int, entry: int, columns: int, known: Known, entries: Entries, values: Floats, bill: Floats
) -> None:
    for member in range(known.first[group], known.first[group + 1]):
        at, counter = entry * columns + member - known.first[group], known.members[member]
        kind = known.kinds[counter]
        if member == known.time_slot[group]:
            bill[counter, BY_MAX_RECORDS] += 1.0
        elif kind in (FLOAT, DOUBLE):
            age = max(now - entries.time[entry], 0)
            bill[counter, BY_MAX_RECORDS] += values[at] * _factor(known.decays[counter], age)
        else:
            whole = values.view(np.uint64)[at]
            bill[counter, BY_MAX_RECORDS] += np.float64(whole if kind == FIXED64 else min(whole, _ONE))


@_compiled
def _expiry(group: int, count: int, known: Known, kept: Kept) -> Any:
    if known.expire_seconds[group] == NO_LIMIT:
        return NEVER
    latest = 0
    for index in range(count):
        latest = max(latest, kept.time[index])
    return latest + known.expire_seconds[group]


@_compiled
def _expiry_of_stored(buffer: Bytes, packs: int, known: Known, stored: Stored) -> int:
    latest = 0
    for pack in range(packs):
        group = stored.packs[pack, GROUP]
        if known.expire_seconds[group] == NO_LIMIT:
            return NEVER
        for place in range(stored.packs[pack, COUNT]):
            time = _stored_time(buffer, group, place, known, stored)
            latest = max(latest, time + known.expire_seconds[group])
    return latest


@_compiled
def _pack_size(
    group: int, count: int, known: Known, stored: Stored, entries: Entries, kept: Kept, stands: Bools
) -> int:
    size = _field_size(_ids_size(group, known, stands)) + _field_size(_keys_size(group, count, stored, entries, kept))
    for member in range(known.first[group], known.first[group + 1]):
        if stands[member]:
            values_size = count * _width(known.kinds[known.members[member]])
            size += _field_size(_field_size(_field_size(values_size)))
    return size


@_compiled
def _ids_size(group: int, known: Known, stands: Bools) -> int:
    size = 0
    for member in range(known.first[group], known.first[group + 1]):
        if stands[member]:
            size += _varint_size(known.ids[known.members[member]])
    return size


@_compiled
def _keys_size(group: int, count: int, stored: Stored, entries: Entries, kept: Kept) -> int:
    size = 0
    for index in range(count):
        size += _varint_size(_kept_key(group, index, stored, entries, kept))
    return size


@_compiled
def _kept_key(group: int, index: int, stored: Stored, entries: Entries, kept: Kept) -> Any:
    entry = kept.entry[index]
    if entry >= 0:
        return entries.key[entry]
    return stored.keys[stored.packs[stored.pack_of[group], FIRST_KEY] + kept.stored[index]]


@_compiled
def _put_pack(
    out: Bytes,
    used: int,
    buffer: Bytes,
    group: int,
    count: int,
    columns: int,
    size: int,
    known: Known,
    stored: Stored,
    entries: Entries,
    values: Floats,
    kept: Kept,
    stands: Bools,
    box: Box,
) -> int:
    used = _put_open(out, used, PROFILE_PACK, size)
    used = _put_open(out, used, PACK_IDS, _ids_size(group, known, stands))
    first, last = known.first[group], known.first[group + 1]
    for member in range(first, last):
        if stands[member]:
            used = _put_varint(out, used, known.ids[known.members[member]])
    used = _put_open(out, used, PACK_KEYS, _keys_size(group, count, stored, entries, kept))
    for index in range(count):
        used = _put_varint(out, used, _kept_key(group, index, stored, entries, kept))
    for member in range(first, last):
        if not stands[member]:
            continue
        kind = known.kinds[known.members[member]]
        values_size = count * _width(kind)
        used = _put_open(out, used, PACK_VALUES, _field_size(_field_size(values_size)))
        used = _put_open(out, used, (kind << 3) | 2, _field_size(values_size))
        used = _put_open(out, used, ROW_VALUES, values_size)
        if member == known.time_slot[group]:
            for index in range(count):
                _put32(out, used + 4 * index, np.uint32(kept.time[index]))
        else:
            row_at = stored.row_at[member] if stored.pack_of[group] >= 0 else -1
            _put_values(out, used, buffer, row_at, kind, count, columns, member - first, values, kept, box)
        used += values_size
    return used


@_compiled
def _put_values(
    out: Bytes,
    at: int,
    buffer: Bytes,
    row_at: int,
    kind: int,
    count: int,
    columns: int,
    column: int,
    values: Floats,
    kept: Kept,
    box: Box,
) -> None:
    """A row: the values of entries, rounded here once, and the stored bits of the keys that nothing happened to."""
    whole, width = values.view(np.uint64), _width(kind)
    for index in range(count):
        entry, place = kept.entry[index], kept.stored[index]
        word = _ZERO
        if entry < 0:
            if row_at >= 0:
                word = _stored_whole(buffer, row_at, place, FIXED32 if width == 4 else FIXED64)
        elif kind == FLOAT:
            held = min(max(values[entry * columns + column], -FLOAT32_MAX), FLOAT32_MAX)
            box.float32[0] = np.float32(held)
            word = np.uint64(box.bits32[0])
        elif kind == DOUBLE:
            box.float64[0] = min(max(values[entry * columns + column], -FLOAT64_MAX), FLOAT64_MAX)
            word = box.bits64[0]
        else:
            word = whole[entry * columns + column]
        if width == 4:
            _put32(out, at + 4 * index, np.uint32(word))
        else:
            _put64(out, at + 8 * index, word)


@_compiled
def _factor(decay: float, seconds: int) -> float:
    return np.exp(-decay * seconds / WEEK_SECONDS) if decay != 0.0 and seconds != 0 else 1.0


@_compiled
def _stored_time(buffer: Bytes, group: int, place: int, known: Known, stored: Stored) -> Any:
    return np.int64(_word32(buffer, stored.row_at[known.time_slot[group]] + 4 * place))


@_compiled
def _stored_float(buffer: Bytes, at: int, place: int, kind: int, box: Box) -> float:
    if kind == FLOAT:
        box.bits32[0] = _word32(buffer, at + 4 * place)
        return np.float64(box.float32[0])
    box.bits64[0] = _word64(buffer, at + 8 * place)
    return box.float64[0]  # type: ignore[no-any-return]


@_compiled
def _stored_whole(buffer: Bytes, at: int, place: int, kind: int) -> Any:
    if kind == FIXED32:
        return np.uint64(_word32(buffer, at + 4 * place))
    return _word64(buffer, at + 8 * place)
