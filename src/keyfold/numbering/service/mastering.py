"""Masters of data centres: take the lock, bring the last state near, run, give the new one away, publish it."""

import contextlib
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog
from msgspec import structs

from keyfold.bulk import folders
from keyfold.bulk.folders import MANIFEST, FolderBroken, FolderUnreachable, Root
from keyfold.core import audit
from keyfold.core.clock import SystemClock
from keyfold.core.context import Context
from keyfold.core.errors import BadInput, Conflict, KeyfoldError, LeaseLost, NotFound, Unavailable
from keyfold.numbering import metrics, model
from keyfold.numbering.model import Published, Record, Version
from keyfold.numbering.service import coordinating, finding, receipts, running, states
from keyfold.numbering.service.coordinating import UNREACHABLE, Hold
from keyfold.numbering.service.finding import IndexLacking
from keyfold.numbering.service.receipts import Receipt
from keyfold.numbering.service.running import Request
from keyfold.numbering.service.states import Stored
from keyfold.numbering.settings import NumberingSettings, type_named

log = structlog.get_logger(__name__)

Tell = Callable[[str], None]
T = TypeVar("T")
NO_TICKET = 2**63


class StateLost(Unavailable):
    """The last state can be read from no cluster"""

    slug = "state-lost"


class StateNotBrought(Unavailable):
    """The last state is on another cluster, and could not be copied to the master's own"""

    slug = "state-not-brought"


class CopiesLacking(Unavailable):
    """Too few clusters could take a copy of the state, so it was not published"""

    slug = "copies-lacking"


class LockTaken(Conflict):
    """Another master holds the lock"""

    slug = "lock-taken"


