"""A seeded simulator of interleavings over the real core: whoever works is stopped before and after every commit.

Relays, consumers, producers and an operator take turns as a seeded scheduler says. It kills them between two steps,
lets them sleep until their lease has passed, delivers messages twice, loses acknowledgements of a topic outside the
store, and moves the one clock. The same seed gives the same run; `Violated` says how to have it again.
"""

import contextlib
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, cast

import greenlet
import msgspec

from keyfold.core import consumer, deadletters, outbox, progress, relay, replay
from keyfold.core.access import ANYONE
from keyfold.core.clock import SECOND_US, ManualClock
from keyfold.core.context import Context
from keyfold.core.errors import Conflict, DataRefused, KeyfoldError, TicketRefused
from keyfold.core.gather import Ask, Operation, Outcome, answers_once
from keyfold.core.leases.lease import Lease
from keyfold.core.leases.sql import SqlLeases
from keyfold.core.store import Transaction
from keyfold.core.topics.topic import Message, Record
from keyfold.core.workers import consumer_named
from keyfold.tally import service
from keyfold.tally.model import Addition
from keyfold.tally.part import PART
from keyfold.tally.service import CHANGES, EVENTS
from tests.faults import ledger
from tests.faults.ledger import CONSUMER, Entry, Ledger, Place
from tests.faults.scenario import LEASE_SECONDS, PARTITIONS, Worker, settings
from tests.faults.stage import OutsideTopic, SimulatedTopics, Stage, patched, step_by_clock

BATCH_MAX = 3  # of relay and consumer, so that partitions take several steps

# Who works for the tally itself; all others work for the ground.
OF_THE_TALLY = ("tally", "asker")


