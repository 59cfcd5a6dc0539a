"""The difference of two sorted streams, against plain sets; and everything that a stream may have wrong."""

import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyfold.segments.difference import SnapshotWrong, ahead, checked, chunked, difference
from tests.unit.segments.reference import apart

ENDS = [0, 1, 2, 2**31, 2**32, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 2, 2**64 - 1]
NUMBERS = st.lists(st.one_of(st.sampled_from(ENDS), st.integers(0, 30), st.integers(0, 2**64 - 1)), max_size=40)
# Of several lengths, one the beginning of another, with characters of one to four bytes.
TEXTS = st.lists(st.text(st.sampled_from("ab\x01\x7fé€𝄞"), min_size=1, max_size=4), max_size=40)


def batches(ids: Sequence[Any], kind: Any, size: int) -> Iterator[pa.Array]:
    for start in range(0, len(ids), size):
        yield pa.array(ids[start : start + size], kind)


def chunks(
    old: Sequence[Any], new: Sequence[Any], kind: Any, size: int = 3, users: int = 4
) -> tuple[list[str], list[str]]:
    pieces = difference(checked(batches(old, kind, size), "old"), checked(batches(new, kind, size + 1), "new"))
    added: list[str] = []
    removed: list[str] = []
    seen: list[str] = []
    for chunk in chunked(pieces, users):
        assert 1 <= len(chunk.user_ids) <= users
        assert chunk.upto == chunk.user_ids[-1]
        seen += chunk.user_ids
        for user, is_added in zip(chunk.user_ids, chunk.is_added, strict=True):
            (added if is_added else removed).append(user)
    order = (lambda each: int(each)) if kind in (pa.uint64(), pa.int64()) else (lambda each: each.encode())
    assert seen == sorted(set(seen), key=order)
    return added, removed


@pytest.mark.spec("SEG-03")
@given(NUMBERS, NUMBERS, st.integers(1, 7), st.integers(1, 9))
def test_numbers_are_told_apart_in_unsigned_order(old: list[int], new: list[int], size: int, users: int) -> None:
    before, after = sorted(set(old)), sorted(set(new))
    expected = tuple([str(each) for each in side] for side in apart(before, after))
    assert chunks(before, after, pa.uint64(), size, users) == expected


@pytest.mark.spec("SEG-03")
@given(TEXTS, TEXTS, st.integers(1, 7), st.integers(1, 9))
def test_text_is_told_apart_in_the_order_of_its_bytes(old: list[str], new: list[str], size: int, users: int) -> None:
    before, after = sorted(set(old), key=str.encode), sorted(set(new), key=str.encode)
    assert chunks(before, after, pa.string(), size, users) == apart(before, after)


@pytest.mark.spec("SEG-03")
def test_the_sign_bit_is_part_of_the_number() -> None:
    """Columns of signed numbers carry the upper half of the unsigned range as negative ones."""
    assert chunks([], [5, -2, -1], pa.int64()) == (["5", str(2**64 - 2), str(2**64 - 1)], [])


@pytest.mark.spec("SEG-03")
@pytest.mark.parametrize("kind", [pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_text_of_every_arrow_type_is_read(kind: Any) -> None:
    assert list(chunks([], ["a", "ab", "b"], kind)[0]) == ["a", "ab", "b"]


@pytest.mark.spec("SEG-03")
def test_a_slice_of_an_array_is_read_from_its_own_beginning() -> None:
    whole = pa.array(["x", "aa", "b", "cc", "y"])
    assert [each.tolist() for each in checked([whole.slice(1, 3)], "new")] == [[b"aa", b"b", b"cc"]]


@pytest.mark.spec("SEG-03")
@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ([pa.array([1, 3, 2], pa.uint64())], r"user 2 comes after 3 \(at new, row 3\)"),
        ([pa.array([1, 3], pa.uint64()), pa.array([2], pa.uint64())], r"user 2 comes after 3 \(at new, row 3\)"),
        ([pa.array([1, 3], pa.uint64()), pa.array([3], pa.uint64())], r"user 3 stands there twice \(at new, row 3\)"),
        ([pa.array([7, 7], pa.uint64())], r"user 7 stands there twice \(at new, row 2\)"),
        ([pa.array([-1, 1], pa.int64())], r"user 1 comes after 18446744073709551615 \(at new, row 2\)"),
        ([pa.array(["b", "a"])], r"user a comes after b \(at new, row 2\)"),
        ([pa.array(["z", "é", "a"])], r"user a comes after é \(at new, row 3\)"),
        ([pa.array([1, None, 3], pa.uint64())], r"no user id \(at new, row 2\)"),
        ([pa.array(["a", "", "b"])], r"a user id is empty \(at new, row 2\)"),
        ([pa.array(["a", "b" * 201])], r"longer than 200 bytes \(at new, row 2\)"),
        ([pa.array(["a", "a\0b"])], r"NUL character \(at new, row 2\)"),
        ([pa.array([1], pa.uint64()), pa.array(["a"])], r"numbers and text in one snapshot \(at new, row 2\)"),
        ([pa.array([1.5, 2.5])], r"user ids are double \(at new\)"),
        ([pa.array([b"a"])], r"user ids are binary \(at new\)"),
    ],
)
def test_what_is_wrong_with_a_snapshot_is_told_with_its_place(arrays: list[pa.Array], words: str) -> None:
    with pytest.raises(SnapshotWrong, match=words):
        list(checked(arrays, "new"))


@pytest.mark.spec("SEG-03")
def test_snapshots_of_different_types_are_refused() -> None:
    old, new = checked([pa.array([1], pa.uint64())], "old"), checked([pa.array(["1"])], "new")
    with pytest.raises(SnapshotWrong, match="the old snapshot has number ids, the new one text ids"):
        list(difference(old, new))


@pytest.mark.spec("SEG-03", "SEG-06")
def test_a_difference_taken_up_behind_any_chunk_is_the_rest_of_it() -> None:
    chance = random.Random(5)
    old = sorted(chance.sample(range(2_000), 700))
    new = sorted(chance.sample(range(2_000), 700))
    whole = list(
        chunked(
            difference(checked(batches(old, pa.uint64(), 64), "old"), checked(batches(new, pa.uint64(), 50), "new")), 37
        )
    )
    for at, chunk in enumerate(whole):
        upto = int(chunk.upto)
        rest_old, rest_new = [each for each in old if each > upto], [each for each in new if each > upto]
        rest = chunked(
            difference(
                checked(batches(rest_old, pa.uint64(), 64), "o"), checked(batches(rest_new, pa.uint64(), 9), "n")
            ),
            37,
        )
        assert list(rest) == whole[at + 1 :]


@pytest.mark.spec("SEG-03")
def test_a_stream_that_is_read_ahead_is_the_same_and_so_are_its_mistakes() -> None:
    def stream() -> Iterator[Any]:
        yield from checked(
            [pa.array([1, 2], pa.uint64()), pa.array([5], pa.uint64()), pa.array([4], pa.uint64())], "new"
        )

    arrays = ahead(stream())
    assert [next(arrays).tolist(), next(arrays).tolist()] == [[1, 2], [5]]
    with pytest.raises(SnapshotWrong, match="user 4 comes after 5"):
        next(arrays)
    begun = threading.active_count()
    some = ahead(checked(batches(range(100), pa.uint64(), 3), "new"))
    assert next(some).tolist() == [0, 1, 2]
    some.close()  # type: ignore[attr-defined]
    assert threading.active_count() == begun
