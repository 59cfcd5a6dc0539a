"""Poison messages: set aside with their reason, listed, driven again in order, or discarded by an operator.

A key with a dead letter has a gate row. The consumer parks later messages of the key behind the gate by updating it,
a redrive drains by updating and at last deleting it: whichever comes second finds the row changed and starts anew.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import sqlalchemy as sa
from msgspec import Struct

from keyfold.core import audit
from keyfold.core.errors import BadInput, LostRace, NotFound, PartitionStopped, Unavailable
from keyfold.core.store import Store, Transaction
from keyfold.core.store.batch import Columns
from keyfold.core.store.shapes import insert, insert_new, load
from keyfold.core.tables import DEAD_LETTERS, PARKED_KEYS
from keyfold.core.topics.topic import Message, Record

DEAD, PARKED = "dead", "parked"
REASON_CHARACTERS_MAX = 1_000


class DeadLetter(Struct, frozen=True):
    """A message that waits for someone to look at it, or for the message before it."""

    consumer: str
    topic: str
    partition: int
    position: int
    key: str
    version: int
    state: str
    reason: str
    tries: int
    set_aside_at_us: int
    payload: bytes


class Refusal(Struct, frozen=True):
    """A message that its consumer cannot apply, and why. Only a consumer without order returns one."""

    record: Record
    reason: str


# What cannot be applied, whatever the try, is returned: it is set aside and the rest of the batch commits at once.
Apply = Callable[[Transaction, Sequence[Record]], Sequence[Refusal] | None]


def park(tx: Transaction, consumer: str, topic: str, records: Sequence[Record]) -> list[Record]:
    """Put the records of waiting keys behind their gates; returns the others, in order."""
    keys = sorted({record.message.key for record in records})
    asked: Columns = {"key": keys, "consumer": [consumer] * len(keys), "topic": [topic] * len(keys)}
    waiting = {key for key, _, _ in load(tx, PARKED_KEYS, asked, ())}
    if not waiting:
        return list(records)
    parked = [record for record in records if record.message.key in waiting]
    new = Counter(_insert(tx, consumer, topic, parked, PARKED, "waits behind an earlier message of its key", tries=0))
    for key in sorted(waiting):
        _move_gate(tx, consumer, topic, key, new[key])
    return [record for record in records if record.message.key not in waiting]


def set_aside(
    tx: Transaction,
    consumer: str,
    topic: str,
    record: Record,
    reason: str,
    *,
    tries: int,
    parked_keys_max: int | None,
) -> None:
    """Keep a poison message with its reason; with `parked_keys_max` its key waits from now on."""
    if not _insert(tx, consumer, topic, [record], DEAD, reason, tries) or parked_keys_max is None:
        return
    gates = sa.select(sa.func.count()).where(
        PARKED_KEYS.c.consumer == consumer,
        PARKED_KEYS.c.topic == topic,
        PARKED_KEYS.c.partition == record.partition,
    )
    if tx.execute(gates).scalar_one() >= parked_keys_max:
        raise PartitionStopped(
            f"{parked_keys_max} keys of {topic}/{record.partition} wait behind poison messages of {consumer}",
            hint=f"Mend the cause, then: keyfold topics redrive {consumer}",
        )
    row: Columns = {
        "key": [record.message.key],
        "consumer": [consumer],
        "topic": [topic],
        "partition": [record.partition],
        "waiting": [1],
    }
    insert(tx, PARKED_KEYS, row)


def listed(tx: Transaction, consumer: str | None = None, count_max: int = 1000) -> list[DeadLetter]:
    """What is set aside, oldest first."""
    query = sa.select(DEAD_LETTERS).order_by(
        DEAD_LETTERS.c.set_aside_at_us, DEAD_LETTERS.c.partition, DEAD_LETTERS.c.position
    )
    if consumer is not None:
        query = query.where(DEAD_LETTERS.c.consumer == consumer)
    return [
        DeadLetter(
            row.consumer,
            row.topic,
            row.partition,
            row.position,
            row.key,
            row.version,
            row.state,
            row.reason,
            row.tries,
            row.set_aside_at_us,
            bytes(row.payload),
        )
        for row in tx.execute(query.limit(count_max))
    ]


class Redriven(Struct, frozen=True):
    """What a redrive did: messages applied, and those that failed again with their reasons."""

    applied: int
    failed: list[DeadLetter]


def redrive(
    store: Store,
    consumer: str,
    topic: str,
    apply: Apply,
    *,
    ordered: bool,
    key: str | None = None,
    count_max: int = 10_000,
) -> Redriven:
    """Apply what was set aside, each message in its own transaction, in order for each key; stop a key at a failure."""
    letters = [
        letter
        for letter in store.read(lambda tx: listed(tx, consumer, count_max))
        if letter.topic == topic and (key is None or letter.key == key)
    ]
    letters.sort(key=lambda letter: (letter.key, letter.partition, letter.position))
    applied, failed, stuck = 0, list[DeadLetter](), set[str]()
    for letter in letters:
        if ordered and letter.key in stuck:
            continue
        try:
            applied += store.transact(partial(_apply_one, letter=letter, apply=apply, ordered=ordered), name="redrive")
        except Unavailable:
            raise
        except Exception as error:
            stuck.add(letter.key)
            reason = f"{type(error).__name__}: {error}"
            store.transact(partial(_failed_again, letter=letter, reason=reason), name="redrive")
            failed.append(letter)
    return Redriven(applied, failed)


def discard(store: Store, consumer: str, topic: str, partition: int, position: int, *, actor: str) -> None:
    """Let go of one dead letter for good, with an audit record; its key flows again where it was the only one."""

    def work(tx: Transaction) -> None:
        letter = next(
            (
                each
                for each in listed(tx, consumer, 2**31 - 1)
                if (each.topic, each.partition, each.position) == (topic, partition, position)
            ),
            None,
        )
        if letter is None:
            raise NotFound(f"{consumer} has no dead letter at {topic}/{partition}/{position}")
        _remove(tx, letter, has_gate=_gate_exists(tx, letter))
        audit.record(tx, actor, "dead letter discarded", f"{consumer} {topic}/{partition}/{position}")

    store.transact(work, name="discard", once=True)


def _apply_one(tx: Transaction, letter: DeadLetter, apply: Apply, ordered: bool) -> int:
    row = tx.execute(sa.select(DEAD_LETTERS).where(*_this(letter))).one_or_none()
    if row is None or (ordered and _waits(tx, letter)):
        return 0  # another redrive was first, or one is still at the message before it
    _remove(tx, letter, has_gate=ordered)
    message = Message(
        key=row.key,
        version=row.version,
        event_time_us=row.event_time_us,
        schema=row.schema_name,
        payload=bytes(row.payload),
        kind=row.kind,
    )
    if refusals := apply(tx, [Record(row.partition, row.position, message)]):
        raise BadInput(refusals[0].reason)
    return 1


def _waits(tx: Transaction, letter: DeadLetter) -> bool:
    earlier = sa.select(sa.func.count()).where(*_this(letter)[:-1], DEAD_LETTERS.c.position < letter.position)
    return bool(tx.execute(earlier).scalar_one())


def _remove(tx: Transaction, letter: DeadLetter, *, has_gate: bool) -> None:
    if has_gate:
        _move_gate(tx, letter.consumer, letter.topic, letter.key, -1)
    if not tx.execute(sa.delete(DEAD_LETTERS).where(*_this(letter))).rowcount:
        raise LostRace("another redrive was first")
    if has_gate:
        tx.execute(
            sa.delete(PARKED_KEYS).where(*_gate(letter.consumer, letter.topic, letter.key), PARKED_KEYS.c.waiting <= 0)
        )


def _failed_again(tx: Transaction, letter: DeadLetter, reason: str) -> None:
    tx.execute(
        sa.update(DEAD_LETTERS)
        .where(*_this(letter))
        .values(state=DEAD, reason=_as_kept(reason), tries=DEAD_LETTERS.c.tries + 1)
    )


def _as_kept(reason: str) -> str:
    """A reason may quote anything; no store takes half a character, and PostgreSQL no NUL."""
    return reason[:REASON_CHARACTERS_MAX].replace("\0", "�").encode(errors="replace").decode()


def _move_gate(tx: Transaction, consumer: str, topic: str, key: str, by: int) -> None:
    moved = tx.execute(
        sa.update(PARKED_KEYS).where(*_gate(consumer, topic, key)).values(waiting=PARKED_KEYS.c.waiting + by)
    ).rowcount
    if moved != 1:
        raise LostRace(f"the key {key!r} stopped waiting meanwhile")


def _gate_exists(tx: Transaction, letter: DeadLetter) -> bool:
    found = sa.select(sa.func.count()).where(*_gate(letter.consumer, letter.topic, letter.key))
    return bool(tx.execute(found).scalar_one())


def _gate(consumer: str, topic: str, key: str) -> tuple[sa.ColumnElement[bool], ...]:
    return (PARKED_KEYS.c.key == key, PARKED_KEYS.c.consumer == consumer, PARKED_KEYS.c.topic == topic)


def _this(letter: DeadLetter) -> tuple[sa.ColumnElement[bool], ...]:
    return (
        DEAD_LETTERS.c.key == letter.key,
        DEAD_LETTERS.c.consumer == letter.consumer,
        DEAD_LETTERS.c.topic == letter.topic,
        DEAD_LETTERS.c.partition == letter.partition,
        DEAD_LETTERS.c.position == letter.position,
    )


def _insert(
    tx: Transaction, consumer: str, topic: str, records: Sequence[Record], state: str, reason: str, tries: int
) -> list[str]:
    """Keep the records; returns the keys of those that were not kept before (a consumer set back meets them again)."""
    count = len(records)
    columns: Columns = {
        "key": [record.message.key for record in records],
        "consumer": [consumer] * count,
        "topic": [topic] * count,
        "partition": [record.partition for record in records],
        "position": [record.position for record in records],
        "kind": [record.message.kind for record in records],
        "version": [record.message.version for record in records],
        "schema_name": [record.message.schema for record in records],
        "event_time_us": [record.message.event_time_us for record in records],
        "payload": [record.message.payload for record in records],
        "state": [state] * count,
        "reason": [_as_kept(reason)] * count,
        "tries": [tries] * count,
        "set_aside_at_us": [tx.now_us] * count,
    }
    return [str(row[0]) for row in insert_new(tx, DEAD_LETTERS, columns)]
