"""The rules of listings: statuses and moves, drafts, offer ids, presets, counters, feeds."""

import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from keyfold.core.errors import BadInput, Conflict
from keyfold.listings import model
from keyfold.listings.model import Condition, Draft, FeedPlan, FeedRow, Item, Offer, Preset, Price, Status

ACTORS: tuple[model.Actor, ...] = ("seller", "feed", "scheduler")


def offer(**given: Any) -> Offer:
    return Offer(**({"seller_id": "ann", "category": "cars", "content": {"year": 2020}} | given))


offers = st.builds(
    offer,
    status=st.sampled_from(model.STATUSES),
    is_banned=st.booleans(),
    was_sold=st.booleans(),
    price=st.none() | st.builds(Price, st.integers(0, 10**9), st.sampled_from(["RUB", "EUR"])),
    photos=st.sampled_from([(), ("https://example.com/1.jpg",)]),
    external_id=st.sampled_from(["", "vin-1"]),
    content=st.fixed_dictionaries({"year": st.integers(1990, 2030)}, optional={"engine": st.just({"power": 90})}),
)


# Statuses ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("LST-06")
@pytest.mark.parametrize(("before", "after"), list(itertools.product(model.STATUSES, repeat=2)))
def test_an_offer_moves_only_as_the_table_says(before: Status, after: Status) -> None:
    for actor in ACTORS:
        if before == after or actor in model.MOVES.get((before, after), ()):
            assert model.moved(offer(status=before), after, actor).status == after
        else:
            with pytest.raises(Conflict, match=f"that is {before} does not become {after} by the {actor}"):
                model.moved(offer(status=before), after, actor)


@pytest.mark.spec("LST-06")
def test_nothing_leaves_the_archive_and_everything_can_come_to_it() -> None:
    assert not [move for move in model.MOVES if move[0] == "archived"]
    reached: set[Status] = {"active"}
    while more := {after for before, after in model.MOVES if before in reached} - reached:
        reached |= more
    assert reached == set(model.STATUSES)
    assert {before for before, after in model.MOVES if after == "archived"} == {"expired", "sold", "removed"}


@pytest.mark.spec("LST-06", "LST-15")
@given(offers)
def test_a_ban_is_over_the_status_and_lifting_it_shows_what_is_beneath(each: Offer) -> None:
    banned, free = structs.replace(each, is_banned=True), structs.replace(each, is_banned=False)
    assert model.shown(free) == each.status
    assert model.shown(banned) == (each.status if each.status in ("removed", "archived") else "banned")


@pytest.mark.spec("LST-06")
def test_a_removal_has_its_reason_until_the_offer_returns() -> None:
    removed = model.moved(offer(), "removed", "seller", "sold elsewhere")
    assert removed.reason == "sold elsewhere"
    assert model.moved(removed, "archived", "scheduler").reason == "sold elsewhere"
    assert model.moved(removed, "active", "feed").reason == ""


@pytest.mark.spec("LST-17")
@given(offers)
def test_a_save_that_changes_nothing_is_not_meaningful(each: Offer) -> None:
    assert not model.is_meaningful(each, structs.replace(each))
    assert model.is_meaningful(None, each)
    assert model.is_meaningful(each, structs.replace(each, content={"year": 1}))


# Offer ids ---------------------------------------------------------------------------------------------------------

ids = st.integers(0, 10**15 - 1)


@pytest.mark.spec("LST-04")
@given(ids)
def test_an_id_is_read_back_from_how_it_is_shown(number: int) -> None:
    made = model.offer_id_of(number)
    assert len(made) == 16
    assert int(made[:15]) == number
    shown = model.offer_id_shown(made)
    assert [len(group) for group in shown.split()] == [4, 4, 4, 4]
    for said in (made, shown, shown.replace(" ", "-"), f" {shown} "):
        assert model.offer_id_read(said) == made


@pytest.mark.spec("LST-04")
@given(ids, st.integers(0, 15), st.integers(1, 9))
def test_a_wrong_digit_is_noticed(number: int, at: int, by: int) -> None:
    made = model.offer_id_of(number)
    wrong = f"{made[:at]}{(int(made[at]) + by) % 10}{made[at + 1 :]}"
    with pytest.raises(BadInput, match="a digit is wrong"):
        model.offer_id_read(wrong)


