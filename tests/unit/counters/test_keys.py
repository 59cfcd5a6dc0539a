"""The numbers that stand for composite keys and for owners."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyfold.counters.errors import ValueWrong
from keyfold.counters.keys import owner_of, poly, poly2, poly2_array, spelled

KEYS = st.integers(0, 2**64 - 1)
MAX = 2**64 - 1

# Published in docs/counters.md: other languages check themselves against these.
POLY2_VECTORS = [
    (0, 0, 0x48218226FF3CD4BF),
    (0, 1, 0xEA8568D2E45FD6CB),
    (1, 0, 0xDCE423FC82C0D5B8),
    (1, 2, 0x081A5C1377856B73),
    (2, 1, 0xF2826F98653E9E57),
    (1000001, 1000002, 0x0A937D31F218F576),
    (MAX, 0, 0x445018E305810B78),
    (MAX, MAX, 0xE8BA9F99CA933538),
]
OWNER_VECTORS = [
    ("a", "a", 0x0CC175B9C0F1B6A8),
    ("example.com", "example.com", 0x5ABABD603B227803),
    ("EXAMPLE.com.", "example.com", 0x5ABABD603B227803),
    ("my_shop.example.com", "my_shop.example.com", 0xACF6D853C1946D08),
    ("яндекс.рф", "xn--d1acpjx3f.xn--p1ai", 0xA1A32B2C375DB62A),
    ("XN--D1ACPJX3F.xn--p1ai", "xn--d1acpjx3f.xn--p1ai", 0xA1A32B2C375DB62A),
    ("Bücher.example", "xn--bcher-kva.example", 0xF8DD7B47A155BCD1),
    ("straße.de", "strasse.de", 0x63101466D7024B49),
]


@pytest.mark.spec("CNT-14")
@pytest.mark.parametrize(("first", "second", "expected"), POLY2_VECTORS)
def test_the_hash_of_two_keys_is_as_published(first: int, second: int, expected: int) -> None:
    assert poly2(first, second) == expected


@pytest.mark.spec("CNT-14", "PRO-04")
def test_the_vectors_are_published() -> None:
    page = (Path(__file__).parents[3] / "docs" / "counters.md").read_text()
    for *_, expected in [*POLY2_VECTORS, *OWNER_VECTORS]:
        assert f"`{expected:016x}` | {expected} |" in page


@pytest.mark.spec("CNT-14")
@given(st.lists(st.tuples(KEYS, KEYS), max_size=20))
def test_arrays_are_hashed_as_single_keys_are(pairs: list[tuple[int, int]]) -> None:
    first, second = (np.array([pair[i] for pair in pairs], np.uint64) for i in (0, 1))
    assert poly2_array(first, second).tolist() == [poly2(a, b) for a, b in pairs]


@pytest.mark.spec("CNT-14")
def test_a_grid_of_small_keys_has_no_collision_in_either_order() -> None:
    """A million neighbours, (a, b) and (b, a) among them, and both halves of the hash spread evenly."""
    side = np.arange(1000, dtype=np.uint64)
    hashes = poly2_array(np.repeat(side, 1000), np.tile(side, 1000))
    assert np.unique(hashes).size == hashes.size
    for bits in (hashes & np.uint64(255), hashes >> np.uint64(56)):
        counts = np.bincount(bits.astype(np.int64), minlength=256)
        assert counts.min() > 3600
        assert counts.max() < 4230


@pytest.mark.spec("CNT-14")
@given(KEYS, KEYS, KEYS)
def test_keys_with_one_half_in_common_never_collide(common: int, one: int, other: int) -> None:
    assert (poly2(common, one) == poly2(common, other)) == (one == other)
    assert (poly2(one, common) == poly2(other, common)) == (one == other)


@pytest.mark.spec("CNT-14")
def test_more_than_two_keys_are_folded_from_the_left() -> None:
    assert poly(7) == 7
    assert poly(1, 2) == poly2(1, 2)
    assert poly(1, 2, 3) == poly2(poly2(1, 2), 3) == 3379602106361104204


@pytest.mark.spec("CNT-14")
def test_what_is_no_unsigned_64_bit_number_is_refused() -> None:
    for pair in ((-1, 0), (0, 2**64)):
        with pytest.raises(ValueWrong, match="64-bit"):
            poly2(*pair)
    with pytest.raises(ValueWrong, match="at least one"):
        poly()
    with pytest.raises(ValueWrong, match="int64"):
        poly2_array(np.array([1]), np.array([1], np.uint64))  # type: ignore[arg-type]


@pytest.mark.spec("PRO-04")
@pytest.mark.parametrize(("domain", "spelling", "expected"), OWNER_VECTORS)
def test_the_owner_of_a_domain_is_as_published(domain: str, spelling: str, expected: int) -> None:
    assert spelled(domain) == spelling
    assert owner_of(domain) == expected
    assert hashlib.md5(spelling.encode()).hexdigest()[:16] == f"{expected:016x}"


@pytest.mark.spec("PRO-04")
@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=12), min_size=1, max_size=3))
def test_every_spelling_of_a_domain_has_the_same_owner(labels: list[str]) -> None:
    domain = ".".join(labels)
    try:
        owner = owner_of(domain)
    except ValueWrong:
        return
    assert owner_of(spelled(domain)) == owner_of(spelled(domain).upper()) == owner
    assert 0 < owner <= MAX


@pytest.mark.spec("PRO-04")
@pytest.mark.parametrize(
    "domain",
    [
        *("", ".", " example.com", "example.com\n", "http://example.com", "example.com:80", "me@example.com", "a..b"),
        *("-a.example", "a-.example", ".example", "example..", "a" * 64 + ".com", "a." * 127 + "com"),
        *("\ud800", "é" * 10**6),
    ],
)
def test_what_is_no_domain_has_no_owner(domain: str) -> None:
    with pytest.raises(ValueWrong, match="is not a domain"):
        owner_of(domain)


@pytest.mark.spec("PRO-04")
def test_no_domain_has_the_owner_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """0 is what columns of updates hold where there is no owner."""

    class Zeros:
        def digest(self) -> bytes:
            return bytes(16)

    monkeypatch.setattr(hashlib, "md5", lambda *_, **__: Zeros())
    assert owner_of("example.com") == 1
