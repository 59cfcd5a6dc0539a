"""The slow reference of the counters: it keeps every event and works out what is read from the rules, exactly.

It follows docs/decisions/0008-counter-fold.md word by word and shares nothing with the implementations but the
catalog. Where the rules leave something open, it decides, and says so:

- a group none of whose stored keys is live is absent whole: its counters no longer stand in a pack, so that what is
  read does not depend on whether cleanup ran (CNT-08);
- an exact sum (VF_FIXED64) that would leave 64 bits refuses updates from the latest to the oldest, the smaller value
  first at equal times, so that the order within a batch does not matter;
- the bill of a VF_AGE counter counts keys (1 for each that it had); weights are signed; a key whose time lies after
  `now` weighs what it holds;
- a merge leaves the NotGlued counters of the others out and keeps one's own.
"""

from collections.abc import Iterable
from decimal import Context, Decimal
from functools import lru_cache

from keyfold.counters.catalog import Catalog, Counter, Group, Kind

EXACT = Context(prec=60, Emin=-(10**12), Emax=10**12)
WEEK_SECONDS = 604_800
NEVER = 2**62

Update = tuple[int, int, float, int]  # counter id, key, value, time
Event = tuple[int, Decimal, int]  # counter id, value, time
Number = Decimal | int
Read = dict[int, dict[int, tuple[Number, int | None]]]


class Rows:
    """What a profile holds of one group: the events of every key, and which counters stand in the pack."""

    def __init__(self) -> None:
        self.events: dict[int, list[Event]] = {}
        self.counter_ids: set[int] = set()

    def time(self, key: int) -> int:
        return max(time for _, _, time in self.events[key])


