"""The commands of profiles, in process on the store."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import Struct

from keyfold.core.answer import Answer, printable
from keyfold.core.context import Context
from keyfold.core.errors import BadInput
from keyfold.core.times import iso, moment_us
from keyfold.core.workers import consumer_named

if TYPE_CHECKING:
    from keyfold.profiles.service.product import Product

app = typer.Typer(no_args_is_help=True, help="Profiles: read, explain, replay a log, export.")

Type = Annotated[str, typer.Argument(metavar="TYPE", help="the type of the profile: user, banner, …")]
Id = Annotated[str, typer.Argument(metavar="ID")]


class Shown(Struct, frozen=True):
    """One key of one counter."""

    counter: str
    counter_id: int
    key: int
    value: float | int  # unix seconds where the counter keeps times
    is_time: bool = False


class Got(Struct, frozen=True, omit_defaults=True):
    """A profile as this command line shows it: every counter, restricted ones too, nothing that is held back."""

    type: str
    id: str
    version: int
    counters: list[Shown]
    segments: list[str]
    problem: str = ""  # why its counters cannot be read


@app.command()
def get(
    ctx: typer.Context,
    profile_type: Type,
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="the ids of one person; their profiles are merged")],
    counter: Annotated[list[str] | None, typer.Option(metavar="NAME_OR_ID", help="This counter only.")] = None,
    now: Annotated[bool, typer.Option("--now", help="Values decayed to now, not as of each key's time.")] = False,
) -> Answer:
    """Read a profile, or several of one person merged: every counter, and nothing that is held back."""
    from keyfold.counters.catalog import Kind, id_or_name
    from keyfold.profiles.model import profile_id_of
    from keyfold.profiles.service.reading import read_profiles, view_of
    from keyfold.profiles.settings import ClientView

    product, context = _product(ctx)
    everything = ClientView(
        restrictions=tuple(c.restriction for c in product.catalog.counters.values() if c.restriction)
    )
    view = view_of(product, everything, [id_or_name(each) for each in counter] if counter else None, at_now=now)
    _must_be_type(product, profile_type)
    keys = [(profile_type, profile_id_of(each)) for each in ids]
    (read,) = context.store.snapshot(lambda tx: read_profiles(tx, product, [(keys, view)]))
    shown = [
        Shown(
            product.catalog[counter_id].name, counter_id, key, value, product.catalog[counter_id].kind is Kind.FIXED32
        )
        for pack in read.packs
        for counter_id, (_, values) in zip(pack.counter_ids, pack.rows, strict=True)
        for key, value in zip(pack.keys, values, strict=True)
    ]
    got = Got(profile_type, ids[0], read.version, shown, [name for name, _ in read.segments], read.problem)
    head = f"{profile_type} {', '.join(printable(each) for each in ids)}: "
    head += f"version {read.version}" if read.version or shown else "nothing is known"
    segments = [f"segments: {', '.join(printable(each) for each in got.segments)}"] if got.segments else []
    notes = [f"its counters cannot be read: {printable(read.problem)}"] if read.problem else []
    return Answer(data=got, table=[_row(each) for each in shown], lines=[head, *segments], notes=notes)


@app.command()
def explain(
    ctx: typer.Context,
    profile_type: Type,
    profile_id: Id,
    counter: Annotated[str | None, typer.Option(metavar="NAME_OR_ID", help="What shares keys with this one.")] = None,
    key: Annotated[int | None, typer.Option(min=0, help="This key only.")] = None,
) -> Answer:
    """Tell what of a profile is held back, since when, until when, and what it waits for."""
    from keyfold.counters.catalog import id_or_name
    from keyfold.profiles.model import profile_id_of
    from keyfold.profiles.service.explaining import explain as explained

    product, context = _product(ctx)
    _must_be_type(product, profile_type)
    which = None if counter is None else id_or_name(counter)
    profile = (profile_type, profile_id_of(profile_id))
    held = context.store.snapshot(lambda tx: explained(tx, product, profile, which, key))
    table = [
        {
            "counter": each.counter or each.counter_id,
            "key": each.key,
            "owner": each.owner,
            "value": each.value,
            "time": iso(each.time * 1_000_000),
            "held_since": iso(each.held_since_us),
            "held_until": iso(each.held_until_us),
            "waits_for": each.waits_for,
        }
        for each in held
    ]
    return Answer(data=held, table=table, lines=[] if held else ["Nothing of it is held back."])


@app.command()
def replay(
    ctx: typer.Context,
    log: Annotated[str, typer.Argument(metavar="LOG", help="the log whose events are to be read again")],
    from_position: Annotated[int | None, typer.Option(min=0, metavar="N", help="Begin at this position.")] = None,
    from_time: Annotated[
        str | None, typer.Option(metavar="TIME", help="Begin here: 2026-11-15T20:30:00Z, -2h, '2h ago'.")
    ] = None,
) -> Answer:
    """Let the events of a log be read again from a place on; those counted before are known by their marks.

    For after a mistake in a handler, or an outage: what was refused or never read is counted, nothing twice.
    """
    from keyfold.core import replay as core_replay
    from keyfold.profiles.worker import consumer_name

    if (from_position is None) == (from_time is None):
        raise BadInput("say where to begin: --from-position N or --from-time TIME, one of them")
    product, context = _product(ctx)
    if log not in product.handlers.logs:
        raise BadInput(f"there is no log {log!r}", hint=f"Handlers read: {', '.join(product.handlers.logs) or 'none'}")
    now_us = context.store.read(lambda tx: tx.now_us)
    start = core_replay.Start(
        position=from_position, time_us=None if from_time is None else moment_us(from_time, now_us)
    )
    moved = core_replay.set_back(context, consumer_named(context, consumer_name(log)), start, actor="command line")
    again = sum(each.before - each.after for each in moved)
    return Answer(data=moved, lines=[f"{again} messages of {product.topic_of(log)} are read again."])


@app.command()
def export(
    ctx: typer.Context,
    path: Annotated[Path, typer.Argument(metavar="FILE", help="a Parquet file; replaced whole when it is done")],
    profile_type: Annotated[str | None, typer.Option("--type", metavar="TYPE", help="Profiles of this type.")] = None,
) -> Answer:
    """Export profiles to Parquet: type, id, version, and the message `Profile`."""
    from keyfold.profiles.service.exporting import export as exported
    from keyfold.profiles.service.exporting import pages_of

    product, context = _product(ctx)
    if profile_type is not None:
        _must_be_type(product, profile_type)
    pages = context.store.read(lambda tx: pages_of(tx, profile_type))
    with ctx.obj.steps("Exporting", pages) as steps:
        done = exported(
            context.store,
            product,
            path,
            profile_type=profile_type,
            report=lambda count: steps.step(f"{count} profiles"),
        )
    notes = [f"{done.broken} profiles could not be read and were left out."] if done.broken else []
    return Answer(data=done, lines=[f"{done.profiles} profiles are in {done.path}."], notes=notes)


def _product(ctx: typer.Context) -> "tuple[Product, Context]":
    from keyfold.profiles.service.product import opened

    context: Context = ctx.obj.product(make=False)
    return opened(context), context


def _must_be_type(product: "Product", profile_type: str) -> None:
    if not product.knows_type(profile_type):
        known = ", ".join(product.catalog.profile_types) or "none; set profiles.catalog"
        raise BadInput(f"there is no profile type {profile_type!r}", hint=f"Known: {known}")


def _row(shown: Shown) -> dict[str, object]:
    value = iso(int(shown.value) * 1_000_000) if shown.is_time else shown.value
    return {"counter": shown.counter, "id": shown.counter_id, "key": shown.key, "value": value}
