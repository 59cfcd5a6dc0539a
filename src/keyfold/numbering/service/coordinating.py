"""The coordinator of a type: the last consistent state and the write lock, in one record behind a fence.

The record is changed by compare-and-set together with a check of the lease, in one transaction of the store or one
multi of ZooKeeper: a holder past its time-out cannot change it, whatever it has computed meanwhile.
"""

import contextlib
from collections.abc import Callable, Iterator

import msgspec
import structlog

from keyfold.core.clock import SystemClock
from keyfold.core.context import Context
from keyfold.core.errors import CommitUnknown, KeyfoldError, LeaseLost, LeasesUnreachable, LostRace, StoreUnreachable
from keyfold.core.leases.holding import Holding
from keyfold.core.leases.lease import Lease, Leases
from keyfold.numbering import model
from keyfold.numbering.model import Record
from keyfold.numbering.settings import NumberingSettings

log = structlog.get_logger(__name__)

TRIES_MAX = 10


def lock_name(type_name: str) -> str:
    return f"numbering/{type_name}"


def look(leases: Leases, type_name: str) -> Record:
    """What is recorded of a type; an empty record where nothing ever was."""
    return _read(leases, type_name)[0]


def holder(leases: Leases, type_name: str) -> Lease | None:
    """The lease in force now, if any."""
    return next(iter(leases.held([lock_name(type_name)])), None)


@contextlib.contextmanager
def locked(context: Context, settings: NumberingSettings, type_name: str, master: str) -> "Iterator[Hold | None]":
    """The write lock, or None where another master has it. It is renewed for as long as a run may take."""
    seconds = context.settings.leases.lease_seconds
    taken = context.leases.acquire([lock_name(type_name)], master, seconds)
    if not taken:
        yield None
        return
    with Holding(context.leases, taken[0], seconds, seconds_max=settings.run_seconds_max) as holding:
        hold = Hold(context.leases, type_name, holding)
        hold.change(lambda record: model.take(record, master, hold.ticket, SystemClock().now_us()))
        yield hold


class Hold:
    """A lock that is held, and the record under it."""

    def __init__(self, leases: Leases, type_name: str, holding: Holding) -> None:
        self._leases = leases
        self._type = type_name
        self._holding = holding
        self.record = Record()

    @property
    def ticket(self) -> int:
        return self._holding.lease.ticket

    def must_be_held(self) -> None:
        self._holding.must_be_held()

    def tell_if_lost(self, error: KeyfoldError) -> None:
        """If the lock has passed on, that is the reason for whatever failed: a newer master clears away our files."""
        try:
            now = holder(self._leases, self._type)
        except UNREACHABLE:
            return
        if now is None or now.ticket != self.ticket:
            raise LeaseLost(f"the lock of {self._type} has passed on") from error

    def change(self, rule: Callable[[Record], Record]) -> Record:
        """Change the record by a rule, or be refused because the lock has passed on.

        If an answer is lost, the record tells what became of it. Another version than the one that was read can only
        be such a change of our own: nobody else may write under our ticket.
        """
        wanted: bytes | None = None
        for _ in range(TRIES_MAX):
            record, version, stored = _read(self._leases, self._type)
            if wanted is not None and stored == wanted:
                self.record = record
                return record
            wanted = msgspec.json.encode(rule(record))
            try:
                self._leases.publish(lock_name(self._type), wanted, version, self._holding.lease)
            except (LostRace, CommitUnknown) as error:
                log.warning("the record of a type is read again", type=self._type, error=str(error))
                continue
            self.record = msgspec.json.decode(wanted, type=Record)
            return self.record
        raise CommitUnknown(f"the record of {self._type} could not be changed in {TRIES_MAX} tries")


def _read(leases: Leases, type_name: str) -> tuple[Record, int | None, bytes | None]:
    found = leases.published(lock_name(type_name))
    if found is None:
        return Record(), None, None
    return msgspec.json.decode(found.data, type=Record), found.version, found.data


UNREACHABLE = (LeasesUnreachable, StoreUnreachable)
