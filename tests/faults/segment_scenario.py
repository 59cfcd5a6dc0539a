"""A small run of segments on one store: snapshots taken whole and in parts, diffed in chunks, off and on, collected.

It is what the kill sweep kills and the crash states are recorded from; `scenario.py` runs it in a process of its own.
Every step looks first whether an earlier run has done it.
"""

import contextlib
import hashlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa

from keyfold.core.clock import ManualClock
from keyfold.core.context import Context
from keyfold.core.relay import Relay
from keyfold.core.settings import Settings, load
from keyfold.segments.part import PART
from keyfold.segments.service import acting, describing, queueing, snapshots, uploading
from keyfold.segments.service.queueing import Queued
from keyfold.segments.service.snapshots import Snapshots
from keyfold.segments.service.ticking import Differ
from keyfold.segments.service.uploading import Uploads
from keyfold.segments.settings import SegmentsSettings
from tests.faults.killsweep import Inspected, WritePath, shrunk, soundness
from tests.faults.nursery import FILE_TIME
from tests.faults.scenario import LEASE_SECONDS, Ack, Order, Say
from tests.faults.segment_ledger import Book, Found
from tests.faults.stage import patched

TOPIC = "cdp-segments-log"
NAMES = ("a", "aa", "b")
USERS = (0, 3, 7, 12, 100, 2**31, 2**63 - 1, 2**63, 2**63 + 5, 2**64 - 1)
CHUNK = 2

# Every version of every snapshot; the users of b are in nothing else, and its second is the first again: it was off.
SENT: dict[tuple[str, int], tuple[int, ...]] = {
    ("a", 1): USERS[:5],
    ("aa", 1): USERS[3:9],
    ("b", 1): (5, 6, 9),
    ("a", 2): (*USERS[2:5], *USERS[6:8]),
    ("a", 3): (*USERS[1:5], USERS[8]),
    ("b", 2): (5, 6, 9),
}
ANEW = [("b", 2)]


class Worker:
    """Everything one process does for segments, each step by hand."""

    def __init__(self, context: Context, name: str) -> None:
        self.context = context
        self.store = context.store
        self.name = name
        self.settings = context.settings.section("segments", SegmentsSettings)
        self.snapshots = Snapshots.of(context, self.settings)
        self.differ = Differ(context, self.settings)
        self.relay = Relay(context, TOPIC, name)
        self.book = Book(TOPIC, self.snapshots.root)

    def row(self, name: str) -> Queued:
        return self.store.read(lambda tx: queueing.one(tx, name))

    def upload(self, name: str, version: int) -> None:
        if self.row(name).evaluation_version < version:
            ids = [pa.array(SENT[name, version], pa.uint64())]
            uploading.upload(self.store, self.snapshots, name, ids, "the upload")

    def upload_in_parts(self, name: str, version: int) -> None:
        if self.row(name).evaluation_version < version:
            uploads, users = Uploads(self.store, self.snapshots), SENT[name, version]
            upload_id = uploads.begin(name)
            uploads.put(name, upload_id, 1, users[:2])
            uploads.put(name, upload_id, 2, users[2:])
            uploads.finish(name, upload_id, 2)

    def diff(self, between: Callable[[], object] = lambda: None) -> None:
        """All that waits; `between` happens after the first chunk."""
        while tick := self.differ.next(self.name):
            for number, _ in enumerate(tick):
                if number == 1:
                    between()

    def turn_off_and_on(self, name: str) -> None:
        row = self.row(name)
        if row.evaluation_version == 1 and row.is_on:
            self.store.transact(lambda tx: acting.turn_off(tx, name, "x"), name="segment act")
        if not self.row(name).is_on:
            self.store.transact(lambda tx: acting.turn_on(tx, name, "x"), name="segment act")

    def collect(self) -> None:
        self.snapshots.collect(self.store, -1, -1)

    def steps(self) -> list[tuple[str, Callable[[], object]]]:
        """All that is done, and whose code it runs."""
        return [
            ("segments", lambda: self.upload("a", 1)),
            ("segments", self.diff),
            ("segments", lambda: self.upload_in_parts("aa", 1)),
            ("segments", self.diff),
            ("ground", self.relay.step),
            ("segments", lambda: self.upload("b", 1)),
            ("segments", self.diff),
            ("segments", lambda: self.upload("a", 2)),
            ("segments", lambda: self.diff(lambda: self.upload("a", 3))),
            ("segments", lambda: self.upload("a", 3)),
            ("segments", self.diff),
            ("segments", lambda: self.turn_off_and_on("b")),
            ("segments", self.diff),
            ("segments", self.collect),
            ("ground", self.relay.step),
        ]


