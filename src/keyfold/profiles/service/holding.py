"""Owned updates that wait for a second source: where they lie, what releases them, what pushes them out."""

from collections.abc import Container, Mapping, Sequence
from typing import Any

from msgspec import Struct

from keyfold.core.store import Transaction, batch
from keyfold.core.store.batch import Columns
from keyfold.core.store.schema import SIGN_BIT
from keyfold.core.store.shapes import delete, insert, load
from keyfold.counters.catalog import Kind
from keyfold.counters.counters import Counters
from keyfold.counters.errors import PackWrong
from keyfold.profiles import metrics
from keyfold.profiles.model import Asked, Held, ProfileKey, Row, UpdateKey, settled
from keyfold.profiles.service.product import Product
from keyfold.profiles.service.storing import Stored, keys_of
from keyfold.profiles.tables import HELD_UPDATES

Place = tuple[str, str, int, int]  # profile type, profile id, time counter, key
Pair = tuple[str, str, int]  # profile type, profile id, time counter
HeldHere = tuple[ProfileKey, int, Held]  # profile, time counter

PLACE = ("profile_type", "profile_id", "time_counter_id", "key")
PAIRS_AT_ONCE = 100  # of which all that waits is in memory
_HELD = ("counter_id", "owner", "value", "count", "committed_at_us")


class Settlement(Struct):
    """What a batch releases, what it adds to what waits, and which of the stored updates leave."""

    released: list[Row]
    waiting: list[HeldHere]
    leaving: list[HeldHere]  # released, or pushed out
    pushed_out: int
    broken: dict[Place, PackWrong]  # where the public key of an owned update cannot be read


def held_at(tx: Transaction, product: Product, keys: Columns) -> dict[Place, list[Held]]:
    """The updates that are held back, by place; past its period one is not there, swept or not.

    Nor is one that the catalog has no place for any more: its counter is gone, or stands under another time counter.
    """
    if not keys:
        return {}
    oldest_us = product.held_oldest_us(tx.now_us)
    found: dict[Place, list[Held]] = {}
    for key, values in sorted(load(tx, HELD_UPDATES, keys, _HELD).items()):
        profile_type, profile_id, time_counter_id, at, time, event_id, log, number = key
        counter_id, owner, value, count, committed_at_us = values
        group = product.delayed.get(counter_id)
        if committed_at_us > oldest_us and group is not None and group.id == time_counter_id:
            exact = count if product.catalog[counter_id].kind is Kind.FIXED64 else value
            one = Held(counter_id, at, exact, time, owner, event_id, log, number, committed_at_us)
            found.setdefault((profile_type, profile_id, time_counter_id, at), []).append(one)
    return found


def several_owners(tx: Transaction, product: Product, merged: Sequence[Sequence[ProfileKey]]) -> list[Place]:
    """The places at which updates of several owners wait, among the profiles of one person.

    Everything else that waits cannot be part of an answer: it stays in the database, so that neither what is fetched
    nor what is done with it depends on it. Mostly there are none, which is found out in half the time that it takes to
    find whose they are. Only places at which something waits: there may be as many of a person as all ids wait at, so
    that each of them at each id would be millions.
    """
    keys = [(number, *key) for number, ids in enumerate(merged) for key in dict.fromkeys(ids)]
    columns = dict(zip(("number", *PLACE[:2]), zip(*keys, strict=True), strict=True))
    mark, alias = ("?", "") if tx.is_sqlite else ("%s", f" ({', '.join(columns)})")
    found: list[tuple[Any, ...]] = []
    for piece in batch.slices(tx, columns):
        rendered, parameters = batch.source(tx, HELD_UPDATES, piece)
        waiting = (
            f"FROM ({rendered}) AS person{alias} JOIN held_updates AS held USING (profile_type, profile_id)"
            f" WHERE held.committed_at_us > {mark}"
        )
        are_any = (
            f"SELECT 1 {waiting} GROUP BY person.number, held.time_counter_id, held.key"
            " HAVING min(held.owner) < max(held.owner) LIMIT 1"
        )
        whose = (
            "SELECT DISTINCT profile_type, profile_id, time_counter_id, key"  # noqa: S608
            " FROM (SELECT person.profile_type, person.profile_id, held.time_counter_id, held.key,"
            f" min(held.owner) OVER place AS lowest, max(held.owner) OVER place AS highest {waiting}"
            " WINDOW place AS (PARTITION BY person.number, held.time_counter_id, held.key)) AS places"
            " WHERE lowest < highest"
        )
        bound = (*parameters, product.held_oldest_us(tx.now_us))
        found += tx.rows(whose, bound) if tx.rows(are_any, bound) else []
    return sorted({(kind, profile_id, group + SIGN_BIT, key + SIGN_BIT) for kind, profile_id, group, key in found})


