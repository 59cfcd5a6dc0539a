"""`python -m bench [NAME…]`: runs benchmarks, prints their tables, keeps the results, refreshes bench/README.md."""

import argparse
import datetime
import importlib
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import msgspec
from msgspec import Struct

import bench
from bench.harness import Measured, Outcome, Race, Verdict, figure, run_race, table
from bench.machine import Machine, look

HERE = Path(__file__).parent
RESULTS = HERE / "results"
README = HERE / "README.md"
NOT_BENCHMARKS = {"__main__", "growth", "harness", "listings", "machine", "redis_server", "serving", "stores"}
HEADING = "# Results of the last run"
ROUNDS = 5
ROUNDS_MIN = 3


class Report(Struct, frozen=True, kw_only=True):
    """One run of one benchmark, as it is kept."""

    name: str
    summary: str
    finished_at: str
    rounds: int
    quick: bool
    machine: Machine
    outcomes: list[Outcome]


def main() -> int:
    options = _options()
    known = benchmarks()
    # A number is enough: b2 is b2_profile_updates.
    options.names = [next((each for each in known if each.startswith(f"{name}_")), name) for name in options.names]
    if unknown := [name for name in options.names if name not in known]:
        print(f"There is no benchmark {unknown[0]}. Known: {', '.join(known)}", file=sys.stderr)
        return 2
    if options.list:
        for name, summary in known.items():
            print(f"{name:18} {summary}")
        return 0
    failed = False
    if not options.only_write:
        machine = look(HERE)
        print(f"{machine_line(machine)}\n", flush=True)
        for name in options.names or known:
            failed |= not _run(name, known[name], options.rounds, options.quick, machine)
    if options.write or options.only_write:
        README.write_text(refreshed(README.read_text(), kept()))
        print(f"wrote {README}")
    return 1 if failed else 0


def benchmarks() -> dict[str, str]:
    """Every benchmark with the first sentence of its file, which is not imported for it."""
    found = {}
    for module in sorted(pkgutil.iter_modules(bench.__path__), key=lambda each: _place(each.name)):
        if module.name not in NOT_BENCHMARKS and not module.name.startswith("_") and not module.ispkg:
            text = (HERE / f"{module.name}.py").read_text()
            found[module.name] = text.split('"""')[1].split("\n\n")[0].replace("\n", " ").strip()
    return found


def _place(name: str) -> tuple[int, int, str]:
    """b2 before b12, both before those without a number."""
    digits = name[1:].partition("_")[0] if name.startswith("b") else ""
    return (0, int(digits), name) if digits.isdigit() else (1, 0, name)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", metavar="NAME", nargs="*", help="benchmarks to run; without a name, all")
    parser.add_argument("--list", action="store_true", help="name the benchmarks and run nothing")
    parser.add_argument("--rounds", type=_rounds, default=None, help=f"rounds of each race (default {ROUNDS})")
    parser.add_argument("--quick", action="store_true", help="less work and three rounds: to see that it runs")
    parser.add_argument("--write", action="store_true", help="refresh bench/README.md from the newest results")
    parser.add_argument("--only-write", action="store_true", help="refresh it and run nothing")
    options = parser.parse_args()
    options.rounds = options.rounds or (ROUNDS_MIN if options.quick else ROUNDS)
    return options


def _rounds(text: str) -> int:
    if int(text) < ROUNDS_MIN:
        raise argparse.ArgumentTypeError(f"a median needs at least {ROUNDS_MIN} rounds")
    return int(text)


def _run(name: str, summary: str, rounds: int, quick: bool, machine: Machine) -> bool:
    """Run one benchmark and keep what it came to; one that breaks does not take the others with it."""
    print(f"== {name}: {summary}", flush=True)
    module = importlib.import_module(f"bench.{name}")
    outcomes: list[Outcome] = []
    whole = True
    try:
        for race in races(module, quick):
            print(f"\n{race.title}", flush=True)
            outcomes.append(run_race(race, rounds, lambda line: print(line, flush=True)))
            print("\n".join(shown(outcomes[-1])), flush=True)
    except Exception:
        traceback.print_exc()
        whole = False
    if outcomes:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        report = Report(
            name=name,
            summary=summary,
            finished_at=now,
            rounds=rounds,
            quick=quick,
            machine=machine,
            outcomes=outcomes,
        )
        RESULTS.mkdir(exist_ok=True)
        encoded = msgspec.json.format(msgspec.json.encode(report), indent=1)
        (RESULTS / f"{name}{'.quick' if quick else ''}.json").write_bytes(encoded + b"\n")
    print(flush=True)
    return whole


