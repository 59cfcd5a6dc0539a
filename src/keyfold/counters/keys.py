"""Keys and owners as 64-bit numbers: the hash of a composite key, and the number of a domain.

All arithmetic is modulo 2⁶⁴. The vectors in `docs/counters.md` are the contract for other languages.
"""

import hashlib
import re

import numpy as np
from numpy.typing import NDArray

from keyfold.counters.catalog import UINT64_MAX
from keyfold.counters.errors import ValueWrong

GOLDEN = 0x9E3779B97F4A7C15
FIRST_FACTOR = 0xBF58476D1CE4E5B9
SECOND_FACTOR = 0x94D049BB133111EB

DOMAIN_LENGTH_MAX = 253
LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")


def poly2(first: int, second: int) -> int:
    """The key of two: `mix(mix(first + GOLDEN) + second)`.

    `mix` is a bijection, so that two keys with one half in common never collide; all others do with a chance of 2⁻⁶⁴
    a pair. Order matters. No secret is in it: whoever chooses keys can also choose two that collide.
    """
    for key in (first, second):
        if not 0 <= key <= UINT64_MAX:
            raise ValueWrong(f"the key {key} is not an unsigned 64-bit number")
    return _mix((_mix((first + GOLDEN) & UINT64_MAX) + second) & UINT64_MAX)


def poly(*keys: int) -> int:
    """The key of several, folded from the left; one key is itself."""
    if not keys:
        raise ValueWrong("a key must be made of at least one")
    folded, *rest = keys
    for key in rest:
        folded = poly2(folded, key)
    return folded


def poly2_array(first: NDArray[np.uint64], second: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`poly2` of each pair, with the same results."""
    for keys in (first, second):
        if keys.dtype != np.uint64:
            raise ValueWrong(f"keys must be an array of uint64, not of {keys.dtype}")
    with np.errstate(over="ignore"):
        return _mix_array(_mix_array(first + np.uint64(GOLDEN)) + second)


def owner_of(domain: str) -> int:
    """The owner that a domain stands for: the first 8 bytes, big-endian, of the MD5 of the domain in its one spelling.

    0 means "no owner" in columns of updates, so that a domain whose 8 bytes were all 0 would get 1.
    """
    digest = hashlib.md5(spelled(domain).encode("ascii"), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "big") or 1


def spelled(domain: str) -> str:
    """A domain in lower-case IDNA (2003, as Python's `idna` codec has it), without the dot of the root."""
    try:
        # A longer one is no domain in any spelling, and the codec would take its time over it.
        short = domain if len(domain) <= DOMAIN_LENGTH_MAX + 1 else ""
        name = short.lower().encode("idna").decode("ascii").lower().removesuffix(".")
    except UnicodeError:
        name = ""
    if len(name) > DOMAIN_LENGTH_MAX or not all(LABEL.fullmatch(label) for label in name.split(".")):
        raise ValueWrong(
            f"{domain[:DOMAIN_LENGTH_MAX]!r} is not a domain",
            hint="Give the bare name of the host: no scheme, port, path or spaces",
        )
    return name


def _mix(number: int) -> int:
    """The finaliser of SplitMix64: every bit of the input changes each bit of the output with a chance of a half."""
    number = (number ^ (number >> 30)) * FIRST_FACTOR & UINT64_MAX
    number = (number ^ (number >> 27)) * SECOND_FACTOR & UINT64_MAX
    return number ^ (number >> 31)


def _mix_array(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(FIRST_FACTOR)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(SECOND_FACTOR)
    return numbers ^ (numbers >> np.uint64(31))
