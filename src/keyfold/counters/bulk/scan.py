"""Finding the packs of many bodies at once, with arrays: every step looks at the same field of all bodies.

Only the form that we write ourselves is understood; a body with anything else in it is marked foreign.
"""

import numpy as np
from msgspec import Struct

from keyfold.counters.bulk import varints
from keyfold.counters.bulk.columns import Bools, Bytes, Ints, Words
from keyfold.counters.bulk.tables import Tables
from keyfold.counters.catalog import Kind

PROFILE_PACK, PACK_IDS, PACK_KEYS, PACK_VALUES, ROW_VALUES = 0x1A, 0x0A, 0x12, 0x1A, 0x0A
WIDTHS = np.array([0, 4, 8, 4, 8], np.int64)


class Scanned(Struct, kw_only=True):
    """The packs of all bodies, by profile and group. `row_at` has a column for each member of a group, -1 for none."""

    profile: Ints
    group: Ints
    key_starts: Ints  # one more than there are packs
    keys: Words
    key_sizes: Ints  # in bytes
    row_at: Ints
    foreign: Bools  # of each body


class _Packs(Struct, kw_only=True):
    """One pack of each of many bodies."""

    profile: Ints
    group: Ints
    keys_at: Ints
    keys_end: Ints
    first_end: Ints  # the place among the ends of varints of its first key
    count: Ints
    row_at: Ints


