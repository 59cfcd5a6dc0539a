"""How every benchmark runs: sides of a race take turns, round after round; medians, spreads and ratios come out.

Machines are noisy and this one is shared, so a ratio inside one run counts and an absolute number does not. Sides
alternate within a round, and who goes first rotates, so that a slow minute of the machine falls on all of them.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from msgspec import Struct

Better = Literal["more", "less"]


class Side(Struct, frozen=True):
    """One contestant. `run` does the work once and returns the measure; what it prepares must not be in it."""

    name: str
    run: Callable[[], float]


class Goal(Struct, frozen=True, kw_only=True):
    """How `side` should stand to `against`, as a ratio; without `against`, as a measure of its own."""

    side: str
    against: str | None
    must: float | None = None
    moonshot: float | None = None
    note: str = ""


class Race(Struct, frozen=True, kw_only=True):
    """Sides that do the same work on the same machine in the same minutes."""

    title: str
    unit: str
    sides: Sequence[Side]
    goals: Sequence[Goal] = ()
    better: Better = "more"


class Measured(Struct, frozen=True):
    name: str
    values: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """From the lowest to the highest, as a part of the median."""
        return (max(self.values) - min(self.values)) / self.median if self.median else 0.0


class Verdict(Struct, frozen=True, kw_only=True):
    """A goal and what came of it; `low` and `high` are the extremes of the single rounds."""

    side: str
    against: str | None
    reached: float
    low: float
    high: float
    must: float | None
    moonshot: float | None
    better: Better
    note: str = ""

    @property
    def grade(self) -> str:
        if self.must is None and self.moonshot is None:
            return ""
        if self._meets(self.moonshot):
            return "moonshot"
        return "must" if self._meets(self.must) else "short"

    def _meets(self, wanted: float | None) -> bool:
        if wanted is None:
            return False
        return self.reached >= wanted if self.better == "more" else self.reached <= wanted


class Outcome(Struct, frozen=True):
    """What a race came to."""

    title: str
    unit: str
    better: Better
    sides: list[Measured]
    verdicts: list[Verdict]


def run_race(race: Race, rounds: int, tell: Callable[[str], None]) -> Outcome:
    """Every side once a round; the first round warms up nothing that the others do not have."""
    values: dict[str, list[float]] = {side.name: [] for side in race.sides}
    for number in range(rounds):
        for side in _in_turn(race.sides, number):
            gc.collect()
            measure = side.run()
            values[side.name].append(measure)
            tell(f"  round {number + 1}/{rounds}  {side.name}: {figure(measure)} {race.unit}")
    measured = [Measured(name, each) for name, each in values.items()]
    return Outcome(race.title, race.unit, race.better, measured, [_verdict(goal, values, race) for goal in race.goals])


def rate(count: int, work: Callable[[], object]) -> float:
    """How many a second, of work that does `count`."""
    return count / seconds(work)


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def figure(value: float) -> str:
    """A number as people read it: three digits that count."""
    if value >= 1000:
        return f"{round(value, 3 - len(str(int(value)))):,.0f}"
    return f"{value:.3g}"


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows in columns, the first row as heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for number, row in enumerate(rows):
        cells = [cell.ljust(width) if not column else cell.rjust(width) for column, (cell, width) in _wide(row, widths)]
        yield "  ".join(cells).rstrip()
        if number == 0:
            yield "  ".join("-" * width for width in widths)


def _wide(row: Sequence[str], widths: Sequence[int]) -> Iterator[tuple[int, tuple[str, int]]]:
    yield from enumerate(zip(row, widths, strict=True))


def _in_turn(sides: Sequence[Side], number: int) -> list[Side]:
    first = number % len(sides)
    return [*sides[first:], *sides[:first]]


def _verdict(goal: Goal, values: dict[str, list[float]], race: Race) -> Verdict:
    ours = values[goal.side]
    if goal.against is None:
        each = ours
        reached = statistics.median(ours)
        better = race.better
    else:
        theirs = values[goal.against]
        # A ratio always reads "times better", whether the measure is a rate or a time.
        pairs = zip(ours, theirs, strict=True) if race.better == "more" else zip(theirs, ours, strict=True)
        each = [above / below for above, below in pairs]
        above, below = statistics.median(ours), statistics.median(theirs)
        reached = above / below if race.better == "more" else below / above
        better = "more"
    return Verdict(
        side=goal.side,
        against=goal.against,
        reached=reached,
        low=min(each),
        high=max(each),
        must=goal.must,
        moonshot=goal.moonshot,
        better=better,
        note=goal.note,
    )
