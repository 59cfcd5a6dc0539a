"""Counting events: marks, profiles, held-back updates and messages of a batch commit together.

Profiles are loaded under a lock, in key order, so two workers on one profile wait for each other; the fold is one
call over the whole batch. An event counts whole or not at all: where one of its updates cannot be kept, the event
is refused and the batch is folded again without it. An owned update waits on instead: whether another was there to
release it must not be told by what is said of its event.
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
from keyfold.profiles.model import Asked, EventKey, LogEvent, ProfileKey, UpdateKey, Verdict, ask, fingerprint
from keyfold.profiles.service.folding import Plan, planned
from keyfold.profiles.service.holding import held_before, move_held
from keyfold.profiles.service.product import Product
from keyfold.profiles.service.storing import COUNTED, Stored, loaded, publish, raise_versions, save
from keyfold.profiles.tables import EVENT_MARKS, EVENT_WATERMARKS

# What one transaction folds; a larger batch is halved by whoever gathered it.
BATCH_UPDATES_MAX = 200_000
ANOTHER_REFUSED = "this id came twice at once with different content, and the first was refused; send it again"


def count_events(tx: Transaction, product: Product, log_events: Sequence[LogEvent], *, marked: bool) -> list[Verdict]:
    """Count events of logs, each once; with `marked` an event's id is remembered, else its position vouches for it."""
    others = not_counted(tx, product, log_events, marked=marked)
    return [others.get(number) or Verdict(event.id, "counted") for number, (_, event) in enumerate(log_events)]


def not_counted(
    tx: Transaction, product: Product, log_events: Sequence[LogEvent], *, marked: bool
) -> dict[int, Verdict]:
    """Count events as `count_events` does; returns only what became of the others, by their numbers in the batch."""
    verdicts: dict[int, Verdict] = {}
    logs = Counter([log for log, _ in log_events])
    times = [event.time for _, event in log_events]
    _must_be_dated(product, log_events, times, tx.now_us, verdicts)
    _must_be_in_time(tx, log_events, sorted(logs), times, verdicts, marked=marked)
    arrived: Sequence[int] = range(len(log_events))
    if verdicts:
        arrived = [number for number in arrived if number not in verdicts]
    repeats: list[int] = []
    if marked:
        arrived, repeats = _unmarked(tx, log_events, arrived, verdicts)
    asked, refused = _asked(product, log_events, arrived)
    asked = _fold_all(tx, product, asked, refused)
    if refused:
        # Of those that are new, and of what repeats one: what was judged before by itself stays as it is.
        for number in (*asked.refused.intersection(arrived), *repeats):
            log, event = log_events[number]
            if (log, event.id) in refused:
                verdicts[number] = _not_kept(event, refused[log, event.id], verdicts.get(number))
    if marked and refused:
        keys = [(log_events[number][0], log_events[number][1].id) for number in arrived]
        _unmark(tx, [key for key in keys if key in refused])
    _count_verdicts(tx, log_events, logs, verdicts)
    return verdicts


def _must_be_dated(
    product: Product,
    log_events: Sequence[LogEvent],
    times: Sequence[int],
    now_us: int,
    verdicts: dict[int, Verdict],
) -> None:
    """Refuse times that cannot be kept."""
    now, future = now_us // 1_000_000, product.settings.future_seconds_max
    if not times or (min(times) >= 1 and max(times) <= min(TIME_MAX, now + future)):
        return
    for number, (_, event) in enumerate(log_events):
        try:
            must_be_time(event.time, now, future)
        except TimeWrong as error:
            verdicts[number] = Verdict(event.id, "refused", str(error))


def _must_be_in_time(
    tx: Transaction,
    log_events: Sequence[LogEvent],
    logs: Sequence[str],
    times: Sequence[int],
    verdicts: dict[int, Verdict],
    *,
    marked: bool,
) -> None:
    """Leave out what is older than its log's watermark: its mark may be gone, so it cannot be told from a repeat."""
    edges = {log: time for (log,), (time,) in load(tx, EVENT_WATERMARKS, {"log": logs}, ("time",)).items()}
    if not edges or min(times) >= max(edges.values()):
        return
    late = [
        (number, log, event)
        for number, (log, event) in enumerate(log_events)
        if event.time < edges.get(log, 0) and number not in verdicts
    ]
    known = _marks(tx, [(log, event.id) for _, log, event in late]) if marked else {}
    for number, log, event in late:
        if (log, event.id) in known:
            verdicts[number] = _repeat(event, known[log, event.id], fingerprint(event.fields))
        else:
            verdicts[number] = Verdict(event.id, "late", f"its time {event.time} lies before {edges[log]}")


