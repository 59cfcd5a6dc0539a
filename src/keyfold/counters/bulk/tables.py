"""The catalog as arrays, the way the kernels look things up."""

from weakref import WeakKeyDictionary

import numpy as np
from msgspec import Struct

from keyfold.counters.bulk.columns import Bools, Floats, Ints, Words
from keyfold.counters.catalog import Catalog, Counter

NO_LIMIT = 2**62


class Tables(Struct, kw_only=True):
    """Counters by id and groups by id; `members` lists the counters of each group by id, one group after another."""

    ids: Words
    kinds: Ints
    decays: Floats
    group: Ints  # of each counter, the place of its group
    slot: Ints  # of each counter, its place in `members`
    read_only: Bools
    members: Ints
    first: Ints  # of each group, where its members begin; one more than there are groups
    time_slot: Ints  # of each group, the place of its time counter in `members`, or -1
    records_max: Ints
    expire_seconds: Ints


_made: WeakKeyDictionary[Catalog, Tables] = WeakKeyDictionary()


def tables_of(catalog: Catalog) -> Tables:
    """The tables of a catalog; made once, since a small batch takes less time than making them."""
    found = _made.get(catalog)
    if found is None:
        found = _made[catalog] = _make(catalog)
    return found


def _make(catalog: Catalog) -> Tables:
    counters = list(catalog.counters.values())
    groups = list(catalog.groups.values())
    place = {counter.id: index for index, counter in enumerate(counters)}
    members = [counter_id for group in groups for counter_id in group.counter_ids]
    slots = {counter_id: slot for slot, counter_id in enumerate(members)}
    group_places = {counter_id: index for index, group in enumerate(groups) for counter_id in group.counter_ids}
    return Tables(
        ids=np.array([counter.id for counter in counters], np.uint64),
        kinds=np.array([counter.kind for counter in counters], np.int64),
        decays=np.array([_decay(counter) for counter in counters], np.float64),
        group=np.array([group_places[counter.id] for counter in counters], np.int64),
        slot=np.array([slots[counter.id] for counter in counters], np.int64),
        read_only=np.array([counter.no_operation for counter in counters], np.bool_),
        members=np.array([place[counter_id] for counter_id in members], np.int64),
        first=np.cumsum([0, *(len(group.counter_ids) for group in groups)], dtype=np.int64),
        time_slot=np.array([slots[group.time.id] if group.time else -1 for group in groups], np.int64),
        records_max=np.array([group.records_max or NO_LIMIT for group in groups], np.int64),
        expire_seconds=np.array([group.expire_seconds or NO_LIMIT for group in groups], np.int64),
    )


def _decay(counter: Counter) -> float:
    return counter.decay if counter.time_counter_id is not None else 0.0
