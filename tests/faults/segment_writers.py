"""Workers that diff the same users at once, through lost COMMITs and killed servers, and one that is paused too long.

Run as a program it is that worker: it stops itself before its second chunk, and says what became of it afterwards.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from keyfold.core import metrics
from keyfold.core.clock import ManualClock
from keyfold.core.errors import KeyfoldError, LeaseLost, Unavailable
from keyfold.core.store import Store
from tests.faults.nursery import ROOT
from tests.faults.part_writers import WORKERS, at_once
from tests.faults.scenario import LEASE_SECONDS
from tests.faults.segment_ledger import Book
from tests.segments import Segments, opened

NAMES = ("a", "b", "c", "d")
USERS = tuple(range(40))
OPTIONS: dict[str, Any] = {"chunk_users_max": 5, "batch_rows": 16, "remove_share_max": 1.0}
LOOK_ROUNDS = 3
PAUSED: dict[str, Any] = {
    "leases__lease_seconds": 1,
    "limits__transaction_seconds_max": 3,  # of a transaction that keeps the lease while it is renewed, too
    "limits__lock_seconds_max": 2,
}
PAUSED_BEFORE_CHUNK = 2
BETWEEN_TRIES_SECONDS = 0.02


class Diffing:
    """Segments whose snapshots are diffed round by round; whoever got no answer looks, and asks again."""

    def __init__(self, segments: Segments, clock: ManualClock) -> None:
        self.segments = segments
        self.clock = clock
        self.refused = 0
        self.book = Book(segments.settings.topic, segments.snapshots.root)

    def insist(self, step: Callable[[], object]) -> None:
        while True:
            try:
                step()
                return
            except (Unavailable, LeaseLost):
                self.refused += 1
                self.clock.advance(2 * LEASE_SECONDS)  # a lease whose COMMIT was lost lies idle until it has passed
                time.sleep(BETWEEN_TRIES_SECONDS)

    def create(self) -> None:
        for name in NAMES:
            self.insist(lambda name=name: self.segments.create(name))  # type: ignore[misc]

    def round(self, number: int, workers: int = WORKERS) -> None:
        """A new snapshot of every segment, then all of them diffed by so many at once."""
        for name in NAMES:
            users = users_of(name, number)
            self.book.counted[name, number] = users
            self.insist(lambda name=name, users=users: self._upload(name, number, users))  # type: ignore[misc]
        at_once(lambda worker: self.insist(lambda: self._diff(f"w{worker}")), range(workers))
        self.insist(lambda: self._diff("last"))

    def _upload(self, name: str, number: int, users: list[int]) -> None:
        if self.segments.row(name).evaluation_version < number:
            self.segments.upload(name, users)

    def _diff(self, worker: str) -> None:
        while self.segments.tick(worker):
            pass

    def broken(self, store: Store | None = None) -> list[str]:
        found = (store or self.segments.store).snapshot(self.book.look)
        due = [f"X1: {name} is {row.stage}: {row.reason}" for name, row in found.rows.items() if row.stage != "done"]
        return due + self.book.compare_now(found) + self.book.compare_history(found)


@contextmanager
def diffing_at(url: str, folder: Path) -> Iterator[Diffing]:
    clock = ManualClock()
    with opened(url, folder, clock=clock, leases__lease_seconds=LEASE_SECONDS, **OPTIONS) as segments:
        yield Diffing(segments, clock)


def diffed_at_once(diffing: Diffing, rounds: int) -> list[str]:
    """Workers at segments that have most users in common: the laws broken."""
    diffing.create()
    for number in range(1, rounds + 1):
        diffing.round(number)
        if number % LOOK_ROUNDS == 0 and (broken := diffing.broken()):
            return broken
    return diffing.broken()


def taken_up_again(diffing: Diffing) -> list[str]:
    """A diff is handed back after its first chunk, a newer snapshot comes, and another takes it up: the laws broken."""
    segments, counted = diffing.segments, diffing.book.counted
    segments.create("a")
    for number in (1, 3):
        counted["a", number], counted["a", number + 1] = users_of("a", number), users_of("a", number + 1)
        segments.upload("a", counted["a", number])  # type: ignore[arg-type]
        tick: Any = segments.differ.next("w1")
        while not segments.row("a").chunks:
            next(tick)
        tick.close()
        segments.upload("a", counted["a", number + 1])  # type: ignore[arg-type]
        segments.tick_all()
    return diffing.broken()


def users_of(name: str, number: int) -> list[int]:
    """The same for the same number; never nobody."""
    chance = random.Random(f"{name}/{number}")
    return [0, *(user for user in USERS[1:] if chance.random() < 0.6)]


def races() -> int:
    """The chunks that lost a race for somebody's set, and ran again."""
    samples = [sample for metric in metrics.RETRIES.collect() for sample in metric.samples]
    return sum(
        int(sample.value)
        for sample in samples
        if sample.name.endswith("_total") and sample.labels["name"] == "segment chunk"
    )


# A worker that is paused past its lease ------------------------------------------------------------------------------


def overtaken(url: str, folder: Path, *, plant: str = "") -> tuple[str, list[str]]:
    """Let a worker stop within a diff until another has finished it: what it says then, and the laws broken."""
    with opened(url, folder, **PAUSED, **OPTIONS) as segments:
        diffing = Diffing(segments, ManualClock())
        segments.create("a")
        diffing.book.counted["a", 1] = users_of("a", 1)
        segments.upload("a", users_of("a", 1))
        command = [sys.executable, "-m", "tests.faults.segment_writers", url, str(folder), plant]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "stopping\n"
            os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)
            while not segments.tick("another"):
                time.sleep(0.05)
            before = diffing.broken()
            holder.send_signal(signal.SIGCONT)
            said = holder.stdout.read().splitlines()[-1]  # behind what it logs
        return said, before + diffing.broken()


def _be_paused(url: str, folder: Path, plant: str) -> None:
    if plant:
        from tests.faults import plants, segment_plants

        assert segment_plants
        plants.named(plant).plant()
    with opened(url, folder, **PAUSED, **OPTIONS) as segments:
        transact, chunks = segments.store.transact, 0

        def stop_first(work: Any, *, name: str = "work", once: bool = False) -> Any:
            nonlocal chunks
            chunks += name == "segment chunk"
            if name == "segment chunk" and chunks == PAUSED_BEFORE_CHUNK:
                print("stopping", flush=True)
                os.kill(os.getpid(), signal.SIGSTOP)
            return transact(work, name=name, once=once)

        segments.store.transact = stop_first  # type: ignore[method-assign]
        try:
            segments.tick("paused")
            print("done")
        except KeyfoldError as error:
            print(error.slug)


if __name__ == "__main__":
    _be_paused(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
