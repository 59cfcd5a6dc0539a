"""The commands of numbering: runs over files, masters under the coordinator, and what can be asked of states."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from keyfold.core.answer import Answer
from keyfold.core.errors import BadInput
from keyfold.core.times import iso
from keyfold.numbering.model import SUMMARY_WORDS, Key, Place, Version, stands
from keyfold.numbering.settings import NumberingSettings, scheme_numbered, type_named, type_numbered

if TYPE_CHECKING:
    from keyfold.core.context import Context
    from keyfold.numbering.service.finding import Found
    from keyfold.numbering.service.planning import Plan
    from keyfold.numbering.service.states import Stored

app = typer.Typer(
    no_args_is_help=True, help="Numbering: a persistent place <shard_id, doc_id> for every offer, versioned T.S.V.G."
)

TypeOption = Annotated[str, typer.Option("--type", metavar="NAME", help="Which type of numbering.types.")]
StateOption = Annotated[
    str, typer.Option("--state", metavar="PATH", help="A state by its folder; the last published one if not said.")
]
ClusterOption = Annotated[str, typer.Option("--cluster", metavar="NAME", help="Read it from this cluster.")]
MasterOption = Annotated[
    str, typer.Option("--master", metavar="NAME", help="What the lock shows; host and process if not said.")
]
OffersOption = Annotated[
    str,
    typer.Option(
        "--input-offers-table", metavar="PATH", help="This generation's offers: a Parquet file, folder or pattern."
    ),
]
ShopsOption = Annotated[
    str,
    typer.Option(
        "--input-shops-dat-file-path", metavar="FILE", help="The shops' parameters, for schemes that use them."
    ),
]
SchemeOption = Annotated[
    int | None,
    typer.Option("--output-sharding-scheme", metavar="S", min=0, help="The sharding scheme; another one reshards."),
]
ForceOption = Annotated[
    bool,
    typer.Option(
        "--rebuild-state-force",
        "--force-rebuild-state",
        help="Deal all places anew, dense from 0, to this input alone.",
    ),
]
ShrunkenOption = Annotated[
    bool, typer.Option("--allow-shrunken-input", help="Go on though the input is empty or much smaller than the last.")
]
EngineOption = Annotated[str, typer.Option("--engine", metavar="duckdb|spark", help="What computes it.")]
ACTOR = "command line"
T = TypeVar("T")


@app.command()
def run(
    ctx: typer.Context,
    input_offers_table: OffersOption,
    output_state_table: Annotated[
        str, typer.Option(metavar="PATH", help="The folder of the new state; it must not be there.")
    ],
    input_state_table: Annotated[
        str, typer.Option(metavar="PATH", help="The state before; left out for the first run.")
    ] = "",
    input_shops_dat_file_path: ShopsOption = "",
    intermediate_new_docs_table: Annotated[
        str, typer.Option(metavar="PATH", help="Copy the table of new documents there, too.")
    ] = "",
    intermediate_expired_docs_table: Annotated[
        str, typer.Option(metavar="PATH", help="Copy the table of expired documents there, too.")
    ] = "",
    output_sharding_scheme: SchemeOption = None,
    output_primary_medium: Annotated[
        str, typer.Option(metavar="NAME", help="Put the state below the folder that numbering.media has for it.")
    ] = "",
    rebuild_state_force: ForceOption = False,
    allow_shrunken_input: ShrunkenOption = False,
    engine: EngineOption = "",
    type_name: TypeOption = "main",
) -> Answer:
    """Number the offers of a generation: one state in, one state out, files only.

    Known keys keep their places, new ones take freed places and the next, keys that were away too long are let go.
    """
    from keyfold.bulk.folders import Root
    from keyfold.numbering.service import running, states

    settings = _settings(ctx)
    own = type_named(settings, type_name)
    before = states.read(Root(input_state_table)) if input_state_table else None
    number = output_sharding_scheme
    if number is None:
        number = before.manifest.scheme.number if before else own.scheme
    request = running.asked(
        settings,
        offers=input_offers_table,
        shops=input_shops_dat_file_path or own.shops,
        before=before,
        target=Root(_on_medium(settings, output_primary_medium, output_state_table)),
        type=own.number,
        scheme=number,
        is_forced=rebuild_state_force,
        is_shrinking_allowed=allow_shrunken_input,
        engine=_engine(engine or settings.engine),
        new_docs=intermediate_new_docs_table,
        expired_docs=intermediate_expired_docs_table,
    )
    with ctx.obj.steps("number", None) as steps:
        state = running.run(request, steps.step)
    return _told(state)


@app.command("run-master")
def run_master(
    ctx: typer.Context,
    cluster: Annotated[
        str, typer.Option(metavar="NAME", help="The cluster of this master, of numbering.clusters.")
    ] = "",
    input_offers_table: OffersOption = "",
    input_shops_dat_file_path: ShopsOption = "",
    output_sharding_scheme: SchemeOption = None,
    rebuild_state_force: ForceOption = False,
    allow_shrunken_input: ShrunkenOption = False,
    wait_seconds_max: Annotated[
        int | None, typer.Option(min=0, help="Give up if the lock cannot be had for so long; never if not said.")
    ] = None,
    master: MasterOption = "",
    type_name: TypeOption = "main",
) -> Answer:
    """Run under the coordinator's lock: copy the last state here, run, copy the new one to a second cluster, publish.

    Without a table of offers those of the topic numbering.offers_topic are taken.
    """
    from keyfold.bulk import engines
    from keyfold.core.workers import worker_name
    from keyfold.numbering.service import building, mastering

    context, settings = _opened(ctx)
    own = type_named(settings, type_name)
    if not cluster and len(settings.clusters) > 1:
        raise BadInput("say which cluster is yours", place="--cluster", hint=f"One of {', '.join(settings.clusters)}")
    worker = mastering.Master(
        context, settings, type_name, cluster or next(iter(settings.clusters)), master or worker_name()
    )
    named = input_offers_table or own.offers
    if not named and not settings.offers_topic:
        raise BadInput("no offers are named", place="--input-offers-table", hint="Or set numbering.offers_topic")
    with ctx.obj.steps("number", None) as steps, engines.scratch_folder("keyfold-offers", _scratch(settings)) as folder:

        def built() -> str:
            table = building.build_offers(context.store, str(folder / "offers"))
            steps.step(f"{table.offers} offers of {settings.offers_topic}")
            return table.path

        published = worker.run(
            named or built,
            input_shops_dat_file_path or own.shops,
            scheme=output_sharding_scheme,
            is_forced=rebuild_state_force,
            is_shrinking_allowed=allow_shrunken_input,
            wait_seconds_max=float("inf") if wait_seconds_max is None else wait_seconds_max,
            tell=steps.step,
        )
    return Answer(
        data=published,
        lines=[
            f"{published.version}: {SUMMARY_WORDS[published.reason]}; {published.known} known, {published.new} new"  # type: ignore[index]
            f" ({published.reused} on freed places), {published.expired} expired, {published.holes} holes",
            f"on {', '.join(published.clusters)} at {published.path}",
        ],
    )


@app.command()
def plan(
    ctx: typer.Context,
    state: StateOption = "",
    input_offers_table: OffersOption = "",
    input_shops_dat_file_path: ShopsOption = "",
    output_sharding_scheme: SchemeOption = None,
    type_name: TypeOption = "main",
    cluster: ClusterOption = "",
) -> Answer:
    """Show what a compaction would save and make useless; with offers also what a run would do, exactly.

    With --output-sharding-scheme it is the preview of a resharding: how many offers would move. Nothing is changed.
    """
    from keyfold.bulk.folders import Root
    from keyfold.numbering.service import planning, running

    settings = _settings(ctx)
    own = type_named(settings, type_name)
    found = _asked_of(ctx, state, type_name, cluster, _verified if input_offers_table else _as_it_is)
    if output_sharding_scheme is not None and not input_offers_table:
        raise BadInput("a resharding is previewed with the offers", place="--input-offers-table")
    if not input_offers_table:
        return _planned(planning.of_state(found, settings.rebuild_ratio, settings.bytes_per_place))
    number = found.manifest.scheme.number if output_sharding_scheme is None else output_sharding_scheme
    request = running.asked(
        settings,
        offers=input_offers_table,
        shops=input_shops_dat_file_path or own.shops,
        before=found,
        target=Root("."),
        type=found.version.type,
        scheme=number,
        is_shrinking_allowed=True,
    )
    return _planned(planning.of_run(request, settings.bytes_per_place))


@app.command()
def find(
    ctx: typer.Context,
    what: Annotated[
        list[str],
        typer.Argument(metavar="WHAT...", help="Keys BUSINESS/SHOP/WAREHOUSE/OFFER, or places SHARD:DOC."),
    ],
    state: StateOption = "",
    type_name: TypeOption = "main",
    cluster: ClusterOption = "",
) -> Answer:
    """Look up the places of keys and the keys of places, by the index of a state, which is built if it is missing."""
    from keyfold.numbering.service import finding

    settings = _settings(ctx)
    keys = [_key(each) for each in what if "/" in each]
    places = [_place(each) for each in what if "/" not in each]

    def look(found: "Stored") -> "tuple[str, dict[Key, Found], dict[Place, Found]]":
        finding.build(found, settings.engine_megabytes_max, _scratch(settings))
        return found.manifest.version, *finding.look_up(found, keys, places)

    version, by_key, by_place = _asked_of(ctx, state, type_name, cluster, look)
    rows = [by_key[key] for key in keys if key in by_key] + [by_place[place] for place in places if place in by_place]
    lacking = [
        f"{key.business_id}/{key.shop_id}/{key.warehouse_id}/{key.offer_id}" for key in keys if key not in by_key
    ]
    lacking += [f"{place.shard_id}:{place.doc_id}" for place in places if place not in by_place]
    return Answer(
        data={"version": version, "found": rows, "not_found": lacking},
        table=[{name: getattr(row, name) for name in row.__struct_fields__} for row in rows],
        lines=[f"{each}: not in {version}" for each in lacking],
        exit_code=1 if lacking and not rows else 0,
    )


@app.command()
def compatible(
    ctx: typer.Context,
    data: Annotated[str, typer.Argument(metavar="T.S.V.G", help="The version that the data were made for.")],
    state: StateOption = "",
    type_name: Annotated[
        str, typer.Option("--type", metavar="NAME", help="Which type of numbering.types; that of the version's T.")
    ] = "",
    cluster: ClusterOption = "",
) -> Answer:
    """Tell whether data fit a state: yes, no, or yes except the places that were reassigned since.

    Without a state the newest published one is taken that the data fit; the exit code is 1 if there is none.
    """
    from keyfold.numbering.service import comparing

    settings = _settings(ctx)
    version = Version.parse(data)
    compare = partial(
        comparing.compatible,
        data=version,
        places_max=settings.exceptions_max,
        megabytes_max=settings.engine_megabytes_max,
        scratch=_scratch(settings),
    )
    named = type_name or ("" if state else type_numbered(settings, version.type))
    told = _asked_of(ctx, state, named, cluster, compare, version)
    shown = [{"shard": each.shard_id, "doc": each.doc_id} for each in told.places[:PLACES_SHOWN]]
    more = [f"… and {told.reassigned - len(shown)} more; --json lists them"] if told.reassigned > len(shown) else []
    return Answer(
        data=told,
        table=shown,
        lines=[*more, f"{told.answer}: {told.explanation} (state {told.state})"],
        exit_code=1 if told.answer == "no" else 0,
    )


PLACES_SHOWN = 20


@app.command()
def history(
    ctx: typer.Context,
    type_name: TypeOption = "main",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most so many states, the newest first.")] = 20,
) -> Answer:
    """Show the published states of a type, which is the last, and who holds the lock."""
    from keyfold.numbering.service import coordinating

    context, settings = _opened(ctx)
    type_named(settings, type_name)
    record = coordinating.look(context.leases, type_name)
    lease = coordinating.holder(context.leases, type_name)
    rows = [
        {
            "version": each.version,
            "run": each.run,
            "at": iso(each.published_at_us),
            "ticket": each.ticket,
            "clusters": each.clusters,
            "known": each.known,
            "new": each.new,
            "expired": each.expired,
            "holes": each.holes,
            "why": each.reason,
            "stands": f"invalid: {each.invalid}" if each.invalid else stands(each, record),
        }
        for each in reversed(record.states[-limit:])
    ]
    lines = [] if rows else [f"no state of {type_name} was published yet"]
    if lease is not None:
        since = (
            f" since {iso(record.taken.taken_at_us)}" if record.taken and record.taken.ticket == lease.ticket else ""
        )
        lines.append(f"{lease.holder} holds the lock{since}, ticket {lease.ticket}")
    if record.is_cut:
        lines.append(f"what came after the last state is lost: the next run has V {record.rebuild_next}")
    return Answer(data={"record": record, "lock": lease}, table=rows, lines=lines)


@app.command()
def index(
    ctx: typer.Context, state: StateOption = "", type_name: TypeOption = "main", cluster: ClusterOption = ""
) -> Answer:
    """Build the look-up index of a state; one that is there is compared with what was written, and built again."""
    from keyfold.numbering.service import finding

    settings = _settings(ctx)

    def build(found: "Stored") -> str:
        finding.build(found, settings.engine_megabytes_max, _scratch(settings), is_verified=True)
        return found.manifest.version

    version = _asked_of(ctx, state, type_name, cluster, build)
    return Answer(data={"version": version}, lines=[f"{version} is indexed"])


@app.command()
def invalidate(
    ctx: typer.Context,
    why: Annotated[str, typer.Option(help="The reason, for the history.")] = "it can no longer be read",
    even_if_readable: Annotated[
        bool, typer.Option("--even-if-readable", help="Also a state that can be read, because it is wrong.")
    ] = False,
    even_if_none_is_left: Annotated[
        bool, typer.Option("--even-if-none-is-left", help="Also if no state can be read: all begins anew.")
    ] = False,
    type_name: TypeOption = "main",
) -> Answer:
    """Declare the last state invalid: the newest one that can be read becomes the last, and the next run raises V."""
    from keyfold.numbering.service import mastering

    context, settings = _opened(ctx)
    record = mastering.invalidate(
        context,
        settings,
        type_name,
        ACTOR,
        why=why,
        even_if_readable=even_if_readable,
        even_if_none_is_left=even_if_none_is_left,
    )
    current = record.current
    lines = [
        f"{current.version} is the last state again" if current else "no state is left: the next run is a first one"
    ]
    return Answer(data=record, lines=[*lines, f"the next run has V {record.rebuild_next}"])


@app.command()
def adopt(
    ctx: typer.Context,
    over: Annotated[
        bool, typer.Option("--over", help="Also where the coordinator knows states: its store was set back.")
    ] = False,
    type_name: TypeOption = "main",
) -> Answer:
    """Go on under a new coordinator from the newest state that the clusters have; the next run raises V."""
    from keyfold.numbering.service import mastering

    context, settings = _opened(ctx)
    record = mastering.adopt(context, settings, type_name, ACTOR, is_over=over)
    assert record.current is not None
    return Answer(
        data=record,
        lines=[f"{record.current.version} is the last state", f"the next run has V {record.rebuild_next}"],
    )


@app.command()
def prune(ctx: typer.Context, type_name: TypeOption = "main") -> Answer:
    """Drop the states that the policy no longer keeps, and delete what was dropped long enough ago."""
    from keyfold.numbering.service import mastering

    context, settings = _opened(ctx)
    pruned = mastering.prune(context, settings, type_name, ACTOR)
    return Answer(
        data=pruned,
        lines=[
            f"{len(pruned.dropped)} dropped, {len(pruned.deleted)} deleted, {pruned.leftovers} leftovers removed",
            *pruned.failures,
        ],
    )


@app.command()
def offers(
    ctx: typer.Context,
    output: Annotated[str, typer.Argument(metavar="PATH", help="The folder of the table; it must not be there.")],
) -> Answer:
    """Write the live offers of the topic numbering.offers_topic as a generation's table."""
    from keyfold.numbering.service import building

    context, settings = _opened(ctx)
    if not settings.offers_topic:
        raise BadInput("no topic of offers is set", hint="Set numbering.offers_topic")
    with ctx.obj.steps("offers", context.store.read(building.live_count)) as steps:
        built = building.build_offers(context.store, output, lambda count: steps.at(count, "written"))
    return Answer(data=built, lines=[f"{built.offers} offers at {built.path}"])


