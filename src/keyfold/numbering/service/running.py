"""One run: the state before and this generation's offers give a new state, written aside and published whole."""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from keyfold.bulk import engines
from keyfold.bulk.engines import Engine, EngineName
from keyfold.bulk.folders import Draft, Root
from keyfold.core.errors import BadInput
from keyfold.numbering import expressions, model
from keyfold.numbering.expressions import KEY, PLACES
from keyfold.numbering.model import Reason, Rules, Version
from keyfold.numbering.service import inputs, states
from keyfold.numbering.service.states import Manifest, Shard, Stored, Summary
from keyfold.numbering.settings import NumberingSettings, scheme_numbered
from keyfold.numbering.sharding import Scheme

if TYPE_CHECKING:
    import ibis.expr.types as ir


class Request(Struct, frozen=True, kw_only=True):
    """What a run is asked to do."""

    offers: str
    shops: str = ""
    before: Stored | None = None
    target: Root
    path: str = ""
    type: int
    scheme: Scheme
    ttl_runs: int
    rebuild_ratio: float
    is_forced: bool = False
    is_shrinking_allowed: bool = False
    input_share_min: float = 0.0
    rebuild_min: int = 0
    is_restart: bool = False
    engine: EngineName = "duckdb"
    megabytes_max: int = 8_000
    scratch: Path | None = None
    new_docs: str = ""  # where to copy this table to, besides the state
    expired_docs: str = ""

    @property
    def rules(self) -> Rules:
        return Rules(
            type=self.type,
            scheme=self.scheme.number,
            ttl_runs=self.ttl_runs,
            rebuild_ratio=self.rebuild_ratio,
            is_forced=self.is_forced,
            rebuild_min=self.rebuild_min,
            is_restart=self.is_restart,
        )

    @property
    def run(self) -> int:
        return self.before.manifest.run + 1 if self.before else 1


def asked(settings: NumberingSettings, *, scheme: int, **given: Any) -> Request:
    """A request with what the settings say, and what is said with it."""
    known: dict[str, Any] = {
        "scheme": scheme_numbered(settings, scheme),
        "ttl_runs": settings.ttl_runs,
        "rebuild_ratio": settings.rebuild_ratio,
        "input_share_min": settings.input_share_min,
        "engine": settings.engine,
        "megabytes_max": settings.engine_megabytes_max,
        "scratch": Path(settings.scratch) if settings.scratch else None,
    }
    return Request(**(known | given))


class _Made(Struct, frozen=True):
    """What was written aside."""

    reason: Reason
    version: Version
    shards: list[Shard]
    summary: Summary


def run(request: Request, tell: Callable[[str], None] = lambda _: None) -> Stored:
    """Do it. `tell` hears of every step, and may stop the run by raising."""
    _must_follow(request)
    extra = [Root(url) for url in (request.new_docs, request.expired_docs) if url]
    for root in extra:
        if root.exists() and root.names():
            raise BadInput(f"{root.url} is there already", hint="Name a folder that is new")
    with request.target.failing(), _inputs(request) as (engine, before, offers):
        tell("read")
        draft = Draft(request.target, request.path, request.scratch)
        try:
            made = _numbered(request, engine, before, offers, draft, tell)
            _must_add_up(request, made)
            tell("checked")
            files = draft.files()
            summary = _with_bytes(made.summary, sum(each.bytes for each in files))
            unsealed = Manifest(
                version=str(made.version),
                run=request.run,
                scheme=request.scheme,
                reason=made.reason,
                parent=request.before.checksum if request.before else "",
                engine=request.engine,
                ttl_runs=request.ttl_runs,
                shards=made.shards,
                summary=summary,
                files=files,
            )
            manifest = states.sealed(unsealed)
            data = states.encoded(manifest)
            for url, name in ((request.new_docs, "new_docs"), (request.expired_docs, "expired_docs")):
                if url:
                    _copy_table(draft, name, Root(url))
            draft.publish(data)
        except BaseException:
            draft.drop()
            raise
    tell("written")
    return Stored(request.target, request.path, manifest, states.checksum_of(data))


