"""Listings on every store: drafts, offers, presets and counts, counters, export, ages, moderation, photos, stages."""

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from keyfold.core.clock import ManualClock
from keyfold.core.errors import BadInput, Conflict, KeyfoldError, NotFound, TooLarge, VersionStale
from keyfold.core.store import Transaction
from keyfold.listings import metrics
from keyfold.listings.categories import ContentRefused
from keyfold.listings.model import SHARDS, Preset, Price, offer_id_read
from keyfold.listings.service import cabinet, drafting, keeping, offers, presets, repairing, saving, walking
from keyfold.listings.service.drafting import DraftShown, Filled, Opening, Publishing
from keyfold.listings.service.keeping import Opinion, PhotoAnswer
from keyfold.listings.service.offers import Edit, Move
from keyfold.listings.service.saving import Change, Saved
from tests.listings import CAR, Product, car, kinds, opened

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def product(store_url: str) -> Iterator[Product]:
    with opened(store_url, clock=ManualClock(1_800_000_000_000_000), limits__transaction_seconds_max=10) as each:
        yield each


def anyone(_: str) -> bool:
    return True


def filled(**more: Any) -> Filled:
    return Filled(category="cars", content=dict(CAR), **more)


def open_draft(product: Product, **opening: str) -> DraftShown:
    return product.do(drafting.open_drafts, Opening(**opening))


def fill(product: Product, draft: DraftShown, what: Filled) -> DraftShown:
    return product.do(drafting.fill, draft.owner_id, draft.draft_id, draft.version, what)


def publish(product: Product, draft: DraftShown) -> Saved | KeyfoldError:
    asked = Publishing(owner_id=draft.owner_id, draft_id=draft.draft_id, version=draft.version)
    return product.do(drafting.publish, [asked])[0]


def published(product: Product, draft: DraftShown) -> Saved:
    saved = publish(product, draft)
    assert isinstance(saved, Saved), saved
    return saved


def edit(product: Product, saved: Saved, what: Filled, version: int | None = None) -> Saved | KeyfoldError:
    one = Edit(
        offer_id=saved.offer.offer_id,
        version=saved.version if version is None else version,
        filled=what,
        may_see=anyone,
    )
    return product.do(offers.edit, [one])[0]


def move(product: Product, offer_id: str, status: Any, **more: Any) -> Saved | KeyfoldError:
    return product.do(offers.move, [Move(offer_id=offer_id, status=status, may_see=anyone, **more)])[0]


def ban(product: Product, offer_id: str, version: int, is_banned: bool = True) -> str:
    opinion = Opinion(offer_id=offer_id, version=version, is_banned=is_banned, reason="a trial")
    return product.do(keeping.judge, [opinion])[0].result


def must_be_right(product: Product, *sellers: str) -> None:
    """G4: the counts are the rows, the counters are the statuses."""
    for seller in sellers:
        assert product.counts(seller) == product.listed(seller)
        assert product.store.read(lambda tx, seller=seller: repairing.drift(tx, seller)) == []  # type: ignore[misc]


# Drafts --------------------------------------------------------------------------------------------------------------


@pytest.mark.spec("LST-02")
def test_a_draft_is_opened_filled_and_published(product: Product) -> None:
    draft = open_draft(product, seller_id="7", category="cars")
    assert open_draft(product, seller_id="7") == draft
    draft = fill(product, draft, filled(price=Price(100, "EUR")))
    assert draft.version == 2
    saved = published(product, draft)
    assert saved.offer.seller_id == "7"
    assert saved.offer.price == Price(100, "EUR")
    assert offer_id_read(saved.offer.offer_id) == saved.offer.offer_id
    assert product.rows("SELECT owner_id FROM current_draft") == []
    assert published(product, draft) == saved  # a repeat
    assert product.counters("7") == {"Active": 1}
    assert open_draft(product, seller_id="7").draft_id != draft.draft_id


@pytest.mark.spec("LST-02")
def test_a_stale_draft_is_refused(product: Product) -> None:
    draft = open_draft(product, seller_id="7", category="cars")
    newer = fill(product, draft, filled())
    with pytest.raises(Conflict, match="version 2, not 1"):
        fill(product, draft, filled(price=Price(1, "EUR")))
    assert isinstance(publish(product, draft), Conflict)
    published(product, newer)
    with pytest.raises(Conflict, match="was published"):
        fill(product, newer, filled())


