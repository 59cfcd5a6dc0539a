"""Leases in ZooKeeper: an ephemeral node for each lease that is held, a persistent one above it for its ticket.

    /keyfold/leases/<name>           rewritten by every taking; stays
    /keyfold/leases/<name>/holder    ephemeral: who holds the lease, gone with the holder's session
    /keyfold/members/<job>/<member>  ephemeral: who is alive
    /keyfold/pointers/<name>         what `publish` wrote

**The ticket is the zxid of the taking.** Taking is one multi that rewrites the persistent node and creates the holder,
so that zxid is the czxid of the holder and the mzxid of the node above it: whoever reads the holder reads its ticket.
A zxid is the leader's epoch (31 bits in use) over a counter of 32 bits, hence positive in 63 bits; a new leader has a
greater epoch than every leader before it, and an exhausted counter forces an election. It grows over the whole
ensemble, so it does so even if somebody deletes the persistent node, whose own version would start at 0 again.

**The fence is the version of the persistent node.** ZooKeeper checks versions, not zxids, and a holder that is created
anew has version 0 again. The node above it keeps its version and raises it at every taking, so `check(node, version)`
in the same multi as a change proves that nobody has taken the lease since.

**A lease ends** with its session, or when its holder does not renew it in time although the session lives (a stuck
loop in a healthy process): then this object hands it back by itself. An answer that was lost may have taken a lease
that nobody knows of; it is found by the mark of that call and handed back.
"""

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from urllib.parse import quote, unquote

import msgspec
import structlog
from msgspec import Struct

from keyfold.core.clock import SECOND_US, SystemClock
from keyfold.core.errors import (
    CommitUnknown,
    LeasesUnreachable,
    LostRace,
    SettingsWrong,
    TicketRefused,
)
from keyfold.core.leases.lease import Lease, Published

try:
    from kazoo.client import KazooClient
    from kazoo.exceptions import (
        BadVersionError,
        KazooException,
        NodeExistsError,
        NoNodeError,
        RolledBackError,
        RuntimeInconsistency,
    )
    from kazoo.handlers.threading import KazooTimeoutError
    from kazoo.protocol.states import KazooState, KeeperState
    from kazoo.retry import KazooRetry
except ImportError:
    raise SettingsWrong("kazoo is not installed", hint="pip install 'keyfold[zookeeper]'") from None

log = structlog.get_logger(__name__)

LEASES = "/keyfold/leases"
MEMBERS = "/keyfold/members"
POINTERS = "/keyfold/pointers"

ANSWER_SECONDS_MIN = 1.0
RECONNECT_SECONDS_MAX = 1.0
TIDY_AGAIN_SECONDS = 0.5
CLOSE_SECONDS_MAX = 5.0

# What ZooKeeper may answer to a sound request; everything else means that it did not answer.
_ANSWERS = (NoNodeError, NodeExistsError, BadVersionError)
_UNDONE = (RolledBackError, RuntimeInconsistency)
_DEAD = (KeeperState.CLOSED, KeeperState.AUTH_FAILED)


class _Holding(Struct, frozen=True):
    """What a holder node says. `taking` marks the call that made it, so that a lost answer can be traced."""

    holder: str
    taking: str


class _Term(Struct, frozen=True):
    """A lease that this object answers for, until a moment of the monotonic clock."""

    lease: Lease
    until: float


