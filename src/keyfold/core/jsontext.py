"""What JSON from outside must not be: too deep, ambiguous, or with characters and numbers that nobody can hold."""

import json
import re

import msgspec

from keyfold.core.errors import BadInput, TooDeep

_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')
_HALF = re.compile(rb"\\u[dD](?:[89abAB]\w\w(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]\w\w\\u[dD])[c-fC-F])")
_MANY_DIGITS = re.compile(rb"\d{19}")
_LONG_INTEGER = re.compile(rb"(?<![\d.eE+-])-?\d{19,}(?![\d.eE])")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_decode_any = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


def must_hold_no_nul(body: bytes) -> None:
    """PostgreSQL has no NUL in text, so nobody may send one."""
    if b"\\u0000" in body and (found := _NUL.search(body)):
        raise BadInput("text may not contain NUL (\\u0000)", place=f"byte {found.end() - 6}")


def must_hold_whole_characters(body: bytes) -> None:
    """The decoder calls half a surrogate pair a truncated body, which would send the caller looking elsewhere."""
    if found := _HALF.search(body):
        raise BadInput("a \\u escape is half of a surrogate pair", place=f"byte {found.start()}")


def must_hold_64_bits(body: bytes) -> None:
    """An integer that is longer is another number to many who read it, and refused by some stores.

    Signed or not: of both kinds there are ids. Most bodies have no number of so many digits, and are not looked at.
    """
    if _MANY_DIGITS.search(body) is None:
        return
    numbers = _STRING.sub(lambda text: b" " * len(text[0]), body)
    for found in _LONG_INTEGER.finditer(numbers):
        # Very long ones are not made numbers: that takes time by the square of their length.
        if len(found[0]) > 20 or not -(2**63) <= int(found[0]) < 2**64:
            raise BadInput("an integer has more than 64 bits", place=f"byte {found.start()}", hint="Send it as text")


def must_not_repeat_names(body: bytes) -> None:
    """A name twice in one object means different things to different readers, so it means nothing to us.

    A dictionary keeps one of the two, so what was decoded and encoded again has fewer colons: this needs no look at
    the names, and costs about as much as decoding. Only an escaped colon could hide one; then the names are looked at.
    """
    hidden = b"\\u003" in body
    if hidden or _encode(_decode_any(body)).count(b":") < body.count(b":"):
        json.loads(body, object_pairs_hook=_must_be_distinct)


def _must_be_distinct(pairs: list[tuple[str, object]]) -> None:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise BadInput(f"the name {twice[:100]!r} appears twice in one object")


def must_not_be_deeper(body: bytes, depth_max: int) -> None:
    """Refuse valid JSON that nests deeper: of its brackets alone, each pass takes away the innermost level."""
    if body.count(b"[") + body.count(b"{") <= depth_max:
        return
    brackets = _STRING.sub(b"", body).translate(_ONE_KIND, _NOT_BRACKETS)
    for _ in range(depth_max):
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise TooDeep(f"the body nests deeper than {depth_max} levels")
