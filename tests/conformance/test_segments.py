"""Segments on every store: the queue, ticks, guards, turning off, sweeps, and what is told of a user."""

import errno
import os
import random
import shutil
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from keyfold.core.clock import ManualClock
from keyfold.core.errors import (
    BadInput,
    Conflict,
    LeaseLost,
    NotFound,
    StoreBusy,
    StoreUnreachable,
    TicketRefused,
    Unavailable,
)
from keyfold.core.leases.holding import Holding
from keyfold.segments.difference import SnapshotWrong
from keyfold.segments.model import SegmentId
from keyfold.segments.service import describing, evaluating, queueing, reading, ticking, uploading
from keyfold.segments.service.sources import must_be_condition
from keyfold.segments.service.uploading import Uploads
from tests.segments import Segments, opened

ENDS = [0, 1, 2**63 - 1, 2**63, 2**64 - 1]


@pytest.fixture
def segments(store_url: str, tmp_path: Path) -> Iterator[Segments]:
    with opened(store_url, tmp_path / "snapshots", chunk_users_max=7, batch_rows=16) as product:
        yield product


def steps(product: Segments, count: int) -> Any:
    """A tick that has done so many pieces of work."""
    tick = product.differ.next("w1")
    assert tick is not None
    for _ in range(count):
        next(tick)
    return tick


def until_chunks(product: Segments, segment_id: str, count: int) -> Any:
    """A tick that has committed so many chunks."""
    tick = product.differ.next("w1")
    assert tick is not None
    next(tick)
    while product.row(segment_id).chunks < count:
        next(tick)
    return tick


@pytest.mark.spec("SEG-01", "SEG-04", "SEG-08")
def test_a_segment_goes_through_its_stages_and_its_users_follow_its_snapshots(segments: Segments) -> None:
    segments.create("sports")
    assert segments.row("sports").stage == "evaluation"
    assert segments.upload("sports", [1, 2, 3, *ENDS[2:]]).stage == "awaiting_diff"
    tick = steps(segments, 1)
    assert segments.row("sports").stage == "diffing"
    assert segments.row("sports").target_version == 1
    for _ in tick:
        pass
    row = segments.row("sports")
    assert (row.stage, row.evaluation_version, row.diff_version, row.target_version) == ("done", 1, 1, None)
    segments.upload("sports", [2, 3, 4, *ENDS[2:]])
    segments.tick_all()
    assert segments.names(1, 2, 4, *ENDS[2:]) == {
        "1": [],
        "2": ["sports"],
        "4": ["sports"],
        **{str(each): ["sports"] for each in ENDS[2:]},
    }
    assert segments.stored()["1"] == (2, [])
    assert segments.stored()["2"] == (1, [("sports", 1)])
    assert segments.stored()["4"] == (1, [("sports", 2)])
    segments.must_agree_with_the_topic()


@pytest.mark.spec("SEG-02", "SEG-08")
def test_users_with_text_ids_follow_too(segments: Segments) -> None:
    segments.create("news")
    segments.upload("news", ["a", "ab", "b", "é", "𝄞"])
    segments.tick_all()
    segments.upload("news", ["ab", "b", "c", "𝄞"])
    segments.tick_all()
    assert segments.names("a", "c", "é", "𝄞") == {"a": [], "c": ["news"], "é": [], "𝄞": ["news"]}
    segments.must_agree_with_the_topic()
    segments.upload("news", [1, 2])
    segments.tick_all()
    row = segments.row("news")
    assert row.stage == "failed"
    assert "the old snapshot has text ids, the new one number ids" in row.reason
    assert row.diff_version == 2


@pytest.mark.spec("SEG-01")
def test_an_evaluation_that_comes_during_a_diff_is_queued_behind_it(segments: Segments) -> None:
    segments.create("sports")
    segments.upload("sports", range(40))
    tick = until_chunks(segments, "sports", 2)
    assert segments.upload("sports", range(20, 60)).stage == "diffing"
    for _ in tick:
        pass
    row = segments.row("sports")
    assert (row.stage, row.diff_version, row.evaluation_version) == ("awaiting_diff", 1, 2)
    segments.tick_all()
    assert segments.row("sports").diff_version == 2
    assert {user for user, names in segments.names(*range(70)).items() if names} == {str(n) for n in range(20, 60)}


@pytest.mark.spec("SEG-01")
def test_snapshots_that_no_diff_will_read_are_deleted(segments: Segments) -> None:
    segments.create("sports")
    for begin in range(4):
        segments.upload("sports", range(begin, begin + 10))
        if begin != 1:
            segments.tick_all()
    row = segments.row("sports")
    assert row.diff_version == 4
    known = segments.store.read(
        lambda tx: tx.driver("SELECT evaluation_version FROM segment_snapshots").scalars().all()
    )
    assert known == [4]
    assert segments.snapshots.collect(segments.store, older_seconds=3600) == 0
    assert segments.snapshots.collect(segments.store, older_seconds=-1, unfinished_seconds=-1) == 3
    assert segments.why(3, "sports").in_snapshot


