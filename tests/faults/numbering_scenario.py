"""A small run of numbering: masters of two clusters publish one state after the other, the last a rebuild, and tidy up.

It is what the kill sweep kills and the crash states are recorded from; `scenario.py` runs it in a process of its own.
Which run comes next follows from the record.
"""

import contextlib
import hashlib
import io
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from keyfold.bulk import engines, folders
from keyfold.core.clock import ManualClock
from keyfold.core.context import Context
from keyfold.core.settings import Settings, load
from keyfold.numbering.model import Published
from keyfold.numbering.part import PART
from keyfold.numbering.service import mastering
from keyfold.numbering.service.mastering import Master, Pruned
from keyfold.numbering.settings import NumberingSettings
from tests.faults.killsweep import Inspected, WritePath, shrunk, soundness
from tests.faults.numbering_ledger import KEY, Book, Json, Key, current_of, record_in
from tests.faults.scenario import Ack, Order, Say
from tests.faults.stage import patched

TYPE = "main"
CLUSTERS = ("x", "y")
SHARDS = 2
LEASE_SECONDS = 3_600  # no lease is renewed in the middle of a run that is counted call by call


def key(number: int) -> Key:
    return (number % 3, f"o{number}", number % 2, 0)


# What each run is given: some offers go, others take their places; the last is a rebuild.
GIVEN: tuple[tuple[Key, ...], ...] = (
    tuple(map(key, range(12))),
    tuple(map(key, (*range(3, 12), 20, 21, 22, 23, 24, 25))),
    tuple(map(key, (*range(5, 12), 21, 30))),
)


class Numbering:
    """A process with masters of every cluster."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.store = context.store
        self.settings = context.settings.section("numbering", NumberingSettings)
        self.book = book_of(self.settings)

    def master(self, cluster: str, name: str = "") -> Master:
        return Master(self.context, self.settings, TYPE, cluster, name or f"master of {cluster}")

    def run(self, cluster: str, keys: Iterable[Key], name: str = "", **more: Any) -> Published:
        given = frozenset(keys)
        self.book.inputs.add(given)
        return self.master(cluster, name).run(offers(given), **{"is_shrinking_allowed": True, **more})

    def prune(self) -> Pruned:
        return mastering.prune(self.context, self.settings, TYPE, "pruner")

    def record(self) -> Json:
        """As the coordinator has it, whichever it is."""
        found = self.context.leases.published(f"numbering/{TYPE}")
        return json.loads(found.data) if found else {}

    def broken(self) -> list[str]:
        return self.book.compare(self.record())

    def tidied(self) -> list[str]:
        """Let go of what nobody needs; what is broken, or left, afterwards."""
        failures = [f"N4: {each}" for each in self.prune().failures]
        return failures + self.broken() + self.book.leftovers(self.record())


def book_of(settings: NumberingSettings) -> Book:
    clusters = {name: Path(url) for name, url in settings.clusters.items()}
    return Book(clusters, TYPE, copies=min(settings.copies_min, len(clusters)), ratio=settings.rebuild_ratio)


def offers(keys: Iterable[Key]) -> str:
    """The URL of a table of offers, which is in memory: reading it is none of the calls that are counted."""
    listed = sorted(keys)
    name = hashlib.md5(repr(listed).encode(), usedforsecurity=False).hexdigest()
    columns = list(zip(*listed, strict=True)) or [()] * len(KEY)
    types = pa.schema([(each, pa.string() if each == "offer_id" else pa.int64()) for each in KEY])
    written = io.BytesIO()
    pq.write_table(pa.table(dict(zip(KEY, map(list, columns), strict=True)), schema=types), written)
    fsspec.filesystem("memory").pipe_file(f"/keyfold-offers/{name}.parquet", written.getvalue())
    return f"memory://keyfold-offers/{name}.parquet"


def settings(url: str, folder: Path | None = None, *, lease_seconds: int = LEASE_SECONDS, **more: object) -> Settings:
    above = folder or folder_of(url)
    own = {
        "clusters": {name: str(above / name) for name in CLUSTERS},
        "schemes": {"0": {"by": "offer", "shards": SHARDS}},
        "ttl_runs": 0,
        "states_kept": 2,
        "rebuilds_kept": 0,
        "grace_hours": 0,
        "engine_megabytes_max": 200,
        "retry_seconds": 1,
        **more,
    }
    options = {"store.url": url, "leases.lease_seconds": lease_seconds}
    options |= {name if "." in name else f"numbering.{name}": value for name, value in own.items()}  # type: ignore[misc]
    return load(parts={"numbering": NumberingSettings}, environ={}, options=options)  # type: ignore[arg-type]


def folder_of(url: str) -> Path:
    """The clusters of a store of one file lie beside it."""
    return Path(url.removeprefix("sqlite:///")).with_suffix(".snapshots")


@contextlib.contextmanager
def opened(url: str, clock: ManualClock | None = None, folder: Path | None = None, **more: Any) -> Iterator[Numbering]:
    with contextlib.closing(Context.open(settings(url, folder, **more), [PART], clock=clock)) as context:
        yield Numbering(context)


# The run that is killed -----------------------------------------------------------------------------------------------


def run(order: Order, say: Say) -> None:
    """Publish three states, and acknowledge each."""
    with _alike(order.worker), opened(order.url, ManualClock()) as numbering:
        for number in range(len(GIVEN)):
            say(Ack("numbering"))
            _next(numbering)
            say(Ack("ground", [number + 1]))


def finish(url: str) -> None:
    """Start anew when the dead master's lease has passed: all that is left, and the leftovers go."""
    clock = ManualClock()
    clock.advance(10 * LEASE_SECONDS)
    with alone(), opened(url, clock) as numbering:
        while _last_run(numbering.record()) < len(GIVEN):
            _next(numbering)
        numbering.prune()


