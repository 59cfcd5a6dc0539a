"""What every lease service must do, run on each of them: SQLite, PostgreSQL, the form for Citus, ZooKeeper."""

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest
import sqlalchemy as sa
from kazoo.client import KazooClient

import keyfold.core.tables
import keyfold.tally.tables  # noqa: F401
from keyfold.core import metrics
from keyfold.core.clock import ManualClock
from keyfold.core.errors import LeasesUnreachable, LostRace, SettingsWrong, TicketRefused
from keyfold.core.leases.lease import Lease, Leases, Published
from keyfold.core.leases.sql import SqlLeases
from keyfold.core.leases.zookeeper import ZooKeeperLeases
from keyfold.core.store import Store, migrate
from tests.servers.zookeeper import ZooKeeperServer

pytestmark = pytest.mark.spec("CORE-10")

LONG_SECONDS = 60
PATIENCE_SECONDS = 60
# A server that has just started may overlook a client, which then waits as long as its session for an answer.
RECONNECTING_SESSION_SECONDS = 5


class Service(Protocol):
    """A lease service under test. Its clients are strangers to each other, as processes are."""

    short_seconds: float

    def client(self) -> Leases: ...

    def after_a_short_lease(self, condition: Callable[[], bool]) -> bool:
        """Whether it holds once a short lease that was granted before this call has expired."""
        ...


class SqlService:
    """One store; time passes by hand."""

    short_seconds = 10.0

    def __init__(self, store: Store, clock: ManualClock) -> None:
        self.store = store
        self.clock = clock

    def client(self) -> Leases:
        return SqlLeases(self.store)

    def after_a_short_lease(self, condition: Callable[[], bool]) -> bool:
        self.clock.advance(self.short_seconds)
        return condition()


class ZooKeeperService:
    """One server; time passes by itself."""

    short_seconds = 1.5

    def __init__(self, server: ZooKeeperServer) -> None:
        self.server = server
        self.clients: list[ZooKeeperLeases] = []

    def client(self, session_seconds: float = 10) -> ZooKeeperLeases:
        self.clients.append(ZooKeeperLeases(self.server.hosts, session_seconds))
        return self.clients[-1]

    def after_a_short_lease(self, condition: Callable[[], bool]) -> bool:
        time.sleep(self.short_seconds)
        return eventually(condition)

    def close(self) -> None:
        for client in self.clients:
            client.close()


def migrated(url: str, clock: ManualClock | None = None) -> Store:
    store = Store.open(url, clock=clock)
    migrate.upgrade(store)
    return store


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


SQL = ["sqlite", "postgres", "postgres_15", "citus_form"]


def open_sql_service(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SqlService]:
    clock = ManualClock()
    if kind == "sqlite":
        store = migrated(f"sqlite:///{tmp_path}/store.db", clock)
    else:
        store = migrated(request.getfixturevalue("postgres_15_url" if kind == "postgres_15" else "postgres_url"), clock)
    if kind == "citus_form":
        # Batches as rows of VALUES, as on a Citus cluster, but by a plain server.
        store.engine._citus = True  # type: ignore[attr-defined]
    yield SqlService(store, clock)
    store.close()


@pytest.fixture
def sql_service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SqlService]:
    yield from open_sql_service(request.param, request, tmp_path)


@pytest.fixture
def zookeeper(zookeeper_server: ZooKeeperServer) -> Iterator[ZooKeeperService]:
    zookeeper_server.start()
    service = ZooKeeperService(zookeeper_server)
    yield service
    zookeeper_server.start()
    service.close()


@pytest.fixture(params=[*SQL, pytest.param("zookeeper", marks=pytest.mark.xdist_group("zookeeper"))])
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Service]:
    if request.param == "zookeeper":
        yield request.getfixturevalue("zookeeper")
    else:
        yield from open_sql_service(request.param, request, tmp_path)


@pytest.fixture
def name() -> str:
    """A name that no other test uses: tests share the ZooKeeper server."""
    return f"name-{uuid.uuid4().hex}"


