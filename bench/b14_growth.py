"""Growth: profile updates/s and the p99 of a read, on stores of 0.1 M and 1 M profiles, and of 10 M if asked for.

Set KEYFOLD_BENCH_GROWTH=full for the store of 10 M (some 10 GB of disk a kind of store, and a long fill). The stores
of all sizes stand side by side and take turns. They are filled directly, with bodies as the product writes them (1 to
60 keys, most of them few), under ids that are scattered over the key space and arrive in no order. Updates are events
with ids, in transactions of `limits.gather_items_max`, every profile equally likely: the hardest for a cache. Reads are
20 people a request, in process, one caller. "flat within 1.5×" is a ratio of at least 0.67 between the two largest.
With --quick the smaller store has so few profiles that a transaction meets many of them twice, which flatters it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from bench import growth, stores
from bench.b2_profile_updates import (
    COUNTER,
    KEYS,
    LOG,
    STREAM_SECONDS,
    TRANSACTION_EVENTS,
    count_marked,
    profiles_at,
    undisturbed_rate,
)
from bench.b3_profile_read import PEOPLE, rows_of
from bench.harness import Race
from keyfold.core.context import Context
from keyfold.core.store import Transaction
from keyfold.counters.bulk import Updates, fold
from keyfold.profiles.handlers import Event
from keyfold.profiles.model import event_of
from keyfold.profiles.service.product import Product
from keyfold.profiles.service.reading import Read, View, read_profiles

TITLES = growth.Titles("profiles", "updates", "events/s", "a read")
VIEW = View(frozenset([COUNTER]), [])
BODIES = 2_000  # different bodies, dealt in turn
FILL_ROWS = 200_000
SCATTER = 0x9E3779B97F4A7C15  # odd, so that multiplying by it maps numbers of 64 bits one to one


def races(quick: bool) -> Iterator[Race]:
    return growth.races(quick, TITLES, grown_at, transactions={TRANSACTION_EVENTS: 2 if quick else 10})


@contextmanager
def grown_at(url: str, count: int) -> Iterator["Grown"]:
    with profiles_at(url) as (context, product):
        fill(context, product, count)
        yield Grown(context, product, count)


def scattered(number: int) -> str:
    return f"{number * SCATTER % 2**64:016x}"


class Grown(growth.Grown[list[Read]]):
    """A store that holds so many profiles."""

    def __init__(self, context: Context, product: Product, count: int) -> None:
        super().__init__(context, count)
        self._product = product

    def write(self, transactions: int, size: int) -> float:
        events = self._events(transactions * size)
        return undisturbed_rate(len(events), lambda: count_marked(self._context, self._product, events))

    def _question(self) -> Callable[[Transaction], list[Read]]:
        people = {scattered(self._chance.randrange(self.count)) for _ in range(PEOPLE)}
        entries = [([("user", each)], VIEW) for each in people]
        return lambda tx: read_profiles(tx, self._product, entries)

    def _is_whole(self, answer: list[Read]) -> bool:
        return all(read.version for read in answer)

    def _events(self, count: int) -> list[tuple[str, Event]]:
        now = int(time.time())
        fields = [
            {
                "event_id": f"{next(self._ids):015d}-bench",
                "time": now,
                "profile_id": scattered(self._chance.randrange(self.count)),
                "key": self._chance.randrange(KEYS),
            }
            for _ in range(count)
        ]
        return [(LOG, event_of(each)) for each in fields]


def fill(context: Context, product: Product, count: int) -> None:
    """Insert profiles on the bare driver: in pieces, each in key order, so that the index is not built row by row."""
    bodies, expires_at = _bodies(product)
    url = context.settings.store.url
    filling = stores.filling(url, "profiles")
    for start in range(0, count, FILL_ROWS):
        numbers = sorted(range(start, min(start + FILL_ROWS, count)), key=scattered)
        ids = [scattered(number) for number in numbers]
        some = [bodies[number % BODIES] for number in numbers]
        ends = [expires_at[number % BODIES] for number in numbers]
        filling.insert(rows_of(ids, some, ends))
    filling.close()


def _bodies(product: Product) -> tuple[list[bytes], list[int]]:
    chance = np.random.default_rng(14)
    keys = np.minimum(chance.geometric(0.08, BODIES), 60)
    profile = np.repeat(np.arange(BODIES), keys)
    count = len(profile)
    updates = Updates(
        profile=profile,
        counter=np.full(count, COUNTER, np.uint64),
        key=np.concatenate([chance.permutation(KEYS)[:each] for each in keys]).astype(np.uint64),
        value=chance.integers(1, 20, count).astype(np.float64),
        time=int(time.time()) - chance.integers(0, STREAM_SECONDS, count),
    )
    folded = fold(product.catalog, [b""] * BODIES, updates, now=int(time.time()))
    assert not folded.refused
    return folded.bodies, folded.expires_at.tolist()
