"""Administrative acts in an append-only table, each row chained to the one before it by its hash."""

import hashlib

import sqlalchemy as sa

from keyfold.core.errors import LostRace
from keyfold.core.store import Transaction
from keyfold.core.store.batch import Columns
from keyfold.core.store.shapes import insert_new
from keyfold.core.tables import AUDIT


def record(tx: Transaction, actor: str, act: str, detail: str) -> None:
    """Add a row in the transaction of the act itself; `detail` names no secret and no personal data."""
    last = tx.execute(sa.select(AUDIT.c.number, AUDIT.c.hash).order_by(AUDIT.c.number.desc()).limit(1)).one_or_none()
    number, before = (last.number + 1, bytes(last.hash)) if last else (1, b"")
    row: Columns = {
        "number": [number],
        "at_us": [tx.now_us],
        "actor": [actor],
        "act": [act],
        "detail": [detail],
        "hash": [chained(before, number, tx.now_us, actor, act, detail)],
    }
    if not insert_new(tx, AUDIT, row):
        raise LostRace("another act was recorded at the same time")


def chained(before: bytes, number: int, at_us: int, actor: str, act: str, detail: str) -> bytes:
    """The hash of a row: over the hash before it and its own fields, each with its length."""
    digest = hashlib.sha256(before)
    for field in (str(number), str(at_us), actor, act, detail):
        data = field.encode()
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.digest()


def broken(tx: Transaction) -> int | None:
    """The number of the first row that does not follow from the one before it, or None."""
    before, expected = b"", 1
    for row in tx.execute(sa.select(AUDIT).order_by(AUDIT.c.number)):
        if row.number != expected or bytes(row.hash) != chained(
            before, row.number, row.at_us, row.actor, row.act, row.detail
        ):
            return expected
        before, expected = bytes(row.hash), expected + 1
    return None
