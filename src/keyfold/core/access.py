"""Who may call: client tokens with scopes and grants, stored as hashes, expiring, rotated with overlap."""

import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from keyfold.core import audit
from keyfold.core.clock import SECOND_US
from keyfold.core.errors import BadInput, NotFound, ScopeMissing, Unauthenticated
from keyfold.core.store import Store, Transaction
from keyfold.core.store.batch import Columns
from keyfold.core.store.shapes import insert
from keyfold.core.tables import TOKENS

# What a token may do. Which things it may do it to is its grants.
SCOPES: Mapping[str, str] = {
    "ingest": "send events and changes",
    "read": "read state",
    "listings.write": "write a seller's drafts and offers",
    "moderate": "send moderation opinions",
    "metrics": "read /metrics",
    "admin": "everything, and administration",
}
# What a grant may name. A part adds its own kind here, so that a typing mistake is refused.
GRANT_KINDS = ("seller", "unit", "profile", "segment", "numbering", "tally")

EVERYTHING = "*"
PREFIX = "kf"
NEVER_US = 2**62


class Client(Struct, frozen=True):
    """A caller whose token was checked."""

    name: str
    client_id: str  # stays the same when the token is rotated
    scopes: frozenset[str]
    grants: Mapping[str, frozenset[str]]

    def must_have(self, scope: str) -> None:
        if scope not in self.scopes and "admin" not in self.scopes:
            raise ScopeMissing(f"this call needs the scope {scope}", hint=f"The token has: {', '.join(self.scopes)}")

    def may(self, kind: str, name: str) -> bool:
        """Whether the token names this thing; the door answers 404 where it does not."""
        for granted in (EVERYTHING, kind):
            names = self.grants.get(granted, frozenset())
            if EVERYTHING in names or name in names:
                return True
        return False

    def must_see(self, kind: str, names: Sequence[str]) -> None:
        for name in names:
            if not self.may(kind, name):
                raise NotFound(f"there is no {kind} {name!r}")


# The caller of a loopback demo, where no token is asked for.
ANYONE = Client("demo", "demo", frozenset(SCOPES), {EVERYTHING: frozenset({EVERYTHING})})


class Token(Struct, frozen=True):
    """What may be shown of a token; the secret is shown once, when it is made."""

    token_id: str
    client_id: str
    name: str
    scopes: list[str]
    grants: dict[str, list[str]]
    made_at_us: int
    expires_at_us: int
    revoked_at_us: int | None


def create(
    store: Store,
    name: str,
    scopes: Sequence[str],
    grants: Mapping[str, Sequence[str]] | None = None,
    *,
    days: int = 365,
    client_id: str | None = None,
    actor: str = "command line",
) -> str:
    """Make a token and return its text. Without grants it may touch everything within its scopes."""
    _check(name, scopes, grants or {}, days)
    token_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)

    def work(tx: Transaction) -> None:
        row: Columns = {
            "token_id": [token_id],
            "client_id": [client_id or token_id],
            "name": [name],
            "secret_hash": [_hash(secret)],
            "scopes": [_json(sorted(set(scopes)))],
            "grants": [_json({kind: sorted(set(names)) for kind, names in (grants or {EVERYTHING: ["*"]}).items()})],
            "made_at_us": [tx.now_us],
            "expires_at_us": [tx.now_us + days * 86400 * SECOND_US],
        }
        insert(tx, TOKENS, row)
        audit.record(tx, actor, "token created", f"{token_id} {name}: {', '.join(scopes)}")

    store.transact(work, name="token create", once=True)
    return f"{PREFIX}_{token_id}_{secret}"


def rotate(store: Store, token_id: str, *, overlap_seconds: int, days: int = 365, actor: str = "command line") -> str:
    """Make a token with the same name, scopes and grants; the old one ends after the overlap."""
    old = next((token for token in tokens(store) if token.token_id == token_id and token.revoked_at_us is None), None)
    if old is None:
        raise NotFound(f"there is no live token {token_id}", hint="`keyfold token list` shows them")
    text = create(store, old.name, old.scopes, old.grants, days=days, client_id=old.client_id, actor=actor)

    def work(tx: Transaction) -> None:
        ends = tx.now_us + overlap_seconds * SECOND_US
        tx.execute(
            sa.update(TOKENS)
            .where(TOKENS.c.token_id == token_id, TOKENS.c.expires_at_us > ends)
            .values(expires_at_us=ends)
        )
        audit.record(tx, actor, "token rotated", token_id)

    store.transact(work, name="token rotate", once=True)
    return text