def races(module: ModuleType, quick: bool) -> Iterator[Race]:
    make: Callable[[bool], Iterator[Race]] = module.races
    return make(quick)


def shown(outcome: Outcome) -> Iterator[str]:
    yield ""
    yield from table([["side", outcome.unit, "spread"], *(_side_row(side) for side in outcome.sides)])
    if outcome.verdicts:
        yield ""
        yield from table([VERDICT_HEADING, *(_verdict_row(verdict) for verdict in outcome.verdicts)])


VERDICT_HEADING = ["ratio", "reached", "rounds", "must", "moonshot", "grade"]


def _side_row(side: Measured) -> list[str]:
    return [side.name, figure(side.median), f"{side.spread:.0%}"]


def _verdict_row(verdict: Verdict) -> list[str]:
    mark = "×" if verdict.against else ""
    what = f"{verdict.side} / {verdict.against}" if verdict.against else verdict.side
    return [
        f"{what} ({verdict.note})" if verdict.note else what,
        f"{figure(verdict.reached)}{mark}",
        f"{figure(verdict.low)}–{figure(verdict.high)}",
        _wanted(verdict.must, mark),
        _wanted(verdict.moonshot, mark),
        verdict.grade,
    ]


def _wanted(value: float | None, mark: str) -> str:
    return "–" if value is None else f"{value:g}{mark}"


def kept() -> list[Report]:
    """The newest full results of every benchmark that still exists."""
    paths = [RESULTS / f"{name}.json" for name in benchmarks()]
    return [msgspec.json.decode(path.read_bytes(), type=Report) for path in paths if path.exists()]


def machine_line(machine: Machine) -> str:
    message = f", a message to another process and back {machine.round_trip_microseconds:.0f} µs"
    return (
        f"{machine.cores} cores ({machine.processor}), {machine.memory_gigabytes} GB, Linux {machine.kernel}; "
        f"a sync of the disk takes {machine.sync_microseconds_median:.0f} µs (99 %: "
        f"{machine.sync_microseconds_high:.0f} µs){message if machine.round_trip_microseconds else ''}; "
        f"load before: {machine.load_before:.1f}"
    )


RESULTS_INTRODUCTION = f"""{HEADING}

Written by `python -m bench --write`, which leaves what was not run here as it is; goals are those of the project's
performance table. A ratio inside one run counts; an absolute number is only as good as the machine, which was shared
while this ran. Nothing in the tests asserts a time. `rounds` gives the lowest and the highest ratio of a single round.
"""
SECTION = "\n## "


def refreshed(text: str, reports: list[Report]) -> str:
    """The page with the results of these reports; those of other benchmarks stay, of whichever machine they are."""
    introduction, _, results = text.partition(HEADING)
    sections = {each.partition("\n")[0]: each.strip() for each in results.split(SECTION)[1:]}
    sections |= {report.name: "\n".join(section(report)) for report in reports}
    found = [sections[name] for name in benchmarks() if name in sections]
    return introduction + RESULTS_INTRODUCTION + "".join(f"{SECTION}{each}\n" for each in found)


def section(report: Report) -> Iterator[str]:
    yield report.name
    yield ""
    yield report.summary
    yield ""
    yield f"{report.finished_at}, {report.rounds} rounds, commit {report.machine.commit or 'unknown'}."
    yield f"{machine_line(report.machine)}."
    yield "Versions: " + ", ".join(f"{name} {version}" for name, version in report.machine.versions.items()) + "."
    for outcome in report.outcomes:
        yield ""
        yield f"**{outcome.title}**"
        yield ""
        yield from _markdown([["side", outcome.unit, "spread"], *(_side_row(side) for side in outcome.sides)])
        if outcome.verdicts:
            yield ""
            yield from _markdown([VERDICT_HEADING, *(_verdict_row(verdict) for verdict in outcome.verdicts)])


def _markdown(rows: list[list[str]]) -> Iterator[str]:
    for number, row in enumerate(rows):
        yield "| " + " | ".join(row) + " |"
        if number == 0:
            yield "|" + "---|" * len(row)


if __name__ == "__main__":
    sys.exit(main())