class ZooKeeperLeases:
    """Leases granted by an ensemble, held by one session. Connects at the first call; every call is bounded in time.

    A session ends `session_seconds` after the ensemble last heard of it, and a lease with it, however long it was
    asked for. The ensemble must grant such sessions: its maxSessionTimeout is 20 ticks unless set.
    """

    def __init__(self, hosts: str, session_seconds: float) -> None:
        if not hosts:
            raise SettingsWrong("no ZooKeeper is named", place="leases.zookeeper", hint="Write HOST:PORT,…")
        self._hosts = hosts
        self._session_seconds = session_seconds
        # Below the lease, so that whoever waits for an answer still has time to stop its work.
        self._answer_seconds = max(ANSWER_SECONDS_MIN, session_seconds / 3)
        self._clock = SystemClock()
        self._lock = threading.Lock()
        self._client: Any = None
        self._live: threading.Event | None = None
        self._closed = threading.Event()
        self._untidy = threading.Event()
        self._tidier: threading.Thread | None = None
        self._terms: dict[str, _Term] = {}
        self._joined: dict[tuple[str, str], float] = {}
        self._in_doubt: dict[str, Sequence[str]] = {}
        self._silent_since: float | None = None

    # Leases -------------------------------------------------------------------------------------------------------

    def acquire(self, names: Sequence[str], holder: str, seconds: float) -> list[Lease]:
        """Take those that are free. A holder that asks again for what it holds is refused like anybody else."""
        wanted = sorted(set(names))
        if not wanted:
            return []
        until, expires_at_us = self._end(seconds)
        call = self._begin()
        taking = uuid.uuid4().hex
        node = msgspec.json.encode(_Holding(holder, taking))
        try:
            answers = self._take(call, wanted, node)
            if missing := [name for name, answer in answers.items() if isinstance(answer[0], NoNodeError)]:
                call.make([_lease_path(name) for name in missing])
                answers |= self._take(call, missing, node)
        except LeasesUnreachable:
            with self._lock:
                self._in_doubt[taking] = wanted
            self._untidy.set()
            raise
        taken = [
            Lease(name, holder, written.mzxid, expires_at_us)
            for name, (written, made) in answers.items()
            if not isinstance(made, KazooException)
        ]
        with self._lock:
            self._terms |= {lease.name: _Term(lease, until) for lease in taken}
        self._untidy.set()
        return sorted(taken, key=_by_name)

    def renew(self, leases: Sequence[Lease], seconds: float) -> list[Lease]:
        """Prolong what this object took and ZooKeeper still shows. Without an answer nothing is prolonged."""
        until, expires_at_us = self._end(seconds)
        ours = [lease for lease in set(leases) if self._answers_for(lease)]
        if not ours:
            return []
        call = self._begin()
        stats = call.read(call.client.exists_async(_holder_path(lease.name)) for lease in ours)
        kept = [
            Lease(lease.name, lease.holder, lease.ticket, expires_at_us)
            for lease, stat in zip(ours, stats, strict=True)
            if stat is not None and stat.czxid == lease.ticket
        ]
        with self._lock:
            # Meanwhile the session may have ended, or the lease been handed back.
            kept = [lease for lease in kept if self._is_term(lease)]
            self._terms |= {lease.name: _Term(lease, until) for lease in kept}
            for lost in {lease.name for lease in ours} - {lease.name for lease in kept}:
                self._terms.pop(lost, None)
        return sorted(kept, key=_by_name)

    def release(self, leases: Sequence[Lease]) -> None:
        """Hand back. If ZooKeeper does not answer, this is done as soon as it does."""
        if not leases:
            return
        with self._lock:
            overdue = {lease.name: _Term(lease, 0) for lease in leases if self._is_term(lease)}
            self._terms |= overdue
        try:
            self._hand_back(leases)
        except LeasesUnreachable:
            self._untidy.set()
            raise

    def held(self, names: Sequence[str]) -> list[Lease]:
        """The leases in force. When another's will end is not known: a whole session from now is the estimate."""
        wanted = sorted(set(names))
        if not wanted:
            return []
        _, expires_at_us = self._end(self._session_seconds)
        call = self._begin()
        answers = call.read(call.client.get_async(_holder_path(name)) for name in wanted)
        return [
            Lease(name, _holding(answer[0]).holder, answer[1].czxid, expires_at_us)
            for name, answer in zip(wanted, answers, strict=True)
            if not isinstance(answer, KazooException)
        ]

    # Members ------------------------------------------------------------------------------------------------------

    def join(self, job: str, member: str, seconds: float) -> None:
        until, _ = self._end(seconds)
        call = self._begin()
        path = _member_path(job, member)
        (stat,) = call.read([call.client.exists_async(path)])
        if stat is not None and stat.ephemeralOwner != call.session:
            # Left by an earlier session of the same member, with which it would vanish.
            call.read([call.client.delete_async(path, stat.version)])
            stat = None
        if stat is None and self._create_member(call, path) is NoNodeError:
            call.make([_job_path(job)])
            self._create_member(call, path)
        with self._lock:
            self._joined[job, member] = until
        self._untidy.set()

    def leave(self, job: str, member: str) -> None:
        with self._lock:
            self._joined[job, member] = 0
        try:
            self._delete_member(job, member)
        except LeasesUnreachable:
            self._untidy.set()
            raise

    def members(self, job: str) -> list[str]:
        call = self._begin()
        (found,) = call.read([call.client.get_children_async(_job_path(job))])
        return [] if isinstance(found, KazooException) else sorted(unquote(name) for name in found)

    # Pointers -----------------------------------------------------------------------------------------------------

    def publish(self, path: str, data: bytes, version: int | None, lease: Lease) -> int:
        """One multi of the fence and the pointer, so neither can change in between."""
        call = self._begin()
        fence = self._fence(call, lease)
        pointer = f"{POINTERS}/{_quoted(path)}"
        if version is None:
            call.make([POINTERS])
            fence.create(pointer, data)
        else:
            fence.set_data(pointer, data, version)
        try:
            (ticket, holder, written), *_ = call.ask([fence.commit_async()])
        except LeasesUnreachable as error:
            raise CommitUnknown(f"ZooKeeper went away while {path} was published: {error.detail}") from error
        if isinstance(ticket, _ANSWERS) or isinstance(holder, _ANSWERS):
            raise _refused(lease)
        if isinstance(written, _ANSWERS):
            raise LostRace(f"{path} is no longer at version {version}")
        return 0 if version is None else int(written.version)

    def published(self, path: str) -> Published | None:
        """What a pointer holds; None if nothing was ever published."""
        call = self._begin()
        (found,) = call.read([call.client.get_async(f"{POINTERS}/{_quoted(path)}")])
        return None if isinstance(found, KazooException) else Published(found[0], found[1].version)

    # The session --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the session, and with it everything that it holds."""
        self._closed.set()
        self._untidy.set()
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            _stop(client).join(CLOSE_SECONDS_MAX)

    def _begin(self) -> "_Call":
        """A connection to ask, within the time that the whole call has."""
        deadline = time.monotonic() + self._answer_seconds
        client, live = self._started()
        if not live.wait(max(0.0, deadline - time.monotonic())):
            if client.client_state in _DEAD:
                self._discard(client)
            raise LeasesUnreachable(f"no ZooKeeper at {self._hosts} answers", retry_after_seconds=1)
        identity = client.client_id
        if identity is None:
            raise LeasesUnreachable("the connection to ZooKeeper has just dropped", retry_after_seconds=1)
        return _Call(client, identity[0], deadline, self._note_answer)

    def _note_answer(self, client: Any, came: bool) -> None:
        """End a session that we cannot hear for as long as it lasts.

        kazoo notices a silent connection only while nothing is sent. Where our requests arrive and the answers do not,
        it would keep a session alive whose leases nobody here believes in and nobody else can have.
        """
        if came:
            self._silent_since = None
            return
        now = time.monotonic()
        if self._silent_since is None:
            self._silent_since = now
        elif now - self._silent_since >= self._session_seconds:
            self._discard(client)

    def _started(self) -> tuple[Any, threading.Event]:
        with self._lock:
            if self._closed.is_set():
                raise LeasesUnreachable("these leases are closed")
            if self._client is None or self._live is None:
                self._client = self._make_client()
                self._live = self._client.start_async()
                if self._tidier is None:
                    self._tidier = threading.Thread(target=self._tidy, name="zookeeper-leases", daemon=True)
                    self._tidier.start()
            return self._client, self._live

    def _make_client(self) -> Any:
        try:
            client = KazooClient(
                self._hosts,
                timeout=self._session_seconds,
                # Without a limit: kazoo would give up, or wait for up to an hour.
                connection_retry=KazooRetry(max_tries=-1, max_delay=RECONNECT_SECONDS_MAX),
                logger=_SILENT,
            )
        except (KazooException, ValueError) as error:
            raise SettingsWrong(f"{self._hosts} names no ZooKeeper: {error}", place="leases.zookeeper") from None
        client.add_listener(self._watch_session)
        return client

    def _watch_session(self, state: str) -> None:
        """Called by kazoo's connection thread, which must not wait.

        SUSPENDED needs no act: nothing is prolonged without an answer, and every lease has its local end.
        """
        if self._closed.is_set():
            return
        if state == KazooState.CONNECTED:
            self._silent_since = None
            log.info("zookeeper session connected")
        else:
            log.warning("zookeeper session lost" if state == KazooState.LOST else "zookeeper session suspended")
        if state == KazooState.LOST:
            with self._lock:
                self._forget_session()
        self._untidy.set()

    def _discard(self, client: Any) -> None:
        """Give up a client that kazoo has given up, or that hears nothing; the next call makes another."""
        with self._lock:
            if self._client is not client:
                return
            self._client = self._live = self._silent_since = None
            self._forget_session()
        client.remove_listener(self._watch_session)
        log.warning("zookeeper session given up")
        _stop(client)

    def _forget_session(self) -> None:
        """What the session held is gone with it. Call with the lock."""
        self._terms.clear()
        self._joined.clear()
        self._in_doubt.clear()

    # Handing back -------------------------------------------------------------------------------------------------

    def _tidy(self) -> None:
        """Hand back what nobody renewed, what could not be handed back before, and what a lost answer took."""
        while not self._closed.is_set():
            self._untidy.wait(self._seconds_to_next_end())
            self._untidy.clear()
            try:
                self._hand_back_overdue()
                self._hand_back_doubtful()
            except Exception as error:
                if not isinstance(error, LeasesUnreachable):
                    log.warning("handing leases back failed", exc_info=error)
                self._untidy.set()
                self._closed.wait(TIDY_AGAIN_SECONDS)

    def _seconds_to_next_end(self) -> float | None:
        with self._lock:
            ends = [*(term.until for term in self._terms.values()), *self._joined.values()]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _hand_back_overdue(self) -> None:
        now = time.monotonic()
        with self._lock:
            leases = [term.lease for term in self._terms.values() if term.until <= now]
            silent = [who for who, until in self._joined.items() if until <= now]
        if leases:
            self._hand_back(leases)
        for job, member in silent:
            self._delete_member(job, member)

    def _hand_back_doubtful(self) -> None:
        with self._lock:
            doubts = dict(self._in_doubt)
        for taking, names in doubts.items():
            call = self._begin()
            answers = call.read(call.client.get_async(_holder_path(name)) for name in names)
            found = [
                Lease(name, "", answer[1].czxid, 0)
                for name, answer in zip(names, answers, strict=True)
                if not isinstance(answer, KazooException) and _holding(answer[0]).taking == taking
            ]
            if found:
                self._hand_back(found)
            with self._lock:
                self._in_doubt.pop(taking, None)

    def _hand_back(self, leases: Sequence[Lease]) -> None:
        """Delete the holders of these very takings, whoever made them."""
        call = self._begin()
        stats = call.read(call.client.exists_async(_lease_path(lease.name)) for lease in leases)
        deletions = []
        for lease, stat in zip(leases, stats, strict=True):
            if stat is not None and stat.mzxid == lease.ticket:
                deletion = call.client.transaction()
                deletion.check(_lease_path(lease.name), stat.version)
                deletion.delete(_holder_path(lease.name))
                deletions.append(deletion)
        call.ask(deletion.commit_async() for deletion in deletions)
        with self._lock:
            for lease in leases:
                if self._is_term(lease, overdue=True):
                    del self._terms[lease.name]

    def _delete_member(self, job: str, member: str) -> None:
        call = self._begin()
        call.ask([call.client.delete_async(_member_path(job, member))])
        with self._lock:
            if self._joined.get((job, member), 0) <= time.monotonic():
                self._joined.pop((job, member), None)

    # Small steps --------------------------------------------------------------------------------------------------

    def _take(self, call: "_Call", names: Sequence[str], node: bytes) -> dict[str, Any]:
        """One multi a name, all in flight at once: a name that is taken must not undo the others."""
        takings = []
        for name in names:
            taking = call.client.transaction()
            taking.set_data(_lease_path(name), node)
            taking.create(_holder_path(name), node, ephemeral=True)
            takings.append(taking)
        return dict(zip(names, call.ask(taking.commit_async() for taking in takings), strict=True))

    def _fence(self, call: "_Call", lease: Lease) -> Any:
        """A transaction that fails unless this very taking is the last one and still in force."""
        (stat,) = call.read([call.client.exists_async(_lease_path(lease.name))])
        if stat is None or stat.mzxid != lease.ticket:
            raise _refused(lease)
        fence = call.client.transaction()
        fence.check(_lease_path(lease.name), stat.version)
        # Any version: it is there, hence ours, because nobody has taken the lease since.
        fence.check(_holder_path(lease.name), -1)
        return fence

    def _create_member(self, call: "_Call", path: str) -> type[KazooException] | None:
        (answer,) = call.ask([call.client.create_async(path, ephemeral=True)])
        return type(answer) if isinstance(answer, KazooException) else None

    def _end(self, seconds: float) -> tuple[float, int]:
        """When something asked for now will end, by the monotonic clock and, estimated, by the wall clock."""
        return time.monotonic() + seconds, self._clock.now_us() + round(seconds * SECOND_US)

    def _answers_for(self, lease: Lease) -> bool:
        with self._lock:
            return self._is_term(lease)

    def _is_term(self, lease: Lease, *, overdue: bool = False) -> bool:
        """Whether we hold this very taking (or held it, and it is overdue). Call with the lock."""
        term = self._terms.get(lease.name)
        if term is None or term.lease.ticket != lease.ticket:
            return False
        return (term.until <= time.monotonic()) == overdue


