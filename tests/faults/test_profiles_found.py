"""Bugs of profiles that the harnesses found, each as the smallest run that shows it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from keyfold.counters.model import decayed
from keyfold.profiles.service.explaining import explain
from tests.profiles import DAY, NOW, OFFER, Profiles, event, opened

EXACT = 602


@pytest.mark.spec("PRO-04", "CORE-02")
def test_an_update_that_is_released_after_the_clock_went_back_is_not_lost(tmp_path: Path) -> None:
    """It was accepted when its time lay behind now; X1 does not ask what the clock says later."""
    with opened(f"sqlite:///{tmp_path / 'keyfold.db'}") as profiles:
        assert profiles.statuses(event("a", 1, [OFFER, 5, 1, "a.example"])) == ["counted"]
        profiles.clock.advance(-2 * DAY)
        assert profiles.statuses(event("b", 1, [OFFER, 5, 1, "b.example"], time=NOW - 2 * DAY)) == ["counted"]
        assert profiles.values(1) == {5: pytest.approx(1 + decayed(1.0, 0.5, 2 * DAY))}


@pytest.mark.spec("PRO-04", "PRO-06")
def test_what_waits_is_found_for_its_whole_period_also_where_the_clock_went_back_meanwhile(tmp_path: Path) -> None:
    with opened(f"sqlite:///{tmp_path / 'keyfold.db'}") as profiles:
        profiles.count(event("a", 1, [OFFER, 5, 1, "a.example"]))
        profiles.clock.advance(-DAY / 2)
        profiles.count(event("other", 1, [OFFER, 6, 1, "a.example"], time=NOW - DAY // 2))
        profiles.clock.advance(5 * DAY + 3600)  # half a day less an hour is left of its five days
        profiles.count(event("b", 1, [OFFER, 5, 1, "b.example"]))
        assert profiles.values(1) == {5: 2.0}


@pytest.mark.spec("PRO-02")
def test_the_repeat_of_an_event_that_is_refused_in_the_same_batch_is_not_called_a_duplicate(tmp_path: Path) -> None:
    with opened(f"sqlite:///{tmp_path / 'keyfold.db'}") as profiles:
        profiles.count(event("full", 1, [EXACT, 5, 2**64 - 1]), log="order")
        one = event("one more", 1, [EXACT, 5, 1])
        assert profiles.statuses(one, one, {**one, "said": "otherwise"}, log="order") == ["refused"] * 3


@pytest.fixture
def revived(tmp_path: Path) -> Iterator[Profiles]:
    """Two owners wait at key 5: the first was past its period when the second came, and no longer is."""
    with opened(f"sqlite:///{tmp_path / 'keyfold.db'}", merge_days=2) as profiles:
        profiles.count(event("a", 1, [OFFER, 5, 1, "a.example"]))
        profiles.clock.advance(6 * DAY)
        profiles.count(event("b", 1, [OFFER, 5, 1, "b.example"]))
        profiles.clock.advance(-2 * DAY)
        assert profiles.values(1) == {}
        yield profiles


@pytest.mark.spec("PRO-04", "PRO-06")
@pytest.mark.parametrize("owner", [None, "a.example"])
def test_whatever_comes_releases_those_that_wait_once_the_clock_went_back_and_they_confirm_each_other(
    revived: Profiles, owner: str | None
) -> None:
    """Also what is itself too far from both, owned or not."""
    revived.count(event("far", 1, [EXACT, 5, 1, owner], time=NOW - 3 * DAY), log="order")
    assert revived.values(1) == {5: 2.0}
    waiting = revived.context.store.read(lambda tx: explain(tx, revived.product, ("user", "1")))
    assert [each.event_id for each in waiting] == (["far"] if owner else [])


@pytest.mark.spec("PRO-02", "PRO-04")
def test_an_event_that_is_refused_releases_nothing_either(revived: Profiles) -> None:
    revived.count(event("full", 1, [EXACT, 6, 2**64 - 1]), log="order")
    assert revived.statuses(event("one more", 1, [OFFER, 5, 1], [EXACT, 6, 1]), log="order") == ["refused"]
    assert 5 not in revived.values(1)
