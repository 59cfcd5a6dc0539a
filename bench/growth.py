"""How growth is measured, of whatever grows: stores of 0.1 M, 1 M and, if asked for, 10 M, that take turns."""

import itertools
import os
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from bench import stores
from bench.harness import Goal, Race, Side
from keyfold.core import memory
from keyfold.core.context import Context
from keyfold.core.store import Transaction

OPTION = "KEYFOLD_BENCH_GROWTH"
QUICK, USUAL, FULL = (10_000, 100_000), (100_000, 1_000_000), (100_000, 1_000_000, 10_000_000)
READS_QUICK, READS = 200, 2_000
MUST, MOONSHOT = 0.67, 0.91  # flat within 1.5×, within 1.1×

Answer = TypeVar("Answer")


class Grown(ABC, Generic[Answer]):
    """A store that holds so many of what grows."""

    def __init__(self, context: Context, count: int) -> None:
        self.count = count
        self._context = context
        self._ids = itertools.count()
        self._chance = random.Random(14)

    @abstractmethod
    def write(self, transactions: int, size: int) -> float:
        """How many a second, in transactions of this size."""

    @abstractmethod
    def _question(self) -> Callable[[Transaction], Answer]:
        """A read of somebody who is there, made ready."""

    @abstractmethod
    def _is_whole(self, answer: Answer) -> bool:
        """Whether the answer has all that was asked for."""

    def read(self, requests: int) -> float:
        """The p99 in milliseconds."""
        taken = []
        for _ in range(requests):
            question = self._question()
            started = time.perf_counter()
            answer = self._context.store.read(question)
            taken.append(time.perf_counter() - started)
            assert self._is_whole(answer)
        return float(np.percentile(taken, 99)) * 1000


class Titles(NamedTuple):
    """What the races of a part are called: what grows, what is written and in which unit, what is read."""

    grows: str
    write: str
    unit: str
    read: str


def races(
    quick: bool,
    titles: Titles,
    grown_at: Callable[[str, int], AbstractContextManager[Grown[Answer]]],
    *,
    transactions: Mapping[int, int],
) -> Iterator[Race]:
    """Reads and writes on each kind of store; `grown_at` opens the product at a URL and fills its store.

    `transactions`: of each size of a transaction, how many are a round.
    """
    memory.settle()  # as every server and worker does when it starts
    counts = QUICK if quick else FULL if os.environ.get(OPTION) == "full" else USUAL
    requests = READS_QUICK if quick else READS
    goals = _goals(counts, titles)
    for kind, opened in stores.KINDS.items():  # one after the other: there may be no room for both
        with opened() as new_url, ExitStack() as stack:
            all_grown = []
            for count in counts:
                started = time.perf_counter()
                url = new_url()
                grown = stack.enter_context(grown_at(url, count))
                stores.warm(url)
                print(f"  {_size(count, titles)} filled in {time.perf_counter() - started:.0f} s", flush=True)
                grown.write(1, max(transactions))
                grown.read(20)
                all_grown.append(grown)
            # Reads first, of stores at rest: what updates leave behind is cleared away by whoever reads it next, until
            # a vacuum has passed, and after a checkpoint PostgreSQL logs each such page whole.
            reads = [Side(_size(each.count, titles), partial(each.read, requests)) for each in all_grown]
            yield Race(title=f"p99 of {titles.read}, {kind}", unit="ms", sides=reads, goals=goals, better="less")
            for size, times in transactions.items():
                writes = [Side(_size(each.count, titles), partial(each.write, times, size)) for each in all_grown]
                title = f"{titles.write}, {kind}, transactions of {size:,}"
                yield Race(title=title, unit=titles.unit, sides=writes, goals=goals)


def _goals(counts: Sequence[int], titles: Titles) -> list[Goal]:
    """What the table asks for is the step from 1 M to 10 M; a smaller one is shown without a grade."""
    before, last = (_size(count, titles) for count in counts[-2:])
    if tuple(counts[-2:]) == FULL[-2:]:
        return [Goal(side=last, against=before, must=MUST, moonshot=MOONSHOT)]
    return [Goal(side=last, against=before, note=f"the step to 10 M needs {OPTION}=full")]


def _size(count: int, titles: Titles) -> str:
    return f"{count / 1_000_000:g} M {titles.grows}"
