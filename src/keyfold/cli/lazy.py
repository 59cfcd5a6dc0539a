"""Commands that are known by name and imported when they are called, and what every command is given."""

import importlib
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from keyfold.cli.output import show
from keyfold.cli.session import Session

if TYPE_CHECKING:
    from typer._click import Command, Context, Parameter
    from typer.core import _TyperParameter


class Later(TyperCommand):
    """A command, or a group of commands, of which only the name and a summary are known until it is called."""

    def __init__(self, name: str, target: str, summary: str, *, is_group: bool, panel: str) -> None:
        super().__init__(name, help=summary, rich_help_panel=panel)
        self._target = target
        self._is_group = is_group

    def load(self) -> "Command":
        module, _, attribute = self._target.partition(":")
        app: typer.Typer = getattr(importlib.import_module(module), attribute)
        command = get_group(app) if self._is_group else get_command(app)
        command.name = self.name
        return command


class LazyGroup(TyperGroup):
    """The root. Its own commands are listed from the start, those of the parts when somebody asks for them."""

    more: Callable[[], Sequence[Later]]

    def list_commands(self, ctx: "Context") -> list[str]:
        self._add_more()
        return super().list_commands(ctx)

    def resolve_command(self, ctx: "Context", args: list[str]) -> "tuple[str | None, Command | None, list[str]]":
        if args[0] not in self.commands:
            self._add_more()
        name, command, rest = super().resolve_command(ctx, args)
        if isinstance(command, Later):
            command = command.load()
            self._equip(command)
        return name, command, rest

    def _add_more(self) -> None:
        for command in self.more():
            self.commands.setdefault(str(command.name), command)

    def _equip(self, command: "Command") -> None:
        """Give a command the options that all commands have, and print what it answers."""
        if isinstance(command, TyperGroup | TyperCommand):
            command.rich_markup_mode = self.rich_markup_mode
        if isinstance(command, TyperGroup):
            for each in command.commands.values():
                self._equip(each)
            read_plainly(command)
            return
        # A terminal has its own width: the lines of a docstring are joined to paragraphs.
        command.help = re.sub(r"(?<!\n)\n(?!\n)", " ", command.help or "")
        answer = command.callback
        assert answer is not None, f"the command {command.name} does nothing"
        session = Session()

        def run(keyfold_store: str | None, keyfold_config: str | None, keyfold_json: bool, **given: object) -> None:
            with session.begun(keyfold_store, keyfold_config, keyfold_json):
                show(answer(**given), as_json=keyfold_json)

        command.callback = run
        command.params = [*command.params, *_common_params()]
        command.context_settings = {**command.context_settings, "obj": session}
        read_plainly(command)


COMMON = "Common options"


def _common_options(
    keyfold_store: Annotated[
        str | None,
        typer.Option(
            "--store", metavar="URL", help="The store: sqlite:///FILE or postgresql://…", rich_help_panel=COMMON
        ),
    ] = None,
    keyfold_config: Annotated[
        str | None,
        typer.Option(
            "--config",
            metavar="FILE",
            envvar="KEYFOLD_CONFIG",
            help="Settings; keyfold.toml of this directory if not said.",
            rich_help_panel=COMMON,
        ),
    ] = None,
    keyfold_json: Annotated[
        bool, typer.Option("--json", help="Answer in JSON, for programs.", rich_help_panel=COMMON)
    ] = False,
) -> None:
    """What every command takes."""


def _common_params() -> "list[Parameter]":
    app = typer.Typer(add_completion=False)
    app.command()(_common_options)
    return get_command(app).params


KINDS: dict[object, type[str] | type[int]] = {str: str, list[str]: str, int: int, list[int]: int, bool: bool}


class _Plain:
    """Reads text, whole numbers and flags as they are; Typer would import Pydantic for it, a quarter of a second."""

    def __init__(self, kind: type[str] | type[int]) -> None:
        self._kind = kind

    def coerce(self, value: object, param: "_TyperParameter", ctx: "Context") -> object:
        many = param.multiple or param.nargs == -1
        if value is None:
            return () if many else None
        if many and isinstance(value, list | tuple):
            return [self._one(each, param, ctx) for each in value]
        return self._one(value, param, ctx)

    def _one(self, value: object, param: "_TyperParameter", ctx: "Context") -> object:
        if self._kind is bool:
            return value
        try:
            read = self._kind(str(value))
            str(read).encode()
        except UnicodeEncodeError:
            raise typer.BadParameter("this is not text in UTF-8", ctx=ctx, param=param) from None
        except ValueError:
            raise typer.BadParameter(f"{value!r} is not a whole number", ctx=ctx, param=param) from None
        least, most = getattr(param, "min", None), getattr(param, "max", None)
        if (least is not None and read < least) or (most is not None and read > most):
            raise typer.BadParameter(f"{value} is not {_range(least, most)}", ctx=ctx, param=param)
        return read


def _range(least: int | None, most: int | None) -> str:
    if least is None or most is None:
        return f"at most {most}" if least is None else f"at least {least}"
    return f"in the range {least} to {most}"


def read_plainly(command: "Command") -> None:
    for param in command.get_params(typer.Context(command)):
        annotation = getattr(getattr(param, "type_descriptor", None), "annotation", None)
        if annotation in KINDS:
            setattr(param, "get_runtime_param", partial(_Plain, KINDS[annotation]))  # noqa: B010
