"""A batch folded in memory: columns from what the handlers said, one call of the kernel, and what cannot be kept."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from msgspec import Struct

from keyfold.core.errors import KeyfoldError, SettingsWrong
from keyfold.counters.bulk import Folded, Updates, fold, reading
from keyfold.counters.catalog import Kind
from keyfold.counters.errors import UpdateRefused
from keyfold.profiles.model import Held, ProfileKey, Ready, Row, rows_of
from keyfold.profiles.service.holding import Place, Settlement, settlement
from keyfold.profiles.service.product import Product
from keyfold.profiles.service.storing import Stored


class Plan(Struct):
    """What a batch comes to, before anything is written."""

    profiles: list[ProfileKey]
    folded: Folded
    settlement: Settlement
    updates: int
    refused: dict[tuple[str, str], KeyfoldError]  # events that cannot be kept, by log and id


class Batch:
    """Updates in columns, as the kernel takes them."""

    def __init__(self, profiles: Iterable[ProfileKey]) -> None:
        self._places = {key: index for index, key in enumerate(profiles)}
        self.profile: list[int] = []
        self.counter: list[int] = []
        self.key: list[int] = []
        self.value: list[float | int] = []
        self.time: list[int] = []
        self._is_exact = False

    def add_events(self, events: Iterable[Ready]) -> None:
        """The updates of events none of which is owned."""
        places, profile, counter = self._places, self.profile.append, self.counter.append
        key, value, time = self.key.append, self.value.append, self.time.append
        for event in events:
            for changed, updates in event.changes:
                place = places[changed]
                for described, at, amount, _ in updates:
                    profile(place)
                    counter(described.id)
                    key(at)
                    value(amount)
                    time(event.time)
                    self._is_exact |= described.kind is Kind.FIXED64

    def add_rows(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.profile.append(self._places[row.profile])
            self.counter.append(row.counter.id)
            self.key.append(row.key)
            self.value.append(row.value)
            self.time.append(row.time)
            self._is_exact |= row.counter.kind is Kind.FIXED64

    def folded(self, product: Product, bodies: Sequence[bytes], now: int) -> Folded:
        exact = product.catalog.counters
        counts = (
            [int(v) if exact[c].kind is Kind.FIXED64 else 0 for c, v in zip(self.counter, self.value, strict=True)]
            if self._is_exact
            else None
        )
        updates = Updates(
            profile=np.array(self.profile, np.int64),
            counter=np.array(self.counter, np.uint64),
            key=np.array(self.key, np.uint64),
            value=np.array(self.value, np.float64),
            time=np.array(self.time, np.int64),
            count=None if counts is None else np.array(counts, np.uint64),
        )
        return fold(
            product.catalog,
            bodies,
            updates,
            now=now,
            future_seconds_max=2
            ** 32,  # every time was judged when its event arrived; the clock may have gone back since
            kernel=product.settings.kernel,
        )


def warm(product: Product) -> None:
    """Fold something, so that no transaction waits for the kernel: the first time ever, it is compiled for seconds."""
    counter = next((each for each in product.catalog.counters.values() if not each.no_operation), None)
    if counter is None:
        return
    batch = Batch([("", "")])
    batch.add_rows([Row(("", ""), counter, 1, 1, 1, 0, "", "", 0)])
    try:
        batch.folded(product, [b""], 1)
        reading.warm(product.catalog, kernel=product.settings.kernel)
    except ImportError:
        raise SettingsWrong(
            "Numba is not installed", place="profiles.kernel", hint="pip install 'keyfold[kernels]', or set it to auto"
        ) from None


def planned(
    product: Product,
    events: Sequence[Ready],
    stored: Mapping[ProfileKey, Stored],
    held: Mapping[Place, list[Held]],
    now_us: int,
) -> Plan:
    """Fold events into their profiles; where data is owned, settle first what is public."""
    now = now_us // 1_000_000
    profiles, bodies = list(stored), [row.body for row in stored.values()]
    batch = Batch(profiles)
    settled = Settlement([], [], [], 0, {})
    if held or any(event.is_owned for event in events):
        rows = [row for event in events for row in rows_of(event)]
        settled = settlement(product, rows, stored, held, now_us)
        batch.add_rows(row for row in rows if not row.owner)
        batch.add_rows(settled.released)
    else:
        batch.add_events(events)
    folded = batch.folded(product, bodies, now)
    plan = Plan(profiles, folded, settled, len(batch.profile), {})
    full = _full(product, bodies, folded)
    if folded.refused or folded.broken or full or settled.broken:
        plan.refused = _refused(product, plan, bodies, [row for event in events for row in rows_of(event)], full, now)
    return plan


def _full(product: Product, bodies: Sequence[bytes], folded: Folded) -> list[int]:
    """The profiles that this batch would make too large."""
    bytes_max = product.settings.profile_bytes_max
    return [
        index for index, body in enumerate(folded.bodies) if len(body) > bytes_max and len(body) > len(bodies[index])
    ]


def _refused(
    product: Product, plan: Plan, bodies: Sequence[bytes], rows: Sequence[Row], full: Sequence[int], now: int
) -> dict[tuple[str, str], KeyfoldError]:
    """The events that cannot be kept: a sum that overflows, a stored body that is broken, a profile that is full."""
    refused: dict[tuple[str, str], KeyfoldError] = {}
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
        for row in _not_fitting(product, plan.profiles[index], bodies[index], own[plan.profiles[index]], now):
            refused.setdefault((row.log, row.event_id), error)
    return refused


def _not_fitting(product: Product, profile: ProfileKey, body: bytes, own: Sequence[Row], now: int) -> Sequence[Row]:
    """The updates of a profile behind the longest beginning that fits into it."""
    fits, too_many = 0, len(own)
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        batch = Batch([profile])
        batch.add_rows(own[:middle])
        if len(batch.folded(product, [body], now).bodies[0]) <= max(product.settings.profile_bytes_max, len(body)):
            fits = middle
        else:
            too_many = middle
    return own[fits:]