@pytest.mark.spec("LST-04")
@given(ids, st.integers(0, 14))
def test_exchanged_neighbours_are_noticed(number: int, at: int) -> None:
    made = model.offer_id_of(number)
    wrong = f"{made[:at]}{made[at + 1]}{made[at]}{made[at + 2 :]}"
    if wrong != made:
        with pytest.raises(BadInput):
            model.offer_id_read(wrong)


@pytest.mark.spec("LST-04")
@pytest.mark.parametrize("text", ["", "1", "x" * 16, "1" * 17, "１" * 16, "0000 0000 0000 000٠"])
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(BadInput):
        model.offer_id_read(text)


# Drafts ------------------------------------------------------------------------------------------------------------


def draft(owner: str, category: str, at: int = 1) -> Draft:
    return Draft(f"draft of {owner}", owner, category, {"filled": owner}, at)


ANON, ANN = "anonymous 7", "ann"


@pytest.mark.spec("LST-02")
@pytest.mark.parametrize(
    ("wished", "anonymous", "logged_in", "act", "whose", "deleted"),
    [
        # none of the wished category: one is reset, the logged-in one first
        ("flats", None, ("cars", 1), "reset", ANN, None),
        ("flats", ("cars", 1), None, "reset", ANON, None),
        ("flats", ("cars", 9), ("cars", 1), "reset", ANN, ANON),
        # exactly one of it: that one
        ("flats", ("flats", 1), ("cars", 9), "take", ANON, ANN),
        ("flats", ("cars", 9), ("flats", 1), "take", ANN, ANON),
        ("flats", None, ("flats", 1), "take", ANN, None),
        # both, or no wish: the newest, of equals the logged-in one
        ("cars", ("cars", 2), ("cars", 1), "take", ANON, ANN),
        ("cars", ("cars", 1), ("cars", 2), "take", ANN, ANON),
        ("cars", ("cars", 1), ("cars", 1), "take", ANN, ANON),
        (None, ("cars", 2), ("flats", 1), "take", ANON, ANN),
        (None, ("cars", 1), ("flats", 1), "take", ANN, ANON),
        (None, ("cars", 1), None, "take", ANON, None),
        # none at all
        ("cars", None, None, "create", None, None),
        (None, None, None, "create", None, None),
    ],
)
def test_opening_a_draft_chooses_between_the_visitors_and_the_persons(
    wished: str | None,
    anonymous: tuple[str, int] | None,
    logged_in: tuple[str, int] | None,
    act: str,
    whose: str | None,
    deleted: str | None,
) -> None:
    opened = model.open_draft(
        wished,
        draft(ANON, *anonymous) if anonymous else None,
        draft(ANN, *logged_in) if logged_in else None,
        ANON,
        ANN,
    )
    assert opened.act == act
    assert opened.owner_id == ANN
    assert (opened.draft.draft_id if opened.draft else None) == (f"draft of {whose}" if whose else None)
    assert (opened.deleted.owner_id if opened.deleted else None) == deleted
    if opened.draft is not None:
        assert opened.draft.owner_id == ANN
        assert opened.draft.content == ({} if act == "reset" else {"filled": whose})
        assert wished in (None, opened.draft.category)


@pytest.mark.spec("LST-02")
def test_without_a_person_the_draft_stays_with_the_visitor() -> None:
    opened = model.open_draft("cars", draft(ANON, "cars"), None, ANON, None)
    assert (opened.act, opened.owner_id, opened.deleted) == ("take", ANON, None)


# Presets -----------------------------------------------------------------------------------------------------------

PRESETS = (
    Preset(number=1, statuses=frozenset({"active"})),
    Preset(number=2, statuses=frozenset({"banned"})),
    Preset(number=3, where=(Condition(field="year", at_least=2000, at_most=2010),)),
    Preset(number=4, where=(Condition(field="engine.power", one_of=(90,)),), categories=frozenset({"cars"})),
    Preset(number=5, is_from_feed=True),
    Preset(number=6, has_photos=False),
    Preset(number=7, where=(Condition(field="engine", exists=False),)),
)


