"""A seeded simulator of segments: workers that diff, people who upload, turn off and approve, stopped around commits.

Snapshots come while others are diffed, twice, in parts, and spoilt on the disk; workers die and are overtaken; the
topic outside loses acknowledgements. A `Book` is told of every commit.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import greenlet
import msgspec
import pyarrow as pa

from keyfold.core import relay
from keyfold.core.clock import SECOND_US, ManualClock
from keyfold.core.context import Context
from keyfold.core.errors import Conflict, KeyfoldError, NotFound, TicketRefused
from keyfold.core.leases.sql import SqlLeases
from keyfold.core.relay import Relay
from keyfold.core.store import Store, Transaction
from keyfold.segments.part import PART
from keyfold.segments.service import acting, queueing, sweeping, ticking, uploading
from keyfold.segments.service.queueing import Queued, Ticketed
from keyfold.segments.service.snapshots import Snapshots
from keyfold.segments.service.ticking import Differ
from keyfold.segments.settings import SegmentsSettings
from tests.faults.scenario import PARTITIONS
from tests.faults.segment_ledger import Book, Found, compare_log
from tests.faults.segment_scenario import NAMES, TOPIC, USERS, settings
from tests.faults.stage import (
    Actor,
    Killed,
    OutsideTopic,
    SimulatedTopics,
    Stage,
    SteppedHolding,
    patched,
    step_by_clock,
)

BATCH_MAX = 4
UPLOADS_MAX = 20
LEASING = ("differ", "relay")
GUARDED = ("segment adopt", "segment step", "segment chunk", "segment finish")


class _AtOnce:
    """A store that is read without a pause: nobody comes between the look at the rows and the files."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def read(self, work: Any) -> Any:
        return Store.read(self._store, work)


