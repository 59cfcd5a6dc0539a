"""Counting events: marks, profiles, held-back updates and messages of a batch commit together.

Profiles are loaded under a lock, in key order, so two workers on one profile wait for each other; the fold is one
call over the whole batch. An event counts whole or not at all: where one of its updates cannot be kept, the event
is refused and the batch is folded again without it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from keyfold.core import outbox
from keyfold.core.errors import KeyfoldError
from keyfold.core.store import Transaction
from keyfold.core.store.batch import Columns
from keyfold.core.store.shapes import compare_and_set, delete, insert, insert_new, load, locking_load, update
from keyfold.core.topics.topic import Message
from keyfold.counters.bulk import Folded, Updates, fold
from keyfold.counters.catalog import Kind
from keyfold.counters.counters import Counters
from keyfold.counters.errors import UpdateRefused
from keyfold.profiles import metrics
from keyfold.profiles.handlers import Event
from keyfold.profiles.model import Held, ProfileKey, Ready, Row, Verdict, fingerprint, ready, settled
from keyfold.profiles.service.message import whole
from keyfold.profiles.service.product import PROFILES_TOPIC, Product
from keyfold.profiles.tables import EVENT_MARKS, EVENT_WATERMARKS, HELD_UPDATES, PROFILE_FLOORS, PROFILES

COLUMNS = ("version", "public_version", "body", "segments", "segments_version", "held_until_us", "expires_at")
Place = tuple[str, str, int, int]  # profile type, profile id, time counter, key
HeldHere = tuple[ProfileKey, int, Held]  # profile, time counter


class Stored(Struct):
    """The row of a profile, loaded for writing; version 0: it is not there yet."""

    version: int = 0
    public_version: int = 0
    body: bytes = b""
    segments: bytes = b""
    segments_version: int = 0
    held_until_us: int = 0
    expires_at: int = 0


class Plan(Struct):
    """What a batch comes to, before anything is written."""

    profiles: list[ProfileKey]
    folded: Folded
    rows: list[Row]
    new_held: list[HeldHere]
    released: list[HeldHere]  # of those that were stored
    refused: dict[int, KeyfoldError]  # by the number of the event


def count_events(
    tx: Transaction, product: Product, log_events: Sequence[tuple[str, Event]], *, marked: bool
) -> list[Verdict]:
    """Count events of logs, each once; with `marked` an event's id is remembered, else its position vouches for it."""
    now = tx.now_us // 1_000_000
    verdicts: list[Verdict | None] = [None] * len(log_events)
    fresh = _readied(product, log_events, now, verdicts)
    fresh = _in_time(tx, fresh, verdicts)
    if marked:
        fresh = _unmarked(tx, fresh, verdicts)
    _fold_all(tx, product, fresh, verdicts, now, marked)
    done = [verdict for verdict in verdicts if verdict is not None]
    _count_verdicts(tx, log_events, done)
    return done


Fresh = list[tuple[int, Ready]]  # the number of the event in the batch, and the event


def _readied(
    product: Product, log_events: Sequence[tuple[str, Event]], now: int, verdicts: list[Verdict | None]
) -> Fresh:
    fresh: Fresh = []
    future = product.settings.future_seconds_max
    for number, (log, event) in enumerate(log_events):
        try:
            fresh.append((number, ready(product.writing.get(log, ()), log, event, now, future)))
        except KeyfoldError as error:
            verdicts[number] = Verdict(event.id, "refused", str(error))
    return fresh


def _in_time(tx: Transaction, fresh: Fresh, verdicts: list[Verdict | None]) -> Fresh:
    """Leave out what is older than its log's watermark: its mark may be gone, so it cannot be told from a repeat."""
    logs = sorted({one.log for _, one in fresh})
    edges = {log: time for (log,), (time,) in load(tx, EVENT_WATERMARKS, {"log": logs}, ("time",)).items()}
    if not edges:
        return fresh
    kept: Fresh = []
    for number, one in fresh:
        edge = edges.get(one.log, 0)
        if one.time < edge:
            verdicts[number] = Verdict(one.event_id, "late", f"its time {one.time} lies before {edge}")
        else:
            kept.append((number, one))
    return kept


