"""The rules of listings: statuses and moves, drafts, offer ids, presets, counters, feeds. Values in, values out."""

import hashlib
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

from keyfold.core.errors import BadInput, Conflict

# Statuses ----------------------------------------------------------------------------------------------------------

Status = Literal["active", "expired", "sold", "removed", "archived"]
Shown = Literal["active", "expired", "sold", "removed", "archived", "banned"]
Actor = Literal["seller", "feed", "scheduler"]
STATUSES: tuple[Status, ...] = ("active", "expired", "sold", "removed", "archived")

# Who may move an offer from one status to another; what is not here is not allowed. `sold` is sold through the
# service: an offer that was sold elsewhere is removed, with a reason.
MOVES: Mapping[tuple[Status, Status], frozenset[Actor]] = {
    ("active", "expired"): frozenset({"scheduler"}),
    ("active", "sold"): frozenset({"seller"}),
    ("active", "removed"): frozenset({"seller", "feed"}),
    ("expired", "active"): frozenset({"seller", "feed"}),
    ("expired", "sold"): frozenset({"seller"}),
    ("expired", "removed"): frozenset({"seller", "feed"}),
    ("expired", "archived"): frozenset({"scheduler"}),
    ("sold", "archived"): frozenset({"scheduler"}),
    ("removed", "active"): frozenset({"feed"}),  # within the window of returning
    ("removed", "archived"): frozenset({"scheduler"}),
}


AMOUNT_MAX = 10**12  # nine million sales of it still fit into a counter


class Price(Struct, frozen=True, forbid_unknown_fields=True):
    """Whole minor units of a currency."""

    amount: Annotated[int, Meta(ge=0, le=AMOUNT_MAX)]
    currency: Annotated[str, Meta(pattern=r"^[A-Z]{3}(?!\n)$")]


class Offer(Struct, frozen=True, kw_only=True):
    """An offer as it is stored, shown and exported. `content` is the offer itself, as its category has it."""

    offer_id: str = ""  # empty: not stored yet
    seller_id: str
    category: str
    schema_version: int = 0  # of the category, that the content was checked against
    status: Status = "active"
    is_banned: bool = False
    was_sold: bool = False  # for good, from its first sale on
    price: Price | None = None
    photos: tuple[str, ...] = ()  # where they come from
    external_id: str = ""  # of a feed; empty: made by hand
    business_id: int = 0
    shop_id: int = 0
    warehouse_id: int = 0
    tier: str = ""
    created_at_us: int = 0
    status_at_us: int = 0  # since when it has its status
    updated_at_us: int = 0
    reason: str = ""  # why it was removed
    content: Mapping[str, Any]


def shown(offer: Offer) -> Shown:
    """A ban stands over the status of an offer that is still in the cabinet; beneath, the status goes on."""
    return "banned" if offer.is_banned and offer.status in ("active", "expired", "sold") else offer.status


def must_move(before: Status, after: Status, actor: Actor) -> None:
    """Refuse a move that the table does not have."""
    if before == after:
        return
    allowed = MOVES.get((before, after), frozenset())
    if actor not in allowed:
        possible = [to for (start, to), who in MOVES.items() if start == before and actor in who]
        raise Conflict(
            f"an offer that is {before} does not become {after} by the {actor}",
            hint=f"It may become {', '.join(possible)}" if possible else "It stays as it is",
        )


def moved(offer: Offer, status: Status, actor: Actor, reason: str = "") -> Offer:
    """An offer in another status. Its first sale is remembered for good."""
    must_move(offer.status, status, actor)
    return msgspec.structs.replace(
        offer,
        status=status,
        was_sold=offer.was_sold or status == "sold",
        reason=reason if status == "removed" else offer.reason if status == "archived" else "",
    )


def is_meaningful(before: Offer | None, after: Offer) -> bool:
    """Whether a save is a change that anybody must hear of. That the same content meets a newer schema is none."""
    if before is None:
        return True
    same = msgspec.structs.replace(after, schema_version=before.schema_version)
    return before != same or not is_alike(before.content, after.content)


