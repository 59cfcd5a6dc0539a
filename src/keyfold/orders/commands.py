"""The commands of order statistics, in process on the store."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import typer
from msgspec import Struct

from keyfold.core.answer import Answer, printable
from keyfold.core.context import Context
from keyfold.core.errors import BadInput, TooLarge
from keyfold.core.times import iso, moment_us

if TYPE_CHECKING:
    from keyfold.orders.model import Identity, Property
    from keyfold.orders.service.history import History
    from keyfold.orders.service.unit import Unit

app = typer.Typer(
    no_args_is_help=True, help="Order statistics: query, check, fill history, add identities and dimensions."
)

REASONS_MAX = 10  # that a redrive tells of

T = TypeVar("T")

UnitOption = Annotated[str, typer.Option("--unit", metavar="UNIT", help="Which unit.")]
Identities = Annotated[
    list[str], typer.Argument(metavar="TYPE=VALUE...", help="whose orders: phone_id=12345 card_id=77")
]
Filters = Annotated[
    list[str] | None, typer.Option("--filter", metavar="NAME=VALUE", help="Only orders with this value; repeat it.")
]
HistoryOption = Annotated[
    str | None, typer.Option("--from", metavar="FILES", help="Parquet files of completed orders: orders/*.parquet.")
]


class UnitShown(Struct, frozen=True):
    """How a unit stands."""

    unit: str
    topic: str
    dimensions: list[str]
    splitting: str | None
    late_before: str
    identities: list[dict[str, Any]]
    jobs: dict[str, Any]


@app.command()
def status(ctx: typer.Context, unit: UnitOption = "rides") -> Answer:
    """Show how a unit stands.

    What it counts by, its starts, and how far its long work is.
    """
    from keyfold.orders.service.jobs import progress_of
    from keyfold.orders.service.reading import is_complete

    context, own = _unit(ctx, unit)

    def look(tx: Any) -> UnitShown:
        stood = own.stood(tx)
        return UnitShown(
            unit=own.name,
            topic=own.topic,
            dimensions=stood.state.dimensions,
            splitting=stood.state.splitting.dimension if stood.state.splitting else None,
            late_before=iso(own.late_before_us(stood, tx.now_us)),
            identities=[
                {
                    "identity": each.name,
                    "start": None if each.start_us is None else iso(each.start_us),
                    "history": each.source or ("pending" if each.has_history else "none"),
                    "filled_at": None if each.filled_at_us is None else iso(each.filled_at_us),
                    "lacking": max(each.lacking, int(each.is_behind)),
                    "is_complete": is_complete(each),
                }
                for each in stood.state.identities
            ],
            jobs={name: msgspec.to_builtins(each) for name, each in progress_of(tx, own).items()},
        )

    shown = context.store.read(look)
    lines = [f"dimensions: {', '.join(shown.dimensions)}", f"orders created before {shown.late_before} are late"]
    if shown.splitting:
        lines.append(f"the dimension {shown.splitting} is being added: keyfold orders add-dimension {shown.splitting}")
    for name, each in shown.jobs.items():
        state = "done" if each["is_done"] else "not finished"
        lines.append(f"{name}: {state} {' '.join(f'{key}={value}' for key, value in each['numbers'].items())}")
    return Answer(data=shown, table=shown.identities, lines=lines)


@app.command()
def query(
    ctx: typer.Context,
    identities: Identities,
    filters: Filters = None,
    group_by: Annotated[
        list[str] | None, typer.Option("--group-by", metavar="NAME", help="Tell counts apart by this; repeat it.")
    ] = None,
    evidence: Annotated[bool, typer.Option("--evidence", help="Tell what the counts rest on.")] = False,
    unit: UnitOption = "rides",
) -> Answer:
    """Count the completed orders of identities."""
    from keyfold.orders.service.lagging import Lag
    from keyfold.orders.service.reading import Evidence, Query, evidence_of, must_be_known, read_orders

    context, own = _unit(ctx, unit)
    whose = _identities(identities, context.limits.batch_items_max)
    asked = Query(whose, _properties(filters), group_by or [])
    context.store.read(lambda tx: must_be_known(own.seen(tx).state, asked))
    found: list[Evidence] = []
    if evidence:  # before the counts: what comes in between is then counted, and never neither counted nor told of
        lag = Lag(context).messages(own)
        found = context.store.read(lambda tx: evidence_of(tx, own, asked.identities, lag))
    read = context.store.read(lambda tx: read_orders(tx, own, asked))
    if evidence:
        read = [msgspec.structs.replace(one, evidence=two) for one, two in zip(read, found, strict=True)]
    rows = [
        {
            "identity": f"{one.identity.type}={one.identity.value}",
            **{each.name: each.value for each in item.properties},
            "orders": item.counter_value,
        }
        for one in read
        for item in one.data
    ]
    none = [f"{one.identity.type}={one.identity.value}: no orders" for one in read if not one.data]
    told = [
        f"{one.identity.type}={one.identity.value}: counted from {one.evidence.counted_from or 'never'} to "
        f"{one.evidence.counted_to or 'never'}, history {one.evidence.history}, "
        f"{'complete' if one.evidence.is_complete else 'not complete'}, "
        f"{'?' if one.evidence.lag_messages is None else one.evidence.lag_messages} orders wait"
        for one in read
        if one.evidence is not None
    ]
    return Answer(data={"data": read}, table=rows, lines=[*none, *told])


@app.command()
def check(
    ctx: typer.Context,
    identities: Identities,
    fewer_than: Annotated[int | None, typer.Option(min=1, metavar="N", help="Every identity has fewer orders.")] = None,
    at_least: Annotated[int | None, typer.Option(min=1, metavar="N", help="Every identity has so many orders.")] = None,
    filters: Filters = None,
    reserve: Annotated[str | None, typer.Option(metavar="ORDER_ID", help="Hold a place for this order.")] = None,
    seconds: Annotated[int, typer.Option(min=1, help="How long the place is held.")] = 600,
    allow_incomplete: Annotated[bool, typer.Option(help="Answer although history is not counted yet.")] = False,
    unit: UnitOption = "rides",
) -> Answer:
    """Check for the first N orders.

    Whether every identity has fewer (or at least) so many; exits with 1 where not.
    """
    from keyfold.core.errors import KeyfoldError
    from keyfold.orders.model import Text
    from keyfold.orders.service.checking import CHECKED_MAX, Check, check_orders, must_be_check

    context, own = _unit(ctx, unit)
    whose = _identities(identities, CHECKED_MAX)
    held = None if reserve is None else _converted(reserve, Text, "--reserve")
    asked = Check(whose, _properties(filters), fewer_than, at_least, held, seconds, allow_incomplete)

    def work(tx: Any) -> Any:
        must_be_check(own.stood(tx).state, own, asked)
        return check_orders(tx, own, [asked])[0]

    answer = context.store.transact(work, name="orders check", once=True)
    if isinstance(answer, KeyfoldError):
        raise answer
    rows = [
        {
            "identity": f"{each.identity.type}={each.identity.value}",
            "orders": each.counter_value,
            "held": each.reserved,
        }
        for each in answer.identities
    ]
    line = "allowed" + (f", a place is held until {answer.reserved_until}" if answer.reserved_until else "")
    lines = [line if answer.allowed else f"not allowed: {answer.reason}"]
    return Answer(data=answer, table=rows, lines=lines, exit_code=0 if answer.allowed else 1)


@app.command()
def backfill(
    ctx: typer.Context,
    source: HistoryOption = None,
    identity: Annotated[
        list[str] | None, typer.Option(metavar="TYPE", help="This identity type; all that have a start if left out.")
    ] = None,
    unit: UnitOption = "rides",
) -> Answer:
    """Count history: orders from before the start.

    It may be stopped anywhere and run again at any time, also whenever history has caught up.
    """
    from keyfold.orders.service.backfilling import backfill as backfilled
    from keyfold.orders.service.backfilling import orders_to_count
    from keyfold.orders.service.history import names_of
    from keyfold.orders.service.history import opened as history_of

    context, own = _unit(ctx, unit)
    state = context.store.read(own.stood).state
    names = identity or [each.name for each in state.identities if each.has_history and each.source != "import"]
    if not names:
        raise BadInput(f"no identity type of {unit} has a start: every order counts live, there is no history to count")
    for name in names:
        state.identity(name, "--identity")
    history = history_of(own, _where(own, source), names_of(own, state, names))
    total = orders_to_count(history, [each for each in state.identities if each.name in names])
    with ctx.obj.steps("Backfill", total) as steps:
        done = backfilled(context.store, own, history, names, steps.at)
    rows = [
        {"identity": each.identity, "orders": each.orders, "cells": each.cells, "lacking": each.lacking}
        for each in done
    ]
    notes = [
        f"{each.identity}: history lacks {each.lacking} orders that arrived live: {', '.join(each.lacking_orders[:10])}"
        for each in done
        if each.lacking
    ]
    notes += [f"{each.identity}: more were left to history while it was counted" for each in done if each.is_behind]
    if notes:
        notes.append("Run it again when history has caught up.")
    return Answer(data=done, table=rows, notes=[*notes, *_before_start(context, own, names)])


@app.command(name="import")
def import_(
    ctx: typer.Context,
    path: Annotated[Path, typer.Argument(metavar="FILE", help="older documents, one JSON object a line")],
    identity: Annotated[str, typer.Option(metavar="TYPE", help="The identity type that the documents are of.")],
    settled: Annotated[
        bool, typer.Option("--settled", help="What was refused or left before is in by now, or is to be left out.")
    ] = False,
    unit: UnitOption = "rides",
) -> Answer:
    """Import the older nested documents.

    What cannot be mapped is refused and listed; then it exits with 1. History is not complete until all that was
    refused is settled.
    """
    from keyfold.orders.service.importing import import_documents

    context, own = _unit(ctx, unit)
    if not path.is_file():
        raise BadInput(f"{path} is not a plain file" if path.exists() else f"there is no file {path}")
    stamp = f"{path.resolve()} {path.stat().st_size} {path.stat().st_mtime_ns}"
    with path.open("rb") as documents:
        total = sum(1 for _ in documents)
    with ctx.obj.steps("Import", total) as steps, path.open("rb") as documents:
        done = import_documents(context.store, own, identity, documents, stamp, steps.at, is_settled=settled)
    rows = [{"line": each.line, "identity": each.identity, "reason": each.reason} for each in done.refused_documents]
    line = f"{done.documents} documents with {done.orders} orders were imported, {done.refused} refused."
    notes = []
    if done.lacking:
        notes = [
            f"The history of {identity} is not complete: at least {done.lacking} documents or orders are not known to "
            "be in it. They were refused, left to it, or in a file that was not imported to its end.",
            "When they are in, or to be left out, import the last file again, or an empty one, with --settled.",
        ]
    notes += _before_start(context, own, [identity])
    return Answer(data=done, table=rows, lines=[line], notes=notes, exit_code=1 if done.refused else 0)


@app.command(name="add-identity")
def add_identity(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="the new identity type")],
    start: Annotated[
        str | None, typer.Option(metavar="TIME", help="Orders created from then on count live; ahead of now.")
    ] = None,
    column: Annotated[str | None, typer.Option(metavar="COLUMN", help="What history calls it.")] = None,
    unit: UnitOption = "rides",
) -> Answer:
    """Count by a further identity type.

    Live from its start on; what was before by a backfill of this type alone. Run again, it can name another column.
    """
    from keyfold.orders.service.identities import add_identity as added

    context, own = _unit(ctx, unit)
    now_us = context.store.read(lambda tx: tx.now_us)
    kind = added(context.store, own, name, None if start is None else moment_us(start, now_us), column)
    if kind.start_us is None:
        return Answer(data=kind, lines=[f"{name} is there already: every order of it counts live."])
    line = f"{name} counts live orders created from {iso(kind.start_us)} on."
    after = f"After that: keyfold orders backfill --identity {name} --unit {unit} --from FILES"
    return Answer(data=kind, lines=[line, after])


@app.command(name="add-dimension")
def add_dimension(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="the new dimension")],
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="TABLE.COLUMN", help="Where history has it: orders/*.parquet.city."),
    ] = None,
    rest_as_unknown: Annotated[
        bool, typer.Option("--rest-as-unknown", help="What history cannot explain gets the value `unknown`.")
    ] = False,
    unit: UnitOption = "rides",
) -> Answer:
    """Tell orders apart by a further dimension.

    Nothing stops meanwhile; run again, it resumes where it was. Exits with 1 while cells are left that history cannot
    explain.
    """
    from keyfold.orders.service import splitting
    from keyfold.orders.service.history import names_of
    from keyfold.orders.service.history import opened as history_of

    context, own = _unit(ctx, unit)
    where, column = _table_column(own, source)
    if where is None and not rest_as_unknown:
        raise BadInput("say where history has it: --from TABLE.COLUMN", hint="Or let all be unknown: --rest-as-unknown")
    state = context.store.read(own.stood).state
    is_begun = state.splitting is not None and state.splitting.dimension == name
    if where is not None and (name not in state.dimensions or (is_begun and name not in state.columns)):
        _must_have_column(own, state, where, name, column)
    begun = splitting.switch(context.store, own, name, column)
    if begun is None:
        return Answer(data={"dimension": name, "is_done": True}, lines=[f"{name} is there already."])
    with ctx.obj.steps("Splitting", splitting.cells_to_split(context.store, own, name)) as steps:
        splitting.wait_for_writers(context.store, begun, report=steps.at)
        state = context.store.read(own.stood).state
        history: History | None = None if where is None else history_of(own, where, names_of(own, state))
        done = splitting.split(context.store, own, begun, history, steps.at, rest_as_unknown=rest_as_unknown)
    rows = [
        {
            "identity": each.identity,
            "cells": each.cells,
            "orders_before": each.orders_before,
            "orders_after": each.orders_after,
            "left": each.left,
        }
        for each in done.types
    ]
    notes = [
        f"{each.identity_type}={each.identity_value} {' '.join(f'{k}={v}' for k, v in each.properties.items())}: "
        f"counts {each.live_count} live and {each.history_count} before the start, "
        f"history has {each.live_in_history} and {each.history_in_history}"
        for each in done.unexplained[:20]
    ]
    line = (
        f"{name} can be asked for." if done.is_done else f"{name} is not done: run it again when history has caught up."
    )
    return Answer(data=done, table=rows, lines=[line], notes=notes, exit_code=0 if done.is_done else 1)


@app.command()
def correct(
    ctx: typer.Context,
    order_ids: Annotated[list[str], typer.Argument(metavar="ORDER_ID...")],
    reason: Annotated[str, typer.Option(help="Why; it stands in the audit, so it names nobody.")],
    unit: UnitOption = "rides",
) -> Answer:
    """Take back orders that were counted by mistake."""
    from keyfold.orders.model import Text
    from keyfold.orders.service.correcting import CORRECTIONS_MAX, correct_orders

    context, own = _unit(ctx, unit)
    if len(order_ids) > CORRECTIONS_MAX:
        raise BadInput(f"{len(order_ids)} orders, {CORRECTIONS_MAX} can be taken back at once")
    ids, why = _converted(order_ids, list[Text], "order_ids"), _converted(reason, Text, "--reason")
    done = context.store.transact(
        lambda tx: correct_orders(tx, own, ids, why, "command line"), name="orders correct", once=True
    )
    table = [{"order": each.order_id, "status": each.status} for each in done]
    return Answer(data=done, table=table, exit_code=1 if any(each.status == "not known" for each in done) else 0)


@app.command()
def kept(
    ctx: typer.Context,
    why: Annotated[str | None, typer.Option(metavar="WHY", help="late, before_start or set_aside.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most so many.")] = 100,
    unit: UnitOption = "rides",
) -> Answer:
    """List orders that were not counted.

    Or not for all their identities: late, created before the start, set aside.
    """
    from keyfold.orders.service.keeping import kept_orders

    if why not in (None, "late", "before_start", "set_aside"):
        raise BadInput(f"{why!r} is no reason to keep an order", hint="Write late, before_start or set_aside")
    context, own = _unit(ctx, unit)
    found = context.store.read(lambda tx: kept_orders(tx, own, why, "", limit))
    table = [
        {"order": each.order_id, "why": each.why, "created_at": each.created_at, "kept_at": each.kept_at}
        for each in found
    ]
    return Answer(data=found, table=table, lines=[] if found else ["There are none."])


@app.command()
def redrive(ctx: typer.Context, unit: UnitOption = "rides") -> Answer:
    """Count orders again that were set aside.

    For after the settings were mended: an application has its brand now, a hook works. Tells why the others cannot.
    """
    from keyfold.orders.service.keeping import redrive as driven

    context, own = _unit(ctx, unit)
    after: str | None = ""
    counts: dict[str, int] = {}
    reasons: dict[str, tuple[str, int]] = {}  # why orders did not count: the first of them, and how many
    while after is not None:
        after, verdicts = context.store.transact(partial(driven, unit=own, after=after, limit=1_000), name="redrive")
        for each in verdicts:
            counts[each.status] = counts.get(each.status, 0) + 1
            if each.reason and (each.reason in reasons or len(reasons) < REASONS_MAX):
                first, count = reasons.get(each.reason, (each.order_id, 0))
                reasons[each.reason] = (first, count + 1)
    told = ", ".join(f"{count} {status}" for status, count in sorted(counts.items())) or "none were set aside"
    notes = [
        f"{printable(reason)}: {count}, the first is {printable(first)}" for reason, (first, count) in reasons.items()
    ]
    if {"set_aside", "conflict"} & counts.keys():
        notes.append(f"Those that stay: keyfold orders kept --why set_aside --unit {unit}")
    return Answer(data=counts, lines=[told], notes=notes)


def _unit(ctx: typer.Context, name: str) -> "tuple[Context, Unit]":
    from keyfold.orders.service.unit import opened

    context: Context = ctx.obj.product(make=False)
    return context, opened(context)[name]


def _before_start(context: Context, own: "Unit", names: Sequence[str]) -> list[str]:
    """Until a start there can be more history: what was counted before it is no end, though nothing is lacking."""
    return [
        f"{each.name}: history goes on until {iso(each.start_us)}, so it is not complete. Run it again after that."
        for each in context.store.read(own.stood).state.identities
        if each.name in names and each.start_us and each.filled_at_us and each.filled_at_us < each.start_us
    ]


def _pair(text: str, what: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise BadInput(f"{text!r} is not {what}", hint="Write NAME=VALUE")
    return name, value


def _identities(given: list[str], items_max: int) -> "list[Identity]":
    from keyfold.orders.model import Identity

    if len(given) > items_max:
        raise TooLarge(f"{len(given)} identities, {items_max} are allowed", place="identities")
    pairs = [_pair(each, "an identity") for each in given]
    return _converted([{"type": name, "value": value} for name, value in pairs], list[Identity], "identities")


def _properties(given: list[str] | None) -> "list[Property]":
    from keyfold.orders.model import Property

    pairs = [_pair(each, "a filter") for each in given or ()]
    return _converted([{"name": name, "value": value} for name, value in pairs], list[Property], "filters")


def _converted(given: object, kind: type[T], place: str) -> T:
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        detail, _, at = str(error).partition(" - at ")
        raise BadInput(detail[:1].lower() + detail[1:], place=at.strip("`").replace("$", place, 1) or place) from None


def _where(unit: "Unit", given: str | None) -> str:
    where = given or unit.settings.history
    if not where:
        raise BadInput("say where history is: --from FILES", hint=f"Or set orders.units.{unit.name}.history")
    return where


def _table_column(unit: "Unit", given: str | None) -> tuple[str | None, str | None]:
    """TABLE.COLUMN: the table is Parquet files, or `history` for those that the settings name."""
    if given is None:
        return None, None
    table, dot, column = given.rpartition(".")
    if not dot or not table or not column or column == "parquet":
        raise BadInput(f"{given!r} is not TABLE.COLUMN", hint="Write orders/*.parquet.city, or history.city")
    return (_where(unit, None) if table == "history" else table), column


def _must_have_column(unit: "Unit", state: Any, where: str, name: str, column: str | None) -> None:
    """History is looked at before live counting is switched: a mistyped column must change nothing."""
    from keyfold.orders.service.history import names_of
    from keyfold.orders.service.history import opened as history_of
    from keyfold.orders.settings import why_not_name

    others = [each for each in state.dimensions if each != name]
    if why := why_not_name(name, [*state.by_name, *others]):
        raise BadInput(why)
    columns = {**state.columns, **({name: column} if column else {})}
    after = msgspec.structs.replace(state, dimensions=[*others, name], columns=columns)
    history_of(unit, where, names_of(unit, after)).must_be_sound()
