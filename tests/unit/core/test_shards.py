"""Claims about sharing shards: even, exclusive, still when nothing changes, and moving only what must move."""

import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyfold.core import metrics, shards
from keyfold.core.clock import SECOND_US, ManualClock
from keyfold.core.errors import LeasesUnreachable, StoreUnreachable
from keyfold.core.leases.lease import Lease, Leases
from keyfold.core.leases.sql import SqlLeases
from keyfold.core.shards import Shards, fair_shares, lease_name, slice_of
from keyfold.core.store import Store, migrate

pytestmark = pytest.mark.spec("CORE-11")

LEASE_SECONDS = 9


class Line:
    """A worker's way to the lease service, which a test cuts; it counts the calls that go over it."""

    def __init__(self, leases: Leases) -> None:
        self.leases = leases
        self.error: Exception | None = None
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> object:
        def call(*arguments: object) -> object:
            self.calls.append(name)
            if self.error is not None:
                raise self.error
            return getattr(self.leases, name)(*arguments)

        return call


class Crew:
    """Workers of one job of `count` shards, on one store, by one clock."""

    def __init__(self, store: Store, clock: ManualClock) -> None:
        self.store = store
        self.clock = clock
        self.lines: dict[str, Line] = {}

    def worker(self, name: str, count: int = 12) -> Shards:
        self.lines[name] = Line(SqlLeases(self.store))
        return Shards(
            self.lines[name],  # type: ignore[arg-type]
            "job",
            count,
            name,
            LEASE_SECONDS,
            monotonic=lambda: self.clock.now_us() / SECOND_US,
        )

    def settle(self, *workers: Shards) -> None:
        """Enough rounds for a change to be noticed, handed back and taken."""
        for _ in range(4):
            self.clock.advance(LEASE_SECONDS / 3)
            for worker in workers:
                worker.tick()


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Crew]:
    clock = ManualClock()
    store = Store.open(f"sqlite:///{tmp_path / 'keyfold.db'}", clock=clock)
    migrate.upgrade(store)
    yield Crew(store, clock)
    store.close()


def shards_of(*workers: Shards) -> list[list[int]]:
    return [sorted(worker.held) for worker in workers]


def sizes(*workers: Shards) -> list[int]:
    return sorted(len(worker.held) for worker in workers)


def all_held_once(*workers: Shards) -> bool:
    held = list(itertools.chain.from_iterable(worker.held for worker in workers))
    return sorted(held) == list(range(workers[0].count))


# The rule ---------------------------------------------------------------------------------------------------------

HOLDINGS = st.dictionaries(st.sampled_from("abcdefg"), st.integers(0, 9), min_size=1)


@given(st.integers(0, 40), HOLDINGS)
def test_shares_add_up_and_differ_by_at_most_one(count: int, holding: dict[str, int]) -> None:
    shares = fair_shares(count, list(holding), holding)
    assert sum(shares.values()) == count
    assert max(shares.values()) - min(shares.values()) <= 1


@given(st.integers(0, 40), HOLDINGS)
def test_no_other_even_sharing_moves_fewer_shards(count: int, holding: dict[str, int]) -> None:
    each, remainder = divmod(count, len(holding))
    fewest = min(
        moved({member: each + (member in more) for member in holding}, holding)
        for more in itertools.combinations(holding, remainder)
    )
    assert moved(fair_shares(count, list(holding), holding), holding) == fewest


def moved(shares: dict[str, int], holding: dict[str, int]) -> int:
    return sum(max(0, holding[member] - share) for member, share in shares.items())


@given(HOLDINGS, st.integers(0, 20))
def test_members_who_lack_shards_reach_for_different_ones(holding: dict[str, int], free_count: int) -> None:
    members = sorted(holding)
    free = list(range(100, 100 + free_count))
    shares = fair_shares(sum(holding.values()) + free_count, members, holding)
    slices = [slice_of(free, member, members, shares, holding) for member in members]
    reached = list(itertools.chain.from_iterable(slices))
    assert len(reached) == len(set(reached))
    for member, mine in zip(members, slices, strict=True):
        assert len(mine) <= max(0, shares[member] - holding[member])
    lacking = sum(max(0, shares[member] - holding[member]) for member in members)
    assert len(reached) == min(lacking, free_count)


# Sharing ----------------------------------------------------------------------------------------------------------


