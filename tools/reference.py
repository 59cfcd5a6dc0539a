"""Writes docs/reference.md from the code: every command, setting, endpoint, metric and error. `make docs` runs it."""

import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from keyfold.cli.lazy import Later
from keyfold.cli.root import root
from keyfold.core import errors, metrics
from keyfold.core.access import SCOPES
from keyfold.core.context import Context
from keyfold.core.settings import load
from keyfold.parts import PARTS, settings_of_parts

TARGET = Path(__file__).parents[1] / "docs" / "reference.md"


def reference() -> str:
    """The whole page."""
    sections = [commands(), settings(), endpoints(), scopes(), metric_table(), problems()]
    head = "# Reference\nGenerated from the code by `make docs`; a test keeps it complete.\n"
    return "\n".join([head, *sections])


def table(title: str, columns: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [f"## {title}", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines.extend(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)
    return "\n".join(lines) + "\n"


def commands() -> str:
    group = root()
    group._add_more()
    loaded = [(name, each.load()) for name, each in group.commands.items() if isinstance(each, Later)]
    return table(
        "Commands", ("Command", "What it does"), (row for name, each in loaded for row in _commands(name, each))
    )


def _commands(name: str, command: object) -> Iterator[tuple[str, str]]:
    within = getattr(command, "commands", None)
    if within is not None:
        for each, found in within.items():
            yield from _commands(f"{name} {each}", found)
        return
    arguments = [
        each.metavar or each.name.upper()
        for each in getattr(command, "params", ())
        if each.param_type_name == "argument"
    ]
    text = str(getattr(command, "help", "") or "").strip().split("\n\n")[0].replace("\n", " ")
    yield f"`keyfold {' '.join([name, *arguments])}`", text


def settings() -> str:
    rows = (
        (f"`{row.name}`", f"`{_default(row.default)}`" if row.default != "" else "", row.description)
        for row in load(parts=settings_of_parts(), environ={}).table
    )
    return table("Settings", ("Setting", "Default", "What it is"), rows)


def _default(value: object) -> str:
    """Whatever holds others as JSON, whose order does not change from run to run, as that of a set does."""
    return msgspec.json.encode(value, order="sorted").decode() if isinstance(value, Mapping) else str(value)


def endpoints() -> str:
    with tempfile.TemporaryDirectory() as folder:
        context = Context.open(load(environ={}, options={"store.url": f"sqlite:///{folder}/keyfold.db"}), PARTS)
        routes = [route for part in PARTS if part.routes for route in part.routes(context)]
        context.close()
    rows = [(f"`{route.method} {route.path}`", f"`{route.scope}`", route.summary) for route in routes]
    rows += [
        ("`GET /healthz`", "none", "The process lives"),
        ("`GET /readyz`", "none", "The store answers with a known schema and the server is not stopping"),
        ("`GET /metrics`", "`metrics`", "Prometheus metrics"),
        ("`GET /openapi.json`", "none", "The OpenAPI 3.1 document"),
        ("`GET /docs`", "none", "The interactive page"),
    ]
    return table("Endpoints", ("Endpoint", "Scope", "What it does"), iter(rows))


def scopes() -> str:
    return table("Scopes", ("Scope", "What it allows"), ((f"`{name}`", text) for name, text in SCOPES.items()))


def metric_table() -> str:
    rows = (
        (f"`{each.name}{'_total' if each.type == 'counter' else ''}`", each.type, each.documentation)
        for each in sorted(metrics.REGISTRY.collect(), key=lambda each: each.name)
    )
    return table("Metrics", ("Metric", "Type", "What it measures"), rows)


def problems() -> str:
    rows = (
        (f"`{kind.slug}`", str(kind.status), kind.title())
        for kind in sorted(_kinds(errors.KeyfoldError), key=lambda kind: (kind.status, kind.slug))
    )
    return table("Errors", ("`/problems/…`", "Status", "Meaning"), rows)


def _kinds(kind: type[errors.KeyfoldError]) -> Iterator[type[errors.KeyfoldError]]:
    if kind.__module__ == errors.__name__:
        yield kind
    for each in kind.__subclasses__():
        yield from _kinds(each)


if __name__ == "__main__":
    page = reference()
    if "--check" in sys.argv and TARGET.read_text(encoding="utf-8") != page:
        sys.exit("docs/reference.md is not what the code says: run `make docs`")
    TARGET.write_text(page, encoding="utf-8")