@pytest.mark.spec("LST-02")
def test_who_logs_in_takes_the_draft_along(product: Product) -> None:
    visitor = fill(product, open_draft(product, anonymous_id="visitor", category="cars"), filled())
    product.pass_days(1)
    own = open_draft(product, seller_id="7", category="flats")
    taken = open_draft(product, seller_id="7", anonymous_id="visitor", category="cars")
    assert (taken.draft_id, taken.owner_id, taken.filled) == (visitor.draft_id, "7", visitor.filled)
    assert product.rows("SELECT owner_id, draft_id FROM current_draft") == [("7", visitor.draft_id)]
    assert product.rows("SELECT draft_id FROM draft") == [(visitor.draft_id,)]
    assert own.draft_id != taken.draft_id


@pytest.mark.spec("LST-02")
def test_a_draft_of_another_category_is_reset_and_keeps_its_id(product: Product) -> None:
    draft = fill(product, open_draft(product, seller_id="7", category="cars"), filled())
    reset = open_draft(product, seller_id="7", category="flats")
    assert reset.draft_id == draft.draft_id
    assert reset.filled == Filled(category="flats")


@pytest.mark.spec("LST-02")
def test_a_draft_opened_from_two_devices_is_one(product: Product) -> None:
    found: list[DraftShown] = []
    barrier = threading.Barrier(4)

    def device() -> None:
        barrier.wait()
        found.append(open_draft(product, seller_id="7", category="cars"))

    run_together([device] * 4)
    assert len({draft.draft_id for draft in found}) == 1
    assert product.rows("SELECT count(*) FROM draft") == [(1,)]
    assert product.rows("SELECT count(*) FROM current_draft") == [(1,)]


@pytest.mark.spec("LST-02")
def test_a_draft_published_twice_at_once_is_one_offer(product: Product) -> None:
    draft = fill(product, open_draft(product, seller_id="7", category="cars"), filled())
    found: list[Saved] = []
    barrier = threading.Barrier(4)

    def device() -> None:
        barrier.wait()
        found.append(published(product, draft))

    run_together([device] * 4)
    assert len({saved.offer.offer_id for saved in found}) == 1
    assert product.counters("7") == {"Active": 1}
    asked = Publishing(owner_id="7", draft_id=draft.draft_id, version=draft.version)
    assert {each.offer.offer_id for each in product.do(drafting.publish, [asked, asked])} == {  # type: ignore[union-attr]
        found[0].offer.offer_id
    }


@pytest.mark.spec("LST-03")
def test_a_draft_that_breaks_its_schema_survives(product: Product) -> None:
    wrong = Filled(category="cars", content={"make": "Volvo", "year": "old"})
    draft = fill(product, open_draft(product, seller_id="7", category="cars"), wrong)
    refused = publish(product, draft)
    assert isinstance(refused, ContentRefused)
    assert "content.year" in refused.detail
    assert "mileage_km" in refused.detail
    assert product.store.read(lambda tx: drafting.read_draft(tx, "7", draft.draft_id)) == draft
    assert product.rows("SELECT count(*) FROM offer_ids") == [(0,)]
    saved = published(product, fill(product, draft, filled()))
    assert saved.offer.schema_version == 2


@pytest.mark.spec("LST-03")
def test_a_flat_is_published_by_the_schema_of_flats(product: Product) -> None:
    flat = {"deal": "rent", "address": {"city": "Riga"}, "area_m2": 54.5, "rooms": 2}
    draft = fill(product, open_draft(product, seller_id="7", category="flats"), Filled(category="flats", content=flat))
    saved = published(product, draft)
    assert (saved.offer.category, saved.offer.schema_version, saved.offer.content) == ("flats", 1, flat)
    nowhere = edit(product, saved, Filled(category="flats", content={**flat, "address": {}}))
    assert isinstance(nowhere, ContentRefused)
    assert nowhere.place == "content.address"
    assert isinstance(edit(product, saved, filled()), Saved)  # a car after all


@pytest.mark.spec("LST-03")
def test_categories_are_those_of_the_folder_in_its_newest_versions(store_url: str, tmp_path: Path) -> None:
    boats = tmp_path / "categories" / "boats"
    boats.mkdir(parents=True)
    for version in (2, 10):
        schema = {"type": "object", "required": ["masts"], "properties": {"masts": {"maximum": version}}}
        (boats / f"{version}.json").write_bytes(msgspec.json.encode(schema))
    with opened(store_url, listings__categories=str(boats.parent)) as product:
        draft = open_draft(product, seller_id="7", category="boats")
        draft = fill(product, draft, Filled(category="boats", content={"masts": 3}))
        saved = published(product, draft)
        assert (saved.offer.category, saved.offer.schema_version) == ("boats", 10)
        refused = edit(product, saved, Filled(category="boats", content={"masts": 11}))
        assert isinstance(refused, ContentRefused)
        assert refused.place == "content.masts"
        assert isinstance(edit(product, saved, filled()), BadInput)  # there are no cars here