class _Call:
    """One bounded conversation with ZooKeeper over one session."""

    def __init__(self, client: Any, session: int, deadline: float, note_answer: Callable[[Any, bool], None]) -> None:
        self.client = client
        self.session = session
        self._deadline = deadline
        self._note_answer = note_answer

    def ask(self, requests: Iterable[Any]) -> list[Any]:
        """Send all, then wait for all; a refusal such as NoNodeError is an answer, silence is not."""
        return [self._answer(request) for request in list(requests)]

    def read(self, requests: Iterable[Any]) -> list[Any]:
        """Ask a server that has caught up with the leader: a lagging one would show a lease that has passed on."""
        caught_up = self.client.sync_async("/")
        sent = list(requests)
        self._answer(caught_up)
        return self.ask(sent)

    def make(self, paths: Sequence[str]) -> None:
        """Create persistent nodes and those above them, where they are missing."""
        above = dict.fromkeys(path.rpartition("/")[0] for path in paths)
        for level in (["/keyfold"], [path for path in above if path.count("/") > 1], paths):
            self.ask(self.client.create_async(path) for path in level)

    def _answer(self, request: Any) -> Any:
        try:
            answer = request.get(timeout=max(0.0, self._deadline - time.monotonic()))
        except _ANSWERS as refusal:
            self._note_answer(self.client, True)
            return refusal
        except KazooTimeoutError as error:
            self._note_answer(self.client, False)
            raise _unreachable(error) from error
        except KazooException as error:
            raise _unreachable(error) from error
        self._note_answer(self.client, True)
        # A multi answers for each of its steps; those beside the refused one are undone.
        for step in answer if isinstance(answer, list) else ():
            if isinstance(step, KazooException) and not isinstance(step, _ANSWERS + _UNDONE):
                raise _unreachable(step)
        return answer