def is_alike(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether two contents are the same JSON, whatever the order of their names: to Python, true equals 1."""
    return before == after and (
        before is after or msgspec.json.encode(before, order="sorted") == msgspec.json.encode(after, order="sorted")
    )


def stamped(before: Offer | None, after: Offer, now_us: int) -> Offer:
    """A change with its times; an offer never goes back in time, whatever the clock does."""
    now_us = max(now_us, before.updated_at_us) if before is not None else now_us
    is_moved = before is None or before.status != after.status
    return msgspec.structs.replace(
        after,
        created_at_us=after.created_at_us or now_us,
        status_at_us=now_us if is_moved else after.status_at_us,
        updated_at_us=now_us,
    )


class Ages(Struct, frozen=True):
    """How long an offer stays in a status, in microseconds."""

    expires: int
    archived: int


def due_at_us(offer: Offer, ages: Ages) -> int | None:
    """When the scheduler has to look at an offer again."""
    if offer.status == "archived":
        return None
    return offer.status_at_us + (ages.expires if offer.status == "active" else ages.archived)


def aged(offer: Offer, ages: Ages, now_us: int) -> Offer:
    """What the scheduler makes of an offer: expired, archived, or the offer as it is."""
    due = due_at_us(offer, ages)
    if due is None or now_us < due:
        return offer
    return moved(offer, "expired" if offer.status == "active" else "archived", "scheduler")


SHARDS = 16  # that schedulers share; the number is stored with the rows


def shard_of(seller_id: str) -> int:
    """A stable hash of the seller."""
    return zlib.crc32(seller_id.encode()) % SHARDS


def business_of(seller_id: str) -> int:
    """A seller as a number, for whoever needs one: their own digits, or 63 bits of a hash. `007` is not `7`."""
    if seller_id.isascii() and seller_id.isdigit() and len(seller_id) <= 18 and str(int(seller_id)) == seller_id:
        return int(seller_id)
    return int.from_bytes(hashlib.sha256(seller_id.encode()).digest()[:8]) >> 1


# Offer ids ---------------------------------------------------------------------------------------------------------

ID_DIGITS = 15
_DAMM = (
    (0, 3, 1, 7, 5, 9, 8, 6, 4, 2),
    (7, 0, 9, 2, 1, 5, 4, 8, 6, 3),
    (4, 2, 0, 6, 8, 7, 1, 3, 5, 9),
    (1, 7, 5, 0, 9, 8, 3, 4, 2, 6),
    (6, 1, 2, 3, 0, 4, 5, 9, 7, 8),
    (3, 6, 7, 4, 2, 0, 9, 5, 8, 1),
    (5, 8, 6, 9, 7, 2, 0, 1, 3, 4),
    (8, 9, 4, 5, 3, 6, 2, 0, 1, 7),
    (9, 4, 3, 8, 6, 1, 7, 2, 0, 5),
    (2, 5, 8, 1, 4, 3, 6, 7, 9, 0),
)


def offer_id_of(number: int) -> str:
    """An id from a random number below 10^15: its digits and a check digit.

    The digit is Damm's: it finds every wrong digit and every two neighbours that were exchanged.
    """
    if not 0 <= number < 10**ID_DIGITS:
        raise ValueError(f"{number} has not {ID_DIGITS} digits")
    digits = f"{number:0{ID_DIGITS}}"
    return f"{digits}{_check_digit(digits)}"


def offer_id_read(text: str) -> str:
    """An id as a person says it, with any grouping, back to its digits; a slip of the tongue is refused."""
    digits = "".join(text.replace("-", " ").split())
    if len(digits) != ID_DIGITS + 1 or not digits.isascii() or not digits.isdigit():
        raise BadInput(f"{text[:50]!r} is not an offer id", hint=f"It has {ID_DIGITS + 1} digits")
    if _check_digit(digits) != 0:
        raise BadInput(f"{text[:50]!r} is not an offer id: a digit is wrong", hint="Read it again")
    return digits


def offer_id_shown(offer_id: str) -> str:
    """In groups of four, as it is read out."""
    return " ".join(offer_id[at : at + 4] for at in range(0, len(offer_id), 4))


def _check_digit(digits: str) -> int:
    interim = 0
    for digit in digits:
        interim = _DAMM[interim][int(digit)]
    return interim


# Drafts ------------------------------------------------------------------------------------------------------------


class Draft(Struct, frozen=True):
    """A half-filled offer of an owner, anonymous or logged in."""

    draft_id: str
    owner_id: str
    category: str
    content: Mapping[str, Any]
    updated_at_us: int


class Opened(Struct, frozen=True):
    """What opening a draft does: which one it is from here on, and which goes."""

    act: Literal["create", "reset", "take"]
    draft: Draft | None  # None: a new one is created
    owner_id: str
    deleted: Draft | None = None


def open_draft(
    category: str | None, anonymous: Draft | None, logged_in: Draft | None, anonymous_id: str, logged_in_id: str | None
) -> Opened:
    """Choose between the draft of an anonymous visitor and that of the person who logged in."""
    owner_id = logged_in_id or anonymous_id
    there = [draft for draft in (logged_in, anonymous) if draft is not None]  # the logged-in one first
    if not there:
        return Opened("create", None, owner_id)
    alike = [draft for draft in there if draft.category == category]
    if category is not None and not alike:
        chosen = there[0]
        reset = Draft(chosen.draft_id, owner_id, category, {}, chosen.updated_at_us)
        return Opened("reset", reset, owner_id, _other(there, chosen))
    candidates = there if category is None or len(alike) == 2 else alike
    chosen = max(candidates, key=lambda draft: draft.updated_at_us)  # the first of equals: the logged-in one
    taken = msgspec.structs.replace(chosen, owner_id=owner_id)
    return Opened("take", taken, owner_id, _other(there, chosen))


def _other(there: Sequence[Draft], chosen: Draft) -> Draft | None:
    return next((draft for draft in there if draft is not chosen), None)


# Photos ------------------------------------------------------------------------------------------------------------

PhotoState = Literal["asked", "ready", "failed"]
PHOTO_URL_MAX = 2_000
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)+", re.IGNORECASE)
_INSIDE = (
    "localhost",
    "svc",
    "cluster",
    "local",
    "internal",
    "intranet",
    "lan",
    "home",
    "corp",
    "arpa",
    "test",
    "invalid",
    "onion",
)
_REBINDING = ("nip.io", "sslip.io", "xip.io", "localtest.me", "lvh.me", "rebind.network", "rbndr.us")


class Photo(Struct, frozen=True, omit_defaults=True):
    """One photo of an offer: where it comes from, and what the photo service made of it."""

    url: str
    state: PhotoState = "asked"
    image: Any = None
    error: str = ""


def must_be_photo_url(url: str) -> None:
    """Refuse what no photo of a seller comes from. Nothing here looks a name up, and no address is ever fetched by us;
    whoever does fetch it must check again what the name resolves to."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise BadInput("this is not the address of a photo", place="photos") from None
    if len(url) > PHOTO_URL_MAX or not url.isprintable() or " " in url or "\\" in url:
        raise BadInput("this is not the address of a photo", place="photos")
    if parts.scheme not in ("http", "https"):
        raise BadInput("a photo comes from an http or https address", place="photos")
    if parts.username is not None or parts.password is not None or port not in (None, 80, 443):
        raise BadInput("the address of a photo has no user, password or port", place="photos")
    if not _NAME.fullmatch(host) or host.rsplit(".", 1)[1][0].isdigit():
        raise BadInput("a photo comes from a host that has a name", place="photos", hint="Not from an IP address")
    lowered = host.lower()
    if any(lowered == each or lowered.endswith(f".{each}") for each in (*_INSIDE, *_REBINDING)):
        raise BadInput("a photo comes from a host of the Internet", place="photos")


def photos_after(photos: Iterable[Photo], urls: Iterable[str]) -> tuple[list[Photo], list[str]]:
    """The photos of an offer with these addresses, and which of them must be asked for.

    What was asked for, made or has failed stays as it is: the same address is not asked for again.
    """
    known = {photo.url: photo for photo in photos}
    wanted = list(dict.fromkeys(urls))
    return [known.get(url) or Photo(url) for url in wanted], [url for url in wanted if url not in known]


def photos_answered(photos: Sequence[Photo], answers: Mapping[str, Photo]) -> list[Photo]:
    """The photos with what the photo service has answered; answers to addresses that are gone change nothing.

    A photo that is ready stays ready: an error that comes late, or again, does not take it away.
    """
    return [
        answer if (answer := answers.get(photo.url)) and not (photo.state == "ready" and answer.error) else photo
        for photo in photos
    ]


# Presets -----------------------------------------------------------------------------------------------------------


class Condition(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing that must hold of an offer's content. `field` is a path, `engine.power`; all given must hold."""

    field: Annotated[str, Meta(min_length=1, max_length=200)]
    one_of: tuple[str | int | bool, ...] = ()
    at_least: float | None = None
    at_most: float | None = None
    exists: bool | None = None


class Preset(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A list of a seller's cabinet: offers whose shown status, category and content meet it."""

    number: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    statuses: frozenset[Shown] = frozenset()
    categories: frozenset[str] = frozenset()
    is_from_feed: bool | None = None
    has_photos: bool | None = None
    where: tuple[Condition, ...] = ()


def presets_of(offer: Offer, presets: Iterable[Preset]) -> frozenset[int]:
    """The numbers of the presets that an offer is in: from the offer itself, and nothing else."""
    return frozenset(preset.number for preset in presets if _is_in(offer, preset))


def _is_in(offer: Offer, preset: Preset) -> bool:
    return (
        (not preset.statuses or shown(offer) in preset.statuses)
        and (not preset.categories or offer.category in preset.categories)
        and preset.is_from_feed in (None, bool(offer.external_id))
        and preset.has_photos in (None, bool(offer.photos))
        and all(_holds(offer.content, condition) for condition in preset.where)
    )


def _holds(content: Mapping[str, Any], condition: Condition) -> bool:
    found: Any = content
    for step in condition.field.split("."):
        found = found.get(step) if isinstance(found, Mapping) else None
    if condition.exists is not None and (found is not None) != condition.exists:
        return False
    if condition.one_of and not any(type(found) is type(each) and found == each for each in condition.one_of):
        return False
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    if condition.at_least is not None and not (is_number and found >= condition.at_least):
        return False
    return condition.at_most is None or bool(is_number and found <= condition.at_most)


# Counters of a seller ------------------------------------------------------------------------------------------------

CURRENT: Mapping[Shown, str] = {"active": "Active", "expired": "Expired", "banned": "Banned"}
SOLD = "Sold"
SEQ_NOS = 10  # rows that a counter is spread over


def money_earned(currency: str) -> str:
    """Money has a counter for each currency."""
    return f"MoneyEarned.{currency}"


def counter_changes(before: Offer | None, after: Offer) -> dict[str, int]:
    """What a save adds to the counters of a seller; what adds nothing is left out.

    `Sold` and the money grow once for an offer, when it first becomes sold; a price that is missing then adds nothing,
    also when it is told later.
    """
    changes: Counter[str] = Counter()
    if before is not None and shown(before) in CURRENT:
        changes[CURRENT[shown(before)]] -= 1
    if shown(after) in CURRENT:
        changes[CURRENT[shown(after)]] += 1
    if after.was_sold and not (before is not None and before.was_sold):
        changes[SOLD] += 1
        if after.price is not None:
            changes[money_earned(after.price.currency)] += after.price.amount
    return {name: change for name, change in changes.items() if change}


# Feeds -------------------------------------------------------------------------------------------------------------


class FeedRow(Struct, frozen=True):
    """What a seller's feeds know of one external id: the offer, and the last task that had it."""

    offer_id: str
    task_id: int


class Item(Struct, frozen=True, kw_only=True):
    """One item of a feed. Without an offer it was not valid, though its external id could be read."""

    external_id: str
    offer: Offer | None


Act = Literal["create", "update", "return", "keep", "sold", "ignore"]


class Decided(Struct, frozen=True):
    """What becomes of an item: what its offer is from here on, and why it is not what the item says."""

    act: Act
    offer: Offer | None = None
    why: str = ""

    @property
    def is_in_feed(self) -> bool:
        """Whether the task has this external id, so that its end does not remove the offer."""
        return self.act != "ignore"


def external_id_of(given: str | None, content: Mapping[str, Any]) -> str:
    """The partner's own id, or a hash of the content."""
    if given:
        return given
    canonical = msgspec.json.encode(content, order="sorted")
    return f"sha256:{hashlib.sha256(canonical).hexdigest()}"


def is_task_new(task_id: int, ended_task_id: int | None) -> bool:
    """Items and ends of a task that is not newer than the last ended one change nothing."""
    return ended_task_id is None or task_id > ended_task_id


def decide_item(
    item: Item, task_id: int, *, row: FeedRow | None, there: Offer | None, returns_since_us: int
) -> Decided:
    """What an item does. `there` is the offer that the row of its external id names, whatever its status is now; an
    offer that was removed since `returns_since_us` returns."""
    if row is not None and row.task_id > task_id:
        return Decided("ignore", why=f"task {row.task_id} has changed it since")
    if there is not None and there.status in ("active", "expired", "sold"):
        if item.offer is None:
            # Its offer stays alive: a slip in one field must not take an advertisement down.
            return Decided("keep", there, "invalid")
        return Decided("update", updated_by_feed(there, item.offer))
    if there is not None and there.was_sold:
        return Decided("sold", there, "its offer was sold and is archived")
    if item.offer is None:
        return Decided("ignore", why="invalid and new")
    if there is not None and there.status == "removed" and there.status_at_us >= returns_since_us:
        return Decided("return", moved(updated_by_feed(there, item.offer), "active", "feed"))
    return Decided("create", item.offer)


def updated_by_feed(before: Offer, item: Offer) -> Offer:
    """The content of an item in an offer that is there: a ban stays, expired becomes active, sold stays sold."""
    status = "active" if before.status == "expired" else before.status
    return msgspec.structs.replace(
        before,
        category=item.category,
        schema_version=item.schema_version,
        content=item.content,
        price=item.price,
        photos=item.photos,
        business_id=item.business_id,
        shop_id=item.shop_id,
        warehouse_id=item.warehouse_id,
        status=status,
    )


def removed_by_feed(offer: Offer) -> Offer:
    """An offer that its feed no longer has. What was sold stays sold."""
    if (offer.status, "removed") not in MOVES:
        return offer
    return moved(offer, "removed", "feed", "no longer in the feed")


class FeedPlan(Struct, frozen=True):
    """What a feed would do, before it does it."""

    create: int  # or return, where an offer was removed a short while ago
    update: int
    delete: int
    keep: int  # invalid items whose offers stay as they are
    invalid: int
    live: int  # offers of the feed before
    has_ended: bool
    sold: int = 0  # items whose offers were sold and archived: they are not made anew


def why_held(plan: FeedPlan, delete_share_max: float) -> str:
    """Why a feed must wait for somebody's approval; empty if it need not."""
    if not plan.has_ended:
        return "its end has not come"
    if plan.live and plan.delete > delete_share_max * plan.live:
        return f"it would remove {plan.delete} of {plan.live} offers"
    return ""
