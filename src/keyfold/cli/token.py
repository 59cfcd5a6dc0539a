"""`keyfold token`: the tokens of HTTP clients."""

import re
import time
from typing import Annotated

import typer
from msgspec import Struct

from keyfold.cli.session import actor, session_of
from keyfold.core import access
from keyfold.core.answer import Answer
from keyfold.core.clock import SECOND_US
from keyfold.core.errors import BadInput
from keyfold.core.store import Store
from keyfold.core.times import iso, span_seconds

app = typer.Typer(no_args_is_help=True, help="Tokens of HTTP clients. A token is shown once, when it is made.")

SCOPES = "; ".join(f"{name}: {meaning}" for name, meaning in access.SCOPES.items())


class NewToken(Struct, frozen=True):
    """The only answer that ever holds the token itself."""

    token: str
    token_id: str
    name: str
    scopes: list[str]
    grants: dict[str, list[str]]
    expires_at: str


class ShownToken(Struct, frozen=True):
    token_id: str
    client_id: str
    name: str
    scopes: list[str]
    grants: dict[str, list[str]]
    state: str
    made_at: str
    expires_at: str
    revoked_at: str | None


@app.command()
def create(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="whose token this is, for people")],
    scope: Annotated[list[str], typer.Option(metavar="SCOPE", help=f"What it may do, repeated. {SCOPES}.")],
    grant: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND=NAME",
            help=f"What it may do it to, repeated; everything if none. Kinds: {', '.join(access.GRANT_KINDS)}.",
        ),
    ] = None,
    days: Annotated[int, typer.Option(help="How long it lives, 1 to 3650.")] = 365,
) -> Answer:
    """Make a token and show it, once.

    It goes to stdout alone, so TOKEN=$(keyfold token create …) works.
    """
    store = session_of(ctx).product().store
    text = access.create(store, name, scope, _grants(grant or []), days=days, actor=actor())
    return _shown_once(store, text)


@app.command("list")
def list_tokens(ctx: typer.Context) -> Answer:
    """List the tokens, never their secrets."""
    now_us = time.time_ns() // 1000
    shown = [_shown(token, now_us) for token in access.tokens(session_of(ctx).product(make=False).store)]
    if not shown:
        return Answer(data=shown, notes=["There is no token yet. Make one: keyfold token create NAME --scope read"])
    names = ("token_id", "name", "scopes", "grants", "state", "expires_at")
    return Answer(data=shown, table=[{name: getattr(token, name) for name in names} for token in shown])


@app.command()
def revoke(ctx: typer.Context, token_id: Annotated[str, typer.Argument(metavar="TOKEN_ID")]) -> Answer:
    """End a token now."""
    access.revoke(session_of(ctx).product(make=False).store, token_id, actor=actor())
    return Answer(data={"revoked": token_id}, lines=[f"The token {token_id} is revoked."])


@app.command()
def rotate(
    ctx: typer.Context,
    token_id: Annotated[str, typer.Argument(metavar="TOKEN_ID")],
    overlap: Annotated[str, typer.Option(metavar="SPAN", help="How long both work: 12h, 1d, 0s.")] = "1d",
    days: Annotated[int, typer.Option(help="How long the new one lives, 1 to 3650.")] = 365,
) -> Answer:
    """Make a token like an old one, which ends after an overlap."""
    overlap_seconds = span_seconds(overlap)
    store = session_of(ctx).product(make=False).store
    text = access.rotate(store, token_id, overlap_seconds=overlap_seconds, days=days, actor=actor())
    return _shown_once(store, text, f"The old token {token_id} works for another {overlap}.")


def _shown_once(store: Store, text: str, *notes: str) -> Answer:
    token_id = text.split("_")[1]
    token = next(token for token in access.tokens(store) if token.token_id == token_id)
    made = NewToken(text, token_id, token.name, token.scopes, token.grants, iso(token.expires_at_us))
    return Answer(
        data=made,
        lines=[text],
        notes=[
            f"This is the token of {token.name} ({', '.join(token.scopes)}), good until {made.expires_at}.",
            "Keep it now: it is stored as a hash and cannot be shown again.",
            *notes,
        ],
    )


def _shown(token: access.Token, now_us: int) -> ShownToken:
    revoked = token.revoked_at_us is not None
    state = "revoked" if revoked else "expired" if token.expires_at_us <= now_us else "live"
    return ShownToken(
        token.token_id,
        token.client_id,
        token.name,
        token.scopes,
        token.grants,
        state,
        _second(token.made_at_us),
        _second(token.expires_at_us),
        None if token.revoked_at_us is None else _second(token.revoked_at_us),
    )


def _second(time_us: int) -> str:
    return iso(time_us // SECOND_US * SECOND_US)


def _grants(texts: list[str]) -> dict[str, list[str]]:
    grants: dict[str, list[str]] = {}
    for text in texts:
        if not re.fullmatch(r"[^=]+=.+", text):
            raise BadInput(f"the grant {text!r} is not KIND=NAME", hint=f"Kinds: {', '.join(access.GRANT_KINDS)}")
        kind, _, name = text.partition("=")
        grants.setdefault(kind, []).append(name)
    return grants
