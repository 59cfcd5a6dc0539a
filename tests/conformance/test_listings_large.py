"""A seller of very many offers, whose feeds are applied and whose counts are repaired under load from others.

`make faults` does it with a million offers.
"""

import threading
from collections.abc import Callable

import pytest

from keyfold.core.store import Transaction
from keyfold.listings.model import shard_of
from keyfold.listings.service import cabinet, repairing, walking
from keyfold.listings.service.feeds import tasks
from tests.conformance.test_listings import ban, must_be_right
from tests.conformance.test_listings_feeds import SELLER, Feeds, item
from tests.faults.effort import TIMEOUT_SECONDS, effort
from tests.listings import car, opened

OFFERS = effort(1_200, 1_000_000)
KEPT = range(0, OFFERS, 3)
LINES = 500
WRITERS = 3
SELLERS_OF_WRITER = 4

pytestmark = pytest.mark.timeout(TIMEOUT_SECONDS)


class Others:
    """Sellers who go on publishing, banning and selling, and somebody who leafs through the large seller's offers."""

    def __init__(self, product: Feeds) -> None:
        self._product = product
        self._stopping = threading.Event()
        self._cursor, self._seen = "", set[str]()  # of the walk
        self.failures: list[BaseException] = []
        self.done = [0] * (WRITERS + 1)
        works = [self._write] * WRITERS + [self._leaf]
        self._threads = [threading.Thread(target=self._run, args=(work, at)) for at, work in enumerate(works)]

    def __enter__(self) -> "Others":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def must_go_on(self) -> None:
        """None of them failed, and each has done something since it was asked last, or does it now."""
        for _ in range(300):
            if self.failures or all(self.done):
                break
            self._stopping.wait(0.1)
        if self.failures:
            raise self.failures[0]
        assert all(self.done), self.done
        self.done = [0] * len(self.done)

    def _run(self, work: Callable[[int], None], number: int) -> None:
        try:
            while not self._stopping.is_set():
                work(number)
                self.done[number] += 1
        except BaseException as error:
            self.failures.append(error)

    def _write(self, number: int) -> None:
        for seller in sellers_of(number):
            sold, banned = self._product.make(car(seller), car(seller))
            self._product.change(sold.offer.offer_id, status="sold")
            ban(self._product, banned.offer.offer_id, 1)

    def _leaf(self, _: int) -> None:
        """Whatever changes meanwhile, a walk goes on behind the page before and meets no offer twice."""
        page = self._page(self._cursor)
        ids = {each.offer_id for each in page.offers}
        assert len(ids) == len(page.offers)
        assert not ids & self._seen
        self._cursor = page.cursor
        self._seen |= ids
        if not page.cursor:
            self._seen = set()

    def _page(self, cursor: str) -> cabinet.PageOf:
        return self._product.store.read(lambda tx: cabinet.page(tx, SELLER, "all", cursor, 100))


def sellers_of(number: int) -> list[str]:
    """Of the same shard as the large seller, so that they meet wherever they can."""
    same = [str(each) for each in range(100, 2_000) if shard_of(str(each)) == shard_of(SELLER)]
    return same[number * SELLERS_OF_WRITER : (number + 1) * SELLERS_OF_WRITER]


def send(product: Feeds, task_id: int, numbers: range, others: Others) -> None:
    for start in range(0, len(numbers), LINES):
        product.send(task_id, *[item(f"sku-{number}") for number in numbers[start : start + LINES]], position=start)
    product.end(task_id, len(numbers))
    others.must_go_on()


def apply(product: Feeds, others: Others) -> None:
    while product.step():
        others.must_go_on()


@pytest.mark.spec("LST-08", "LST-09", "LST-12")
def test_a_very_large_seller_and_the_others_do_not_stop_each_other(store_url: str) -> None:
    with opened(store_url, store__connections_max=24) as opened_product:
        product = Feeds(opened_product.context, None)
        with Others(product) as others:
            send(product, 1, range(OFFERS), others)
            apply(product, others)
            assert product.shown(1).done.created == OFFERS
            assert product.counters(SELLER) == {"Active": OFFERS}

            send(product, 2, KEPT, others)
            apply(product, others)
            assert product.shown(2).stage == "held"  # most of them would go
            product.do(tasks.approve, SELLER, 2, "somebody")
            apply(product, others)
            assert product.shown(2).done.removed == OFFERS - len(KEPT)

            for _ in range(3):
                product.store.transact(plant)
                scrub(product)
                others.must_go_on()
        assert product.live() == {f"sku-{number}" for number in KEPT}
        assert product.counters(SELLER) == {"Active": len(KEPT)}
        must_be_right(product, SELLER, *[seller for number in range(WRITERS) for seller in sellers_of(number)])


def plant(tx: Transaction) -> None:
    """Drift in one count of the large seller."""
    chosen = f"seller_id = '{SELLER}' AND preset_id = 2"
    tx.driver(
        f"UPDATE user_offer_presets_count SET offers = offers + 5 WHERE {chosen}"
        f" AND seq_no = (SELECT min(seq_no) FROM user_offer_presets_count WHERE {chosen})"
    )


def scrub(product: Feeds) -> None:
    """A whole round of the scrubber over the shard."""
    product.store.transact(lambda tx: tx.driver(f"DELETE FROM listing_walks WHERE walk = '{walking.SCRUB}'"))
    scrubber = walking.Scrubber(product.store, product.listings)
    while scrubber.step(shard_of(SELLER), lambda _: None):
        pass
    assert product.store.read(lambda tx: repairing.drift(tx, SELLER)) == []
