"""A small part for the tests of the door: a number a key, with every kind of route that a part may have."""

import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from keyfold.core import logs, settings
from keyfold.core.context import Context
from keyfold.core.errors import Conflict, VersionStale
from keyfold.core.gather import Ask, Operation, Outcome, Versioned
from keyfold.core.part import Part
from keyfold.core.route import Lines, Route
from keyfold.core.store import Store, Transaction

Number = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class Item(Struct, frozen=True, forbid_unknown_fields=True):
    key: Annotated[str, Meta(min_length=1, max_length=200)]
    add: Number = 1


class AddBody(Struct, frozen=True, forbid_unknown_fields=True):
    items: Annotated[list[Item], Meta(min_length=1, max_length=1000)]


class ReadBody(Struct, frozen=True, forbid_unknown_fields=True):
    keys: Annotated[list[str], Meta(min_length=1)]


class SetBody(Struct, frozen=True, forbid_unknown_fields=True):
    value: Number


class OpenBody(Struct, frozen=True, forbid_unknown_fields=True):
    anything: Any


class ListQuery(Struct, frozen=True, forbid_unknown_fields=True):
    limit: Annotated[int, Meta(ge=1, le=100, description="how many at most", examples=[10])] = 10
    factor: float = 1.0
    after: str | None = None


class SlowQuery(Struct, frozen=True, forbid_unknown_fields=True):
    seconds: float = 0.0


class Trial(Struct, frozen=True):
    """A number and its version."""

    key: str
    value: int
    version: int


class LinesQuery(Struct, frozen=True, forbid_unknown_fields=True):
    seconds: float = 0.0
    refuse: Annotated[int, Meta(ge=-1, le=2**31)] = -1


class Trials(Struct, frozen=True):
    trials: list[Trial]


class Echo(Struct, frozen=True):
    said: str


handed: list[Lines] = []  # what the route of lines was called with


def take_lines(ask: Ask) -> Outcome:
    """Slowly, if asked to, and refusing the line of a number."""
    time.sleep(ask.query.seconds)
    body: Lines = ask.body
    if body.first <= ask.query.refuse < body.first + len(body.lines):
        return Conflict(f"line {ask.query.refuse} is refused")
    handed.append(body)
    return Echo(f"{body.first + len(body.lines)} lines")


def make_table(store: Store) -> None:
    ddl = "CREATE TABLE IF NOT EXISTS trials (key TEXT PRIMARY KEY, value BIGINT NOT NULL, version BIGINT NOT NULL)"
    store.transact(lambda tx: tx.driver(ddl.replace("BIGINT", "INTEGER") + " STRICT" if tx.is_sqlite else ddl))


def rows(tx: Transaction, keys: Sequence[str]) -> dict[str, Trial]:
    found = {row.key: Trial(*row) for row in tx.driver("SELECT key, value, version FROM trials") if row.key in keys}
    return {key: found.get(key, Trial(key, 0, 0)) for key in keys}


def put(tx: Transaction, trial: Trial) -> None:
    mark = "?" if tx.is_sqlite else "%s"
    tx.driver(
        f"INSERT INTO trials VALUES ({mark}, {mark}, {mark})"
        " ON CONFLICT (key) DO UPDATE SET value = excluded.value, version = excluded.version",
        (trial.key, trial.value, trial.version),
    )


def add(tx: Transaction, asks: Sequence[Ask]) -> list[Outcome]:
    state = rows(tx, [item.key for ask in asks for item in ask.body.items])
    for ask in asks:
        for item in ask.body.items:
            old = state[item.key]
            state[item.key] = Trial(item.key, old.value + item.add, old.version + 1)
    for trial in state.values():
        put(tx, trial)
    return [Trials([state[item.key] for item in ask.body.items]) for ask in asks]


def read(tx: Transaction, asks: Sequence[Ask]) -> list[Outcome]:
    state = rows(tx, [key for ask in asks for key in ask.body.keys])
    return [Trials([state[key] for key in ask.body.keys]) for ask in asks]


def replace(tx: Transaction, asks: Sequence[Ask]) -> list[Outcome]:
    return [_replaced(tx, ask) for ask in asks]


