"""A PostgreSQL killed without warning, again and again under traffic, loses nothing that it acknowledged."""

import asyncio
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence

import msgspec
import pytest

from keyfold.core import metrics, outbox
from keyfold.core.access import ANYONE
from keyfold.core.context import Context
from keyfold.core.errors import DataRefused, Unavailable
from keyfold.core.gather import Ask, Gatherer, Operation, Outcome
from keyfold.core.loops import Runner
from keyfold.core.settings import load
from keyfold.core.store import Store, Transaction, migrate
from keyfold.core.topics.topic import Message
from keyfold.core.workers import loops
from keyfold.tally import service
from keyfold.tally.model import Addition
from keyfold.tally.part import PART
from keyfold.tally.service import EVENTS
from tests.faults import ledger
from tests.faults.effort import TIMEOUT_SECONDS, effort, seed
from tests.faults.ledger import CONSUMER, Ledger
from tests.faults.matrix import Hit
from tests.servers.postgres import PostgresServer

pytestmark = [
    pytest.mark.spec("CORE-02", "CORE-06", "CORE-08", "CORE-22"),
    pytest.mark.timeout(TIMEOUT_SECONDS),
]

CYCLES, CYCLES_LONG = 5, 1_000
PRODUCERS, ASKERS = 2, 4
PAUSE_SECONDS = 0.005
DRY_SECONDS_MAX = 60
# A message table of millions would make the look at it the slowest part of the long run.
ROUNDS_PER_STORE = 50


