"""The rows of profiles: loaded for writing, saved, and published whole."""

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import sqlalchemy as sa
from msgspec import Struct

from keyfold.core import outbox
from keyfold.core.store import Transaction
from keyfold.core.store.shapes import compare_and_set, load, locking_load, update
from keyfold.core.topics.topic import Message
from keyfold.profiles.model import ProfileKey
from keyfold.profiles.service.message import whole
from keyfold.profiles.service.product import PROFILES_TOPIC, Product
from keyfold.profiles.tables import PROFILE_FLOORS, PROFILES

COUNTED = ("public_version", "body", "held_until_us", "expires_at")
SEGMENTED = ("public_version", "segments", "segments_version")
COLUMNS = ("version", "public_version", "body", "segments", "segments_version", "held_until_us", "expires_at")


class Stored(Struct):
    """The row of a profile, loaded for writing; version 0: it is not there yet."""

    version: int = 0
    public_version: int = 0
    body: bytes = b""
    segments: bytes = b""
    segments_version: int = 0
    held_until_us: int = 0
    expires_at: int = 0


def keys_of(profiles: Iterable[ProfileKey]) -> dict[str, list[Any]]:
    """The keys of profiles as the columns of a batch."""
    listed = list(profiles)
    return {"profile_type": [each for each, _ in listed], "profile_id": [each for _, each in listed]}


def behind(profile: ProfileKey) -> sa.ColumnElement[bool]:
    """Profiles after this one, in the order of their keys: how every walk over all of them goes on."""
    place = sa.tuple_(PROFILES.c.profile_type, PROFILES.c.profile_id)
    return place > sa.tuple_(*(sa.literal(each) for each in profile))


def loaded(tx: Transaction, keys: Sequence[ProfileKey]) -> dict[ProfileKey, Stored]:
    """The rows for writing. SQLite has one writer, who holds the whole file; elsewhere the rows are locked in order."""
    found = (load if tx.is_sqlite else locking_load)(tx, PROFILES, keys_of(keys), COLUMNS)
    return {key: Stored(*row) if (row := found.get(key)) else Stored() for key in keys}


def raise_versions(tx: Transaction, stored: Mapping[ProfileKey, Stored], public: Sequence[ProfileKey]) -> None:
    """A profile that was never public, or was deleted since, starts above every version that was ever deleted."""
    types = sorted({key[0] for key in public if stored[key].public_version == 0})
    floors = load(tx, PROFILE_FLOORS, {"profile_type": types}, ("version",)) if types else {}
    for key in public:
        row = stored[key]
        row.public_version = (row.public_version or floors.get((key[0],), (0,))[0]) + 1


def save(tx: Transaction, changed: Mapping[ProfileKey, Stored], columns: Sequence[str]) -> None:
    """Save rows that this transaction has loaded for writing; one that was made meanwhile is a lost race.

    `columns` are those that may have changed: a row that is there is left alone in the others.
    """
    in_order = sorted(changed)
    known = {key: row for key in in_order if (row := changed[key]).version}
    fresh = {key: row for key in in_order if not (row := changed[key]).version}
    if known:
        update(tx, PROFILES, _columns(known, columns))
    if fresh:
        compare_and_set(tx, PROFILES, _columns(fresh, COLUMNS))


def _columns(rows: Mapping[ProfileKey, Stored], names: Sequence[str]) -> dict[str, Sequence[Any]]:
    values = zip(*map(attrgetter(*names), rows.values()), strict=True)
    return {**keys_of(rows), **dict(zip(names, values, strict=True))}


def publish(tx: Transaction, product: Product, profiles: Mapping[ProfileKey, Stored]) -> None:
    """Put whole profiles in the outbox, as they are in this transaction."""
    messages = [
        Message(
            key=f"{key[0]}/{key[1]}",
            version=row.public_version,
            event_time_us=tx.now_us,
            schema="profile/1",
            payload=whole(key, row.body, row.segments, row.public_version),
        )
        for key, row in profiles.items()
    ]
    outbox.put(tx, product.topics, PROFILES_TOPIC.name, messages)
