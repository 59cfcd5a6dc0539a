"""What a review of listings found, and what must stay as it was where that was mended."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from keyfold.core.clock import ManualClock
from keyfold.core.errors import Conflict, NotFound, TooLarge
from keyfold.core.loops import run_until_idle
from keyfold.core.store import Transaction
from keyfold.core.store.shapes import insert
from keyfold.core.topics.topic import Message, Record
from keyfold.core.workers import loops as worker_loops
from keyfold.listings.model import SHARDS, Preset, Price, business_of, shard_of
from keyfold.listings.service import drafting, keeping, offers, presets, repairing, saving, walking
from keyfold.listings.service.drafting import DraftShown, Filled, Opening
from keyfold.listings.service.feeds import applying, planning, staging, sweeping, tasks
from keyfold.listings.service.feeds.items import Read, read_line
from keyfold.listings.service.keeping import Opinion
from keyfold.listings.service.offers import Edit
from keyfold.listings.service.saving import Saved
from keyfold.listings.tables import SELLERS
from keyfold.listings.worker import Scheduler
from tests.listing_services import Moderation
from tests.listings import CAR, DAY_US, Product, car, opened

pytestmark = pytest.mark.timeout(120)
START_US = 1_800_000_000_000_000


@pytest.fixture
def product(store_url: str) -> Iterator[Product]:
    with opened(store_url, clock=ManualClock(START_US), limits__transaction_seconds_max=10) as each:
        yield each


@pytest.fixture
def served(postgres_url: str) -> Iterator[Product]:
    """On a server, where others commit between the statements of a transaction."""
    with opened(postgres_url, clock=ManualClock(START_US), limits__transaction_seconds_max=10) as each:
        yield each


def anyone(_: str) -> bool:
    return True


def unguarded(_: Transaction) -> None:
    return None


def seller_in_shard(shard_id: int) -> str:
    return next(f"z{number}" for number in range(1_000) if shard_of(f"z{number}") == shard_id)


def changed_presets(product: Product, **more: Preset) -> None:
    """Put another preset in force, and wait until it may be built."""
    settings = product.listings.settings
    wanted = type(settings)(presets={**settings.presets, **more})
    product.store.transact(lambda tx: presets.adopt(tx, wanted))
    assert product.clock is not None
    product.clock.advance(60)


def build_all(product: Product) -> None:
    while any(walking.build(product.store, product.listings, shard, unguarded) for shard in range(SHARDS)):
        pass


def states(product: Product) -> set[str]:
    return {row.state for row in product.store.read(presets.stored)}


# Presets -------------------------------------------------------------------------------------------------------------


def test_a_preset_is_ready_also_when_its_last_two_shards_end_at_once(served: Product) -> None:
    served.make(car(seller_in_shard(0)))
    changed_presets(served, photos=Preset(number=9, has_photos=True))
    (row,) = [each for each in served.store.read(presets.stored) if each.state == presets.BUILDING]

    def step(shard: int) -> Callable[[Transaction], bool]:
        return lambda tx: walking._build(tx, row, shard, unguarded)

    for shard in range(SHARDS - 2):
        while served.store.transact(step(shard)):
            pass

    def last_two(tx: Transaction) -> None:
        step(SHARDS - 2)(tx)
        served.store.transact(step(SHARDS - 1))  # neither sees the other

    served.store.transact(last_two)
    build_all(served)
    assert states(served) == {presets.READY}


def test_a_walk_passes_sellers_without_an_offer_in_bounded_steps(
    product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(walking, "SELLERS_MAX", 2)
    idle = [f"s{number:05}" for number in range(9)]
    rows = {"seller_id": idle, "shard_id": [0] * len(idle), "repairs": [0] * len(idle)}
    product.store.transact(lambda tx: insert(tx, SELLERS, rows))
    step = product.store.read(lambda tx: walking._next_offers(tx, 0, walking.Place()))
    assert step == ([], walking.Place(idle[1], walking.ALL_OFFERS))
    last = seller_in_shard(0)
    product.make(car(last, photos=("https://photos.example.com/1.jpg",)))
    changed_presets(product, photos=Preset(number=9, has_photos=True))
    build_all(product)
    assert states(product) == {presets.READY}
    assert product.listed(last)[9] == product.counts(last)[9] == 1


def test_two_processes_that_start_at_once_put_the_same_presets_in_force(served: Product) -> None:
    served.store.transact(lambda tx: tx.driver("DELETE FROM offer_presets"))
    failed: list[BaseException] = []

    def start() -> None:
        try:
            served.store.transact(lambda tx: presets.adopt(tx, served.listings.settings))
        except BaseException as error:
            failed.append(error)

    second = threading.Thread(target=start)

    def first(tx: Transaction) -> None:
        presets.adopt(tx, served.listings.settings)
        second.start()
        time.sleep(0.5)

    served.store.transact(first)
    second.join()
    assert not failed
    assert len(served.store.read(presets.stored)) == len(served.listings.settings.presets)


# Drafts --------------------------------------------------------------------------------------------------------------


def filled(**content: Any) -> Filled:
    return Filled(category="cars", content={**CAR, **content})


def fill(product: Product, draft: DraftShown, what: Filled) -> DraftShown:
    return product.do(drafting.fill, draft.owner_id, draft.draft_id, draft.version, what)


def test_what_is_filled_in_while_its_owner_logs_in_is_not_lost(
    served: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = served.do(drafting.open_drafts, Opening(anonymous_id="visitor", category="cars"))
    load, filled_in = drafting._load, []

    def loaded_then_filled(tx: Transaction, keys: Any) -> Any:
        found = load(tx, keys)
        if found and not filled_in:
            filled_in.append(True)
            fill(served, draft, filled(title="written on the other device"))
        return found

    with monkeypatch.context() as patched:
        patched.setattr(drafting, "_load", loaded_then_filled)
        taken = served.do(drafting.open_drafts, Opening(anonymous_id="visitor", seller_id="7", category="cars"))
    assert taken.owner_id == "7"
    assert taken.filled.content.get("title") == "written on the other device"


def test_a_draft_that_is_touched_while_old_ones_are_forgotten_stays(
    served: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = served.do(drafting.open_drafts, Opening(seller_id="7", category="cars"))
    served.pass_days(served.listings.settings.draft_days + 1)
    now_us = START_US + (served.listings.settings.draft_days + 1) * DAY_US
    touched: list[bool] = []

    class Touching:
        """The first read of old drafts is followed by somebody who goes on with one."""

        def __init__(self, tx: Transaction) -> None:
            self._tx = tx
            self.now_us = now_us

        def __getattr__(self, name: str) -> Any:
            return getattr(self._tx, name)

        def execute(self, statement: Any, parameters: Any = None) -> Any:
            found = self._tx.execute(statement, parameters)
            if not touched:
                touched.append(True)
                rows = found.all()
                fill(served, draft, filled(title="not forgotten"))
                return rows
            return found

    served.store.transact(lambda tx: drafting.forget(Touching(tx), served.listings, 100))  # type: ignore[arg-type]
    again = served.do(drafting.open_drafts, Opening(seller_id="7"))
    assert (again.draft_id, again.filled.content["title"]) == (draft.draft_id, "not forgotten")


def test_the_version_of_a_draft_grows_also_when_it_changes_hands(product: Product) -> None:
    draft = product.do(drafting.open_drafts, Opening(anonymous_id="visitor", category="cars"))
    draft = fill(product, draft, filled(title="one"))
    taken = product.do(drafting.open_drafts, Opening(anonymous_id="visitor", seller_id="7"))
    assert taken.version > draft.version
    assert fill(product, taken, filled(title="two")).version == taken.version + 1
    with pytest.raises(NotFound):
        product.store.read(lambda tx: drafting.read_draft(tx, "visitor", draft.draft_id))


# Offers --------------------------------------------------------------------------------------------------------------


def edit(product: Product, saved: Saved, what: Filled) -> Any:
    one = Edit(offer_id=saved.offer.offer_id, version=saved.version, filled=what, may_see=anyone)
    return product.do(offers.edit, [one])[0]


def test_true_is_not_one(product: Product) -> None:
    """To Python they are equal; to whoever reads the offer they are not."""
    draft = product.do(drafting.open_drafts, Opening(seller_id="7", category="cars"))
    draft = fill(product, draft, Filled(category="cars", content={"flag": 1}))
    draft = fill(product, draft, Filled(category="cars", content={"flag": True}))
    assert draft.filled.content == {"flag": True}
    assert draft.filled.content["flag"] is True
    (saved,) = product.make(car(content={"flag": 0}))
    changed = product.change(saved.offer.offer_id, content={"flag": False})
    assert changed.version == 2
    assert product.change(saved.offer.offer_id, content={"flag": False}).version == 2


def test_what_is_too_large_is_not_looked_at_further(product: Product) -> None:
    (saved,) = product.make(car())
    refused = edit(product, saved, Filled(category="cars", content={**CAR, "equipment": [1] * 500_000}))
    assert isinstance(refused, TooLarge)


def test_an_offer_is_answered_once_however_often_it_is_asked_for(product: Product) -> None:
    first, second = product.make(car("7"), car("8"))
    ids = [second.offer.offer_id, *[first.offer.offer_id] * 1_000]
    answers = product.store.read(lambda tx: offers.read_each(tx, [(ids, anyone), (ids, lambda seller: seller == "7")]))
    assert [[told.offer_id for told in each] for each in answers] == [
        [second.offer.offer_id, first.offer.offer_id],
        [first.offer.offer_id],
    ]


def test_an_opinion_that_changes_no_ban_reads_no_offer(product: Product, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come by the ten thousand at once, and an offer has up to 100 KB."""
    (saved,) = product.make(car())
    read: list[int] = []
    load_offers = saving.load_offers

    def counted(tx: Transaction, keys: Any) -> Any:
        read.append(len(keys))
        return load_offers(tx, keys)

    monkeypatch.setattr(saving, "load_offers", counted)
    banned, reads = [], []
    for version, is_banned in enumerate([False, False, True, True, False, True], 1):
        read.clear()
        opinion = Opinion(offer_id=saved.offer.offer_id, version=version, is_banned=is_banned)
        product.do(keeping.judge, [opinion])
        banned.append(product.counters("7").get("Banned", 0))
        reads.append(sum(read))
    assert reads == [0, 0, 1, 0, 1, 1]
    assert banned == [0, 0, 1, 1, 0, 1]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many offers are loaded at once, where four of those below are as much as may be held."""
    loaded: list[int] = []
    load_offers = saving.load_offers

    def counted(tx: Transaction, keys: Any) -> Any:
        loaded.append(len(keys))
        return load_offers(tx, keys)

    monkeypatch.setattr(saving, "STEP_BYTES_MAX", 5_200)
    monkeypatch.setattr(saving, "ALWAYS_FIT", 1)
    monkeypatch.setattr(saving, "load_offers", counted)
    return loaded


def make_large(product: Product, count: int, **more: Any) -> list[str]:
    made = product.make(*[car(content={**CAR, "description": "x" * 900}, **more) for _ in range(count)])
    return [saved.offer.offer_id for saved in made]


@pytest.mark.spec("LST-15", "CORE-16")
def test_opinions_that_ban_very_many_offers_hold_some_of_them_at_a_time(product: Product, loads: list[int]) -> None:
    """A thousand bans of offers of 15 KB took 200 MB."""
    opinions = [Opinion(offer_id=each, version=1, is_banned=True) for each in make_large(product, 10)]
    judged = product.do(keeping.judge, opinions)
    assert [(each.offer_id, each.result) for each in judged] == [(each.offer_id, "applied") for each in opinions]
    assert product.counters("7") == {"Banned": 10}
    assert sum(loads) == 10
    assert max(loads) <= 4


@pytest.mark.spec("LST-15", "CORE-08", "CORE-16")
def test_bans_from_the_topic_are_halved_until_a_transaction_holds_few_enough(
    product: Product, loads: list[int]
) -> None:
    moderation = Moderation(product.context, product.listings.settings.opinions_topic)
    for each in make_large(product, 10):
        moderation.say(each, is_banned=True)
    run_until_idle(worker_loops(product.context))
    assert product.counters("7") == {"Banned": 10}
    assert sum(loads) == 10
    assert max(loads) <= 4
    assert product.rows("SELECT count(*) FROM dead_letters") == [(0,)]


@pytest.mark.spec("LST-14", "CORE-16")
def test_answers_for_very_many_photos_hold_some_offers_at_a_time(product: Product, loads: list[int]) -> None:
    url = "https://photos.example.com/1.jpg"
    answers = [
        keeping.PhotoAnswer(offer_id=each, url=url, error="broken")
        for each in make_large(product, 100, photos=(url,), external_id="A")
    ]
    with pytest.raises(TooLarge):
        product.do(keeping.add_photos, answers)
    records = [Record(0, at, message_of(each)) for at, each in enumerate(answers[:10])]
    product.store.transact(lambda tx: keeping.take_answers(product.listings)(tx, records))
    assert sum(loads) == 10
    assert max(loads) <= 4
    bodies = product.rows("SELECT body FROM offer WHERE kind = 'photos'")
    assert sum("broken" in body for (body,) in bodies) == 10


def message_of(answer: keeping.PhotoAnswer) -> Message:
    payload = msgspec.json.encode(answer)
    return Message(key=answer.offer_id, version=1, event_time_us=1, schema="photo-answer/1", payload=payload)


@pytest.mark.spec("LST-06", "CORE-03", "CORE-16")
def test_moves_that_were_gathered_are_refused_where_a_transaction_cannot_hold_their_offers(
    product: Product, loads: list[int]
) -> None:
    """Whoever gathers them halves them then, down to the one that always fits."""
    moves = [offers.Move(offer_id=each, status="sold", may_see=anyone) for each in make_large(product, 10)]
    with pytest.raises(TooLarge):
        product.do(offers.move, moves)
    for each in moves:
        product.do(offers.move, [each])
    assert product.counters("7")["Sold"] == 10
    assert max(loads) <= 1


# The scheduler -------------------------------------------------------------------------------------------------------


@pytest.fixture
def scheduler(product: Product) -> Iterator[Scheduler]:
    made = Scheduler(product.context, product.listings, "test")
    yield made
    made.stop()


def feed(product: Product, seller_id: str, task_id: int = 1) -> None:
    line = msgspec.json.encode({"external_id": "A", "category": "cars", "content": CAR})
    staging.take_lines(product.store, product.listings, seller_id, task_id, 0, [line])
    product.do(tasks.end_task, seller_id, task_id, 1)


def stage(product: Product, seller_id: str, task_id: int = 1) -> str:
    return product.store.read(lambda tx: tasks.must_find(tx, seller_id, task_id).stage)


def fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("planted")


def test_what_fails_in_a_shard_does_not_stop_its_other_work(
    product: Product, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(product, "7")
    monkeypatch.setattr(walking, "age", fail)
    for _ in range(5):
        with pytest.raises(RuntimeError, match="planted"):
            scheduler.step()
    assert stage(product, "7") == "done"


def test_a_feed_that_fails_does_not_stop_the_others_of_its_shard(
    product: Product, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = seller_in_shard(3)
    good = next(name for name in (f"y{number}" for number in range(1_000)) if shard_of(name) == 3)
    plan_of = planning.plan_of
    monkeypatch.setattr(planning, "plan_of", lambda tx, task: fail() if task.seller_id == bad else plan_of(tx, task))
    feed(product, bad)
    assert product.clock is not None
    product.clock.advance(1)
    feed(product, good)
    for _ in range(10):
        product.clock.advance(1)
        with contextlib.suppress(RuntimeError):
            scheduler.step()
    assert (stage(product, bad), stage(product, good)) == ("ended", "done")


def test_the_scheduler_sweeps_in_bounded_steps(
    product: Product, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[int] = []

    def forget(*_: Any) -> bool:
        swept.append(1)
        return len(swept) < 100

    monkeypatch.setattr(sweeping, "forget", forget)
    assert scheduler.step()
    assert len(swept) == 1
    while scheduler.step():
        pass
    assert len(swept) == 100


@pytest.mark.spec("CORE-11", "LST-12", "LST-13")
def test_a_plan_that_takes_longer_than_a_lease_is_made_once_however_many_schedulers_wait(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They took the shard from each other in the middle of every plan: 24 plans in 25 seconds, none of them used."""
    plans: list[str] = []
    plan_of = planning.plan_of

    def slow(tx: Transaction, task: tasks.Task) -> Any:
        plans.append(task.seller_id)
        product.store.transact(make_due)  # guarded work, which refuses an older ticket from then on
        time.sleep(1.6)
        return plan_of(tx, task)

    monkeypatch.setattr(planning, "plan_of", slow)
    with opened(store_url, leases__lease_seconds=1) as product:
        schedulers = [Scheduler(product.context, product.listings, f"worker-{number}") for number in range(2)]
        feed(product, "7")
        product.make(car(seller_in_shard(shard_of("7"))))
        ended = threading.Event()
        threads = [threading.Thread(target=keep_stepping, args=(each, ended)) for each in schedulers]
        for thread in threads:
            thread.start()
        ends_at = time.monotonic() + 20
        while stage(product, "7") != "done" and time.monotonic() < ends_at:
            time.sleep(0.05)
        ended.set()
        for thread in threads:
            thread.join()
        assert stage(product, "7") == "done"
        assert len(plans) <= 2  # the second where the shard had only just changed hands


