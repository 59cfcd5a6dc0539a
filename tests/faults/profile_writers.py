"""Workers that meet on one busy profile, with events that both were sent; and requests whose COMMITs get lost."""

import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

from keyfold.core.store import Transaction
from keyfold.profiles.model import event_of
from keyfold.profiles.service.counting import count_events
from tests.faults.part_writers import Writing
from tests.faults.profile_ledger import LOG, Book, Fields
from tests.profiles import NOW, OFFER, Profiles, event, opened

EXACT = 602
NAME = "busy profile"  # of the transactions
OWNERS = (None, None, "a.example", "b.example")
WAIT_SECONDS_MAX = 30


@contextmanager
def writing_at(url: str) -> Iterator[Writing[dict[str, Any]]]:
    with opened(url, kernel="numpy") as profiles:
        yield writing_of(profiles)


def writing_of(profiles: Profiles) -> Writing[dict[str, Any]]:
    return Writing("profiles", NAME, "counted", make_event, partial(count, profiles), partial(broken_in, profiles))


def broken_in(profiles: Profiles, sent: Sequence[Fields]) -> list[str]:
    """The laws broken where each of these events, all of one time, must count once, however they were gathered."""
    book = Book(profiles.product)
    for fields in sent:
        if fields["event_id"] not in book.counted:
            book.commit(profiles.clock.now_us(), [(fields, "counted")])
    return book.compare(profiles.context.store.snapshot(book.look), batches_known=False)


def count(profiles: Profiles, batch: Sequence[dict[str, Any]]) -> list[str]:
    events = [(LOG, event_of(fields)) for fields in batch]
    verdicts = profiles.context.store.transact(
        lambda tx: count_events(tx, profiles.product, events, marked=True), name=NAME
    )
    return [verdict.status for verdict in verdicts]


def others_go_on(profiles: Profiles) -> list[str]:
    """While somebody is long at work on one profile, another is counted: the laws broken at the end."""
    # The very first update of a counter also stores its kind, for which others do wait.
    first = event("first", "busy", [OFFER, 1], [EXACT, 1], time=NOW)
    others = [make_event(number, f"other{number}") for number in range(1, 10)]
    count(profiles, [first])
    has_it, may_commit = threading.Event(), threading.Event()
    second = make_event(100, "busy")

    def take_long(tx: Transaction) -> None:
        count_events(tx, profiles.product, [(LOG, event_of(second))], marked=True)
        has_it.set()
        may_commit.wait(WAIT_SECONDS_MAX)

    with ThreadPoolExecutor(2) as pool:
        writing = pool.submit(profiles.context.store.transact, take_long, name=NAME)
        try:
            assert has_it.wait(WAIT_SECONDS_MAX)
            for each in others:
                pool.submit(count, profiles, [each]).result(WAIT_SECONDS_MAX)
            assert not writing.done()
        finally:
            may_commit.set()
        writing.result()
    return broken_in(profiles, [first, second, *others])


def make_event(number: int, profile: str) -> dict[str, Any]:
    """The same for the same number, whoever makes it."""
    chance = random.Random(number)
    updates = [
        [chance.choice((OFFER, EXACT)), chance.randrange(5), chance.randint(1, 9), chance.choice(OWNERS)]
        for _ in range(2)
    ]
    return event(f"e{number}", profile, *updates, time=NOW)
