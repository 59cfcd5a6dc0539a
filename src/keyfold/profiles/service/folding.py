"""A batch folded in memory: columns from what the handlers said, one call of the kernel, and what cannot be kept."""

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from keyfold.core.errors import KeyfoldError, SettingsWrong
from keyfold.counters.bulk import Folded, Updates, fold, reading
from keyfold.counters.catalog import Kind
from keyfold.counters.counters import Counters
from keyfold.counters.errors import UpdateRefused
from keyfold.profiles.model import Asked, EventKey, Held, ProfileKey, Row
from keyfold.profiles.service.holding import Place, Settlement, settlement
from keyfold.profiles.service.product import Product
from keyfold.profiles.service.storing import Stored

# Of a full profile: how many folds of its body, each as much work as so many updates, may be spent on what fits; and
# how often all of its updates may be looked at besides, which is enough to find how many of the first do.
TRIES_MAX, TRY_ROWS, HALVINGS_MAX = 200, 1_000, 20


class Plan(Struct):
    """What a batch comes to, before anything is written."""

    profiles: list[ProfileKey]
    folded: Folded
    settlement: Settlement
    updates: int
    refused: dict[EventKey, KeyfoldError]  # events that cannot be kept


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
        product.catalog,
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
    now_us: int,
) -> Plan:
    """Fold events into their profiles; where data is owned, settle first what is public."""
    now = now_us // 1_000_000
    profiles, bodies = asked.profiles, [stored[key].body for key in asked.profiles]
    settled = Settlement([], [], [], 0, {})
    if held or asked.is_owned:
        rows = list(asked.rows())
        settled = settlement(product, rows, stored, held, now_us)
        updates = _columns_of(product, profiles, [*(row for row in rows if not row.owner), *settled.released])
    else:
        updates = _columns(product, asked)
    folded = _folded(product, bodies, updates, now)
    plan = Plan(profiles, folded, settled, len(updates.profile), {})
    full = _full(product, bodies, folded)
    if folded.refused or folded.broken or full or settled.broken:
        plan.refused = _refused(product, plan, bodies, list(asked.rows()), full, now)
    return plan


def _full(product: Product, bodies: Sequence[bytes], folded: Folded) -> list[int]:
    """The profiles that this batch would make too large."""
    bytes_max = product.settings.profile_bytes_max
    return [
        index for index, body in enumerate(folded.bodies) if len(body) > bytes_max and len(body) > len(bodies[index])
    ]


def _refused(
    product: Product, plan: Plan, bodies: Sequence[bytes], rows: Sequence[Row], full: Sequence[int], now: int
) -> dict[EventKey, KeyfoldError]:
    """The events that cannot be kept: a sum that overflows, a stored body that is broken, a profile that is full."""
    refused: dict[EventKey, KeyfoldError] = {}
    folded = [*(row for row in rows if not row.owner), *plan.settlement.released]
    for at, error in plan.folded.refused.items():
        refused.setdefault((folded[at].log, folded[at].event_id), error)
    broken: dict[ProfileKey, KeyfoldError] = {plan.profiles[index]: e for index, e in plan.folded.broken.items()}
    broken |= plan.settlement.broken
    for row in rows:
        if row.profile in broken:
            refused.setdefault((row.log, row.event_id), broken[row.profile])
    own: dict[ProfileKey, list[Row]] = {plan.profiles[index]: [] for index in full}
    for row in folded:
        if row.profile in own:
            own[row.profile].append(row)
    error = UpdateRefused(f"the profile is full: its body may have {product.settings.profile_bytes_max} bytes")
    for index in full:
        profile = plan.profiles[index]
        for event in _not_fitting(product, profile, bodies[index], own[profile], now):
            refused.setdefault(event, error)
    return refused


def _not_fitting(
    product: Product, profile: ProfileKey, body: bytes, own: Sequence[Row], now: int
) -> Sequence[EventKey]:
    """The events that a full profile has no room for. What adds nothing to its size is never among them."""
    events: dict[EventKey, list[Row]] = {}
    for row in own:
        events.setdefault((row.log, row.event_id), []).append(row)
    counters = Counters(product.catalog, body, now)
    known = {each for group in counters.groups() for each in counters.counter_ids(group)}
    adding = {
        event
        for event, rows in events.items()
        if not all(row.counter.id in known and counters.find(row.counter.id, row.key) for row in rows)
    }
    room = _Room(product, profile, body, own, now)
    room.take([rows for event, rows in events.items() if event not in adding])
    room.take([rows for event, rows in events.items() if event in adding])
    return room.refused


class _Room:
    """A profile that cannot take all events of a batch: each is judged by itself, none is refused for its neighbours.

    Events are taken in runs, which are halved where they do not fit. A flood of misfits would need a fold for each:
    beyond a bound on that work, what is left is refused unseen.
    """

    def __init__(self, product: Product, profile: ProfileKey, body: bytes, own: Sequence[Row], now: int) -> None:
        self.refused: list[EventKey] = []
        self._product, self._profile, self._body, self._now = product, profile, body, now
        self._taken: list[Row] = []
        self._work_left = TRIES_MAX * TRY_ROWS + HALVINGS_MAX * len(own)

    def take(self, events: Sequence[Sequence[Row]]) -> None:
        """Take those that fit, in their order."""
        rows = [row for event in events for row in event]
        if not rows or self._fits(rows):
            self._taken += rows
        elif len(events) == 1:
            self.refused.append((rows[0].log, rows[0].event_id))
        else:
            middle = len(events) // 2
            self.take(events[:middle])
            self.take(events[middle:])

    def _fits(self, rows: Sequence[Row]) -> bool:
        wanted = [*self._taken, *rows]
        self._work_left -= TRY_ROWS + len(wanted)
        if self._work_left < 0:
            return False
        folded = _folded(self._product, [self._body], _columns_of(self._product, [self._profile], wanted), self._now)
        return len(folded.bodies[0]) <= max(self._product.settings.profile_bytes_max, len(self._body))
