"""Segment sets, taken whole from the segments' topic: a set no newer than the stored one changes nothing."""

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Struct, structs

from keyfold.core.store import Transaction
from keyfold.core.topics.topic import Record
from keyfold.counters.errors import PackWrong
from keyfold.profiles.model import ProfileKey, profile_id_of
from keyfold.profiles.service.message import current, segments_stored
from keyfold.profiles.service.product import SEGMENT_ID_MAX, Product
from keyfold.profiles.service.storing import SEGMENTED, Stored, loaded, publish, raise_versions, save


class Entry(Struct, frozen=True):
    """A segment that a user is in, and the evaluation that put them there."""

    segment_id: Annotated[str, Meta(min_length=1, max_length=SEGMENT_ID_MAX)]
    evaluation_version: Annotated[int, Meta(ge=0, le=2**63 - 1)]


class SegmentSet(Struct, frozen=True):
    """What a message of the segments' topic says of its key: everything, in the order of entry."""

    segments: list[Entry]


def apply_segments(tx: Transaction, product: Product, records: Sequence[Record]) -> None:
    """Take the newest set of each user; at most the newest so many segments are kept."""
    newest: dict[ProfileKey, Record] = {}
    for record in records:
        key = (product.settings.segments_type, profile_id_of(record.message.key, "key"))
        if key not in newest or record.message.version > newest[key].message.version:
            newest[key] = record
    stored = loaded(tx, product, sorted(newest), items=len(records))
    changed = {key: row for key, row in stored.items() if _taken(row, newest[key], product.settings.segments_max)}
    raise_versions(tx, changed, list(changed))
    save(tx, changed, SEGMENTED)
    if product.settings.publish:
        publish(tx, product, {key: _as_read(product, row, tx.now_us // 1_000_000) for key, row in changed.items()})


def _as_read(product: Product, row: Stored, now: int) -> Stored:
    """The counters were not written: unlike after a count, some may have expired. What is broken is told as it is."""
    try:
        return structs.replace(row, body=current(product.catalog, row.body, now))
    except PackWrong:
        return row


def _taken(row: Stored, record: Record, count_max: int) -> bool:
    """Put a newer set into a row; whether it was newer."""
    if record.message.version <= row.segments_version:
        return False
    entries = msgspec.json.decode(record.message.payload, type=SegmentSet).segments[-count_max:]
    row.segments = segments_stored([(each.segment_id, each.evaluation_version) for each in entries])
    row.segments_version = record.message.version
    return True