def run(order: Order, say: Say) -> None:
    """Do the whole scenario, stopping and starting in the middle, and acknowledge each step that has committed."""
    clock = ManualClock()
    with _alike(order.worker):
        for part_of_run in (slice(8), slice(8, None)):
            with opened(order.url, clock) as context:
                worker = Worker(context, order.worker)
                for part, step in worker.steps()[part_of_run]:
                    say(Ack(part))
                    step()
                    say(Ack("ground", counts(worker.store.snapshot(worker.book.look))))
                worker.relay.stop()


def finish(url: str) -> None:
    """Start anew after a crash, when the dead worker's leases have passed: all that is left, in the same order."""
    clock = ManualClock()
    clock.advance(10 * LEASE_SECONDS)
    with opened(url, clock) as context:
        worker = Worker(context, "w2")
        worker.diff()
        for _, step in worker.steps():
            step()


@contextlib.contextmanager
def _alike(worker: str) -> Iterator[None]:
    """Folders get the same names in every run, so that a call on one of them can be found again; files one time."""
    numbers, sync = itertools.count(), snapshots.sync

    def name(_: int = 16) -> str:
        return hashlib.md5(f"{worker}/{next(numbers)}".encode(), usedforsecurity=False).hexdigest()

    def sync_with_one_time(path: Path) -> None:
        sync(path)
        for each in [path] if path.is_file() else path.glob("*.parquet"):
            os.utime(each, (FILE_TIME, FILE_TIME))

    with patched(
        [
            (snapshots, "uuid", SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=name()))),
            (snapshots, "sync", sync_with_one_time),
            (uploading, "secrets", SimpleNamespace(token_hex=name)),
        ]
    ):
        yield


def opened(url: str, clock: ManualClock) -> contextlib.closing[Context]:
    return contextlib.closing(Context.open(settings(url), [PART], clock=clock))


def set_up(url: str) -> None:
    """Make the segments, of which every run finds a copy."""
    with opened(url, ManualClock()) as context:
        own = context.settings.section("segments", SegmentsSettings)
        for name in NAMES:
            segment = describing.Segment(segment_id=name)
            context.store.transact(lambda tx, segment=segment: describing.create(tx, own, segment, "x"))  # type: ignore[misc]


def settings(url: str, *, folder: Path | None = None, chunk_users_max: int = CHUNK, **more: object) -> Settings:
    options = {
        "store.url": url,
        "topics.partitions": 1,
        "leases.lease_seconds": LEASE_SECONDS,
        "segments.folder": str(folder or folder_of(url)),
        "segments.chunk_users_max": chunk_users_max,
        "segments.batch_rows": 16,
        **{f"segments.{name}": value for name, value in more.items()},
    }
    return load(parts={"segments": SegmentsSettings}, environ={}, options=options)  # type: ignore[arg-type]


def folder_of(url: str) -> Path:
    """The snapshots of a store of one file lie beside it."""
    return Path(url.removeprefix("sqlite:///")).with_suffix(".snapshots")


def warm_up() -> None:
    """Import what a run would otherwise import between its counted calls."""
    import pyarrow.parquet

    assert pyarrow.parquet
    pa.table({"user_id": pa.array(USERS, pa.uint64())}).column(0).to_numpy()


def counts(found: Found) -> list[int]:
    """How far the work has come, in numbers that only grow."""
    told = [each for messages in found.messages.values() for each in messages]
    return [
        sum(row.version for row in found.rows.values()),
        sum(row.evaluation_version for row in found.rows.values()),
        sum(version for version, _ in found.sets.values()),
        len(told),
        sum(each.is_published for each in told),
    ]


def inspect(path: Path, told: list[int] | None, at_the_end: bool) -> Inspected:
    """Follow the snapshots that were taken as far as the queue says, and compare."""
    broken = soundness(path)
    with opened(f"sqlite:///{path}", ManualClock()) as context:
        book = Worker(context, "looking").book
        found = context.store.snapshot(book.look)
        versions = {name: row.evaluation_version for name, row in found.rows.items()}
        book.counted = {place: users for place, users in SENT.items() if place[1] <= versions[place[0]]}
        broken += book.compare_now(found) + book.compare_history(found, ANEW) + shrunk(counts(found), told)
        if at_the_end:
            broken += book.ends(found)
            broken += [f"X1: {place} was never taken" for place in SENT if place not in book.counted]
        return Inspected(broken, found.fingerprint())


SEGMENTS = WritePath("segments", finish, inspect)
