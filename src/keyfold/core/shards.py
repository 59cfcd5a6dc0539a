"""Even sharing of a job's shards among its live workers, by leases, without anyone in charge.

Every worker looks at the same facts (who is alive, who holds what) and follows the same rule, so that they agree
without talking: each is due `count // workers` shards, and the remainder goes to those who already hold most, by
name where they hold alike. So a join or a death moves no shard that could stay. Whoever holds too much hands back;
whoever holds too little takes its own slice of what is free.

A lease counts here for `lease_seconds` from *before* it was asked for, by the local monotonic clock, so a worker stops
believing in it before anybody else can have it, whether or not the lease service answers. A worker that slept past
that moment inside a transaction is stopped by its ticket at the guard row (keyfold.core.progress), not here.

A piece of work may outlast a lease: what is held is renewed in the background while it goes on (`at_work`). Otherwise
two workers would take a long piece from each other, each before the other has done it, and it would never be done.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import structlog
from msgspec import Struct

from keyfold.core import metrics
from keyfold.core.errors import Unavailable
from keyfold.core.heartbeat import Heartbeat
from keyfold.core.leases.lease import Lease, Leases

log = structlog.get_logger(__name__)

# Three chances to renew within a lease; more while shards change hands or the service does not answer.
TICKS_PER_LEASE = 3
HURRIED_TICKS_PER_LEASE = 10
# Twice as often as there is something to renew, so that a renewal is late by a sixth of the lease at most.
BEATS_PER_LEASE = 2 * TICKS_PER_LEASE
# Whoever has not ticked for so long hangs, and loses its shards although its process lives. Ten times what a
# transaction may take by default.
WORK_SECONDS_MAX = 600.0


class _Kept(Struct, frozen=True):
    lease: Lease
    valid_until: float


class Shards:
    """One worker's share of a job. `worker` must be unique to this process: two of one name would share leases."""

    def __init__(
        self,
        leases: Leases,
        job: str,
        count: int,
        worker: str,
        lease_seconds: float,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.job = job
        self.count = count
        self.worker = worker
        self._leases = leases
        self._lease_seconds = lease_seconds
        self._monotonic = monotonic
        self._shards = {lease_name(job, shard): shard for shard in range(count)}
        # Replaced, never changed in place: worker threads read it while a tick goes on.
        self._kept: Mapping[int, _Kept] = {}
        self._turn = threading.Lock()
        self._next_at = float("-inf")
        self._renewed_at = float("-inf")
        self._ticked_at = float("-inf")
        self._reachable = True
        self._heartbeat = Heartbeat(self._beat, lease_seconds / BEATS_PER_LEASE, f"leases of {job}")

    @property
    def held(self) -> dict[int, Lease]:
        """The shards to work on now, with the ticket for each; what has expired meanwhile is not among them."""
        now = self._monotonic()
        return {shard: kept.lease for shard, kept in self._kept.items() if kept.valid_until > now}

    def tick(self, *, force: bool = False) -> dict[int, Lease]:
        """Say that we live, renew, and move towards an even share; cheap to call before every piece of work.

        Does so three times a lease (ten times while shards change hands) and otherwise only answers `held`, as it does
        while another thread is at it. A lease service that does not answer is no error here: what is held stays held
        until it expires.
        """
        self._ticked_at = self._monotonic()
        if not self._turn.acquire(blocking=False):
            return self.held
        try:
            now = self._monotonic()
            if force or now >= self._next_at:
                settled = self._if_reachable(self._share)
                self._next_at = now + self._lease_seconds / (TICKS_PER_LEASE if settled else HURRIED_TICKS_PER_LEASE)
            return self.held
        finally:
            metrics.SHARDS_HELD.labels(self.job).set(len(self.held))
            self._turn.release()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Tick, and renew what is held in the background until this is left, however long the work takes.

        The others get no share of it before the next tick. The ticket alone decides what commits, as ever.
        """
        self.tick()
        self._heartbeat.begin()
        try:
            yield
        finally:
            self._heartbeat.end()

    def release_all(self) -> None:
        """Hand everything back and leave the job, so that the others need not wait for leases to expire."""
        self._heartbeat.stop()
        with self._turn:
            leases = [kept.lease for kept in self._kept.values()]
            self._kept = {}
            self._next_at = float("-inf")
            metrics.SHARDS_HELD.labels(self.job).set(0)
            try:
                self._leases.release(leases)
            finally:
                self._leases.leave(self.job, self.worker)

    def _beat(self) -> None:
        """Renew where no tick has done so for its share of the lease; a tick that goes on does it itself."""
        if not self._turn.acquire(blocking=False):
            return
        try:
            now = self._monotonic()
            is_due = now >= self._renewed_at + self._lease_seconds / TICKS_PER_LEASE
            if self._kept and is_due and now < self._ticked_at + WORK_SECONDS_MAX:
                self._if_reachable(self._stay)
        finally:
            self._turn.release()

    def _if_reachable(self, act: Callable[[], bool]) -> bool:
        try:
            settled = act()
        except Unavailable as error:
            if self._reachable:
                log.warning("leases cannot be renewed", job=self.job, worker=self.worker, error=str(error))
            self._reachable = False
            return False
        if not self._reachable:
            log.info("leases are renewed again", job=self.job, worker=self.worker)
        self._reachable = True
        return settled

    def _stay(self) -> bool:
        """Only what keeps things as they are: nothing changes hands in the middle of a piece of work."""
        self._renew()
        self._leases.join(self.job, self.worker, self._lease_seconds)
        return True

    def _share(self) -> bool:
        """Whether there was nothing to change: we held our share, and living workers held all the rest."""
        # First of all, because everything else can wait.
        self._renew()
        self._leases.join(self.job, self.worker, self._lease_seconds)
        members = sorted({*self._leases.members(self.job), self.worker})
        holders = {self._shards[lease.name]: lease.holder for lease in self._leases.held(list(self._shards))}
        holding = Counter(holders.values()) | Counter({self.worker: len(self._kept)})
        shares = fair_shares(self.count, members, holding)
        surplus = len(self._kept) - shares[self.worker]
        if surplus > 0:
            self._hand_back(sorted(self._kept)[-surplus:])
        elif surplus < 0:
            free = [shard for shard in range(self.count) if shard not in holders]
            self._acquire(slice_of(free, self.worker, members, shares, holding))
        return surplus == 0 and all(holders.get(shard) in members for shard in range(self.count))

    def _renew(self) -> None:
        """Those that expired here are asked for too: under an unchanged ticket nobody had them in between."""
        if not self._kept:
            return
        asked_at = self._monotonic()
        valid_until = asked_at + self._lease_seconds
        renewed = self._leases.renew([kept.lease for kept in self._kept.values()], self._lease_seconds)
        self._kept = {self._shards[lease.name]: _Kept(lease, valid_until) for lease in renewed}
        self._renewed_at = asked_at

    def _hand_back(self, shards: Collection[int]) -> None:
        leases = [self._kept[shard].lease for shard in shards]
        # Forgotten before it is handed back: from that moment another may hold it.
        self._kept = {shard: kept for shard, kept in self._kept.items() if shard not in shards}
        self._leases.release(leases)

    def _acquire(self, shards: Sequence[int]) -> None:
        if not shards:
            return
        valid_until = self._monotonic() + self._lease_seconds
        names = [lease_name(self.job, shard) for shard in shards]
        taken = self._leases.acquire(names, self.worker, self._lease_seconds)
        self._kept = {**self._kept, **{self._shards[lease.name]: _Kept(lease, valid_until) for lease in taken}}


def lease_name(job: str, shard: int) -> str:
    """The name of a shard's lease; unambiguous, because a number holds no `#`."""
    return f"{job}#{shard}"


def fair_shares(count: int, members: Collection[str], holding: Mapping[str, int]) -> dict[str, int]:
    """How many shards each member is due; the remainder goes to those who hold most, so that fewest move."""
    each, remainder = divmod(count, len(members))
    first = sorted(members, key=lambda member: (-holding.get(member, 0), member))[:remainder]
    return {member: each + (member in first) for member in members}


def slice_of(
    free: Sequence[int], worker: str, members: Sequence[str], shares: Mapping[str, int], holding: Mapping[str, int]
) -> Sequence[int]:
    """The free shards that are this worker's to take: members who lack some take turns, so that none race for one."""
    start = 0
    for member in members:
        lacking = max(0, shares[member] - holding.get(member, 0))
        if member == worker:
            return free[start : start + lacking]
        start += lacking
    return []
