"""A batch folded in memory: columns from what the handlers said, one call of the kernel, and what cannot be kept."""

from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from functools import cache

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from keyfold.core.errors import KeyfoldError, SettingsWrong
from keyfold.counters.bulk import Folded, Updates, fold, reading
from keyfold.counters.catalog import UINT64_MAX, Kind
from keyfold.counters.counters import Counters
from keyfold.counters.errors import CounterOverflow, UpdateRefused
from keyfold.profiles.model import Asked, EventKey, Held, ProfileKey, Row, UpdateKey
from keyfold.profiles.service.holding import Place, Settlement, settlement
from keyfold.profiles.service.product import Product
from keyfold.profiles.service.storing import Stored

# Of a full profile: how many folds, each as much work as so many updates, may be spent on which events fit; and how
# often all of its body and updates may be looked at besides, which is enough to find how many of the first do.
TRIES_MAX, TRY_ROWS, HALVINGS_MAX = 200, 1_000, 20
BODY_BYTES_PER_ROW = 64  # so many bytes of a body are as much work as an update
RELEASE_TRIES_MAX = 10  # folds to find how much of what is released fits: enough for some 500 keys


Spot = tuple[ProfileKey, int, int]  # profile, counter, key


class Plan(Struct):
    """What a batch comes to, before anything is written."""

    profiles: list[ProfileKey]
    folded: Folded
    settlement: Settlement
    updates: int
    refused: dict[EventKey, KeyfoldError]  # events that cannot be kept
    kept_back: set[UpdateKey]  # owned updates that a source releases, and that cannot be kept: they wait on


class Rows(Struct):
    """What is folded into one profile, or into one number of it: what is public by itself, and what is released."""

    public: list[Row]
    released: list[Row]


def _columns(product: Product, asked: Asked) -> Updates:
    """What was asked for, none of it owned, as the kernel takes it."""
    log_events, updates, size = asked.log_events, asked.updates, np.array(asked.size, np.int64)
    return _updates(
        product,
        profile=np.repeat(np.array(asked.profile, np.int64), size),
        counter=[each[0].id for each in updates],
        key=[each[1] for each in updates],
        value=[each[2] for each in updates],
        time=np.repeat(np.array([log_events[number][1].time for number in asked.event], np.int64), size),
    )


def _columns_of(product: Product, profiles: Sequence[ProfileKey], rows: Sequence[Row]) -> Updates:
    places = {key: index for index, key in enumerate(profiles)}
    return _updates(
        product,
        profile=np.array([places[row.profile] for row in rows], np.int64),
        counter=[row.counter.id for row in rows],
        key=[row.key for row in rows],
        value=[row.value for row in rows],
        time=np.array([row.time for row in rows], np.int64),
    )


def _updates(
    product: Product,
    *,
    profile: NDArray[np.int64],
    counter: Sequence[int],
    key: Sequence[int],
    value: Sequence[float | int],
    time: NDArray[np.int64],
) -> Updates:
    exact = {each for each in set(counter) if product.catalog.counters[each].kind is Kind.FIXED64}
    counts = [int(v) if c in exact else 0 for c, v in zip(counter, value, strict=True)] if exact else None
    return Updates(
        profile=profile,
        counter=np.array(counter, np.uint64),
        key=np.array(key, np.uint64),
        value=np.array(value, np.float64),
        time=time,
        count=None if counts is None else np.array(counts, np.uint64),
    )


def _folded(product: Product, bodies: Sequence[bytes], updates: Updates, now: int) -> Folded:
    return fold(
        product.writable,
        bodies,
        updates,
        now=now,
        future_seconds_max=2**32,  # every time was judged when its event arrived; the clock may have gone back since
        kernel=product.settings.kernel,
    )


def warm(product: Product) -> None:
    """Fold something, so that no transaction waits for the kernel: the first time ever, it is compiled for seconds."""
    counter = next((each for each in product.catalog.counters.values() if not each.no_operation), None)
    if counter is None:
        return
    nobody = ("", "")
    try:
        _folded(product, [b""], _columns_of(product, [nobody], [Row(nobody, counter, 1, 1, 1, 0, "", "", 0)]), 1)
        reading.warm(product.catalog, kernel=product.settings.kernel)
    except ImportError:
        raise SettingsWrong(
            "Numba is not installed", place="profiles.kernel", hint="pip install 'keyfold[kernels]', or set it to auto"
        ) from None


