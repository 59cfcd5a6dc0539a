"""The tutorial and the pages are true: every command in them runs, and prints what they say."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
MARK = "=== next command ==="


def commands(text: str) -> list[tuple[str, str]]:
    """Each command, which may go on in lines that begin with `> `, and the output it promises."""
    found: list[tuple[str, str]] = []
    for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            first, *rest = part.split("\n")
            more = list(itertools.takewhile(lambda line: line.startswith("> "), rest))
            command = "\n".join([first, *(line[2:] for line in more)])
            found.append((command, "\n".join(rest[len(more) :]).strip()))
    return found


def matches(promised: str, printed: str) -> bool:
    """`…` in a promise stands for anything."""
    pattern = ".*".join(re.escape(piece) for piece in promised.split("…"))
    return re.fullmatch(pattern, printed, re.DOTALL) is not None


@pytest.mark.spec("CORE-15", "CORE-19", "CORE-20", "CORE-22")
@pytest.mark.parametrize("page", ["tutorial.md", "segments.md", "numbering.md", "listings.md"])
def test_every_command_of_a_page_prints_what_it_promises(page: str, tmp_path: Path) -> None:
    steps = commands((DOCS / page).read_text(encoding="utf-8"))
    script = "\n".join(f"echo '{MARK}'\n{command}" for command, _ in steps)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment = {name: value for name, value in environment.items() if not name.startswith("KEYFOLD_")}
    ran = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    printed = [each.strip() for each in ran.stdout.split(MARK)[1:]]
    assert len(printed) == len(steps), ran.stdout + ran.stderr
    for (command, promised), got in zip(steps, printed, strict=True):
        assert matches(promised, got), f"$ {command}\npromised:\n{promised}\nprinted:\n{got}\n{ran.stderr}"
