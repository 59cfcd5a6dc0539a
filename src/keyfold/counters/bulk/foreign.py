"""The slow path: profiles whose body is not in the form we write are folded one by one, through protobuf."""

import numpy as np

from keyfold.core.errors import KeyfoldError
from keyfold.counters.bulk.columns import NEVER, Folded, Ints, Updates
from keyfold.counters.catalog import Catalog, Kind
from keyfold.counters.errors import PackWrong, UpdateRefused

Row = tuple[int, float, int, int, int]  # minus the time, value, row, counter id, key


def fold_foreign(
    catalog: Catalog, folded: Folded, profile: int, updates: Updates, rows: Ints, now: int, future_seconds_max: int
) -> None:
    """Fold the rows of one profile; a body that breaks an invariant stays as it is, its rows not folded."""
    try:
        _fold(catalog, folded, profile, updates, rows, now, future_seconds_max)
    except PackWrong as wrong:
        folded.broken[profile] = wrong
        folded.expires_at[profile] = NEVER  # nobody may sweep away what nobody can read


def _fold(
    catalog: Catalog, folded: Folded, profile: int, updates: Updates, rows: Ints, now: int, future_seconds_max: int
) -> None:
    from keyfold.counters.counters import MutableCounters

    body = folded.bodies[profile]
    counters = MutableCounters(catalog, body, now, future_seconds_max=future_seconds_max)
    refused: dict[int, KeyfoldError] = {}
    added = False
    # From the latest to the oldest, so that a batch is a set: the first of a key decides whether the key is live.
    for minus_time, value, row, counter_id, key in sorted(_rows(catalog, updates, rows)):
        try:
            added |= counters.update(counter_id, key, value, -minus_time)
        except UpdateRefused as error:
            refused[row] = error
    if added:
        counters.cleanup()
        written = counters.serialise()
        for counter_id, lost in counters.bill.items():
            if not any(lost):
                continue
            before = folded.bill.get(counter_id, (0.0, 0.0))
            folded.bill[counter_id] = (before[0] + lost[0], before[1] + lost[1])
        expires_at = counters.expires_at
    else:
        written = body
        expires_at = MutableCounters(catalog, body, now).expires_at
    folded.dropped += counters.dropped
    folded.refused.update(refused)
    folded.expires_at[profile] = expires_at
    if written != body:
        folded.bodies[profile] = written
        folded.changed[profile] = True


def _rows(catalog: Catalog, updates: Updates, rows: Ints) -> list[Row]:
    exact = updates.count
    found: list[Row] = []
    for row in rows.tolist():
        counter_id = int(updates.counter[row])
        is_exact = exact is not None and catalog[counter_id].kind is Kind.FIXED64
        value = int(exact[row]) if is_exact and exact is not None else float(updates.value[row])
        found.append((-int(updates.time[row]), value, row, counter_id, int(updates.key[row])))
    return found


assert np.iinfo(np.int64).max > NEVER
