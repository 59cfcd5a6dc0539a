"""The embedded topic: published rows of the one message table, read by position."""

import time
from collections.abc import Sequence

import sqlalchemy as sa

from keyfold.core.errors import OffsetGone, TopicChanged
from keyfold.core.store import Store, Transaction
from keyfold.core.tables import MESSAGES, PROGRESS, TOPICS
from keyfold.core.topics.topic import Bounds, Message, PayloadOnly, Payloads, Record

POLL_SECONDS = 0.02
# A fetch reads page by page and ends after so many bytes: what it holds in memory is bounded, however many it may take.
PAGE_COUNT = 2_000
FETCH_BYTES_MAX = 32 * 1024 * 1024


def relay_job(topic: str) -> str:
    """The guarded job whose position is the next position of an embedded partition."""
    return f"relay/{topic}"


class EmbeddedTopic:
    """A `Source` over the store. Positions are gapless and in commit order per key: the relay alone sets them."""

    def __init__(self, store: Store, name: str, partitions: int, *, payload_only: bool = False) -> None:
        self._store = store
        self.name = name
        self.partitions = partitions
        self._read = self._read_payloads if payload_only else self._read_whole

    def identity(self) -> str:
        made = sa.select(TOPICS.c.made_at_us).where(TOPICS.c.topic == self.name)
        return f"embedded/{self._store.read(lambda tx: tx.execute(made).scalar_one())}"

    def bounds(self, partition: int) -> Bounds:
        return self._store.read(lambda tx: bounds(tx, self.name, partition))

    def fetch(self, partition: int, position: int, count_max: int, wait_seconds: float) -> Sequence[Record]:
        deadline = time.monotonic() + wait_seconds
        while True:
            records = self._store.read(lambda tx: self._read(tx, partition, position, count_max))
            if records and records[0].position == position:
                return records
            if records or position > 0:
                self._must_be_inside(partition, position)
            if time.monotonic() >= deadline:
                return []
            time.sleep(POLL_SECONDS)

    def position_at(self, partition: int, time_us: int) -> int:
        return self._store.read(lambda tx: position_at(tx, self.name, partition, time_us))

    def close(self) -> None:
        """Nothing is held between calls."""

    def _read_whole(self, tx: Transaction, partition: int, position: int, count_max: int) -> Sequence[Record]:
        records: list[Record] = []
        bytes_left = FETCH_BYTES_MAX
        while bytes_left > 0 and (count := min(PAGE_COUNT, count_max - len(records))) > 0:
            page = published(tx, self.name, partition, position + len(records), count)
            if records and page and page[0].position != records[-1].position + 1:
                break  # purged since the page before was read
            records += page
            if len(page) < count:
                break
            bytes_left -= sum([len(record.message.payload) for record in page])
        return _before_a_gap(records)

    def _read_payloads(self, tx: Transaction, partition: int, position: int, count_max: int) -> Sequence[Record]:
        payloads: list[bytes] = []
        bytes_left = FETCH_BYTES_MAX
        while bytes_left > 0 and (count := min(PAGE_COUNT, count_max - len(payloads))) > 0:
            following = position + len(payloads)
            first, page = published_payloads(tx, self.name, partition, following, count)
            if first != following:
                if not payloads:
                    return Payloads(partition, first, page)
                break  # purged since the page before was read
            payloads += page
            if len(page) < count:
                break
            bytes_left -= sum(map(len, page))
        return Payloads(partition, position, payloads)

    def _must_be_inside(self, partition: int, position: int) -> None:
        inside = self.bounds(partition)
        place = f"{self.name}/{partition}"
        if position < inside.first:
            raise OffsetGone(
                f"position {position} was purged; the first one kept is {inside.first}",
                place=place,
                hint="Replay from a kept position: keyfold topics replay",
            )
        if position > inside.next:
            raise TopicChanged(f"position {position} lies after the end {inside.next}", place=place)


def _before_a_gap(records: list[Record]) -> list[Record]:
    """Records that follow one another. On a cluster a read may see some of what one transaction has numbered: a
    message that is not seen yet must not be passed over."""
    if not records or records[-1].position - records[0].position + 1 == len(records):
        return records
    return [record for at, record in enumerate(records, records[0].position) if record.position == at]


