"""What a run reads: offers in every form, and clear words, with nothing written, for what cannot be numbered."""

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from msgspec import structs

from keyfold.bulk.folders import Root
from keyfold.core.errors import BadInput, KeyfoldError, NotFound
from keyfold.numbering.model import DOC_ID_MAX, Key
from keyfold.numbering.service import running, states
from keyfold.numbering.service.states import Stored
from tests.numbering_runs import SCHEMES, TEXTS, leftovers, places, request, write_offers, write_shops

KEYS = [Key(1, text, 1, 1) for text in TEXTS]
BY_TIER = SCHEMES[2]


@pytest.fixture
def before(tmp_path: Path) -> Stored:
    return running.run(request(write_offers(tmp_path / "before.parquet", KEYS[:10]), tmp_path / "before"))


def refused(tmp_path: Path, offers: str, words: str, before: Stored | None = None, **given: Any) -> KeyfoldError:
    """The run is refused in these words, and nothing is there."""
    target, scratch = tmp_path / "target", tmp_path / "scratch"
    scratch.mkdir(exist_ok=True)
    with pytest.raises(KeyfoldError, match=words) as error:
        running.run(request(offers, target, before, scratch=scratch, **given))
    assert not target.exists()
    assert leftovers(tmp_path) == []
    assert list(scratch.iterdir()) == []
    return error.value


@pytest.mark.spec("NUM-09")
@pytest.mark.parametrize("where", ["local", "memory"])
@pytest.mark.parametrize("form", ["a file", "a folder", "a pattern"])
def test_offers_are_a_file_a_folder_or_a_pattern_anywhere(tmp_path: Path, where: str, form: str) -> None:
    root = Root(str(tmp_path / "in") if where == "local" else f"memory://{uuid.uuid4().hex}/in")
    for number in range(3):
        file = write_offers(tmp_path / "made.parquet", KEYS[number * 5 : number * 5 + 5])
        root.put(Path(file), f"offers/part={number}/{number}.parquet")
    # None of these is read as a part of the folder.
    for name in ("_SUCCESS", "notes.txt", ".hidden.parquet", "_temporary/x.parquet"):
        root.put(Path(write_offers(tmp_path / "made.parquet", KEYS[:1])), f"offers/{name}")
    url, count = {
        "a file": (f"{root.url}/offers/part=0/0.parquet", 5),
        "a folder": (f"{root.url}/offers", 15),
        "a pattern": (f"{root.url}/offers/*/[01].parquet", 10),
    }[form]
    state = running.run(request(url, tmp_path / "state"))
    assert sorted(places(state)) == sorted(KEYS[:count])


@pytest.mark.spec("NUM-09")
@pytest.mark.parametrize("url", ["nothing.parquet", "nothing", "nothing/*.parquet", "memory://nothing", "empty"])
def test_offers_that_are_not_there_are_not_found(tmp_path: Path, url: str) -> None:
    (tmp_path / "empty").mkdir()
    error = refused(tmp_path, url if "://" in url else str(tmp_path / url), "no Parquet files")
    assert isinstance(error, NotFound)


def kinds(*types: Any) -> list[Any]:
    return [pytest.param(kind, id=str(kind)) for kind in types]


@pytest.mark.spec("NUM-01")
@pytest.mark.parametrize("kind", kinds(pa.int8(), pa.int32(), pa.uint16(), pa.uint64()))
def test_ids_may_be_integers_of_any_width(tmp_path: Path, kind: Any) -> None:
    keys = [Key(number, "a", number, number) for number in range(100)]
    columns = {name: pa.array(list(range(100)), kind) for name in ("business_id", "shop_id", "warehouse_id")}
    state = running.run(request(write_offers(tmp_path / "offers.parquet", keys, **columns), tmp_path / "state"))
    assert sorted(places(state)) == keys


