"""The root of the command line: what `keyfold --help` says, and where each command lives."""

import sys
from typing import Annotated

import typer
from typer.main import get_command

from keyfold import __version__
from keyfold.cli.lazy import Later, LazyGroup, read_plainly

HELP = """
Keyfold keeps exact, bounded state per key, folded from events. Each event
counts once, whatever crashes or is delivered twice: state, dedupe marks,
source position and outgoing messages commit in one transaction. A SQLite file
is enough to start; PostgreSQL, Citus, Kafka and ZooKeeper are for growing up.

The parts of a marketplace; those with commands below are here, the others are coming:

  profiles      decaying counters about a person, owned data held back
  order stats   exact order counts per identity and dimension, with backfill
  segments      the difference of two snapshots, streamed into versioned sets
  numbering     a lasting shard and number for every offer
  listings      drafts, offers, feeds, counts and an ordered export
  tally         a number per key: the walking example

First commands to type:

  keyfold serve --demo                 the product on http://127.0.0.1:8080
  keyfold tally add apples 3           change something in ./keyfold.db
  keyfold tally get apples             read it
  keyfold topics tail tally-changes    see the message that the change sent
  keyfold token create me --scope read
  keyfold settings                     every setting and where it comes from
"""

RUN, OPERATE, PARTS = "Run", "Operate", "Parts"


def root() -> LazyGroup:
    """The whole command line; rich help on a terminal, plain text otherwise."""
    rich = sys.stdout.isatty()
    # Plain help would refill the lines of a paragraph that does not start with \b.
    text = HELP if rich else "\b" + HELP.replace("\n\n", "\n\n\b\n")
    app = typer.Typer(cls=LazyGroup, help=text, rich_markup_mode="rich" if rich else None)
    app.callback()(_keyfold)
    group = get_command(app)
    assert isinstance(group, LazyGroup)
    for command in _own():
        group.add_command(command)
    group.more = _of_parts
    read_plainly(group)
    return group


def _own() -> list[Later]:
    return [
        Later("serve", "keyfold.cli.serve:app", "Serve HTTP, and work, until stopped.", is_group=False, panel=RUN),
        Later("work", "keyfold.cli.work:app", "Run the workers' loops alone.", is_group=False, panel=RUN),
        Later(
            "store", "keyfold.cli.store:app", "The schema: upgrade, status, distribute.", is_group=True, panel=OPERATE
        ),
        Later(
            "token", "keyfold.cli.token:app", "Tokens of HTTP clients: create, list, …", is_group=True, panel=OPERATE
        ),
        Later(
            "topics",
            "keyfold.cli.topics:app",
            "Messages: list, tail, replay; dead letters.",
            is_group=True,
            panel=OPERATE,
        ),
        Later(
            "settings",
            "keyfold.cli.settings:app",
            "Every setting in force and its source.",
            is_group=False,
            panel=OPERATE,
        ),
    ]


def _of_parts() -> list[Later]:
    from keyfold.parts import PARTS as PARTS_OF_PRODUCT

    return [
        Later(
            part.command_name or part.name,
            part.commands,
            f"{part.summary[0].upper()}{part.summary[1:]}.",
            is_group=True,
            panel=PARTS,
        )
        for part in PARTS_OF_PRODUCT
        if part.commands
    ]


def _version(asked: bool) -> None:
    if asked:
        print(f"keyfold {__version__}")
        raise typer.Exit


def _keyfold(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Replaced by HELP."""
