"""How many messages a consumer takes at once: more while batches are quick, fewer when one took too long or failed."""

COUNT_START = 10_000
COUNT_MIN = 1_000  # slowness alone leads no lower: what every step costs, however small, would only be paid more often


class Pace:
    """A count that grows with every full batch that was quick: at first it doubles, after a setback by an eighth.

    A large batch changes a key once where several small ones change it again and again (profile updates by position on
    SQLite: a third more events a second by 40,000 than by 20,000). What bounds it is time, because others wait for the
    store as long as one transaction goes on.
    """

    def __init__(self, count_max: int, seconds_max: float) -> None:
        self.count = min(COUNT_START, count_max)
        self._count_max = count_max
        self._seconds_max = seconds_max
        self._share = 1  # of the count, by which it grows

    def went(self, taken: int, seconds: float) -> None:
        """A batch of so many took so many seconds, from its first statement to its commit; a small one says nothing."""
        if seconds > self._seconds_max:
            if taken > self.count // 2:
                self._shrink(COUNT_MIN)
        elif taken >= self.count and seconds < self._seconds_max / 2:
            self.count = min(self._count_max, self.count + max(1, self.count // self._share))

    def set_back(self) -> None:
        """A batch was too much as a whole."""
        self._shrink(1)

    def _shrink(self, least: int) -> None:
        self.count = max(min(least, self.count), self.count // 2)
        self._share = 8