@pytest.mark.spec("SEG-06")
@pytest.mark.parametrize("chunks", range(5))
def test_a_diff_that_dies_is_taken_up_at_the_chunk_it_had_reached(segments: Segments, chunks: int) -> None:
    segments.create("sports")
    segments.upload("sports", range(30))
    tick = until_chunks(segments, "sports", chunks)
    tick.close()
    reached = segments.row("sports")
    assert (reached.stage, reached.chunks) == ("diffing", chunks)
    segments.tick_all()
    assert segments.row("sports").stage == "done"
    assert segments.stored() == {str(user): (1, [("sports", 1)]) for user in range(30)}
    segments.must_agree_with_the_topic()


@pytest.mark.spec("SEG-05")
def test_one_segment_is_diffed_by_one_worker_at_a_time(segments: Segments) -> None:
    segments.create("sports")
    segments.upload("sports", range(30))
    tick = until_chunks(segments, "sports", 1)
    assert segments.differ.next("w2") is None
    for _ in tick:
        pass
    assert segments.row("sports").stage == "done"


@pytest.mark.spec("SEG-05", "SEG-06")
def test_a_worker_whose_ticket_was_overtaken_commits_nothing_more(segments: Segments) -> None:
    segments.create("sports")
    segments.upload("sports", range(30))
    old = until_chunks(segments, "sports", 1)
    segments.store.transact(lambda tx: tx.driver("UPDATE leases SET expires_at_us = 0"))
    new = segments.differ.next("w2")
    assert new is not None
    next(new)
    with pytest.raises(TicketRefused, match="was moved by somebody else"):
        for _ in old:
            pass
    for _ in new:
        pass
    assert segments.row("sports").stage == "done"
    assert segments.stored() == {str(user): (1, [("sports", 1)]) for user in range(30)}
    segments.must_agree_with_the_topic()


