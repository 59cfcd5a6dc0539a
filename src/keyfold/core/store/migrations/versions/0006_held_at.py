"""Profiles: when something was last held back, instead of until when, which depended on the setting of that day.

What is stored already lies later than the moment it now stands for: such a profile is looked at for longer than it
needs to be, and nothing else.
"""

from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.execute("ALTER TABLE profiles RENAME COLUMN held_until_us TO held_at_us")
