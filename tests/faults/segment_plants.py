"""Planted bugs of segments, each with the harness that must catch it; planted as those in plants.py are."""

from typing import Any

import sqlalchemy as sa
from msgspec import structs

from keyfold.core.store import Transaction
from keyfold.core.store.batch import Columns
from keyfold.segments.model import Collector, Guard
from keyfold.segments.service import acting, applying, queueing, snapshots, ticking
from keyfold.segments.service.queueing import Queued, Ticketed
from keyfold.segments.service.snapshots import Snapshots
from keyfold.segments.tables import SEGMENT_SNAPSHOTS
from tests.faults.plants import Plot, commit, commit_after, plant

SIMULATOR, KILLS, WRITERS = "segment simulator", "segment kill sweep", "segment writers"
STATES, PAUSED, RESUMED = "segment crash states", "segment holder paused", "segment taken up again"

# Tickets and positions -----------------------------------------------------------------------------------------------


def _step_anyway(held: Ticketed, tx: Transaction, **changes: Any) -> Queued:
    return queueing.save(tx, queueing.one(tx, held.row.segment_id), **changes)


@plant("a step of a diff does not look at its ticket", SIMULATOR, "segments")
def _(plot: Plot) -> None:
    plot.name(Ticketed, "step", _step_anyway)


@plant("a holder that was overtaken goes on", PAUSED, "segments")
def _(plot: Plot) -> None:
    plot.name(Ticketed, "step", _step_anyway)
    plot.name(ticking.Holding, "must_be_held", lambda _: None)


@plant("a diff is taken up under an older ticket", SIMULATOR, "segments")
def _(plot: Plot) -> None:
    adopt = Ticketed.adopt

    def adopt_anyway(tx: Transaction, segment_id: str, ticket: int) -> Ticketed | None:
        row = queueing.one(tx, segment_id)
        if row.ticket > ticket:
            queueing.save(tx, row, ticket=ticket)
        return adopt(tx, segment_id, ticket)

    plot.name(Ticketed, "adopt", adopt_anyway)


@plant("the position of a diff is not stored with its chunk", SIMULATOR, "segments")
def _(plot: Plot) -> None:
    step = Ticketed.step

    def stand_still(held: Ticketed, tx: Transaction, **changes: Any) -> Queued:
        return step(held, tx, **{name: value for name, value in changes.items() if name != "upto"})

    plot.name(Ticketed, "step", stand_still)


@plant("the position of a diff is committed before its chunk", KILLS, "segments")
def _(plot: Plot) -> None:
    step = Ticketed.step

    def step_and_commit(held: Ticketed, tx: Transaction, **changes: Any) -> Queued:
        done = step(held, tx, **changes)
        commit(tx)
        return done

    plot.name(Ticketed, "step", step_and_commit)


@plant("a diff that was begun goes over to a newer snapshot", RESUMED, "segments")
def _(plot: Plot) -> None:
    adopt = Ticketed.adopt

    def adopt_newest(tx: Transaction, segment_id: str, ticket: int) -> Ticketed | None:
        held = adopt(tx, segment_id, ticket)
        if held is None:
            return None
        return Ticketed(queueing.save(tx, held.row, target_version=held.row.evaluation_version))

    plot.name(Ticketed, "adopt", adopt_newest)


# Sets ----------------------------------------------------------------------------------------------------------------


@plant("a set is saved without comparing its version", WRITERS, "segments")
def _(plot: Plot) -> None:
    def overwrite(tx: Transaction, table: sa.Table, columns: Columns) -> None:
        for user, version, body, departures in zip(*columns.values(), strict=True):
            row = {"user_id": user, "version": version + 1, "segments": body, "departures": departures}
            found = tx.execute(sa.update(table).where(table.c.user_id == user).values(**row))
            if not found.rowcount:
                tx.execute(sa.insert(table).values(**row))

    plot.name(applying, "compare_and_set", overwrite)


@plant("a changed set is announced in another transaction", KILLS, "segments")
def _(plot: Plot) -> None:
    commit_after(plot, applying, "compare_and_set")


@plant("one segment more than the cap fits into a set", SIMULATOR, "segments")
def _(plot: Plot) -> None:
    plot.name(ticking, "Collector", lambda minimal, segments_max: Collector(minimal, segments_max + 1))


@plant("a change leaves garbage in the set", SIMULATOR, "segments")
def _(plot: Plot) -> None:
    plot.name(ticking, "Collector", lambda minimal, segments_max: Collector({}, segments_max))


@plant("a set is left out of its message", SIMULATOR, "segments")
def _(plot: Plot) -> None:
    payload_of = applying.payload_of
    plot.name(applying, "payload_of", lambda body, before, gone: payload_of(before, before, gone))


# People --------------------------------------------------------------------------------------------------------------


@plant("a segment is turned off under the hands of a diff, which goes on", SIMULATOR, "segments")
def _(plot: Plot) -> None:
    turn_off = queueing.turn_off

    def turn_off_and_go_on(tx: Transaction, segment_id: str) -> Queued:
        row = queueing.one(tx, segment_id)
        done = turn_off(tx, segment_id)
        if row.stage != "diffing":
            return done
        begun = {"stage": row.stage, "target_version": row.target_version, "upto": row.upto, "chunks": row.chunks}
        return queueing.save(tx, done, **begun)

    plot.name(acting.queueing, "turn_off", turn_off_and_go_on)


@plant("nobody is asked about a diff that empties a segment", SIMULATOR, "segments")
def _(plot: Plot) -> None:
    plot.name(Guard, "objection", lambda *_: None)


# Snapshots -----------------------------------------------------------------------------------------------------------


@plant("the snapshot that a diff goes to is forgotten", SIMULATOR, "segments")
def _(plot: Plot) -> None:
    forget = snapshots.forget
    plot.name(snapshots, "forget", lambda tx, row: forget(tx, structs.replace(row, target_version=None)))


@plant("files of a snapshot that a row names are deleted", SIMULATOR, "segments")
def _(plot: Plot) -> None:
    collect = Snapshots.collect

    def collect_all_but_the_last(found: Snapshots, store: Any, *seconds: float) -> int:
        return collect(found, _Only(store), *seconds)  # type: ignore[arg-type]

    plot.name(Snapshots, "collect", collect_all_but_the_last)


class _Only:
    """A store in which only the newest snapshot of each segment is named."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def read(self, work: Any) -> Any:
        return self._store.read(lambda tx: work(_OnlyNewest(tx)))


class _OnlyNewest:
    def __init__(self, tx: Transaction) -> None:
        self._tx = tx

    def execute(self, statement: Any) -> Any:
        named = SEGMENT_SNAPSHOTS.c
        rows = self._tx.execute(
            sa.select(named.segment_id, sa.func.max(named.evaluation_version)).group_by(named.segment_id)
        )
        pairs = sa.tuple_(named.segment_id, named.evaluation_version)
        return self._tx.execute(statement.where(pairs.in_([tuple(row) for row in rows])))


@plant("a snapshot is named before its files are synced", STATES, "segments")
def _(plot: Plot) -> None:
    plot.name(snapshots, "sync", lambda *_: None)


@plant("a snapshot is named before its folder has its name", STATES, "segments")
def _(plot: Plot) -> None:
    sync = snapshots.sync
    plot.name(snapshots, "sync", lambda path: sync(path) if path.is_file() else None)
