"""Workers that meet on the same orders and on the last place; requests whose COMMITs get lost; history as Parquet."""

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

from keyfold.core.errors import Unavailable
from keyfold.orders.model import CompletedOrder, Identity
from keyfold.orders.service.checking import Check, Checked, check_orders
from keyfold.orders.service.correcting import correct_orders
from keyfold.orders.service.counting import count_orders
from tests.faults.order_ledger import Book
from tests.orders import DAY, HOUR, NOW, START, Orders, iso, order, write_history

NAME = "busy identity"  # of the transactions
WORKERS = 2
BATCH = 4
HOT_SHARE = 0.9
TYPES = ("phone_id", "card_id")
OPTIONS = {"identities": TYPES, "dimensions": ("tariff",), "dedupe_days": 10, "keep_days": 3650}
WITH_HISTORY = {"identities": ("phone_id",), "dimensions": ("tariff",), "start": iso(START)}
ROUNDS = 12

T = TypeVar("T")
R = TypeVar("R")


class Busy(NamedTuple):
    """What became of a busy identity: the laws broken, and the orders that were of it."""

    broken: list[str]
    orders: int


def busy_identity(orders: Orders, *, batches: int = 25) -> Busy:
    """Two workers of which nine in ten orders are of one phone; every second order was sent to both."""
    scripts = [_script(number, batches) for number in range(WORKERS)]

    def work(script: Sequence[Sequence[CompletedOrder]]) -> None:
        for batch in script:
            count(orders, batch)

    _at_once(work, scripts)
    sent = [each for script in scripts for batch in script for each in batch]
    return Busy(broken_in(orders, sent), sum(each.identities["phone_id"] == "busy" for each in sent))


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
        check = Check(
            [Identity("phone_id", f"p{number}")], fewer_than=1, order_id=f"o{number}/{worker}", reserve_seconds=HOUR
        )
        together.wait()
        (answer,) = orders.store.transact(lambda tx: check_orders(tx, orders.unit, [check]), name="check")
        assert isinstance(answer, Checked)
        return answer.allowed

    broken = []
    for number in range(rounds):
        together = threading.Barrier(WORKERS)
        got = _at_once(ask, [(number, worker, together) for worker in range(WORKERS)])
        if got.count(True) != 1:
            broken.append(f"O1: {got.count(True)} of {WORKERS} got the only place of p{number}")
    return broken


def taken_back_by_two(orders: Orders, *, rounds: int = ROUNDS) -> list[str]:
    """Two who take back the same orders at once: the laws broken."""
    sent = [make_order(number, "busy") for number in range(rounds)]
    count(orders, sent)

    def correct(_: int) -> list[str]:
        said = []
        for each in sent:
            found = orders.store.transact(
                lambda tx, each=each: correct_orders(tx, orders.unit, [each.order_id], "refund", "x"), name="correct"
            )
            said += [one.order_id for one in found if one.status == "corrected"]
        return said

    said = [order_id for each in _at_once(correct, range(WORKERS)) for order_id in each]
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


def insisting(orders: Orders, is_enough: Callable[[], bool], *, first: int = 0) -> list[CompletedOrder]:
    """Ask for batches, each until it is answered, with the same ids: the orders that were acknowledged."""
    sent: list[CompletedOrder] = []
    while not is_enough():
        batch = [make_order(first + len(sent) + at, f"p{at}") for at in range(BATCH)]
        while not (statuses := _answered(orders, batch)):
            pass
        assert statuses <= {"accepted", "duplicate"}, statuses
        sent += batch
    return sent


def _answered(orders: Orders, batch: Sequence[CompletedOrder]) -> set[str]:
    try:
        return set(count(orders, batch))
    except Unavailable:
        return set()


def make_order(number: int, phone: str) -> CompletedOrder:
    """The same for the same number, whoever makes it."""
    chance = random.Random(number)
    identities = {"phone_id": phone, "card_id": f"c{chance.randrange(3)}"}
    return order(f"o{number}", NOW - chance.randrange(DAY), identities, tariff=chance.choice("xyz"))


def _script(worker: int, batches: int) -> list[list[CompletedOrder]]:
    """Even numbers are shared by all workers, odd ones are of one."""
    numbers = [number if number % 2 == 0 else number + 10_001 * worker * 2 for number in range(batches * BATCH)]
    made = [
        make_order(number, "busy" if random.Random(-number).random() < HOT_SHARE else f"cold{number % 7}")
        for number in numbers
    ]
    return [made[at : at + BATCH] for at in range(0, len(made), BATCH)]


def _at_once(work: Callable[[T], R], given: Sequence[T]) -> list[R]:
    with ThreadPoolExecutor(len(given)) as pool:
        return list(pool.map(work, given))
