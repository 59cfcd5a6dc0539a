"""One row a key: its value, the version of that value, and the newest event applied to it."""

import sqlalchemy as sa

from keyfold.core.store.schema import Int64, Text, table

TALLIES = table(
    "tallies",
    sa.Column("key", Text, primary_key=True),
    sa.Column("value", Int64, nullable=False),
    sa.Column("version", Int64, nullable=False),
    sa.Column("event_version", Int64, nullable=False),
    distribute_by="key",
)
