"""The offers of a generation from the topic that listings export to: the newest version of each, if it is live."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
import sqlalchemy as sa
from msgspec import Meta, Struct

from keyfold.bulk.folders import Draft, Root
from keyfold.core.clock import SECOND_US
from keyfold.core.deadletters import Refusal
from keyfold.core.errors import BadInput
from keyfold.core.files import arrow_and_parquet
from keyfold.core.store import Store, Transaction
from keyfold.core.store.batch import Columns
from keyfold.core.store.shapes import compare_and_set, load
from keyfold.core.topics.topic import Record
from keyfold.numbering import metrics
from keyfold.numbering.tables import NUMBERING_OFFERS

OFFER_ID_MAX = 512
Id = Annotated[int, Meta(ge=0, le=2**63 - 1)]
PAGE_ROWS = 50_000
COLUMNS = ("business_id", "offer_id", "shop_id", "warehouse_id", "tier")
DEAD_DAYS = 30


class ExportedOffer(Struct, frozen=True):
    """What a message of an offer must say to be numbered; it may say more. The index holds active offers alone."""

    offer_id: Annotated[str, Meta(min_length=1, max_length=OFFER_ID_MAX)]
    business_id: Id
    shop_id: Id
    warehouse_id: Id = 0
    status: str = "active"
    is_banned: bool = False
    tier: Annotated[str, Meta(max_length=64)] = ""

    @property
    def is_live(self) -> bool:
        return self.status == "active" and not self.is_banned


_decoded = msgspec.json.Decoder(ExportedOffer).decode


def take_offers(tx: Transaction, records: Sequence[Record]) -> list[Refusal]:
    """Keep the newest version of every offer. Messages may come again and in any order."""
    newest: dict[str, tuple[int, ExportedOffer]] = {}
    refused: list[Refusal] = []
    for record in records:
        message = record.message
        if message.kind not in ("", "offer"):
            continue  # other kinds of one offer are versioned by themselves
        try:
            offer = _decoded(message.payload)
            if "\0" in offer.offer_id:
                raise BadInput("offer_id holds a NUL")
            offer.offer_id.encode()
        except (msgspec.DecodeError, UnicodeError, BadInput) as error:
            refused.append(Refusal(record, f"no offer: {error}"))
            continue
        if message.key not in newest or newest[message.key][0] < message.version:
            newest[message.key] = (message.version, offer)
    keys = sorted(newest)
    stored = load(tx, NUMBERING_OFFERS, {"message_key": keys}, ("version", "offer_version")) if keys else {}
    newer = [key for key in keys if (key,) not in stored or stored[key,][1] < newest[key][0]]
    offers = [newest[key][1] for key in newer]
    rows: Columns = {
        "message_key": newer,
        "version": [stored[key,][0] if (key,) in stored else 0 for key in newer],
        "offer_version": [newest[key][0] for key in newer],
        **{name: [getattr(offer, name) for offer in offers] for name in COLUMNS},
        "is_live": [int(offer.is_live) for offer in offers],
        "moved_at_us": [tx.now_us] * len(newer),
    }
    if newer:
        compare_and_set(tx, NUMBERING_OFFERS, rows)
    metrics.OFFERS.labels("taken").inc(len(newer))
    metrics.OFFERS.labels("old").inc(len(keys) - len(newer))
    metrics.OFFERS.labels("refused").inc(len(refused))
    return refused


class Built(Struct, frozen=True):
    """A table of offers that was written."""

    offers: int
    path: str


def build_offers(store: Store, target: str, tell: Callable[[int], None] = lambda _: None) -> Built:
    """Write the offers that are live now as this generation's table, visible when it is whole.

    Pages are read one after the other: an offer that changes meanwhile is there as it was, or as it is.
    """
    pyarrow, parquet = arrow_and_parquet()
    types = pyarrow.schema(
        [(name, pyarrow.string() if name in ("offer_id", "tier") else pyarrow.int64()) for name in COLUMNS]
    )
    root = Root(target)
    draft = Draft(root, "", None)
    try:
        count, after = 0, ""
        with parquet.ParquetWriter(draft.folder / "offers.parquet", types, compression="zstd") as writer:
            while rows := store.read(lambda tx, after=after: _page(tx, after)):  # type: ignore[misc]
                columns = list(zip(*rows, strict=True))
                arrays = {name: list(columns[at + 1]) for at, name in enumerate(COLUMNS)}
                writer.write_table(pyarrow.table(arrays, schema=types))
                count, after = count + len(rows), rows[-1][0]
                tell(count)
        draft.files()
        draft.publish(None)
    except BaseException:
        draft.drop()
        raise
    return Built(count, root.url)


def _page(tx: Transaction, after: str) -> list[tuple[Any, ...]]:
    offers = NUMBERING_OFFERS.c
    chosen = (
        sa.select(offers.message_key, *(offers[name] for name in COLUMNS))
        .where(offers.message_key > after, offers.is_live == 1)
        .order_by(offers.message_key)
        .limit(PAGE_ROWS)
    )
    return [tuple(row) for row in tx.execute(chosen)]


def forget_dead(tx: Transaction, rows_max: int) -> int:
    """Forget offers that are not live, once no older version of them can still come."""
    offers = NUMBERING_OFFERS.c
    before_us = tx.now_us - DEAD_DAYS * 86_400 * SECOND_US
    is_gone = sa.and_(offers.is_live == 0, offers.moved_at_us < before_us)
    chosen = sorted(tx.execute(sa.select(offers.message_key).where(is_gone).limit(rows_max)).scalars())
    # Asked again where it is deleted: an offer may have come back since it was chosen.
    return tx.execute(sa.delete(NUMBERING_OFFERS).where(offers.message_key.in_(chosen), is_gone)).rowcount


def live_count(tx: Transaction) -> int:
    chosen = sa.select(sa.func.count()).select_from(NUMBERING_OFFERS).where(NUMBERING_OFFERS.c.is_live == 1)
    return int(tx.execute(chosen).scalar_one())
