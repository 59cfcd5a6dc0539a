"""Profiles on every store: each event once, owned data held back and released, merged reads, sweeps, exports."""

import asyncio
import math
import threading
from collections.abc import Iterator
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from keyfold.core import deadletters
from keyfold.core.access import ANYONE
from keyfold.core.errors import Conflict, SettingsWrong, StoreBusy, TooLarge
from keyfold.core.gather import Ask, Gatherer, Operation
from keyfold.core.metrics import REGISTRY
from keyfold.core.replay import Start, set_back
from keyfold.core.store import Transaction
from keyfold.core.times import iso
from keyfold.core.topics.topic import Record
from keyfold.core.workers import consumer_named
from keyfold.counters.errors import CatalogWrong
from keyfold.counters.keys import owner_of
from keyfold.counters.messages_pb2 import Profile
from keyfold.counters.model import decayed
from keyfold.profiles.answers import as_json, as_protobuf, as_structs
from keyfold.profiles.routes import ReadBody, routes
from keyfold.profiles.service import folding, reading, sweeping
from keyfold.profiles.service.explaining import explain
from keyfold.profiles.service.exporting import export
from keyfold.profiles.service.holding import several_owners
from keyfold.profiles.service.reading import read_numbers, read_profiles, view_of
from keyfold.profiles.service.segments import apply_segments
from keyfold.profiles.service.storing import Stored
from keyfold.profiles.service.weighing import Weighing
from keyfold.profiles.settings import ClientView
from keyfold.profiles.tables import EVENT_MARKS, HELD_UPDATES, KEY_FREQUENCIES, PROFILE_TOTALS, PROFILES
from keyfold.profiles.worker import Sweep
from tests.product import message, put, read_all
from tests.profiles import DAY, EXAMPLE, NOW, OFFER, OFFER_TIME, PUBLIC, UNRESTRICTED, Profiles, event, opened

EXACT = 602  # an exact sum beside OFFER


@pytest.fixture
def profiles(store_url: str) -> Iterator[Profiles]:
    with opened(store_url) as product:
        yield product


def answered(profiles: Profiles, *ids: int) -> bytes:
    """One person, as the endpoint answers."""
    (operation,) = (each.run for each in routes(profiles.context) if each.path == "/v1/profiles")
    assert isinstance(operation, Operation)
    body = msgspec.convert({"profiles": [{"ids": [{"type": "user", "id": each} for each in ids]}]}, ReadBody)
    gatherer = Gatherer(profiles.context.store, profiles.context.limits)
    try:
        return asyncio.run(gatherer.ask(operation, Ask(client=ANYONE, body=body))).body
    finally:
        gatherer.close()


def rows_of(profiles: Profiles, table: sa.Table) -> int:
    return profiles.context.store.read(
        lambda tx: tx.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
    )


def published(profiles: Profiles) -> list[Profile]:
    profiles.relay("profiles")
    records = [record for each in read_all(profiles.context, "profiles").values() for record in each]
    assert all(record.message.version == Profile.FromString(record.message.payload).version for record in records)
    return [Profile.FromString(record.message.payload) for record in records]