def revoke(store: Store, token_id: str, *, actor: str = "command line") -> None:
    """End a token now. Servers notice within ACCESS_CACHE_SECONDS."""

    def work(tx: Transaction) -> None:
        ended = tx.execute(
            sa.update(TOKENS)
            .where(TOKENS.c.token_id == token_id, TOKENS.c.revoked_at_us.is_(None))
            .values(revoked_at_us=tx.now_us)
        ).rowcount
        if not ended:
            raise NotFound(f"there is no live token {token_id}", hint="`keyfold token list` shows them")
        audit.record(tx, actor, "token revoked", token_id)

    store.transact(work, name="token revoke", once=True)


def tokens(store: Store) -> list[Token]:
    """Every token, the newest first."""
    rows = store.read(lambda tx: tx.execute(sa.select(TOKENS).order_by(TOKENS.c.made_at_us.desc())).all())
    return [
        Token(
            row.token_id,
            row.client_id,
            row.name,
            msgspec.json.decode(row.scopes, type=list[str]),
            msgspec.json.decode(row.grants, type=dict[str, list[str]]),
            row.made_at_us,
            row.expires_at_us,
            row.revoked_at_us,
        )
        for row in rows
    ]


def client_of(store: Store, text: str) -> tuple[Client, int]:
    """The client whose token this is, and until when (microseconds) it may be remembered; 401 for any other text."""
    prefix, _, rest = text.partition("_")
    token_id, _, secret = rest.partition("_")
    if prefix != PREFIX or not token_id or not secret or not text.isascii() or len(text) > 200:
        raise Unauthenticated("the token is not valid")

    def work(tx: Transaction) -> tuple[sa.Row[tuple[object, ...]] | None, int]:
        return tx.execute(sa.select(TOKENS).where(TOKENS.c.token_id == token_id)).one_or_none(), tx.now_us

    row, now_us = store.read(work)
    stored = bytes(row.secret_hash) if row else b"\0" * 32
    if not hmac.compare_digest(stored, _hash(secret)) or row is None:
        raise Unauthenticated("the token is not valid")
    if row.revoked_at_us is not None or row.expires_at_us <= now_us:
        raise Unauthenticated("the token has ended", hint="Ask for a new one: keyfold token create")
    grants = msgspec.json.decode(row.grants, type=dict[str, frozenset[str]])
    scopes = msgspec.json.decode(row.scopes, type=frozenset[str])
    return Client(row.name, row.client_id, scopes, grants), row.expires_at_us


def any_token(store: Store) -> bool:
    """Whether any live token exists; a server open to the network refuses to start without one."""
    live = sa.and_(TOKENS.c.revoked_at_us.is_(None), TOKENS.c.expires_at_us > sa.bindparam("now_us"))
    counted = sa.select(sa.func.count()).select_from(TOKENS).where(live)
    return store.read(lambda tx: int(tx.execute(counted, {"now_us": tx.now_us}).scalar_one())) > 0


def _check(name: str, scopes: Sequence[str], grants: Mapping[str, Sequence[str]], days: int) -> None:
    if not name.strip() or len(name) > 100 or "\0" in name:
        raise BadInput("a token needs a name of 1 to 100 characters")
    if not scopes:
        raise BadInput("a token needs at least one scope", hint=f"Known: {', '.join(SCOPES)}")
    for scope in scopes:
        if scope not in SCOPES:
            raise BadInput(f"there is no scope {scope!r}", hint=f"Known: {', '.join(SCOPES)}")
    for kind in grants:
        if kind not in GRANT_KINDS and kind != EVERYTHING:
            raise BadInput(f"there is no grant kind {kind!r}", hint=f"Known: {', '.join(GRANT_KINDS)}")
    if not 1 <= days <= 3650:
        raise BadInput("a token lives 1 to 3650 days")


def _hash(secret: str) -> bytes:
    """The secret has 256 random bits, so a plain hash cannot be searched."""
    return hashlib.sha256(secret.encode()).digest()


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
