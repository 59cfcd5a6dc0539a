"""Counting events: marks, profiles, held-back updates and messages of a batch commit together.

Profiles are loaded under a lock, in key order, so two workers on one profile wait for each other; the fold is one
call over the whole batch. An event counts whole or not at all: where one of its updates cannot be kept, the event
is refused and the batch is folded again without it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keyfold.core.errors import KeyfoldError, TooLarge
from keyfold.core.store import Transaction
from keyfold.core.store.batch import Columns
from keyfold.core.store.shapes import delete, insert_new, load
from keyfold.profiles import metrics
from keyfold.profiles.handlers import Event
from keyfold.profiles.model import ProfileKey, Ready, Verdict, fingerprint, ready
from keyfold.profiles.service.folding import Plan, planned
from keyfold.profiles.service.holding import held_before, move_held
from keyfold.profiles.service.product import Product
from keyfold.profiles.service.storing import Stored, loaded, publish, raise_versions, save
from keyfold.profiles.tables import EVENT_MARKS, EVENT_WATERMARKS


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
    _fold_all(tx, product, fresh, verdicts, marked=marked)
    done = [verdict for verdict in verdicts if verdict is not None]
    _count_verdicts(tx, log_events, done)
    return done


# What one transaction folds; a larger batch is halved by whoever gathered it.
BATCH_UPDATES_MAX = 200_000

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
    updates = sum(len(changed) for _, one in fresh for _, changed in one.changes)
    if updates > BATCH_UPDATES_MAX and len(log_events) > 1:
        raise TooLarge(f"{updates} updates in one batch, {BATCH_UPDATES_MAX} are allowed", hint="Send fewer events")
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


def _fold_all(tx: Transaction, product: Product, fresh: Fresh, verdicts: list[Verdict | None], *, marked: bool) -> None:
    keys = sorted({profile for _, one in fresh for profile, _ in one.changes})
    stored = loaded(tx, keys)
    held = held_before(tx, product, [one for _, one in fresh], stored)
    refused: Fresh = []
    while (plan := planned(product, [one for _, one in fresh], stored, held, tx.now_us)).refused:
        out = [(number, one) for number, one in fresh if (one.log, one.event_id) in plan.refused]
        if not out:
            break  # only what had waited cannot be kept: it is left out, and refuses no event of this batch
        for number, one in out:
            verdicts[number] = Verdict(one.event_id, "refused", str(plan.refused[one.log, one.event_id]))
        fresh = [(number, one) for number, one in fresh if (one.log, one.event_id) not in plan.refused]
        refused += out
    if refused and marked:
        delete(tx, EVENT_MARKS, {"log": [r.log for _, r in refused], "event_id": [r.event_id for _, r in refused]})
    for number, one in fresh:
        verdicts[number] = Verdict(one.event_id, "counted")
    _write(tx, product, stored, plan)


def _write(tx: Transaction, product: Product, stored: Mapping[ProfileKey, Stored], plan: Plan) -> None:
    changed: dict[ProfileKey, Stored] = {}
    held_until_us = tx.now_us + product.settings.delete_us
    for profile, _, _ in plan.settlement.waiting:
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
    move_held(tx, product, plan.settlement)
    if product.settings.publish:
        publish(tx, product, {key: stored[key] for key in public})
    tx.after_commit.append(lambda: _count_folds(product, plan))


def _count_folds(product: Product, plan: Plan) -> None:
    metrics.FOLDS.inc(plan.updates)
    metrics.DROPPED.inc(plan.folded.dropped)
    metrics.HELD.inc(len(plan.settlement.waiting))
    metrics.RELEASED.inc(len(plan.settlement.released))
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