@pytest.mark.spec("LST-07")
@given(offers)
def test_an_offer_is_in_the_presets_whose_conditions_it_meets(each: Offer) -> None:
    expected = {
        1: model.shown(each) == "active",
        2: model.shown(each) == "banned",
        3: 2000 <= each.content["year"] <= 2010,
        4: "engine" in each.content,
        5: each.external_id != "",
        6: each.photos == (),
        7: "engine" not in each.content,
    }
    assert model.presets_of(each, PRESETS) == {number for number, holds in expected.items() if holds}


@pytest.mark.spec("LST-07")
@pytest.mark.parametrize(
    ("content", "condition", "holds"),
    [
        ({"a": 1}, Condition(field="a", one_of=(1,)), True),
        ({"a": True}, Condition(field="a", one_of=(1,)), False),
        ({"a": "1"}, Condition(field="a", one_of=(1,)), False),
        ({"a": True}, Condition(field="a", at_least=0), False),
        ({"a": "x"}, Condition(field="a", at_most=9), False),
        ({}, Condition(field="a", at_most=9), False),
        ({"a": [1]}, Condition(field="a.b", exists=True), False),
        ({"a": None}, Condition(field="a", exists=True), False),
        ({"a": 5}, Condition(field="a", at_least=5, at_most=5, exists=True), True),
    ],
)
def test_a_condition_looks_at_values_as_they_are(content: dict[str, Any], condition: Condition, holds: bool) -> None:
    in_it = model.presets_of(offer(content=content), [Preset(number=1, where=(condition,))])
    assert bool(in_it) == holds


# Counters ----------------------------------------------------------------------------------------------------------

moves = st.lists(
    st.tuples(st.sampled_from(model.STATUSES), st.booleans(), st.none() | st.integers(0, 99)), min_size=1, max_size=12
)


@pytest.mark.spec("LST-10")
@given(moves)
def test_counters_are_what_a_recount_of_the_history_gives(steps: list[tuple[Status, bool, int | None]]) -> None:
    counters: Counter[str] = Counter()
    before: Offer | None = None
    sold, money = 0, 0
    for status, is_banned, amount in steps:
        price = None if amount is None else Price(amount, "RUB")
        base = before or offer()
        after = structs.replace(
            base, status=status, is_banned=is_banned, price=price, was_sold=base.was_sold or status == "sold"
        )
        if after.was_sold and not sold:
            sold, money = 1, amount or 0
        grew = counters["Sold"], counters["MoneyEarned.RUB"]
        counters.update(model.counter_changes(before, after))
        assert counters["Sold"] >= grew[0]
        assert counters["MoneyEarned.RUB"] >= grew[1]
        assert (counters["Sold"], counters["MoneyEarned.RUB"]) == (sold, money)
        for shown, name in model.CURRENT.items():
            assert counters[name] == (model.shown(after) == shown)
        before = after


@pytest.mark.spec("LST-10")
def test_a_repeated_sale_and_a_price_that_comes_late_add_nothing() -> None:
    unpriced = model.moved(offer(), "sold", "seller")
    assert model.counter_changes(offer(), unpriced) == {"Active": -1, "Sold": 1}
    priced = structs.replace(unpriced, price=Price(500, "EUR"))
    assert model.counter_changes(unpriced, priced) == {}
    assert model.counter_changes(unpriced, model.moved(unpriced, "sold", "seller")) == {}


# Feeds -------------------------------------------------------------------------------------------------------------


def decide(
    item: Offer | None, task_id: int = 5, *, row: FeedRow | None = None, there: Offer | None = None, since_us: int = 0
) -> model.Decided:
    return model.decide_item(
        Item(external_id="vin-1", offer=item), task_id, row=row, there=there, returns_since_us=since_us
    )


NEW = offer(
    content={"year": 2024},
    price=Price(9, "RUB"),
    external_id="vin-1",
    schema_version=9,
    business_id=8,
    shop_id=7,
    warehouse_id=6,
)


@pytest.mark.spec("LST-12")
def test_an_item_of_an_older_task_changes_nothing() -> None:
    assert not model.is_task_new(4, 4)
    assert not model.is_task_new(3, 4)
    assert model.is_task_new(5, 4)
    assert model.is_task_new(1, None)
    assert decide(NEW, 5, row=FeedRow("1", 6), there=offer()).act == "ignore"
    assert decide(NEW, 5, row=FeedRow("1", 5), there=offer()).act == "update"
    assert decide(NEW, 1).act == "create"


