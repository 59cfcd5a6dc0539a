"""Faults around leases: holders paused past their lease, cut off, killed; answers lost; every interleaving of workers.

What must hold: never two holders of a name by the clock, tickets only grow, and of two who believe that they hold a
lease only the one with the newer ticket commits.
"""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Self

import psutil
import pytest
import structlog
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from keyfold.core import progress
from keyfold.core.clock import SECOND_US, ManualClock
from keyfold.core.errors import LeasesUnreachable, StoreBusy, TicketRefused, Unavailable
from keyfold.core.leases.lease import Lease, Leases
from keyfold.core.leases.sql import SqlLeases
from keyfold.core.leases.zookeeper import ZooKeeperLeases
from keyfold.core.limits import Limits
from keyfold.core.shards import Shards
from keyfold.core.store import Store, Transaction, migrate
from tests.faults.proxy import Proxy
from tests.servers.postgres import PostgresServer
from tests.servers.process import free_port
from tests.servers.zookeeper import ZooKeeperServer

pytestmark = pytest.mark.spec("CORE-10", "CORE-11")

LONG = os.environ.get("KEYFOLD_FAULTS") == "long"
PAUSES = 2_000 if LONG else 5
SEEDS = 6_000 if LONG else 60
EXAMPLES = 2_000 if LONG else 40
ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 60
# A lease that does not run out while a test is patient.
HOUR_SECONDS = 3_600

# A stopped process must not hold a lock for long, or the tests would wait for it.
LIMITS = Limits(lock_seconds_max=1, transaction_seconds_max=2)
SQL_LEASE_SECONDS = 0.3
SESSION_SECONDS = 2.0
PATIENT_SESSION_SECONDS = 20.0


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.01)


def answer_of(act: Callable[[], list[Lease]]) -> list[Lease] | None:
    """What the service answered; None if it did not."""
    try:
        return act()
    except LeasesUnreachable:
        return None


# A second process, paused past its lease --------------------------------------------------------------------------


PAUSED = "paused"


class Worker:
    """What both processes do: take the lease, adopt the guard row, commit under the ticket."""

    def __init__(self, kind: str, store_url: str, hosts: str, name: str, holder: str) -> None:
        self.store = Store.open(store_url, limits=LIMITS)
        self.leases: Leases = SqlLeases(self.store)
        self.seconds = SQL_LEASE_SECONDS
        if kind == "zookeeper":
            # The session of the one that is paused decides how long the other has to wait.
            session_seconds = SESSION_SECONDS if holder == PAUSED else PATIENT_SESSION_SECONDS
            self.leases = ZooKeeperLeases(hosts, session_seconds)
            self.seconds = 2 * session_seconds
        self.name = name
        self.holder = holder
        self.lease: Lease | None = None
        self.position = 0

    def close(self) -> None:
        self.leases.close()
        self.store.close()

    def take(self) -> int:
        """Wait for the lease and adopt the guard row; the ticket."""

        def taken() -> bool:
            with suppress(Unavailable):
                for lease in self.leases.acquire([self.name], self.holder, self.seconds):
                    self.lease = lease
                    return True
            return False

        eventually(taken)
        assert self.lease is not None
        ticket = self.lease.ticket
        self.position = self.store.transact(lambda tx: progress.adopt(tx, self.name, 0, ticket, ""))
        return ticket

    def commit(self, inside: Callable[[], None] = lambda: None) -> str:
        """Move the guard row, note what was accepted, and say how it went."""
        lease = self.lease
        assert lease is not None

        def work(tx: Transaction) -> None:
            progress.advance(tx, self.name, 0, lease.ticket, self.position, self.position + 1)
            tx.driver(f"INSERT INTO accepted (position, ticket) VALUES ({self.position}, {lease.ticket})")
            inside()

        try:
            self.store.transact(work)
        except TicketRefused:
            return "refused"
        except Unavailable as error:
            return error.slug
        self.position += 1
        return "committed"

    def publish(self) -> str:
        leases, lease = self.leases, self.lease
        assert isinstance(leases, ZooKeeperLeases)
        assert lease is not None
        outcome = ""

        def tried() -> str:
            # Just woken up, the process has yet to find its way back to the server.
            nonlocal outcome
            with suppress(Unavailable):
                found = leases.published(self.name)
                try:
                    leases.publish(self.name, self.holder.encode(), found.version if found else None, lease)
                    outcome = "published"
                except TicketRefused:
                    outcome = "refused"
            return outcome

        eventually(tried)
        return outcome

    def release(self) -> None:
        assert self.lease is not None
        self.leases.release([self.lease])