def test_a_worker_alone_takes_every_shard_at_its_first_tick(crew: Crew) -> None:
    alone = crew.worker("a")
    assert sorted(alone.tick()) == list(range(12))


def test_workers_share_evenly_and_no_shard_is_held_twice(crew: Crew) -> None:
    workers = [crew.worker(name, count=10) for name in "abcd"]
    crew.settle(*workers)
    assert sizes(*workers) == [2, 2, 3, 3]
    assert all_held_once(*workers)


def test_nothing_moves_once_shards_are_shared(crew: Crew) -> None:
    workers = [crew.worker(name, count=10) for name in "abcd"]
    crew.settle(*workers)
    before = [worker.held for worker in workers]
    tickets = [{shard: lease.ticket for shard, lease in held.items()} for held in before]
    for _ in range(5):
        crew.settle(*workers)
    assert [{shard: lease.ticket for shard, lease in worker.held.items()} for worker in workers] == tickets


@pytest.mark.parametrize("newcomer", ["0", "m", "z"], ids=["first by name", "in between", "last by name"])
def test_a_join_moves_only_what_the_newcomer_is_due(crew: Crew, newcomer: str) -> None:
    workers = [crew.worker(name, count=10) for name in ("a", "n", "x")]
    crew.settle(*workers)
    before = shards_of(*workers)
    joined = crew.worker(newcomer, count=10)
    crew.settle(*workers, joined)
    assert all_held_once(*workers, joined)
    assert sizes(*workers, joined) == [2, 2, 3, 3]
    for was, now in zip(before, shards_of(*workers), strict=True):
        assert set(now) <= set(was)
    assert len(joined.held) == 2


def test_a_leaver_gives_its_shards_to_the_others_at_their_next_tick(crew: Crew) -> None:
    staying, leaving = crew.worker("a"), crew.worker("b")
    crew.settle(staying, leaving)
    kept = set(staying.held)
    leaving.release_all()
    assert leaving.held == {}
    crew.clock.advance(LEASE_SECONDS / 3)
    staying.tick()
    assert all_held_once(staying)
    assert kept <= set(staying.held)


def test_the_shards_of_a_dead_worker_are_taken_over_within_a_lease(crew: Crew) -> None:
    living, dying = crew.worker("a"), crew.worker("b")
    crew.settle(living, dying)
    lost = dying.held
    for _ in range(3):
        crew.clock.advance(LEASE_SECONDS / 3)
        living.tick()
    assert all_held_once(living)
    assert all(living.held[shard].ticket > lease.ticket for shard, lease in lost.items())


def test_of_more_workers_than_shards_each_shard_has_one_and_the_rest_wait(crew: Crew) -> None:
    workers = [crew.worker(name, count=3) for name in "abcde"]
    crew.settle(*workers)
    assert sizes(*workers) == [0, 0, 1, 1, 1]
    assert all_held_once(*workers)
    next(worker for worker in workers if worker.held).release_all()
    crew.settle(*[worker for worker in workers if worker.held or worker is workers[-1]], *workers[:-1])
    assert all_held_once(*workers)


def test_a_job_without_shards_keeps_nobody_busy(crew: Crew) -> None:
    assert crew.worker("a", count=0).tick() == {}


def test_shards_of_different_jobs_have_different_leases() -> None:
    assert lease_name("job", 11) != lease_name("job1", 1) != lease_name("job#1", 1)


# Time -------------------------------------------------------------------------------------------------------------


def test_ticks_within_a_third_of_a_lease_ask_nobody(crew: Crew) -> None:
    worker = crew.worker("a")
    worker.tick()
    calls = len(crew.lines["a"].calls)
    for _ in range(100):
        worker.tick()
    assert len(crew.lines["a"].calls) == calls
    worker.tick(force=True)
    assert len(crew.lines["a"].calls) > calls


def test_while_shards_change_hands_it_looks_again_sooner_and_then_no_more(crew: Crew) -> None:
    worker = crew.worker("a")
    crew.lines["a"].leases.acquire([lease_name("job", 0)], "dead", LEASE_SECONDS)
    while len(worker.tick()) < 12:
        crew.clock.advance(LEASE_SECONDS / 9)
    calls = len(crew.lines["a"].calls)
    crew.clock.advance(LEASE_SECONDS / 9)
    worker.tick()
    settled = len(crew.lines["a"].calls)
    assert settled > calls
    crew.clock.advance(LEASE_SECONDS / 4)
    worker.tick()
    assert len(crew.lines["a"].calls) == settled