def planned(
    product: Product,
    asked: Asked,
    stored: Mapping[ProfileKey, Stored],
    held: Mapping[Place, list[Held]],
    kept_back: Container[UpdateKey],
    now_us: int,
) -> Plan:
    """Fold events into their profiles; where data is owned, settle first what is public, without what is kept back."""
    now = now_us // 1_000_000
    profiles, bodies = asked.profiles, [stored[key].body for key in asked.profiles]
    settled = Settlement([], [], [], 0, {})
    if held or asked.is_owned:
        rows = list(asked.rows())
        settled = settlement(product, rows, stored, held, kept_back, now_us)
        updates = _columns_of(product, profiles, [*(row for row in rows if not row.owner), *settled.released])
    else:
        updates = _columns(product, asked)
    folded = _folded(product, bodies, updates, now)
    plan = Plan(profiles, folded, settled, len(updates.profile), {}, set())
    full = _full(product, bodies, folded)
    if folded.refused or folded.broken or full or settled.broken:
        _judge(product, plan, bodies, list(asked.rows()), full, now)
    return plan


def _full(product: Product, bodies: Sequence[bytes], folded: Folded) -> list[int]:
    """The profiles that this batch would make too large."""
    bytes_max = product.settings.profile_bytes_max
    return [
        index for index, body in enumerate(folded.bodies) if len(body) > bytes_max and len(body) > len(bodies[index])
    ]


def _judge(
    product: Product, plan: Plan, bodies: Sequence[bytes], rows: Sequence[Row], full: Sequence[int], now: int
) -> None:
    """Find what cannot be kept: a sum that overflows, a stored body that is broken, a profile that is full.

    Events are refused by what is public alone. What a source releases is never a reason, nor is its event refused for
    it: it waits on. Otherwise a status would tell that something waits.
    """
    for row in rows:
        if row.owner and (error := plan.settlement.broken.get(_place(product, row))):
            plan.refused.setdefault((row.log, row.event_id), error)
    stored = dict(zip(plan.profiles, bodies, strict=True))

    @cache
    def counters_of(profile: ProfileKey) -> Counters:
        return Counters(product.catalog, stored[profile], now)

    public = [row for row in rows if not row.owner]
    _judge_refused(product, plan, public, stored, counters_of, now)
    broken = {plan.profiles[index]: error for index, error in plan.folded.broken.items()}
    crowded = [plan.profiles[index] for index in full]
    profiles: dict[ProfileKey, Rows] = {each: Rows([], []) for each in (*broken, *crowded)}
    for row in public:
        if row.profile in profiles:
            profiles[row.profile].public.append(row)
    for row in plan.settlement.released:
        if row.profile in profiles:
            profiles[row.profile].released.append(row)
    for profile, wrong in broken.items():
        _leave_out(plan, profiles[profile], wrong)
    rooms = {each: _Room(product, each, stored[each], counters_of(each), now) for each in crowded}
    error_full = UpdateRefused(f"the profile is full: its body may have {product.settings.profile_bytes_max} bytes")
    for profile, room in rooms.items():
        _leave_out(plan, Rows(room.without_room(profiles[profile].public), []), error_full)
    if not plan.refused:  # else all is folded again, and other updates may be released
        for profile, room in rooms.items():
            _leave_out(plan, Rows([], room.not_released(profiles[profile].released)), error_full)


def _judge_refused(
    product: Product,
    plan: Plan,
    public: Sequence[Row],
    stored: Mapping[ProfileKey, bytes],
    counters_of: Callable[[ProfileKey], Counters],
    now: int,
) -> None:
    """Refuse what the fold refused; where something is released at its key, only what is refused without that, too.

    What is released makes its key live: then rows count that are too old by themselves, of all counters of its group.
    """
    folded = [*public, *plan.settlement.released]
    freed = {_place(product, row) for row in plan.settlement.released} if plan.folded.refused else set()
    doubtful: dict[Spot, tuple[Place, KeyfoldError]] = {}  # each once, however many rows of it are refused
    for at, refusal in plan.folded.refused.items():
        if (place := _place(product, folded[at])) in freed:
            doubtful[_spot(folded[at])] = place, refusal
        else:
            plan.refused.setdefault((folded[at].log, folded[at].event_id), refusal)
    if not doubtful:
        return
    places = {place: Rows([], []) for place, _ in doubtful.values()}
    for at, row in enumerate(folded):
        if (here := places.get(_place(product, row))) is not None:
            (here.public if at < len(public) else here.released).append(row)
    _refuse_alone(product, plan, [row for here in places.values() for row in here.public], stored, now)
    for spot, (place, refusal) in doubtful.items():
        own = Rows(
            *([row for row in part if _spot(row) == spot] for part in (places[place].public, places[place].released))
        )
        left_out = own.released
        if isinstance(refusal, CounterOverflow):
            left_out = _too_much(int(counters_of(spot[0]).get(spot[1], spot[2])), own)
        plan.kept_back.update(row.update for row in left_out or places[place].released)


def _refuse_alone(
    product: Product, plan: Plan, rows: Sequence[Row], stored: Mapping[ProfileKey, bytes], now: int
) -> None:
    """Refuse what cannot be kept of some public updates, folded by themselves."""
    if not rows:
        return
    profiles = list(dict.fromkeys(row.profile for row in rows))
    columns = _columns_of(product, profiles, rows)
    for at, refusal in _folded(product, [stored[each] for each in profiles], columns, now).refused.items():
        plan.refused.setdefault((rows[at].log, rows[at].event_id), refusal)


