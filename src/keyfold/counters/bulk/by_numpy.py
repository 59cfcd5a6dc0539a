"""The fold with arrays: group by group, the rows and the stored keys of all profiles at once.

The same answers as `by_numba`, without a compiler. Only the form that we write ourselves is understood.
"""

from functools import partial
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from keyfold.counters.bulk import varints
from keyfold.counters.bulk.checks import Checked, check
from keyfold.counters.bulk.columns import (
    FOREIGN,
    NEVER,
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
from keyfold.counters.bulk.cores import on_cores
from keyfold.counters.bulk.order import rows_by_profile
from keyfold.counters.bulk.scan import (
    PACK_IDS,
    PACK_KEYS,
    PACK_VALUES,
    PROFILE_PACK,
    ROW_VALUES,
    WIDTHS,
    Scanned,
    Scanner,
    ranges,
)
from keyfold.counters.bulk.tables import NO_LIMIT, Tables
from keyfold.counters.catalog import Kind

WEEK_SECONDS = 604_800.0
LARGEST = {Kind.FLOAT: float(np.finfo(np.float32).max), Kind.DOUBLE: float(np.finfo(np.float64).max)}
EXACT_SAFE = 2.0**64 * (1 - 1e-9)  # a sum in floating point below it is a sum below 2**64

Column = NDArray[np.float64] | NDArray[np.uint64]


class Stored(Struct, kw_only=True):
    """What the bodies hold of one group: keys of all profiles one after another."""

    profile: Ints  # of each pack
    starts: Ints  # of each pack's keys, one more than there are packs
    pack: Ints  # of each key
    keys: Words
    key_sizes: Ints
    times: Ints  # 0 where the group has no time counter
    columns: list[Column]  # by member; 0 where the counter does not stand in the pack
    stands: Bools  # by pack and member


class Entries(Struct, kw_only=True):
    """The rows of one group, one entry for each profile and key."""

    rows: Ints  # by profile and key
    of_row: Ints  # the entry of each of them
    counts: Ints
    profile: Ints
    keys: Words
    times: Ints  # after the fold
    place: Ints  # among the stored keys: its own, or the next
    live: Bools  # the key is stored there, and live
    good: Bools  # not dropped


class Kept(Struct, kw_only=True):
    """What is left of one group after the fold, by profile and key."""

    profile: Ints
    keys: Words
    key_sizes: Ints
    times: Ints
    columns: list[Column]
    stands: Bools  # by profile (all of them) and member


class Overflow(Exception):
    """Exact sums of these profiles may leave 64 bits: which update is refused is the slow path's to say."""

    def __init__(self, profiles: Ints) -> None:
        super().__init__()
        self.profiles = profiles


class Rows(Struct, kw_only=True):
    """The rows that passed the checks, by profile: jumping between rows would be mostly waiting for memory."""

    starts: Ints  # of each profile's rows, one more than there are profiles
    counter: NDArray[np.int32]  # of each row, the place of its counter in the tables
    key: Words
    value: Floats
    exact: Words  # the value of rows of VF_FIXED64 counters; may be empty where there are none
    time: Ints

    def of(self, begin: int, end: int) -> "Rows":
        """Those of some profiles."""
        own = slice(int(self.starts[begin]), int(self.starts[end]))
        return Rows(
            starts=self.starts[begin : end + 1] - self.starts[begin],
            counter=self.counter[own],
            key=self.key[own],
            value=self.value[own],
            exact=self.exact[own],
            time=self.time[own],
        )


class Batch(Struct, kw_only=True):
    starts: Ints
    rows: Rows
    tables: Tables

    def fold(self, work: Work) -> Done:
        rows, barred = self.rows.of(work.begin, work.end), np.zeros(work.end - work.begin, np.bool_)
        while True:
            try:
                # A sum that leaves its kind is held at the largest number; a factor that underflows is 0.
                with np.errstate(over="ignore", under="ignore"):
                    return Fold(work, rows, self.tables, barred).run()
            except Overflow as overflow:
                barred[overflow.profiles] = True


checked = check


def gathered(updates: Updates, checked: Checked, profiles: int, tables: Tables, cores: int) -> Batch:
    starts, order = rows_by_profile(updates.profile, checked.good, profiles)
    columns = (checked.counter, updates.key, updates.value, updates.time)
    counter, key, value, time = on_cores(cores, [partial(_taken, column, order) for column in columns])
    exact = checked.exact[order] if len(checked.exact) else checked.exact
    rows = Rows(starts=starts, counter=counter, key=key, value=value, exact=exact, time=time)
    return Batch(starts=starts, rows=rows, tables=tables)


def _taken(column: NDArray[Any], order: Ints) -> NDArray[Any]:
    return column[order]


class Fold:
    """One run over one buffer of bodies."""

    def __init__(self, work: Work, rows: Rows, tables: Tables, barred: Bools) -> None:
        self.rows, self.tables, self.now = rows, tables, work.now
        self.profiles = len(work.starts) - 1
        self.words = varints.words64(work.buffer)
        self.words32 = varints.words32(work.buffer)
        self.scanned: Scanned = Scanner(work.buffer, work.starts, tables).scan()
        self.foreign = self.scanned.foreign | barred
        self.row_profile = np.repeat(np.arange(self.profiles), np.diff(rows.starts))
        self.bill = np.zeros((len(tables.ids), 2), np.float64)

    def run(self) -> Done:
        groups = self._groups()
        stored = {group: self._stored(group) for group in groups}  # may find more that is foreign
        entries = {group: self._entries(group, stored[group]) for group in groups}
        added = np.zeros(self.profiles, np.bool_)
        dropped = 0
        for each in entries.values():
            added[each.profile[each.good]] = True
            dropped += int(each.counts[~each.good].sum())
        kept = {group: self._kept(group, stored[group], entries[group], added) for group in groups}
        status = np.where(self.foreign, FOREIGN, np.where(added, WRITTEN, 0)).astype(np.int8)
        buffer, starts = self._written(kept)
        return Done(
            buffer=buffer,
            starts=starts,
            status=status,
            expires_at=self._expires_at(stored, kept, added),
            bill=self.bill,
            dropped=dropped,
        )

    def _groups(self) -> list[int]:
        used = np.zeros(len(self.tables.records_max), np.bool_)
        used[self.scanned.group] = True
        if len(self.rows.counter):
            counters = np.bincount(self.rows.counter, minlength=len(self.tables.ids)) > 0
            used[self.tables.group[counters]] = True
        return np.flatnonzero(used).tolist()

    def _members(self, group: int) -> list[int]:
        return self.tables.members[self.tables.first[group] : self.tables.first[group + 1]].tolist()  # type: ignore[no-any-return]

    def _time_column(self, group: int) -> int:
        slot = int(self.tables.time_slot[group])
        return slot - int(self.tables.first[group]) if slot >= 0 else -1

    # What is stored ---------------------------------------------------------------------------------------------

    def _stored(self, group: int) -> Stored:
        scanned = self.scanned
        packs = np.flatnonzero((scanned.group == group) & ~self.foreign[scanned.profile])
        counts = np.diff(scanned.key_starts)[packs]
        starts = np.concatenate(([0], np.cumsum(counts)))
        pack = np.repeat(np.arange(len(packs)), counts)
        within = np.arange(len(pack)) - starts[pack]
        place = ranges(scanned.key_starts[packs], counts)
        columns: list[Column] = []
        wrong = np.zeros(len(packs), np.bool_)
        row_at = scanned.row_at[packs]
        for column, counter in enumerate(self._members(group)):
            values = self._column(row_at[:, column], pack, within, Kind(int(self.tables.kinds[counter])))
            if values.dtype == np.float64 and not np.isfinite(values).all():
                wrong[pack[~np.isfinite(values)]] = True
            columns.append(values)
        if wrong.any():
            self.foreign[scanned.profile[packs[wrong]]] = True
            return self._stored(group)
        time_column = self._time_column(group)
        return Stored(
            profile=scanned.profile[packs],
            starts=starts,
            pack=pack,
            keys=scanned.keys[place],
            key_sizes=scanned.key_sizes[place],
            times=columns[time_column].astype(np.int64) if time_column >= 0 else np.zeros(len(pack), np.int64),
            columns=columns,
            stands=row_at[:, : len(columns)] >= 0,
        )

    def _column(self, row_at: Ints, pack: Ints, within: Ints, kind: Kind) -> Column:
        missing = row_at < 0
        at = np.where(missing, 0, row_at)[pack] + within * np.where(missing, 0, WIDTHS[kind])[pack]
        bits = self.words32[at] if WIDTHS[kind] == 4 else self.words[at]
        if missing.any():
            bits[missing[pack]] = 0
        if kind is Kind.FLOAT:
            return bits.view(np.float32).astype(np.float64)
        return bits.view(np.float64) if kind is Kind.DOUBLE else bits.astype(np.uint64)

    # What comes in ----------------------------------------------------------------------------------------------

    def _entries(self, group: int, stored: Stored) -> Entries:
        given, expiry = self.rows, int(self.tables.expire_seconds[group])
        rows = self._rows(group)
        profile, keys = self.row_profile[rows], given.key[rows]
        first = np.ones(len(rows), np.bool_)
        first[1:] = (keys[1:] != keys[:-1]) | (profile[1:] != profile[:-1])
        heads = np.flatnonzero(first)
        times = np.maximum.reduceat(given.time[rows], heads) if len(heads) else np.empty(0, np.int64)
        if self.tables.time_slot[group] < 0:
            times = np.zeros(len(heads), np.int64)
        profile, keys = profile[heads], keys[heads]
        place, live = _found(stored, profile, keys)
        stored_times = stored.times[place[live]]
        still = self.now - stored_times <= expiry
        live[live] = still
        times[live] = np.maximum(times[live], stored_times[still])
        return Entries(
            rows=rows,
            of_row=np.cumsum(first) - 1,
            counts=np.diff(np.append(heads, len(rows))),
            profile=profile,
            keys=keys,
            times=times,
            place=place,
            live=live,
            good=self.now - times <= expiry,
        )

    def _rows(self, group: int) -> Ints:
        """The rows of a group whose profile is not foreign, by profile and key."""
        chosen = self.tables.group[self.rows.counter] == group
        if self.foreign.any():
            chosen &= ~self.foreign[self.row_profile]
        rows = np.flatnonzero(chosen)
        return rows[_order(self.row_profile[rows], self.rows.key[rows])]

    # The fold ---------------------------------------------------------------------------------------------------

    def _kept(self, group: int, stored: Stored, entries: Entries, added: Bools) -> Kept:
        here = added[stored.profile[stored.pack]]
        live = here & (self.now - stored.times <= int(self.tables.expire_seconds[group]))
        self._charge(group, stored.columns, stored.times, np.flatnonzero(here & ~live), 1)
        stands = np.zeros((self.profiles, len(stored.columns)), np.bool_)
        with_live = np.zeros(len(stored.profile), np.bool_)
        with_live[stored.pack[live]] = True
        stands[stored.profile[with_live]] = stored.stands[with_live]
        if (time_column := self._time_column(group)) >= 0:
            stands[:, time_column] = True
        live[entries.place[entries.live]] = False  # these go on as entries; a live entry is never dropped
        old, new = np.flatnonzero(live), np.flatnonzero(entries.good)
        new_at = np.searchsorted(old, entries.place[new]) + np.arange(len(new))
        is_old = np.ones(len(old) + len(new), np.bool_)
        is_old[new_at] = False
        columns = [
            _merged(is_old, values[old], self._folded(group, column, stored, entries, stands)[new])
            for column, values in enumerate(stored.columns)
        ]
        kept = Kept(
            profile=_merged(is_old, stored.profile[stored.pack[old]], entries.profile[new]),
            keys=_merged(is_old, stored.keys[old], entries.keys[new]),
            key_sizes=_merged(is_old, stored.key_sizes[old], varints.lengths_of(entries.keys[new])),
            times=_merged(is_old, stored.times[old], entries.times[new]),
            columns=columns,
            stands=stands,
        )
        return self._capped(group, kept)

    def _folded(self, group: int, column: int, stored: Stored, entries: Entries, stands: Bools) -> Column:
        """What a counter has for each entry: the stored value decayed to the entry's time, and the rows on top."""
        counter = self._members(group)[column]
        rows = np.flatnonzero((self.rows.counter[entries.rows] == counter) & entries.good[entries.of_row])
        of_row, own = entries.of_row[rows], entries.rows[rows]
        stands[entries.profile[of_row], column] = True
        place = entries.place[entries.live]
        if column == self._time_column(group):
            return entries.times.astype(np.uint64)
        kind = Kind(int(self.tables.kinds[counter]))
        if kind is Kind.FIXED32:
            latest = np.zeros(len(entries.keys), np.uint64)
            latest[entries.live] = stored.columns[column][place]
            np.maximum.at(latest, of_row, self.rows.time[own].astype(np.uint64))
            return latest
        if kind is Kind.FIXED64:
            exact = np.zeros(len(entries.keys), np.uint64)
            exact[entries.live] = stored.columns[column][place]
            added = self.rows.exact[own] if len(own) else np.empty(0, np.uint64)
            rough = exact.astype(np.float64) + np.bincount(of_row, added.astype(np.float64), len(exact))
            if (rough >= EXACT_SAFE).any():
                raise Overflow(entries.profile[rough >= EXACT_SAFE])
            np.add.at(exact, of_row, added)
            return exact
        decay = float(self.tables.decays[counter])
        values = self.rows.value[own] * _factors(decay, entries.times[of_row] - self.rows.time[own])
        age = entries.times[entries.live] - stored.times[place]
        before = stored.columns[column][place] * _factors(decay, age)
        # What is stored comes first, as in the other kernel: where values cancel, the order of a sum shows.
        of_all, all_values = np.append(np.flatnonzero(entries.live), of_row), np.append(before, values)
        total = np.bincount(of_all, all_values, len(entries.keys)).astype(np.float64)  # of nothing it makes integers
        return np.clip(total, -LARGEST[kind], LARGEST[kind])

    def _capped(self, group: int, kept: Kept) -> Kept:
        """Keep the newest by time, then key, up to MaxRecords."""
        most = int(self.tables.records_max[group])
        counts = np.bincount(kept.profile, minlength=self.profiles)
        over = counts > most
        if not over.any():
            return kept
        some = np.flatnonzero(over[kept.profile])
        by_age = np.argsort(kept.profile[some] << 32 | kept.times[some], kind="stable")
        sizes = counts[over]
        rank = np.arange(len(some)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        gone = some[by_age[rank < np.repeat(sizes - most, sizes)]]
        self._charge(group, kept.columns, kept.times, gone, 0)
        left = np.ones(len(kept.keys), np.bool_)
        left[gone] = False
        return Kept(
            profile=kept.profile[left],
            keys=kept.keys[left],
            key_sizes=kept.key_sizes[left],
            times=kept.times[left],
            columns=[values[left] for values in kept.columns],
            stands=kept.stands,
        )

    def _charge(self, group: int, columns: list[Column], times: Ints, gone: Ints, cause: int) -> None:
        """Times have no weight: of a counter that keeps times, the keys are counted."""
        if not len(gone):
            return
        for counter, values in zip(self._members(group), columns, strict=True):
            kind = Kind(int(self.tables.kinds[counter]))
            lost = values[gone]
            if kind is Kind.FIXED32:
                self.bill[counter, cause] += np.count_nonzero(lost)
                continue
            ages = np.maximum(self.now - times[gone], 0)
            self.bill[counter, cause] += float((lost * _factors(float(self.tables.decays[counter]), ages)).sum())

    def _expires_at(self, stored: dict[int, Stored], kept: dict[int, Kept], added: Bools) -> Ints:
        latest = np.zeros(self.profiles, np.int64)
        for group in stored:
            expiry = int(self.tables.expire_seconds[group])
            before, after = stored[group], kept[group]
            of_before = before.profile[before.pack]
            unchanged = ~added[of_before]
            for profile, times in ((of_before[unchanged], before.times[unchanged]), (after.profile, after.times)):
                np.maximum.at(latest, profile, NEVER if expiry == NO_LIMIT else times + expiry)
        return latest

    # The bodies -------------------------------------------------------------------------------------------------

    def _written(self, kept: dict[int, Kept]) -> tuple[Bytes, Ints]:
        packs = [PackWriter(self.tables, self._members(group), each, self.profiles) for group, each in kept.items()]
        starts = np.zeros(self.profiles + 1, np.int64)
        np.cumsum(sum((pack.sizes for pack in packs), np.zeros(self.profiles, np.int64)), out=starts[1:])
        buffer = np.empty(int(starts[-1]) + 16, np.uint8)
        at = starts[:-1].copy()
        for pack in packs:
            pack.write(buffer, at)
            at += pack.sizes
        return buffer, starts


class PackWriter:
    """The packs of one group: sizes from the inside out, then the bytes, keys before all else since they spill."""

    def __init__(self, tables: Tables, members: list[int], kept: Kept, profiles: int) -> None:
        self.kept = kept
        self.counts = np.bincount(kept.profile, minlength=profiles)
        self.there = self.counts > 0
        self.ids = [int(tables.ids[counter]) for counter in members]
        self.kinds = [Kind(int(tables.kinds[counter])) for counter in members]
        self.stands = kept.stands & self.there[:, None]
        self.ids_size = sum(
            (self.stands[:, column] * len(_varint(each)) for column, each in enumerate(self.ids)),
            np.zeros(profiles, np.int64),
        )
        self.keys_size = np.bincount(kept.profile, kept.key_sizes, profiles).astype(np.int64)
        self.row_sizes = [
            self.stands[:, column] * _field(_field(_field(self.counts * WIDTHS[kind])))
            for column, kind in enumerate(self.kinds)
        ]
        self.inner = _field(self.ids_size) + _field(self.keys_size) + sum(self.row_sizes, np.int64(0))
        self.sizes = np.where(self.there, _field(self.inner), 0)

    def write(self, buffer: Bytes, at: Ints) -> None:
        words, words32 = varints.words64(buffer), varints.words32(buffer)
        there = np.flatnonzero(self.there)
        head = at + 1 + _length(self.inner)
        keys_at = head + _field(self.ids_size)
        self._write_keys(buffer, words, keys_at + 1 + _length(self.keys_size))
        _open(buffer, at[there], PROFILE_PACK, self.inner[there])
        _open(buffer, head[there], PACK_IDS, self.ids_size[there])
        _open(buffer, keys_at[there], PACK_KEYS, self.keys_size[there])
        self._write_ids(buffer, head + 1 + _length(self.ids_size))
        row_at = keys_at + _field(self.keys_size)
        for column, kind in enumerate(self.kinds):
            self._write_row(buffer, words32 if WIDTHS[kind] == 4 else words, row_at, column, kind)
            row_at = row_at + self.row_sizes[column]

    def _write_keys(self, buffer: Bytes, words: Words, at: Ints) -> None:
        kept = self.kept
        ends = np.cumsum(kept.key_sizes)
        before = np.cumsum(self.keys_size) - self.keys_size
        places = ends - kept.key_sizes - before[kept.profile] + at[kept.profile]
        varints.write(buffer, words, places, kept.keys, kept.key_sizes)

    def _write_ids(self, buffer: Bytes, at: Ints) -> None:
        for column, each in enumerate(self.ids):
            stands = np.flatnonzero(self.stands[:, column])
            for offset, byte in enumerate(_varint(each)):
                buffer[at[stands] + offset] = byte
            at = at + self.stands[:, column] * len(_varint(each))

    def _write_row(self, buffer: Bytes, words: NDArray[np.uint32] | Words, at: Ints, column: int, kind: Kind) -> None:
        stands = self.stands[:, column]
        size = self.counts * WIDTHS[kind]
        kind_at = at + 1 + _length(_field(_field(size)))
        values_at = kind_at + 1 + _length(_field(size))
        some = np.flatnonzero(stands)
        _open(buffer, at[some], PACK_VALUES, _field(_field(size))[some])
        _open(buffer, kind_at[some], (kind << 3) | 2, _field(size)[some])
        _open(buffer, values_at[some], ROW_VALUES, size[some])
        profile = self.kept.profile
        first = np.cumsum(self.counts) - self.counts
        places = (values_at + 1 + _length(size) - first * WIDTHS[kind])[profile] + np.arange(len(profile)) * WIDTHS[
            kind
        ]
        bits = _bits(self.kept.columns[column], kind)
        if stands[self.there].all():
            words[places] = bits
        else:
            chosen = stands[profile]
            words[places[chosen]] = bits[chosen]


def _found(stored: Stored, profile: Ints, keys: Words) -> tuple[Ints, Bools]:
    """Where each key stands among the stored keys of its profile, or would stand; and whether it does."""
    pack = np.searchsorted(stored.profile, profile)
    known = np.append(stored.profile, -1)[pack] == profile
    low = stored.starts[pack]
    end = np.where(known, stored.starts[np.minimum(pack + 1, len(stored.profile))], low)
    high = end.copy()
    active = np.flatnonzero(low < high)
    while len(active):
        middle = (low[active] + high[active]) >> 1
        below = stored.keys[middle] < keys[active]
        low[active] = np.where(below, middle + 1, low[active])
        high[active] = np.where(below, high[active], middle)
        active = active[low[active] < high[active]]
    found = low < end
    found[found] = stored.keys[low[found]] == keys[found]
    return low, found


def _order(profile: Ints, keys: Words) -> Ints:
    """By profile, then key, then place; in one word where they fit, since one word is sorted many times quicker."""
    if not len(keys):
        return np.empty(0, np.int64)
    row_bits = len(keys).bit_length()
    key_bits = int(keys.max()).bit_length()
    if row_bits + key_bits + int(profile[-1]).bit_length() > 64:
        return np.lexsort((keys, profile))
    word = (profile.astype(np.uint64) << np.uint64(key_bits)) | keys
    word = (word << np.uint64(row_bits)) | np.arange(len(keys), dtype=np.uint64)
    word.sort()
    return (word & np.uint64((1 << row_bits) - 1)).view(np.int64)


def _factors(decay: float, seconds: Ints) -> Floats | float:
    return np.exp(-decay * seconds / WEEK_SECONDS) if decay else 1.0


def _merged(is_old: Bools, old: NDArray[Any], new: NDArray[Any]) -> NDArray[Any]:
    if not len(new):
        return old
    merged = np.empty(len(is_old), old.dtype)
    merged[is_old] = old
    merged[~is_old] = new
    return merged


def _bits(values: Column, kind: Kind) -> NDArray[np.uint32] | Words:
    if kind is Kind.FLOAT:
        return values.astype(np.float32).view(np.uint32)
    return values.astype(np.uint32) if kind is Kind.FIXED32 else values.view(np.uint64)


def _length(sizes: Ints) -> Ints:
    return varints.lengths_of(sizes.astype(np.uint64))


def _field(sizes: Ints) -> Ints:
    return 1 + _length(sizes) + sizes


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def _open(buffer: Bytes, at: Ints, tag: int, sizes: Ints) -> None:
    """Write a tag and a size, byte by byte: what follows may be there already."""
    buffer[at] = tag
    rest = sizes
    at = at + 1
    while len(at):
        more = rest >= 0x80
        buffer[at] = (rest & 0x7F) | (more << 7)
        at, rest = at[more] + 1, rest[more] >> 7