def serve(kind: str, store_url: str, hosts: str, name: str) -> None:
    """The second process: does what it is told, line by line."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # stdout is for answers
    worker = Worker(kind, store_url, hosts, name, PAUSED)

    def stop_inside() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    acts: dict[str, Callable[[], object]] = {
        "take": worker.take,
        "commit": worker.commit,
        "commit and stop inside": lambda: worker.commit(stop_inside),
        "publish": worker.publish,
    }
    for line in sys.stdin:
        sys.stdout.write(f"{acts[line.strip()]()}\n")
        sys.stdout.flush()


class OtherProcess:
    """The second process, as the test sees it."""

    def __init__(self, kind: str, store_url: str, hosts: str, name: str) -> None:
        script = "import sys; from tests.faults.test_leases import serve; serve(*sys.argv[1:])"
        self._process = subprocess.Popen(
            [sys.executable, "-c", script, kind, store_url, hosts, name],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def tell(self, act: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{act}\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the second process has died"
        return line.strip()

    def ask(self, act: str) -> str:
        self.tell(act)
        return self.answer()

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        self.wait_until_stopped()

    def wait_until_stopped(self) -> None:
        eventually(lambda: psutil.Process(self._process.pid).status() == psutil.STATUS_STOPPED)

    def wake(self) -> None:
        self._process.send_signal(signal.SIGCONT)


class Ground:
    """Where the two processes meet."""

    def __init__(self, kind: str, store_url: str, hosts: str) -> None:
        self.kind = kind
        self.pauses = PAUSES if LONG or kind != "zookeeper" else 2  # each costs a session
        self.name = f"name-{uuid.uuid4().hex}"
        self._place = (kind, store_url, hosts, self.name)
        store = Store.open(store_url)
        migrate.upgrade(store)
        store.transact(lambda tx: tx.driver("CREATE TABLE accepted (position bigint PRIMARY KEY, ticket bigint)"))
        store.close()

    def other_process(self) -> OtherProcess:
        return OtherProcess(*self._place)

    def rival(self) -> "closing[Worker]":
        return closing(Worker(*self._place, holder="rival"))

    def check_accepted_tickets_only_grew(self, worker: Worker) -> None:
        rows = worker.store.read(
            lambda tx: [tuple(row) for row in tx.driver("SELECT position, ticket FROM accepted ORDER BY position")]
        )
        assert [position for position, _ in rows] == list(range(worker.position))
        tickets = [ticket for _, ticket in rows]
        assert tickets == sorted(tickets)


KINDS = ["sqlite", "postgres", pytest.param("zookeeper", marks=pytest.mark.xdist_group("zookeeper"))]


@pytest.fixture(params=KINDS)
def ground(request: pytest.FixtureRequest, tmp_path: Path) -> Ground:
    hosts = ""
    if request.param == "zookeeper":
        server: ZooKeeperServer = request.getfixturevalue("zookeeper_server")
        server.start()
        hosts = server.hosts
    url = request.getfixturevalue("postgres_url") if request.param == "postgres" else f"sqlite:///{tmp_path}/store.db"
    return Ground(request.param, url, hosts)


@pytest.mark.spec("NUM-11")
def test_a_holder_paused_past_its_lease_is_refused_when_it_wakes_up(ground: Ground) -> None:
    with ground.other_process() as other, ground.rival() as rival:
        for _ in range(ground.pauses):
            paused_ticket = int(other.ask("take"))
            assert other.ask("commit") == "committed"
            other.pause()
            assert rival.take() > paused_ticket
            assert rival.commit() == "committed"
            other.wake()
            assert other.ask("commit") == "refused"
            assert rival.commit() == "committed"
            rival.release()
        ground.check_accepted_tickets_only_grew(rival)


@pytest.mark.spec("NUM-11")
def test_a_holder_paused_past_its_lease_is_refused_after_the_rival_has_gone_too(ground: Ground) -> None:
    with ground.other_process() as other, ground.rival() as rival:
        other.ask("take")
        other.pause()
        rival.take()
        rival.release()
        other.wake()
        assert other.ask("commit") == "refused"
        ground.check_accepted_tickets_only_grew(rival)


def test_a_holder_paused_inside_its_transaction_commits_before_the_rival_or_not_at_all(ground: Ground) -> None:
    """SQLite: nobody can take over while a stopped process holds the file. PostgreSQL ends its idle transaction."""
    with ground.other_process() as other, ground.rival() as rival:
        paused_ticket = int(other.ask("take"))
        other.tell("commit and stop inside")
        other.wait_until_stopped()
        if ground.kind == "postgres":
            assert rival.take() > paused_ticket
            assert rival.commit() == "committed"
            other.wake()
            assert other.answer() != "committed"
        else:
            with pytest.raises(StoreBusy):
                rival.store.transact(lambda tx: progress.adopt(tx, ground.name, 0, paused_ticket + 1, ""))
            other.wake()
            other.answer()
            assert rival.take() > paused_ticket
            assert rival.commit() == "committed"
        assert other.ask("commit") == "refused"
        ground.check_accepted_tickets_only_grew(rival)


@pytest.mark.xdist_group("zookeeper")
@pytest.mark.spec("NUM-11")
def test_a_holder_paused_past_its_session_cannot_publish_in_zookeeper(
    zookeeper_server: ZooKeeperServer, tmp_path: Path
) -> None:
    zookeeper_server.start()
    ground = Ground("zookeeper", f"sqlite:///{tmp_path}/store.db", zookeeper_server.hosts)
    with ground.other_process() as other, ground.rival() as rival:
        for _ in range(ground.pauses):
            other.ask("take")
            assert other.ask("publish") == "published"
            other.pause()
            rival.take()
            assert rival.publish() == "published"
            other.wake()
            assert other.ask("publish") == "refused"
            rival.release()


def test_a_holder_that_was_killed_is_replaced_under_a_greater_ticket(ground: Ground) -> None:
    with ground.rival() as rival:
        with ground.other_process() as other:
            killed_ticket = int(other.ask("take"))
            assert other.ask("commit") == "committed"
        assert rival.take() > killed_ticket
        assert rival.position == 1
        assert rival.commit() == "committed"
        ground.check_accepted_tickets_only_grew(rival)


# A server that dies -----------------------------------------------------------------------------------------------


def test_leases_and_tickets_survive_a_kill_of_postgres(postgres_server: PostgresServer, postgres_url: str) -> None:
    store = Store.open(postgres_url, limits=LIMITS)
    migrate.upgrade(store)
    leases = SqlLeases(store)
    for _ in range(2):
        kept, handed_back = leases.acquire(["a", "b"], "alice", HOUR_SECONDS)
        leases.release([handed_back])
        postgres_server.kill()
        with pytest.raises(Unavailable):
            leases.acquire(["a"], "bob", HOUR_SECONDS)
        postgres_server.start()
        (taken,) = leases.acquire(["a", "b"], "bob", HOUR_SECONDS)
        assert (taken.name, taken.ticket) == ("b", handed_back.ticket + 1)
        leases.release([kept, taken])
    store.close()


# Cut off from ZooKeeper -------------------------------------------------------------------------------------------


class Link:
    """The network between one client and ZooKeeper."""

    def __init__(self, server: ZooKeeperServer) -> None:
        self._server = server
        self.proxy = Proxy().start(server.port)
        self.hosts = f"127.0.0.1:{self.proxy.port}"

    def take_down(self) -> None:
        # Nothing listens on port 1: whoever connects anew is reset too.
        self.proxy._upstream_port = 1
        self.proxy.cut()

    def bring_up(self) -> None:
        self.proxy._upstream_port = self._server.port


@contextmanager
def linked(server: ZooKeeperServer, session_seconds: float = SESSION_SECONDS) -> Iterator[tuple[Link, ZooKeeperLeases]]:
    """A client behind a link that a test takes down."""
    server.start()
    link = Link(server)
    leases = ZooKeeperLeases(link.hosts, session_seconds)
    leases._answer_seconds = 3  # a busy machine is no fault
    with link.proxy, closing(leases):
        yield link, leases


@pytest.mark.xdist_group("zookeeper")
@pytest.mark.spec("NUM-11")
def test_of_two_sides_of_a_partition_one_publishes(zookeeper_server: ZooKeeperServer) -> None:
    name = f"name-{uuid.uuid4().hex}"
    with (
        linked(zookeeper_server) as (link, far),
        closing(ZooKeeperLeases(zookeeper_server.hosts, PATIENT_SESSION_SECONDS)) as near,
    ):
        for round_ in range(max(2, PAUSES // 20)):
            lease = wait_for_lease(far, name, "far")
            version = far.publish(name, b"far", None if round_ == 0 else 2 * round_ - 1, lease)
            link.take_down()
            assert answer_of(lambda lease=lease: far.renew([lease], HOUR_SECONDS)) is None
            taken = wait_for_lease(near, name, "near")
            assert taken.ticket > lease.ticket
            assert near.publish(name, b"near", version, taken) == version + 1
            link.bring_up()
            eventually(lambda lease=lease: answer_of(lambda: far.renew([lease], HOUR_SECONDS)) == [])
            with pytest.raises(TicketRefused):
                far.publish(name, b"late", version + 1, lease)
            near.release([taken])


@pytest.mark.xdist_group("zookeeper")
def test_a_short_partition_costs_no_lease(zookeeper_server: ZooKeeperServer) -> None:
    name = f"name-{uuid.uuid4().hex}"
    with linked(zookeeper_server, session_seconds=PATIENCE_SECONDS) as (link, leases):
        lease = wait_for_lease(leases, name, "far")
        for _ in range(3):
            link.proxy.cut()
            eventually(lambda: answer_of(lambda: leases.renew([lease], HOUR_SECONDS)))
        (held,) = leases.held([name])
        assert held.ticket == lease.ticket


@pytest.mark.xdist_group("zookeeper")
def test_what_was_taken_by_a_request_whose_answer_was_lost_is_handed_back_by_the_same_session(
    zookeeper_server: ZooKeeperServer,
) -> None:
    with (
        linked(zookeeper_server, session_seconds=PATIENCE_SECONDS) as (link, far),
        closing(ZooKeeperLeases(zookeeper_server.hosts, PATIENT_SESSION_SECONDS)) as near,
    ):
        names = nodes_of(far, 3)
        session = far._client._session_id
        link.proxy.cut_at_reply(0)
        assert answer_of(lambda: far.acquire(names, "far", HOUR_SECONDS)) is None
        eventually(lambda: near.held(names) == [])
        eventually(lambda: answer_of(lambda: far.acquire(names, "far", HOUR_SECONDS)))
        assert far._client._session_id == session


@pytest.mark.xdist_group("zookeeper")
def test_a_session_that_hears_no_answers_is_given_up_and_frees_what_it_held(zookeeper_server: ZooKeeperServer) -> None:
    with (
        linked(zookeeper_server, session_seconds=3) as (link, far),
        closing(ZooKeeperLeases(zookeeper_server.hosts, PATIENT_SESSION_SECONDS)) as near,
    ):
        names = nodes_of(far, 3)
        held = far.acquire(names[:1], "far", HOUR_SECONDS)
        far._answer_seconds = 0.3
        link.proxy.deafen()
        # Served, though the answer never arrives; and the requests that follow keep the session alive.
        assert answer_of(lambda: far.acquire(names[1:], "far", HOUR_SECONDS)) is None
        eventually(lambda: len(near.held(names)) == 3)
        eventually(lambda: answer_of(lambda: far.renew(held, HOUR_SECONDS)) == [])
        eventually(lambda: near.held(names) == [])
        eventually(lambda: len(answer_of(lambda: far.acquire(names, "far", HOUR_SECONDS)) or []) == 3)


def nodes_of(leases: ZooKeeperLeases, count: int) -> list[str]:
    """Names that were taken before, so that taking one is a single request."""
    names = sorted(f"name-{uuid.uuid4().hex}" for _ in range(count))
    leases.release(leases.acquire(names, "far", HOUR_SECONDS))
    return names


@pytest.mark.xdist_group("zookeeper")
@pytest.mark.spec("CORE-11")
def test_a_worker_cut_off_stops_before_its_shards_are_worked_on_elsewhere(zookeeper_server: ZooKeeperServer) -> None:
    job = f"job-{uuid.uuid4().hex}"
    with (
        linked(zookeeper_server, session_seconds=2) as (link, far_leases),
        closing(ZooKeeperLeases(zookeeper_server.hosts, 2)) as near_leases,
    ):
        far = Shards(far_leases, job, 4, "far", 2)
        near = Shards(near_leases, job, 4, "near", 2)
        watcher = Overlaps(far, near)

        def settled(far_count: int, near_count: int) -> Callable[[], bool]:
            def look() -> bool:
                far.tick()
                near.tick()
                watcher.look()
                return (len(far.held), len(near.held)) == (far_count, near_count)

            return look

        eventually(settled(2, 2))
        link.take_down()
        eventually(settled(0, 4))
        link.bring_up()
        eventually(settled(2, 2))
        assert not watcher.found


class Overlaps:
    """Looks for a shard that two workers hold at once."""

    def __init__(self, one: Shards, other: Shards) -> None:
        self._one = one
        self._other = other
        self.found: list[set[int]] = []

    def look(self) -> None:
        # What expires between the two looks must be looked at last, or it would seem held twice.
        other = set(self._other.held)
        if both := other & set(self._one.held):
            self.found.append(both)


def wait_for_lease(leases: Leases, name: str, holder: str) -> Lease:
    taken: list[Lease] = []
    eventually(lambda: taken.extend(answer_of(lambda: leases.acquire([name], holder, HOUR_SECONDS)) or []) or taken)
    return taken[0]


# Every order of events, by one clock ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated SQLite file to copy: migrating takes a hundred times longer."""
    path = tmp_path_factory.mktemp("template") / "store.db"
    store = Store.open(f"sqlite:///{path}")
    migrate.upgrade(store)
    store.read(lambda tx: tx.driver("PRAGMA wal_checkpoint(TRUNCATE)").all())
    store.close()
    return path


