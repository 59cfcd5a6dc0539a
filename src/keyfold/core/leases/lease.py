"""The contract of leases: one holder a name, a ticket that only grows, and the members of a job."""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct


class Lease(Struct, frozen=True):
    """Leave to work on `name` until it expires. The ticket proves it: guarded rows refuse an older one."""

    name: str
    holder: str
    ticket: int
    expires_at_us: int


class Published(Struct, frozen=True):
    """What a pointer holds, and the version that the next `publish` must name."""

    data: bytes
    version: int


class Leases(Protocol):
    """Who grants leases. Every method is safe to call from several threads."""

    def acquire(self, names: Sequence[str], holder: str, seconds: float) -> list[Lease]:
        """Take those of the names that are free or expired; each taking raises the ticket."""
        ...

    def renew(self, leases: Sequence[Lease], seconds: float) -> list[Lease]:
        """Prolong; what has passed to another holder, or expired, is left out of the answer."""
        ...

    def release(self, leases: Sequence[Lease]) -> None:
        """Hand back; a lease that has passed on is left alone."""
        ...

    def held(self, names: Sequence[str]) -> list[Lease]:
        """The leases in force now."""
        ...

    def join(self, job: str, member: str, seconds: float) -> None:
        """Say that a member of a job is alive."""
        ...

    def leave(self, job: str, member: str) -> None: ...

    def members(self, job: str) -> list[str]:
        """The members that are alive, sorted."""
        ...

    def publish(self, path: str, data: bytes, version: int | None, lease: Lease) -> int:
        """Set what a pointer holds, if it is still at `version` (None: not there yet) and the lease is in force.

        Both are checked in the act that writes. Returns the new version. `LostRace`: another version is there;
        `TicketRefused`: the lease is not held any more; `CommitUnknown`: the answer was lost, `published` tells.
        """
        ...

    def published(self, path: str) -> Published | None:
        """What a pointer holds; None if nothing was ever published."""
        ...

    def close(self) -> None: ...
