"""Reading many stored profiles at once: the counters asked for, as lists, of bodies that can be passed on as they lie.

With Numba all bodies go through one compiled loop, and through a second one where JSON is wanted; what the first puts
aside, and everything without Numba, goes through protobuf, with all that depends on the counters of a pack worked out
once. What neither can pass on (something has expired, is too much, is in another form, is broken) is answered None, and
the caller looks at it key by key.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, islice
from math import isfinite
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np
from msgspec import Struct

from keyfold.counters.bulk.columns import Bytes, Ints, KernelName, Numbers, Words
from keyfold.counters.bulk.folding import has_numba
from keyfold.counters.bulk.tables import tables_of
from keyfold.counters.catalog import Catalog, Kind
from keyfold.counters.errors import PackWrong
from keyfold.counters.model import Number
from keyfold.counters.packs import NAMES, must_be_whole, parsed

# What one run of the loop holds in memory is some twenty times this.
CHUNK_BYTES = 1 << 18
CODE_BITS = 32
PLANS_MAX = 1_000
LAYOUTS_MAX = 1_000
REAL = (Kind.FLOAT, Kind.DOUBLE)


class Pack(Struct, frozen=True, gc=False):
    """Counters that share keys, as they are answered. The list of ids is shared between packs."""

    counter_ids: list[int]
    keys: Sequence[int]
    rows: list[tuple[Kind, Sequence[Number]]]


# The wanted counters of a pack; of each its kind, and whether its values are real; the kind where it is just one such.
Shape = tuple[list[int], list[tuple[Kind, bool]], Kind | None]


class Layout(Struct, frozen=True):
    """What to take of a pack with certain counters in a certain order; of nothing wanted, no rows."""

    counter_ids: list[int]
    rows: list[tuple[int, Kind, str]]  # place, kind, name of the field
    time_at: int | None = None
    records_max: int | None = None
    expire_seconds: int | None = None


class Plan:
    """What is known beforehand of reading certain counters: the catalog as arrays, and every kind of pack met so far.

    `fits` is False where a group has more wanted counters than a code has bits.
    """

    def __init__(self, catalog: Catalog, wanted: frozenset[int]) -> None:
        self._catalog = ref(catalog)  # which the plans are kept by: one that held it would keep it for good
        self.wanted = wanted
        self.members = [
            [each for each in group.counter_ids if each in wanted] for group in catalog.groups.values()
        ]  # by the place of their group
        self.fits = all(len(each) < CODE_BITS for each in self.members)
        self.ids: Words = tables_of(catalog).ids
        self.counters, self.groups = self._tables() if self.fits else (np.empty((0, 4), np.int64),) * 2
        self.kinds: Words = np.array(
            [(each, catalog[each].kind) for members in self.members for each in members], np.uint64
        ).reshape(-1, 2)
        self.firsts: Ints = np.array([*accumulate(map(len, self.members), initial=0)], np.int64)
        self.shapes: dict[int, Shape] = {}
        self.layouts: dict[tuple[int, ...], Layout | None] = {}

    @property
    def catalog(self) -> Catalog:
        catalog = self._catalog()
        assert catalog is not None, "whoever reads holds the catalog"
        return catalog

    def shape(self, code: int) -> Shape:
        """What the compiled loop means by a code."""
        members = self.members[code >> CODE_BITS]
        ids = [each for bit, each in enumerate(members) if code >> bit & 1]
        kinds = [self.catalog[each].kind for each in ids]
        only_real = kinds[0] if len(kinds) == 1 and kinds[0] in REAL else None
        shape = self.shapes[code] = (ids, [(kind, kind in REAL) for kind in kinds], only_real)
        return shape

    def layout(self, ids: tuple[int, ...]) -> Layout | None:
        """How a pack of these counters is read; None where it is not simply one group."""
        if len(self.layouts) >= LAYOUTS_MAX:  # bodies of others may hold anything
            self.layouts.clear()
        layout = self.layouts[ids] = self._layout(ids)
        return layout

    def _layout(self, ids: tuple[int, ...]) -> Layout | None:
        picked = [(index, each) for index, each in enumerate(ids) if each in self.wanted]
        if not picked:
            wanted = {self.catalog.group_of(each).id for each in self.wanted if each in self.catalog}
            others = {self.catalog.group_of(each).id for each in ids if each in self.catalog}
            return Layout([], []) if ids and not wanted & others else None
        if not all(each in self.catalog for each in ids):
            return None
        group = self.catalog.group_of(picked[0][1])
        if not all(each in group.counter_ids for each in ids) or (group.time and group.time.id not in ids):
            return None
        if group.time is None and len(ids) > 1:
            return None
        kinds = [self.catalog[each].kind for _, each in picked]
        return Layout(
            [each for _, each in picked],
            [(index, kind, NAMES[kind]) for (index, _), kind in zip(picked, kinds, strict=True)],
            ids.index(group.time.id) if group.time else None,
            group.records_max,
            group.expire_seconds,
        )

    def _tables(self) -> tuple[Ints, Ints]:
        tables = tables_of(self.catalog)
        bits = {each: 1 << bit for members in self.members for bit, each in enumerate(members)}
        times = {group.time.id for group in self.catalog.groups.values() if group.time}
        counters = [
            (each.kind, place, bits.get(each.id, 0), each.id in times)
            for each, place in zip(self.catalog.counters.values(), tables.group.tolist(), strict=True)
        ]
        groups = np.stack([tables.records_max, tables.expire_seconds, tables.time_slot >= 0], axis=1)
        return np.array(counters, np.int64).reshape(-1, 4), groups.astype(np.int64)


_plans: WeakKeyDictionary[Catalog, dict[frozenset[int], Plan]] = WeakKeyDictionary()


def plan_of(catalog: Catalog, wanted: frozenset[int]) -> Plan:
    """The plan of reading certain counters; made once, since a request takes less time than making it."""
    plans = _plans.get(catalog)
    if plans is None:
        plans = _plans[catalog] = {}
    plan = plans.get(wanted)
    if plan is None:
        if len(plans) >= PLANS_MAX:
            plans.clear()
        plan = plans[wanted] = Plan(catalog, wanted)
    return plan


def read(
    catalog: Catalog, bodies: Sequence[bytes], wanted: frozenset[int], now: int, *, kernel: KernelName = "auto"
) -> list[list[Pack] | None]:
    """The wanted packs of each body as of `now`, in the order they are stored; None: look at it key by key."""
    plan = plan_of(catalog, wanted)
    if not _is_compiled(plan, kernel):
        return [_by_protobuf(plan, body, now) for body in bodies]
    found: list[list[Pack] | None] = []
    for some in _chunks(bodies):
        found += _by_numba(plan, some, now)
    return [_by_protobuf(plan, bodies[at], now) if packs is None else packs for at, packs in enumerate(found)]


def write(
    catalog: Catalog, bodies: Sequence[bytes], wanted: frozenset[int], now: int, *, kernel: KernelName = "auto"
) -> list[bytes | None]:
    """The packs that `read` finds as JSON, a list for each body; None where only `read` can tell."""
    plan = plan_of(catalog, wanted)
    if not _is_compiled(plan, kernel):
        return [None] * len(bodies)
    return [written for some in _chunks(bodies) for written in _written(plan, some, now)]


def numbers(
    catalog: Catalog, bodies: Sequence[bytes], wanted: frozenset[int], now: int, *, kernel: KernelName = "auto"
) -> tuple[Numbers, list[int]]:
    """The packs that `read` finds as arrays, and the places of the bodies of which it finds None."""
    plan = plan_of(catalog, wanted)
    if not _is_compiled(plan, kernel):
        packs = [_by_protobuf(plan, body, now) for body in bodies]
        return numbers_of([each or () for each in packs]), [at for at, each in enumerate(packs) if each is None]
    found: list[Numbers] = []
    others: list[int] = []
    begin = 0
    for some in _chunks(bodies):
        packs_of, *columns = _listed(plan, some, now)
        found.append(_numbers(columns, begin))
        if packs_of.min(initial=0) < 0:
            others += (np.flatnonzero(packs_of < 0) + begin).tolist()
        begin += len(some)
    return found[0] if len(found) == 1 else joined(found), others


def numbers_of(profiles: Sequence[Iterable[Pack]]) -> Numbers:
    """The packs of profiles as arrays."""
    rows = [
        (place, counter_id, key, value, 0 if kind in REAL else value)
        for place, packs in enumerate(profiles)
        for pack in packs
        for counter_id, (kind, values) in zip(pack.counter_ids, pack.rows, strict=True)
        for key, value in zip(pack.keys, values, strict=True)
    ]
    columns = zip(*rows, strict=True) if rows else ((),) * len(_TYPES)
    return _numbers([np.array(each, kind) for each, kind in zip(columns, _TYPES, strict=True)])


def joined(found: Sequence[Numbers]) -> Numbers:
    """Numbers of several runs as one, by profile."""
    columns = [np.concatenate([getattr(each, name) for each in found]) for name in Numbers.__struct_fields__]
    order = np.argsort(columns[0], kind="stable")
    return _numbers([each[order] for each in columns])


_TYPES = (np.int64, np.uint64, np.uint64, np.float64, np.uint64)  # of the columns of Numbers


def _numbers(columns: Sequence[Any], begin: int = 0) -> Numbers:
    profile, counter, key, value, count = columns
    return Numbers(profile=profile + begin if begin else profile, counter=counter, key=key, value=value, count=count)


def warm(catalog: Catalog, *, kernel: KernelName = "auto") -> None:
    """Read something, so that no request waits for the loop: the first time ever, it is compiled for seconds."""
    wanted = frozenset(islice(catalog.counters, 1))
    read(catalog, [b""], wanted, 0, kernel=kernel)
    write(catalog, [b""], wanted, 0, kernel=kernel)
    numbers(catalog, [b""], wanted, 0, kernel=kernel)


def _is_compiled(plan: Plan, kernel: KernelName) -> bool:
    return plan.fits and (kernel == "numba" or (kernel == "auto" and has_numba()))


def _written(plan: Plan, bodies: Sequence[bytes], now: int) -> Iterator[bytes | None]:
    from keyfold.counters.bulk.by_numba_writing import write as write_all

    text, ends = write_all(plan.kinds, plan.firsts, *_decoded(plan, bodies, now))
    whole, begin = text.tobytes(), 0
    for end in ends.tolist():
        yield whole[begin:end] or None
        begin = end


def _by_numba(plan: Plan, bodies: Sequence[bytes], now: int) -> list[list[Pack] | None]:
    return _cut(plan, *(column.tolist() for column in _decoded(plan, bodies, now)))


def _decoded(plan: Plan, bodies: Sequence[bytes], now: int) -> Any:
    """The columns of all packs: see `decode`."""
    from keyfold.counters.bulk.by_numba_reading import decode

    return decode(*_buffer(bodies), plan.ids, plan.counters, plan.groups, now)


def _listed(plan: Plan, bodies: Sequence[bytes], now: int) -> Any:
    """A row a number: see `listed`."""
    from keyfold.counters.bulk.by_numba_reading import listed

    return listed(*_buffer(bodies), plan.ids, plan.counters, plan.groups, now, plan.kinds, plan.firsts)


def _buffer(bodies: Sequence[bytes]) -> tuple[Bytes, Ints]:
    """The bodies one after another, and where each begins."""
    starts = np.array([*accumulate(map(len, bodies), initial=0)], np.int64)
    return np.frombuffer(b"".join([*bodies, b"\0"]), np.uint8), starts  # NumPy refuses an empty one


def _chunks(bodies: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """The bodies in runs of a bounded size; a body is never cut."""
    if sum(map(len, bodies)) <= CHUNK_BYTES:
        yield bodies
        return
    begin, size = 0, 0
    for index, body in enumerate(bodies):
        if size + len(body) > CHUNK_BYTES and index > begin:
            yield bodies[begin:index]
            begin, size = index, 0
        size += len(body)
    yield bodies[begin:]


def _cut(
    plan: Plan, packs_of: list[int], codes: list[int], counts: list[int], words: list[int], floats: list[float]
) -> list[list[Pack] | None]:
    """The numbers, which stand in the order of the packs, as packs."""
    shapes, packs_left = plan.shapes, zip(codes, counts, strict=True)
    found: list[list[Pack] | None] = []
    at, floats_at = 0, 0
    for packs_count in packs_of:
        if packs_count < 0:
            found.append(None)
            continue
        packs: list[Pack] = []
        add = packs.append
        for code, count in islice(packs_left, packs_count):
            counter_ids, kinds, only_real = shapes.get(code) or plan.shape(code)
            keys = words[at : (at := at + count)]
            if only_real is not None:  # the usual pack: a loop over its rows costs as much as all else
                add(Pack(counter_ids, keys, [(only_real, floats[floats_at : (floats_at := floats_at + count)])]))
                continue
            rows: list[tuple[Kind, Sequence[Number]]] = []
            for kind, is_real in kinds:
                if is_real:
                    rows.append((kind, floats[floats_at : (floats_at := floats_at + count)]))
                else:
                    rows.append((kind, words[at : (at := at + count)]))
            add(Pack(counter_ids, keys, rows))
        found.append(packs)
    return found


def _by_protobuf(plan: Plan, body: bytes, now: int) -> list[Pack] | None:
    """Measured: reaching into a message costs more than the numbers, so nothing is asked of it twice."""
    try:
        profile = parsed(body)
        must_be_whole(profile, plan.catalog)
    except PackWrong:
        return None
    if profile.counters:
        return None
    packs = []
    for pack in profile.packed_counters:
        ids, keys, values = tuple(pack.counter_ids), pack.keys[:], pack.values
        layout = plan.layouts.get(ids) or plan.layout(ids)
        if layout is None or not keys or len(values) != len(ids):
            return None
        if not layout.rows:
            continue
        count = len(keys)
        if layout.records_max is not None and count > layout.records_max:
            return None
        if layout.time_at is not None:
            # In a kind of a later version they look missing, and then nothing of the group is read.
            times = values[layout.time_at].fixed32_values.value[:]
            if len(times) != count:
                return None
            if layout.expire_seconds is not None and min(times) < now - layout.expire_seconds:
                return None
        rows: list[tuple[Kind, Sequence[Number]]] = []
        for index, kind, name in layout.rows:
            # A row of another kind looks empty here.
            column = getattr(values[index], name).value[:]
            if len(column) != count or (kind in REAL and not all(map(isfinite, column))):
                return None
            rows.append((kind, column))
        packs.append(Pack(layout.counter_ids, keys, rows))
    return packs
