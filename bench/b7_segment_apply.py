"""Segment apply: changed users through full ticks, with messages, against transactions of one user and batch SQL.

Every user is in 20 other segments (the second race: 300, with a tenth of the users). One segment changes: half of the
users enter it, half leave it, and in the next round the other way round. Ours is a whole tick of the product: both
snapshots read twice from Parquet, checked, counted, the sets read, changed, collected, saved by compare-and-set in
chunks of `segments.chunk_users_max` under a ticket, each with its message in the outbox. Every commit is synced.

Peers are on the bare driver, on a table (user_id, version, segments as JSON) and an outbox of their own, and are handed
the changed users: they read no snapshots, hold no ticket and keep no position, so a crash would leave them guessing,
and they neither collect garbage nor remember why somebody left. "one user a transaction" changes one row and inserts
its message; it is too slow for all, so it does 2,000. "batch SQL by hand" does as many users a transaction as ours, on
PostgreSQL in one statement by jsonb and `unnest`, on SQLite by its JSON functions and `executemany`.
"""

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import sqlalchemy as sa

from bench import stores
from bench.b2_profile_updates import undisturbed_rate
from bench.harness import Goal, Race, Side
from bench.serving import prepared
from keyfold.core import memory
from keyfold.core.context import Context
from keyfold.core.settings import load
from keyfold.core.store.sqlite import driver as sqlite_driver
from keyfold.segments.model import Entry, body_of
from keyfold.segments.part import PART
from keyfold.segments.service import describing
from keyfold.segments.service.snapshots import Snapshots
from keyfold.segments.service.ticking import Differ
from keyfold.segments.service.uploading import upload
from keyfold.segments.settings import SegmentsSettings

OURS, ONE, BATCH = "a tick", "one user a transaction", "batch SQL by hand"
ONE_BY_ONE = 2_000
FIRST = 10**12  # users are numbers of 13 digits
CHUNK = SegmentsSettings().chunk_users_max
SEGMENT = "changing"


def entries(sets: int) -> list[Entry]:
    return [Entry(f"segment-{number:04d}", 1 + number % 7) for number in range(sets)]


