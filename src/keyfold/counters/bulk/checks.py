"""Which rows of a batch may be folded, and why the others may not."""

from functools import partial

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from keyfold.core.errors import KeyfoldError
from keyfold.counters.bulk.columns import Bools, Ints, Updates, Words
from keyfold.counters.bulk.cores import on_cores
from keyfold.counters.bulk.tables import Tables
from keyfold.counters.catalog import Kind
from keyfold.counters.errors import CounterReadOnly, CounterUnknown, TimeWrong, ValueWrong
from keyfold.counters.model import TIME_MAX, VALUE_MAX

SMALL_ID_MAX = 1 << 16
SLICE_ROWS = 1 << 15


class Checked(Struct, kw_only=True):
    counter: NDArray[np.int32]  # the place of each row's counter in the tables
    exact: Words  # the value of VF_FIXED64 rows; empty where there are none
    good: Bools | None  # None: all of them
    owned: Ints
    refused: dict[int, KeyfoldError]


def check(tables: Tables, updates: Updates, profiles: int, now: int, future_seconds_max: int, cores: int) -> Checked:
    """Look at every row once; messages are made only for the rows that are refused."""
    check_lengths(updates)
    _check_profiles(updates, profiles)
    length = len(updates.profile)
    place, known = np.zeros(length, np.int32), np.zeros(length, np.bool_)
    value_wrong, bad = np.zeros(length, np.bool_), np.zeros(length, np.bool_)
    exact = np.empty(0, np.uint64)
    time_latest = min(TIME_MAX, now + future_seconds_max)
    has_exact = bool((tables.kinds == Kind.FIXED64).any())
    if has_exact:
        exact = np.zeros(length, np.uint64)

    def judge(some: slice) -> None:
        place[some], known[some] = _places(tables, updates.counter[some])
        value_wrong[some], its_exact = _wrong_values(tables, updates, some, place[some])
        if its_exact is not None:
            exact[some] = its_exact
        bad[some] = ~known[some] | value_wrong[some] | (updates.time[some] < 1) | (updates.time[some] > time_latest)
        if tables.read_only.any():
            bad[some] |= tables.read_only[place[some]]

    if len(tables.ids):
        # In slices, so that what is worked out on the way stays in the cache.
        begins = range(0, length, SLICE_ROWS)
        on_cores(cores, [partial(judge, slice(begin, begin + SLICE_ROWS)) for begin in begins])
    if not len(tables.ids):
        bad[:] = True
    owned = _owned(updates)
    if owned is not None:
        bad &= ~owned
    refused = {
        row: _refusal(tables, updates, row, int(place[row]), bool(known[row]), bool(value_wrong[row]), time_latest)
        for row in np.flatnonzero(bad).tolist()
    }
    if owned is not None:
        bad |= owned
    return Checked(
        counter=place,
        exact=exact,
        good=~bad if bad.any() else None,
        owned=np.flatnonzero(owned) if owned is not None else np.empty(0, np.int64),
        refused=refused,
    )


def check_lengths(updates: Updates) -> None:
    """Before any compiled loop, which would read beyond the end of a column that is too short."""
    length = len(updates.profile)
    columns = (updates.counter, updates.key, updates.value, updates.time, updates.count, updates.owner)
    if any(column is not None and len(column) != length for column in columns):
        raise ValueError("the columns of a batch must have one length")


def _check_profiles(updates: Updates, profiles: int) -> None:
    if len(updates.profile) and not (int(updates.profile.min()) >= 0 and int(updates.profile.max()) < profiles):
        raise ValueError(f"a row names a profile outside the {profiles} bodies given")


def _places(tables: Tables, counter: Words) -> tuple[NDArray[np.int32], Bools]:
    """Where each counter stands in the tables; 0 for those that are not there."""
    largest = int(tables.ids[-1])
    if largest < SMALL_ID_MAX:
        # A look-up in a small table is several times quicker than a binary search of each row.
        lookup = np.full(largest + 2, -1, np.int32)
        lookup[tables.ids.astype(np.int64)] = np.arange(len(tables.ids), dtype=np.int32)
        place = lookup[np.minimum(counter, np.uint64(largest + 1)).view(np.int64)]
        known = place >= 0
        if not known.all():
            place[~known] = 0
        return place, known
    place = np.searchsorted(tables.ids, counter).astype(np.int32)
    np.minimum(place, len(tables.ids) - 1, out=place)
    return place, tables.ids[place] == counter


def _wrong_values(
    tables: Tables, updates: Updates, some: slice, place: NDArray[np.int32]
) -> tuple[Bools, Words | None]:
    """Which of some rows have a value that their counter does not take; and the exact values, where there are any."""
    value = updates.value[some]
    wrong = ~(np.abs(value) <= VALUE_MAX)  # so that NaN is wrong
    kinds = tables.kinds[place]
    are_exact = kinds == Kind.FIXED64
    wrong |= (kinds == Kind.FIXED32) & (value != 1)
    if not are_exact.any():
        return wrong, None
    if updates.count is not None:
        return wrong & ~are_exact, updates.count[some]
    fits = (value >= 0) & (value < 2.0**64) & (np.floor(value) == value)
    return wrong | (are_exact & ~fits), np.where(are_exact & fits, value, 0.0).astype(np.uint64)


def _owned(updates: Updates) -> Bools | None:
    if updates.owner is None:
        return None
    owned = updates.owner != 0
    return owned if owned.any() else None


def _refusal(
    tables: Tables, updates: Updates, row: int, place: int, known: bool, value_wrong: bool, time_latest: int
) -> KeyfoldError:
    counter_id, time, value = int(updates.counter[row]), int(updates.time[row]), float(updates.value[row])
    where = f"row {row}"
    if not known:
        hint = "`keyfold counters show` lists them"
        return CounterUnknown(f"there is no counter {counter_id}", place=where, hint=hint)
    if tables.read_only[place]:
        return CounterReadOnly(f"the counter {counter_id} is NoOperation: no handler may write it", place=where)
    if value_wrong:
        return ValueWrong(_value_message(Kind(int(tables.kinds[place])), counter_id, value), place=where)
    if time < 1 or time > TIME_MAX:
        return TimeWrong(f"the time {time} is not between 1 and {TIME_MAX} (unix seconds)", place=where)
    message = f"the time {time} is later than {time_latest}, the latest that is taken now"
    return TimeWrong(message, place=where, hint="look at the clock of the sender")


def _value_message(kind: Kind, counter_id: int, value: float) -> str:
    if kind is Kind.FIXED32:
        return f"an update of the time counter {counter_id} must have the value 1, not {value}"
    if kind is Kind.FIXED64:
        return f"the value {value} of the counter {counter_id} is not a whole number from 0 to 2**64 - 1"
    return f"the value {value} of the counter {counter_id} is not a number of at most {VALUE_MAX:g} in magnitude"
