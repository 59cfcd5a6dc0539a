"""The rows of profiles: loaded for writing, saved, and published whole."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any

import sqlalchemy as sa
from msgspec import Struct

from keyfold.core import outbox
from keyfold.core.errors import TooLarge
from keyfold.core.store import Transaction
from keyfold.core.store.shapes import compare_and_set, load, locking_load, update
from keyfold.core.topics.topic import Message
from keyfold.profiles.model import ProfileKey
from keyfold.profiles.service.message import whole
from keyfold.profiles.service.product import PROFILES_TOPIC, Product
from keyfold.profiles.tables import PROFILE_FLOORS, PROFILES

COUNTED = ("public_version", "body", "held_at_us", "expires_at")
SEGMENTED = ("public_version", "segments", "segments_version")
COLUMNS = ("version", "public_version", "body", "segments", "segments_version", "held_at_us", "expires_at")
KEY = ("profile_type", "profile_id")
_BODY, _SEGMENTS = COLUMNS.index("body"), COLUMNS.index("segments")
_SIZE = (sa.func.length(PROFILES.c.body) + sa.func.length(PROFILES.c.segments)).label("size")
_HAS_SEGMENTS = (sa.func.length(PROFILES.c.segments) > 0).label("has_segments")


class Stored(Struct):
    """The row of a profile, loaded for writing; version 0: it is not there yet."""

    version: int = 0
    public_version: int = 0
    body: bytes = b""
    segments: bytes = b""
    segments_version: int = 0
    held_at_us: int = 0
    expires_at: int = 0

    @property
    def has_segments(self) -> bool:
        return bool(self.segments)


def keys_of(profiles: Iterable[ProfileKey]) -> dict[str, list[Any]]:
    """The keys of profiles as the columns of a batch."""
    listed = list(profiles)
    return {"profile_type": [each for each, _ in listed], "profile_id": [each for _, each in listed]}


def behind(profile: ProfileKey) -> sa.ColumnElement[bool]:
    """Profiles after this one, in the order of their keys: how every walk over all of them goes on."""
    place = sa.tuple_(PROFILES.c.profile_type, PROFILES.c.profile_id)
    return place > sa.tuple_(*(sa.literal(each) for each in profile))


def next_profiles(
    tx: Transaction,
    after: ProfileKey,
    columns: Sequence[str],
    wanted: sa.ColumnElement[bool],
    rows_max: int,
    bytes_max: int,
) -> tuple[Sequence[sa.Row[Any]], ProfileKey | None]:
    """The next step of a walk over the profiles wanted, bounded in rows and in bytes; and where to go on, if anywhere.

    The bytes are those of the profiles, which are not read here: both databases know a length without its value.
    """
    page = tx.execute(
        sa.select(*(PROFILES.c[name] for name in (*KEY, *columns)), _SIZE, _HAS_SEGMENTS)
        .where(behind(after), wanted)
        .order_by(*(PROFILES.c[name] for name in KEY))
        .limit(rows_max)
    ).all()
    fitting = sum(size <= bytes_max for size in accumulate(row.size for row in page))
    rows = page[: max(1, fitting)]  # one always goes, whatever its size
    is_last = len(page) < rows_max and len(rows) == len(page)
    return rows, None if is_last else (rows[-1].profile_type, rows[-1].profile_id)


def public_rows(tx: Transaction, keys: Sequence[ProfileKey]) -> dict[ProfileKey, Stored]:
    """The rows as the world sees them, in the order given, without those that are not there any more."""
    found = load(tx, PROFILES, keys_of(keys), ("public_version", "body", "segments"))
    rows = {key: Stored(public_version=row[0], body=row[1], segments=row[2]) for key in keys if (row := found.get(key))}
    return {key: row for key, row in rows.items() if row.public_version}


def loaded(tx: Transaction, product: Product, keys: Sequence[ProfileKey], *, items: int) -> dict[ProfileKey, Stored]:
    """The rows for writing. SQLite has one writer, who holds the whole file; elsewhere the rows are locked in order.

    They come in steps, so that a batch of large profiles is known as too large before all of them are in memory. Then
    it is halved by whoever gathered it; of a single item it never is too large. Measured: steps take no longer.
    """
    found: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    size, size_max = 0, product.settings.write_bytes_max
    step = max(1, size_max // product.settings.profile_bytes_max)
    for begin in range(0, len(keys), step):
        some = (load if tx.is_sqlite else locking_load)(tx, PROFILES, keys_of(keys[begin : begin + step]), COLUMNS)
        size += sum([len(row[_BODY]) + len(row[_SEGMENTS]) for row in some.values()])
        if size > size_max and items > 1:
            raise TooLarge(
                f"the profiles of one batch have more than the {size_max} bytes that are allowed",
                hint="Send fewer events",
            )
        found |= some
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
    return {**keys_of(rows), **{name: list(map(attrgetter(name), rows.values())) for name in names}}


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
