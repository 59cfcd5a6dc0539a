"""Masters at once, cut off, through lost COMMITs and killed servers, beside spoilt states, and one paused too long.

Run as a program it is that master: it stops itself at a moment of its run, and says what became of it afterwards.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import structlog

from keyfold.core.clock import ManualClock
from keyfold.core.context import open_store
from keyfold.core.errors import Conflict, KeyfoldError, LeaseLost, Unavailable
from keyfold.core.store import migrate
from keyfold.numbering.model import Published
from keyfold.numbering.service import mastering
from keyfold.numbering.service.mastering import StateLost
from tests.faults.lostcommit import ONE_TRY
from tests.faults.numbering_ledger import Json, Key, current_of
from tests.faults.numbering_scenario import CLUSTERS, GIVEN, LEASE_SECONDS, TYPE, Numbering, key, opened, settings
from tests.faults.nursery import ROOT
from tests.faults.part_writers import CUTS, at_once
from tests.faults.pgproxy import CommitProxy, Cut
from tests.faults.proxy import Proxy
from tests.servers.postgres import PostgresServer

# Of the one who is to lose it, and of the other, who must not where the machine is busy.
LOST_LEASE_SECONDS = 3
KEPT_LEASE_SECONDS = 30
BETWEEN_TRIES_SECONDS = 0.02
PATIENCE_SECONDS = 60
# Where a master stops: before the last state is brought near, in its run, before its state is copied, and published.
MOMENTS = ("lock taken", "new offers found", "written", "copied to")
KINDS = ("manifest.json", "places", "free", "new_docs", "expired_docs", "remap")
DAMAGES = ("truncated", "altered", "missing")


@contextmanager
def numbering_at(url: str, folder: Path, *, clock: ManualClock | None = None, **more: Any) -> Iterator[Numbering]:
    """Numbering on a new store of any kind."""
    if not url.startswith("sqlite"):
        store = open_store(settings(url, folder))
        migrate.upgrade(store)
        store.close()
    with opened(url, clock, folder, **more) as numbering:
        yield numbering


def keys_of(number: int) -> list[Key]:
    """The offers of a run; the same for the same number, and most of them those of the run before."""
    chance = random.Random(f"offers {number}")
    return [key(0), *(key(each) for each in range(1, 16) if chance.random() < 0.75)]


def _rest(_: float) -> None:
    time.sleep(BETWEEN_TRIES_SECONDS)


# At once --------------------------------------------------------------------------------------------------------------


def run_at_once(url: str, folder: Path, runs: int, **more: Any) -> tuple[list[str], int]:
    """A master of each cluster, so many runs each: the laws broken, and how often one found the lock taken."""
    waits: list[str] = []
    with ExitStack() as stack:
        masters = [stack.enter_context(numbering_at(url, folder, **more)) for _ in CLUSTERS]
        begin = threading.Barrier(len(masters))

        def work(number: int) -> list[str]:
            begin.wait()
            for turn in range(runs):
                masters[number].run(
                    CLUSTERS[number], keys_of(len(CLUSTERS) * turn + number), sleep=_rest, tell=waits.append
                )
            return []

        at_once(work, range(len(masters)))
        first = masters[0]
        first.book.inputs |= {each for other in masters for each in other.book.inputs}
        broken = first.broken()
        published = first.record()["states"][-1]["run"]
        if published != runs * len(masters):
            broken.append(f"X1: {runs * len(masters)} runs were published, the last is run {published}")
        return broken + first.tidied(), sum("holds the lock" in words for words in waits)


def run_one_after_another(numbering: Numbering, runs: int) -> list[str]:
    """So many runs by the engine: the laws broken."""
    for number in range(runs):
        numbering.run(CLUSTERS[number % len(CLUSTERS)], keys_of(number), is_forced=number % 5 == 4)
        if broken := numbering.broken():
            return broken
    return numbering.tidied()


# Insisting ------------------------------------------------------------------------------------------------------------


class Insisting:
    """Runs one after the other, each until the record shows it; whoever got no answer asks again."""

    def __init__(self, numbering: Numbering, clock: ManualClock) -> None:
        self.numbering = numbering
        self.clock = clock
        self.refused = 0
        self.untold = 0  # published, though the master was told otherwise

    def run(self, number: int) -> None:
        before = self._insist(self._run_published)
        while self._insist(self._run_published) == before:
            try:
                self.numbering.run(CLUSTERS[number % len(CLUSTERS)], keys_of(number), wait_seconds_max=0)
            except (Unavailable, LeaseLost, Conflict) as error:
                self.refused += 1
                self._wait()
                self.untold += not isinstance(error, Conflict) and self._insist(self._run_published) != before
        now = self._insist(self._run_published)
        if now != before + 1:
            self.numbering.book.broken.append(f"X2: one run was asked for, and {now - before} were published")

    def broken(self) -> list[str]:
        return list(self._insist(self.numbering.broken))

    def _run_published(self) -> int:
        current = current_of(self.numbering.record())
        return current["run"] if current else 0

    def _insist(self, ask: Callable[[], Any]) -> Any:
        while True:
            try:
                return ask()
            except Unavailable:
                self._wait()

    def _wait(self) -> None:
        self.clock.advance(2 * LEASE_SECONDS)  # a lease whose COMMIT was lost lies idle until it has passed
        time.sleep(BETWEEN_TRIES_SECONDS)


def through_lost_commits(
    server: PostgresServer, url: str, folder: Path, chance: random.Random, lost: int
) -> tuple[list[str], CommitProxy]:
    """Runs whose COMMITs get lost, until so many were: the laws broken. Every lost answer reaches the master."""
    clock = ManualClock()
    with (
        CommitProxy(server.port, lambda: Cut.NONE) as proxy,
        numbering_at(proxy.url_of(url), folder, clock=clock, is_indexed=False) as numbering,
    ):
        numbering.store.limits = ONE_TRY
        insisting, number, broken = Insisting(numbering, clock), 0, list[str]()
        while not broken and min(proxy.cuts[Cut.AFTER] + proxy.cuts[Cut.DURING], proxy.cuts[Cut.BEFORE]) < lost:
            proxy.plan = lambda: chance.choice(CUTS)
            insisting.run(number)
            proxy.plan = lambda: Cut.NONE
            broken += insisting.broken()
            number += 1
        clock.advance(10 * LEASE_SECONDS)
        return broken or numbering.tidied(), proxy


# Paused ---------------------------------------------------------------------------------------------------------------


def overtaken(url: str, folder: Path, moment: str, *, hosts: str = "", plant: str = "") -> tuple[str, list[str]]:
    """Let a master stop at a moment until another has published: what it says then, and the laws broken."""
    with numbering_at(url, folder, **_options(hosts, KEPT_LEASE_SECONDS)) as numbering:
        numbering.run("x", keys_of(0))
        command = [sys.executable, "-m", "tests.faults.numbering_masters", url, str(folder), moment, hosts, plant]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as paused:
            assert paused.stdout is not None
            assert paused.stdout.readline() == "stopping\n"
            os.waitid(os.P_PID, paused.pid, os.WSTOPPED | os.WNOWAIT)
            numbering.book.inputs |= {frozenset(keys_of(0)), frozenset(keys_of(1))}
            broken = numbering.broken()
            numbering.run("x", keys_of(2), sleep=_rest)
            broken += numbering.broken()
            before = numbering.record()
            paused.send_signal(signal.SIGCONT)
            said = paused.stdout.read().strip()
        if _states(numbering.record()) != _states(before):
            broken.append("N3: a master that was overtaken has changed the record")
        return said, broken + numbering.tidied()


def _states(record: Json) -> list[str]:
    return [state["checksum"] for state in record["states"]]


def _options(hosts: str, lease_seconds: int) -> dict[str, Any]:
    if not hosts:
        return {"lease_seconds": lease_seconds}
    return {"lease_seconds": lease_seconds, "leases.kind": "zookeeper", "leases.zookeeper": hosts}


def _be_paused(url: str, folder: Path, moment: str, hosts: str, plant: str) -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # stdout is for answers
    if plant:
        from tests.faults import numbering_plants, plants

        assert numbering_plants
        plants.named(plant).plant()

    def stop(words: str) -> None:
        if words.startswith(moment):
            print("stopping", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)

    with opened(url, None, folder, **_options(hosts, LOST_LEASE_SECONDS)) as numbering:
        try:
            numbering.run("y", keys_of(1), "paused", tell=stop)
            print("published")
        except KeyfoldError as error:
            print(error.slug)


# Cut off --------------------------------------------------------------------------------------------------------------


def cut_off(url: str, folder: Path, port: int, *, for_good: bool) -> tuple[str, list[str]]:
    """A master loses ZooKeeper when its state is written; another goes on: what the first says, and the laws broken."""
    said: list[str] = []
    is_cut_off, may_go_on = threading.Event(), threading.Event()
    with Proxy() as proxy:
        options = _options(f"127.0.0.1:{port}", KEPT_LEASE_SECONDS)
        far = _options(f"127.0.0.1:{proxy.start(port).port}", LOST_LEASE_SECONDS)
        with numbering_at(url, folder, **options) as near, opened(url, None, folder, **far) as cut:
            near.run("x", keys_of(0))

            def lose_it(words: str) -> None:
                if words == "written":
                    proxy.block()
                    is_cut_off.set()
                    assert may_go_on.wait(PATIENCE_SECONDS)

            def work() -> None:
                try:
                    cut.run("y", keys_of(1), "cut off", tell=lose_it)
                    said.append("published")
                except KeyfoldError as error:
                    said.append(error.slug)

            working = threading.Thread(target=work)
            working.start()
            assert is_cut_off.wait(PATIENCE_SECONDS)
            try:
                near.run("x", keys_of(2), sleep=_rest)
            finally:
                if not for_good:
                    proxy.unblock()
                may_go_on.set()
            working.join()
            near.book.inputs.add(frozenset(keys_of(1)))
            return said[0], near.broken() + near.tidied()


# Spoilt ---------------------------------------------------------------------------------------------------------------


def spoil(folder: Path, kind: str, damage: str) -> None:
    """Do harm to one file of a state."""
    path = folder / kind if kind == "manifest.json" else min((folder / kind).glob("*.parquet"))
    data = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(data[:-1])
    elif damage == "altered":
        path.write_bytes(data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :])
    else:
        path.unlink()


def spoilt(numbering: Numbering, folder: Path, kind: str, damage: str) -> list[str]:
    """The last state is spoilt on one cluster, then on both, and given up: the laws broken on the way."""
    numbering.run("x", GIVEN[0])
    last = numbering.run("x", GIVEN[1])
    if kind == "remap":  # which a rebuild alone has
        last = numbering.run("x", GIVEN[2], is_forced=True)
    broken = numbering.broken()
    spoil(folder / "x" / last.path, kind, damage)
    numbering.book.spoilt.add(("x", last.path))
    last = numbering.run("x", GIVEN[1])  # with the other cluster's copy
    numbering.book.spoilt.clear()
    broken += numbering.broken()

    for cluster in CLUSTERS:
        spoil(folder / cluster / last.path, "places", damage)
        numbering.book.spoilt.add((cluster, last.path))
    broken += _refused(numbering)
    mastering.invalidate(
        numbering.context, numbering.settings, TYPE, "operator", why="it is spoilt", even_if_readable=False
    )
    record = numbering.record()
    current = current_of(record)
    if current is None or current["checksum"] == last.checksum:
        return [*broken, "N4: the pointer still names a state that was given up"]
    broken += numbering.broken()
    numbering.prune()  # must leave what the pointer has returned to
    broken += numbering.broken()
    after = numbering.run("y", GIVEN[0])
    broken += numbering.broken()
    broken += _new_line(after, record)
    numbering.run("x", GIVEN[1])
    return broken + numbering.broken()


def _refused(numbering: Numbering) -> list[str]:
    before = numbering.record()["states"]
    for cluster in CLUSTERS:
        try:
            numbering.run(cluster, GIVEN[0])
            return [f"N4: {cluster} went on from a state that is spoilt"]
        except StateLost:
            pass
    return [] if numbering.record()["states"] == before else ["N4: a refused run has changed the record"]


def _new_line(after: Published, record: Json) -> list[str]:
    used = max(int(state["version"].split(".")[2]) for state in record["states"])
    _, _, rebuild, generation = map(int, after.version.split("."))
    if rebuild > used and generation == 0:
        return []
    return [f"N5: {after.version} follows a state that was given up, of V {used}"]


if __name__ == "__main__":
    _be_paused(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
