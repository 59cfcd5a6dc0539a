"""A seeded simulator of numbering: masters of two clusters, an operator and a pruner, stopped around every step.

Masters, the coordinator, the folders and the pruning are real; the places of a run are dealt by the model and not by an
engine, which would take a hundred times as long. Masters die and are overtaken, files are spoilt, states given up. A
`Book` is shown the record after every change of it.
"""

import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from keyfold.bulk import engines, folders
from keyfold.bulk.folders import Draft, Root
from keyfold.core.clock import ManualClock
from keyfold.core.context import Context
from keyfold.core.errors import Conflict, KeyfoldError, LeaseLost, NotFound
from keyfold.core.leases.sql import SqlLeases
from keyfold.core.store import Store, Transaction
from keyfold.core.topics.registry import Topics
from keyfold.numbering import model, sharding
from keyfold.numbering.model import Key, Outcome, State
from keyfold.numbering.part import PART
from keyfold.numbering.service import coordinating, mastering, running, states
from keyfold.numbering.service.mastering import Master, StateLost
from keyfold.numbering.service.running import Request
from keyfold.numbering.service.states import Manifest, Shard, Stored, Summary
from keyfold.numbering.settings import NumberingSettings
from tests.faults.numbering_ledger import Contents, Json, current_of, record_in
from tests.faults.numbering_masters import DAMAGES, spoil
from tests.faults.numbering_scenario import CLUSTERS, TYPE, alone, book_of, key, settings
from tests.faults.scenario import LEASE_SECONDS
from tests.faults.stage import Actor, Killed, Stage, SteppedHolding, patched

KEYS = tuple(map(key, range(14)))
OFTEN_BEFORE_FOLDERS = 0.5


