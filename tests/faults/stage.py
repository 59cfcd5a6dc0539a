"""Where simulated runs are played: actors stopped before and after every commit, whose turns a seed decides.

One clock, one fresh copy of a store, topics in it or outside. A play adds its actors, its faults and what it looks at.
"""

import contextlib
import random
import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import greenlet

from keyfold.core.clock import SECOND_US, ManualClock
from keyfold.core.errors import LeaseLost
from keyfold.core.leases.holding import Holding
from keyfold.core.settings import Settings
from keyfold.core.shards import Shards
from keyfold.core.store import Store, Transaction
from keyfold.core.topics.registry import Topics
from keyfold.core.topics.topic import Bounds, Message, Pending, Record, Sink, Source
from tests.faults.ledger import Entry
from tests.faults.scenario import LEASE_SECONDS, PARTITIONS

T = TypeVar("T")

TRACE_SHOWN = 30

# How often somebody is stopped before and after what is not the heart of the matter; all else always.
OFTEN = {
    "read": 0.4,
    "join job": 0.1,
    "clear members": 0.1,
    "acquire leases": 0.4,
    "renew leases": 0.4,
    "orders purge": 0.2,
    "feed sweep": 0.05,
    "listings drafts": 0.2,
    "listings adopt": 0.3,
}


class Violated(AssertionError):
    """A law was broken in a simulated run."""

    def __init__(self, seed: int, broken: Sequence[str], trace: Sequence[str], test: str) -> None:
        shown = "\n  ".join(trace[-TRACE_SHOWN:])
        super().__init__(
            f"seed {seed}: {'; '.join(broken[:5])}\n"
            f"again: KEYFOLD_FAULTS_SEED={seed} pytest tests/faults/{test}\nthe last steps:\n  {shown}"
        )
        self.broken = list(broken)


class Killed(BaseException):
    """Thrown into whoever dies, where it stands: nothing of ours catches it."""


class SteppedStore(Store):
    """A store whose users are stopped before and after everything they do with it."""

    pause: Callable[[str, float], None]
    on_commit: Callable[[str, Transaction, object], None]

    def transact(self, work: Callable[[Transaction], T], *, name: str = "work", once: bool = False) -> T:
        self.pause(f"before {name}", OFTEN.get(name, 1.0))
        ran: list[Transaction] = []

        def watched(tx: Transaction) -> T:
            ran[:] = [tx]
            return work(tx)

        result = super().transact(watched, name=name, once=once)
        self.on_commit(name, ran[0], result)
        self.pause(f"after {name}", OFTEN.get(name, 1.0))
        return result

    def read(self, work: Callable[[Transaction], T]) -> T:
        result = super().read(work)
        self.pause("after a read", OFTEN["read"])
        return result