class Master:
    """A master of one cluster."""

    def __init__(self, context: Context, settings: NumberingSettings, type_name: str, cluster: str, name: str) -> None:
        self._context = context
        self._settings = settings
        self._type_name = type_name
        self._type = type_named(settings, type_name)
        self._cluster = cluster
        self._name = name
        self._own = root_of(settings, cluster)
        self._scratch = Path(settings.scratch) if settings.scratch else None

    def run(
        self,
        offers: str | Callable[[], str],
        shops: str = "",
        *,
        scheme: int | None = None,
        is_forced: bool = False,
        is_shrinking_allowed: bool = False,
        wait_seconds_max: float = float("inf"),
        tell: Tell = lambda _: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> Published:
        """Get the lock, however long it takes, and publish one more state under its ticket.

        Offers that must be made are made when the lock is had: by then those of before may be long out of date.
        """
        request = running.asked(
            self._settings,
            offers=offers if isinstance(offers, str) else "",
            shops=shops,
            target=self._own,
            type=self._type.number,
            scheme=self._type.scheme if scheme is None else scheme,
            is_forced=is_forced,
            is_shrinking_allowed=is_shrinking_allowed,
        )
        deadline = time.monotonic() + wait_seconds_max
        while True:
            published = self._once(request, offers, tell)
            if published is not None:
                return published
            left = deadline - time.monotonic()
            if left <= 0:
                raise LockTaken(f"another master holds the lock of {self._type_name}", hint="keyfold number history")
            sleep(min(self._settings.retry_seconds, left))

    def _once(self, request: Request, offers: str | Callable[[], str], tell: Tell) -> Published | None:
        """One try. None where the lock is not to be had now."""
        with contextlib.ExitStack() as stack:
            try:
                hold = stack.enter_context(
                    coordinating.locked(self._context, self._settings, self._type_name, self._name)
                )
            except UNREACHABLE as error:
                log.warning("the coordinator does not answer", type=self._type_name, error=str(error))
                tell("the coordinator does not answer; waiting")
                return None
            if hold is None:
                tell("another master holds the lock; waiting")
                return None
            tell(f"lock taken, ticket {hold.ticket}")
            try:
                if not isinstance(offers, str):
                    request = structs.replace(request, offers=offers())
                return self._under_lock(hold, request, tell)
            except Exception as error:
                metrics.RUNS.labels(self._type_name, "lock lost" if isinstance(error, LeaseLost) else "failed").inc()
                raise

    def _under_lock(self, hold: Hold, request: Request, tell: Tell) -> Published:
        began = time.monotonic()
        state, clusters = self._made(hold, request, tell)
        published = _published(state, clusters, hold.ticket)
        self._publish(hold, published)
        leave_receipts(self._settings, self._type_name, published)
        tell(f"published {state.manifest.version}")
        metrics.RUNS.labels(self._type_name, "published").inc()
        metrics.RUN_SECONDS.labels(self._type_name).set(time.monotonic() - began)
        measure(self._type_name, state)
        self._afterwards(hold, state, tell)
        return published

    def _made(self, hold: Hold, request: Request, tell: Tell) -> tuple[Stored, list[str]]:
        """A new state, on as many clusters as it must be."""
        begin(hold, self._settings, self._type_name)
        must_be_newest(hold, self._settings, self._type_name)
        record = hold.record
        if record.current:
            leave_receipts(self._settings, self._type_name, record.current)
        before = self._brought(hold, record.current, tell) if record.current else None
        path = f"{self._type_name}/{hold.ticket}-{uuid.uuid4().hex}"

        def step(what: str) -> None:
            hold.must_be_held()
            tell(what)

        try:
            state = running.run(
                structs.replace(
                    request, before=before, path=path, rebuild_min=record.rebuild_next, is_restart=record.is_cut
                ),
                step,
            )
            return state, [self._cluster, *self._given(hold, state, tell)]
        except KeyfoldError as error:
            self._forget(path)
            hold.tell_if_lost(error)
            raise

    def _publish(self, hold: Hold, published: Published) -> None:
        """Move the pointer. Whatever happens, the files stay: an answer may be lost after the pointer has moved."""
        try:
            hold.change(lambda now: model.publish(now, published, history_max=self._settings.history_max))
        except LeaseLost:
            known = coordinating.look(self._context.leases, self._type_name)
            if all(each.checksum != published.checksum for each in known.states):
                raise

    def _afterwards(self, hold: Hold, state: Stored, tell: Tell) -> None:
        """What may be done later: its failure does not unmake what was published."""
        try:
            if self._settings.is_indexed:
                finding.build(state, self._settings.engine_megabytes_max, self._scratch)
                tell("indexed")
            prune_under(hold, self._settings, self._type_name)
        except (KeyfoldError, OSError) as error:
            log.warning("published, but not tidied up", type=self._type_name, error=str(error))
            tell(f"published, but not tidied up: {error}")

    def _brought(self, hold: Hold, last: Published, tell: Tell) -> Stored:
        """The last state on our own cluster, copied from wherever it can be read."""
        failures: list[str] = []
        stuck: list[str] = []
        is_broken = False
        try:
            return self._found(self._cluster, last, is_verified=True)
        except NotFound:
            pass
        except Unavailable as error:
            failures.append(f"{self._cluster}: {error}")
            is_broken = isinstance(error, FolderBroken)
        for cluster in _holders(self._settings, last):
            if cluster == self._cluster:
                continue
            hold.must_be_held()
            try:
                found = self._found(cluster, last, is_verified=is_broken)
            except (NotFound, Unavailable) as error:
                failures.append(f"{cluster}: {error}")
                continue
            try:
                if is_broken:
                    self._own.remove(last.path)  # only now: until here it might have been all that there is
                    is_broken = False
                self._copied(found, self._own, tell, f"state copied from {cluster}")
                return states.read(self._own, last.path, checksum=last.checksum)
            except FolderUnreachable as error:
                stuck.append(f"{cluster}: {error}")
            except (NotFound, Unavailable) as error:
                failures.append(f"{cluster}: {error}")
        if stuck:
            raise StateNotBrought(
                f"{last.version}, the last state of {self._type_name}, could not be copied to {self._cluster} from"
                f" {'; '.join(stuck)}",
                hint="Nothing is lost: mend the cluster, or run on another",
            )
        raise StateLost(
            f"{last.version}, the last state of {self._type_name}, can be read from no cluster: {'; '.join(failures)}",
            hint=f"Bring it back, or give it up: keyfold number invalidate --type {self._type_name}",
        )

    def _found(self, cluster: str, last: Published, *, is_verified: bool) -> Stored:
        state = states.read(root_of(self._settings, cluster), last.path, checksum=last.checksum)
        if is_verified:
            self._bounded(partial(_verified, state), f"reading {state.where}")
        return state

    def _given(self, hold: Hold, state: Stored, tell: Tell) -> list[str]:
        """Copy a state to other clusters until enough hold it."""
        others = [name for name in self._settings.clusters if name != self._cluster]
        wanted = min(self._settings.copies_min, 1 + len(others)) - 1
        given: list[str] = []
        failures: list[str] = []
        for cluster in others:
            if len(given) >= wanted:
                break
            hold.must_be_held()
            try:
                self._copied(state, root_of(self._settings, cluster), tell, f"copied to {cluster}")
                given.append(cluster)
            except Unavailable as error:
                failures.append(f"{cluster}: {error}")
        if len(given) < wanted:
            raise CopiesLacking(
                f"a state must be on {wanted + 1} clusters before it is published; it is on {1 + len(given)}:"
                f" {'; '.join(failures)}",
                hint="Mend the cluster, or lower numbering.copies_min",
            )
        return given

    def _copied(self, state: Stored, target: Root, tell: Tell, words: str) -> None:
        manifest = state.root.read(f"{state.path}/{MANIFEST}")
        for left in range(self._settings.copy_tries_max - 1, -1, -1):
            try:
                self._bounded(
                    lambda go_on: folders.copy(
                        state.root,
                        target,
                        state.path,
                        state.manifest.files,
                        manifest,
                        scratch=self._scratch,
                        go_on=go_on,
                    ),
                    f"copying {state.where}",
                )
                tell(words)
                return
            except FolderUnreachable as error:
                if not left:
                    raise
                log.warning("a copy failed and is tried again", state=state.where, error=str(error))

    def _bounded(self, work: "Callable[[Callable[[], None]], None]", what: str) -> None:
        folders.within(self._settings.copy_seconds_max, work, what)

    def _forget(self, path: str) -> None:
        """What was not published is nothing; whatever cannot be deleted now is deleted by a later master."""
        for cluster in self._settings.clusters:
            try:
                root_of(self._settings, cluster).remove(path)
            except KeyfoldError as error:
                log.warning("an unpublished state stays for now", cluster=cluster, path=path, error=str(error))


def invalidate(
    context: Context,
    settings: NumberingSettings,
    type_name: str,
    master: str,
    *,
    why: str,
    even_if_readable: bool,
    even_if_none_is_left: bool = False,
) -> Record:
    """Declare the last state invalid under a ticket; the pointer returns to the newest one that can be read."""
    type_named(settings, type_name)
    with coordinating.locked(context, settings, type_name, master) as hold:
        if hold is None:
            raise LockTaken(f"a master holds the lock of {type_name}", hint="Wait until it is done, or stop it")
        lost: list[Published] = []
        is_blind = False
        for state in reversed(hold.record.states):
            if state.invalid:
                continue
            hold.must_be_held()
            is_last = state == hold.record.current
            if (is_last and even_if_readable) or state.is_deleted:
                lost.append(state)
                continue
            is_blind = not readable(settings, state)
            if not is_blind:
                if is_last:
                    raise Conflict(
                        f"{state.version}, the last state of {type_name}, can be read",
                        hint="If it is wrong nevertheless: --even-if-readable",
                    )
                break
            lost.append(state)
        if not lost:
            raise NotFound(f"no state of {type_name} was ever published")
        if is_blind and not even_if_none_is_left:
            raise Conflict(
                f"no state of {type_name} can be read from here: the next run would be a first one",
                hint="See that the clusters are there; if all is lost indeed: --even-if-none-is-left",
            )
        checksums = [each.checksum for each in lost]
        record = hold.change(lambda now: model.declare_invalid(now, hold.ticket, checksums, why))
        named = ", ".join(each.version for each in lost)
        context.store.transact(
            lambda tx: audit.record(tx, master, "numbering invalidate", f"{type_name}: {named}"), once=True
        )
        return record


def begin(hold: Hold, settings: NumberingSettings, type_name: str) -> None:
    """A coordinator that knows no state of a type must not begin it anew beside states of another coordinator.

    Only a look at every cluster tells. That the record is there does not: whoever takes the lock writes it.
    """
    if not is_strange(hold.record):
        return
    for cluster in settings.clusters:
        try:
            found = _states_of(settings, type_name, cluster)
        except Unavailable as error:
            raise Unavailable(
                f"whether {cluster} has states of {type_name} is not known: {error}",
                hint="A type is begun when every cluster answers",
            ) from None
        if found:
            raise Conflict(
                f"the coordinator knows no state of {type_name}, but {cluster} has {found[0].manifest.version}",
                hint=f"keyfold number adopt --type {type_name} goes on from the newest; or move the folder away",
            )
    hold.change(lambda record: model.begin(record, hold.ticket))


def must_be_newest(hold: Hold, settings: NumberingSettings, type_name: str) -> None:
    """A coordinator that was set back, by a backup of its store, must not use versions again that were published since.

    The clusters' receipts tell. A published state has as many as it has copies: so many clusters must not be silent.
    """
    silent: list[str] = []
    for cluster in settings.clusters:
        try:
            newest = max(_receipts_of(settings, type_name, cluster), default=None)
        except Unavailable as error:
            log.warning("whether a cluster has newer states is not known", cluster=cluster, error=str(error))
            silent.append(f"{cluster}: {error}")
            continue
        if newest and model.is_behind(hold.record, newest.rebuild, newest.generation, newest.run):
            hold.must_be_held()
            raise Conflict(
                f"{newest.version} of run {newest.run} was published to {cluster}, which is newer than what the"
                f" coordinator knows of {type_name}",
                hint=f"If its store was set back: keyfold number adopt --over --type {type_name}",
            )
    if len(silent) >= min(settings.copies_min, len(settings.clusters)):
        raise Unavailable(
            f"whether there are newer states of {type_name} is not known: {'; '.join(silent)}",
            hint="Mend the cluster, or take it out of numbering.clusters",
        )


def leave_receipts(settings: NumberingSettings, type_name: str, state: Published) -> None:
    """Tell the clusters what was published, as far as they answer: a later master makes up for what is missing."""
    for cluster in settings.clusters:
        root = root_of(settings, cluster)
        try:
            if root.names(type_name):  # where there is nothing at all, the cluster may not be mounted
                receipts.leave(root, type_name, receipts.of(state))
        except Unavailable as error:
            log.warning("a cluster was not told what is published", cluster=cluster, error=str(error))


def is_strange(record: Record) -> bool:
    """Whether the clusters may have states that this coordinator never heard of."""
    return not record.states and not record.is_begun


def adopt(
    context: Context, settings: NumberingSettings, type_name: str, master: str, *, is_over: bool = False
) -> Record:
    """Go on, under a new coordinator, from the newest state that clusters have; the next run raises V.

    With `is_over` also where the coordinator knows states: it was set back, and the clusters have newer ones.
    """
    number = type_named(settings, type_name).number
    found = [
        (state, cluster)
        for cluster in settings.clusters
        for state in _states_of(settings, type_name, cluster)
        if state.version.type == number
    ]
    if not found:
        raise NotFound(
            f"no cluster has a state of {type_name}",
            hint=f"If they are lost, move {type_name}{receipts.RECEIPTS} away on every cluster, too, to begin anew",
        )
    with coordinating.locked(context, settings, type_name, master) as hold:
        if hold is None:
            raise LockTaken(f"a master holds the lock of {type_name}")
        if hold.record.states and not is_over:
            raise Conflict(
                f"the coordinator knows states of {type_name} already",
                hint="keyfold number history; if it was set back: --over",
            )
        for newest, _ in sorted(found, key=lambda each: (each[0].version, each[0].manifest.run), reverse=True):
            holders = [cluster for state, cluster in found if state.checksum == newest.checksum]
            candidate = _published(newest, holders, hold.ticket)
            if readable(settings, candidate):
                break
        else:
            raise StateLost(f"no state of {type_name} can be read")
        used = [state.version.rebuild for state, _ in found]
        used += [each.rebuild for cluster in settings.clusters for each in _receipts_of(settings, type_name, cluster)]
        rebuild_next = 1 + max(used)
        others = {
            state.checksum: _published(state, [cluster], hold.ticket)
            for state, cluster in found
            if state.checksum != candidate.checksum
        }
        now_us = SystemClock().now_us()
        record = hold.change(
            lambda now: model.adopt(
                now, candidate, sorted(others.values(), key=lambda each: each.run), rebuild_next, now_us
            )
        )
        context.store.transact(
            lambda tx: audit.record(tx, master, "numbering adopt", f"{type_name}: {candidate.version}"), once=True
        )
        return record


def _states_of(settings: NumberingSettings, type_name: str, cluster: str) -> list[Stored]:
    """Every state that a cluster has of a type, by what their manifests say."""
    root, states_found = root_of(settings, cluster), []
    for name in root.names(type_name):
        if name.endswith(finding.INDEX) or folders.WRITING in name:
            continue
        with contextlib.suppress(NotFound, FolderBroken):
            states_found.append(states.read(root, f"{type_name}/{name}"))
    return states_found


def _receipts_of(settings: NumberingSettings, type_name: str, cluster: str) -> list[Receipt]:
    return receipts.found(root_of(settings, cluster), type_name)


def prune(context: Context, settings: NumberingSettings, type_name: str, master: str) -> "Pruned":
    """Drop and delete what the policy no longer keeps."""
    type_named(settings, type_name)
    with coordinating.locked(context, settings, type_name, master) as hold:
        if hold is None:
            raise LockTaken(f"a master holds the lock of {type_name}", hint="It prunes when it has published")
        return prune_under(hold, settings, type_name)


class Pruned(msgspec.Struct, frozen=True):
    """What a pruning did."""

    dropped: list[str]  # versions that got a tombstone now
    deleted: list[str]  # versions that were given up now: their files are gone, or go at the next pruning
    leftovers: int  # folders of runs that were never published
    failures: list[str]


def prune_under(hold: Hold, settings: NumberingSettings, type_name: str) -> Pruned:
    """Put tombstones on what is no longer kept, delete what had one for long enough, and what dead masters left.

    A folder that the record does not name, or has given up, and whose ticket is older than ours can never be published:
    its master lost the lock. If it is a whole state, somebody may read it nevertheless: it gets the grace of others.
    """
    if is_strange(hold.record):
        raise Conflict(
            f"the coordinator knows no state of {type_name}: what the clusters have may be another coordinator's"
        )
    must_be_newest(hold, settings, type_name)
    now_us = SystemClock().now_us()
    dropped = model.to_drop(hold.record, states_kept=settings.states_kept, rebuilds_kept=settings.rebuilds_kept)
    if dropped:
        hold.change(lambda record: model.drop(record, hold.ticket, [each.checksum for each in dropped], now_us))
    due = [
        each
        for each in hold.record.states
        if each != hold.record.current  # the pointer may have returned to it since
        and each.dropped_at_us
        and not each.is_deleted
        and now_us - each.dropped_at_us >= settings.grace_hours * 3_600_000_000
    ]
    # Given up first, under the ticket, and deleted then: the pointer can no longer return to what has lost its files.
    if due:
        hold.change(lambda record: model.deleted(record, hold.ticket, [each.checksum for each in due]))
    failures: list[str] = []
    found = _folders_of(settings, type_name, hold, failures)
    _note_strays(hold, found, now_us, is_partial=bool(failures))
    grace_us = settings.grace_hours * 3_600_000_000
    waiting = [path for path, since_us in hold.record.strays.items() if now_us - since_us < grace_us]
    named = _paths([each.path for each in hold.record.states if not each.is_deleted] + waiting)
    given_up = _paths(each.path for each in hold.record.states if each.is_deleted)
    given_up_now = _paths(each.path for each in due)
    leftovers = 0
    for name, paths in found.items():
        root = root_of(settings, name)
        # What was adopted has the ticket of another coordinator, which may be greater than any of ours.
        stale = [path for path in paths if path in given_up or (path not in named and _ticket_of(path) < hold.ticket)]
        _removed(root, [path for path in stale if path in given_up_now], name, failures)
        leftovers += _removed(root, [path for path in stale if path not in given_up_now], name, failures)
    return Pruned([each.version for each in dropped], [each.version for each in due], leftovers, failures)


def _folders_of(
    settings: NumberingSettings, type_name: str, hold: Hold, failures: list[str]
) -> dict[str, dict[str, bool]]:
    """The folders of every cluster that answers, each with whether it is a whole state that the record lacks."""
    known = _paths(each.path for each in hold.record.states)
    found: dict[str, dict[str, bool]] = {}
    for name in settings.clusters:
        root = root_of(settings, name)
        try:
            paths = [f"{type_name}/{each}" for each in root.names(type_name)]
            found[name] = {path: path not in known and _is_stray(root, path, hold.ticket) for path in paths}
        except Unavailable as error:
            failures.append(f"{name}: {error}")
    return found


def _is_stray(root: Root, path: str, ticket: int) -> bool:
    is_state = not path.endswith(finding.INDEX) and folders.WRITING not in path
    return is_state and _ticket_of(path) < ticket and root.exists(f"{path}/{MANIFEST}")


def _note_strays(hold: Hold, found: dict[str, dict[str, bool]], now_us: int, *, is_partial: bool) -> None:
    """Whole states that the record lacks get a tombstone, too: it may be the record that has forgotten them."""
    strays = {path for paths in found.values() for path, is_stray in paths.items() if is_stray}
    strays |= set(hold.record.strays) if is_partial else set()
    if strays != set(hold.record.strays):
        hold.change(lambda record: model.note_strays(record, hold.ticket, strays, now_us))


def _paths(paths: Iterable[str]) -> set[str]:
    """Where states lie, and their indexes."""
    return {path for each in paths for path in (each, finding.index_path(each))}


def _removed(root: Root, paths: Sequence[str], cluster: str, failures: list[str]) -> int:
    removed = 0
    for path in paths:
        try:
            root.remove(path)
            removed += 1
        except Unavailable as error:
            failures.append(f"{cluster}: {error}")
    return removed


def _ticket_of(path: str) -> int:
    """The ticket that a folder was made under; what has none in its name is not ours to delete."""
    text = path.rpartition("/")[2].partition("-")[0]
    return int(text) if text.isascii() and text.isdigit() else NO_TICKET


def readable(settings: NumberingSettings, state: Published) -> bool:
    """Whether any cluster still has all of a state."""
    return next(_readable_from(settings, state), None) is not None


def stored(settings: NumberingSettings, state: Published, cluster: str = "") -> Stored:
    """A published state where it can be read; by its manifest, which is compared with what was published."""
    return read_anywhere(settings, state, lambda found: found, cluster)


def read_anywhere(settings: NumberingSettings, state: Published, work: Callable[[Stored], T], cluster: str = "") -> T:
    """What work makes of a published state, by the first copy that it can be made from.

    One copy may be broken where another is whole, and an index lies beside one copy alone.
    """
    failures: list[str] = []
    lacking: IndexLacking | None = None
    for name in [cluster] if cluster else _holders(settings, state):
        try:
            return work(states.read(root_of(settings, name), state.path, checksum=state.checksum))
        except IndexLacking as error:
            lacking = error
        except (NotFound, Unavailable) as error:
            failures.append(f"{name}: {error}")
    if lacking:
        raise lacking
    raise StateLost(f"{state.version} cannot be read: {'; '.join(failures)}")


def _holders(settings: NumberingSettings, state: Published) -> list[str]:
    """Clusters to look for a state in: its master's own, which has the index, the others that it was published with,
    then those of masters that went on from it."""
    order = {name: at for at, name in enumerate(state.clusters)}
    return sorted(settings.clusters, key=lambda name: order.get(name, len(order)))


def _readable_from(settings: NumberingSettings, state: Published) -> Iterator[str]:
    for name in settings.clusters:
        try:
            found = states.read(root_of(settings, name), state.path, checksum=state.checksum)
            folders.within(settings.copy_seconds_max, partial(_verified, found), f"reading {found.where}")
            yield name
        except (NotFound, Unavailable) as error:
            log.debug("a copy of a state cannot be read", cluster=name, version=state.version, error=str(error))


def _verified(state: Stored, _: Callable[[], None]) -> None:
    states.verify(state)


def root_of(settings: NumberingSettings, cluster: str) -> Root:
    if cluster not in settings.clusters:
        raise BadInput(
            f"there is no cluster {cluster[:100]!r}", hint=f"numbering.clusters has {', '.join(settings.clusters)}"
        )
    return Root(settings.clusters[cluster])


def measure(type_name: str, state: Stored) -> None:
    metrics.GENERATION.labels(type_name).set(Version.parse(state.manifest.version).generation)
    metrics.HOLES.labels(type_name).set(state.manifest.summary.holes)
    metrics.PLACES.labels(type_name).set(sum(each.places for each in state.manifest.shards))


def _published(state: Stored, clusters: list[str], ticket: int) -> Published:
    manifest = state.manifest
    return Published(
        version=manifest.version,
        run=manifest.run,
        path=state.path,
        clusters=clusters,
        checksum=state.checksum,
        ticket=ticket,
        published_at_us=SystemClock().now_us(),
        reason=manifest.reason,
        known=manifest.summary.known,
        new=manifest.summary.new,
        reused=manifest.summary.reused,
        expired=manifest.summary.expired,
        holes=manifest.summary.holes,
        bytes=manifest.summary.bytes,
    )
