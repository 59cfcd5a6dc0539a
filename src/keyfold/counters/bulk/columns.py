"""What goes into a fold and what comes out of it, as columns."""

from typing import Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from keyfold.core.errors import KeyfoldError
from keyfold.counters.errors import PackWrong

NEVER = 2**62

KernelName = Literal["auto", "numpy", "numba"]
Bytes = NDArray[np.uint8]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Words = NDArray[np.uint64]
Floats = NDArray[np.float64]


class Updates(Struct, kw_only=True):
    """Updates as arrays of equal length."""

    profile: Ints  # index into the bodies
    counter: Words
    key: Words
    value: Floats
    time: Ints  # unix seconds
    count: Words | None = None  # the exact value for VF_FIXED64 counters; without it, taken from `value`
    owner: Words | None = None  # 0 for a row without an owner


class Numbers(Struct, kw_only=True):
    """What was read of many profiles, as arrays of equal length: a row is one number under one key of one counter."""

    profile: Ints  # index into what was asked for; ascending
    counter: Words
    key: Words
    value: Floats
    count: Words  # the exact value of a counter of whole numbers, of which `value` has 53 bits; 0 of others


class Folded(Struct, kw_only=True):
    """What became of the bodies and of the updates."""

    bodies: list[bytes]  # in the order given; those that did not change are the very same objects
    changed: Bools
    owned: Ints  # rows with an owner, not folded
    refused: dict[int, KeyfoldError]  # row -> why it was not folded
    broken: dict[int, PackWrong]  # profile -> the invariant that its body breaks; left as it is, rows not folded
    dropped: int  # updates older than the expiry, of keys that were not live
    bill: dict[int, tuple[float, float]]  # counter id -> weight at `now` lost to MaxRecords, to ExpireDays
    expires_at: Ints  # the second after which every key is expired; NEVER; 0 for an empty profile


class Work(Struct, kw_only=True):
    """The input of one run of a kernel: some of the profiles of its batch, and one buffer of their bodies."""

    begin: int
    end: int
    buffer: Bytes  # padded with at least 16 bytes
    starts: Ints  # of the bodies, one more than there are
    now: int


class Done(Struct, kw_only=True):
    """The output of a kernel."""

    buffer: Bytes
    starts: Ints  # of the bodies written, one more than there are profiles; empty where `status` is not WRITTEN
    status: NDArray[np.int8]
    expires_at: Ints
    bill: Floats  # by counter: lost to MaxRecords, to ExpireDays
    dropped: int


UNCHANGED, WRITTEN, FOREIGN = 0, 1, 2