class Scanner:
    """The buffer with the views and indexes that all steps share."""

    def __init__(self, buffer: Bytes, starts: Ints, tables: Tables) -> None:
        self.buffer = buffer
        self.words = varints.words64(buffer)
        self.tables = tables
        self.at = starts[:-1].copy()
        self.end = starts[1:]
        self.foreign = np.zeros(len(self.at), np.bool_)
        self.last_group = np.full(len(self.at), -1, np.int64)
        self.varint_ends = np.flatnonzero(buffer < 0x80)
        self.columns = int(np.diff(tables.first).max(initial=1))

    def scan(self) -> Scanned:
        steps = []
        active = np.flatnonzero(self.at < self.end)
        if not len(self.tables.ids):  # a catalog without counters knows the form of no body
            self.foreign[active] = True
            active = active[:0]
        while len(active):
            packs = self._packs(active)
            steps.append(packs)
            active = packs.profile[self.at[packs.profile] < self.end[packs.profile]]
        return self._decoded(_joined(steps, self.columns))

    def _packs(self, profile: Ints) -> _Packs:
        """The next pack of each body; bodies where there is none in our form drop out."""
        at, end, good = self._opened(self.at[profile], self.end[profile], PROFILE_PACK)
        ids_at, ids_end, opened = self._opened(at, end, PACK_IDS)
        keys_at, keys_end, opened_keys = self._opened(ids_end, end, PACK_KEYS)
        good &= opened & opened_keys & (ids_at < ids_end) & (keys_at < keys_end)
        good &= self.buffer[keys_end - 1] < 0x80
        good &= self.buffer[ids_end - 1] < 0x80
        self.foreign[profile[~good]] = True
        kept = np.flatnonzero(good)
        profile, end, ids_at, ids_end = profile[kept], end[kept], ids_at[kept], ids_end[kept]
        keys_at, keys_end = keys_at[kept], keys_end[kept]
        first_end = np.searchsorted(self.varint_ends, keys_at)
        count = np.searchsorted(self.varint_ends, keys_end) - first_end
        group, row_at, at, good = self._rows(profile, ids_at, ids_end, keys_end, end, count)
        self.at[profile] = at
        self.last_group[profile] = group
        self.foreign[profile[~good]] = True
        kept = np.flatnonzero(good)
        return _Packs(
            profile=profile[kept],
            group=group[kept],
            keys_at=keys_at[kept],
            keys_end=keys_end[kept],
            first_end=first_end[kept],
            count=count[kept],
            row_at=row_at[kept],
        )

    def _rows(
        self, profile: Ints, ids_at: Ints, ids_end: Ints, at: Ints, end: Ints, count: Ints
    ) -> tuple[Ints, Ints, Ints, Bools]:
        """The rows of each pack, one id after another: the group, where the rows lie, and where the pack ended."""
        tables, size = self.tables, len(profile)
        group = np.full(size, -1, np.int64)
        row_at = np.full((size, self.columns), -1, np.int64)
        at, ids_at = at.copy(), ids_at.copy()
        last = np.full(size, -1, np.int64)
        good = np.ones(size, np.bool_)
        active = np.arange(size)
        while len(active):
            counter, ids_next, fine = self._counters(ids_at[active], ids_end[active])
            fine &= counter > last[active]
            new = group[active] < 0
            group[active] = np.where(new, tables.group[counter], group[active])
            fine &= tables.group[counter] == group[active]
            values_at, next_at, found = self._row(at[active], end[active], counter, count[active])
            fine &= found
            column = tables.slot[counter] - tables.first[group[active]]
            row_at[active[fine], column[fine]] = values_at[fine]
            at[active], ids_at[active], last[active] = next_at, ids_next, counter
            good[active[~fine]] = False
            active = active[fine & (ids_next < ids_end[active])]
        good &= (at == end) & (group > self.last_group[profile])
        timed = np.flatnonzero(tables.time_slot[group] >= 0)
        time_column = tables.time_slot[group[timed]] - tables.first[group[timed]]
        good[timed] &= row_at[timed, time_column] >= 0
        return group, row_at, at, good

    def _counters(self, at: Ints, end: Ints) -> tuple[Ints, Ints, Bools]:
        lengths = varints.lengths_at(self.buffer, self.words, at)
        good = at + lengths <= end
        lengths = np.where(good, lengths, 1)
        ids, short = varints.read(self.buffer, self.words, at, lengths)
        place = np.minimum(np.searchsorted(self.tables.ids, ids), len(self.tables.ids) - 1)
        return place, at + lengths, good & short & (self.tables.ids[place] == ids)

    def _row(self, at: Ints, end: Ints, counter: Ints, count: Ints) -> tuple[Ints, Ints, Bools]:
        """Where the values of one row lie, and where the row ends."""
        kind = self.tables.kinds[counter]
        row_at, row_end, good = self._opened(at, end, PACK_VALUES)
        kind_at, kind_end, opened = self._opened(row_at, row_end, (kind.astype(np.int64) << 3) | 2)
        values_at, values_end, opened_values = self._opened(kind_at, kind_end, ROW_VALUES)
        good &= opened & opened_values & (kind_end == row_end) & (values_end == kind_end)
        good &= values_end - values_at == count * WIDTHS[kind]
        return values_at, row_end, good

    def _opened(self, at: Ints, end: Ints, tag: int | Ints) -> tuple[Ints, Ints, Bools]:
        """Where the contents of a field begin and end, for those that have the field there and whole.

        For the others both are `end`, so that no later step reads beyond the buffer.
        """
        good = (at < end) & (self.buffer[at] == tag)
        start = at + 1
        lengths = varints.lengths_at(self.buffer, self.words, start)
        good &= lengths <= 5  # four gigabytes
        lengths = np.where(good, lengths, 1)
        size, short = varints.read(self.buffer, self.words, start, lengths)
        start = start + lengths
        stop = start + size.view(np.int64)
        good &= short & (stop <= end)
        return np.where(good, start, end), np.where(good, stop, end), good

    def _decoded(self, packs: _Packs) -> Scanned:
        """The packs with their keys, without those of the bodies that turn out to be foreign here."""
        kept = np.flatnonzero(~self.foreign[packs.profile])
        packs = _chosen(packs, kept[np.argsort(packs.profile[kept], kind="stable")])
        key_starts = np.concatenate(([0], np.cumsum(packs.count)))
        place = ranges(packs.first_end, packs.count)
        ends = self.varint_ends[place]
        begins = np.empty_like(ends)
        begins[1:] = ends[:-1] + 1
        begins[key_starts[:-1]] = packs.keys_at
        sizes = ends - begins + 1
        good = sizes <= 10
        keys, short = varints.read(self.buffer, self.words, begins, np.minimum(sizes, 11))
        good &= short
        ascending = np.ones(len(keys), np.bool_)
        ascending[1:] = keys[1:] > keys[:-1]
        ascending[key_starts[:-1]] = True
        good &= ascending
        if not good.all():
            of = np.repeat(packs.profile, packs.count)
            self.foreign[of[~good]] = True
            return self._decoded(packs)
        return Scanned(
            profile=packs.profile,
            group=packs.group,
            key_starts=key_starts,
            keys=keys,
            key_sizes=sizes,
            row_at=packs.row_at,
            foreign=self.foreign,
        )


def ranges(starts: Ints, counts: Ints) -> Ints:
    """start, start + 1, … for each start, `count` of them, one after another."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    places: Ints = np.arange(total) + np.repeat(starts - (ends - counts), counts)
    return places


def _chosen(packs: _Packs, which: Ints) -> _Packs:
    return _Packs(
        profile=packs.profile[which],
        group=packs.group[which],
        keys_at=packs.keys_at[which],
        keys_end=packs.keys_end[which],
        first_end=packs.first_end[which],
        count=packs.count[which],
        row_at=packs.row_at[which],
    )


def _joined(steps: list[_Packs], columns: int) -> _Packs:
    nothing = np.empty(0, np.int64)

    def column(name: str) -> Ints:
        return np.concatenate([nothing, *(getattr(step, name) for step in steps)])

    return _Packs(
        profile=column("profile"),
        group=column("group"),
        keys_at=column("keys_at"),
        keys_end=column("keys_end"),
        first_end=column("first_end"),
        count=column("count"),
        row_at=np.concatenate([np.empty((0, columns), np.int64), *(step.row_at for step in steps)]),
    )


assert list(Kind) == [1, 2, 3, 4]  # the places in WIDTHS