def only(leases: list[Lease]) -> Lease:
    (lease,) = leases
    return lease


# Taking -----------------------------------------------------------------------------------------------------------


def test_free_names_are_granted_to_whoever_asks_one_lease_each_in_order(service: Service, name: str) -> None:
    names = [f"{name}-{n}" for n in (2, 0, 1)]
    granted = service.client().acquire(names, "alice", LONG_SECONDS)
    assert [(lease.name, lease.holder) for lease in granted] == [(each, "alice") for each in sorted(names)]


def test_a_held_lease_is_refused_to_everybody_else(service: Service, name: str) -> None:
    only(service.client().acquire([name], "alice", LONG_SECONDS))
    assert service.client().acquire([name], "bob", LONG_SECONDS) == []


def test_a_holder_that_asks_again_is_refused_and_keeps_its_ticket(service: Service, name: str) -> None:
    leases = service.client()
    lease = only(leases.acquire([name], "alice", LONG_SECONDS))
    assert leases.acquire([name], "alice", LONG_SECONDS) == []
    assert only(leases.held([name])).ticket == lease.ticket


def test_a_batch_takes_what_is_free_and_leaves_the_rest(service: Service, name: str) -> None:
    names = [f"{name}-{n}" for n in range(6)]
    service.client().acquire(names[1:3], "alice", LONG_SECONDS)
    taken = service.client().acquire(names, "bob", LONG_SECONDS)
    assert [lease.name for lease in taken] == [names[0], *names[3:]]


def test_a_name_that_stands_twice_in_a_batch_is_granted_once(service: Service, name: str) -> None:
    only(service.client().acquire([name, name], "alice", LONG_SECONDS))


def test_an_empty_batch_asks_for_nothing(service: Service) -> None:
    leases = service.client()
    assert leases.acquire([], "alice", LONG_SECONDS) == leases.renew([], LONG_SECONDS) == leases.held([]) == []
    leases.release([])


def test_a_batch_of_hundreds_of_names_is_taken_renewed_and_handed_back(service: Service, name: str) -> None:
    leases = service.client()
    names = sorted(f"{name}-{n}" for n in range(300))
    taken = leases.acquire(names, "alice", LONG_SECONDS)
    assert [lease.name for lease in taken] == names
    assert [lease.name for lease in leases.renew(taken, LONG_SECONDS)] == names
    leases.release(taken)
    assert leases.held(names) == []


def test_any_text_can_be_a_name_a_holder_a_job_and_a_member(service: Service, name: str) -> None:
    leases = service.client()
    texts = [f"{name}{odd}" for odd in ("/a/b", "..", "%2F", "ключ", "a b", "'\"", "a\nb", "{}", "#1")] + ["."]
    taken = leases.acquire(texts, "holder/ключ", LONG_SECONDS)
    assert {lease.name for lease in taken} == set(texts)
    assert {(lease.name, lease.holder) for lease in leases.held(texts)} == {(text, "holder/ключ") for text in texts}
    leases.release(taken)
    for text in texts:
        leases.join(f"{name}/..", text, LONG_SECONDS)
    assert leases.members(f"{name}/..") == sorted(texts)