def rows_fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each statement has fetched since."""
    fetched: list[int] = []
    rows_of_driver = Transaction.rows

    def rows(tx: Transaction, *statement: Any) -> list[tuple[Any, ...]]:
        found = rows_of_driver(tx, *statement)
        fetched.append(len(found))
        return found

    monkeypatch.setattr(Transaction, "rows", rows)
    return fetched


def calls_of(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """The calls since of what `folding` knows by a name."""
    calls: list[int] = []
    known = getattr(folding, name)

    def called(*given: Any) -> Any:
        calls.append(len(calls))
        return known(*given)

    monkeypatch.setattr(folding, name, called)
    return calls


def swept(sweep: Sweep | Weighing) -> None:
    """Step until nothing is left."""
    while sweep.step():
        pass


# Events, each once ---------------------------------------------------------------------------------------------------


@pytest.mark.spec("PRO-01", "PRO-02")
def test_an_event_counts_once_whatever_way_it_is_repeated(profiles: Profiles) -> None:
    one = event("e1", 7, [OFFER, 1, 2.5])
    assert profiles.statuses(one, one, event("e1", 7, [OFFER, 1, 9])) == ["counted", "duplicate", "conflict"]
    assert profiles.statuses(one, event("e2", "7", [OFFER, 1])) == ["duplicate", "counted"]
    profiles.send("visit", one, event("e2", "7", [OFFER, 1]), event("e3", 7, [OFFER, 1]))
    assert profiles.values(7) == {1: 4.5}
    assert profiles.statuses({**one, "time": NOW - 1}) == ["conflict"], "another time is another content"
    assert profiles.statuses(one, log="order") == ["counted"], "ids are those of a log"


@pytest.mark.spec("PRO-02")
def test_an_event_older_than_the_window_is_late_and_a_mark_outlives_its_event_s_chance(store_url: str) -> None:
    with opened(store_url, event_days=7) as profiles:
        sweep = Sweep(profiles.context, profiles.product)
        assert profiles.statuses(event("old", 1, [OFFER, 1], time=NOW - 7 * DAY)) == ["counted"]
        swept(sweep)
        edge = (NOW // DAY - 7) * DAY
        assert profiles.statuses(event("edge", 1, [OFFER, 1], time=edge)) == ["counted"]
        assert profiles.statuses(event("older", 1, [OFFER, 1], time=edge - 1)) == ["late"]
        profiles.clock.advance(DAY)
        swept(sweep)
        assert profiles.statuses(event("edge", 1, [OFFER, 1], time=edge)) == ["duplicate"], "its mark is still there"
        assert profiles.statuses(event("other", 1, [OFFER, 1], time=edge)) == ["late"]
        assert rows_of(profiles, EVENT_MARKS) == 2, "marks are kept a day longer than events are taken"
        profiles.clock.advance(DAY)
        swept(sweep)
        assert rows_of(profiles, EVENT_MARKS) == 0
        profiles.clock.advance(-3 * DAY)
        swept(sweep)
        assert profiles.statuses(event("edge", 1, [OFFER, 1], time=edge)) == ["late"], (
            "a clock that jumps back opens nothing"
        )
        assert profiles.values(1) == {1: pytest.approx(1 + decayed(1.0, 0.5, NOW - 7 * DAY - edge))}


@pytest.mark.spec("PRO-01", "PRO-02", "PRO-03")
def test_what_cannot_be_counted_is_refused_whole_and_stops_no_other(profiles: Profiles) -> None:
    verdicts = profiles.count(
        event("raises", 1, **{"raise": True}),
        event("half", 1, [OFFER, 1], [OFFER, -1]),
        event("unknown", 1, ["CI_NONE", 1]),
        event("other log", 1, [539, 1]),
        event("other type", 1, [700, 1]),
        event("time counter", 1, [OFFER_TIME, 1]),
        event("future", 1, [OFFER, 1], time=NOW + DAY + 1),
        event("negative time", 1, [OFFER, 1], time=-5),
        event("nan", 1, [OFFER, 1, float("nan")]),
        event("infinite", 1, [OFFER, 1, float("inf")]),
        event("no id", None, [OFFER, 1]),
        event("good", 1, [OFFER, 1]),
    )
    assert [verdict.status for verdict in verdicts] == ["refused"] * 11 + ["counted"]
    reasons = {verdict.event_id: verdict.reason for verdict in verdicts}
    assert "the handler count failed: RuntimeError: a mistake in a handler" in reasons["raises"]
    assert "does not accept the log visit, only redir" in reasons["other log"]
    assert "86401 seconds ahead of now, 86400 are allowed" in reasons["future"]
    assert profiles.values(1) == {1: 1.0}
    assert rows_of(profiles, EVENT_MARKS) == 1, "a refused event may come again when the cause is mended"


@pytest.mark.spec("PRO-02")
def test_poison_of_a_topic_is_set_aside_with_its_reason_and_can_be_driven_again(profiles: Profiles) -> None:
    profiles.send("visit", event("bad", 1, [OFFER, -3]), event("good", 1, [OFFER, 1]))
    put(profiles.context, "visit-log", [message("x", 1, b"not json")])
    profiles.relay("visit-log")
    profiles.consume("profiles-visit")
    letters = profiles.context.store.read(lambda tx: deadletters.listed(tx))
    assert sorted(letter.reason.split(":")[0] for letter in letters) == ["DecodeError", "refused"]
    assert profiles.values(1) == {1: 1.0}
    consumer = consumer_named(profiles.context, "profiles-visit")
    again = deadletters.redrive(profiles.context.store, consumer.name, consumer.topic, consumer.apply, ordered=False)
    assert (again.applied, len(again.failed)) == (0, 2)


@pytest.mark.spec("CORE-09", "PRO-02")
def test_poison_whose_reason_quotes_what_no_store_takes_stops_no_redrive(profiles: Profiles) -> None:
    profiles.send("visit", event("bad", 1, **{"raise": "a\0b"}), event("good", 1, [OFFER, -3]))
    consumer = consumer_named(profiles.context, "profiles-visit")
    again = deadletters.redrive(profiles.context.store, consumer.name, consumer.topic, consumer.apply, ordered=False)
    assert (again.applied, len(again.failed)) == (0, 2)
    letters = profiles.context.store.read(lambda tx: deadletters.listed(tx))
    assert [letter.tries for letter in letters] == [2, 2]
    assert "a mistake in a handler: a�b" in letters[0].reason


@pytest.mark.spec("CORE-09", "PRO-02")
def test_a_log_is_read_again_also_where_some_of_it_is_set_aside(profiles: Profiles) -> None:
    """Nothing waits behind such an event; counted at last, it is a repeat to whoever drives it again."""
    profiles.send("visit", {"event_id": "no time"}, event("ahead", 1, [OFFER, 5], time=NOW + 2 * DAY))
    profiles.clock.advance(2 * DAY)
    consumer = consumer_named(profiles.context, "profiles-visit")
    set_back(profiles.context, consumer, Start(position=0), actor="ann")
    profiles.consume(consumer.name)
    assert profiles.values(1) == {5: 1.0}
    again = deadletters.redrive(profiles.context.store, consumer.name, consumer.topic, consumer.apply, ordered=False)
    assert (again.applied, len(again.failed)) == (1, 1)
    assert profiles.values(1) == {5: 1.0}


@pytest.mark.spec("PRO-02")
def test_a_log_counted_by_position_needs_no_marks_and_cannot_be_set_back(store_url: str) -> None:
    with opened(store_url, by_position=["visit"]) as profiles:
        profiles.send("visit", *[event(f"e{n}", n % 3, [OFFER, 1]) for n in range(30)])
        assert profiles.values(0) == profiles.values(2) == {1: 10.0}
        assert rows_of(profiles, EVENT_MARKS) == 0
        assert not consumer_named(profiles.context, "profiles-visit").replayable
        assert consumer_named(profiles.context, "profiles-redir").replayable


@pytest.mark.spec("PRO-03")
def test_several_logs_feed_one_type_and_one_log_feeds_several(profiles: Profiles) -> None:
    profiles.count(event("a", 1, [539, 5], banner_id=90, page=3), log="redir")
    profiles.count(event("b", 1, [OFFER, 5]), log="visit")
    profiles.count(event("c", 1, [OFFER, 5]), log="order")
    assert profiles.values(1, counter=539) == {5: 1.0}
    assert profiles.values(1) == {5: 2.0}
    assert profiles.values(90, counter=700, profile_type="banner") == {3: 1.0}


# Ownership -----------------------------------------------------------------------------------------------------------

A, B, C = "a.example", "b.example", "c.example"
MERGE = 180 * DAY


@pytest.mark.spec("PRO-04", "PRO-05")
def test_owned_data_is_public_only_when_a_second_source_confirms_it(profiles: Profiles) -> None:
    profiles.count(event("1", 1, [OFFER, 5, 2.0, A], time=NOW - DAY), event("2", 1, [OFFER, 6, 1.0, A]))
    profiles.count(event("3", 1, [OFFER, 5, 4.0, A], time=NOW - 2 * DAY))
    assert profiles.read(1).version == 0
    assert profiles.values(1) == {}
    profiles.count(event("4", 1, [OFFER, 5, 1.0, B]))
    expected = 1.0 + decayed(2.0, 0.5, DAY) + decayed(4.0, 0.5, 2 * DAY)
    assert profiles.values(1) == {5: pytest.approx(expected)}
    assert profiles.values(1, counter=OFFER_TIME) == {5: NOW}
    assert rows_of(profiles, HELD_UPDATES) == 1
    profiles.count(event("5", 1, [OFFER, 6]))
    assert profiles.values(1)[6] == 2.0
    assert rows_of(profiles, HELD_UPDATES) == 0
    profiles.count(event("6", 1, [OFFER, 6, 1.0, A]))
    assert profiles.values(1)[6] == 3.0, "a public key releases at once"


@pytest.mark.spec("PRO-04")
def test_sources_must_be_strictly_closer_than_the_merge_period(store_url: str) -> None:
    with opened(store_url, merge_days=10, event_days=3650) as profiles:
        profiles.count(event("1", 1, [OFFER, 5, 1, A], time=NOW - 10 * DAY), event("2", 1, [OFFER, 5, 1, B]))
        assert profiles.values(1) == {}
        profiles.count(event("3", 2, [OFFER, 5, 1, A], time=NOW - 10 * DAY + 1), event("4", 2, [OFFER, 5, 1, B]))
        assert len(profiles.values(2)) == 1
        profiles.count(event("5", 3, [OFFER, 5, 1, A], time=NOW - 10 * DAY), event("6", 3, [OFFER, 5]))
        assert profiles.values(3) == {5: 1.0}, "the public key is too far away"


@pytest.mark.spec("PRO-04")
def test_siblings_under_one_time_counter_confirm_each_other(profiles: Profiles) -> None:
    profiles.count(event("1", 1, [OFFER, 5, 1, A]), event("2", 1, [EXACT, 5, 7, B]), log="order")
    assert profiles.values(1) == {5: 1.0}
    assert profiles.values(1, counter=EXACT) == {5: 7}


@pytest.mark.spec("PRO-04")
def test_owned_data_that_cannot_be_held_back_is_refused_and_never_public(profiles: Profiles) -> None:
    (verdict,) = profiles.count(event("1", 1, [OFFER, 5], [PUBLIC, 5, 1, A]), log="visit")
    assert verdict.status == "refused"
    (verdict,) = profiles.count(event("1", 1, [539, 5, 1, A]), log="redir")
    assert (verdict.status, "MaxDelayedRecords" in verdict.reason) == ("refused", True)
    (verdict,) = profiles.count(event("2", 1, [OFFER, 5, 1, ""]))
    assert verdict.status == "refused", "an empty owner is a mistake, not the lack of one"
    assert profiles.values(1) == {}


def everything_seen(profiles: Profiles, tmp_path: Path) -> list[bytes]:
    """All that the world sees: answers in both forms, what was published, what is exported, how many are weighed."""
    seen: list[bytes] = []
    for at_now in (False, True):
        view = view_of(profiles.product, UNRESTRICTED, None, at_now=at_now)
        for ids in ((1,), (2,), (3,), (1, 1), (1, 4)):
            read = profiles.read(*ids, view=view)
            seen += [msgspec.json.encode(as_structs([read], view)), as_protobuf([read], view)]
            at_once = view_of(profiles.product, UNRESTRICTED, None, at_now=at_now, as_json=True)
            seen.append(as_json([profiles.read(*ids, view=at_once)], at_once))
            assert seen[-1] == seen[-3]
    seen += sorted(each.SerializeToString() for each in published(profiles))
    import pyarrow.parquet as parquet

    export(profiles.context.store, profiles.product, tmp_path / "all.parquet", report=lambda _: None)
    seen += parquet.read_table(tmp_path / "all.parquet")["profile"].to_pylist()
    Weighing(profiles.context, profiles.product).step()
    totals = profiles.context.store.read(lambda tx: tx.execute(sa.select(PROFILE_TOTALS.c.profiles)).scalars().all())
    return [*seen, msgspec.json.encode(totals)]


PUBLIC_EVENTS = [event("p1", 1, [OFFER, 1, 2.0]), event("p2", 3, [OFFER, 9])]
OWNED_EVENTS = [
    event("h1", 1, [OFFER, 5, 1, A]),
    event("h2", 2, [OFFER, 6, 1, A]),
    *[event(f"h3{key}", 3, [OFFER, key + 100, 1, B]) for key in range(50)],
]


@pytest.mark.spec("PRO-05", "PRO-13")
def test_held_back_data_shows_in_no_answer_no_message_and_no_export(profiles: Profiles, tmp_path: Path) -> None:
    profiles.count(*PUBLIC_EVENTS)
    before = everything_seen(profiles, tmp_path)
    profiles.count(*OWNED_EVENTS)
    assert rows_of(profiles, HELD_UPDATES) == len(OWNED_EVENTS)
    assert everything_seen(profiles, tmp_path) == before


@pytest.mark.spec("PRO-05")
def test_a_store_with_held_back_data_and_one_without_answer_alike_byte_for_byte(tmp_path: Path) -> None:
    seen = []
    for name, owned in (("plain", []), ("held", OWNED_EVENTS)):
        with opened(f"sqlite:///{tmp_path / name}.db") as profiles:
            for each in [*owned[:25], *PUBLIC_EVENTS, *owned[25:]]:
                profiles.count(each)
            assert rows_of(profiles, HELD_UPDATES) == len(owned)
            seen.append(everything_seen(profiles, tmp_path))
    assert seen[0] == seen[1]


@pytest.mark.spec("PRO-05", "CNT-07")
def test_a_sweep_tells_nothing_of_what_waits_byte_for_byte(tmp_path: Path) -> None:
    seen = []
    for name, waiting in (("plain", False), ("held", True)):
        with opened(f"sqlite:///{tmp_path / name}.db", event_days=3650) as profiles:
            profiles.count(*PUBLIC_EVENTS)
            profiles.clock.advance(60 * DAY + 1)
            if waiting:
                profiles.count(*[{**each, "time": NOW + 60 * DAY} for each in OWNED_EVENTS])
            before = everything_seen(profiles, tmp_path)
            swept(Sweep(profiles.context, profiles.product))
            profiles.clock.advance(2 * DAY)
            between = everything_seen(profiles, tmp_path)
            profiles.count(event("p3", 1, [OFFER, 1], time=NOW + 62 * DAY))
            assert rows_of(profiles, HELD_UPDATES) == waiting * len(OWNED_EVENTS)
            seen.append((before, between, everything_seen(profiles, tmp_path)))
    assert seen[0] == seen[1]
    assert len(set(map(tuple, seen[0]))) == 3, "there was something to see each time"


@pytest.mark.spec("PRO-05", "PRO-13", "CNT-07")
def test_the_public_part_of_a_profile_goes_as_if_nothing_of_it_waited(profiles: Profiles) -> None:
    later = NOW + 60 * DAY
    profiles.count(event("1", 1, [OFFER, 5]), event("2", 2, [OFFER, 5]))
    profiles.clock.advance(60 * DAY + 1)
    profiles.count(event("3", 1, [OFFER, 6, 1, A], time=later))
    swept(Sweep(profiles.context, profiles.product))
    assert [profiles.read(each).version for each in (1, 2)] == [0, 0]
    profiles.count(event("4", 1, [OFFER, 7], time=later), event("5", 2, [OFFER, 7], time=later))
    told = [(each.id, each.version, len(each.packed_counters)) for each in published(profiles)]
    assert sorted(told) == [(each, *rest) for each in ("1", "2") for rest in ((1, 1), (2, 0), (3, 1))]
    profiles.count(event("6", 1, [OFFER, 6, 1, B], time=later))
    assert profiles.values(1) == {6: 2.0, 7: 1.0}, "what waited is still there for a second source"


@pytest.mark.spec("PRO-05", "CNT-07")
def test_a_profile_of_which_something_only_waited_leaves_no_row_behind(profiles: Profiles) -> None:
    profiles.count(event("1", 1, [OFFER, 5]))
    profiles.clock.advance(60 * DAY + 1)
    profiles.count(event("2", 1, [OFFER, 6, 1, A], time=NOW + 60 * DAY))
    swept(Sweep(profiles.context, profiles.product))
    assert rows_of(profiles, PROFILES) == 1
    profiles.clock.advance(5 * DAY + 1)
    swept(Sweep(profiles.context, profiles.product))
    assert [rows_of(profiles, table) for table in (PROFILES, HELD_UPDATES)] == [0, 0]
    assert len(published(profiles)) == 2, "it was told once that it is gone"


@pytest.mark.spec("PRO-06")
def test_held_back_data_is_deleted_after_its_period_and_has_no_effect_from_that_moment_on(profiles: Profiles) -> None:
    profiles.count(event("1", 1, [OFFER, 5, 1, A]), event("2", 2, [OFFER, 5, 1, A]))
    profiles.clock.advance(5 * DAY - 1)
    profiles.count(event("3", 1, [OFFER, 5, 1, B]))
    assert len(profiles.values(1)) == 1
    profiles.clock.advance(1)
    profiles.count(event("4", 2, [OFFER, 5, 1, B]))
    assert profiles.values(2) == {}, "not swept, and yet not there"
    swept(Sweep(profiles.context, profiles.product))
    assert rows_of(profiles, HELD_UPDATES) == 1
    assert profiles.context.store.read(lambda tx: explain(tx, profiles.product, ("user", "2")))[0].event_id == "4"


@pytest.mark.spec("PRO-04", "PRO-06")
def test_what_waits_is_judged_by_the_period_that_is_set_today(store_url: str) -> None:
    with opened(store_url, delete_days=5) as profiles:
        profiles.count(
            event("1", 1, [OFFER, 5, 1, A]), event("2", 2, [OFFER, 5, 1, A]), event("3", 3, [OFFER, 5, 1, A])
        )
    later = NOW + 10 * DAY
    with opened(store_url, delete_days=30) as profiles:
        profiles.clock.advance(10 * DAY)
        swept(Sweep(profiles.context, profiles.product))
        profiles.count(event("4", 1, [OFFER, 5, 1, B], time=later), event("5", 2, [OFFER, 5], time=later))
        released = {5: pytest.approx(1 + decayed(1.0, 0.5, 10 * DAY))}
        assert [profiles.values(1), profiles.values(2)] == [released, released]
        assert rows_of(profiles, HELD_UPDATES) == 1
    with opened(store_url, delete_days=5) as profiles:
        profiles.clock.advance(10 * DAY)
        profiles.count(event("6", 3, [OFFER, 5, 1, B], time=later))
        assert profiles.values(3) == {}


@pytest.mark.spec("PRO-06", "PRO-07", "PRO-10")
def test_past_its_period_an_update_waits_for_nobody_though_others_of_its_profile_still_wait(profiles: Profiles) -> None:
    profiles.count(event("old", 1, [OFFER, 5, 1, A]))
    profiles.clock.advance(3 * DAY)
    profiles.count(event("young", 1, [OFFER, 6, 1, A]), event("other", 2, [OFFER, 5, 1, B]))
    assert profiles.values(1, 2) == {5: 2.0}
    profiles.clock.advance(2 * DAY)
    assert profiles.values(1, 2) == {}, "nor in a merge, swept or not"
    held = profiles.context.store.read(lambda tx: explain(tx, profiles.product, ("user", "1")))
    assert [each.event_id for each in held] == ["young"]
    profiles.count(event("late", 1, [OFFER, 5, 1, B]))
    assert profiles.values(1) == {}


@pytest.mark.spec("PRO-06")
def test_above_the_cap_the_smallest_by_time_key_and_event_go(profiles: Profiles) -> None:
    profiles.count(*[event(f"e{n:03}", 1, [OFFER, 1000 + n, 1, A], time=NOW - n // 2) for n in range(604)])
    assert rows_of(profiles, HELD_UPDATES) == 600
    held = profiles.context.store.read(lambda tx: explain(tx, profiles.product, ("user", "1")))
    gone = {f"e{n:03}" for n in range(604)} - {each.event_id for each in held}
    assert gone == {"e600", "e601", "e602", "e603"}


@pytest.mark.spec("PRO-06", "CORE-16")
def test_what_waits_is_fetched_only_where_there_is_too_much_of_it(
    profiles: Profiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in range(5):
        full = 600 if each == 0 else 300
        profiles.count(*[event(f"w{each}-{n}", each, [OFFER, 1000 + n, 1, A]) for n in range(full)])
    fetched = rows_fetched(monkeypatch)
    profiles.count(*[event(f"n{each}", each, [OFFER, 9, 1, A], time=NOW + 1) for each in range(5)])
    assert sum(fetched) < 700, "of the one profile that has more than 600"
    assert rows_of(profiles, HELD_UPDATES) == 600 + 4 * 301
    held = profiles.context.store.read(lambda tx: explain(tx, profiles.product, ("user", "0")))
    assert {f"w0-{n}" for n in range(600)} - {each.event_id for each in held} == {"w0-0"}


@pytest.mark.spec("PRO-10")
def test_an_administrator_is_told_what_is_held_back_and_what_it_waits_for(profiles: Profiles) -> None:
    profiles.count(event("1", 1, [OFFER, 5, 2.5, A], time=NOW - 60), event("2", 1, [EXACT, 6, 7, B]), log="order")
    first, second = profiles.context.store.read(lambda tx: explain(tx, profiles.product, ("user", "1")))
    assert (first.counter, first.key, first.value, first.time) == ("CI_OFFER_INTEREST_COUNT", 5, 2.5, NOW - 60)
    assert first.owner == f"{owner_of(A):016x}"
    assert first.held_since_us == NOW * 1_000_000
    assert first.held_until_us == (NOW + 5 * DAY) * 1_000_000
    moments = [iso((NOW - 60 + sign * (180 * DAY - 1)) * 1_000_000) for sign in (-1, 1)]
    assert first.waits_for.endswith(f"of another owner, between {moments[0]} and {moments[1]}")
    assert (second.value, second.log) == (7, "order")
    only = profiles.context.store.read(lambda tx: explain(tx, profiles.product, ("user", "1"), EXACT, 6))
    assert [each.event_id for each in only] == ["2"]


@pytest.mark.spec("PRO-10")
def test_what_waits_is_told_though_the_public_part_of_its_profile_is_broken(profiles: Profiles) -> None:
    profiles.count(event("a", 1, [630, 1], [OFFER, 5, 1, A]), log="order")
    broken = Profile()
    pack = broken.packed_counters.add(counter_ids=[630], keys=[1, 1])
    pack.values.add().fixed64_values.value.extend([1, 2])
    for body in (broken.SerializeToString(), b"\x1a\x05\x0a\x03abc"):
        profiles.context.store.transact(lambda tx, b=body: tx.execute(sa.update(PROFILES).values(body=b)))
        (held,) = profiles.context.store.read(lambda tx: explain(tx, profiles.product, ("user", "1")))
        assert held.event_id == "a"
        assert "of another owner" in held.waits_for
        assert "the public part of the profile cannot be read" in held.waits_for


# Reading -------------------------------------------------------------------------------------------------------------


@pytest.mark.spec("PRO-07")
def test_the_ids_of_one_person_are_merged_and_nothing_is_written(profiles: Profiles) -> None:
    profiles.count(event("1", 1, [OFFER, 5, 2.0], time=NOW - DAY), event("2", 2, [OFFER, 5, 1.0]))
    profiles.count(event("3", 1, [OFFER, 7, 1.0, A], time=NOW - DAY), event("4", 2, [OFFER, 7, 3.0, B]))
    before = rows_of(profiles, HELD_UPDATES), profiles.read(1).version
    merged = profiles.values(1, 2)
    assert merged == {5: pytest.approx(1 + decayed(2.0, 0.5, DAY)), 7: pytest.approx(3 + decayed(1.0, 0.5, DAY))}
    assert profiles.values(1, 2, counter=OFFER_TIME) == {5: NOW, 7: NOW}
    assert profiles.values(1) == {5: 2.0}, "alone, what is held back stays so"
    assert (rows_of(profiles, HELD_UPDATES), profiles.read(1).version) == before


@pytest.mark.spec("PRO-07", "PRO-04")
def test_a_merged_answer_is_the_same_whatever_the_order_of_the_ids(store_url: str) -> None:
    with opened(store_url, merge_days=2) as profiles:
        times = {1: NOW - 4 * DAY + 100, 2: NOW - 2 * DAY + 50, 3: NOW}
        for each, owner in ((1, A), (2, B), (3, A)):
            profiles.count(event(f"e{each}", each, [OFFER, 5, 1, owner], time=times[each]))
        everything = sum(decayed(1.0, 0.5, NOW - time) for time in times.values())
        for ids in permutations(times):
            assert profiles.values(*ids) == {5: pytest.approx(everything)}, "the second confirms both others"


@pytest.mark.spec("PRO-07", "PRO-04", "CNT-08")
def test_what_owners_release_in_a_merge_confirms_nothing_more_once_it_has_expired(store_url: str) -> None:
    with opened(store_url, merge_days=10, event_days=3650) as profiles:
        expired, latest = NOW - 61 * DAY, NOW - 55 * DAY
        apart = [("b", 1, B, expired - 8 * DAY), ("a", 2, A, expired), ("alone", 3, A, latest)]
        profiles.count(*[event(each, one, [OFFER, 5, 1, owner], time=time) for each, one, owner, time in apart])
        profiles.count(*[event(f"{each}4", 4, [OFFER, 5, 1, owner], time=time) for each, _, owner, time in apart])
        assert profiles.values(1, 2, 3) == profiles.values(4) == {}, "as where one profile has all three"
        profiles.clock.advance(-2 * DAY)
        assert profiles.values(1, 2, 3).keys() == {5}, "while the key of the first two is live, it is a source"


@pytest.mark.spec("PRO-07", "CNT-16")
def test_an_id_that_is_named_twice_is_one_profile(profiles: Profiles) -> None:
    not_glued = next(c.id for c in profiles.product.catalog.counters.values() if c.not_glued and not c.no_operation)
    log = profiles.product.catalog[not_glued].input_types[0]
    profiles.count(event("1", 1, [OFFER, 5, 2.0], [OFFER, 6, 1, A]), event("2", 2, [OFFER, 5], [OFFER, 6, 1, B]))
    profiles.count(event("3", 1, [not_glued, 5]), log=log)
    view = view_of(profiles.product, UNRESTRICTED, [OFFER])
    for ids, found in (((1, 1), {5: 2.0}), ((1, 2, 1, 2), {5: 3.0, 6: 2.0})):
        assert profiles.values(*ids) == found
        assert profiles.read(*ids) == profiles.read(*dict.fromkeys(ids))
        people = [[("user", str(each)) for each in ids]]
        numbers, _ = profiles.context.store.read(lambda tx, p=people: read_numbers(tx, profiles.product, p, view))
        assert dict(zip(numbers.key.tolist(), numbers.value.tolist(), strict=True)) == found
    assert profiles.values(1, 1, counter=not_glued) == {5: 1.0}, "as of a single id"


@pytest.mark.spec("PRO-07", "CNT-16")
def test_what_owners_release_of_a_not_glued_counter_is_not_in_a_merge(store_url: str, tmp_path: Path) -> None:
    exactly = '    Description: "orders of an offer, exactly"\n'
    changed = with_changed_catalog(tmp_path, "not_glued", exactly, exactly + "    NotGlued: true\n")
    with opened(store_url, catalog=changed) as profiles:
        assert profiles.product.catalog[EXACT].not_glued
        for each, owner in ((1, A), (2, B)):
            profiles.count(event(f"e{each}", each, [OFFER, 5, 1, owner], [EXACT, 5, 7, owner]), log="order")
        assert profiles.values(1, 2) == {5: 2.0}
        assert profiles.values(1, 2, counter=EXACT) == {}


@pytest.mark.spec("PRO-07")
def test_a_hundred_ids_merge_within_the_caps(profiles: Profiles) -> None:
    events = [event(f"{n}-{k}", n, [OFFER, n * 10 + k], time=NOW - n * 60 - k) for n in range(100) for k in range(3)]
    profiles.count(*events)
    merged = profiles.values(*range(100))
    assert len(merged) == 30
    assert set(merged) == {n * 10 + k for n in range(10) for k in range(3)}, "the newest of all"


@pytest.mark.spec("PRO-07", "CNT-16")
def test_not_glued_counters_are_answered_for_a_single_id_only(profiles: Profiles) -> None:
    not_glued = next(c.id for c in profiles.product.catalog.counters.values() if c.not_glued and not c.no_operation)
    log = profiles.product.catalog[not_glued].input_types[0]
    profiles.count(event("1", 1, [not_glued, 5]), event("2", 2, [not_glued, 5]), log=log)
    assert profiles.values(1, counter=not_glued) == {5: 1.0}
    assert profiles.values(1, 2, counter=not_glued) == {}


@pytest.mark.spec("PRO-07", "CNT-08")
def test_values_are_as_of_the_key_s_time_or_decayed_to_now_and_expire_unswept(profiles: Profiles) -> None:
    profiles.count(event("1", 1, [OFFER, 5, 4.0]))
    profiles.clock.advance(7 * DAY)
    assert profiles.values(1) == {5: 4.0}
    view = view_of(profiles.product, UNRESTRICTED, [OFFER], at_now=True)
    assert profiles.read(1, view=view).packs[0].rows[0][1] == [pytest.approx(decayed(4.0, 0.5, 7 * DAY))]
    profiles.clock.advance(53 * DAY)
    assert profiles.values(1) == {5: 4.0}
    profiles.clock.advance(1)
    assert profiles.values(1) == profiles.values(1, 2) == {}


@pytest.mark.spec("PRO-08", "PRO-09")
def test_a_client_receives_what_its_configuration_and_grants_name(profiles: Profiles) -> None:
    profiles.count(event("1", 1, [539, 5]), log="redir")
    profiles.count(event("2", 1, [OFFER, 5]))
    plain = view_of(profiles.product, ClientView(), None)
    assert {left.counter_id for left in plain.left_out} == {539, 540}
    assert [pack.counter_ids for pack in profiles.read(1, view=plain).packs] == [[OFFER, OFFER_TIME]]
    granted = view_of(profiles.product, UNRESTRICTED, [539])
    assert [pack.counter_ids for pack in profiles.read(1, view=granted).packs] == [[539]]
    by_both = view_of(profiles.product, ClientView(), [539, profiles.product.catalog[539].name])
    assert [left.counter_id for left in by_both.left_out] == [539]
    narrow = view_of(profiles.product, ClientView(counters=[OFFER]), [OFFER, 539, OFFER_TIME])
    assert {left.counter_id: left.reason for left in narrow.left_out} == {
        539: "needs a grant for UR_METRIKA_OWNED",
        OFFER_TIME: "not among the counters of this client",
    }
    assert [pack.counter_ids for pack in profiles.read(1, view=narrow).packs] == [[OFFER]]
    none = view_of(profiles.product, ClientView(keywords=("segments",)), None)
    assert profiles.read(1, view=none).packs == []


@pytest.mark.spec("CNT-11", "PRO-08")
def test_a_legacy_client_gets_the_older_form_and_everyone_else_packs(profiles: Profiles) -> None:
    profiles.count(event("1", 1, [OFFER, 5], [EXACT, 6]), log="order")
    view = view_of(profiles.product, ClientView(legacy=True), None)
    read = profiles.read(1, view=view)
    answer = as_structs([read], view).profiles[0]
    assert answer.packed_counters == []
    assert [(each.counter_id, list(each.keys)) for each in answer.counters] == [
        (OFFER, [5, 6]),
        (EXACT, [5, 6]),
        (OFFER_TIME, [5, 6]),
    ]
    from keyfold.counters.messages_pb2 import Profiles as ProfilesMessage

    message = ProfilesMessage.FromString(as_protobuf([read], view)).profiles[0]
    assert [each.counter_id for each in message.counters] == [OFFER, EXACT, OFFER_TIME]
    assert not message.packed_counters


@pytest.mark.spec("CNT-16")
def test_rare_keys_weigh_more_by_how_many_profiles_have_them(profiles: Profiles) -> None:
    idf = next(c for c in profiles.product.catalog.counters.values() if c.idf)
    events = [event(f"{n}", n, [idf.id, 1], *([[idf.id, 2]] if n == 0 else [])) for n in range(9)]
    profiles.count(*events, log=idf.input_types[0])
    weighing = Weighing(profiles.context, profiles.product)
    assert not weighing.step()
    view = view_of(profiles.product, UNRESTRICTED, [idf.id], weighted=True)
    ((_, values),) = profiles.read(0, view=view).packs[0].rows
    assert values == [pytest.approx(math.log(10 / 10)), pytest.approx(math.log(10 / 2))]
    assert not weighing.step(), "not due again"


@pytest.mark.spec("CNT-16")
def test_weights_that_could_not_be_stored_are_stored_at_the_next_step_and_count_nobody_twice(
    profiles: Profiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    idf = next(c for c in profiles.product.catalog.counters.values() if c.idf)
    profiles.count(*[event(f"{n}", n, [idf.id, 1]) for n in range(9)], log=idf.input_types[0])
    weighing = Weighing(profiles.context, profiles.product)

    def busy(*_: object, **__: object) -> None:
        raise StoreBusy("another writes")

    with monkeypatch.context() as patched:
        patched.setattr(profiles.context.store, "transact", busy)
        with pytest.raises(StoreBusy):
            weighing.step()
    assert not weighing.step()

    def counted(tx: Transaction) -> list[int]:
        totals = tx.execute(sa.select(PROFILE_TOTALS.c.profiles)).scalars()
        return [*totals, *tx.execute(sa.select(KEY_FREQUENCIES.c.profiles)).scalars()]

    assert profiles.context.store.read(counted) == [9, 9]
    profiles.clock.advance(DAY)
    assert not weighing.step()
    assert profiles.context.store.read(counted) == [9, 9], "the next walk begins anew"


def take_segments(profiles: Profiles, version: int, *names: str) -> None:
    """A set of user 1, as often as it is delivered."""
    entries = [{"segment_id": name, "evaluation_version": version} for name in names]
    record = Record(0, 0, message("1", version, msgspec.json.encode({"segments": entries})))
    profiles.context.store.transact(lambda tx: apply_segments(tx, profiles.product, [record]))


@pytest.mark.spec("CNT-08", "PRO-13")
def test_a_change_of_segments_publishes_no_key_that_has_expired(profiles: Profiles) -> None:
    profiles.count(event("1", 1, [OFFER, 5], [630, 7]), event("2", 1, [OFFER, 6], time=NOW - DAY), log="order")
    profiles.clock.advance(60 * DAY)
    take_segments(profiles, 5, "a")
    profiles.clock.advance(1)
    take_segments(profiles, 6, "a")
    kept = [sorted(key for pack in each.packed_counters for key in pack.keys) for each in published(profiles)]
    assert kept == [[5, 6, 7], [5, 7], [7]]
    assert [sorted(pack.keys) for pack in profiles.read(1).packs] == [[7]]


@pytest.mark.spec("PRO-11")
def test_a_set_of_segments_that_was_left_does_not_come_back_after_a_sweep(profiles: Profiles) -> None:
    take_segments(profiles, 5, "a")
    take_segments(profiles, 6)
    swept(Sweep(profiles.context, profiles.product))
    assert [each.version for each in published(profiles)] == [1, 2, 3], "it is gone, and that was told"
    take_segments(profiles, 5, "a")
    assert (profiles.read(1).segments, profiles.read(1).version) == ([], 0)
    swept(Sweep(profiles.context, profiles.product))
    take_segments(profiles, 7, "b")
    assert (profiles.read(1).segments, profiles.read(1).version) == ([("b", 7)], 4)


@pytest.mark.spec("PRO-11", "CNT-07")
def test_a_sweep_does_not_load_profiles_that_have_segments(profiles: Profiles, monkeypatch: pytest.MonkeyPatch) -> None:
    take_segments(profiles, 5, "a")
    profiles.count(event("2", 2, [OFFER, 5]))
    profiles.clock.advance(60 * DAY + 1)
    load_for_writing, locked = sweeping.loaded, list[Any]()

    def loaded(tx: Transaction, product: Any, keys: Any, *, items: int) -> Any:
        locked.extend(keys)
        return load_for_writing(tx, product, keys, items=items)

    monkeypatch.setattr(sweeping, "loaded", loaded)
    swept(Sweep(profiles.context, profiles.product))
    assert locked == [("user", "2")]
    assert profiles.read(1).segments == [("a", 5)]
    take_segments(profiles, 6)
    swept(Sweep(profiles.context, profiles.product))
    assert locked == [("user", "2"), ("user", "1")], "without segments it goes"


def take_segments_by_topic(profiles: Profiles, version: int, *names: str) -> None:
    entries = [{"segment_id": name, "evaluation_version": version} for name in names]
    put(profiles.context, "cdp-segments-log", [message("1", version, msgspec.json.encode({"segments": entries}))])
    profiles.relay("cdp-segments-log")
    profiles.consume("profiles-segments")


@pytest.mark.spec("PRO-11")
def test_segment_sets_are_taken_whole_by_version_and_bounded(profiles: Profiles) -> None:
    sent = partial(take_segments_by_topic, profiles)
    sent(3, "x", "y")
    profiles.count(event("1", 1, [OFFER, 5]))
    sent(2, "old")
    assert profiles.read(1).segments == [("x", 3), ("y", 3)]
    assert profiles.read(1).version == 2
    sent(4, *[f"s{n}" for n in range(600)])
    assert [name for name, _ in profiles.read(1).segments] == [f"s{n}" for n in range(100, 600)]
    sent(5)
    assert profiles.read(1).segments == []
    assert [len(each.segments) for each in published(profiles)] == [2, 2, 500, 0]


@pytest.mark.spec("PRO-11", "CORE-09")
def test_a_set_of_segments_that_cannot_be_read_keeps_no_newer_one_waiting(profiles: Profiles) -> None:
    put(profiles.context, "cdp-segments-log", [message("1", 3, b"not json")])
    profiles.relay("cdp-segments-log")
    profiles.consume("profiles-segments")
    take_segments_by_topic(profiles, 4, "x")
    assert profiles.read(1).segments == [("x", 4)], "it is whole: nothing of the one before is needed"
    letters = profiles.context.store.read(lambda tx: deadletters.listed(tx))
    assert [(letter.version, letter.state) for letter in letters] == [(3, deadletters.DEAD)]


@pytest.mark.spec("PRO-12")
def test_a_full_profile_refuses_what_does_not_fit_and_goes_on_with_the_rest(store_url: str) -> None:
    with opened(store_url, profile_bytes_max=1000) as profiles:
        lone = 630  # a counter without a time counter: nothing of it expires
        events = [event(f"e{n}", 1, [lone, 2**63 + n], time=NOW) for n in range(100)]
        log = profiles.product.catalog[lone].input_types[0]
        verdicts = profiles.count(*events, event("other", 2, [lone, 1]), log=log)
        counted = [verdict.status for verdict in verdicts].count("counted")
        assert 30 < counted < 100
        assert verdicts[-1].status == "counted"
        assert "the profile is full" in verdicts[counted].reason
        assert [verdict.status for verdict in verdicts[: counted - 1]] == ["counted"] * (counted - 1)
        assert profiles.statuses(event("again", 1, [lone, 2**63]), log=log) == ["counted"], "a key it has still counts"


@pytest.mark.spec("PRO-12")
def test_a_full_profile_refuses_nobody_for_what_their_neighbours_ask(store_url: str) -> None:
    with opened(store_url, profile_bytes_max=1000) as profiles:
        lone = 630
        profiles.count(event("first", 1, *[[lone, 2**63 + n] for n in range(50)]), log="order")
        large = event("large", 1, *[[lone, 2**62 + n] for n in range(20)])
        known = [event(f"k{n}", 1, [lone, 2**63 + n]) for n in range(3)]
        assert profiles.statuses(known[0], large, known[1], event("small", 1, [lone, 7]), known[2], log="order") == [
            "counted",
            "refused",
            "counted",
            "counted",
            "counted",
        ]
        fill = [event(f"f{n}", 1, [lone, 2**63 + 100 + n]) for n in range(300)]
        statuses = profiles.statuses(*fill, event("again", 1, [lone, 7]), log="order")
        assert statuses[-1] == "counted", "behind more than are looked at one by one, too"
        assert statuses[:-1] == sorted(statuses[:-1]), "the first that fit are in"
        assert profiles.values(1, counter=lone)[7] == 2


@pytest.mark.spec("PRO-12")
def test_ids_are_text_or_64_bit_numbers_of_any_type(profiles: Profiles) -> None:
    for number, each in enumerate((2**64 - 1, -(2**63), "профиль", "a/b c")):
        profiles.count(event(f"e{number}", each, [OFFER, 1]))
        assert profiles.values(each) == {1: 1.0}
    assert profiles.statuses(event("x", 2**64, [OFFER, 1]), event("y", "", [OFFER, 1])) == ["refused"] * 2


@pytest.mark.spec("PRO-13")
def test_every_change_is_published_whole_with_a_growing_version(profiles: Profiles) -> None:
    profiles.count(event("1", 1, [OFFER, 5]))
    profiles.count(event("2", 1, [OFFER, 5]), event("3", 1, [PUBLIC, 5]), log="order")
    profiles.count(event("1", 1, [OFFER, 5]))
    first, second = published(profiles)
    assert (first.type, first.id, first.version, second.version) == ("user", "1", 1, 2)
    packs = {tuple(pack.counter_ids): pack for pack in second.packed_counters}
    assert packs[OFFER, OFFER_TIME].values[0].float_values.value[0] == 2.0


# Concurrency, ageing, change of catalog ------------------------------------------------------------------------------


def in_parallel(*works: Any) -> None:
    failures: list[BaseException] = []

    def run(work: Any) -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


@pytest.mark.spec("PRO-02", "CORE-04")
def test_two_workers_on_one_profile_lose_nothing_and_count_nothing_twice(profiles: Profiles) -> None:
    shared = [event(f"s{n}", n % 4, [OFFER, n % 3], [EXACT, 1, 2]) for n in range(40)]

    def work(name: str) -> None:
        for n in range(40):
            profiles.count(shared[n], event(f"{name}{n}", n % 4, [OFFER, 9], [EXACT, 1, 1]), log="order")

    in_parallel(lambda: work("a"), lambda: work("b"))
    for profile in range(4):
        assert profiles.values(profile, counter=EXACT)[1] == 10 * 2 + 20
        assert profiles.values(profile)[9] == 20.0
    assert [each.version for each in published(profiles) if each.id == "0"] == list(
        range(1, profiles.read(0).version + 1)
    )


@pytest.mark.spec("PRO-04", "CORE-04")
def test_two_owners_that_come_at_once_still_release_each_other(profiles: Profiles) -> None:
    for n in range(15):
        in_parallel(
            lambda n=n: profiles.count(event(f"a{n}", n, [OFFER, 5, 1, A])),
            lambda n=n: profiles.count(event(f"b{n}", n, [OFFER, 5, 1, B])),
        )
    assert [profiles.values(n) for n in range(15)] == [{5: 2.0}] * 15
    assert rows_of(profiles, HELD_UPDATES) == 0


@pytest.mark.spec("CORE-02")
def test_a_transaction_that_fails_late_leaves_nothing(profiles: Profiles) -> None:
    from keyfold.profiles.model import event_of
    from keyfold.profiles.service.counting import count_events

    def work(tx: Transaction) -> None:
        count_events(
            tx, profiles.product, [("visit", event_of(event("1", 1, [OFFER, 5], [OFFER, 6, 1, A])))], marked=True
        )
        raise Conflict("at the very end")

    with pytest.raises(Conflict):
        profiles.context.store.transact(work)
    assert [rows_of(profiles, table) for table in (PROFILES, HELD_UPDATES, EVENT_MARKS)] == [0, 0, 0]
    assert published(profiles) == []


@pytest.mark.spec("CNT-07", "PRO-13")
def test_a_profile_that_expired_whole_is_deleted_and_comes_back_above_its_version(profiles: Profiles) -> None:
    profiles.count(event("1", 1, [OFFER, 5]), event("2", 2, [OFFER, 5]))
    profiles.count(event("3", 1, [OFFER, 5]))
    profiles.clock.advance(60 * DAY)
    profiles.count(event("4", 2, [OFFER, 6], time=NOW + 60 * DAY))
    profiles.clock.advance(1)
    swept(Sweep(profiles.context, profiles.product))
    assert rows_of(profiles, PROFILES) == 1
    assert profiles.values(2) == {6: 1.0}
    profiles.count(event("5", 1, [OFFER, 7], time=NOW + 60 * DAY))
    versions = [(each.id, each.version, len(each.packed_counters)) for each in published(profiles) if each.id == "1"]
    assert versions == [("1", 1, 1), ("1", 2, 1), ("1", 3, 0), ("1", 4, 1)]


def moved(name: str, **labels: str) -> float:
    """A metric as it stands; of a counter that was never told, 0."""
    return REGISTRY.get_sample_value(f"keyfold_{name}_total", labels) or 0.0


@pytest.mark.spec("CNT-18")
def test_what_expires_with_its_whole_profile_is_on_the_eviction_bill(profiles: Profiles) -> None:
    lost = {"counter": "CI_OFFER_INTEREST_COUNT", "to": "ExpireDays"}
    before = moved("counter_lost_weight", **lost)
    profiles.count(event("1", 1, [OFFER, 5, 3.0]), event("2", 2, [OFFER, 5, 4.0]))
    profiles.clock.advance(60 * DAY + 1)
    swept(Sweep(profiles.context, profiles.product))
    weight = decayed(7.0, 0.5, 60 * DAY + 1)
    assert moved("counter_lost_weight", **lost) - before == pytest.approx(weight)
    profiles.count(event("3", 1, [OFFER, 5], time=NOW + 60 * DAY))
    swept(Sweep(profiles.context, profiles.product))
    assert moved("counter_lost_weight", **lost) - before == pytest.approx(weight), "once"


@pytest.mark.spec("CORE-17", "CNT-18", "PRO-06")
def test_the_metrics_move_with_what_waits_goes_and_is_lost(profiles: Profiles) -> None:
    interest = {"counter": "CI_OFFER_INTEREST_COUNT"}

    def told() -> list[float]:
        names = ("held_updates", "held_updates_released", "held_updates_pushed_out", "held_updates_deleted")
        lost = [moved("counter_lost_weight", **interest, to=each) for each in ("MaxRecords", "ExpireDays")]
        return [*map(moved, names), moved("profiles_expired"), *lost]

    def since(before: list[float]) -> list[float]:
        return [round(after - each, 6) for after, each in zip(told(), before, strict=True)]

    start = told()
    profiles.count(event("1", 1, [OFFER, 5, 1, A]), event("2", 1, [OFFER, 5, 1, B]), event("3", 2, [OFFER, 5, 1, A]))
    assert since(start) == [1, 2, 0, 0, 0, 0, 0], "the first two confirm each other, the third waits"
    start = told()
    profiles.count(*[event(f"p{n:03}", 3, [OFFER, 1_000 + n, 1, A], time=NOW - 1) for n in range(601)])
    assert since(start) == [601, 0, 1, 0, 0, 0, 0]
    start = told()
    profiles.count(event("many", 4, *[[OFFER, key] for key in range(32)]))
    assert since(start) == [0, 0, 0, 0, 0, 2, 0], "two above MaxRecords"
    start = told()
    profiles.clock.advance(5 * DAY)
    swept(Sweep(profiles.context, profiles.product))
    assert since(start) == [0, 0, 0, 601, 0, 0, 0]
    start = told()
    profiles.clock.advance(60 * DAY)
    profiles.count(event("again", 4, [OFFER, 99], time=NOW + 65 * DAY))
    assert since(start)[-1] == pytest.approx(decayed(30.0, 0.5, 65 * DAY), abs=1e-6), "by a count"
    start = told()
    swept(Sweep(profiles.context, profiles.product))
    assert since(start) == [0, 0, 0, 0, 1, 0, pytest.approx(decayed(2.0, 0.5, 65 * DAY), abs=1e-6)], "by the sweep"


@pytest.mark.spec("CNT-07")
def test_a_profile_that_waits_for_a_second_source_is_not_swept(profiles: Profiles) -> None:
    profiles.count(event("1", 1, [OFFER, 5, 1, A]))
    swept(Sweep(profiles.context, profiles.product))
    profiles.count(event("2", 1, [OFFER, 5, 1, B]))
    assert profiles.values(1) == {5: 2.0}
    step = profiles.context.store.transact(lambda tx: sweeping.delete_expired(tx, profiles.product, ("", ""), 1))
    assert step == sweeping.Step(("user", "1"), 0)


@pytest.mark.spec("CNT-03", "CNT-19")
def test_a_catalog_that_changes_the_kind_of_a_counter_is_refused_before_anything_is_counted(
    store_url: str, tmp_path: Path
) -> None:
    with opened(store_url) as profiles:
        profiles.count(event("1", 1, [OFFER, 5]))
    text = EXAMPLE.read_text()
    start = text.index("CI_OFFER_INTEREST_COUNT = 600")
    changed = text[:start] + text[start:].replace("VF_FLOAT", "VF_DOUBLE", 1)
    (tmp_path / "changed.proto").write_text(changed)
    with (
        pytest.raises(CatalogWrong, match="counter 600 was float here, now it is double"),
        opened(store_url, catalog=str(tmp_path / "changed.proto")),
    ):
        pass


@pytest.mark.spec("CNT-13", "CNT-19")
def test_a_counter_that_left_the_catalog_is_not_answered_and_not_destroyed(store_url: str, tmp_path: Path) -> None:
    with opened(store_url) as profiles:
        profiles.count(event("1", 1, [OFFER, 5], [EXACT, 5, 3]), log="order")
    text = EXAMPLE.read_text()
    start, end = text.index("CI_OFFER_ORDERS_EXACT = 602"), text.index("CI_OFFER_INTEREST_TIME = 603")
    (tmp_path / "less.proto").write_text(text[:start] + text[end:])
    with opened(store_url, catalog=str(tmp_path / "less.proto")) as profiles:
        profiles.count(event("2", 1, [OFFER, 6]))
        assert profiles.values(1) == {5: 1.0, 6: 1.0}
        assert EXACT not in [each for pack in profiles.read(1).packs for each in pack.counter_ids]
    with opened(store_url) as profiles:
        assert profiles.values(1, counter=EXACT)[5] == 3


# What a review found --------------------------------------------------------------------------------------------------


def with_changed_catalog(tmp_path: Path, name: str, old: str, new: str) -> str:
    """A catalog beside the example, with one change."""
    text = EXAMPLE.read_text()
    assert old in text
    (tmp_path / f"{name}.proto").write_text(text.replace(old, new))
    return str(tmp_path / f"{name}.proto")


def without_counter(tmp_path: Path, name: str, following: str) -> str:
    """The example without one counter: everything from its name to the next one's."""
    text = EXAMPLE.read_text()
    start, end = text.index(f"  {name} = "), text.index(f"  {following} = ")
    (tmp_path / "without.proto").write_text(text[:start] + text[end:])
    return str(tmp_path / "without.proto")