def races(quick: bool) -> Iterator[Race]:
    memory.settle()
    users = int(os.environ.get("KEYFOLD_BENCH_USERS", 20_000 if quick else 1_000_000))
    with stores.each_kind() as kinds:
        for count, sets in ((users, 20), (users // 10, 300)):
            for kind in ("SQLite", "PostgreSQL"):
                yield from _race(kind, kinds[kind], count, sets)


def _race(kind: str, new_url: stores.NewUrl, users: int, sets: int) -> Iterator[Race]:
    peer: Any = (SqlitePeer if kind == "SQLite" else PostgresPeer)(new_url(), users, sets)
    with tempfile.TemporaryDirectory(prefix="keyfold-bench-") as folder:
        ours = Ours(new_url(), Path(folder), users, sets)
        must = (30, 60) if kind == "SQLite" else (20, 40)
        wanted = sets == 20
        yield Race(
            title=f"{users:,} changed users of {sets} segments, {kind}, chunks of {CHUNK:,}",
            unit="users/s",
            sides=[Side(OURS, ours.tick), Side(ONE, peer.one_by_one), Side(BATCH, peer.in_batches)],
            goals=[
                Goal(side=OURS, against=ONE, must=must[0] if wanted else None, moonshot=must[1] if wanted else None),
                Goal(side=OURS, against=BATCH, must=0.8 if wanted else None, moonshot=1.6 if wanted else None),
            ],
        )
        ours.close()
        peer.close()


class Ours:
    """The product on one store, whose segment changes to and fro."""

    def __init__(self, url: str, folder: Path, users: int, sets: int) -> None:
        self._users = users
        given = {"store.url": prepared(url), "segments.folder": str(folder), "segments.remove_share_max": 1.0}
        self._context = Context.open(load(parts={"segments": SegmentsSettings}, environ={}, options=given), [PART])
        self._settings = self._context.settings.section("segments", SegmentsSettings)
        self._snapshots = Snapshots.of(self._context, self._settings)
        self._differ = Differ(self._context, self._settings)
        self._turn = 0
        made = describing.Segment(segment_id=SEGMENT)
        self._context.store.transact(lambda tx: describing.create(tx, self._settings, made, "bench"))
        fill = stores.filling(url, "user_segments")
        for begin in range(0, users, 50_000):
            ids = [str(FIRST + each) for each in range(begin, min(begin + 50_000, users))]
            body = body_of(entries(sets))
            # Half of them are in the segment from the start.
            bodies = [f"{body}\n{SEGMENT}:1" if int(each) % 2 else body for each in ids]
            fill.insert({"user_id": ids, "version": [1] * len(ids), "segments": bodies, "departures": [""] * len(ids)})
        fill.close()
        self._upload()
        self._run()  # of a segment without an old snapshot, whose users are all there: nothing is written

    def tick(self) -> float:
        self._upload()
        self._context.store.transact(lambda tx: tx.driver("DELETE FROM messages"))
        result = undisturbed_rate(self._users, self._run)
        count = self._context.store.read(lambda tx: tx.driver("SELECT count(*) FROM messages").scalar_one())
        assert count == self._users
        return result

    def close(self) -> None:
        self._context.close()

    def _upload(self) -> None:
        self._turn += 1
        ids = pa.array(range(FIRST + self._turn % 2, FIRST + self._users, 2), pa.uint64())
        upload(self._context.store, self._snapshots, SEGMENT, [ids], "the upload")

    def _run(self) -> None:
        tick = self._differ.next("bench")
        assert tick is not None
        for _ in tick:
            pass


def as_json(sets: int, more: bool) -> str:
    listed = [*entries(sets), *([Entry(SEGMENT, 1)] if more else [])]
    each = ",".join(f'{{"segment_id":"{e.segment_id}","evaluation_version":{e.evaluation_version}}}' for e in listed)
    return f"[{each}]"


class PostgresPeer:
    """Two tables in a database of its own, on the bare driver."""

    SCHEMA = """
    CREATE TABLE user_sets (user_id TEXT PRIMARY KEY, version BIGINT NOT NULL, segments JSONB NOT NULL);
    CREATE TABLE outbox (id BIGSERIAL PRIMARY KEY, topic TEXT NOT NULL, key TEXT NOT NULL, version BIGINT NOT NULL,
                         payload BYTEA NOT NULL, queued_at TIMESTAMPTZ NOT NULL DEFAULT now());
    """
    CHANGE = """
    UPDATE user_sets SET version = user_sets.version + 1, segments = CASE WHEN batch.is_added
      THEN user_sets.segments || jsonb_build_object('segment_id', %s::text, 'evaluation_version', %s::bigint)
      ELSE (SELECT coalesce(jsonb_agg(e ORDER BY n), '[]') FROM jsonb_array_elements(user_sets.segments)
            WITH ORDINALITY AS each (e, n) WHERE e ->> 'segment_id' <> %s) END
    FROM (SELECT * FROM unnest(%s::text[], %s::bool[]) AS rows (user_id, is_added) ORDER BY user_id) AS batch
    WHERE user_sets.user_id = batch.user_id RETURNING user_sets.user_id, user_sets.version, user_sets.segments
    """
    BOTH = f"""
    WITH changed AS ({CHANGE})
    INSERT INTO outbox (topic, key, version, payload)
    SELECT 'cdp-segments-log', user_id, version, convert_to(jsonb_build_object('segments', segments)::text, 'UTF8')
    FROM changed
    """

    def __init__(self, url: str, users: int, sets: int) -> None:
        self._users = users
        self._turn = 1
        self._connection = psycopg.connect(url, autocommit=True)
        self._connection.execute(self.SCHEMA)
        bodies = [as_json(sets, more) for more in (False, True)]
        with self._connection.cursor().copy("COPY user_sets FROM STDIN") as copying:
            for each in range(users):
                copying.write_row((str(FIRST + each), 1, bodies[each % 2]))
        self._connection.execute("VACUUM ANALYZE user_sets")

    def one_by_one(self) -> float:
        few = min(ONE_BY_ONE, self._users)
        # Those that were changed singly are changed back before the next round.
        result = undisturbed_rate(few, lambda: self._change(range(few), 1))
        self._flip()
        self._change(range(few), CHUNK)
        self._flip()
        return result

    def in_batches(self) -> float:
        self._connection.execute("TRUNCATE outbox")
        result = undisturbed_rate(self._users, lambda: self._change(range(self._users), CHUNK))
        self._flip()
        return result

    def close(self) -> None:
        self._connection.close()

    def _flip(self) -> None:
        self._turn += 1

    def _change(self, users: Sequence[int], size: int) -> None:
        for begin in range(0, len(users), size):
            some = users[begin : begin + size]
            ids = [str(FIRST + each) for each in some]
            is_added = [(each + self._turn) % 2 == 1 for each in some]
            with self._connection.transaction():
                self._connection.execute(self.BOTH, (SEGMENT, 2, SEGMENT, ids, is_added), prepare=True)


class SqlitePeer:
    """The same in a file of its own, every commit synced."""

    ADD = """UPDATE user_sets SET version = version + 1, segments = json_insert(segments, '$[#]',
             json_object('segment_id', ?, 'evaluation_version', 2)) WHERE user_id = ?"""
    REMOVE = """UPDATE user_sets SET version = version + 1, segments = (SELECT json_group_array(json(value)) FROM
                json_each(segments) WHERE value ->> 'segment_id' <> ?) WHERE user_id = ?"""
    TELL = """INSERT INTO outbox (topic, key, version, payload)
              SELECT 'cdp-segments-log', user_id, version, json_object('segments', json(segments)) FROM user_sets
              WHERE user_id IN (SELECT value FROM json_each(?))"""

    def __init__(self, url: str, users: int, sets: int) -> None:
        self._users = users
        self._turn = 1
        self._connection = sqlite_driver().connect(sa.make_url(url).database, isolation_level=None)
        for sql in (
            "PRAGMA journal_mode = WAL",
            "PRAGMA synchronous = FULL",
            "PRAGMA cache_size = -64000",
            "CREATE TABLE user_sets (user_id TEXT PRIMARY KEY, version INTEGER NOT NULL, segments TEXT NOT NULL)"
            " WITHOUT ROWID, STRICT",
            "CREATE TABLE outbox (id INTEGER PRIMARY KEY, topic TEXT NOT NULL, key TEXT NOT NULL,"
            " version INTEGER NOT NULL, payload TEXT NOT NULL) STRICT",
            "BEGIN",
        ):
            self._connection.execute(sql)
        bodies = [as_json(sets, more) for more in (False, True)]
        rows = ((str(FIRST + each), 1, bodies[each % 2]) for each in range(users))
        self._connection.executemany("INSERT INTO user_sets VALUES (?, ?, ?)", rows)
        self._connection.execute("COMMIT")
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def one_by_one(self) -> float:
        few = min(ONE_BY_ONE, self._users)
        result = undisturbed_rate(few, lambda: self._change(range(few), 1))
        self._turn += 1
        self._change(range(few), CHUNK)
        self._turn += 1
        return result

    def in_batches(self) -> float:
        self._connection.execute("DELETE FROM outbox")
        result = undisturbed_rate(self._users, lambda: self._change(range(self._users), CHUNK))
        self._turn += 1
        return result

    def close(self) -> None:
        self._connection.close()

    def _change(self, users: Sequence[int], size: int) -> None:
        for begin in range(0, len(users), size):
            some = users[begin : begin + size]
            ids = [str(FIRST + each) for each in some]
            is_added = [(each + self._turn) % 2 == 1 for each in some]
            self._connection.execute("BEGIN IMMEDIATE")
            for sql, wanted in ((self.ADD, True), (self.REMOVE, False)):
                rows = [(SEGMENT, user) for user, added in zip(ids, is_added, strict=True) if added is wanted]
                self._connection.executemany(sql, rows)
            self._connection.execute(self.TELL, (json.dumps(ids),))
            self._connection.execute("COMMIT")
