"""What handlers ask for: an event counts whole or not at all, and is known by its runs of updates."""

import pytest

from keyfold.profiles.handlers import Event, Handler, Updates, Writable
from keyfold.profiles.model import UPDATES_MAX, Asked, ask
from tests.profiles import OFFER, catalog

pytestmark = pytest.mark.spec("PRO-01")


def count(event: Event, updates: Updates) -> None:
    updates.many(OFFER, event["keys"])


def count_other(event: Event, updates: Updates) -> None:
    if str(event.get("other")).startswith("broken"):
        raise RuntimeError(event["other"])
    updates.many(OFFER, event.get("other", ()))


def asked(*fields: dict[str, object]) -> tuple[Asked, dict[tuple[str, str], str]]:
    writable = Writable(catalog(), "order", "user")
    own = [Handler("order", "user", "profile_id", count), Handler("order", "user", "second", count_other)]
    log_events = [("order", Event(f"e{number}", 5, each)) for number, each in enumerate(fields)]
    return ask({"order": [(each, writable) for each in own]}, log_events, range(len(log_events)))


def rows(found: Asked) -> list[tuple[str, str, int, int]]:
    return [(row.event_id, row.profile[1], row.key, row.number) for row in found.rows()]


def test_updates_are_numbered_within_their_event_whichever_handler_asked() -> None:
    found, refused = asked({"profile_id": "a", "keys": [1, 2], "second": "b", "other": [3]}, {"keys": []})
    assert rows(found) == [("e0", "a", 1, 0), ("e0", "a", 2, 1), ("e0", "b", 3, 2)]
    assert found.refused == set()
    assert refused == {}


def test_what_was_asked_for_before_a_handler_failed_is_gone() -> None:
    found, refused = asked(
        {"profile_id": "a", "keys": [1], "other": "broken"},
        {"profile_id": "b", "keys": [2]},
        {"profile_id": "", "keys": [3]},
        {"profile_id": "c", "keys": range(UPDATES_MAX + 1)},
        {"profile_id": "a", "keys": [4]},
        {"profile_id": "a", "keys": [5], "other": "broken \ud83d"},
    )
    assert rows(found) == [("e1", "b", 2, 0), ("e4", "a", 4, 0)]
    assert [name for _, name in refused] == ["e0", "e2", "e3", "e5"]
    assert refused["order", "e0"] == "the handler count_other failed: RuntimeError: broken"
    assert "an id must be" in refused["order", "e2"]
    assert "are allowed" in refused["order", "e3"]
    assert refused["order", "e5"] == "the handler count_other failed: RuntimeError: broken ?", "what an answer can say"


def test_a_number_names_the_profile_of_the_same_text_and_a_truth_value_none() -> None:
    found, refused = asked(
        {"profile_id": "1", "keys": [1]}, {"profile_id": 1, "keys": [2]}, {"profile_id": True, "keys": [3]}
    )
    assert found.profiles == [("user", "1")]
    assert found.profile == [0, 0]
    assert [name for _, name in refused] == ["e2"]


def test_without_some_events_the_runs_of_the_others_stay_theirs() -> None:
    found, _ = asked(
        {"profile_id": "a", "keys": [1], "second": "b", "other": [2]},
        {"profile_id": "b", "keys": []},
        {"profile_id": "b", "keys": [3, 4]},
    )
    left = found.without({("order", "e0")})
    assert rows(left) == [("e2", "b", 3, 0), ("e2", "b", 4, 1)]
    assert left.refused == {0}
    assert rows(found)[0] == ("e0", "a", 1, 0)