def _unmarked(tx: Transaction, fresh: Fresh, verdicts: list[Verdict | None]) -> Fresh:
    """Mark events; those marked before, or twice in this batch, are duplicates, or conflicts where they say another."""
    first: dict[tuple[str, str], tuple[int, int]] = {}  # the number and the fingerprint of the first of an id
    prints = [fingerprint(one.fields) for _, one in fresh]
    for (number, one), mark in zip(fresh, prints, strict=True):
        first.setdefault((one.log, one.event_id), (number, mark))
    new = _marked(tx, first, {number: one.time for number, one in fresh})
    if len(new) == len(fresh):
        return fresh
    old = [key for key in first if key not in new]
    keys = {"log": [log for log, _ in old], "event_id": [event_id for _, event_id in old]}
    known = {key: mark for key, (mark,) in load(tx, EVENT_MARKS, keys, ("fingerprint",)).items()}
    kept: Fresh = []
    for (number, one), mark in zip(fresh, prints, strict=True):
        key = (one.log, one.event_id)
        if key in new and first[key][0] == number:
            kept.append((number, one))
        elif known.get(key, first[key][1]) == mark:
            verdicts[number] = Verdict(one.event_id, "duplicate")
        else:
            verdicts[number] = Verdict(one.event_id, "conflict", "this id was counted with other content")
    return kept


def _marked(
    tx: Transaction, first: Mapping[tuple[str, str], tuple[int, int]], times: Mapping[int, int]
) -> set[tuple[Any, ...]]:
    """Insert the marks of events; returns those that were not there."""
    marks: Columns = {
        "log": [log for log, _ in first],
        "event_id": [event_id for _, event_id in first],
        "fingerprint": [mark for _, mark in first.values()],
        "time": [times[number] for number, _ in first.values()],
    }
    return insert_new(tx, EVENT_MARKS, marks)


def _fold_all(
    tx: Transaction, product: Product, fresh: Fresh, verdicts: list[Verdict | None], now: int, marked: bool
) -> None:
    keys = sorted({row.profile for _, one in fresh for row in one.rows})
    stored = loaded(tx, keys)
    held = _held(tx, product, fresh, stored)
    refused: Fresh = []
    while True:
        plan = _planned(tx, product, fresh, stored, held, now)
        if not plan.refused:
            break
        refused += [(number, one) for number, one in fresh if number in plan.refused]
        fresh = [(number, one) for number, one in fresh if number not in plan.refused]
        for number, error in plan.refused.items():
            verdicts[number] = Verdict(_named(refused, number), "refused", str(error))
    if refused and marked:
        delete(tx, EVENT_MARKS, {"log": [r.log for _, r in refused], "event_id": [r.event_id for _, r in refused]})
    for number, one in fresh:
        verdicts[number] = Verdict(one.event_id, "counted")
    _write(tx, product, stored, plan, now)


def _named(events: Fresh, number: int) -> str:
    return next(one.event_id for each, one in events if each == number)


def loaded(tx: Transaction, keys: Sequence[ProfileKey]) -> dict[ProfileKey, Stored]:
    """The rows for writing. SQLite has one writer, who holds the whole file; elsewhere the rows are locked in order."""
    columns = {"profile_type": [each for each, _ in keys], "profile_id": [each for _, each in keys]}
    found = load(tx, PROFILES, columns, COLUMNS) if tx.is_sqlite else locking_load(tx, PROFILES, columns, COLUMNS)
    stored = {key: Stored() for key in keys}
    for (profile_type, profile_id), row in found.items():
        stored[profile_type, profile_id] = Stored(row[0], row[1], bytes(row[2]), bytes(row[3]), *row[4:])
    return stored


def _held(
    tx: Transaction, product: Product, fresh: Fresh, stored: Mapping[ProfileKey, Stored]
) -> dict[Place, list[Held]]:
    """What waits at the keys that this batch touches; only profiles that hold anything are looked at."""
    if not product.delayed:
        return {}
    now_us = tx.now_us
    places = sorted(
        {
            (*row.profile, product.delayed[row.counter.id].id, row.key)
            for _, one in fresh
            for row in one.rows
            if row.counter.id in product.delayed and stored[row.profile].held_until_us > now_us
        }
    )
    return held_at(tx, product, dict(zip(PLACE, zip(*places, strict=True), strict=True)) if places else {})


PLACE = ("profile_type", "profile_id", "time_counter_id", "key")
_HELD = ("counter_id", "owner", "value", "count", "committed_at_us")


