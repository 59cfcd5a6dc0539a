"""Workers that meet on the same orders and on the last place; requests whose COMMITs get lost; history as Parquet."""

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from keyfold.orders.model import CompletedOrder, Identity
from keyfold.orders.service.checking import Check, Checked, check_orders
from keyfold.orders.service.correcting import correct_orders
from keyfold.orders.service.counting import count_orders
from tests.faults.order_ledger import Book
from tests.faults.part_writers import WORKERS, Writing, at_once
from tests.orders import DAY, HOUR, NOW, START, Orders, iso, opened, order, write_history

NAME = "busy identity"  # of the transactions
TYPES = ("phone_id", "card_id")
OPTIONS = {"identities": TYPES, "dimensions": ("tariff",), "dedupe_days": 10, "keep_days": 3650}
WITH_HISTORY = {"identities": ("phone_id",), "dimensions": ("tariff",), "start": iso(START)}
ROUNDS = 12


@contextmanager
def writing_at(url: str) -> Iterator[Writing[CompletedOrder]]:
    with opened(url, **OPTIONS) as orders:
        yield writing_of(orders)


def writing_of(orders: Orders) -> Writing[CompletedOrder]:
    return Writing("orders", NAME, "accepted", make_order, partial(count, orders), partial(broken_in, orders))


def broken_in(orders: Orders, sent: Sequence[CompletedOrder], *, taken_back: Sequence[str] = ()) -> list[str]:
    """The laws broken where each of these orders must count once, but for those that were taken back."""
    book = Book(orders.unit, dict.fromkeys(TYPES))
    book.commit_rightly(orders.clock.now_us(), sent)
    book.corrected |= set(taken_back)
    return book.broken_in(orders.store)


def count(orders: Orders, batch: Sequence[CompletedOrder]) -> list[str]:
    verdicts = orders.store.transact(lambda tx: count_orders(tx, orders.unit, batch), name=NAME)
    return [verdict.status for verdict in verdicts]


def last_place(orders: Orders, *, rounds: int = ROUNDS) -> list[str]:
    """Two who ask at once for the only place of an identity: the rounds in which both got it."""

    def ask(wanted: tuple[int, int, threading.Barrier]) -> bool:
        number, worker, together = wanted
        # The only place is of the second identity: it is not enough that those meet who ask for the same first one.
        whose = [Identity("card_id", f"c{number}/{worker}"), Identity("phone_id", f"p{number}")]
        check = Check(whose, fewer_than=1, order_id=f"o{number}/{worker}", reserve_seconds=HOUR)
        together.wait()
        (answer,) = orders.store.transact(lambda tx: check_orders(tx, orders.unit, [check]), name="check")
        assert isinstance(answer, Checked)
        return answer.allowed

    broken = []
    for number in range(rounds):
        together = threading.Barrier(WORKERS)
        got = at_once(ask, [(number, worker, together) for worker in range(WORKERS)])
        if got.count(True) != 1:
            broken.append(f"O1: {got.count(True)} of {WORKERS} got the only place of p{number}")
    return broken


def taken_back_by_two(orders: Orders, *, rounds: int = ROUNDS) -> list[str]:
    """Two who take back the same orders at once: the laws broken."""
    sent = [make_order(number, "busy") for number in range(rounds)]
    count(orders, sent)

    def correct(order_id: str) -> list[str]:
        found = orders.store.transact(
            lambda tx: correct_orders(tx, orders.unit, [order_id], "refund", "x"), name="correct"
        )
        return [one.order_id for one in found if one.status == "corrected"]

    said = [each for one in sent for found in at_once(correct, [one.order_id] * WORKERS) for each in found]
    wrong = [] if sorted(said) == sorted(each.order_id for each in sent) else [f"X2: taken back were {sorted(said)}"]
    return wrong + broken_in(orders, sent, taken_back=[each.order_id for each in sent])


def from_history(orders: Orders, path: Path) -> list[str]:
    """Parquet counted beside live orders, exactly at the start too, then split by a new dimension: the laws broken."""
    moments = (START - DAY, START - 1, START - 1e-6, START, START + 1, START + HOUR)
    made = [
        order(f"o{number}", created, {"phone_id": f"p{number % 2}"}, tariff="xy"[number % 2], city="rs"[number % 3 > 0])
        for number, created in enumerate([*moments, *moments])
    ]
    book = Book(orders.unit, {"phone_id": START * 1_000_000})
    orders.clock.advance(START + 2 * HOUR - NOW)
    for each in made:
        sent = order(each.order_id, each.created_at.timestamp(), each.identities, tariff=each.properties["tariff"])
        book.commit(orders.clock.now_us(), [(sent, *count(orders, [sent]))])
    found = orders.store.transact(
        lambda tx: correct_orders(tx, orders.unit, [made[3].order_id], "refund", "x"), name="correct"
    )
    book.correct(found)
    table = write_history(path / "history.parquet", made)
    orders.backfill(table, "phone_id", cells_max=1)
    book.told("phone_id", made)
    broken = book.broken_in(orders.store)
    book.switch()
    done = orders.add_dimension("city", table, cells_max=1)
    found_now = orders.store.snapshot(book.look)
    book.split(done, made, found_now)
    return broken + book.broken_in(orders.store) + book.compare_slices(found_now, made)


def make_order(number: int, phone: str) -> CompletedOrder:
    """The same for the same number, whoever makes it."""
    chance = random.Random(number)
    identities = {"phone_id": phone, "card_id": f"c{chance.randrange(3)}"}
    return order(f"o{number}", NOW - chance.randrange(DAY), identities, tariff=chance.choice("xyz"))
