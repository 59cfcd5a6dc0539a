"""Counting events: marks, profiles, held-back updates and messages of a batch commit together.

Profiles are loaded under a lock, in key order, so two workers on one profile wait for each other; the fold is one
call over the whole batch. An event counts whole or not at all: where one of its updates cannot be kept, the event
is refused and the batch is folded again without it.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from keyfold.core.errors import KeyfoldError, TooLarge
from keyfold.core.store import Transaction
from keyfold.core.store.batch import Columns
from keyfold.core.store.shapes import delete, insert_new, load
from keyfold.counters.errors import TimeWrong
from keyfold.counters.model import must_be_time
from keyfold.profiles import metrics
from keyfold.profiles.handlers import Event
from keyfold.profiles.model import ProfileKey, Ready, Verdict, fingerprint, ready
from keyfold.profiles.service.folding import Plan, planned
from keyfold.profiles.service.holding import held_before, move_held
from keyfold.profiles.service.product import Product
from keyfold.profiles.service.storing import Stored, loaded, publish, raise_versions, save
from keyfold.profiles.tables import EVENT_MARKS, EVENT_WATERMARKS

# What one transaction folds; a larger batch is halved by whoever gathered it.
BATCH_UPDATES_MAX = 200_000

EventKey = tuple[str, str]  # log, event id
Arrived = tuple[int, str, Event]  # its number in the batch, its log, the event
Fresh = list[tuple[int, Ready]]


def count_events(
    tx: Transaction, product: Product, log_events: Sequence[tuple[str, Event]], *, marked: bool
) -> list[Verdict]:
    """Count events of logs, each once; with `marked` an event's id is remembered, else its position vouches for it."""
    verdicts: list[Verdict | None] = [None] * len(log_events)
    arrived = _in_time(tx, _dated(product, log_events, tx.now_us, verdicts), verdicts, marked=marked)
    repeats: list[Arrived] = []
    if marked:
        arrived, repeats = _unmarked(tx, arrived, verdicts)
    refused: dict[EventKey, str] = {}
    fresh = _readied(product, arrived, refused)
    fresh = _fold_all(tx, product, fresh, refused)
    for number, one in fresh:
        verdicts[number] = Verdict(one.event_id, "counted")
    for number, log, event in (*arrived, *repeats):
        if (log, event.id) in refused and (verdicts[number] is None or marked):
            verdicts[number] = Verdict(event.id, "refused", refused[log, event.id])
    # Not the marks of what had waited before: that was counted, and waits on.
    unmarked = [(log, event.id) for _, log, event in arrived if (log, event.id) in refused] if marked else []
    delete(tx, EVENT_MARKS, {"log": [log for log, _ in unmarked], "event_id": [each for _, each in unmarked]})
    done = [verdict for verdict in verdicts if verdict is not None]
    _count_verdicts(tx, log_events, done)
    return done


def _dated(
    product: Product, log_events: Sequence[tuple[str, Event]], now_us: int, verdicts: list[Verdict | None]
) -> list[Arrived]:
    """Refuse times that cannot be kept."""
    arrived: list[Arrived] = []
    now, future = now_us // 1_000_000, product.settings.future_seconds_max
    for number, (log, event) in enumerate(log_events):
        try:
            must_be_time(event.time, now, future)
            arrived.append((number, log, event))
        except TimeWrong as error:
            verdicts[number] = Verdict(event.id, "refused", str(error))
    return arrived


def _in_time(
    tx: Transaction, arrived: Sequence[Arrived], verdicts: list[Verdict | None], *, marked: bool
) -> list[Arrived]:
    """Leave out what is older than its log's watermark: its mark may be gone, so it cannot be told from a repeat."""
    logs = sorted({log for _, log, _ in arrived})
    edges = {log: time for (log,), (time,) in load(tx, EVENT_WATERMARKS, {"log": logs}, ("time",)).items()}
    late = [each for each in arrived if each[2].time < edges.get(each[1], 0)]
    if not late:
        return list(arrived)
    known = _marks(tx, [(log, event.id) for _, log, event in late]) if marked else {}
    for number, log, event in late:
        if (log, event.id) in known:
            verdicts[number] = _repeat(event, known[log, event.id], fingerprint(event.fields))
        else:
            verdicts[number] = Verdict(event.id, "late", f"its time {event.time} lies before {edges[log]}")
    return [each for each in arrived if verdicts[each[0]] is None]