class Simulation(Stage):
    """Events and tallies: producers, relays, consumers, requests, an operator."""

    def __init__(self, seed: int, template: Path, directory: Path) -> None:
        super().__init__(seed, template, directory, settings, ManualClock())
        self._limits = msgspec.structs.replace(
            self._settings.limits,
            relay_batch_max=BATCH_MAX,
            consumer_batch_max=BATCH_MAX,
            consumer_batch_milliseconds=2**31,
        )
        self._outside: dict[str, OutsideTopic] = {}
        if self.chance.random() < 0.5:
            self._outside = {
                EVENTS.name: OutsideTopic(EVENTS.name, "ground", self),
                CHANGES.name: OutsideTopic(CHANGES.name, "tally", self),
            }
        # What was asked for, what was acknowledged, and how far things ever came.
        self._batches = _scripts(self.chance)
        self._acknowledged: set[tuple[str, int]] = set()
        self._asks = [Addition(f"direct{self.chance.randrange(2)}", self.chance.randrange(1, 9)) for _ in range(5)]
        self._asked = 0
        self._answers: dict[int, bytes] = {}
        self._reached: dict[int, int] = defaultdict(int)
        self._discarded: set[Place] = set()
        # Tickets: those a transaction under way has used, those in force, the newest accepted.
        self._used: list[_Use] = []
        self._stands: dict[tuple[str, int], int] = {}
        self._granted: dict[str, Lease] = {}
        self._releasing: dict[greenlet.greenlet, Sequence[Lease]] = {}
        self._accepted: dict[tuple[str, int], int] = defaultdict(int)
        self._broken: list[str] = []

    # The run ----------------------------------------------------------------------------------------------------------

    def _kinds(self) -> Sequence[str]:
        return ("producer0", "producer1", "asker", "operator", *2 * ("events", "tally", "changes"))

    def _part_of(self, kind: str) -> str:
        return "tally" if kind in OF_THE_TALLY else "ground"

    def _one_step(self) -> None:
        draw = self.chance.random()
        if draw < 0.02:
            self._crash(self.chance.choice(self._actors))
        elif draw < 0.035:
            self._sleep(self.chance.choice(self._actors))
        elif draw < 0.06:
            self._clock.advance(self.chance.choice((0.1, 1, LEASE_SECONDS / 2)))
        elif draw < 0.08:
            self._rewind()
        else:
            self._anybodys_turn()

    def _rewind(self) -> None:
        """An operator has everything delivered again from some earlier position."""
        found = Ledger.of(self._store, self._logs())
        positions = {shard: position for shard, position in found.positions[CONSUMER].items() if position}
        if not positions:
            return
        self._remember(found)
        shard = self.chance.choice(sorted(positions))
        start = replay.Start(position=self.chance.randrange(positions[shard]), partition=shard)
        context = self._context()
        with contextlib.suppress(Conflict):  # what is set aside would come a second time
            replay.set_back(context, consumer_named(context, "tally"), start, actor="operator")
            self._stands[CONSUMER, shard] = start.position or 0
            self.struck["message delivered twice", "tally"] += positions[shard] - (start.position or 0)
            self.trace.append(f"{self._step} set back {shard} from {positions[shard]} to {start.position}")

    def _run_dry(self) -> None:
        self._kill_all()
        for script in self._batches:
            while script.left:
                self._put(script)
        while self._asked < len(self._asks):
            self._ask()
        last = Worker(self._context(), "last")
        self._tame(last)
        last.run_dry()
        while self._store.read(deadletters.listed):
            self._mend(self._store.read(deadletters.listed))
            last.run_dry()
        for log in (topic.logs for topic in self._outside.values()):
            for messages in log.values():
                repeated = len(messages) - len({(each.key, each.version) for each in messages})
                self.struck["message delivered twice", "ground"] += repeated

    # The actors -------------------------------------------------------------------------------------------------------

    def _body(self, kind: str, name: str) -> Callable[[], None]:
        bodies: dict[str, Callable[[], None]] = {
            "producer0": lambda: self._produce(self._batches[0]),
            "producer1": lambda: self._produce(self._batches[1]),
            "asker": self._keep_asking,
            "operator": self._operate,
        }
        return bodies.get(kind) or (lambda: self._keep_stepping(kind, name))

    def _keep_stepping(self, kind: str, name: str) -> None:
        worker = Worker(self._context(), name)
        self._tame(worker)
        loop = {"events": worker.events, "tally": worker.tally, "changes": worker.changes}[kind]
        while True:
            try:
                loop.step()
            except KeyfoldError as error:
                self.pause(f"failed: {error}")
            if self.chance.random() < 0.02:
                loop.stop()
                self.pause("stopped in good order")
            self.pause("between two steps")

    def _produce(self, script: "_Script") -> None:
        while script.left:
            for _ in range(4):
                self.pause("between two batches")
            self._put(script)

    def _put(self, script: "_Script") -> None:
        """Put the next batch; whoever died before the acknowledgement finds it there, refused as a repeat."""
        batch, topics = script.left[0], self._context().topics
        with contextlib.suppress(DataRefused):
            self._store.transact(lambda tx: outbox.put(tx, topics, EVENTS.name, batch), name="put")
        self._acknowledged.update((each.key, each.version) for each in batch)
        script.left.pop(0)

    def _keep_asking(self) -> None:
        while self._asked < len(self._asks):
            self._ask()
            self.pause("between two requests")

    def _ask(self) -> None:
        """One request with an Idempotency-Key; whoever died before the answer asks again."""
        topics = self._context().topics

        def add(tx: Transaction, asks: Sequence[Ask]) -> list[Outcome]:
            changed = service.add(tx, topics, [ask.body for ask in asks])
            return [changed[ask.body.key] for ask in asks]

        operation = Operation(name="add", apply=add, writes=True)
        number = self._asked
        ask = Ask(client=ANYONE, body=self._asks[number], idempotency_key=f"ask{number}", fingerprint=b"%d" % number)
        self._store.transact(lambda tx: answers_once(tx, operation, [ask]), name="ask", once=True)
        self._asked = number + 1

    def _operate(self) -> None:
        """Look at what was set aside; drive it again, or let it go."""
        while True:
            self.pause("looking")
            if self.chance.random() < 0.2 and (letters := self._store.read(deadletters.listed)):
                self._mend(letters)

    def _mend(self, letters: list[deadletters.DeadLetter]) -> None:
        for letter in letters:
            if letter.state == deadletters.DEAD and ledger.is_poison(letter.payload):
                self._discarded.add((letter.partition, letter.position))
                with contextlib.suppress(KeyfoldError):
                    place = (letter.topic, letter.partition, letter.position)
                    deadletters.discard(self._store, "tally", *place, actor="operator")
        topics = self._context().topics
        deadletters.redrive(
            self._store,
            "tally",
            EVENTS.name,
            lambda tx, records: service.apply_events(tx, topics, records),
            ordered=True,
        )

    def _context(self) -> Context:
        """A process of its own on the shared store."""
        partitions = dict.fromkeys((EVENTS.name, CHANGES.name), PARTITIONS)
        topics = SimulatedTopics(self._store, self._settings, partitions)
        topics.outside = self._outside
        context = Context(self._settings, self._store, topics, SqlLeases(self._store), [PART])
        context.limits = self._limits
        return context

    def _tame(self, worker: Worker) -> None:
        for loop in (worker.events, worker.tally, worker.changes):
            step_by_clock(loop._shards, lambda: self._clock.now_us() / SECOND_US)

    # What is looked at ------------------------------------------------------------------------------------------------

    def _logs(self) -> dict[str, dict[int, list[Entry]]]:
        return {name: topic.entries() for name, topic in self._outside.items()}

    def _remember(self, found: Ledger) -> None:
        for shard, position in found.positions[CONSUMER].items():
            self._reached[shard] = max(self._reached[shard], position)

    def _look(self, *, at_the_end: bool = False) -> None:
        found = Ledger.of(self._store, self._logs())
        self._remember(found)
        broken = list(self._broken)
        broken += ledger.broken_now(
            found, reached=self._reached, discarded=self._discarded, added=self._added(found, at_the_end)
        )
        broken += ledger.unkept(found, self._acknowledged)
        broken += ledger.torn(found, [batch for script in self._batches for batch in script.ids])
        if at_the_end:
            broken += ledger.broken_at_the_end(found, self._expected(), discarded=self._discarded)
        if broken:
            raise self._violated(broken)

    def _added(self, found: Ledger, at_the_end: bool) -> dict[str, int]:
        """The sums of the requests that are in: those answered, and one whose answer may still be on its way."""
        sums: dict[str, int] = defaultdict(int)
        for number, ask in enumerate(self._asks):
            if f"ask{number}" in found.answers or number < self._asked or at_the_end:
                sums[ask.key] += ask.add
        return sums

    def _expected(self) -> dict[str, list[bytes]]:
        expected: dict[str, list[bytes]] = defaultdict(list)
        for script in self._batches:
            for message in script.messages:
                expected[message.key].append(message.payload)
        return expected

    @contextlib.contextmanager
    def _spies(self) -> Iterator[None]:
        """Watch tickets from outside the code under test, and give it this simulation's time."""
        advance, adopt, set_aside, park = progress.advance, progress.adopt, deadletters.set_aside, deadletters.park
        release = SqlLeases.release

        def watch_advance(tx: Transaction, job: str, shard: int, ticket: int, expected: int, position: int) -> None:
            try:
                advance(tx, job, shard, ticket, expected, position)
            except TicketRefused:
                if ticket < self._accepted[job, shard]:
                    part = "tally" if job == CONSUMER else "ground"
                    self.struck["holder paused past its lease", part] += 1
                raise
            self._used.append(_Use(tx, job, shard, ticket, expected, position))

        def watch_adopt(tx: Transaction, job: str, shard: int, ticket: int, source: str) -> int:
            position = adopt(tx, job, shard, ticket, source)
            self._used.append(_Use(tx, job, shard, ticket, position, position))
            return position

        def watch_release(leases: SqlLeases, held: Sequence[Lease]) -> None:
            self._releasing[greenlet.getcurrent()] = held
            release(leases, held)

        def watch_set_aside(tx: Transaction, *given: object, **named: object) -> None:
            set_aside(tx, *given, **named)  # type: ignore[arg-type]
            self.struck["poison message", "tally"] += 1

        def watch_park(tx: Transaction, name: str, topic: str, records: Sequence[Record]) -> list[Record]:
            free = park(tx, name, topic, records)
            self.struck["poison message", "ground"] += len(records) - len(free)
            return free

        time = SimpleNamespace(monotonic=lambda: self._clock.now_us() / SECOND_US, sleep=lambda _: None)
        patches: list[tuple[object, str, object]] = [
            (progress, "advance", watch_advance),
            (progress, "adopt", watch_adopt),
            (deadletters, "set_aside", watch_set_aside),
            (deadletters, "park", watch_park),
            (SqlLeases, "release", watch_release),
            (relay, "time", time),
            (consumer, "time", time),
        ]
        with patched(patches):
            yield

    def _committed(self, name: str, tx: Transaction, result: object) -> None:
        """N3: a lease in force is not taken, tickets grow, and so do those shown at a guard row and accepted."""
        for use in self._used:
            if use.tx is tx:
                self._accept(use)
        self._used.clear()
        if name == "acquire leases":
            for lease in cast("list[Lease]", result):
                self._must_be_free(lease)
                self._granted[lease.name] = lease
        elif name == "renew leases":
            self._granted.update({lease.name: lease for lease in cast("list[Lease]", result)})
        elif name == "release leases":
            for lease in self._releasing.pop(greenlet.getcurrent()):
                if self._granted[lease.name].ticket == lease.ticket:
                    self._granted[lease.name] = msgspec.structs.replace(lease, expires_at_us=0)

    def _accept(self, use: "_Use") -> None:
        shard = (use.job, use.shard)
        if use.ticket < self._accepted[shard]:
            self._broken.append(f"N3: {shard} took ticket {use.ticket} after {self._accepted[shard]}")
        if use.expected != self._stands.get(shard, 0):
            self._broken.append(f"X2: {shard} moved from {use.expected} when it stood at {self._stands.get(shard, 0)}")
        self._accepted[shard] = max(use.ticket, self._accepted[shard])
        self._stands[shard] = use.position

    def _must_be_free(self, taken: Lease) -> None:
        before = self._granted.get(taken.name)
        if before and before.expires_at_us > self._clock.now_us():
            self._broken.append(f"N3: {taken} was taken while {before} was in force")
        if before and before.ticket >= taken.ticket:
            self._broken.append(f"N3: {taken} has no newer ticket than {before}")


class _Use(NamedTuple):
    """A ticket shown at a guard row, and the move it was shown for."""

    tx: Transaction
    job: str
    shard: int
    ticket: int
    expected: int
    position: int


class _Script:
    """The batches that one producer puts, in order."""

    def __init__(self, batches: list[list[Message]]) -> None:
        self.left = list(batches)
        self.messages = [message for batch in batches for message in batch]
        self.ids = [{(message.key, message.version) for message in batch} for batch in batches]


def _scripts(chance: random.Random) -> list[_Script]:
    """Two producers with keys of their own; now and then a message that cannot be applied."""
    poisoned = chance.random() < 0.3
    scripts = []
    for producer in range(2):
        versions: Counter[str] = Counter()
        batches = []
        for _ in range(7):
            batches.append(list[Message]())
            for _ in range(chance.randint(1, 4)):
                key = f"p{producer}k{chance.randrange(3)}"
                versions[key] += 1
                payload = b'{"add":%d}' % chance.randint(-5, 100)
                if poisoned and chance.random() < 0.1:
                    payload = b"poison"
                batches[-1].append(
                    Message(key=key, version=versions[key], event_time_us=0, schema="event/1", payload=payload)
                )
        scripts.append(_Script(batches))
    return scripts
