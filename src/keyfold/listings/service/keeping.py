"""What others keep at an offer: opinions of moderation, answers of the photo service, the state of stages.

Each has its own row under the offer's key, with a version of its own. Only what changes the offer itself, a ban, also
writes the row of the offer.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from keyfold.core import outbox
from keyfold.core.deadletters import Refusal
from keyfold.core.errors import BadInput, NotFound, TooLarge, VersionStale
from keyfold.core.store import Transaction
from keyfold.core.store.shapes import compare_and_set, load_rows
from keyfold.core.topics.topic import Record
from keyfold.listings import metrics
from keyfold.listings.model import Photo, photos_answered
from keyfold.listings.service import saving
from keyfold.listings.service.feeds import reporting
from keyfold.listings.service.listings import Listings
from keyfold.listings.service.offers import MaySee, not_there
from keyfold.listings.service.saving import BILLING_KIND, MODERATION_KIND, PHOTOS_KIND, Change, Photos, kind_message
from keyfold.listings.tables import OFFER

STAGE_BYTES_MAX = 100 * 1024
OfferId = Annotated[
    str, Meta(pattern=r"^[0-9]{16}(?!\n)$", description="16 digits, the last of which checks the others")
]
Version = Annotated[int, Meta(ge=1, le=2**63 - 1)]

_encode = msgspec.json.Encoder().encode


class Row(Struct, frozen=True):
    """A kind of an offer as it is stored anew, at `version` before."""

    seller_id: str
    offer_id: str
    kind: str
    version: int
    body: bytes


def store(tx: Transaction, listings: Listings, rows: Sequence[Row]) -> None:
    """Store kinds of offers, and export them."""
    if not rows:
        return
    columns: dict[str, list[Any]] = {
        "seller_id": [row.seller_id for row in rows],
        "offer_id": [row.offer_id for row in rows],
        "kind": [row.kind for row in rows],
        "version": [row.version for row in rows],
        "body": [row.body.decode() for row in rows],
    }
    compare_and_set(tx, OFFER, columns)
    messages = [kind_message(tx, row.seller_id, row.offer_id, row.kind, row.version + 1, row.body) for row in rows]
    outbox.put(tx, listings.topics, listings.settings.topic, messages)


# Moderation ----------------------------------------------------------------------------------------------------------


class Opinion(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What moderation thinks of an offer. Versions grow for each offer; an older one changes nothing."""

    offer_id: OfferId
    version: Version
    is_banned: bool
    reason: Annotated[str, Meta(max_length=2_000)] = ""
    details: Any = None


class Judged(Struct, frozen=True):
    """What became of an opinion: applied, old (a newer one is there), or unknown (no such offer)."""

    offer_id: str
    result: str


_decode_opinion = msgspec.json.Decoder(Opinion).decode


def judge(
    tx: Transaction,
    listings: Listings,
    opinions: Sequence[Opinion],
    may_see: MaySee = lambda _: True,
    *,
    in_one_step: bool = False,
) -> list[Judged]:
    """Apply opinions, of each offer the newest. A ban and its lifting move presets and counters.

    Offers that it changes are held some at a time; with `in_one_step` more of them than that are `TooLarge`.
    """
    newest: dict[str, Opinion] = {}
    for opinion in opinions:
        if opinion.offer_id not in newest or newest[opinion.offer_id].version < opinion.version:
            newest[opinion.offer_id] = opinion
    found = saving.sellers_of(tx, list(newest))
    sellers = {offer_id: seller for offer_id, seller in found.items() if may_see(seller)}
    keys = [(seller, offer_id) for offer_id, seller in sellers.items()]
    there = {
        key: (version, msgspec.json.decode(body, type=Opinion))
        for key, (version, body) in saving.load_kind(tx, keys, MODERATION_KIND).items()
    }
    fresh = [key for key in keys if key not in there or there[key][1].version < newest[key[1]].version]
    # The offers first: whoever bans while its seller edits waits here, or finds the row changed and looks again. Most
    # opinions change no ban, and an offer is what the last one said: those are not even read.
    banned = {key for key, (_, opinion) in there.items() if opinion.is_banned}
    changed = sorted(key for key in fresh if newest[key[1]].is_banned != (key in banned))
    if in_one_step:
        saving.must_fit_together(tx, changed)
    for step in saving.steps_of(tx, changed):
        _ban(tx, listings, step, newest)
    store(
        tx,
        listings,
        [Row(*key, MODERATION_KIND, there[key][0] if key in there else 0, _encode(newest[key[1]])) for key in fresh],
    )
    applied = {offer_id for _, offer_id in fresh}
    results = [
        "unknown"
        if each.offer_id not in sellers
        else "applied"
        if each.offer_id in applied and newest[each.offer_id] == each
        else "old"
        for each in opinions
    ]
    for result in results:
        metrics.OPINIONS.labels(result).inc()
    return [Judged(each.offer_id, result) for each, result in zip(opinions, results, strict=True)]


