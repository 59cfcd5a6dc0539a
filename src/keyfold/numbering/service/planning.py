"""What a run, a compaction or another sharding scheme would do, before anything is done."""

from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from keyfold.bulk import engines
from keyfold.bulk.folders import Root
from keyfold.numbering import model
from keyfold.numbering.service import running, states
from keyfold.numbering.service.running import Request
from keyfold.numbering.service.states import Manifest, Shard, Stored, Summary


class ShardPlan(Struct, frozen=True):
    """One shard: as it is (or would be after a run), and as a compaction would leave it."""

    shard_id: int
    places: int  # how far it reaches: its maximum + 1
    offers: int  # of the input
    holes: int
    ratio: float | None  # places by offers
    compacted: int
    bytes_saved: int
    is_over: bool


class Moves(Struct, frozen=True):
    """Offers that would get another place, or another shard."""

    offers: int
    places: int
    shards: int


class Plan(Struct, frozen=True):
    """What is to be expected."""

    version: str
    run: Summary | None  # what a run with these offers would do; None where no offers were given
    would_rebuild: str  # why a run would compact by itself; empty if it would not
    shards: list[ShardPlan]
    holes: int
    bytes_saved: int
    invalidated: str  # the data that a compaction would make useless
    moves: Moves | None  # by a compaction, or by the scheme that was asked for


def of_state(state: Stored, rebuild_ratio: float, bytes_per_place: int) -> Plan:
    """From what the state says of itself: at once, whatever its size."""
    return _plan(state.manifest, None, state.manifest.shards, rebuild_ratio, bytes_per_place, None, None)


def of_run(request: Request, bytes_per_place: int) -> Plan:
    """A run with these offers, and a rebuild, done aside and thrown away."""
    assert request.before is not None
    with engines.scratch_folder("keyfold-plan", request.scratch) as folder:
        keeping = structs.replace(
            request,
            target=Root(str(folder / "run")),
            path="",
            is_forced=False,
            rebuild_ratio=float("inf"),
            scheme=request.before.manifest.scheme,
        )
        run = running.run(keeping)
        rebuilt = running.run(structs.replace(request, target=Root(str(folder / "rebuilt")), path="", is_forced=True))
        moves = _moves(rebuilt, request.megabytes_max, folder)
    compacted = {shard.shard_id: shard.top for shard in rebuilt.manifest.shards}
    return _plan(
        request.before.manifest,
        run.manifest.summary,
        run.manifest.shards,
        request.rebuild_ratio,
        bytes_per_place,
        compacted,
        moves,
    )


def _plan(
    before: Manifest,
    run: Summary | None,
    shards: list[Shard],
    ratio: float,
    bytes_per_place: int,
    compacted: dict[int, int] | None,
    moves: Moves | None,
) -> Plan:
    after = compacted if compacted is not None else {shard.shard_id: shard.input for shard in shards}
    known = {shard.shard_id: shard for shard in shards}
    rows = [
        _shard_plan(known.get(number, Shard(number, 0, 0, 0, 0, 0)), after.get(number, 0), ratio, bytes_per_place)
        for number in sorted(known.keys() | after.keys())
    ]
    over = [row.shard_id for row in rows if row.is_over]
    version = model.Version.parse(before.version)
    return Plan(
        before.version,
        run,
        f"shards {', '.join(map(str, over[:10]))} reach beyond {ratio:g} times their offers" if over else "",
        rows,
        sum(row.holes for row in rows),
        sum(row.bytes_saved for row in rows),
        f"all data of {version.type}.{version.scheme}.{version.rebuild}, generations 0 to {version.generation}",
        moves,
    )


def _shard_plan(shard: Shard, compacted: int, ratio: float, bytes_per_place: int) -> ShardPlan:
    return ShardPlan(
        shard.shard_id,
        shard.top,
        shard.input,
        shard.holes,
        round(shard.top / shard.input, 3) if shard.input else None,
        compacted,
        (shard.top - compacted) * bytes_per_place,
        shard.places > 0 and model.must_rebuild({0: shard.top}, {0: shard.input}, ratio),
    )


def _moves(rebuilt: Stored, megabytes_max: int, scratch: Path) -> Moves:
    with (
        states.at_hand(rebuilt, ("remap",), scratch) as files,
        engines.opened("duckdb", job="plan", megabytes_max=megabytes_max, scratch=scratch) as engine,
    ):
        remap: Any = states.table(engine, files, "remap")
        shards = remap.old_shard_id != remap.shard_id
        counted = remap.aggregate(
            offers=remap.count(),
            places=(shards | (remap.old_doc_id != remap.doc_id)).cast("int64").sum(),
            shards=shards.cast("int64").sum(),
        )
        row = engine.rows(counted)[0]
    return Moves(*(int(row[name] or 0) for name in ("offers", "places", "shards")))