@contextlib.contextmanager
def _inputs(request: Request) -> "Iterator[tuple[Engine, dict[str, ir.Table] | None, ir.Table]]":
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(
            engines.opened(
                request.engine, job="numbering", megabytes_max=request.megabytes_max, scratch=request.scratch
            )
        )
        shops = inputs.shops(request.shops, request.scheme)
        files = stack.enter_context(inputs.dataset(request.offers, request.scratch))
        before: dict[str, ir.Table] | None = None
        if request.before is not None:
            held = stack.enter_context(states.at_hand(request.before, ("places", "free"), request.scratch))
            before = {name: states.table(engine, held, name) for name in held}
        stack.enter_context(engines.failing(request.engine))
        yield engine, before, inputs.offers(engine, files, request.scheme, shops)


def _must_follow(request: Request) -> None:
    before = request.before
    if before is None:
        return
    if before.version.type != request.type:
        raise BadInput(f"the state is of type {before.version.type}, not {request.type}", place=before.where)
    known = before.manifest.scheme
    if known.number == request.scheme.number and known != request.scheme:
        raise BadInput(
            f"{known} was used for {before.where}, and is now {request.scheme}",
            hint="A scheme that changes needs a new number",
        )


def _numbered(
    request: Request,
    engine: Engine,
    before: "dict[str, ir.Table] | None",
    offers: "ir.Table",
    draft: Draft,
    tell: Callable[[str], None],
) -> _Made:
    _must_not_shrink(request, engine, offers)
    reason: Reason = ""
    if before is None or request.before is None:
        reason = "first"
    elif request.is_forced:
        reason = "forced"
    elif request.scheme.number != request.before.manifest.scheme.number:
        reason = "scheme"
    else:
        made = _moved_on(request, engine, before, offers, draft, tell)
        tops = {shard.shard_id: shard.top for shard in made.shards if shard.places}
        if not model.must_rebuild(tops, {each.shard_id: each.input for each in made.shards}, request.rebuild_ratio):
            return made
        for name in states.TABLES:
            for file in (draft.folder / name).iterdir():
                file.unlink()
            (draft.folder / name).rmdir()
        tell("too many holes")
        reason = "ratio"
    return _rebuilt(request, engine, before, offers, draft, reason, tell)


def _must_not_shrink(request: Request, engine: Engine, offers: "ir.Table") -> None:
    if request.is_shrinking_allowed:
        return
    count = int(engine.rows(offers.aggregate(rows=offers.count()))[0]["rows"])
    last = sum(shard.input for shard in request.before.manifest.shards) if request.before else 0
    if count == 0:
        raise BadInput(
            "there is no offer in the input: every place would be lost",
            place=request.offers,
            hint="If it is meant: --allow-shrunken-input",
        )
    if count < request.input_share_min * last:
        raise BadInput(
            f"the input has {count} offers, the last run had {last}",
            place=request.offers,
            hint="If it is meant: --allow-shrunken-input",
        )


