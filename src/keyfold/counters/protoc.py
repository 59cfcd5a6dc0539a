"""Runs the compiler on a catalog. It stops at the first mistake of a counter: we step over, so that all are reported.

A mistake is noted, taken out of a copy of the file, and the copy compiled again, until the compiler is content or
complains about something that cannot be stepped over.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from msgspec import Struct

COMPILE_SECONDS_MAX = 60
ROUNDS_MAX = 50

COMPLAINT = re.compile(r"(?P<file>[^:]+):(?P<line>\d+):(?P<column>\d+): (?P<text>.*)")
IN_OPTION = re.compile(r'Error while parsing option value for "[^"]*": (.*)')
UNKNOWN_NAME = re.compile(r'Unknown enumeration value of "([^"]*)" for field "([^"]*)"')
SAME_NUMBER = "uses the same enum value as"
# What may hold a brace that is none: strings and comments.
BRACES = re.compile(r""""(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|//[^\n]*|/\*.*?\*/|[{}]""", re.DOTALL)


class Compiled(Struct, frozen=True):
    """A descriptor set, and what had to be taken out of the catalog to get it."""

    descriptors: bytes | None
    mistakes: list[str]
    unknown: dict[str, dict[str, str]]  # counter → field → the name that no enum has
    unreadable: set[str]  # counters whose whole description was taken out


def compiled(path: Path) -> Compiled:
    """Files that the catalog imports are looked for beside it."""
    found = Compiled(None, [], {}, set())
    with tempfile.TemporaryDirectory(prefix="keyfold-catalog-") as folder:
        for _ in range(ROUNDS_MAX):
            descriptors, complaints = _run(path, Path(folder))
            if descriptors is not None:
                return Compiled(descriptors, found.mistakes, found.unknown, found.unreadable)
            left = [line for line in complaints if not _step_over(line, path.parent, Path(folder), found)]
            if left or not complaints:
                break
        lines = [_readable(line) for line in left] or ["the compiler failed without a word"]
        return Compiled(None, found.mistakes + lines, found.unknown, found.unreadable)


def _run(path: Path, copies: Path) -> tuple[bytes | None, list[str]]:
    """In a process of its own: the compiler writes its complaints to the standard error of the process."""
    out = copies / "catalog.binpb"
    done = subprocess.run(  # noqa: S603
        [
            *(sys.executable, "-m", "grpc_tools.protoc", f"-I{copies}", f"-I{path.parent.absolute()}"),
            *("--include_imports", f"--descriptor_set_out={out}", path.name),
        ],
        cwd=copies,  # a file of the same name where we stand must not be taken for the catalog
        capture_output=True,
        text=True,
        errors="replace",
        timeout=COMPILE_SECONDS_MAX,
        check=False,
    )
    if done.returncode == 0 and out.exists():
        return out.read_bytes(), []
    # It names files by where they lie, the copies and the originals alike: here they go by the name of the import.
    said = done.stderr.replace(f"{copies}/", "").replace(f"{path.parent.absolute()}/", "")
    return None, [line for line in said.splitlines() if line.strip() and ": warning: " not in line]


def _step_over(line: str, folder: Path, copies: Path, found: Compiled) -> bool:
    """Note the mistake and take it out of the copy; False where that cannot be done."""
    complaint = COMPLAINT.fullmatch(line)
    if complaint is None or not _is_inside(complaint["file"]):
        return False
    copy = copies / complaint["file"]
    # The compiler counts columns in bytes: in Latin-1 a character is a byte.
    text = (copy if copy.exists() else folder / complaint["file"]).read_text("latin-1")
    start = _offset(text, int(complaint["line"]), int(complaint["column"]))
    if SAME_NUMBER in complaint["text"]:
        changed = _with_aliases(text, start)
    elif in_option := IN_OPTION.match(complaint["text"]):
        changed = _without(text, start, in_option[1], found)
    else:
        return False
    if changed == text:
        return False
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(changed, "latin-1")
    return True


def _is_inside(file: str) -> bool:
    """Whether a name stays inside the folder it is joined to: an original must never be written to."""
    return not Path(file).is_absolute() and ".." not in Path(file).parts


def _without(text: str, start: int, reason: str, found: Compiled) -> str:
    """Without one field whose value is an unknown name, or else without the whole description of the counter."""
    counter, end = _counter_at(text, start), _end_of_block(text, start)
    if counter is None or end is None:
        return text
    block = text[start:end]
    if unknown := UNKNOWN_NAME.match(reason):
        name, field = unknown[1], unknown[2]
        shorter = re.sub(rf"\b{field}\s*:\s*{re.escape(name)}(?!\w)", _blank, block, count=1)
        if shorter != block:
            found.unknown.setdefault(counter, {})[field] = name
            return text[:start] + shorter + text[end:]
    found.mistakes.append(f"{counter}: {reason}")
    found.unreadable.add(counter)
    return text[:start] + "{" + _blanked(block[1:-1]) + "}" + text[end:]


def _with_aliases(text: str, start: int) -> str:
    """A number used twice is allowed, for the catalog to report it."""
    opened = list(re.finditer(r"\benum\s+\w+\s*\{", text[:start]))
    return f"{text[: opened[-1].end()]} option allow_alias = true;{text[opened[-1].end() :]}" if opened else text


def _offset(text: str, line: int, column: int) -> int:
    """Where a line and column, both from 1, stand in the text; for the compiler a tab fills up to eight columns."""
    lines = text.split("\n")
    before, wanted = sum(len(each) + 1 for each in lines[: line - 1]), lines[line - 1]
    return before + next((i for i in range(len(wanted)) if len(wanted[:i].expandtabs(8)) >= column - 1), len(wanted))


def _counter_at(text: str, start: int) -> str | None:
    """The name of the enum value whose options are open at this place."""
    opened = list(re.finditer(r"(\w+)\s*=\s*\w+\s*\[", text[:start]))
    return opened[-1][1] if opened else None


def _end_of_block(text: str, start: int) -> int | None:
    depth = 0
    for match in BRACES.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0 and match[0] == "}":
            return match.end()
    return None


def _blank(match: re.Match[str]) -> str:
    return _blanked(match[0])


def _blanked(text: str) -> str:
    """Lines stay where they are, for the complaints of the next round."""
    return re.sub(r"[^\n]", " ", text)


def _readable(line: str) -> str:
    complaint = COMPLAINT.fullmatch(line)
    return f"{complaint['file']}, line {complaint['line']}: {complaint['text']}" if complaint else line
