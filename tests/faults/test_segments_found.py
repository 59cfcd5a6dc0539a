"""Bugs of segments that the fault tests have found."""

import os
from pathlib import Path
from typing import Any

import pytest

from keyfold.core.errors import LeaseLost, StoreFull
from keyfold.segments.service import evaluating, uploading
from keyfold.segments.service.snapshots import GRACE_SECONDS, Snapshots
from keyfold.segments.service.uploading import Uploads
from tests.faults.smalldisk import Ballast
from tests.segments import Segments, opened

HOURS_AGO = 2 * GRACE_SECONDS


def _url(directory: Path) -> str:
    return f"sqlite:///{directory / 'keyfold.db'}"


def _in_parts(segments: Segments) -> tuple[Uploads, str]:
    uploads = Uploads(segments.store, segments.snapshots)
    upload_id = uploads.begin("a")
    uploads.put("a", upload_id, 1, [1, 2])
    uploads.put("a", upload_id, 2, [3])
    return uploads, upload_id


@pytest.mark.spec("SEG-02", "SEG-10")
def test_an_upload_finished_long_after_its_last_part_is_not_deleted_before_a_row_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files were old enough to be taken for left behind, in the moment between its name and its row."""
    with opened(_url(tmp_path), tmp_path / "snapshots") as segments:
        segments.create("a")
        uploads, upload_id = _in_parts(segments)
        folder = segments.snapshots.aside("a", upload_id)
        for path in (*folder.iterdir(), folder):
            os.utime(path, (path.stat().st_mtime - HOURS_AGO,) * 2)
        accept = uploading.accept

        def collect_first(*given: Any) -> Any:
            segments.snapshots.collect(segments.store)
            return accept(*given)

        monkeypatch.setattr(uploading, "accept", collect_first)
        uploads.finish("a", upload_id, 2)
        segments.tick_all()
        assert set(segments.stored()) == {"1", "2", "3"}


@pytest.mark.spec("SEG-02")
def test_a_snapshot_that_has_lost_a_file_fails_its_diff_and_is_not_taken_for_a_smaller_one(tmp_path: Path) -> None:
    """As the old snapshot it would leave users in the segment for good, and nobody would know."""
    with opened(_url(tmp_path), tmp_path / "snapshots", remove_share_max=1.0) as segments:
        segments.create("a")
        uploads, upload_id = _in_parts(segments)
        uploads.finish("a", upload_id, 2)
        segments.tick_all()
        next(segments.snapshots.root.glob("a/*/000002.parquet")).unlink()
        segments.upload("a", [1, 2])
        segments.tick_all()
        row = segments.row("a")
        assert (row.stage, row.diff_version) == ("failed", 1)
        assert "2 users that are not the 3 that were applied" in row.reason


@pytest.mark.spec("SEG-10")
def test_an_evaluation_whose_lease_has_passed_is_not_a_failure_of_the_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was marked failed and no longer wanted, while nothing was wrong but the time it took."""
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"user_id": [1, 2]}), tmp_path / "users.parquet")
    tables = {"users": {"url": str(tmp_path / "users.parquet")}}
    with opened(_url(tmp_path), tmp_path / "snapshots", tables=tables) as segments:
        segments.create("a", source_table="users", condition="true")
        segments.store.transact(lambda tx: evaluating.want(tx, "a"))

        def has_passed(_: object) -> None:
            raise LeaseLost("it took too long")

        with monkeypatch.context() as patched:
            patched.setattr(evaluating.Holding, "must_be_held", has_passed)
            with pytest.raises(LeaseLost):
                segments.evaluator.step("w1")
        assert (segments.row("a").stage, segments.row("a").is_evaluation_wanted) == ("evaluation", 1)
        assert segments.evaluator.step("w2")
        assert segments.row("a").stage == "awaiting_diff"


@pytest.mark.spec("SEG-02", "SEG-10")
def test_a_snapshot_that_does_not_fit_is_refused_by_our_own_word_and_leaves_nothing(
    small_disk: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A part was refused by the bare error of the system and stayed by half; a whole one was not told to wait."""
    with opened(_url(tmp_path_factory.mktemp("store")), small_disk / "snapshots") as segments:
        segments.create("a")
        uploads, upload_id = _in_parts(segments)
        there = _files(segments.snapshots)
        ballast = Ballast(small_disk)
        ballast.leave(64 * 1024)
        many = [number * 7919 for number in range(60_000)]
        with pytest.raises(StoreFull):
            segments.upload("a", many)
        with pytest.raises(StoreFull):
            uploads.put("a", upload_id, 3, many)
        assert _files(segments.snapshots) == there
        ballast.free()
        uploads.finish("a", upload_id, 2)
        assert segments.upload("a", many).evaluation_version == 2


def _files(snapshots: Snapshots) -> set[Path]:
    return {path for path in snapshots.root.rglob("*") if path.is_file()}
