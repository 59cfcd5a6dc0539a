"""Snapshots: sorted user ids of a segment at a version, as Parquet files that never change, or read in place.

A snapshot is written aside, synced, and becomes visible under its own name, which no other ever has; only then does a
row name it. Files that no row names are deleted some time later.
"""

import contextlib
import errno
import os
import shutil
import time
import uuid
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import sqlalchemy as sa
from msgspec import Struct

from keyfold.core.context import Context
from keyfold.core.errors import NotFound, StoreFull, Unavailable
from keyfold.core.files import arrow_and_parquet, make_folder, sync
from keyfold.core.store import Store, Transaction
from keyfold.core.store.batch import Columns
from keyfold.core.store.shapes import insert, load
from keyfold.core.tables import TOPICS
from keyfold.segments.difference import IdType, Keys, SnapshotWrong, ahead, as_key, checked, id_type_of, is_number
from keyfold.segments.service import queueing, sources
from keyfold.segments.service.queueing import Queued
from keyfold.segments.settings import SegmentsSettings
from keyfold.segments.tables import SEGMENT_SNAPSHOTS

if TYPE_CHECKING:
    import pyarrow as pa

USER_ID = "user_id"
ROW_GROUP_ROWS = 262_144
WRITING, DELETING = ".writing", ".deleting"
# A folder that no row names may belong to a transaction that has yet to commit.
GRACE_SECONDS = 3_600
UNKNOWN = "?"


class FolderRefused(Unavailable):
    """The folder of snapshots is full, not there, or cannot be written"""

    slug = "folder-refused"


class Location(Struct, frozen=True, omit_defaults=True):
    """Where the ids are: a folder of Parquet files below ours, or the rows of a table that say this version."""

    folder: str = ""
    table: str = ""
    segment_id: str = ""
    version: int = 0


class Snapshot(Struct, frozen=True):
    """A snapshot that a row names."""

    location: Location
    rows: int


class Written(Struct, frozen=True):
    location: Location
    rows: int
    id_type: IdType | None


def known(tx: Transaction, segment_id: str, version: int) -> Snapshot | None:
    keys: Columns = {"segment_id": [segment_id], "evaluation_version": [version]}
    for location, rows in load(tx, SEGMENT_SNAPSHOTS, keys, ("location", "rows")).values():
        return Snapshot(msgspec.json.decode(location, type=Location), rows)
    return None


def find(tx: Transaction, segment_id: str, version: int) -> Snapshot:
    found = known(tx, segment_id, version)
    if found is None:
        raise NotFound(f"there is no snapshot {version} of {segment_id}", hint="Evaluate or upload it again")
    return found


def name(tx: Transaction, segment_id: str, version: int, location: Location, rows: int) -> None:
    """Say where the snapshot of a version is."""
    row: Columns = {
        "segment_id": [segment_id],
        "evaluation_version": [version],
        "location": [msgspec.json.encode(location).decode()],
        "rows": [rows],
        "made_at_us": [tx.now_us],
    }
    insert(tx, SEGMENT_SNAPSHOTS, row)


def take(tx: Transaction, row: Queued, version: int, location: Location, rows: int) -> Queued:
    """Make a snapshot the newest of its segment, and queue its diff."""
    name(tx, row.segment_id, version, location, rows)
    changed = queueing.arrived(tx, row, version)
    forget(tx, changed)
    return changed


def forget(tx: Transaction, row: Queued) -> None:
    """Forget the snapshots that no diff of this segment will read any more."""
    wanted = {each for each in (row.diff_version, row.target_version, row.evaluation_version) if each is not None}
    named = SEGMENT_SNAPSHOTS.c
    tx.execute(
        sa.delete(SEGMENT_SNAPSHOTS).where(
            named.segment_id == row.segment_id, named.evaluation_version.not_in(sorted(wanted))
        )
    )


class Reading:
    """One reading of a snapshot, from its beginning or from behind an id; no snapshot is an empty one."""

    def __init__(self, snapshots: "Snapshots", snapshot: Snapshot | None, name: str, after: str | None = None) -> None:
        self._snapshots = snapshots
        self._snapshot = snapshot
        self._name = name
        self._after = after
        self._rows = self._crc = 0

    def keys(self) -> Iterator[Keys]:
        if self._snapshot is None:
            return
        in_place, last = bool(self._snapshot.location.table), None
        stream = self._snapshots.stream(self._snapshot.location, self._name, self._after)
        is_large = self._snapshot.rows > self._snapshots.settings.batch_rows
        for keys in ahead(stream) if is_large else stream:
            if last is not None and keys[0] <= last:
                raise SnapshotWrong("a file begins before the one before it ends", place=self._name)
            last = keys[-1]
            if in_place:
                self._rows += len(keys)
                self._crc = zlib.crc32(_bytes_of(keys), self._crc)
            yield keys

    def fingerprint(self) -> str:
        """Of the snapshot after it was read; of a table, what was read of it."""
        if self._snapshot is None or not self._snapshot.location.table:
            return self._snapshots.fingerprint(self._snapshot)
        return UNKNOWN if self._after is not None else f"{self._rows} rows, {self._crc:08x}"