def test_a_lease_counts_from_before_it_was_asked_for(crew: Crew) -> None:
    """A slow answer does not lengthen a lease here: the service has counted since it granted it, or longer."""
    worker = crew.worker("a")
    leases = crew.lines["a"].leases

    class Slow:
        def __getattr__(self, name: str) -> object:
            def call(*arguments: object) -> object:
                answer = getattr(leases, name)(*arguments)
                if name in {"acquire", "renew"}:
                    crew.clock.advance(LEASE_SECONDS - 1)
                return answer

            return call

    crew.lines["a"].leases = Slow()  # type: ignore[assignment]
    assert sorted(worker.tick()) == list(range(12))
    crew.clock.advance(1)
    assert worker.held == {}
    crew.clock.advance(-1)
    worker.tick(force=True)
    assert sorted(worker.held) == list(range(12))
    crew.clock.advance(1)
    assert worker.held == {}


def test_a_paused_worker_that_wakes_up_believes_in_no_lease_that_passed_on(crew: Crew) -> None:
    awake, paused = crew.worker("a"), crew.worker("b")
    crew.settle(awake, paused)
    assert paused.held
    for _ in range(4):
        crew.clock.advance(LEASE_SECONDS / 3)
        awake.tick()
    assert all_held_once(awake)
    assert paused.held == {}
    crew.settle(awake, paused)
    assert all_held_once(awake, paused)
    assert sizes(awake, paused) == [6, 6]


# Work that takes longer than a lease ---------------------------------------------------------------------------------

SHORT_LEASE_SECONDS = 1.0


def by_real_time(store: Store, name: str) -> Shards:
    return Shards(SqlLeases(store), "job", 4, name, SHORT_LEASE_SECONDS)


def looks_on(worker: Shards, seconds: float) -> None:
    """Another worker's life, for some time."""
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        worker.tick()
        time.sleep(0.02)


def test_work_that_outlasts_its_lease_keeps_its_shards_and_hands_over_when_it_is_done(sqlite_store: Store) -> None:
    busy, idle = by_real_time(sqlite_store, "a"), by_real_time(sqlite_store, "b")
    with busy.at_work():
        before = busy.held
        looks_on(idle, 2 * SHORT_LEASE_SECONDS)
        assert idle.held == {}
        assert {shard: lease.ticket for shard, lease in busy.held.items()} == {
            shard: lease.ticket for shard, lease in before.items()
        }
        assert len(before) == 4
    busy.tick(force=True)
    idle.tick(force=True)
    assert sizes(busy, idle) == [2, 2]
    busy.release_all()


def test_whoever_hangs_loses_its_shards_although_its_process_lives(
    sqlite_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "WORK_SECONDS_MAX", 0.1)
    hanging, idle = by_real_time(sqlite_store, "a"), by_real_time(sqlite_store, "b")
    with hanging.at_work():
        looks_on(idle, 1.5 * SHORT_LEASE_SECONDS)
        assert hanging.held == {}
        assert len(idle.held) == 4
    hanging.release_all()


def test_a_beat_asks_nobody_where_a_tick_has_just_renewed(crew: Crew) -> None:
    worker = crew.worker("a")
    worker.tick()
    crew.clock.advance(LEASE_SECONDS / 3)
    worker.tick()
    crew.lines["a"].calls.clear()
    worker._beat()
    assert crew.lines["a"].calls == []
    crew.clock.advance(LEASE_SECONDS / 3)
    worker._beat()
    assert crew.lines["a"].calls == ["renew", "join"]


# A lease service that does not answer -----------------------------------------------------------------------------


@pytest.mark.parametrize("error", [LeasesUnreachable("gone"), StoreUnreachable("gone")])
def test_what_is_held_stays_held_until_it_expires_and_no_longer(crew: Crew, error: Exception) -> None:
    worker = crew.worker("a")
    worker.tick()
    crew.lines["a"].error = error
    crew.clock.advance(LEASE_SECONDS - 1)
    assert sorted(worker.tick()) == list(range(12))
    crew.clock.advance(1)
    assert worker.tick() == {}