class OutsideTopic:
    """A topic outside the store, as the relay and a consumer see a broker; it may lose acknowledgements."""

    def __init__(self, name: str, part: str, stage: "Stage", *, losing: float = 0.3) -> None:
        self.name = name
        self._losing = losing  # how often some of what was sent, or its acknowledgement, is lost
        self._part = part
        self.partitions = PARTITIONS
        self.logs: dict[int, list[Message]] = {partition: [] for partition in range(PARTITIONS)}
        self._stage = stage

    def identity(self) -> str:
        return f"outside/{self.name}"

    def publish(self, partition: int, pending: Sequence[Pending]) -> list[int]:
        """Take a first few of the messages, and acknowledge a first few of those."""
        self._stage.pause(f"before sending to {self.name}")
        log, chance = self.logs[partition], self._stage.chance
        taken, acknowledged = len(pending), len(pending)
        if self._stage.faulty and chance.random() < self._losing:
            taken = chance.randint(0, len(pending))
            acknowledged = chance.randint(0, taken)
        positions = []
        for each in pending[:taken]:
            positions.append(len(log))
            log.append(each.message)
        if acknowledged < taken:
            self._stage.struck["acknowledgement lost", self._part] += 1
        self._stage.pause(f"after sending to {self.name}")
        return positions[:acknowledged]

    def bounds(self, partition: int) -> Bounds:
        return Bounds(0, len(self.logs[partition]))

    def fetch(self, partition: int, position: int, count_max: int, wait_seconds: float) -> list[Record]:
        log = self.logs[partition][position : position + count_max]
        self._stage.pause(f"after reading {self.name}")
        return [Record(partition, position + index, message) for index, message in enumerate(log)]

    def position_at(self, partition: int, time_us: int) -> int:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing is held between calls."""

    def entries(self) -> dict[int, list[Entry]]:
        return {
            partition: [Entry(each.key, each.version, each.payload) for each in log]
            for partition, log in self.logs.items()
        }


class SimulatedTopics(Topics):
    """Topics in the store, or outside it."""

    outside: dict[str, OutsideTopic]

    def source(self, name: str, *, payload_only: bool = False) -> Source:
        return self.outside.get(name) or super().source(name, payload_only=payload_only)

    def sink(self, name: str) -> Sink | None:
        return self.outside.get(name)


class Actor:
    """Somebody at work: runs until the next pause, sleeps, dies."""

    def __init__(self, kind: str, name: str, part: str, body: Callable[[], None]) -> None:
        self.kind = kind
        self.name = name
        self.part = part
        self.asleep_until_step = 0
        self.where = ""  # it stands
        self.greenlet = greenlet.greenlet(body)


class Stage(ABC):
    """One seeded run on a fresh copy of a store."""

    steps = 400
    look_every_steps = 80
    test = "test_simulator.py"

    def __init__(
        self, seed: int, template: Path, directory: Path, settings: Callable[[str], Settings], clock: ManualClock
    ) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.faulty = True
        self.is_over = False
        self.struck: Counter[tuple[str, str]] = Counter()
        self.trace: list[str] = []
        self._clock = clock
        self._hub = greenlet.getcurrent()
        self._file = directory / f"{seed}.db"
        shutil.copyfile(template, self._file)
        self._settings = settings(f"sqlite:///{self._file}")
        self._store = SteppedStore.open(self._settings.store.url, clock=clock)
        self._store.pause = self.pause
        self._store.on_commit = self._committed
        self._actors: list[Actor] = []
        self._step = 0
        self._names = 0

    def run(self) -> None:
        """Let the seed have its way, then run dry without faults; raises Violated where a law is broken."""
        try:
            with self._spies():
                for kind in self._kinds():
                    self._start(kind)
                for step in range(self.steps):
                    self._step = step
                    self._one_step()
                    if step % self.look_every_steps == 0:
                        self._look()
                self._look()
                self._run_dry()
                self._look(at_the_end=True)
        except Exception as error:
            if isinstance(error, Violated):
                raise
            raise self._violated([f"{type(error).__name__}: {error}"]) from error
        finally:
            self.is_over = True
            self._store.close()
            for file in self._file.parent.glob(f"{self._file.name}*"):
                file.unlink()

    def pause(self, where: str, often: float = 1.0) -> None:
        """Give the turn back, where the caller is an actor."""
        if greenlet.getcurrent() is not self._hub and self.chance.random() < often:
            self._hub.switch(where)

    @abstractmethod
    def _kinds(self) -> Sequence[str]:
        """Who is there at the beginning."""

    @abstractmethod
    def _body(self, kind: str, name: str) -> Callable[[], None]:
        """What an actor of this kind does."""

    @abstractmethod
    def _part_of(self, kind: str) -> str:
        """Whose code it runs."""

    @abstractmethod
    def _one_step(self) -> None:
        """A fault, or somebody's turn."""

    @abstractmethod
    def _run_dry(self) -> None:
        """Everybody dies; one worker comes when all leases have passed, and finishes without faults."""

    @abstractmethod
    def _look(self, *, at_the_end: bool = False) -> None:
        """Compare the store with the laws."""

    @abstractmethod
    def _spies(self) -> contextlib.AbstractContextManager[None]:
        """Watch from outside the code under test, and give it this simulation's time."""

    @abstractmethod
    def _committed(self, name: str, tx: Transaction, result: object) -> None:
        """Called after every commit."""

    def _violated(self, broken: Sequence[str]) -> Violated:
        return Violated(self.seed, broken, self.trace, self.test)

    def _start(self, kind: str) -> None:
        self._names += 1
        name = f"{kind}-{self._names}"
        self._actors.append(Actor(kind, name, self._part_of(kind), self._body(kind, name)))

    def _anybodys_turn(self) -> None:
        if awake := [actor for actor in self._actors if actor.asleep_until_step <= self._step]:
            self._turn(self.chance.choice(awake))

    def _turn(self, actor: Actor) -> None:
        actor.where = str(actor.greenlet.switch())
        self.trace.append(f"{self._step} {actor.name}: {actor.where}")
        if actor.greenlet.dead:
            self._actors.remove(actor)

    def _crash(self, actor: Actor) -> None:
        """Kill, and start another in its place."""
        self._actors.remove(actor)
        if actor.greenlet:
            self._kill(actor)
            self.struck["crash between two steps", actor.part] += 1
        self.trace.append(f"{self._step} {actor.name} dies")
        self._start(actor.kind)

    def _sleep(self, actor: Actor) -> None:
        """Stop somebody for longer than any lease lasts, while the others go on."""
        actor.asleep_until_step = self._step + self.chance.randint(10, 60)
        self._clock.advance(LEASE_SECONDS * 1.1)
        self.trace.append(f"{self._step} {actor.name} falls asleep")

    def _kill_all(self) -> None:
        """Everybody dies, and there are no more faults; all leases pass."""
        self.faulty = False
        for actor in self._actors:
            self._kill(actor)
        self._clock.advance(10 * LEASE_SECONDS)

    def _kill(self, actor: Actor) -> None:
        if actor.greenlet:  # begun, and not at its end
            with contextlib.suppress(Killed):
                actor.greenlet.throw(Killed)


def step_by_clock(shards: Shards, monotonic: Callable[[], float]) -> None:
    """Without a thread: who stands still here is a process that stands still, and renews nothing meanwhile."""
    shards._monotonic = monotonic
    shards._heartbeat.begin = lambda: None  # type: ignore[method-assign]


class SteppedHolding(Holding):
    """Without a thread: the lease is renewed when somebody asks, and the dead hand nothing back."""

    def __init__(self, stage: Stage, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named, monotonic=lambda: stage._clock.now_us() / SECOND_US)
        self._stage = stage

    def __enter__(self) -> "SteppedHolding":
        return self

    def __exit__(self, kind: object = None, *_: object) -> None:
        if kind is not Killed and not self._stage.is_over:
            self._leases.release([self.lease])

    def must_be_held(self) -> None:
        super().must_be_held()
        if self._monotonic() > self._valid_until - LEASE_SECONDS / 2:
            if not self._leases.renew([self.lease], LEASE_SECONDS):
                raise LeaseLost("somebody else has it")
            self._valid_until = self._monotonic() + LEASE_SECONDS


@contextlib.contextmanager
def patched(patches: Sequence[tuple[object, str, object]]) -> Iterator[None]:
    """Names replaced for a while: place, name, what stands there instead."""
    before = [(place, name, getattr(place, name)) for place, name, _ in patches]
    try:
        for place, name, instead in patches:
            setattr(place, name, instead)
        yield
    finally:
        for place, name, original in before:
            setattr(place, name, original)