class Snapshots:
    """The snapshots of a product: read, written, deleted."""

    def __init__(self, settings: SegmentsSettings, root: Path) -> None:
        self.settings = settings
        self.root = root

    @classmethod
    def of(cls, context: Context, settings: SegmentsSettings) -> "Snapshots":
        """The snapshots of a store lie apart from those of any other: each deletes what it does not know."""
        made = sa.select(TOPICS.c.made_at_us).where(TOPICS.c.topic == settings.topic)
        made_at_us = context.store.read(lambda tx: tx.execute(made).scalar_one())
        return cls(settings, Path(settings.folder) / f"store-{made_at_us}")

    def stream(self, location: Location, name: str, after: str | None = None) -> Iterator[Keys]:
        """The ids behind `after`, checked within each file, some rows at a time."""
        if location.table:
            yield from self._table_stream(location, name, after)
            return
        for path in self._files(location):
            yield from self._file_stream(path, f"{name}, {path.name}", after)

    def contains(self, snapshot: Snapshot, user_id: str) -> bool:
        """Whether a user is in a snapshot; a file tells by its statistics which part of it to read."""
        if snapshot.location.table:
            return sources.contains(self.settings, snapshot.location, user_id)
        for path in self._files(snapshot.location):
            for keys in self._file_stream(path, path.name, None, only=user_id):
                key = as_key_like(user_id, keys)
                if key is None:
                    return False
                at = int(np.searchsorted(keys, key))
                if at < len(keys) and keys[at] == key:
                    return True
        return False

    def fingerprint(self, snapshot: Snapshot | None) -> str:
        """What changes when somebody changes the files of a snapshot behind our back; of a table it is not known."""
        if snapshot is None or snapshot.location.table:
            return "none" if snapshot is None else UNKNOWN
        stats = [(path.name, path.stat()) for path in self._files(snapshot.location)]
        said = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
        return f"{zlib.crc32(msgspec.json.encode(said)):08x}"

    def write(self, segment_id: str, ids: "Iterable[pa.Array]", name: str) -> Written:
        """Write a snapshot, checking it; whoever looks sees nothing or the whole."""
        pa, pq = arrow_and_parquet()
        aside = self.begin(segment_id, uuid.uuid4().hex)
        rows, kind, writer = 0, None, None
        try:
            with told():
                for keys in checked(ids, name):
                    kind = kind or id_type_of(keys)
                    array = pa.array(keys) if kind == "number" else pa.array([key.decode() for key in keys.tolist()])
                    table = pa.table({USER_ID: array})
                    if writer is None:
                        path = aside / "0000.parquet"
                        writer = pq.ParquetWriter(path, table.schema, use_dictionary=False, compression="lz4")
                    writer.write_table(table, row_group_size=ROW_GROUP_ROWS)
                    rows += len(keys)
                if writer is not None:
                    writer.close()
                    writer = None
                    sync(aside / "0000.parquet")
                return Written(self.publish(aside), rows, kind)
        finally:
            if writer is not None:
                writer.close()
            shutil.rmtree(aside, ignore_errors=True)

    def publish(self, aside: Path) -> Location:
        """A folder that was written aside gets its name."""
        made = aside.with_name(aside.name.removesuffix(WRITING))
        os.utime(aside)  # its parts may be old: the time to be named within begins now
        sync(aside)
        os.rename(aside, made)
        sync(made.parent)
        sync(self.root)
        return Location(folder=str(made.relative_to(self.root)))

    def begin(self, segment_id: str, name: str) -> Path:
        """A folder to write to, aside."""
        aside = self.aside(segment_id, name)
        with told():
            make_folder(aside.parent)
            aside.mkdir()
        return aside

    def aside(self, segment_id: str, name: str) -> Path:
        return self.root / segment_id / f"{name}{WRITING}"

    def collect(
        self, store: Store, older_seconds: float = GRACE_SECONDS, unfinished_seconds: float = GRACE_SECONDS
    ) -> int:
        """Delete what no row names any more, and what was never finished; returns how many folders."""
        if not self.root.is_dir():
            return 0
        # Listed first: what is named between the listing and the look at the rows is seen there.
        folders = [each for each in self.root.glob("*/*") if each.is_dir()]
        locations = store.read(lambda tx: tx.execute(sa.select(SEGMENT_SNAPSHOTS.c.location)).scalars().all())
        named = {msgspec.json.decode(location, type=Location).folder for location in locations}
        removed = 0
        for folder in folders:
            age_max = unfinished_seconds if folder.name.endswith(WRITING) else older_seconds
            if str(folder.relative_to(self.root)) not in named and _age(folder) > age_max:
                removed += _delete(folder)
        return removed

    def _files(self, location: Location) -> list[Path]:
        folder = self.root / location.folder
        if not self.root.is_dir():  # not mounted here: no segment is to blame
            raise FolderRefused(f"{self.root} is not there", hint="segments.folder must be the same for all workers")
        if not folder.is_dir():
            raise SnapshotWrong(
                f"the snapshot {folder} is gone", hint="segments.folder must be the same for all workers"
            )
        return sorted(folder.glob("*.parquet"))

    def _file_stream(self, path: Path, name: str, after: str | None, *, only: str | None = None) -> Iterator[Keys]:
        with open_parquet(path, name) as file:
            column, rows = file.schema_arrow.names[0], file.metadata.num_row_groups
            kind: IdType = "text" if _is_text(file.schema_arrow.field(0).type) else "number"
            low = None if after is None else _comparable(after, kind, name)
            groups = [at for at in range(rows) if _may_hold(file, at, low, only, kind)]
            if not groups:
                return
            before = sum(file.metadata.row_group(at).num_rows for at in range(groups[0]))
            batches = file.iter_batches(batch_size=self.settings.batch_rows, row_groups=groups, columns=[column])
            key = None if after is None else as_key(after, kind)
            for keys in checked((batch.column(0) for batch in batches), name, rows_before=before):
                left = keys if key is None else keys[int(np.searchsorted(keys, key, side="right")) :]
                if len(left):
                    yield left

    def _table_stream(self, location: Location, name: str, after: str | None) -> Iterator[Keys]:
        yield from checked(sources.ids_in_place(self.settings, location, after, self.settings.batch_rows), name)