@contextmanager
def copied(empty_store: Path, clock: ManualClock) -> Iterator[Store]:
    # In memory where there is such a place: here the order of events is at stake, not the disk.
    parent = Path("/dev/shm") if Path("/dev/shm").is_dir() else empty_store.parent
    directory = parent / f"keyfold-{uuid.uuid4().hex}"
    directory.mkdir()
    shutil.copy(empty_store, directory / "store.db")
    store = Store.open(f"sqlite:///{directory / 'store.db'}", clock=clock)
    try:
        yield store
    finally:
        store.close()
        shutil.rmtree(directory)


NAMES = ("a", "b", "c")
HOLDERS = ("alice", "bob", "carol")


class LeasesAgainstModel(RuleBasedStateMachine):
    """Leases in the store do, act by act, what a model of a few lines says; guarded commits obey the tickets."""

    empty_store: Path

    @initialize()
    def open(self) -> None:
        self.clock = ManualClock()
        self.copy = copied(self.empty_store, self.clock)
        self.store = self.copy.__enter__()
        self.leases = SqlLeases(self.store)
        self.model: dict[str, Lease] = {}
        self.granted: list[Lease] = []
        self.adopted: dict[str, int] = {}
        self.accepted: dict[str, list[int]] = defaultdict(list)

    def teardown(self) -> None:
        if hasattr(self, "copy"):
            self.copy.__exit__(None, None, None)

    def in_force(self, name: str) -> Lease | None:
        lease = self.model.get(name)
        return lease if lease and lease.expires_at_us > self.clock.now_us() else None

    def end(self, seconds: float) -> int:
        return self.clock.now_us() + round(seconds * SECOND_US)

    @rule(names=st.sets(st.sampled_from(NAMES)), holder=st.sampled_from(HOLDERS), seconds=st.integers(1, 10))
    def acquire(self, names: set[str], holder: str, seconds: float) -> None:
        expected = [
            Lease(name, holder, self.model[name].ticket + 1 if name in self.model else 1, self.end(seconds))
            for name in sorted(names)
            if self.in_force(name) is None
        ]
        assert self.leases.acquire(list(names), holder, seconds) == expected
        self.model |= {lease.name: lease for lease in expected}
        self.granted += expected

    @rule(data=st.data(), seconds=st.integers(1, 10))
    def renew(self, data: st.DataObject, seconds: float) -> None:
        chosen = self.some_granted(data)
        current = {(lease.name, lease.ticket) for lease in chosen}
        expected = [
            Lease(name, lease.holder, lease.ticket, self.end(seconds))
            for name in NAMES
            if (lease := self.in_force(name)) and (name, lease.ticket) in current
        ]
        assert self.leases.renew(chosen, seconds) == expected
        self.model |= {lease.name: lease for lease in expected}

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        chosen = self.some_granted(data)
        self.leases.release(chosen)
        for lease in chosen:
            if self.model[lease.name].ticket == lease.ticket:
                self.model[lease.name] = Lease(lease.name, lease.holder, lease.ticket, 0)

    @rule(seconds=st.floats(-2, 12))
    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def look(self) -> None:
        assert self.leases.held(NAMES) == [lease for name in NAMES if (lease := self.in_force(name))]

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        """Whoever ever held a lease tries to commit under it, long after or not."""
        for lease in self.some_granted(data)[:1]:
            newest = self.adopted.get(lease.name, 0)
            try:
                self.store.transact(lambda tx, lease=lease: guarded(tx, lease))
            except TicketRefused:
                assert lease.ticket < newest
            else:
                assert lease.ticket >= newest
                self.adopted[lease.name] = lease.ticket
                self.accepted[lease.name].append(lease.ticket)
        assert all(tickets == sorted(tickets) for tickets in self.accepted.values())

    def some_granted(self, data: st.DataObject) -> list[Lease]:
        if not self.granted:
            return []
        return data.draw(st.lists(st.sampled_from(self.granted), max_size=4))


