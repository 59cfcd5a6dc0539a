"""Export of all profiles to Parquet: one row a profile with the message `Profile`, visible whole or not at all."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import sqlalchemy as sa
from msgspec import Struct

from keyfold.core.errors import BadInput, Conflict
from keyfold.core.files import arrow_and_parquet, sync
from keyfold.core.store import Store, Transaction
from keyfold.counters.errors import PackWrong
from keyfold.profiles.model import ProfileKey
from keyfold.profiles.service.message import current, whole
from keyfold.profiles.service.product import Product
from keyfold.profiles.service.storing import Stored, next_profiles, public_rows
from keyfold.profiles.tables import PROFILES

PAGE = 2_000


class Exported(Struct, frozen=True):
    path: str
    profiles: int
    broken: int  # left out, because their stored body breaks an invariant


def export(
    store: Store, product: Product, path: Path, *, profile_type: str | None = None, report: Callable[[int], None]
) -> Exported:
    """Write every public profile, in the order of type and id; the bodies of each page are read in one statement.

    The file is written aside, synced and renamed: whoever looks sees the old one or the whole new one.
    """
    try:
        return _exported(store, product, path, profile_type, report)
    except OSError as error:
        raise BadInput(f"{path} cannot be written: {error.strerror or error}") from None


def _exported(
    store: Store, product: Product, path: Path, profile_type: str | None, report: Callable[[int], None]
) -> Exported:
    arrow, parquet = arrow_and_parquet()
    if path.exists() and not path.is_file():
        raise Conflict(f"{path} is there and is not a file")
    if not path.parent.is_dir():
        raise BadInput(f"there is no folder {path.parent}")
    schema = arrow.schema(
        [("type", arrow.string()), ("id", arrow.string()), ("version", arrow.uint64()), ("profile", arrow.binary())]
    )
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    count = broken = 0
    try:
        with parquet.ParquetWriter(aside, schema, compression="zstd") as writer:
            for page, wrong in _pages(store, product, profile_type):
                columns = [list(column) for column in zip(*page, strict=True)] if page else [[], [], [], []]
                writer.write_table(arrow.table(dict(zip(schema.names, columns, strict=True)), schema=schema))
                count, broken = count + len(page), broken + wrong
                report(count)
        sync(aside)
        os.replace(aside, path)
        sync(path.parent)
    finally:
        aside.unlink(missing_ok=True)
    return Exported(str(path), count, broken)


def pages_of(tx: Transaction, profile_type: str | None) -> int:
    """How many pages there are to export, about."""
    count = sa.select(sa.func.count()).select_from(PROFILES).where(PROFILES.c.public_version > 0)
    if profile_type is not None:
        count = count.where(PROFILES.c.profile_type == profile_type)
    return int(tx.execute(count).scalar_one()) // PAGE + 1


Exportable = tuple[str, str, int, bytes]


def _pages(store: Store, product: Product, profile_type: str | None) -> Iterator[tuple[list[Exportable], int]]:
    after: ProfileKey | None = ("", "")
    while after is not None:
        rows, after, now = store.read(partial(_page, product=product, after=after, profile_type=profile_type))
        page = [_exportable(product, key, row, now) for key, row in rows.items()]
        yield [each for each in page if each is not None], sum(each is None for each in page)


def _page(
    tx: Transaction, product: Product, after: ProfileKey, profile_type: str | None
) -> tuple[dict[ProfileKey, Stored], ProfileKey | None, int]:
    wanted = PROFILES.c.public_version > 0
    if profile_type is not None:
        wanted &= PROFILES.c.profile_type == profile_type
    rows, last = next_profiles(tx, after, (), wanted, PAGE, product.settings.read_bytes_max)
    return public_rows(tx, [(row.profile_type, row.profile_id) for row in rows]), last, tx.now_us // 1_000_000


def _exportable(product: Product, key: ProfileKey, row: Stored, now: int) -> Exportable | None:
    """What has expired since the last change is left out, as in every answer."""
    try:
        body = current(product.catalog, row.body, now)
    except PackWrong:
        return None
    return (*key, row.public_version, whole(key, body, row.segments, row.public_version))