class Reference:
    """One profile, as the rules have it."""

    def __init__(self, catalog: Catalog, profile_type: str = "user") -> None:
        self.catalog = catalog
        self.groups = {g.id: g for g in catalog.groups.values() if g.profile_type == profile_type}
        self.rows: dict[int, Rows] = {group_id: Rows() for group_id in self.groups}
        self.bill: dict[int, list[Decimal]] = {}  # counter id -> weight lost to MaxRecords, to ExpireDays
        self.dropped = 0
        self.refused: list[Update] = []  # exact sums that would have left 64 bits
        self.commits = 0

    def commit(self, updates: Iterable[Update], now: int) -> bool:
        """Fold one batch, in which order does not matter; says whether something was added."""
        accepted: list[tuple[Group, Update]] = []
        touched: dict[tuple[int, int], list[Update]] = {}
        for update in updates:
            touched.setdefault((self.catalog.group_of(update[0]).id, update[1]), []).append(update)
        for (group_id, key), batch in touched.items():
            group = self.groups[group_id]
            stored = self._live_events(group, key, now)
            times = [time for _, _, time in stored] + [time for _, _, _, time in batch]
            if _expired(group, max(times), now):
                self.dropped += len(batch)
                continue
            accepted += [(group, update) for update in self._fitting(stored, batch)]
        if not accepted:
            return False
        self._expire(now)
        for group, (counter_id, key, value, time) in accepted:
            rows = self.rows[group.id]
            rows.events.setdefault(key, []).append((counter_id, Decimal(value), time))
            rows.counter_ids.add(counter_id)
        self._enforce_max_records(now)
        self.commits += 1
        return True

    def cleanup(self, now: int, *, enforce_max_records: bool = True) -> None:
        self._expire(now)
        if enforce_max_records:
            self._enforce_max_records(now)

    def merge(self, others: Iterable["Reference"], now: int | None = None, released: Iterable[Update] = ()) -> None:
        """Take over the events of other profiles; with `now`, expired keys do not come along and caps hold.

        What is `released` into the merge counts where its key is live, be it by a later one of them.
        """
        if now is not None:
            self._expire(now)
        for other in others:
            for group_id, rows in other.rows.items():
                self._take(self.groups[group_id], rows, now)
        for counter_id, key, value, time in sorted(released, key=lambda each: -each[3]):
            group = self.catalog.group_of(counter_id)
            rows = self.rows[group.id]
            if now is None or key in rows.events or not _expired(group, time, now):
                rows.events.setdefault(key, []).append((counter_id, Decimal(value), time))
                rows.counter_ids.add(counter_id)
        if now is not None:
            self._enforce_max_records(now)
        self.commits += 1

    def read(self, now: int) -> Read:
        """Every counter with its live keys: value and time (None where the counter has no time counter)."""
        found: Read = {}
        for group in self.groups.values():
            rows = self.rows[group.id]
            live = [key for key in sorted(rows.events) if not _expired(group, rows.time(key), now)]
            for counter in self._standing(group):
                if live:
                    found[counter.id] = {
                        key: (value_of(counter, rows.events[key]), rows.time(key) if group.time else None)
                        for key in live
                    }
        return found

    def magnitudes(self) -> dict[tuple[int, int], Decimal]:
        """For each counter and key the decayed sum of |v|: what a rounding error is relative to."""
        found = {}
        for group in self.groups.values():
            for key, events in self.rows[group.id].events.items():
                for counter in self._standing(group):
                    sizes = [(counter_id, abs(value), time) for counter_id, value, time in events]
                    found[counter.id, key] = Decimal(value_of(counter, sizes))
        return found

    @property
    def expires_at(self) -> int:
        """The second after which every key is expired; NEVER where some key never is; 0 for an empty profile."""
        latest = 0
        for group in self.groups.values():
            rows = self.rows[group.id]
            for key in rows.events:
                if group.expire_seconds is None:
                    return NEVER
                latest = max(latest, rows.time(key) + group.expire_seconds)
        return latest

    def _take(self, group: Group, rows: Rows, now: int | None) -> None:
        own = self.rows[group.id]
        glued = {c.id for c in _members(group) if not c.not_glued}
        for key, events in rows.events.items():
            if now is not None and _expired(group, rows.time(key), now):
                continue
            # The key keeps its time even where the counter that moved it stays behind.
            kept = [event for event in events if event[0] in glued]
            if group.time and group.time.id in glued:
                kept.append((group.time.id, Decimal(1), rows.time(key)))
            if kept:
                own.events.setdefault(key, []).extend(kept)
                own.counter_ids |= rows.counter_ids & glued

    def _live_events(self, group: Group, key: int, now: int) -> list[Event]:
        rows = self.rows[group.id]
        if key not in rows.events or _expired(group, rows.time(key), now):
            return []
        return rows.events[key]

    def _fitting(self, stored: list[Event], batch: list[Update]) -> list[Update]:
        """The updates without those that would take an exact sum out of 64 bits."""
        fitting = []
        sums: dict[int, int] = {}
        for counter_id, value, _ in stored:
            sums[counter_id] = sums.get(counter_id, 0) + int(value)
        for update in sorted(batch, key=lambda u: (-u[3], u[2])):
            counter_id, _, more, _ = update
            if self.catalog[counter_id].kind is Kind.FIXED64:
                if sums.get(counter_id, 0) + int(more) >= 2**64:
                    self.refused.append(update)
                    continue
                sums[counter_id] = sums.get(counter_id, 0) + int(more)
            fitting.append(update)
        return fitting

    def _expire(self, now: int) -> None:
        for group in self.groups.values():
            rows = self.rows[group.id]
            self._evict(group, [key for key in rows.events if _expired(group, rows.time(key), now)], now, 1)

    def _enforce_max_records(self, now: int) -> None:
        for group in self.groups.values():
            rows = self.rows[group.id]
            if group.records_max is not None and len(rows.events) > group.records_max:
                oldest_first = sorted(rows.events, key=lambda key: (rows.time(key), key))
                self._evict(group, oldest_first[: -group.records_max], now, 0)

    def _evict(self, group: Group, keys: list[int], now: int, cause: int) -> None:
        rows = self.rows[group.id]
        for key in keys:
            for counter in self._standing(group):
                lost = _weight(counter, rows.events[key], rows.time(key), now)
                self.bill.setdefault(counter.id, [Decimal(0), Decimal(0)])[cause] += lost
        for key in keys:
            del rows.events[key]
        if not rows.events:
            rows.counter_ids.clear()

    def _standing(self, group: Group) -> list[Counter]:
        """The counters that stand in the pack of the group: the time counter always, others once updated."""
        rows = self.rows[group.id]
        return [c for c in _members(group) if c is group.time or c.id in rows.counter_ids]


def value_of(counter: Counter, events: Iterable[Event]) -> Number:
    """What a counter has for a key, from all the events of the key (those of its siblings move the time)."""
    events = list(events)
    latest = max(time for _, _, time in events)
    own = [(value, time) for counter_id, value, time in events if counter_id == counter.id]
    if counter.kind is Kind.FIXED32:
        is_time = counter.time_counter_id is None
        return latest if is_time else max((time for _, time in own), default=0)
    if counter.kind is Kind.FIXED64:
        return sum(int(value) for value, _ in own)
    total = Decimal(0)
    for value, time in own:
        total = EXACT.add(total, EXACT.multiply(value, decayed(counter.decay, latest - time)))
    return total


@lru_cache(maxsize=100_000)
def decayed(decay: float, seconds: int) -> Decimal:
    """exp(−decay · seconds / 604800), to sixty digits."""
    exponent = EXACT.divide(EXACT.multiply(Decimal(decay), Decimal(-seconds)), Decimal(WEEK_SECONDS))
    return EXACT.exp(exponent)


def _weight(counter: Counter, events: list[Event], time: int, now: int) -> Decimal:
    value = value_of(counter, events)
    if counter.kind is Kind.FIXED32:
        return Decimal(1 if value else 0)
    return EXACT.multiply(Decimal(value), decayed(counter.decay, max(0, now - time)))


def _members(group: Group) -> list[Counter]:
    return sorted([*group.values, *([group.time] if group.time else [])], key=lambda counter: counter.id)


def _expired(group: Group, time: int, now: int) -> bool:
    return group.expire_seconds is not None and now - time > group.expire_seconds
