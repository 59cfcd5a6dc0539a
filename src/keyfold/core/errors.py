"""One tree of errors: what was wrong, where, and what to do next.

The docstring of a class is the title that people read; `slug` is the stable name that programs read; `status` is
what the HTTP edge answers. A new error is a subclass here, never a bare exception with a number at the door.
"""

from typing import ClassVar


class KeyfoldError(Exception):
    """Something went wrong"""

    slug: ClassVar[str] = "error"
    status: ClassVar[int] = 500

    def __init__(
        self,
        detail: str,
        *,
        place: str | None = None,
        hint: str | None = None,
        retry_after_seconds: int | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.place = place
        self.hint = hint
        self.retry_after_seconds = retry_after_seconds

    @classmethod
    def title(cls) -> str:
        return (cls.__doc__ or "").strip().splitlines()[0]

    def __str__(self) -> str:
        place = f" (at {self.place})" if self.place else ""
        hint = f". {self.hint}" if self.hint else ""
        return f"{self.detail}{place}{hint}"


# What the caller sent ---------------------------------------------------------------------------------------------


class BadInput(KeyfoldError):
    """The input was refused and nothing was changed"""

    slug = "bad-input"
    status = 400


class TooDeep(BadInput):
    """The body is nested too deeply"""

    slug = "too-deep"


class TooLarge(BadInput):
    """The body or the batch is larger than the limit"""

    slug = "too-large"
    status = 413


class WrongMediaType(BadInput):
    """The body must be JSON"""

    slug = "wrong-media-type"
    status = 415


class TooSlow(BadInput):
    """The body did not arrive in time"""

    slug = "too-slow"
    status = 408


class AddressTooLong(BadInput):
    """The address is longer than the limit"""

    slug = "address-too-long"
    status = 414


class Unauthenticated(KeyfoldError):
    """A valid client token is needed"""

    slug = "unauthenticated"
    status = 401


class ScopeMissing(KeyfoldError):
    """The token lacks the scope that this call needs"""

    slug = "scope-missing"
    status = 403


class NotFound(KeyfoldError):
    """There is no such thing, or this token may not know of it"""

    slug = "not-found"
    status = 404


class MethodNotAllowed(KeyfoldError):
    """This address does not take that method"""

    slug = "method-not-allowed"
    status = 405


class Conflict(KeyfoldError):
    """The request contradicts what is stored"""

    slug = "conflict"
    status = 409


class IdempotencyConflict(Conflict):
    """The Idempotency-Key was used before with another body"""

    slug = "idempotency-conflict"


class VersionStale(KeyfoldError):
    """The thing has changed since the version in If-Match"""

    slug = "version-stale"
    status = 412


class VersionNeeded(KeyfoldError):
    """An edit needs If-Match with the version it was made from"""

    slug = "version-needed"
    status = 428


class RateExceeded(KeyfoldError):
    """Too many requests"""

    slug = "rate-exceeded"
    status = 429


# What the machinery could not do now ------------------------------------------------------------------------------


class Unavailable(KeyfoldError):
    """The service cannot do this now; try again"""

    slug = "unavailable"
    status = 503


class QueueFull(Unavailable):
    """Too many requests are waiting"""

    slug = "queue-full"


class StoreBusy(Unavailable):
    """The store stayed contended through every try"""

    slug = "store-busy"


class StoreUnreachable(Unavailable):
    """The store does not answer"""

    slug = "store-unreachable"


class StoreFull(Unavailable):
    """The store's disk is full; reads go on"""

    slug = "store-full"


class CommitUnknown(Unavailable):
    """The store went away while committing; whether it committed is not known"""

    slug = "commit-unknown"


class TopicUnreachable(Unavailable):
    """The broker does not answer"""

    slug = "topic-unreachable"


class LeasesUnreachable(Unavailable):
    """The lease service does not answer"""

    slug = "leases-unreachable"


class Stopping(Unavailable):
    """The server is stopping"""

    slug = "stopping"


class Internal(KeyfoldError):
    """An unexpected fault; the log has it under the request id"""

    slug = "internal"


# What an operator must mend ---------------------------------------------------------------------------------------


class SettingsWrong(KeyfoldError):
    """The settings are wrong"""

    slug = "settings-wrong"


class StoreRefused(KeyfoldError):
    """This store cannot be used"""

    slug = "store-refused"


class SchemaUnknown(StoreRefused):
    """The store's schema is not the one this version knows"""

    slug = "schema-unknown"


class TopicChanged(KeyfoldError):
    """The topic is not the one that was read before"""

    slug = "topic-changed"


class OffsetGone(TopicChanged):
    """The position lies before what the topic still keeps"""

    slug = "offset-gone"


class PartitionStopped(KeyfoldError):
    """Too many keys wait behind poison messages; the partition stands still"""

    slug = "partition-stopped"


# What a transaction says of itself; callers retry or let go -------------------------------------------------------


class LostRace(KeyfoldError):
    """Another writer changed a row first; the whole transaction runs again"""

    slug = "lost-race"
    status = 503


class LeaseLost(KeyfoldError):
    """The lease has passed to another holder"""

    slug = "lease-lost"
    status = 409


class TicketRefused(LeaseLost):
    """A newer ticket guards this work"""

    slug = "ticket-refused"


class DataRefused(BadInput):
    """The store refused a value"""

    slug = "data-refused"