def guarded(tx: Transaction, lease: Lease) -> None:
    position = progress.adopt(tx, lease.name, 0, lease.ticket, "")
    progress.advance(tx, lease.name, 0, lease.ticket, position, position + 1)


def test_leases_do_what_the_model_says_in_any_order_of_acts(empty_store: Path) -> None:
    LeasesAgainstModel.empty_store = empty_store
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        LeasesAgainstModel, settings=settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)
    )


class Killed(BaseException):
    """Ends the thread of a simulated worker."""


LEASE_SECONDS = 9.0
SHARDS = 5


class SimulatedWorker:
    """A worker whose thread stands still at every call to the lease service and every commit, until it is stepped."""

    def __init__(self, simulation: "Simulation", name: str) -> None:
        self.simulation = simulation
        self.name = name
        self.fault: str | None = None
        self.is_dead = False
        self.error: BaseException | None = None
        self._granting = SqlLeases(simulation.store)
        self.shards = Shards(
            self,  # type: ignore[arg-type]
            "job",
            SHARDS,
            name,
            LEASE_SECONDS,
            monotonic=lambda: simulation.clock.now_us() / SECOND_US,
        )
        self._go, self._stands = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._live, name=name, daemon=True)
        self._thread.start()
        self._stands.acquire()

    def __getattr__(self, method: str) -> Callable[..., object]:
        """The lease service, as this worker reaches it: its requests and its answers may be lost."""

        def call(*arguments: object) -> object:
            self.stand_still()
            if self.fault == "cut off":
                raise LeasesUnreachable("the request was lost")
            answer = getattr(self._granting, method)(*arguments)
            self.stand_still()
            if self.fault == "deaf":
                raise LeasesUnreachable("the answer was lost")
            return answer

        return call

    def step(self) -> None:
        """Let the worker go on to its next standstill."""
        self._go.release()
        self._stands.acquire()
        if self.error is not None:
            raise self.error

    def stand_still(self) -> None:
        self._stands.release()
        self._go.acquire()
        if self.is_dead:
            raise Killed

    def end(self) -> None:
        self.is_dead = True
        self._go.release()
        self._thread.join()

    def _live(self) -> None:
        try:
            while True:
                self.stand_still()
                self.shards.tick()
                for shard, lease in self.shards.held.items():
                    self.stand_still()
                    self._commit(shard, lease)
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self._stands.release()

    def _commit(self, shard: int, lease: Lease) -> None:
        """Read where to go on, stand still, and commit from there."""
        with suppress(TicketRefused):
            store = self.simulation.store
            position = store.transact(lambda tx: progress.adopt(tx, "job", shard, lease.ticket, ""))
            self.stand_still()
            store.transact(lambda tx: progress.advance(tx, "job", shard, lease.ticket, position, position + 1))
            self.simulation.accepted[shard].append(lease.ticket)