@pytest.mark.spec("PRO-02")
def test_a_repeat_of_a_refused_event_in_one_batch_is_refused_too(profiles: Profiles) -> None:
    large = 2**64 - 1
    profiles.count(event("first", 1, [EXACT, 1, large]), log="order")
    one = event("o1", 1, [EXACT, 1, 1])
    first, repeat, other = profiles.count(one, one, event("o1", 1, [EXACT, 2, 1]), log="order")
    assert [first.status, repeat.status, other.status] == ["refused"] * 3
    assert "would leave 64 bits" in first.reason
    assert repeat.reason == first.reason
    assert other.reason == "this id came twice at once with different content, and the first was refused; send it again"
    assert profiles.statuses(event("o1", 1, [EXACT, 2, 1]), log="order") == ["counted"], "it may come again, mended"


@pytest.mark.spec("PRO-02")
def test_what_was_judged_by_itself_is_not_refused_for_what_is_refused_beside_it(store_url: str) -> None:
    with opened(store_url, profile_bytes_max=1000) as profiles:
        swept(Sweep(profiles.context, profiles.product))
        profiles.count(event("first", 2, [EXACT, 1, 2**64 - 1]), log="order")
        late = event("e", 2, [OFFER, 5], time=NOW - 30 * DAY)
        much = event("e", 2, [EXACT, 1, 1])
        assert profiles.statuses(late, much, log="order") == ["late", "refused"]
        by_position = event("n", 2, [OFFER, -1]), event("n", 2, [OFFER, 7]), much
        told = [verdict.status for verdict in profiles.count(*by_position, log="order", marked=False)]
        assert (told, profiles.values(2)[7]) == (["refused", "counted", "refused"], 1.0)
        waits = event("w", 1, [OFFER, 5, 1, A])
        assert profiles.statuses(waits) == ["counted"]
        filled_profile(profiles, 1)
        beside = event("b", 1, [OFFER, 5, 1, B]), event("p", 1, [OFFER, 5])
        assert profiles.statuses(waits, *beside) == ["duplicate", "counted", "refused"]