def _moved_on(
    request: Request,
    engine: Engine,
    before: "dict[str, ir.Table]",
    offers: "ir.Table",
    draft: Draft,
    tell: Callable[[str], None],
) -> _Made:
    """Known keys keep their places, new ones take freed places and the next."""
    assert request.before is not None
    places, run = before["places"], request.run
    new = engine.keep(expressions.sharded(expressions.unknown(offers, places), request.scheme))
    inputs.must_be_whole(engine, new)
    inputs.must_be_unique(engine, new)
    tell("new offers found")

    expired = engine.keep(expressions.overdue(places, offers, run, request.ttl_runs))
    kept = expressions.kept(places, offers, run, request.ttl_runs, is_restart=request.is_restart)
    engine.write(kept, draft.folder / "kept")
    kept = _written(engine, draft.folder / "kept", PLACES)
    was = sum(shard.places for shard in request.before.manifest.shards)
    kept_count, expired_count = _count(engine, kept), _count(engine, expired)
    if kept_count + expired_count != was:
        inputs.must_be_unique(engine, expressions.keyed(offers))
        raise AssertionError(f"{kept_count} places kept and {expired_count} expired are not the {was} before")
    tell("places kept")

    free = engine.keep(before["free"].union(expired.select(*expressions.FREE)))
    new_by_shard = _by_shard(engine, expressions.counts(new, "new"), "new")
    free_by_shard = _by_shard(engine, expressions.counts(free, "free"), "free")
    sizes = {shard.shard_id: shard.size for shard in request.before.manifest.shards}
    sizes_after = {
        shard: sizes.get(shard, 0) + max(0, new_by_shard.get(shard, 0) - free_by_shard.get(shard, 0))
        for shard in sizes.keys() | new_by_shard.keys()
    }
    for shard, size in sorted(sizes_after.items()):
        model.must_fit(shard, size)
    new_count = sum(new_by_shard.values())
    version = model.next_version(request.before.version, request.rules, "", new_count > 0)
    shards = engines.rows_of(
        {"shard_id": "int32", "size": "int64", "free": "int64"},
        {
            "shard_id": sorted(sizes.keys() | free_by_shard.keys()),
            "size": [sizes.get(shard, 0) for shard in sorted(sizes.keys() | free_by_shard.keys())],
            "free": [free_by_shard.get(shard, 0) for shard in sorted(sizes.keys() | free_by_shard.keys())],
        },
    )
    given = expressions.dealt(new, free, shards, version.generation, run, is_restart=request.is_restart)
    given = expressions.with_types(given, PLACES)
    engine.write(given, draft.folder / "given")
    taken = engines.rows_of(
        {"shard_id": "int32", "new": "int64"},
        {"shard_id": list(new_by_shard), "new": list(new_by_shard.values())},
    )
    engine.write(expressions.still_free(free, taken), draft.folder / "left")
    engine.write(expressions.with_types(expired, PLACES), draft.folder / "gone")
    tell("places given")

    figures = _figures(engine, [draft.folder / "kept", draft.folder / "given"], run)
    reused = sum(min(count, free_by_shard.get(shard, 0)) for shard, count in new_by_shard.items())
    states.gather_files(draft, "new_docs", [_linked(draft.folder / "given")])
    states.gather_files(draft, "places", [draft.folder / "kept", draft.folder / "given"])
    states.gather_files(draft, "free", [draft.folder / "left"])
    states.gather_files(draft, "expired_docs", [draft.folder / "gone"])
    states.gather_files(draft, "remap", [])
    free_after = {shard: count - min(count, new_by_shard.get(shard, 0)) for shard, count in free_by_shard.items()}
    return _Made(
        "restart" if request.is_restart else "",
        version,
        _shards(figures, sizes_after, free_after),
        _summary(figures, new_count, reused, expired_count),
    )


def _rebuilt(
    request: Request,
    engine: Engine,
    before: "dict[str, ir.Table] | None",
    offers: "ir.Table",
    draft: Draft,
    reason: Reason,
    tell: Callable[[str], None],
) -> _Made:
    """Places are dealt anew, dense from 0, to the input's keys; others are let go."""
    inputs.must_be_whole(engine, offers)
    inputs.must_be_unique(engine, expressions.keyed(offers))
    run = request.run
    by_shard = _by_shard(engine, expressions.counts(expressions.sharded(offers, request.scheme), "new"), "new")
    for shard, size in sorted(by_shard.items()):
        model.must_fit(shard, size)
    tell("new offers found")
    engine.write(expressions.rebuilt(offers, request.scheme, run), draft.folder / "given")
    places = _written(engine, draft.folder / "given", PLACES)
    tell("places given")
    new_count, expired_count = sum(by_shard.values()), 0
    if before is not None:
        engine.write(expressions.moved(before["places"], places), draft.folder / "moved")
        engine.write(before["places"].anti_join(places.select(*KEY), KEY), draft.folder / "gone")
        engine.write(places.anti_join(before["places"].select(*KEY), KEY), draft.folder / "fresh")
        expired_count = _count(engine, _written(engine, draft.folder / "gone", PLACES))
        new_count = _count(engine, _written(engine, draft.folder / "fresh", PLACES))
    version = model.next_version(
        request.before.version if request.before else None, request.rules, reason, bool(by_shard)
    )
    figures = _figures(engine, [draft.folder / "given"], run)
    fresh = [draft.folder / "fresh"] if before is not None else [_linked(draft.folder / "given")]
    states.gather_files(draft, "new_docs", fresh)
    states.gather_files(draft, "places", [draft.folder / "given"])
    states.gather_files(draft, "free", [])
    states.gather_files(draft, "expired_docs", [draft.folder / "gone"] if before is not None else [])
    states.gather_files(draft, "remap", [draft.folder / "moved"] if before is not None else [])
    return _Made(reason, version, _shards(figures, by_shard, {}), _summary(figures, new_count, 0, expired_count))


