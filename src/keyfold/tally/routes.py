"""The endpoints of the tally."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated

from msgspec import Meta, Struct

from keyfold.core.context import Context
from keyfold.core.errors import TooLarge, VersionStale
from keyfold.core.gather import Ask, Operation, Outcome, Versioned
from keyfold.core.route import Route
from keyfold.core.store import Transaction
from keyfold.tally import service
from keyfold.tally.model import Addition, Key, Tally, Value


class AddBody(Struct, frozen=True, forbid_unknown_fields=True):
    items: Annotated[list[Addition], Meta(min_length=1, description="additions, applied together or not at all")]


class ReadBody(Struct, frozen=True, forbid_unknown_fields=True):
    keys: Annotated[list[Key], Meta(min_length=1, description="tallies to read")]


class ReplaceBody(Struct, frozen=True, forbid_unknown_fields=True):
    value: Value


class ReplacePath(Struct, frozen=True):
    key: Key


class Tallies(Struct, frozen=True):
    """The tallies, in the order asked for."""

    tallies: list[Tally]


def routes(context: Context) -> list[Route]:
    items_max = context.limits.batch_items_max

    def check(ask: Ask) -> None:
        if len(keys := _keys(ask)) > items_max:
            raise TooLarge(f"{len(keys)} items, {items_max} are allowed in one request")
        ask.client.must_see("tally", keys)

    def add(tx: Transaction, asks: Sequence[Ask]) -> list[Outcome]:
        changed = service.add(tx, context.topics, [item for ask in asks for item in ask.body.items])
        return [Tallies([changed[item.key] for item in ask.body.items]) for ask in asks]

    def read(tx: Transaction, asks: Sequence[Ask]) -> list[Outcome]:
        found = service.read(tx, [key for ask in asks for key in ask.body.keys])
        return [Tallies([found[key] for key in ask.body.keys]) for ask in asks]

    def replace(tx: Transaction, asks: Sequence[Ask]) -> list[Outcome]:
        return [_replaced(context, tx, ask) for ask in asks]

    gathered = partial(Operation, check=check, key=lambda ask: _keys(ask)[0], weight=lambda ask: len(_keys(ask)))
    adding = gathered(name="tally add", apply=add, writes=True)
    reading = gathered(name="tally read", apply=read, writes=False)
    replacing = gathered(name="tally replace", apply=replace, writes=True)
    post, put = partial(Route, method="POST"), partial(Route, method="PUT", if_match=True, errors=(VersionStale,))
    tallies, one = partial(post, answer=Tallies), partial(put, answer=Tally, path_type=ReplacePath)
    return [
        tallies(
            path="/v1/tallies", summary="Add to tallies", scope="ingest", body=AddBody, run=adding, idempotent=True
        ),
        tallies(path="/v1/tallies/read", summary="Read tallies", scope="read", body=ReadBody, run=reading),
        one(
            path="/v1/tallies/{key}",
            summary="Set a tally",
            scope="ingest",
            body=ReplaceBody,
            run=replacing,
            idempotent=True,
        ),
    ]


def _keys(ask: Ask) -> list[str]:
    if isinstance(ask.body, AddBody):
        return [item.key for item in ask.body.items]
    return list(ask.body.keys) if isinstance(ask.body, ReadBody) else [ask.path["key"]]


def _replaced(context: Context, tx: Transaction, ask: Ask) -> Outcome:
    try:
        tally = service.replace(tx, context.topics, ask.path["key"], ask.body.value, ask.if_match or 0)
    except VersionStale as error:
        return error
    return Versioned(tally, tally.version)