@pytest.mark.spec("PRO-02")
def test_a_handler_that_changes_its_event_does_not_change_its_fingerprint(profiles: Profiles) -> None:
    one = event("e1", 1, [OFFER, 1])
    sent = msgspec.json.decode(msgspec.json.encode(one))
    profiles.count(one)
    one["updates"].append([OFFER, 2])
    assert profiles.statuses(sent) == ["duplicate"]


@pytest.mark.spec("CNT-07", "CNT-19")
def test_a_sweep_judges_by_the_catalog_of_today_and_leaves_what_it_does_not_know(
    store_url: str, tmp_path: Path
) -> None:
    with opened(store_url) as profiles:
        profiles.count(event("1", 1, [OFFER, 5]), event("2", 2, [630, 5], [OFFER, 5]), log="order")
    longer = with_changed_catalog(tmp_path, "longer", "MaxRecords: 30 ExpireDays: 60", "MaxRecords: 30 ExpireDays: 600")
    with opened(store_url, catalog=longer) as profiles:
        profiles.clock.advance(70 * DAY)
        swept(Sweep(profiles.context, profiles.product))
        assert profiles.values(1) == {5: 1.0}
    with opened(
        store_url, catalog=without_counter(tmp_path, "CI_ORDERS_BY_PAGE_TOTAL", "CI_BANNER_PAGE_CLICK_COUNT")
    ) as p:
        p.count(event("3", 2, [OFFER, 6]))
        p.clock.advance(70 * DAY)
        swept(Sweep(p.context, p.product))
    with opened(store_url) as profiles:
        assert profiles.values(2, counter=630) == {5: 1.0}