class SegmentSimulation(Stage):
    """Three segments of the same ten users."""

    steps = 300
    look_every_steps = 40
    test = "test_segment_simulator.py"

    def __init__(self, seed: int, template: Path, directory: Path) -> None:
        self._folder = directory / f"{seed}.snapshots"
        segments_max = 2 if seed % 2 else 3
        chosen = partial(settings, folder=self._folder, segments_max=segments_max, chunk_users_max=2 + seed // 2 % 2)
        super().__init__(seed, template, directory, chosen, ManualClock())
        self._limits = msgspec.structs.replace(self._settings.limits, relay_batch_max=BATCH_MAX)
        self._outside = {TOPIC: OutsideTopic(TOPIC, "segments", self, losing=0.7)}
        self._topics = SimulatedTopics(self._store, self._settings, {TOPIC: PARTITIONS})
        self._topics.outside = self._outside
        self._own = self._settings.section("segments", SegmentsSettings)
        self._snapshots = Snapshots.of(self._context(), self._own)
        self.book = Book(TOPIC, self._snapshots.root, segments_max=segments_max)
        self.book.commit(0, self._queue())
        self._uploads = 0
        self._uploading: dict[Any, list[int]] = {}  # by who is at it
        self._swept: list[tuple[Transaction, str]] = []
        self._graves: list[object] = []  # what the dead held: nobody hands it back

    def run(self) -> None:
        try:
            super().run()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _kinds(self) -> Sequence[str]:
        return ("differ", "differ", "uploader", "uploader", "operator", "relay", "relay", "keeper")

    def _part_of(self, kind: str) -> str:
        return "segments"

    def _body(self, kind: str, name: str) -> Callable[[], None]:
        bodies: dict[str, Callable[[], None]] = {
            "differ": lambda: self._keep_diffing(name),
            "uploader": self._keep_uploading,
            "operator": self._operate,
            "relay": lambda: self._keep_relaying(Relay(self._context(), TOPIC, name)),
            "keeper": self._keep_house,
        }
        return bodies[kind]

    def _one_step(self) -> None:
        """Workers have a long way to go, and every pause lets the leases of all of them pass: pauses are rare."""
        draw = self.chance.random()
        if draw < 0.02:
            self._crash(self.chance.choice(self._actors))
        elif draw < 0.035:
            leasing = [actor for actor in self._actors if actor.kind in LEASING]
            self._sleep(self.chance.choice([each for each in leasing if _is_at_work(each)] or leasing))
        elif draw < 0.05:
            self._rot()
        elif draw < 0.5 and (awake := [each for each in self._actors if self._is_awake_worker(each)]):
            self._turn(self.chance.choice(awake))
        else:
            self._anybodys_turn()

    def _is_awake_worker(self, actor: Actor) -> bool:
        return actor.kind in LEASING and actor.asleep_until_step <= self._step

    def _run_dry(self) -> None:
        paused = [each for each in self._actors if each.kind == "differ" and _is_at_work(each)]
        self._actors = [each for each in self._actors if each not in paused]
        self._kill_all()
        self._uploading.clear()
        self._finish()
        for actor in paused:  # another has done its work meanwhile
            self._turn(actor)
            self._kill(actor)
        last = Relay(self._context(), TOPIC, "last")
        self._tame(last)
        while last.step():
            pass

    def _finish(self) -> None:
        differ = Differ(self._context(), self._own)
        for _ in range(50):
            if tick := differ.next("last"):
                for _ in tick:
                    pass
                continue
            rows = self._queue()
            due = [name for name, row in rows.items() if row.stage in ("held", "failed")]
            if not due:
                return
            for name in due:
                self._mend(name, rows[name])

    def _mend(self, name: str, row: Queued) -> None:
        """What is held is approved; what is spoilt on the disk is left behind, by a new snapshot and off and on."""
        if row.stage == "held":
            self._act("approve", name)
            return
        if row.target_version is not None or self.book.rotten & {(name, row.diff_version or 0)}:
            self._act("off", name)
            self._act("on", name)
        self._upload(name, self._users())

    # The actors -------------------------------------------------------------------------------------------------------

    def _keep_diffing(self, name: str) -> None:
        differ = Differ(self._context(), self._own)
        while True:
            tick = differ.next(name)
            self.pause("between two ticks")
            if tick is None:
                continue
            try:
                for _ in tick:
                    self.pause("between two pieces")
                    if self.chance.random() < 0.08:
                        tick.close()  # type: ignore[attr-defined]
            except KeyfoldError as error:
                self.pause(f"failed: {error}")
            except Killed:
                self._graves.append(tick)
                raise

    def _keep_uploading(self) -> None:
        while self._uploads < UPLOADS_MAX:
            self.pause("between two uploads")
            self._uploads += 1
            begun = [name for name, row in self._queue().items() if row.chunks]
            with contextlib.suppress(Conflict, NotFound):
                self._upload(self.chance.choice([*begun, *begun, *NAMES]), self._users())

    def _users(self) -> list[int]:
        """The users of a snapshot; now and then the same as another, or nobody."""
        chance = self.chance
        if self.book.counted and chance.random() < 0.3:
            self.struck["message delivered twice", "segments"] += 1
            return list(chance.choice(list(self.book.counted.values())))
        share = chance.choice((0.0, 0.3, 0.6, 0.8, 0.8, 1.0))
        return [user for user in USERS if chance.random() < share]

    def _upload(self, name: str, users: list[int]) -> None:
        me = greenlet.getcurrent()
        self._uploading[me] = users
        try:
            if users and self.chance.random() < 0.3:
                self._upload_in_parts(name, users)
            else:
                ids = [pa.array(users, pa.uint64())]
                uploading.upload(self._store, self._snapshots, name, ids, "the upload")
        finally:
            self._uploading.pop(me, None)

    def _upload_in_parts(self, name: str, users: list[int]) -> None:
        uploads = uploading.Uploads(self._store, self._snapshots)
        upload_id = uploads.begin(name)
        parts = [users[: len(users) // 2], users[len(users) // 2 :]]
        kept = [part for part in parts if part]
        for number, part in enumerate(kept, 1):
            self.pause("between two parts")
            uploads.put(name, upload_id, number, part)
        uploads.finish(name, upload_id, len(kept))

    def _operate(self) -> None:
        """What waits for somebody is dealt with; a diff that a newer snapshot waits for is taken up anew."""
        while True:
            self.pause("looking")
            rows = list(self._queue().values())
            behind = [row for row in rows if row.chunks and row.evaluation_version > (row.target_version or 0)]
            row = self.chance.choice(behind or rows)
            acts = {"held": ("approve", "approve", "off"), "failed": ("retry", "off")}.get(
                row.stage, ("off", *["retry"] * 3)
            )
            act = self.chance.choice(("retry", "retry", "off") if behind else acts) if row.is_on else "on"
            if behind or act in ("on", "approve") or self.chance.random() < 0.2:
                with contextlib.suppress(Conflict):
                    self._act(act, row.segment_id)

    def _act(self, act: str, name: str) -> None:
        works: dict[str, Callable[[Transaction], Queued]] = {
            "off": lambda tx: acting.turn_off(tx, name, "operator"),
            "on": lambda tx: acting.turn_on(tx, name, "operator"),
            "retry": lambda tx: acting.retry(tx, name, "operator"),
            "approve": lambda tx: acting.approve(tx, name, None, "operator"),
        }
        self._store.transact(works[act], name="segment act")

    def _keep_house(self) -> None:
        """Sweep sets, and delete files that no row names, where nobody is about to name them."""
        context = self._context()
        while True:
            for _ in range(3):
                self.pause("resting")
            if not self._uploading:
                self._snapshots.collect(_AtOnce(self._store), -1, -1)  # type: ignore[arg-type]
            if self.chance.random() < 0.3:
                sweeping.sweep(context, self._own, lambda done, what: None)

    def _keep_relaying(self, loop: Relay) -> None:
        self._tame(loop)
        while True:
            try:
                loop.step()
            except KeyfoldError as error:
                self.pause(f"failed: {error}")
            self.pause("between two steps")

    def _rot(self) -> None:
        """A snapshot that nobody has begun to diff is spoilt on the disk."""
        named = Store.read(self._store, self.book.look).snapshots
        for name, row in self._queue().items():
            place = (name, row.evaluation_version)
            if row.stage != "awaiting_diff" or row.target_version is not None or place in self.book.rotten:
                continue
            for path in (self._snapshots.root / named[place]).glob("*.parquet"):
                path.write_bytes(path.read_bytes()[:-9])
                self.book.rotten |= {each for each, folder in named.items() if folder == named[place]}
                self.trace.append(f"{self._step} the snapshot {place} is spoilt")
                return

    def _context(self) -> Context:
        """A process of its own on the shared store."""
        context = Context(self._settings, self._store, self._topics, SqlLeases(self._store), [PART])
        context.limits = self._limits
        return context

    def _tame(self, loop: Relay) -> None:
        step_by_clock(loop._shards, lambda: self._clock.now_us() / SECOND_US)

    # What is looked at ------------------------------------------------------------------------------------------------

    def _queue(self) -> dict[str, Queued]:
        return Store.read(self._store, lambda tx: queueing.queued(tx, NAMES))

    def _look(self, *, at_the_end: bool = False) -> None:
        found: Found = self._store.snapshot(self.book.look)
        broken = self.book.broken + self.book.compare(found)
        broken += compare_log(found, self._outside[TOPIC].entries().values(), at_the_end)
        broken += self.book.ends(found) if at_the_end else []
        if broken:
            raise self._violated(broken)

    def _committed(self, name: str, tx: Transaction, result: object) -> None:
        """Nobody is stopped inside a transaction, so this is the first look at what it has done."""
        book, users = self.book, self._uploading.get(greenlet.getcurrent())
        if name == "segment snapshot" and isinstance(result, Queued) and users is not None:
            book.counted[result.segment_id, result.evaluation_version] = users
        if name == "segment act" and isinstance(result, Queued):
            self._acted(result)
        if name.startswith("segment"):
            book.commit(tx.now_us, self._queue())
        if name == "segment sweep" and isinstance(result, sweeping.Swept):
            after = next(after for one, after in self._swept if one is tx)
            upto = result.upto or "~"
            book.collect(sorted(user for user in book.sets if after < str(user) <= upto))
        self._swept.clear()

    def _acted(self, row: Queued) -> None:
        place, before = (row.segment_id, row.evaluation_version), (row.segment_id, row.evaluation_version - 1)
        if row.evaluation_version and place not in self.book.counted:  # turned on: the last snapshot again
            self.book.counted[place] = self.book.counted[before]
            self.book.rotten |= {place} if before in self.book.rotten else set()
        if row.approved_version:
            self.book.approved.add((row.segment_id, row.approved_version))

    @contextlib.contextmanager
    def _spies(self) -> Iterator[None]:
        """Hear who is refused, what is swept and what fails, and give the code this simulation's time."""
        step, sweep_step, fail = Ticketed.step, sweeping.sweep_step, ticking.Tick._fail

        def watch_step(held: Ticketed, tx: Transaction, **changes: object) -> Queued:
            newest = queueing.one(tx, held.row.segment_id).ticket
            try:
                done = step(held, tx, **changes)
            except TicketRefused:
                self.struck["holder paused past its lease", "segments"] += newest > held.row.ticket
                raise
            if held.row.ticket < newest:
                self.book.broken.append(f"N3: ticket {held.row.ticket} was accepted after {newest}")
            return done

        def watch_sweep(tx: Transaction, context: Any, own: Any, after: str, users_max: int) -> sweeping.Swept:
            self._swept.append((tx, after))
            return sweep_step(tx, context, own, after, users_max)

        def watch_fail(tick: ticking.Tick, held: Ticketed, reason: str) -> None:
            fail(tick, held, reason)
            self.struck["poison message", "segments"] += 1

        time = SimpleNamespace(monotonic=lambda: self._clock.now_us() / SECOND_US, sleep=lambda _: None)
        with patched(
            [
                (Ticketed, "step", watch_step),
                (sweeping, "sweep_step", watch_sweep),
                (ticking.Tick, "_fail", watch_fail),
                (ticking, "Holding", partial(SteppedHolding, self)),
                (relay, "time", time),
            ]
        ):
            yield


def _is_at_work(actor: Actor) -> bool:
    return actor.where.removeprefix("before ") in GUARDED
