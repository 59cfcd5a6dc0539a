"""Counts against rows: by how much they differ, and the exact repair while writes go on.

Every writer changes rows and counts in one transaction, so what they differ by stays the same whoever writes. One
statement sees both in one snapshot and adds the difference to whatever the count is when it holds the row. Two repairs
of one seller would add it twice: they queue at the seller's row.
"""

from msgspec import Struct

from keyfold.core import audit
from keyfold.core.errors import NotFound
from keyfold.core.store import Transaction
from keyfold.listings import metrics
from keyfold.listings.model import CURRENT, SOLD
from keyfold.listings.service import presets

PRESETS, COUNTERS = "presets", "counters"

_PRESET_DRIFT = (
    "SELECT preset_id, sum(n) AS drift FROM ("
    "SELECT preset_id, count(*) AS n FROM user_offer_presets WHERE seller_id = {m} GROUP BY preset_id"
    " UNION ALL SELECT preset_id, -sum(offers) AS n FROM user_offer_presets_count WHERE seller_id = {m}"
    " GROUP BY preset_id) AS compared GROUP BY preset_id HAVING sum(n) <> 0"
)
_NAMES = " ".join(f"WHEN '{status}' THEN '{name}'" for status, name in CURRENT.items())
_STATUSES = ", ".join(f"'{status}'" for status in CURRENT)
_COUNTER_DRIFT = (
    "SELECT counter_id, sum(n) AS drift FROM ("
    f"SELECT CASE shown {_NAMES} END AS counter_id, count(*) AS n FROM offer"
    f" WHERE seller_id = {{m}} AND shown IN ({_STATUSES}) GROUP BY shown"
    f" UNION ALL SELECT '{SOLD}' AS counter_id, count(*) AS n FROM sold_offers WHERE seller_id = {{m}}"
    " UNION ALL SELECT 'MoneyEarned.' || currency AS counter_id, sum(amount) AS n FROM sold_offers"
    " WHERE seller_id = {m} AND currency <> '' GROUP BY currency"
    " UNION ALL SELECT counter_id, -sum(counter_value) AS n FROM user_total_counters WHERE seller_id = {m}"
    " GROUP BY counter_id) AS compared GROUP BY counter_id HAVING sum(n) <> 0"
)


class Drift(Struct, frozen=True):
    """A count that is not what the rows say; `missing` is what must be added to it."""

    seller_id: str
    what: str  # presets or counters
    name: str
    missing: int


def drift(tx: Transaction, seller_id: str) -> list[Drift]:
    """Where the counts of a seller differ from the rows. Each of the two statements sees one snapshot."""
    names = {row.number: row.name for row in presets.stored(tx)}
    mark = "?" if tx.is_sqlite else "%s"
    found = tx.rows(_PRESET_DRIFT.format(m=mark), (seller_id,) * 2)
    counted = tx.rows(_COUNTER_DRIFT.format(m=mark), (seller_id,) * 4)
    return [Drift(seller_id, PRESETS, names.get(number, str(number)), int(missing)) for number, missing in found] + [
        Drift(seller_id, COUNTERS, name, int(missing)) for name, missing in counted
    ]


def repair(tx: Transaction, seller_id: str, actor: str) -> list[Drift]:
    """Add to the counts of a seller what they differ by; returns what that was."""
    mark = "?" if tx.is_sqlite else "%s"
    if not tx.rows(
        f"UPDATE sellers SET repairs = repairs + 1 WHERE seller_id = {mark} RETURNING repairs", (seller_id,)
    ):
        raise NotFound(f"there is no seller {seller_id!r}")
    found = drift(tx, seller_id)  # which no writer changes, and no repair but this one
    if not found:
        return []
    _add(tx, "user_offer_presets_count", "preset_id", "offers", _PRESET_DRIFT.format(m=mark), seller_id)
    _add(tx, "user_total_counters", "counter_id", "counter_value", _COUNTER_DRIFT.format(m=mark), seller_id)
    for each in found:
        metrics.REPAIRED.labels(each.what).inc()
    told = ", ".join(f"{each.name} {each.missing:+d}" for each in found)
    audit.record(tx, actor, "counts repaired", f"{seller_id}: {told}")
    return found


def _add(tx: Transaction, table: str, name: str, value: str, drifted: str, seller_id: str) -> None:
    """Add the drift to the first row of each count, in the statement that finds it."""
    mark = "?" if tx.is_sqlite else "%s"
    tx.driver(
        f"INSERT INTO {table} (seller_id, {name}, seq_no, {value})"
        f" SELECT {mark}, {name}, 0, drift FROM ({drifted}) AS drifted WHERE true"
        f" ON CONFLICT (seller_id, {name}, seq_no) DO UPDATE SET {value} = {table}.{value} + excluded.{value}",
        (seller_id,) * (1 + drifted.count(mark)),
    )
