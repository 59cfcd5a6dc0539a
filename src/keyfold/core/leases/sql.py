"""Leases in the store: a row a name, taken and prolonged by the database's clock, one statement for a whole batch.

Right under concurrency because every change is one conditional UPDATE of the row it speaks of: of two takers one
waits for the row and then sees that it is no longer free. A released or expired lease keeps its row, so the ticket
keeps growing. A holder that asks again for what it holds is refused like anybody else: the lease is not free, and a
new ticket would fence the holder's own work.
"""

import threading
from collections.abc import Sequence

from keyfold.core.clock import SECOND_US
from keyfold.core.errors import Conflict, LostRace, TicketRefused
from keyfold.core.leases.lease import Lease, Published
from keyfold.core.store import batch
from keyfold.core.store.batch import Columns
from keyfold.core.store.store import Store, Transaction
from keyfold.core.tables import LEASES

FIRST_TICKET = 1
# Handed back: free by any clock, also one that was set back.
FREE = 0


class PointerMoved(Conflict):
    """The pointer was moved by somebody else"""

    slug = "pointer-moved"


class SqlLeases:
    """Leases granted by the store that holds the guarded rows; nothing else to run."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def acquire(self, names: Sequence[str], holder: str, seconds: float) -> list[Lease]:
        """Take those that are free or expired. If the answer to COMMIT is lost, they lie idle until they expire."""
        wanted = sorted(set(names))
        if not wanted:
            return []

        def take(tx: Transaction) -> list[Lease]:
            now_us = tx.now_us
            expires_at_us = now_us + _us(seconds)
            count = len(wanted)
            rows: Columns = {
                "name": wanted,
                "holder": [holder] * count,
                "ticket": [FIRST_TICKET] * count,
                "expires_at_us": [expires_at_us] * count,
            }
            rendered, parameters = batch.source(tx, LEASES, rows)
            taken = tx.driver(
                f"INSERT INTO leases (name, holder, ticket, expires_at_us) {rendered}"
                " ON CONFLICT (name) DO UPDATE"
                " SET holder = excluded.holder, ticket = leases.ticket + 1, expires_at_us = excluded.expires_at_us"
                f" WHERE leases.expires_at_us <= {_mark(tx)}"
                " RETURNING name, ticket",
                (*parameters, now_us),
            )
            return sorted((Lease(row.name, holder, row.ticket, expires_at_us) for row in taken), key=_by_name)

        return self._store.transact(take, name="acquire leases")

    def renew(self, leases: Sequence[Lease], seconds: float) -> list[Lease]:
        """Prolong what is still held under its ticket. Expired is lost, even where nobody has taken it."""
        if not leases:
            return []

        def prolong(tx: Transaction) -> list[Lease]:
            now_us = tx.now_us
            expires_at_us = now_us + _us(seconds)
            rendered, parameters = _in_name_order(tx, leases)
            kept = tx.driver(
                f"UPDATE leases SET expires_at_us = {_mark(tx)} FROM {rendered} WHERE {_STILL_MINE}"
                f" AND leases.expires_at_us > {_mark(tx)} RETURNING leases.name, leases.holder, leases.ticket",
                (expires_at_us, *parameters, now_us),
            )
            return sorted((Lease(row.name, row.holder, row.ticket, expires_at_us) for row in kept), key=_by_name)

        return self._store.transact(prolong, name="renew leases")

    def release(self, leases: Sequence[Lease]) -> None:
        if not leases:
            return

        def hand_back(tx: Transaction) -> None:
            rendered, parameters = _in_name_order(tx, leases)
            tx.driver(f"UPDATE leases SET expires_at_us = {FREE} FROM {rendered} WHERE {_STILL_MINE}", parameters)

        self._store.transact(hand_back, name="release leases")

    def held(self, names: Sequence[str]) -> list[Lease]:
        wanted = sorted(set(names))
        if not wanted:
            return []

        def look(tx: Transaction) -> list[Lease]:
            rendered, parameters = _relation(tx, {"name": wanted})
            rows = tx.driver(
                "SELECT leases.name, leases.holder, leases.ticket, leases.expires_at_us"
                f" FROM {rendered} JOIN leases ON leases.name = batch.name"
                f" WHERE leases.expires_at_us > {_mark(tx)}",
                (*parameters, tx.now_us),
            )
            found = (Lease(row.name, row.holder, row.ticket, row.expires_at_us) for row in rows)
            return sorted(found, key=_by_name)

        return self._store.read(look)

    def join(self, job: str, member: str, seconds: float) -> None:
        def say_alive(tx: Transaction) -> None:
            mark = _mark(tx)
            tx.driver(
                f"INSERT INTO members (job, member, expires_at_us) VALUES ({mark}, {mark}, {mark})"
                " ON CONFLICT (job, member) DO UPDATE SET expires_at_us = excluded.expires_at_us",
                (job, member, tx.now_us + _us(seconds)),
            )

        self._store.transact(say_alive, name="join job")
        if self._is_new(job, member):
            self._forget_the_dead(job)

    def leave(self, job: str, member: str) -> None:
        def go(tx: Transaction) -> None:
            tx.driver(f"DELETE FROM members WHERE job = {_mark(tx)} AND member = {_mark(tx)}", (job, member))

        self._store.transact(go, name="leave job")
        with self._lock:
            self._known.discard((job, member))

    def members(self, job: str) -> list[str]:
        def look(tx: Transaction) -> list[str]:
            found = tx.driver(
                f"SELECT member FROM members WHERE job = {_mark(tx)} AND expires_at_us > {_mark(tx)}",
                (job, tx.now_us),
            )
            # Sorted here: a database sorts by its own collation, and all workers must agree on the order.
            return sorted(str(member) for member in found.scalars())

        return self._store.read(look)

    def publish(self, path: str, data: bytes, version: int | None, lease: Lease) -> int:
        """The lease's own row is written first, in the same transaction: nobody takes it over before this has ended."""

        def move(tx: Transaction) -> int:
            mark = _mark(tx)
            is_held = tx.driver(
                f"UPDATE leases SET expires_at_us = expires_at_us WHERE name = {mark} AND holder = {mark}"
                f" AND ticket = {mark} AND expires_at_us > {mark}",
                (lease.name, lease.holder, lease.ticket, tx.now_us),
            ).rowcount
            if not is_held:
                raise TicketRefused(f"the lease {lease.name} is no longer held under ticket {lease.ticket}")
            if version is None:
                written = tx.driver(
                    f"INSERT INTO pointers (name, version, data) VALUES ({mark}, 0, {mark}) ON CONFLICT DO NOTHING",
                    (path, data),
                ).rowcount
            else:
                written = tx.driver(
                    f"UPDATE pointers SET data = {mark}, version = version + 1"
                    f" WHERE name = {mark} AND version = {mark}",
                    (data, path, version),
                ).rowcount
            if not written:
                raise PointerMoved(f"{path} is no longer at version {version}")
            return 0 if version is None else version + 1

        try:
            return self._store.transact(move, name="publish pointer", once=True)
        except PointerMoved as error:
            raise LostRace(error.detail) from None

    def published(self, path: str) -> Published | None:
        def look(tx: Transaction) -> Published | None:
            found = tx.driver(f"SELECT data, version FROM pointers WHERE name = {_mark(tx)}", (path,)).one_or_none()
            return None if found is None else Published(bytes(found.data), found.version)

        return self._store.read(look)

    def close(self) -> None:
        """The store belongs to whoever opened it."""

    def _is_new(self, job: str, member: str) -> bool:
        with self._lock:
            if (job, member) in self._known:
                return False
            self._known.add((job, member))
            return True

    def _forget_the_dead(self, job: str) -> None:
        """Every newcomer clears its job of members that died without leaving, so the table stays small.

        In a transaction of its own: one that also held the newcomer's row could deadlock with another newcomer.
        """

        def clear(tx: Transaction) -> None:
            tx.driver(
                f"DELETE FROM members WHERE job = {_mark(tx)} AND expires_at_us <= {_mark(tx)}",
                (job, tx.now_us),
            )

        self._store.transact(clear, name="clear members")


