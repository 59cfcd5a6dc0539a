"""Segments against a plain model in memory: whatever people and workers do, in whatever order, S1 … S4 hold."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from keyfold.core.errors import Conflict, LeaseLost
from keyfold.segments.service import queueing
from keyfold.segments.service.queueing import Queued
from tests.segments import Segments, opened
from tests.unit.segments.reference import Entries, changed

USERS = [0, 3, 7, 12, 100, 2**31, 2**63 - 1, 2**63, 2**63 + 5, 2**64 - 1]
NAMES = ["a", "aa", "b"]
NAME, WORKER = st.sampled_from(NAMES), st.sampled_from(["w1", "w2"])
SNAPSHOT = st.integers(0, 2 ** len(USERS) - 1).map(
    lambda bits: [user for at, user in enumerate(USERS) if bits >> at & 1]
)


class Machine(RuleBasedStateMachine):
    """The product beside the model. A worker may be stopped anywhere, killed, or overtaken by the other."""

    product: Segments

    def __init__(self) -> None:
        super().__init__()
        product = self.product
        for table in ("segments", "segment_queue", "segment_snapshots", "user_segments", "messages", "leases"):
            product.store.transact(lambda tx, table=table: tx.driver(f"DELETE FROM {table}"))  # type: ignore[misc]
        product.store.transact(lambda tx: tx.driver("DELETE FROM progress"))
        for name in NAMES:
            product.create(name)
        self.snapshots: dict[tuple[str, int], list[int]] = {}
        self.sets: dict[int, Entries] = {}
        self.versions: dict[int, int] = {}
        self.ticks: dict[str, Any] = {}
        self.rows = {name: product.row(name) for name in NAMES}
        self.minimal = dict.fromkeys(NAMES, 0)

    @initialize(first=st.tuples(SNAPSHOT, SNAPSHOT, SNAPSHOT))
    def begin(self, first: tuple[list[int], ...]) -> None:
        for name, users in zip(NAMES, first, strict=True):
            self.upload(name, users)

    @rule(name=NAME, users=SNAPSHOT)
    def upload(self, name: str, users: list[int]) -> None:
        if not self.rows[name].is_on:
            with pytest.raises(Conflict):
                self.product.upload(name, users)
            return
        row = self.product.upload(name, users)
        self.snapshots[name, row.evaluation_version] = users
        self.look()

    @rule(worker=WORKER, steps=st.integers(1, 3))
    def work_a_little(self, worker: str, steps: int) -> None:
        """A worker does some bounded pieces of work, and stops where it is."""
        for _ in range(steps):
            if not self.step(worker):
                break

    @rule(worker=WORKER)
    def work_on(self, worker: str) -> None:
        """A worker finishes what it has begun, or the whole diff of another segment."""
        while self.step(worker):
            pass

    @rule()
    def work_all(self) -> None:
        """Both workers take turns until nothing is left to do."""
        while any([self.step("w1"), self.step("w2")]):
            pass

    def step(self, worker: str) -> bool:
        """Whether there is more of this tick."""
        tick = self.ticks.get(worker) or self.product.differ.next(worker)
        self.ticks[worker] = tick
        if tick is None:
            return False
        try:
            next(tick)
        except StopIteration:
            self.ticks[worker] = None
        except LeaseLost:  # overtaken, or the segment was turned off: nothing was committed by this step
            self.ticks[worker] = None
            return False
        self.look()
        return self.ticks[worker] is not None

    @rule(worker=WORKER)
    def stop(self, worker: str) -> None:
        """A worker is told to stop: it hands back what it holds."""
        if (tick := self.ticks.pop(worker, None)) is not None:
            tick.close()

    @rule()
    def let_leases_expire(self) -> None:
        """Whoever is at work may be overtaken from now on, and does not know it."""
        self.product.store.transact(lambda tx: tx.driver("UPDATE leases SET expires_at_us = 0"))

    @rule(name=NAME)
    def turn_off(self, name: str) -> None:
        self.product.act("off", name)
        self.look()

    @precondition(lambda self: not all(row.is_on for row in self.rows.values()))
    @rule(name=NAME)
    def turn_on(self, name: str) -> None:
        was_on = self.rows[name].is_on
        row = self.product.act("on", name)
        if not was_on and row.stage == "awaiting_diff":
            self.snapshots[name, row.evaluation_version] = self.snapshots[name, row.evaluation_version - 1]
        self.look()

    @precondition(lambda self: any(row.stage == "held" for row in self.rows.values()))
    @rule()
    def approve(self) -> None:
        for name, row in self.rows.items():
            if row.stage == "held":
                self.product.approve(name, row.evaluation_version)
        self.look()

    @precondition(lambda self: any(row.is_waiting for row in self.rows.values()))
    @rule(name=NAME)
    def retry(self, name: str) -> None:
        with contextlib.suppress(Conflict):
            self.product.act("retry", name)
        self.look()

    @precondition(lambda self: any(row.minimal_valid_version for row in self.rows.values()))
    @rule()
    def sweep(self) -> None:
        self.product.sweep()
        for user in sorted(self.sets):
            self.apply(user, "", 0, False)

    def look(self) -> None:
        """Replay through the model what was committed since the last look."""
        found = self.product.store.read(lambda tx: queueing.queued(tx, NAMES))
        self.minimal = {name: row.minimal_valid_version for name, row in found.items()}
        for name in NAMES:
            before, after = self.rows[name], found[name]
            if after.chunks > before.chunks or (after.target_version and after.upto != before.upto):
                self.committed(before, after)
            self.rows[name] = after

    def committed(self, before: Queued, after: Queued) -> None:
        target = after.target_version or 0
        old = [] if after.diff_version is None else self.snapshots[after.segment_id, after.diff_version]
        new = self.snapshots[after.segment_id, target]
        begin = -1 if before.upto is None else int(before.upto)
        for user in USERS:
            if begin < user <= int(after.upto or -1) and (user in old) != (user in new):
                self.apply(user, after.segment_id, target, user in new)

    def apply(self, user: int, segment: str, version: int, is_added: bool) -> None:
        set_before = self.sets.get(user, [])
        set_after = changed(set_before, segment, version, is_added, self.minimal, self.product.settings.segments_max)
        if set_after != set_before:
            self.sets[user] = set_after
            self.versions[user] = self.versions.get(user, 0) + 1

    @invariant()
    def the_table_is_what_the_model_says(self) -> None:
        stored = self.product.stored()
        assert {int(user): entries for user, (_, entries) in stored.items()} == self.sets
        assert {int(user): version for user, (version, _) in stored.items()} == self.versions

    def teardown(self) -> None:
        for tick in self.ticks.values():
            if tick is not None:
                tick.close()
        self.settle()
        self.product.must_agree_with_the_topic()

    def settle(self) -> None:
        """Left alone, every segment that is on ends where its last snapshot says (but for what the cap pushed out)."""
        self.product.store.transact(lambda tx: tx.driver("UPDATE leases SET expires_at_us = 0"))
        for _ in range(20):
            tick = self.product.differ.next("last")
            if tick is None:
                held = [name for name in NAMES if self.product.row(name).stage == "held"]
                if not held:
                    break
                for name in held:
                    self.product.approve(name)
                continue
            for _ in tick:
                self.look()
            self.look()
        for name in NAMES:
            row = self.product.row(name)
            assert row.stage in ("done", "evaluation")
            in_it = {user for user, entries in self.sets.items() if self.is_in(name, entries)}
            expected = (
                set(self.snapshots[name, row.evaluation_version]) if row.is_on and row.evaluation_version else set()
            )
            # What the cap pushed out does not come back by itself.
            assert in_it <= expected if self.product.settings.segments_max < len(NAMES) else in_it == expected

    def is_in(self, name: str, entries: Entries) -> bool:
        return any(each == name and version >= self.minimal[name] for each, version in entries)


@pytest.fixture
def product(request: pytest.FixtureRequest) -> Iterator[Segments]:
    """In memory where that can be: what survives a crash is proved elsewhere, and here a sync would be most of it."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        kind, segments_max = request.param
        url = f"sqlite:///{folder}/keyfold.db" if kind == "sqlite" else str(request.getfixturevalue("postgres_url"))
        given = {"chunk_users_max": 2, "batch_rows": 16, "segments_max": segments_max}
        with opened(url, Path(folder), **given) as made:
            yield made


@pytest.mark.parametrize("product", [("sqlite", 2), ("sqlite", 3), ("postgresql", 2)], indirect=True)
@pytest.mark.spec("SEG-01", "SEG-04", "SEG-05", "SEG-06", "SEG-07", "SEG-08", "SEG-09")
@pytest.mark.timeout(600)
def test_sets_are_what_a_plain_model_says_whatever_happens(product: Segments) -> None:
    class Here(Machine):
        pass

    Here.product = product
    is_embedded = product.store.is_sqlite
    run_state_machine_as_test(
        Here,
        settings=settings(
            max_examples=60 if is_embedded else 12,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