def held_before(
    tx: Transaction, product: Product, asked: Asked, stored: Mapping[ProfileKey, Stored]
) -> dict[Place, list[Held]]:
    """What waits at the keys that this batch touches; only profiles that hold anything are looked at."""
    if not product.delayed:
        return {}
    oldest_us = product.held_oldest_us(tx.now_us)
    places = sorted(
        {
            (*profile, product.delayed[counter.id].id, key)
            for _, profile, updates in asked.runs()
            if stored[profile].held_at_us > oldest_us
            for counter, key, _, _ in updates
            if counter.id in product.delayed
        }
    )
    return held_at(tx, product, dict(zip(PLACE, zip(*places, strict=True), strict=True)) if places else {})


def settlement(
    product: Product,
    rows: Sequence[Row],
    stored: Mapping[ProfileKey, Stored],
    held: Mapping[Place, list[Held]],
    kept_back: Container[UpdateKey],
    now_us: int,
) -> Settlement:
    """Settle every key of this batch that has an owned update, or where one waits.

    Where one waits at a key of refused events only, nothing is settled: they have no effect. What is kept back is not
    released.
    """
    now = now_us // 1_000_000
    owned = {(*row.profile, product.delayed[row.counter.id].id, row.key) for row in rows if row.owner}
    steps: dict[Place, list[Held | int]] = {}
    for row in rows:
        group = product.delayed.get(row.counter.id)
        if group is not None and ((place := (*row.profile, group.id, row.key)) in owned or place in held):
            steps.setdefault(place, []).append(_as_held(row, now_us) if row.owner else row.time)
    result = Settlement([], [], [], 0, {})
    readers: dict[ProfileKey, Counters] = {}
    for place, taken in steps.items():
        profile, group = (place[0], place[1]), product.catalog.groups[place[2]]
        try:
            if profile not in readers:
                readers[profile] = Counters(product.catalog, stored[profile].body, now)
            found = readers[profile].find(group.id, place[3])
        except PackWrong as error:
            if place in owned:  # elsewhere the fold finds it out, whether or not something waits there
                result.broken[place] = error
            continue
        before = held.get(place, [])
        key = settled(
            before,
            None if found is None else found.time,
            taken,
            merge_seconds=product.settings.merge_seconds,
            expired_before=None if group.expire_seconds is None else now - group.expire_seconds,
            count_max=group.delayed_records_max,
            kept_back=kept_back,
        )
        known = {id(each) for each in before}
        gone = (*key.released, *key.pushed_out)
        result.waiting.extend((profile, group.id, each) for each in key.waiting if id(each) not in known)
        result.leaving.extend((profile, group.id, each) for each in gone if id(each) in known)
        result.released.extend(_as_row(product, profile, each) for each in key.released)
        result.pushed_out += len(key.pushed_out)
    return result


def _as_held(row: Row, now_us: int) -> Held:
    return Held(row.counter.id, row.key, row.value, row.time, row.owner, row.event_id, row.log, row.number, now_us)


def _as_row(product: Product, profile: ProfileKey, held: Held) -> Row:
    counter = product.catalog[held.counter_id]
    return Row(profile, counter, held.key, held.value, held.time, 0, held.event_id, held.log, held.number)


