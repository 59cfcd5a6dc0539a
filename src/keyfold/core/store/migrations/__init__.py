"""Alembic's scripts: one numbered file a change, written for both databases."""
