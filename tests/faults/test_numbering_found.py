"""Bugs of numbering that the fault tests have found."""

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from keyfold.bulk import folders
from keyfold.bulk.folders import Draft, FolderUnreachable, Root
from keyfold.core import files
from keyfold.numbering.service import finding, mastering
from keyfold.numbering.service.mastering import StateLost
from tests.faults.numbering_ledger import KEY, current_of
from tests.faults.numbering_masters import keys_of, numbering_at, spoil
from tests.faults.numbering_scenario import GIVEN, TYPE, Numbering
from tests.faults.smalldisk import Ballast


def _url(directory: Path) -> str:
    return f"sqlite:///{directory / 'keyfold.db'}"


def _give_up(numbering: Numbering) -> None:
    mastering.invalidate(
        numbering.context, numbering.settings, TYPE, "operator", why="it is wrong", even_if_readable=True
    )


@pytest.mark.spec("NUM-09")
def test_the_folders_above_a_first_state_are_brought_onto_the_disk_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Power was lost after the pointer had moved, and with the folder of the cluster the state on it was gone."""
    synced: list[Path] = []

    def watch(path: Path) -> None:
        synced.append(path)

    for module in (files, folders):
        monkeypatch.setattr(module, "sync", watch)
    Draft(Root(str(tmp_path / "data" / "x")), "main/1-a", None).publish(b"{}")
    assert {tmp_path, tmp_path / "data", tmp_path / "data/x", tmp_path / "data/x/main"} <= set(synced)


@pytest.mark.spec("NUM-14", "NUM-15")
def test_pruning_leaves_the_state_that_the_pointer_has_returned_to(fast_path: Path) -> None:
    """It had a tombstone from before: its files were deleted under the pointer, and the pruning failed after that."""
    with numbering_at(_url(fast_path), fast_path, states_kept=1, grace_hours=1, is_indexed=False) as numbering:
        for number in range(2):
            numbering.run("x", keys_of(number))
        assert numbering.record()["states"][0]["dropped_at_us"]
        _give_up(numbering)
    with numbering_at(_url(fast_path), fast_path, states_kept=1, grace_hours=0, is_indexed=False) as numbering:
        assert not numbering.prune().failures
        assert not numbering.broken()
        numbering.run("x", keys_of(2))
        assert not numbering.broken()


@pytest.mark.spec("NUM-14")
def test_what_comes_back_of_a_deleted_state_is_deleted_again(fast_path: Path) -> None:
    """After a loss of power a folder was there again that the record had as deleted, and it stayed for good."""
    with numbering_at(_url(fast_path), fast_path, states_kept=1, is_indexed=False) as numbering:
        first = numbering.run("x", keys_of(0))
        numbering.run("x", keys_of(1))
        assert numbering.record()["states"][0]["is_deleted"]
        (fast_path / "y" / first.path / "places").mkdir(parents=True)
        assert numbering.prune().leftovers == 1
        assert not numbering.book.leftovers(numbering.record())


@pytest.mark.spec("NUM-15")
def test_a_broken_copy_is_deleted_only_once_another_was_found_whole(fast_path: Path) -> None:
    """Ours was deleted first; where the other cluster could not be read either, nothing was left to save."""
    with numbering_at(_url(fast_path), fast_path, is_indexed=False) as numbering:
        last = numbering.run("x", GIVEN[0])
        spoil(fast_path / "x" / last.path, "new_docs", "truncated")
        (fast_path / "y").rename(fast_path / "away")
        with pytest.raises(StateLost):
            numbering.run("x", GIVEN[1])
        assert (fast_path / "x" / last.path / "manifest.json").exists()
        (fast_path / "away").rename(fast_path / "y")
        numbering.run("x", GIVEN[1])
        assert not numbering.tidied()


@pytest.mark.spec("NUM-15")
def test_a_copy_that_cannot_be_read_for_now_is_not_deleted(fast_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster that was too slow to be read lost its copy, although nothing was wrong with it."""
    with numbering_at(_url(fast_path), fast_path, is_indexed=False) as numbering:
        last = numbering.run("x", GIVEN[0])
        within = folders.within

        def too_slow(seconds: float, work: Any, what: str) -> Any:
            if what.startswith("reading"):
                raise FolderUnreachable(f"{what} took longer than {seconds:g} seconds")
            return within(seconds, work, what)

        removed: list[str] = []
        with monkeypatch.context() as patched:
            patched.setattr(folders, "within", too_slow)
            patched.setattr(Root, "remove", lambda _, path: removed.append(path))
            numbering.run("x", GIVEN[1])
        assert last.path not in removed
        assert not numbering.broken()


@pytest.mark.spec("NUM-09")
def test_a_disk_that_fails_between_two_files_ends_a_run_by_our_own_word(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was the bare error of the system, and where DuckDB met it, the input was blamed."""
    with numbering_at(_url(fast_path), fast_path, is_indexed=False) as numbering:

        def fail(*_: object) -> None:
            raise OSError(5, os.strerror(5))

        pq.write_table(pa.table(dict(zip(KEY, zip(*GIVEN[0], strict=True), strict=True))), fast_path / "offers.parquet")
        monkeypatch.setattr(Path, "rename", fail)
        with pytest.raises(FolderUnreachable, match=os.strerror(5)):
            numbering.master("x").run(str(fast_path / "offers.parquet"))
        monkeypatch.undo()
        assert not numbering.book.leftovers(numbering.record())


@pytest.mark.spec("NUM-09", "NUM-13")
def test_a_state_was_published_though_there_is_no_room_for_its_index(
    small_disk: Path, fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DuckDB's own error came out of a run that had published."""
    (fast_path / "x").symlink_to(small_disk, target_is_directory=True)
    write = finding._write

    def fill_first(*given: Any) -> None:
        Ballast(small_disk).leave(0)
        write(*given)

    with numbering_at(_url(fast_path), fast_path) as numbering:
        monkeypatch.setattr(finding, "_write", fill_first)
        published = numbering.run("x", GIVEN[0])
        current = current_of(numbering.record())
        assert current
        assert current["checksum"] == published.checksum
        assert not numbering.broken()
