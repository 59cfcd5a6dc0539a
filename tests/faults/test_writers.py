"""Writers that meet on one key lose no update, and sorted batches do not wait for each other in a circle."""

from collections.abc import Iterator

import pytest

from keyfold.core.context import Context
from tests.faults import writers
from tests.faults.effort import effort
from tests.faults.matrix import Hit

pytestmark = pytest.mark.spec("CORE-04")


@pytest.fixture
def product(store_url: str) -> Iterator[Context]:
    with writers.opened(store_url) as context:
        yield context


@pytest.mark.fault("many writers of one key", "ground", "tally")
def test_nine_in_ten_additions_to_one_key_give_right_sums_and_every_change_is_published(
    product: Context, hit: Hit
) -> None:
    hot = writers.hot_key(product, transactions=effort(30, 2_000))
    assert not hot.broken
    hit("tally", hot.additions)
    hit("ground", hot.published)


def test_batches_with_the_same_keys_in_other_orders_never_lose_a_race(product: Context) -> None:
    """Every batch is sorted before it is written, so all writers take the rows in one order."""
    broken, tried_again = writers.crossing(product, transactions=effort(15, 1_000))
    assert not broken
    assert tried_again == 0


@pytest.mark.spec("CORE-22")
def test_of_writers_that_have_seen_the_same_version_one_replaces_it(product: Context) -> None:
    assert not writers.replacing(product, times=effort(8, 500))


@pytest.mark.spec("CORE-06")
def test_what_commits_late_with_a_lower_id_is_published_all_the_same(postgres_url: str) -> None:
    with writers.opened(postgres_url) as context:
        assert not writers.late_commit(context)