def _ban(tx: Transaction, listings: Listings, keys: Sequence[tuple[str, str]], newest: Mapping[str, Opinion]) -> None:
    """Put offers under their bans, or out of them."""
    offers = saving.load_offers(tx, keys)
    changes = [
        Change(saved, msgspec.structs.replace(saved.offer, is_banned=newest[offer_id].is_banned))
        for (_, offer_id), saved in offers.items()
    ]
    saving.save(tx, listings, changes)


def take_opinions(listings: Listings) -> Callable[[Transaction, Sequence[Record]], list[Refusal]]:
    """The consumer of moderation's topic. What speaks of no offer of ours is set aside.

    In one step, so that a batch of very many bans is halved: shorter transactions lose fewer races with sellers.
    """

    def apply(tx: Transaction, records: Sequence[Record]) -> list[Refusal]:
        read, refused = _decoded(records, _decode_opinion)
        judged = judge(tx, listings, [opinion for _, opinion in read], in_one_step=True)
        return refused + [
            Refusal(record, f"there is no offer {opinion.offer_id}")
            for (record, opinion), each in zip(read, judged, strict=True)
            if each.result == "unknown"
        ]

    return apply


# Photos --------------------------------------------------------------------------------------------------------------


class PhotoAnswer(Struct, frozen=True, kw_only=True):
    """What became of a photo: an image, as the photo service describes it, or an error."""

    offer_id: OfferId
    url: Annotated[str, Meta(min_length=1, max_length=2_000)]
    image: Any = None
    error: Annotated[str, Meta(max_length=500)] = ""

    def __post_init__(self) -> None:
        if (self.image is None) == (not self.error):
            raise ValueError("an answer has either an image or an error")


_decode_answer = msgspec.json.Decoder(PhotoAnswer).decode
_decode_photos = msgspec.json.Decoder(Photos).decode


def add_photos(tx: Transaction, listings: Listings, answers: Sequence[PhotoAnswer]) -> list[tuple[str, str, str, str]]:
    """Add answers to the photos of their offers; returns the errors that are new: seller, offer, address, error.

    An answer for an address that is no longer in its offer is dropped, and so is one that says nothing new.
    """
    asked: dict[str, dict[str, Photo]] = {}
    for answer in answers:
        photo = Photo(answer.url, "failed" if answer.error else "ready", answer.image, answer.error)
        before = asked.setdefault(answer.offer_id, {}).get(answer.url)
        if not (before is not None and before.state == "ready" and photo.error):
            asked[answer.offer_id][answer.url] = photo
    keys = [(seller, offer_id) for offer_id, seller in saving.sellers_of(tx, list(asked)).items()]
    saving.must_fit_together(tx, keys, PHOTOS_KIND)
    there = saving.load_kind(tx, keys, PHOTOS_KIND)
    rows: list[Row] = []
    errors: list[tuple[str, str, str, str]] = []
    for key, (version, body) in there.items():
        before_all = _decode_photos(body).photos
        after_all = photos_answered(before_all, asked[key[1]])
        if after_all == before_all:
            continue
        rows.append(Row(*key, PHOTOS_KIND, version, _encode(Photos(after_all))))
        changed = [after for before, after in zip(before_all, after_all, strict=True) if before != after]
        errors += [(*key, photo.url, photo.error) for photo in changed if photo.error]
        metrics.ANSWERS.labels("added").inc(len(changed))
    store(tx, listings, rows)
    return errors