@app.command()
def shard(
    ctx: typer.Context,
    keys: Annotated[list[str], typer.Argument(metavar="BUSINESS/SHOP/WAREHOUSE/OFFER...")],
    scheme: Annotated[int, typer.Option(min=0, help="The number of the scheme.")] = 0,
    tier: Annotated[str, typer.Option(help="The shops' parameter, for schemes that use it.")] = "",
) -> Answer:
    """Tell the shards that a sharding scheme gives to keys."""
    from keyfold.numbering.sharding import shard_of

    chosen = scheme_numbered(_settings(ctx), scheme)
    rows = [{"key": each, "shard": shard_of(chosen, _key(each), {"tier": tier})} for each in keys]
    return Answer(data=rows, table=rows)


def _settings(ctx: typer.Context) -> NumberingSettings:
    return ctx.obj.settings().section("numbering", NumberingSettings)  # type: ignore[no-any-return]


def _opened(ctx: typer.Context) -> "tuple[Context, NumberingSettings]":
    context: Context = ctx.obj.product()
    return context, context.settings.section("numbering", NumberingSettings)


def _asked_of(
    ctx: typer.Context,
    path: str,
    type_name: str,
    cluster: str,
    work: "Callable[[Stored], T]",
    data: Version | None = None,
) -> T:
    """What work makes of a state by its folder, or of a published one: the last, or the newest that data fit."""
    from keyfold.bulk.folders import Root
    from keyfold.numbering.service import comparing, coordinating, mastering, states

    if path:
        return work(states.read(Root(path)))
    context, settings = _opened(ctx)
    type_named(settings, type_name)
    record = coordinating.look(context.leases, type_name)
    return mastering.read_anywhere(settings, comparing.chosen(record, data), work, cluster)


