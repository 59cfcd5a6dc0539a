"""Planted bugs: mistakes that somebody could make, each with the harness that must catch it.

A plant replaces a piece of our code, or a piece of an SQL statement. It also counts its uses, so that one which no
longer fits the code (a renamed function, a rewritten statement) fails as loudly as one that is not caught.
"""

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa

from keyfold.core import consumer, deadletters, gather, outbox, progress, relay
from keyfold.core.store import Transaction, batch, shapes, sqlite
from keyfold.core.store import store as stores
from keyfold.core.store.schema import key_names
from keyfold.core.topics.topic import Message, Pending, Record, Sink
from keyfold.tally import service


class Plot:
    """Where plants go: what stands in for what, and how often it was used."""

    def __init__(self) -> None:
        self.uses = 0
        self._patches: list[tuple[object, str, object]] = []
        self._statements: list[tuple[str, str]] = []

    def name(self, place: object, name: str, instead: Callable[..., Any]) -> None:
        """Call `instead` in place of `place.name`."""

        def counted(*given: object, **named: object) -> object:
            self.uses += 1
            return instead(*given, **named)

        assert callable(getattr(place, name)), f"{place} has no function {name}"
        self._patches.append((place, name, counted))

    def sql(self, old: str, new: str) -> None:
        """Run statements with `new` in place of `old`."""
        self._statements.append((old, new))

    def dig(self) -> Callable[[], None]:
        """Put everything in; returns how to take it out again."""
        if self._statements:
            self._patches.append((Transaction, "driver", self._rewriting(Transaction.driver)))
        before = [(place, name, getattr(place, name)) for place, name, _ in self._patches]
        for place, name, instead in self._patches:
            setattr(place, name, instead)

        def undo() -> None:
            for place, name, original in before:
                setattr(place, name, original)

        return undo

    def _rewriting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def driver(tx: Transaction, sql: str, parameters: Any = None) -> Any:
            for old, new in self._statements:
                if old in sql:
                    self.uses += 1
                    sql = sql.replace(old, new)
            return original(tx, sql, parameters)

        return driver


class Plant(NamedTuple):
    """A bug: what it is, who must catch it, whose code it is in, and how it is put in."""

    name: str
    harness: str
    part: str
    into: Callable[[Plot], None]

    def plant(self) -> None:
        """For good: in a process that lives for one run."""
        plot = Plot()
        self.into(plot)
        plot.dig()

    @contextlib.contextmanager
    def planted(self) -> Iterator[Plot]:
        plot = Plot()
        self.into(plot)
        undo = plot.dig()
        try:
            yield plot
        finally:
            undo()


def commit(tx: Transaction) -> None:
    """End the transaction in its middle, and begin another."""
    tx.driver("COMMIT")
    tx.driver("BEGIN IMMEDIATE")


def commit_after(plot: Plot, place: Any, name: str) -> None:
    """Let a function end the transaction that it is given."""
    original = getattr(place, name)

    def call_and_commit(*given: Any) -> Any:
        done = original(*given)
        commit(next(each for each in given if isinstance(each, Transaction)))
        return done

    plot.name(place, name, call_and_commit)


def not_there(tx: Transaction, table: sa.Table, columns: Any) -> set[Any]:
    """The keys of columns that no row has: what an `insert_new` would say that it inserted."""
    keys = {name: columns[name] for name in key_names(table)}
    return set(zip(*keys.values(), strict=True)) - set(shapes.load(tx, table, keys, ()))


def look_then_insert(insert_new: Callable[..., Any]) -> Callable[..., set[Any]]:
    """An `insert_new` that two writers pass at once."""

    def insert(tx: Transaction, table: sa.Table, columns: Any) -> set[Any]:
        new = not_there(tx, table, columns)
        time.sleep(0.01)  # on a quick machine the two would seldom meet here
        insert_new(tx, table, columns)
        return new

    return insert


PLANTS: list[Plant] = []


def plant(name: str, harness: str, part: str = "ground") -> Callable[[Callable[[Plot], None]], Callable[[Plot], None]]:
    def listed(into: Callable[[Plot], None]) -> Callable[[Plot], None]:
        PLANTS.append(Plant(name, harness, part, into))
        return into

    return listed


# Positions and tickets -----------------------------------------------------------------------------------------------


@plant("dedupe by position dropped", "simulator")
def _(plot: Plot) -> None:
    plot.name(progress, "advance", lambda *_: None)


@plant("position moved without comparing it", "simulator")
def _(plot: Plot) -> None:
    plot.sql("AND ticket = ? AND position = ?", "AND ticket = ? AND ? >= 0")


@plant("fence skipped: the ticket is not compared", "simulator")
def _(plot: Plot) -> None:
    plot.sql("AND ticket = ? AND position = ?", "AND ? >= 0 AND position = ?")


@plant("an older ticket adopts the shard back", "simulator")
def _(plot: Plot) -> None:
    plot.sql("WHERE progress.ticket <= excluded.ticket AND", "WHERE")


