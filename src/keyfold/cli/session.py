"""What a command is given: the options that all commands have, and the product opened with them."""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from keyfold.cli.output import Steps
from keyfold.core.errors import StoreRefused, StoreUnreachable

if TYPE_CHECKING:
    from keyfold.core.context import Context
    from keyfold.core.settings import Settings
    from keyfold.core.store import Store


class Session:
    """One call of a command; `context.obj` of Typer. What it opens is closed when the command has answered."""

    def __init__(self) -> None:
        self._store: str | None = None
        self._config: str | None = None
        self.as_json = False
        self._open = ExitStack()
        self._place: str | None = None

    @contextmanager
    def begun(self, store: str | None, config: str | None, as_json: bool) -> Iterator[None]:
        self._store, self._config, self.as_json = store, config, as_json
        try:
            with self._open:
                yield
        except (StoreRefused, StoreUnreachable) as error:
            # A store that cannot be used is a matter of where its URL was written.
            error.place = error.place or self._place
            raise

    def settings(self, options: Mapping[str, object] | None = None) -> "Settings":
        """The settings in force; `options` are what this command takes beyond --store."""
        from keyfold.core.settings import load
        from keyfold.parts import settings_of_parts

        settings = load(
            parts=settings_of_parts(),
            file=Path(self._config) if self._config else None,
            options={"store.url": self._store, **(options or {})},
        )
        source = next(row.source for row in settings.table if row.name == "store.url")
        self._place = "--store" if source == "command line" else f"store.url, {source}"
        return settings

    def product(
        self, options: Mapping[str, object] | None = None, *, make: bool = True, keep: bool = False
    ) -> "Context":
        """The product, opened. Without `make`, a SQLite file must be there; with `keep`, the caller closes it."""
        from keyfold.core import logs
        from keyfold.core.context import Context
        from keyfold.parts import PARTS

        settings = self.settings(options)
        logs.configure(settings.log)
        if not make:
            must_be_there(settings.store.url)
        context = Context.open(settings, PARTS)
        if not keep:
            self._open.callback(context.close)
        return context

    def store(self) -> "tuple[Store, Settings]":
        """The bare store, whatever its schema, and the settings it was opened with."""
        from keyfold.core.context import open_store

        settings = self.settings()
        store = open_store(settings)
        self._open.callback(store.close)
        return store, settings

    def steps(self, label: str, total: int | None) -> Steps:
        """Progress of long work, to be entered with `with`; silent where the answer is for a program."""
        return Steps(label, total, silent=self.as_json)


class WrongUsage(typer.TyperException):
    """Options that do not go together; exit code 2, as for everything that the command line itself refuses."""

    exit_code = 2

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


def session_of(context: typer.Context) -> Session:
    assert isinstance(context.obj, Session)
    return context.obj


def sqlite_file(url: str) -> Path | None:
    """The file that the URL of an embedded store names."""
    import sqlalchemy as sa

    try:
        parsed = sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError):
        return None
    return Path(parsed.database) if parsed.drivername.startswith("sqlite") and parsed.database else None


def must_be_there(url: str) -> None:
    """Looking at a store must not make one: a mistyped name would leave a file behind and show it empty."""
    file = sqlite_file(url)
    if file is not None and not file.exists():
        raise StoreRefused(
            f"there is no store {file.absolute()} yet",
            hint="`keyfold store upgrade` makes it, so does `keyfold serve`",
        )


def actor() -> str:
    """Who acts, for the audit: whoever runs the command line on this machine."""
    return f"command line ({os.environ.get('USER') or os.getuid()})"
