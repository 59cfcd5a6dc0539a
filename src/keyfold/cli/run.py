"""Running a command line: whatever goes wrong becomes one clear line on stderr and an exit code."""

import json
import os
import re
import signal
import sys
from collections.abc import Sequence

import typer
from msgspec import ValidationError

from keyfold.cli.root import root
from keyfold.core.errors import BadInput, KeyfoldError

FAILED, WRONG_USAGE, INTERRUPTED, PIPE_CLOSED = 1, 2, 130, 141


def run(arguments: Sequence[str]) -> int:
    """Run one command line to its exit code."""
    as_json = "--json" in arguments
    # As Ctrl-C: what is held is handed back, what was half written is taken away.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        answer = root().main(args=list(arguments), prog_name="keyfold", standalone_mode=False)
        sys.stdout.flush()
        return answer if isinstance(answer, int) else 0
    except KeyfoldError as error:
        _say(as_json, error.slug, error.detail, error.place, error.hint)
        return FAILED
    except ValidationError as error:
        # A value that a part's own types refuse: "Expected `int` <= 5 - at `$.add`".
        detail, _, place = str(error).partition(" - at ")
        _say(as_json, BadInput.slug, detail[:1].lower() + detail[1:], place.strip("`"), None)
        return FAILED
    except typer.TyperException as error:
        return _wrong_usage(error, as_json)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        _forget_stdout()
        return PIPE_CLOSED
    except Exception as error:
        return _unexpected(error, as_json)


def _wrong_usage(error: typer.TyperException, as_json: bool) -> int:
    """One line, with the command whose help says more; a group without a command has shown its help already."""
    text = error.format_message()
    if type(error).__name__ == "NoArgsIsHelpError":
        if text:
            print(text)
        return WRONG_USAGE
    # "No such command 'x'. Did you mean 'y'?" reads as one sentence after the name of the program.
    text = re.sub(r"\s+", " ", text).rstrip(".")
    context = getattr(error, "ctx", None)
    hint = f"Try: {context.command_path} --help" if context is not None else getattr(error, "hint", None)
    _say(as_json, "usage", text[:1].lower() + text[1:], None, hint)
    return error.exit_code


def _unexpected(error: Exception, as_json: bool) -> int:
    if os.environ.get("KEYFOLD_LOG_LEVEL", "").lower() == "debug":
        import traceback

        print(safe("".join(traceback.format_exception(error))), file=sys.stderr, end="")
        hint = "This is a bug: please report it with the lines above"
    else:
        hint = "Set KEYFOLD_LOG_LEVEL=debug to see where it happened"
    first_line = (str(error).strip().splitlines() or [""])[0]
    _say(as_json, "unexpected", f"unexpected {type(error).__name__}: {first_line}".rstrip(": "), None, hint)
    return FAILED


def _say(as_json: bool, slug: str, detail: str, place: str | None, hint: str | None) -> None:
    detail, place, hint = safe(detail), safe(place or ""), safe(hint or "")
    if as_json:
        line = json.dumps({"error": slug, "detail": detail, "place": place or None, "hint": hint or None})
    else:
        end = "" if detail.endswith(("?", "!")) and not place else "."
        line = f"keyfold: {detail}{f' (at {place})' if place else ''}{f'{end} {hint}' if hint else ''}"
    print(line, file=sys.stderr)


def safe(text: str) -> str:
    """One line's worth of text without passwords and tokens. A password reaches to the last @ of its word."""
    from keyfold.core.logs import redact

    return redact(re.sub(r"(://[^:/@\s]*:)\S*@", r"\1***@", text))


def _forget_stdout() -> None:
    """Whoever read our output has gone; the interpreter's last flush must not complain about it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
