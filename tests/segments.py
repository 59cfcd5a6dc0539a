"""Segments opened for a test: snapshots by hand, ticks step by step, a clock that moves, and what the topic says."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from keyfold.core.clock import ManualClock
from keyfold.core.context import Context, open_store
from keyfold.core.relay import Relay
from keyfold.core.settings import load
from keyfold.core.store import migrate
from keyfold.segments.part import PART
from keyfold.segments.service import acting, describing, queueing, reading, sweeping, uploading
from keyfold.segments.service.evaluating import Evaluator
from keyfold.segments.service.queueing import Queued
from keyfold.segments.service.snapshots import Snapshots
from keyfold.segments.service.ticking import Differ
from keyfold.segments.settings import SegmentsSettings
from tests.product import read_all, relay_all

ACTOR = "test"
Entries = list[tuple[str, int]]


class Segments:
    """A product with segments, driven by hand."""

    def __init__(self, context: Context, clock: ManualClock | None) -> None:
        self.context = context
        self.store = context.store
        self.clock = clock
        self.settings = context.settings.section("segments", SegmentsSettings)
        self.snapshots = Snapshots.of(context, self.settings)
        self.differ = Differ(context, self.settings)
        self.evaluator = Evaluator(context, self.settings)

    def create(self, segment_id: str, **more: Any) -> None:
        wanted = describing.Segment(segment_id=segment_id, **more)
        self.store.transact(lambda tx: describing.create(tx, self.settings, wanted, ACTOR))

    def upload(self, segment_id: str, ids: Iterable[int | str]) -> Queued:
        listed = list(ids)
        is_text = bool(listed) and isinstance(listed[0], str)
        arrays = [pa.array(listed, pa.string() if is_text else pa.uint64())]
        return uploading.upload(self.store, self.snapshots, segment_id, arrays, "the upload")

    def tick(self, holder: str = "w1") -> bool:
        """Diff the segment that waits longest, to its end; whether there was one."""
        tick = self.differ.next(holder)
        if tick is None:
            return False
        for _ in tick:
            pass
        return True

    def tick_all(self) -> None:
        while self.tick():
            pass

    def row(self, segment_id: str) -> Queued:
        return self.store.read(lambda tx: queueing.one(tx, segment_id))

    def act(self, what: str, segment_id: str) -> Queued:
        acts: Any = {"off": acting.turn_off, "on": acting.turn_on, "retry": acting.retry}
        return self.store.transact(lambda tx: acts[what](tx, segment_id, ACTOR))  # type: ignore[no-any-return]

    def approve(self, segment_id: str, version: int | None = None) -> Queued:
        return self.store.transact(lambda tx: acting.approve(tx, segment_id, version, ACTOR))

    def sweep(self) -> sweeping.Swept:
        return sweeping.sweep(self.context, self.settings, lambda done, what: None)

    def stored(self) -> dict[str, tuple[int, Entries]]:
        """Every user's version and set, as the table has it."""

        def look(tx: Any) -> dict[str, tuple[int, Entries]]:
            rows = tx.driver("SELECT user_id, version, segments FROM user_segments")
            found: dict[str, tuple[int, Entries]] = {}
            for row in rows:
                lines = [line.split(":") for line in row.segments.split("\n")[1:]]
                found[row.user_id] = (row.version, [(name, int(version)) for name, version in lines])
            return found

        return self.store.read(look)

    def names(self, *users: int | str) -> dict[str, list[str]]:
        """The segments that a reader sees of each user."""
        found = self.store.read(lambda tx: reading.read_sets(tx, [str(user) for user in users]))
        return {user: [each.segment_id for each in one.segments] for user, one in found.items()}

    def why(self, user: int | str, segment_id: str) -> reading.Because:
        return reading.why(self.store, self.snapshots, self.settings, str(user), segment_id)

    def history(self, user: int | str) -> list[reading.Change]:
        return self.store.read(lambda tx: reading.history(tx, self.settings.topic, str(user)))

    def published(self) -> dict[str, list[tuple[int, Entries]]]:
        """Every version of every user that the topic has, in its order."""
        relay = Relay(self.context, self.settings.topic, "w")
        relay_all(relay)
        relay.stop()
        found: dict[str, list[tuple[int, Entries]]] = {}
        for records in read_all(self.context, self.settings.topic).values():
            for record in records:
                told = json.loads(record.message.payload)["segments"]
                entries = [(each["segment_id"], each["evaluation_version"]) for each in told]
                found.setdefault(record.message.key, []).append((record.message.version, entries))
        return found

    def must_agree_with_the_topic(self) -> None:
        """S2: every version was published once, in order, and the highest is what the table has."""
        published, stored = self.published(), self.stored()
        assert published.keys() == stored.keys()
        for user, (version, entries) in stored.items():
            assert [each for each, _ in published[user]] == list(range(1, version + 1))
            assert published[user][-1][1] == entries


@contextmanager
def opened(
    url: str, folder: Path, *, clock: ManualClock | None = None, parts: Sequence[Any] = (PART,), **options: object
) -> Iterator[Segments]:
    """Segments on the store at `url`; options are settings of segments, or of another section with `__` for the dot."""
    given = {name.replace("__", ".") if "__" in name else f"segments.{name}": value for name, value in options.items()}
    settings = load(
        parts={part.name: part.settings for part in parts if part.settings},
        environ={},
        options={"store.url": url, "segments.folder": str(folder), **given},
    )
    store = open_store(settings)
    migrate.upgrade(store)
    store.close()
    context = Context.open(settings, parts, clock=clock)
    try:
        yield Segments(context, clock)
    finally:
        context.close()
