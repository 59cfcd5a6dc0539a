"""The commands of segments, in process on the store."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from keyfold.core.answer import Answer
from keyfold.core.context import Context
from keyfold.core.errors import BadInput
from keyfold.segments.model import SegmentId, Stage, UserId
from keyfold.segments.settings import SegmentsSettings

if TYPE_CHECKING:
    import pyarrow as pa

    from keyfold.core.store import Transaction
    from keyfold.segments.service.describing import SegmentShown

app = typer.Typer(no_args_is_help=True, help="Segments: snapshots, their differences, and the sets of users.")

ACTOR = "command line"
SegmentArgument = Annotated[str, typer.Argument(metavar="SEGMENT", help="which segment")]
UserArgument = Annotated[str, typer.Argument(metavar="USER", help="which user")]


@app.command()
def create(
    ctx: typer.Context,
    segment: SegmentArgument,
    title: Annotated[str, typer.Option(help="What people call it.")] = "",
    table: Annotated[str, typer.Option(metavar="NAME", help="Evaluate it over this table of segments.tables.")] = "",
    where: Annotated[str, typer.Option(metavar="SQL", help="Whoever meets this condition is in it.")] = "",
    remove_percent_max: Annotated[
        int | None, typer.Option(min=0, max=100, help="Hold a diff that removes more of its users than this.")
    ] = None,
) -> Answer:
    """Make a segment.

    Without a table its snapshots are uploaded; with one it is evaluated.
    """
    from keyfold.segments.service import describing
    from keyfold.segments.service.sources import must_be_condition

    context, settings = _opened(ctx)
    if where:
        must_be_condition(where)
    wanted = describing.Segment(
        segment_id=_segment_id(segment),
        title=title,
        source_table=table,
        condition=where,
        remove_share_max=None if remove_percent_max is None else remove_percent_max / 100,
    )
    made = context.store.transact(lambda tx: describing.create(tx, settings, wanted, ACTOR), once=True)
    further = "keyfold segments evaluate" if table else "keyfold segments upload"
    return Answer(data=made, lines=[f"{made.segment_id} is there. Next: {further} {made.segment_id}"])


@app.command()
def evaluate(
    ctx: typer.Context,
    segment: SegmentArgument,
    later: Annotated[bool, typer.Option("--later", help="Only ask for it; a worker does it.")] = False,
) -> Answer:
    """Evaluate a segment over its table, into its next snapshot."""
    from keyfold.core.workers import worker_name
    from keyfold.segments.service import evaluating

    context, settings = _opened(ctx)
    name = _segment_id(segment)
    if later:
        return _told(ctx, lambda tx: evaluating.want(tx, name), "its evaluation is asked for")
    row = evaluating.Evaluator(context, settings).evaluate(name, worker_name())
    if row is None:
        raise BadInput(f"{name} is being evaluated by a worker", hint="keyfold segments status")
    return _stands(ctx, name, f"evaluation {row.evaluation_version} waits for its diff")


@app.command()
def upload(
    ctx: typer.Context,
    segment: SegmentArgument,
    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="Parquet files, or text with an id a line; - is stdin")
    ],
    column: Annotated[str, typer.Option(help="The column of user ids in Parquet files.")] = "user_id",
    ids: Annotated[str, typer.Option(metavar="number|text", help="What the lines of text files are.")] = "number",
) -> Answer:
    """Give a segment its next snapshot: all its users, sorted.

    Numbers ascend as numbers (sort -n -u), text by its bytes (LC_ALL=C sort -u).
    """
    from keyfold.segments.service.snapshots import Snapshots
    from keyfold.segments.service.uploading import upload as take

    context, settings = _opened(ctx)
    if ids not in ("number", "text"):
        raise BadInput(f"ids are number or text, not {ids!r}", place="--ids")
    name = _segment_id(segment)
    row = take(
        context.store,
        Snapshots.of(context, settings),
        name,
        _ids(files, column, ids, settings.batch_rows),
        ", ".join(files),
    )
    return _stands(ctx, name, f"snapshot {row.evaluation_version} waits for its diff")


@app.command()
def status(
    ctx: typer.Context,
    segments: Annotated[list[str] | None, typer.Argument(metavar="[SEGMENT]...", help="all if left out")] = None,
    stage: Annotated[str | None, typer.Option(metavar="STAGE", help="Only those in this stage.")] = None,
    stuck: Annotated[bool, typer.Option("--stuck", help="Only those that wait or do not move for too long.")] = False,
) -> Answer:
    """Show where segments stand, and the queue."""
    from keyfold.segments.service import describing, queueing

    context, settings = _opened(ctx)
    wanted_stage = None if stage is None else msgspec.convert(stage.replace(" ", "_"), Stage)

    def look(tx: "Transaction") -> "tuple[list[SegmentShown], Any]":
        names = segments or describing.listed(
            tx,
            stage=wanted_stage,
            only=None,
            after="",
            count_max=settings.segments_shown_max,
            stuck_seconds=settings.stuck_seconds if stuck else None,
        )
        for each in segments or ():
            queueing.one(tx, each)
        return describing.shown(tx, settings, names), queueing.figures(tx, settings.stuck_seconds)

    shown, figures = context.store.read(look)
    lines = [f"{each.segment_id}: {each.reason}" for each in shown if each.reason]
    depth = ", ".join(f"{each.stage.replace('_', ' ')} {each.segments}" for each in figures.stages if each.segments)
    lines.append(f"queue: {depth or 'empty'}" + (f"; stuck: {', '.join(figures.stuck)}" if figures.stuck else ""))
    return Answer(data={"segments": shown, "queue": figures}, table=[_row(each) for each in shown], lines=lines)


@app.command()
def approve(
    ctx: typer.Context,
    segment: SegmentArgument,
    version: Annotated[int | None, typer.Option(min=1, help="Only if this evaluation is what is held.")] = None,
) -> Answer:
    """Let a held diff go on."""
    from keyfold.segments.service import acting

    name = _segment_id(segment)
    return _told(ctx, lambda tx: acting.approve(tx, name, version, ACTOR), "approved; a worker goes on with it")


@app.command()
def retry(ctx: typer.Context, segment: SegmentArgument) -> Answer:
    """Try again what has failed or is stuck."""
    from keyfold.segments.service import acting

    name = _segment_id(segment)
    return _told(ctx, lambda tx: acting.retry(tx, name, ACTOR), "queued again")


@app.command()
def off(ctx: typer.Context, segment: SegmentArgument) -> Answer:
    """Turn a segment off: nobody is in it any more.

    Users are cleaned as they are touched; a sweep cleans the rest.
    """
    from keyfold.segments.service import acting

    name = _segment_id(segment)
    return _told(ctx, lambda tx: acting.turn_off(tx, name, ACTOR), "turned off; keyfold segments sweep cleans all")


@app.command()
def on(ctx: typer.Context, segment: SegmentArgument) -> Answer:
    """Turn a segment on again: everybody in it enters anew."""
    from keyfold.segments.service import acting

    name = _segment_id(segment)
    return _told(ctx, lambda tx: acting.turn_on(tx, name, ACTOR), "turned on")


@app.command()
def sweep(ctx: typer.Context) -> Answer:
    """Collect what has expired from the sets of all users."""
    from keyfold.segments.service import sweeping

    context, settings = _opened(ctx)
    total = context.store.read(sweeping.users_about)
    with ctx.obj.steps("users", total) as steps:
        swept = sweeping.sweep(context, settings, steps.at)
    return Answer(data=swept, lines=[f"{swept.users} users, {swept.changed} changed"])


@app.command()
def get(ctx: typer.Context, users: Annotated[list[str], typer.Argument(metavar="USER...")]) -> Answer:
    """Show the sets of users."""
    from keyfold.segments.service.reading import read_sets

    context, _ = _opened(ctx)
    wanted = [_user_id(each) for each in users]
    found = list(context.store.read(lambda tx: read_sets(tx, wanted)).values())
    rows = [
        {
            "user": each.user_id,
            "version": each.version,
            "segments": [f"{one.segment_id}@{one.evaluation_version}" for one in each.segments],
        }
        for each in found
    ]
    return Answer(data=found, table=rows)


@app.command()
def why(ctx: typer.Context, user: UserArgument, segment: SegmentArgument) -> Answer:
    """Tell why a user is, or is not, in a segment."""
    from keyfold.segments.service import reading
    from keyfold.segments.service.snapshots import Snapshots

    context, settings = _opened(ctx)
    user_id, name = _user_id(user), _segment_id(segment)
    found = Snapshots.of(context, settings)
    told = reading.why(context.store, found, settings, user_id, name)
    where = f" (version {told.version} of the set, {told.at})" if told.version is not None else ""
    return Answer(data=told, lines=[f"{told.state.replace('_', ' ')}: {told.explanation}{where}"])


@app.command()
def history(
    ctx: typer.Context,
    user: UserArgument,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most so many versions.")] = 20,
) -> Answer:
    """Show how the set of a user changed, the newest first, within the replay window."""
    from keyfold.segments.service import reading

    context, settings = _opened(ctx)
    user_id = _user_id(user)
    found = context.store.read(lambda tx: reading.history(tx, settings.topic, user_id, count_max=limit))
    rows = [
        {
            "version": each.version,
            "at": each.at,
            "entered": each.entered,
            "left": each.left,
            "expired": each.expired,
            "pushed_out": each.pushed_out,
            "segments": len(each.segments),
        }
        for each in found
    ]
    return Answer(data=found, table=rows, lines=[] if found else [f"nothing of {user_id} within the window"])


def _opened(ctx: typer.Context) -> tuple[Context, SegmentsSettings]:
    context: Context = ctx.obj.product()
    return context, context.settings.section("segments", SegmentsSettings)


def _segment_id(text: str) -> str:
    return _is(text, SegmentId, "SEGMENT")


def _user_id(text: str) -> str:
    return _is(text, UserId, "USER")


def _is(text: str, kind: Any, place: str) -> str:
    try:
        return msgspec.convert(text, kind)  # type: ignore[no-any-return]
    except msgspec.ValidationError as error:
        raise BadInput(f"{text[:100]!r}: {error}", place=place) from None


def _ids(files: list[str], column: str, ids: str, batch_rows: int) -> "Iterator[pa.Array]":
    """The ids of all files, one after the other."""
    from keyfold.segments.service.snapshots import file_ids
    from keyfold.segments.service.uploading import line_ids

    for file in files:
        if file == "-":
            yield from line_ids(sys.stdin, ids, batch_rows)
        elif file.endswith(".parquet"):
            yield from file_ids([Path(file)], column, batch_rows)
        else:
            try:
                with Path(file).open(encoding="utf-8") as lines:
                    yield from line_ids(lines, ids, batch_rows)
            except (OSError, UnicodeDecodeError) as error:
                raise BadInput(f"the file cannot be read: {error}", place=file) from None


def _told(ctx: typer.Context, act: "Callable[[Transaction], object]", words: str) -> Answer:
    context, _ = _opened(ctx)
    context.store.transact(act, name="segment act", once=True)
    return _stands(ctx, ctx.params["segment"], words)


def _stands(ctx: typer.Context, segment_id: str, words: str) -> Answer:
    from keyfold.segments.service import describing

    context, settings = _opened(ctx)
    (shown,) = context.store.read(lambda tx: describing.shown(tx, settings, [segment_id]))
    return Answer(data=shown, lines=[f"{segment_id}: {words}"])


def _row(shown: "SegmentShown") -> dict[str, object]:
    counts = shown.counts
    return {
        "segment": shown.segment_id,
        "stage": shown.stage.replace("_", " ") if shown.is_on else "off",
        "evaluated": shown.evaluation_version,
        "diffed": shown.diff_version,
        "users": None if counts is None else counts.new_rows,
        "added": None if counts is None else counts.added,
        "removed": None if counts is None else counts.removed,
        "since": shown.in_stage_since,
        "stuck": shown.is_stuck,
    }
