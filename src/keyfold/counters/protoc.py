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
# Warnings about a file, and what the compiler logs by itself, as of each file that names no syntax.
REMARK = re.compile(r".*: warning: |WARNING: |[IW]\d{4} ")
SAME_NUMBER = "uses the same enum value as"
ALIASES = re.compile(r"\boption\s+allow_alias\b")
# What may hold anything: strings and comments.
NO_CODE = re.compile(r""""(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|//[^\n]*|/\*.*?\*/""", re.DOTALL)


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
            in_turn = sorted(complaints, key=_turn)
            stepped = {line: _step_over(line, path.parent, Path(folder), found) for line in in_turn}
            left = [line for line in complaints if stepped[line] is None]
            if left or not any(stepped.values()):
                left = left or complaints
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
    return None, [line for line in said.splitlines() if line.strip() and not REMARK.match(line)]


def _turn(line: str) -> tuple[int, int, int]:
    """Numbers used twice come last, from the end of the file: what is put in moves only what stands behind it."""
    complaint = COMPLAINT.fullmatch(line)
    if complaint is None or SAME_NUMBER not in complaint["text"]:
        return 0, 0, 0
    return 1, -int(complaint["line"]), -int(complaint["column"])


def _step_over(line: str, folder: Path, copies: Path, found: Compiled) -> bool | None:
    """Note the mistake and take it out of the copy; False where it is out already, None where that cannot be done."""
    complaint = COMPLAINT.fullmatch(line)
    if complaint is None or not _is_inside(complaint["file"]):
        return None
    copy = copies / complaint["file"]
    # The compiler counts columns in bytes: in Latin-1 a character is a byte.
    text = (copy if copy.exists() else folder / complaint["file"]).read_text("latin-1")
    start = _offset(text, int(complaint["line"]), int(complaint["column"]))
    if SAME_NUMBER in complaint["text"]:
        changed = _with_aliases(text, start)
    elif in_option := IN_OPTION.match(complaint["text"]):
        changed = _without(text, start, in_option[1], found)
    else:
        return None
    if changed is None or changed == text:
        return None if changed is None else False
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(changed, "latin-1")
    return True


def _is_inside(file: str) -> bool:
    """Whether a name stays inside the folder it is joined to: an original must never be written to."""
    return not Path(file).is_absolute() and ".." not in Path(file).parts


def _without(text: str, start: int, reason: str, found: Compiled) -> str | None:
    """Without one field whose value is an unknown name, or else without the whole description of the counter."""
    code = _code(text)
    counter, end = _counter_at(code, start), _end_of_block(code, start)
    if counter is None or end is None:
        return None
    if unknown := UNKNOWN_NAME.match(reason):
        name, field = unknown[1], unknown[2]
        if given := re.compile(rf"\b{field}\s*:\s*{re.escape(name)}(?!\w)").search(code, start, end):
            found.unknown.setdefault(counter, {})[field] = name
            return text[: given.start()] + _blanked(text[given.start() : given.end()]) + text[given.end() :]
    found.mistakes.append(f"{counter}: {reason}")
    found.unreadable.add(counter)
    return text[: start + 1] + _blanked(text[start + 1 : end - 1]) + text[end - 1 :]


def _with_aliases(text: str, start: int) -> str | None:
    """A number used twice is allowed, for the catalog to report it."""
    code = _code(text)
    begin, end = _start_of_block(code, start), _end_of_block(code, start, depth=1)
    if begin is None or end is None:
        return None
    if ALIASES.search(code, begin, end):
        return text  # put in for another number of the same enum
    return f"{text[: end - 1]} option allow_alias = true;{text[end - 1 :]}"


def _offset(text: str, line: int, column: int) -> int:
    """Where a line and column, both from 1, stand in the text; for the compiler a tab fills up to eight columns."""
    lines = text.split("\n")
    before, wanted = sum(len(each) + 1 for each in lines[: line - 1]), lines[line - 1]
    return before + next((i for i in range(len(wanted)) if len(wanted[:i].expandtabs(8)) >= column - 1), len(wanted))


def _code(text: str) -> str:
    """The text with nothing but blanks for its strings and comments."""
    return NO_CODE.sub(lambda match: _blanked(match[0]), text)


def _counter_at(code: str, start: int) -> str | None:
    """The name of the enum value whose options are open at this place."""
    opened = list(re.finditer(r"(\w+)\s*=\s*-?\s*\w+\s*\[", code[:start]))
    return opened[-1][1] if opened else None


def _start_of_block(code: str, start: int) -> int | None:
    """Where the innermost block that is open at a place begins."""
    opened: list[int] = []
    for match in re.finditer("[{}]", code[:start]):
        if match[0] == "{":
            opened.append(match.start())
        elif opened:
            opened.pop()
    return opened[-1] if opened else None


def _end_of_block(code: str, start: int, depth: int = 0) -> int | None:
    """Where a block ends: the next one, or the one that so many blocks are open in already."""
    for match in re.compile("[{}]").finditer(code, start):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return match.end()
    return None


def _blanked(text: str) -> str:
    """Lines stay where they are, for the complaints of the next round."""
    return re.sub(r"[^\n]", " ", text)


def _readable(line: str) -> str:
    complaint = COMPLAINT.fullmatch(line)
    return f"{complaint['file']}, line {complaint['line']}: {complaint['text']}" if complaint else line
