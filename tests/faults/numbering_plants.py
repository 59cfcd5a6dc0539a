"""Planted bugs of numbering, each with the harness that must catch it; planted as those in plants.py are."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from keyfold.bulk import folders
from keyfold.bulk.folders import Draft
from keyfold.core.errors import Unavailable
from keyfold.numbering import expressions, model
from keyfold.numbering.model import Published, Record
from keyfold.numbering.service import coordinating, mastering, running
from keyfold.numbering.service.coordinating import Hold
from keyfold.numbering.service.mastering import Master
from keyfold.numbering.service.states import Stored
from tests.faults.plants import Plot, plant

SIMULATOR, KILLS, STATES = "numbering simulator", "numbering kill sweep", "numbering crash states"
RUNS, SPOILT, PAUSED, LOST = "numbering runs", "numbering spoilt", "numbering holder paused", "numbering lost answers"

_FENCE = "WHERE name = ? AND holder = ? AND ticket = ? AND expires_at_us > ?"
_NO_FENCE = "WHERE name = ? OR holder = ? OR ticket = ? OR expires_at_us > ?"

# Tickets and the record ----------------------------------------------------------------------------------------------


@plant("the record is changed without a look at the lease", SIMULATOR, "numbering")
def _(plot: Plot) -> None:
    plot.sql(_FENCE, _NO_FENCE)


@plant("nobody notes that the lock was taken", SIMULATOR, "numbering")
def _(plot: Plot) -> None:
    plot.name(coordinating.model, "take", lambda record, *_: record)


@plant("whoever was overtaken publishes anyway", PAUSED, "numbering")
def _(plot: Plot) -> None:
    def append(record: Record, state: Published, **_: object) -> Record:
        return structs.replace(record, states=[*record.states, state])

    plot.sql(_FENCE, _NO_FENCE)
    plot.name(model, "publish", append)


@plant("a state whose publishing was not answered is deleted", LOST, "numbering")
def _(plot: Plot) -> None:
    def change_once(hold: Hold, rule: Callable[[Record], Record]) -> Record:
        record, version, _ = coordinating._read(hold._leases, hold._type)
        changed = rule(record)
        name = coordinating.lock_name(hold._type)
        hold._leases.publish(name, msgspec.json.encode(changed), version, hold._holding.lease)
        hold.record = changed
        return changed

    def publish_or_forget(master: Master, hold: Hold, published: Published) -> None:
        try:
            hold.change(lambda now: model.publish(now, published, history_max=200))
        except Unavailable:
            master._forget(published.path)
            raise

    plot.name(Hold, "change", change_once)
    plot.name(Master, "_publish", publish_or_forget)


@plant("V stays where the last state was given up", SIMULATOR, "numbering")
def _(plot: Plot) -> None:
    declare_invalid = model.declare_invalid

    def forget_it(*given: Any) -> Record:
        return structs.replace(declare_invalid(*given), is_cut=False)

    plot.name(model, "declare_invalid", forget_it)


@plant("a V that was used is used again", SIMULATOR, "numbering")
def _(plot: Plot) -> None:
    publish = model.publish

    def forget_it(record: Record, state: Published, **more: Any) -> Record:
        return structs.replace(publish(record, state, **more), rebuild_next=0)

    plot.name(model, "publish", forget_it)


# Copies and leftovers ------------------------------------------------------------------------------------------------


@plant("a state is published on one cluster alone", SIMULATOR, "numbering")
def _(plot: Plot) -> None:
    plot.name(Master, "_given", _nobody_else)


def _nobody_else(master: Master, *_: object) -> list[str]:
    return [name for name in master._settings.clusters if name != master._cluster]


@plant("the last state is moved to the next master, and not copied", KILLS, "numbering")
def _(plot: Plot) -> None:
    brought = Master._brought

    def move(master: Master, hold: Hold, last: Published, tell: Callable[[str], None]) -> Stored:
        state = brought(master, hold, last, tell)
        for cluster in _nobody_else(master):
            mastering.root_of(master._settings, cluster).remove(last.path)
        return state

    plot.name(Master, "_brought", move)


@plant("pruning deletes what the record names", SIMULATOR, "numbering")
def _(plot: Plot) -> None:
    plot.name(mastering, "_paths", lambda _: set[str]())


@plant("pruning deletes what younger masters have made", SIMULATOR, "numbering")
def _(plot: Plot) -> None:
    plot.name(mastering, "_ticket_of", lambda _: -1)
    # The tombstones of whole states are noted under the lock: who has lost it is refused before anything is deleted.
    plot.name(mastering, "_note_strays", lambda *_, **__: None)


@plant("what dead masters left stays", SIMULATOR, "numbering")
def _(plot: Plot) -> None:
    plot.name(mastering, "_ticket_of", lambda _: 2**63)


@plant("the tombstone of the last state counts", SIMULATOR, "numbering")
def _(plot: Plot) -> None:
    drop, give_up = model.drop, model.deleted

    def mark(record: Record, ticket: int, checksums: Iterable[str], **changes: Any) -> Record:
        chosen = set(checksums)
        states = [structs.replace(each, **changes) if each.checksum in chosen else each for each in record.states]
        return structs.replace(record, states=states)

    def drop_all(record: Record, ticket: int, checksums: Iterable[str], now_us: int) -> Record:
        every = [*checksums, *(each.checksum for each in record.states)]
        return mark(drop(record, ticket, (), now_us), ticket, every, dropped_at_us=now_us)

    def give_up_all(record: Record, ticket: int, checksums: Iterable[str]) -> Record:
        every = [*checksums, *(each.checksum for each in record.states if each.dropped_at_us)]
        return mark(give_up(record, ticket, ()), ticket, every, is_deleted=True)

    plot.name(model, "drop", drop_all)
    plot.name(model, "deleted", give_up_all)


# Files ---------------------------------------------------------------------------------------------------------------


@plant("files are not compared with their checksums", SPOILT, "numbering")
def _(plot: Plot) -> None:
    plot.name(folders, "_must_be", lambda *_: None)


@plant("a state gets its name before it is synced", STATES, "numbering")
def _(plot: Plot) -> None:
    plot.name(folders, "sync", lambda _: None)


@plant("folders above a state are made and not synced", STATES, "numbering")
def _(plot: Plot) -> None:
    sync = folders.sync

    def make(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    plot.name(folders, "make_folder", make)
    plot.name(folders, "sync", lambda path: sync(path) if path.name != "x" else None)


@plant("the files of a copy are not synced", STATES, "numbering")
def _(plot: Plot) -> None:
    publish = Draft.publish

    def forget_the_copy(draft: Draft, manifest: bytes | None) -> None:
        for path in draft.folder.rglob("*.parquet"):
            if draft._target.path.endswith("/y"):
                path.write_bytes(path.read_bytes())  # the same once more, and not synced
        publish(draft, manifest)

    plot.name(Draft, "publish", forget_the_copy)


# Places, by the model ------------------------------------------------------------------------------------------------


def _dealing(plot: Plot, change: Callable[..., Any]) -> None:
    plot.name(model, "_dealt", change)


@plant("a freed place is given and stays free", SIMULATOR, "numbering")
def _(plot: Plot) -> None:
    dealt = model._dealt

    def keep_free(keys: Sequence[Any], free: Any, *given: Any) -> Any:
        places, _, sizes = dealt(keys, free, *given)
        return places, free, sizes

    _dealing(plot, keep_free)


@plant("the sizes of shards begin anew with every run", SIMULATOR, "numbering")
def _(plot: Plot) -> None:
    dealt = model._dealt

    def begin_anew(keys: Sequence[Any], free: Any, sizes: Mapping[int, int], *given: Any) -> Any:
        return dealt(keys, free, {}, *given)

    _dealing(plot, begin_anew)


@plant("a reused place is not told as such", SIMULATOR, "numbering")
def _(plot: Plot) -> None:
    dealt = model._dealt

    def hide(*given: Any) -> Any:
        places, free, sizes = dealt(*given)
        return {key: held._replace(is_reused=False) for key, held in places.items()}, free, sizes

    _dealing(plot, hide)


@plant("a key expires one run too late", SIMULATOR, "numbering")
def _(plot: Plot) -> None:
    plot.name(model, "is_expired", lambda run, seen_run, ttl_runs: run - seen_run > ttl_runs + 1)


@plant("the generation stays where places are given", SIMULATOR, "numbering")
def _(plot: Plot) -> None:
    next_version = model.next_version
    plot.name(model, "next_version", lambda before, rules, reason, _: next_version(before, rules, reason, False))


# Places, by the engine -----------------------------------------------------------------------------------------------


@plant("the engine leaves a freed place free that it has given", RUNS, "numbering")
def _(plot: Plot) -> None:
    plot.name(expressions, "still_free", lambda free, taken: free)


@plant("the engine lets a key expire one run too late", RUNS, "numbering")
def _(plot: Plot) -> None:
    overdue, kept = expressions.overdue, expressions.kept
    plot.name(expressions, "overdue", lambda places, offers, run, ttl: overdue(places, offers, run, ttl + 1))
    plot.name(
        expressions,
        "kept",
        lambda places, offers, run, ttl, **more: kept(places, offers, run, ttl + 1, **more),
    )


@plant("the engine begins at 0 in every run", RUNS, "numbering")
def _(plot: Plot) -> None:
    rows_of = running.engines.rows_of

    def begin_anew(types: Mapping[str, str], columns: Mapping[str, Sequence[Any]]) -> Any:
        if "size" in columns:
            columns = {**columns, "size": [0] * len(columns["size"])}
        return rows_of(types, columns)

    plot.name(running.engines, "rows_of", begin_anew)