def _replaced(tx: Transaction, ask: Ask) -> Outcome:
    key = ask.path["key"]
    old = rows(tx, [key])[key]
    if old.version != ask.if_match:
        return VersionStale(f"{key!r} is at version {old.version}, not {ask.if_match}")
    new = Trial(key, ask.body.value, old.version + 1)
    put(tx, new)
    return Versioned(new, new.version)


def _check(ask: Ask) -> None:
    body = ask.body
    keys = [item.key for item in body.items] if isinstance(body, AddBody) else getattr(body, "keys", None)
    ask.client.must_see("tally", keys if keys is not None else [ask.path["key"]])


def routes(context: Context) -> list[Route]:
    def get(ask: Ask) -> Outcome:
        ask.client.must_see("tally", [ask.path["key"]])
        found = context.store.read(lambda tx: rows(tx, [ask.path["key"]]))[ask.path["key"]]
        return Versioned(found, found.version)

    def slow(ask: Ask) -> Outcome:
        time.sleep(ask.query.seconds)
        return Echo("awake")

    def slow_write(tx: Transaction, asks: Sequence[Ask]) -> list[Outcome]:
        time.sleep(1.5)
        return add(tx, asks)

    def broken(ask: Ask) -> Outcome:
        raise RuntimeError("kf_000000000000_broken postgresql://user:broken-password@host/db")

    def operation(name: str, apply: Any, *, writes: bool) -> Operation:
        return Operation(name=name, apply=apply, writes=writes, check=_check)

    return [
        Route(
            method="POST",
            path="/v1/trials",
            summary="Add",
            scope="ingest",
            run=operation("trial add", add, writes=True),
            body=AddBody,
            answer=Trials,
            idempotent=True,
        ),
        Route(
            method="POST",
            path="/v1/trials/read",
            summary="Read many",
            scope="read",
            run=operation("trial read", read, writes=False),
            body=ReadBody,
            answer=Trials,
        ),
        Route(
            method="PUT",
            path="/v1/trials/{key}",
            summary="Set",
            scope="ingest",
            run=operation("trial set", replace, writes=True),
            body=SetBody,
            answer=Trial,
            if_match=True,
            idempotent=True,
        ),
        Route(
            method="GET",
            path="/v1/trials/{key}",
            summary="Read one",
            scope="read",
            run=get,
            query=ListQuery,
            answer=Trial,
        ),
        Route(
            method="POST",
            path="/v1/trials/open",
            summary="Take anything",
            scope="admin",
            run=lambda ask: Echo(type(ask.body.anything).__name__),
            body=OpenBody,
            answer=Echo,
        ),
        Route(method="GET", path="/v1/slow", summary="Wait", scope="read", run=slow, query=SlowQuery, answer=Echo),
        Route(
            method="POST",
            path="/v1/slow",
            summary="Add slowly",
            scope="ingest",
            run=operation("trial slow", slow_write, writes=True),
            body=AddBody,
            answer=Trials,
            idempotent=True,
        ),
        Route(
            method="POST",
            path="/v1/lines",
            summary="Take lines",
            scope="ingest",
            run=take_lines,
            lines=Item,
            query=LinesQuery,
            answer=Echo,
        ),
        Route(method="GET", path="/v1/broken", summary="Fail", scope="read", run=broken, answer=Echo),
        Route(
            method="DELETE",
            path="/v1/trials/{key}",
            summary="Answer nothing",
            scope="moderate",
            run=lambda ask: None,
            status=204,
        ),
    ]


PART = Part(name="trial", summary="for the tests of the door", routes=routes)


def open_context(**options: object) -> Context:
    """The product with this part alone; options as `store_url`, `http_port`."""
    context = Context.open(
        settings.load(environ={}, options={name.replace("_", ".", 1): value for name, value in options.items()}),
        [PART],
    )
    make_table(context.store)
    return context


def main(arguments: Sequence[str]) -> None:
    """A server of its own process: `python -m tests.unit.http.trial store_url=… http_port=0`."""
    from keyfold.http.server import serve

    context = open_context(**dict(argument.split("=", 1) for argument in arguments))
    logs.configure(context.settings.log)
    serve(context, ready=lambda line: print(line, flush=True))


if __name__ == "__main__":
    main(sys.argv[1:])
