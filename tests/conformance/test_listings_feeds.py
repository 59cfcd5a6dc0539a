"""A feed is staged, planned, held or applied, and leaves exactly the offers that it has, whatever happens."""

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keyfold.core import access
from keyfold.core.clock import ManualClock
from keyfold.core.context import Context
from keyfold.core.errors import Conflict, DataRefused, NotFound, TicketRefused, TooLarge
from keyfold.core.settings import load as load_settings
from keyfold.core.store import Transaction, batch
from keyfold.http import body as bodies
from keyfold.listings.model import SHARDS, Offer, moved, shard_of
from keyfold.listings.part import PART
from keyfold.listings.service import saving
from keyfold.listings.service.feeds import applying, planning, reporting, restarting, staging, sweeping, tasks
from keyfold.listings.service.feeds.items import read_line
from keyfold.listings.service.feeds.reporting import Problem
from keyfold.listings.service.feeds.tasks import FeedShown
from keyfold.listings.service.saving import Change
from tests.listings import CAR, Product, car, kinds, opened
from tests.unit.http.conftest import Answered, Caller

SELLER = "7"


def item(external_id: str | None, **more: Any) -> dict[str, Any]:
    named = {} if external_id is None else {"external_id": external_id}
    return {**named, "category": "cars", "content": dict(CAR), **more}


def lines(*items: Any) -> list[bytes]:
    return [each if isinstance(each, bytes) else msgspec.json.encode(each) for each in items]


def free(tx: Transaction) -> None:
    """The ticket of a scheduler that is alone."""


class Feeds(Product):
    """A product whose feeds are driven by hand."""

    def send(self, task_id: int, *items: Any, position: int = 0, seller: str = SELLER) -> int:
        taken = staging.take_lines(self.store, self.listings, seller, task_id, position, lines(*items))
        return taken.position

    def end(self, task_id: int, count: int, seller: str = SELLER) -> FeedShown:
        return self.do(tasks.end_task, seller, task_id, count)

    def step(self, seller: str = SELLER, guard: applying.Guard = free) -> bool:
        return applying.step(self.store, self.listings, shard_of(seller), guard)

    def run(self, seller: str = SELLER) -> None:
        for _ in range(1_000):
            if not self.step(seller):
                return
        raise AssertionError("the steps do not end")

    def feed(self, task_id: int, *items: Any, seller: str = SELLER) -> FeedShown:
        """A whole feed, sent, ended and applied."""
        self.send(task_id, *items, seller=seller)
        self.end(task_id, len(items), seller)
        self.run(seller)
        return self.shown(task_id, seller)

    def ids(self, task_id: int, *external_ids: str) -> FeedShown:
        return self.feed(task_id, *[item(each) for each in external_ids])

    def shown(self, task_id: int, seller: str = SELLER) -> FeedShown:
        return self.store.read(lambda tx: tasks.shown(tasks.must_find(tx, seller, task_id)))

    def problems(self, task_id: int, seller: str = SELLER) -> list[Problem]:
        return self.store.read(
            lambda tx: reporting.report(tx, self.listings, seller, task_id, limit=1_000_000).problems
        )

    def offers(self, seller: str = SELLER) -> list[Offer]:
        rows = self.rows(f"SELECT body FROM offer WHERE kind = 'offer' AND seller_id = '{seller}'")
        return [msgspec.json.decode(body, type=Offer) for (body,) in rows]

    def by_external_id(self, seller: str = SELLER) -> dict[str, Offer]:
        """The offers of feeds that are not removed; each external id has one at most."""
        found: dict[str, Offer] = {}
        for offer in self.offers(seller):
            if offer.external_id and offer.status not in ("removed", "archived"):
                assert offer.external_id not in found
                found[offer.external_id] = offer
        return found

    def live(self, seller: str = SELLER) -> set[str]:
        return {name for name, offer in self.by_external_id(seller).items() if offer.status != "sold"}

    def sell(self, offer: Offer) -> None:
        self.move(offer, "sold")

    def move(self, offer: Offer, status: Any, actor: Any = "seller") -> None:
        def work(tx: Transaction) -> None:
            saved = saving.load_by_id(tx, [offer.offer_id])[offer.offer_id]
            saving.save(tx, self.listings, [Change(saved, moved(saved.offer, status, actor))])

        self.store.transact(work)


@pytest.fixture
def product(store_url: str) -> Iterator[Feeds]:
    with opened(store_url, clock=ManualClock(), listings__feed_delete_share_max=1) as made:
        yield Feeds(made.context, made.clock)


@pytest.fixture
def make(store_url: str) -> Iterator[Callable[..., Feeds]]:
    """A product with settings of one's own."""
    managers = []

    def opening(**options: object) -> Feeds:
        manager = opened(store_url, clock=ManualClock(), **options)
        managers.append(manager)
        made = manager.__enter__()
        return Feeds(made.context, made.clock)

    yield opening
    for manager in managers:
        manager.__exit__(None, None, None)


# Taking items in -----------------------------------------------------------------------------------------------------


@pytest.mark.spec("LST-12")
def test_a_repeated_piece_is_skipped_and_a_gap_is_refused_with_the_position_to_go_on_from(product: Feeds) -> None:
    assert product.send(1, item("a"), item("b")) == 2
    assert product.send(1, item("a"), item("b")) == 2
    assert product.send(1, item("b"), item("c"), position=1) == 3
    assert product.send(1) == 3
    with pytest.raises(Conflict, match="3 were taken so far") as refused:
        product.send(1, item("e"), position=4)
    assert "from 3 on" in (refused.value.hint or "")
    assert product.rows("SELECT external_id, number FROM feed_items ORDER BY external_id") == [
        ("a", 0),
        ("b", 1),
        ("c", 2),
    ]
    assert product.shown(1).taken.repeated == 0
    assert product.offers() == []


@pytest.mark.spec("LST-12")
def test_a_feed_that_was_cut_has_no_end_and_goes_on_where_it_was_cut(product: Feeds) -> None:
    product.send(1, item("a"))
    with pytest.raises(Conflict, match="1 items were taken, 3 were sent"):
        product.end(1, 3)
    with pytest.raises(Conflict, match="1 items were taken, 0 were sent"):
        product.end(1, 0)
    assert product.shown(1).stage == "taking"
    assert not product.step()
    product.send(1, item("b"), item("c"), position=1)
    product.end(1, 3)
    product.run()
    assert product.live() == {"a", "b", "c"}


@pytest.mark.spec("LST-12")
def test_the_end_is_told_again_and_takes_no_more_items(product: Feeds) -> None:
    product.send(1, item("a"))
    first = product.end(1, 1)
    assert product.end(1, 1) == first
    with pytest.raises(Conflict, match="takes no more items"):
        product.send(1, item("b"), position=1)
    product.run()
    assert product.end(1, 1).stage == "done"
    with pytest.raises(Conflict, match="cut"):
        product.end(1, 2)
    assert product.live() == {"a"}


