"""Writers of any part that marks what it counts: two on one busy key, callers that insist on an answer."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from keyfold.core import metrics
from keyfold.core.errors import Unavailable
from tests.faults.effort import effort, seed
from tests.faults.matrix import Hit
from tests.faults.pgproxy import CommitProxy, Cut
from tests.servers.postgres import PostgresServer

WORKERS = 2
BATCH = 4
HOT_SHARE = 0.9
LOST, LOST_LONG = 30, 20_000
CYCLES, CYCLES_LONG = 3, 300
CUTS = (Cut.AFTER, Cut.DURING, Cut.BEFORE, Cut.NONE, Cut.NONE, Cut.NONE)

Item = TypeVar("Item")  # what is counted
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Writing(Generic[Item]):
    """A part at work on a store."""

    part: str
    name: str  # of its transactions
    counted: str  # the status of what is new
    make: Callable[[int, str], Item]  # by number and key; the same for the same number, whoever makes it
    count: Callable[[Sequence[Item]], list[str]]  # the status of each
    broken_in: Callable[[Sequence[Item]], list[str]]  # the laws broken where each of these must count once


Opened = Callable[[str], AbstractContextManager[Writing[Item]]]  # at the URL of an empty store


class Busy(NamedTuple):
    """What became of a busy key: the laws broken, and how much was of it."""

    broken: list[str]
    items: int


def busy(writing: Writing[Item], *, batches: int = 25) -> Busy:
    """Two workers of which nine in ten items are of one key; every second item was sent to both."""
    assert batches % 4 != 3  # of a pair that is swapped, both are sent
    numbers = [_numbers(worker, batches * BATCH) for worker in range(WORKERS)]
    made = [[writing.make(number, _key(number)) for number in own] for own in numbers]
    for turn in range(batches):  # in step, or one may stay behind the other for good
        at_once(writing.count, [_batch(own, worker, turn) for worker, own in enumerate(made)])
    sent = [each for own in made for each in own]
    return Busy(writing.broken_in(sent), sum(_key(number) == "busy" for own in numbers for number in own))


def _numbers(worker: int, count: int) -> list[int]:
    """Even numbers are shared by all workers, odd ones are of one."""
    return [number if number % 2 == 0 else number + 10_001 * worker * 2 for number in range(count)]


def _batch(made: Sequence[Item], worker: int, turn: int) -> Sequence[Item]:
    """By turns all workers send what they share at once, and one of them what another sends next."""
    at = (turn ^ 1 if worker and turn % 4 >= 2 else turn) * BATCH
    return made[at : at + BATCH]


def _key(number: int) -> str:
    return "busy" if random.Random(-number).random() < HOT_SHARE else f"cold{number % 7}"


def at_once(work: Callable[[T], R], given: Sequence[T]) -> list[R]:
    with ThreadPoolExecutor(len(given)) as pool:
        return list(pool.map(work, given))


def survives_lost_commits(opened: Opened[Item], server: PostgresServer, url: str, hit: Hit) -> None:
    """COMMITs are cut before, while and after they arrive; whoever got no answer asks again for the same."""
    chance = _chance()
    lost = effort(LOST, LOST_LONG)
    with CommitProxy(server.port, lambda: Cut.NONE) as proxy, opened(proxy.url_of(url)) as writing:

        def is_enough() -> bool:
            return min(proxy.cuts[Cut.AFTER] + proxy.cuts[Cut.DURING], proxy.cuts[Cut.BEFORE]) >= lost

        proxy.plan = lambda: chance.choice(CUTS)
        sent = _insisting(writing, is_enough)
        proxy.plan = lambda: Cut.NONE
        assert not writing.broken_in(sent)
        hit(writing.part, proxy.cuts[Cut.AFTER] + proxy.cuts[Cut.DURING], fault="answer to COMMIT lost")
        hit(writing.part, proxy.cuts[Cut.BEFORE], fault="COMMIT never arrived")


def survives_kills(opened: Opened[Item], server: PostgresServer, hit: Hit) -> None:
    """Two callers insist through every kill of the server; nobody is told to stop."""
    chance = _chance()
    has_ended = threading.Event()
    with opened(server.create_database("killed")) as writing, ThreadPoolExecutor(WORKERS) as pool:
        first = [number * 10_000_000 for number in range(WORKERS)]
        asking = [pool.submit(_insisting, writing, has_ended.is_set, first=each) for each in first]
        try:
            for _ in range(effort(CYCLES, CYCLES_LONG)):
                before = _interrupted(writing.name)
                time.sleep(chance.uniform(0.2, 0.6))
                server.kill()
                server.start()
                hit(writing.part, _interrupted(writing.name) - before)
        finally:
            has_ended.set()
        assert not writing.broken_in([item for each in asking for item in each.result()])


def _chance() -> random.Random:
    chosen = seed()
    print(f"KEYFOLD_FAULTS_SEED={chosen}")
    return random.Random(chosen)


def _insisting(writing: Writing[Item], is_enough: Callable[[], bool], *, first: int = 0) -> list[Item]:
    """Ask for batches, each until it is answered, with the same ids: what was acknowledged."""
    sent: list[Item] = []
    while not is_enough():
        batch = [writing.make(first + len(sent) + at, f"p{at}") for at in range(BATCH)]
        while not (statuses := _answered(writing, batch)):
            pass
        assert statuses <= {writing.counted, "duplicate"}, statuses
        sent += batch
    return sent


def _answered(writing: Writing[Item], batch: Sequence[Item]) -> set[str]:
    try:
        return set(writing.count(batch))
    except Unavailable:
        return set()


def _interrupted(name: str) -> int:
    """The transactions of a name that lost the server under their feet and were tried again."""
    samples = [sample for metric in metrics.RETRIES.collect() for sample in metric.samples]
    return sum(
        int(sample.value)
        for sample in samples
        if sample.name.endswith("_total")
        and sample.labels["name"] == name
        and sample.labels["reason"] in ("store-unreachable", "commit-unknown")
    )
