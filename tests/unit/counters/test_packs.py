"""Packs: their invariants by name, readers that mind no order, and what passes through unharmed."""

import contextlib
import random
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfold.counters import Catalog, Counters, Kind, MutableCounters, arrays, read
from keyfold.counters.bulk import reading as bulk
from keyfold.counters.errors import (
    BodyUnreadable,
    CounterTwice,
    KeyTwice,
    KindMissing,
    KindUnknown,
    KindWrong,
    PackEmpty,
    PackWrong,
    RowLengthWrong,
    RowsMissing,
    ValueNotFinite,
)
from keyfold.counters.messages_pb2 import CounterPack, Profile, ValueType
from keyfold.counters.model import NEVER
from keyfold.counters.packs import as_legacy
from tests.unit.counters.test_counters import CATALOG, HISTORIES, NOW, counter, folded

TIMELESS = counter(51, Kind.FIXED32)  # a time counter without limits
BODY = folded([[(1, 5, 2.0, NOW), (2, 6, 3.0, NOW - 10), (20, 2**63, 1.5, NOW), (3, 5, 9, NOW)]])


def spoiled(how: str) -> bytes:
    profile = Profile.FromString(BODY)
    pack = profile.packed_counters[0]
    match how:
        case "no keys":
            pack.ClearField("keys")
        case "no counters":
            pack.ClearField("counter_ids")
        case "a row missing":
            del pack.values[-1]
        case "a row too short":
            del pack.values[0].float_values.value[-1]
        case "no kind":
            pack.values[0].Clear()
        case "another kind":
            pack.values[0].double_values.value[:] = [1.0, 2.0]
        case "a counter twice":
            profile.packed_counters.append(pack)
        case "a key twice":
            pack.keys[1] = pack.keys[0]
        case "not a number":
            profile.packed_counters[1].values[0].double_values.value[0] = float("nan")
        case "cut off":
            return BODY[:-3]
    return profile.SerializeToString()


@pytest.mark.spec("CNT-09")
@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("no keys", PackEmpty),
        ("no counters", PackEmpty),
        ("a row missing", RowsMissing),
        ("a row too short", RowLengthWrong),
        ("no kind", KindMissing),
        ("another kind", KindWrong),
        ("a counter twice", CounterTwice),
        ("a key twice", KeyTwice),
        ("not a number", ValueNotFinite),
        ("cut off", BodyUnreadable),
    ],
)
def test_each_broken_invariant_has_its_own_error(how: str, error: type[PackWrong]) -> None:
    with pytest.raises(error):
        MutableCounters(CATALOG, spoiled(how), NOW).cleanup()
    with pytest.raises(error):
        list(Counters(CATALOG, spoiled(how), NOW).groups())
    with pytest.raises(error):
        MutableCounters(CATALOG, b"", NOW).absorb(Counters(CATALOG, spoiled(how), NOW))


@pytest.mark.spec("CNT-09")
def test_the_document_s_own_example_is_read() -> None:
    pack = CounterPack(counter_ids=[1, 10], keys=[1000001, 1000002, 1000003])
    pack.values.add().float_values.value.extend([0.1, 0.2, 0.3])
    pack.values.add().fixed32_values.value.extend([1500000001, 1500000002, 1500000003])
    body = Profile(packed_counters=[pack]).SerializeToString()
    assert list(read(body, {10})) == [(10, 1000001, 1500000001), (10, 1000002, 1500000002), (10, 1000003, 1500000003)]
    assert Counters(CATALOG, body, 1500000003).get(1, 1000002) == pytest.approx(0.2)


def shuffled(body: bytes, seed: int) -> bytes:
    """The same counters in other packs, in another order, with keys in another order, some in the older form."""
    rng = random.Random(seed)
    profile, other = Profile.FromString(body), Profile()
    for pack in profile.packed_counters:
        order = rng.sample(range(len(pack.keys)), len(pack.keys))
        for older in as_legacy(pack):
            field = older.values.WhichOneof("value")
            assert field is not None
            values = getattr(older.values, field).value
            values[:] = [values[index] for index in order]
            older.keys[:] = [older.keys[index] for index in order]
            if rng.random() < 0.3:
                other.counters.append(older)
            else:
                other.packed_counters.add(counter_ids=[older.counter_id], keys=older.keys, values=[older.values])
    packs = rng.sample(list(other.packed_counters), len(other.packed_counters))
    del other.packed_counters[:]
    other.packed_counters.extend(packs)
    return other.SerializeToString()