def inspect(path: Path, told: list[int] | None, at_the_end: bool) -> Inspected:
    """Whether the pointer names the old state or the new one, whole; at the end nothing else lies about."""
    broken = soundness(path)
    url = f"sqlite:///{path}"
    with opened(url, ManualClock()) as numbering:
        record = record_in(numbering.store)
        book = numbering.book
        book.inputs |= set(map(frozenset, GIVEN))
        broken += book.compare(record) + shrunk([_last_run(record)], told)
        left = book.leftovers(record)
        if at_the_end:
            broken += left
            broken += [] if _last_run(record) == len(GIVEN) else [f"X1: run {_last_run(record)} is the last"]
        marks = [(each["run"], "dropped_at_us" in each, "is_deleted" in each) for each in record.get("states", ())]
        return Inspected(broken, (tuple(marks), len(left)))


def _next(numbering: Numbering) -> None:
    done = _last_run(numbering.record())
    is_last = done + 1 == len(GIVEN)
    # No clock moves here: a lock that an error has left is waited for in vain.
    numbering.run(CLUSTERS[done % len(CLUSTERS)], GIVEN[done], is_forced=is_last, wait_seconds_max=0)


def _last_run(record: Json) -> int:
    current = current_of(record)
    return int(current["run"]) if current else 0


@contextlib.contextmanager
def _alike(worker: str) -> Iterator[None]:
    """Folders get the same names in every run, so that a call on one of them can be found again."""
    numbers = itertools.count()

    def name() -> SimpleNamespace:
        text = f"{worker}/{next(numbers)}"
        return SimpleNamespace(hex=hashlib.md5(text.encode(), usedforsecurity=False).hexdigest())

    uuid = SimpleNamespace(uuid4=name)
    with alone(), patched([(mastering, "uuid", uuid), (folders, "uuid", uuid)]):
        yield


class _Inline(Executor):
    """A pool without threads."""

    def __init__(self, _: int) -> None:
        pass

    def submit(self, work: Callable[..., Any], /, *given: Any, **named: Any) -> "Future[Any]":
        done: Future[Any] = Future()
        try:
            done.set_result(work(*given, **named))
        except Exception as error:
            done.set_exception(error)
        return done


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Everything in one thread: a call is the nth of its kind in a process, and not in one of its threads."""
    connect = engines.duckdb_connection

    def connect_alone(*given: Any) -> Any:
        connection = connect(*given)
        connection.raw_sql("SET threads = 1")
        return connection

    futures = SimpleNamespace(futures=SimpleNamespace(ThreadPoolExecutor=_Inline))

    def do_it(_: float, work: Callable[[Callable[[], None]], Any], __: str) -> Any:
        return work(lambda: None)

    with patched(
        [
            (engines, "duckdb_connection", connect_alone),
            (folders, "concurrent", futures),
            (folders, "within", do_it),
        ]
    ):
        yield


def warm_up() -> None:
    """Import what a run would otherwise import between its counted calls, without a thread that a fork would lose."""
    import duckdb
    import ibis.backends.duckdb
    import pyarrow.parquet

    assert duckdb, (ibis.backends.duckdb, pyarrow.parquet)
    for keys in GIVEN:
        offers(keys)


NUMBERING = WritePath("numbering", finish, inspect)