def held_at(tx: Transaction, product: Product, keys: Columns) -> dict[Place, list[Held]]:
    """The updates that are held back, by place; past its period one is not there, swept or not."""
    if not keys:
        return {}
    oldest_us = tx.now_us - product.settings.delete_us
    found: dict[Place, list[Held]] = {}
    for key, values in sorted(load(tx, HELD_UPDATES, keys, _HELD).items()):
        profile_type, profile_id, time_counter_id, at, time, event_id, log, number = key
        counter_id, owner, value, count, committed_at_us = values
        if committed_at_us > oldest_us:
            kind = product.catalog[counter_id].kind if counter_id in product.catalog else None
            exact = count if kind is Kind.FIXED64 else value
            one = Held(counter_id, at, exact, time, owner, event_id, log, number, committed_at_us)
            found.setdefault((profile_type, profile_id, time_counter_id, at), []).append(one)
    return found


def _planned(
    tx: Transaction,
    product: Product,
    fresh: Fresh,
    stored: Mapping[ProfileKey, Stored],
    held: Mapping[Place, list[Held]],
    now: int,
) -> Plan:
    rows = [row for _, one in fresh for row in one.rows]
    new_held: list[HeldHere] = []
    released: list[HeldHere] = []
    if product.delayed and (held or any(row.owner for row in rows)):
        freed, new_held, released = _settled(product, rows, stored, held, now, tx.now_us)
        rows = [row for row in rows if not row.owner] + freed
    profiles = sorted({row.profile for row in rows})
    folded = _folded(product, profiles, [stored[key].body for key in profiles], rows, now)
    plan = Plan(profiles, folded, rows, new_held, released, {})
    plan.refused = _refused(product, plan, stored, fresh, now)
    return plan


def _settled(
    product: Product,
    rows: Sequence[Row],
    stored: Mapping[ProfileKey, Stored],
    held: Mapping[Place, list[Held]],
    now: int,
    now_us: int,
) -> tuple[list[Row], list[HeldHere], list[HeldHere]]:
    """What this batch releases, what it adds to what waits, and which of the stored updates leave."""
    steps: dict[Place, list[Held | int]] = {place: [] for place in held}
    for row in rows:
        if row.owner:
            steps.setdefault((*row.profile, product.delayed[row.counter.id].id, row.key), [])
    for row in rows:
        group = product.delayed.get(row.counter.id)
        if group is not None and (here := steps.get((*row.profile, group.id, row.key))) is not None:
            here.append(_as_held(row, now_us) if row.owner else row.time)
    freed: list[Row] = []
    waiting: list[HeldHere] = []
    leaving: list[HeldHere] = []
    readers: dict[ProfileKey, Counters] = {}
    for place, taken in steps.items():
        profile, group = (place[0], place[1]), product.catalog.groups[place[2]]
        if profile not in readers:
            readers[profile] = Counters(product.catalog, stored[profile].body, now)
        found = readers[profile].find(group.id, place[3])
        before = held.get(place, [])
        result = settled(
            before,
            None if found is None else found.time,
            taken,
            merge_seconds=product.settings.merge_seconds,
            expired_before=None if group.expire_seconds is None else now - group.expire_seconds,
        )
        known = {id(each) for each in before}
        waiting += [(profile, group.id, each) for each in result.waiting if id(each) not in known]
        leaving += [(profile, group.id, each) for each in result.released if id(each) in known]
        freed += [_as_row(product, profile, each) for each in result.released]
    return freed, waiting, leaving


def _as_held(row: Row, now_us: int) -> Held:
    return Held(row.counter.id, row.key, row.value, row.time, row.owner, row.event_id, row.log, row.number, now_us)


def _as_row(product: Product, profile: ProfileKey, held: Held) -> Row:
    counter = product.catalog[held.counter_id]
    return Row(profile, counter, held.key, held.value, held.time, 0, held.event_id, held.log, held.number)


def _folded(
    product: Product, profiles: Sequence[ProfileKey], bodies: Sequence[bytes], rows: Sequence[Row], now: int
) -> Folded:
    places = {key: index for index, key in enumerate(profiles)}
    exact = any(row.counter.kind is Kind.FIXED64 for row in rows)
    updates = Updates(
        profile=np.array([places[row.profile] for row in rows], np.int64),
        counter=np.array([row.counter.id for row in rows], np.uint64),
        key=np.array([row.key for row in rows], np.uint64),
        value=np.array([row.value for row in rows], np.float64),
        time=np.array([row.time for row in rows], np.int64),
        count=np.array([_exact(row) for row in rows], np.uint64) if exact else None,
    )
    return fold(
        product.catalog,
        bodies,
        updates,
        now=now,
        future_seconds_max=product.settings.future_seconds_max,
        kernel=product.settings.kernel,
    )


def _exact(row: Row) -> int:
    return int(row.value) if row.counter.kind is Kind.FIXED64 else 0