@pytest.mark.spec("CNT-10", "CNT-11")
@settings(max_examples=80, deadline=None)
@given(history=HISTORIES, seed=st.integers(0, 2**32))
def test_readers_work_on_any_order_and_grouping(history: list[list[tuple[int, int, float, int]]], seed: int) -> None:
    body = folded(history)
    other = shuffled(body, seed)
    assert sorted(read(other)) == sorted(read(body))
    one, two = MutableCounters(CATALOG, body, NOW), MutableCounters(CATALOG, other, NOW)
    for counters in (one, two):
        counters.update(1, 77, 1.0, NOW)
    assert one.serialise() == two.serialise(), "rewritten in our own form on the first write"


@pytest.mark.spec("CNT-12")
@settings(max_examples=60, deadline=None)
@given(history=HISTORIES, seed=st.integers(0, 2**32), wanted=st.sets(st.sampled_from([1, 2, 3, 4, 10, 20, 30])))
def test_the_array_reader_says_what_the_linear_reader_says(
    history: list[list[tuple[int, int, float, int]]], seed: int, wanted: set[int]
) -> None:
    body = shuffled(folded(history), seed)
    found = [
        (row.counter_id, int(k), v.item())
        for row in arrays(body, wanted)
        for k, v in zip(row.keys, row.values, strict=True)
    ]
    assert found == list(read(body, wanted))


def field(number: int, content: bytes) -> bytes:
    """A field of bytes, or of a message."""
    return bytes([number << 3 | 2, len(content)]) + content


ROW = field(3, field(1, field(1, struct.pack("<f", 1.5))))
PACK = field(3, field(1, b"\x01") + field(2, b"\x05") + ROW)


@pytest.mark.spec("CNT-11", "CNT-12", "CNT-13")
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (PACK + b"\xa3\x06\x08\x01\x0b\x0c\xa4\x06", [(1, 5, 1.5)]),
        (field(4, b"\x08\x01\x08\x02" + field(2, b"\x05") + ROW), [(2, 5, 1.5)]),
        (field(4, b"\x08\x01" + field(2, b"\x05\x06") + ROW + ROW), [(1, 5, 1.5), (1, 6, 1.5)]),
        (field(4, b"\x08\x01" + field(2, b"\x05") + field(3, field(2, field(1, bytes(8)))) + ROW), [(1, 5, 1.5)]),
        (field(4, field(2, b"\x05") + ROW), [(0, 5, 1.5)]),
        (field(4, b"\x08\x01" + field(2, b"\x05")), []),
        (field(3, b"\x08\x01\x10\x05" + field(3, field(1, b"\x0d" + struct.pack("<f", 1.5)))), [(1, 5, 1.5)]),
        (
            field(
                3,
                field(1, b"\x01")
                + field(2, b"\x05")
                + field(3, field(1, field(1, struct.pack("<f", 1.5)) + b"\x08\x80\x80\x80\x01")),
            ),
            [(1, 5, 1.5)],
        ),
    ],
    ids=[
        "a group of a later format, with another in it",
        "an id given twice: the last",
        "values given twice: both",
        "values of two kinds: the last",
        "no id",
        "no values",
        "not packed",
        "a field of the number of values and of another type",
    ],
)
def test_the_array_reader_takes_every_spelling_that_protobuf_takes(
    body: bytes, expected: list[tuple[int, int, float]]
) -> None:
    assert list(read(body)) == expected
    assert listed(body) == expected


def listed(body: bytes) -> list[tuple[int, int, float]]:
    rows = arrays(body)
    return [(row.counter_id, int(k), v.item()) for row in rows for k, v in zip(row.keys, row.values, strict=True)]


@pytest.mark.spec("CNT-09", "CNT-12")
@pytest.mark.parametrize(
    "body",
    [
        b"\xa3\x06",
        b"\xa3\x06\xac\x06",
        b"\xa4\x06",
        b"\xa3\x06\x0a\x05\xa4\x06",
        PACK + b"\x00\x01",
        field(3, field(1, b"\x01") + field(2, b"") + field(3, field(1, field(1, b"")))),
        field(3, field(1, b"\x01") + field(2, b"\x80") + field(2, b"\x01") + field(3, field(1, field(1, bytes(4))))),
    ],
    ids=["open", "closed by another", "never opened", "cut off inside", "no number", "no keys", "a key in two pieces"],
)
def test_what_protobuf_refuses_the_array_reader_refuses(body: bytes) -> None:
    for reader in (read, arrays):
        with pytest.raises(PackWrong):
            list(reader(body))