@pytest.mark.spec("PRO-12", "CNT-19")
def test_what_a_sweep_leaves_after_a_change_of_the_catalog_is_not_written_at_every_walk(
    store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(store_url) as profiles:
        profiles.count(event("1", 1, [OFFER, 5]), event("2", 2, [630, 5], [OFFER, 5]), log="order")
    longer = with_changed_catalog(tmp_path, "longer", "MaxRecords: 30 ExpireDays: 60", "MaxRecords: 30 ExpireDays: 61")
    load_for_writing, locked = sweeping.loaded, list[Any]()

    def loaded(tx: Transaction, product: Any, keys: Any, *, items: int) -> Any:
        locked.extend(keys)
        return load_for_writing(tx, product, keys, items=items)

    monkeypatch.setattr(sweeping, "loaded", loaded)
    with opened(store_url, catalog=longer) as profiles:
        profiles.clock.advance(60 * DAY + 1)
        for _ in range(3):
            swept(Sweep(profiles.context, profiles.product))
            profiles.clock.advance(600)
        assert locked == [("user", "1")]
        assert profiles.values(1) == {5: 1.0}
        profiles.clock.advance(DAY)
        swept(Sweep(profiles.context, profiles.product))
        assert profiles.read(1).version == 0, "a day later it is looked at again, and goes"
        assert len(published(profiles)) == 3, "to leave it was no change"


@pytest.mark.spec("PRO-04", "PRO-07", "CNT-19")
def test_held_back_updates_of_a_counter_that_left_the_catalog_disturb_nobody(store_url: str, tmp_path: Path) -> None:
    with opened(store_url) as profiles:
        profiles.count(event("1", 1, [EXACT, 5, 7, A]), event("2", 2, [EXACT, 5, 7, B]), log="order")
    less = without_counter(tmp_path, "CI_OFFER_ORDERS_EXACT", "CI_OFFER_INTEREST_TIME")
    with opened(store_url, catalog=less) as profiles:
        assert profiles.statuses(event("3", 1, [OFFER, 5])) == ["counted"]
        assert profiles.values(1, 2) == {5: 1.0}
    with opened(store_url) as profiles:
        assert profiles.values(1, 2, counter=EXACT)[5] == 14


@pytest.mark.spec("PRO-04", "PRO-07", "CNT-19")
def test_what_waits_for_a_counter_that_nobody_may_write_any_more_is_released_all_the_same(
    store_url: str, tmp_path: Path
) -> None:
    with opened(store_url) as profiles:
        profiles.count(event("1", 1, [EXACT, 5, 7, A]), event("2", 2, [EXACT, 5, 7, A]), log="order")
    named = "CI_OFFER_ORDERS_EXACT = 602 [(CounterDescription) = {"
    read_only = with_changed_catalog(tmp_path, "read_only", named, f"{named} NoOperation: true")
    with opened(store_url, catalog=read_only) as profiles:
        assert profiles.statuses(event("3", 1, [EXACT, 5]), event("4", 1, [OFFER, 5]), log="order") == [
            "refused",
            "counted",
        ]
        assert profiles.values(1, counter=EXACT) == {5: 7}
        profiles.count(event("5", 3, [OFFER, 5, 1, B]))
        assert profiles.values(2, 3, counter=EXACT) == {5: 7}, "as where its owners confirm each other in an answer"


@pytest.mark.spec("PRO-05", "PRO-07")
def test_the_public_key_of_one_id_does_not_release_what_another_id_waits_with(profiles: Profiles) -> None:
    profiles.count(event("1", 1, [OFFER, 5, 3.0, A]), event("2", 2, [OFFER, 5, 0.5]))
    assert profiles.values(1, 2) == {5: 0.5}


@pytest.mark.spec("PRO-05", "PRO-07")
def test_what_waits_unconfirmed_is_not_even_fetched_by_a_merged_read(
    profiles: Profiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiles.count(event("1", 1, [OFFER, 5]), event("2", 2, [OFFER, 5, 2.0]))
    fetched = rows_fetched(monkeypatch)
    before = profiles.values(1, 2)
    without = list(fetched)
    waiting = [event(f"{one}-{n}", one, [OFFER, 1000 + n, 1, A]) for one in (1, 2) for n in range(200)]
    profiles.count(*waiting, event("b", 2, [OFFER, 999, 1, B]))
    fetched.clear()
    assert profiles.values(1, 2) == before
    assert fetched == without == [2, 0]


@pytest.mark.spec("PRO-07")
def test_a_merge_looks_at_each_place_only_at_the_ids_that_wait_there(profiles: Profiles) -> None:
    waiting = [(one, 10 * (one // 2) + n, (A, B)[one % 2]) for one in range(20) for n in range(10)]
    profiles.count(*[event(f"{one}-{key}", one, [OFFER, key, 1, owner]) for one, key, owner in waiting])
    profiles.count(event("alone", 1, [OFFER, 1000, 1, A]), event("one", 2, [OFFER, 1001, 1, B]))
    profiles.count(event("other", 50, [OFFER, 1001, 1, A]))
    people = [[("user", str(each)) for each in ids] for ids in (range(20), (0, 1), (1, 2))]
    found = profiles.context.store.read(lambda tx: several_owners(tx, profiles.product, people))
    assert found == sorted(("user", str(one), OFFER_TIME, key) for one, key, _ in waiting)
    assert len(profiles.values(*range(20))) == 30


@pytest.mark.spec("PRO-05", "PRO-08")
def test_reads_that_look_at_what_waits_are_gathered_apart_from_the_others(tmp_path: Path) -> None:
    with opened(f"sqlite:///{tmp_path / 'k.db'}") as profiles:
        (reading,) = (each.run for each in routes(profiles.context) if each.path == "/v1/profiles")
        assert isinstance(reading, Operation)
        for people, is_apart in (([1, 1], False), ([2], True), ([1, 2, 1], True)):
            body = {"profiles": [{"ids": [{"type": "user", "id": n} for n in range(count)]} for count in people]}
            assert reading.is_apart(Ask(client=ANYONE, body=msgspec.convert(body, ReadBody))) == is_apart


@pytest.mark.spec("PRO-07", "PRO-04")
def test_a_merged_answer_is_of_one_moment_though_something_is_released_meanwhile(
    profiles: Profiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiles.count(event("1", 1, [OFFER, 5, 2.0, A]), event("2", 2, [OFFER, 5, 1.0, B]))
    before = answered(profiles, 1, 2)

    def releasing(*given: Any) -> Any:
        monkeypatch.undo()
        release = threading.Thread(target=profiles.count, args=[event("3", 1, [OFFER, 5, 10.0])])
        release.start()
        release.join()
        return several_owners(*given)

    monkeypatch.setattr(reading, "several_owners", releasing)
    assert answered(profiles, 1, 2) == before
    assert profiles.values(1) == {5: 12.0}
    assert answered(profiles, 1, 2) != before


@pytest.mark.spec("PRO-07")
def test_exact_sums_that_leave_64_bits_in_a_merge_stay_at_the_largest(profiles: Profiles) -> None:
    profiles.count(event("1", 1, [EXACT, 5, 2**63]), event("2", 2, [EXACT, 5, 2**63]), log="order")
    assert profiles.values(1, 2, counter=EXACT) == {5: 2**64 - 1}


@pytest.mark.spec("PRO-07")
def test_exact_sums_that_owners_release_in_a_merge_stay_at_the_largest_and_fail_nobody(profiles: Profiles) -> None:
    profiles.count(
        event("1", 1, [EXACT, 5, 2**63, A]),
        event("2", 2, [EXACT, 5, 2**63, B]),
        event("3", 3, [EXACT, 5, 2**64 - 1], [EXACT, 6, 1, A]),
        event("4", 4, [EXACT, 5, 1, B], [EXACT, 6, 2, B]),
        event("5", 5, [EXACT, 5, 1, A]),
        log="order",
    )
    assert profiles.values(1, 2, counter=EXACT) == {5: 2**64 - 1}
    assert profiles.values(3, 4, 5, counter=EXACT) == {5: 2**64 - 1, 6: 3}


@pytest.mark.spec("PRO-04", "PRO-06")
def test_a_flood_of_one_owner_is_settled_quickly_and_within_the_cap(profiles: Profiles) -> None:
    flood = [event(f"f{n:05}", 1, [OFFER, 5, 1, A], time=NOW - n) for n in range(5_000)]
    profiles.count(*flood)
    assert rows_of(profiles, HELD_UPDATES) == 600
    profiles.count(event("last", 1, [OFFER, 5, 1, B]))
    assert profiles.values(1)[5] == pytest.approx(601, rel=0.01)


@pytest.mark.spec("PRO-04", "PRO-06")
def test_a_flood_of_what_has_no_room_is_settled_quickly_and_within_the_cap(profiles: Profiles) -> None:
    flood = [event(f"f{n:05}", 1, [EXACT, 5, 2**64 - 1, (A, B)[n % 2]], time=NOW - n) for n in range(3_000)]
    assert profiles.statuses(*flood, log="order") == ["counted"] * 3_000
    assert profiles.values(1, counter=EXACT) == {5: 2**64 - 1}
    assert rows_of(profiles, HELD_UPDATES) == 600


@pytest.mark.spec("PRO-04", "CORE-16")
def test_a_profile_is_decoded_once_however_many_of_its_sums_have_no_room(
    profiles: Profiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = calls_of(monkeypatch, "Counters")
    flood = [event(f"{owner}", 1, *[[EXACT, key, 2**64 - 1, owner] for key in range(50)]) for owner in (A, B)]
    assert profiles.statuses(*flood, log="order") == ["counted"] * 2
    assert rows_of(profiles, HELD_UPDATES) == 50
    assert len(decoded) == 1


@pytest.mark.spec("PRO-12")
def test_one_event_that_cannot_be_kept_fails_no_other(profiles: Profiles) -> None:
    long_id = "ж" * 200
    assert profiles.statuses(event("1", long_id, [OFFER, 5]), event("2", long_id, [OFFER, 6, 1, A])) == ["counted"] * 2

    def spoil(tx: Transaction) -> None:
        tx.execute(sa.update(PROFILES).where(PROFILES.c.profile_id == "9").values(body=b"\x1a\x05\x0a\x03abc"))

    profiles.count(event("3", 9, [OFFER, 5]))
    profiles.context.store.transact(spoil)
    assert profiles.statuses(event("4", 9, [OFFER, 5, 1, A]), event("5", 9, [OFFER, 5]), event("6", 8, [OFFER, 5])) == [
        "refused",
        "refused",
        "counted",
    ]


@pytest.mark.spec("PRO-12", "PRO-06")
def test_what_is_released_does_not_make_a_profile_larger_than_it_may_be(store_url: str) -> None:
    with opened(store_url, profile_bytes_max=1000) as profiles:
        lone = [event(f"l{n}", 1, [630, 2**63 + n]) for n in range(40)]
        waits = event("w", 1, *[[OFFER, 2**63 + n, 1, A] for n in range(30)])
        profiles.count(waits)
        profiles.count(*lone, log="order")
        assert profiles.statuses(event("x", 1, *[[OFFER, 2**63 + n, 1, B] for n in range(30)])) == ["counted"]
        size = profiles.context.store.read(
            lambda tx: tx.execute(sa.select(sa.func.length(PROFILES.c.body))).scalar_one()
        )
        assert 1000 - 2 * 22 < size <= 1000, "as many as fit are released"
        released = profiles.values(1)
        assert set(released.values()) == {2.0}
        assert rows_of(profiles, HELD_UPDATES) == 2 * (30 - len(released))


@pytest.mark.spec("PRO-05", "PRO-12", "CORE-16")
def test_a_full_profile_spends_a_few_folds_on_what_is_released(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [2**60 + n for n in range(300)]
    with opened(store_url, profile_bytes_max=1000) as profiles:
        filled_profile(profiles, 1)
        profiles.count(event("a", 1, *[[OFFER, key, 1, A] for key in keys]))
        folds = calls_of(monkeypatch, "_folded")
        for number, owner in enumerate((B, A)):
            assert profiles.statuses(event(f"{number}", 1, *[[OFFER, key, 1, owner] for key in keys])) == ["counted"]
            assert len(folds) <= 3, "nothing of it fits: one look tells"
            folds.clear()
        assert profiles.values(1) == {}
        profiles.count(event("half", 2, *[[630, 2**63 + n] for n in range(25)]), log="order")
        profiles.count(*[event(f"h{key}", 2, [OFFER, key, 1, A], time=NOW - key % 1000) for key in keys])
        folds.clear()
        assert profiles.statuses(event("b", 2, *[[OFFER, key, 1, B] for key in keys[::-1]], time=NOW)) == ["counted"]
        assert len(folds) <= 2 + 10
        size = profiles.context.store.read(
            lambda tx: tx.execute(
                sa.select(sa.func.length(PROFILES.c.body)).where(PROFILES.c.profile_id == "2")
            ).scalar_one()
        )
        assert 1000 - 2 * 22 < size <= 1000


@pytest.mark.spec("PRO-12", "CORE-16")
def test_the_larger_a_full_profile_the_fewer_folds_it_spends_on_misfits(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(store_url, profile_bytes_max=60_000) as profiles:
        fill = [event(f"f{n}", 1, *[[630, 2**63 + n * 1000 + key] for key in range(1000)]) for n in range(3)]
        assert profiles.statuses(*fill, log="order") == ["counted"] * 3
        folds = calls_of(monkeypatch, "_folded")
        much = [event(f"m{n}", 1, *[[630, 2**62 + n * 1000 + key] for key in range(1000)]) for n in range(100)]
        statuses = profiles.statuses(*much, event("again", 1, [630, 2**63]), log="order")
        assert statuses == ["refused"] * 100 + ["counted"]
        folds.clear()
        small = [event(f"s{n}", 1, [630, 2**61 + n]) for n in range(900)]
        statuses = profiles.statuses(*small, log="order")
        assert statuses == sorted(statuses), "the first that fit are in"
        assert "refused" in statuses
        assert "counted" in statuses
        assert len(folds) < 130


@pytest.mark.spec("PRO-12", "PRO-06")
def test_what_was_released_and_found_no_room_is_released_when_there_is_some(store_url: str) -> None:
    with opened(store_url, profile_bytes_max=1000) as profiles:
        filled = filled_profile(profiles, 1)
        profiles.count(event("a", 1, [OFFER, 5, 1, A]), event("b", 1, [OFFER, 5, 2, B]))
        assert profiles.values(1) == {}
        assert rows_of(profiles, HELD_UPDATES) == 2
        profiles.context.store.transact(lambda tx: tx.execute(sa.update(PROFILES).values(body=b"")))
        profiles.count(event("c", 1, [OFFER, 5, 4, A]))
        assert profiles.values(1) == {5: 7.0}
        assert rows_of(profiles, HELD_UPDATES) == 0
        assert filled > 30


def filled_profile(profiles: Profiles, profile_id: int) -> int:
    """Fill a profile until nothing more fits; returns how many keys it has."""
    fill = [event(f"fill{profile_id}-{n}", profile_id, [630, 2**63 + n]) for n in range(100)]
    fill += [event(f"last{profile_id}-{n}", profile_id, [630, n]) for n in range(100)]
    return profiles.statuses(*fill, log="order").count("counted")


WAITING_BESIDE = {
    "nothing": [],
    "one owner": [event("w1", 1, [OFFER, 5, 1, A], [EXACT, 5, 2**64 - 1, A], time=NOW + DAY)],
    "an owner twice": [
        event("w1", 1, [EXACT, 5, 2**64 - 1, A], time=NOW - DAY),
        event("w2", 1, [EXACT, 5, 2**64 - 1, A], [OFFER, 5, 1, A], time=NOW + 60),
    ],
}


@pytest.mark.spec("PRO-04", "PRO-05")
@pytest.mark.parametrize("kernel", ["numpy", "numba"])
@pytest.mark.parametrize("waiting", WAITING_BESIDE.values(), ids=WAITING_BESIDE)
def test_no_public_event_is_refused_for_what_waits(tmp_path: Path, kernel: str, waiting: list[dict[str, Any]]) -> None:
    """Whatever times and values it has: what would leave 64 bits with it waits on."""
    with opened(f"sqlite:///{tmp_path / 'k.db'}", kernel=kernel) as profiles:
        assert profiles.statuses(*waiting, log="order") == ["counted"] * len(waiting)
        public = event("y", 1, [EXACT, 5, 1], [OFFER, 7])
        assert profiles.statuses(public, log="order") == ["counted"]
        assert profiles.values(1)[7] == 1.0
        assert profiles.statuses(event("z", 1, [EXACT, 5, 2**63 + 5]), log="order") == ["counted"]
        assert profiles.values(1, counter=EXACT)[5] == 2**63 + 6
        assert profiles.statuses(event("much", 1, [EXACT, 5, 2**63]), log="order") == ["refused"]


@pytest.mark.spec("PRO-04", "PRO-05", "PRO-06")
def test_what_is_too_large_to_be_released_waits_on_and_keeps_nobody_else_from_it(profiles: Profiles) -> None:
    profiles.count(event("large", 1, [EXACT, 5, 2**64 - 1, A], time=NOW + DAY), log="order")
    profiles.count(event("small", 1, [EXACT, 5, 7, C]), log="order")
    assert profiles.values(1, counter=EXACT) == {5: 7}, "the other is a source, though it is too large itself"
    assert profiles.statuses(event("b", 1, [EXACT, 5, 2**64 - 8, B]), log="order") == ["counted"]
    assert profiles.values(1, counter=EXACT) == {5: 2**64 - 1}, "as much as fits"
    (held,) = profiles.context.store.read(lambda tx: explain(tx, profiles.product, ("user", "1")))
    assert (held.event_id, "if its profile has room" in held.waits_for) == ("large", True)
    profiles.clock.advance(5 * DAY)
    swept(Sweep(profiles.context, profiles.product))
    assert rows_of(profiles, HELD_UPDATES) == 0


@pytest.mark.spec("PRO-05", "PRO-12")
def test_the_status_in_a_full_profile_tells_nothing_of_what_waits(tmp_path: Path) -> None:
    """The same events are said to be the same, one by one and together, whoever waits at their keys."""
    told = []
    waiting = [event("w", 1, *[[OFFER, key, 1, A] for key in range(5)], [EXACT, 3, 2**64 - 1, A])]
    for name, before in (("plain", []), ("held", waiting)):
        with opened(f"sqlite:///{tmp_path / name}.db", profile_bytes_max=1000) as profiles:
            filled_profile(profiles, 1)
            profiles.count(*before, log="order")
            asked = [
                event("owned", 1, [OFFER, 1, 1, B]),
                event("both", 1, [OFFER, 2, 1, B], [630, 2**63]),
                event("known", 1, [630, 2**63 + 1]),
                event("public", 1, [OFFER, 3]),
                event("wide", 1, [EXACT, 3, 1, B]),
            ]
            one_by_one = [profiles.statuses(each, log="order") for each in asked]
            again = [{**each, "event_id": f"again {each['event_id']}"} for each in asked]
            told.append((one_by_one, profiles.statuses(*again, log="order"), profiles.values(1, counter=630)))
    assert told[0] == told[1]
    assert told[0][1] == ["counted", "counted", "counted", "refused", "counted"]


@pytest.mark.spec("PRO-05", "PRO-12")
@pytest.mark.parametrize("kernel", ["numpy", "numba"])
@pytest.mark.parametrize("bytes_max", [1000, 256_000])
@pytest.mark.parametrize("waits", [[OFFER, 5, 1, A], [EXACT, 5, 1, A], [EXACT, 5, 2**64 - 1, A]], ids=str)
def test_what_is_too_old_to_count_is_not_refused_for_what_is_released_at_its_key(
    tmp_path: Path, kernel: str, bytes_max: int, waits: list[object]
) -> None:
    """Alone it has no effect; beside what is released its sum would leave 64 bits."""
    old = [event(f"o{n}", 1, [EXACT, 5, 2**63], time=NOW - 61 * DAY) for n in range(2)]
    large = [event(f"l{n}", 1, [EXACT, 6, 2**63]) for n in range(2)]
    told = []
    for name, before in (("plain", []), ("held", [event("w", 1, waits)])):
        url = f"sqlite:///{tmp_path / name}.db"
        with opened(url, kernel=kernel, profile_bytes_max=bytes_max, event_days=90) as profiles:
            if bytes_max == 1000:
                filled_profile(profiles, 1)
            assert profiles.statuses(*before, log="order") == ["counted"] * len(before)
            told.append(profiles.statuses(event("probe", 1, [OFFER, 5, 1, B]), *old, *large, log="order"))
    assert told[0] == told[1]
    assert told[0][:3] == ["counted"] * 3


@pytest.mark.spec("PRO-05", "PRO-12")
def test_the_status_in_a_broken_profile_tells_nothing_of_what_waits(tmp_path: Path) -> None:
    told = []
    for name, before in (("plain", []), ("held", [event("w", 1, [OFFER, 5, 1, A])])):
        with opened(f"sqlite:///{tmp_path / name}.db") as profiles:
            profiles.count(event("first", 1, [630, 1]), *before, log="order")
            broken = Profile()
            broken.packed_counters.add(counter_ids=[630], keys=[1, 2]).values.add().fixed64_values.value.append(1)
            body = broken.SerializeToString()
            profiles.context.store.transact(lambda tx, b=body: tx.execute(sa.update(PROFILES).values(body=b)))
            owned = event("owned", 1, [OFFER, 5, 1, B])
            told.append((profiles.statuses(owned), profiles.statuses(event("public", 1, [OFFER, 5]))))
    assert told[0] == told[1]
    assert told[0][1] == ["refused"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"by_position": ["visitt"]},
        {"topics": {"visitt": "x"}},
        {"topics": {"visit": "profiles"}},
        {"clients": {"ads": {"counters": ["CI_TYPO"]}}},
        {"clients": {"ads": {"types": ["usr"]}}},
        {"clients": {"ads": {"restrictions": ["UR_TYPO"]}}},
        {"limits__message_bytes_max": 300_000},
        {"limits__key_bytes_max": 100},
    ],
)
def test_settings_that_name_what_is_not_there_are_refused_at_the_start(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsWrong), opened(f"sqlite:///{tmp_path / 'wrong.db'}", **wrong):
        pass


@pytest.mark.spec("CNT-03")
def test_the_kind_of_a_counter_is_free_until_something_of_it_is_stored(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'free.db'}"
    with opened(url) as profiles:
        profiles.read(1)
    other = with_changed_catalog(tmp_path, "other", "DecayFactor: 0.1\n", "DecayFactor: 0.2\n")
    text = Path(other).read_text()
    start = text.index("CI_OFFER_INTEREST_COUNT = 600")
    Path(other).write_text(text[:start] + text[start:].replace("VF_FLOAT", "VF_DOUBLE", 1))
    with opened(url, catalog=other) as profiles:
        profiles.count(event("1", 1, [OFFER, 5]))
    with pytest.raises(CatalogWrong, match=r"the catalog has a mistake: .* was double here") as error, opened(url):
        pass
    assert error.value.hint == "Use a new id for the new kind"


@pytest.mark.spec("PRO-08")
def test_a_profile_that_is_broken_in_the_store_says_so_and_disturbs_no_other(profiles: Profiles) -> None:
    profiles.count(event("1", 1, [OFFER, 5]), event("2", 2, [OFFER, 5]))

    def spoil(tx: Transaction) -> None:
        broken = Profile.FromString(
            tx.execute(sa.select(PROFILES.c.body).where(PROFILES.c.profile_id == "1")).scalar_one()
        )
        broken.packed_counters[0].values[0].float_values.value[0] = float("nan")
        body = broken.SerializeToString()
        tx.execute(sa.update(PROFILES).where(PROFILES.c.profile_id == "1").values(body=body))

    profiles.context.store.transact(spoil)
    assert "not finite" in profiles.read(1).problem
    assert profiles.read(1).packs == []
    assert profiles.values(2) == {5: 1.0}
    assert "not finite" in profiles.read(1, 2).problem


@pytest.mark.spec("PRO-08", "CORE-16")
def test_what_one_request_may_read_is_bounded(store_url: str) -> None:
    with opened(store_url, read_bytes_max=1_000_000, profile_bytes_max=250_000) as profiles:
        profiles.count(event("1", 1, *[[630, 2**63 + n] for n in range(1_000)]), log="order")
        view = view_of(profiles.product, UNRESTRICTED, None)

        def read(people: int) -> int:
            entries = [([("user", "1")], view)] * people
            return len(profiles.context.store.read(lambda tx: read_profiles(tx, profiles.product, entries)))

        def read_arrays(people: int) -> int:
            asked = [[("user", "1")]] * people
            found, _ = profiles.context.store.read(lambda tx: read_numbers(tx, profiles.product, asked, view))
            return len(set(found.profile.tolist()))

        assert read(40) == read_arrays(40) == 40
        for reading in (read, read_arrays):
            with pytest.raises(TooLarge, match="1000000 are allowed"):
                reading(80)


def copied(profiles: Profiles, count: int, keys: int) -> list[str]:
    """So many more profiles, each with so many keys of 18 bytes that never expire."""
    body = Profile()
    pack = body.packed_counters.add(counter_ids=[630], keys=range(2**63, 2**63 + keys))
    pack.values.add().fixed64_values.value.extend([1] * keys)
    row = Stored(version=1, public_version=1, body=body.SerializeToString(), expires_at=2**62)
    ids = [f"large{number:03}" for number in range(count)]
    values = [{"profile_type": "user", "profile_id": each, **msgspec.structs.asdict(row)} for each in ids]
    profiles.context.store.transact(lambda tx: tx.execute(sa.insert(PROFILES), values))
    return ids


def bytes_fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes of values each statement has fetched since."""
    fetched: list[int] = []
    rows_of_driver = Transaction.rows

    def rows(tx: Transaction, *statement: Any) -> list[tuple[Any, ...]]:
        found = rows_of_driver(tx, *statement)
        fetched.append(sum(len(value) for row in found for value in row if isinstance(value, bytes)))
        return found

    monkeypatch.setattr(Transaction, "rows", rows)
    return fetched


@pytest.mark.spec("PRO-08", "PRO-12", "CORE-16")
def test_a_request_that_asks_for_too_much_is_refused_before_all_of_it_is_fetched(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(store_url, read_bytes_max=1_000_000) as profiles:
        ids = [("user", each) for each in copied(profiles, 40, keys=6_000)]
        view = view_of(profiles.product, UNRESTRICTED, None)
        everyone = [([each], view) for each in ids]
        fetched = bytes_fetched(monkeypatch)
        with pytest.raises(TooLarge, match="1000000 are allowed"):
            profiles.context.store.read(lambda tx: read_profiles(tx, profiles.product, everyone))
        assert 1_000_000 < sum(fetched) < 2_000_000, "the rest of four million was never fetched"
        fetched.clear()
        with pytest.raises(TooLarge, match="1000000 are allowed"):
            profiles.context.store.read(lambda tx: read_numbers(tx, profiles.product, [[each] for each in ids], view))
        assert 1_000_000 < sum(fetched) < 2_000_000
        assert len(profiles.context.store.read(lambda tx: read_profiles(tx, profiles.product, everyone[:9]))) == 9


@pytest.mark.spec("PRO-08", "PRO-11", "CORE-16")
def test_what_one_request_may_read_is_bounded_in_segments_too(store_url: str) -> None:
    with opened(store_url, read_bytes_max=1_000_000, publish=False) as profiles:
        entries = [{"segment_id": f"{n:0100}", "evaluation_version": 2**60} for n in range(500)]
        said = msgspec.json.encode({"segments": entries})
        sets = [Record(0, each, message(str(each), 1, said)) for each in range(30)]
        profiles.context.store.transact(lambda tx: apply_segments(tx, profiles.product, sets))
        view = view_of(profiles.product, UNRESTRICTED, None)

        def read(people: int) -> list[int]:
            asked = [([("user", str(each))], view) for each in range(people)]
            read = profiles.context.store.read(lambda tx: read_profiles(tx, profiles.product, asked))
            return [len(each.segments) for each in read]

        assert read(15) == [500] * 15
        with pytest.raises(TooLarge, match="1000000 are allowed"):
            read(30)


@pytest.mark.spec("PRO-08")
def test_some_people_are_read_by_one_statement(profiles: Profiles, monkeypatch: pytest.MonkeyPatch) -> None:
    profiles.count(*[event(f"e{n}", n, [OFFER, 5]) for n in range(100)])
    view = view_of(profiles.product, UNRESTRICTED, None)
    fetched = bytes_fetched(monkeypatch)
    entries = [([("user", str(n))], view) for n in range(100)]
    assert len(profiles.context.store.read(lambda tx: read_profiles(tx, profiles.product, entries))) == 100
    assert len(fetched) == 1


@pytest.mark.spec("PRO-12", "CORE-16")
def test_the_profiles_of_one_batch_are_bounded_in_bytes(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(store_url, write_bytes_max=1_000_000, profile_bytes_max=2_000_000, publish=False) as profiles:
        ids = copied(profiles, 40, keys=6_000)
        events = [event(each, each, [OFFER, 5]) for each in ids]
        fetched = bytes_fetched(monkeypatch)
        with pytest.raises(TooLarge, match="1000000 bytes that are allowed"):
            profiles.count(*events)
        assert 1_000_000 < sum(fetched) < 1_300_000, "the rest of four million was never fetched"
        profiles.send("visit", *events)
        assert [profiles.values(each) for each in ids] == [{5: 1.0}] * 40, "a consumer halves its batch"


@pytest.mark.spec("PRO-12", "CORE-16")
def test_an_event_of_a_profile_larger_than_a_batch_may_be_is_counted_alone(store_url: str) -> None:
    with opened(store_url, write_bytes_max=1_000_000, profile_bytes_max=2_000_000, publish=False) as profiles:
        (large,) = copied(profiles, 1, keys=60_000)
        assert profiles.statuses(event("1", large, [OFFER, 5])) == ["counted"]


@pytest.mark.spec("PRO-12", "PRO-13", "CNT-16", "CORE-16")
def test_walks_over_all_profiles_read_a_bounded_number_of_bytes_at_a_time(
    store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(store_url, read_bytes_max=1_000_000, write_bytes_max=1_000_000) as profiles:
        copied(profiles, 25, keys=6_000)
        fetched = bytes_fetched(monkeypatch)
        done = export(profiles.context.store, profiles.product, tmp_path / "all.parquet", report=lambda _: None)
        swept(Weighing(profiles.context, profiles.product))
        totals = sa.select(PROFILE_TOTALS.c.profiles)
        assert profiles.context.store.read(lambda tx: tx.execute(totals).scalar_one()) == done.profiles == 25
        profiles.context.store.transact(lambda tx: tx.execute(sa.update(PROFILES).values(expires_at=1)))
        swept(Sweep(profiles.context, profiles.product))
        assert max(fetched) <= 1_000_000


@pytest.mark.spec("CNT-16")
def test_before_the_first_count_nothing_is_weighed(profiles: Profiles) -> None:
    idf = next(c for c in profiles.product.catalog.counters.values() if c.idf)
    profiles.count(event("1", 1, [idf.id, 1, 2.5]), log=idf.input_types[0])
    view = view_of(profiles.product, UNRESTRICTED, [idf.id], weighted=True)
    assert profiles.read(1, view=view).packs[0].rows[0][1] == [2.5]


@pytest.mark.spec("CNT-16")
def test_a_counter_that_became_idf_since_the_last_count_is_not_weighed(store_url: str, tmp_path: Path) -> None:
    idf, later = 610, OFFER
    with opened(store_url) as profiles:
        profiles.count(*[event(f"{n}", n, [idf, n], [later, 5, 2.0]) for n in range(9)])
        assert not Weighing(profiles.context, profiles.product).step()
        view = view_of(profiles.product, UNRESTRICTED, [idf], weighted=True)
        assert profiles.read(0, view=view).packs[0].rows[0][1] == [pytest.approx(math.log(10 / 2))], "all are rare"
    description = '    Description: "interest in an offer, from visits and orders"\n'
    changed = with_changed_catalog(tmp_path, "idf", description, description + "    Idf: true\n")
    with opened(store_url, catalog=changed) as profiles:
        view = view_of(profiles.product, UNRESTRICTED, [later], weighted=True)
        assert profiles.read(0, view=view).packs[0].rows[0][1] == [2.0], "before its first count"
        profiles.clock.advance(DAY)
        assert not Weighing(profiles.context, profiles.product).step()
        assert profiles.read(0, view=view).packs[0].rows[0][1] == [0.0], "everybody has it"


@pytest.mark.spec("PRO-07", "PRO-05")
@pytest.mark.parametrize("at_now", [False, True])
def test_arrays_hold_what_packs_do_whoever_is_asked_for(profiles: Profiles, at_now: bool) -> None:
    """One id, several ids, nobody, a stranger to the public, somebody of whom a part has expired, a broken profile."""
    assert profiles.statuses(event("a", 1, [OFFER, 7, 2.5], [EXACT, 7, 2**60 + 1]), log="order") == ["counted"]
    profiles.count(event("b", 2, [OFFER, 7, 1.0], [OFFER, 8, 1.5]), event("c", 4, [OFFER, 5, 1, "a.example"]))
    profiles.count(event("d", 3, [OFFER, 1, 1.0], time=NOW - 20 * DAY), event("e", 5, [OFFER, 1, 1]))
    profiles.clock.advance(11 * DAY)
    profiles.count(event("f", 3, [OFFER, 2, 1.0], time=NOW + 11 * DAY))
    profiles.context.store.transact(
        lambda tx: tx.execute(sa.update(PROFILES).where(PROFILES.c.profile_id == "5").values(body=b"\xff"))
    )
    people: list[list[tuple[str, str]]] = [[("user", each)] for each in ("1", "nobody", "4", "3", "5", "1", "2")]
    view = view_of(profiles.product, UNRESTRICTED, None, at_now=at_now, as_json=True)
    for asked in (people, [*people, [("user", "1"), ("user", "2")]], []):
        found, problems = profiles.context.store.read(lambda tx, a=asked: read_numbers(tx, profiles.product, a, view))
        packs = msgspec.structs.replace(view, written=False)
        read = profiles.context.store.read(
            lambda tx, a=asked, v=packs: read_profiles(tx, profiles.product, [(ids, v) for ids in a])
        )
        expected = [
            (place, counter_id, key, float(value), value if isinstance(value, int) else 0)
            for place, each in enumerate(read)
            for pack in each.packs
            for counter_id, (_, values) in zip(pack.counter_ids, pack.rows, strict=True)
            for key, value in zip(pack.keys, values, strict=True)
        ]
        columns = (found.profile, found.counter, found.key, found.value, found.count)
        assert list(zip(*(each.tolist() for each in columns), strict=True)) == expected
        assert problems == {place: each.problem for place, each in enumerate(read) if each.problem}
        assert set(problems) == ({4} if asked else set())
        assert not asked or ({0, 3, 5, 6} <= set(found.profile.tolist()) and 2 not in found.profile)