def make_due(tx: Transaction) -> None:
    tx.driver("UPDATE offer SET due_at_us = 1")


def keep_stepping(scheduler: Scheduler, ended: threading.Event) -> None:
    while not ended.is_set():
        scheduler.step()
        ended.wait(0.02)
    scheduler.stop()


def test_a_seller_whose_counts_cannot_be_compared_does_not_stop_the_round(
    product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On SQLite a thousand sales at the highest price are a sum that it refuses."""
    bad = seller_in_shard(3)
    good = next(name for name in (f"zz{number}" for number in range(1_000)) if shard_of(name) == 3)
    product.make(car(bad), car(good))
    product.store.transact(lambda tx: tx.driver("DELETE FROM user_total_counters"))
    drift = repairing.drift
    monkeypatch.setattr(repairing, "drift", lambda tx, seller: fail() if seller == bad else drift(tx, seller))
    scrubber = walking.Scrubber(product.store, product.listings)
    while scrubber.step(3, unguarded):
        pass
    assert (product.counters(bad), product.counters(good)) == ({}, {"Active": 1})


def test_a_step_of_the_scheduler_holds_so_many_bytes_of_offers_at_most(
    product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[int] = []
    load_offers = saving.load_offers

    def counted(tx: Transaction, keys: Any) -> Any:
        loaded.append(len(keys))
        return load_offers(tx, keys)

    lines = [
        msgspec.json.encode({"external_id": f"e{at}", "category": "cars", "content": {**CAR, "description": "x" * 900}})
        for at in range(10)
    ]
    staging.take_lines(product.store, product.listings, "7", 1, 0, lines)
    product.do(tasks.end_task, "7", 1, len(lines))

    def run(task_id: int) -> None:
        while applying.step(product.store, product.listings, shard_of("7"), unguarded):
            assert product.clock is not None
            product.clock.advance(1)
            if stage(product, "7", task_id) == "held":
                product.do(tasks.approve, "7", task_id, "test")

    run(1)
    monkeypatch.setattr(saving, "STEP_BYTES_MAX", 4_000)
    monkeypatch.setattr(saving, "load_offers", counted)
    changed_presets(product, photos=Preset(number=9, has_photos=False))
    build_all(product)
    assert states(product) == {presets.READY}
    assert product.listed("7")[9] == product.counts("7")[9] == 10
    product.pass_days(product.listings.settings.expire_days + 1)
    while walking.age(product.store, product.listings, shard_of("7"), unguarded):
        pass
    assert product.counters("7") == {"Expired": 10}
    product.do(tasks.end_task, "7", 2, 0)
    run(2)
    assert product.counters("7") == {}
    assert 0 < max(loaded) <= 4


@pytest.mark.spec("LST-12", "CORE-16")
def test_a_step_of_a_feed_counts_the_offers_that_its_items_meet(product: Product, loads: list[int]) -> None:
    """Five hundred items that are not valid have no bytes, and meet offers of 100 KB."""
    large = {"category": "cars", "content": {**CAR, "description": "x" * 900}}
    invalid = {"category": "none", "content": {}}
    for task_id, item in ((1, large), (2, invalid)):
        loads.clear()
        sent = [msgspec.json.encode({"external_id": f"e{at}", **item}) for at in range(10)]
        staging.take_lines(product.store, product.listings, "7", task_id, 0, sent)
        product.do(tasks.end_task, "7", task_id, len(sent))
        while applying.step(product.store, product.listings, shard_of("7"), unguarded):
            pass
        assert stage(product, "7", task_id) == "done"
    assert product.counters("7") == {"Active": 10}
    assert sum(loads) == 10
    assert max(loads) <= 4


def test_how_long_the_oldest_offer_is_due_is_that_of_all_shards(product: Product) -> None:
    product.make(car("7"), car("8"))
    product.pass_days(product.listings.settings.expire_days + 1)
    assert product.store.read(walking.overdue_seconds) == 86_400
    for shard in range(SHARDS):
        walking.age(product.store, product.listings, shard, unguarded)
    assert product.store.read(walking.overdue_seconds) == 0


# Small things --------------------------------------------------------------------------------------------------------


def test_two_sellers_are_never_one_number() -> None:
    assert business_of("7") == 7
    assert business_of("007") not in (7, business_of("07"))
    assert business_of("0") == 0


def test_a_backslash_before_what_looks_like_half_a_character_is_no_half_character(product: Product) -> None:
    def read(description: bytes) -> Read:
        given = b'{"external_id":"A","category":"cars","content":%b,"description":"%b"}}'
        return read_line(product.listings, "7", given % (msgspec.json.encode(CAR)[:-1], description))

    assert not read(rb"C:\\ud83d").reason
    assert "half of a surrogate pair" in read(rb"\ud83d").reason


@pytest.mark.spec("LST-12")
def test_a_line_that_is_no_text_refuses_nothing_but_itself(product: Product) -> None:
    lines = [b'{"external_id": "a\xff"}', b"\xff\xfe", msgspec.json.encode({"category": "cars", "content": CAR})]
    taken = staging.take_lines(product.store, product.listings, "7", 1, 0, lines)
    assert taken.position == 3
    assert product.rows("SELECT count(*) FROM feed_problems") == [(2,)]
    assert product.rows("SELECT count(*) FROM feed_items WHERE body <> ''") == [(1,)]


@pytest.mark.spec("LST-12")
def test_feeds_that_are_begun_and_never_ended_are_bounded(product: Product) -> None:
    line = msgspec.json.encode({"external_id": "1", "category": "cars", "content": CAR})
    for task in range(1, 11):
        staging.take_lines(product.store, product.listings, "7", task, 0, [line])
    with pytest.raises(Conflict, match="10 feeds"):
        staging.take_lines(product.store, product.listings, "7", 11, 0, [line])
    product.do(tasks.end_task, "7", 10, 1)
    staging.take_lines(product.store, product.listings, "7", 11, 0, [line])


@pytest.mark.spec("LST-07")
def test_a_walk_waits_by_its_own_clock_whatever_the_store_says(
    product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(walking, "time", SimpleNamespace(monotonic=lambda: now))
    patience = walking.Patience(10)
    row = product.store.read(presets.stored)[0]
    assert not patience.is_over(row)
    product.pass_days(300)  # the store's clock jumps
    assert not patience.is_over(row)
    now = 11.0
    assert patience.is_over(row)


@pytest.mark.spec("LST-17")
def test_a_newer_schema_alone_is_no_change(product: Product) -> None:
    (saved,) = product.make(car(schema_version=1))
    assert product.change(saved.offer.offer_id, schema_version=2).version == 1


@pytest.mark.spec("LST-10")
def test_the_money_of_millions_of_sales_fits(product: Product) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"amount": 10**12 + 1, "currency": "EUR"}, Price)
    assert 9_000_000 * 10**12 < 2**63
