"""Counting events: marks, profiles, held-back updates and messages of a batch commit together.

Profiles are loaded under a lock, in key order, so two workers on one profile wait for each other; the fold is one
call over the whole batch. An event counts whole or not at all: where one of its updates cannot be kept, the event
is refused and the batch is folded again without it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from keyfold.core.errors import TooLarge
from keyfold.core.store import Transaction
from keyfold.core.store.batch import Columns
from keyfold.core.store.shapes import delete, insert_new, load
from keyfold.counters.errors import TimeWrong
from keyfold.counters.model import TIME_MAX, must_be_time
from keyfold.profiles import metrics
from keyfold.profiles.handlers import Event
from keyfold.profiles.model import Arrived, Asked, EventKey, ProfileKey, Verdict, ask, fingerprint
from keyfold.profiles.service.folding import Plan, planned
from keyfold.profiles.service.holding import held_before, move_held
from keyfold.profiles.service.product import Product
from keyfold.profiles.service.storing import COUNTED, Stored, loaded, publish, raise_versions, save
from keyfold.profiles.tables import EVENT_MARKS, EVENT_WATERMARKS

# What one transaction folds; a larger batch is halved by whoever gathered it.
BATCH_UPDATES_MAX = 200_000


def count_events(
    tx: Transaction, product: Product, log_events: Sequence[tuple[str, Event]], *, marked: bool
) -> list[Verdict]:
    """Count events of logs, each once; with `marked` an event's id is remembered, else its position vouches for it."""
    others = not_counted(tx, product, log_events, marked=marked)
    return [others.get(number) or Verdict(event.id, "counted") for number, (_, event) in enumerate(log_events)]


def not_counted(
    tx: Transaction, product: Product, log_events: Sequence[tuple[str, Event]], *, marked: bool
) -> dict[int, Verdict]:
    """Count events as `count_events` does; returns only what became of the others, by their place."""
    verdicts: dict[int, Verdict] = {}
    arrived = _in_time(tx, _dated(product, log_events, tx.now_us, verdicts), verdicts, marked=marked)
    repeats: list[Arrived] = []
    if marked:
        arrived, repeats = _unmarked(tx, arrived, verdicts)
    asked, refused = _asked(product, arrived)
    asked = _fold_all(tx, product, asked, refused)
    if refused:
        counted = {number for number, _, _ in asked.events}
        for number, log, event in (*arrived, *repeats):
            if number not in counted and (log, event.id) in refused:
                verdicts[number] = Verdict(event.id, "refused", refused[log, event.id])
        if marked:
            # Not the marks of what had waited before: that was counted, and waits on.
            _unmark(tx, [(log, event.id) for _, log, event in arrived if (log, event.id) in refused])
    _count_verdicts(tx, log_events, verdicts)
    return verdicts


def _dated(
    product: Product, log_events: Sequence[tuple[str, Event]], now_us: int, verdicts: dict[int, Verdict]
) -> list[Arrived]:
    """Refuse times that cannot be kept."""
    now, future = now_us // 1_000_000, product.settings.future_seconds_max
    arrived = [(number, log, event) for number, (log, event) in enumerate(log_events)]
    latest = min(TIME_MAX, now + future)
    wrong = [each for each in arrived if not 1 <= each[2].time <= latest]
    for number, _, event in wrong:
        try:
            must_be_time(event.time, now, future)
        except TimeWrong as error:
            verdicts[number] = Verdict(event.id, "refused", str(error))
    return [each for each in arrived if each[0] not in verdicts] if wrong else arrived


def _in_time(tx: Transaction, arrived: list[Arrived], verdicts: dict[int, Verdict], *, marked: bool) -> list[Arrived]:
    """Leave out what is older than its log's watermark: its mark may be gone, so it cannot be told from a repeat."""
    logs = sorted({log for _, log, _ in arrived})
    edges = {log: time for (log,), (time,) in load(tx, EVENT_WATERMARKS, {"log": logs}, ("time",)).items()}
    late = [each for each in arrived if each[2].time < edges.get(each[1], 0)] if edges else []
    if not late:
        return arrived
    known = _marks(tx, [(log, event.id) for _, log, event in late]) if marked else {}
    for number, log, event in late:
        if (log, event.id) in known:
            verdicts[number] = _repeat(event, known[log, event.id], fingerprint(event.fields))
        else:
            verdicts[number] = Verdict(event.id, "late", f"its time {event.time} lies before {edges[log]}")
    return [each for each in arrived if each[0] not in verdicts]