@pytest.mark.spec("LST-12")
def test_a_task_that_is_not_newer_than_the_last_ended_changes_nothing(product: Feeds) -> None:
    product.send(4, item("old"))
    product.ids(5, "a")
    for task_id in (3, 4):
        with pytest.raises(Conflict):
            product.send(task_id, item("b"), position=0)
        with pytest.raises(Conflict):
            product.end(task_id, 1 if task_id == 4 else 0)
    assert product.shown(4).stage == "superseded"
    with pytest.raises(NotFound):
        product.shown(3)
    product.run()
    assert product.live() == {"a"}


@pytest.mark.spec("LST-12")
def test_items_that_come_in_while_a_newer_task_ends_stay_without_effect(product: Feeds) -> None:
    """The end of task 5 cannot see a task that begins at the same moment; the row of the seller can."""
    product.ids(5, "a")
    product.store.transact(lambda tx: tasks.begin(tx, SELLER, 4))
    with pytest.raises(Conflict, match="feed 5 of this seller has ended"):
        product.send(4, item("b"))
    with pytest.raises(Conflict, match="feed 5 of this seller has ended"):
        product.end(4, 0)


@pytest.mark.spec("LST-12")
def test_two_feeds_at_once_are_staged_apart_and_the_newer_one_wins(product: Feeds) -> None:
    product.send(1, item("a"), item("b"))
    product.send(2, item("b"), item("c"))
    product.send(1, item("d"), position=2)
    product.end(1, 3)
    product.step()
    product.step()
    assert product.shown(1).stage == "applying"
    product.send(2, item("c"), position=2)
    product.end(2, 3)
    product.run()
    assert product.live() == {"b", "c"}
    assert (product.shown(1).stage, product.shown(2).stage) == ("superseded", "done")
    product.ids(3, "b")
    assert [product.shown(task_id).stage for task_id in (1, 2, 3)] == ["superseded", "done", "done"]


@pytest.mark.spec("LST-12")
def test_of_repeats_the_last_wins_and_the_others_are_told(product: Feeds) -> None:
    product.send(1, item("a", price={"amount": 1, "currency": "EUR"}), item("b"))
    product.send(1, item("a", price={"amount": 2, "currency": "EUR"}), item("b", category="?"), position=2)
    product.send(1, item("a", price={"amount": 3, "currency": "EUR"}), position=4)
    product.end(1, 5)
    product.run()
    offers = product.by_external_id()
    assert list(offers) == ["a"]
    assert offers["a"].price is not None
    assert offers["a"].price.amount == 3
    told = {each.place: (each.external_id, each.reason) for each in product.problems(1)}
    assert set(told) == {"item 000000000", "item 000000001", "item 000000002", "item 000000003"}
    assert told["item 000000000"][0] == "a"
    assert "item 2" in told["item 000000000"][1]
    assert "item 4" in told["item 000000002"][1]
    assert "no category" in told["item 000000003"][1]
    assert product.shown(1).taken.repeated == 3


@pytest.mark.spec("LST-12", "LST-14")
@pytest.mark.parametrize(
    ("given", "name", "words"),
    [
        (item("a", content={"make": "x"}), "a", "content"),
        (item("a", category="boats"), "a", "no category"),
        (item("a", surprise=1), "a", "surprise"),
        (item("a", content={**CAR, "title": "x\0y"}), "a", "NUL"),
        (item("a", photos=["http://127.0.0.1/x.jpg"]), "a", "host"),
        (item("a", photos=["ftp://example.com/x.jpg"]), "a", "http"),
        (item("a", price={"amount": -1, "currency": "EUR"}), "a", "price"),
        (item("a", price={"amount": 1, "currency": "EUR", "more": 1}), "a", "more"),
        (item("a", content=[1]), "a", "content"),
        (item("a", warehouse_id=-1), "a", "warehouse_id"),
        (b'{"external_id": "a", "external_id": "a", "category": "cars", "content": {}}', "a", "twice"),
        (b'{"external_id": "a", "content": ' + b"[" * 100 + b"]" * 100 + b"}", "a", ""),
        (item("a", **{"x\0": 1}), "a", "x\\0"),
        (item("a\0"), "", "NUL"),
        (item(""), "", "external_id"),
        (item("x" * 201), "", "external_id"),
        (b"not json", "", "malformed"),
        (b'{"external_id": "a"', "", "truncated"),
        (b'"a"', "", "object"),
        (b"\xff\xfe", "", ""),
        (b'{"external_id": "\\ud800"}', "", "surrogate"),
        (b"[" * 100_000, "", ""),
    ],
)
def test_an_invalid_item_is_told_and_keeps_its_offer_if_its_id_can_be_read(
    product: Feeds, given: Any, name: str, words: str
) -> None:
    product.ids(1, "a", "b")
    product.feed(2, given, item("b"))
    assert product.live() == ({"a", "b"} if name else {"b"})
    (told,) = product.problems(2)
    assert (told.place, told.external_id) == ("item 000000000", name)
    assert words in told.reason
    shown = product.shown(2)
    assert (shown.taken.invalid, shown.taken.unreadable) == ((1, 0) if name else (0, 1))
    assert shown.plan is not None
    assert (shown.plan.keep, shown.plan.invalid, shown.plan.delete) == ((1, 1, 0) if name else (0, 1, 1))
    if name:
        assert [offer.content for offer in product.offers()] == [CAR, CAR]


@pytest.mark.spec("LST-12")
def test_an_item_of_the_largest_size_is_taken_and_one_byte_more_is_not(make: Callable[..., Feeds]) -> None:
    product = make(listings__feed_delete_share_max=1)
    most = product.listings.settings.offer_bytes_max
    assert most == 100 * 1024
    equipment = ["x" * 100] * 200
    base = {**CAR, "description": "", "equipment": equipment}
    room = most - len(msgspec.json.encode((base, None, ())))
    # The description has a limit of its own, so the rest is filled with photos.
    photos: list[str] = []
    while room > 31_000:
        photos.append("https://photos.example.com/" + "p" * 1_900 + f"{len(photos):03}")
        room = most - len(msgspec.json.encode((base, None, tuple(photos))))
    largest = {**base, "description": "y" * room}
    larger = {**base, "description": "y" * (room + 1)}
    assert len(msgspec.json.encode((largest, None, tuple(photos)))) == most
    product.feed(1, item("a", content=largest, photos=photos), item("b", content=larger, photos=photos))
    assert product.live() == {"a"}
    (told,) = product.problems(1)
    assert (told.external_id, f"{most} are allowed" in told.reason) == ("b", True)


