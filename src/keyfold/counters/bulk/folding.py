"""The columnar fold: checks the rows, hands canonical bodies to a kernel in one buffer, and the others to protobuf."""

from collections.abc import Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Protocol

import numpy as np
from msgspec import Struct

from keyfold.counters.bulk import by_numpy
from keyfold.counters.bulk.checks import Checked
from keyfold.counters.bulk.columns import (
    FOREIGN,
    UNCHANGED,
    WRITTEN,
    Done,
    Floats,
    Folded,
    Ints,
    KernelName,
    Updates,
    Work,
)
from keyfold.counters.bulk.cores import cores_for, on_cores
from keyfold.counters.bulk.foreign import fold_foreign
from keyfold.counters.bulk.order import rows_by_profile
from keyfold.counters.bulk.tables import Tables, tables_of
from keyfold.counters.catalog import Catalog

PADDING = bytes(16)  # so that eight bytes can be loaded at the last one
# What one run of a kernel holds in memory: more rows or bytes are folded in several runs.
CHUNK_ROWS = 1 << 18
CHUNK_BYTES = 8 << 20


class Batch(Protocol):
    """The rows that passed the checks, by profile, the way a kernel takes them."""

    starts: Ints  # of each profile's rows, one more than there are profiles

    def fold(self, work: Work) -> Done: ...


class Kernel(Protocol):
    """Two modules do the same work in different ways."""

    def checked(
        self, tables: Tables, updates: Updates, profiles: int, now: int, future_seconds_max: int, cores: int
    ) -> Checked: ...

    def gathered(self, updates: Updates, checked: Checked, profiles: int, tables: Tables, cores: int) -> Batch: ...


class Ran(Struct, kw_only=True):
    """What is left to say of one run, when its bodies have been taken over."""

    foreign: list[int]
    bill: Floats
    dropped: int


def fold(
    catalog: Catalog,
    bodies: Sequence[bytes],
    updates: Updates,
    *,
    now: int,
    future_seconds_max: int = 86_400,
    kernel: KernelName = "auto",
    cores: int | None = None,
) -> Folded:
    """Fold a batch of updates into the bodies of profiles: one commit at `now`, in which order does not matter.

    A large batch is folded on all cores that the process may use, or on so many; the bytes are the same.
    """
    if cores is not None and cores < 1:
        raise ValueError(f"a fold takes at least one of the cores, not {cores}")  # of no share, no row is looked at
    tables, with_kernel = tables_of(catalog), _kernel(kernel)
    cores = cores_for(len(updates.profile)) if cores is None else cores
    checked = with_kernel.checked(tables, updates, len(bodies), now, future_seconds_max, cores)
    folded = Folded(
        bodies=list(bodies),
        changed=np.zeros(len(bodies), np.bool_),
        owned=checked.owned,
        refused=checked.refused,
        broken={},
        dropped=0,
        bill={},
        expires_at=np.zeros(len(bodies), np.int64),
    )
    batch = with_kernel.gathered(updates, checked, len(bodies), tables, cores)
    bill = np.zeros((len(tables.ids), 2), np.float64)
    sizes = np.fromiter(map(len, bodies), np.int64, len(bodies))
    foreign: list[int] = []
    chunks = _chunks(batch.starts, sizes)
    runs = [partial(_run, folded, batch, bodies, sizes, begin, end, now) for begin, end in chunks]
    for ran in on_cores(cores, runs):
        folded.dropped += ran.dropped
        bill += ran.bill
        foreign += ran.foreign
    if foreign:
        starts, rows = rows_by_profile(updates.profile, checked.good, len(bodies))
        for profile in foreign:
            its_rows = rows[starts[profile] : starts[profile + 1]]
            fold_foreign(catalog, folded, profile, updates, its_rows, now, future_seconds_max)
    _add_bill(folded, tables, bill)
    return folded


def _kernel(name: KernelName) -> Kernel:
    if name == "numpy" or (name == "auto" and not has_numba()):
        return by_numpy
    from keyfold.counters.bulk import by_numba

    return by_numba


@cache
def has_numba() -> bool:
    try:
        import keyfold.counters.bulk.by_numba  # noqa: F401
    except (ImportError, RuntimeError):  # not installed; or nowhere to keep what it compiles
        return False
    return True


def _chunks(row_starts: Ints, sizes: Ints) -> list[tuple[int, int]]:
    """Runs of profiles of a bounded size each; a profile is never cut."""
    if not len(sizes):
        return []
    shares = row_starts[1:] // CHUNK_ROWS + np.cumsum(sizes) // CHUNK_BYTES
    cuts = np.flatnonzero(np.diff(shares)) + 1
    bounds = [0, *cuts.tolist(), len(sizes)]
    return list(pairwise(bounds))


def _run(folded: Folded, batch: Batch, bodies: Sequence[bytes], sizes: Ints, begin: int, end: int, now: int) -> Ran:
    """Fold into some of the bodies; runs of different bodies may go on at the same time."""
    starts = np.zeros(end - begin + 1, np.int64)
    np.cumsum(sizes[begin:end], out=starts[1:])
    buffer = np.frombuffer(b"".join([*bodies[begin:end], PADDING]), np.uint8)
    done = batch.fold(Work(begin=begin, end=end, buffer=buffer, starts=starts, now=now))
    folded.expires_at[begin:end] = done.expires_at
    _take_over(folded, done, begin)
    foreign = (np.flatnonzero(done.status == FOREIGN) + begin).tolist()
    return Ran(foreign=foreign, bill=done.bill, dropped=done.dropped)


def _take_over(folded: Folded, done: Done, begin: int) -> None:
    """The bodies that a kernel wrote, where they differ from what was there."""
    written = np.flatnonzero(done.status == WRITTEN)
    if not len(written):
        return
    whole = done.buffer[: done.starts[-1]].tobytes()
    bodies = folded.bodies
    ends = done.starts[written + 1].tolist()
    for profile, start, end in zip((written + begin).tolist(), done.starts[written].tolist(), ends, strict=True):
        body = whole[start:end]
        if body != bodies[profile]:
            bodies[profile] = body
            folded.changed[profile] = True


def _add_bill(folded: Folded, tables: Tables, bill: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> None:
    for place in np.flatnonzero(bill.any(axis=1)).tolist():
        counter_id = int(tables.ids[place])
        before = folded.bill.get(counter_id, (0.0, 0.0))
        folded.bill[counter_id] = (before[0] + float(bill[place, 0]), before[1] + float(bill[place, 1]))


assert UNCHANGED == 0  # kernels begin with zeros
