"""The rows of a batch by profile."""

import numpy as np

from keyfold.counters.bulk.columns import Bools, Ints


def rows_by_profile(profile: Ints, good: Bools | None, profiles: int) -> tuple[Ints, Ints]:
    """Where the rows of each profile begin, and the good rows in that order."""
    chosen = np.flatnonzero(good) if good is not None else None
    own = profile if chosen is None else profile[chosen]
    starts = np.zeros(profiles + 1, np.int64)
    np.cumsum(np.bincount(own, minlength=profiles), out=starts[1:])
    # Sixteen bits are sorted by radix, several times quicker.
    order = np.argsort(own.astype(np.uint16) if profiles <= 1 << 16 else own, kind="stable")
    return starts, order if chosen is None else chosen[order]
