"""`Counters` looks things up in a profile; `MutableCounters` also updates, cleans up, merges and serialises it.

Both decode a group of counters when it is first asked for, and keep what they decoded. What they do not know
(counters of a later catalog, kinds and fields of a later format) passes through a read-modify-write unharmed.
"""

import math
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from msgspec import Struct

from keyfold.counters.catalog import UINT64_MAX, Catalog, Counter, Group, Kind
from keyfold.counters.errors import CounterOverflow, KindUnknown, ValueNotFinite
from keyfold.counters.messages_pb2 import CounterPack, Profile, ValueType
from keyfold.counters.model import (
    FUTURE_SECONDS_MAX,
    NEVER,
    Number,
    decayed,
    is_live,
    must_be_update,
    storable,
    survivors,
)
from keyfold.counters.packs import Row, fill, parsed, whole_rows


class Value(NamedTuple):
    """What a counter says of a key: its value as of `time`, the key's latest time (None: nothing keeps its time)."""

    value: Number
    time: int | None


class Table(Struct):
    """One group of a profile, decoded: the time of each key, and the values of each counter that was ever written."""

    times: dict[int, int]
    values: dict[int, dict[int, Number]]


IsOwn = Callable[[int, ValueType], bool]

# Of each counter, what it lost, by the reason: an index into its entry.
Bill = dict[int, list[float]]
TO_MAX_RECORDS, TO_EXPIRE_DAYS = 0, 1


class Counters:
    """Look-ups in one profile as of `now`: an expired key is not there, whether cleanup ran or not."""

    def __init__(self, catalog: Catalog, body: bytes = b"", now: int = 0) -> None:
        self.catalog = catalog
        self.now = now
        self._body = body
        self._profile = parsed(body) if body else Profile()
        self._rows: dict[int, Row] | None = None
        self._later: set[int] = set()  # counters of the catalog that are stored in a kind of a later version
        self._tables: dict[int, Table] = {}

    def get(self, counter: int | str, key: int, *, at: int | None = None) -> Number:
        """The value of a key as of its latest time, or decayed to `at`; 0 where there is none."""
        found = self.find(counter, key, at=at)
        return found.value if found else 0

    def find(self, counter: int | str, key: int, *, at: int | None = None) -> Value | None:
        described = self.catalog[counter]
        group = self.catalog.group_of(described.id)
        table = self._table(group)
        if not self._is_there(group, table, key):
            return None
        return _value(described, group, table, key, at)

    def items(self, counter: int | str, *, at: int | None = None) -> Iterator[tuple[int, Value]]:
        """Every live key with its value, by key. A key that only a sibling wrote is there with 0."""
        described = self.catalog[counter]
        group = self.catalog.group_of(described.id)
        table = self._table(group)
        for key in self.keys(group):
            yield key, _value(described, group, table, key, at)

    def keys(self, group: Group) -> list[int]:
        """The live keys of a group, ascending."""
        table = self._table(group)
        if group.expire_seconds is None:
            return sorted(table.times)
        oldest = self.now - group.expire_seconds
        return sorted(key for key, time in table.times.items() if time >= oldest)

    def counter_ids(self, group: Group) -> list[int]:
        """The counters of a group that this profile has, by id."""
        return sorted([*self._table(group).values, *([group.time.id] if group.time else [])])

    def groups(self) -> Iterator[Group]:
        """The groups that this profile has something of."""
        present = {self.catalog.group_of(each).id for each in self._known_rows()} | set(self._tables)
        for group_id in sorted(present):
            if self._table(self.catalog.groups[group_id]).times:
                yield self.catalog.groups[group_id]

    def column(self, counter: Counter, group: Group, keys: Collection[int], at: int | None = None) -> list[Number]:
        """The values of a counter for the keys, in their order."""
        table = self._table(group)
        if counter is group.time:
            return [table.times[key] for key in keys]
        column = table.values.get(counter.id, {})
        if at is None or not counter.decay:
            return [column.get(key, 0) for key in keys]
        return [decayed(column.get(key, 0), counter.decay, max(at - table.times[key], 0)) for key in keys]

    def _is_there(self, group: Group, table: Table, key: int) -> bool:
        time = table.times.get(key)
        return time is not None and is_live(group, time, self.now)

    def _known_rows(self) -> dict[int, Row]:
        if self._rows is None:
            found = list(whole_rows(self._profile, self.catalog))
            self._rows = {row.counter_id: row for row in found if row.kind}
            self._later = {row.counter_id for row in found if not row.kind}
        return self._rows

    def _table(self, group: Group) -> Table:
        table = self._tables.get(group.id)
        if table is None:
            table = self._tables[group.id] = self._decoded(group)
        return table

    def _decoded(self, group: Group) -> Table:
        found = self._known_rows()
        if self._is_opaque(group):
            return Table({}, {})  # a time of 0 would be an invented one
        values = {c.id: _column(c, found[c.id]) for c in group.values if c.id in found}
        times = _column(group.time, found[group.time.id]) if group.time and group.time.id in found else {}
        for column in values.values():
            for key in column:
                times.setdefault(key, 0)  # a value without its time is as old as can be
        return Table({key: int(time) for key, time in times.items()}, values)

    def _is_opaque(self, group: Group) -> bool:
        """Whether the times of a group are in a kind of a later version.

        Then nobody here knows what has expired: it is not read, and keeps its packs as they are.
        """
        return group.time is not None and group.time.id in self._later


