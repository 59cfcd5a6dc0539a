"""The commands of the catalog: what counters there are, and what a change of them does to stored data."""

import math
from typing import Annotated

import typer
from msgspec import Struct

from keyfold.core.answer import Answer
from keyfold.core.errors import SettingsWrong
from keyfold.counters.catalog import VALUE_FUNCTIONS, Catalog, Counter, Group, id_or_name
from keyfold.counters.compile import EXAMPLE, load
from keyfold.counters.lint import SEVERITIES, Finding, keys_of
from keyfold.counters.lint import lint as compared
from keyfold.counters.model import WEEK_SECONDS

app = typer.Typer(no_args_is_help=True, help="Counters: what the catalog has, and what changing it does.")

FUNCTIONS = {kind: function for function, kind in VALUE_FUNCTIONS.items()}
SETTING = "profiles.catalog"


class Shown(Struct, frozen=True, kw_only=True):
    """A counter for programs, in the words of the catalog where those are its own."""

    id: int
    name: str
    profile_type: str
    group_id: int
    keys: str
    value_function: str
    decay_factor: float
    half_life_seconds: float | None
    time_counter_id: int | None
    shares_keys_with: list[int]
    max_records: int | None
    expire_days: int | None
    max_delayed_records: int | None
    input_types: tuple[str, ...]
    usage_restriction: str | None
    no_operation: bool
    not_glued: bool
    idf: bool
    description: str


@app.command()
def show(
    ctx: typer.Context,
    catalog: Annotated[str | None, typer.Argument(help="a .proto file or a descriptor set")] = None,
    counter: Annotated[
        str | None,
        typer.Option("--counter", metavar="NAME_OR_ID", help="This counter alone, with all there is to say."),
    ] = None,
) -> Answer:
    """Show the counters of a catalog, by the keys they share.

    Without CATALOG it is the one that the setting profiles.catalog names.
    """
    loaded = load(catalog or _catalog_in_force(ctx))
    if counter is not None:
        one = _shown(loaded[id_or_name(counter)], loaded)
        return Answer(data=one, lines=_details(one))
    rows = [_shown(each, loaded) for group in _ordered(loaded) for each in _members(group)]
    return Answer(data=rows, lines=[line for group in _ordered(loaded) for line in _block(group)])


@app.command()
def lint(
    old: Annotated[str, typer.Argument(help="the catalog that stored profiles were written with")],
    new: Annotated[str, typer.Argument(help="the catalog that is to replace it")],
) -> Answer:
    """Tell what a change of the catalog does to stored data.

    The exit code is 1 where something breaks or is lost.
    """
    findings = compared(load(old), load(new))
    counts = {severity: sum(finding.severity == severity for finding in findings) for severity in SEVERITIES}
    summary = ", ".join(f"{severity}: {count}" for severity, count in counts.items())
    return Answer(
        data=findings,
        lines=[line for finding in findings for line in _explained(finding)],
        notes=[summary if findings else "Nothing that stored profiles or their readers would notice."],
        exit_code=1 if counts["breaks"] or counts["loses"] else 0,
    )


@app.command()
def example() -> Answer:
    """Print a catalog to start from: keyfold counters example > counters.proto"""
    text = EXAMPLE.read_text(encoding="utf-8")
    return Answer(data={"catalog": text}, lines=[text.rstrip("\n")])


def _catalog_in_force(ctx: typer.Context) -> str:
    row = next((row for row in ctx.obj.settings().table if row.name == SETTING), None)
    if row is None or not row.value:
        raise SettingsWrong(
            f"no CATALOG was given, and the setting {SETTING} is empty",
            hint="For one to start from: keyfold counters example > counters.proto",
        )
    return str(row.value)


def _ordered(catalog: Catalog) -> list[Group]:
    return sorted(catalog.groups.values(), key=lambda group: (group.profile_type, group.id))


def _members(group: Group) -> list[Counter]:
    return [*group.values, *([group.time] if group.time else [])]


def _shown(counter: Counter, catalog: Catalog) -> Shown:
    group = catalog.group_of(counter.id)
    return Shown(
        id=counter.id,
        name=counter.name,
        profile_type=counter.profile_type,
        group_id=group.id,
        keys=keys_of(counter),
        value_function=FUNCTIONS[counter.kind],
        decay_factor=counter.decay,
        half_life_seconds=_half_life_seconds(counter),
        time_counter_id=counter.time_counter_id,
        shares_keys_with=[each for each in group.counter_ids if each != counter.id],
        max_records=group.records_max,
        expire_days=group.time.expire_days if group.time else None,
        max_delayed_records=group.delayed_records_max,
        input_types=counter.input_types,
        usage_restriction=counter.restriction,
        no_operation=counter.no_operation,
        not_glued=counter.not_glued,
        idf=counter.idf,
        description=counter.description,
    )


def _details(shown: Shown) -> list[str]:
    """All fields, one a line; those that say nothing are left out."""
    fields = [(name.replace("_", " "), getattr(shown, name)) for name in shown.__struct_fields__]
    said = [(name, value) for name, value in fields if value is not None and value != () and value != []]
    width = max(len(name) for name, _ in said)
    return [f"{name.ljust(width)}  {_text(value)}" for name, value in said]


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _block(group: Group) -> list[str]:
    """A group as a paragraph: what its counters have in common, then each of them."""
    first = group.time or group.values[0]
    limits = [
        f"at most {group.records_max} keys" if group.records_max else "",
        f"each for {group.time.expire_days} days" if group.time and group.time.expire_days else "",
        f"{group.delayed_records_max} owned updates held back" if group.delayed_records_max else "",
    ]
    kept = ", ".join(filter(None, limits)) or "kept for good"
    restricted = f"; only with the grant {first.restriction}" if first.restriction else ""
    width = max(len(counter.name) for counter in _members(group))
    lines = [f"{group.profile_type}: {keys_of(group)}; {kept}{restricted}"]
    for counter in _members(group):
        lines.append(f"  {counter.id:>6}  {counter.name.ljust(width)}  {_nature(counter, group)}")
        if counter.description:
            lines.append(f"          {counter.description}")
    return [*lines, ""]


def _nature(counter: Counter, group: Group) -> str:
    half_life = _half_life_seconds(counter)
    flags = [
        FUNCTIONS[counter.kind],
        f"decay {counter.decay:g} (halves in {_span(half_life)})" if half_life else "",
        "the time of the others" if counter is group.time and group.values else "",
        f"from {', '.join(counter.input_types)}" if counter.input_types else "",
        "not written by handlers" if counter.no_operation else "",
        "not glued" if counter.not_glued else "",
        "idf" if counter.idf else "",
    ]
    return ", ".join(filter(None, flags))


def _half_life_seconds(counter: Counter) -> float | None:
    return math.log(2) / counter.decay * WEEK_SECONDS if counter.decay else None


def _span(seconds: float) -> str:
    for unit, length in (("weeks", 604_800), ("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} seconds"


def _explained(finding: Finding) -> list[str]:
    lines = [
        f"{finding.severity.ljust(6)}  {finding.counter} ({finding.id}): {finding.change}",
        f"        {finding.effect}",
    ]
    return [*lines, f"        → {finding.advice}"] if finding.advice else lines
