"""Workers that meet on one busy profile, with events that both were sent; and requests whose COMMITs get lost."""

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from keyfold.core import metrics
from keyfold.core.errors import Unavailable
from keyfold.core.store import Transaction
from keyfold.profiles.model import event_of
from keyfold.profiles.service.counting import count_events
from tests.faults.profile_ledger import LOG, Book, Fields
from tests.profiles import NOW, OFFER, Profiles, event

EXACT = 602
NAME = "busy profile"  # of the transactions
WORKERS = 2
BATCH = 4
HOT_SHARE = 0.9
OWNERS = (None, None, "a.example", "b.example")
WAIT_SECONDS_MAX = 30


class Busy(NamedTuple):
    """What became of a busy profile: the laws broken, and the events that were for it."""

    broken: list[str]
    events: int


def busy_profile(profiles: Profiles, *, batches: int = 25) -> Busy:
    """Two workers of which nine in ten events go to one profile; every second event was sent to both."""
    scripts = [_script(number, batches) for number in range(WORKERS)]

    def work(script: Sequence[Sequence[dict[str, Any]]]) -> None:
        for batch in script:
            count(profiles, batch)

    with ThreadPoolExecutor(WORKERS) as pool:
        for each in [pool.submit(work, script) for script in scripts]:
            each.result()
    sent = [fields for script in scripts for batch in script for fields in batch]
    return Busy(broken_in(profiles, sent), sum(fields["profile_id"] == "busy" for fields in sent))


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


def insisting(profiles: Profiles, is_enough: Callable[[], bool], *, first: int = 0) -> list[dict[str, Any]]:
    """Ask for batches, each until it is answered, with the same ids: the events that were acknowledged."""
    sent: list[dict[str, Any]] = []
    while not is_enough():
        batch = [make_event(first + len(sent) + at, f"p{at}") for at in range(BATCH)]
        while not (statuses := _answered(profiles, batch)):
            pass
        assert statuses <= {"counted", "duplicate"}, statuses
        sent += batch
    return sent


def _answered(profiles: Profiles, batch: Sequence[dict[str, Any]]) -> set[str]:
    try:
        return set(count(profiles, batch))
    except Unavailable:
        return set()


def interrupted(name: str = NAME) -> int:
    """The transactions of a name that lost the server under their feet and were tried again."""
    samples = [sample for metric in metrics.RETRIES.collect() for sample in metric.samples]
    return sum(
        int(sample.value)
        for sample in samples
        if sample.name.endswith("_total")
        and sample.labels["name"] == name
        and sample.labels["reason"] in ("store-unreachable", "commit-unknown")
    )


def make_event(number: int, profile: str) -> dict[str, Any]:
    """The same for the same number, whoever makes it."""
    chance = random.Random(number)
    updates = [
        [chance.choice((OFFER, EXACT)), chance.randrange(5), chance.randint(1, 9), chance.choice(OWNERS)]
        for _ in range(2)
    ]
    return event(f"e{number}", profile, *updates, time=NOW)


def _script(worker: int, batches: int) -> list[list[dict[str, Any]]]:
    """Even numbers are shared by all workers, odd ones are of one."""
    numbers = [number if number % 2 == 0 else number + 10_001 * worker * 2 for number in range(batches * BATCH)]
    made = [
        make_event(number, "busy" if random.Random(-number).random() < HOT_SHARE else f"cold{number % 7}")
        for number in numbers
    ]
    return [made[at : at + BATCH] for at in range(0, len(made), BATCH)]
