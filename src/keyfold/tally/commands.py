"""The commands of the tally, in process on the store."""

from typing import Annotated

import msgspec
import typer

from keyfold.core.context import Context
from keyfold.tally import service
from keyfold.tally.model import Addition, Key, Tally

app = typer.Typer(no_args_is_help=True, help="Tallies: a number per key.")


@app.command(context_settings={"ignore_unknown_options": True})
def add(
    ctx: typer.Context,
    key: Annotated[str, typer.Argument(help="what is tallied")],
    number: Annotated[int, typer.Argument(metavar="[N]", help="what to add; may be negative")] = 1,
) -> Tally:
    """Add to a tally, and announce its new value."""
    addition = msgspec.convert({"key": key, "add": number}, Addition)
    context: Context = ctx.obj.product()
    return context.store.transact(lambda tx: service.add(tx, context.topics, [addition])[key], once=True)


@app.command()
def get(ctx: typer.Context, keys: Annotated[list[str], typer.Argument(metavar="KEY...")]) -> list[Tally]:
    """Read tallies; a key never changed is at 0."""
    wanted, context = msgspec.convert(keys, list[Key]), ctx.obj.product()
    return list(context.store.read(lambda tx: service.read(tx, wanted)).values())
