"""Many writers at once on one store: of one hot key, of shared keys in crossing orders, of what each has seen."""

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import NamedTuple

from keyfold.core import metrics, outbox
from keyfold.core.context import Context
from keyfold.core.errors import VersionStale
from keyfold.core.store import Store, Transaction, migrate
from keyfold.core.topics.topic import Message
from keyfold.tally import service
from keyfold.tally.model import Addition
from keyfold.tally.part import PART
from keyfold.tally.service import EVENTS
from tests.faults import ledger, scenario
from tests.faults.ledger import Ledger
from tests.faults.scenario import Worker

WRITERS = 4
HOT_SHARE = 0.9
POLL_SECONDS = 0.01


@contextmanager
def opened(url: str) -> Iterator[Context]:
    """A product on an empty store of any kind."""
    store = Store.open(url)
    migrate.upgrade(store)
    store.close()
    context = Context.open(scenario.settings(url), [PART])
    try:
        yield context
    finally:
        context.close()


class Hot(NamedTuple):
    """What became of a hot key: the laws broken, the additions made to it, the changes of it published."""

    broken: list[str]
    additions: int
    published: int


def hot_key(context: Context, *, transactions: int = 30) -> Hot:
    """Writers of batches of which nine in ten additions go to one key, while the changes are relayed."""
    added: Counter[str] = Counter()
    times: Counter[str] = Counter()
    counting = threading.Lock()

    def write(number: int) -> None:
        chance = random.Random(number)
        for _ in range(transactions):
            batch = [
                Addition("hot" if chance.random() < HOT_SHARE else f"cold{chance.randrange(20)}", chance.randint(1, 9))
                for _ in range(5)
            ]
            context.store.transact(lambda tx, batch=batch: service.add(tx, context.topics, batch) and None, name="hot")
            with counting:
                for addition in batch:
                    added[addition.key] += addition.add
                    times[addition.key] += 1

    worker = Worker(context, "w1")
    _all_at_once(write, meanwhile=worker.changes.step)
    worker.run_dry()
    found = Ledger.of(context.store)
    broken = ledger.broken_now(found, added=added) + ledger.broken_at_the_end(found, {})
    published = sum(row.entry.key == "hot" for row in found.messages[ledger.CHANGES])
    return Hot(broken, times["hot"], published)


def crossing(
    context: Context, *, transactions: int = 15, keys: int = 30, until_tried_again: bool = False
) -> tuple[list[str], int]:
    """Writers that come with the same keys in different orders: the laws broken, and how often one had to try again."""
    names = [f"k{number}" for number in range(keys)]
    before = retries("crossing")
    done: list[int] = []

    def write(number: int) -> None:
        chance = random.Random(number)
        for _ in range(transactions):
            batch = [Addition(name, 1) for name in chance.sample(names, len(names))]
            context.store.transact(
                lambda tx, batch=batch: service.add(tx, context.topics, batch) and None, name="crossing"
            )
            done.append(number)
            if until_tried_again and retries("crossing") > before:
                return

    _all_at_once(write)
    sums = dict.fromkeys(names, len(done))
    return ledger.broken_now(Ledger.of(context.store), added=sums), retries("crossing") - before


def replacing(context: Context, *, times: int = 8) -> list[str]:
    """Writers that each read a tally and set it one higher, if it is still what they have seen."""

    def write(_: int) -> None:
        done = 0
        while done < times:
            seen = context.store.read(lambda tx: service.read(tx, ["a"]))["a"]
            try:
                context.store.transact(
                    lambda tx, seen=seen: service.replace(tx, context.topics, "a", seen.value + 1, seen.version),
                    name="replacing",
                )
                done += 1
            except VersionStale:
                continue

    _all_at_once(write)
    return ledger.broken_now(Ledger.of(context.store), added={"a": WRITERS * times})


def late_commit(context: Context) -> list[str]:
    """A transaction takes its ids first and commits last, while others come and are published in between."""
    worker = Worker(context, "w1")
    worker.run_dry()
    sent: dict[str, list[bytes]] = {}
    has_its_ids, may_commit = threading.Event(), threading.Event()

    def event(key: str) -> Message:
        sent.setdefault(key, []).append(b'{"add":1}')
        return Message(key=key, version=len(sent[key]), event_time_us=0, schema="event/1", payload=sent[key][-1])

    late = [event(f"late{number}") for number in range(8)]

    def take_time(tx: Transaction) -> None:
        outbox.put(tx, context.topics, EVENTS.name, late)
        has_its_ids.set()
        may_commit.wait(10)

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(context.store.transact, take_time)
        has_its_ids.wait(10)
        for _ in range(3):
            worker.put([event(f"early{number}") for number in range(8)])
            worker.run_dry()
        may_commit.set()
        writing.result()
    worker.run_dry()
    found = Ledger.of(context.store)
    return ledger.broken_now(found) + ledger.broken_at_the_end(found, sent)


def retries(name: str) -> int:
    """How often transactions of this name lost a race, a deadlock among them, and ran again."""
    samples = [sample for metric in metrics.RETRIES.collect() for sample in metric.samples]
    counted = [each for each in samples if each.name.endswith("_total") and each.labels["name"] == name]
    return int(sum(each.value for each in counted))


def _all_at_once(write: Callable[[int], None], meanwhile: Callable[[], object] = lambda: None) -> None:
    with ThreadPoolExecutor(WRITERS) as pool:
        writing = [pool.submit(write, number) for number in range(WRITERS)]
        while wait(writing, POLL_SECONDS).not_done:
            meanwhile()
        for each in writing:
            each.result()