def _as_it_is(state: "Stored") -> "Stored":
    return state


def _verified(state: "Stored") -> "Stored":
    from keyfold.numbering.service import states

    states.verify(state)
    return state


def _told(state: "Stored") -> Answer:
    manifest = state.manifest
    summary = manifest.summary
    return Answer(
        data={
            "version": manifest.version,
            "run": manifest.run,
            "path": state.where,
            "checksum": state.checksum,
            "reason": manifest.reason,
            "summary": summary,
            "shards": manifest.shards,
        },
        table=[
            {
                "shard": each.shard_id,
                "places": each.top,
                "offers": each.input,
                "absent": each.places - each.input,
                "holes": each.holes,
                "free": each.free,
            }
            for each in manifest.shards
        ],
        lines=[
            f"{manifest.version}: {SUMMARY_WORDS[manifest.reason]}; {summary.known} known, {summary.new} new"
            f" ({summary.reused} on freed places), {summary.expired} expired, {summary.absent} absent,"
            f" {summary.holes} holes, {summary.bytes} bytes",
            f"at {state.where}",
        ],
    )


def _planned(plan: "Plan") -> Answer:
    rows = [
        {
            "shard": each.shard_id,
            "places": each.places,
            "offers": each.offers,
            "holes": each.holes,
            "ratio": each.ratio,
            "compacted": each.compacted,
            "bytes saved": each.bytes_saved,
            "over": each.is_over,
        }
        for each in plan.shards
    ]
    lines = []
    if plan.run is not None:
        lines.append(
            f"a run would keep {plan.run.known} and give {plan.run.new} places ({plan.run.reused} freed ones);"
            f" {plan.run.expired} would expire"
        )
    lines.append(
        f"it would compact by itself: {plan.would_rebuild}" if plan.would_rebuild else "no shard is over the ratio"
    )
    lines.append(
        f"a compaction would save {plan.bytes_saved} bytes ({plan.holes} holes) and invalidate {plan.invalidated}"
    )
    if plan.moves is not None:
        lines.append(
            f"of {plan.moves.offers} known offers {plan.moves.places} would get another place,"
            f" {plan.moves.shards} another shard"
        )
    return Answer(data=plan, table=rows, lines=lines)


