"""A seller's cabinet: pages of a preset, newest first, and what is counted."""

import base64
from collections.abc import Sequence

from msgspec import Struct

from keyfold.core.errors import BadInput, NotFound
from keyfold.core.store import Transaction
from keyfold.listings.service import offers, presets
from keyfold.listings.service.offers import Told
from keyfold.listings.service.presets import PresetRow

FIRST = (2**63 - 1, "~")  # behind every offer


class PageOf(Struct, frozen=True, kw_only=True):
    """A page of a preset. While the preset is being built, offers may be missing."""

    preset: str
    offers: Sequence[Told]
    cursor: str  # of the next page; empty: this was the last
    count: int
    is_complete: bool


class PresetCount(Struct, frozen=True):
    preset: str
    number: int
    offers: int
    is_complete: bool


def page(tx: Transaction, seller_id: str, preset: str, cursor: str, limit: int) -> PageOf:
    """One page. It costs as much at the end of a million offers as at the beginning."""
    row = _preset(tx, preset)
    mark = "?" if tx.is_sqlite else "%s"
    found = tx.rows(
        "SELECT create_time, offer_id FROM user_offer_presets"
        f" WHERE seller_id = {mark} AND preset_id = {mark} AND (create_time, offer_id) < ({mark}, {mark})"
        f" ORDER BY create_time DESC, offer_id DESC LIMIT {mark}",
        (seller_id, row.number, *(cursor_read(cursor) if cursor else FIRST), limit + 1),
    )
    shown = found[:limit]
    bodies = offers.read_of(tx, [(seller_id, offer_id) for _, offer_id in shown])
    return PageOf(
        preset=preset,
        # An offer that was taken out between the two statements is not on the page.
        offers=[bodies[offer_id] for _, offer_id in shown if offer_id in bodies],
        cursor=cursor_of(*shown[-1]) if len(found) > limit else "",
        count=_counts(tx, seller_id).get(row.number, 0),
        is_complete=row.state == presets.READY,
    )


def preset_counts(tx: Transaction, seller_id: str) -> list[PresetCount]:
    """How many offers each preset of a seller has."""
    counts = _counts(tx, seller_id)
    return [
        PresetCount(row.name, row.number, counts.get(row.number, 0), row.state == presets.READY)
        for row in presets.stored(tx)
        if row.state != presets.DROPPING
    ]


def counters(tx: Transaction, seller_id: str) -> dict[str, int]:
    """The counters of a seller, each summed over its rows."""
    mark = "?" if tx.is_sqlite else "%s"
    rows = tx.rows(
        f"SELECT counter_id, sum(counter_value) FROM user_total_counters WHERE seller_id = {mark} GROUP BY counter_id",
        (seller_id,),
    )
    found = {name: int(value) for name, value in rows}
    return {"Active": 0, "Expired": 0, "Banned": 0, "Sold": 0} | dict(sorted(found.items()))


def cursor_of(create_time: int, offer_id: str) -> str:
    return base64.urlsafe_b64encode(f"{create_time} {offer_id}".encode()).decode().rstrip("=")


def cursor_read(cursor: str) -> tuple[int, str]:
    try:
        time, _, offer_id = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode("ascii").partition(" ")
        place = int(time), offer_id
    except ValueError:
        raise _no_cursor() from None
    if not 0 <= place[0] < 2**63 or not offer_id.isdigit() or cursor_of(*place) != cursor:
        raise _no_cursor()
    return place


def _no_cursor() -> BadInput:
    return BadInput("this is no cursor of ours", place="query cursor", hint="Take it from the page before")


def _preset(tx: Transaction, name: str) -> PresetRow:
    rows = presets.stored(tx)
    row = presets.named(rows, name)
    if row is None:
        known = ", ".join(each.name for each in rows if each.state != presets.DROPPING)
        raise NotFound(f"there is no preset {name[:100]!r}", hint=f"There are {known}")
    return row


def _counts(tx: Transaction, seller_id: str) -> dict[int, int]:
    mark = "?" if tx.is_sqlite else "%s"
    rows = tx.rows(
        f"SELECT preset_id, sum(offers) FROM user_offer_presets_count WHERE seller_id = {mark} GROUP BY preset_id",
        (seller_id,),
    )
    return {number: int(count) for number, count in rows}