def take_answers(listings: Listings) -> Callable[[Transaction, Sequence[Record]], list[Refusal]]:
    """The consumer of the photo service's topic; errors go to the report of the feed that had the photo."""

    def apply(tx: Transaction, records: Sequence[Record]) -> list[Refusal]:
        read, refused = _decoded(records, _decode_answer)
        errors = add_photos(tx, listings, [answer for _, answer in read])
        named = _external_ids(tx, [(seller_id, offer_id) for seller_id, offer_id, _, _ in errors])
        told = [(*each[:2], named.get(each[:2], ""), *each[2:]) for each in errors]
        reporting.tell_photo_errors(tx, listings, [each for each in told if each[2]])
        return refused

    return apply


def _external_ids(tx: Transaction, keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """The names of offers in their feeds; the offers themselves are held some at a time."""
    return {
        key: saved.offer.external_id
        for step in saving.steps_of(tx, list(dict.fromkeys(keys)))
        for key, saved in saving.load_offers(tx, step).items()
    }


# Stages --------------------------------------------------------------------------------------------------------------


class StageState(Struct, frozen=True):
    """What a stage keeps at an offer: its own affair, any JSON."""

    offer_id: str
    stage: str
    version: int
    state: Any


def kind_of_stage(stage: str) -> str:
    """Billing is a kind of its own; every other stage is one by its name."""
    return BILLING_KIND if stage == BILLING_KIND else f"stage:{stage}"


def read_stage(tx: Transaction, offer_id: str, stage: str, may_see: MaySee) -> StageState:
    key = _seller_of(tx, offer_id, may_see), offer_id
    found = saving.load_kind(tx, [key], kind_of_stage(stage)).get(key)
    if found is None:
        raise NotFound(f"the stage {stage!r} keeps nothing at {offer_id!r}")
    return StageState(offer_id, stage, found[0], msgspec.json.decode(found[1]))


def write_stage(
    tx: Transaction, listings: Listings, offer_id: str, stage: str, version: int, state: Any, may_see: MaySee
) -> StageState:
    """Keep the state of a stage, if it is still at `version` (0: nothing is kept yet)."""
    key = _seller_of(tx, offer_id, may_see), offer_id
    kind = kind_of_stage(stage)
    found = saving.load_kind(tx, [key], kind).get(key)
    current = found[0] if found is not None else 0
    if current != version:
        raise VersionStale(f"the stage {stage!r} is at version {current}, not {version}", hint="Read it again")
    body = _encode(state)
    if len(body) > STAGE_BYTES_MAX:
        raise TooLarge(f"the state has {len(body)} bytes, {STAGE_BYTES_MAX} are allowed", place="state")
    if found is not None and found[1].encode() == body:
        return StageState(offer_id, stage, current, state)
    if found is None:
        _must_have_room(tx, listings, key)
    store(tx, listings, [Row(*key, kind, current, body)])
    return StageState(offer_id, stage, current + 1, state)


def _must_have_room(tx: Transaction, listings: Listings, key: tuple[str, str]) -> None:
    """Bounded, so that nobody fills an offer with stages; two that come at once may exceed it by one."""
    kinds = load_rows(tx, OFFER, {"seller_id": [key[0]], "offer_id": [key[1]]}, ("kind",))
    count = sum(kind.startswith("stage:") for (kind,) in kinds)
    if count >= listings.settings.stages_max:
        raise BadInput(f"{count} stages keep state at this offer, no more are allowed", place="stage")


def _seller_of(tx: Transaction, offer_id: str, may_see: MaySee) -> str:
    seller = saving.sellers_of(tx, [offer_id]).get(offer_id)
    if seller is None or not may_see(seller):
        raise not_there(offer_id)
    return seller


def _decoded(
    records: Sequence[Record], decode: Callable[[bytes], Any]
) -> tuple[list[tuple[Record, Any]], list[Refusal]]:
    """What can be read, and what cannot."""
    read: list[tuple[Record, Any]] = []
    refused: list[Refusal] = []
    for record in records:
        try:
            read.append((record, decode(record.message.payload)))
        except (msgspec.DecodeError, UnicodeError) as error:
            refused.append(Refusal(record, f"cannot be read: {error}"))
    return read, refused