def _key(text: str) -> Key:
    parts = text.split("/", 3)
    if len(parts) != 4 or not parts[3]:
        raise BadInput(f"{text[:100]!r} is not a key", hint="Write BUSINESS/SHOP/WAREHOUSE/OFFER")
    business, shop, warehouse = (_whole(part, text) for part in parts[:3])
    return Key(business, parts[3], shop, warehouse)


def _place(text: str) -> Place:
    parts = text.split(":")
    if len(parts) != 2:
        raise BadInput(
            f"{text[:100]!r} is neither a key nor a place", hint="Write BUSINESS/SHOP/WAREHOUSE/OFFER or SHARD:DOC"
        )
    return Place(_whole(parts[0], text, 31), _whole(parts[1], text, 31))


def _whole(text: str, whole: str, bits: int = 63) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 20 or int(text) >= 2**bits:
        raise BadInput(f"{text[:30]!r} of {whole[:100]!r} is not a number below 2^{bits}")
    return int(text)


def _engine(text: str) -> Any:
    if text not in ("duckdb", "spark"):
        raise BadInput(f"the engine is duckdb or spark, not {text[:30]!r}", place="--engine")
    return text


def _scratch(settings: NumberingSettings) -> Path | None:
    return Path(settings.scratch) if settings.scratch else None


def _on_medium(settings: NumberingSettings, medium: str, path: str) -> str:
    if not medium:
        return path
    if medium not in settings.media:
        raise BadInput(
            f"there is no medium {medium[:100]!r}",
            place="--output-primary-medium",
            hint=f"numbering.media has {', '.join(settings.media) or 'none'}",
        )
    below = settings.media[medium]
    return f"{below.rstrip('/')}/{path.lstrip('/')}" if below else path