@plant("a takeover does not raise the ticket", "simulator")
def _(plot: Plot) -> None:
    plot.sql("ticket = leases.ticket + 1", "ticket = leases.ticket")


@plant("a lease in force is taken", "simulator")
def _(plot: Plot) -> None:
    plot.sql("WHERE leases.expires_at_us <= ?", "WHERE ? >= 0")


# The transaction -----------------------------------------------------------------------------------------------------


def _split(plot: Plot, *, position_first: bool) -> None:
    def apply(self: Any, partition: int, ticket: int, position: int, records: list[Record]) -> None:
        end = records[-1].position + 1
        works = [
            lambda tx: progress.advance(tx, self._consumer.job, partition, ticket, position, end),
            lambda tx: self._consumer.apply(tx, records),
        ]
        for work in works if position_first else reversed(works):
            self._store.transact(work, name="tally")
        self._positions[partition] = (ticket, end)

    plot.name(consumer.ConsumerWorker, "_apply", apply)


@plant("transaction split: the position moves before the state", "simulator")
def _(plot: Plot) -> None:
    _split(plot, position_first=True)


@plant("transaction split: the state moves before the position", "simulator")
def _(plot: Plot) -> None:
    _split(plot, position_first=False)


@plant("transaction split, process killed between its halves", "kill sweep")
def _(plot: Plot) -> None:
    _split(plot, position_first=True)


@plant("transaction split, power lost between its halves", "crash states")
def _(plot: Plot) -> None:
    _split(plot, position_first=True)


@plant("a message is kept in memory and put with the next one", "simulator")
def _(plot: Plot) -> None:
    put, kept = outbox.put, list[tuple[str, Sequence[Message]]]()

    def put_later(tx: Transaction, topics: Any, topic: str, messages: Sequence[Message]) -> None:
        for earlier_topic, earlier in kept:
            put(tx, topics, earlier_topic, earlier)
        kept[:] = [(topic, messages)]

    plot.name(outbox, "put", put_later)


@plant("a failed transaction is committed", "simulator")
def _(plot: Plot) -> None:
    def commit(engine: Any, connection: Any) -> None:
        if connection.connection.dbapi_connection.in_transaction:
            connection.exec_driver_sql("COMMIT")

    plot.name(sqlite.SqliteEngine, "rollback", commit)


# The relay -----------------------------------------------------------------------------------------------------------


class _WrongSink:
    """A sink between the relay and the topic, with a mistake in it."""

    def __init__(self, sink: Sink, publish: Callable[[Sink, int, Sequence[Pending]], list[int]]) -> None:
        self._sink = sink
        self._publish = publish

    def publish(self, partition: int, pending: Sequence[Pending]) -> list[int]:
        return self._publish(self._sink, partition, pending)


def _wrong_sink(plot: Plot, publish: Callable[[Sink, int, Sequence[Pending]], list[int]]) -> None:
    send = relay.Relay._send
    plot.name(relay.Relay, "_send", lambda self, sink, partition: send(self, _WrongSink(sink, publish), partition))


@plant("marked before acknowledged", "simulator")
def _(plot: Plot) -> None:
    send = relay.Relay._send

    def mark_then_send(self: relay.Relay, sink: Any, partition: int) -> bool:
        taken: list[Pending] = []

        def remember(_: Sink, partition: int, pending: Sequence[Pending]) -> list[int]:
            taken.extend(pending)
            end = sink.bounds(partition).next
            return list(range(end, end + len(pending)))

        more = send(self, _WrongSink(sink, remember), partition)  # type: ignore[arg-type]
        if taken:
            sink.publish(partition, taken)
        return more

    plot.name(relay.Relay, "_send", mark_then_send)


@plant("all marked where only the first few were acknowledged", "simulator")
def _(plot: Plot) -> None:
    def publish(sink: Sink, partition: int, pending: Sequence[Pending]) -> list[int]:
        positions = sink.publish(partition, pending)
        following = positions[-1] + 1 if positions else 0
        return positions + list(range(following, following + len(pending) - len(positions)))

    _wrong_sink(plot, publish)


@plant("sent in another order than committed", "simulator")
def _(plot: Plot) -> None:
    _wrong_sink(plot, lambda sink, partition, pending: sink.publish(partition, pending[::-1])[::-1])


@plant("the newest message is numbered first", "simulator")
def _(plot: Plot) -> None:
    plot.sql("row_number() OVER (ORDER BY id)", "row_number() OVER (ORDER BY id DESC)")
    plot.sql(" ORDER BY id LIMIT", " ORDER BY id DESC LIMIT")


@plant("the hint moves when messages are read, not when they are out", "simulator")
def _(plot: Plot) -> None:
    pending_of = relay.Relay._pending

    def pending(self: relay.Relay, tx: Transaction, partition: int) -> list[Pending]:
        found = pending_of(self, tx, partition)
        if found:
            self._places[partition].hint.id = found[-1].id
        return found

    plot.name(relay.Relay, "_pending", pending)


