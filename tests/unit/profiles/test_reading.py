"""What is read many at a time, with or without Numba, is what is read one by one through protobuf."""

import random

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keyfold.counters.bulk import KernelName, reading
from keyfold.counters.catalog import Catalog, Kind
from keyfold.counters.errors import KindWrong, PackEmpty, PackWrong, RowsMissing
from keyfold.counters.messages_pb2 import Profile, ValueType
from keyfold.counters.packs import NAMES, as_legacy
from keyfold.profiles.answers import as_json, as_protobuf, as_structs
from keyfold.profiles.service.reading import LeftOut, Read, View, packs_of
from tests.unit.counters.test_bulk import CATALOG as OTHER
from tests.unit.counters.test_bulk import _mutations, kernels
from tests.unit.counters.test_counters import CATALOG, DAY, HISTORIES, NOW, Update, folded
from tests.unit.counters.test_packs import shuffled, spoiled, with_unknown

History = list[list[Update]]
WANTED = st.frozensets(st.sampled_from([1, 2, 3, 4, 10, 20, 30, 40, 41]), min_size=1)
LATER = st.one_of(st.integers(0, 40 * DAY), st.sampled_from([5 * DAY, 5 * DAY + 1, 30 * DAY, 30 * DAY + 1]))
BROKEN = [
    "no keys",
    "no counters",
    "a row missing",
    "a row too short",
    "no kind",
    "another kind",
    "a counter twice",
    "a key twice",
    "not a number",
    "cut off",
]


def one_by_one(catalog: Catalog, body: bytes, wanted: frozenset[int], now: int) -> str:
    """The packs with all their types, or the error."""
    try:
        return spelled(packs_of(catalog, body, View(wanted, []), now))
    except PackWrong as error:
        return repr(error)


def spelled(packs: list[reading.Pack]) -> str:
    """What is said, whatever the order of packs and keys: there is no promise about it."""
    return repr(
        sorted(
            (counter_id, kind, key, repr(value))
            for pack in packs
            for counter_id, (kind, values) in zip(pack.counter_ids, pack.rows, strict=True)
            for key, value in zip(pack.keys, values, strict=True)
        )
    )


def must_be_alike(catalog: Catalog, bodies: list[bytes], wanted: frozenset[int], now: int, kernel: KernelName) -> None:
    read = reading.read(catalog, bodies, wanted, now, kernel=kernel)
    for body, packs in zip(bodies, read, strict=True):
        if packs is not None:
            assert spelled(packs) == one_by_one(catalog, body, wanted, now)
    for packs, text in zip(read, reading.write(catalog, bodies, wanted, now, kernel=kernel), strict=True):
        assert text is None or (packs is not None and text == encoded(packs))


def encoded(packs: list[reading.Pack]) -> bytes:
    """The packs as msgspec writes them."""
    (profile,) = as_structs([Read(("user", "1"), packs, [], 1)], View(frozenset(), [])).profiles
    return msgspec.json.encode(profile.packed_counters)


@pytest.mark.spec("PRO-08", "CNT-08")
@kernels
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(histories=st.lists(HISTORIES, max_size=4), wanted=WANTED, later=LATER, cleanup=st.booleans())
def test_any_profiles_are_read_alike(
    kernel: KernelName, histories: list[History], wanted: frozenset[int], later: int, cleanup: bool
) -> None:
    bodies = [folded(history, cleanup=cleanup) for history in histories]
    must_be_alike(CATALOG, bodies, wanted, NOW + later, kernel)


@pytest.mark.spec("PRO-08", "CNT-10")
@kernels
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(history=HISTORIES, wanted=WANTED, later=LATER, seed=st.integers(0, 2**32))
def test_profiles_in_any_form_are_read_alike(
    kernel: KernelName, history: History, wanted: frozenset[int], later: int, seed: int
) -> None:
    body = folded(history)
    forms = [body, shuffled(body, seed), joined(body, seed), body + unknown(), body + body]
    must_be_alike(CATALOG, forms, wanted, NOW + later, kernel)


def joined(body: bytes, seed: int) -> bytes:
    """Packs that happen to have the same number of keys put into one, whatever their groups."""
    profile, other = Profile.FromString(body), Profile()
    by_size: dict[int, list[int]] = {}
    for index, pack in enumerate(profile.packed_counters):
        by_size.setdefault(len(pack.keys), []).append(index)
    for places in by_size.values():
        random.Random(seed).shuffle(places)
        new = other.packed_counters.add(keys=profile.packed_counters[places[0]].keys)
        for place in places:
            new.counter_ids.extend(profile.packed_counters[place].counter_ids)
            new.values.extend(profile.packed_counters[place].values)
    return other.SerializeToString()


def unknown() -> bytes:
    profile = Profile()
    profile.packed_counters.add(counter_ids=[777], keys=[3]).values.add().float_values.value.extend([1.5])
    return profile.SerializeToString() + b"\xc2\x3e\x03new"


@pytest.mark.spec("CNT-09", "PRO-08")
@kernels
@settings(max_examples=200, deadline=None)
@given(
    bodies=st.lists(_mutations(), min_size=1, max_size=6), wanted=st.frozensets(st.sampled_from(list(OTHER.counters)))
)
def test_hostile_bodies_are_read_alike_and_one_that_is_refused_is_not_passed_on(
    kernel: KernelName, bodies: list[bytes], wanted: frozenset[int]
) -> None:
    must_be_alike(OTHER, bodies, wanted, NOW, kernel)


@pytest.mark.spec("CNT-09")
@kernels
@pytest.mark.parametrize("how", BROKEN)
def test_a_body_that_breaks_an_invariant_is_read_alike(kernel: KernelName, how: str) -> None:
    for wanted in ({1}, {2}, {10}, {20}, {1, 2, 3, 10, 20}):
        must_be_alike(CATALOG, [spoiled(how), with_unknown(), spoiled(how)], frozenset(wanted), NOW, kernel)


