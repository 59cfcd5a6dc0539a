"""What orders add to their cells, against a count one by one."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyfold.orders.model import CompletedOrder, Order, micros
from keyfold.orders.service.counting import _cells

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
ORDERS = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.integers(0, 2),
        st.dictionaries(st.sampled_from([1, 2, 70]), st.sampled_from(["a", "ab", "b", "é", "日"]), min_size=1),
    ),
    min_size=1,
    max_size=40,
)


@pytest.mark.spec("ORD-05")
@given(ORDERS)
def test_each_cell_stands_once_in_key_order_with_its_count_its_first_and_its_last_moment(
    given: list[tuple[int, int, dict[int, str]]],
) -> None:
    sent = CompletedOrder("o", EPOCH, {}, {})
    found = _cells([Order("o", created, identities, slice_, sent) for created, slice_, identities in given])
    moments: dict[tuple[int, str, int], list[int]] = {}
    for created, slice_, identities in given:
        for type_id, value in identities.items():
            moments.setdefault((type_id, value, slice_), []).append(created)
    expected = [(*key, len(each), min(each), max(each)) for key, each in sorted(moments.items())]
    assert list(zip(*found.values(), strict=True)) == expected
    assert list(found)[:3] == ["identity_type", "identity_value", "slice_id"]


@pytest.mark.spec("ORD-05")
@given(st.datetimes(timezones=st.just(UTC)))
def test_a_moment_in_microseconds_is_exact(moment: datetime) -> None:
    assert micros(moment) == (moment - EPOCH) // timedelta(microseconds=1)
