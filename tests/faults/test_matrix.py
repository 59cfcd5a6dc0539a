"""The table of faults and the tests that inflict them are the same."""

from pathlib import Path

import pytest

from tests.faults.matrix import FAULTS, PARTS, cells


def test_every_fault_of_the_table_is_inflicted_on_every_part_by_some_test(request: pytest.FixtureRequest) -> None:
    """Each of those tests fails where its fault never strikes, so no cell of the matrix can stay empty."""
    here = Path(__file__).parent
    modules = {item.path for item in request.session.items if item.path.parent == here}
    if modules != set(here.glob("test_*.py")) or request.config.option.keyword:
        pytest.skip("only a part of the fault tests was collected")
    declared = {cell for item in request.session.items for cell in cells(item)}
    missing = {(fault, part) for fault, parts in FAULTS.items() for part in parts} - declared
    assert not missing
    assert {part for _, part in declared} == set(PARTS)