def _silent_logger() -> logging.Logger:
    """kazoo reports every attempt to connect; a change of state is logged here, once."""
    logger = logging.Logger("kazoo", level=logging.CRITICAL)
    logger.addHandler(logging.NullHandler())
    return logger


_SILENT = _silent_logger()


def _stop(client: Any) -> threading.Thread:
    """End a client and its session in the background: kazoo waits for a server that may be silent."""

    def stop() -> None:
        with contextlib.suppress(Exception):
            client.stop()
        with contextlib.suppress(Exception):
            client.close()

    thread = threading.Thread(target=stop, name="zookeeper-close", daemon=True)
    thread.start()
    return thread


def _unreachable(error: Exception) -> LeasesUnreachable:
    reason = str(error) or type(error).__name__
    return LeasesUnreachable(f"ZooKeeper did not answer: {reason}", retry_after_seconds=1)


def _refused(lease: Lease) -> TicketRefused:
    return TicketRefused(f"the lease {lease.name} is no longer held under ticket {lease.ticket}")


def _holding(data: bytes) -> _Holding:
    return msgspec.json.decode(data, type=_Holding)


def _quoted(name: str) -> str:
    """A name as one step of a path: no slash, and neither `.` nor `..`."""
    if not name:
        raise ValueError("a name in ZooKeeper is not empty")
    return quote(name, safe="").replace(".", "%2E")


def _lease_path(name: str) -> str:
    return f"{LEASES}/{_quoted(name)}"


def _holder_path(name: str) -> str:
    return f"{LEASES}/{_quoted(name)}/holder"


def _job_path(job: str) -> str:
    return f"{MEMBERS}/{_quoted(job)}"


def _member_path(job: str, member: str) -> str:
    return f"{MEMBERS}/{_quoted(job)}/{_quoted(member)}"


def _by_name(lease: Lease) -> str:
    return lease.name