@pytest.mark.spec("NUM-01")
@pytest.mark.parametrize(
    ("name", "column", "words"),
    [
        ("business_id", pa.array(["1", "2"]), "business_id.*string"),
        ("shop_id", pa.array(["x", "y"]), "shop_id.*string"),
        ("warehouse_id", pa.array([1.5, 2.0]), "warehouse_id.*float"),
        ("shop_id", pa.array([True, False]), "shop_id.*bool"),
        ("offer_id", pa.array([1, 2]), "offer_id.*int"),
        ("offer_id", pa.array([b"a", b"b"]), "offer_id.*binary"),
        ("business_id", pa.array([-1, 2]), "business_id -1"),
        ("shop_id", pa.array([None, 2], pa.int64()), "shop_id None"),
        ("offer_id", pa.array([None, "b"]), "offer_id None"),
        ("offer_id", pa.array(["", "b"]), "offer_id ''"),
        ("business_id", pa.array([2**63, 2], pa.uint64()), "9223372036854775808"),
        ("warehouse_id", None, "no column warehouse_id"),
        ("offer_id", None, "no column offer_id"),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_offers_that_have_no_whole_key_are_refused(
    tmp_path: Path, before: Stored, name: str, column: Any, words: str, is_first: bool
) -> None:
    offers = write_offers(tmp_path / "offers.parquet", [Key(1, "a", 1, 1), Key(1, "b", 1, 1)], **{name: column})
    error = refused(tmp_path, offers, words, None if is_first else before)
    assert isinstance(error, BadInput)


@pytest.mark.spec("NUM-01", "NUM-09")
@pytest.mark.xdist_group("spark")
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("spark_session")
def test_spark_refuses_what_duckdb_refuses(tmp_path: Path, before: Stored) -> None:
    keys = [Key(1, "a", 1, 1), Key(1, "b", 1, 1)]
    for name, column, words in (
        ("business_id", pa.array([2**63, 2], pa.uint64()), "9223372036854775808"),
        ("business_id", pa.array(["1", "2"]), "business_id.*string"),
        ("warehouse_id", pa.array([1.5, 2.0]), "warehouse_id.*float"),
        ("offer_id", pa.array([b"a", b"b"]), "offer_id.*binary"),
        ("offer_id", pa.array(["a", "a"]), "more than once"),
        ("shop_id", pa.array([None, -2], pa.int64()), "shop_id -2"),
        ("offer_id", None, "no column offer_id"),
    ):
        offers = write_offers(tmp_path / "offers.parquet", keys, **{name: column})
        assert isinstance(refused(tmp_path, offers, words, before, engine="spark"), BadInput)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    refused(tmp_path, str(tmp_path / "broken.parquet"), "cannot be read", before, engine="spark")
    unsigned = write_offers(tmp_path / "offers.parquet", keys, shop_id=pa.array([0, 2**63 - 1], pa.uint64()))
    state = running.run(request(unsigned, tmp_path / "state", engine="spark"))
    assert sorted(places(state)) == [Key(1, "a", 0, 1), Key(1, "b", 2**63 - 1, 1)]


@pytest.mark.spec("NUM-01")
@pytest.mark.parametrize("rebuild", [True, False])
@pytest.mark.parametrize("twice", [KEYS[3], KEYS[12]], ids=["known", "new"])
@pytest.mark.parametrize("tiers", [("small", "small"), ("small", "large"), (None, "")])
def test_a_key_that_comes_twice_is_refused(
    tmp_path: Path, twice: Key, tiers: tuple[str | None, str | None], rebuild: bool
) -> None:
    given: dict[str, Any] = {"scheme": BY_TIER}
    before = running.run(request(write_offers(tmp_path / "before.parquet", KEYS[:10]), tmp_path / "before", **given))
    offers = write_offers(tmp_path / "offers.parquet", [*KEYS[:2], twice, twice], [None, None, *tiers])
    error = refused(tmp_path, offers, "more than once", before, is_forced=rebuild, **given)
    assert repr(twice.offer_id) in str(error)


@pytest.mark.spec("NUM-01")
def test_a_key_that_comes_twice_in_two_files_is_refused(tmp_path: Path, before: Stored) -> None:
    write_offers(tmp_path / "in" / "1.parquet", KEYS[:5])
    write_offers(tmp_path / "in" / "2.parquet", KEYS[4:9])
    refused(tmp_path, str(tmp_path / "in"), "more than once", before)


@pytest.mark.spec("NUM-02", "NUM-08")
def test_an_input_that_is_empty_or_shrunken_is_refused_unless_it_is_meant(tmp_path: Path, before: Stored) -> None:
    empty = write_offers(tmp_path / "empty.parquet", [])
    few = write_offers(tmp_path / "few.parquet", KEYS[:4])
    refused(tmp_path, empty, "no offer in the input")
    refused(tmp_path, empty, "no offer in the input", before)
    refused(tmp_path, few, "4 offers, the last run had 10", before, input_share_min=0.5)
    allowed = running.run(request(empty, tmp_path / "allowed", before, is_shrinking_allowed=True))
    # No ratio of no offers is enough for the places that are there.
    assert (allowed.manifest.reason, places(allowed)) == ("ratio", {})
    assert sorted(places(allowed, "expired_docs")) == sorted(KEYS[:10])
    first = running.run(request(empty, tmp_path / "first", is_shrinking_allowed=True))
    assert places(first) == {}
    next_one = running.run(request(few, tmp_path / "next", first))
    assert sorted(places(next_one)) == sorted(KEYS[:4])


@pytest.mark.spec("NUM-09")
@pytest.mark.parametrize(
    "damage",
    [lambda data: b"", lambda data: b"PAR1", lambda data: data[:-30], lambda data: data[:20] + b"\0" * 60 + data[80:]],
    ids=["empty", "no Parquet", "truncated", "altered"],
)
def test_offers_that_are_damaged_are_refused(tmp_path: Path, before: Stored, damage: Callable[[bytes], bytes]) -> None:
    file = Path(write_offers(tmp_path / "offers.parquet", [Key(number, "x" * 30, 1, 1) for number in range(5000)]))
    file.write_bytes(damage(file.read_bytes()))
    error = refused(tmp_path, str(file), "", before)
    assert isinstance(error, BadInput)
    assert "\n" not in error.detail


@pytest.mark.spec("NUM-07")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"shop_id 7\n", "line 1.*no name, tab and value"),
        (b"shop_id\t7\n\nshop_id\t7\ntier\tlarge\n", "shop 7 is there twice.*line 3"),
        (b"tier\tlarge\n", "no shop_id.*line 1"),
        (b"shop_id\tseven\n", "no shop_id.*'seven'"),
        (b"shop_id\t-7\n", "no shop_id"),
        (b"shop_id\t9223372036854775808\n", "no shop_id"),
        (b"shop_id\t7\ntier\t\xff\n", "not UTF-8"),
    ],
)
def test_a_shops_file_that_is_malformed_is_refused(tmp_path: Path, text: bytes, words: str) -> None:
    shops = tmp_path / "shops.dat"
    shops.write_bytes(text)
    offers = write_offers(tmp_path / "offers.parquet", KEYS[:3])
    assert isinstance(refused(tmp_path, offers, words, shops=str(shops), scheme=BY_TIER), BadInput)