def open_parquet(path: Path, name: str) -> Any:
    """A Parquet file whose memory stays flat: no look-ahead, pages read through a small buffer."""
    pa, pq = arrow_and_parquet()
    try:
        return pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
    except (OSError, pa.ArrowException) as error:
        raise SnapshotWrong(f"the file cannot be read: {error}", place=name) from None


def as_key_like(user_id: str, keys: Keys) -> Any:
    """A user id as these ids are compared; None where it cannot be among them."""
    if id_type_of(keys) == "text":
        return user_id.encode()
    return np.uint64(int(user_id)) if is_number(user_id) else None


def _comparable(user_id: str, kind: IdType, name: str) -> Any:
    if kind == "text":
        return user_id.encode()
    if not is_number(user_id):
        raise SnapshotWrong(f"{name} has number ids, the diff was begun with {user_id!r}")
    return int(user_id)


def _may_hold(file: Any, group: int, low: Any, only: str | None, kind: IdType) -> bool:
    """Whether a row group can hold ids behind `low`, or the one id."""
    statistics = file.metadata.row_group(group).column(0).statistics
    if statistics is None or not statistics.has_min_max or file.metadata.num_columns != 1:
        return True
    least, most = statistics.min, statistics.max
    if kind == "text":
        least, most = least.encode(), most.encode()
    elif least < 0 or most < 0:  # signed in the file; the ids themselves are compared as unsigned
        return True
    if only is not None:
        if kind == "number" and not is_number(only):
            return False
        wanted: Any = int(only) if kind == "number" else only.encode()
        return bool(least <= wanted <= most)
    return low is None or bool(most > low)


def _is_text(kind: Any) -> bool:
    return str(kind).endswith("string")


def _bytes_of(keys: Keys) -> bytes:
    """The same of the same ids, however they were cut into arrays: the width of text is that of the longest in one."""
    return keys.tobytes() if id_type_of(keys) == "number" else b"\0".join([*keys.tolist(), b""])


def _age(folder: Path) -> float:
    try:
        newest = max((each.stat().st_mtime for each in (folder, *folder.iterdir())), default=0.0)
    except FileNotFoundError:
        return 0.0
    return time.time() - newest


def _delete(folder: Path) -> bool:
    """Delete a folder, unless its upload is being finished: it is renamed first, which only one of the two can do."""
    gone = folder if folder.name.endswith(DELETING) else folder.with_name(folder.name + DELETING)
    try:
        os.rename(folder, gone)
    except OSError:
        return False
    shutil.rmtree(gone, ignore_errors=True)
    return True


@contextlib.contextmanager
def told() -> Iterator[None]:
    """What the file system refuses is said as such. A file that is gone is the caller's to explain."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        kind = StoreFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else FolderRefused
        raise kind(f"the snapshot cannot be kept: {error.strerror or error}", place="segments.folder") from None


def columns_of(batches: "Iterable[Any]") -> "Iterator[pa.Array]":
    """The first column of record batches."""
    for batch in batches:
        yield batch.column(0)


def file_ids(paths: Sequence[Path], column: str, batch_rows: int) -> "Iterator[pa.Array]":
    """The ids of Parquet files that somebody gives, one file after the other."""
    for path in paths:
        with open_parquet(path, str(path)) as file:
            names = file.schema_arrow.names
            if column not in names:
                raise SnapshotWrong(
                    f"there is no column {column!r}", place=str(path), hint=f"It has {', '.join(names)}"
                )
            yield from columns_of(file.iter_batches(batch_size=batch_rows, columns=[column]))
