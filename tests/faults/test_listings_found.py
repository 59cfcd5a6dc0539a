"""Bugs of listings that the fault tests have found."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from keyfold.core.clock import ManualClock
from keyfold.core.store import Transaction
from keyfold.listings.model import SHARDS, Preset, shard_of
from keyfold.listings.service import drafting, presets, saving, walking
from keyfold.listings.service.drafting import DraftShown, Filled, Opening
from keyfold.listings.service.feeds import applying, staging, tasks
from keyfold.listings.service.presets import PresetRow
from keyfold.listings.service.saving import Change
from tests.listings import CAR, Product, car, opened

NOW_US = 1_800_000_000_000_000
TRANSACTION_SECONDS_MAX = 10
OPTIONS: dict[str, Any] = {"limits__transaction_seconds_max": TRANSACTION_SECONDS_MAX}
NEW = {"new": Preset(number=9, statuses=frozenset({"active"}))}
WAIT_SECONDS = 5.0


def free(_: Transaction) -> None:
    """A guard of nobody."""


@pytest.fixture
def product(postgres_url: str) -> Iterator[Product]:
    with opened(postgres_url, clock=ManualClock(NOW_US), **OPTIONS) as each:
        yield each


class Meeting:
    """Two transactions that both have done their work before either commits, if neither waits for the other."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2)

    def __call__(self, work: Callable[[Transaction], Any]) -> Callable[[Transaction], Any]:
        def met(tx: Transaction) -> Any:
            done = work(tx)
            with contextlib.suppress(threading.BrokenBarrierError):  # one waits for the other, or comes again
                self._barrier.wait(1.0)
            return done

        return met


def at_once(*work: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(work)) as pool:
        return [each.result() for each in [pool.submit(one) for one in work]]


@pytest.mark.spec("LST-07")
def test_a_preset_is_ready_when_the_last_two_shards_come_to_their_ends_at_once(postgres_url: str) -> None:
    """Neither saw the other's end, and nobody looked again: it was being built for ever."""
    clock = ManualClock(NOW_US)
    with opened(postgres_url, clock=clock, **OPTIONS) as product:
        product.make(car())
    with opened(postgres_url, clock=clock, **OPTIONS, listings__presets=msgspec.to_builtins(NEW)) as product:
        product.pass_days(1)
        (row,) = [each for each in product.store.read(presets.stored) if each.number == 9]
        for shard in range(SHARDS - 2):
            while walking.build(product.store, product.listings, shard, free):
                pass
        for shard in (SHARDS - 2, SHARDS - 1):  # all but its last step
            while product.store.read(partial(_is_there_more, row, shard)):
                walking.build(product.store, product.listings, shard, free)
        meet = Meeting()
        at_once(
            *[
                lambda shard=shard: product.store.transact(  # type: ignore[misc]
                    meet(lambda tx: walking._build(tx, row, shard, free))
                )
                for shard in (SHARDS - 2, SHARDS - 1)
            ]
        )
        for shard in range(SHARDS):
            walking.build(product.store, product.listings, shard, free)
        assert {each.name: each.state for each in product.store.read(presets.stored)} == {"new": "ready"}
        assert product.counts("7") == product.listed("7") == {9: 1}
        assert product.rows("SELECT count(*) FROM listing_walks WHERE walk <> 'scrub'") == [(0,)]


@pytest.mark.spec("LST-07")
@pytest.mark.parametrize("is_first", [True, False], ids=["of a new store", "with other presets"])
def test_two_processes_that_start_at_once_both_come_up(postgres_url: str, is_first: bool) -> None:
    """The second one failed at its start, because a preset was there that it was about to store."""
    with opened(postgres_url, clock=ManualClock(NOW_US)) as product:
        if is_first:
            product.store.transact(lambda tx: tx.driver("DELETE FROM offer_presets"))
    with opened(postgres_url, clock=ManualClock(NOW_US)) as product:
        settings = msgspec.structs.replace(product.listings.settings, presets=NEW)
        if is_first:
            product.store.transact(lambda tx: tx.driver("DELETE FROM offer_presets"))
        meet = Meeting()
        adopt = meet(lambda tx: presets.adopt(tx, settings))
        changed = at_once(*[lambda: product.store.transact(adopt, name="listings presets")] * 2)
        assert sum(bool(each) for each in changed) == 1
        assert product.store.read(lambda tx: presets.is_adopted(tx, settings))


def _is_there_more(row: PresetRow, shard_id: int, tx: Transaction) -> bool:
    listed, _ = walking._next_offers(tx, shard_id, walking._place(tx, row.walk, shard_id))
    return bool(listed)


def _while_at_work(
    product: Product, monkeypatch: pytest.MonkeyPatch, name: str, work: Callable[[], Any], meanwhile: Callable[[], Any]
) -> Any:
    """Do something else, in another transaction, when the first has come to where it calls `drafting.name`."""
    original = getattr(drafting, name)
    has_come = False

    def call(*given: Any) -> Any:
        nonlocal has_come
        if not has_come:
            has_come = True
            with ThreadPoolExecutor(1) as pool:
                pool.submit(meanwhile).result(WAIT_SECONDS)
        return original(*given)

    monkeypatch.setattr(drafting, name, call)
    done = work()
    assert has_come
    return done


def _filled() -> Filled:
    return Filled(category="cars", content=dict(CAR))