def _place(product: Product, row: Row) -> Place:
    return (*row.profile, product.catalog.group_of(row.counter.id).id, row.key)


def _spot(row: Row) -> Spot:
    return row.profile, row.counter.id, row.key


def _leave_out(plan: Plan, rows: Rows, error: KeyfoldError) -> None:
    for row in rows.public:
        plan.refused.setdefault((row.log, row.event_id), error)
    plan.kept_back.update(row.update for row in rows.released)


def _too_much(stands: int, here: Rows) -> list[Row]:
    """What is released into an exact sum and has no room in 64 bits, beside what is public: the largest.

    Nothing where what is public has no room itself: that is too old, and takes none once all that makes its key live
    waits on.
    """
    room = UINT64_MAX - stands - sum(int(row.value) for row in here.public)
    left_out: list[Row] = []
    if room < 0:
        return left_out
    for row in sorted(here.released, key=lambda each: (each.value, each.update)):
        if row.value > room:
            left_out.append(row)
        else:
            room -= int(row.value)
    return left_out


def _together(rows: Sequence[Row], key: Callable[[Row], Hashable]) -> list[list[Row]]:
    found: dict[Hashable, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return list(found.values())


class _Room:
    """A profile that cannot take all of a batch: what of it has no room. What adds nothing to its size always has.

    Events are judged each by itself, none is refused for its neighbours: they are taken in runs, which are halved where
    they do not fit. A flood of misfits would need a fold for each: beyond a bound on that work, what is left is refused
    unseen. What is released has a few folds only, or how long they take would tell that something waited.
    """

    def __init__(self, product: Product, profile: ProfileKey, body: bytes, counters: Counters, now: int) -> None:
        self._product, self._profile, self._body, self._now = product, profile, body, now
        self._counters = counters
        self._known: dict[int, bool] = {}
        self._taken: list[Row] = []
        self._left_out: list[Row] = []
        self._work_left = 0

    def without_room(self, rows: Sequence[Row]) -> list[Row]:
        """Take the events that fit, in their order; returns the rows of the others."""
        events = _together(rows, lambda row: (row.log, row.event_id))
        self._left_out, self._work_left = [], TRIES_MAX * TRY_ROWS + HALVINGS_MAX * self._work(rows)
        self._take([each for each in events if not any(map(self._adds, each))])
        self._take([each for each in events if any(map(self._adds, each))])
        return self._left_out

    def not_released(self, rows: Sequence[Row]) -> list[Row]:
        """Of what is released, all of which does not fit, take the newest keys that do; returns the rows of the others.

        What needs a new counter comes last: that takes room beside every key of its group.
        """
        inside = [row for row in rows if not self._adds(row)]
        spots = sorted(_together([row for row in rows if self._adds(row)], _spot), key=self._order)
        if not spots or (inside and not self._fits(inside)):
            return list(rows)
        self._taken += inside
        fitting, misfit, count = 0, len(spots), 1  # mostly not even one fits: that is known at once
        for _ in range(RELEASE_TRIES_MAX):
            if misfit - fitting <= 1:
                break
            if self._fits([row for spot in spots[:count] for row in spot]):
                fitting = count
            else:
                misfit = count
            count = (fitting + misfit) // 2
        return [row for spot in spots[fitting:] for row in spot]

    def _order(self, spot: Sequence[Row]) -> tuple[bool, int, Spot]:
        return not self._knows(spot[0].counter.id), -max(row.time for row in spot), _spot(spot[0])

    def _adds(self, row: Row) -> bool:
        return not (self._knows(row.counter.id) and self._counters.find(row.counter.id, row.key))

    def _knows(self, counter_id: int) -> bool:
        known = self._known.get(counter_id)
        if known is None:
            group = self._product.catalog.group_of(counter_id)
            known = self._known[counter_id] = counter_id in self._counters.counter_ids(group)
        return known

    def _take(self, events: Sequence[Sequence[Row]]) -> None:
        rows = [row for event in events for row in event]
        if not rows or self._has_room(rows):
            self._taken += rows
        elif len(events) == 1:
            self._left_out += rows
        else:
            middle = len(events) // 2
            self._take(events[:middle])
            self._take(events[middle:])

    def _has_room(self, rows: Sequence[Row]) -> bool:
        self._work_left -= TRY_ROWS + self._work([*self._taken, *rows])
        return self._work_left >= 0 and self._fits(rows)

    def _work(self, rows: Sequence[Row]) -> int:
        return len(rows) + len(self._body) // BODY_BYTES_PER_ROW

    def _fits(self, rows: Sequence[Row]) -> bool:
        wanted = _columns_of(self._product, [self._profile], [*self._taken, *rows])
        folded = _folded(self._product, [self._body], wanted, self._now)
        return len(folded.bodies[0]) <= max(self._product.settings.profile_bytes_max, len(self._body))
