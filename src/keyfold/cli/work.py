"""`keyfold work`: the workers' loops in the foreground, until told to stop."""

import os
from collections.abc import Iterator
from typing import Annotated

import typer

from keyfold.cli.run import safe
from keyfold.cli.session import session_of
from keyfold.cli.signals import stop_on_signals
from keyfold.core import memory
from keyfold.core.answer import Answer
from keyfold.core.errors import Unavailable
from keyfold.core.loops import Runner, run_until_idle
from keyfold.core.workers import chosen, loops

app = typer.Typer(add_completion=False)


@app.command()
def work(
    ctx: typer.Context,
    parts: Annotated[
        list[str] | None, typer.Argument(metavar="PART", help="The parts to work for; all if none is named.")
    ] = None,
    until_idle: Annotated[
        bool, typer.Option("--until-idle", help="End when nothing is left to do, instead of waiting for more.")
    ] = False,
) -> Iterator[Answer]:
    """Run relays, consumers and the janitor until stopped, without serving HTTP.

    Several workers share the work, on one machine or many. SIGTERM or Ctrl-C finishes the step in hand and hands
    leases back; a second one stops at once.
    """
    context = session_of(ctx).product()
    names = [part.name for part in chosen(context, parts or [])]
    made = loops(context, parts or [])
    memory.settle()
    if until_idle:
        run_until_idle(made)
        yield Answer(data={"event": "idle", "parts": names}, lines=["Nothing is left to do."])
        return
    stopping = stop_on_signals()
    runner = Runner(made)
    runner.start()
    url = safe(context.settings.store.url)
    try:
        yield Answer(
            data={
                "event": "started",
                "pid": os.getpid(),
                "store": url,
                "parts": names,
                "loops": [x.name for x in made],
            },
            lines=[f"Working on {url} for {', '.join(names)}: {len(made)} loops. Ctrl-C stops."],
        )
        stopping.wait()
        yield Answer(data={"event": "stopping"}, lines=["Finishing the step in hand; again to stop at once."])
    finally:
        # Also where nobody reads our lines any more: leases are handed back before the store is closed.
        _stop(runner, context.settings.http.stop_seconds_max)
    yield Answer(data={"event": "stopped"}, lines=["Stopped; everything held was handed back."])


def _stop(runner: Runner, seconds_max: int) -> None:
    if not runner.stop(seconds_max):
        raise Unavailable(
            f"not every loop ended within {seconds_max} seconds", hint="What they hold is free when its lease ends"
        )
