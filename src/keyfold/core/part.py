"""What a part brings to the product: settings, topics, routes, loops, commands. Core mounts them and knows no part."""

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from keyfold.core.topics.topic import TopicSpec

if TYPE_CHECKING:
    import sqlalchemy as sa

    from keyfold.core.consumer import Consumer
    from keyfold.core.context import Context
    from keyfold.core.loops import Loop
    from keyfold.core.route import Route
    from keyfold.core.settings import Settings


class Part(Struct, frozen=True, kw_only=True):
    """A part of the product. `commands` names a Typer app, `module:attribute`, imported only when it is called."""

    name: str
    summary: str
    topics: "Sequence[TopicSpec] | Callable[[Settings], Sequence[TopicSpec]]" = ()
    tables: "Callable[[Settings], Sequence[sa.Table]] | None" = None  # those that the settings name
    settings: type[Struct] | None = None
    routes: "Callable[[Context], Sequence[Route]] | None" = None
    consumers: "Callable[[Context], Sequence[Consumer]] | None" = None
    loops: "Callable[[Context], Sequence[Loop]] | None" = None
    commands: str | None = None
    command_name: str = ""  # of its commands; the part's own name where it is empty

    def topics_of(self, settings: "Settings") -> Sequence[TopicSpec]:
        """The topics of a part, some of which a user names in the settings."""
        return self.topics(settings) if callable(self.topics) else self.topics


def later(where: str) -> Callable[[Any], Any]:
    """A function of a part, `module:attribute`, imported when it is first called: what it stands on may be heavy."""
    module, _, attribute = where.partition(":")

    def call(given: Any) -> Any:
        return getattr(importlib.import_module(module), attribute)(given)

    return call


def named_tables(parts: "Sequence[Part]", settings: "Settings") -> "list[sa.Table]":
    """The tables that the settings of a product name, beside those of the migrations."""
    return [table for part in parts if part.tables is not None for table in part.tables(settings)]
