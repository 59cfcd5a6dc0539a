"""What every book of laws can do, whichever part it is of: it is told of commits, and compared with the store."""

from typing import Any, Protocol

from keyfold.core.store import Store, Transaction


class Book(Protocol):
    """What was counted, folded by hand, without the code under test."""

    broken: list[str]  # what was said and cannot be
    counted: Any  # by id

    def commit(self, now_us: int, given: Any, /) -> None:
        """Take in what was said of each item that one transaction was given."""

    def look(self, tx: Transaction, /) -> Any:
        """What is there."""

    def compare(self, found: Any, /) -> list[str]:
        """The laws that what is there breaks."""

    def broken_in(self, store: Store, /) -> list[str]:
        """All of it: what was said, and what is there."""
