"""Where a part that counts what a topic brings is played: its consumers, its clock, an operator who replays it."""

import contextlib
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from keyfold.core import consumer, deadletters, progress, relay, replay
from keyfold.core.clock import SECOND_US, ManualClock
from keyfold.core.consumer import Consumer, ConsumerWorker
from keyfold.core.context import Context
from keyfold.core.errors import Conflict, KeyfoldError, TicketRefused
from keyfold.core.leases.sql import SqlLeases
from keyfold.core.part import Part
from keyfold.core.relay import Relay
from keyfold.core.settings import Settings
from keyfold.core.store import Transaction
from tests.faults.book import Book
from tests.faults.stage import Actor, OutsideTopic, SimulatedTopics, Stage, patched, step_by_clock

DAY = 86_400
BATCH_MAX = 3


Item = TypeVar("Item")  # what is counted
Said = Sequence[tuple[Item, str]]  # what was said of each


class Sweep(Protocol):
    """Deletes what has outlived its time."""

    def step(self) -> bool: ...


class LogStage(Stage, Generic[Item]):
    """Two workers or more of one topic, callers, a sender, a sweeper, a relay; a play sets `_consumer` and `book`."""

    part: Part
    log_topic: str
    relayed_topic: str
    outside: Sequence[str]
    partitions = 2
    sent_max: int  # in the topic
    batches_max: int  # of each caller
    sweeper_rests: int  # turns between two sweeps
    book: Book
    _consumer: Consumer

    def __init__(
        self, seed: int, template: Path, directory: Path, settings: Callable[[str], Settings], clock: ManualClock
    ) -> None:
        super().__init__(seed, template, directory, settings, clock)
        self._limits = msgspec.structs.replace(
            self._settings.limits,
            relay_batch_max=BATCH_MAX,
            consumer_batch_max=BATCH_MAX,
            consumer_batch_milliseconds=2**31,
        )
        self._outside = {name: OutsideTopic(name, self.part.name, self, losing=0.7) for name in self.outside}
        self._topics = SimulatedTopics(self._store, self._settings, dict.fromkeys(self._outside, self.partitions))
        self._topics.outside = self._outside
        self._monotonic_us = 0
        self._back_seconds = 0.0  # how far the clock went back in all
        self._highest_us = 0  # what it showed before it last moved, or earlier
        self._accepted: dict[tuple[str, int], int] = defaultdict(int)
        # What was sent and asked for; what was said in a transaction under way.
        self._sent = 0
        self._asking: dict[str, Sequence[Item]] = {}
        self._asked = {"asker0": 0, "asker1": 0}
        self._said: list[tuple[Transaction, Said[Item]]] = []

    @abstractmethod
    def _item(self) -> Item:
        """Something to count: new, a repeat, or another thing under a known id."""

    @abstractmethod
    def _send(self) -> None:
        """Put something into the topic, poison now and then."""

    @abstractmethod
    def _caller(self) -> Callable[[Sequence[Item]], Mapping[str, str]]:
        """A process that counts batches; of those it calls counted, by id, what it said."""

    @abstractmethod
    def _sweep(self) -> Sweep:
        """In a process of its own."""

    @abstractmethod
    def _broken_besides(self, found: Any, at_the_end: bool) -> list[str]:
        """The laws broken that the book does not know of."""

    def _own_bodies(self) -> Mapping[str, Callable[[], None]]:
        """Of the kinds of actors that only this play has."""
        return {}

    def _is_guarded(self, job: str) -> bool:
        """Whether it is the part's own."""
        return job == self._consumer.job

    def _body(self, kind: str, name: str) -> Callable[[], None]:
        bodies: dict[str, Callable[[], None]] = {
            "log": lambda: self._keep_stepping(ConsumerWorker(self._context(), self._consumer, name)),
            "relay": lambda: self._keep_stepping(Relay(self._context(), self.relayed_topic, name)),
            "sender": self._keep_sending,
            "sweeper": self._keep_sweeping,
            **self._own_bodies(),
        }
        return bodies.get(kind) or (lambda: self._keep_asking(kind))

    def _keep_sending(self) -> None:
        while self._sent < self.sent_max:
            self.pause("between two messages")
            self._send()

    def _keep_asking(self, kind: str) -> None:
        caller = self._caller()
        while self._asked[kind] < self.batches_max:
            self._ask(kind, caller)
            self.pause("between two requests")

    def _ask(self, kind: str, caller: Callable[[Sequence[Item]], Mapping[str, str]]) -> None:
        """Count a batch; whoever died before the answer asks again with the same."""
        if kind not in self._asking:
            self._asking[kind] = [self._item() for _ in range(self.chance.randint(1, BATCH_MAX))]
        for item_id, status in caller(self._asking[kind]).items():
            if item_id not in self.book.counted:
                self.book.broken.append(f"X1: {item_id} was acknowledged as {status} and is not there")
        del self._asking[kind]
        self._asked[kind] += 1

    def _send_and_ask_the_rest(self, caller: Callable[[Sequence[Item]], Mapping[str, str]]) -> None:
        while self._sent < self.sent_max:
            self._send()
        for kind in self._asked:
            while self._asked[kind] < self.batches_max:
                self._ask(kind, caller)

    def _keep_sweeping(self) -> None:
        sweep = self._sweep()
        while True:
            for _ in range(self.sweeper_rests):
                self.pause("resting")
            sweep.step()

    def _look(self, *, at_the_end: bool = False) -> None:
        found = self._store.snapshot(self.book.look)
        broken = self.book.broken + self.book.compare(found) + self._broken_besides(found, at_the_end)
        if broken:
            raise self._violated(broken)

    def _committed(self, name: str, tx: Transaction, result: object) -> None:
        """Nobody is stopped inside a transaction, so what was said in another has been rolled back."""
        for said_tx, said in self._said:
            if said_tx is tx:
                self.book.commit(tx.now_us, said)
                twice = sum(status == "duplicate" for _, status in said)
                self.struck["message delivered twice", self.part.name] += twice
        self._said.clear()

    def _part_of(self, kind: str) -> str:
        return self.part.name

    def _context(self) -> Context:
        """A process of its own on the shared store."""
        context = Context(self._settings, self._store, self._topics, SqlLeases(self._store), [self.part])
        context.limits = self._limits
        return context

    def _move_clock(self, seconds: float) -> None:
        self._highest_us = max(self._highest_us, self._clock.now_us())
        self._clock.advance(seconds)
        self._monotonic_us += max(0, round(seconds * SECOND_US))
        self._back_seconds -= min(0, seconds)
        self.struck["clock jumped", self.part.name] += abs(seconds) >= DAY / 4
        self.trace.append(f"{self._step} the clock moves by {seconds} seconds")

    def _rewind(self) -> None:
        """An operator has everything delivered again from some earlier position."""
        found = self._store.read(lambda tx: progress.positions(tx, self._consumer.job))
        positions = {shard: each.position for shard, each in found.items() if each.position}
        if positions:
            shard = self.chance.choice(sorted(positions))
            start = replay.Start(position=self.chance.randrange(positions[shard]), partition=shard)
            with contextlib.suppress(Conflict):  # what is set aside would come a second time
                replay.set_back(self._context(), self._consumer, start, actor="operator")
                self.trace.append(f"{self._step} set back {shard} from {positions[shard]} to {start.position}")

    def _keep_stepping(self, loop: ConsumerWorker | Relay) -> None:
        self._tame(loop)
        while True:
            try:
                loop.step()
            except KeyfoldError as error:
                self.pause(f"failed: {error}")
            self.pause("between two steps")

    def _tame(self, loop: ConsumerWorker | Relay) -> None:
        step_by_clock(loop._shards, lambda: self._monotonic_us / SECOND_US)

    def _is_at_work(self, actor: Actor) -> bool:
        return actor.where in (f"before {self._consumer.name}", f"after reading {self.log_topic}")

    def _all_but_paused_die(self, kind: str) -> list[Actor]:
        """Whoever stands between what it has read and its commit is paused until another has done its work."""
        paused = [each for each in self._actors if each.kind == kind and self._is_at_work(each)]
        self._actors = [each for each in self._actors if each not in paused]
        self._kill_all()
        self._move_clock(self._back_seconds)  # leases of the dead pass
        return paused

    def _read_to_the_end(self, paused: Sequence[Actor]) -> None:
        last = ConsumerWorker(self._context(), self._consumer, "last")
        self._tame(last)
        while last.step():
            pass
        for actor in paused:
            self._turn(actor)
            self._kill(actor)
        self._redrive()

    def _redrive(self) -> None:
        """Try again what was set aside, then let go of what fails again."""
        if not self._store.read(deadletters.listed):
            return
        name, topic = self._consumer.name, self._consumer.topic
        again = deadletters.redrive(self._store, name, topic, self._consumer.apply, ordered=False)
        for letter in again.failed:
            with contextlib.suppress(KeyfoldError):
                deadletters.discard(self._store, name, topic, letter.partition, letter.position, actor="operator")

    @contextlib.contextmanager
    def _heard(self, patches: Sequence[tuple[object, str, object]]) -> Iterator[None]:
        """Count the faults that struck, and hear what the play wants to hear."""
        advance, set_aside = progress.advance, deadletters.set_aside

        def watch_advance(tx: Transaction, job: str, shard: int, ticket: int, expected: int, position: int) -> None:
            try:
                advance(tx, job, shard, ticket, expected, position)
            except TicketRefused:
                if self._is_guarded(job) and ticket < self._accepted[job, shard]:
                    self.struck["holder paused past its lease", self.part.name] += 1
                raise
            if self._is_guarded(job):
                self._accepted[job, shard] = max(ticket, self._accepted[job, shard])

        def watch_set_aside(tx: Transaction, *given: object, **named: object) -> None:
            set_aside(tx, *given, **named)  # type: ignore[arg-type]
            self.struck["poison message", self.part.name] += 1

        time = SimpleNamespace(monotonic=lambda: self._monotonic_us / SECOND_US, sleep=lambda _: None)
        own: list[tuple[object, str, object]] = [
            (progress, "advance", watch_advance),
            (deadletters, "set_aside", watch_set_aside),
            (relay, "time", time),
            (consumer, "time", time),
        ]
        with patched([*own, *patches]):
            yield