@pytest.mark.spec("SEG-05", "SEG-08")
def test_segments_diffed_side_by_side_on_the_same_users_lose_no_change(store_url: str, tmp_path: Path) -> None:
    chance = random.Random(3)
    names = [f"s{number}" for number in range(6)]
    last: dict[str, set[int]] = {}
    with opened(store_url, tmp_path / "snapshots", chunk_users_max=11, batch_rows=32) as product:
        for name in names:
            product.create(name, remove_share_max=1.0)
        for _ in range(3):
            for name in names:
                last[name] = set(chance.sample(range(120), 60))
                product.upload(name, sorted(last[name]))
            failed: list[BaseException] = []

            def work(holder: str, failed: list[BaseException] = failed) -> None:
                try:
                    while product.tick(holder):
                        pass
                except BaseException as error:
                    failed.append(error)

            threads = [threading.Thread(target=work, args=(f"w{number}",)) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not failed
            product.tick_all()
        found = product.names(*range(120))
        for user in range(120):
            assert set(found[str(user)]) == {name for name in names if user in last[name]}
        product.must_agree_with_the_topic()


@pytest.mark.spec("SEG-07", "SEG-12")
def test_the_cap_pushes_the_oldest_out_also_when_two_segments_reach_it_at_once(store_url: str, tmp_path: Path) -> None:
    with opened(store_url, tmp_path / "snapshots", segments_max=2) as product:
        for name in ("a", "b", "c", "d"):
            product.create(name)
            product.upload(name, range(50))
        threads = [threading.Thread(target=product.tick, args=(f"w{number}",)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        product.tick_all()
        assert {version for version, _ in product.stored().values()} == {4}
        assert {len(entries) for _, entries in product.stored().values()} == {2}
        product.must_agree_with_the_topic()
        kept = product.names(7)["7"]
        gone = next(name for name in ("a", "b", "c", "d") if name not in kept)
        told = product.why(7, gone)
        assert (told.state, told.in_snapshot) == ("pushed_out", True)
        product.upload(gone, range(50))
        product.tick_all()
        assert gone not in product.names(7)["7"], "what was pushed out does not come back by itself"


@pytest.mark.spec("SEG-07", "SEG-09")
def test_a_segment_that_is_turned_off_empties_and_turned_on_enters_anew(segments: Segments) -> None:
    for name in ("a", "b"):
        segments.create(name)
        segments.upload(name, range(20))
        segments.tick_all()
    row = segments.act("off", "a")
    assert (row.minimal_valid_version, row.diff_version, row.is_on) == (2, None, 0)
    assert segments.names(5) == {"5": ["b"]}
    with pytest.raises(Conflict, match="turned off"):
        segments.upload("a", range(3))
    # Users are cleaned as they are touched: user 30 enters b, user 5 leaves it.
    segments.upload("b", [each for each in range(31) if each != 5])
    segments.tick_all()
    assert segments.stored()["5"][1] == []
    assert segments.stored()["6"][1] == [("a", 1), ("b", 1)]
    swept = segments.sweep()
    assert (swept.users, swept.changed) == (31, 19)
    assert segments.sweep().changed == 0
    assert segments.stored()["6"] == (3, [("b", 1)])
    segments.act("on", "a")
    segments.tick_all()
    assert segments.names(5, 6, 25) == {"5": ["a"], "6": ["b", "a"], "25": ["b"]}
    assert segments.stored()["6"][1] == [("b", 1), ("a", 2)]
    assert segments.why(6, "a").state == "in"
    segments.must_agree_with_the_topic()


@pytest.mark.spec("SEG-09")
@pytest.mark.parametrize("is_on_again", [False, True])
def test_turning_off_during_a_diff_stops_it_at_its_next_chunk(segments: Segments, is_on_again: bool) -> None:
    segments.create("a")
    segments.upload("a", range(30))
    tick = until_chunks(segments, "a", 2)
    segments.act("off", "a")
    if is_on_again:
        segments.act("on", "a")
    with pytest.raises(TicketRefused):
        for _ in tick:
            pass
    segments.tick_all()
    in_it = {user for user, names in segments.names(*range(30)).items() if names}
    assert in_it == ({str(user) for user in range(30)} if is_on_again else set())
    if is_on_again:
        assert {entries[0] for _, entries in segments.stored().values()} == {("a", 2)}
    segments.must_agree_with_the_topic()


@pytest.mark.spec("SEG-11")
def test_a_diff_that_removes_too_many_is_held_until_it_is_approved(segments: Segments) -> None:
    segments.create("a", remove_share_max=0.2)
    segments.upload("a", range(20))
    segments.tick_all()
    segments.upload("a", range(10))
    segments.tick_all()
    row = segments.row("a")
    assert (row.stage, row.diff_version, row.reason) == ("held", 1, "10 of 20 users would leave, more than 20%")
    assert row.checked is not None
    assert (row.checked.counts.removed, row.checked.counts.new_rows) == (10, 10)
    assert len([names for names in segments.names(*range(20)).values() if names]) == 20
    with pytest.raises(Conflict, match="version 2 of a is held, not 1"):
        segments.approve("a", 1)
    with pytest.raises(Conflict, match="is held"):
        segments.act("retry", "a")
    segments.approve("a", 2)
    segments.tick_all()
    assert segments.row("a").diff_version == 2
    assert len([names for names in segments.names(*range(20)).values() if names]) == 10
    with pytest.raises(Conflict, match="not held"):
        segments.approve("a")


@pytest.mark.spec("SEG-11")
def test_an_approval_is_for_what_was_held_and_for_nothing_that_came_after_it(segments: Segments) -> None:
    segments.create("a")
    segments.upload("a", range(20))
    segments.tick_all()
    segments.upload("a", [])
    segments.tick_all()
    assert segments.row("a").reason == "the new snapshot is empty"
    segments.approve("a", 2)
    segments.upload("a", [5])
    segments.tick_all()
    row = segments.row("a")
    assert (row.stage, row.evaluation_version) == ("held", 3)
    segments.upload("a", range(18))
    segments.tick_all()
    assert segments.row("a").diff_version == 4


@pytest.mark.spec("SEG-03", "SEG-13")
def test_a_wrong_snapshot_fails_before_any_user_is_changed_and_can_be_replaced(segments: Segments) -> None:
    segments.create("a")
    segments.upload("a", range(100))
    spoiled = segments.snapshots.root / _folder(segments, "a", 1) / "0000.parquet"
    ids = [*range(60), 59, *range(60, 90)]
    pq.write_table(pa.table({"user_id": pa.array(ids, pa.uint64())}), spoiled)
    segments.tick_all()
    row = segments.row("a")
    assert row.stage == "failed"
    assert "user 59 stands there twice (at the new snapshot, 0000.parquet, row 61)" in row.reason
    assert segments.stored() == {}
    figures = segments.store.read(lambda tx: queueing.figures(tx, 0))
    assert {each.stage: each.segments for each in figures.stages}["failed"] == 1
    segments.act("retry", "a")
    segments.tick_all()
    assert segments.row("a").stage == "failed"
    segments.upload("a", range(5))
    segments.tick_all()
    assert segments.row("a").stage == "done"
    assert set(segments.stored()) == {"0", "1", "2", "3", "4"}


@pytest.mark.spec("SEG-06")
def test_a_snapshot_that_is_replaced_during_its_diff_stops_it(segments: Segments) -> None:
    """Half of another snapshot was applied: only putting it back, or turning off and on, leads to the right sets."""
    segments.create("a")
    segments.upload("a", range(100))
    file = segments.snapshots.root / _folder(segments, "a", 1) / "0000.parquet"
    shutil.copy2(file, file.with_suffix(".good"))
    tick = until_chunks(segments, "a", 2)
    pq.write_table(pa.table({"user_id": pa.array(range(50, 200), pa.uint64())}), file)
    for _ in tick:
        pass
    row = segments.row("a")
    assert (row.stage, row.chunks) == ("failed", 2)
    assert "has changed while it was applied" in row.reason
    segments.act("retry", "a")
    segments.tick_all()
    assert "has changed after 2 chunks of it were applied" in segments.row("a").reason
    segments.act("off", "a")
    segments.act("on", "a")
    segments.tick_all()
    assert {user for user, names in segments.names(*range(200)).items() if names} == {str(n) for n in range(50, 200)}
    segments.must_agree_with_the_topic()


@pytest.mark.spec("SEG-06")
def test_a_snapshot_that_is_put_back_goes_on_where_it_was(segments: Segments) -> None:
    segments.create("a")
    segments.upload("a", range(100))
    file = segments.snapshots.root / _folder(segments, "a", 1) / "0000.parquet"
    shutil.copy2(file, file.with_suffix(".good"))
    tick = until_chunks(segments, "a", 2)
    file.unlink()
    for _ in tick:
        pass
    assert segments.row("a").stage == "failed"
    shutil.copy2(file.with_suffix(".good"), file)
    segments.act("retry", "a")
    segments.tick_all()
    assert segments.row("a").stage == "done"
    assert segments.stored() == {str(user): (1, [("a", 1)]) for user in range(100)}


@pytest.mark.spec("SEG-01")
def test_a_diff_that_was_begun_is_finished_before_a_newer_snapshot_is_diffed(segments: Segments) -> None:
    """Users that the first snapshot added and the second has not would else stay for ever."""
    segments.create("a", remove_share_max=1.0)
    segments.upload("a", range(30))
    tick = until_chunks(segments, "a", 2)
    tick.close()
    segments.upload("a", range(100, 130))
    segments.tick_all()
    assert {user for user, names in segments.names(*range(130)).items() if names} == {str(n) for n in range(100, 130)}
    assert segments.row("a").diff_version == 2


@pytest.mark.spec("SEG-12")
def test_why_tells_how_a_user_came_in_and_went_out(segments: Segments) -> None:
    segments.create("a")
    segments.upload("a", range(10))
    segments.tick_all()
    segments.upload("a", range(3, 12))
    segments.tick_all()
    assert segments.why(5, "a").state == "in"
    assert segments.why(5, "a").version == 1
    assert segments.why(11, "a").evaluation_version == 2
    left = segments.why(1, "a")
    assert (left.state, left.version, left.evaluation_version, left.in_snapshot) == ("left", 2, 1, False)
    assert segments.why(99, "a").state == "never"
    assert segments.why("not a number", "a").state == "never"
    segments.act("off", "a")
    assert segments.why(5, "a").state == "expired"
    with pytest.raises(NotFound, match="no segment 'b'"):
        segments.why(1, "b")
    changes = segments.history(1)
    assert [(each.version, each.entered, each.left) for each in changes] == [(2, [], ["a"]), (1, ["a"], [])]


@pytest.mark.spec("SEG-13")
def test_a_stuck_segment_is_visible_and_can_be_tried_again(store_url: str, tmp_path: Path) -> None:
    clock = ManualClock()
    with opened(store_url, tmp_path / "snapshots", clock=clock, stuck_seconds=60) as product:
        product.create("a")
        product.create("idle")
        product.upload("a", range(10))
        clock.advance(61)
        figures = product.store.read(lambda tx: queueing.figures(tx, 60))
        assert figures.stuck == ["a"]
        assert {each.stage: each.oldest_seconds for each in figures.stages if each.segments} == {
            "awaiting_diff": 61,
            "evaluation": 61,
        }
        (shown,) = product.store.read(lambda tx: describing.shown(tx, product.settings, ["a"]))
        assert shown.is_stuck
        product.act("retry", "a")
        assert product.store.read(lambda tx: queueing.figures(tx, 60)).stuck == []
        with pytest.raises(Conflict, match="nothing to try again"):
            product.act("retry", "idle")


@pytest.mark.spec("SEG-02", "SEG-10")
def test_an_upload_in_parts_becomes_a_snapshot_when_it_is_finished(segments: Segments) -> None:
    segments.create("a")
    uploads = Uploads(segments.store, segments.snapshots)
    upload_id = uploads.begin("a")
    assert uploads.put("a", upload_id, 2, [7, 8, 2**64 - 1]).last == str(2**64 - 1)
    uploads.put("a", upload_id, 1, [9])
    with pytest.raises(SnapshotWrong, match=r"user 7 does not come after 9.*part 2"):
        uploads.finish("a", upload_id, 2)
    uploads.put("a", upload_id, 1, [1, 5])
    with pytest.raises(BadInput, match="part 3 is not there"):
        uploads.finish("a", upload_id, 3)
    with pytest.raises(BadInput, match="2 parts, not 1"):
        uploads.finish("a", upload_id, 1)
    with pytest.raises(SnapshotWrong, match=r"user 4 comes after 5 \(at part 3, row 2\)"):
        uploads.put("a", upload_id, 3, [5, 4])
    with pytest.raises(SnapshotWrong, match="numbers and text"):
        uploads.put("a", upload_id, 3, [5, "x"])
    assert uploads.finish("a", upload_id, 2).evaluation_version == 1
    assert uploads.finish("a", upload_id, 2).evaluation_version == 1, "a repeat is answered as the first"
    segments.create("b")
    with pytest.raises(NotFound, match="no upload"):
        uploads.finish("b", upload_id, 2)
    with pytest.raises(NotFound, match="no upload"):
        uploads.put("a", upload_id, 1, [1])
    with pytest.raises(NotFound):
        uploads.put("a", "../../etc", 1, [1])
    segments.tick_all()
    assert set(segments.stored()) == {"1", "5", "7", "8", str(2**64 - 1)}


@pytest.mark.spec("SEG-10")
def test_an_upload_whose_finish_was_cut_short_is_finished_by_a_repeat_and_never_twice(
    segments: Segments, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments.create("a")
    uploads = Uploads(segments.store, segments.snapshots)
    upload_id = uploads.begin("a")
    uploads.put("a", upload_id, 1, [1, 5])

    def cut(*_: object) -> None:
        raise StoreUnreachable("the store went away")

    with monkeypatch.context() as patched:
        patched.setattr(uploading, "accept", cut)
        with pytest.raises(StoreUnreachable):
            uploads.finish("a", upload_id, 1)
    assert uploads.finish("a", upload_id, 1).evaluation_version == 1
    segments.tick_all()
    segments.upload("a", [1, 5, 6])
    segments.tick_all()
    assert uploads.finish("a", upload_id, 1).evaluation_version == 2, "an older snapshot does not come back"
    assert segments.names(6) == {"6": ["a"]}


@pytest.mark.spec("SEG-10")
def test_a_condition_over_a_table_is_evaluated_into_a_sorted_snapshot(store_url: str, tmp_path: Path) -> None:
    people = tmp_path / "people.parquet"
    rows = {"user": pa.array([9, 2**64 - 1, 3, 3, 7], pa.uint64()), "visits": [5, 9, 1, 8, 0]}
    pq.write_table(pa.table(rows), people)
    tables = {"people": {"url": str(people), "user_id": "user"}}
    with opened(store_url, tmp_path / "snapshots", tables=tables) as product:
        product.create("fans", source_table="people", condition="visits > 4")
        with pytest.raises(Conflict, match="evaluated over people"):
            product.upload("fans", [1])
        row = product.evaluator.evaluate("fans", "w")
        assert row is not None
        assert (row.stage, row.evaluation_version) == ("awaiting_diff", 1)
        product.tick_all()
        assert {user for user, (_, entries) in product.stored().items() if entries} == {"3", "9", str(2**64 - 1)}
        product.store.transact(lambda tx: queueing.want_evaluation(tx, "fans"))
        assert product.evaluator.step("w")
        assert not product.evaluator.step("w")
        assert product.row("fans").evaluation_version == 2


@pytest.mark.spec("SEG-10")
@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ("nonsense > 4", "failed"),
        ("visits >", "not SQL"),
        ("visits > 4; DROP TABLE x", "not SQL|more than one"),
        ("visits IN (SELECT 1)", "may only look at columns"),
        ("EXISTS (SELECT * FROM read_csv('/etc/passwd'))", "may only look at columns"),
        ("getenv('HOME') = ''", "may not call"),
        ("true) OR (true", "not SQL|more than one"),
        ("true) ORDER BY (1", "not SQL|more than one"),
    ],
)
def test_a_condition_that_cannot_be_evaluated_says_so(tmp_path: Path, condition: str, words: str) -> None:
    people = tmp_path / "people.parquet"
    pq.write_table(pa.table({"user_id": [1, 2], "visits": [5, 1]}), people)
    with opened(
        f"sqlite:///{tmp_path / 'k.db'}", tmp_path / "snapshots", tables={"people": {"url": str(people)}}
    ) as product:
        product.create("fans", source_table="people", condition=condition)
        with pytest.raises(BadInput, match=words):
            product.evaluator.evaluate("fans", "w")
        product.store.transact(lambda tx: queueing.want_evaluation(tx, "fans"))
        assert product.evaluator.step("w")
        assert product.row("fans").stage == "failed"


@pytest.mark.spec("SEG-10")
@pytest.mark.xdist_group("spark")
@pytest.mark.usefixtures("spark_session")
def test_spark_evaluates_to_the_same_snapshot_as_duckdb(tmp_path: Path) -> None:
    people = tmp_path / "people.parquet"
    users = [2**64 - 1, 7, 2**63, 7, 0, 12]
    rows = {
        "user_id": pa.array(users, pa.uint64()),
        "name": ["é", "b", "ab", "b", "a", "𝄞"],
        "visits": [5, 9, 1, 8, 0, 7],
    }
    pq.write_table(pa.table(rows), people)
    tables = {"people": {"url": str(people)}, "names": {"url": str(people), "user_id": "name"}}
    found: dict[str, list[set[str]]] = {}
    for engine in ("duckdb", "spark"):
        url, folder = f"sqlite:///{tmp_path / engine}.db", tmp_path / engine
        with opened(url, folder, tables=tables, engine=engine) as product:
            for table in tables:
                product.create(table, source_table=table, condition="visits % 2 = 1 OR length(name) = 2")
                product.evaluator.evaluate(table, "w")
            product.tick_all()
            found[engine] = [{user for user, names in product.names(*users).items() if names}]
            found[engine].append({user for user, (_, entries) in product.stored().items() if ("names", 1) in entries})
    assert found["spark"] == found["duckdb"]
    assert found["spark"] == [{str(2**64 - 1), "7", str(2**63), "12"}, {"é", "b", "ab", "𝄞"}]


@pytest.mark.spec("SEG-02")
def test_snapshots_are_read_in_place_from_a_table_with_segments_and_versions(store_url: str, tmp_path: Path) -> None:
    database = tmp_path / "warehouse.ddb"
    _fill(database, [("fans", 3, user) for user in (5, 1, 9)] + [("others", 8, 2)])
    tables = {"kept": {"url": f"duckdb://{database}", "name": "kept", "segment_id": "segment", "version": "evaluation"}}
    with opened(store_url, tmp_path / "snapshots", tables=tables, chunk_users_max=2) as product:
        product.create("fans", source_table="kept")
        row = product.evaluator.evaluate("fans", "w")
        assert row is not None
        assert row.evaluation_version == 3
        product.tick_all()
        assert product.row("fans").diff_version == 3
        assert set(product.stored()) == {"1", "5", "9"}
        _fill(database, [("fans", 4, user) for user in (5, 6, 7, 9)])
        product.evaluator.evaluate("fans", "w")
        tick = until_chunks(product, "fans", 1)
        tick.close()
        product.tick_all()
        assert {user for user, names in product.names(1, 5, 6, 7, 9).items() if names} == {"5", "6", "7", "9"}
        assert product.why(6, "fans").in_snapshot
        assert not product.why(1, "fans").in_snapshot
        again = product.evaluator.evaluate("fans", "w")
        assert again is not None
        assert again.evaluation_version == 4


@pytest.mark.spec("SEG-01")
def test_a_segment_is_made_once_and_its_mistakes_are_named(segments: Segments) -> None:
    segments.create("a", title="A")
    segments.create("a", title="A")
    with pytest.raises(Conflict, match="another segment 'a'"):
        segments.create("a", title="B")
    with pytest.raises(BadInput, match="no table 'x'"):
        segments.create("b", source_table="x", condition="true")
    with pytest.raises(BadInput, match="a condition needs a table"):
        segments.create("b", condition="true")
    assert segments.store.read(lambda tx: reading.read_sets(tx, ["nobody"]))["nobody"].version == 0


def _folder(product: Segments, segment_id: str, version: int) -> str:
    def look(tx: Any) -> str:
        rows = tx.driver("SELECT segment_id, evaluation_version, location FROM segment_snapshots")
        found = {(row.segment_id, row.evaluation_version): row.location for row in rows}
        return str(msgspec.json.decode(found[segment_id, version])["folder"])

    return product.store.read(look)


def _fill(database: Path, rows: list[tuple[str, int, int]]) -> None:
    import duckdb

    with duckdb.connect(str(database)) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS kept (segment TEXT, evaluation BIGINT, user_id BIGINT)")
        connection.executemany("INSERT INTO kept VALUES (?, ?, ?)", rows)


@pytest.mark.spec("SEG-02", "SEG-03")
@pytest.mark.parametrize(
    "change", ["DELETE FROM kept WHERE evaluation = 3", "UPDATE kept SET user_id = 2 WHERE user_id = 1"]
)
def test_a_table_that_has_lost_what_was_applied_stops_the_next_diff(
    store_url: str, tmp_path: Path, change: str
) -> None:
    """Whoever was only in the old rows would otherwise stay in the segment for ever."""
    import duckdb

    database = tmp_path / "warehouse.ddb"
    _fill(database, [("fans", 3, user) for user in (1, 5, 9)])
    tables = {"kept": {"url": f"duckdb://{database}", "name": "kept", "segment_id": "segment", "version": "evaluation"}}
    with opened(store_url, tmp_path / "snapshots", tables=tables) as product:
        product.create("fans", source_table="kept")
        product.evaluator.evaluate("fans", "w")
        product.tick_all()
        with duckdb.connect(str(database)) as connection:
            connection.execute(change)
        _fill(database, [("fans", 4, user) for user in (5, 9)])
        product.evaluator.evaluate("fans", "w")
        product.tick_all()
        row = product.row("fans")
        assert (row.stage, row.diff_version) == ("failed", 3)
        assert "that were applied" in row.reason
        product.act("retry", "fans")
        product.tick_all()
        assert product.row("fans").stage == "failed"
        product.act("off", "fans")
        product.act("on", "fans")
        _fill(database, [("fans", 5, user) for user in (5, 9)])
        product.evaluator.step("w")
        product.tick_all()
        product.sweep()
        assert product.names(1, 5, 9) == {"1": [], "5": ["fans"], "9": ["fans"]}


@pytest.mark.spec("SEG-02")
def test_text_ids_of_a_table_have_one_checksum_however_they_are_cut(tmp_path: Path) -> None:
    people = tmp_path / "kept.parquet"
    users = ["a", "b", "c" * 20, *(f"d{number}" for number in range(40))]
    pq.write_table(pa.table({"s": ["fans"] * 43, "v": [1] * 43, "user_id": users}), people)
    tables = {"kept": {"url": str(people), "segment_id": "s", "version": "v"}}
    found = set()
    for batch_rows in (16, 20, 100):
        with opened(
            f"sqlite:///{tmp_path / str(batch_rows)}.db", tmp_path / "snapshots", tables=tables, batch_rows=batch_rows
        ) as product:
            product.create("fans", source_table="kept")
            product.evaluator.evaluate("fans", "w")
            product.tick_all()
            checked = product.row("fans").checked
            assert checked is not None
            found.add(checked.new)
    assert len(found) == 1


@pytest.mark.spec("SEG-01", "SEG-10")
def test_an_evaluation_that_finds_nothing_new_leaves_no_diff_behind(store_url: str, tmp_path: Path) -> None:
    """A version whose diff has failed is diffed again, not taken for done."""
    database = tmp_path / "warehouse.ddb"
    _fill(database, [("fans", 1, user) for user in (1, 5, 9)])
    tables = {"kept": {"url": f"duckdb://{database}", "name": "kept", "segment_id": "segment", "version": "evaluation"}}
    with opened(store_url, tmp_path / "snapshots", tables=tables) as product:
        product.create("fans", source_table="kept")
        product.evaluator.evaluate("fans", "w")
        product.tick_all()
        _fill(database, [("fans", 2, user) for user in (5, 5, 9)])
        product.evaluator.evaluate("fans", "w")
        product.tick_all()
        assert product.row("fans").stage == "failed"
        product.store.transact(lambda tx: evaluating.want(tx, "fans"))
        product.evaluator.step("w")
        assert product.row("fans").stage == "awaiting_diff"


@pytest.mark.spec("SEG-10")
def test_an_evaluation_that_cannot_be_done_does_not_keep_the_others_waiting(tmp_path: Path) -> None:
    people = tmp_path / "people.parquet"
    pq.write_table(pa.table({"user_id": [1, 2]}), people)
    tables = {"odd": {"url": str(people), "segment_id": "no column", "version": "none"}, "people": {"url": str(people)}}
    with opened(f"sqlite:///{tmp_path / 'k.db'}", tmp_path / "snapshots", tables=tables) as product:
        product.create("bad", source_table="odd")
        product.create("good", source_table="people", condition="true")
        for name in ("bad", "good"):
            product.store.transact(lambda tx, name=name: evaluating.want(tx, name))  # type: ignore[misc]
        while product.evaluator.step("w"):
            pass
        assert product.row("bad").stage == "failed"
        assert "no column" in product.row("bad").reason
        assert product.row("good").stage == "awaiting_diff"


@pytest.mark.spec("SEG-10")
def test_a_worker_that_loses_its_lease_does_not_fail_the_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    people = tmp_path / "people.parquet"
    pq.write_table(pa.table({"user_id": [1, 2]}), people)
    tables = {"people": {"url": str(people)}}
    with opened(f"sqlite:///{tmp_path / 'k.db'}", tmp_path / "snapshots", tables=tables) as product:
        product.create("fans", source_table="people", condition="true")
        product.store.transact(lambda tx: evaluating.want(tx, "fans"))

        def lost(holding: Holding) -> None:
            raise LeaseLost("the lease has passed")

        with monkeypatch.context() as patched:
            patched.setattr(Holding, "must_be_held", lost)
            with pytest.raises(LeaseLost):
                product.evaluator.step("w")
        row = product.row("fans")
        assert (row.stage, row.is_evaluation_wanted) == ("evaluation", 1)
        assert product.evaluator.step("w")
        assert product.evaluator.evaluate("fans", "w", only_if_wanted=True) is None


@pytest.mark.spec("SEG-13")
def test_a_diff_that_every_worker_takes_up_and_none_moves_is_shown_as_stuck(
    store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()

    def busy(*_: object) -> None:
        raise StoreBusy("the transaction ran too long")

    monkeypatch.setattr(ticking, "apply_chunk", busy)
    with opened(store_url, tmp_path / "snapshots", clock=clock, stuck_seconds=100) as product:
        product.create("a")
        product.upload("a", [1, 2])
        for _ in range(5):
            with pytest.raises(StoreBusy):
                product.tick()
            clock.advance(60)
        assert product.store.read(lambda tx: queueing.figures(tx, 100)).stuck == ["a"]


@pytest.mark.parametrize(
    "condition",
    [
        "pg_read_file('/etc/passwd') = ''",
        "query_to_xml('SELECT * FROM secrets', true, true, '') IS NULL",
        "java_method('java.lang.System', 'exit', 1) = ''",
        "\"read_text\"('/etc/passwd') = ''",
        "main.\"getenv\" /* */ ('HOME') = ''",
        "'/etc/passwd'.read_text() = ''",
        "read_csv('/etc/passwd') IS NULL",
        "current_setting('temp_directory') = ''",
        "sleep_ms(100000) IS NULL",
        "sum(visits) > 4",
        "true) OFFSET 3 --",
        "true) USING SAMPLE 1 --",
        "(" * 3_000 + "true" + ")" * 3_000,
    ],
)
def test_a_condition_calls_only_what_is_known_to_look_at_its_arguments_alone(condition: str) -> None:
    with pytest.raises(BadInput, match=r"may not call|more than one|nested too deeply"):
        must_be_condition(condition)


@pytest.mark.parametrize(
    "condition",
    [
        "visits IN (1, 2) AND (city = 'Riga' OR lower(city) LIKE 'r%')",
        "CAST(visits AS DECIMAL(10, 2)) > 1 AND visits::VARCHAR(5) <> ''",
        "CASE WHEN (visits > 1) THEN (city) ELSE ('') END = 'Riga'",
        "seen > now() - INTERVAL (3) DAY AND date_diff('day', seen, current_date) < 4",
        "list_contains(tags, 'a') OR len(list_filter(tags, lambda tag: tag > 'b')) > 1",
        "coalesce(visits, 0) BETWEEN (1) AND (5) AND NOT (visits IS NULL)",
        "regexp_matches(city, '^R') AND extract(year FROM seen) = 2026 AND substring(city, 1, 2) = 'Ri'",
    ],
)
def test_a_condition_may_call_functions_of_values(condition: str) -> None:
    must_be_condition(condition)


@pytest.mark.spec("SEG-10", "SEG-02")
@pytest.mark.parametrize("columns", [{}, {"segment_id": "s", "version": "v"}])
def test_negative_numbers_of_a_signed_column_are_the_upper_half_of_the_ids(
    store_url: str, tmp_path: Path, columns: dict[str, str]
) -> None:
    people = tmp_path / "people.parquet"
    ids = [-1, 5, -(2**63), 0, 2**63 - 1]
    pq.write_table(pa.table({"s": ["fans"] * 5, "v": [1] * 5, "user_id": pa.array(ids, pa.int64())}), people)
    tables = {"people": {"url": str(people), **columns}}
    with opened(store_url, tmp_path / "snapshots", tables=tables, chunk_users_max=2) as product:
        product.create("fans", source_table="people", condition="" if columns else "true")
        product.evaluator.evaluate("fans", "w")
        product.tick_all()
        assert set(product.stored()) == {"5", *map(str, (0, 2**63 - 1, 2**63, 2**64 - 1))}
        assert product.why(2**64 - 1, "fans").in_snapshot
        assert [product.why(user, "fans").in_snapshot for user in ("05", "²", "-1", "9" * 30)] == [False] * 4


@pytest.mark.parametrize("segment_id", ["fans\n", "fans\nothers", "\nfans", "fans:1", "../fans", ".", ""])
def test_an_id_that_would_tear_sets_or_paths_apart_is_refused(segment_id: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(segment_id, SegmentId)


@pytest.mark.spec("SEG-10")
def test_an_upload_that_took_long_is_not_deleted_before_it_is_named(
    segments: Segments, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments.create("a")
    uploads = Uploads(segments.store, segments.snapshots)
    upload_id = uploads.begin("a")
    uploads.put("a", upload_id, 1, [1, 2])
    folder = segments.snapshots.root / "a" / f"{upload_id}.writing"
    for each in (*folder.iterdir(), folder):
        os.utime(each, (1_700_000_000, 1_700_000_000))
    accept = uploading.accept

    def accept_late(*given: Any) -> queueing.Queued:
        assert segments.snapshots.collect(segments.store) == 0
        return accept(*given)

    monkeypatch.setattr(uploading, "accept", accept_late)
    uploads.finish("a", upload_id, 1)
    segments.tick_all()
    assert segments.row("a").stage == "done"


@pytest.mark.spec("SEG-10")
def test_uploads_are_bounded_in_number_and_in_memory(tmp_path: Path) -> None:
    with opened(f"sqlite:///{tmp_path / 'k.db'}", tmp_path / "snapshots", uploads_max=2) as product:
        product.create("a")
        uploads = Uploads(product.store, product.snapshots)
        upload_id = uploads.begin("a")
        uploads.begin("a")
        with pytest.raises(Conflict, match="2 uploads of a are begun"):
            uploads.begin("a")
        ids = [*(f"{number:06}" for number in range(400_000)), "z" * 200]
        tracemalloc.start()
        try:
            uploads.put("a", upload_id, 1, ids)
            uploads.finish("a", upload_id, 1)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 60_000_000
        uploads.begin("a")


@pytest.mark.spec("SEG-10")
def test_an_upload_that_the_disk_refuses_says_so_and_leaves_nothing(
    segments: Segments, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    segments.create("a")
    uploads = Uploads(segments.store, segments.snapshots)
    upload_id = uploads.begin("a")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(Unavailable, match="No space left"):
            uploads.put("a", upload_id, 1, [1])
    assert list((segments.snapshots.root / "a" / f"{upload_id}.writing").iterdir()) == []
    uploads.put("a", upload_id, 1, [1])
    assert uploads.finish("a", upload_id, 1).stage == "awaiting_diff"


@pytest.mark.parametrize(("line", "id_type"), [("9" * 6_000, "number"), ("²", "number"), ("a\udcff", "text")])
def test_a_line_that_is_no_id_is_refused_with_its_place(line: str, id_type: str) -> None:
    with pytest.raises(SnapshotWrong, match="at line 2"):
        list(uploading.line_ids(["1\n", line], id_type, 10))


@pytest.mark.spec("SEG-12")
def test_why_answers_while_the_snapshot_cannot_be_read_and_holds_no_connection_meanwhile(
    segments: Segments, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments.create("a")
    segments.upload("a", [1])
    segments.tick_all()
    contains = segments.snapshots.contains

    def watched(*given: Any) -> bool:
        assert not is_reading
        return contains(*given)

    is_reading: list[bool] = []
    read = segments.store.read

    def counted(work: Any) -> Any:
        is_reading.append(True)
        try:
            return read(work)
        finally:
            is_reading.pop()

    monkeypatch.setattr(segments.snapshots, "contains", watched)
    monkeypatch.setattr(segments.store, "read", counted)
    assert segments.why(1, "a").in_snapshot
    shutil.rmtree(segments.snapshots.root)
    told = segments.why(1, "a")
    assert (told.state, told.in_snapshot) == ("in", None)


@pytest.mark.spec("SEG-06")
def test_a_worker_that_does_not_see_the_folder_fails_no_segment(segments: Segments, tmp_path: Path) -> None:
    segments.create("a")
    segments.upload("a", [1, 2])
    shutil.move(segments.snapshots.root, tmp_path / "away")
    with pytest.raises(Unavailable, match="is not there"):
        segments.tick()
    assert segments.row("a").stage == "diffing"
    shutil.move(tmp_path / "away", segments.snapshots.root)
    segments.tick_all()
    assert segments.row("a").stage == "done"
