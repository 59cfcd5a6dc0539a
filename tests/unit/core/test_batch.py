"""A batch is one row a key, in key order, folded as the rows came."""

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from keyfold.core.store import batch

pytestmark = pytest.mark.spec("CORE-03", "CORE-04")

ROWS = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 3), st.integers(-5, 5), st.integers(0, 9)))


@given(ROWS)
def test_aggregating_equals_folding_one_row_after_another(rows: list[tuple[str, int, int, int]]) -> None:
    columns = (
        dict(zip(("key", "kind", "n", "t"), map(list, zip(*rows, strict=True)), strict=True))
        if rows
        else {"key": [], "kind": [], "n": [], "t": []}
    )
    reference: dict[tuple[str, int], tuple[int, int]] = {}
    for key, kind, n, t in rows:
        before = reference.get((key, kind))
        reference[key, kind] = (n, t) if before is None else (before[0] + n, max(before[1], t))
    result = batch.aggregated(columns, ("key", "kind"), {"n": batch.add, "t": max})
    keys = list(zip(result["key"], result["kind"], strict=True))
    assert keys == sorted(reference)
    assert dict(zip(keys, zip(result["n"], result["t"], strict=True), strict=True)) == reference


@given(ROWS)
def test_a_key_that_stands_twice_is_refused_where_rows_are_not_folded(rows: list[tuple[str, int, int, int]]) -> None:
    columns = {"key": [row[0] for row in rows], "n": [row[2] for row in rows]}
    if len(set(columns["key"])) == len(rows):
        assert batch.in_key_order(columns, ("key",))["key"] == sorted(columns["key"])
    else:
        with pytest.raises(ValueError, match="twice"):
            batch.in_key_order(columns, ("key",))


def test_a_column_without_a_fold_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="no fold for n"):
        batch.aggregated({"key": ["a"], "n": [1]}, ("key",), {})


@given(st.lists(st.one_of(st.none(), st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))))
def test_an_array_is_what_its_items_are_one_by_one(values: list[str | None]) -> None:
    items = ["NULL" if each is None else batch._array_item(sa.Text(), each) for each in values]
    assert batch._array_text(sa.Text(), values) == "{" + ",".join(items) + "}"
