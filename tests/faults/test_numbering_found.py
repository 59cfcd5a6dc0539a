"""Bugs of numbering that the fault tests have found."""

from pathlib import Path

import pytest

from keyfold.bulk import folders
from keyfold.bulk.folders import Draft, Root
from keyfold.core import files
from keyfold.numbering.service import mastering
from tests.faults.numbering_scenario import TYPE, Numbering


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