def test_of_many_who_race_for_the_same_names_one_gets_each_and_none_runs_again(service: Service, name: str) -> None:
    names = [f"{name}-{n}" for n in range(20)]
    racers = [service.client() for _ in range(6)]
    results: list[list[Lease]] = [[] for _ in racers]
    barrier = threading.Barrier(len(racers))
    before = times_run_again()

    def race(index: int) -> None:
        barrier.wait()
        # Each in another order, so that without a common lock order they would deadlock.
        mixed = names[index * 3 :] + names[: index * 3]
        results[index] = racers[index].acquire(mixed if index % 2 else mixed[::-1], f"racer-{index}", LONG_SECONDS)

    threads = [threading.Thread(target=race, args=(index,)) for index in range(len(racers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    granted = {(lease.name, lease.holder, lease.ticket) for taken in results for lease in taken}
    assert sorted(each for each, _, _ in granted) == sorted(names)
    assert granted == {(lease.name, lease.holder, lease.ticket) for lease in racers[0].held(names)}
    assert times_run_again() == before


def times_run_again() -> float:
    """How often a transaction about leases lost a race, a deadlock say."""
    (retries,) = metrics.RETRIES.collect()
    return sum(sample.value for sample in retries.samples if "leases" in sample.labels.get("name", ""))


# Tickets ----------------------------------------------------------------------------------------------------------


def test_every_taking_has_a_greater_ticket_that_fits_63_bits(service: Service, name: str) -> None:
    alice, bob = service.client(), service.client()
    tickets = []
    for turn in range(6):
        leases, holder = (alice, "alice") if turn % 2 else (bob, "bob")
        lease = only(leases.acquire([name], holder, LONG_SECONDS))
        tickets.append(lease.ticket)
        leases.release([lease])
    assert tickets == sorted(set(tickets))
    assert 0 < tickets[0] < tickets[-1] < 2**63


def test_renewing_keeps_the_ticket(service: Service, name: str) -> None:
    leases = service.client()
    lease = only(leases.acquire([name], "alice", LONG_SECONDS))
    assert only(leases.renew([lease], LONG_SECONDS)).ticket == lease.ticket


def test_a_lease_taken_after_it_expired_has_a_greater_ticket(service: Service, name: str) -> None:
    old = only(service.client().acquire([name], "alice", service.short_seconds))
    bob = service.client()
    taken: list[Lease] = []
    assert service.after_a_short_lease(lambda: bool(taken.extend(bob.acquire([name], "bob", LONG_SECONDS)) or taken))
    assert only(taken).ticket > old.ticket


# Renewing ---------------------------------------------------------------------------------------------------------


def test_a_renewed_lease_outlives_its_first_term(service: Service, name: str) -> None:
    leases = service.client()
    lease = only(leases.acquire([name], "alice", service.short_seconds))
    only(leases.renew([lease], LONG_SECONDS))
    assert service.after_a_short_lease(lambda: True)
    assert service.client().acquire([name], "bob", LONG_SECONDS) == []


def test_an_expired_lease_is_not_renewed_even_if_nobody_took_it(service: Service, name: str) -> None:
    leases = service.client()
    lease = only(leases.acquire([name], "alice", service.short_seconds))
    assert service.after_a_short_lease(lambda: True)
    assert leases.renew([lease], LONG_SECONDS) == []
    assert service.after_a_short_lease(lambda: leases.held([name]) == [])


def test_a_lease_that_passed_on_is_left_out_of_the_renewed(service: Service, name: str) -> None:
    alice, bob = service.client(), service.client()
    lost, kept = alice.acquire([f"{name}-0", f"{name}-1"], "alice", LONG_SECONDS)
    alice.release([lost])
    passed = only(bob.acquire([lost.name], "bob", LONG_SECONDS))
    assert [lease.name for lease in alice.renew([lost, kept], LONG_SECONDS)] == [kept.name]
    assert only(bob.held([lost.name])).ticket == passed.ticket


def test_a_lease_with_a_made_up_ticket_is_not_renewed(service: Service, name: str) -> None:
    leases = service.client()
    lease = only(leases.acquire([name], "alice", LONG_SECONDS))
    made_up = Lease(name, "alice", lease.ticket + 1, lease.expires_at_us)
    assert leases.renew([made_up], LONG_SECONDS) == []
    only(leases.renew([lease], LONG_SECONDS))


def test_a_lease_may_stand_beside_an_older_one_of_its_name(service: Service, name: str) -> None:
    leases = service.client()
    old = only(leases.acquire([name], "alice", LONG_SECONDS))
    leases.release([old])
    new = only(leases.acquire([name], "alice", LONG_SECONDS))
    assert only(leases.renew([new, old, new], LONG_SECONDS)).ticket == new.ticket
    leases.release([old, new, new])
    assert leases.held([name]) == []


# Handing back -----------------------------------------------------------------------------------------------------


def test_a_released_lease_is_free_at_once(service: Service, name: str) -> None:
    alice = service.client()
    alice.release(alice.acquire([name], "alice", LONG_SECONDS))
    only(service.client().acquire([name], "bob", LONG_SECONDS))


def test_releasing_a_lease_that_passed_on_leaves_the_new_holder_alone(service: Service, name: str) -> None:
    alice, bob = service.client(), service.client()
    old = only(alice.acquire([name], "alice", LONG_SECONDS))
    alice.release([old])
    new = only(bob.acquire([name], "bob", LONG_SECONDS))
    alice.release([old])
    assert only(bob.held([name])).ticket == new.ticket
    only(bob.renew([new], LONG_SECONDS))


def test_a_released_lease_is_not_renewed(service: Service, name: str) -> None:
    leases = service.client()
    lease = only(leases.acquire([name], "alice", LONG_SECONDS))
    leases.release([lease])
    assert leases.renew([lease], LONG_SECONDS) == []


# Looking ----------------------------------------------------------------------------------------------------------


def test_held_shows_everybody_who_holds_what_under_which_ticket(service: Service, name: str) -> None:
    names = [f"{name}-{n}" for n in range(4)]
    first = only(service.client().acquire([names[0]], "alice", LONG_SECONDS))
    second = only(service.client().acquire([names[2]], "bob", LONG_SECONDS))
    seen = service.client().held(names)
    assert [(lease.name, lease.holder, lease.ticket) for lease in seen] == [
        (names[0], "alice", first.ticket),
        (names[2], "bob", second.ticket),
    ]


def test_an_expired_lease_is_not_in_force(service: Service, name: str) -> None:
    service.client().acquire([name], "alice", service.short_seconds)
    leases = service.client()
    assert service.after_a_short_lease(lambda: leases.held([name]) == [])


# Members ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("CORE-11")
def test_members_are_those_who_joined_and_did_not_leave_sorted(service: Service, name: str) -> None:
    leases = service.client()
    for member in ("b", "C", "a", "é"):
        service.client().join(name, member, LONG_SECONDS)
    assert leases.members(name) == ["C", "a", "b", "é"]
    service.client().leave(name, "b")
    assert leases.members(name) == ["C", "a", "é"]


@pytest.mark.spec("CORE-11")
def test_a_member_that_falls_silent_is_no_longer_one(service: Service, name: str) -> None:
    service.client().join(name, "silent", service.short_seconds)
    leases = service.client()
    leases.join(name, "loud", LONG_SECONDS)
    assert service.after_a_short_lease(lambda: leases.members(name) == ["loud"])


@pytest.mark.spec("CORE-11")
def test_a_member_that_joins_again_and_again_is_one_member_and_stays(service: Service, name: str) -> None:
    leases = service.client()
    leases.join(name, "alice", service.short_seconds)
    leases.join(name, "alice", LONG_SECONDS)
    assert service.after_a_short_lease(lambda: True)
    assert leases.members(name) == ["alice"]


@pytest.mark.spec("CORE-11")
def test_the_members_of_one_job_are_not_those_of_another(service: Service, name: str) -> None:
    leases = service.client()
    leases.join(f"{name}-1", "alice", LONG_SECONDS)
    leases.leave(f"{name}-2", "alice")
    assert leases.members(f"{name}-1") == ["alice"]
    assert leases.members(f"{name}-2") == []


# In the store alone -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sql_service", SQL, indirect=True)
def test_every_act_is_one_statement_however_large_the_batch(sql_service: SqlService) -> None:
    leases = SqlLeases(sql_service.store)
    names = [f"name-{n}" for n in range(50)]
    taken: list[Lease] = []
    acts: list[Callable[[], object]] = [
        lambda: taken.extend(leases.acquire(names, "alice", LONG_SECONDS)),
        lambda: leases.renew(taken, LONG_SECONDS),
        lambda: leases.held(names),
        lambda: leases.release(taken),
    ]
    leases.held(names[:1])  # asks once what kind of server this is
    for act in acts:
        statements: list[str] = []

        def count(_1: object, _2: object, statement: str, *_: object, seen: list[str] = statements) -> None:
            if not statement.startswith(("BEGIN", "COMMIT")):
                seen.append(statement)

        sa.event.listen(sa.Engine, "before_cursor_execute", count)
        try:
            act()
        finally:
            sa.event.remove(sa.Engine, "before_cursor_execute", count)
        assert len(statements) == 1, statements


@pytest.mark.parametrize("sql_service", SQL, indirect=True)
def test_a_released_lease_is_free_also_by_a_clock_that_was_set_back(sql_service: SqlService) -> None:
    leases = sql_service.client()
    lease = only(leases.acquire(["name"], "alice", LONG_SECONDS))
    leases.release([lease])
    sql_service.clock.advance(-86_400)
    assert only(leases.acquire(["name"], "bob", LONG_SECONDS)).ticket > lease.ticket


@pytest.mark.parametrize("sql_service", SQL, indirect=True)
def test_a_newcomer_clears_its_job_of_the_dead_and_no_other(sql_service: SqlService) -> None:
    for worker in range(5):
        sql_service.client().join("job", f"worker-{worker}", sql_service.short_seconds)
    sql_service.client().join("other", "worker", sql_service.short_seconds)
    sql_service.clock.advance(sql_service.short_seconds)
    sql_service.client().join("job", "newcomer", LONG_SECONDS)
    rows = sql_service.store.read(lambda tx: [tuple(row) for row in tx.driver("SELECT job, member FROM members")])
    assert sorted(rows) == [("job", "newcomer"), ("other", "worker")]


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_leases_expire_by_the_clock_of_the_database(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    url = f"sqlite:///{tmp_path}/store.db" if kind == "sqlite" else request.getfixturevalue("postgres_url")
    store = migrated(url)
    alice, bob = SqlLeases(store), SqlLeases(store)
    only(alice.acquire(["long"], "alice", LONG_SECONDS))
    old = only(alice.acquire(["short"], "alice", 0.2))
    taken: list[Lease] = []
    assert eventually(lambda: bool(taken.extend(bob.acquire(["short", "long"], "bob", LONG_SECONDS)) or taken))
    assert only(taken).name == "short"
    assert only(taken).ticket > old.ticket
    store.close()


# In ZooKeeper alone -----------------------------------------------------------------------------------------------


def expire_session(leases: ZooKeeperLeases) -> None:
    """End the session as the ensemble would: a second connection with its credentials closes it."""
    identity = leases._client.client_id
    twin = KazooClient(leases._hosts, client_id=identity)
    twin.start()
    twin.stop()
    twin.close()


@pytest.mark.xdist_group("zookeeper")
def test_the_ticket_is_the_zxid_by_which_the_holder_was_created(zookeeper: ZooKeeperService, name: str) -> None:
    leases = zookeeper.client()
    lease = only(leases.acquire([name], "alice", LONG_SECONDS))
    above, holder = (leases._client.exists(f"/keyfold/leases/{name}{end}") for end in ("", "/holder"))
    assert lease.ticket == holder.czxid == above.mzxid


@pytest.mark.xdist_group("zookeeper")
def test_tickets_grow_over_a_kill_of_the_server_and_over_a_deleted_node(zookeeper: ZooKeeperService, name: str) -> None:
    leases = zookeeper.client(RECONNECTING_SESSION_SECONDS)
    first = only(leases.acquire([name], "alice", LONG_SECONDS))
    leases.release([first])
    zookeeper.server.kill()
    zookeeper.server.start()
    second: list[Lease] = []
    assert eventually(
        lambda: bool(second.extend(reached(lambda: leases.acquire([name], "bob", LONG_SECONDS)))) or bool(second)
    )
    leases._client.delete(f"/keyfold/leases/{name}", recursive=True)
    third = only(leases.acquire([name], "carol", LONG_SECONDS))
    assert first.ticket < only(second).ticket < third.ticket


def reached(act: Callable[[], list[Lease]]) -> list[Lease]:
    """The answer, or none while the service does not give one."""
    try:
        return act()
    except LeasesUnreachable:
        return []


@pytest.mark.xdist_group("zookeeper")
def test_with_its_session_a_holder_loses_every_lease_and_its_membership(zookeeper: ZooKeeperService, name: str) -> None:
    alice, bob = zookeeper.client(), zookeeper.client()
    names = [f"{name}-0", f"{name}-1"]
    old = alice.acquire(names, "alice", LONG_SECONDS)
    alice.join(name, "alice", LONG_SECONDS)
    expire_session(alice)
    assert bob.held(names) == []
    assert bob.members(name) == []
    assert eventually(lambda: answered(lambda: alice.renew(old, LONG_SECONDS)) == [])
    assert alice._terms == alice._joined == {}
    taken = bob.acquire(names, "bob", LONG_SECONDS)
    assert min(lease.ticket for lease in taken) > max(lease.ticket for lease in old)


def answered(act: Callable[[], list[Lease]]) -> list[Lease] | None:
    try:
        return act()
    except LeasesUnreachable:
        return None


@pytest.mark.xdist_group("zookeeper")
def test_a_new_session_does_not_renew_the_leases_of_the_old_one(zookeeper: ZooKeeperService, name: str) -> None:
    alice = zookeeper.client()
    old = only(alice.acquire([name], "alice", LONG_SECONDS))
    expire_session(alice)
    new: list[Lease] = []
    assert eventually(
        lambda: bool(new.extend(reached(lambda: alice.acquire([name], "alice", LONG_SECONDS)))) or bool(new)
    )
    assert alice.renew([old], LONG_SECONDS) == []
    assert only(alice.renew(new, LONG_SECONDS)).ticket > old.ticket


@pytest.mark.xdist_group("zookeeper")
def test_a_holder_that_somebody_deleted_is_lost_whoever_comes_after(zookeeper: ZooKeeperService, name: str) -> None:
    alice, bob = zookeeper.client(), zookeeper.client()
    names = [f"{name}-0", f"{name}-1"]
    old = alice.acquire(names, "alice", LONG_SECONDS)
    for each in names:
        alice._client.delete(f"/keyfold/leases/{each}/holder")
    only(bob.acquire(names[:1], "bob", LONG_SECONDS))
    assert alice.renew(old, LONG_SECONDS) == []
    assert [lease.holder for lease in alice.held(names)] == ["bob"]


@pytest.mark.xdist_group("zookeeper")
def test_a_member_whose_session_ended_joins_again(zookeeper: ZooKeeperService, name: str) -> None:
    alice, bob = zookeeper.client(), zookeeper.client()
    alice.join(name, "alice", LONG_SECONDS)
    expire_session(alice)

    def joins() -> bool:
        try:
            alice.join(name, "alice", LONG_SECONDS)
        except LeasesUnreachable:
            return False
        return True

    assert eventually(joins)
    assert bob.members(name) == ["alice"]


@pytest.mark.xdist_group("zookeeper")
def test_a_member_replaces_the_node_that_its_earlier_session_left(zookeeper: ZooKeeperService, name: str) -> None:
    before, after = zookeeper.client(), zookeeper.client()
    before.join(name, "alice", LONG_SECONDS)
    after.join(name, "alice", LONG_SECONDS)
    before.close()
    assert after.members(name) == ["alice"]


@pytest.mark.xdist_group("zookeeper")
def test_closing_frees_everything_at_once(zookeeper: ZooKeeperService, name: str) -> None:
    alice, bob = zookeeper.client(session_seconds=LONG_SECONDS), zookeeper.client()
    alice.acquire([name], "alice", LONG_SECONDS)
    alice.join(name, "alice", LONG_SECONDS)
    alice.close()
    only(bob.acquire([name], "bob", LONG_SECONDS))
    assert bob.members(name) == []
    with pytest.raises(LeasesUnreachable):
        alice.held([name])


@pytest.mark.xdist_group("zookeeper")
def test_a_silent_server_is_an_error_and_prolongs_nothing(zookeeper: ZooKeeperService, name: str) -> None:
    leases = zookeeper.client(session_seconds=LONG_SECONDS)
    leases._answer_seconds = 0.5
    lease = only(leases.acquire([name], "alice", LONG_SECONDS))
    term = leases._terms[name]
    zookeeper.server.pause()
    acts: list[Callable[[], object]] = [
        lambda: leases.renew([lease], LONG_SECONDS),
        lambda: leases.acquire([f"{name}-other"], "alice", LONG_SECONDS),
        lambda: leases.held([name]),
        lambda: leases.join(name, "alice", LONG_SECONDS),
        lambda: leases.members(name),
    ]
    for act in acts:
        with pytest.raises(LeasesUnreachable):
            act()
    assert leases._terms[name] == term
    zookeeper.server.resume()
    assert eventually(lambda: answered(lambda: leases.renew([lease], LONG_SECONDS)) not in (None, []))


@pytest.mark.xdist_group("zookeeper")
def test_a_lease_that_could_not_be_handed_back_is_handed_back_later(zookeeper: ZooKeeperService, name: str) -> None:
    alice, bob = zookeeper.client(session_seconds=LONG_SECONDS), zookeeper.client()
    alice._answer_seconds = 0.5
    lease = only(alice.acquire([name], "alice", LONG_SECONDS))
    alice.join(name, "alice", LONG_SECONDS)
    zookeeper.server.pause()
    with pytest.raises(LeasesUnreachable):
        alice.release([lease])
    with pytest.raises(LeasesUnreachable):
        alice.leave(name, "alice")
    zookeeper.server.resume()
    assert eventually(lambda: answered(lambda: bob.held([name])) == [])
    assert eventually(lambda: bob.members(name) == [])


@pytest.mark.xdist_group("zookeeper")
def test_what_a_lost_answer_took_is_handed_back(zookeeper: ZooKeeperService, name: str) -> None:
    alice, bob = zookeeper.client(session_seconds=LONG_SECONDS), zookeeper.client()
    alice.release(alice.acquire([name], "alice", LONG_SECONDS))
    taken_at = alice._client.exists(f"/keyfold/leases/{name}").mzxid
    alice._answer_seconds = 0.5
    zookeeper.server.pause()
    with pytest.raises(LeasesUnreachable):
        alice.acquire([name], "alice", LONG_SECONDS)
    zookeeper.server.resume()
    # The request lay in the paused server's socket and is served now, though nobody waits for its answer.
    assert eventually(lambda: bob._begin().client.exists(f"/keyfold/leases/{name}").mzxid > taken_at)
    assert eventually(lambda: bob.held([name]) == [])
    only(alice.acquire([name], "alice", LONG_SECONDS))


def test_a_server_that_is_not_there_is_an_error_and_no_hang() -> None:
    leases = ZooKeeperLeases("127.0.0.1:1", session_seconds=1)
    with pytest.raises(LeasesUnreachable):
        leases.acquire(["name"], "alice", LONG_SECONDS)
    leases.close()


def test_no_server_named_is_a_mistake_in_the_settings() -> None:
    with pytest.raises(SettingsWrong, match="no ZooKeeper is named"):
        ZooKeeperLeases("", session_seconds=1)


@pytest.mark.xdist_group("zookeeper")
def test_losing_a_server_writes_one_line_a_change_and_nothing_through_logging(
    zookeeper: ZooKeeperService, name: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    leases = zookeeper.client(RECONNECTING_SESSION_SECONDS)
    leases.acquire([name], "alice", LONG_SECONDS)
    zookeeper.server.kill()
    leases._answer_seconds = 0.5
    for _ in range(3):
        with pytest.raises(LeasesUnreachable):
            leases.held([name])
    zookeeper.server.start()
    assert eventually(lambda: answered(lambda: leases.held([name])) is not None)
    captured = capfd.readouterr()
    assert (captured.out + captured.err).count("zookeeper session suspended") == 1
    assert not caplog.records


# Publishing under a lease -----------------------------------------------------------------------------------------


@pytest.mark.spec("NUM-11")
def test_a_holder_publishes_from_version_to_version(service: Service, name: str) -> None:
    leases = service.client()
    lease = only(leases.acquire([name], "alice", LONG_SECONDS))
    assert leases.published(name) is None
    assert leases.publish(name, b"one", None, lease) == 0
    assert leases.publish(name, b"two", 0, lease) == 1
    assert service.client().published(name) == Published(b"two", 1)


def test_a_publication_from_a_version_that_is_gone_loses_the_race(service: Service, name: str) -> None:
    leases = service.client()
    lease = only(leases.acquire([name], "alice", LONG_SECONDS))
    with pytest.raises(LostRace):
        leases.publish(name, b"none yet", 0, lease)
    leases.publish(name, b"one", None, lease)
    leases.publish(name, b"two", 0, lease)
    for version in (0, None):
        with pytest.raises(LostRace):
            leases.publish(name, b"late", version, lease)
    assert leases.published(name) == Published(b"two", 1)


@pytest.mark.spec("NUM-11")
def test_a_holder_whose_lease_passed_on_cannot_publish(service: Service, name: str) -> None:
    alice, bob = service.client(), service.client()
    old = only(alice.acquire([name], "alice", LONG_SECONDS))
    alice.publish(name, b"by alice", None, old)
    alice.release([old])
    new = only(bob.acquire([name], "bob", LONG_SECONDS))
    with pytest.raises(TicketRefused):
        alice.publish(name, b"late", 0, old)
    assert bob.publish(name, b"by bob", 0, new) == 1
    bob.release([new])
    only(alice.acquire([name], "alice", LONG_SECONDS))
    with pytest.raises(TicketRefused):
        alice.publish(name, b"later", 1, old)


@pytest.mark.spec("NUM-11")
def test_a_holder_past_its_lease_cannot_publish_even_if_nobody_took_it(service: Service, name: str) -> None:
    leases = service.client()
    lease = only(leases.acquire([name], "alice", service.short_seconds))
    assert service.after_a_short_lease(lambda: leases.held([name]) == [])
    with pytest.raises(TicketRefused):
        leases.publish(name, b"late", None, lease)
    assert leases.published(name) is None


@pytest.mark.spec("NUM-11")
def test_of_many_who_publish_from_one_version_one_does(service: Service, name: str) -> None:
    leases = service.client()
    lease = only(leases.acquire([name], "alice", LONG_SECONDS))
    leases.publish(name, b"first", None, lease)
    outcomes: list[object] = []

    def publish(number: int) -> None:
        try:
            outcomes.append(leases.publish(name, b"%d" % number, 0, lease))
        except LostRace:
            outcomes.append("lost")

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, outcomes)) == ["1", "lost", "lost", "lost"]


@pytest.mark.xdist_group("zookeeper")
@pytest.mark.spec("NUM-11")
def test_a_takeover_between_the_look_and_the_publication_is_noticed(
    zookeeper: ZooKeeperService, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, bob = zookeeper.client(), zookeeper.client()
    lease = only(alice.acquire([name], "alice", LONG_SECONDS))
    look = alice._fence

    def look_and_lose(*arguments: object) -> object:
        fence = look(*arguments)  # type: ignore[arg-type]
        alice.release([lease])
        only(bob.acquire([name], "bob", LONG_SECONDS))
        return fence

    monkeypatch.setattr(alice, "_fence", look_and_lose)
    with pytest.raises(TicketRefused):
        alice.publish(name, b"late", None, lease)
    assert bob.published(name) is None