class NumberingSimulation(Stage):
    """One type on two clusters."""

    steps = 500
    look_every_steps = 100
    test = "test_numbering_simulator.py"

    def __init__(self, seed: int, template: Path, directory: Path) -> None:
        self._folder = directory / f"{seed}.clusters"
        more = {"ttl_runs": seed % 3, "grace_hours": seed // 3 % 2, "states_kept": 1 + seed // 6 % 2}
        chosen = partial(settings, folder=self._folder, lease_seconds=LEASE_SECONDS, is_indexed=False, **more)
        super().__init__(seed, template, directory, chosen, ManualClock())
        self._own = self._settings.section("numbering", NumberingSettings)
        self._topics = Topics(self._store, self._settings, {})
        self.book = book_of(self._own)
        self._given: dict[str, list[Key]] = {}

    def run(self) -> None:
        try:
            super().run()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _kinds(self) -> Sequence[str]:
        return ("master of x", "master of y", "master of y", "operator", "pruner")

    def _part_of(self, kind: str) -> str:
        return "numbering"

    def _body(self, kind: str, name: str) -> Callable[[], None]:
        bodies: dict[str, Callable[[], None]] = {"operator": self._operate, "pruner": self._keep_pruning}
        return bodies.get(kind) or partial(self._keep_running, kind[-1], name)

    def _one_step(self) -> None:
        draw = self.chance.random()
        if draw < 0.01:
            self._crash(self.chance.choice(self._actors))
            self._clock.advance(LEASE_SECONDS * self.chance.choice((0.2, 1.1)))
        elif draw < 0.022:
            at_work = [actor for actor in self._actors if _is_at_work(actor)]
            self._sleep(self.chance.choice(at_work or self._actors))
        elif draw < 0.03:
            self._rot()
        elif draw < 0.6 and (at_work := [actor for actor in self._actors if self._is_awake_at_work(actor)]):
            self._turn(self.chance.choice(at_work))
        else:
            self._anybodys_turn()

    def _is_awake_at_work(self, actor: Actor) -> bool:
        return _is_at_work(actor) and actor.asleep_until_step <= self._step

    def _run_dry(self) -> None:
        paused = [actor for actor in self._actors if actor.where == "before publish pointer"]
        self._actors = [actor for actor in self._actors if actor not in paused]
        self._kill_all()
        for number in range(3):
            self._finish(CLUSTERS[number % 2])
        for actor in paused:  # others have published meanwhile
            self._turn(actor)
            self._kill(actor)
        self._clock.advance(10 * LEASE_SECONDS)
        mastering.prune(self._context(), self._own, TYPE, "last")

    def _finish(self, cluster: str) -> None:
        while True:
            try:
                self._run_once(cluster, "last")
                return
            except StateLost:
                self._give_up(even_if_readable=False)

    # The actors -------------------------------------------------------------------------------------------------------

    def _keep_running(self, cluster: str, name: str) -> None:
        while True:
            self.pause("between two runs")
            try:
                self._run_once(cluster, name)
            except LeaseLost as error:
                self.struck["holder paused past its lease", "numbering"] += 1
                self.pause(f"overtaken: {error}")
            except KeyfoldError as error:
                self.pause(f"failed: {error}")

    def _run_once(self, cluster: str, name: str) -> None:
        chance = self.chance
        share = chance.choice((0.3, 0.6, 0.8, 0.8, 1.0))
        keys = [model.Key(*each) for each in KEYS if chance.random() < share]
        url = f"memory://{len(self._given)}"
        self._given[url] = keys
        self.book.inputs.add(frozenset(keys))
        Master(self._context(), self._own, TYPE, cluster, name).run(
            url,
            is_forced=chance.random() < 0.1,
            tell=self.pause,
            sleep=lambda _: self.pause("waiting for the lock"),
        )

    def _operate(self) -> None:
        """Give up a state that is lost, and now and then one that is not."""
        while True:
            for _ in range(12):
                self.pause("looking on")
            with contextlib.suppress(Conflict, NotFound, LeaseLost):
                self._give_up(even_if_readable=self.chance.random() < 0.5)

    def _give_up(self, *, even_if_readable: bool) -> None:
        mastering.invalidate(
            self._context(),
            self._own,
            TYPE,
            "operator",
            why="lost",
            even_if_readable=even_if_readable,
            even_if_none_is_left=True,
        )

    def _keep_pruning(self) -> None:
        while True:
            for _ in range(8):
                self.pause("resting")
            with contextlib.suppress(Conflict, LeaseLost):
                mastering.prune(self._context(), self._own, TYPE, "pruner")

    def _rot(self) -> None:
        """A file of the last state is spoilt on one of its clusters."""
        current = current_of(self._record())
        cluster = self.chance.choice(CLUSTERS)
        if current is None or not (folder := self._folder / cluster / current["path"]).exists():
            return
        kind = self.chance.choice(["manifest.json", *sorted(path.name for path in folder.iterdir() if path.is_dir())])
        damage = self.chance.choice(DAMAGES)
        with contextlib.suppress(ValueError, FileNotFoundError):  # nothing of that kind, or spoilt before
            spoil(folder, kind, damage)
            self.book.spoilt.add((cluster, current["path"]))
            self.struck["file spoilt", "numbering"] += 1
            self.trace.append(f"{self._step} {kind} of {current['version']} on {cluster} is {damage}")

    def _context(self) -> Context:
        """A process of its own on the shared store."""
        return Context(self._settings, self._store, self._topics, SqlLeases(self._store), [PART])

    # What is looked at ------------------------------------------------------------------------------------------------

    def _record(self) -> Json:
        return record_in(_AtOnce(self._store))  # type: ignore[arg-type]

    def _look(self, *, at_the_end: bool = False) -> None:
        record = self._record()
        broken = self.book.compare(record) + (self.book.leftovers(record) if at_the_end else [])
        if broken:
            raise self._violated(broken)

    def _committed(self, name: str, tx: Transaction, result: object) -> None:
        if name != "publish pointer":
            return
        rows = Store.read(self._store, lambda one: list(one.driver("SELECT ticket, expires_at_us FROM leases")))
        taken = self._record().get("taken") or {}
        if [(row.ticket, row.expires_at_us > tx.now_us) for row in rows] != [(taken.get("ticket"), True)]:
            raise self._violated([f"N3: the record was changed under {taken}, the lease is {rows}"])
        self._look()

    @contextlib.contextmanager
    def _spies(self) -> Iterator[None]:
        """Stop everybody before folders change too, and give the code this simulation's time."""
        remove, publish, drop = Root.remove, Draft.publish, Draft.drop

        def stop_and_remove(root: Root, path: str) -> None:
            self.pause("before a folder is deleted", OFTEN_BEFORE_FOLDERS)
            remove(root, path)

        def stop_and_publish(draft: Draft, manifest: bytes | None) -> None:
            self.pause("before a folder is named", OFTEN_BEFORE_FOLDERS)
            publish(draft, manifest)
            self.pause("after a folder was named", OFTEN_BEFORE_FOLDERS)

        def drop_alive(draft: Draft) -> None:
            if not isinstance(sys.exc_info()[1], Killed):  # the dead tidy nothing up
                drop(draft)

        with (
            alone(),
            patched(
                [
                    (Root, "remove", stop_and_remove),
                    (Draft, "publish", stop_and_publish),
                    (Draft, "drop", drop_alive),
                    (folders, "sync", lambda _: None),
                    (folders, "make_folder", lambda path: path.mkdir(parents=True, exist_ok=True)),
                    (coordinating, "Holding", partial(SteppedHolding, self)),
                    (running, "run", self._by_model),
                ]
            ),
        ):
            yield

    # A run by the model -----------------------------------------------------------------------------------------------

    def _by_model(self, request: Request, tell: Callable[[str], None]) -> Stored:
        """What `running.run` does, without an engine."""
        keys = self._given[request.offers]
        before = _state(request.before) if request.before else None
        tell("read")
        draft = Draft(request.target, request.path, None)
        try:
            outcome = model.number(before, keys, request.rules, partial(sharding.shard_of, request.scheme))
            tell("new offers found")
            with engines.failing("duckdb"):
                _write(draft.folder, outcome)
            tell("checked")
            manifest = states.sealed(_manifest(request, outcome, draft))
            data = states.encoded(manifest)
            draft.publish(data)
        except BaseException:
            draft.drop()
            raise
        tell("written")
        return Stored(request.target, request.path, manifest, states.checksum_of(data))


class _AtOnce:
    """A store that is read without a pause."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def read(self, work: Any) -> Any:
        return Store.read(self._store, work)


def _is_at_work(actor: Actor) -> bool:
    return actor.kind.startswith("master") and not actor.where.startswith(("between", "waiting", "failed"))


def _state(stored: Stored) -> State:
    states.verify(stored)
    found = Contents(stored.root.local(stored.path), _json(stored))
    places = {
        Key(*each): model.Held(model.Place(*held.place), held.generation, held.is_reused, held.seen_run)
        for each, held in found.places.items()
    }
    return State(stored.version, found.run, places, frozenset(model.Place(*each) for each in found.free), found.sizes)


def _json(stored: Stored) -> Json:
    return dict(json.loads(stored.root.read(f"{stored.path}/{folders.MANIFEST}")))


def _write(folder: Path, outcome: Outcome) -> None:
    tables: dict[str, list[Json]] = {
        "places": _rows(outcome.state.places),
        "free": [place._asdict() for place in outcome.state.free],
        "new_docs": _rows(outcome.new),
        "expired_docs": _rows(outcome.expired),
        "remap": [
            {"old_shard_id": old.shard_id, "old_doc_id": old.doc_id, **new._asdict()}
            for old, new in outcome.remap.items()
        ],
    }
    for name, rows in tables.items():
        if rows:
            (folder / name).mkdir()
            pq.write_table(pa.Table.from_pylist(rows), folder / name / "00000.parquet", compression="none")


def _rows(places: Mapping[Key, model.Held]) -> list[Json]:
    return [
        {
            **each._asdict(),
            **held.place._asdict(),
            "generation": held.generation,
            "is_reused": held.is_reused,
            "seen_run": held.seen_run,
        }
        for each, held in places.items()
    ]


def _manifest(request: Request, outcome: Outcome, draft: Draft) -> Manifest:
    state = outcome.state
    return Manifest(
        version=str(state.version),
        run=state.run,
        scheme=request.scheme,
        reason=outcome.reason,
        parent=request.before.checksum if request.before else "",
        engine="duckdb",
        ttl_runs=request.ttl_runs,
        shards=[Shard(shard, size, 0, 0, 0, 0) for shard, size in sorted(state.sizes.items())],
        summary=Summary(0, 0, len(outcome.new), 0, len(outcome.expired), 0, 0),
        files=draft.files(),
    )