def _unmarked(
    tx: Transaction, arrived: Sequence[Arrived], verdicts: dict[int, Verdict]
) -> tuple[list[Arrived], list[Arrived]]:
    """Mark events; returns those that are new, and those that repeat one of them within this batch.

    Fingerprints are taken before a handler has seen the event.
    """
    prints = [fingerprint(event.fields) for _, _, event in arrived]
    keys = [(log, event.id) for _, log, event in arrived]
    # Where the first of an id stands; from behind, so that it is the one that stays.
    first = dict(zip(reversed(keys), range(len(keys) - 1, -1, -1), strict=True))
    at_first = sorted(first.values())
    marks: Columns = {
        "log": [arrived[at][1] for at in at_first],
        "event_id": [arrived[at][2].id for at in at_first],
        "fingerprint": [prints[at] for at in at_first],
        "time": [arrived[at][2].time for at in at_first],
    }
    inserted = insert_new(tx, EVENT_MARKS, marks)
    if len(inserted) == len(arrived):
        return list(arrived), []
    known = _marks(tx, [key for key in first if key not in inserted])
    new: list[Arrived] = []
    repeats: list[Arrived] = []
    for at, (key, (number, log, event)) in enumerate(zip(keys, arrived, strict=True)):
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


def _unmark(tx: Transaction, keys: Sequence[EventKey]) -> None:
    delete(tx, EVENT_MARKS, {"log": [log for log, _ in keys], "event_id": [event_id for _, event_id in keys]})


def _asked(product: Product, arrived: Sequence[Arrived]) -> tuple[Asked, dict[EventKey, str]]:
    """Let the handlers read the events that are new; and why some are refused."""
    asked, refused = ask(product.writing, arrived)
    updates = len(asked.updates)
    if updates > BATCH_UPDATES_MAX and len(arrived) > 1:
        raise TooLarge(f"{updates} updates in one batch, {BATCH_UPDATES_MAX} are allowed", hint="Send fewer events")
    return asked, refused


def _fold_all(tx: Transaction, product: Product, asked: Asked, refused: dict[EventKey, str]) -> Asked:
    """Fold and write; what cannot be kept is left out, and the rest folded again without it. Returns what counted."""
    stored = loaded(tx, sorted(asked.profiles))
    held = held_before(tx, product, asked, stored)
    while (plan := planned(product, asked, stored, held, tx.now_us)).refused:
        refused |= {key: str(error) for key, error in plan.refused.items()}
        asked = asked.without(refused)
        # What had waited before and cannot be kept now waits on, and is not looked at in this batch.
        held = {place: [h for h in here if (h.log, h.event_id) not in refused] for place, here in held.items()}
    product.pin(tx, {counter.id for counter, _, _, _ in asked.updates})
    _write(tx, product, stored, plan)
    return asked


def _write(tx: Transaction, product: Product, stored: Mapping[ProfileKey, Stored], plan: Plan) -> None:
    changed: dict[ProfileKey, Stored] = {}
    held_until_us = tx.now_us + product.settings.delete_us
    for profile, _, _ in plan.settlement.waiting:
        changed[profile] = stored[profile]
        changed[profile].held_until_us = max(held_until_us, changed[profile].held_until_us)
    public: list[ProfileKey] = []
    expires_at: list[int] = plan.folded.expires_at.tolist()
    places = {plan.profiles[index]: index for index in np.flatnonzero(plan.folded.changed).tolist()}
    # In the order that they were loaded in, which is that of their keys: nothing needs to be sorted again.
    for key, row in stored.items():
        index = places.get(key)
        if index is not None:
            changed[key] = row
            row.body, row.expires_at = plan.folded.bodies[index], expires_at[index]
            public.append(key)
    raise_versions(tx, stored, public)
    save(tx, changed, COUNTED)
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


def _count_verdicts(tx: Transaction, log_events: Sequence[tuple[str, Event]], others: Mapping[int, Verdict]) -> None:
    arrived = Counter([log for log, _ in log_events])
    counts = Counter((log_events[at][0], verdict.status) for at, verdict in others.items())
    for log, number in (arrived - Counter(log_events[at][0] for at in others)).items():
        counts[log, "counted"] = number

    def count() -> None:
        for (log, status), number in counts.items():
            metrics.EVENTS.labels(log, status).inc(number)

    tx.after_commit.append(count)