def _refused(
    product: Product, plan: Plan, stored: Mapping[ProfileKey, Stored], fresh: Fresh, now: int
) -> dict[int, KeyfoldError]:
    """The events that cannot be kept: a sum that overflows, a stored body that is broken, a profile that is full."""
    bodies_max = product.settings.profile_bytes_max
    large = [
        index
        for index, body in enumerate(plan.folded.bodies)
        if len(body) > bodies_max and len(body) > len(stored[plan.profiles[index]].body)
    ]
    if not (plan.folded.refused or plan.folded.broken or large):
        return {}
    numbers = {(one.log, one.event_id): number for number, one in fresh}
    refused: dict[int, KeyfoldError] = {}
    for at, error in plan.folded.refused.items():
        _refuse(refused, numbers, plan.rows[at], error)
    broken = {plan.profiles[index]: error for index, error in plan.folded.broken.items()}
    for row in plan.rows:
        if row.profile in broken:
            _refuse(refused, numbers, row, broken[row.profile])
    for index in large:
        for row in _overflowing(product, plan.profiles[index], stored[plan.profiles[index]].body, plan.rows, now):
            error = UpdateRefused(f"the profile is full: its body may have {bodies_max} bytes")
            _refuse(refused, numbers, row, error)
    return refused


def _refuse(
    refused: dict[int, KeyfoldError], numbers: Mapping[tuple[str, str], int], row: Row, error: KeyfoldError
) -> None:
    """An update that was stored before this batch refuses no event of it."""
    number = numbers.get((row.log, row.event_id))
    if number is not None:
        refused.setdefault(number, error)


def _overflowing(product: Product, key: ProfileKey, body: bytes, rows: Sequence[Row], now: int) -> list[Row]:
    """The updates behind the longest beginning that fits into the profile."""
    own = [row for row in rows if row.profile == key]
    fits, too_many = 0, len(own)
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        size = len(_folded(product, [key], [body], own[:middle], now).bodies[0])
        if size <= max(product.settings.profile_bytes_max, len(body)):
            fits = middle
        else:
            too_many = middle
    return own[fits:]


def _write(tx: Transaction, product: Product, stored: Mapping[ProfileKey, Stored], plan: Plan, now: int) -> None:
    changed: dict[ProfileKey, Stored] = {}
    held_until_us = tx.now_us + product.settings.delete_us
    for profile, _, _ in plan.new_held:
        changed[profile] = stored[profile]
        changed[profile].held_until_us = held_until_us
    public: list[ProfileKey] = []
    for index in np.flatnonzero(plan.folded.changed).tolist():
        key = plan.profiles[index]
        row = changed[key] = stored[key]
        row.body, row.expires_at = plan.folded.bodies[index], int(plan.folded.expires_at[index])
        public.append(key)
    raise_versions(tx, stored, public)
    save(tx, changed)
    _move_held(tx, product, plan)
    if product.settings.publish:
        publish(tx, product, {key: stored[key] for key in public})
    tx.after_commit.append(lambda: _count_folds(product, plan))


def raise_versions(tx: Transaction, stored: Mapping[ProfileKey, Stored], public: Sequence[ProfileKey]) -> None:
    """A profile that was never public, or was deleted since, starts above every version that was ever deleted."""
    types = sorted({key[0] for key in public if stored[key].public_version == 0})
    floors = load(tx, PROFILE_FLOORS, {"profile_type": types}, ("version",)) if types else {}
    for key in public:
        row = stored[key]
        row.public_version = (row.public_version or floors.get((key[0],), (0,))[0]) + 1


def save(tx: Transaction, changed: Mapping[ProfileKey, Stored]) -> None:
    """Save rows that this transaction has loaded for writing; one that was made meanwhile is a lost race."""
    known = [(key, row) for key, row in sorted(changed.items()) if row.version]
    fresh = [(key, row) for key, row in sorted(changed.items()) if not row.version]
    if known:
        update(tx, PROFILES, _columns(known))
    if fresh:
        compare_and_set(tx, PROFILES, {**_columns(fresh), "version": [0] * len(fresh)})


def _columns(rows: Sequence[tuple[ProfileKey, Stored]]) -> dict[str, list[Any]]:
    return {
        "profile_type": [key[0] for key, _ in rows],
        "profile_id": [key[1] for key, _ in rows],
        "public_version": [row.public_version for _, row in rows],
        "body": [row.body for _, row in rows],
        "segments": [row.segments for _, row in rows],
        "segments_version": [row.segments_version for _, row in rows],
        "held_until_us": [row.held_until_us for _, row in rows],
        "expires_at": [row.expires_at for _, row in rows],
    }


