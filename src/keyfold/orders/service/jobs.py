"""Long work in bounded steps: whose run it is and how far it came stands in the transaction of each step.

A run that is started again takes over where the last one was; whoever still runs is refused at its next step.
"""

import uuid
from collections.abc import Callable
from typing import Any

import msgspec

from keyfold.core.errors import LeaseLost
from keyfold.core.store import Store, Transaction
from keyfold.core.store.batch import Columns
from keyfold.core.store.shapes import compare_and_set, load
from keyfold.orders.service.unit import Unit


class Progress(msgspec.Struct, frozen=True):
    """How far a run came. `source` tells what it reads: of another source it begins anew."""

    source: str
    after: str | None = None
    is_done: bool = False
    numbers: dict[str, int] = {}

    def adding(self, **more: int) -> dict[str, int]:
        return {**self.numbers, **{name: self.numbers.get(name, 0) + value for name, value in more.items()}}


class Job:
    """One run of one piece of work."""

    def __init__(self, unit: Unit, name: str, run: str, progress: Progress) -> None:
        self._unit = unit
        self._name = name
        self._run = run
        self.progress = progress

    @classmethod
    def begin(
        cls, store: Store, unit: Unit, name: str, source: str, begun: Callable[[Transaction, bool], None] | None = None
    ) -> "Job":
        """Take the work over, where it was if it reads the same, else from the beginning.

        `begun` is told in the same transaction, with whether work of another source was left unfinished.
        """
        run = uuid.uuid4().hex

        def work(tx: Transaction) -> Progress:
            version, found = _stored(tx, unit, name)
            unfinished = found[1] if found is not None and not found[1].is_done else None
            goes_on = unfinished is not None and unfinished.source == source
            if begun is not None:
                begun(tx, unfinished is not None and not goes_on)
            progress = unfinished if unfinished is not None and goes_on else Progress(source)
            _store(tx, unit, name, version, run, progress)
            return progress

        return cls(unit, name, run, store.transact(work, name="begin job"))

    def step(self, tx: Transaction, progress: Progress) -> None:
        """Move on, in the transaction of the step; refused where another run has taken over."""
        version, found = _stored(tx, self._unit, self._name)
        if found is None or found[0] != self._run:
            raise LeaseLost(f"another run of {self._name} has taken over", hint="Let that one finish")
        _store(tx, self._unit, self._name, version, self._run, progress)

    def stepped(self, progress: Progress) -> None:
        """What `step` stored is committed."""
        self.progress = progress


def give_up(tx: Transaction, unit: Unit, name: str) -> None:
    """Nothing of this work is left to finish; whoever still runs it is refused at the next step."""
    version, found = _stored(tx, unit, name)
    if found is not None and not found[1].is_done:
        _store(tx, unit, name, version, "", msgspec.structs.replace(found[1], is_done=True))


def progress_of(tx: Transaction, unit: Unit) -> dict[str, Progress]:
    """All work that was ever begun, by name."""
    rows = tx.rows(f"SELECT name, body FROM {unit.tables.jobs.name}")  # noqa: S608
    return {name: msgspec.json.decode(body, type=Progress) for name, body in rows}


def _stored(tx: Transaction, unit: Unit, name: str) -> tuple[int, tuple[str, Progress] | None]:
    found = load(tx, unit.tables.jobs, {"name": [name]}, ("version", "run", "body"))
    if not found:
        return 0, None
    ((version, run, body),) = found.values()
    return version, (run, msgspec.json.decode(body, type=Progress))


def _store(tx: Transaction, unit: Unit, name: str, version: int, run: str, progress: Progress) -> None:
    row: dict[str, list[Any]] = {
        "name": [name],
        "version": [version],
        "run": [run],
        "body": [msgspec.json.encode(progress).decode()],
    }
    columns: Columns = row
    compare_and_set(tx, unit.tables.jobs, columns)