def _unmarked(
    tx: Transaction, log_events: Sequence[LogEvent], arrived: Sequence[int], verdicts: dict[int, Verdict]
) -> tuple[Sequence[int], list[int]]:
    """Mark events; returns those that are new, and those that repeat one of them within this batch.

    Fingerprints are taken before a handler has seen the event.
    """
    some = [log_events[number] for number in arrived]
    prints = [fingerprint(event.fields) for _, event in some]
    keys = [(log, event.id) for log, event in some]
    # Where the first of an id stands; from behind, so that it is the one that stays.
    first = dict(zip(reversed(keys), range(len(keys) - 1, -1, -1), strict=True))
    at_first = sorted(first.values())
    marks: Columns = {
        "log": [some[at][0] for at in at_first],
        "event_id": [some[at][1].id for at in at_first],
        "fingerprint": [prints[at] for at in at_first],
        "time": [some[at][1].time for at in at_first],
    }
    inserted = insert_new(tx, EVENT_MARKS, marks)
    if len(inserted) == len(arrived):
        return arrived, []
    known = _marks(tx, [key for key in first if key not in inserted])
    new: list[int] = []
    repeats: list[int] = []
    for at, (key, number) in enumerate(zip(keys, arrived, strict=True)):
        if key in inserted and first[key] == at:
            new.append(number)
            continue
        verdicts[number] = _repeat(some[at][1], known[key] if key in known else prints[first[key]], prints[at])
        if key in inserted:
            repeats.append(number)
    return new, repeats


def _marks(tx: Transaction, keys: Sequence[EventKey]) -> dict[EventKey, int]:
    columns = {"log": [log for log, _ in keys], "event_id": [event_id for _, event_id in keys]}
    found = load(tx, EVENT_MARKS, columns, ("fingerprint",))
    return {(log, event_id): mark for (log, event_id), (mark,) in found.items()}


def _repeat(event: Event, counted: int, mark: int) -> Verdict:
    if counted == mark:
        return Verdict(event.id, "duplicate")
    return Verdict(event.id, "conflict", "this id was counted with other content")


def _not_kept(event: Event, reason: str, before: Verdict | None) -> Verdict:
    """The reason is that of the first of its id: another event may be somebody else's, and may be good."""
    is_other = before is not None and before.status == "conflict"
    return Verdict(event.id, "refused", ANOTHER_REFUSED if is_other else reason)


def _unmark(tx: Transaction, keys: Sequence[EventKey]) -> None:
    delete(tx, EVENT_MARKS, {"log": [log for log, _ in keys], "event_id": [event_id for _, event_id in keys]})


def _asked(
    product: Product, log_events: Sequence[LogEvent], arrived: Sequence[int]
) -> tuple[Asked, dict[EventKey, str]]:
    """Let the handlers read the events that are new; and why some are refused."""
    asked, refused = ask(product.writing, log_events, arrived)
    updates = len(asked.updates)
    if updates > BATCH_UPDATES_MAX and len(arrived) > 1:
        raise TooLarge(f"{updates} updates in one batch, {BATCH_UPDATES_MAX} are allowed", hint="Send fewer events")
    return asked, refused


def _fold_all(tx: Transaction, product: Product, asked: Asked, refused: dict[EventKey, str]) -> Asked:
    """Fold and write; what cannot be kept is left out, and the rest folded again without it. Returns what counted."""
    stored = loaded(tx, product, sorted(asked.profiles), items=len(asked.log_events))
    held = held_before(tx, product, asked, stored)
    kept_back: set[UpdateKey] = set()
    while True:
        plan = planned(product, asked, stored, held, kept_back, tx.now_us)
        if not plan.refused and not plan.kept_back:
            break
        if plan.refused:
            # Without them other updates may be released, and have room.
            refused |= {key: str(error) for key, error in plan.refused.items()}
            asked, kept_back = asked.without(plan.refused), set()
        else:
            kept_back |= plan.kept_back
    product.pin(tx, {each[0].id for each in asked.updates})
    _write(tx, product, stored, plan)
    return asked


def _write(tx: Transaction, product: Product, stored: Mapping[ProfileKey, Stored], plan: Plan) -> None:
    changed: dict[ProfileKey, Stored] = {}
    for profile, _, _ in plan.settlement.waiting:
        changed[profile] = stored[profile]
        changed[profile].held_at_us = max(tx.now_us, changed[profile].held_at_us)
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
    metrics.count_lost(product.catalog, plan.folded.bill)


def _count_verdicts(
    tx: Transaction, log_events: Sequence[LogEvent], logs: Counter[str], others: Mapping[int, Verdict]
) -> None:
    counts = Counter((log_events[at][0], verdict.status) for at, verdict in others.items())
    for log, number in (logs - Counter(log_events[at][0] for at in others)).items():
        counts[log, "counted"] = number

    def count() -> None:
        for (log, status), number in counts.items():
            metrics.EVENTS.labels(log, status).inc(number)

    tx.after_commit.append(count)
