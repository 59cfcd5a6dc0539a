"""B1: the columnar fold of counters, bytes in and bytes out, against plain Python and plain dict sums.

Updates fall on profiles and on keys by Zipf 1.1; the counter decays by 1 a week and keeps 60 keys. Every side starts
from the same bodies, which hold an earlier part of the stream. The straightforward side does the same work with
dicts and protobuf; the dict sums know neither time nor cap nor bytes. The second race is what a service does: a few
updates on many profiles of about 700 bytes, where finding and writing the bytes is the work.
"""

import math
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
from numpy.typing import NDArray

from bench.harness import Goal, Race, Side, rate, seconds
from keyfold.counters.bulk import KernelName, Updates, fold
from keyfold.counters.bulk.folding import has_numba
from keyfold.counters.catalog import Catalog, Counter, Kind
from keyfold.counters.messages_pb2 import Profile

NOW = 1_700_000_000
DAY_SECONDS, WEEK_SECONDS = 86_400, 604_800
SEEN, VALUE = 1, 2  # the time counter and its value counter
SEEN_OTHER, VALUE_OTHER, VALUE_THIRD = 10, 11, 12
RECORDS_MAX, EXPIRE_DAYS, DECAY = 60, 100, 1.0
KEYS = 200
FOLDS = 5  # one after the other, each from the same bodies: one alone is done in a tenth of a second

Table = dict[int, tuple[int, float]]  # key -> time, value


def _counter(counter_id: int, kind: Kind, **options: object) -> Counter:
    return Counter(id=counter_id, name=f"c{counter_id}", kind=kind, namespace="n", **options)  # type: ignore[arg-type]


CATALOG = Catalog(
    [
        _counter(SEEN, Kind.FIXED32, records_max=RECORDS_MAX, expire_days=EXPIRE_DAYS),
        _counter(VALUE, Kind.FLOAT, decay=DECAY, time_counter_id=SEEN),
    ]
)
CATALOG_OF_SERVICE = Catalog(
    [
        *CATALOG.counters.values(),
        _counter(SEEN_OTHER, Kind.FIXED32, records_max=RECORDS_MAX, expire_days=EXPIRE_DAYS),
        _counter(VALUE_OTHER, Kind.FLOAT, decay=0.1, time_counter_id=SEEN_OTHER),
        _counter(VALUE_THIRD, Kind.FLOAT, decay=7.0, time_counter_id=SEEN_OTHER),
    ]
)


def races(quick: bool) -> Iterator[Race]:
    yield _large(200_000 if quick else 5_000_000, 2_000 if quick else 20_000)
    yield _small(20 if quick else 100)


def _kernels() -> list[KernelName]:
    return ["numba", "numpy"] if has_numba() else ["numpy"]


# The large batch ----------------------------------------------------------------------------------------------------


