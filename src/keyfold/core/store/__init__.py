"""Where state lives: SQLite or PostgreSQL behind one small API."""

from keyfold.core.store.store import Store, Transaction

__all__ = ["Store", "Transaction"]