@pytest.mark.spec("NUM-07")
def test_a_shops_file_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    offers = write_offers(tmp_path / "offers.parquet", KEYS[:3])
    assert isinstance(
        refused(tmp_path, offers, "there is no .*shops", shops=str(tmp_path / "shops"), scheme=BY_TIER), NotFound
    )


@pytest.mark.spec("NUM-07")
def test_values_of_a_shops_file_are_whatever_stands_after_the_tab(tmp_path: Path) -> None:
    """Also what Python takes for the end of a line, but no editor does."""
    keys = [Key(number, "a", shop, 1) for number in range(40) for shop in (7, 8)]
    offers = write_offers(tmp_path / "offers.parquet", keys)
    shops = tmp_path / "shops.dat"
    shops.write_text(
        "#shop_id\t7\r\nname\ta\x0bb\x85c\u2028d\r\ntier\tlarge\r\n\r\n\r\nshop_id\t8\nnote\t\ntier\tsmall"
    )
    state = running.run(request(offers, tmp_path / "state", shops=str(shops), scheme=BY_TIER))
    shards = {
        shop: {held.place.shard_id for key, held in places(state).items() if key.shop_id == shop} for shop in (7, 8)
    }
    assert (len(shards[7]), len(shards[8])) == (BY_TIER.shards, 1)


