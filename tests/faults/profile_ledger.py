"""What profiles must be after a fault: the accepted events, folded and held back by hand and slowly.

A `Book` is told of every commit, in order: which events were given, and what was said of each. It folds what was
counted with the slow reference of the counters, holds owned updates back by the words of docs/profiles.md, and
compares a store with that. Each broken law is a sentence that begins with the name of its invariant.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from keyfold.core.store import Store, Transaction
from keyfold.core.tables import MESSAGES
from keyfold.counters.catalog import UINT64_MAX, Catalog, Kind
from keyfold.counters.keys import owner_of
from keyfold.counters.messages_pb2 import Profile
from keyfold.profiles.service.product import PROFILES_TOPIC, Product
from keyfold.profiles.service.reading import Read, read_profiles, view_of
from keyfold.profiles.tables import EVENT_MARKS, EVENT_WATERMARKS, HELD_UPDATES, PROFILES
from tests.profiles import DAY, OFFER_TIME, UNRESTRICTED
from tests.unit.counters.reference import Reference

LOG = "order"
TYPE = "user"
EXACT = 602
# The bound of CNT-05 for one commit: a float is rounded once when it is stored.
ROUNDING = 2.0**-24

Fields = Mapping[str, Any]
Place = tuple[str, int]  # profile id, key; every owned update is of the one group that may hold some back
Update = tuple[int, int, float, int]  # counter, key, value, time
Released = tuple[tuple[str, int], Update]  # with the id of its event, and which update of it


class Waiting(NamedTuple):
    """An owned update that nobody has confirmed."""

    counter: int
    value: float
    time: int
    owner: str
    event_id: str
    number: int
    committed_at_us: int


class Message(NamedTuple):
    """A profile as it was published; `floor` is the highest version of any that was deleted before."""

    version: int
    payload: bytes
    said: Profile
    floor: int

    @property
    def is_deletion(self) -> bool:
        return not self.said.packed_counters


class Found:
    """What a store holds of profiles at one moment, and what its readers are given."""

    def __init__(self, tx: Transaction, product: Product, ids: Iterable[str]) -> None:
        self.now_us = tx.now_us
        self.marks = {row.event_id: row.time for row in tx.execute(sa.select(EVENT_MARKS))}
        self.watermark = max((row.time for row in tx.execute(sa.select(EVENT_WATERMARKS)) if row.log == LOG), default=0)
        self.held = list(tx.execute(sa.select(HELD_UPDATES)))
        self.rows = {row.profile_id: row for row in tx.execute(sa.select(PROFILES))}
        self.messages: dict[str, list[Message]] = defaultdict(list)
        published = sa.select(MESSAGES).where(MESSAGES.c.topic == PROFILES_TOPIC.name).order_by(MESSAGES.c.id)
        floor = 0
        for row in tx.execute(published):
            message = Message(row.version, bytes(row.payload), Profile.FromString(bytes(row.payload)), floor)
            self.messages[row.key.removeprefix(f"{TYPE}/")].append(message)
            floor = max(floor, message.version) if message.is_deletion else floor
        self.ids = sorted({*ids, *self.rows, *self.messages, *(row.profile_id for row in self.held)})
        view = view_of(product, UNRESTRICTED, None)
        read = read_profiles(tx, product, [([(TYPE, each)], view) for each in self.ids])
        self.read = dict(zip(self.ids, read, strict=True))
        everybody = [(TYPE, each) for each in self.ids]
        orders = [everybody, everybody[::-1]] if len(everybody) > 1 else []
        self.merged = read_profiles(tx, product, [(order, view) for order in orders])

    def counts(self) -> list[int]:
        """How far the work has come, in numbers that only grow while no sweep runs."""
        return [len(self.marks), sum(row.public_version for row in self.rows.values())]


class Book:
    """Every event that was accepted, in the order of the commits, and what follows from them."""

    def __init__(self, product: Product) -> None:
        self._product = product
        self._catalog: Catalog = product.catalog
        self._profiles: dict[str, Reference] = {}
        self._waiting: dict[Place, list[Waiting]] = defaultdict(list)
        self._changes: Counter[str] = Counter()
        self._watermark = 0
        self.counted: dict[str, Fields] = {}
        self.refused: set[str] = set()  # or late
        self.broken: list[str] = []

    # What happens -----------------------------------------------------------------------------------------------------

    def commit(self, now_us: int, given: Sequence[tuple[Fields, str]]) -> None:
        """A transaction has committed in which these events were given, with what was said of each."""
        fresh = []
        for fields, status in given:
            self._judge(fields, status, now_us)
            if status == "counted":
                self.counted.setdefault(fields["event_id"], fields)
                fresh.append(fields)
        for fields, status in given:
            if status == "refused" and not self._is_ahead(fields, now_us) and self._has_room(fields, fresh, now_us):
                self.broken.append(f"C4: {fields['event_id']} was refused, and what is public leaves room for it")
        self._fold(fresh, now_us)

    def move_watermark(self, now_us: int) -> None:
        self._watermark = max(self._watermark, _edge(now_us, self._product.settings.event_days))

    def sweep(self, now_us: int) -> None:
        """What nobody confirmed in time is gone for good, whatever the clock says later."""
        for place, waiting in self._waiting.items():
            self._waiting[place] = self._alive(waiting, now_us)

    def keep_only(self, profiles: Collection[str], now_us: int) -> None:
        """A sweep has left these; what it deleted must have expired, and does not come back with the clock."""
        for gone in set(self._profiles) - set(profiles):
            if left := self._profiles.pop(gone).read(now_us // 1_000_000):
                self.broken.append(f"X1: {gone} was swept, and had {left}")

    def _may_be_refused(self, fields: Fields) -> bool:
        """Only what may not fit: a public sum of more than 64 bits."""
        return any(value >= 2**63 and owner is None for _, _, value, owner in updates_of(fields))

    def _has_room(self, fields: Fields, beside: Sequence[Fields], now_us: int) -> bool:
        """Whether its public updates fit, with what is public and with those of the events that were counted beside."""
        profile = str(fields["profile_id"])
        sums = self._exact(profile, now_us // 1_000_000)
        for each in (fields, *(each for each in beside if str(each["profile_id"]) == profile)):
            for counter, key, value, owner in updates_of(each):
                if owner is None and counter == EXACT:
                    sums[key] += int(value)
        return all(total <= UINT64_MAX for total in sums.values())

    def _exact(self, profile: str, now: int) -> Counter[int]:
        """The exact sums that are public, by key."""
        reference = self._profiles.get(profile)
        found = reference.read(now).get(EXACT, {}) if reference else {}
        return Counter({key: int(value) for key, (value, _) in found.items()})

    def _is_ahead(self, fields: Fields, now_us: int) -> bool:
        """Refused before anything else is looked at, so a repeat may be too, where the clock went back."""
        return bool(fields["time"] > now_us // 1_000_000 + self._product.settings.future_seconds_max)

    def _judge(self, fields: Fields, status: str, now_us: int) -> None:
        """Behind the watermark a repeat is known as such only while its mark is there."""
        known = self.counted.get(fields["event_id"])
        right = [] if known is None else ["duplicate" if known == fields else "conflict"]
        if fields["time"] < self._watermark:
            right.append("late")
        elif known is None:
            right = ["counted", "refused"] if self._may_be_refused(fields) else ["counted"]
        if self._is_ahead(fields, now_us):
            right.append("refused")
        if status not in right:
            self.broken.append(f"X2: {fields['event_id']} is said to be {status}, it is {right[0]}")
        if status in ("late", "refused"):
            self.refused.add(fields["event_id"])

    def _fold(self, events: Sequence[Fields], now_us: int) -> None:
        """What became public is one batch of its profile; of what is released, what has no room in a sum waits on."""
        now = now_us // 1_000_000
        before = {place: list(waiting) for place, waiting in self._waiting.items()}
        stays: set[tuple[str, int]] = set()
        while True:
            public, released = self._settled(events, now_us, stays)
            if not (too_much := self._too_much(public, released, now)):
                break
            stays |= too_much
            self._waiting = defaultdict(list, {place: list(waiting) for place, waiting in before.items()})
        for profile in public.keys() | released.keys():
            updates = [*public[profile], *(update for _, update in released[profile])]
            reference = self._profiles.setdefault(profile, Reference(self._catalog, TYPE))
            stood = reference.read(0)
            reference.commit(updates, now)
            # What is older than all of MaxRecords keys came and went at once: nobody sees a change.
            self._changes[profile] += reference.read(0) != stood
            if reference.refused:
                self.broken.append(f"C1: {profile} counts {reference.refused}, which leaves 64 bits")

    def _too_much(
        self, public: Mapping[str, list[Update]], released: Mapping[str, list[Released]], now: int
    ) -> set[tuple[str, int]]:
        """Of what is released into an exact sum, what has no room beside what is public: the largest."""
        stay: set[tuple[str, int]] = set()
        for profile, freed in released.items():
            sums = self._exact(profile, now)
            for counter, key, value, _ in public[profile]:
                if counter == EXACT:
                    sums[key] += int(value)
            for name, (counter, key, value, _) in sorted(freed, key=lambda each: (each[1][2], each[0])):
                if counter == EXACT and sums[key] + int(value) > UINT64_MAX:
                    stay.add(name)
                elif counter == EXACT:
                    sums[key] += int(value)
        return stay

    def _settled(
        self, events: Sequence[Fields], now_us: int, stays: Collection[tuple[str, int]]
    ) -> tuple[dict[str, list[Update]], dict[str, list[Released]]]:
        """Step by step, as if each update came alone: what is public by itself, and what is released."""
        now = now_us // 1_000_000
        public: dict[str, list[Update]] = defaultdict(list)
        released: dict[str, list[Released]] = defaultdict(list)
        latest: dict[Place, int] = {}
        touched: set[Place] = set()
        for fields in events:
            profile, time = str(fields["profile_id"]), fields["time"]
            for number, (counter, key, value, owner) in enumerate(updates_of(fields)):
                place = (profile, key)
                if place not in touched:
                    touched.add(place)
                    if (stands := self._public_time(place, now)) is not None:
                        latest[place] = stands
                    released[profile] += self._freed(place, latest, now_us, stays)
                if owner is None:
                    public[profile].append((counter, key, value, time))
                    self._move(latest, place, time, now)
                else:
                    self._waiting[place].append(
                        Waiting(counter, value, time, owner, fields["event_id"], number, now_us)
                    )
                released[profile] += self._freed(place, latest, now_us, stays)
        return public, released

    def _freed(
        self, place: Place, latest: dict[Place, int], now_us: int, stays: Collection[tuple[str, int]]
    ) -> list[Released]:
        """Take out what a second source confirms, and what that confirms in turn; returns the updates."""
        freed: list[Released] = []
        while True:
            here = self._alive(self._waiting[place], now_us)
            free = [
                each
                for each in here
                if (each.event_id, each.number) not in stays and self._is_confirmed(each, here, latest.get(place))
            ]
            if not free:
                return freed
            freed += [((each.event_id, each.number), (each.counter, place[1], each.value, each.time)) for each in free]
            self._waiting[place] = [each for each in self._waiting[place] if each not in free]
            for each in sorted(free, key=lambda one: -one.time):
                self._move(latest, place, each.time, now_us // 1_000_000)

    def _move(self, latest: dict[Place, int], place: Place, time: int, now: int) -> None:
        """The public time after an update; one that has expired makes no key."""
        expire_seconds = self._catalog.groups[OFFER_TIME].expire_seconds
        if place in latest or expire_seconds is None or now - time <= expire_seconds:
            latest[place] = max(time, latest.get(place, 0))

    def _is_confirmed(self, one: Waiting, here: Sequence[Waiting], public_time: int | None) -> bool:
        times = [other.time for other in here if other.owner != one.owner]
        times += [] if public_time is None else [public_time]
        return any(abs(time - one.time) < self._product.settings.merge_seconds for time in times)

    def _alive(self, waiting: Sequence[Waiting], now_us: int) -> list[Waiting]:
        return [each for each in waiting if each.committed_at_us > now_us - self._product.settings.delete_us]

    def _public_time(self, place: Place, now: int) -> int | None:
        reference = self._profiles.get(place[0])
        found = reference.read(now).get(OFFER_TIME, {}).get(place[1]) if reference else None
        return None if found is None else int(found[0])

    # What is compared -------------------------------------------------------------------------------------------------

    def broken_in(self, store: Store) -> list[str]:
        """The laws that a store breaks between any two commits."""
        found = store.snapshot(self.look)
        return self.broken + self.compare(found)

    def look(self, tx: Transaction) -> Found:
        return Found(tx, self._product, {str(fields["profile_id"]) for fields in self.counted.values()})

    def compare(self, found: Found, *, batches_known: bool = True) -> list[str]:
        """The laws that what was found breaks. Who does not know how events were gathered cannot count the changes."""
        if not batches_known:
            self._changes = Counter({each: len(found.messages[each]) for each in found.ids})
        broken = self._marks(found) + self._held(found)
        for each in found.ids:
            broken += self._published(each, found)
            broken += self._values(each, found.read[each], self._profiles.get(each), found.now_us // 1_000_000)
        for read in found.merged:
            broken += self._values("a merge", read, self._merged(found), found.now_us // 1_000_000)
        return broken

    def _merged(self, found: Found) -> Reference:
        """All profiles as one person's: what is public of each, and what owners confirm of each other."""
        now = found.now_us // 1_000_000
        together: dict[int, list[Waiting]] = defaultdict(list)
        for (profile, key), waiting in self._waiting.items():
            together[key] += self._alive(waiting, found.now_us) if profile in found.ids else []
        confirmed = [
            (each.counter, key, each.value, each.time)
            for key, waiting in together.items()
            for each in self._confirmed(waiting, now)
        ]
        parts = [self._profiles[each] for each in found.ids if each in self._profiles]
        merged = Reference(self._catalog, TYPE)
        merged.merge(parts, now, confirmed)
        merged.commits = sum(part.commits for part in parts) + len(confirmed)
        return merged

    def _confirmed(self, waiting: Sequence[Waiting], now: int) -> list[Waiting]:
        """What of these has a source among them, and what is near the newest of what has and is no expired key."""
        expire_seconds = self._catalog.groups[OFFER_TIME].expire_seconds
        confirmed: list[Waiting] = []
        while True:
            left = [each for each in waiting if each not in confirmed]
            live = [each.time for each in confirmed if expire_seconds is None or now - each.time <= expire_seconds]
            newest = max(live, default=None)
            free = [each for each in left if self._is_confirmed(each, left, newest)]
            if not free:
                return confirmed
            confirmed += free

    def _marks(self, found: Found) -> list[str]:
        """X2: an event has a mark exactly if it counts; once it is a day behind the watermark, the mark may go."""
        broken = [f"X1: {each} has a mark and was never counted" for each in found.marks if each not in self.counted]
        kept = [each for each, fields in self.counted.items() if fields["time"] >= found.watermark - DAY]
        broken += [f"X2: {each} was counted and has no mark" for each in kept if each not in found.marks]
        if found.watermark != self._watermark:
            broken.append(f"X2: the watermark is {found.watermark}, it was moved to {self._watermark}")
        return broken

    def _held(self, found: Found) -> list[str]:
        """C4: exactly what nobody has confirmed waits."""
        fresh = found.now_us - self._product.settings.delete_us
        there = {
            (row.profile_id, row.key, row.event_id, row.number, row.counter_id, row.owner, row.time, _value(row))
            for row in found.held
            if row.committed_at_us > fresh
        }
        right = {
            (profile, key, one.event_id, one.number, one.counter, owner_of(one.owner), one.time, float(one.value))
            for (profile, key), waiting in self._waiting.items()
            for one in self._alive(waiting, found.now_us)
        }
        broken = [f"C4: {each} waits, and should not" for each in sorted(there - right)[:3]]
        return broken + [f"C4: {each} should wait, and does not" for each in sorted(right - there)[:3]]

    def _values(self, profile: str, read: Read, reference: Reference | None, now: int) -> list[str]:
        """C1, C3, C4: a reader gets what the public events add up to, within the bound of CNT-05, and nothing else."""
        there = {
            counter_id: dict(zip(pack.keys, row, strict=True))
            for pack in read.packs
            for counter_id, (_, row) in zip(pack.counter_ids, pack.rows, strict=True)
        }
        right = reference.read(now) if reference else {}
        if {each: set(keys) for each, keys in there.items()} != {each: set(keys) for each, keys in right.items()}:
            return [f"C4: {profile} is read as {there}, it is {right}"]
        magnitudes = reference.magnitudes() if reference else {}
        broken = []
        for counter_id, values in there.items():
            is_exact = self._catalog[counter_id].kind not in (Kind.FLOAT, Kind.DOUBLE)
            for key, value in values.items():
                expected = right[counter_id][key][0]
                if is_exact:
                    expected = min(expected, UINT64_MAX)  # where a merge has more
                bound = 0.0 if is_exact else _bound(reference, magnitudes[counter_id, key])
                if abs(float(value) - float(expected)) > bound or (is_exact and value != expected):
                    broken.append(f"C1: counter {counter_id} of {profile} has {value} at {key}, it is {expected}")
        return broken

    def _published(self, profile: str, found: Found) -> list[str]:
        """G2, G3: every change once, versions without gaps, the last one as it is stored; all of it is read so."""
        messages, row = found.messages[profile], found.rows.get(profile)
        broken = []
        before = 0  # a profile that is new, or was deleted, starts above the floor
        for message in messages:
            if (message.said.id, message.said.version) != (profile, message.version):
                broken.append(f"G2: the message {profile} {message.version} says {message.said.version}")
            if message.version != (before or message.floor) + 1:
                broken.append(f"G3: {profile} was published as {message.version} after {before or message.floor}")
            before = 0 if message.is_deletion else message.version
        changes = sum(not message.is_deletion for message in messages)
        if changes != self._changes[profile]:
            broken.append(f"G2: {profile} changed {self._changes[profile]} times and was published {changes} times")
        stored = row.public_version if row else 0
        if not stored == before == found.read[profile].version:
            broken.append(f"G2: {profile} is at {stored}, read as {found.read[profile].version}, published as {before}")
        elif row and before and Profile.FromString(bytes(row.body)) != _body(messages[-1].said):
            broken.append(f"G2: {profile} is not what was published as {before}")
        return broken


def updates_of(fields: Fields) -> list[tuple[int, int, float, str | None]]:
    """What an event counts: counter, key, value, owner."""
    return [(*each, *[1, None][len(each) - 2 :]) for each in fields["updates"]]


def _value(row: Any) -> float:
    return float(row.count or row.value)


def _bound(reference: Reference | None, magnitude: Any) -> float:
    commits = reference.commits if reference else 0
    return (commits + 1) * ROUNDING * float(magnitude) + 1e-30


def _body(said: Profile) -> Profile:
    """A published profile without what only the message says."""
    return Profile(packed_counters=said.packed_counters, counters=said.counters)


def _edge(now_us: int, event_days: int) -> int:
    return (now_us // 1_000_000 // DAY - event_days) * DAY