class Simulation:
    """Workers that come, go, lose requests and answers and fall asleep, in an order that a seed decides."""

    def __init__(self, seed: int, store: Store, clock: ManualClock) -> None:
        self.random = random.Random(seed)
        self.store = store
        self.clock = clock
        self.accepted: dict[int, list[int]] = defaultdict(list)
        self.workers: list[SimulatedWorker] = []
        self.asleep: list[SimulatedWorker] = []
        self._newest: dict[int, tuple[int, str]] = {}

    def run(self, steps: int) -> None:
        self.add()
        for _ in range(steps):
            act = self.random.choices(
                [self.step, self.pass_time, self.change_fault, self.sleep_or_wake, self.add, self.kill],
                [100, 12, 3, 2, 1, 1],
            )[0]
            act()
            self.check()

    def add(self) -> None:
        if len(self.workers) < 7:
            name = f"{self.random.choice('abcxyz')}-{len(self.workers)}"
            self.workers.append(SimulatedWorker(self, name))

    def awake(self) -> list[SimulatedWorker]:
        return [worker for worker in self.workers if worker not in self.asleep]

    def step(self) -> None:
        if awake := self.awake():
            worker = self.random.choice(awake)
            # Runs of steps, or no tick would ever end within a lease.
            for _ in range(self.random.choice([1, 1, 2, 5, 15])):
                worker.step()
                self.check()

    def pass_time(self) -> None:
        self.clock.advance(self.random.choice([0.001, 0.5, LEASE_SECONDS / 3, LEASE_SECONDS / 2, LEASE_SECONDS]))

    def change_fault(self) -> None:
        if self.workers:
            self.random.choice(self.workers).fault = self.random.choice([None, "cut off", "deaf"])

    def sleep_or_wake(self) -> None:
        if self.asleep and self.random.random() < 0.5:
            self.asleep.remove(self.random.choice(self.asleep))
        elif awake := self.awake():
            self.asleep.append(self.random.choice(awake))

    def kill(self) -> None:
        """One that will never move again: the same as one asleep for ever."""
        if len(self.awake()) > 1:
            self.asleep.append(self.random.choice(self.awake()))

    def check(self) -> None:
        """Nobody shares a shard, asleep or not, and a ticket that was passed by does not come back."""
        seen: dict[int, str] = {}
        for worker in self.workers:
            for shard, lease in worker.shards.held.items():
                assert shard not in seen, f"{worker.name} and {seen[shard]} both hold {shard}"
                seen[shard] = worker.name
                ticket, holder = self._newest.get(shard, (0, ""))
                assert (lease.ticket, worker.name) == (ticket, holder) or lease.ticket > ticket
                self._newest[shard] = (lease.ticket, worker.name)
        assert all(tickets == sorted(tickets) for tickets in self.accepted.values())

    def settle(self) -> list[SimulatedWorker]:
        """All faults end and time passes; the workers that are awake, evenly busy."""
        for worker in self.workers:
            worker.fault = None
        if not self.awake():
            self.asleep.pop()
        awake = self.awake()
        for _ in range(8):
            self.clock.advance(LEASE_SECONDS / 3)
            self.round(awake)
        self.check_shared(awake)
        return awake

    def round(self, workers: list[SimulatedWorker]) -> None:
        """Everybody does a whole tick, in turns of a step each."""
        for _ in range(40):
            for worker in workers:
                worker.step()
                self.check()

    def check_shared(self, workers: list[SimulatedWorker]) -> None:
        sizes = [len(worker.shards.held) for worker in workers]
        assert sum(sizes) == SHARDS
        assert max(sizes) - min(sizes) <= 1

    def lose_one(self, workers: list[SimulatedWorker]) -> None:
        """One dies; a lease later the others have all of its shards, or at the next look if they raced for them."""
        survivors = workers[1:]
        self.asleep.append(workers[0])
        for seconds in (LEASE_SECONDS / 3,) * 3 + (LEASE_SECONDS / 9,):
            self.clock.advance(seconds)
            self.round(survivors)
        assert not workers[0].shards.held
        self.check_shared(survivors)

    def end(self) -> None:
        for worker in self.workers:
            worker.end()