@pytest.mark.spec("LST-12")
def test_text_of_every_kind_comes_back_as_it_was_sent(product: Feeds) -> None:
    names = ["🚗", "é", "e\u0301", "'; DROP TABLE feed; --", '"\\', " ", "\u2028", "a\tb", "Z", "\U0010ffff", "\ufffd"]
    sent = [item(name, content={**CAR, "title": f"{name} 👩‍👩‍👧 \u200b"}) for name in names]
    assert product.feed(1, *sent).done.created == len(names)
    assert {name: offer.content["title"] for name, offer in product.by_external_id().items()} == {
        name: f"{name} 👩‍👩‍👧 \u200b" for name in names
    }
    again = product.feed(2, *sent)
    assert (again.done.unchanged, again.done.created, again.done.removed) == (len(names), 0, 0)


@pytest.mark.spec("LST-12")
def test_without_an_external_id_the_content_says_which_offer_it_is(product: Feeds) -> None:
    product.feed(1, item(None))
    (offer,) = product.offers()
    reordered = dict(reversed(list(CAR.items())))
    product.feed(2, item(None, content=reordered, price={"amount": 5, "currency": "EUR"}))
    (after,) = product.offers()
    assert after.offer_id == offer.offer_id
    assert after.price is not None
    product.feed(3, item(None, content={**CAR, "year": 1990}))
    assert len(product.live()) == 1
    assert product.live() != {offer.external_id}


@pytest.mark.spec("LST-12")
def test_problems_and_items_are_bounded(make: Callable[..., Feeds]) -> None:
    product = make(listings__feed_problems_max=3, listings__feed_items_max=10)
    product.send(1, *[b"?"] * 2)
    product.send(1, *[b"?"] * 5, position=2)
    shown = product.shown(1)
    assert (shown.taken.unreadable, shown.problems_untold, len(product.problems(1))) == (7, 4, 3)
    with pytest.raises(TooLarge):
        product.send(1, *[item("a")] * 4, position=7)
    assert product.shown(1).position == 7
    product.send(1, *[item("a")] * 3, position=7)


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=60)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    ).map(lambda content: _json({"external_id": "a", "category": "cars", "content": content, "price": content}))
)
def test_whatever_a_line_is_it_is_read_and_what_is_said_of_it_can_be_stored(
    tmp_path_factory: pytest.TempPathFactory, line: bytes
) -> None:
    read = read_line(_any_listings(tmp_path_factory), SELLER, line)
    assert bool(read.body) != bool(read.reason)
    for text in (read.external_id, read.body, read.reason):
        assert "\0" not in text
        text.encode()


def _json(value: object) -> bytes:
    """As others write it: with escapes, NaN and whole numbers of any length."""
    return json.dumps(value).encode()


_LISTINGS: list[Any] = []


