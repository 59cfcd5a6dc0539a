"""Order statistics on every store: each order once, the right cells, history beside live, dimensions added live."""

import asyncio
import importlib
import random
import re
import sqlite3
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa

from keyfold.core import audit, deadletters
from keyfold.core.access import ANYONE, Client
from keyfold.core.clock import ManualClock
from keyfold.core.errors import BadInput, Conflict, LeaseLost, LostRace, SettingsWrong, TooLarge
from keyfold.core.gather import Ask, Gatherer, Operation
from keyfold.core.relay import Relay
from keyfold.core.store import Transaction
from keyfold.core.times import iso as iso_us
from keyfold.orders import metrics
from keyfold.orders import routes as order_routes
from keyfold.orders.model import CompletedOrder, DimensionPending, Identity, Property
from keyfold.orders.service import backfilling, counting, reading, splitting, sweeping
from keyfold.orders.service.backfilling import backfill
from keyfold.orders.service.checking import (
    HELD_BYTES_MAX,
    Check,
    Checked,
    check_orders,
    must_be_check,
    release,
)
from keyfold.orders.service.correcting import correct_orders
from keyfold.orders.service.excluding import Excluded
from keyfold.orders.service.filling import claim
from keyfold.orders.service.history import History, names_of
from keyfold.orders.service.history import opened as history_of
from keyfold.orders.service.identities import add_identity
from keyfold.orders.service.importing import import_documents
from keyfold.orders.service.keeping import kept_orders, redrive
from keyfold.orders.service.lagging import Lag
from keyfold.orders.service.reading import Query, evidence_of
from keyfold.orders.service.splitting import split, switch
from keyfold.orders.service.unit import Stood, Unit, Units
from keyfold.orders.worker import Sweep
from tests.orders import DAY, HOUR, NOW, START, Orders, iso, opened, order, recount, write_history
from tests.product import message, put, relay_all

DIMENSIONS = ["tariff", "brand", "payment_method_type"]
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
ALL = {"phone_id": "p1", "yandex_uid": "u1", "card_id": "c1", "device_id": "d1"}


def four_at_once(work: Callable[[int], None]) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))  # raises what any of them raised


@pytest.fixture
def orders(store_url: str) -> Iterator[Orders]:
    with opened(store_url) as found:
        yield found


@pytest.fixture
def with_history(store_url: str) -> Iterator[Orders]:
    """A unit whose live counting begins in two hours."""
    with opened(
        store_url, start=iso(START), dedupe_days=10, limits__transaction_seconds_max=1, limits__lock_seconds_max=1
    ) as found:
        yield found


# Counting ---------------------------------------------------------------------------------------------------------


@pytest.mark.spec("ORD-01", "ORD-04")
def test_an_order_counts_for_every_identity_that_it_has(orders: Orders) -> None:
    assert (
        orders.count(
            order("1", NOW - 60, ALL, tariff="econom", brand="yataxi", payment_method_type="card"),
            order("2", NOW - 30, {"phone_id": "p1"}, tariff="econom", brand="yataxi", payment_method_type="cash"),
        )
        == ["accepted"] * 2
    )
    assert orders.total("phone_id", "p1") == 2
    assert [orders.total(*each) for each in ALL.items() if each[0] != "phone_id"] == [1, 1, 1]
    assert orders.total("phone_id", "p1", payment_method_type="cash") == 1
    evidence = orders.store.read(lambda tx: evidence_of(tx, orders.unit, [Identity("phone_id", "p1")], 0))[0]
    assert evidence.counted_from == iso(NOW - 60).replace("+00:00", "Z")
    assert evidence.counted_to == iso(NOW - 30).replace("+00:00", "Z")


@pytest.mark.spec("ORD-05")
def test_a_repeat_changes_nothing_and_another_body_is_a_conflict(orders: Orders) -> None:
    one = order("1", NOW, ALL, tariff="econom")
    assert orders.count(one, one) == ["accepted", "duplicate"]
    assert orders.count(one) == ["duplicate"]
    for other in (
        order("1", NOW - 1, ALL, tariff="econom"),
        order("1", NOW, ALL, tariff="business"),
        order("1", NOW, {"phone_id": "p2"}, tariff="econom"),
    ):
        assert orders.count(other) == ["conflict"]
    assert orders.cells() == recount([one], DIMENSIONS, list(ALL))


@pytest.mark.spec("ORD-05")
@pytest.mark.parametrize(("count", "size"), [(300, 25), (6_000, 3_000)], ids=["small", "marked and added in pieces"])
def test_concurrent_repeats_count_once(store_url: str, count: int, size: int) -> None:
    sent = [order(f"o{n}", NOW, {"phone_id": f"p{n % 7}", "card_id": "c"}, tariff=f"t{n % 3}") for n in range(count)]
    with opened(store_url) as orders:
        statuses: list[str] = []
        guard = threading.Lock()

        def work(seed: int) -> None:
            mine = random.Random(seed).sample(sent, len(sent))
            for at in range(0, len(mine), size):
                found = orders.count(*mine[at : at + size])
                with guard:
                    statuses.extend(found)

        four_at_once(work)
        assert statuses.count("accepted") == len(sent)
        assert statuses.count("duplicate") == 3 * len(sent)
        assert orders.cells() == recount(sent, DIMENSIONS, list(ALL))


@pytest.mark.spec("ORD-05")
def test_a_large_batch_tells_repeats_and_conflicts_from_orders_that_are_new(orders: Orders) -> None:
    sent = [order(f"o{n}", NOW - n, {"phone_id": f"p{n % 50}", "card_id": f"c{n}"}) for n in range(6_000)]
    assert orders.count(*sent[:5_500]) == ["accepted"] * 5_500
    assert orders.cells() == recount(sent[:5_500], DIMENSIONS, list(ALL))
    other = order("o7", NOW, {"phone_id": "p0"})
    assert orders.count(*sent[3_000:], other, sent[5_999]) == [
        *["duplicate"] * 2_500,
        *["accepted"] * 500,
        "conflict",
        "duplicate",
    ]
    assert orders.cells() == recount(sent, DIMENSIONS, list(ALL))


@pytest.mark.spec("ORD-06")
def test_orders_behind_the_window_are_late_listed_and_never_counted(store_url: str) -> None:
    with opened(store_url, dedupe_days=10) as orders:
        assert orders.count(order("old", NOW - 10 * DAY - 1), order("young", NOW - 10 * DAY + 1)) == [
            "late",
            "accepted",
        ]
        assert orders.total("phone_id", "p1") == 1
        kept = orders.store.read(lambda tx: kept_orders(tx, orders.unit, "late", "", 10))
        assert [each.order_id for each in kept] == ["old"]


@pytest.mark.spec("ORD-06", "ORD-05")
@pytest.mark.parametrize("seconds", [1, 0], ids=["apart", "of one moment"])
def test_marks_are_purged_behind_the_watermark_in_bounded_steps_and_their_orders_are_late(
    store_url: str, seconds: int
) -> None:
    with opened(store_url, dedupe_days=10) as orders:
        sent = [order(f"o{n}", NOW - n * seconds) for n in range(50)]
        orders.count(*sent)
        purge = lambda: orders.store.transact(lambda tx: sweeping.purge_marks(tx, orders.unit, 20))  # noqa: E731
        move = lambda: orders.store.transact(lambda tx: sweeping.move_watermark(tx, orders.unit))  # noqa: E731
        move()
        assert purge() == 0
        orders.clock.advance(11 * DAY)
        assert move()
        assert purge() == 0, "the marks are one step behind the watermark"
        assert orders.count(*sent[:1]) == ["late"]
        orders.clock.advance(1.5 * DAY)
        assert move()
        assert [purge(), purge(), purge(), purge()] == [20, 20, 10, 0]
        assert set(orders.count(*sent)) == {"late"}
        assert orders.total("phone_id", "p1") == 50


@pytest.mark.spec("ORD-05", "ORD-07")
def test_an_order_that_was_left_is_known_for_as_long_as_one_that_was_counted(store_url: str) -> None:
    with opened(store_url, start=iso(START), dedupe_days=2, keep_days=1) as orders:
        orders.clock.advance(2 * HOUR - 300)
        assert orders.count(order("1", START - 1)) == ["before_start"], "it was created in the future"
        orders.clock.advance(2 * DAY + 1)
        assert orders.store.transact(lambda tx: sweeping.purge_kept(tx, orders.unit, 10)) == 0
        assert orders.count(order("1", START - 1, tariff="other")) == ["conflict"]
        orders.clock.advance(600)
        assert orders.store.transact(lambda tx: sweeping.purge_kept(tx, orders.unit, 10)) == 1
        assert orders.count(order("1", START - 1, tariff="other")) == ["late"]


@pytest.mark.spec("ORD-06")
def test_kept_orders_and_places_of_one_moment_are_purged_in_bounded_steps(store_url: str) -> None:
    with opened(store_url, dedupe_days=10) as orders:
        orders.count(*[order(f"o{n}", NOW - 11 * DAY) for n in range(10)])
        for number in range(5):
            check(orders, f"held{number}", fewer_than=100)
        orders.clock.advance(91 * DAY)
        for purge in (sweeping.purge_kept, sweeping.purge_reservations):
            purged = [orders.store.transact(lambda tx, purge=purge: purge(tx, orders.unit, 4)) for _ in range(4)]
            assert purged == [4, 4, 2, 0]


@pytest.mark.spec("ORD-06")
def test_the_oldest_are_found_by_the_index(orders: Orders) -> None:
    """A purge of a few out of many looks at those, and each it deletes by its key."""

    def look(tx: Transaction) -> list[str]:
        _prefer_indexes(tx)
        explain = "EXPLAIN QUERY PLAN" if tx.is_sqlite else "EXPLAIN"
        tables = orders.unit.tables
        aged = {tables.marks: "created_at_us", tables.kept: "kept_at_us", tables.reservations: "expires_at_us"}
        made = [sweeping._oldest_deleted(table, table.c[column], 5, 5) for table, column in aged.items()]
        dialect = tx.connection.dialect
        told = [str(each.compile(dialect=dialect, compile_kwargs={"literal_binds": True})) for each in made]
        return [str(tx.execute(sa.text(f"{explain} {sql}")).all()) for sql in told]

    plans = orders.store.transact(look)
    for plan, index in zip(plans, ("marks_created", "kept_kept_at", "reservations_expires"), strict=True):
        assert re.search(rf"INDEX \S*{index}|Index.* Scan using \S*{index}", plan), plan
        assert not re.search(r"SCAN orders|Seq Scan", plan), plan


@pytest.mark.spec("ORD-06")
def test_a_clock_that_goes_back_lets_no_purged_order_in(store_url: str) -> None:
    with opened(store_url, dedupe_days=10) as orders:
        orders.count(order("1"))
        orders.clock.advance(13 * DAY)
        orders.store.transact(lambda tx: sweeping.move_watermark(tx, orders.unit))
        assert orders.store.transact(lambda tx: sweeping.purge_marks(tx, orders.unit, 10)) == 1
        orders.clock.advance(-13 * DAY)
        assert not orders.store.transact(lambda tx: sweeping.move_watermark(tx, orders.unit)), "it never moves back"
        assert orders.count(order("1")) == ["late"]


@pytest.mark.spec("ORD-07")
def test_orders_created_before_the_start_are_left_to_the_backfill_and_kept(with_history: Orders) -> None:
    early, live = order("early", START - 1, ALL), order("live", START, ALL)
    with_history.clock.advance(3 * HOUR)
    before = metrics.LEFT_TO_HISTORY.labels("rides")._value.get()
    assert with_history.count(early, live, early) == ["before_start", "accepted", "before_start"]
    assert with_history.count(early) == ["before_start"]
    assert metrics.LEFT_TO_HISTORY.labels("rides")._value.get() == before + 1, "each is counted once"
    assert with_history.total("phone_id", "p1") == 1
    kept = with_history.store.read(lambda tx: kept_orders(tx, with_history.unit, "before_start", "", 10))
    assert [each.order_id for each in kept] == ["early"]
    marks = with_history.unit.tables.marks
    marked = with_history.store.read(lambda tx: tx.execute(sa.select(marks.c.order_id)).scalars().all())
    assert marked == ["live"], "an order that did not count is not marked"


@pytest.mark.spec("ORD-06", "ORD-07")
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_whoever_lists_kept_orders_page_by_page_sees_all_of_them(store_url: str, limit: int) -> None:
    """Also where one is kept for two reasons, and a page ends between them."""
    with opened(store_url) as orders:
        kept = [(order("A"), "before_start"), *[(order(each), "set_aside") for each in "ABC"]]
        orders.store.transact(lambda tx: counting.keep(tx, orders.unit, kept))  # type: ignore[arg-type]
        seen: list[tuple[str, str]] = []
        after = ""
        while page := orders.store.read(lambda tx, after=after: kept_orders(tx, orders.unit, None, after, limit)):  # type: ignore[misc]
            seen += [(each.order_id, each.why) for each in page]
            assert len(page) >= limit or len(seen) == 4, "a short page is the last one"
            after = page[-1].order_id
        assert seen == [("A", "before_start"), ("A", "set_aside"), ("B", "set_aside"), ("C", "set_aside")]


@pytest.mark.spec("ORD-05", "ORD-07")
def test_another_order_under_the_id_of_one_on_the_other_side_of_the_start_is_a_conflict(
    with_history: Orders, tmp_path: Path
) -> None:
    with_history.clock.advance(3 * HOUR)
    early, late = order("x", START - 1, tariff="a"), order("x", START, tariff="a")
    partly = order("y", START, {"phone_id": "p1"})
    assert with_history.count(early, partly) == ["before_start", "accepted"]
    with_history.backfill(write_history(tmp_path / "h.parquet", [early]), "phone_id")
    assert with_history.count(late, late, early) == ["conflict", "conflict", "before_start"]
    assert with_history.count(early) == ["before_start"]
    assert with_history.count(order("x", START - 2, tariff="a")) == ["conflict"], "two that are left are told apart too"
    assert with_history.total("phone_id", "p1") == 2
    assert with_history.count(order("y", START - 1, {"phone_id": "p1"})) == ["conflict"]
    assert is_complete(with_history), "nothing was left to history by a conflict"
    assert with_history.count(order("z", START - 1), order("z", START)) == ["before_start", "conflict"]


@pytest.mark.spec("ORD-05", "ORD-07")
def test_two_orders_under_one_id_on_both_sides_of_the_start_at_once_have_one_effect(with_history: Orders) -> None:
    with_history.clock.advance(3 * HOUR)
    sides = [START - 1, START]
    statuses: dict[str, list[str]] = {}

    def work(number: int) -> None:
        for turn in range(10):
            (status,) = with_history.count(order(f"o{turn}", sides[(number + turn) % 2]))
            statuses.setdefault(f"o{turn}", []).append(status)

    four_at_once(work)
    for found in statuses.values():
        assert sorted(found) in (
            ["before_start", "before_start", "conflict", "conflict"],
            ["accepted", "conflict", "conflict", "duplicate"],
        )
    assert with_history.total("phone_id", "p1") == sum("accepted" in each for each in statuses.values())


@pytest.mark.spec("ORD-07")
def test_a_start_must_lie_ahead_of_now_and_cannot_change(store_url: str) -> None:
    with pytest.raises(SettingsWrong, match="ahead of now"), opened(store_url, start=iso(NOW + 60)):
        pass
    with opened(store_url, start=iso(START)):
        pass
    with pytest.raises(SettingsWrong, match="cannot change"), opened(store_url, start=iso(START + 1)):
        pass
    with opened(store_url, start=iso(START), clock=ManualClock((START + DAY) * 1_000_000)) as orders:
        assert orders.count(order("1", START)) == ["accepted"]


@pytest.mark.spec("ORD-07", "ORD-09")
def test_an_identity_type_that_was_added_may_stand_anywhere_in_the_settings(store_url: str) -> None:
    with opened(store_url, start=iso(START), identities=["phone_id"]) as orders:
        add_identity(orders.store, orders.unit, "mail_id", (START + DAY) * 1_000_000)
    for identities in (["mail_id", "phone_id"], ["phone_id", "mail_id"], ["mail_id"]):
        with opened(store_url, start=iso(START), identities=identities) as orders:
            assert [each.name for each in orders.store.read(orders.unit.stood).state.identities] == [
                "phone_id",
                "mail_id",
            ]
        with (
            pytest.raises(SettingsWrong, match="cannot change"),
            opened(store_url, start=iso(START + DAY), identities=identities),
        ):
            pass


@pytest.mark.spec("ORD-02")
def test_units_have_tables_identities_and_dimensions_of_their_own(store_url: str) -> None:
    with opened(store_url) as rides, opened(store_url, unit="food", identities=["eater"], dimensions=["place"]) as food:
        rides.count(order("1", NOW, {"phone_id": "p1"}, tariff="econom"))
        food.count(order("1", NOW, {"eater": "p1"}, place="cafe"), order("2", NOW, {"eater": "p1"}))
        assert rides.total("phone_id", "p1") == 1
        assert {
            item.properties[0].value: item.counter_value
            for item in food.read(("eater", "p1"), group_by=["place"])[0].data
        } == {
            "cafe": 1,
            "unknown": 1,
        }
        with pytest.raises(BadInput, match="there is no identity type 'phone_id'"):
            food.count(order("3", NOW, {"phone_id": "p1"}))


@pytest.mark.spec("ORD-02")
def test_what_is_special_about_a_unit_is_a_hook(store_url: str, tmp_path: Path) -> None:
    hooks = tmp_path / "hooks_of_food.py"
    hooks.write_text(
        "import msgspec\n"
        "from keyfold.orders.hooks import completed\n"
        "@completed\n"
        "def prepare(order):\n"
        "    if order.order_id.startswith('test'):\n"
        "        return None\n"
        "    if order.order_id == 'broken':\n"
        "        raise RuntimeError('no')\n"
        "    return msgspec.structs.replace(order, properties={'place': order.properties['place'].lower()})\n"
    )
    with opened(store_url, unit="food", identities=["eater"], dimensions=["place"], hooks=str(hooks)) as food:
        sent = [order(each, NOW, {"eater": "e"}, place="CAFE") for each in ("1", "test-2", "broken")]
        assert [(each.status, each.reason) for each in food.verdicts(*sent)] == [
            ("accepted", ""),
            ("set_aside", "the hook of the unit left it out"),
            ("set_aside", "the hook of the unit failed: RuntimeError: no"),
        ]
        assert food.total("eater", "e", place="cafe") == 1