@pytest.mark.spec("LST-02")
def test_what_is_filled_in_while_a_draft_changes_hands_is_not_lost(
    product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was answered as stored, and the draft went to who had logged in as it had been before."""
    draft: DraftShown = product.do(drafting.open_drafts, Opening(anonymous_id="visitor", category="cars"))
    taken = _while_at_work(
        product,
        monkeypatch,
        "_hold",
        lambda: product.do(drafting.open_drafts, Opening(anonymous_id="visitor", seller_id="7")),
        lambda: product.do(drafting.fill, "visitor", draft.draft_id, draft.version, _filled()),
    )
    assert (taken.owner_id, taken.filled) == ("7", _filled())


@pytest.mark.spec("LST-02")
def test_a_draft_that_is_filled_in_while_old_ones_are_forgotten_stays(
    product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner was told that it is stored."""
    draft: DraftShown = product.do(drafting.open_drafts, Opening(seller_id="7", category="cars"))
    product.pass_days(100)
    _while_at_work(
        product,
        monkeypatch,
        "relation",
        lambda: walking.forget(product.store, product.listings, 100),
        lambda: product.do(drafting.fill, "7", draft.draft_id, draft.version, _filled()),
    )
    assert product.store.read(lambda tx: drafting.read_draft(tx, "7", draft.draft_id)).filled == _filled()
    assert product.rows("SELECT owner_id FROM current_draft") == [("7",)]


@pytest.mark.spec("LST-07")
def test_a_walk_waits_for_whoever_has_read_the_presets_before_they_were_committed(postgres_url: str) -> None:
    """Putting them in force may take as long as any transaction, and whoever began just before that as long again."""
    clock = ManualClock(NOW_US)
    with opened(postgres_url, clock=clock, **OPTIONS) as product:
        product.make(car())
        settings = msgspec.structs.replace(product.listings.settings, presets=NEW)
        may_commit, has_read = threading.Event(), threading.Event()

        def adopt_slowly(tx: Transaction) -> None:
            presets.adopt(tx, settings)
            clock.advance(TRANSACTION_SECONDS_MAX - 1)
            has_read.wait(WAIT_SECONDS)

        def make_slowly(tx: Transaction) -> None:
            saving.save(tx, product.listings, [Change(None, car("8"))])
            has_read.set()
            may_commit.wait(WAIT_SECONDS)

        with ThreadPoolExecutor(1) as pool:
            making = pool.submit(product.store.transact, make_slowly)
            product.store.transact(adopt_slowly)
            clock.advance(TRANSACTION_SECONDS_MAX - 1)
            for shard in range(SHARDS):
                while walking.build(product.store, product.listings, shard, free):
                    pass
            may_commit.set()
            making.result()
        clock.advance(TRANSACTION_SECONDS_MAX)
        for shard in range(SHARDS):
            while walking.build(product.store, product.listings, shard, free):
                pass
        assert product.listed("8") == product.listed("7") == {9: 1}


@pytest.mark.spec("LST-13")
def test_a_feed_is_not_held_for_offers_that_were_sold_and_banned(tmp_path: Path) -> None:
    """They are shown as banned, so the plan counted them among those that it would remove, which it never does."""
    with opened(f"sqlite:///{tmp_path / 'keyfold.db'}", clock=ManualClock(NOW_US)) as product:
        _feed(product, 1, "a", "b", "c")
        for offer_id, external_id in product.rows("SELECT offer_id, external_id FROM feed WHERE external_id <> 'a'"):
            product.change(offer_id, status="sold", was_sold=True, is_banned=external_id == "b")
        _feed(product, 2, "a")
        stage, counts = product.rows("SELECT stage, counts FROM feed_tasks WHERE task_id = 2")[0]
        assert stage == "done"
        assert (plan := msgspec.json.decode(counts)["plan"])["live"] == 1
        assert plan["delete"] == 0


@pytest.mark.spec("LST-12", "LST-14")
def test_a_photo_that_stands_twice_in_an_item_of_a_feed_is_one_photo(tmp_path: Path) -> None:
    """As it is in an offer made by hand: the next edit would have been a change."""
    with opened(f"sqlite:///{tmp_path / 'keyfold.db'}", clock=ManualClock(NOW_US)) as product:
        _feed(product, 1, "a", photos=["https://photos.example.com/1.jpg"] * 2)
        (body,) = product.rows("SELECT body FROM offer WHERE kind = 'offer'")[0]
        assert msgspec.json.decode(body)["photos"] == ["https://photos.example.com/1.jpg"]


@pytest.mark.spec("LST-07")
def test_a_preset_that_changes_while_it_is_built_leaves_no_walk_behind(tmp_path: Path) -> None:
    with opened(f"sqlite:///{tmp_path / 'keyfold.db'}", clock=ManualClock(NOW_US), **OPTIONS) as product:
        product.make(car())
        for statuses in ({"expired"}, {"sold"}):
            preset = Preset(number=2, statuses=frozenset(statuses))  # type: ignore[arg-type]
            chosen = msgspec.structs.replace(product.listings.settings, presets={"new": preset})
            product.store.transact(lambda tx, chosen=chosen: presets.adopt(tx, chosen))  # type: ignore[misc]
            product.pass_days(1)
            walking.build(product.store, product.listings, 0, free)
        for shard in range(SHARDS):
            while walking.build(product.store, product.listings, shard, free):
                pass
        assert {row.state for row in product.store.read(presets.stored)} == {"ready"}
        assert product.rows("SELECT walk FROM listing_walks") == []


def _feed(product: Product, task_id: int, *external_ids: str, **more: Any) -> None:
    """A whole feed, sent, ended and applied as far as nobody is asked."""
    items = [{"external_id": each, "category": "cars", "content": dict(CAR), **more} for each in external_ids]
    lines = [msgspec.json.encode(item) for item in items]
    staging.take_lines(product.store, product.listings, "7", task_id, 0, lines)
    product.do(tasks.end_task, "7", task_id, len(lines))
    while applying.step(product.store, product.listings, shard_of("7"), free):
        pass