def _any_listings(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if not _LISTINGS:
        with opened(f"sqlite:///{tmp_path_factory.mktemp('read') / 'keyfold.db'}") as made:
            _LISTINGS.append(made.listings)
    return _LISTINGS[0]


# What items do -------------------------------------------------------------------------------------------------------


@pytest.mark.spec("LST-12")
def test_offers_are_made_updated_and_removed_with_their_counts_and_messages(product: Feeds) -> None:
    product.ids(1, "a", "b", "c")
    before = product.by_external_id()
    priced = item("b", price={"amount": 7, "currency": "EUR"}, warehouse_id=5, photos=["https://example.com/1.jpg"])
    shown = product.feed(2, item("a"), priced, item("d"))
    assert msgspec.structs.asdict(shown.done) == {
        "created": 1,
        "updated": 1,
        "unchanged": 1,
        "returned": 0,
        "kept": 0,
        "sold": 0,
        "ignored": 0,
        "removed": 1,
    }
    after = product.by_external_id()
    assert set(after) == {"a", "b", "d"}
    assert after["a"] == before["a"]
    assert (after["b"].offer_id, after["b"].warehouse_id) == (before["b"].offer_id, 5)
    assert (after["b"].business_id, after["b"].shop_id, after["b"].schema_version) == (7, 7, 2)
    (gone,) = [offer for offer in product.offers() if offer.status == "removed"]
    assert (gone.external_id, gone.reason) == ("c", "no longer in the feed")
    assert product.counts(SELLER) == product.listed(SELLER) == {1: 3, 2: 3}
    assert product.counters(SELLER) == {"Active": 3}
    versions = {(key, version) for key, _, version, _ in kinds(product.told(), "offer")}
    expected = {(before["a"].offer_id, 1), (after["d"].offer_id, 1)}
    expected |= {(before[name].offer_id, version) for name in "bc" for version in (1, 2)}
    assert versions == expected
    assert [key for key, *_ in product.told("photo-requests")] == [after["b"].offer_id]


@pytest.mark.spec("LST-12")
def test_a_ban_stays_expired_becomes_active_and_sold_stays_sold(product: Feeds) -> None:
    product.ids(1, "banned", "expired", "sold")
    offers = product.by_external_id()
    product.change(offers["banned"].offer_id, is_banned=True)
    product.move(offers["expired"], "expired", "scheduler")
    product.sell(offers["sold"])
    product.feed(2, *[item(name, price={"amount": 9, "currency": "EUR"}) for name in offers])
    after = product.by_external_id()
    assert {name: offer.offer_id for name, offer in after.items()} == {
        name: offer.offer_id for name, offer in offers.items()
    }
    assert {
        (name, offer.status, offer.is_banned, offer.price.amount) for name, offer in after.items() if offer.price
    } == {
        ("banned", "active", True, 9),
        ("expired", "active", False, 9),
        ("sold", "sold", False, 9),
    }
    assert "MoneyEarned.EUR" not in product.counters(SELLER)


@pytest.mark.spec("LST-12")
def test_offers_made_by_hand_and_of_others_are_never_touched(product: Feeds) -> None:
    (hand,) = product.make(car(SELLER))
    product.feed(1, item("a"), seller="8")
    product.ids(1, "a")
    product.ids(2)
    assert product.live() == set()
    assert hand.offer in product.offers()
    assert product.live("8") == {"a"}


@pytest.mark.spec("LST-12")
def test_what_was_sold_stays_sold_when_it_leaves_the_feed_and_when_it_comes_back(product: Feeds) -> None:
    product.ids(1, "a", "b")
    sold = product.by_external_id()["a"]
    product.sell(sold)
    assert product.ids(2, "b").done.removed == 0
    assert product.by_external_id()["a"].status == "sold"
    assert product.ids(3, "a", "b").done.created == 0
    assert product.by_external_id()["a"].offer_id == sold.offer_id
    assert product.counters(SELLER) == {"Active": 1, "Sold": 1}


@pytest.mark.spec("LST-12")
def test_what_was_sold_and_archived_is_not_made_anew_while_the_feed_has_it(product: Feeds) -> None:
    product.ids(1, "a", "b")
    sold = product.by_external_id()["a"]
    product.sell(sold)
    product.move(sold, "archived", "scheduler")
    for task_id in (2, 3):
        product.pass_days(60)
        shown = product.ids(task_id, "a", "b")
        assert shown.plan is not None
        assert (shown.done.sold, shown.done.created, shown.plan.sold, shown.plan.create) == (1, 0, 1, 0)
        assert [each.reason for each in product.problems(task_id)] == ["its offer was sold and is archived"]
        while sweeping.forget(product.store, product.listings, 100):
            pass
    assert len(product.offers()) == 2


@pytest.mark.spec("LST-13")
@pytest.mark.parametrize("by_hand", [True, False])
def test_a_removed_offer_returns_with_its_id_and_its_ban_within_the_window_only(product: Feeds, by_hand: bool) -> None:
    product.ids(1, "a", "b")
    before = product.by_external_id()
    for name in "ab":
        product.change(before[name].offer_id, is_banned=True)
        if by_hand:
            product.move(before[name], "removed")
    if not by_hand:
        product.ids(2)
    product.pass_days(29)
    shown = product.ids(3, "a")
    assert (shown.done.returned, shown.done.created) == (1, 0)
    back = product.by_external_id()["a"]
    assert (back.offer_id, back.is_banned, back.reason) == (before["a"].offer_id, True, "")
    product.pass_days(2)
    shown = product.ids(4, "a", "b")
    assert (shown.done.returned, shown.done.created) == (0, 1)
    made = product.by_external_id()["b"]
    assert (made.offer_id != before["b"].offer_id, made.is_banned) == (True, False)
    assert product.counts(SELLER) == product.listed(SELLER)


@pytest.mark.spec("LST-12")
def test_an_item_older_than_the_row_of_its_offer_is_ignored(product: Feeds) -> None:
    product.ids(1, "a")
    product.store.transact(lambda tx: tx.driver("UPDATE feed SET task_id = 9"))
    shown = product.feed(2, item("a", price={"amount": 9, "currency": "EUR"}))
    assert shown.done.ignored == 1
    assert product.by_external_id()["a"].price is None
    assert "task 9" in product.problems(2)[0].reason


@pytest.mark.spec("LST-12")
def test_many_items_and_removals_are_done_in_steps_that_are_bounded(
    product: Feeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applying, "STEP_ITEMS", 4)
    monkeypatch.setattr(applying, "STEP_REMOVALS", 3)
    names = [f"{number:03}" for number in range(10)]
    product.send(1, *map(item, names))
    product.end(1, 10)
    grown = []
    while product.step():
        grown.append(len(product.offers()))
    assert grown == [0, 4, 8, 10, 10, 10]
    product.end(2, 0)
    shrunk = []
    while product.step():
        shrunk.append(len(product.live()))
    assert shrunk == [10, 10, 7, 4, 1, 0, 0]


@pytest.mark.spec("LST-12")
def test_a_step_holds_so_many_bytes_at_most_but_always_an_item(product: Feeds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "STEP_BYTES_MAX", 900)
    product.send(1, *[item(name) for name in "abcd"])
    size = max(row[0] for row in product.rows("SELECT length(body) FROM feed_items"))
    assert 900 // size == 2
    product.end(1, 4)
    grown = []
    while product.step():
        grown.append(len(product.offers()))
    assert grown == [0, 2, 4, 4, 4]
    monkeypatch.setattr(saving, "STEP_BYTES_MAX", 1)
    assert product.ids(2, "a", "e").done.created == 1


# Plans ---------------------------------------------------------------------------------------------------------------


@pytest.mark.spec("LST-13")
def test_the_plan_counts_what_the_feed_then_does(product: Feeds) -> None:
    (hand,) = product.make(car(SELLER))
    product.ids(1, *"abcdefgh")
    offers = product.by_external_id()
    product.sell(offers["a"])
    product.sell(offers["b"])
    product.move(offers["b"], "archived", "scheduler")
    product.move(offers["c"], "removed")
    product.move(offers["f"], "expired", "scheduler")
    product.move(offers["f"], "archived", "scheduler")
    product.change(offers["d"].offer_id, is_banned=True)
    sent = [
        item("f"),
        item("b"),
        item("c"),
        item("d"),
        item("e", category="?"),
        item("new"),
        item("newer", category="?"),
        b"?",
    ]
    product.send(2, *sent)
    early = product.store.read(lambda tx: planning.plan_of(tx, tasks.must_find(tx, SELLER, 2)))
    product.end(2, len(sent))
    product.run()
    shown = product.shown(2)
    plan = shown.plan
    assert plan is not None
    assert early == msgspec.structs.replace(plan, has_ended=False)
    assert plan.create == shown.done.created + shown.done.returned == 3
    assert plan.update == shown.done.updated + shown.done.unchanged == 1
    assert plan.delete == shown.done.removed == 2
    assert plan.keep == shown.done.kept == 1
    assert plan.sold == shown.done.sold == 1
    assert (plan.invalid, plan.live, plan.has_ended) == (3, 4, True)
    assert product.live() == {"c", "d", "e", "f", "new"}
    assert hand.offer in product.offers()


@pytest.mark.spec("LST-13")
def test_a_feed_that_would_remove_too_much_is_held_until_somebody_approves_it(make: Callable[..., Feeds]) -> None:
    product = make()
    product.ids(1, *"abcd")
    assert product.ids(2, "a", "b").stage == "done"
    shown = product.ids(3)
    assert (shown.stage, shown.reason) == ("held", "it would remove 2 of 2 offers")
    assert product.live() == {"a", "b"}
    for task_id in (1, 2):
        with pytest.raises(Conflict, match="not held"):
            product.do(tasks.approve, SELLER, task_id, "ann")
    with pytest.raises(NotFound):
        product.do(tasks.approve, SELLER, 9, "ann")
    assert product.do(tasks.approve, SELLER, 3, "ann").stage == "applying"
    assert product.do(tasks.approve, SELLER, 3, "bob").approved_by == "ann"
    product.run()
    assert (product.shown(3).stage, product.shown(3).done.removed) == ("done", 2)
    assert product.live() == set()
    acts = product.rows("SELECT actor, detail FROM audit WHERE act = 'feed approved'")
    assert acts == [("ann", "7 3: it would remove 2 of 2 offers")]


@pytest.mark.spec("LST-13")
def test_a_newer_ended_task_supersedes_what_is_held(make: Callable[..., Feeds]) -> None:
    product = make()
    product.ids(1, *"abcd")
    product.ids(2, "a")
    product.send(3, item("a"))
    assert product.shown(2).stage == "held"
    assert product.ids(4, "a", "b", "c").stage == "done"
    assert [product.shown(task_id).stage for task_id in (2, 3)] == ["superseded", "superseded"]
    with pytest.raises(Conflict, match="superseded"):
        product.do(tasks.approve, SELLER, 2, "ann")
    product.run()
    assert product.live() == {"a", "b", "c"}


@pytest.mark.spec("LST-13")
def test_a_plan_that_was_made_before_a_change_is_not_used(product: Feeds, monkeypatch: pytest.MonkeyPatch) -> None:
    product.ids(1, *"abcd")
    product.end(2, 0)
    counted = planning.plan_of

    def overtaken(tx: Transaction, task: tasks.Task) -> Any:
        plan = counted(tx, task)
        product.store.transact(lambda other: tasks.lock(other, SELLER, 2))
        return plan

    monkeypatch.setattr(planning, "plan_of", overtaken)
    product.step()
    assert product.shown(2).stage == "ended"
    monkeypatch.setattr(planning, "plan_of", counted)
    product.run()
    assert product.shown(2).stage == "done"


# Schedulers ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("LST-12")
def test_who_has_lost_the_shard_changes_nothing(product: Feeds) -> None:
    product.send(1, item("a"))
    product.end(1, 1)
    before = product.shown(1)

    def lost(tx: Transaction) -> None:
        raise TicketRefused("another has it")

    for _ in range(3):
        with pytest.raises(TicketRefused):
            product.step(guard=lost)
        assert product.shown(1) == before
        product.step()
        before = product.shown(1)
        if before.stage == "done":
            break
    assert not applying.step(product.store, product.listings, (shard_of(SELLER) + 1) % SHARDS, free)


@pytest.mark.spec("LST-12")
def test_a_feed_that_cannot_be_applied_is_held_and_the_others_of_its_shard_go_on(
    product: Feeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = next(str(number) for number in range(8, 999) if shard_of(str(number)) == shard_of(SELLER))
    product.send(1, item("a"))
    product.end(1, 1)
    product.send(1, item("a"), seller=other)
    product.end(1, 1, other)
    save = saving.save

    def refused(tx: Transaction, listings: Any, changes: Sequence[Change]) -> Any:
        if any(change.after.seller_id == SELLER for change in changes):
            raise DataRefused("no")
        return save(tx, listings, changes)

    monkeypatch.setattr(saving, "save", refused)
    product.run()
    assert product.live(other) == {"a"}
    assert (product.shown(1).stage, "could not be applied: no" in product.shown(1).reason) == ("held", True)
    monkeypatch.setattr(saving, "save", save)
    product.do(tasks.approve, SELLER, 1, "ann")
    product.run()
    assert product.live() == {"a"}


@pytest.mark.spec("LST-12")
def test_a_large_feed_does_not_keep_a_small_one_waiting(product: Feeds, monkeypatch: pytest.MonkeyPatch) -> None:
    assert product.clock is not None
    monkeypatch.setattr(applying, "STEP_ITEMS", 1)
    other = next(str(number) for number in range(8, 999) if shard_of(str(number)) == shard_of(SELLER))
    product.send(1, *[item(str(number)) for number in range(20)])
    product.end(1, 20)
    product.clock.advance(1)
    product.send(1, item("a"), seller=other)
    product.end(1, 1, other)
    for _ in range(10):
        product.clock.advance(1)
        product.step()
    assert product.shown(1, other).stage == "done"
    assert product.shown(1).stage == "applying"


@pytest.mark.spec("LST-12")
def test_schedulers_senders_and_ends_at_once_leave_the_newest_feed(store_url: str) -> None:
    """Each task has offers of its own and one that all have; every write of any of them may meet any other."""
    with opened(store_url, listings__feed_delete_share_max=1) as made:
        product = Feeds(made.context, None)
        stop = threading.Event()
        tasks_count = 6

        def send(task_id: int) -> None:
            names = ["all", *[f"{task_id}-{number}" for number in range(5)]]
            try:
                for position, name in enumerate(names):
                    product.send(task_id, item(name), position=position)
                product.end(task_id, len(names))
            except Conflict:
                pass  # a newer one was faster

        def work() -> None:
            while not stop.is_set():
                if not product.step():
                    stop.wait(0.005)

        with ThreadPoolExecutor(5) as pool:
            workers = [pool.submit(work) for _ in range(2)]
            order = list(range(1, tasks_count + 1))
            random.Random(5).shuffle(order)
            list(pool.map(send, order))
            stop.set()
            for worker in workers:
                worker.result()
        product.run()
        ended = product.rows(f"SELECT ended_task_id FROM sellers WHERE seller_id = '{SELLER}'")[0][0]
        assert ended == tasks_count
        assert product.live() == {"all", *[f"{tasks_count}-{number}" for number in range(5)]}
        assert product.counts(SELLER) == product.listed(SELLER) == {1: 6, 2: 6}


WORKER = """
import sys
from keyfold.listings.model import shard_of
from keyfold.listings.service.feeds import applying
from tests.listings import opened

applying.STEP_ITEMS = applying.STEP_REMOVALS = 10
with opened(sys.argv[1], listings__feed_delete_share_max=1) as product:
    print("ready", flush=True)
    while applying.step(product.store, product.listings, shard_of("7"), lambda tx: None):
        print("stepped", flush=True)
"""


@pytest.mark.spec("LST-12")
def test_a_process_that_is_killed_again_and_again_applies_everything_once(store_url: str) -> None:
    """Killed wherever it is: each item is one offer with one version and one message, each removal one more."""
    count = 600
    with opened(store_url, listings__feed_delete_share_max=1) as made:
        product = Feeds(made.context, None)
        names = [f"{number:04}" for number in range(count)]
        product.send(1, *map(item, names))
        product.end(1, count)
        _killed_often(store_url)
        product.run()
        assert product.live() == set(names)
        product.send(2, *map(item, names[::2]))
        product.end(2, count // 2)
        _killed_often(store_url)
        product.run()
        assert product.live() == set(names[::2])
        assert product.shown(1).done.created == len(product.offers()) == count
        assert (product.shown(2).done.unchanged, product.shown(2).done.removed) == (count // 2, count // 2)
        versions = [version for _, _, version, _ in kinds(product.told(), "offer")]
        assert sorted(versions) == [1] * count + [2] * (count // 2)
        assert product.counts(SELLER) == product.listed(SELLER) == {1: count // 2, 2: count // 2}


def _killed_often(url: str) -> None:
    wait = random.Random(7)
    for _ in range(2):
        worker = subprocess.Popen([sys.executable, "-c", WORKER, url], stdout=subprocess.PIPE)
        assert worker.stdout is not None
        for _ in range(wait.randrange(2, 12)):
            worker.stdout.readline()
        time.sleep(wait.random() / 50)
        worker.kill()
        worker.wait()
        worker.stdout.close()


class Killed(BaseException):
    """The process dies here: what is not committed is gone."""


@pytest.mark.spec("LST-12", "LST-13")
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_after_the_end_of_a_task_the_live_offers_are_those_of_its_feed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Random feeds, interleaved, cut, repeated and old, with sales, bans and kills, against a slow reference."""
    with opened(
        f"sqlite:///{tmp_path_factory.mktemp('feeds') / 'keyfold.db'}",
        clock=ManualClock(),
        listings__feed_delete_share_max=1,
    ) as made:
        Walk(Feeds(made.context, made.clock), data).run()


@pytest.mark.spec("LST-12", "LST-13")
@pytest.mark.parametrize("seed", range(4))
def test_so_it_is_on_every_store(product: Feeds, seed: int) -> None:
    Walk(product, random.Random(seed)).run()


class Walk:
    """Does random things to the feeds of one seller and knows what must come of them."""

    NAMES = "abcdef"

    def __init__(self, product: Feeds, data: Any) -> None:
        self.product = product
        self.data = data
        self.sent: dict[int, list[tuple[str, int]]] = {}  # by task: names and prices; a price below 0 is invalid
        self.ended = 0
        self.sold: set[str] = set()  # offers, by id

    def below(self, count: int) -> int:
        if isinstance(self.data, random.Random):
            return self.data.randrange(count)
        return int(self.data.draw(st.integers(0, count - 1)))

    def run(self) -> None:
        size = applying.STEP_ITEMS, applying.STEP_REMOVALS
        applying.STEP_ITEMS, applying.STEP_REMOVALS = 2, 2
        try:
            for _ in range(25):
                [self.send, self.send, self.end, self.step, self.step, self.step, self.sell, self.sweep][
                    self.below(8)
                ]()
            self.finish()
        finally:
            applying.STEP_ITEMS, applying.STEP_REMOVALS = size

    def send(self) -> None:
        task_id = 1 + self.below(6)
        items = [(self.NAMES[self.below(6)], self.below(5) - 1) for _ in range(self.below(5))]
        before = self.sent.get(task_id, [])
        position = max(0, len(before) - self.below(3))  # what was sent before may be sent again
        again = before[position:]
        given = [item(name, price={"amount": price, "currency": "EUR"}) for name, price in [*again, *items]]
        try:
            self.product.send(task_id, *given, position=position)
        except Conflict:
            assert task_id <= self.ended
            return
        assert task_id > self.ended
        self.sent[task_id] = [*before, *items]

    def end(self) -> None:
        task_id = 1 + self.below(6)
        sent = len(self.sent.get(task_id, []))
        if task_id in self.sent and not self.below(4):
            with pytest.raises(Conflict):
                self.product.end(task_id, sent + 1)
            return
        try:
            self.product.end(task_id, sent)
        except Conflict:
            assert task_id <= self.ended
            return
        self.sent.setdefault(task_id, [])
        self.ended = max(self.ended, task_id)

    def step(self) -> None:
        """A step, sometimes killed just before its commit."""
        kill = not self.below(3)

        def work(tx: Transaction) -> None:
            if kill:
                tx.now_us  # noqa: B018
                self._kill_at_save()

        before = self._state() if kill else None
        save = tasks.save
        try:
            self.product.step(guard=work)
        except Killed:
            tasks.save = save
            assert self._state() == before
        finally:
            tasks.save = save

    def _kill_at_save(self) -> None:
        save = tasks.save

        def killed(tx: Transaction, task: tasks.Task) -> tasks.Task:
            save(tx, task)
            raise Killed

        tasks.save = killed

    def _state(self) -> Mapping[str, list[tuple[Any, ...]]]:
        names = ("offer", "feed", "feed_tasks", "user_offer_presets", "feed_problems", "sellers")
        return {name: sorted(self.product.rows(f"SELECT * FROM {name}"), key=repr) for name in names}

    def sell(self) -> None:
        there = [offer for offer in self.product.by_external_id().values() if offer.status == "active"]
        if there:
            offer = sorted(there, key=lambda offer: offer.external_id)[self.below(len(there))]
            self.product.sell(offer)
            self.sold.add(offer.offer_id)

    def sweep(self) -> None:
        sweeping.forget(self.product.store, self.product.listings, 1 + self.below(3))

    def finish(self) -> None:
        self.product.run()
        prices = dict(self.sent.get(self.ended, []))
        offers = self.product.by_external_id()
        for name, offer in offers.items():
            if offer.status != "sold":
                assert name in prices
                assert offer.price is not None
                assert prices[name] < 0 or offer.price.amount == prices[name]
            else:
                assert offer.offer_id in self.sold
        valid = {name for name, price in prices.items() if price >= 0}
        assert valid <= set(offers)
        assert {each.offer_id for each in self.product.offers() if each.was_sold} == self.sold
        assert self.product.counts(SELLER) == self.product.listed(SELLER)
        stages = dict(self.product.rows("SELECT task_id, stage FROM feed_tasks"))
        for task_id, stage in stages.items():
            is_old = task_id < self.ended
            assert stage in (("superseded", "done") if is_old else ("done",) if task_id == self.ended else ("taking",))
        while sweeping.forget(self.product.store, self.product.listings, 2):
            pass
        staged = {task_id for (task_id,) in self.product.rows("SELECT DISTINCT task_id FROM feed_items")}
        assert all(task_id > self.ended for task_id in staged)


# Reports and clean-up ------------------------------------------------------------------------------------------------


@pytest.mark.spec("LST-12")
def test_a_report_comes_by_pages(product: Feeds) -> None:
    product.send(1, *[b"?"] * 5, item("a"))
    with pytest.raises(NotFound):
        product.problems(2)

    def page(after: str) -> reporting.FeedReport:
        return product.store.read(lambda tx: reporting.report(tx, product.listings, SELLER, 1, after, 2))

    first = page("")
    second = page(first.next_after or "")
    third = page(second.next_after or "")
    places = [problem.place for each in (first, second, third) for problem in each.problems]
    assert places == [reporting.place_of_item(number) for number in range(5)]
    assert third.next_after is None
    assert first.feed == product.shown(1)


@pytest.mark.spec("LST-14")
def test_errors_of_photos_reach_the_report_of_the_task_that_last_had_the_offer_once_each(
    make: Callable[..., Feeds],
) -> None:
    product = make(listings__feed_problems_max=3)
    product.ids(1, "a", "b")
    product.ids(2, "a", "b")
    offers = product.by_external_id()
    errors = [(SELLER, offers[name].offer_id, name, f"https://example.com/{name}.jpg", "too large\0") for name in "ab"]
    for _ in range(2):
        product.do(
            reporting.tell_photo_errors, [*errors, errors[0], (SELLER, "1", "", "u", "e"), ("8", "1", "x", "u", "e")]
        )
    told = product.problems(2)
    assert sorted(each.external_id for each in told) == ["a", "b"]
    assert all("https://example.com/" in each.reason and "too large" in each.reason for each in told)
    assert product.problems(1) == []
    more = [(SELLER, offers["a"].offer_id, "a", f"https://example.com/{number}.jpg", "no") for number in range(5)]
    product.do(reporting.tell_photo_errors, more)
    assert len(product.problems(2)) == 3
    product.store.transact(lambda tx: tx.driver("DELETE FROM feed_tasks"))
    product.do(reporting.tell_photo_errors, [(SELLER, offers["b"].offer_id, "b", "https://example.com/z.jpg", "no")])
    assert len(product.rows("SELECT place FROM feed_problems")) == 3


@pytest.mark.spec("LST-12")
def test_what_is_finished_is_forgotten_in_steps_and_what_is_not_stays(product: Feeds) -> None:
    def sweep() -> int:
        steps = 1
        while sweeping.forget(product.store, product.listings, 2):
            steps += 1
        return steps

    def count(table: str) -> int:
        return int(product.rows(f"SELECT count(*) FROM {table}")[0][0])

    product.feed(1, *[item(name) for name in "abcde"], b"?", b"?", b"?")
    product.send(2, item("a"))
    assert count("feed_items") == 6
    assert sweep() >= 3
    assert product.rows("SELECT task_id, external_id FROM feed_items") == [(2, "a")]
    assert (count("feed_tasks"), count("feed_problems"), count("feed")) == (2, 3, 5)
    product.pass_days(29)
    sweep()
    assert (count("feed_tasks"), count("feed_problems")) == (2, 3)
    product.pass_days(2)
    sweep()
    assert [product.shown(2).stage, product.shown(2).reason] == ["superseded", "it was given up: it waited too long"]
    assert (count("feed_items"), count("feed_tasks"), count("feed_problems"), count("feed")) == (0, 1, 0, 5)
    for task_id, items in ((1, 8), (2, 1)):
        with pytest.raises(Conflict):
            product.end(task_id, items)
    product.run()
    assert product.live() == set("abcde")
    product.ids(3, "a")
    product.pass_days(29)
    sweep()
    assert count("feed") == 5
    product.pass_days(2)
    sweep()
    assert product.rows("SELECT external_id FROM feed") == [("a",)]


@pytest.mark.spec("LST-13")
def test_a_row_that_returns_while_it_is_swept_stays(product: Feeds, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look and the DELETE a feed may have returned the offer."""
    product.ids(1, "a")
    product.ids(2)
    product.pass_days(31)

    def meanwhile(tx: Transaction, *given: Any) -> Any:
        tx.driver("UPDATE feed SET removed_at_us = NULL")
        return batch.relation(tx, *given)

    monkeypatch.setattr(sweeping, "relation", meanwhile)
    sweeping.forget(product.store, product.listings, 10)
    assert product.rows("SELECT external_id FROM feed") == [("a",)]


@pytest.mark.spec("LST-12")
def test_figures_count_the_feeds_that_are_not_finished(make: Callable[..., Feeds]) -> None:
    product = make()
    product.ids(1, *"abcd")
    product.ids(2, "a")
    product.send(3, item("a"))
    assert product.store.read(reporting.figures) == {"taking": 1, "held": 1, "ended": 0, "applying": 0, "removing": 0}


# Over HTTP -----------------------------------------------------------------------------------------------------------

NDJSON = {"content-type": "application/x-ndjson"}


@pytest.fixture
def caller(store_url: str) -> Iterator[Caller]:
    made_of = load_settings(
        parts={"listings": PART.settings} if PART.settings else {},
        environ={},
        options={"store.url": store_url},
    )
    context = Context.open(made_of, [PART])
    made = Caller(context)
    yield made
    made.close()
    context.close()


def post(caller: Caller, path: str, *items: Any, **more: Any) -> Answered:
    return caller("POST", path, body=b"\n".join(lines(*items)), headers=NDJSON, **more)


@pytest.mark.spec("LST-12", "LST-13")
def test_a_feed_over_http_is_sent_resumed_ended_held_approved_and_reported(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = Feeds(caller.context, None)
    product.ids(1, *"abcd")
    monkeypatch.setattr(bodies, "LINES_MAX", 2)
    base = "/v1/feeds/7/2"
    assert caller("GET", base).slug == "not-found"
    answer = post(caller, f"{base}/items", item("a"), b"?", item("x"))
    assert (answer.status, answer.json["position"], answer.json["taken"]["unreadable"]) == (200, 3, 1)
    gap = post(caller, f"{base}/items?position=5", item("y"))
    assert (gap.slug, gap.json["hint"]) == ("conflict", "Send the items from 3 on")
    assert post(caller, f"{base}/items?position=1", b"?", item("x"), item("y")).json["position"] == 4
    early = caller("GET", f"{base}?plan=true").json
    assert (early["stage"], early["reason"], early["plan"]["create"]) == ("taking", "its end has not come", 2)
    assert caller("GET", base).json["plan"] is None
    assert caller("POST", f"{base}/end", json={"items": 5}).slug == "conflict"
    assert caller("POST", f"{base}/end", json={"items": 4}).json["stage"] == "ended"
    assert caller("GET", f"{base}?plan=true").json["reason"] == "it would remove 3 of 4 offers"
    product.run()
    held = caller("GET", base).json
    assert (held["stage"], held["reason"]) == ("held", "it would remove 3 of 4 offers")
    assert caller("POST", f"{base}/approve").json["approved_by"] == "tests"
    product.run()
    done = caller("GET", f"{base}/report?limit=1").json
    assert (done["feed"]["stage"], done["feed"]["done"]["removed"], done["next_after"]) == ("done", 3, None)
    assert [each["place"] for each in done["problems"]] == ["item 000000001"]
    assert product.live() == {"a", "x", "y"}


def keyed(key: str) -> dict[str, str]:
    return {"idempotency-key": key}


@pytest.mark.spec("CORE-22", "LST-12", "LST-13")
def test_the_end_and_the_approval_of_a_feed_repeat_their_first_answers(caller: Caller) -> None:
    product = Feeds(caller.context, None)
    product.ids(1, *"abcd")
    product.send(2, item("a"))
    base = "/v1/feeds/7/2"
    ended = caller("POST", f"{base}/end", json={"items": 1}, headers=keyed("k1"))
    assert ended.json["stage"] == "ended"
    product.run()
    assert caller("POST", f"{base}/end", json={"items": 1}, headers=keyed("k1")).body == ended.body
    assert caller("POST", f"{base}/end", json={"items": 2}, headers=keyed("k1")).slug == "idempotency-conflict"
    approved = caller("POST", f"{base}/approve", headers=keyed("k2"))
    assert approved.json["stage"] == "applying"
    product.run()
    assert caller("POST", f"{base}/approve", headers=keyed("k2")).body == approved.body
    assert product.live() == {"a"}


@pytest.mark.spec("CORE-22", "LST-02")
def test_drafts_are_opened_and_filled_once_under_a_key(caller: Caller) -> None:
    opening = {"seller_id": "7", "category": "cars"}
    first = caller("POST", "/v1/drafts", json=opening, headers=keyed("k1"))
    path = f"/v1/drafts/{first.json['draft_id']}"
    filling = {"owner_id": "7", "version": 1, "filled": {"category": "cars", "content": {"make": "Saab"}}}
    filled = caller("PUT", path, json=filling, headers=keyed("k2"))
    assert (filled.status, filled.json["version"]) == (200, 2)
    assert caller("PUT", path, json=filling, headers=keyed("k2")).body == filled.body
    assert caller("PUT", path, json=filling).slug == "conflict"  # a stale version, without the key
    assert caller("POST", "/v1/drafts", json=opening, headers=keyed("k1")).body == first.body
    assert caller("POST", "/v1/drafts", json={"seller_id": "7"}, headers=keyed("k1")).slug == "idempotency-conflict"


@pytest.mark.spec("CORE-22", "CORE-03", "LST-02")
def test_drafts_that_are_opened_and_filled_at_once_share_transactions_and_fail_alone(caller: Caller) -> None:
    owners = [f"s{number}" for number in range(12)]
    opened = caller.together(*[caller.call("POST", "/v1/drafts", json={"seller_id": each}) for each in owners])
    assert [each.json["owner_id"] for each in opened] == owners
    fillings = [
        {"owner_id": owner, "version": 1 + (owner == "s3"), "filled": {"category": "cars", "content": {}}}
        for owner in owners
    ]
    answers = caller.together(
        *[
            caller.call("PUT", f"/v1/drafts/{draft.json['draft_id']}", json=filling)
            for draft, filling in zip(opened, fillings, strict=True)
        ]
    )
    assert [each.status for each in answers] == [409 if owner == "s3" else 200 for owner in owners]


@pytest.mark.spec("CORE-22", "LST-12")
def test_where_no_answer_is_kept_a_key_is_refused_and_not_passed_over(caller: Caller) -> None:
    headers = {**NDJSON, **keyed("k1")}
    refused = caller("POST", "/v1/feeds/7/1/items", body=lines(item("a"))[0], headers=headers)
    assert (refused.slug, refused.json["place"]) == ("bad-input", "header idempotency-key")
    assert caller("GET", "/v1/feeds/7/1").slug == "not-found"
    assert caller("POST", "/v1/offers", json={"offer_ids": ["0" * 16]}, headers=keyed("k1")).status == 200  # a read


@pytest.mark.spec("LST-13")
def test_a_plan_over_http_is_of_one_moment_and_joins_as_a_large_one_should(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = Feeds(caller.context, None)
    product.ids(1, "a")
    product.send(2, item("a"), item("b"))
    found: list[Any] = []

    def looked_at(tx: Transaction, task: tasks.Task) -> Any:
        plan = plan_of(tx, task)
        product.send(2, item("c"), position=2)
        found.append((plan, plan_of(tx, task), tx.is_sqlite or tx.rows("SHOW enable_nestloop")))
        return plan

    plan_of = planning.plan_of
    monkeypatch.setattr(planning, "LARGE", 0)
    monkeypatch.setattr(planning, "plan_of", looked_at)
    assert caller("GET", "/v1/feeds/7/2?plan=true").json["plan"]["create"] == 1
    ((before, after, is_joined),) = found
    assert before == after
    assert is_joined in (True, [("off",)])


@pytest.mark.spec("LST-12", "LST-18")
def test_a_token_sees_the_feeds_of_its_own_sellers_and_needs_the_scope(caller: Caller) -> None:
    store = caller.context.store
    mine = access.create(store, "mine", ["listings.write", "read"], {"seller": ["7"]})
    reader = access.create(store, "reader", ["read"])
    product = Feeds(caller.context, None)
    for seller in "78":
        product.send(1, item("a"), seller=seller)
    calls: list[tuple[str, str, dict[str, Any]]] = [
        ("POST", "/items?position=1", {"body": b"?", "headers": NDJSON}),
        ("POST", "/end", {"json": {"items": 2}}),
        ("POST", "/approve", {}),
        ("GET", "", {}),
        ("GET", "/report", {}),
    ]
    for method, path, request in calls:
        assert caller(method, f"/v1/feeds/8/1{path}", token=mine, **request).slug == "not-found"
        assert caller(method, f"/v1/feeds/7/1{path}", token=mine, **request).status in (200, 409)
        status = caller(method, f"/v1/feeds/8/1{path}", token=reader, **request).status
        assert status == (403 if method == "POST" else 200)
    assert product.shown(1, "8").position == 1
    for task in ("0", "-1", "x", str(2**63)):
        assert caller("GET", f"/v1/feeds/7/{task}").status == 400


# Restart -------------------------------------------------------------------------------------------------------------


@pytest.mark.spec("LST-12")
def test_feeds_begin_again_after_one_with_far_too_great_a_task_id(make: Callable[..., Feeds]) -> None:
    feeds = make(listings__feed_delete_share_max=1)
    feeds.ids(1, "a", "b", "c")
    before = {name: offer.offer_id for name, offer in feeds.by_external_id().items()}
    feeds.feed(2**62, item("a"), item("b"))
    with pytest.raises(Conflict, match="changes nothing"):
        feeds.send(3, item("a"))
    feeds.send(2**62 + 1, item("a"))  # has no end
    done = restarting.restart(feeds.store, SELLER, "somebody")
    assert done == restarting.Restarted(SELLER, 2**62, superseded=1, offers=3)
    assert feeds.shown(2**62 + 1).stage == "superseded"
    assert feeds.live() == {"a", "b"}
    feeds.ids(3, "b", "c", "d")
    assert feeds.live() == {"b", "c", "d"}
    after = {name: offer.offer_id for name, offer in feeds.by_external_id().items()}
    assert (after["b"], after["c"]) == (before["b"], before["c"])  # also the one that a feed had removed
    with pytest.raises(Conflict, match="changes nothing"):
        feeds.send(2, item("a"))
    assert feeds.rows("SELECT actor, detail FROM audit WHERE act = 'feeds restarted'") == [
        ("somebody", f"{SELLER}: feed {2**62} was the last")
    ]
    with pytest.raises(NotFound):
        restarting.restart(feeds.store, "nobody", "somebody")


class Interrupted:
    """A store on which something happens before the last transactions of a restart."""

    def __init__(self, feeds: Feeds, happens: Callable[[], object]) -> None:
        self._feeds = feeds
        self._happens = happens
        self._transactions = 0

    def transact(self, work: Callable[[Transaction], Any], **named: Any) -> Any:
        self._transactions += 1
        if self._transactions == 3:
            self._happens()
        return self._feeds.store.transact(work, **named)


@pytest.mark.spec("LST-12")
def test_a_restart_of_feeds_is_refused_where_one_ends_meanwhile(make: Callable[..., Feeds]) -> None:
    feeds = make(listings__feed_delete_share_max=1)
    feeds.ids(2**62, "a", "b")
    store: Any = Interrupted(feeds, lambda: feeds.ids(2**62 + 1, "b"))
    with pytest.raises(Conflict, match="meanwhile"):
        restarting.restart(store, SELLER, "somebody")
    with pytest.raises(Conflict, match="changes nothing"):
        feeds.ids(1, "a")
    restarting.restart(feeds.store, SELLER, "somebody")
    feeds.ids(1, "a")
    assert feeds.live() == {"a"}