@pytest.mark.spec("ORD-02")
def test_a_hook_that_cuts_a_character_in_two_concerns_no_other_order(store_url: str, tmp_path: Path) -> None:
    hooks = tmp_path / "hooks_that_cut.py"
    hooks.write_text(
        "import msgspec\n"
        "from keyfold.orders.hooks import completed\n"
        "@completed\n"
        "def cut(order):\n"
        "    short = {k: v.encode()[:3].decode('utf-8', 'surrogateescape') for k, v in order.properties.items()}\n"
        "    return msgspec.structs.replace(order, properties=short)\n"
    )
    with opened(store_url, hooks=str(hooks)) as orders:
        assert orders.count(order("1", tariff="économ"), order("2", tariff="éé")) == ["accepted", "set_aside"]
        assert orders.total("phone_id", "p1", tariff="éc") == 1


@pytest.mark.spec("ORD-02", "ORD-05")
def test_a_hook_that_changes_its_order_in_place_changes_nothing_of_what_was_sent(
    store_url: str, tmp_path: Path
) -> None:
    hooks = tmp_path / "hooks_in_place.py"
    hooks.write_text(
        "from keyfold.orders.hooks import completed\n"
        "@completed\n"
        "def prepare(order):\n"
        "    order.properties['tariff'] = 'new ' + order.properties['tariff']\n"
        "    order.identities['card_id'] = 'c'\n"
        "    return None if order.order_id == 'aside' else order\n"
    )
    one, aside = order("1", tariff="econom"), order("aside", tariff="econom")
    with opened(store_url, hooks=str(hooks)) as orders:
        tries: list[list[str]] = []

        def work(tx: Transaction) -> None:
            tries.append([each.status for each in counting.count_orders(tx, orders.unit, [one, aside])])
            if len(tries) == 1:
                raise LostRace("a transaction may run again")

        orders.store.transact(work)
        assert tries == [["accepted", "set_aside"]] * 2
        assert orders.total("phone_id", "p1", tariff="new econom") == orders.total("card_id", "c") == 1
        (kept,) = orders.store.read(lambda tx: kept_orders(tx, orders.unit, None, "", 9))
        assert kept.order == order("aside", tariff="econom")
    with opened(store_url) as orders:
        assert orders.count(order("1", tariff="econom")) == ["duplicate"]


@pytest.mark.spec("ORD-11")
def test_the_brand_comes_from_the_application_and_an_unmapped_one_is_set_aside(store_url: str) -> None:
    sent = [
        order("1", NOW, application="android"),
        order("2", NOW, application="new_app"),
        order("3", NOW, application="android", brand="uber"),
        order("4", NOW, brand="uber"),
    ]
    with opened(store_url, application_brands={"android": "yataxi"}) as orders:
        assert orders.count(*sent) == ["accepted", "set_aside", "set_aside", "accepted"]
        assert orders.count(*sent) == ["duplicate", "set_aside", "set_aside", "duplicate"]
        assert orders.total("phone_id", "p1", brand="yataxi") == 1
    with opened(store_url, application_brands={"android": "yataxi", "new_app": "yango"}) as orders:
        after, verdicts = orders.store.transact(lambda tx: redrive(tx, orders.unit, "", 100))
        assert after is None
        assert [(each.order_id, each.status) for each in verdicts] == [("2", "accepted"), ("3", "set_aside")]
        assert orders.total("phone_id", "p1", brand="yango") == 1
        assert len(orders.store.read(lambda tx: kept_orders(tx, orders.unit, "set_aside", "", 10))) == 1
    with opened(store_url) as orders:
        _, verdicts = orders.store.transact(lambda tx: redrive(tx, orders.unit, "", 100))
        assert [(each.order_id, each.status) for each in verdicts] == [("3", "set_aside")]
        assert "there is no property 'application'" in verdicts[0].reason
    with pytest.raises(SettingsWrong, match="application_brands"), opened(store_url, application_brands={"web": ""}):
        """Nobody could ask for an empty brand."""


@pytest.mark.spec("ORD-05", "ORD-11")
def test_another_order_under_the_id_of_one_that_was_set_aside_or_late_is_a_conflict(store_url: str) -> None:
    """Of each id one is kept: what is not the same must be told, or it would be gone."""
    with opened(store_url, application_brands={"android": "yataxi"}) as orders:
        for why, created, more in (("set_aside", NOW, {"application": "new"}), ("late", NOW - 400 * DAY, {})):
            one, other = (order(f"{why} 1", created, {"phone_id": each}, **more) for each in ("p1", "p2"))
            assert orders.count(one) == [why]
            assert orders.count(other, one) == ["conflict", why]
            two, other = (order(f"{why} 2", created, {"phone_id": each}, **more) for each in ("p1", "p2"))
            assert orders.count(two, other, two) == [why, "conflict", why]
            kept = orders.store.read(lambda tx, why=why: kept_orders(tx, orders.unit, why, "", 9))  # type: ignore[misc]
            assert [each.order for each in kept] == [one, two]
        orders.send(order("set_aside 1", NOW, {"phone_id": "p3"}, application="new"))
        assert len(orders.store.read(lambda tx: deadletters.listed(tx, "orders-rides"))) == 1


@pytest.mark.spec("ORD-05", "ORD-11")
def test_what_conflicts_when_it_is_driven_again_stays_listed(store_url: str) -> None:
    aside, same = (order(each, NOW, {"phone_id": "p1"}, application="new") for each in ("1", "2"))
    with opened(store_url, application_brands={"android": "yataxi"}) as orders:
        assert orders.count(aside, same) == ["set_aside", "set_aside"]
        assert orders.count(order("1", NOW, {"phone_id": "p2"}, application="android")) == ["accepted"]
    with opened(store_url, application_brands={"android": "yataxi", "new": "yango"}) as orders:
        for turn in (["conflict", "accepted"], ["conflict"]):
            _, verdicts = orders.store.transact(lambda tx: redrive(tx, orders.unit, "", 9))
            assert [each.status for each in verdicts] == turn
            (kept,) = orders.store.read(lambda tx: kept_orders(tx, orders.unit, None, "", 9))
            assert kept.order == aside, "nobody else knows what it said"
        assert orders.total("phone_id", "p1") == orders.total("phone_id", "p2") == 1


@pytest.mark.spec("ORD-05", "ORD-11")
def test_of_an_id_that_was_counted_nothing_is_set_aside(store_url: str) -> None:
    counted, other = order("1", NOW, application="android"), order("1", NOW, {"phone_id": "p2"}, application="new")
    with opened(store_url, application_brands={"android": "yataxi"}) as orders:
        assert orders.count(counted, other) == ["accepted", "conflict"]
        assert orders.count(other) == ["conflict"]
    with opened(store_url, application_brands={"other": "yango"}) as orders:
        assert orders.count(counted) == ["duplicate"], "it was counted, whatever it would be today"
        assert orders.store.read(lambda tx: kept_orders(tx, orders.unit, None, "", 9)) == []


@pytest.mark.spec("ORD-05", "ORD-07", "ORD-11")
def test_of_an_id_that_was_left_to_history_nothing_is_set_aside(store_url: str) -> None:
    left = order("1", START - 1, application="android")
    other = order("1", START, {"phone_id": "p2"}, application="new")
    with opened(store_url, start=iso(START), application_brands={"android": "yataxi"}) as orders:
        orders.clock.advance(3 * HOUR)
        assert orders.count(left, other) == ["before_start", "conflict"]
        assert orders.count(other) == ["conflict"]
    clock = ManualClock((START + HOUR) * 1_000_000)
    with opened(store_url, start=iso(START), application_brands={"other": "yango"}, clock=clock) as orders:
        assert orders.count(left) == ["before_start"]
        assert len(orders.store.read(lambda tx: kept_orders(tx, orders.unit, None, "", 9))) == 1


@pytest.mark.spec("ORD-05")
def test_two_orders_that_are_set_aside_under_one_id_at_once_are_kept_or_told(store_url: str) -> None:
    with opened(store_url, application_brands={"android": "yataxi"}) as orders:
        statuses: dict[int, list[str]] = {}

        def work(number: int) -> None:
            for turn in range(10):
                sent = order(f"o{turn}", NOW, {"phone_id": f"p{number}"}, application="new")
                statuses.setdefault(turn, []).extend(orders.count(sent))

        four_at_once(work)
        assert [sorted(each) for each in statuses.values()] == [["conflict"] * 3 + ["set_aside"]] * 10


@pytest.mark.spec("ORD-04", "ORD-05")
def test_orders_arrive_by_topic_and_what_is_wrong_is_set_aside(orders: Orders) -> None:
    orders.send(
        order("1"),
        order("1"),
        b"{}",
        order("2", NOW - 400 * DAY),
        order("3", NOW, {"nobody": "x"}),
        order("1", NOW - 1),
    )
    assert orders.total("phone_id", "p1") == 1
    letters = orders.store.read(lambda tx: deadletters.listed(tx, "orders-rides"))
    reasons = " ".join(each.reason for each in letters)
    assert len(letters) == 3
    assert [each.order_id for each in orders.store.read(lambda tx: kept_orders(tx, orders.unit, "late", "", 9))] == [
        "2"
    ]
    assert "conflict" in reasons
    assert "order_id" in reasons
    assert "nobody" in reasons
    orders.send(order("1"), order("4"))
    assert orders.total("phone_id", "p1") == 2


@pytest.mark.spec("ORD-01")
def test_values_that_would_fill_the_store_are_bounded(store_url: str) -> None:
    with opened(store_url, slices_max=3) as orders:
        statuses = orders.count(*[order(f"{n}", NOW, tariff=f"t{n}") for n in range(5)])
        assert sorted(statuses) == ["accepted"] * 3 + ["set_aside"] * 2
        assert len(orders.cells()) == 3


# Reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("ORD-03")
def test_counts_are_filtered_grouped_and_sorted_by_their_values(orders: Orders) -> None:
    rides = [("cash", "econom")] * 5 + [("card", "econom")] * 10 + [("card", "business")] * 2
    orders.count(
        *[
            order(
                f"{n}",
                NOW,
                {"phone_id": "12345", "yandex_uid": "67890"},
                brand="yataxi",
                payment_method_type=pay,
                tariff=tariff,
            )
            for n, (pay, tariff) in enumerate(rides)
        ],
        order("other", NOW, {"phone_id": "12345"}, brand="uber", payment_method_type="card", tariff="econom"),
    )
    first, second, third = orders.read(
        ("phone_id", "12345"), ("yandex_uid", "67890"), ("card_id", "none"),
        group_by=["payment_method_type", "tariff"],
        filters={"brand": "yataxi"},
    )  # fmt: skip
    told = [([each.value for each in item.properties], item.counter_value) for item in first.data]
    assert told == [(["card", "business"], 2), (["card", "econom"], 10), (["cash", "econom"], 5)]
    assert second.data == first.data
    assert third.data == []
    assert orders.read(("phone_id", "12345"))[0].data[0].counter_value == 18
    assert orders.read(("phone_id", "12345"), filters={"brand": "none"})[0].data == []


