"""`keyfold settings`: every setting in force, and where its value comes from."""

import typer
from msgspec import Struct

from keyfold.cli.output import as_text
from keyfold.cli.run import safe
from keyfold.cli.session import session_of
from keyfold.core.answer import Answer
from keyfold.core.logs import redact_event

app = typer.Typer(add_completion=False)


class Setting(Struct, frozen=True):
    """A row of the table; a secret in the value is blotted out."""

    name: str
    value: object
    source: str
    description: str


@app.command()
def settings(ctx: typer.Context) -> Answer:
    """Show every setting in force: its value, where the value comes from, and what it means.

    A value comes from the command line, else from the environment (KEYFOLD_HTTP_PORT for http.port),
    else from keyfold.toml, else it is the default.
    """
    rows = [
        Setting(row.name, _shown(row.name, row.value), row.source, row.description)
        for row in session_of(ctx).settings().table
    ]
    return Answer(data=rows, table=[{**_row(row), "value": as_text(row.value)} for row in rows])


def _shown(name: str, value: object) -> object:
    blotted = redact_event(None, "", {name: value})[name]
    return safe(blotted) if isinstance(blotted, str) else blotted


def _row(row: Setting) -> dict[str, object]:
    return {"name": row.name, "value": row.value, "source": row.source, "description": row.description}
