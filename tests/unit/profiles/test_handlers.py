"""Handlers: what a user's module may say, and what is refused at once."""

from pathlib import Path

import pytest

from keyfold.core.errors import SettingsWrong
from keyfold.counters.errors import CounterReadOnly, CounterUnknown, UpdateRefused, ValueWrong
from keyfold.counters.keys import owner_of
from keyfold.profiles import Event, Updates, handler
from keyfold.profiles.handlers import Writable, load
from tests.profiles import OFFER, catalog

pytestmark = pytest.mark.spec("PRO-01")


@pytest.fixture
def updates() -> Updates:
    return Updates(Writable(catalog(), "order", "user"))


def test_one_key_many_keys_and_many_values_with_and_without_an_owner(updates: Updates) -> None:
    updates.one(OFFER, 1)
    updates.one("CI_OFFER_INTEREST_COUNT", 2, 2.5, owner="Shop.Example.")
    updates.many(OFFER, [3, 4])
    updates.many(OFFER, (5, 6), 0.5, owner=77)
    updates.many(OFFER, [7, 8], [1.5, -2])
    shop = owner_of("shop.example")
    assert [(key, value, owner) for _, key, value, owner in updates.rows] == [
        (1, 1, 0),
        (2, 2.5, shop),
        (3, 1, 0),
        (4, 1, 0),
        (5, 0.5, 77),
        (6, 0.5, 77),
        (7, 1.5, 0),
        (8, -2, 0),
    ]


@pytest.mark.spec("PRO-03", "PRO-04", "CNT-03")
def test_what_cannot_be_kept_is_refused_where_it_is_said(updates: Updates) -> None:
    for key in (-1, 2**64, "1", 1.0, True, None):
        with pytest.raises(ValueWrong):
            updates.one(OFFER, key)  # type: ignore[arg-type]
    for value in (float("nan"), float("inf"), 1e31, 10**400, "1", None):
        with pytest.raises(ValueWrong):
            updates.one(OFFER, 1, value)  # type: ignore[arg-type]
    with pytest.raises(ValueWrong, match="2 keys and 3 values"):
        updates.many(OFFER, [1, 2], [1, 2, 3])
    with pytest.raises(ValueWrong, match="whole numbers"):
        updates.one(602, 1, 0.5)
    with pytest.raises(CounterUnknown):
        updates.one("CI_NONE", 1)
    with pytest.raises(CounterReadOnly):
        updates.one(603, 1)
    with pytest.raises(UpdateRefused, match="does not accept the log order, only redir"):
        updates.one(539, 1)
    with pytest.raises(UpdateRefused, match="belongs to profiles of type banner, not user"):
        updates.one(700, 1)
    for owner in ("", " ", 0, -1, 2**64, 1.5, True):
        with pytest.raises((ValueWrong, UpdateRefused)):
            updates.one(OFFER, 1, owner=owner)  # type: ignore[arg-type]
    with pytest.raises(UpdateRefused, match="has no MaxDelayedRecords"):
        Updates(Writable(catalog(), "redir", "user")).one(539, 1, owner="a.example")
    assert updates.rows == []


def test_a_missing_field_of_an_event_is_named() -> None:
    event = Event("e", 1, {"a": 5})
    assert (event["a"], event.get("b"), event.get("b", 7)) == (5, None, 7)
    with pytest.raises(UpdateRefused, match="no field 'b'"):
        event["b"]


def test_a_function_may_be_registered_for_several_logs_and_types(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "from keyfold.profiles import handler\n"
        "@handler('a')\n@handler('b', 'banner', profile_id='banner_id')\ndef both(event, updates): pass\n"
        "alias = both\n"
    )
    found = load(str(file))
    assert found.logs == ["a", "b"]
    assert [(each.profile_type, each.id_field) for each in found.by_log["b"]] == [("banner", "banner_id")]
    assert len(found.by_log["a"]) == 1
    assert load("").logs == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1", "there are no handlers"),
        ("import nowhere", "ModuleNotFoundError"),
        ("def (", "SyntaxError"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        *[
            (f"from keyfold.profiles import handler\n@handler('a')\n{own}", "own is called and not awaited")
            for own in (
                "async def own(event, updates): pass",
                "def own(event, updates): yield",
                "async def own(event, updates): yield",
            )
        ],
    ],
)
def test_a_module_that_cannot_be_used_is_said_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "own.py"
    file.write_text(text)
    with pytest.raises(SettingsWrong, match=said):
        load(str(file))
    with pytest.raises(SettingsWrong, match="No module named"):
        load("no.such.module")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("@handler\ndef other(event, updates): pass", r'as text: @handler\("visit"\)'),
        ("@handler(['a', 'b'])\ndef other(event, updates): pass", "as text"),
        ("@handler('')\ndef other(event, updates): pass", "as text"),
        ("@handler('b')\ndef own(event, updates): pass", "nothing would call own of line 3"),
        ("own = None", "nothing would call own of line 3"),
        ("class Own:\n    @handler('b')\n    def other(event, updates): pass", "nothing would call other of line 6"),
    ],
)
def test_no_handler_is_lost_without_a_word(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "own.py"
    file.write_text(f"from keyfold.profiles import handler\n\n@handler('a')\ndef own(event, updates): pass\n{text}\n")
    with pytest.raises(SettingsWrong, match=said):
        load(str(file))


def test_a_module_may_hold_objects_that_have_every_attribute(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "from unittest.mock import MagicMock\nfrom keyfold.profiles import handler\nanything = MagicMock()\n"
        "@handler('a')\ndef own(event, updates): pass\n"
    )
    assert load(str(file)).logs == ["a"]


def test_the_decorator_leaves_the_function_as_it_is() -> None:
    @handler("a")
    def own(event: Event, updates: Updates) -> None:
        updates.one(OFFER, event["key"])

    made = Updates(Writable(catalog(), "order", "user"))
    own(Event("e", 1, {"key": 9}), made)
    assert made.rows[0][1] == 9