@pytest.mark.spec("ORD-03")
@pytest.mark.parametrize(
    ("query", "said", "place"),
    [
        (Query([Identity("mail", "x")]), "there is no identity type 'mail'", "identities[0].type"),
        (Query([Identity("phone_id", "x")], [Property("city", "x")]), "there is no property 'city'", "filters[0].name"),
        (Query([Identity("phone_id", "x")], [], ["city"]), "there is no property 'city'", "group_by[0]"),
        (
            Query([Identity("phone_id", "x")], [Property("brand", "x"), Property("brand", "y")]),
            "the property 'brand' is filtered twice",
            "filters[1].name",
        ),
        (Query([Identity("phone_id", "x")], [], ["brand", "brand"]), "stands twice", "group_by[1]"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_its_place(
    sqlite_orders: Orders, query: Query, said: str, place: str
) -> None:
    from keyfold.orders.service.reading import must_be_known

    with pytest.raises(BadInput, match=said) as error:
        sqlite_orders.store.read(lambda tx: must_be_known(sqlite_orders.unit.stood(tx).state, query))
    assert error.value.place == place


@pytest.fixture
def sqlite_orders(tmp_path: Path) -> Iterator[Orders]:
    with opened(f"sqlite:///{tmp_path / 'keyfold.db'}") as found:
        yield found


@pytest.mark.parametrize(
    ("wrong", "said", "place"),
    [
        (order("1", NOW, {"mail": "x"}), "there is no identity type", "orders[1].identities.mail"),
        (CompletedOrder("1", order("1").created_at, {}), "at least one identity", "orders[1].identities"),
        (order("1", NOW, city="x"), "there is no property 'city'", "orders[1].properties.city"),
        (order("1", NOW, application="android"), "there is no property", "orders[1].properties.application"),
        (order("1", NOW + 301), "in the future", "orders[1].created_at"),
    ],
)
def test_a_wrong_order_is_refused_with_its_place_and_nothing_changes(
    sqlite_orders: Orders, wrong: CompletedOrder, said: str, place: str
) -> None:
    with pytest.raises(BadInput, match=said) as error:
        sqlite_orders.count(order("good"), wrong)
    assert error.value.place == place
    assert not sqlite_orders.cells()


@pytest.mark.spec("ORD-12")
def test_a_read_touches_the_index_alone_whatever_was_counted(orders: Orders) -> None:
    for start in range(0, 400, 100):
        orders.count(
            *[order(f"{n}", NOW, {"phone_id": f"p{n % 40}"}, tariff=f"t{n % 3}") for n in range(start, start + 100)]
        )
    for asked in (1, 3, 20):
        for found in _plans(orders, Query([Identity("phone_id", f"p{n}") for n in range(asked)])):
            assert ("SEARCH" in found and "PRIMARY KEY" in found) or "Index Only Scan" in found, found
    assert orders.total("phone_id", "p1") == 10
    assert len(orders.cells()) == 120, "as many rows as there are cells, however many orders"


@pytest.mark.spec("ORD-03", "ORD-12")
def test_a_look_up_answers_as_a_read_does_or_not_at_all(store_url: str) -> None:
    """Over random queries; a state or a slice that this process has not seen is left to the read."""
    chance = random.Random(12)
    with opened(store_url) as writer, opened(store_url) as other:
        if writer.store.is_sqlite:
            pytest.skip("its reads are all answered by the lanes")
        assert other.unit.remembered() is None
        query = Query([Identity("phone_id", "p1")])
        assert reading.lookup_of(other.unit, query) is None
        writer.count(
            *[
                order(
                    f"{n}",
                    NOW,
                    {"phone_id": f"p{n % 9}", "card_id": f"c{n % 7}"},
                    tariff=f"t{n % 3}",
                    brand=f"b{n % 2}",
                )
                for n in range(200)
            ]
        )
        other.store.read(other.unit.seen)
        assert _looked_up(other, query) is None, "its slices are not known yet"
        for _ in range(100):
            identities = [
                Identity(
                    *chance.choice([("phone_id", f"p{chance.randrange(10)}"), ("card_id", f"c{chance.randrange(8)}")])
                )
                for _ in range(chance.randrange(1, 9))
            ]
            filters = [Property("tariff", f"t{chance.randrange(4)}")] if chance.random() < 0.5 else []
            query = Query(identities, filters, chance.sample(DIMENSIONS, chance.randrange(4)))
            read = other.store.read(lambda tx, query=query: reading.read_orders(tx, other.unit, query))  # type: ignore[misc]
            other.store.read(other.unit.seen)
            assert _looked_up(other, query) == read
        assert reading.lookup_of(other.unit, Query([Identity("phone_id", f"p{n}") for n in range(9)])) is None
        with pytest.raises(BadInput, match="no identity type"):
            reading.lookup_of(other.unit, Query([Identity("passport", "p1")]))


def _looked_up(orders: Orders, query: Query) -> list[reading.IdentityData] | None:
    found = reading.lookup_of(orders.unit, query)
    assert found is not None
    few, answered = found
    return answered(orders.store.read(lambda tx: tx.rows(few.sql, few.parameters)))


def _prefer_indexes(tx: Transaction) -> None:
    """PostgreSQL would rather scan tables that are as small as those of tests, and the nodes of a cluster as well."""
    if not tx.is_sqlite:
        for said in ("citus.propagate_set_commands = 'local'", "enable_seqscan = off", "enable_bitmapscan = off"):
            tx.driver(f"SET LOCAL {said}")


def _plans(orders: Orders, query: Query) -> list[str]:
    """How the database finds what is read, by the statements that are sent for it."""
    sent: list[tuple[str, Any]] = []

    def listen(tx: Transaction) -> None:
        rows = tx.rows

        def heard(sql: str, parameters: Any = None) -> Any:
            sent.append((sql, parameters))
            return rows(sql, parameters)

        tx.rows = heard  # type: ignore[method-assign]
        reading.read_orders(tx, orders.unit, query)

    def look(tx: Transaction) -> list[str]:
        _prefer_indexes(tx)
        explain = "EXPLAIN QUERY PLAN" if tx.is_sqlite else "EXPLAIN"
        return [str(tx.rows(f"{explain} {sql}", given)) for sql, given in sent if "live_count" in sql]

    orders.store.read(listen)
    plans = orders.store.transact(look)
    assert len(plans) == 1, "one statement for all identities"
    return plans


# First-N ----------------------------------------------------------------------------------------------------------


def check(
    orders: Orders, order_id: str | None = None, identities: dict[str, str] | None = None, **more: Any
) -> Checked:
    asked = Check(
        [Identity(*each) for each in (identities or {"phone_id": "p1", "card_id": "c1"}).items()],
        [Property(name, value) for name, value in more.pop("filters", {}).items()],
        order_id=order_id,
        reserve_seconds=60 if order_id else 0,
        **(more or {"fewer_than": 3}),
    )
    (answer,) = orders.store.transact(lambda tx: check_orders(tx, orders.unit, [asked]))
    if isinstance(answer, Exception):
        raise answer
    return answer


@pytest.mark.spec("ORD-14")
def test_a_check_asks_every_identity(orders: Orders) -> None:
    orders.count(
        order("1", NOW, {"phone_id": "p1"}, tariff="econom"), order("2", NOW, {"phone_id": "p1"}, tariff="econom")
    )
    assert check(orders).allowed
    assert not check(orders, fewer_than=2).allowed
    assert "phone_id has 2 orders" in check(orders, fewer_than=2).reason
    assert check(orders, fewer_than=1, filters={"tariff": "business"}).allowed
    assert not check(orders, at_least=2).allowed, "the card has none"
    assert check(orders, at_least=2, identities={"phone_id": "p1"}).allowed


@pytest.mark.spec("ORD-14")
def test_a_place_is_held_until_it_expires_and_counting_the_order_takes_it(orders: Orders) -> None:
    assert check(orders, "a", fewer_than=2).allowed
    assert check(orders, "b", fewer_than=2).allowed
    assert not check(orders, "c", fewer_than=2).allowed
    assert check(orders, "a", fewer_than=2).allowed, "asked for again it is the same place"
    assert not check(orders, fewer_than=2).allowed, "what is held is taken"
    assert not check(orders, "a", fewer_than=1).allowed
    assert not check(orders, "c", fewer_than=2).allowed, "whoever was told yes may rely on it, a no later on or not"
    orders.count(order("a", NOW, {"phone_id": "p1", "card_id": "c1"}))
    assert not check(orders, "c", fewer_than=2).allowed
    with pytest.raises(Conflict, match="counted already"):
        check(orders, "a", fewer_than=2)
    orders.clock.advance(61)
    assert check(orders, "c", fewer_than=2).allowed, "b has not come in time"
    assert orders.store.transact(lambda tx: sweeping.purge_reservations(tx, orders.unit, 100)) == 2
    assert orders.store.transact(lambda tx: release(tx, orders.unit, ["c"])) == 2
    assert orders.store.transact(lambda tx: sweeping.purge_gates(tx, orders.unit, 100)) == 2
    assert check(orders, "d", fewer_than=2).allowed


@pytest.mark.spec("ORD-14")
def test_a_place_is_held_for_as_long_as_is_told_also_when_asked_for_again_for_less(orders: Orders) -> None:
    def hold(seconds: int, *types: str) -> Check:
        whose = [Identity(each, "1") for each in types]
        return Check(whose, fewer_than=1, order_id="a", reserve_seconds=seconds)

    def held_until(*checks: Check) -> list[str | None]:
        told = orders.store.transact(lambda tx: check_orders(tx, orders.unit, checks))
        return [each.reserved_until for each in told if isinstance(each, Checked)]

    def at(created: float) -> str:
        return iso_us(int(created * 1_000_000))

    long, short = hold(3_600, "phone_id"), hold(60, "phone_id")
    assert held_until(long, short) == [at(NOW + 3_600)] * 2
    assert held_until(short) == [at(NOW + 3_600)]
    assert held_until(hold(60, "phone_id", "card_id")) == [at(NOW + 60)], "the card has it no longer"
    orders.clock.advance(3_590)
    assert not check(orders, fewer_than=1, identities={"phone_id": "1"}).allowed
    assert held_until(short) == [at(NOW + 3_650)], "asked for again it is held from now on"
    orders.clock.advance(61)
    assert check(orders, fewer_than=1, identities={"phone_id": "1"}).allowed


@pytest.mark.spec("ORD-14")
def test_a_place_counts_for_every_filter_that_its_order_could_match(orders: Orders) -> None:
    assert check(orders, "a", fewer_than=1, filters={"tariff": "econom"}).allowed
    assert not check(orders, "b", fewer_than=1).allowed, "an order in econom is an order"
    assert not check(orders, "b", fewer_than=1, filters={"brand": "uber"}).allowed, "it could be one of uber"
    assert check(orders, "b", fewer_than=1, filters={"tariff": "business"}).allowed


@pytest.mark.spec("ORD-14")
def test_a_place_that_no_index_could_hold_is_refused_alike_on_every_store(store_url: str) -> None:
    """Random characters of four bytes, which no index makes shorter."""
    chance = random.Random(5)

    def long(bytes_: int) -> str:
        return "".join(chr(chance.randrange(0x10000, 0x30000)) for _ in range(bytes_ // 4)) + "x" * (bytes_ % 4)

    dimensions = [f"d{n}" for n in range(5)]
    with opened(store_url, dimensions=dimensions) as orders:
        state = orders.store.read(orders.unit.stood).state
        given = {"identities": [Identity("phone_id", "p1"), Identity("card_id", long(800))], "fewer_than": 1}
        held = {**given, "order_id": long(800), "reserve_seconds": 60}
        most = HELD_BYTES_MAX - 1_600 - len(b'{"d0":"","d1":""}')
        fits = Check(**held, filters=[Property("d0", long(most - most // 2)), Property("d1", long(most // 2))])
        must_be_check(state, orders.unit, fits)
        (answer,) = orders.store.transact(lambda tx: check_orders(tx, orders.unit, [fits]))
        assert isinstance(answer, Checked)
        assert answer.allowed
        filters = [*fits.filters[:1], Property("d1", fits.filters[1].value + "x")]
        with pytest.raises(BadInput, match="longer than 2600 bytes") as refused:
            must_be_check(state, orders.unit, Check(**held, filters=filters))
        assert refused.value.place == "filters"
        filters = [Property(name, long(800)) for name in dimensions]
        must_be_check(state, orders.unit, Check(**given, filters=filters))  # it holds no place


@pytest.mark.spec("ORD-14")
def test_two_who_ask_at_once_do_not_both_get_the_last_place(store_url: str) -> None:
    with opened(store_url) as orders:
        granted: list[str] = []

        def work(number: int) -> None:
            for turn in range(10):
                name = f"{number}-{turn}"
                # They meet on an identity that is the first of some, and the second of others.
                own, met = ("card_id", f"c{number}"), ("phone_id", "p1")
                shared = dict([own, met] if number % 2 else [met, own])
                if check(orders, name, identities=shared, fewer_than=7).allowed:
                    granted.append(name)

        four_at_once(work)
        assert len(granted) == 7


@pytest.mark.spec("ORD-13", "ORD-14")
def test_a_check_fails_closed_while_history_is_not_counted(with_history: Orders, tmp_path: Path) -> None:
    with_history.clock.advance(3 * HOUR)
    assert "history of phone_id" in check(with_history, identities={"phone_id": "p1"}, fewer_than=1).reason
    assert check(with_history, identities={"phone_id": "p1"}, fewer_than=1, allow_incomplete=True).allowed
    path = write_history(tmp_path / "h.parquet", [order("h", START - 1, {"phone_id": "p2"})])
    with_history.backfill(path)
    assert check(with_history, identities={"phone_id": "p1"}, fewer_than=1).allowed
    evidence = with_history.store.read(lambda tx: evidence_of(tx, with_history.unit, [Identity("phone_id", "p1")], 0))[
        0
    ]
    assert (evidence.history, evidence.is_complete, evidence.counted_from) == ("backfilled", True, None)


@pytest.mark.spec("ORD-12", "ORD-13")
def test_counts_do_not_wait_for_evidence_that_waits_for_the_topic(
    orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders.count(order("1"))
    is_asked, answers = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        is_asked.set()
        assert answers.wait(10)

    monkeypatch.setattr(Lag, "messages", wait)
    (route,) = [each for each in order_routes.routes(orders.context) if each.path == "/v1/orders"]
    assert isinstance(route.run, Operation)
    operation, gatherer = route.run, Gatherer(orders.store, orders.context.limits)

    def ask(evidence: bool) -> Any:
        body = order_routes.OrdersBody([Identity("phone_id", "p1")], [], [])
        query = order_routes.OrdersQuery(evidence=evidence)
        return gatherer.ask(operation, Ask(client=ANYONE, body=body, query=query))

    async def work() -> list[Any]:
        waiting = [asyncio.create_task(ask(True)) for _ in range(4)]
        await asyncio.to_thread(is_asked.wait, 5)
        counts = await asyncio.wait_for(asyncio.gather(*(ask(False) for _ in range(4))), 5)
        answers.set()
        return [*counts, *await asyncio.gather(*waiting)]

    try:
        assert [b'"counter_value":1' in each.body for each in asyncio.run(work())] == [True] * 8
    finally:
        answers.set()
        gatherer.close()


@pytest.mark.spec("ORD-13")
def test_the_lag_is_the_number_of_orders_that_wait_in_the_topic(orders: Orders) -> None:
    orders.send(order("1"))
    assert Lag(orders.context).messages(orders.unit) == 0
    waiting = [message(f"w{n}", 0, msgspec.json.encode(order(f"w{n}")), kind=f"w{n}") for n in range(3)]
    put(orders.context, orders.unit.topic, waiting)
    relay_all(relay := Relay(orders.context, orders.unit.topic, "w"))
    relay.stop()
    assert Lag(orders.context).messages(orders.unit) == 3
    orders.send()
    assert Lag(orders.context).messages(orders.unit) == 0
    assert orders.total("phone_id", "p1") == 4


@pytest.mark.spec("ORD-13")
def test_an_order_counted_while_it_is_asked_for_is_told_as_waiting_or_as_counted(
    orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The consumer commits when the counts were read: whoever saw none of it must have seen it wait."""
    orders.send()
    put(orders.context, orders.unit.topic, [message("w", 0, msgspec.json.encode(order("w")), kind="w")])
    relay_all(relay := Relay(orders.context, orders.unit.topic, "w"))
    relay.stop()
    read_many = reading.read_many

    def read_and_consume(*given: Any) -> Any:
        found = read_many(*given)
        orders.send()
        return found

    monkeypatch.setattr(order_routes, "read_many", read_and_consume)
    (route,) = [each for each in order_routes.routes(orders.context) if each.path == "/v1/orders"]
    assert isinstance(route.run, Operation)
    body = order_routes.OrdersBody([Identity("phone_id", "p1")], [], [])
    ask = Ask(client=Client("test", "test", frozenset(), {}), body=body, query=order_routes.OrdersQuery(evidence=True))
    apply = route.run.apply
    (answer,) = orders.store.read(lambda tx: apply(tx, [ask]))
    (told,) = answer.data
    assert (told.data, told.evidence.lag_messages) == ([], 1)
    assert orders.total("phone_id", "p1") == 1


@pytest.mark.spec("ORD-13")
def test_evidence_knows_at_once_what_another_process_has_left_to_history(store_url: str, tmp_path: Path) -> None:
    clock = ManualClock(NOW * 1_000_000)
    with (
        opened(store_url, start=iso(START), clock=clock) as orders,
        opened(store_url, start=iso(START), clock=clock) as other,
    ):
        clock.advance(3 * HOUR)
        orders.backfill(write_history(tmp_path / "h.parquet", [order("h", START - 5, {"phone_id": "p2"})]))

        def told() -> bool:
            asked = [Identity("phone_id", "p1")]
            return other.store.read(lambda tx: evidence_of(tx, other.unit, asked, 0))[0].is_complete

        other.total("phone_id", "p1")
        assert told()
        assert orders.count(order("r", START - 1)) == ["before_start"]
        assert not told()


# Corrections ------------------------------------------------------------------------------------------------------


@pytest.mark.spec("ORD-16")
def test_an_order_is_taken_back_exactly_once_with_an_audit_record(orders: Orders) -> None:
    one, two = order("1", NOW, ALL, tariff="econom"), order("2", NOW, ALL, tariff="econom")
    orders.count(one, two)

    def correct(*ids: str) -> list[str]:
        done = orders.store.transact(lambda tx: correct_orders(tx, orders.unit, ids, "fraud", "test"))
        return [each.status for each in done]

    assert correct("1", "nobody", "1") == ["corrected", "not known", "corrected before"]
    assert correct("1") == ["corrected before"]
    assert orders.cells() == recount([two], DIMENSIONS, list(ALL))
    assert orders.count(one) == ["duplicate"], "within the window it cannot be counted again"
    assert orders.store.read(audit.broken) is None
    acts = orders.store.read(lambda tx: [row.act for row in tx.execute(sa.text("SELECT act FROM audit"))])
    assert acts == ["order taken back"]


@pytest.mark.spec("ORD-13", "ORD-16")
def test_the_interval_of_a_cell_whose_orders_were_all_taken_back_begins_anew(orders: Orders) -> None:
    def interval() -> tuple[str | None, str | None]:
        (told,) = orders.store.read(lambda tx: evidence_of(tx, orders.unit, [Identity("phone_id", "p1")], None))
        return told.counted_from, told.counted_to

    def at(created: float) -> str:
        return iso_us(int(created * 1_000_000))

    orders.count(order("1", NOW - 5 * DAY), order("2", NOW - 4 * DAY), order("3", NOW - 3 * DAY))
    take_back(orders, "1")
    assert interval() == (at(NOW - 5 * DAY), at(NOW - 3 * DAY)), "which order is first now is not known"
    take_back(orders, "2", "3")
    assert interval() == (None, None)
    orders.count(order("4", NOW - DAY))
    assert interval() == (at(NOW - DAY), at(NOW - DAY))


@pytest.mark.spec("ORD-16")
def test_two_who_take_back_one_order_take_it_once(store_url: str) -> None:
    with opened(store_url) as orders:
        orders.count(*[order(str(n), NOW) for n in range(20)])
        done: list[str] = []

        def work() -> None:
            for n in range(20):
                found = orders.store.transact(
                    lambda tx, n=n: correct_orders(tx, orders.unit, [str(n)], "fraud", "test")
                )
                done.extend(each.status for each in found)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert done.count("corrected") == 20
        assert orders.total("phone_id", "p1") == 0


# History ----------------------------------------------------------------------------------------------------------


def some_orders(
    seed: int, count: int, begin: float, end: float, prefix: str = "o", cities: bool = False
) -> list[CompletedOrder]:
    chance = random.Random(seed)
    made = []
    for n in range(count):
        identities = {
            name: f"{name[0]}{chance.randrange(12)}"
            for name in ("phone_id", "yandex_uid", "card_id", "device_id")
            if chance.random() < 0.8
        } or {"phone_id": "p0"}
        properties = {"tariff": chance.choice("abc"), "brand": chance.choice(["yataxi", "uber"])}
        if chance.random() < 0.7:
            properties["payment_method_type"] = chance.choice(["card", "cash"])
        if cities:
            properties["city"] = chance.choice(["moscow", "riga", "omsk"])
        made.append(order(f"{prefix}{n}", chance.uniform(begin, end), identities, **properties))
    return made


def without_city(sent: CompletedOrder) -> CompletedOrder:
    return msgspec.structs.replace(sent, properties={k: v for k, v in sent.properties.items() if k != "city"})


@pytest.mark.spec("ORD-07", "ORD-08", "ORD-01")
def test_live_and_history_together_are_every_order_once(with_history: Orders, tmp_path: Path) -> None:
    every = some_orders(1, 300, START - 5 * DAY, START + HOUR)
    path = write_history(tmp_path / "h.parquet", every)
    with_history.clock.advance(4 * HOUR)
    statuses = with_history.count(*every)
    assert statuses.count("before_start") > 100
    assert statuses.count("accepted") == sum(each.created_at.timestamp() >= START for each in every)
    done = with_history.backfill(path)
    assert with_history.cells() == recount(every, DIMENSIONS, list(ALL))
    assert sum(each.lacking for each in done) == 0
    again = with_history.backfill(path)
    assert [each.orders for each in again] == [each.orders for each in done]
    assert with_history.cells() == recount(every, DIMENSIONS, list(ALL))
    first = min(each.created_at for each in every if each.identities.get("phone_id") == "p1")
    evidence = with_history.store.read(lambda tx: evidence_of(tx, with_history.unit, [Identity("phone_id", "p1")], 0))[
        0
    ]
    assert evidence.counted_from == first.isoformat().replace("+00:00", "Z"), "the interval covers both parts"


@pytest.mark.spec("ORD-08")
def test_a_rerun_follows_a_history_that_was_mended(with_history: Orders, tmp_path: Path) -> None:
    every = some_orders(2, 200, START - 5 * DAY, START)
    path = tmp_path / "h.parquet"
    with_history.clock.advance(4 * HOUR)
    with_history.count(*[each for each in every if each.created_at.timestamp() > START - 2 * DAY])
    done = with_history.backfill(write_history(path, every[:120]))
    assert sum(each.lacking for each in done) > 0, "what arrived live and is not in history is told"
    assert with_history.cells() == recount(every[:120], DIMENSIONS, list(ALL))
    with_history.backfill(write_history(path, every[60:]), cells_max=7)
    assert with_history.cells() == recount(every[60:], DIMENSIONS, list(ALL)), "what vanished is zero"
    with_history.backfill(write_history(path, every), cells_max=50)
    assert with_history.cells() == recount(every, DIMENSIONS, list(ALL))


@pytest.mark.spec("ORD-08")
def test_what_vanished_from_history_is_emptied_in_bounded_steps(
    with_history: Orders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "h.parquet"
    every = [order(f"{n}", START - 1, {"phone_id": f"p{n:02}"}) for n in range(60)]
    with_history.backfill(write_history(path, every), "phone_id")
    cells = with_history.unit.tables.cells
    filled = sa.select(sa.func.count()).select_from(cells).where(cells.c.history_count != 0)
    stands = [60]
    real = with_history.store.transact

    def transact(work: Any, **more: Any) -> Any:
        found = real(work, **more)
        stands.append(with_history.store.read(lambda tx: tx.execute(filled).scalar_one()))
        return found

    monkeypatch.setattr(with_history.store, "transact", transact)
    with_history.backfill(write_history(path, [every[7], every[40]]), "phone_id", cells_max=8)
    assert stands[-1] == 2
    assert max(before - after for before, after in pairwise(stands)) <= 8


@pytest.mark.spec("ORD-08")
def test_any_ibis_table_will_do_and_one_that_was_mended_is_read_from_its_beginning(tmp_path: Path) -> None:
    import ibis

    every = some_orders(20, 40, START - DAY, START)
    connection = ibis.duckdb.connect()

    def table(sent: list[CompletedOrder]) -> History:
        path = write_history(tmp_path / "h.parquet", sent)
        naive = "* REPLACE (CAST(created_proc AT TIME ZONE 'UTC' AS TIMESTAMP) AS created_proc)"
        connection.raw_sql(f"CREATE OR REPLACE TABLE finished AS SELECT {naive} FROM read_parquet('{path}')")
        made = connection.table("finished")
        return history_of(orders.unit, made, names_of(orders.unit, orders.store.read(orders.unit.stood).state))

    def stop(done: int, what: str) -> None:
        raise Killed

    with opened(f"sqlite:///{tmp_path / 'x.db'}", start=iso(START)) as orders:
        with pytest.raises(Killed):
            backfill(orders.store, orders.unit, table(every[:20]), list(ALL), stop, cells_max=5)
        backfill(orders.store, orders.unit, table(every), list(ALL))
        assert orders.cells() == recount(every, DIMENSIONS, list(ALL))


@pytest.mark.spec("ORD-07", "ORD-08")
@pytest.mark.parametrize(
    ("zone", "kind"),
    [
        ("America/New_York", "aware"),
        ("Asia/Tokyo", "aware"),
        ("America/New_York", "naive"),
        ("Asia/Tokyo", "naive"),
        ("America/New_York", "text"),
    ],
)
def test_the_start_is_one_moment_whatever_the_zone_of_the_connection(tmp_path: Path, zone: str, kind: str) -> None:
    import ibis

    connection = ibis.duckdb.connect()
    connection.raw_sql(f"SET TimeZone = '{zone}'")
    hours = [order(f"h{n}", START + n * HOUR, {"phone_id": "p1"}) for n in range(-12, 12)]
    path = write_history(tmp_path / "h.parquet", hours)
    naive = "created_proc AT TIME ZONE 'UTC'"
    text = f"strftime({naive}, '%Y-%m-%d %H:%M:%S') || CASE WHEN hour({naive}) % 2 = 0 THEN 'Z' ELSE '' END"
    moment = {"aware": "created_proc", "naive": naive, "text": text}[kind]
    connection.raw_sql(f"CREATE TABLE h AS SELECT * REPLACE ({moment} AS created_proc) FROM read_parquet('{path}')")
    with opened(f"sqlite:///{tmp_path / 'x.db'}", start=iso(START)) as orders:
        orders.clock.advance(2 * DAY)
        assert orders.count(*hours).count("accepted") == 12
        names = names_of(orders.unit, orders.store.read(orders.unit.stood).state)
        history = history_of(orders.unit, connection.table("h"), names)
        (done,) = backfill(orders.store, orders.unit, history, ["phone_id"])
        assert (done.orders, orders.total("phone_id", "p1")) == (12, 24)
        found = orders.store.read(lambda tx: evidence_of(tx, orders.unit, [Identity("phone_id", "p1")], 0))[0]
        assert found.counted_from == iso(START - 12 * HOUR).replace("+00:00", "Z")


class Killed(BaseException):
    """As a process that dies: nothing of it runs on."""


@pytest.mark.spec("ORD-08", "ORD-09")
def test_a_backfill_killed_at_every_commit_while_orders_arrive_ends_exact(
    store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = some_orders(3, 260, START - 5 * DAY, START + 2 * HOUR)
    live = [each for each in every if each.created_at.timestamp() >= START]
    path = write_history(tmp_path / "h.parquet", every)
    with opened(store_url, start=iso(START), dedupe_days=10) as orders:
        orders.clock.advance(5 * HOUR)
        real = orders.store.transact
        left: list[int] = []
        # Live ones, and those that history has as well, one between any two commits.
        early = [each for each in every if START - 4 * DAY < each.created_at.timestamp() < START]
        waiting = [each for pair in zip(live, early, strict=False) for each in pair]

        def transact(work: Any, **more: Any) -> Any:
            found = real(work, **more)
            if more.get("name") in ("backfill", "begin job", "look", "claim backfill"):
                if waiting:
                    real(lambda tx: orders.unit and _count_all(tx, orders.unit, [waiting.pop()]))
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
            return found

        monkeypatch.setattr(orders.store, "transact", transact)
        for commits in range(1000):
            left[:] = [commits]
            try:
                done = orders.backfill(path, cells_max=40)
                break
            except Killed:
                continue
        assert commits > 10
        monkeypatch.undo()
        assert sum(each.lacking for each in done) == 0
        orders.count(*live, *early)
        assert orders.cells() == recount(every, DIMENSIONS, list(ALL))
        orders.backfill(path)
        assert all(is_complete(orders, name) for name in ALL)
        assert orders.cells() == recount(every, DIMENSIONS, list(ALL))


def _count_all(tx: Transaction, unit: Unit, sent: list[CompletedOrder]) -> None:
    from keyfold.orders.service.counting import count_orders

    count_orders(tx, unit, sent)


@pytest.mark.spec("ORD-08")
def test_a_run_that_another_has_taken_over_stops(with_history: Orders, tmp_path: Path) -> None:
    path = write_history(tmp_path / "h.parquet", some_orders(4, 100, START - DAY, START))
    with_history.clock.advance(3 * HOUR)
    seen: list[int] = []

    def interfere(done: int, what: str) -> None:
        if not seen:
            seen.append(done)
            with_history.backfill(path)

    with pytest.raises(LeaseLost, match="another run"):
        with_history.backfill(path, report=interfere, cells_max=10)


@pytest.mark.spec("ORD-09")
def test_a_new_identity_type_has_its_own_start_and_its_backfill_touches_nothing_else(
    store_url: str, tmp_path: Path
) -> None:
    with opened(store_url, dedupe_days=10) as orders:
        before = [
            msgspec.structs.replace(each, identities={**each.identities, "mail": f"m{n % 5}"})
            for n, each in enumerate(some_orders(5, 60, NOW - DAY, NOW))
        ]
        orders.count(
            *[
                msgspec.structs.replace(each, identities={k: v for k, v in each.identities.items() if k != "mail"})
                for each in before
            ]
        )
        kind = add_identity(orders.store, orders.unit, "mail", START * 1_000_000)
        assert add_identity(orders.store, orders.unit, "mail") == kind
        with pytest.raises(Conflict, match="another start"):
            add_identity(orders.store, orders.unit, "mail", START * 1_000_000 + 1)
        orders.clock.advance(3 * HOUR)
        between = [
            msgspec.structs.replace(each, identities={**each.identities, "mail": "m1"})
            for each in some_orders(6, 20, NOW, START + HOUR, prefix="b")
        ]
        assert set(orders.count(*between)) == {"accepted"}
        with pytest.raises(Conflict, match="counts live"):
            orders.backfill(write_history(tmp_path / "x.parquet", before), "phone_id")
        (done,) = orders.backfill(write_history(tmp_path / "h.parquet", [*before, *between]), "mail")
        assert done.lacking == 0
        assert orders.cells() == recount([*before, *between], DIMENSIONS, [*ALL, "mail"])


@pytest.mark.spec("ORD-08", "ORD-09")
def test_a_mistyped_column_of_an_identity_type_is_mended_by_asking_again(store_url: str, tmp_path: Path) -> None:
    with opened(store_url, identities=["phone_id"]) as orders:
        kind = add_identity(orders.store, orders.unit, "mail", START * 1_000_000, "mial")
        orders.clock.advance(3 * HOUR)
        path = write_history(tmp_path / "h.parquet", [order("1", NOW, {"mail": "m"}), order("2", NOW, {"mial": "n"})])
        orders.backfill(path, "mail")
        assert (orders.total("mail", "n"), is_complete(orders, "mail")) == (1, True)
        assert (
            add_identity(orders.store, orders.unit, "mail")
            == orders.store.read(orders.unit.stood).state.by_name["mail"]
        )
        assert is_complete(orders, "mail"), "nothing was asked to change"
        assert add_identity(orders.store, orders.unit, "mail", column="email").start_us == kind.start_us
        assert not is_complete(orders, "mail"), "what was counted is of another column"
        with pytest.raises(BadInput, match=r"lacks columns: email \(mail\)") as error:
            orders.backfill(path, "mail")
        assert "keyfold orders add-identity mail --column" in error.value.hint
        add_identity(orders.store, orders.unit, "mail", column="mail")
        orders.backfill(path, "mail")
        assert [orders.total("mail", each) for each in "mn"] == [1, 0]
        assert is_complete(orders, "mail")
        assert switch(orders.store, orders.unit, "city") is not None
        with pytest.raises(Conflict, match="is being added"):
            add_identity(orders.store, orders.unit, "mail", column="other")


@pytest.mark.spec("ORD-08", "ORD-09")
def test_a_column_that_is_named_while_a_backfill_is_at_another_type_stops_it(store_url: str, tmp_path: Path) -> None:
    with opened(store_url, start=iso(START), identities=["phone_id"]) as orders:
        add_identity(orders.store, orders.unit, "mail", (START + 1) * 1_000_000, "mial")
        orders.clock.advance(3 * HOUR)
        path = write_history(
            tmp_path / "h.parquet", [order("1", NOW, {"phone_id": "p1", "mail": "m"}), order("2", NOW, {"mial": "n"})]
        )

        def meanwhile(done: int, what: str) -> None:
            add_identity(orders.store, orders.unit, "mail", column="mail")

        with pytest.raises(Conflict, match="another column was named for mail meanwhile"):
            orders.backfill(path, "phone_id", "mail", report=meanwhile)
        assert not is_complete(orders, "mail")
        orders.backfill(path, "mail")
        assert [orders.total("mail", each) for each in "mn"] == [1, 0]


@pytest.mark.spec("ORD-07", "ORD-08")
def test_a_table_of_an_engine_that_cannot_cut_times_is_counted_too(tmp_path: Path) -> None:
    import ibis

    path = write_history(tmp_path / "h.parquet", [order("1", START - 1), order("2", START + 1)])
    names = [name for name in pq.read_schema(path).names if name != "created_proc"]
    declared = ", ".join(f"{name} TEXT" for name in names)
    rows = [
        (f"{row['created_proc']:%Y-%m-%d %H:%M:%S}", *[row[name] for name in names])
        for row in pq.read_table(path).to_pylist()
    ]
    file = tmp_path / "history.db"
    with closing(sqlite3.connect(file)) as connection:
        connection.execute(f"CREATE TABLE orders (created_proc TIMESTAMP, {declared})")
        connection.executemany(f"INSERT INTO orders VALUES ({', '.join('?' * (1 + len(names)))})", rows)
        connection.commit()
    table = ibis.sqlite.connect(file).table("orders")
    with opened(f"sqlite:///{tmp_path / 'x.db'}", start=iso_us(START * 1_000_000 + 5)) as orders:
        orders.clock.advance(3 * HOUR)
        state = orders.store.read(orders.unit.stood).state
        history = history_of(orders.unit, table, names_of(orders.unit, state, ["phone_id"]))
        backfill(orders.store, orders.unit, history, ["phone_id"])
        assert orders.total("phone_id", "p1") == 1


@pytest.mark.spec("ORD-08", "ORD-11")
def test_where_brands_come_from_applications_only_some_files_may_name_them(tmp_path: Path) -> None:
    sent = [order(f"{n}", START - 1 - n, application="android") for n in range(2)]
    write_history(tmp_path / "h1.parquet", sent[:1], without=["brand"])
    write_history(tmp_path / "h2.parquet", sent[1:])
    with opened(f"sqlite:///{tmp_path / 'x.db'}", start=iso(START), application_brands={"android": "yataxi"}) as orders:
        orders.backfill(tmp_path / "h*.parquet", "phone_id")
        assert orders.total("phone_id", "p1", brand="yataxi") == 2


@pytest.mark.spec("ORD-07", "ORD-09")
def test_the_start_of_a_new_identity_type_is_a_whole_second(store_url: str) -> None:
    with opened(store_url, clock=ManualClock(NOW * 1_000_000 + 734_512)) as orders:
        kind = add_identity(orders.store, orders.unit, "mail")
        lead = orders.unit.settings.start_lead_seconds_min + 60
        assert kind.start_us == (NOW + lead + 1) * 1_000_000
        assert add_identity(orders.store, orders.unit, "mail") == kind


@pytest.mark.spec("ORD-07", "ORD-08")
@pytest.mark.parametrize("unit_us", [1_000, 1_000_000, 60_000_000, 86_400_000_000])
@pytest.mark.parametrize("is_text", [False, True])
def test_times_too_coarse_to_tell_the_sides_of_the_start_are_refused(
    tmp_path: Path, unit_us: int, is_text: bool
) -> None:
    start_us = START * 1_000_000 + 734_512
    live = CompletedOrder("live", EPOCH + timedelta(microseconds=start_us + 300), {"phone_id": "p1"})
    moments = [each // unit_us * unit_us for each in (start_us + 300, start_us - 3 * unit_us)]

    def written(moments_us: list[int]) -> Path:
        path = write_history(tmp_path / "h.parquet", [live, order("early", START - 9)])
        table = pq.read_table(path)
        times = pa.array(moments_us, pa.timestamp("us", "UTC"))
        if is_text:
            times = pa.array([iso_us(each) for each in moments_us])
        pq.write_table(table.set_column(table.schema.get_field_index("created_proc"), "created_proc", times), path)
        return path

    with opened(f"sqlite:///{tmp_path / 'x.db'}", start=iso_us(start_us)) as orders:
        orders.clock.advance(3 * HOUR)
        assert orders.count(live) == ["accepted"]
        with pytest.raises(BadInput) as error:
            orders.backfill(written(moments), "phone_id")
        assert "1 orders" in error.value.detail
        assert iso_us(moments[0]) in error.value.detail
        assert orders.total("phone_id", "p1") == 1, "nothing was counted twice"
        orders.backfill(written([start_us + 300, moments[1]]), "phone_id")
        assert orders.total("phone_id", "p1") == 2
        orders.backfill(written([moments[0] + unit_us, moments[1]]), "phone_id")
        assert orders.total("phone_id", "p1") == 2, "coarse times elsewhere are no harm"
        left = msgspec.structs.replace(live, order_id="left", created_at=EPOCH + timedelta(microseconds=moments[0]))
        if unit_us <= 60_000_000:
            assert orders.count(left) == ["before_start"]
        orders.backfill(write_history(tmp_path / "h.parquet", [left]), "phone_id")
        assert orders.total("phone_id", "p1") == 2, "nor is an order at the cut that did not count live"


@pytest.mark.parametrize(
    ("orders_given", "without", "said"),
    [
        (
            [order("1", START - 1), order("2", START - 1)],
            ["performer_tariff_class", "user_uid"],
            "lacks columns: user_uid (yandex_uid), performer_tariff_class (tariff)",
        ),
        (
            [order("1", START - 1), order("1", START - 2), order("2", START - 3)],
            [],
            "1 orders stand there more than once: 1",
        ),
        ([order("1", START - 1, {"phone_id": "x" * 201})], [], "longer than 200"),
        ([order("1", START - 1, {"phone_id": "x\0y"})], [], "1 values of phone_id have a NUL"),
        ([order("1", START - 1, tariff="\0")], [], "1 values of tariff have a NUL"),
    ],
)
@pytest.mark.spec("ORD-08")
def test_a_wrong_history_is_refused_and_nothing_changes(
    tmp_path: Path, orders_given: list[CompletedOrder], without: list[str], said: str
) -> None:
    with opened(f"sqlite:///{tmp_path / 'x.db'}", start=iso(START)) as orders:
        with pytest.raises(BadInput) as error:
            orders.backfill(write_history(tmp_path / "h.parquet", orders_given, without))
        assert said in str(error.value)
        assert not orders.cells()
        with pytest.raises(BadInput, match="there are no files"):
            orders.backfill(tmp_path / "nothing.parquet")


@pytest.mark.spec("ORD-08", "CORE-13")
def test_text_that_is_no_time_is_told_with_its_column_before_anything_is_written(tmp_path: Path) -> None:
    path = write_history(tmp_path / "h.parquet", [order(f"{n}", START - 1) for n in range(3)])
    times = pa.array(["2023-11-14T20:00:00Z", "yesterday", "2023-11-14 25:00:00"])
    at = pq.read_schema(path).get_field_index("created_proc")
    pq.write_table(pq.read_table(path).set_column(at, "created_proc", times), path)
    with opened(f"sqlite:///{tmp_path / 'x.db'}", start=iso(START)) as orders:
        told = r"^2 values of created_proc are no times: '[^']*'; write 2026-11-15T20:30:00Z$"
        with pytest.raises(BadInput) as error:
            orders.backfill(path)
        assert re.search(told, error.value.detail), "they are there, so nothing is said to lack a time"
        assert not orders.cells()
        path.write_text("no Parquet")
        with pytest.raises(BadInput) as error:
            orders.backfill(path)
        assert "the history cannot be read" in error.value.detail
        assert (str(path) in error.value.detail, "\n" in error.value.detail) == (True, False)


@pytest.mark.parametrize(
    ("moment", "kind"),
    [
        (-1, pa.timestamp("us", tz="UTC")),
        (-62_135_596_800_000_001, pa.timestamp("us")),  # behind the last moment of the year 0
        (-(2**63) + 1, pa.timestamp("us", tz="UTC")),  # minus infinity
        ("-0044-03-15T00:00:00Z", pa.string()),
    ],
)
@pytest.mark.spec("ORD-08", "CORE-13")
def test_history_has_no_times_before_1970_as_live_orders_have_none(
    tmp_path: Path, moment: int | str, kind: pa.DataType
) -> None:
    path = write_history(tmp_path / "h.parquet", [order("1", 0), order("2", 0)])
    times = pa.array(["1970-01-01T00:00:00Z", moment] if isinstance(moment, str) else pa.array([0, moment]).cast(kind))
    at = pq.read_schema(path).get_field_index("created_proc")
    with opened(f"sqlite:///{tmp_path / 'x.db'}", start=iso(START)) as orders:
        orders.backfill(path, "phone_id")
        pq.write_table(pq.read_table(path).set_column(at, "created_proc", times), path)
        with pytest.raises(BadInput, match="1 orders were created before 1970"):
            orders.backfill(path, "phone_id")
        (evidence,) = orders.store.read(lambda tx: evidence_of(tx, orders.unit, [Identity("phone_id", "p1")], 0))
        assert evidence.counted_from == "1970-01-01T00:00:00Z"


@pytest.mark.spec("ORD-08", "CORE-13")
def test_a_file_with_two_columns_of_one_name_is_refused_where_that_is_read(tmp_path: Path) -> None:
    path = write_history(tmp_path / "h.parquet", [order("1", START - 1, {"phone_id": "p1"})])
    table, other = pq.read_table(path), pa.array(["other"])
    with opened(f"sqlite:///{tmp_path / 'x.db'}", start=iso(START)) as orders:
        pq.write_table(table.append_column("note", other).append_column("note", other), path)
        orders.backfill(path, "phone_id")
        pq.write_table(table.append_column("id", other), path)
        with pytest.raises(BadInput, match=r"h\.parquet has more than one column id"):
            orders.backfill(path, "phone_id")
        assert orders.total("phone_id", "p1") == 1


@pytest.mark.spec("ORD-08", "CORE-13")
def test_what_the_engine_cannot_compute_is_told_in_its_words(tmp_path: Path) -> None:
    import ibis

    connection = ibis.duckdb.connect()
    write_history(tmp_path / "h.parquet", [order("1", START - 1, {"phone_id": "abc"})])
    number = "* REPLACE (CAST(user_phone_id AS BIGINT) AS user_phone_id)"
    connection.raw_sql(f"CREATE VIEW h AS SELECT {number} FROM read_parquet('{tmp_path / 'h.parquet'}')")
    with opened(f"sqlite:///{tmp_path / 'x.db'}", start=iso(START)) as orders:
        state = orders.store.read(orders.unit.stood).state
        history = history_of(orders.unit, connection.table("h"), names_of(orders.unit, state))
        asked: list[Callable[[], object]] = [
            history.must_be_sound,
            lambda: history.count_before_start(state.by_name["phone_id"]),
            lambda: history.lacking(state.by_name["phone_id"], ["2"]),
            lambda: list(history.cells(state.by_name["phone_id"], None, Excluded())),
            lambda: history.identities_of(state.by_name["phone_id"], Excluded([["1"]]), Excluded(), None, 1),
        ]
        for ask in asked:
            with pytest.raises(BadInput, match=r"duckdb failed: Conversion Error: .*abc"):
                ask()


@pytest.mark.spec("ORD-11", "ORD-08")
def test_history_takes_the_brand_from_the_application_and_stops_at_one_that_has_none(tmp_path: Path) -> None:
    sent = [
        order("1", START - 1, application="android", tariff="a"),
        order("2", START - 2, application="new_app"),
        order("3", START - 3),
    ]
    path = write_history(tmp_path / "h.parquet", sent)
    with opened(f"sqlite:///{tmp_path / 'x.db'}", start=iso(START), application_brands={"android": "yataxi"}) as orders:
        with pytest.raises(BadInput, match="1 applications have no brand: new_app"):
            orders.backfill(path)
        assert not orders.cells()
    brands = {"android": "yataxi", "new_app": "yango"}
    with opened(f"sqlite:///{tmp_path / 'x.db'}", start=iso(START), application_brands=brands) as orders:
        orders.backfill(path)
        (read,) = orders.read(("phone_id", "p1"), group_by=["brand"])
        assert {item.properties[0].value: item.counter_value for item in read.data} == {
            "yataxi": 1,
            "yango": 1,
            "unknown": 1,
        }


@pytest.mark.spec("ORD-11", "ORD-08")
def test_without_an_application_the_brand_of_history_is_its_own_as_of_live_orders(tmp_path: Path) -> None:
    def sent(prefix: str, created: float) -> list[CompletedOrder]:
        return [
            order(f"{prefix}1", created, brand="uber"),
            order(f"{prefix}2", created, application="android"),
            order(f"{prefix}3", created, application="android", brand="yataxi"),
            order(f"{prefix}4", created),
        ]

    live, old = sent("live", START), sent("old", START - 1)
    url, path = f"sqlite:///{tmp_path / 'x.db'}", tmp_path / "h.parquet"
    with opened(url, start=iso(START), application_brands={"android": "yataxi"}) as orders:
        orders.clock.advance(3 * HOUR)
        orders.count(*live)
        orders.backfill(write_history(path, old), "phone_id")
        (read,) = orders.read(("phone_id", "p1"), group_by=["brand"])
        assert {item.properties[0].value: item.counter_value for item in read.data} == {
            "uber": 2,
            "yataxi": 4,
            "unknown": 2,
        }
        orders.backfill(write_history(path, old, without=["brand"]), "phone_id")
        assert orders.total("phone_id", "p1", brand="uber") == 1, "history need not have a column of brands"
        wrong = [*old, order("x", START - 1, application="android", brand="uber")]
        assert orders.count(order("y", START, application="android", brand="uber")) == ["set_aside"]
        with pytest.raises(BadInput, match="1 orders name another brand than that of their application: android, uber"):
            orders.backfill(write_history(path, wrong), "phone_id")


@pytest.mark.spec("ORD-02", "ORD-08", "ORD-11")
def test_a_hook_on_the_application_gives_the_same_brand_live_and_in_history(tmp_path: Path) -> None:
    hooks = tmp_path / "hooks_of_applications.py"
    hooks.write_text(
        "import msgspec\n"
        "from keyfold.orders.hooks import completed, history\n"
        "@completed\n"
        "def lower(order):\n"
        "    given = {name: value.lower() for name, value in order.properties.items()}\n"
        "    return msgspec.structs.replace(order, properties=given)\n"
        "@history\n"
        "def lower_history(table):\n"
        "    return table.mutate(application=table.application.lower())\n"
    )
    brands = {"android": "yataxi"}
    url = f"sqlite:///{tmp_path / 'x.db'}"
    with opened(url, start=iso(START), application_brands=brands, hooks=str(hooks)) as orders:
        orders.clock.advance(3 * HOUR)
        orders.count(order("live", START, application="Android"))
        path = write_history(tmp_path / "h.parquet", [order("early", START - 1, application="ANDROID")])
        orders.backfill(path, "phone_id")
        assert orders.total("phone_id", "p1", brand="yataxi") == 2
        write_history(path, [order("early", START - 1, application="NEW")])
        with pytest.raises(BadInput, match="1 applications have no brand: new"):
            orders.backfill(path, "phone_id")


@pytest.mark.spec("ORD-02", "ORD-08")
@pytest.mark.parametrize(
    "given",
    [
        "table.tariff.cases(('business', 'b'))",
        "table.tariff.nullif('econom')",
        "ibis.literal('')",
        "ibis.null('string')",
    ],
)
def test_what_a_hook_leaves_without_a_value_is_unknown_as_of_live_orders(tmp_path: Path, given: str) -> None:
    hooks = tmp_path / "hooks_without_values.py"
    hooks.write_text(
        "import ibis\n"
        "from keyfold.orders.hooks import history\n"
        "@history\n"
        f"def bare(table): return table.mutate(tariff={given}, card_id=ibis.literal(''))\n"
    )
    sent = order("1", START - 1, {"phone_id": "p1", "card_id": "c1"}, tariff="econom")
    path = write_history(tmp_path / "h.parquet", [sent])
    with opened(f"sqlite:///{tmp_path / 'x.db'}", start=iso(START), hooks=str(hooks)) as orders:
        orders.backfill(path)
        assert orders.cells() == recount([order("1", START - 1)], DIMENSIONS, list(ALL))
    with opened(f"sqlite:///{tmp_path / 'x.db'}", start=iso(START)) as orders:
        assert orders.total("phone_id", "p1", tariff="unknown") == 1, "whoever has no slice in memory reads it as well"


def one_order(path: Path, **columns: Any) -> Path:
    """A history of one order whose columns are of whatever type is given."""
    table = pq.read_table(write_history(path, [order("1", START - 1, tariff="econom")]))
    for name, values in columns.items():
        table = table.set_column(table.schema.get_field_index(name), name, values)
    path.parent.mkdir(exist_ok=True)
    pq.write_table(table, path)
    return path


@pytest.mark.spec("ORD-08")
@pytest.mark.parametrize(
    ("column", "said"),
    [
        (pa.array([123.0]), "real numbers"),
        (pa.array(["Пётр".encode()], pa.binary()), "binary"),
        (pa.array([b"0" * 16], pa.binary(16)), "binary"),
        (pa.array([Decimal("123.00")], pa.decimal128(20, 2)), "decimal(20, 2)"),
        (pa.array([["p1", "p2"]]), "array<string>"),
        (pa.array([datetime(2026, 1, 1, tzinfo=UTC)], pa.timestamp("us", "UTC")), "timestamp"),
    ],
)
@pytest.mark.parametrize("name", ["user_phone_id", "performer_tariff_class"])
def test_what_would_not_be_the_text_of_live_orders_is_refused(
    tmp_path: Path, name: str, column: pa.Array, said: str
) -> None:
    path = one_order(tmp_path / "h.parquet", **{name: column})
    with opened(f"sqlite:///{tmp_path / 'x.db'}", start=iso(START)) as orders:
        with pytest.raises(BadInput) as error:
            orders.backfill(path, "phone_id")
        assert (name in error.value.detail, said in error.value.detail) == (True, True)
        assert not orders.cells()


@pytest.mark.spec("ORD-08")
@pytest.mark.parametrize(
    ("column", "identity"),
    [
        (pa.array(["007"]), "007"),
        (pa.array(["p1"]).dictionary_encode(), "p1"),
        (pa.array([7], pa.int16()), "7"),
        (pa.array([2**64 - 1], pa.uint64()), "18446744073709551615"),
        (pa.array([Decimal(12345678901234567890123)], pa.decimal128(38, 0)), "12345678901234567890123"),
        (pa.array([True]), "true"),
    ],
)
def test_text_and_whole_numbers_are_identities_as_they_are(tmp_path: Path, column: pa.Array, identity: str) -> None:
    path = one_order(tmp_path / "h.parquet", user_phone_id=column)
    with opened(f"sqlite:///{tmp_path / 'x.db'}", start=iso(START)) as orders:
        orders.backfill(path, "phone_id")
        assert orders.total("phone_id", identity) == 1


@pytest.mark.spec("ORD-08")
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (pa.array([123]), pa.array(["007"])),
        (pa.array(["abc"]), pa.array([123])),
        (pa.array([123]), pa.array([1.7])),
        (pa.array(["x"]), pa.array([123.0])),
        (pa.array(["x"]), pa.array([b"x"])),
        (pa.array(["x"]), None),
    ],
)
def test_files_whose_columns_differ_are_refused_by_their_names(
    tmp_path: Path, first: pa.Array, second: pa.Array | None
) -> None:
    one_order(tmp_path / "1.parquet", user_phone_id=first)
    other = one_order(
        tmp_path / "2.parquet", id=pa.array(["2"]), user_phone_id=pa.array(["y"]) if second is None else second
    )
    if second is None:
        pq.write_table(pq.read_table(other).drop(["user_phone_id"]), other)
    with opened(f"sqlite:///{tmp_path / 'x.db'}", start=iso(START)) as orders:
        with pytest.raises(BadInput) as error:
            orders.backfill(tmp_path / "[12].parquet", "phone_id")
        said = error.value.detail
        assert all(each in said for each in ("user_phone_id", "1.parquet", "2.parquet"))
        assert not orders.cells()
        (done,) = orders.backfill(tmp_path / "[12].parquet", "card_id")
        assert done.lacking == 0, "what is not read may be anything"


@pytest.mark.spec("ORD-08")
@pytest.mark.parametrize("at", [0, 1])
def test_files_may_have_columns_of_nulls_and_numbers_of_other_widths(tmp_path: Path, at: int) -> None:
    given = [
        {"user_phone_id": pa.array([None], pa.null()), "user_uid": pa.array([7], pa.int16()), "id": pa.array(["1"])},
        {"user_phone_id": pa.array(["007"]), "user_uid": pa.array([2**40]), "id": pa.array(["2"])},
    ]
    aware = pa.array([(START - 1) * 1000], pa.timestamp("ms", "UTC"))
    one_order(tmp_path / "0.parquet", **given[at])
    one_order(tmp_path / "1.parquet", **given[1 - at], created_proc=aware.cast(pa.timestamp("us")))
    with opened(f"sqlite:///{tmp_path / 'x.db'}", start=iso(START)) as orders:
        orders.backfill(tmp_path / "[01].parquet", "phone_id", "yandex_uid")
        totals = [
            orders.total(*each) for each in (("phone_id", "007"), ("yandex_uid", "7"), ("yandex_uid", str(2**40)))
        ]
        assert totals == [1, 1, 1]


@pytest.mark.spec("ORD-08")
@pytest.mark.parametrize("folder", ["performer_tariff_class=gold", "user_phone_id=p2", "[a]", "a*b", "a'b"])
def test_the_names_of_folders_change_nothing_of_what_lies_in_them(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir()
    path = one_order(tmp_path / folder / "1.parquet")
    with opened(f"sqlite:///{tmp_path / 'x.db'}", start=iso(START)) as orders:
        orders.backfill(path, "phone_id")
        assert orders.total("phone_id", "p1", tariff="econom") == 1


@pytest.mark.spec("ORD-02", "ORD-08")
def test_a_hook_whose_name_another_took_is_refused_instead_of_left_out(tmp_path: Path) -> None:
    hooks = tmp_path / "hooks_of_one_name.py"
    hooks.write_text(
        "from keyfold.orders.hooks import completed, history\n"
        "@completed\ndef lower(order):\n    return order\n"
        "@history\ndef lower(table):\n    return table\n"
    )
    url = f"sqlite:///{tmp_path / 'x.db'}"
    with pytest.raises(SettingsWrong, match="nothing would call lower of line 2"), opened(url, hooks=str(hooks)):
        pass


@pytest.mark.spec("ORD-02", "ORD-07", "ORD-13", "ORD-14")
def test_an_identity_that_a_hook_adds_is_left_to_history_like_any_other(store_url: str, tmp_path: Path) -> None:
    hooks = tmp_path / "hooks_that_add.py"
    hooks.write_text(
        "import msgspec\n"
        "from keyfold.orders.hooks import completed\n"
        "@completed\n"
        "def add_phone(order):\n"
        "    phone = order.identities['device_id'].partition('/')[0]\n"
        "    return msgspec.structs.replace(order, identities={**order.identities, 'phone_id': phone})\n"
    )
    with opened(store_url, start=iso(START), hooks=str(hooks)) as orders:
        orders.clock.advance(3 * HOUR)
        path = write_history(tmp_path / "h.parquet", [order("h", START - 5, {"phone_id": "p2"})])
        orders.backfill(path)
        assert is_complete(orders)
        assert orders.count(order("r", START - 1, {"device_id": "p1/x"})) == ["before_start"]
        assert [is_complete(orders, name) for name in ("phone_id", "device_id", "card_id")] == [False, False, True]
        done = {each.identity: each.lacking for each in orders.backfill(path)}
        assert done == {"phone_id": 1, "device_id": 1, "card_id": 0, "yandex_uid": 0}
        assert not check(orders, identities={"phone_id": "p1"}, fewer_than=1).allowed


@pytest.mark.spec("ORD-02", "ORD-07", "ORD-13")
def test_an_identity_that_a_hook_drops_is_not_looked_for_in_history(store_url: str, tmp_path: Path) -> None:
    hooks = tmp_path / "hooks_that_drop.py"
    hooks.write_text(
        "import msgspec\n"
        "from keyfold.orders.hooks import completed, history\n"
        "@completed\n"
        "def drop(order):\n"
        "    good = {name: value for name, value in order.identities.items() if value != '0'}\n"
        "    return msgspec.structs.replace(order, identities=good)\n"
        "@history\n"
        "def drop_history(table):\n"
        "    return table.mutate(card_id=table.card_id.nullif('0'))\n"
    )
    with opened(store_url, start=iso(START), hooks=str(hooks)) as orders:
        orders.clock.advance(3 * HOUR)
        left = order("r", START - 1, {"phone_id": "p1", "card_id": "0"})
        assert orders.count(left) == ["before_start"]
        path = write_history(tmp_path / "h.parquet", [left])
        assert {each.identity: each.lacking for each in orders.backfill(path)} == dict.fromkeys(ALL, 0)
        again = order("s", START - 2, {"phone_id": "p1", "card_id": "0"})
        assert orders.count(again) == ["before_start"]
        assert [is_complete(orders, name) for name in ("phone_id", "card_id")] == [False, True]


@pytest.mark.spec("ORD-02", "ORD-07")
@pytest.mark.parametrize("what", ["created_at=order.created_at - timedelta(hours=1)", "order_id='x'"])
def test_a_hook_changes_neither_the_id_of_an_order_nor_its_moment(store_url: str, tmp_path: Path, what: str) -> None:
    """By them an order is known, and counted live or by history: what kept it says the same as who counts it."""
    hooks = tmp_path / "hooks_that_move.py"
    hooks.write_text(
        "import msgspec\n"
        "from datetime import timedelta\n"
        "from keyfold.orders.hooks import completed\n"
        "@completed\n"
        "def move(order):\n"
        f"    return msgspec.structs.replace(order, {what})\n"
    )
    with opened(store_url, start=iso(START), hooks=str(hooks)) as orders:
        orders.clock.advance(3 * HOUR)
        (verdict,) = orders.verdicts(order("1", START + 60))
        assert verdict.status == "set_aside"
        assert verdict.reason == f"the hook of the unit failed: it changed {what.partition('=')[0]}"
        assert orders.total("phone_id", "p1") == 0


@pytest.mark.spec("ORD-02", "ORD-07", "ORD-13")
@pytest.mark.parametrize(("does", "lacking"), [("return None", 0), ("raise RuntimeError('no')", 1)])
def test_of_an_order_left_to_history_that_its_hook_now_refuses(
    store_url: str, tmp_path: Path, does: str, lacking: int
) -> None:
    """One that the hook leaves out need not be in history; where it fails, the order is looked for as it was sent."""
    hooks = tmp_path / "hooks_that_refuse.py"
    hooks.write_text(f"from keyfold.orders.hooks import completed\n@completed\ndef refuse(order):\n    {does}\n")
    with opened(store_url, start=iso(START)) as orders:
        orders.clock.advance(3 * HOUR)
        assert orders.count(order("r", START - 1)) == ["before_start"]
    with opened(store_url, start=iso(START), hooks=str(hooks), clock=ManualClock((START + HOUR) * 1_000_000)) as orders:
        path = write_history(tmp_path / "h.parquet", [order("h", START - 5, {"phone_id": "p2"})])
        (done,) = orders.backfill(path, "phone_id")
        assert done.lacking == lacking


# A new dimension --------------------------------------------------------------------------------------------------


@pytest.mark.spec("ORD-10")
def test_a_dimension_is_added_live_and_reads_are_right_at_every_moment(with_history: Orders, tmp_path: Path) -> None:
    before = some_orders(7, 200, START - 5 * DAY, START + HOUR, cities=True)
    with_history.clock.advance(3 * HOUR)
    with_history.count(*map(without_city, before))
    path = write_history(tmp_path / "h.parquet", before)
    with_history.backfill(path)
    after = some_orders(8, 40, START, START + HOUR, prefix="n", cities=True)
    wanted = recount(map_without_city(before), DIMENSIONS, list(ALL))
    sent = iter(after)
    counted: list[CompletedOrder] = []

    def look(done: int, what: str) -> None:
        counted.append(next(sent))
        assert with_history.count(counted[-1]) == ["accepted"]
        totals = recount([*before, *counted], [], list(ALL))
        for name in ALL:
            for value in {key[1] for key in totals if key[0] == name}:
                assert with_history.total(name, value) == totals[name, value, ()]
        with pytest.raises(DimensionPending, match="being added"):
            with_history.total("phone_id", "p1", city="riga")

    assert with_history.cells() == wanted
    done = with_history.add_dimension("city", path, cells_max=30, report=look)
    assert done.is_done
    assert all(each.is_conserved and each.left == 0 for each in done.types)
    with_history.count(*after)
    assert with_history.cells() == recount([*before, *after], [*DIMENSIONS, "city"], list(ALL))
    with_history.backfill(path)
    assert with_history.cells() == recount([*before, *after], [*DIMENSIONS, "city"], list(ALL)), "history has it too"


def map_without_city(sent: list[CompletedOrder]) -> list[CompletedOrder]:
    return [without_city(each) for each in sent]


@pytest.mark.spec("ORD-10")
def test_a_cell_that_history_does_not_explain_stays_and_is_told(with_history: Orders, tmp_path: Path) -> None:
    before = some_orders(9, 80, START, START + HOUR, cities=True)
    with_history.clock.advance(3 * HOUR)
    with_history.count(*map(without_city, before))
    path = tmp_path / "h.parquet"
    done = with_history.add_dimension("city", write_history(path, before[1:]), cells_max=10)
    assert not done.is_done
    assert sum(each.left for each in done.types) == len(before[0].identities)
    assert {each.identity_value for each in done.unexplained} == set(before[0].identities.values())
    assert with_history.total("phone_id", "p1") == recount(before, [], ["phone_id"])["phone_id", "p1", ()]
    begun = switch(with_history.store, with_history.unit, "city")
    assert begun is not None
    write_history(path, before)
    again = split(with_history.store, with_history.unit, begun, with_history.history(path))
    assert again.is_done
    assert switch(with_history.store, with_history.unit, "city") is None
    assert with_history.cells() == recount(before, [*DIMENSIONS, "city"], list(ALL))


@pytest.mark.spec("ORD-10")
def test_a_split_reads_a_bounded_part_of_history_for_each_step(
    with_history: Orders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it is run again and the only cell that was left is the last of all."""
    before = [order(f"{n}", START, {"phone_id": f"p{n // 4:02}"}, tariff="t", city="riga") for n in range(120)]
    with_history.clock.advance(3 * HOUR)
    with_history.count(*map(without_city, before))
    read: list[int] = []
    step = splitting._Splitter._step

    def counted(splitter: Any, upto: str, explained: Any) -> Any:
        read.append(len(explained))
        return step(splitter, upto, explained)

    monkeypatch.setattr(splitting._Splitter, "_step", counted)
    monkeypatch.setattr(splitting, "ROWS_MAX", 10)
    path = tmp_path / "h.parquet"
    done = with_history.add_dimension("city", write_history(path, before[:-1]), cells_max=100)
    assert sum(each.left for each in done.types) == 1
    assert max(read) < 10 + 4
    read.clear()
    begun = switch(with_history.store, with_history.unit, "city")
    assert begun is not None
    write_history(path, before)
    assert split(with_history.store, with_history.unit, begun, with_history.history(path), cells_max=100).is_done
    assert sum(read) == 4, "what has no old cell is passed over"
    assert with_history.cells() == recount(before, [*DIMENSIONS, "city"], list(ALL))


@pytest.mark.spec("ORD-08", "ORD-10")
def test_a_split_stops_where_the_combinations_of_values_have_no_room(store_url: str, tmp_path: Path) -> None:
    """As where the wrong column is named, of which every order has its own value."""
    every = [order(f"{n}", NOW, {"phone_id": f"p{n}"}, tariff="x", city=f"{n}") for n in range(5)]
    path = write_history(tmp_path / "h.parquet", every)
    with opened(store_url, slices_max=3) as orders:
        orders.count(*map(without_city, every))
        with pytest.raises(BadInput, match="more combinations of values than 3"):
            orders.add_dimension("city", path)
        assert [orders.total("phone_id", f"p{n}") for n in range(5)] == [1] * 5
    with opened(store_url, slices_max=6) as orders:
        assert orders.add_dimension("city", path).is_done
        assert orders.cells() == recount(every, [*DIMENSIONS, "city"], ["phone_id"])


@pytest.mark.spec("ORD-10")
def test_orders_that_history_has_and_nobody_has_counted_yet_are_not_mistaken_for_others(
    with_history: Orders, tmp_path: Path
) -> None:
    counted = order("counted", START, {"phone_id": "p1"}, tariff="a", city="riga")
    lagging = order("lagging", START, {"phone_id": "p1"}, tariff="a", city="omsk")
    with_history.clock.advance(3 * HOUR)
    with_history.count(without_city(counted))
    done = with_history.add_dimension("city", write_history(tmp_path / "h.parquet", [lagging]))
    assert not done.is_done, "one order is one order, but not the same"
    with_history.count(lagging)
    begun = switch(with_history.store, with_history.unit, "city")
    assert begun is not None
    path = write_history(tmp_path / "h.parquet", [lagging, counted])
    assert split(with_history.store, with_history.unit, begun, with_history.history(path)).is_done
    assert with_history.cells() == recount([counted, lagging], [*DIMENSIONS, "city"], list(ALL))


@pytest.mark.spec("ORD-10")
def test_what_cannot_be_explained_may_be_called_unknown(with_history: Orders, tmp_path: Path) -> None:
    before = some_orders(10, 40, START, START + HOUR, cities=True)
    with_history.clock.advance(3 * HOUR)
    with_history.count(*map(without_city, before))
    path = write_history(tmp_path / "h.parquet", before[1:])
    assert with_history.add_dimension("city", path, rest_as_unknown=True).is_done
    lost = recount([without_city(before[0])], DIMENSIONS, list(ALL))
    wanted: Counter[Any] = Counter()
    for each in before:
        for name, value, values in recount([without_city(each)], DIMENSIONS, list(ALL)):
            city = "unknown" if (name, value, values) in lost else each.properties["city"]
            wanted[name, value, tuple(sorted([*values, ("city", city)]))] += 1
    assert with_history.cells() == wanted, "that, and nothing else"


@pytest.mark.spec("ORD-08", "ORD-10")
def test_what_is_called_unknown_before_the_start_has_its_values_by_the_next_backfill(
    with_history: Orders, tmp_path: Path
) -> None:
    """The live part of the same cells is explained, and no backfill would mend it."""
    live = order("1", START, tariff="t", city="riga")
    early = [order("2", START - 1, tariff="t", city="omsk"), order("3", START - 2, tariff="t", city="riga")]
    with_history.clock.advance(3 * HOUR)
    with_history.count(without_city(live))
    path = tmp_path / "h.parquet"
    with_history.backfill(write_history(path, [live, early[0]]))
    write_history(path, [live, *early])
    (left,) = with_history.add_dimension("city", path).unexplained
    assert (left.history_count, left.history_in_history) == (1, 2), "history has caught up meanwhile"
    assert with_history.add_dimension("city", path, rest_as_unknown=True).is_done
    assert [with_history.total("phone_id", "p1", city=each) for each in ("riga", "unknown")] == [1, 1]
    with_history.backfill(path)
    assert with_history.cells() == recount([live, *early], [*DIMENSIONS, "city"], list(ALL))
    assert take_back(with_history, "1") == ["corrected"]


@pytest.mark.spec("ORD-10", "ORD-16")
def test_orders_can_be_taken_back_before_during_and_after_a_split(with_history: Orders, tmp_path: Path) -> None:
    before = some_orders(11, 60, START, START + HOUR, cities=True)
    with_history.clock.advance(3 * HOUR)
    with_history.count(*map(without_city, before))
    path = write_history(tmp_path / "h.parquet", before)
    ids = iter([each.order_id for each in before])
    gone: list[str] = []

    def correct(*_: Any) -> None:
        gone.append(next(ids))
        (done,) = with_history.store.transact(
            lambda tx: correct_orders(tx, with_history.unit, gone[-1:], "fraud", "test")
        )
        assert done.status == "corrected"

    correct()
    done = with_history.add_dimension("city", path, cells_max=25, report=correct)
    assert done.is_done or done.unexplained, "one taken back meanwhile may be in the history that was read"
    begun = switch(with_history.store, with_history.unit, "city")
    if begun is not None:
        assert split(with_history.store, with_history.unit, begun, with_history.history(path)).is_done
    correct()
    left = [each for each in before if each.order_id not in gone]
    assert with_history.cells() == recount(left, [*DIMENSIONS, "city"], list(ALL))


@pytest.mark.spec("ORD-10", "ORD-08")
def test_while_a_dimension_is_added_nothing_else_changes_history(with_history: Orders, tmp_path: Path) -> None:
    before = some_orders(12, 30, START - DAY, START, cities=True)
    path = write_history(tmp_path / "h.parquet", before)
    with_history.clock.advance(3 * HOUR)
    with_history.backfill(path)
    assert switch(with_history.store, with_history.unit, "city") is not None
    with pytest.raises(Conflict, match="'city' is being added"):
        with_history.backfill(path)
    with pytest.raises(Conflict, match="'city' is being added"):
        switch(with_history.store, with_history.unit, "zone")
    with pytest.raises(Conflict, match="'city' is being added"):
        add_identity(with_history.store, with_history.unit, "mail")
    assert not with_history.store.transact(lambda tx: sweeping.move_watermark(tx, with_history.unit))


def take_back(orders: Orders, *order_ids: str) -> list[str]:
    done = orders.store.transact(lambda tx: correct_orders(tx, orders.unit, order_ids, "fraud", "test"))
    return [each.status for each in done]


@pytest.mark.spec("ORD-10", "ORD-16")
def test_of_two_who_split_at_once_the_first_is_refused_and_forgets_no_move_of_the_other(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first has left a cell of one type and is at the next, where the second begins, with a better history."""
    with opened(postgres_url, identities=["phone_id", "card_id"], dimensions=["tariff"]) as orders:
        both = order("both", NOW, {"phone_id": "p", "card_id": "c"}, tariff="x", city="riga")
        other = order("other", NOW, {"phone_id": "p"}, tariff="x", city="riga")
        orders.count(without_city(both), without_city(other))
        begun = switch(orders.store, orders.unit, "city")
        assert begun is not None
        orders.count(order("new", NOW, {"phone_id": "q"}, tariff="x", city="riga"))  # nobody waits for its slice
        whole = write_history(tmp_path / "whole.parquet", [both, other])
        lacking = write_history(tmp_path / "lacking.parquet", [both])
        at_next, real = threading.Event(), splitting.update

        def second() -> bool:
            def report(done: int, what: str) -> None:
                at_next.set()

            return split(orders.store, orders.unit, begun, orders.history(whole), report).is_done

        with ThreadPoolExecutor(1) as pool:
            running = []

            def update(*given: Any) -> int:
                if not running:
                    running.append(pool.submit(second))
                    at_next.wait(20)
                return real(*given)

            monkeypatch.setattr(splitting, "update", update)
            with pytest.raises(LeaseLost, match="another run of split city card_id has taken over"):
                split(orders.store, orders.unit, begun, orders.history(lacking))
            assert running[0].result()
        assert take_back(orders, "both") == ["corrected"]
        assert (orders.total("phone_id", "p", city="riga"), orders.total("card_id", "c")) == (1, 0)


@pytest.mark.spec("ORD-10", "ORD-16")
def test_an_order_that_was_late_at_the_switch_can_still_be_taken_back(store_url: str, tmp_path: Path) -> None:
    with opened(store_url, dedupe_days=10, limits__transaction_seconds_max=1, limits__lock_seconds_max=1) as orders:
        old = order("old", NOW - 9 * DAY, tariff="x", city="riga")
        orders.count(without_city(old))
        orders.clock.advance(1.5 * DAY)
        assert orders.add_dimension("city", write_history(tmp_path / "h.parquet", [old])).is_done
        orders.count(order("new", NOW + 1.5 * DAY, tariff="x"))
        assert take_back(orders, "old") == ["corrected"]
        assert orders.total("phone_id", "p1", city="riga") == 0
        assert orders.total("phone_id", "p1", city="unknown") == 1


@pytest.mark.spec("ORD-10", "ORD-16")
def test_an_order_explained_for_one_identity_and_not_for_another_is_taken_from_both(
    with_history: Orders, tmp_path: Path
) -> None:
    with_history.clock.advance(3 * HOUR)
    both = order("both", START, {"phone_id": "p", "card_id": "c"}, tariff="t", city="riga")
    gone = order("gone", START, {"phone_id": "p"}, tariff="t")
    with_history.count(without_city(both), gone)
    path = write_history(tmp_path / "h.parquet", [both])
    assert with_history.add_dimension("city", path, rest_as_unknown=True).is_done
    assert (
        with_history.total("card_id", "c", city="riga") == with_history.total("phone_id", "p", city="unknown") - 1 == 1
    )
    with_history.count(order("other", START, {"phone_id": "p"}, tariff="t", city="riga"))
    assert take_back(with_history, "both") == ["corrected"]
    assert [with_history.total("phone_id", "p", city=each) for each in ("unknown", "riga")] == [1, 1]
    assert with_history.total("card_id", "c") == 0


@pytest.mark.spec("ORD-10", "ORD-16")
def test_an_order_explains_only_cells_of_identities_that_it_counts_for(with_history: Orders, tmp_path: Path) -> None:
    with_history.clock.advance(3 * HOUR)
    phone, device = {"phone_id": "p"}, {"phone_id": "p", "device_id": "d"}
    with_history.count(order("a", START, device, tariff="t"), order("b", START, phone, tariff="t"))
    path = tmp_path / "h.parquet"

    def told(a: dict[str, str], b: dict[str, str]) -> Path:
        return write_history(
            path, [order("a", START, a, tariff="t", city="riga"), order("b", START, b, tariff="t", city="omsk")]
        )

    (left,) = with_history.add_dimension("city", told(phone, device)).unexplained
    assert (left.identity_type, left.live_count, left.live_in_history) == ("device_id", 1, 0), "one, but not the same"
    begun = switch(with_history.store, with_history.unit, "city")
    assert begun is not None
    history = with_history.history(told(device, device))
    assert split(with_history.store, with_history.unit, begun, history).is_done, "one has more identities in history"
    assert with_history.total("device_id", "d", city="riga") == with_history.total("device_id", "d") == 1
    assert take_back(with_history, "a") == ["corrected"]
    assert with_history.total("device_id", "d") == 0


@pytest.mark.spec("ORD-10", "ORD-16")
def test_what_is_taken_back_while_a_dimension_is_added_stays_in_history_until_the_next_backfill(
    store_url: str, tmp_path: Path
) -> None:
    limits = {"limits__transaction_seconds_max": 1, "limits__lock_seconds_max": 1}
    with opened(store_url, identities=["phone_id"], dimensions=["tariff"], start=iso(START), **limits) as orders:
        add_identity(orders.store, orders.unit, "card_id", (START + DAY) * 1_000_000)
        orders.clock.advance(START + 2 * DAY - NOW)
        both = {"phone_id": "p", "card_id": "c"}
        early = [order(each, START + HOUR, both, tariff="t", city="riga", payment_method_type=each) for each in "123"]
        late = order("4", START + DAY + HOUR, both, tariff="t", city="omsk", payment_method_type="4")
        orders.count(*[order(each.order_id, each.created_at.timestamp(), both, tariff="t") for each in (*early, late)])
        path = write_history(tmp_path / "h.parquet", [*early, late])
        take_back(orders, "1")
        orders.backfill(path)
        begun = switch(orders.store, orders.unit, "city")
        assert begun is not None
        orders.clock.advance(-HOUR)  # no clock decides what the backfill knew
        assert take_back(orders, "2") == ["corrected"]
        splitting.wait_for_writers(orders.store, begun, sleep=orders.clock.advance)
        assert split(orders.store, orders.unit, begun, orders.history(path)).is_done
        assert [orders.total("card_id", "c", city=each) for each in ("riga", "omsk")] == [2, 1]
        assert not is_complete(orders, "card_id")
        orders.backfill(path, "card_id")
        assert orders.cells() == recount([early[2], late], ["tariff", "city"], list(both))
        assert orders.add_dimension("pay", path, "payment_tech_type").is_done, "left out by now"
        assert orders.total("card_id", "c", pay="2") == 0


@pytest.mark.spec("ORD-10")
def test_by_a_clock_that_went_back_a_dimension_is_added_right(store_url: str, tmp_path: Path) -> None:
    with opened(store_url, dedupe_days=10, limits__transaction_seconds_max=1, limits__lock_seconds_max=1) as orders:
        counted, late = order("1", NOW, tariff="x", city="riga"), order("2", NOW - 20 * DAY, tariff="x", city="omsk")
        assert orders.count(without_city(counted), without_city(late)) == ["accepted", "late"]
        orders.clock.advance(-HOUR)
        assert orders.add_dimension("city", write_history(tmp_path / "h.parquet", [counted, late])).is_done
        assert orders.cells() == recount([counted], [*DIMENSIONS, "city"], list(ALL))


@pytest.mark.spec("ORD-08", "ORD-13", "ORD-16")
def test_an_order_that_is_also_in_history_has_it_counted_anew_when_it_is_taken_back(
    store_url: str, tmp_path: Path
) -> None:
    with opened(store_url, identities=["phone_id"], start=iso(START)) as orders:
        add_identity(orders.store, orders.unit, "card_id", (START + DAY) * 1_000_000)
        orders.clock.advance(START + DAY + HOUR - NOW)
        partly = order("1", START + HOUR, {"phone_id": "p", "card_id": "c"}, city="riga")
        assert orders.count(without_city(partly)) == ["accepted"]
        path = write_history(tmp_path / "h.parquet", [partly])
        orders.backfill(path)
        assert orders.total("card_id", "c") == 1
        assert take_back(orders, "1") == ["corrected"]
        assert not check(orders, identities={"card_id": "c"}, fewer_than=9).allowed, "its history is not right any more"
        assert check(orders, identities={"phone_id": "p"}, fewer_than=1).allowed
        with pytest.raises(Conflict, match="history of card_id has to be counted"):
            switch(orders.store, orders.unit, "city")
        orders.backfill(path)
        assert not orders.cells()
        assert switch(orders.store, orders.unit, "city") is not None


@pytest.mark.spec("ORD-07", "ORD-13", "ORD-14")
def test_an_order_left_to_history_after_it_was_counted_makes_checks_refuse(
    with_history: Orders, tmp_path: Path
) -> None:
    with_history.clock.advance(3 * HOUR)
    path = tmp_path / "h.parquet"
    with_history.backfill(write_history(path, [order("h", START - 5, {"phone_id": "p2"})]))
    asked = {"phone_id": "p1"}
    assert check(with_history, identities=asked, fewer_than=1).allowed
    under_way = order("r", START - 1, asked)
    assert with_history.count(under_way) == ["before_start"]
    assert not check(with_history, identities=asked, fewer_than=1).allowed
    wrong = msgspec.structs.replace(under_way, created_at=order("", START + 5).created_at)
    (done,) = with_history.backfill(write_history(path, [wrong]), "phone_id")
    assert done.lacking == 1, "it is there, but not as an order from before the start"
    with_history.backfill(write_history(path, [under_way]))
    assert "phone_id has 1 orders" in check(with_history, identities=asked, fewer_than=1).reason


def is_complete(orders: Orders, name: str = "phone_id") -> bool:
    return reading.is_complete(orders.store.read(orders.unit.stood).state.by_name[name])


@pytest.mark.spec("ORD-06", "ORD-07", "ORD-13", "ORD-14")
def test_a_late_order_makes_no_history_incomplete_and_its_id_can_be_sent_again(store_url: str, tmp_path: Path) -> None:
    """Nobody could settle it: a time that is none, or a repeat of what history has."""
    with opened(store_url, start=iso(START), dedupe_days=1) as orders:
        orders.clock.advance(2 * DAY)
        orders.backfill(write_history(tmp_path / "h.parquet", [order("h", START - 5)]), "phone_id")
        assert orders.count(order("r", 0, {"phone_id": "p2"}), order("h", START - 5)) == ["late", "late"]
        assert is_complete(orders)
        kept = orders.store.read(lambda tx: kept_orders(tx, orders.unit, None, "", 9))
        assert [(each.order_id, each.why) for each in kept] == [("h", "late"), ("r", "late")]
        assert orders.count(order("r", NOW + 2 * DAY - 60, {"phone_id": "p2"})) == ["accepted"]


@pytest.mark.spec("ORD-05", "ORD-07")
def test_an_order_that_lacks_room_and_is_left_for_another_type_is_set_aside_until_there_is_room(store_url: str) -> None:
    """However often it is driven again in between."""
    sent = order("late type", NOW, {"phone_id": "p1", "mail": "m1"}, tariff="b")
    with opened(store_url, slices_max=1) as orders:
        add_identity(orders.store, orders.unit, "mail")
        assert orders.count(order("first", NOW, tariff="a")) == ["accepted"]
        assert orders.count(sent, sent) == ["set_aside", "set_aside"]
        for _ in range(2):
            _, (verdict,) = orders.store.transact(lambda tx: redrive(tx, orders.unit, "", 10))
            assert verdict.status == "set_aside"
        assert orders.count(msgspec.structs.replace(sent, properties={"tariff": "c"})) == ["conflict"]
    with opened(store_url, slices_max=9) as orders:
        _, (verdict,) = orders.store.transact(lambda tx: redrive(tx, orders.unit, "", 10))
        assert (verdict.status, orders.total("phone_id", "p1", tariff="b")) == ("accepted", 1)


@pytest.mark.spec("ORD-14")
def test_a_place_that_is_held_anew_while_it_is_purged_stays(store_url: str) -> None:
    """A row that was listed as old is looked at again when it is deleted."""
    with opened(store_url) as orders:
        reservations = orders.unit.tables.reservations
        purge = str(sweeping._oldest_deleted(reservations, reservations.c.expires_at_us, 1, 10))
        listed, _, again = purge.rpartition(")")
        assert "expires_at_us <" in listed
        assert "expires_at_us <" in again


@pytest.mark.spec("ORD-07", "ORD-08", "ORD-13")
@pytest.mark.parametrize("is_there", [True, False], ids=["history has it", "history lacks it"])
def test_an_order_left_to_history_after_that_was_looked_through_is_looked_for_too(
    with_history: Orders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    with_history.clock.advance(3 * HOUR)
    known, under_way = order("k", START - 2, {"phone_id": "p2"}), order("r", START - 1, {"phone_id": "p1"})
    with_history.count(known)
    path = write_history(tmp_path / "h.parquet", [known, under_way] if is_there else [known])
    waiting = [under_way]
    real = History.lacking

    def lacking(history: History, *given: Any) -> list[str]:
        found = real(history, *given)
        if waiting:
            assert with_history.count(waiting.pop()) == ["before_start"]
        return found

    monkeypatch.setattr(History, "lacking", lacking)
    (done,) = with_history.backfill(path, "phone_id")
    assert (done.lacking, is_complete(with_history)) == ((0, True) if is_there else (1, False))
    assert check(with_history, identities={"phone_id": "p1"}, fewer_than=2).allowed is is_there
    assert not check(with_history, identities={"phone_id": "p1"}, fewer_than=1).allowed


@pytest.mark.spec("ORD-07", "ORD-08", "ORD-13")
def test_an_order_that_is_being_left_to_history_while_that_is_counted_is_seen(
    with_history: Orders, tmp_path: Path
) -> None:
    with_history.clock.advance(3 * HOUR)
    path = write_history(tmp_path / "h.parquet", [order("k", START - 2, {"phone_id": "p2"})])
    with_history.backfill(path, "phone_id")
    began = threading.Event()

    def leave(tx: Transaction) -> None:
        _count_all(tx, with_history.unit, [order("r", START - 1, {"phone_id": "p1"})])
        began.set()
        time.sleep(0.5)

    writer = threading.Thread(target=lambda: with_history.store.transact(leave))
    writer.start()
    began.wait()
    (done,) = with_history.backfill(path, "phone_id")
    writer.join()
    assert not is_complete(with_history)
    assert done.lacking or done.is_behind


@pytest.mark.spec("ORD-08", "ORD-13")
def test_what_a_table_gains_while_it_is_read_is_lacking(with_history: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order comes into the table when the cells were read, and before anybody asks whether it is there."""
    import ibis

    connection = ibis.duckdb.connect()
    connection.raw_sql("CREATE TABLE finished (order_id TEXT, created_at TIMESTAMP, phone_id TEXT)")
    for name in DIMENSIONS:
        connection.raw_sql(f"ALTER TABLE finished ADD COLUMN {name} TEXT")
    with_history.clock.advance(3 * HOUR)
    with_history.count(order("r", START - 1, {"phone_id": "p1"}))
    state = with_history.store.read(with_history.unit.stood).state
    names = msgspec.structs.replace(names_of(with_history.unit, state, ["phone_id"]), columns={})
    insert = f"INSERT INTO finished VALUES ('r', make_timestamp({(START - 1) * 1_000_000}), 'p1', 'x', 'y', 'z')"
    cells = History.cells

    def gaining(*given: Any) -> Iterator[Any]:
        yield from cells(*given)
        connection.raw_sql(insert)

    monkeypatch.setattr(History, "cells", gaining)
    history = history_of(with_history.unit, connection.table("finished"), names)
    (done,) = backfill(with_history.store, with_history.unit, history, ["phone_id"])
    assert (done.lacking, with_history.total("phone_id", "p1"), is_complete(with_history)) == (1, 0, False)
    monkeypatch.undo()
    backfill(with_history.store, with_history.unit, history, ["phone_id"])
    assert (with_history.total("phone_id", "p1"), is_complete(with_history)) == (1, True)


@pytest.mark.spec("ORD-08")
def test_files_that_change_while_they_are_read_are_one_history_no_more(with_history: Orders, tmp_path: Path) -> None:
    with_history.clock.advance(3 * HOUR)
    path = write_history(tmp_path / "h.parquet", [order("1", START - 1)])
    more = [order("1", START - 1), order("2", START - 1)]
    with pytest.raises(Conflict, match="changed while they were read"):
        with_history.backfill(path, "phone_id", report=lambda *_: write_history(path, more))
    with_history.backfill(path, "phone_id")
    assert with_history.total("phone_id", "p1") == 2


@pytest.mark.spec("ORD-10")
def test_no_cell_is_split_by_files_that_have_changed_while_they_were_read(with_history: Orders, tmp_path: Path) -> None:
    with_history.clock.advance(3 * HOUR)
    path = tmp_path / "h.parquet"

    def told(city: str) -> Path:
        return write_history(path, [order(each, START, {"phone_id": each}, tariff="t", city=city) for each in "12"])

    with_history.count(*[order(each, START, {"phone_id": each}, tariff="t") for each in "12"])
    with pytest.raises(Conflict, match="changed while they were read"):
        with_history.add_dimension("city", told("riga"), cells_max=1, report=lambda *_: told("omsk"))
    assert with_history.add_dimension("city", path).is_done
    assert [with_history.total("phone_id", "1", city="riga"), with_history.total("phone_id", "2", city="omsk")] == [
        1,
        1,
    ]


@pytest.mark.spec("ORD-08", "ORD-11")
def test_a_run_that_was_stopped_does_not_go_on_by_other_rules(tmp_path: Path) -> None:
    url, path = f"sqlite:///{tmp_path / 'x.db'}", tmp_path / "h.parquet"
    sent = [order(f"{n}", START - 9, {"phone_id": f"p{n}"}, application="android") for n in range(6)]
    write_history(path, sent)

    def stop(done: int, what: str) -> None:
        raise Killed

    with opened(url, start=iso(START), application_brands={"android": "wrong"}) as orders, pytest.raises(Killed):
        orders.backfill(path, "phone_id", cells_max=3, report=stop)
    with opened(url, start=iso(START), application_brands={"android": "right"}) as orders:
        with pytest.raises(Conflict, match=r"has to be counted|was not finished"):
            switch(orders.store, orders.unit, "city")
        orders.backfill(path, "phone_id")
        assert [orders.total("phone_id", f"p{n}", brand="right") for n in range(6)] == [1] * 6


@pytest.mark.spec("ORD-02", "ORD-08")
@pytest.mark.parametrize("where", ["file", "module", "from another module"])
def test_a_run_that_was_stopped_does_not_go_on_by_other_hooks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    url, name = f"sqlite:///{tmp_path / 'x.db'}", f"hooks_that_change_{len(where)}"
    monkeypatch.syspath_prepend(str(tmp_path))
    sent = [order(f"{n}", START - 9, {"phone_id": f"p{n}"}, tariff="Ee") for n in range(2)]
    path = write_history(tmp_path / "h.parquet", sent)
    hooks = str(tmp_path / f"{name}.py") if where == "file" else name

    def write(change: str) -> None:
        own = f"{name}_own" if where == "from another module" else name
        (tmp_path / f"{name}.py").write_text(f"from {name}_own import change_case\n")
        (tmp_path / f"{own}.py").write_text(
            "from keyfold.orders.hooks import history\n"
            "@history\n"
            f"def change_case(table): return table.mutate(tariff=table.tariff.{change}())  # {change}\n"
        )
        importlib.invalidate_caches()
        for each in (name, own):
            sys.modules.pop(each, None)

    def stop(done: int, what: str) -> None:
        raise Killed

    write("upper")
    with opened(url, start=iso(START), hooks=hooks) as orders, pytest.raises(Killed):
        orders.backfill(path, "phone_id", cells_max=1, report=stop)
    write("lower")
    with opened(url, start=iso(START), hooks=hooks) as orders:
        orders.backfill(path, "phone_id", cells_max=1)
        assert [orders.total("phone_id", f"p{n}", tariff="ee") for n in range(2)] == [1, 1]


@pytest.mark.spec("ORD-08", "ORD-16")
def test_an_order_taken_back_while_history_is_counted_is_left_out_of_it(store_url: str, tmp_path: Path) -> None:
    with opened(store_url, identities=["phone_id"], start=iso(START)) as orders:
        orders.clock.advance(3 * HOUR)
        orders.count(order("1", START, {"phone_id": "p"}))
        add_identity(orders.store, orders.unit, "mail", (START + DAY) * 1_000_000)
        orders.clock.advance(2 * DAY)
        other = order("2", START - 5, {"mail": "m"})
        path = write_history(tmp_path / "h.parquet", [order("1", START, {"phone_id": "p", "mail": "m"}), other])
        (done,) = orders.backfill(path, "mail", report=lambda *_: take_back(orders, "1"))
        assert done.orders == 1
        assert is_complete(orders, "mail")
        assert orders.cells() == recount([other], DIMENSIONS, ["mail"])


@pytest.mark.spec("ORD-08", "ORD-13", "ORD-16")
def test_an_order_taken_back_while_the_end_of_a_backfill_is_written_is_left_out_of_it(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On SQLite nobody writes meanwhile."""
    with opened(postgres_url, identities=["phone_id"], start=iso(START)) as orders:
        orders.clock.advance(3 * HOUR)
        orders.count(order("1", START, {"phone_id": "p"}))
        add_identity(orders.store, orders.unit, "mail", (START + DAY) * 1_000_000)
        orders.clock.advance(2 * DAY)
        other = order("2", START - 5, {"mail": "m"})
        path = write_history(tmp_path / "h.parquet", [order("1", START, {"phone_id": "p", "mail": "m"}), other])
        waiting, real = ["1"], backfilling._must_be_conserved

        def conserved(*given: Any) -> None:
            if waiting:
                assert take_back(orders, waiting.pop()) == ["corrected"]
            real(*given)

        monkeypatch.setattr(backfilling, "_must_be_conserved", conserved)
        orders.backfill(path, "mail")
        assert (orders.total("mail", "m"), is_complete(orders, "mail")) == (1, True)


@pytest.mark.spec("ORD-08", "ORD-13", "ORD-16")
def test_an_order_that_was_taken_back_is_not_lacking_where_history_does_not_have_it(
    store_url: str, tmp_path: Path
) -> None:
    with opened(store_url, identities=["phone_id"], mixed_brand="yataxi") as orders:
        for name in ("mail", "card_id"):
            add_identity(orders.store, orders.unit, name, START * 1_000_000)
        orders.clock.advance(HOUR)
        whose = {"phone_id": "p1", "mail": "m1", "card_id": "c1"}
        refunded, other = order("1", NOW + HOUR, whose), order("2", NOW + HOUR, whose)
        assert orders.count(refunded, other) == ["accepted", "accepted"]
        assert take_back(orders, "1") == ["corrected"]
        orders.clock.advance(2 * HOUR)
        (done,) = orders.backfill(write_history(tmp_path / "h.parquet", [order("3", NOW, {"mail": "m2"})]), "mail")
        assert (done.lacking_orders, is_complete(orders, "mail")) == (["2"], False)
        (done,) = orders.backfill(write_history(tmp_path / "h.parquet", [other]), "mail")
        assert (done.lacking, is_complete(orders, "mail")) == (0, True)
        assert import_documents(orders.store, orders.unit, "card_id", lines(DOCUMENT), "one").left == 1


@pytest.mark.spec("ORD-08", "ORD-09", "ORD-10", "ORD-16", "CORE-16")
def test_no_read_holds_all_the_orders_that_were_ever_taken_back(
    store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are never purged: a backfill, also one during which more are taken back, and a split take them in pages."""
    monkeypatch.setattr("keyfold.orders.service.excluding.PAGE_ROWS", 4)
    monkeypatch.setattr("keyfold.orders.service.backfilling.IDENTITIES_MAX", 2)
    every = [
        order(f"o{n:02}", START + n, {"phone_id": f"p{n % 3}", "mail": f"m{n % 7}"}, city=f"c{n % 2}")
        for n in range(40)
    ]
    taken_back = [each.order_id for each in every[:30]]
    rows: list[int] = []
    real = Transaction.execute

    def counting(tx: Transaction, statement: Any, parameters: Any = None) -> Any:
        found = real(tx, statement, parameters)
        if not (isinstance(statement, sa.Select) and "corrections" in str(statement)):
            return found
        rows.append(len((frozen := found.freeze()).data))
        return frozen()

    def more_taken_back(*_: object) -> None:
        take_back(orders, *taken_back[10:20])

    path = write_history(tmp_path / "h.parquet", every)
    with opened(store_url, identities=["phone_id"], start=iso(START)) as orders:
        orders.clock.advance(3 * HOUR)
        alone = [msgspec.structs.replace(each, identities={"phone_id": each.identities["phone_id"]}) for each in every]
        orders.count(*map(without_city, alone))
        take_back(orders, *taken_back[:10])
        add_identity(orders.store, orders.unit, "mail", (START + DAY) * 1_000_000)
        orders.clock.advance(2 * DAY)
        monkeypatch.setattr(Transaction, "execute", counting)
        orders.backfill(path, "mail", report=more_taken_back)
        assert (max(rows), sum(rows)) == (4, 10 + 20)
        assert orders.cells() == recount(list(map(without_city, every[20:])), DIMENSIONS, ["phone_id", "mail"])
        take_back(orders, *taken_back[20:])
        orders.backfill(path)
        assert orders.add_dimension("city", path).is_done
        assert (max(rows), sum(rows)) == (4, 10 + 20 + 30 + 2 * 30)
        assert orders.cells() == recount(every[30:], [*DIMENSIONS, "city"], ["phone_id", "mail"])


@pytest.mark.spec("ORD-08", "ORD-16")
def test_what_was_taken_back_is_left_out_of_a_table_of_another_engine_up_to_a_bound(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ibis

    every = [order(f"o{n}", START + n, {"phone_id": f"p{n % 3}", "mail": f"m{n % 4}"}) for n in range(20)]
    connection = ibis.connect(postgres_url)
    connection.create_table("finished", pq.read_table(write_history(tmp_path / "h.parquet", every)))
    with opened(f"sqlite:///{tmp_path / 'x.db'}", identities=["phone_id"], start=iso(START)) as orders:
        orders.clock.advance(3 * HOUR)
        orders.count(*[msgspec.structs.replace(each, identities={"phone_id": "p"}) for each in every])
        add_identity(orders.store, orders.unit, "mail", (START + DAY) * 1_000_000)
        orders.clock.advance(2 * DAY)
        take_back(orders, "o1", "o2")
        names = names_of(orders.unit, orders.store.read(orders.unit.stood).state, ["mail"])
        history = history_of(orders.unit, connection.table("finished"), names)
        with monkeypatch.context() as patch:
            patch.setattr("keyfold.orders.service.excluding.UPLOADED_MAX", 1)
            with pytest.raises(BadInput, match="2 orders were taken back, 1 can be left out of a history in postgres"):
                backfill(orders.store, orders.unit, history, ["mail"])
        backfill(orders.store, orders.unit, history, ["mail"], report=lambda *_: take_back(orders, "o3"))
        counted = {key: count for key, count in orders.cells().items() if key[0] == "mail"}
        assert counted == recount(
            [each for each in every if each.order_id not in ("o1", "o2", "o3")], DIMENSIONS, ["mail"]
        )
    connection.disconnect()


@pytest.mark.spec("ORD-08", "ORD-16")
def test_taking_back_live_orders_neither_ends_a_backfill_nor_makes_it_begin_anew(
    with_history: Orders, tmp_path: Path
) -> None:
    with_history.clock.advance(3 * HOUR)
    with_history.count(*[order(f"{n}", START, {"phone_id": "live"}) for n in range(9)])
    live = iter(range(9))
    path = write_history(tmp_path / "h.parquet", [order(f"h{n}", START - 1, {"phone_id": f"p{n}"}) for n in range(6)])

    def correct(done: int, what: str) -> None:
        assert take_back(with_history, str(next(live))) == ["corrected"]
        if done == 4 and next(live) < 5:
            raise Killed

    with pytest.raises(Killed):
        with_history.backfill(path, "phone_id", cells_max=2, report=correct)
    take_back(with_history, "8")
    (done,) = with_history.backfill(path, "phone_id", cells_max=2, report=correct)
    assert (done.steps, done.orders) == (1, 6), "it goes on where it was"
    assert is_complete(with_history)


@pytest.mark.spec("ORD-10", "ORD-16")
def test_what_was_called_unknown_explains_no_cell_of_the_next_dimension(with_history: Orders, tmp_path: Path) -> None:
    with_history.clock.advance(3 * HOUR)
    first = order("x", START, {"phone_id": "p"}, city="riga", pay="cash")
    second = order("z", START, {"phone_id": "p"}, city="riga", pay="card")
    bare = msgspec.structs.replace(first, properties={})
    with_history.count(bare)
    path = tmp_path / "h.parquet"
    assert with_history.add_dimension("city", write_history(path, []), rest_as_unknown=True).is_done
    with_history.count(msgspec.structs.replace(second, properties={"city": "riga"}))
    assert not with_history.add_dimension("pay", write_history(path, [first]), "payment_tech_type").is_done
    assert take_back(with_history, "z") == ["corrected"]
    assert take_back(with_history, "x") == ["corrected"]
    assert not with_history.cells()


@pytest.mark.spec("ORD-02", "ORD-08", "ORD-10")
def test_no_name_of_a_dimension_or_an_identity_meets_a_column_of_our_own(tmp_path: Path) -> None:
    names = ["count", "from_us", "to_us", "is_live", "times", "single", "identity"]
    given = {"identities": ["to_us", "times"], "dimensions": ["from_us", "is_live"], "start": iso(START)}
    identities = {"to_us": "a", "times": "b"}
    sent = [
        order(f"{n}", START + (n - 2) * HOUR, identities, from_us="f", is_live="l", count=f"c{n % 2}") for n in range(4)
    ]
    columns: dict[str, Any] = {each: [{**one.identities, **one.properties}.get(each) for one in sent] for each in names}
    columns |= {"id": [each.order_id for each in sent], "created_proc": [each.created_at for each in sent]}
    path = tmp_path / "h.parquet"
    pq.write_table(pa.table(columns), path)
    with opened(
        f"sqlite:///{tmp_path / 'x.db'}", **given, limits__transaction_seconds_max=1, limits__lock_seconds_max=1
    ) as orders:
        orders.clock.advance(4 * HOUR)
        bare = [{k: v for k, v in each.properties.items() if k != "count"} for each in sent]
        orders.count(*[msgspec.structs.replace(one, properties=said) for one, said in zip(sent, bare, strict=True)])
        orders.backfill(path)
        assert orders.add_dimension("count", path).is_done
        assert orders.cells() == recount(sent, ["from_us", "is_live", "count"], ["to_us", "times"])


@pytest.mark.spec("ORD-02", "ORD-10")
@pytest.mark.parametrize("name", ["order_id", "Created_At", "_keyfold_count", "Tariff", "PHONE_ID"])
def test_a_name_that_history_has_for_something_else_is_refused_before_anything_changes(
    sqlite_orders: Orders, name: str
) -> None:
    before = sqlite_orders.store.read(sqlite_orders.unit.stood)
    with pytest.raises(BadInput):
        switch(sqlite_orders.store, sqlite_orders.unit, name)
    with pytest.raises(BadInput):
        add_identity(sqlite_orders.store, sqlite_orders.unit, name)
    assert sqlite_orders.store.read(sqlite_orders.unit.stood) == before
    for more in ({"identities": ["phone_id", name]}, {"dimensions": ["tariff", "phone_id", name]}):
        with pytest.raises(SettingsWrong, match=r"(identities|dimensions): "), opened("sqlite://", **more):
            pass


@pytest.mark.spec("ORD-10")
def test_another_column_is_not_taken_in_the_middle(with_history: Orders) -> None:
    assert switch(with_history.store, with_history.unit, "city", "town") is not None
    with pytest.raises(Conflict, match="from the column 'town', not 'city'"):
        switch(with_history.store, with_history.unit, "city", "city")


@pytest.mark.spec("ORD-10")
def test_a_column_that_is_first_named_when_a_dimension_is_gone_on_with_is_the_one_that_is_read(
    with_history: Orders, tmp_path: Path
) -> None:
    with_history.clock.advance(3 * HOUR)
    with_history.count(order("1", START, tariff="t"))
    path = write_history(tmp_path / "h.parquet", [order("1", START, tariff="t", city="wrong")])
    pq.write_table(pq.read_table(path).append_column("town", pa.array(["riga"])), path)
    begun = switch(with_history.store, with_history.unit, "city")
    assert switch(with_history.store, with_history.unit, "city", "town") == begun
    with pytest.raises(Conflict, match="from the column 'town', not 'city'"):
        switch(with_history.store, with_history.unit, "city", "city")
    assert with_history.add_dimension("city", path, "town").is_done
    assert with_history.total("phone_id", "p1", city="riga") == 1


@pytest.mark.spec("ORD-03")
def test_an_answer_is_bounded(sqlite_orders: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "ITEMS_MAX", 5)
    sqlite_orders.count(*[order(str(n), NOW, tariff=f"t{n}") for n in range(3)])
    assert len(sqlite_orders.read(("phone_id", "p1"), group_by=["tariff"])[0].data) == 3
    with pytest.raises(TooLarge, match="more than 5 counts"):
        sqlite_orders.read(("phone_id", "p1"), ("phone_id", "p1"), group_by=["tariff"])


@pytest.mark.spec("ORD-06")
def test_marks_are_not_purged_until_whoever_saw_an_older_watermark_has_ended(store_url: str) -> None:
    with opened(store_url, dedupe_days=30) as orders:
        orders.count(order("1", NOW - 20 * DAY))
    with opened(store_url, dedupe_days=3) as orders:
        sweep = Sweep(orders.context, Units({"rides": orders.unit}))
        count = sa.select(sa.func.count()).select_from(orders.unit.tables.marks)
        sweep.step()
        sweep.step()
        assert orders.store.read(lambda tx: tx.execute(count).scalar_one()) == 1
        orders.clock.advance(orders.store.limits.transaction_seconds_max + 2)
        sweep.step()
        assert orders.store.read(lambda tx: tx.execute(count).scalar_one()) == 0


# Older documents --------------------------------------------------------------------------------------------------

DOCUMENT = {
    "_id": "5d0b7fb1629526419ee8cfad",
    "transactions": ["11a5920aac5616bf82865eeb0866019e"],
    "tariffs": {"business": {"value": 10}, "econom": {"value": 72}, "vezetstart": {"value": 3}},
    "updated": "ISODate('2020-04-23T20:03:58.787Z')",
    "created": "ISODate('2019-06-24T11:16:03.180Z')",
    "brand": {"vezet": {"tariffs": {"vezetstart": {"value": 3}}, "transactions": ["c7a8718dd12b640aa6dbd20fa58447b3"]}},
}


def lines(*documents: Any) -> Any:
    import io

    return io.BytesIO(
        b"".join(each if isinstance(each, bytes) else msgspec.json.encode(each) + b"\n" for each in documents)
    )


@pytest.mark.spec("ORD-15")
def test_older_documents_are_imported_and_what_cannot_be_mapped_is_listed(store_url: str) -> None:
    with opened(store_url, start=iso(START), mixed_brand="yataxi") as orders:
        wrong = [
            {**DOCUMENT, "_id": "late", "updated": iso(START)},
            {**DOCUMENT, "_id": "strange", "cities": {"riga": 1}},
            {**DOCUMENT, "_id": "negative", "tariffs": {"econom": {"value": -1}}},
            {**DOCUMENT, "_id": ""},
            b"not json\n",
        ]
        orders.clock.advance(3 * HOUR)
        done = import_documents(orders.store, orders.unit, "phone_id", lines(DOCUMENT, *wrong), "one")
        assert (done.documents, done.orders, done.refused, done.lacking) == (1, 88, 5, 5)
        assert not check(orders, identities={"phone_id": "late"}, fewer_than=1).allowed, (
            "what was refused is not counted"
        )
        assert [each.line for each in done.refused_documents] == [2, 3, 4, 5, 6]
        (read,) = orders.read(
            ("phone_id", "5d0b7fb1629526419ee8cfad"), group_by=["brand", "tariff", "payment_method_type"]
        )
        assert {tuple(each.value for each in item.properties): item.counter_value for item in read.data} == {
            ("vezet", "vezetstart", "unknown"): 3,
            ("yataxi", "business", "unknown"): 10,
            ("yataxi", "econom", "unknown"): 72,
            ("yataxi", "vezetstart", "unknown"): 3,
        }
        less = {**DOCUMENT, "tariffs": {"econom": {"value": 1}}, "brand": {}}
        import_documents(orders.store, orders.unit, "phone_id", lines(less), "two")
        assert orders.total("phone_id", "5d0b7fb1629526419ee8cfad") == 1, "set whole, not added"


@pytest.mark.spec("ORD-13", "ORD-14", "ORD-15")
def test_an_import_is_complete_only_when_all_that_was_refused_or_left_is_said_to_be_settled(store_url: str) -> None:
    with opened(store_url, start=iso(START), mixed_brand="yataxi") as orders:
        orders.clock.advance(3 * HOUR)

        def imported(source: str, *documents: Any, **more: bool) -> int:
            given = lines(*documents)
            return import_documents(orders.store, orders.unit, "phone_id", given, source, **more).lacking

        def is_allowed() -> bool:
            assert check(orders, identities={"phone_id": "p1"}, fewer_than=1).allowed is is_complete(orders)
            return is_complete(orders)

        assert imported("good", DOCUMENT) == 0
        assert is_allowed()
        assert imported("bad", {**DOCUMENT, "_id": "p1", "strange": 1}) == 1
        assert not is_allowed()
        assert imported("other", DOCUMENT) == 1
        assert imported("empty") == 1
        assert not is_allowed(), "what was refused is not in another file"
        assert imported("mended", {**DOCUMENT, "_id": "p2"}, is_settled=True) == 0
        assert is_allowed()
        assert orders.count(order("under way", START - 1)) == ["before_start"]
        assert not is_allowed()
        assert imported("mended", DOCUMENT) == 1, "documents do not tell whether they have it"
        assert not is_allowed()
        assert imported("empty", is_settled=True) == 0
        assert is_allowed()
    with opened(store_url, unit="early", start=iso(START), mixed_brand="yataxi") as orders:
        orders.count(order("before", NOW))
        orders.clock.advance(3 * HOUR)
        import_documents(orders.store, orders.unit, "phone_id", lines(DOCUMENT), "one")
        assert not is_complete(orders), "it was left to history before that was imported"


@pytest.mark.spec("ORD-15")
def test_import_and_backfill_that_begin_at_once_exclude_each_other(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On SQLite nobody writes meanwhile."""
    with opened(postgres_url, identities=["phone_id"], start=iso(START)) as orders:
        waiting, real = [orders.unit], orders.unit.stood

        def stood(tx: Transaction) -> Stood:
            found = real(tx)
            if waiting:
                claim(orders.store, waiting.pop(), ["phone_id"], "import")
            return found

        monkeypatch.setattr(orders.unit, "stood", stood)
        with pytest.raises(Conflict, match="comes from import, which excludes backfill"):
            claim(orders.store, orders.unit, ["phone_id"], "backfill")


@pytest.mark.spec("ORD-15")
def test_import_and_backfill_exclude_each_other(store_url: str, tmp_path: Path) -> None:
    with opened(store_url, start=iso(START), mixed_brand="yataxi") as orders:
        import_documents(orders.store, orders.unit, "phone_id", lines(DOCUMENT), "one")
        path = write_history(tmp_path / "h.parquet", [order("1", START - 1)])
        with pytest.raises(Conflict, match="comes from import"):
            orders.backfill(path, "phone_id")
        orders.backfill(path, "card_id")
        with pytest.raises(Conflict, match="comes from backfill"):
            import_documents(orders.store, orders.unit, "card_id", lines(DOCUMENT), "one")
    with opened(store_url, unit="food", mixed_brand="x") as food, pytest.raises(Conflict, match="counts live"):
        import_documents(food.store, food.unit, "phone_id", lines(DOCUMENT), "one")


def half_imported(orders: Orders, source: str, *documents: Any) -> None:
    """Import documents one by one, and be killed behind the second."""

    def stop(done: int, what: str) -> None:
        if done == 2:
            raise Killed

    with pytest.raises(Killed):
        import_documents(orders.store, orders.unit, "phone_id", lines(*documents), source, stop, documents_max=1)


@pytest.mark.spec("ORD-13", "ORD-15")
@pytest.mark.parametrize("is_refused", [True, False])
def test_half_an_import_is_not_made_whole_by_another_file(store_url: str, is_refused: bool) -> None:
    with opened(store_url, start=iso(START), mixed_brand="yataxi") as orders:
        orders.clock.advance(3 * HOUR)
        second = {**DOCUMENT, "_id": "p2", **({"strange": 1} if is_refused else {})}
        half = [{**DOCUMENT, "_id": "p1"}, second, {**DOCUMENT, "_id": "p3"}]
        half_imported(orders, "half", *half)
        done = import_documents(orders.store, orders.unit, "phone_id", lines({**DOCUMENT, "_id": "p4"}), "other")
        assert (done.refused, done.lacking, is_complete(orders)) == (0, 1, False)
        assert orders.total("phone_id", "p3") == 0
        import_documents(orders.store, orders.unit, "phone_id", lines(*half), "half", is_settled=True)
        assert orders.total("phone_id", "p3") == 88
        assert is_complete(orders) is not is_refused


@pytest.mark.spec("ORD-15")
@pytest.mark.parametrize("updated", ["-1d", "2h ago", " -0s ", "ISODate('-1d')", {"$date": "1w ago"}])
def test_a_document_says_when_it_was_updated_not_how_long_ago(store_url: str, updated: Any) -> None:
    given = {**DOCUMENT, "updated": updated, "created": updated}
    with opened(store_url, start=iso(START), mixed_brand="yataxi") as orders:
        done = import_documents(orders.store, orders.unit, "phone_id", lines(given), "one")
        assert [each.reason for each in done.refused_documents] == ["created is not a time"]


@pytest.mark.spec("ORD-13", "ORD-15")
@pytest.mark.parametrize(
    "created", ["0001-01-01T00:00:00+14:00", "0001-01-01T00:00:00Z", "1969-12-31T23:59:59.999999Z"]
)
def test_a_document_created_before_1970_is_refused_as_such_orders_are(store_url: str, created: str) -> None:
    """A time that is none must not be where counts begin, nor one that no answer can tell."""
    first = {**DOCUMENT, "_id": "p1", "created": "1970-01-01T00:00:00Z"}
    with opened(store_url, start=iso(START), mixed_brand="yataxi") as orders:
        given = lines(first, {**DOCUMENT, "_id": "p2", "created": created})
        done = import_documents(orders.store, orders.unit, "phone_id", given, "one")
        assert [each.reason for each in done.refused_documents] == ["it was created before 1970"]
        asked = [Identity("phone_id", each) for each in ("p1", "p2")]
        told = orders.store.read(lambda tx: evidence_of(tx, orders.unit, asked, None))
        assert [each.counted_from for each in told] == ["1970-01-01T00:00:00Z", None]


@pytest.mark.spec("ORD-13", "ORD-15")
def test_what_was_refused_is_lacking_at_once_also_where_all_was_complete(store_url: str) -> None:
    with opened(store_url, start=iso(START), mixed_brand="yataxi") as orders:
        orders.clock.advance(3 * HOUR)
        import_documents(orders.store, orders.unit, "phone_id", lines(DOCUMENT), "one")
        assert is_complete(orders)
        half_imported(orders, "two", DOCUMENT, {**DOCUMENT, "strange": 1}, DOCUMENT)
        assert not is_complete(orders)


@pytest.mark.spec("ORD-15")
def test_an_import_killed_at_every_commit_ends_exact_and_lists_all_that_was_refused(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [{**DOCUMENT, "_id": f"p{n:02}", **({"strange": 1} if n % 4 == 1 else {})} for n in range(12)]
    with opened(store_url, start=iso(START), mixed_brand="yataxi") as orders:
        orders.clock.advance(3 * HOUR)
        real = orders.store.transact
        left: list[int] = []

        def transact(work: Any, **more: Any) -> Any:
            found = real(work, **more)
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return found

        monkeypatch.setattr(orders.store, "transact", transact)
        for commits in range(100):
            left[:] = [commits]
            try:
                size = 2 + commits % 3
                done = import_documents(orders.store, orders.unit, "phone_id", lines(*given), "one", documents_max=size)
                break
            except Killed:
                assert not is_complete(orders)
        monkeypatch.undo()
        assert commits > 3
        assert (done.documents, done.orders, done.refused, done.lacking) == (9, 9 * 88, 3, 3)
        assert [(each.line, each.identity) for each in done.refused_documents] == [(2, "p01"), (6, "p05"), (10, "p09")]
        totals = [orders.total("phone_id", each["_id"]) for each in given]
        assert totals == [0 if "strange" in each else 88 for each in given]


@pytest.mark.spec("ORD-15")
@pytest.mark.parametrize("is_killed", [True, False])
def test_an_import_of_which_nothing_was_taken_leaves_the_choice(
    store_url: str, tmp_path: Path, is_killed: bool
) -> None:
    with opened(store_url, start=iso(START), mixed_brand="yataxi") as orders:
        orders.clock.advance(3 * HOUR)
        wrong = [{**DOCUMENT, "strange": n} for n in range(3)]
        if is_killed:
            half_imported(orders, "wrong", *wrong)
        else:
            done = import_documents(orders.store, orders.unit, "phone_id", lines(*wrong), "wrong")
            assert (done.documents, done.refused, done.lacking) == (0, 3, 3)
        assert not is_complete(orders)
        path = write_history(tmp_path / "h.parquet", [order("1", START - 1)])
        orders.backfill(path)
        assert is_complete(orders)
        with pytest.raises(Conflict, match="comes from backfill"):
            import_documents(orders.store, orders.unit, "phone_id", lines(*wrong), "wrong")
        assert switch(orders.store, orders.unit, "city") is not None, "nothing is left to finish"
    with opened(store_url, unit="food", start=iso(START), mixed_brand="x") as food:
        food.clock.advance(3 * HOUR)
        import_documents(food.store, food.unit, "phone_id", lines(), "empty")
        assert is_complete(food), "that there is nothing is an import as well"
        with pytest.raises(Conflict, match="comes from import"):
            food.backfill(path, "phone_id")