class MutableCounters(Counters):
    """A profile that can be changed; `bill` is the weight, decayed to the moment, that each counter lost, by reason."""

    def __init__(
        self, catalog: Catalog, body: bytes = b"", now: int = 0, *, future_seconds_max: int = FUTURE_SECONDS_MAX
    ) -> None:
        super().__init__(catalog, body, now)
        self._known_rows()  # a profile that breaks an invariant is refused before anything is added to it
        self._future_seconds_max = future_seconds_max
        self._changed = False
        self._live: set[int] = set()  # groups without an expired key: their keys are looked at once, not at each update
        self.bill: Bill = {}
        self.dropped = 0

    def update(self, counter: int | str, key: int, value: Number, time: int) -> bool:
        """Add a value at a time. False: the event is older than the expiry and its key is not live."""
        described = self.catalog[counter]
        must_be_update(described, key, value, time, self.now, self._future_seconds_max)
        return self.fold(described, key, value, time)

    def fold(self, described: Counter, key: int, value: Number, time: int) -> bool:
        """Add what was checked before, whatever the catalog now says of who may write it."""
        group = self.catalog.group_of(described.id)
        table = self._table(group)
        self._must_be_writable(group, described)
        if group.time is None:
            self._add(described, table, key, value, time, 0)
            table.times.setdefault(key, 0)
            return True
        latest = table.times.get(key)
        if latest is not None and not is_live(group, latest, self.now):
            latest = None
        if latest is None and not is_live(group, time, self.now):
            self.dropped += 1
            return False
        self._expire_once(group)
        moved = max(time, latest or 0)
        self._add(described, table, key, value, time, moved, latest)
        if latest is not None and moved > latest:
            self._decay_siblings(group, table, key, moved - latest, described)
        table.times[key] = moved
        return True

    def cleanup(self, now: int | None = None, enforce_max_records: bool = True) -> None:
        """Forget expired keys, and the oldest above `MaxRecords`."""
        self.now = self.now if now is None else now
        self._live.clear()
        for group in list(self.groups()):
            table = self._table(group)
            self._expire(group)
            if enforce_max_records and group.records_max is not None and len(table.times) > group.records_max:
                kept = survivors(table.times, group.records_max)
                self._lose(group, table, [key for key in table.times if key not in kept], TO_MAX_RECORDS)

    def absorb(self, other: Counters, *, glued_only: bool = True) -> None:
        """Add another profile of the same person: times maxed, values decayed to the later time and summed."""
        gifts = [gift for group in other.groups() if (gift := self._gift(other, group, glued_only))]
        for gift in gifts:  # before anything is added: a merge is refused whole
            self._must_be_writable(gift.group, *gift.members)
        for gift in gifts:
            self._expire_once(gift.group)
            for key in gift.keys:
                self._absorb_key(gift.group, gift.members, gift.table, key)

    def absorb_update(self, described: Counter, key: int, value: Number, time: int) -> None:
        """Add an update to a merge, which is only read: as in `absorb`, a sum stays at the largest number."""
        if described.kind is Kind.FIXED64:
            value = min(value, UINT64_MAX - self.get(described.id, key))
        if self.fold(described, key, value, time) and described.kind in (Kind.FLOAT, Kind.DOUBLE):
            column = self._table(self.catalog.group_of(described.id)).values[described.id]
            column[key] = storable(column[key], described.kind)

    def serialise(self) -> bytes:
        """The body to store. What this version does not know keeps its pack, its keys and its bytes."""
        if not self._changed:
            return self._body
        profile = Profile()
        profile.CopyFrom(self._profile)
        extras = _take_out(profile, self._is_own)
        for group in self.groups():
            self._pack(group, extras, profile.packed_counters.add())
        return profile.SerializeToString(deterministic=True)

    @property
    def expires_at(self) -> int:
        """The second after which every key has expired; 0 for an empty profile."""
        if self._later and any(map(self._is_opaque, self.catalog.groups.values())):
            return NEVER
        latest = 0
        for group in self.groups():
            if group.expire_seconds is None:
                return NEVER
            latest = max(latest, max(self._table(group).times.values()) + group.expire_seconds)
        return latest

    def _gift(self, other: Counters, group: Group, glued_only: bool) -> "_Gift | None":
        """What another profile has to add to a group, as of our own `now`."""
        if glued_only and group.time is not None and group.time.not_glued:
            return None
        theirs = other._table(group)
        members = [c for c in group.values if c.id in theirs.values and not (glued_only and c.not_glued)]
        keys = [key for key in other.keys(group) if is_live(group, theirs.times[key], self.now)]
        return _Gift(group, members, theirs, keys) if keys and (group.time is not None or members) else None

    def _must_be_writable(self, group: Group, *counters: Counter) -> None:
        """The kind of a counter never changes silently, and a second row of its id would break the profile."""
        if not self._later:
            return
        for counter in (*counters, *((group.time,) if group.time else ())):
            if counter.id in self._later:
                raise KindUnknown(
                    f"{counter.name} is stored here in a kind of a later version",
                    hint="Write it, and what is under it, with the version that stored it",
                )

    def _is_own(self, counter_id: int, row: ValueType) -> bool:
        """Whether a row is one that is written anew."""
        if counter_id not in self.catalog or row.WhichOneof("value") is None:
            return False
        return not (self._later and self._is_opaque(self.catalog.group_of(counter_id)))

    def _add(
        self, counter: Counter, table: Table, key: int, value: Number, time: int, moved: int, latest: int | None = None
    ) -> None:
        if counter.time_counter_id is None and counter.kind is Kind.FIXED32:
            self._changed = True
            return  # a time counter keeps the time itself
        column = table.values.setdefault(counter.id, {})
        before = column.get(key, 0)
        if counter.kind is Kind.FIXED64:
            if before + int(value) > UINT64_MAX:
                raise CounterOverflow(f"{counter.name} of key {key} would leave 64 bits")
            column[key] = before + int(value)
        elif counter.kind is Kind.FIXED32:
            column[key] = max(before, time)
        else:
            aged = decayed(before, counter.decay, moved - latest) if latest is not None else before
            column[key] = aged + decayed(value, counter.decay, moved - time)
        self._changed = True

    def _decay_siblings(self, group: Group, table: Table, key: int, seconds: int, written: Counter) -> None:
        for sibling in group.values:
            column = table.values.get(sibling.id)
            if sibling is not written and sibling.decay and column and key in column:
                column[key] = decayed(column[key], sibling.decay, seconds)

    def _absorb_key(self, group: Group, members: list[Counter], theirs: Table, key: int) -> None:
        table = self._table(group)
        time, latest = theirs.times[key], table.times.get(key)
        moved = max(time, latest or 0)
        if latest is not None and moved > latest:
            for sibling in group.values:
                column = table.values.get(sibling.id)
                if sibling.decay and column and key in column:
                    column[key] = decayed(column[key], sibling.decay, moved - latest)
        for counter in members:
            column = table.values.setdefault(counter.id, {})
            before, more = column.get(key, 0), theirs.values[counter.id].get(key, 0)
            if counter.kind is Kind.FIXED32:
                column[key] = max(before, more)
            else:
                total = before + decayed(more, counter.decay, moved - time)
                # A merge is only read: it stays at the largest number.
                column[key] = min(total, UINT64_MAX) if counter.kind is Kind.FIXED64 else storable(total, counter.kind)
        table.times[key] = moved
        self._changed = True

    def _expire_once(self, group: Group) -> None:
        """Before something is added: what has expired must not be added to."""
        if group.id not in self._live:
            self._expire(group)
            self._live.add(group.id)

    def _expire(self, group: Group) -> None:
        table = self._table(group)
        expired = [key for key, time in table.times.items() if not is_live(group, time, self.now)]
        self._lose(group, table, expired, TO_EXPIRE_DAYS)

    def _lose(self, group: Group, table: Table, keys: list[int], to: int) -> None:
        for key in keys:
            time = table.times.pop(key)
            for counter in group.values:
                column = table.values.get(counter.id)
                if column is not None and (value := column.pop(key, None)) is not None:
                    self._charge(counter, value, time, to)
            if group.time is not None:
                self._charge(group.time, time, time, to)  # one without a time it never had
        if not table.times:
            table.values.clear()  # a counter stands in a pack only from its first update on
        self._changed = self._changed or bool(keys)

    def _charge(self, counter: Counter, value: Number, time: int, to: int) -> None:
        """Times have no weight: of a counter that keeps times, the keys are counted."""
        weight = (
            float(value != 0)
            if counter.kind is Kind.FIXED32
            else decayed(value, counter.decay, max(self.now - time, 0))
        )
        self.bill.setdefault(counter.id, [0.0, 0.0])[to] += weight

    def _pack(self, group: Group, extras: "_Extras", pack: CounterPack) -> None:
        keys = sorted(self._table(group).times)
        for counter in (self.catalog[each] for each in self.counter_ids(group)):
            if counter.id in extras.packs:
                pack.MergeFrom(extras.packs[counter.id])
            row = pack.values.add()
            if counter.id in extras.rows:
                row.CopyFrom(extras.rows[counter.id])
            pack.counter_ids.append(counter.id)
            fill(row, counter.kind, [_stored(counter, value) for value in self.column(counter, group, keys)])
        pack.keys.extend(keys)


