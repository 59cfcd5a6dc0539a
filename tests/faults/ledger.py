"""What a fault test looks at: everything that is committed, and the laws it obeys at every moment and at the end.

The laws are those of RELIABILITY.md for the ground and the tally, folded here by hand and slowly, without the code
under test. Each broken one is a sentence that begins with the name of its invariant.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from keyfold.core.store import Store

EVENTS, CHANGES = "tally-events", "tally-changes"
CONSUMER = f"consumer/{EVENTS}/tally"

Rows = Callable[[str], Iterable[Sequence[object]]]
Place = tuple[int, int]  # partition, position


class Entry(NamedTuple):
    """A message, where it stands in the outbox or in a topic."""

    key: str
    version: int
    payload: bytes


class Row(NamedTuple):
    """A row of the message table; `position` is None while it waits for the relay."""

    entry: Entry
    id: int
    partition: int
    position: int | None


class Tally(NamedTuple):
    value: int
    version: int
    event_version: int


Log = Mapping[int, Sequence[Entry]]  # partition -> what stands there, by position


class Ledger:
    """The committed state at one moment. `topics` holds the logs of topics that live outside the store."""

    def __init__(self, rows: Rows, topics: Mapping[str, Log] | None = None) -> None:
        self.messages: dict[str, list[Row]] = {EVENTS: [], CHANGES: []}
        found = rows("SELECT topic, key, version, payload, id, partition, position FROM messages ORDER BY id")
        for topic, key, version, payload, number, partition, position in found:
            self.messages[topic].append(Row(Entry(key, version, bytes(payload)), number, partition, position))
        self.tallies = {
            key: Tally(value, version, event_version)
            for key, value, version, event_version in rows("SELECT key, value, version, event_version FROM tallies")
        }
        self.positions: dict[str, dict[int, int]] = defaultdict(dict)
        self.tickets: dict[tuple[str, int], int] = {}
        for job, shard, ticket, position in rows("SELECT job, shard, ticket, position FROM progress"):
            self.positions[job][shard] = position
            self.tickets[job, shard] = ticket
        self.leases = dict(rows("SELECT name, ticket FROM leases"))
        self.letters: set[Place] = set(rows("SELECT partition, position FROM dead_letters"))
        self.answers: set[str] = {key for (key,) in rows("SELECT key FROM answers")}
        self.outside = topics or {}

    @classmethod
    def of(cls, store: Store, topics: Mapping[str, Log] | None = None) -> "Ledger":
        return store.snapshot(lambda tx: cls(lambda query: list(map(tuple, tx.driver(query))), topics))

    def log(self, topic: str) -> Log:
        """What a reader of the topic finds; where positions have gaps or stand twice, `G3` says so elsewhere."""
        if topic in self.outside:
            return self.outside[topic]
        published: dict[int, dict[int, Entry]] = defaultdict(dict)
        for row in self.messages[topic]:
            if row.position is not None:
                published[row.partition][row.position] = row.entry
        return {partition: [entry for _, entry in sorted(at.items())] for partition, at in published.items()}

    def counts(self) -> list[int]:
        """How far the work has come, in numbers that only grow."""
        relayed = [sum(row.position is not None for row in self.messages[topic]) for topic in (EVENTS, CHANGES)]
        return [
            len(self.messages[EVENTS]),
            relayed[0],
            sum(self.positions[CONSUMER].values()),
            len(self.messages[CHANGES]),
            relayed[1],
        ]

    def fingerprint(self) -> tuple[object, ...]:
        """Equal for states from which the same follows."""
        return (*self.counts(), *sorted(self.leases.items()), *sorted(self.tickets.items()))


def broken_now(
    ledger: Ledger,
    *,
    reached: Mapping[int, int] | None = None,
    discarded: Collection[Place] = (),
    added: Mapping[str, int] | None = None,
) -> list[str]:
    """The laws that hold at every moment, between any two commits.

    `reached` is how far the consumer ever came, where its position was set back; `discarded` are dead letters that an
    operator let go; `added` are sums that came to tallies by another way than the topic.
    """
    found = list[str]()
    for topic in (EVENTS, CHANGES):
        if topic not in ledger.outside:
            found += _numbered_without_gaps(ledger, topic)
        found += _in_version_order(ledger, topic)
        found += _nothing_else_is_published(ledger, topic)
    found += _applied_once(ledger, reached or ledger.positions[CONSUMER], discarded, added or {})
    found += _every_change_is_announced(ledger)
    found += _tickets_were_granted(ledger)
    return found


def broken_at_the_end(
    ledger: Ledger, expected: Mapping[str, Sequence[bytes]], *, discarded: Collection[Place] = ()
) -> list[str]:
    """The laws that hold when everything has run dry; `expected` are the payloads of all events of each key."""
    found = list[str]()
    stored: dict[str, list[bytes]] = defaultdict(list)
    for row in sorted(ledger.messages[EVENTS], key=lambda row: (row.entry.key, row.entry.version)):
        stored[row.entry.key].append(row.entry.payload)
    if stored != expected:
        found.append(f"X2: the events stored are {dict(stored)}, those sent {dict(expected)}")
    for topic, rows in ledger.messages.items():
        published = {(entry.key, entry.version) for log in ledger.log(topic).values() for entry in log}
        if lost := [row.entry for row in rows if (row.entry.key, row.entry.version) not in published]:
            found.append(f"G2: {len(lost)} messages of {topic} never reached it, {lost[0]} among them")
        if pending := [row.entry for row in rows if row.position is None]:
            found.append(f"G2: {len(pending)} messages of {topic} wait for ever, {pending[0]} among them")
    for partition, log in ledger.log(EVENTS).items():
        position = ledger.positions[CONSUMER].get(partition, 0)
        if position != len(log):
            found.append(f"X2: the consumer stands at {position} of {len(log)} in partition {partition}")
    if not discarded and not ledger.letters:
        sums = {key: sum(map(addition, payloads)) for key, payloads in expected.items()}
        tallied = {key: tally.value for key, tally in ledger.tallies.items() if key in expected}
        if tallied != sums:
            found.append(f"X2: the tallies are {tallied}, the events add up to {sums}")
    return found


def unkept(ledger: Ledger, acknowledged: Iterable[tuple[str, int]]) -> list[str]:
    """X1: the acknowledged events, by key and version, that are not there."""
    stored = {(row.entry.key, row.entry.version) for row in ledger.messages[EVENTS]}
    lost = [each for each in acknowledged if each not in stored]
    return [f"X1: {len(lost)} acknowledged events are gone, {lost[0]} among them"] if lost else []


def torn(ledger: Ledger, batches: Iterable[Collection[tuple[str, int]]]) -> list[str]:
    """Batches that one transaction wrote and of which only some events are there."""
    stored = {(row.entry.key, row.entry.version) for row in ledger.messages[EVENTS]}
    halves = [batch for batch in batches if 0 < sum(each in stored for each in batch) < len(batch)]
    return [f"X1: a transaction is there in part: {batch}" for batch in halves]


def addition(payload: bytes) -> int:
    return int(msgspec.json.decode(payload)["add"])


def is_poison(payload: bytes) -> bool:
    return not payload.startswith(b"{")


def _numbered_without_gaps(ledger: Ledger, topic: str) -> list[str]:
    positions: dict[int, list[int]] = defaultdict(list)
    for row in ledger.messages[topic]:
        if row.position is not None:
            positions[row.partition].append(row.position)
    found = []
    following = ledger.positions[f"relay/{topic}"]
    for partition in {*positions, *following}:
        taken = sorted(positions[partition])
        if taken != list(range(following.get(partition, 0))):
            found.append(f"G3: {topic}/{partition} has {taken}, the next position is {following.get(partition)}")
    return found


def _in_version_order(ledger: Ledger, topic: str) -> list[str]:
    """Per key: first occurrences grow by one, and what still waits comes after all that is out."""
    found = []
    highest: dict[str, int] = defaultdict(int)
    for log in ledger.log(topic).values():
        for entry in log:
            if entry.version > highest[entry.key] + 1:
                found.append(f"G3: {topic} has {entry.key} {entry.version} after {highest[entry.key]}")
            highest[entry.key] = max(highest[entry.key], entry.version)
    numbers: dict[str, tuple[int, int]] = {}
    for row in sorted(ledger.messages[topic], key=lambda row: row.entry.version):
        before, version = numbers.get(row.entry.key, (-1, 0))
        if row.id <= before:
            found.append(f"G3: {topic} numbers {row.entry.key} {row.entry.version} before {version}")
        numbers[row.entry.key] = (row.id, row.entry.version)
    return found


def _nothing_else_is_published(ledger: Ledger, topic: str) -> list[str]:
    committed = {(row.entry.key, row.entry.version): row for row in ledger.messages[topic]}
    found = []
    for partition, log in ledger.log(topic).items():
        for entry in log:
            row = committed.get((entry.key, entry.version))
            if row is None or (row.entry.payload, row.partition) != (entry.payload, partition):
                found.append(f"G2: {topic} has {entry}, which nobody committed")
    if topic in ledger.outside:
        logs = ledger.log(topic)
        for row in committed.values():
            if row.position is None:
                continue
            log = logs.get(row.partition, ())
            if row.position >= len(log) or log[row.position] != row.entry:
                found.append(f"G2: {row.entry} is marked as published at {row.position}, where it does not stand")
    return found


def _applied_once(
    ledger: Ledger, reached: Mapping[int, int], discarded: Collection[Place], added: Mapping[str, int]
) -> list[str]:
    """X2: every tally is the fold of what the consumer has passed, without what was set aside."""
    found = []
    values: dict[str, int] = defaultdict(int, added)
    newest: dict[str, int] = defaultdict(int)
    waiting: set[str] = set()
    for partition, log in sorted(ledger.log(EVENTS).items()):
        for position, entry in enumerate(log[: reached.get(partition, 0)]):
            if entry.version <= newest[entry.key] or (partition, position) in discarded:
                continue
            if (partition, position) in ledger.letters:
                waiting.add(entry.key)
            elif is_poison(entry.payload):
                found.append(f"X2: the poison at {partition}/{position} was neither set aside nor discarded")
            elif entry.key in waiting:
                found.append(f"G3: {entry.key} {entry.version} was applied past a message that waits")
            else:
                values[entry.key] += addition(entry.payload)
                newest[entry.key] = entry.version
    for key in sorted({*values, *ledger.tallies}):
        tally = ledger.tallies.get(key, Tally(0, 0, 0))
        if (tally.value, tally.event_version) != (values[key], newest[key]):
            found.append(f"X2: {key} is {tally}, the events up to {dict(reached)} make {values[key]}")
    return found


def _every_change_is_announced(ledger: Ledger) -> list[str]:
    """G2: the announced versions of a tally are 1 … its version, and the last one says what the tally says."""
    announced: dict[str, dict[int, bytes]] = defaultdict(dict)
    for row in ledger.messages[CHANGES]:
        announced[row.entry.key][row.entry.version] = row.entry.payload
    found = []
    for key in sorted({*announced, *ledger.tallies}):
        tally = ledger.tallies.get(key, Tally(0, 0, 0))
        versions = sorted(announced[key])
        if versions != list(range(1, tally.version + 1)):
            found.append(f"G2: {key} is at version {tally.version}, announced are {versions}")
        elif versions and (last := msgspec.json.decode(announced[key][versions[-1]])["value"]) != tally.value:
            found.append(f"G2: {key} is {tally.value}, announced as {last}")
    return found


def _tickets_were_granted(ledger: Ledger) -> list[str]:
    """N3: nobody has worked under a ticket that was never granted."""
    return [
        f"N3: {job}/{shard} is under ticket {ticket}, granted was {ledger.leases.get(f'{job}#{shard}', 0)}"
        for (job, shard), ticket in ledger.tickets.items()
        if ticket > ledger.leases.get(f"{job}#{shard}", 0)
    ]