def _large(count: int, profiles: int) -> Race:
    before = fold(CATALOG, [b""] * profiles, _stream(count // 5, profiles, seed=1, ago=30), now=NOW).bodies
    updates = _stream(count, profiles, seed=2, ago=0)
    given = (updates.profile, updates.counter, updates.key, updates.value, updates.time)
    columns = [column.tolist() for column in given]
    profile, counter, key, value, _ = columns
    _must_agree(before, updates, columns)
    sides = [Side(f"fold, {name}", _folding(name, before, updates)) for name in _kernels()]
    sides.append(Side("straightforward", lambda: rate(count, lambda: straightforward(before, *columns))))
    sides.append(Side("dict sums", lambda: rate(count, lambda: dict_sums(profile, counter, key, value))))
    nested = "dict sums, one dict a profile"
    sides.append(Side(nested, lambda: rate(count, lambda: nested_dict_sums(profiles, profile, key, value))))
    goals = []
    for side in sides[:-3]:
        goals.append(Goal(side=side.name, against="dict sums", must=3, moonshot=10))
        goals.append(Goal(side=side.name, against="straightforward", must=50))
        goals.append(Goal(side=side.name, against=nested))
    title = f"{count:,} updates into {profiles:,} profiles, one call"
    return Race(title=title, unit="updates/s", sides=sides, goals=goals)


def _folding(name: KernelName, bodies: list[bytes], updates: Updates) -> Callable[[], float]:
    fold(CATALOG, bodies[:1], _stream(1, 1, seed=3, ago=0), now=NOW, kernel=name)  # compiles

    def several() -> None:
        for _ in range(FOLDS):
            fold(CATALOG, bodies, updates, now=NOW, kernel=name)

    return lambda: rate(FOLDS * len(updates.profile), several)


def _zipf(chance: np.random.Generator, values: int, count: int) -> NDArray[np.int64]:
    weights = 1 / np.arange(1, values + 1) ** 1.1
    ranks = np.searchsorted(np.cumsum(weights) / weights.sum(), chance.random(count))
    return chance.permutation(values)[np.minimum(ranks, values - 1)]


def _stream(count: int, profiles: int, *, seed: int, ago: int) -> Updates:
    """A month of updates that ended `ago` days ago."""
    chance = np.random.default_rng(seed)
    return Updates(
        profile=_zipf(chance, profiles, count),
        counter=np.full(count, VALUE, np.uint64),
        key=_zipf(chance, KEYS, count).astype(np.uint64),
        value=np.ones(count),
        time=NOW - ago * DAY_SECONDS - chance.integers(0, 30 * DAY_SECONDS, count),
    )


class Straightforward:
    """CNT-04 to CNT-07 for any catalog, as one would write them first: dicts, and protobuf at both ends."""

    def __init__(self, catalog: Catalog, body: bytes) -> None:
        self.catalog = catalog
        self.times: dict[int, dict[int, int]] = {}  # group -> key -> time
        self.values: dict[int, dict[int, float]] = {}  # counter -> key -> value
        for pack in Profile.FromString(body).packed_counters:
            for counter_id, row in zip(pack.counter_ids, pack.values, strict=True):
                group = catalog.group_of(counter_id)
                if group.time is not None and counter_id == group.time.id:
                    self.times[group.id] = dict(zip(pack.keys, row.fixed32_values.value, strict=True))
                else:
                    self.values[counter_id] = dict(zip(pack.keys, row.float_values.value, strict=True))

    def update(self, counter_id: int, key: int, value: float, time: int) -> None:
        counter, group = self.catalog[counter_id], self.catalog.group_of(counter_id)
        times, values = self.times.setdefault(group.id, {}), self.values.setdefault(counter_id, {})
        latest = times.get(key)
        if latest is not None and NOW - latest > EXPIRE_DAYS * DAY_SECONDS:
            latest = None
            for sibling in group.values:
                self.values.get(sibling.id, {}).pop(key, None)
        if latest is None:
            if NOW - time > EXPIRE_DAYS * DAY_SECONDS:
                return
            latest = time
        if time > latest:
            for sibling in group.values:
                column = self.values.get(sibling.id, {})
                if key in column:
                    column[key] = _decayed(column[key], sibling.decay, time - latest)
            latest = time
        times[key] = latest
        values[key] = values.get(key, 0.0) + _decayed(value, counter.decay, latest - time)

    def cleanup(self) -> None:
        for group_id, times in self.times.items():
            group = self.catalog.groups[group_id]
            live = {key: time for key, time in times.items() if NOW - time <= EXPIRE_DAYS * DAY_SECONDS}
            newest = sorted(live, key=lambda key: (live[key], key), reverse=True)[: group.records_max]
            self.times[group_id] = {key: times[key] for key in sorted(newest)}

    def serialise(self) -> bytes:
        profile = Profile()
        for group_id, times in self.times.items():
            if not times:
                continue
            pack = profile.packed_counters.add(keys=list(times))
            for counter_id in self.catalog.groups[group_id].counter_ids:
                if counter_id == group_id:
                    pack.values.add().fixed32_values.value.extend(times.values())
                elif counter_id in self.values:
                    column = self.values[counter_id]
                    pack.values.add().float_values.value.extend([column.get(key, 0.0) for key in times])
                else:
                    continue
                pack.counter_ids.append(counter_id)
        return profile.SerializeToString()


def straightforward(
    bodies: list[bytes], profile: list[int], counter: list[int], key: list[int], value: list[float], time: list[int]
) -> list[bytes]:
    tables = [Straightforward(CATALOG, body) for body in bodies]
    for each, *update in zip(profile, counter, key, value, time, strict=True):
        tables[each].update(*update)
    for table in tables:
        table.cleanup()
    return [table.serialise() for table in tables]


def _decayed(value: float, decay: float, age: int) -> float:
    return value * math.exp(-decay * age / WEEK_SECONDS)


def _parsed(body: bytes) -> Table:
    table: Table = {}
    for pack in Profile.FromString(body).packed_counters:
        times, values = pack.values[0].fixed32_values.value, pack.values[1].float_values.value
        table.update(zip(pack.keys, zip(times, values, strict=True), strict=True))
    return table


def dict_sums(profile: list[int], counter: list[int], key: list[int], value: list[float]) -> int:
    sums: dict[tuple[int, int, int], float] = {}
    for place, each in zip(zip(profile, counter, key, strict=True), value, strict=True):
        sums[place] = sums.get(place, 0.0) + each
    return len(sums)


def nested_dict_sums(profiles: int, profile: list[int], key: list[int], value: list[float]) -> int:
    """Quicker than a peer that knows of counters could be: one counter, profiles in a list."""
    sums: list[dict[int, float]] = [{} for _ in range(profiles)]
    for each_profile, each_key, each_value in zip(profile, key, value, strict=True):
        own = sums[each_profile]
        own[each_key] = own.get(each_key, 0.0) + each_value
    return sum(map(len, sums))


def _must_agree(bodies: list[bytes], updates: Updates, columns: list[list[float]]) -> None:
    """A race between sides that come to different answers would mean nothing."""
    wanted = straightforward(bodies, *columns)  # type: ignore[arg-type]
    for name in _kernels():
        folded = fold(CATALOG, bodies, updates, now=NOW, kernel=name)
        for body, other in zip(folded.bodies, wanted, strict=True):
            ours, theirs = _parsed(body), _parsed(other)
            assert ours.keys() == theirs.keys()
            assert all(ours[key][0] == time for key, (time, _) in theirs.items())
            assert all(math.isclose(ours[key][1], value, rel_tol=1e-5) for key, (_, value) in theirs.items())


# The small batches of a service -------------------------------------------------------------------------------------


def _small(batches: int) -> Race:
    profiles, count = 1_500, 2_000
    bodies = _bodies_of_service(profiles)
    work = [_batch_of_service(profiles, count, seed) for seed in range(batches)]
    sides = [Side(f"fold, {name}", _serving(name, bodies, work)) for name in _kernels()]
    sides.append(Side("parse and serialise by protobuf", lambda: _by_protobuf(bodies, batches)))
    goals = [Goal(side=side.name, against=None, must=8) for side in sides[:1]]
    goals += [Goal(side=side.name, against=sides[-1].name) for side in sides[:-1]]
    mean = round(sum(map(len, bodies)) / len(bodies))
    title = f"{count:,} updates over {profiles:,} profiles of {mean} bytes"
    return Race(title=title, unit="µs a profile", better="less", sides=sides, goals=goals)


@cache
def _hashed_keys() -> NDArray[np.uint64]:
    return np.random.default_rng(5).integers(0, 2**64, 100_000, dtype=np.uint64)


def _batch_of_service(profiles: int, count: int, seed: int) -> Updates:
    """Every profile once, the rest by chance; keys are hashes, as most namespaces have them."""
    chance = np.random.default_rng(seed)
    every = np.concatenate([np.arange(profiles), chance.integers(0, profiles, max(count - profiles, 0))])[:count]
    return Updates(
        profile=every,
        counter=chance.choice(np.array([VALUE, VALUE_OTHER, VALUE_THIRD], np.uint64), count),
        key=_hashed_keys()[chance.integers(0, 25, count) + every * 25],
        value=np.ones(count),
        time=NOW - chance.integers(0, 30 * DAY_SECONDS, count),
    )


def _bodies_of_service(profiles: int) -> list[bytes]:
    bodies = [b""] * profiles
    for seed in range(30):
        bodies = fold(CATALOG_OF_SERVICE, bodies, _batch_of_service(profiles, 2_000, 1_000 + seed), now=NOW).bodies
    return bodies


def _serving(name: KernelName, bodies: list[bytes], work: list[Updates]) -> Callable[[], float]:
    def run() -> None:
        for updates in work:
            fold(CATALOG_OF_SERVICE, bodies, updates, now=NOW, kernel=name)

    fold(CATALOG_OF_SERVICE, bodies[:1], _batch_of_service(1, 1, 0), now=NOW, kernel=name)  # compiles
    return lambda: seconds(run) / (len(work) * len(bodies)) * 1e6


def _by_protobuf(bodies: list[bytes], batches: int) -> float:
    """What it would cost to look at every number of a body and put it back, without folding anything."""

    def run() -> None:
        for _ in range(batches):
            for body in bodies:
                old, new = Profile.FromString(body), Profile()
                for pack in old.packed_counters:
                    other = new.packed_counters.add(counter_ids=list(pack.counter_ids), keys=list(pack.keys))
                    for row in pack.values:
                        kind = row.WhichOneof("value") or ""
                        getattr(other.values.add(), kind).value.extend(list(getattr(row, kind).value))
                new.SerializeToString()

    return seconds(run) / (batches * len(bodies)) * 1e6
