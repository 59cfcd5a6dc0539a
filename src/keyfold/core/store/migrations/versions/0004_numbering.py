"""Numbering: pointers that leases guard, and the offers that were exported."""

import sqlalchemy as sa
from alembic import op

from keyfold.core.store.schema import BinaryText, Bytes, Int32, Int64, Text

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "pointers",
        sa.Column("name", Text, primary_key=True),
        sa.Column("version", Int64, nullable=False),
        sa.Column("data", Bytes, nullable=False),
        sqlite_strict=True,
    )
    op.create_table(
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
        sqlite_strict=True,
    )
