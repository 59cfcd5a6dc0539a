"""Writers of one seller's offers at once: opinions that both were sent, and everybody's work beside each other."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec

from keyfold.core.clock import ManualClock
from keyfold.core.errors import KeyfoldError, NotFound
from keyfold.core.store import Transaction
from keyfold.listings.model import SHARDS, Price
from keyfold.listings.service import keeping, offers, presets, repairing, saving, walking
from keyfold.listings.service.keeping import Opinion
from keyfold.listings.service.offers import Move
from keyfold.listings.service.saving import Change
from tests.faults.listing_ledger import Book
from tests.faults.listing_simulator import PRESETS, anyone
from tests.faults.part_writers import Writing, at_once
from tests.listings import Product, car, opened

NAME = "busy offer"  # of the transactions
SELLER = "7"
KEYS = ("busy", *(f"cold{number}" for number in range(7)), *(f"p{number}" for number in range(4)))
NOW_US = 1_800_000_000_000_000
CHANGERS = 3
CHANGES = 12  # of each, in a round


@contextmanager
def writing_at(url: str) -> Iterator[Writing[Opinion]]:
    """Opinions of offers of one seller, each of which says its number; whoever applies one also sets a price."""
    with opened(url, clock=ManualClock(NOW_US), store__connections_max=24) as product:
        made = _insist(lambda: product.make(*[car(SELLER) for _ in KEYS]))
        ids = {key: saved.offer.offer_id for key, saved in zip(KEYS, made, strict=True)}
        yield Writing(
            "listings", NAME, "counted", partial(_opinion, ids), partial(_count, product), partial(_broken_in, product)
        )


def _opinion(ids: dict[str, str], number: int, key: str) -> Opinion:
    return Opinion(offer_id=ids[key], version=number + 1, is_banned=random.Random(number).random() < 0.5)


def _count(product: Product, batch: Sequence[Opinion]) -> list[str]:
    def work(tx: Transaction) -> list[str]:
        judged = keeping.judge(tx, product.listings, batch)
        found = saving.load_by_id(tx, [each.offer_id for each in batch])
        priced = [
            Change(saved, msgspec.structs.replace(saved.offer, price=Price(saved.version, "EUR")))
            for saved in found.values()
        ]
        saving.save(tx, product.listings, priced)
        return ["counted" if each.result == "applied" else "duplicate" for each in judged]

    return product.store.transact(work, name=NAME, once=True)


def _broken_in(product: Product, sent: Sequence[Opinion]) -> list[str]:
    """The laws broken, where the newest of these opinions must hold."""
    book = Book()
    found = product.store.snapshot(book.look)
    newest: dict[str, Opinion] = {}
    for each in sent:
        if each.offer_id not in newest or newest[each.offer_id].version < each.version:
            newest[each.offer_id] = each
    broken = book.compare(found)
    for offer_id, opinion in newest.items():
        row = found.rows.get((offer_id, "moderation"))
        if row is None or (row.body["version"], row.body["is_banned"]) != (opinion.version, opinion.is_banned):
            broken.append(f"X1: the newest opinion of {offer_id} is {opinion}, there is {row}")
    return broken


def _insist(work: Callable[[], Any]) -> Any:
    while True:
        try:
            return work()
        except KeyfoldError:
            continue


# Everybody's work beside each other ----------------------------------------------------------------------------------


def all_at_once(url: str, rounds: int) -> list[str]:
    """Offers of one seller change while another preset is built and spoilt counts are repaired: the laws broken.

    Presets are put in force between two rounds, when nobody is at work: how long a walk must wait is tested elsewhere.
    """
    clock = ManualClock(NOW_US)
    with opened(url, clock=clock, store__connections_max=24) as product:
        made = [each.offer.offer_id for each in product.make(*[car(SELLER) for _ in range(6)])]
        for number in range(rounds):
            chosen = msgspec.structs.replace(product.listings.settings, presets=PRESETS[number % len(PRESETS)])
            product.store.transact(lambda tx, chosen=chosen: presets.adopt(tx, chosen))  # type: ignore[misc]
            clock.advance(1_000)
            _spoil(product, number)
            works = [partial(_change, product, made, CHANGERS * number + each) for each in range(CHANGERS)]
            if number % 2:
                works.append(partial(_repair, product))
            at_once(lambda work: work(), [*works, partial(_build, product)])
            if not number % 2:
                _repair(product)
            broken = _broken_in(product, [])
            states = {row.state for row in product.store.read(presets.stored)}
            if broken or states != {"ready"}:
                return broken or [f"G4: presets are {states}"]
        return []


def _spoil(product: Product, number: int) -> None:
    def work(tx: Transaction) -> None:
        tx.driver(
            "INSERT INTO user_offer_presets_count (seller_id, preset_id, seq_no, offers) VALUES (%s, 2, 0, %s)"
            " ON CONFLICT (seller_id, preset_id, seq_no) DO UPDATE"
            " SET offers = user_offer_presets_count.offers + excluded.offers",
            (SELLER, 5 + number),
        )

    product.store.transact(work)


def _change(product: Product, made: Sequence[str], number: int) -> None:
    chance = random.Random(number)
    for turn in range(CHANGES):
        offer_id = chance.choice(made)
        version = number * CHANGES + turn + 1
        draw = chance.random()
        if draw < 0.5:
            opinion = Opinion(offer_id=offer_id, version=version, is_banned=chance.random() < 0.5)
            product.do(keeping.judge, [opinion])
        elif draw < 0.7:
            product.change(offer_id, photos=() if chance.random() < 0.5 else ("https://photos.example.com/1.jpg",))
        elif draw < 0.75:
            product.do(offers.move, [Move(offer_id=offer_id, status="sold", may_see=anyone)])
        else:
            product.make(car(SELLER))


def _repair(product: Product) -> None:
    threading.Event().wait(0.02)  # when the others are at it
    try:
        product.store.transact(lambda tx: repairing.repair(tx, SELLER, "test"))
    except NotFound:
        return


def _build(product: Product) -> None:
    for _ in range(2):
        for shard in range(SHARDS):
            while walking.build(product.store, product.listings, shard, lambda _: None):
                pass