class Traffic:
    """Producers that put events, and requests gathered with Idempotency-Keys; each insists until it is answered."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._events: set[tuple[str, int]] = set()
        self._answers: set[str] = set()
        self.sent: dict[str, list[bytes]] = defaultdict(list)
        self.failures: list[BaseException] = []
        bodies = [lambda number=number: self._produce(number) for number in range(PRODUCERS)]
        bodies.append(lambda: asyncio.run(self._keep_asking()))
        self._threads = [threading.Thread(target=self._watched, args=(body,), daemon=True) for body in bodies]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(DRY_SECONDS_MAX)
        assert not any(thread.is_alive() for thread in self._threads)

    def acknowledged(self) -> tuple[set[tuple[str, int]], set[str]]:
        """What must be there from now on."""
        with self._lock:
            return set(self._events), set(self._answers)

    def _watched(self, body: "object") -> None:
        try:
            body()  # type: ignore[operator]
        except BaseException as error:
            self.failures.append(error)
            raise

    def _produce(self, number: int) -> None:
        chance = random.Random(number)
        while not self._stop.is_set():
            batch = [self._event(f"p{number}k{chance.randrange(5)}") for _ in range(chance.randint(1, 4))]
            self._put(batch)
            with self._lock:
                self._events.update((message.key, message.version) for message in batch)
            time.sleep(PAUSE_SECONDS)

    def _event(self, key: str) -> Message:
        payloads = self.sent[key]
        payloads.append(b'{"add":%d}' % len(payloads))
        return Message(key=key, version=len(payloads), event_time_us=0, schema="event/1", payload=payloads[-1])

    def _put(self, batch: list[Message]) -> None:
        topics = self._context.topics
        while True:
            try:
                self._context.store.transact(
                    lambda tx: outbox.put(tx, topics, EVENTS.name, batch), name="kill put", once=True
                )
                return
            except DataRefused:
                return  # an earlier try, given up as unknown, is in
            except Unavailable:
                time.sleep(PAUSE_SECONDS)

    async def _keep_asking(self) -> None:
        gatherer = Gatherer(self._context.store, self._context.limits)
        await asyncio.gather(*(self._ask(gatherer, number) for number in range(ASKERS)))
        await asyncio.to_thread(gatherer.close)

    async def _ask(self, gatherer: Gatherer, number: int) -> None:
        topics = self._context.topics

        def add(tx: Transaction, asks: Sequence[Ask]) -> list[Outcome]:
            changed = service.add(tx, topics, [Addition(ask.body) for ask in asks])
            return [changed[ask.body] for ask in asks]

        operation = Operation(name="kill ask", apply=add, writes=True, key=lambda ask: str(ask.body))
        count = 0
        while not self._stop.is_set():
            key, count = f"direct{count % 3}", count + 1
            name = f"{key}/{number}-{count}"
            ask = Ask(client=ANYONE, body=key, idempotency_key=name, fingerprint=name.encode())
            while True:
                try:
                    reply = await gatherer.ask(operation, ask)
                    break
                except Unavailable:
                    await asyncio.sleep(PAUSE_SECONDS)
            assert msgspec.json.decode(reply.body)["key"] == key
            with self._lock:
                self._answers.add(name)
            await asyncio.sleep(PAUSE_SECONDS)


def broken(found: Ledger, events: set[tuple[str, int]], answers: set[str]) -> list[str]:
    added = Counter(name.partition("/")[0] for name in found.answers)
    gone = [f"X1: {len(lost)} answered requests are gone" for lost in [answers - found.answers] if lost]
    return ledger.broken_now(found, added=added) + ledger.unkept(found, events) + gone


@pytest.mark.fault("server killed", "ground", "tally")
def test_a_server_killed_under_traffic_keeps_every_answer_and_doubles_none(server: PostgresServer, hit: Hit) -> None:
    """Writers, two workers and gathered requests go on through every kill; nobody is told to stop."""
    chosen = seed()
    print(f"KEYFOLD_FAULTS_SEED={chosen}")
    chance = random.Random(chosen)
    left = effort(CYCLES, CYCLES_LONG)
    while left > 0:
        rounds = min(left, ROUNDS_PER_STORE)
        _kill_under_traffic(server, f"store{left}", rounds, chance, hit)
        left -= rounds


def _kill_under_traffic(server: PostgresServer, name: str, rounds: int, chance: random.Random, hit: Hit) -> None:
    url = server.create_database(name)
    store = Store.open(url)
    migrate.upgrade(store)
    options = {"store.url": url, "leases.lease_seconds": 2, "topics.partitions": 2, "store.connections_max": 20}
    contexts = [Context.open(load(environ={}, options=options), [PART]) for _ in range(2)]
    runners = [Runner(loops(context)) for context in contexts]
    traffic = Traffic(contexts[0])
    for each in (*runners, traffic):
        each.start()
    for _ in range(rounds):
        time.sleep(chance.uniform(0.2, 0.8))
        before = _interrupted()
        assert server.is_running
        server.kill()
        server.start()
        told = traffic.acknowledged()
        found = Ledger.of(store)
        assert not traffic.failures
        assert not broken(found, *told)
        for part, times in (_interrupted() - before).items():
            hit(part, times)
    traffic.stop()
    _wait_until_dry(store)
    for runner in runners:
        assert runner.stop(DRY_SECONDS_MAX)
    found = Ledger.of(store)
    assert not broken(found, *traffic.acknowledged()) + ledger.broken_at_the_end(found, traffic.sent)
    in_force = "SELECT count(*) FROM leases WHERE expires_at_us > extract(epoch FROM clock_timestamp()) * 1000000"
    assert store.read(lambda tx: tx.driver(in_force).scalar_one()) == 0, "a worker that stopped still holds a lease"
    for context in contexts:
        context.close()
    store.close()
    server.drop_database(name)


def _interrupted() -> Counter[str]:
    """By part, the transactions that lost the server under their feet and were tried again."""
    found: Counter[str] = Counter()
    for sample in (sample for metric in metrics.RETRIES.collect() for sample in metric.samples):
        if sample.name.endswith("_total") and sample.labels["reason"] in ("store-unreachable", "commit-unknown"):
            found["tally" if sample.labels["name"] in ("tally", "kill ask") else "ground"] += int(sample.value)
    return found


def _wait_until_dry(store: Store) -> None:
    deadline = time.monotonic() + DRY_SECONDS_MAX
    while time.monotonic() < deadline:
        found = Ledger.of(store)
        waiting = [row for rows in found.messages.values() for row in rows if row.position is None]
        behind = sum(map(len, found.log(ledger.EVENTS).values())) - sum(found.positions[CONSUMER].values())
        if not waiting and not behind:
            return
        time.sleep(0.1)
    pytest.fail("the workers did not come to an end")
