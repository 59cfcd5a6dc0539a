"""A lease that is renewed in the background for as long as a piece of work takes."""

import threading
import time
from collections.abc import Callable

import structlog

from keyfold.core.errors import LeaseLost, Unavailable
from keyfold.core.leases.lease import Lease, Leases

log = structlog.get_logger(__name__)

RENEWALS_PER_LEASE = 3


class Holding:
    """Renews a lease until it is left, and says whether it is still held; the ticket alone decides what commits.

    With `seconds_max` it is not renewed any more after so long: whoever hangs loses it, although its process lives.
    """

    def __init__(
        self,
        leases: Leases,
        lease: Lease,
        seconds: float,
        *,
        seconds_max: float = float("inf"),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lease = lease
        self._leases = leases
        self._seconds = seconds
        self._monotonic = monotonic
        self._ends_at = monotonic() + seconds_max
        self._valid_until = min(monotonic() + seconds, self._ends_at)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name=f"lease {lease.name}", daemon=True)

    def __enter__(self) -> "Holding":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        try:
            self._leases.release([self.lease])
        except Unavailable as error:  # it expires by itself
            log.warning("a lease was not handed back", lease=self.lease.name, error=str(error))

    def must_be_held(self) -> None:
        if self._monotonic() >= self._valid_until:
            raise LeaseLost(f"the lease {self.lease.name} has passed", hint="Another worker goes on")

    def _renew(self) -> None:
        while not self._ended.wait(self._seconds / RENEWALS_PER_LEASE):
            asked_at = self._monotonic()
            if asked_at >= self._ends_at:
                return
            try:
                if not self._leases.renew([self.lease], self._seconds):
                    self._valid_until = asked_at
                    return
                self._valid_until = min(asked_at + self._seconds, self._ends_at)
            except Unavailable as error:
                log.warning("a lease was not renewed", lease=self.lease.name, error=str(error))