@pytest.mark.parametrize("block", range(6))
def test_workers_never_share_a_shard_and_settle_evenly_whatever_happens(block: int, empty_store: Path) -> None:
    first = int(os.environ.get("KEYFOLD_SEED", "0"))
    for seed in range(first + block, first + SEEDS, 6):
        clock = ManualClock()
        with copied(empty_store, clock) as store:
            simulation = Simulation(seed, store, clock)
            try:
                simulation.run(steps=120)
                awake = simulation.settle()
                if len(awake) > 1:
                    simulation.lose_one(awake)
            except BaseException as error:
                error.add_note(f"KEYFOLD_SEED={seed}")
                raise
            finally:
                simulation.end()


# An ensemble ------------------------------------------------------------------------------------------------------


class Member(ZooKeeperServer):
    """One server of an ensemble."""

    def __init__(self, number: int, ensemble: dict[str, str]) -> None:
        super().__init__({**ensemble, "initLimit": "50", "syncLimit": "25"})
        self.number = number

    def mode(self) -> str:
        """Leader, follower, or nothing while there is no quorum."""
        with suppress(OSError), closing(socket.create_connection(("127.0.0.1", self.port), timeout=2)) as connection:
            connection.sendall(b"srvr")
            return connection.makefile("rb").read().partition(b"Mode: ")[2].split(b"\n")[0].decode()
        return ""

    def _prepare(self) -> None:
        super()._prepare()
        (self.directory / "data").mkdir()
        (self.directory / "data" / "myid").write_text(str(self.number))

    def _command(self) -> list[str]:
        return [part.replace("ZooKeeperServerMain", "quorum.QuorumPeerMain") for part in super()._command()]

    def _answers(self) -> bool:
        # Alone it cannot: the test waits for a quorum.
        return True