def _must_add_up(request: Request, made: _Made) -> None:
    """Whoever has a place is counted where it was given and where it was written: both say the same, or we stop."""
    before = request.before.manifest.shards if request.before and made.reason in ("", "restart") else []
    known = {shard.shard_id: shard.unaccounted for shard in before}
    for shard in made.shards:
        if shard.unaccounted != known.get(shard.shard_id, 0) or shard.top > shard.size:
            raise BadInput(
                f"shard {shard.shard_id} has {shard.places} places in use, {shard.free} free ones and reaches to"
                f" {shard.top}, but {shard.size} were given",
                place=request.offers,
                hint="The offers must not change while they are numbered",
            )


def _written(engine: Engine, folder: Path, types: dict[str, str]) -> "ir.Table":
    files = [str(path) for path in sorted(folder.glob("*.parquet"))]
    return expressions.with_types(engine.read(files), types) if files else engines.empty(types)


def _linked(folder: Path) -> Path:
    """The same files under a second name: they are of two tables."""
    second = folder.with_name(f"{folder.name}-again")
    second.mkdir()
    for file in folder.glob("*.parquet"):
        try:
            (second / file.name).hardlink_to(file)
        except OSError:  # not every file system has a second name
            shutil.copyfile(file, second / file.name)
    return second


def _count(engine: Engine, table: "ir.Table") -> int:
    return int(engine.rows(table.aggregate(rows=table.count()))[0]["rows"])


def _by_shard(engine: Engine, table: "ir.Table", name: str) -> dict[int, int]:
    return {int(row["shard_id"]): int(row[name]) for row in engine.rows(table)}


def _figures(engine: Engine, written: list[Path], run: int) -> dict[int, dict[str, Any]]:
    files = [str(path) for folder in written for path in sorted(folder.glob("*.parquet"))]
    if not files:
        return {}
    return {int(row["shard_id"]): row for row in engine.rows(expressions.figures(engine.read(files), run))}


def _shards(figures: dict[int, dict[str, Any]], sizes: Mapping[int, int], free: Mapping[int, int]) -> list[Shard]:
    nothing = {"top": 0, "places": 0, "input": 0}
    shards = []
    for number in sorted(figures.keys() | sizes.keys()):
        top, places, seen = (int(figures.get(number, nothing)[name]) for name in ("top", "places", "input"))
        shards.append(Shard(number, sizes.get(number, 0), top, places, seen, free.get(number, 0)))
    return shards


def _summary(figures: dict[int, dict[str, Any]], new: int, reused: int, expired: int) -> Summary:
    places, tops, seen = (sum(int(each[name]) for each in figures.values()) for name in ("places", "top", "input"))
    return Summary(seen - new, places - seen, new, reused, expired, tops - seen, 0)


def _with_bytes(summary: Summary, size: int) -> Summary:
    return Summary(summary.known, summary.absent, summary.new, summary.reused, summary.expired, summary.holes, size)


def _copy_table(draft: Draft, name: str, target: Root) -> None:
    """A table for whoever asked for it under a name of its own."""
    copied = Draft(target, "", None)
    try:
        for file in sorted((draft.folder / name).iterdir()):
            shutil.copyfile(file, copied.folder / file.name)
        copied.files()
        copied.publish(None)
    except BaseException:
        copied.drop()
        raise