# The ticket alone would do; the holder keeps a lease that was made up by mistake from being honoured.
_STILL_MINE = "leases.name = batch.name AND leases.holder = batch.holder AND leases.ticket = batch.ticket"


def _in_name_order(tx: Transaction, leases: Sequence[Lease]) -> tuple[str, Sequence[object]]:
    """The leases as a relation sorted by name, byte by byte: the lock order that `acquire` has too."""
    each = sorted({(lease.name, lease.ticket, lease.holder) for lease in leases})
    rows: Columns = {
        "name": [name for name, _, _ in each],
        "ticket": [ticket for _, ticket, _ in each],
        "holder": [holder for _, _, holder in each],
    }
    listed, parameters = _relation(tx, rows, "listed")
    order = "name" if tx.is_sqlite else 'name COLLATE "C"'
    return f"(SELECT * FROM {listed} ORDER BY {order}) AS batch", parameters


def _relation(tx: Transaction, columns: Columns, name: str = "batch") -> tuple[str, Sequence[object]]:
    rendered, parameters = batch.source(tx, LEASES, columns)
    # SQLite names the columns inside the SELECT and takes no list after the alias.
    alias = name if tx.is_sqlite else f"{name} ({', '.join(columns)})"
    return f"({rendered}) AS {alias}", parameters


def _mark(tx: Transaction) -> str:
    return "?" if tx.is_sqlite else "%s"


def _us(seconds: float) -> int:
    return round(seconds * SECOND_US)


def _by_name(lease: Lease) -> str:
    return lease.name