@pytest.mark.spec("LST-02")
def test_old_drafts_are_forgotten(product: Product) -> None:
    old = open_draft(product, seller_id="7", category="cars")
    product.pass_days(80)
    new = open_draft(product, seller_id="8", category="cars")
    product.pass_days(20)
    assert not walking.forget(product.store, product.listings, 100)
    assert product.rows("SELECT draft_id FROM draft") == [(new.draft_id,)]
    assert product.rows("SELECT draft_id FROM current_draft") == [(new.draft_id,)]
    assert open_draft(product, seller_id="7", category="cars").draft_id != old.draft_id


# Offers --------------------------------------------------------------------------------------------------------------


@pytest.mark.spec("LST-04")
def test_an_id_that_is_taken_is_drawn_again(product: Product, monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = product.make(car())
    fresh = "0000000000000000"
    drawn = iter([first.offer.offer_id, fresh])
    monkeypatch.setattr(product.listings, "new_offer_id", lambda: next(drawn))
    (second,) = product.make(car("8"))
    assert second.offer.offer_id == fresh
    assert dict(product.rows("SELECT offer_id, seller_id FROM offer_ids")) == {
        first.offer.offer_id: "7",
        fresh: "8",
    }


@pytest.mark.spec("LST-17")
def test_a_save_that_changes_nothing_emits_nothing(product: Product) -> None:
    (saved,) = product.make(car())
    before = product.told()
    same = edit(product, saved, Filled(category="cars", content=dict(CAR), price=saved.offer.price))
    assert same == saved
    assert product.told() == before
    assert product.rows("SELECT version FROM offer") == [(1,)]


@pytest.mark.spec("LST-11")
def test_every_change_is_exported_in_order(product: Product) -> None:
    saved = product.make(*[car(str(seller)) for seller in range(20)])
    for turn in range(3):
        saved = [  # type: ignore[misc]
            edit(product, each, filled(price=Price(turn, "EUR"))) for each in saved
        ]
    told = kinds(product.told(), "offer")
    versions: dict[str, list[int]] = {}
    for key, _, version, payload in told:
        versions.setdefault(key, []).append(version)
        assert payload["version"] == version
        assert payload["business_id"] == payload["shop_id"] == int(payload["seller_id"])
        assert payload["warehouse_id"] == 0
    assert versions == {each.offer.offer_id: [1, 2, 3, 4] for each in saved}


@pytest.mark.spec("LST-05")
def test_a_stale_edit_is_refused_and_an_absent_offer_is_not_there(product: Product) -> None:
    (saved,) = product.make(car())
    assert isinstance(edit(product, saved, filled(price=Price(1, "EUR"))), Saved)
    assert isinstance(edit(product, saved, filled(price=Price(2, "EUR"))), VersionStale)
    absent = msgspec.structs.replace(saved, offer=msgspec.structs.replace(saved.offer, offer_id="0" * 16))
    assert isinstance(edit(product, absent, filled()), NotFound)
    hidden = Edit(offer_id=saved.offer.offer_id, version=2, filled=filled(), may_see=lambda seller: seller == "8")
    assert isinstance(product.do(offers.edit, [hidden])[0], NotFound)


@pytest.mark.spec("LST-01")
def test_an_offer_has_100_kilobytes_and_not_one_more(product: Product) -> None:
    (saved,) = product.make(car(price=None))
    size_of_rest = len(msgspec.json.encode((dict(CAR) | {"description": ""}, None, ())))
    text = "ü" * ((100 * 1024 - size_of_rest) // 2)
    text += "x" * ((100 * 1024 - size_of_rest) % 2)
    with pytest.raises(ContentRefused):  # the schema has a bound of its own
        drafting.offer_of(product.listings, "7", Filled(category="cars", content=dict(CAR) | {"description": text}))
    whole = msgspec.structs.replace(saved.offer, content=dict(CAR) | {"description": text})
    saving.must_fit(product.listings, whole)
    after = product.change(saved.offer.offer_id, content=whole.content)
    assert after.offer.content["description"] == text
    assert product.told()[-1][3]["content"]["description"] == text
    with pytest.raises(TooLarge, match="102401 bytes, 102400 are allowed"):
        saving.must_fit(
            product.listings, msgspec.structs.replace(whole, content=dict(CAR) | {"description": text + "x"})
        )


@pytest.mark.spec("LST-05")
def test_text_is_kept_as_it_is(product: Product) -> None:
    text = "Продаётся 🚗 \\ \"'; DROP TABLE offer; \t\n {} $1 %s ? \u0001"
    (saved,) = product.make(car(content=dict(CAR) | {"title": text}))
    found = product.store.read(lambda tx: offers.read(tx, [saved.offer.offer_id]))[saved.offer.offer_id]
    assert msgspec.json.decode(found.body)["content"]["title"] == text
    assert product.told()[0][3]["content"]["title"] == text


# Presets, counts and counters ----------------------------------------------------------------------------------------


@pytest.mark.spec("LST-07", "LST-08", "LST-10")
def test_statuses_move_presets_counts_and_counters(product: Product) -> None:
    first, second = product.make(car(), car())
    assert product.counts("7") == product.listed("7") == {1: 2, 2: 2}
    assert product.counters("7") == {"Active": 2}
    ban(product, first.offer.offer_id, 1)
    assert product.counts("7") == product.listed("7") == {1: 2, 2: 1, 4: 1}
    assert product.counters("7") == {"Active": 1, "Banned": 1}
    move(product, second.offer.offer_id, "sold")
    assert product.counts("7") == product.listed("7") == {1: 2, 4: 1, 5: 1}
    assert product.counters("7") == {"Banned": 1, "Sold": 1, "MoneyEarned.EUR": 5_000_00}
    move(product, first.offer.offer_id, "removed", reason="sold elsewhere")
    assert product.counts("7") == product.listed("7") == {1: 1, 5: 1}
    must_be_right(product, "7")


@pytest.mark.spec("LST-10")
def test_a_sale_that_is_repeated_counts_once(product: Product) -> None:
    (saved,) = product.make(car())
    sold = move(product, saved.offer.offer_id, "sold")
    assert move(product, saved.offer.offer_id, "sold") == sold
    ban(product, saved.offer.offer_id, 1)
    ban(product, saved.offer.offer_id, 2, is_banned=False)
    assert product.counters("7") == {"Sold": 1, "MoneyEarned.EUR": 5_000_00}


@pytest.mark.spec("LST-10")
def test_a_sale_without_a_price_adds_nothing_to_the_money(product: Product) -> None:
    (saved,) = product.make(car(price=None))
    sold = move(product, saved.offer.offer_id, "sold")
    assert isinstance(sold, Saved)
    assert product.counters("7") == {"Sold": 1}
    edit(product, sold, filled(price=Price(700, "EUR")))
    assert product.counters("7") == {"Sold": 1}
    must_be_right(product, "7")


@pytest.mark.spec("LST-06")
def test_a_move_that_is_not_in_the_table_is_refused(product: Product) -> None:
    (saved,) = product.make(car())
    move(product, saved.offer.offer_id, "removed")
    assert isinstance(move(product, saved.offer.offer_id, "active"), Conflict)
    assert isinstance(move(product, saved.offer.offer_id, "sold"), Conflict)
    assert isinstance(move(product, saved.offer.offer_id, "removed", version=1), VersionStale)


@pytest.mark.spec("LST-07")
def test_pages_are_the_newest_first_each_offer_once(product: Product) -> None:
    made = []
    for _ in range(5):
        made += product.make(*[car() for _ in range(5)])
        product.pass_days(0.001)
    product.make(car("8"))
    expected = sorted(((each.offer.created_at_us, each.offer.offer_id) for each in made), reverse=True)
    found: list[str] = []
    cursor = ""
    while True:
        page = product.store.read(lambda tx, cursor=cursor: cabinet.page(tx, "7", "active", cursor, 4))  # type: ignore[misc]
        assert page.count == 25
        found += [each.offer_id for each in page.offers]
        cursor = page.cursor
        if not cursor:
            break
        assert len(page.offers) == 4
    assert found == [offer_id for _, offer_id in expected]


@pytest.mark.spec("LST-07")
@pytest.mark.parametrize("cursor", ["x", "MTIz", "////", "MTIzIGFiYw", "é"])
def test_a_cursor_of_somebody_else_is_refused(product: Product, cursor: str) -> None:
    with pytest.raises(BadInput, match="cursor"):
        product.store.read(lambda tx: cabinet.page(tx, "7", "active", cursor, 4))


def schedule(product: Product, work: Any) -> None:
    for shard in range(16):
        while work(product.store, product.listings, shard, lambda _: None):
            pass


@pytest.mark.spec("LST-06")
def test_offers_expire_and_are_archived(product: Product) -> None:
    old, sold, removed = product.make(car(), car(), car())
    move(product, sold.offer.offer_id, "sold")
    move(product, removed.offer.offer_id, "removed")
    product.pass_days(31)
    schedule(product, walking.age)
    assert statuses(product) == {old.key: "active", sold.key: "archived", removed.key: "archived"}
    product.pass_days(30)
    ban(product, old.offer.offer_id, 1)
    schedule(product, walking.age)
    assert product.counters("7") == {"Banned": 1, "Sold": 1, "MoneyEarned.EUR": 5_000_00}
    ban(product, old.offer.offer_id, 2, is_banned=False)
    assert product.counters("7")["Expired"] == 1  # the status beneath went on
    move(product, old.offer.offer_id, "active")
    product.pass_days(59)
    schedule(product, walking.age)
    assert statuses(product)[old.key] == "active"  # its time began anew
    product.pass_days(2)
    schedule(product, walking.age)
    product.pass_days(31)
    schedule(product, walking.age)
    assert set(statuses(product).values()) == {"archived"}
    assert product.listed("7") == {}
    must_be_right(product, "7")
    schedule(product, walking.age)


def statuses(product: Product) -> dict[tuple[str, str], str]:
    rows = product.rows("SELECT seller_id, offer_id, shown FROM offer WHERE kind = 'offer'")
    return {(seller, offer_id): status for seller, offer_id, status in rows}


@pytest.mark.spec("LST-06")
def test_ages_that_were_changed_hold_for_offers_that_are_there(store_url: str) -> None:
    clock = ManualClock(1_800_000_000_000_000)
    with opened(store_url, clock=clock, listings__expire_days=2) as product:
        (saved,) = product.make(car())
    with opened(store_url, clock=clock, listings__expire_days=10) as product:
        product.pass_days(3)
        schedule(product, walking.age)
        assert statuses(product) == {saved.key: "active"}
        product.pass_days(8)
        schedule(product, walking.age)
        assert statuses(product) == {saved.key: "expired"}


@pytest.mark.spec("LST-07")
def test_a_changed_preset_is_built_while_offers_change(store_url: str) -> None:
    clock = ManualClock(1_800_000_000_000_000)
    first = {"old": Preset(number=1, statuses=frozenset({"active"})), "gone": Preset(number=3)}
    second = {
        "old": Preset(number=1, statuses=frozenset({"active", "sold"})),
        "new": Preset(number=2, categories=frozenset({"cars"}), statuses=frozenset({"active", "sold"})),
    }
    options: dict[str, Any] = {"clock": clock, "limits__transaction_seconds_max": 10}
    with opened(store_url, **options, listings__presets=msgspec.to_builtins(first)) as product:
        made = product.make(*[car(str(seller)) for seller in range(40) for _ in range(2)])
        for each in made[:40]:
            move(product, each.offer.offer_id, "sold")
        assert product.counts("0") == product.listed("0") == {3: 2}
    with opened(store_url, **options, listings__presets=msgspec.to_builtins(second)) as product:
        states = {row.name: row.state for row in product.store.read(presets.stored)}
        assert states == {"old": "building", "new": "building", "gone": "dropping"}
        schedule(product, walking.build)  # too early: somebody may still go by the old presets
        assert product.listed("1") == {3: 2}
        for each in made[30:60]:  # before the walk
            product.change(each.offer.offer_id, price=Price(1, "EUR"))
        product.pass_days(1)
        for shard in range(8):
            while walking.build(product.store, product.listings, shard, lambda _: None):
                pass
        for each in made[20:70:2]:  # in the middle of it
            product.change(each.offer.offer_id, status="removed")
        schedule(product, walking.build)
        states = {row.name: row.state for row in product.store.read(presets.stored)}
        assert states == {"old": "ready", "new": "ready"}
        assert product.rows("SELECT count(*) FROM listing_walks WHERE walk <> 'scrub'") == [(0,)]
        gone = {each.offer.seller_id for each in made[20:70:2]}
        for seller in range(40):
            live = 2 - sum(each.offer.seller_id == str(seller) for each in made[20:70:2])
            expected = {1: live, 2: live} if live else {}
            assert product.counts(str(seller)) == product.listed(str(seller)) == expected, (seller, gone)
        must_be_right(product, *map(str, range(40)))


def plant(product: Product, sql: str) -> None:
    product.store.transact(lambda tx: tx.driver(sql))


@pytest.mark.spec("LST-09")
def test_drift_is_found_and_repaired(product: Product) -> None:
    made = product.make(*[car() for _ in range(10)], car("8"))
    move(product, made[0].offer.offer_id, "sold")
    plant(product, "UPDATE user_offer_presets_count SET offers = offers + 5 WHERE seller_id = '7' AND preset_id = 2")
    plant(product, "DELETE FROM user_offer_presets_count WHERE seller_id = '7' AND preset_id = 1")
    plant(product, "UPDATE user_total_counters SET counter_value = -3 WHERE seller_id = '7' AND counter_id = 'Sold'")
    found = product.store.read(lambda tx: repairing.drift(tx, "7"))
    assert {(each.what, each.name): each.missing for each in found} == {
        ("presets", "all"): 10,
        ("presets", "active"): product.listed("7")[2] - product.counts("7")[2],
        ("counters", "Sold"): 1 - product.counters("7")["Sold"],
    }
    repaired = product.store.transact(lambda tx: repairing.repair(tx, "7", "test"))
    assert sorted(repaired, key=str) == sorted(found, key=str)
    must_be_right(product, "7", "8")
    assert product.counts("7") == {1: 10, 2: 9, 5: 1}
    assert product.counters("7") == {"Active": 9, "Sold": 1, "MoneyEarned.EUR": 5_000_00}
    with pytest.raises(NotFound):
        product.store.transact(lambda tx: repairing.repair(tx, "nobody", "test"))


@pytest.mark.spec("LST-09")
def test_counts_are_repaired_while_eight_writers_change_the_same_seller(store_url: str) -> None:
    """Drift is planted again and again, and repaired by two at once, under load."""
    with opened(store_url, store__connections_max=24) as product:
        made = product.make(*[car() for _ in range(16)])
        stopping = threading.Event()
        failures: list[BaseException] = []

        def writer(number: int) -> None:
            mine = made[number::8]
            turn = 0
            while not stopping.is_set():
                turn += 1
                for each in mine:
                    ban(product, each.offer.offer_id, turn, is_banned=turn % 2 == 1)
                product.make(car())

        def repairer() -> None:
            while not stopping.is_set():
                product.store.transact(lambda tx: repairing.repair(tx, "7", "test"))

        def failing(work: Any, *given: Any) -> Any:
            def run() -> None:
                try:
                    work(*given)
                except BaseException as error:
                    failures.append(error)
                    stopping.set()

            return run

        threads = [threading.Thread(target=failing(writer, number)) for number in range(8)]
        threads += [threading.Thread(target=failing(repairer)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for number in range(15):
            stopping.wait(0.1)
            plant(
                product,
                f"UPDATE user_offer_presets_count SET offers = offers + {7 + number}"
                " WHERE seller_id = '7' AND preset_id = 2 AND seq_no = (SELECT min(seq_no) FROM"
                " user_offer_presets_count WHERE seller_id = '7' AND preset_id = 2)",
            )
            plant(
                product,
                f"UPDATE user_total_counters SET counter_value = counter_value - {3 + number}"
                " WHERE seller_id = '7' AND counter_id = 'Active' AND seq_no = (SELECT min(seq_no) FROM"
                " user_total_counters WHERE seller_id = '7' AND counter_id = 'Active')",
            )
        stopping.set()
        for thread in threads:
            thread.join()
        assert not failures, failures[0]
        product.store.transact(lambda tx: repairing.repair(tx, "7", "test"))
        must_be_right(product, "7")
        assert product.counts("7")[1] == len(product.rows("SELECT 1 FROM offer_ids"))


@pytest.mark.spec("LST-09")
def test_the_scrubber_walks_all_sellers_and_repairs(product: Product) -> None:
    product.make(*[car(str(seller)) for seller in range(120)])
    plant(product, "UPDATE user_offer_presets_count SET offers = offers + 1 WHERE seller_id IN ('3', '90')")
    scrubber = walking.Scrubber(product.store, product.listings)
    for shard in range(16):
        while scrubber.step(shard, lambda _: None):
            pass
    must_be_right(product, *map(str, range(120)))
    plant(product, "UPDATE user_offer_presets_count SET offers = offers + 1 WHERE seller_id = '3'")
    for shard in range(16):
        assert not scrubber.step(shard, lambda _: None)  # the round is over
    assert product.counts("3") != product.listed("3")
    product.pass_days(1.1)
    for shard in range(16):
        while scrubber.step(shard, lambda _: None):
            pass
    must_be_right(product, "3")


def scrubbed(product: Product) -> None:
    scrubber = walking.Scrubber(product.store, product.listings)
    for shard in range(SHARDS):
        while scrubber.step(shard, lambda _: None):
            pass


def drift_told() -> dict[str, float]:
    """What the gauge says to whoever watches it."""
    samples = [sample for family in metrics.DRIFT.collect() for sample in family.samples]
    return {sample.labels["what"]: sample.value for sample in samples}


@pytest.mark.spec("LST-09", "CORE-17")
def test_the_scrubber_tells_by_how_much_counts_have_drifted_and_leaves_them_where_it_is_told_to(
    store_url: str,
) -> None:
    clock = ManualClock(1_800_000_000_000_000)
    with opened(store_url, clock=clock, listings__scrub_repairs=False) as product:
        product.make(car("3"), car("90"))
        scrubbed(product)
        assert drift_told() == {"presets": 0, "counters": 0}
        plant(product, "UPDATE user_offer_presets_count SET offers = offers + 3 WHERE preset_id = 2")
        plant(product, "UPDATE user_total_counters SET counter_value = counter_value - 2 WHERE seller_id = '3'")
        product.pass_days(1.1)
        scrubbed(product)
        assert drift_told() == {"presets": 6, "counters": 2}
        assert [product.counts(seller)[2] for seller in ("3", "90")] == [4, 4]
    with opened(store_url, clock=clock) as product:
        product.pass_days(1.1)
        scrubbed(product)
        assert drift_told() == {"presets": 6, "counters": 2}  # what was found, and mended
        must_be_right(product, "3", "90")
        product.pass_days(1.1)
        scrubbed(product)
        assert drift_told() == {"presets": 0, "counters": 0}


# Moderation, photos, stages ------------------------------------------------------------------------------------------


@pytest.mark.spec("LST-15")
def test_opinions_apply_by_their_own_version(product: Product) -> None:
    (saved,) = product.make(car())
    offer_id = saved.offer.offer_id
    assert ban(product, offer_id, 5) == "applied"
    assert ban(product, offer_id, 4, is_banned=False) == "old"
    assert ban(product, offer_id, 5) == "old"
    assert product.counters("7") == {"Banned": 1}
    assert ban(product, offer_id, 6, is_banned=False) == "applied"
    assert product.counters("7") == {"Active": 1}
    assert ban(product, "0" * 16, 1) == "unknown"
    assert [version for _, _, version, _ in kinds(product.told(), "moderation")] == [1, 2]
    told = kinds(product.told(), "moderation")[-1][3]
    assert told["body"]["version"] == 6
    assert told["seller_id"] == "7"


@pytest.mark.spec("LST-15")
def test_a_ban_during_edits_is_not_lost(product: Product) -> None:
    (saved,) = product.make(car())
    offer_id = saved.offer.offer_id

    def editor() -> None:
        for turn in range(20):
            found = product.store.read(lambda tx: saving.load_by_id(tx, [offer_id]))[offer_id]
            edit(product, found, filled(price=Price(turn + 1, "EUR")))

    def moderator() -> None:
        for version in range(1, 20):
            ban(product, offer_id, version, is_banned=version % 2 == 1)

    run_together([editor, moderator])
    found = product.store.read(lambda tx: saving.load_by_id(tx, [offer_id]))[offer_id]
    assert found.offer.is_banned
    assert found.offer.price != saved.offer.price
    assert product.counters("7") == {"Banned": 1}
    must_be_right(product, "7")
    versions = [version for _, _, version, _ in kinds(product.told(), "offer")]
    assert versions == list(range(1, found.version + 1))


URLS = ("https://photos.example.com/1.jpg", "https://photos.example.com/2.jpg", "https://photos.example.com/3.jpg")


@pytest.mark.spec("LST-14")
def test_photos_are_asked_for_once_and_their_answers_added(product: Product) -> None:
    (saved,) = product.make(car(photos=URLS[:2]))
    offer_id = saved.offer.offer_id
    assert statuses(product) == {saved.key: "active"}
    after = edit(product, saved, Filled(category="cars", content=dict(CAR), photos=(URLS[1], URLS[2])))
    assert isinstance(after, Saved)
    edit(product, after, Filled(category="cars", content=dict(CAR), photos=(URLS[2], URLS[1])))
    asked = [payload["urls"] for _, _, _, payload in product.told("photo-requests")]
    assert asked == [[*URLS[:2]], [URLS[2]]]
    answers = [
        PhotoAnswer(offer_id=offer_id, url=URLS[0], image={"id": "gone"}),  # no longer in the offer
        PhotoAnswer(offer_id=offer_id, url=URLS[1], image={"id": "b"}),
        PhotoAnswer(offer_id=offer_id, url=URLS[2], error="not an image"),
        PhotoAnswer(offer_id="0" * 16, url=URLS[2], error="not an image"),
    ]
    errors = product.do(keeping.add_photos, answers)
    assert errors == [("7", offer_id, URLS[2], "not an image")]
    before = product.told()
    assert kinds(before, "photos")[-1][3]["body"]["photos"] == [
        {"url": URLS[2], "state": "failed", "error": "not an image"},
        {"url": URLS[1], "state": "ready", "image": {"id": "b"}},
    ]
    assert product.do(keeping.add_photos, answers) == []  # a repeat
    late = PhotoAnswer(offer_id=offer_id, url=URLS[1], error="came late")
    assert product.do(keeping.add_photos, [late]) == []
    assert product.told() == before


@pytest.mark.spec("LST-16")
def test_a_stage_keeps_its_state_by_compare_and_set(product: Product) -> None:
    (saved,) = product.make(car())
    offer_id = saved.offer.offer_id
    first = product.do(keeping.write_stage, offer_id, "pricing", 0, {"a": [1, "é"]}, anyone)
    assert (first.version, first.state) == (1, {"a": [1, "é"]})
    assert product.store.read(lambda tx: keeping.read_stage(tx, offer_id, "pricing", anyone)) == first
    with pytest.raises(VersionStale):
        product.do(keeping.write_stage, offer_id, "pricing", 0, {"a": 2}, anyone)
    assert product.do(keeping.write_stage, offer_id, "pricing", 1, {"a": [1, "é"]}, anyone) == first
    assert product.do(keeping.write_stage, offer_id, "billing", 0, None, anyone).version == 1
    with pytest.raises(NotFound):
        product.store.read(lambda tx: keeping.read_stage(tx, offer_id, "pricing", lambda seller: seller == "8"))
    with pytest.raises(NotFound):
        product.store.read(lambda tx: keeping.read_stage(tx, offer_id, "other", anyone))
    assert Counter(kind for _, kind, _, _ in product.told()) == {"offer": 1, "stage:pricing": 1, "billing": 1}
    for number in range(19):
        product.do(keeping.write_stage, offer_id, f"stage-{number}", 0, number, anyone)
    with pytest.raises(BadInput, match="20 stages"):
        product.do(keeping.write_stage, offer_id, "one-more", 0, 1, anyone)


@pytest.mark.spec("LST-16")
def test_stages_that_write_at_once_lose_no_update(product: Product) -> None:
    (saved,) = product.make(car())
    offer_id = saved.offer.offer_id
    product.do(keeping.write_stage, offer_id, "sum", 0, 0, anyone)

    def adder() -> None:
        done = 0
        while done < 15:
            seen = product.store.read(lambda tx: keeping.read_stage(tx, offer_id, "sum", anyone))
            try:
                product.do(keeping.write_stage, offer_id, "sum", seen.version, seen.state + 1, anyone)
                done += 1
            except VersionStale:
                continue

    run_together([adder] * 4)
    assert product.store.read(lambda tx: keeping.read_stage(tx, offer_id, "sum", anyone)).state == 60


# Writers beside each other -------------------------------------------------------------------------------------------


@pytest.mark.spec("LST-08", "LST-10", "LST-11")
def test_writers_of_one_seller_leave_the_counts_right(product: Product) -> None:
    made = product.make(*[car() for _ in range(12)])

    def writer(number: int) -> Any:
        def run() -> None:
            for turn in range(8):
                product.make(car(), car("8"))
                each = made[(number * 3 + turn) % 12]
                ban(product, each.offer.offer_id, 1 + number * 100 + turn, is_banned=turn % 2 == 0)
                move(product, made[(number + turn) % 12].offer.offer_id, "sold")

        return run

    run_together([writer(number) for number in range(4)])
    must_be_right(product, "7", "8")
    told = kinds(product.told(), "offer")
    versions: dict[str, list[int]] = {}
    for key, _, version, _ in told:
        versions.setdefault(key, []).append(version)
    stored = dict(product.rows("SELECT offer_id, version FROM offer WHERE kind = 'offer'"))
    assert versions == {key: list(range(1, version + 1)) for key, version in stored.items()}


def test_a_transaction_that_fails_changes_nothing(product: Product) -> None:
    def work(tx: Transaction) -> None:
        saving.save(tx, product.listings, [Change(None, car())])
        raise BadInput("a trial")

    with pytest.raises(BadInput):
        product.store.transact(work)
    for table in ("offer", "offer_ids", "user_offer_presets", "user_offer_presets_count", "messages", "sellers"):
        assert product.rows(f"SELECT count(*) FROM {table}") == [(0,)]


def run_together(work: list[Any]) -> None:
    failures: list[BaseException] = []

    def run(each: Any) -> None:
        try:
            each()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(each,)) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
