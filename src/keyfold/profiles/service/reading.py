"""Reading profiles: the ids of one person merged, held back data left out, restricted counters left out and named."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import sqlalchemy as sa
from msgspec import Struct, structs

from keyfold.core.errors import NotFound, TooLarge
from keyfold.core.store import Transaction
from keyfold.core.store.shapes import load
from keyfold.counters.bulk import reading as bulk
from keyfold.counters.bulk.columns import Numbers
from keyfold.counters.bulk.reading import Pack
from keyfold.counters.catalog import Catalog, Counter, Group, Kind
from keyfold.counters.counters import Counters, MutableCounters
from keyfold.counters.errors import PackWrong
from keyfold.counters.messages_pb2 import Profile
from keyfold.counters.model import Number
from keyfold.profiles.model import Held, ProfileKey, released_by_merge
from keyfold.profiles.service.holding import PLACE, Place, held_at, several_owners
from keyfold.profiles.service.product import Product
from keyfold.profiles.service.storing import keys_of
from keyfold.profiles.settings import ClientView
from keyfold.profiles.tables import KEY_FREQUENCIES, PROFILE_TOTALS, PROFILES

Found = Mapping[tuple[Any, ...], tuple[Any, ...]]

STEP_BOUNDS = 4


class LeftOut(Struct, frozen=True):
    """A counter that was not given, and why."""

    counter_id: int
    reason: str


class View(Struct, frozen=True):
    """What one request of one client may see and wants: counters by id, whole sections, the moment of the values."""

    counters: frozenset[int]
    left_out: list[LeftOut]
    segments: bool = True
    at_now: bool = False
    weighted: bool = False
    legacy: bool = False
    written: bool = False  # packs are wanted as JSON, where nothing else needs their numbers


class Read(Struct, frozen=True, gc=False):
    """One answered profile; version 0: nothing public is stored of it."""

    key: ProfileKey
    packs: list[Pack]
    segments: list[tuple[str, int]]
    version: int
    problem: str = ""  # why its counters cannot be read
    written: bytes | None = None  # the packs as JSON, instead of `packs`


def view_of(
    product: Product,
    client: ClientView,
    wanted: Sequence[int | str] | None,
    *,
    at_now: bool = False,
    weighted: bool = False,
    as_json: bool = False,
) -> View:
    """What a client receives of what it asked for; what it does not is listed with the reason."""
    catalog = product.catalog
    configured = None if client.counters is None else {catalog[each].id for each in client.counters}
    named = catalog.counters.values() if wanted is None else map(catalog.__getitem__, wanted)
    asked = {each.id: each for each in named}.values()  # by id and by name it is one counter
    given: set[int] = set()
    left_out: list[LeftOut] = []
    for counter in asked:
        if "counters" not in client.keywords:
            if wanted is not None:
                left_out.append(LeftOut(counter.id, "this client receives no counters"))
        elif counter.restriction is not None and counter.restriction not in client.restrictions:
            left_out.append(LeftOut(counter.id, f"needs a grant for {counter.restriction}"))
        elif configured is not None and counter.id not in configured:
            if wanted is not None:
                left_out.append(LeftOut(counter.id, "not among the counters of this client"))
        else:
            given.add(counter.id)
    is_weighted = weighted and bool(given)
    written = as_json and not (at_now or is_weighted or client.legacy)
    return View(frozenset(given), left_out, "segments" in client.keywords, at_now, is_weighted, client.legacy, written)


def read_profiles(
    tx: Transaction, product: Product, entries: Sequence[tuple[Sequence[ProfileKey], View]]
) -> list[Read]:
    """Each entry is one person: the profiles of all its ids, merged; the same id twice is one profile.

    Where ids are merged, all is to be read of one moment (`Store.snapshot`): what is released after the profiles were
    read, and before what waits is, would be in neither.
    """
    now = tx.now_us // 1_000_000
    entries = [(ids if len(ids) == 1 else list(dict.fromkeys(ids)), view) for ids, view in entries]
    keys = dict.fromkeys([key for ids, _ in entries for key in ids])
    found = _stored(tx, product, keys, ("body", "segments", "public_version"))
    # Whoever is read with others is looked up among the held back whether or not anything is there.
    held = _confirmed(tx, product, [ids for ids, _ in entries if len(ids) > 1])
    rows = [_public(found, ids) for ids, _ in entries]
    _must_not_be_too_much(product, sum([len(row[0]) + len(row[1]) for own in rows for row in own]))
    read: list[Read] = []
    for (ids, view), own, passed_on in zip(entries, rows, _passed_on(product, entries, rows, now), strict=True):
        if passed_on is None:
            read.append(_looked_at(product, ids, view, own, held, now))
            continue
        _, stored_segments, version = own[0]
        segments = _segments(own) if stored_segments and view.segments else []
        if isinstance(passed_on, bytes):
            read.append(Read(ids[0], [], segments, version, "", passed_on))
        else:
            read.append(Read(ids[0], passed_on, segments, version))
    if any(view.weighted for _, view in entries):
        return weighted(tx, product, read, [view.weighted for _, view in entries])
    return read


def read_numbers(
    tx: Transaction, product: Product, people: Sequence[Sequence[ProfileKey]], view: View
) -> tuple[Numbers, dict[int, str]]:
    """The counters that `read_profiles` answers as arrays, for a program that computes with them.

    `profile` is the place of the person among those asked for. Whose counters cannot be read has no rows: why, is told
    apart by place. Arrays are what a model wants, and no object is made for a number or a pack.
    """
    if not view.counters or view.at_now or view.weighted or {1} != set(map(len, people)):
        counted = structs.replace(view, segments=False, written=False)
        return _numbers_of(read_profiles(tx, product, [(ids, counted) for ids in people]))
    now = tx.now_us // 1_000_000
    keys = [ids[0] for ids in people]
    found = _stored(tx, product, dict.fromkeys(keys), ("body", "public_version"))
    bodies = [row[0] if (row := found.get(key)) is not None and row[1] else b"" for key in keys]
    _must_not_be_too_much(product, sum(map(len, bodies)))
    numbers, others = bulk.numbers(product.catalog, bodies, view.counters, now, kernel=product.settings.kernel)
    if not others:
        return numbers, {}
    looked_at, problems = _numbers_of(
        [_looked_at(product, [keys[at]], view, [(bodies[at], b"", 0)], {}, now) for at in others]
    )
    looked_at.profile = np.array(others, np.int64)[looked_at.profile]
    return bulk.joined([numbers, looked_at]), {others[at]: problem for at, problem in problems.items()}


def _numbers_of(read: Sequence[Read]) -> tuple[Numbers, dict[int, str]]:
    problems = {place: each.problem for place, each in enumerate(read) if each.problem}
    return bulk.numbers_of([each.packs for each in read]), problems


def _public(found: Found, ids: Sequence[ProfileKey]) -> list[tuple[Any, ...]]:
    """The rows of one person, without those of which nothing is public."""
    if len(ids) == 1:
        row = found.get(ids[0])
        return [row] if row is not None and row[2] else []
    return [row for key in ids if (row := found.get(key)) is not None and row[2]]


def _stored(tx: Transaction, product: Product, keys: Collection[ProfileKey], columns: Sequence[str]) -> Found:
    """The rows: bytes, and the public version last.

    Few come at once. Many come in steps, so that too much is known as such before all of it is in memory; a step of
    nothing but the largest profiles has STEP_BOUNDS times as much. Shorter steps took up to a quarter longer.
    """
    step = max(1, STEP_BOUNDS * product.settings.read_bytes_max // product.settings.profile_bytes_max)
    if len(keys) <= step:
        return load(tx, PROFILES, keys_of(keys), columns)
    found: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    size, listed = 0, list(keys)
    for begin in range(0, len(listed), step):
        some = load(tx, PROFILES, keys_of(listed[begin : begin + step]), columns)
        size += sum([len(stored) for row in some.values() for stored in row[:-1]])
        _must_not_be_too_much(product, size)
        found |= some
    return found


def _must_not_be_too_much(product: Product, size: int) -> None:
    """A few bytes may ask for many: what is answered is bounded as what is asked."""
    size_max = product.settings.read_bytes_max
    if size > size_max:
        raise TooLarge(
            f"the profiles of one request have {size} bytes or more together, {size_max} are allowed",
            hint="Read fewer people at once",
        )


def stored_bodies(tx: Transaction, keys: Sequence[ProfileKey]) -> dict[ProfileKey, bytes]:
    return {(key[0], key[1]): bytes(row[0]) for key, row in load(tx, PROFILES, keys_of(keys), ("body",)).items()}


def _passed_on(
    product: Product,
    entries: Sequence[tuple[Sequence[ProfileKey], View]],
    rows: Sequence[Sequence[tuple[Any, ...]]],
    now: int,
) -> list[list[Pack] | bytes | None]:
    """The packs of all people of whom one stored profile can be passed on as it lies; None for the others."""
    found: list[list[Pack] | bytes | None] = [None] * len(entries)
    by_wish: dict[tuple[frozenset[int], bool], list[int]] = {}
    last: View | None = None
    alike: list[int] = []
    for index, (ids, view) in enumerate(entries):
        if view is not last:  # the people of one request share their view
            last, alike = view, []
            if view.counters and not view.at_now:
                alike = by_wish.setdefault((view.counters, view.written), alike)
        if len(ids) == 1 and rows[index]:
            alike.append(index)
    for (wanted, written), places in by_wish.items():
        passed_on = _written if written else _packs
        for index, packs in zip(
            places, passed_on(product, [rows[at][0][0] for at in places], wanted, now), strict=True
        ):
            found[index] = packs
    return found


def _packs(product: Product, bodies: Sequence[bytes], wanted: frozenset[int], now: int) -> list[list[Pack] | None]:
    return bulk.read(product.catalog, bodies, wanted, now, kernel=product.settings.kernel)


def _written(
    product: Product, bodies: Sequence[bytes], wanted: frozenset[int], now: int
) -> Sequence[list[Pack] | bytes | None]:
    """As JSON wherever that can be done at once, and as packs elsewhere."""
    texts = bulk.write(product.catalog, bodies, wanted, now, kernel=product.settings.kernel)
    if None not in texts:
        return texts
    others = iter(_packs(product, [body for body, text in zip(bodies, texts, strict=True) if not text], wanted, now))
    return [next(others) if text is None else text for text in texts]


def _looked_at(
    product: Product,
    ids: Sequence[ProfileKey],
    view: View,
    rows: Sequence[tuple[Any, ...]],
    held: Mapping[ProfileKey, list[tuple[int, Held]]],
    now: int,
) -> Read:
    """One person of whom no stored profile can be passed on as it lies.

    A profile that is broken in the store is no fault of the caller, nor of the others that were asked for.
    """
    packs, problem = list[Pack](), ""
    try:
        if view.counters and len(ids) > 1:
            merged = merged_profile(product, [bytes(row[0]) for row in rows], [held.get(key, []) for key in ids], now)
            packs = _picked(merged, view, now)
        elif view.counters and rows:
            packs = packs_of(product.catalog, bytes(rows[0][0]), view, now)
    except PackWrong as error:
        problem = str(error)
    segments = _segments(rows) if view.segments else []
    return Read(ids[0], packs, segments, sum([row[2] for row in rows]), problem)


def merged_profile(
    product: Product, bodies: Sequence[bytes], held: Sequence[Sequence[tuple[int, Held]]], now: int
) -> MutableCounters:
    """Several profiles of one person as one; what their owners confirm of each other is in it, and is not written."""
    merged = MutableCounters(product.catalog, b"", now, future_seconds_max=2**33)
    for body in bodies:
        merged.absorb(Counters(product.catalog, body, now))
    by_place: dict[tuple[int, int], list[Held]] = {}
    for profile in held:
        for group_id, each in profile:
            by_place.setdefault((group_id, each.key), []).append(each)
    for (group_id, _), waiting in sorted(by_place.items()):
        expire_seconds = product.catalog.groups[group_id].expire_seconds
        expired_before = None if expire_seconds is None else now - expire_seconds
        freed = released_by_merge(waiting, product.settings.merge_seconds, expired_before)
        for each in sorted(freed, key=lambda one: -one.time):
            counter = product.catalog[each.counter_id]
            if not counter.not_glued:
                merged.absorb_update(counter, each.key, each.value, each.time)
    merged.cleanup()
    return merged


def packs_of(catalog: Catalog, body: bytes, view: View, now: int) -> list[Pack]:
    """The counters of one stored profile, whatever its form, key by key."""
    return _picked(Counters(catalog, body, now), view, now)


def _picked(counters: Counters, view: View, now: int) -> list[Pack]:
    """The packs of the groups that are wanted; what is wrong with others is not looked at."""
    wanted = {counters.catalog.group_of(each).id for each in view.counters if each in counters.catalog}
    return [pack for each in sorted(wanted) for pack in _pack(counters, counters.catalog.groups[each], view, now)]


def _pack(counters: Counters, group: Group, view: View, now: int) -> list[Pack]:
    ids = [each for each in counters.counter_ids(group) if each in view.counters]
    keys = newest(counters, group)
    if not ids or not keys:
        return []
    members = [counters.catalog[each] for each in ids]
    at = now if view.at_now else None
    return [Pack(ids, keys, [(c.kind, _whole(c, counters.column(c, group, keys, at))) for c in members])]


def newest(counters: Counters, group: Group) -> list[int]:
    """The live keys of a group, within MaxRecords, ascending: as if cleanup had just run."""
    keys = counters.keys(group)
    if group.records_max is None or len(keys) <= group.records_max or group.time is None:
        return keys
    times = dict(zip(keys, counters.column(group.time, group, keys), strict=True))
    return sorted(sorted(keys, key=lambda key: (times[key], key))[-group.records_max :])


def _whole(counter: Counter, values: list[Number]) -> Sequence[Number]:
    return [float(value) for value in values] if counter.kind in (Kind.FLOAT, Kind.DOUBLE) else values


def _segments(rows: Sequence[tuple[Any, ...]]) -> list[tuple[str, int]]:
    """The segments of all ids, each once, at its newest evaluation."""
    stored = [row[1] for row in rows if row[1]]
    if not stored:
        return []
    found: dict[str, int] = {}
    for body in stored:
        for each in Profile.FromString(bytes(body)).segments:
            found[each.id] = max(each.evaluation_version, found.get(each.id, 0))
    return list(found.items())


def _confirmed(
    tx: Transaction, product: Product, merged: Sequence[Sequence[ProfileKey]]
) -> dict[ProfileKey, list[tuple[int, Held]]]:
    by_profile: dict[ProfileKey, list[tuple[int, Held]]] = {}
    places = several_owners(tx, product, merged) if merged and product.delayed else []
    listed = dict(zip(PLACE, zip(*places, strict=True), strict=True)) if places else {}
    found: Mapping[Place, list[Held]] = held_at(tx, product, listed)
    for (profile_type, profile_id, group_id, _), waiting in found.items():
        by_profile.setdefault((profile_type, profile_id), []).extend((group_id, each) for each in waiting)
    return by_profile


def weighted(tx: Transaction, product: Product, read: Sequence[Read], asked: Sequence[bool]) -> list[Read]:
    """Values of Idf counters by the weight of their keys: ln((1 + N) / (1 + df)), as the last run of the job counted.

    Before its first run a counter is not weighed. A key that no row speaks of stands in one profile: this one.
    """
    totals = {row.profile_type: row.profiles for row in tx.execute(sa.select(PROFILE_TOTALS))}
    idf = {each.id: totals[each.profile_type] for each in _counted(tx, product) if each.profile_type in totals}
    places = {
        (counter_id, key)
        for one, is_asked in zip(read, asked, strict=True)
        if is_asked
        for pack in one.packs
        for counter_id in pack.counter_ids
        if counter_id in idf
        for key in pack.keys
    }
    columns = {"counter_id": [each for each, _ in places], "key": [each for _, each in places]}
    known = {place: count for place, (count,) in load(tx, KEY_FREQUENCIES, columns, ("profiles",)).items()}
    weights = {
        (counter_id, key): math.log((1 + idf[counter_id]) / (1 + min(idf[counter_id], known.get((counter_id, key), 1))))
        for counter_id, key in places
    }
    return [
        structs.replace(one, packs=[_weighed(pack, weights, idf) for pack in one.packs]) if is_asked else one
        for one, is_asked in zip(read, asked, strict=True)
    ]


def _counted(tx: Transaction, product: Product) -> list[Counter]:
    """The Idf counters that the last run of the job met: each has a row."""
    known = [each for each in product.catalog.counters.values() if each.idf]
    if not known:
        return []
    met = tx.execute(sa.select(*[sa.exists().where(KEY_FREQUENCIES.c.counter_id == each.id) for each in known])).one()
    return [each for each, is_met in zip(known, met, strict=True) if is_met]


def _weighed(pack: Pack, weights: Mapping[tuple[int, int], float], idf: Collection[int]) -> Pack:
    rows: list[tuple[Kind, Sequence[Number]]] = [
        (Kind.DOUBLE, [value * weights[counter_id, key] for key, value in zip(pack.keys, row[1], strict=True)])
        if counter_id in idf
        else row
        for counter_id, row in zip(pack.counter_ids, pack.rows, strict=True)
    ]
    return Pack(pack.counter_ids, pack.keys, rows)


def must_be_counters(product: Product, wanted: Collection[int | str]) -> None:
    """Refuse a request that names what the catalog does not have."""
    known = product.catalog
    for index, each in enumerate(wanted):
        if (each not in known.counters) if isinstance(each, int) else (each not in known.by_name):
            raise NotFound(f"there is no counter {each}", place=f"counters[{index}]")