def bounds(tx: Transaction, topic: str, partition: int) -> Bounds:
    here = (MESSAGES.c.topic == topic, MESSAGES.c.partition == partition, MESSAGES.c.position.is_not(None))
    first = sa.select(sa.func.min(MESSAGES.c.position)).where(*here).scalar_subquery()
    following = (
        sa.select(PROGRESS.c.position)
        .where(PROGRESS.c.job == relay_job(topic), PROGRESS.c.shard == partition)
        .scalar_subquery()
    )
    row = tx.execute(sa.select(first.label("first"), following.label("next"))).one()
    end = int(row.next or 0)
    return Bounds(end if row.first is None else int(row.first), end)


def published(tx: Transaction, topic: str, partition: int, position: int, count_max: int) -> list[Record]:
    rows = tx.rows(_published_sql("?" if tx.is_sqlite else "%s"), (topic, partition, position, count_max))
    return [
        Record(
            partition,
            at,
            Message(key=key, version=version, event_time_us=time_us, schema=schema, payload=payload, kind=kind),
        )
        for at, key, version, time_us, schema, payload, kind in rows
    ]


def published_payloads(
    tx: Transaction, topic: str, partition: int, position: int, count_max: int
) -> tuple[int, list[bytes]]:
    """The payloads alone, of messages that follow one another, and the position of the first.

    As many rows as there are positions between two are all of them, whose positions need not be read. Where there are
    fewer, at the end or because some were purged, they are read with their positions.
    """
    mark = "?" if tx.is_sqlite else "%s"
    rows = tx.rows(_between_sql(mark), (topic, partition, position, position + count_max))
    if len(rows) == count_max:
        return position, [payload for (payload,) in rows]
    rows = tx.rows(_published_sql(mark, "position, payload"), (topic, partition, position, count_max)) if rows else []
    first = rows[0][0] if rows else position
    return first, [payload for place, (at, payload) in enumerate(rows, first) if at == place]


def whole(tx: Transaction, topic: str, record: Record) -> Record:
    """A record with all of its message."""
    if not isinstance(record.message, PayloadOnly):
        return record
    found = published(tx, topic, record.partition, record.position, 1)
    if not found or found[0].position != record.position:
        raise OffsetGone(f"position {record.position} was purged", place=f"{topic}/{record.partition}")
    return found[0]


def position_at(tx: Transaction, topic: str, partition: int, time_us: int) -> int:
    """Publication times grow with positions, so a binary search finds the place without an index of times."""
    inside = bounds(tx, topic, partition)
    low, high = inside.first, inside.next
    while low < high:
        middle = (low + high) // 2
        at = tx.execute(_PUBLISHED_AT, {"t": topic, "p": partition, "position": middle}).scalar()
        if at is not None and at >= time_us:
            high = middle
        else:
            low = middle + 1
    return low


def message_of(row: sa.Row[tuple[object, ...]]) -> Message:
    return Message(
        key=row.key,
        version=row.version,
        event_time_us=row.event_time_us,
        schema=row.schema_name,
        payload=bytes(row.payload),
        kind=row.kind,
    )


_HERE = (MESSAGES.c.topic == sa.bindparam("t"), MESSAGES.c.partition == sa.bindparam("p"))


_WHOLE = "position, key, version, event_time_us, schema_name, payload, kind"


def _published_sql(mark: str, wanted: str = _WHOLE) -> str:
    return (
        f"SELECT {wanted} FROM messages"
        f" WHERE topic = {mark} AND partition = {mark} AND position IS NOT NULL AND position >= {mark}"
        f" ORDER BY position LIMIT {mark}"
    )


def _between_sql(mark: str) -> str:
    return (
        "SELECT payload FROM messages"
        f" WHERE topic = {mark} AND partition = {mark} AND position IS NOT NULL AND position >= {mark}"
        f" AND position < {mark} ORDER BY position"
    )


_PUBLISHED_AT = sa.select(MESSAGES.c.published_at_us).where(*_HERE, MESSAGES.c.position == sa.bindparam("position"))