@pytest.mark.spec("LST-12")
@pytest.mark.parametrize(("status", "after"), [("active", "active"), ("expired", "active"), ("sold", "sold")])
@pytest.mark.parametrize("is_banned", [True, False])
def test_a_matched_offer_is_updated_and_keeps_its_ban_and_its_sale(
    status: Status, after: Status, is_banned: bool
) -> None:
    there = offer(status=status, is_banned=is_banned, was_sold=status == "sold", created_at_us=7)
    decided = decide(NEW, there=there)
    assert decided.act == "update"
    assert decided.offer is not None
    assert (decided.offer.status, decided.offer.is_banned, decided.offer.created_at_us) == (after, is_banned, 7)
    for name in ("content", "price", "schema_version", "business_id", "shop_id", "warehouse_id"):
        assert getattr(decided.offer, name) == getattr(NEW, name)


@pytest.mark.spec("LST-12")
def test_an_invalid_item_keeps_its_offer_alive_and_changes_nothing_of_it() -> None:
    there = offer()
    assert decide(None, there=there) == model.Decided("keep", there, "invalid")
    assert decide(None).act == "ignore"


@pytest.mark.spec("LST-13")
def test_a_removed_offer_that_returns_has_its_ban_and_is_active() -> None:
    gone = offer(status="removed", is_banned=True, reason="no longer in the feed", created_at_us=7)
    decided = decide(NEW, there=gone)
    assert decided.act == "return"
    assert decided.offer is not None
    assert (decided.offer.status, decided.offer.is_banned, decided.offer.reason) == ("active", True, "")
    assert decided.offer.created_at_us == 7


@pytest.mark.spec("LST-13")
def test_an_offer_that_was_removed_too_long_ago_is_made_anew() -> None:
    gone = offer(offer_id="1", status="removed", status_at_us=99, is_banned=True)
    assert decide(NEW, there=gone, since_us=99).act == "return"
    assert decide(NEW, there=gone, since_us=100) == model.Decided("create", NEW)
    assert decide(None, there=gone, since_us=99).act == "ignore"


@pytest.mark.spec("LST-12")
def test_what_was_sold_and_archived_is_not_made_anew_and_stays_in_the_feed() -> None:
    sold = offer(offer_id="1", status="archived", was_sold=True)
    for item in (NEW, None):
        decided = decide(item, there=sold)
        assert (decided.act, decided.offer, decided.is_in_feed) == ("sold", sold, True)
    assert decide(NEW, there=offer(offer_id="1", status="archived")) == model.Decided("create", NEW)


@pytest.mark.spec("LST-12")
def test_the_end_of_a_task_removes_what_it_lacks_and_leaves_what_was_sold() -> None:
    assert model.removed_by_feed(offer()).status == "removed"
    assert model.removed_by_feed(offer(status="expired")).reason == "no longer in the feed"
    assert model.removed_by_feed(offer(status="sold")).status == "sold"


@pytest.mark.spec("LST-13")
@pytest.mark.parametrize(
    ("delete", "live", "has_ended", "words"),
    [(0, 10, True, ""), (5, 10, True, ""), (6, 10, True, "6 of 10"), (0, 0, True, ""), (0, 10, False, "end")],
)
def test_a_feed_that_lacks_its_end_or_would_remove_too_much_is_held(
    delete: int, live: int, has_ended: bool, words: str
) -> None:
    plan = FeedPlan(create=0, update=0, delete=delete, keep=0, invalid=0, live=live, has_ended=has_ended)
    assert (words in model.why_held(plan, 0.5)) if words else not model.why_held(plan, 0.5)


@pytest.mark.spec("LST-12")
def test_an_external_id_is_given_or_comes_from_the_content_alone() -> None:
    assert model.external_id_of("vin-1", {}) == "vin-1"
    one, same, other = ({"a": 1, "b": [2, {"c": 3, "d": 4}]}, {"b": [2, {"d": 4, "c": 3}], "a": 1}, {"a": 1, "b": [2]})
    assert model.external_id_of(None, one) == model.external_id_of("", same)
    assert model.external_id_of(None, one) != model.external_id_of(None, other)
    assert model.external_id_of(None, one).startswith("sha256:")