def _value(counter: Counter, group: Group, table: Table, key: int, at: int | None) -> Value:
    time = table.times[key] if group.time else None
    if counter is group.time:
        return Value(table.times[key], time)
    value = table.values.get(counter.id, {}).get(key, 0)
    if at is not None and time is not None:
        value = decayed(value, counter.decay, max(at - time, 0))
    return Value(value, time)


def _column(counter: Counter, row: Row) -> dict[int, Number]:
    column = dict(zip(row.keys, row.values, strict=True))
    if counter.kind in (Kind.FLOAT, Kind.DOUBLE) and not all(map(math.isfinite, column.values())):
        raise ValueNotFinite(f"counter {counter.id} holds a value that is not finite")
    return column


def _stored(counter: Counter, value: Number) -> Number:
    return storable(value, counter.kind) if counter.kind in (Kind.FLOAT, Kind.DOUBLE) else int(value)


class _Gift(Struct):
    """What one profile adds to a group of another: these counters and keys of its table."""

    group: Group
    members: list[Counter]
    table: Table
    keys: list[int]


class _Extras(Struct):
    """Fields of a later format that stood beside known rows: they stay with the counter they stood with."""

    rows: dict[int, ValueType]
    packs: dict[int, CounterPack]


def _take_out(profile: Profile, is_own: IsOwn) -> _Extras:
    """Take the rows that are written anew out of their packs; a pack of which nothing is left goes."""
    extras = _Extras({}, {})
    for index in reversed(range(len(profile.packed_counters))):
        pack = profile.packed_counters[index]
        first = _take_rows(pack, is_own, extras)
        if pack.counter_ids:
            continue
        pack.ClearField("keys")
        if first is not None and pack.ByteSize():
            extras.packs[first] = CounterPack()
            extras.packs[first].CopyFrom(pack)
        del profile.packed_counters[index]
    for index in reversed(range(len(profile.counters))):
        older = profile.counters[index]
        if is_own(older.counter_id, older.values):
            _keep_extra(older.counter_id, older.values, extras)
            del profile.counters[index]
    return extras


def _take_rows(pack: CounterPack, is_own: IsOwn, extras: _Extras) -> int | None:
    """Take such rows out of a pack; returns the first of them."""
    first: int | None = None
    for index in reversed(range(len(pack.counter_ids))):
        counter_id, row = pack.counter_ids[index], pack.values[index]
        if is_own(counter_id, row):
            _keep_extra(counter_id, row, extras)
            first = counter_id
            del pack.counter_ids[index]
            del pack.values[index]
    return first


def _keep_extra(counter_id: int, row: ValueType, extras: _Extras) -> None:
    rest = ValueType()
    rest.CopyFrom(row)
    field = row.WhichOneof("value") or "float_values"
    values = getattr(rest, field)
    values.ClearField("value")
    if not values.ByteSize():
        rest.ClearField(field)
    if rest.ByteSize():
        extras.rows[counter_id] = rest
