"""The rules of order statistics, pure."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyfold.orders.model import DataItem, Property, View

pytestmark = pytest.mark.spec("ORD-03")

NAMES = ("tariff", "brand", "payment")
VALUES = st.sampled_from(["a", "b", "unknown"])
# Of slices made before a dimension was added, it is missing, which is the same as unknown.
SLICES = st.dictionaries(st.integers(0, 9), st.dictionaries(st.sampled_from(NAMES), VALUES), min_size=10, max_size=10)
CELLS = st.lists(st.tuples(st.integers(0, 9), st.integers(-1, 5)), max_size=20)
FILTERS = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=2)
GROUPS = st.lists(st.sampled_from(NAMES), unique=True)


@given(SLICES, st.lists(CELLS, min_size=1, max_size=4), FILTERS, GROUPS)
def test_a_view_groups_the_cells_of_every_identity_as_a_plain_count_would(
    slices: dict[int, dict[str, str]],
    identities: list[list[tuple[int, int]]],
    filters: dict[str, str],
    group_by: list[str],
) -> None:
    """One view for all of them: what it has found out about a slice is used for the next."""
    view = View([Property(*each) for each in filters.items()], group_by)
    for cells in identities:
        expected: Counter[tuple[str, ...]] = Counter()
        for slice_id, count in cells:
            values = {name: slices[slice_id].get(name, "unknown") for name in NAMES}
            if all(values[name] == value for name, value in filters.items()):
                expected[tuple(values[name] for name in group_by)] += count
        assert view.grouped(cells, slices) == [
            DataItem([Property(*each) for each in zip(group_by, group, strict=True)], expected[group])
            for group in sorted(expected)
            if expected[group]
        ]
