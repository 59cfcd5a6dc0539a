"""Orders that were kept because they were not counted: listed, and driven again where the reason is gone."""

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from keyfold.core.errors import BadInput
from keyfold.core.store import Transaction
from keyfold.core.store.shapes import delete
from keyfold.core.times import iso
from keyfold.orders.model import CompletedOrder
from keyfold.orders.service.counting import Verdict, count_orders, order_check
from keyfold.orders.service.unit import Unit


class KeptOrder(Struct, frozen=True):
    """One of them."""

    order_id: str
    why: str  # late, before_start or set_aside
    created_at: str
    kept_at: str
    order: CompletedOrder


def kept_orders(tx: Transaction, unit: Unit, why: str | None, after: str, limit: int) -> list[KeptOrder]:
    """The kept orders behind an id, in the order of their ids.

    One that is kept for several reasons is listed with all of them, also beyond the limit: who goes on behind its id
    would not see the others.
    """
    kept = unit.tables.kept
    wanted = sa.select(kept).order_by(kept.c.order_id, kept.c.why)
    if why is not None:
        wanted = wanted.where(kept.c.why == why)
    rows = tx.execute(wanted.where(kept.c.order_id > after).limit(limit)).all()
    if len(rows) == limit:
        rest = wanted.where(kept.c.order_id == rows[-1].order_id, kept.c.why > rows[-1].why)
        rows = [*rows, *tx.execute(rest)]
    decode = msgspec.json.Decoder(CompletedOrder).decode
    return [
        KeptOrder(row.order_id, row.why, iso(row.created_at_us), iso(row.kept_at_us), decode(row.body)) for row in rows
    ]


def redrive(tx: Transaction, unit: Unit, after: str, limit: int) -> tuple[str | None, list[Verdict]]:
    """Count orders again that were set aside, now that the unit may place them; where to go on, and what became.

    Also of those that are wrong by now, and of those whose ids another order was counted under meanwhile: nobody else
    knows what they said, so they stay where they are.
    """
    page = kept_orders(tx, unit, "set_aside", after, limit)
    must_be_order = order_check(tx, unit)
    good: list[CompletedOrder] = []
    wrong: list[Verdict] = []
    for each in page:
        try:
            must_be_order(each.order, each.order_id)
            good.append(each.order)
        except BadInput as error:
            wrong.append(Verdict(each.order_id, "set_aside", str(error)))
    verdicts = count_orders(tx, unit, good)
    gone = [each.order_id for each in verdicts if each.status not in ("set_aside", "conflict")]
    delete(tx, unit.tables.kept, {"order_id": gone, "why": ["set_aside"] * len(gone)})
    return (page[-1].order_id if len(page) >= limit else None), [*verdicts, *wrong]