@pytest.mark.spec("NUM-07")
def test_an_offer_without_a_tier_is_sharded_by_its_shops(tmp_path: Path) -> None:
    """As in the offers that are built from the topic, where most have an empty one."""
    keys = [Key(number, "a", 7, 1) for number in range(40)]
    shops = write_shops(tmp_path / "shops.dat", {7: "large"})
    plain = write_offers(tmp_path / "plain.parquet", keys)
    first = places(running.run(request(plain, tmp_path / "plain", shops=shops, scheme=BY_TIER)))
    for name, tier in (("null", None), ("empty", "")):
        offers = write_offers(tmp_path / f"{name}.parquet", keys, [tier] * len(keys))
        assert places(running.run(request(offers, tmp_path / name, shops=shops, scheme=BY_TIER))) == first


def claiming(state: Stored, size: int) -> Stored:
    """The same state, whose manifest says that so many places were given in each shard."""
    shards = [structs.replace(shard, size=size) for shard in state.manifest.shards]
    manifest = state.root.local("manifest.json")
    manifest.write_bytes(states.encoded(states.sealed(structs.replace(state.manifest, shards=shards))))
    return states.read(state.root)


@pytest.mark.spec("NUM-01", "NUM-02")
def test_a_shard_is_filled_to_the_last_number_and_not_beyond(tmp_path: Path) -> None:
    given: dict[str, Any] = {"scheme": SCHEMES[3], "rebuild_ratio": 1e12}
    first = running.run(request(write_offers(tmp_path / "1.parquet", KEYS[:2]), tmp_path / "1", **given))
    before = claiming(first, DOC_ID_MAX)
    refused(tmp_path, write_offers(tmp_path / "2.parquet", KEYS[:4]), "shard 0 would need 2147483649", before, **given)
    last = running.run(request(write_offers(tmp_path / "3.parquet", KEYS[:3]), tmp_path / "3", before, **given))
    assert places(last)[KEYS[2]].place == (0, DOC_ID_MAX)
    assert last.manifest.shards[0].size == DOC_ID_MAX + 1


@pytest.mark.spec("NUM-05")
def test_a_state_of_another_type_or_of_a_changed_scheme_is_refused(tmp_path: Path, before: Stored) -> None:
    offers = write_offers(tmp_path / "offers.parquet", KEYS[:5])
    refused(tmp_path, offers, "of type 1, not 2", before, type=2)
    changed = structs.replace(SCHEMES[0], shards=5)
    refused(tmp_path, offers, "needs a new number", before, scheme=changed)


@pytest.mark.spec("NUM-08")
def test_the_tables_of_new_and_expired_offers_go_where_they_are_asked_for(tmp_path: Path, before: Stored) -> None:
    offers = write_offers(tmp_path / "offers.parquet", KEYS[5:15])
    new, expired = str(tmp_path / "new it's"), f"memory://{uuid.uuid4().hex}/expired"
    state = running.run(request(offers, tmp_path / "state", before, ttl_runs=0, new_docs=new, expired_docs=expired))
    assert len(places(state, "new_docs")) == len(places(state, "expired_docs")) == 5
    for url, name in ((new, "new_docs"), (expired, "expired_docs")):
        read = running.run(request(url, tmp_path / f"of {name}"))
        assert sorted(places(read)) == sorted(places(state, name))
    refused(tmp_path, offers, "there already", before, new_docs=new)
    assert msgspec.json.decode((tmp_path / "state" / "manifest.json").read_bytes())["version"] == str(state.version)