def crafted(*rows: tuple[int, list[float]], older: bool = False) -> bytes:
    """One pack of two keys with rows as they are given; its last row in the older form, if told so."""
    profile = Profile()
    pack = profile.packed_counters.add(keys=[5, 6])
    for counter_id, values in rows:
        pack.counter_ids.append(counter_id)
        field = getattr(pack.values.add(), NAMES[CATALOG[counter_id].kind])
        field.value.extend([float(v) if CATALOG[counter_id].kind in (1, 2) else int(v) for v in values])
    if older:
        profile.counters.append(list(as_legacy(pack))[-1])
        del pack.counter_ids[-1], pack.values[-1]
    return profile.SerializeToString()


@pytest.mark.spec("CNT-09", "CNT-10")
@kernels
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(crafted((1, [1, 2]), (1, [3, 4]), (10, [NOW, NOW])), id="a counter twice in a pack"),
        pytest.param(crafted((1, [1, 2])), id="a group without its time"),
        pytest.param(crafted((1, [1, 2, 3]), (10, [NOW, NOW])), id="a row too long"),
        pytest.param(crafted((1, [1, 2]), (10, [NOW, NOW, NOW])), id="a time too many"),
        pytest.param(crafted((1, [1, 2]), (10, [NOW])), id="a time too few"),
        pytest.param(crafted((1, [1, 2]), (10, [NOW, NOW]), (20, [1, 2])), id="two groups in a pack"),
        pytest.param(crafted((1, [1, 2]), (10, [NOW, NOW]), (20, [1, 2]), older=True), id="partly in the older form"),
    ],
)
def test_a_pack_that_is_not_one_whole_group_is_read_alike(kernel: KernelName, body: bytes) -> None:
    for wanted in ({1}, {10}, {1, 10}, {1, 10, 20}):
        must_be_alike(CATALOG, [body, folded([[(1, 7, 2.0, NOW)]]), body], frozenset(wanted), NOW, kernel)


@pytest.mark.spec("CNT-09")
@pytest.mark.parametrize(("how", "error"), [("no keys", PackEmpty), ("a row missing", RowsMissing)])
def test_a_broken_pack_is_refused_by_name(how: str, error: type[PackWrong]) -> None:
    with pytest.raises(error):
        packs_of(CATALOG, spoiled(how), View(frozenset({1}), []), NOW)
    assert reading.read(CATALOG, [spoiled(how)], frozenset({1}), NOW) == [None]


@pytest.mark.spec("PRO-08", "CNT-13")
def test_a_row_of_a_later_kind_is_left_out_and_its_siblings_are_read() -> None:
    profile = Profile.FromString(folded([[(1, 5, 2.0, NOW), (3, 5, 9, NOW)]]))
    profile.packed_counters[0].values[0].CopyFrom(ValueType.FromString(b"\x7a\x03abc"))
    body = profile.SerializeToString()
    assert reading.read(CATALOG, [body], frozenset({1, 3}), NOW) == [None]
    assert packs_of(CATALOG, body, View(frozenset({1, 3}), []), NOW) == [reading.Pack([3], [5], [(Kind.FIXED64, [9])])]


@pytest.mark.spec("CNT-09")
def test_another_kind_is_refused_where_values_must_be_decayed() -> None:
    with pytest.raises(KindWrong):
        packs_of(CATALOG, spoiled("another kind"), View(frozenset({1}), [], at_now=True), NOW)


@pytest.mark.spec("PRO-08")
def test_every_kind_of_values_is_answered_under_its_own_name() -> None:
    wanted = frozenset({1, 2, 3, 4, 10})
    rows: list[Update] = [(1, 5, 2.0, NOW), (2, 5, 3.0, NOW), (3, 5, 2**64 - 1, NOW), (4, 5, 1, NOW)]
    (packs,) = reading.read(CATALOG, [folded([rows])], wanted, NOW)
    assert packs is not None
    read, view = Read(("user", "1"), packs, [], 1), View(wanted, [])
    values = as_structs([read], view).profiles[0].packed_counters[0].values
    named = [
        {name: each.value for name in each_type.__struct_fields__ if (each := getattr(each_type, name)) is not None}
        for each_type in values
    ]
    expected = [
        {"float_values": [2.0]},
        {"double_values": [3.0]},
        {"fixed64_values": [2**64 - 1]},
        {"fixed32_values": [NOW]},
        {"fixed32_values": [NOW]},
    ]
    assert named == expected
    assert b"\xff" * 8 in as_protobuf([read], view)


@pytest.mark.spec("PRO-08")
def test_an_answer_is_the_same_whether_its_packs_were_written_at_once_or_number_by_number() -> None:
    body = folded([[(1, 5, 2.5, NOW), (3, 5, 2**64 - 1, NOW), (2, 6, 1e-9, NOW)]])
    wanted, kernel = frozenset({1, 2, 3}), "auto"
    (packs,), (text,) = (each(CATALOG, [body], wanted, NOW, kernel=kernel) for each in (reading.read, reading.write))
    view = View(wanted, [LeftOut(4, "needs a grant")])
    segments = [('a " b', 3)]
    for key in (("user", "1"), ("user", 'é "\\ \u2028')):
        plain = [Read(key, packs, segments, 7), Read(key, [], [], 0), Read(key, [], [], 2, "broken")]
        written = [Read(key, [], segments, 7, "", text), *plain[1:]]
        assert as_json(written, view) == as_json(plain, view) == msgspec.json.encode(as_structs(plain, view))