def publish(tx: Transaction, product: Product, profiles: Mapping[ProfileKey, Stored]) -> None:
    """Put whole profiles in the outbox, as they are in this transaction."""
    messages = [
        Message(
            key=f"{key[0]}/{key[1]}",
            version=row.public_version,
            event_time_us=tx.now_us,
            schema="profile/1",
            payload=whole(key, row.body, row.segments, row.public_version),
        )
        for key, row in profiles.items()
    ]
    outbox.put(tx, product.topics, PROFILES_TOPIC.name, messages)


def _move_held(tx: Transaction, product: Product, plan: Plan) -> None:
    if plan.released:
        delete(tx, HELD_UPDATES, _held_keys(plan.released))
    if not plan.new_held:
        return
    exact = [product.catalog[held.counter_id].kind is Kind.FIXED64 for _, _, held in plan.new_held]
    insert(
        tx,
        HELD_UPDATES,
        {
            **_held_keys(plan.new_held),
            "counter_id": [held.counter_id for _, _, held in plan.new_held],
            "owner": [held.owner for _, _, held in plan.new_held],
            "value": [float(held.value) for _, _, held in plan.new_held],
            "count": [
                int(h.value) if is_exact else 0 for (_, _, h), is_exact in zip(plan.new_held, exact, strict=True)
            ],
            "committed_at_us": [held.committed_at_us for _, _, held in plan.new_held],
        },
    )
    _push_out(tx, product, sorted({(*profile, group_id) for profile, group_id, _ in plan.new_held}))


def _held_keys(held: Sequence[HeldHere]) -> dict[str, list[Any]]:
    return {
        "profile_type": [profile[0] for profile, _, _ in held],
        "profile_id": [profile[1] for profile, _, _ in held],
        "time_counter_id": [group_id for _, group_id, _ in held],
        "key": [each.key for _, _, each in held],
        "time": [each.time for _, _, each in held],
        "event_id": [each.event_id for _, _, each in held],
        "log": [each.log for _, _, each in held],
        "number": [each.number for _, _, each in held],
    }


def _push_out(tx: Transaction, product: Product, pairs: Sequence[tuple[str, str, int]]) -> None:
    """Above MaxDelayedRecords of a profile and time counter, the smallest by (time, key, event id) go."""
    waiting = held_at(tx, product, dict(zip(PLACE[:3], zip(*pairs, strict=True), strict=True)))
    by_pair: dict[tuple[str, str, int], list[Held]] = {}
    for place, held in waiting.items():
        by_pair.setdefault(place[:3], []).extend(held)
    gone: list[HeldHere] = []
    for (profile_type, profile_id, group_id), held in by_pair.items():
        count_max = product.catalog.groups[group_id].delayed_records_max or 0
        if len(held) > count_max:
            smallest = sorted(held, key=lambda each: each.age)[: len(held) - count_max]
            gone += [((profile_type, profile_id), group_id, each) for each in smallest]
    if gone:
        delete(tx, HELD_UPDATES, _held_keys(gone))
        tx.after_commit.append(lambda: metrics.PUSHED_OUT.inc(len(gone)))


def _count_folds(product: Product, plan: Plan) -> None:
    metrics.FOLDS.inc(len(plan.rows))
    metrics.DROPPED.inc(plan.folded.dropped)
    metrics.HELD.inc(len(plan.new_held))
    metrics.RELEASED.inc(len(plan.released))
    for counter_id, (to_records_max, to_expire_days) in plan.folded.bill.items():
        name = product.catalog[counter_id].name
        # A sum of negative values would turn the counter back, which a counter must not.
        metrics.LOST_WEIGHT.labels(name, "MaxRecords").inc(abs(to_records_max))
        metrics.LOST_WEIGHT.labels(name, "ExpireDays").inc(abs(to_expire_days))


def _count_verdicts(tx: Transaction, log_events: Sequence[tuple[str, Event]], verdicts: Sequence[Verdict]) -> None:
    counts: dict[tuple[str, str], int] = {}
    for (log, _), verdict in zip(log_events, verdicts, strict=True):
        counts[log, verdict.status] = counts.get((log, verdict.status), 0) + 1

    def count() -> None:
        for (log, status), number in counts.items():
            metrics.EVENTS.labels(log, status).inc(number)

    tx.after_commit.append(count)
