"""Packs as the JSON of the message CounterPack, as a compiled loop: from the columns that `by_numba_reading` decodes.

No object is made for a number or a pack, and Python's lock is not held. Real numbers are written as msgspec writes
them, in the fewest digits that lead back to the number and of those the nearest: R. Giulietti, "The Schubfach way to
render doubles". All unsigned numbers are kept in np.uint64: mixed with a signed one, Numba would turn them into floats.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np

from keyfold.counters.bulk import reading
from keyfold.counters.bulk.columns import Bytes, Floats, Ints, Words

Function = TypeVar("Function", bound=Callable[..., Any])


def _text(text: bytes) -> Bytes:
    return np.frombuffer(text, np.uint8)


IDS, KEYS, ROWS, PACK_END = _text(b'{"counter_ids":['), _text(b'],"keys":['), _text(b'],"values":['), _text(b"]}")
# By the number of the kind; none has the number 0.
KINDS = np.stack(
    [_text(b'{"%s_values":{"value":[' % name.rjust(7)) for name in (b"", b"float", b"double", b"fixed32", b"fixed64")]
)
ROW_END = _text(b"]}}")
ID, KIND = 0, 1  # the columns of `members`
DOUBLE = 2  # kinds up to this one are real
CODE_BITS = 32

# The most bytes of each, with the comma behind it.
WORD_BYTES_MAX, REAL_BYTES_MAX, ROW_BYTES_MAX, PACK_BYTES_MAX = 21, 25, 64, 64

EXACT_DIGITS = 16  # from so many digits before the point on, and below 0.00001, a number has an exponent
POWER_MIN, POWER_MAX = -292, 324


def _powers() -> Words:
    """10 to every power that is needed, as 128 bits of which the first is set, rounded up."""
    table = []
    for power in range(POWER_MIN, POWER_MAX + 1):
        above, below = (10**power, 1) if power >= 0 else (1, 10**-power)
        shift = 128 - above.bit_length() if power >= 0 else 127 + below.bit_length()
        bits = -(-(above << shift) // below) if shift >= 0 else -(-above // (1 << -shift))
        table.append((bits >> 64, bits & (2**64 - 1)))
    return np.array(table, np.uint64)


POWERS = _powers()

_U0, _U1, _U2, _U4, _U10, _U40 = (np.uint64(each) for each in (0, 1, 2, 4, 10, 40))
_HALF, _LOW32 = np.uint64(32), np.uint64(2**32 - 1)
_FRACTION_BITS, _FRACTION, _HIDDEN = np.uint64(52), np.uint64(2**52 - 1), np.uint64(2**52)
_EXPONENT, _SIGN = np.uint64(0x7FF), np.uint64(63)
_UNSIGNED = np.uint64(2**63 - 1)
_COMMA, _POINT, _MINUS, _DIGIT0, _E = (np.uint8(each) for each in b",.-0e")
_OPEN, _CLOSE = np.uint8(ord("[")), np.uint8(ord("]"))

# See by_numba: no counting of references, no way in from Python.
_INNER: dict[str, Any] = {"nogil": True, "_nrt": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def _compiled(function: Function) -> Function:
    """For what only compiled code calls."""
    return cast(Function, numba.njit(**_INNER)(function))


def _compiled_and_kept(function: Function) -> Function:
    """For what is called from Python: kept on disk with all that it calls."""
    return cast(Function, numba.njit(cache=True, nogil=True)(function))


@_compiled_and_kept
def write(members: Words, firsts: Ints, packs_of: Ints, codes: Ints, counts: Ints, words: Words, floats: Floats) -> Any:
    """The text of all profiles, each a list of packs, and where each ends; nothing for one that is ASIDE.

    `members` are the wanted counters of each group, one after another; `firsts` says where those of a group begin.
    """
    out = np.empty(_bytes_max(packs_of, codes, words, floats), np.uint8)
    ends = np.empty(len(packs_of), np.int64)
    reals = floats.view(np.uint64)
    at, pack, word, real = 0, 0, 0, 0
    for profile in range(len(packs_of)):
        if packs_of[profile] >= 0:
            out[at] = _OPEN
            at += 1
            for _ in range(packs_of[profile]):
                at, word, real = _pack(out, at, codes[pack], counts[pack], words, word, reals, real, members, firsts)
                pack += 1
            at = _closed(out, at, packs_of[profile])
        ends[profile] = at
    return out[:at], ends


@_compiled
def _bytes_max(packs_of: Ints, codes: Ints, words: Words, floats: Floats) -> int:
    rows = 0
    for code in codes:
        mask = code & ((1 << CODE_BITS) - 1)
        while mask:
            mask &= mask - 1
            rows += 1
    numbers = WORD_BYTES_MAX * len(words) + REAL_BYTES_MAX * len(floats)
    return numbers + ROW_BYTES_MAX * rows + PACK_BYTES_MAX * len(codes) + 2 * len(packs_of)


@_compiled
def _pack(
    out: Bytes,
    at: int,
    code: int,
    count: int,
    words: Words,
    word: int,
    reals: Words,
    real: int,
    members: Words,
    firsts: Ints,
) -> Any:
    """One pack and a comma; where the text, the words and the real numbers go on."""
    first, mask = firsts[code >> CODE_BITS], code & ((1 << CODE_BITS) - 1)
    at = _put(out, at, IDS)
    for bit in range(CODE_BITS):
        if mask >> bit & 1:
            at = _whole(out, at, members[first + bit, ID])
    at = _put(out, at - 1, KEYS)
    at, word = _wholes(out, at, words, word, count), word + count
    at = _put(out, at - 1, ROWS)
    for bit in range(CODE_BITS):
        if mask >> bit & 1:
            kind = np.int64(members[first + bit, KIND])
            at = _kind(out, at, kind)
            if kind <= DOUBLE:
                at, real = _reals(out, at, reals, real, count), real + count
            else:
                at, word = _wholes(out, at, words, word, count), word + count
            at = _put(out, at - 1, ROW_END)
            out[at] = _COMMA
            at += 1
    at = _put(out, at - 1, PACK_END)
    out[at] = _COMMA
    return at + 1, word, real


@_compiled
def _closed(out: Bytes, at: int, items: int) -> int:
    """The end of a list, in place of the comma behind its last item."""
    place = at - 1 if items > 0 else at
    out[place] = _CLOSE
    return place + 1


@_compiled
def _put(out: Bytes, at: int, text: Bytes) -> int:
    for index in range(len(text)):
        out[at + index] = text[index]
    return at + len(text)


@_compiled
def _kind(out: Bytes, at: int, kind: np.int64) -> int:
    """The beginning of a row: names are padded in the table, and not here."""
    for index in range(KINDS.shape[1]):
        if KINDS[kind, index] != 32:
            out[at] = KINDS[kind, index]
            at += 1
    return at


@_compiled
def _wholes(out: Bytes, at: int, words: Words, first: int, count: int) -> int:
    for index in range(first, first + count):
        at = _whole(out, at, words[index])
    return at


@_compiled
def _reals(out: Bytes, at: int, reals: Words, first: int, count: int) -> int:
    for index in range(first, first + count):
        at = _real(out, at, reals[index])
    return at


@_compiled
def _whole(out: Bytes, at: int, number: np.uint64) -> int:
    """A whole number and a comma."""
    at = _digits(out, at, number, _length(number))
    out[at] = _COMMA
    return at + 1


@_compiled
def _length(number: np.uint64) -> int:
    length = 1
    while number >= _U10:
        number //= _U10
        length += 1
    return length


@_compiled
def _digits(out: Bytes, at: int, number: np.uint64, length: int) -> int:
    """So many digits, the last ones of the number."""
    for place in range(at + length - 1, at - 1, -1):
        rest = number // _U10
        out[place] = _DIGIT0 + np.uint8(number - rest * _U10)
        number = rest
    return at + length


@_compiled
def _zeros(out: Bytes, at: int, count: int) -> int:
    for place in range(at, at + count):
        out[place] = _DIGIT0
    return at + max(count, 0)


@_compiled
def _real(out: Bytes, at: int, bits: np.uint64) -> int:
    """A finite number and a comma."""
    if bits >> _SIGN:
        out[at] = _MINUS
        at += 1
    number, exponent = _shortest(bits & _UNSIGNED)
    while number and number % _U10 == _U0:
        number //= _U10
        exponent += 1
    length = _length(number)
    before = length + exponent  # digits before the point
    if -5 < before <= EXACT_DIGITS:
        at = _plain(out, at, number, length, before)
    else:
        at = _scientific(out, at, number, length, before - 1)
    out[at] = _COMMA
    return at + 1


@_compiled
def _plain(out: Bytes, at: int, number: np.uint64, length: int, before: int) -> int:
    if before >= length:
        at = _zeros(out, _digits(out, at, number, length), before - length)
        out[at], out[at + 1] = _POINT, _DIGIT0
        return at + 2
    if before <= 0:
        out[at], out[at + 1] = _DIGIT0, _POINT
        return _digits(out, _zeros(out, at + 2, -before), number, length)
    return _split(out, at, number, length, before)


@_compiled
def _scientific(out: Bytes, at: int, number: np.uint64, length: int, exponent: int) -> int:
    at = _split(out, at, number, length, 1) if length > 1 else _digits(out, at, number, 1)
    out[at] = _E
    at += 1
    if exponent < 0:
        out[at] = _MINUS
        at += 1
    size = np.uint64(abs(exponent))
    return _digits(out, at, size, _length(size))


@_compiled
def _split(out: Bytes, at: int, number: np.uint64, length: int, before: int) -> int:
    """The digits with a point behind so many of them."""
    end = _digits(out, at + 1, number, length)
    for place in range(at, at + before):
        out[place] = out[place + 1]
    out[at + before] = _POINT
    return end


@_compiled
def _shortest(bits: np.uint64) -> Any:
    """The digits of a number and the power of ten that they are multiplied with; names as in the paper."""
    fraction, raised = bits & _FRACTION, np.int64((bits >> _FRACTION_BITS) & _EXPONENT)
    c, q = (fraction | _HIDDEN, raised - 1075) if raised else (fraction, np.int64(-1074))
    if c == _U0:
        return c, np.int64(0)
    if -53 < q <= 0 and c >> np.uint64(-q) << np.uint64(-q) == c:
        return c >> np.uint64(-q), np.int64(0)
    is_odd, is_irregular = c & _U1, fraction == _U0 and raised > 1
    k = (q * 1262611 - (524031 if is_irregular else 0)) >> 22
    h = np.uint64(q + ((-k * 1741647) >> 19) + 1)
    high, low = POWERS[-k - POWER_MIN, 0], POWERS[-k - POWER_MIN, 1]
    centre = _U4 * c
    v = _product(high, low, centre << h)
    lower = _product(high, low, (centre - (_U1 if is_irregular else _U2)) << h) + is_odd
    upper = _product(high, low, (centre + _U2) << h) - is_odd
    s = v // _U4
    if s >= _U10:
        tens = s // _U10
        is_under, is_over = lower <= _U40 * tens, _U40 * tens + _U40 <= upper
        if is_under != is_over:
            return (tens + _U1 if is_over else tens), k + 1
    is_under, is_over = lower <= _U4 * s, _U4 * s + _U4 <= upper
    if is_under != is_over:
        return (s + _U1 if is_over else s), k
    middle = _U4 * s + _U2
    return (s + _U1 if v > middle or (v == middle and s & _U1) else s), k


@_compiled
def _product(high: np.uint64, low: np.uint64, factor: np.uint64) -> Any:
    """The upper 64 of 192 bits; the last of them is set where what is left out is not nothing."""
    carried = high * factor
    total = carried + _upper(low, factor)
    upper = _upper(high, factor)
    if total < carried:
        upper += _U1
    return upper | _U1 if total > _U1 else upper


@_compiled
def _upper(one: np.uint64, other: np.uint64) -> Any:
    """The upper 64 bits of a product."""
    one_low, one_high, other_low, other_high = one & _LOW32, one >> _HALF, other & _LOW32, other >> _HALF
    middle = one_high * other_low + (one_low * other_low >> _HALF)
    rest = one_low * other_high + (middle & _LOW32)
    return one_high * other_high + (middle >> _HALF) + (rest >> _HALF)


assert CODE_BITS == reading.CODE_BITS  # `Plan` gives out the codes