def move_held(tx: Transaction, product: Product, settled_now: Settlement) -> None:
    """Delete what was released, insert what waits from now on."""
    if settled_now.leaving:
        delete(tx, HELD_UPDATES, _held_keys(settled_now.leaving))
    waiting = _new_only(tx, settled_now.waiting)
    if not waiting:
        return
    exact = {held.counter_id for _, _, held in waiting if product.catalog[held.counter_id].kind is Kind.FIXED64}
    insert(
        tx,
        HELD_UPDATES,
        {
            **_held_keys(waiting),
            "counter_id": [held.counter_id for _, _, held in waiting],
            "owner": [held.owner for _, _, held in waiting],
            "value": [float(held.value) for _, _, held in waiting],
            "count": [int(held.value) if held.counter_id in exact else 0 for _, _, held in waiting],
            "committed_at_us": [held.committed_at_us for _, _, held in waiting],
        },
    )
    _push_out(tx, product, sorted({(*profile, group_id) for profile, group_id, _ in waiting}))


def _new_only(tx: Transaction, waiting: Sequence[HeldHere]) -> list[HeldHere]:
    """Where positions vouch for events, an id may come twice: it waits once."""
    if not waiting:
        return []
    keys = _held_keys(waiting)
    by_key = dict(zip(zip(*keys.values(), strict=True), waiting, strict=True))
    known = load(tx, HELD_UPDATES, keys, ())
    return [here for key, here in by_key.items() if key not in known]


def _held_keys(held: Sequence[HeldHere]) -> dict[str, list[Any]]:
    return {
        **keys_of(profile for profile, _, _ in held),
        "time_counter_id": [group_id for _, group_id, _ in held],
        "key": [each.key for _, _, each in held],
        "time": [each.time for _, _, each in held],
        "event_id": [each.event_id for _, _, each in held],
        "log": [each.log for _, _, each in held],
        "number": [each.number for _, _, each in held],
    }


def _push_out(tx: Transaction, product: Product, pairs: Sequence[Pair]) -> None:
    """Above MaxDelayedRecords of a profile and time counter, the smallest by (time, key, event id) go."""
    crowded = _crowded(tx, product, pairs)
    gone: list[HeldHere] = []
    for begin in range(0, len(crowded), PAIRS_AT_ONCE):
        gone += _smallest(tx, product, crowded[begin : begin + PAIRS_AT_ONCE])
    if gone:
        delete(tx, HELD_UPDATES, _held_keys(gone))
        tx.after_commit.append(lambda: metrics.PUSHED_OUT.inc(len(gone)))


def _crowded(tx: Transaction, product: Product, pairs: Sequence[Pair]) -> list[Pair]:
    """Those of the profiles and time counters in which more waits than may: counted where it lies, not fetched."""
    columns = dict(zip(PLACE[:3], zip(*pairs, strict=True), strict=True))
    most = {group_id: product.catalog.groups[group_id].delayed_records_max or 0 for _, _, group_id in pairs}
    mark, alias = ("?", "") if tx.is_sqlite else ("%s", f" ({', '.join(columns)})")
    found: list[tuple[Any, ...]] = []
    for piece in batch.slices(tx, columns):
        rendered, parameters = batch.source(tx, HELD_UPDATES, piece)
        sql = (
            f"SELECT profile_type, profile_id, time_counter_id, count(*) FROM ({rendered}) AS pair{alias}"  # noqa: S608
            " JOIN held_updates AS held USING (profile_type, profile_id, time_counter_id)"
            f" WHERE held.committed_at_us > {mark}"
            f" GROUP BY 1, 2, 3 HAVING count(*) > {mark}"
        )
        found += tx.rows(sql, (*parameters, product.held_oldest_us(tx.now_us), min(most.values())))
    counted = [((kind, profile_id, group + SIGN_BIT), count) for kind, profile_id, group, count in found]
    return sorted(pair for pair, count in counted if count > most[pair[2]])


def _smallest(tx: Transaction, product: Product, pairs: Sequence[Pair]) -> list[HeldHere]:
    """What goes of each. What the catalog has no place for any more was counted with the rest, and is not here."""
    by_pair: dict[Pair, list[Held]] = {}
    for place, held in held_at(tx, product, dict(zip(PLACE[:3], zip(*pairs, strict=True), strict=True))).items():
        by_pair.setdefault(place[:3], []).extend(held)
    gone: list[HeldHere] = []
    for (profile_type, profile_id, group_id), held in by_pair.items():
        above = len(held) - (product.catalog.groups[group_id].delayed_records_max or 0)
        smallest = sorted(held, key=lambda each: each.age)[: max(0, above)]
        gone += [((profile_type, profile_id), group_id, each) for each in smallest]
    return gone
