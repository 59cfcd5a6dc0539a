"""`keyfold serve`: the HTTP door, with the workers' loops beside it."""

import os
from typing import Annotated

import typer

from keyfold.cli.output import show
from keyfold.cli.session import session_of
from keyfold.core.answer import Answer

app = typer.Typer(add_completion=False)


@app.command()
def serve(
    ctx: typer.Context,
    host: Annotated[
        str | None, typer.Option(metavar="HOST", help="Address to listen on; 127.0.0.1 if not said.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(metavar="PORT", help="Port; 8080 if not said, 0 takes a free one.")
    ] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Loopback only: answer without a token.")] = False,
    no_work: Annotated[bool, typer.Option("--no-work", help="No loops here: `keyfold work` runs them.")] = False,
) -> None:
    """Serve HTTP until stopped; relays, consumers and the janitor run inside unless --no-work.

    SIGTERM or Ctrl-C answers what is under way and hands leases back; a second one stops at once.
    """
    from keyfold.core.workers import loops
    from keyfold.http import server

    session = session_of(ctx)
    options = {"http.host": host, "http.port": port, "http.demo": True if demo else None}
    context = session.product(options, keep=True)

    def ready(line: str) -> None:
        event = {"event": "ready", "url": line.split()[-1], "pid": os.getpid(), "works": not no_work}
        show(iter([Answer(data=event, lines=[f"{line}. Ctrl-C stops."])]), as_json=session.as_json)

    server.serve(context, loops=[] if no_work else loops(context), ready=ready)
