"""The tables of numbering: the offers that were exported to a topic, as far as it was read."""

import sqlalchemy as sa

from keyfold.core.store.schema import BinaryText, Int32, Int64, Text, table

# One row an exported offer, as its newest version says. A row that is not live keeps older versions out for a while.
NUMBERING_OFFERS = table(
    "numbering_offers",
    sa.Column("message_key", BinaryText, primary_key=True),
    sa.Column("version", Int64, nullable=False),
    sa.Column("offer_version", Int64, nullable=False),
    sa.Column("business_id", Int64, nullable=False),
    sa.Column("offer_id", Text, nullable=False),
    sa.Column("shop_id", Int64, nullable=False),
    sa.Column("warehouse_id", Int64, nullable=False),
    sa.Column("tier", Text, nullable=False),
    sa.Column("is_live", Int32, nullable=False),
    sa.Column("moved_at_us", Int64, nullable=False),
    distribute_by="message_key",
)
