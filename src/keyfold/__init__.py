"""Keyfold keeps exact, bounded state per key, folded from events."""

__version__ = "0.1.0"