@plant("cursor polling: what commits later with a lower id is passed over", "writers")
def _(plot: Plot) -> None:
    def published(self: Any, up_to_id: int, looked_at: float) -> None:
        self.id = max(self.id, up_to_id)

    plot.name(relay._Hint, "published", published)


# What a batch does ---------------------------------------------------------------------------------------------------


@plant("dedupe by version dropped", "simulator", "tally")
def _(plot: Plot) -> None:
    plot.name(service, "newer", lambda versions, _: [True for _ in versions])


@plant("of a key that stands twice in a batch only the last counts", "simulator", "tally")
def _(plot: Plot) -> None:
    plot.name(service, "folded", lambda additions: {addition.key: addition.add for addition in additions})


@plant("a value is set where it should be added to", "simulator", "tally")
def _(plot: Plot) -> None:
    plot.sql("value = tallies.value + excluded.value", "value = excluded.value")


@plant("a change is announced with the version before it", "simulator", "tally")
def _(plot: Plot) -> None:
    announce = service._announce

    def announce_wrongly(tx: Transaction, topics: Any, changed: Sequence[Any]) -> None:
        announce(tx, topics, [msgspec.structs.replace(each, version=max(1, each.version - 1)) for each in changed[:1]])

    plot.name(service, "_announce", announce_wrongly)


@plant("the answer to an Idempotency-Key is not kept", "simulator")
def _(plot: Plot) -> None:
    plot.name(gather, "_keep_answers", lambda *_: None)


@plant("later messages do not wait behind a poisonous one", "simulator")
def _(plot: Plot) -> None:
    plot.name(deadletters, "park", lambda tx, name, topic, records: list(records))


@plant("a poisonous message is dropped", "simulator")
def _(plot: Plot) -> None:
    plot.name(deadletters, "set_aside", lambda *_, **__: None)


# The disk ------------------------------------------------------------------------------------------------------------


def _pragma(plot: Plot, *pragmas: str) -> None:
    prepare = sqlite._prepare_connection

    def prepare_wrongly(connection: Any, record: object) -> None:
        prepare(connection, record)
        for pragma in pragmas:
            connection.execute(f"PRAGMA {pragma}")

    plot.name(sqlite, "_prepare_connection", prepare_wrongly)


@plant("synchronous=NORMAL", "crash states")
def _(plot: Plot) -> None:
    _pragma(plot, "synchronous = NORMAL")


@plant("synchronous=OFF", "crash states")
def _(plot: Plot) -> None:
    _pragma(plot, "synchronous = OFF")


@plant("no journal", "kill sweep")
def _(plot: Plot) -> None:
    _pragma(plot, "journal_mode = DELETE", "journal_mode = OFF")


@plant("a commit that failed is taken for one that did not", "disk full")
def _(plot: Plot) -> None:
    commit = sqlite.SqliteEngine.commit

    def commit_quietly(engine: Any, connection: Any) -> None:
        with contextlib.suppress(Exception):
            commit(engine, connection)

    plot.name(sqlite.SqliteEngine, "commit", commit_quietly)


# Writers on a server -------------------------------------------------------------------------------------------------


@plant("unsorted batch", "writers")
def _(plot: Plot) -> None:
    aggregated = batch.aggregated

    def shuffled(columns: Any, key: Any, folds: Any) -> dict[str, list[Any]]:
        rows = aggregated(columns, key, folds)
        order = list(range(len(rows[key[0]])))
        random.shuffle(order)
        return {name: [values[index] for index in order] for name, values in rows.items()}

    plot.name(batch, "aggregated", shuffled)


@plant("an increment that reads and then writes", "writers", "tally")
def _(plot: Plot) -> None:
    def increment(tx: Transaction, table: Any, columns: Any, **options: Any) -> dict[Any, Any]:
        key = columns["key"]
        found = shapes.load(tx, table, {"key": key}, ("value", "version"))
        now = [found.get((each,), (0, 0)) for each in key]
        rows = {
            "key": key,
            "value": [value + add for (value, _), add in zip(now, columns["value"], strict=True)],
            "version": [version + 1 for _, version in now],
            "event_version": [0] * len(key),
        }
        shapes.insert_new(tx, table, rows)
        shapes.update(tx, table, rows)
        return shapes.load(tx, table, {"key": key}, options.get("returning", ()))

    plot.name(service, "increment", increment)


@plant("compare-and-set that does not compare", "writers")
def _(plot: Plot) -> None:
    plot.sql(" AND tallies.version = batch.version", "")


# Answers that get lost -----------------------------------------------------------------------------------------------


@plant("the batch token is not looked at", "lost answers")
def _(plot: Plot) -> None:
    plot.name(stores, "_claim", lambda *_: True)


@plant("the answer to an Idempotency-Key is not kept, and its COMMIT is lost", "lost answers")
def _(plot: Plot) -> None:
    plot.name(gather, "_keep_answers", lambda *_: None)


def named(name: str) -> Plant:
    (found,) = (each for each in PLANTS if each.name == name)
    return found