def _unmarked(
    tx: Transaction, arrived: Sequence[Arrived], verdicts: list[Verdict | None]
) -> tuple[list[Arrived], list[Arrived]]:
    """Mark events; returns those that are new, and those that repeat one of them within this batch.

    Fingerprints are taken before a handler has seen the event.
    """
    prints = [fingerprint(event.fields) for _, _, event in arrived]
    first: dict[EventKey, int] = {}  # where the first of an id stands
    for at, (_, log, event) in enumerate(arrived):
        first.setdefault((log, event.id), at)
    marks: Columns = {
        "log": [log for log, _ in first],
        "event_id": [event_id for _, event_id in first],
        "fingerprint": [prints[at] for at in first.values()],
        "time": [arrived[at][2].time for at in first.values()],
    }
    inserted = insert_new(tx, EVENT_MARKS, marks)
    if len(inserted) == len(arrived):
        return list(arrived), []
    known = _marks(tx, [key for key in first if key not in inserted])
    new: list[Arrived] = []
    repeats: list[Arrived] = []
    for at, (number, log, event) in enumerate(arrived):
        key = (log, event.id)
        if key in inserted and first[key] == at:
            new.append((number, log, event))
            continue
        verdicts[number] = _repeat(event, known[key] if key in known else prints[first[key]], prints[at])
        if key in inserted:
            repeats.append((number, log, event))
    return new, repeats


def _marks(tx: Transaction, keys: Sequence[EventKey]) -> dict[EventKey, int]:
    columns = {"log": [log for log, _ in keys], "event_id": [event_id for _, event_id in keys]}
    found = load(tx, EVENT_MARKS, columns, ("fingerprint",))
    return {(log, event_id): mark for (log, event_id), (mark,) in found.items()}


def _repeat(event: Event, counted: int, mark: int) -> Verdict:
    if counted == mark:
        return Verdict(event.id, "duplicate")
    return Verdict(event.id, "conflict", "this id was counted with other content")


def _readied(product: Product, arrived: Sequence[Arrived], refused: dict[EventKey, str]) -> Fresh:
    """Let the handlers read the events that are new."""
    fresh: Fresh = []
    for number, log, event in arrived:
        try:
            fresh.append((number, ready(product.writing.get(log, ()), log, event)))
        except KeyfoldError as error:
            refused[log, event.id] = str(error)
    updates = sum(len(changed) for _, one in fresh for _, changed in one.changes)
    if updates > BATCH_UPDATES_MAX and len(arrived) > 1:
        raise TooLarge(f"{updates} updates in one batch, {BATCH_UPDATES_MAX} are allowed", hint="Send fewer events")
    return fresh


def _fold_all(tx: Transaction, product: Product, fresh: Fresh, refused: dict[EventKey, str]) -> Fresh:
    """Fold and write; what cannot be kept is left out, and the rest folded again without it. Returns what counted."""
    keys = sorted({profile for _, one in fresh for profile, _ in one.changes})
    stored = loaded(tx, keys)
    held = held_before(tx, product, [one for _, one in fresh], stored)
    while (plan := planned(product, [one for _, one in fresh], stored, held, tx.now_us)).refused:
        refused |= {key: str(error) for key, error in plan.refused.items()}
        fresh = [(number, one) for number, one in fresh if (one.log, one.event_id) not in refused]
        # What had waited before and cannot be kept now waits on, and is not looked at in this batch.
        held = {place: [h for h in here if (h.log, h.event_id) not in refused] for place, here in held.items()}
    product.pin(tx, {counter for _, one in fresh for _, changed in one.changes for counter, _, _, _ in changed})
    _write(tx, product, stored, plan)
    return fresh


def _write(tx: Transaction, product: Product, stored: Mapping[ProfileKey, Stored], plan: Plan) -> None:
    changed: dict[ProfileKey, Stored] = {}
    held_until_us = tx.now_us + product.settings.delete_us
    for profile, _, _ in plan.settlement.waiting:
        changed[profile] = stored[profile]
        changed[profile].held_until_us = max(held_until_us, changed[profile].held_until_us)
    public: list[ProfileKey] = []
    for index in np.flatnonzero(plan.folded.changed).tolist():
        key = plan.profiles[index]
        row = changed[key] = stored[key]
        row.body, row.expires_at = plan.folded.bodies[index], int(plan.folded.expires_at[index])
        public.append(key)
    raise_versions(tx, stored, public)
    save(tx, changed)
    move_held(tx, product, plan.settlement)
    if product.settings.publish:
        publish(tx, product, {key: stored[key] for key in public})
    tx.after_commit.append(lambda: _count_folds(product, plan))


def _count_folds(product: Product, plan: Plan) -> None:
    metrics.FOLDS.inc(plan.updates)
    metrics.DROPPED.inc(plan.folded.dropped)
    metrics.HELD.inc(len(plan.settlement.waiting))
    metrics.RELEASED.inc(len(plan.settlement.released))
    metrics.PUSHED_OUT.inc(plan.settlement.pushed_out)
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