def test_an_unreachable_service_is_asked_again_sooner_but_not_at_every_tick(crew: Crew) -> None:
    worker = crew.worker("a")
    worker.tick()
    crew.lines["a"].error = LeasesUnreachable("gone")
    crew.clock.advance(LEASE_SECONDS / 3)
    crew.lines["a"].calls.clear()
    for _ in range(10):
        worker.tick()
    assert len(crew.lines["a"].calls) == 1
    crew.lines["a"].error = None
    crew.clock.advance(LEASE_SECONDS / 9)
    worker.tick()
    crew.clock.advance(LEASE_SECONDS - 1)
    assert sorted(worker.held) == list(range(12))


def test_a_lease_that_expired_here_but_not_there_is_kept_under_its_ticket(crew: Crew) -> None:
    worker = crew.worker("a", count=1)
    crew.lines["a"].leases.acquire([lease_name("job", 0)], "nobody", 0)  # so that the ticket is not the first one
    worker.tick()
    ticket = worker.held[0].ticket
    crew.clock.advance(LEASE_SECONDS)
    assert worker.held == {}
    crew.clock.advance(-1)
    worker.tick(force=True)
    crew.clock.advance(LEASE_SECONDS - 1)
    assert worker.held[0].ticket == ticket


def test_an_answer_lost_while_taking_leaves_shards_idle_for_a_lease_and_then_they_are_taken(crew: Crew) -> None:
    worker = crew.worker("a")
    line = crew.lines["a"]
    granting = line.leases

    class LosesAnswers:
        def __getattr__(self, name: str) -> object:
            def call(*arguments: object) -> object:
                answer = getattr(granting, name)(*arguments)
                if name == "acquire":
                    raise LeasesUnreachable("the answer was lost")
                return answer

            return call

    line.leases = LosesAnswers()  # type: ignore[assignment]
    assert worker.tick() == {}
    line.leases = granting
    crew.settle(worker)
    assert sorted(worker.held) == list(range(12))


def test_what_is_handed_back_is_forgotten_first(crew: Crew) -> None:
    """Otherwise, between the service's act and our note of it, two would hold one shard."""
    worker, other = crew.worker("a"), crew.worker("b")
    worker.tick()
    seen: list[set[int]] = []
    granting = crew.lines["a"].leases

    class Watches:
        def __getattr__(self, name: str) -> object:
            def call(*arguments: object) -> object:
                if name == "release":
                    released: Sequence[Lease] = arguments[0]  # type: ignore[assignment]
                    seen.append({int(lease.name.rpartition("#")[2]) for lease in released} & set(worker.held))
                return getattr(granting, name)(*arguments)

            return call

    crew.lines["a"].leases = Watches()  # type: ignore[assignment]
    crew.settle(other, worker)
    worker.release_all()
    assert seen == [set(), set()]


def test_everything_is_let_go_here_even_if_it_cannot_be_handed_back(crew: Crew) -> None:
    worker = crew.worker("a")
    worker.tick()
    crew.lines["a"].error = LeasesUnreachable("gone")
    crew.lines["a"].calls.clear()
    with pytest.raises(LeasesUnreachable):
        worker.release_all()
    assert worker.held == {}
    assert crew.lines["a"].calls == ["release", "leave"]


# What others see --------------------------------------------------------------------------------------------------


def test_the_metric_says_how_many_shards_are_held_now(crew: Crew) -> None:
    def shown() -> float | None:
        return metrics.REGISTRY.get_sample_value("keyfold_shards_held", {"job": "job"})

    worker = crew.worker("a")
    worker.tick()
    assert shown() == 12
    crew.lines["a"].error = LeasesUnreachable("gone")
    crew.clock.advance(LEASE_SECONDS)
    worker.tick()
    assert shown() == 0
    crew.lines["a"].error = None
    crew.settle(worker)
    assert shown() == 12
    worker.release_all()
    assert shown() == 0


def test_a_thread_that_ticks_while_another_does_gets_what_is_held_and_waits_for_nobody(crew: Crew) -> None:
    worker = crew.worker("a")
    worker.tick()
    granting = crew.lines["a"].leases
    answers: list[dict[int, Lease]] = []

    class Asks:
        def __getattr__(self, name: str) -> object:
            def call(*arguments: object) -> object:
                # As another thread would, in the middle of a tick.
                answers.append(worker.tick(force=True))
                return getattr(granting, name)(*arguments)

            return call

    crew.lines["a"].leases = Asks()  # type: ignore[assignment]
    worker.tick(force=True)
    assert answers
    assert all(sorted(answer) == list(range(12)) for answer in answers)