@pytest.fixture
def ensemble(zookeeper_server: ZooKeeperServer) -> Iterator[list[Member]]:
    """Three servers that elect a leader. (The fixture above says whether there is a ZooKeeper on this machine.)"""
    places = {f"server.{number}": f"127.0.0.1:{free_port()}:{free_port()}" for number in (1, 2, 3)}
    members = [Member(number, places) for number in (1, 2, 3)]
    try:
        for member in members:
            member.start()
        yield members
    finally:
        for member in members:
            member.discard()


@pytest.mark.xdist_group("zookeeper")
def test_tickets_grow_over_leaders_and_fit_63_bits(ensemble: list[Member]) -> None:
    hosts = ",".join(member.hosts for member in ensemble)
    name = f"name-{uuid.uuid4().hex}"
    tickets: list[int] = []
    with closing(ZooKeeperLeases(hosts, 10)) as leases:
        for _ in range(3):
            for _ in range(2):
                lease = wait_for_lease(leases, name, "alice")
                tickets.append(lease.ticket)
                leases.release([lease])
            (leader,) = [member for member in ensemble if member.mode() == "leader"]
            leader.kill()
            eventually(lambda: "leader" in [member.mode() for member in ensemble])
            leader.start()
    assert tickets == sorted(set(tickets))
    assert tickets[-1] < 2**63
    epochs = [ticket >> 32 for ticket in tickets]
    assert epochs[0] < epochs[2] < epochs[4]
