"""Look-ups: the index agrees with the state for every key and every place, and reads little of it."""

import uuid
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from keyfold.bulk.folders import FolderBroken, Root
from keyfold.numbering.model import Key, Place
from keyfold.numbering.service import finding, running
from keyfold.numbering.service.finding import Index, IndexLacking
from keyfold.numbering.service.states import Stored
from keyfold.numbering.sharding import Scheme
from tests.numbering_runs import places, request, some_key, write_offers

GROUP_ROWS = 2048  # what DuckDB rounds to
SCHEME = Scheme(number=0, by="offer", shards=5)


def large_keys(count: int) -> list[Key]:
    random = Random(count)
    odd = {some_key(random) for _ in range(count // 10)}
    return sorted(odd | {Key(number % 7, f"offer {number}", number, 0) for number in range(count - len(odd))})


def made(keys: list[Key], tmp_path: Path, target: Path | str, scheme: Scheme = SCHEME) -> Stored:
    offers = write_offers(tmp_path / f"{uuid.uuid4().hex}.parquet", keys)
    state = running.run(request(offers, target, scheme=scheme, is_shrinking_allowed=True))
    finding.build(state, 500)
    return state


@pytest.fixture
def groups_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The row groups that are read, one after the other."""
    import pyarrow.parquet as pq

    read: list[int] = []
    plain: Callable[..., Any] = pq.ParquetFile.read_row_group

    def counted(self: Any, group: int, *arguments: Any, **named: Any) -> Any:
        read.append(group)
        return plain(self, group, *arguments, **named)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    monkeypatch.setattr(finding, "GROUP_ROWS", GROUP_ROWS)
    return read


@pytest.mark.spec("NUM-13")
@pytest.mark.parametrize("where", ["local", "memory"])
@pytest.mark.parametrize(("count", "shards"), [(20_000, 5), (9_000, 1), (3, 5), (0, 5)])
def test_the_index_agrees_with_the_state(
    tmp_path: Path, groups_read: list[int], where: str, count: int, shards: int
) -> None:
    target = str(tmp_path / "state") if where == "local" else f"memory://{uuid.uuid4().hex}"
    keys = large_keys(count)
    state = made(keys, tmp_path, target, Scheme(number=0, by="offer", shards=shards))
    held = places(state)
    absent = [Key(key.business_id, key.offer_id + "?", key.shop_id, key.warehouse_id) for key in keys[:50]]
    absent += [Key(0, "nobody", 0, 0), Key(2**63 - 1, "", 2**63 - 1, 2**63 - 1)]
    none = [Place(shard.shard_id, shard.size) for shard in state.manifest.shards]
    none += [Place(shards, 0), Place(0, 2**31 - 1), Place(0, 2**31), Place(-1, 2**31), Place(0, -1), Place(2**40, 0)]
    with Index(state) as index:
        by_key = index.by_keys([*keys, *absent])
        by_place = index.by_places([*(each.place for each in held.values()), *none])
        assert index.by_keys([]) == index.by_places([]) == {}
    assert {key: (found.place, found.generation, found.is_reused, found.seen_run) for key, found in by_key.items()} == {
        key: tuple(each) for key, each in held.items()
    }
    assert {place: found.key for place, found in by_place.items()} == {each.place: key for key, each in held.items()}


@pytest.mark.spec("NUM-13")
def test_a_look_up_reads_few_row_groups(tmp_path: Path, groups_read: list[int]) -> None:
    keys = large_keys(40_000)
    state = made(keys, tmp_path, tmp_path / "state")
    held = places(state)
    with Index(state) as index:
        assert index._by_place._file.metadata.num_row_groups >= 20
        assert index._by_key._file.metadata.num_row_groups >= 20
        for key in keys[:: len(keys) // 100]:
            groups_read.clear()
            assert index.by_keys([key])[key].place == held[key].place
            assert len(groups_read) <= 5
            groups_read.clear()
            assert index.by_places([held[key].place])[held[key].place].key == key
            # Its own, and those that its shard shares with the one before and the one after.
            assert len(groups_read) <= 3
        groups_read.clear()
        assert index.by_places([Place(99, 0)]) == {}
        assert groups_read == []


@pytest.mark.spec("NUM-13")
@pytest.mark.parametrize("url", ["state", "./state", "memory://{}", "memory://{}/", "memory://{}/deep/state"])
def test_the_index_lies_beside_its_state_however_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.chdir(tmp_path)
    url = url.format(uuid.uuid4().hex)
    state = made(large_keys(10), tmp_path / "in", url)
    assert Root(url.rstrip("/") + ".index").names() == ["by_key.parquet", "by_place.parquet", "manifest.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == (
        ["in"] if "memory" in url else ["in", "state", "state.index"]
    )
    with Index(state) as index:
        assert len(index.by_keys(large_keys(10))) == 10


@pytest.mark.spec("NUM-13")
def test_a_key_that_no_engine_could_hold_is_not_found(tmp_path: Path) -> None:
    state = made(large_keys(10), tmp_path, tmp_path / "state")
    with Index(state) as index:
        assert index.by_keys([Key(1, "\udcff", 1, 1)]) == {}


@pytest.mark.spec("NUM-13")
@pytest.mark.parametrize("file", ["by_key.parquet", "by_place.parquet"])
@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: b"", lambda data: b"\0" * len(data), None])
def test_an_index_that_is_damaged_is_refused(
    tmp_path: Path, file: str, damage: Callable[[bytes], bytes] | None
) -> None:
    state = made(large_keys(10), tmp_path, tmp_path / "state")
    path = tmp_path / "state.index" / file
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(FolderBroken, match="index"), Index(state) as index:
        index.by_keys(large_keys(10))


@pytest.mark.spec("NUM-13")
@pytest.mark.parametrize("file", ["by_key.parquet", "by_place.parquet", "manifest.json"])
def test_no_byte_of_an_index_can_change_and_an_answer_with_it(tmp_path: Path, file: str) -> None:
    """Many a bit of a Parquet file could be another and be read all the same: as other keys, or none."""
    random, keys = Random(7), large_keys(40)
    state = made(keys, tmp_path, tmp_path / "state")
    held = places(state)
    path = tmp_path / "state.index" / file
    data = path.read_bytes()
    refused: list[str] = []
    for at in range(0, len(data), 1 if file == "manifest.json" else 5):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :])
        try:
            by_key, by_place = finding.look_up(state, keys, [each.place for each in held.values()])
        except FolderBroken as error:
            refused.append(str(error))
            continue
        assert {key: found.place for key, found in by_key.items()} == {key: each.place for key, each in held.items()}
        assert {found.key: place for place, found in by_place.items()} == {
            key: each.place for key, each in held.items()
        }
    assert len(refused) > len(data) // 10
    assert all("keyfold number index" in words for words in refused)
    finding.build(state, 500, is_verified=True)
    assert len(finding.look_up(state, keys, [])[0]) == len(keys)


@pytest.mark.spec("NUM-13")
def test_what_a_look_up_does_not_read_is_not_in_its_way(
    tmp_path: Path, groups_read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finding, "BLOCK_BYTES", 4096)
    keys = large_keys(40_000)
    state = made(keys, tmp_path, tmp_path / "state")
    by_place = sorted(each.place for each in places(state).values())
    path = tmp_path / "state.index" / "by_place.parquet"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    assert list(finding.look_up(state, [], [by_place[-1]])[1]) == [by_place[-1]]
    with pytest.raises(FolderBroken, match="was altered"):
        finding.look_up(state, [], [by_place[0]])


@pytest.mark.spec("NUM-13")
def test_an_index_of_another_state_is_refused_and_so_is_none(tmp_path: Path) -> None:
    state = made(large_keys(10), tmp_path, tmp_path / "state")
    other = made(large_keys(20), tmp_path, tmp_path / "other")
    (tmp_path / "state.index").rename(tmp_path / "aside")
    with pytest.raises(IndexLacking, match="no look-up index"):
        Index(state)
    (tmp_path / "other.index").rename(tmp_path / "state.index")
    with pytest.raises(FolderBroken, match="another state"):
        Index(state)
    with pytest.raises(IndexLacking):
        Index(other)