@pytest.mark.spec("CNT-12")
@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    changes=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=3),
)
def test_of_any_body_that_the_linear_reader_takes_the_array_reader_says_the_same(
    seed: int, changes: list[tuple[int, int]]
) -> None:
    body = bytearray(shuffled(BODY, seed))
    for place, byte in changes:
        body[place % len(body)] = byte
    try:
        expected = sorted(map(repr, read(bytes(body))))
    except PackWrong:
        return
    assert sorted(map(repr, listed(bytes(body)))) == expected


@pytest.mark.spec("CNT-12")
def test_rows_as_arrays_are_views_of_the_body() -> None:
    (row,) = arrays(BODY, {1})
    assert row.values.tolist() == [2.0, 0.0]
    assert np.shares_memory(row.values, np.frombuffer(BODY, np.uint8))


@pytest.mark.spec("CNT-12")
@settings(max_examples=150, deadline=None)
@given(body=st.binary(max_size=200))
def test_readers_refuse_bytes_that_are_no_profile_by_name(body: bytes) -> None:
    for reader in (lambda: list(arrays(body)), lambda: MutableCounters(CATALOG, body, NOW)):
        with contextlib.suppress(PackWrong):
            reader()


def with_unknown() -> bytes:
    """A pack that a later catalog and a later format wrote into: a counter, a kind and fields that we do not know."""
    profile = Profile.FromString(BODY)
    pack = profile.packed_counters[0]
    pack.counter_ids.append(999)
    pack.values.add().float_values.value.extend([7.0] * len(pack.keys))
    pack.counter_ids.append(30)
    pack.values.append(ValueType.FromString(b"\x7a\x03abc"))  # a kind of a later version, field 15
    raw = pack.SerializeToString() + b"\xa2\x06\x02hi"  # field 100 of the pack
    pack.ParseFromString(raw)
    return profile.SerializeToString() + b"\xc2\x3e\x03new"  # field 1000 of the profile


@pytest.mark.spec("CNT-13")
def test_what_is_not_known_passes_through_a_write_unharmed() -> None:
    body = with_unknown()
    counters = MutableCounters(CATALOG, body, NOW)
    counters.update(1, 8, 1.0, NOW)
    after = Profile.FromString(counters.serialise())
    rest, *ours = after.packed_counters
    assert list(rest.counter_ids) == [999, 30]
    assert list(rest.keys) == [5, 6]
    assert list(rest.values[0].float_values.value) == [7.0, 7.0]
    assert rest.values[1].SerializeToString() == b"\x7a\x03abc"
    assert b"\xa2\x06\x02hi" in rest.SerializeToString()
    assert b"\xc2\x3e\x03new" in after.SerializeToString()
    assert [list(pack.counter_ids) for pack in ours] == [[1, 2, 3, 10], [20]]
    assert list(ours[0].keys) == [5, 6, 8]


def in_a_later_kind(counter_id: int) -> bytes:
    """A profile in which one counter is stored in a kind that we do not know."""
    profile = Profile.FromString(BODY)
    for pack in profile.packed_counters:
        for at, each in enumerate(pack.counter_ids):
            if each == counter_id:
                pack.values[at].ParseFromString(b"\x7a\x03abc")
    return profile.SerializeToString()


@pytest.mark.spec("CNT-03", "CNT-09", "CNT-13")
def test_a_counter_in_a_kind_of_a_later_version_is_not_written_and_its_siblings_are() -> None:
    counters = MutableCounters(CATALOG, in_a_later_kind(1), NOW)
    with pytest.raises(KindUnknown, match="a kind of a later version"):
        counters.update(1, 5, 1.0, NOW)
    assert counters.serialise() == in_a_later_kind(1)
    counters.update(2, 8, 1.0, NOW)
    again = MutableCounters(CATALOG, counters.serialise(), NOW)
    assert again.get(2, 8) == 1.0
    assert b"\x7a\x03abc" in again.serialise()


@pytest.mark.spec("CNT-09", "CNT-13")
def test_a_group_whose_times_are_in_a_kind_of_a_later_version_is_left_as_it_is() -> None:
    counters = MutableCounters(CATALOG, in_a_later_kind(10), NOW)
    for each in (1, 2, 3):
        with pytest.raises(KindUnknown):
            counters.update(each, 5, 1, NOW)
    counters.update(20, 9, 1.0, NOW)
    counters.cleanup()
    after = Profile.FromString(counters.serialise())
    MutableCounters(CATALOG, after.SerializeToString(), NOW)
    assert Profile.FromString(in_a_later_kind(10)).packed_counters[0] in list(after.packed_counters)
    assert [list(pack.counter_ids) for pack in after.packed_counters].count([20]) == 1


