"""Commands that are known by name and imported when they are called, and what every command is given."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import typer
from typer._click.core import Command, Context
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from keyfold.cli.session import Session

TEXT_KINDS: dict[object, Callable[[str], object]] = {str: str, int: int, list[str]: str, list[int]: int}


class Later(TyperCommand):
    """A command, or a group of commands, that is known by its name and its summary."""

    def __init__(self, name: str, target: str, summary: str, *, is_group: bool, panel: str) -> None:
        super().__init__(name, help=summary, rich_help_panel=panel)
        self._target = target
        self._is_group = is_group

    def load(self) -> Command:
        module, _, attribute = self._target.partition(":")
        app: typer.Typer = getattr(importlib.import_module(module), attribute)
        command = get_group(app) if self._is_group else get_command(app)
        command.name = self.name
        _equip(command)
        return command


class LazyGroup(TyperGroup):
    """The root: commands of core are listed in `commands`, those of the parts are asked for when they matter."""

    more: Callable[[], Sequence[Later]] = staticmethod(lambda: ())

    def list_commands(self, ctx: Context) -> list[str]:
        self._add_more()
        return super().list_commands(ctx)

    def resolve_command(self, ctx: Context, args: list[str]) -> tuple[str | None, Command | None, list[str]]:
        if args[0] not in self.commands:
            self._add_more()
        name, command, rest = super().resolve_command(ctx, args)
        return name, command.load() if isinstance(command, Later) else command, rest

    def _add_more(self) -> None:
        for command in self.more():
            self.add_command(command)