@pytest.mark.spec("CNT-03", "CNT-13")
@pytest.mark.parametrize("counter_id", [1, 10])
def test_a_merge_into_a_counter_in_a_kind_of_a_later_version_is_refused_whole(counter_id: int) -> None:
    counters = MutableCounters(CATALOG, in_a_later_kind(counter_id), NOW)
    with pytest.raises(KindUnknown, match="a kind of a later version"):
        counters.absorb(Counters(CATALOG, BODY, NOW))
    assert counters.serialise() == in_a_later_kind(counter_id)
    counters.absorb(Counters(CATALOG, folded([[(20, 2**63, 1.0, NOW)]]), NOW))
    assert MutableCounters(CATALOG, counters.serialise(), NOW).get(20, 2**63) == 2.5


@pytest.mark.spec("CNT-09", "CNT-13")
def test_what_is_under_times_in_a_kind_of_a_later_version_is_not_read_and_does_not_expire() -> None:
    """With a limit or without: nobody here knows the time of any of it, and 0 would be an invented one."""
    catalog = Catalog([*CATALOG.counters.values(), counter(50, Kind.FLOAT, decay=1.0, time_counter_id=51), TIMELESS])
    profile = Profile()
    pack = profile.packed_counters.add(counter_ids=[50, 51], keys=[1])
    pack.values.add().float_values.value.extend([5.0])
    pack.values.add().ParseFromString(b"\x7a\x03abc")
    for body, ids in ((profile.SerializeToString(), (50, 51)), (in_a_later_kind(10), (1, 2, 3, 10))):
        counters = MutableCounters(catalog, body, NOW)
        for each in ids:
            assert counters.find(each, 1) is None
            assert counters.find(each, 5) is None
            assert bulk.read(catalog, [body], frozenset({each}), NOW, kernel="numpy") == [None]
        assert counters.expires_at == NEVER
        merged = MutableCounters(catalog, b"", NOW)
        merged.absorb(counters)
        assert [group.id for group in merged.groups()] == ([20] if ids[0] == 1 else [])


@pytest.mark.spec("CNT-13")
def test_fields_of_a_later_format_beside_known_rows_stay_with_their_counter() -> None:
    profile = Profile.FromString(BODY)
    pack = profile.packed_counters[0]
    pack.ParseFromString(pack.SerializeToString() + b"\xa2\x06\x02hi")
    pack.values[0].ParseFromString(pack.values[0].SerializeToString() + b"\x7a\x03abc")
    counters = MutableCounters(CATALOG, profile.SerializeToString(), NOW)
    counters.update(1, 8, 1.0, NOW)
    after = Profile.FromString(counters.serialise()).packed_counters[0]
    assert b"\xa2\x06\x02hi" in after.SerializeToString()
    assert b"\x7a\x03abc" in after.values[0].SerializeToString()
    assert len(after.values[0].float_values.value) == 3


@pytest.mark.spec("CNT-13")
def test_fields_of_a_later_format_among_the_values_of_a_row_stay_with_them() -> None:
    profile = Profile.FromString(BODY)
    values = profile.packed_counters[0].values[0].float_values
    values.ParseFromString(values.SerializeToString() + b"\x7a\x03abc")
    counters = MutableCounters(CATALOG, profile.SerializeToString(), NOW)
    counters.update(1, 8, 1.0, NOW)
    after = Profile.FromString(counters.serialise()).packed_counters[0].values[0].float_values
    assert b"\x7a\x03abc" in after.SerializeToString()
    assert len(after.value) == 3


@pytest.mark.spec("CNT-11")
def test_the_older_form_is_read_and_moves_to_packs_on_the_first_write() -> None:
    profile = Profile(counters=list(as_legacy(Profile.FromString(BODY).packed_counters[0])))
    counters = MutableCounters(CATALOG, profile.SerializeToString(), NOW)
    assert counters.get(1, 5) == 2.0
    counters.update(1, 5, 1.0, NOW)
    after = Profile.FromString(counters.serialise())
    assert not after.counters
    assert after.packed_counters[0].values[0].float_values.value[0] == 3.0
