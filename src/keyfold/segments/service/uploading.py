"""Snapshots that somebody sends: parts over HTTP, files by the command line. What arrives is checked at once."""

import os
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from msgspec import Struct

from keyfold.core.clock import SECOND_US
from keyfold.core.errors import BadInput, Conflict, NotFound
from keyfold.core.store import Store, Transaction
from keyfold.core.store.batch import Columns
from keyfold.core.store.shapes import delete, insert_new, load
from keyfold.segments.difference import SnapshotWrong, as_text, checked
from keyfold.segments.service import queueing, snapshots
from keyfold.segments.service.describing import described
from keyfold.segments.service.queueing import Queued
from keyfold.segments.service.snapshots import (
    USER_ID,
    WRITING,
    Location,
    Snapshots,
    columns_of,
    open_parquet,
    told,
)
from keyfold.segments.tables import SEGMENT_UPLOADS

if TYPE_CHECKING:
    import pyarrow as pa

# Longer than any caller tries again, and than the files of a snapshot that nobody names are kept.
FINISHED_SECONDS = 30 * 86_400
PARTS_MAX = 10_000
ROWS = 65_536
_UPLOAD_ID = re.compile(r"[0-9a-f]{32}")


class PartTaken(Struct, frozen=True):
    """A part of an upload that is there."""

    number: int
    rows: int
    first: str
    last: str


def accept(store: Store, segment_id: str, location: Location, rows: int, upload_id: str | None = None) -> Queued:
    """Give a snapshot that is written its version, and put the segment into the queue; an upload only once."""

    def work(tx: Transaction) -> Queued:
        row = queueing.one(tx, segment_id)
        queueing.must_be_on(row)
        version = row.evaluation_version + 1
        if upload_id is not None:
            mark: Columns = {
                "upload_id": [upload_id],
                "segment_id": [segment_id],
                "evaluation_version": [version],
                "stored_at_us": [tx.now_us],
            }
            if not insert_new(tx, SEGMENT_UPLOADS, mark):
                return row  # it was accepted, and its answer was lost
        return snapshots.take(tx, row, version, location, rows)

    return store.transact(work, name="segment snapshot", once=True)


def upload(store: Store, found: Snapshots, segment_id: str, ids: "Iterable[pa.Array]", name: str) -> Queued:
    """Take a whole snapshot."""
    must_take_uploads(store, segment_id)
    written = found.write(segment_id, ids, name)
    return accept(store, segment_id, written.location, written.rows)  # where it fails the collector deletes the files


def forget_finished(tx: Transaction, rows_max: int) -> int:
    """Forget uploads that were finished long ago, some at a time."""
    marks = SEGMENT_UPLOADS.c
    old = sa.select(marks.upload_id).where(marks.stored_at_us < tx.now_us - FINISHED_SECONDS * SECOND_US)
    return delete(tx, SEGMENT_UPLOADS, {"upload_id": tx.execute(old.limit(rows_max)).scalars().all()})


def must_take_uploads(store: Store, segment_id: str) -> None:
    def look(tx: Transaction) -> None:
        queueing.must_be_on(queueing.one(tx, segment_id))
        if table := described(tx, [segment_id])[segment_id].source_table:
            raise Conflict(f"{segment_id} is evaluated over {table}", hint="Evaluate it, or make another segment")

    store.read(look)


class Uploads:
    """Uploads in parts: each is a file until the last is there. Sending a part again replaces it."""

    def __init__(self, store: Store, found: Snapshots) -> None:
        self._store = store
        self._snapshots = found

    def begin(self, segment_id: str) -> str:
        must_take_uploads(self._store, segment_id)
        begun = len(list((self._snapshots.root / segment_id).glob(f"*{WRITING}")))
        if begun >= self._snapshots.settings.uploads_max:
            raise Conflict(
                f"{begun} uploads of {segment_id} are begun and not finished",
                hint=f"Finish one; what is left alone is forgotten after {self._snapshots.settings.upload_hours} hours",
            )
        upload_id = secrets.token_hex(16)
        self._snapshots.begin(segment_id, upload_id)
        return upload_id

    def put(self, segment_id: str, upload_id: str, number: int, user_ids: Sequence[int | str]) -> PartTaken:
        """Keep one part; it must ascend in itself, and its neighbours are looked at when the upload is finished."""
        import pyarrow as pa
        from pyarrow import parquet

        folder = self._known(segment_id, upload_id)
        ids = arrow_ids(user_ids)
        first, last, _ = _ends((ids[at : at + ROWS] for at in range(0, len(ids), ROWS)), f"part {number}")
        path = folder / f"{number:06}.parquet"
        aside = folder / f"{number:06}.{secrets.token_hex(4)}.aside"
        try:
            with told():
                parquet.write_table(pa.table({USER_ID: ids}), aside, use_dictionary=False, compression="lz4")
                with aside.open("rb") as file:
                    os.fsync(file.fileno())
                os.rename(aside, path)
        except FileNotFoundError:
            raise _unknown(upload_id) from None
        finally:
            aside.unlink(missing_ok=True)
        return PartTaken(number, len(ids), as_text(first), as_text(last))

    def finish(self, segment_id: str, upload_id: str, parts: int) -> Queued:
        """All parts are there: they become the next snapshot of the segment. A repeat is answered as the first."""
        must_take_uploads(self._store, segment_id)
        if (done := self._finished(segment_id, upload_id)) is not None:
            return done
        location, rows = self._published(segment_id, upload_id, parts)
        return accept(self._store, segment_id, location, rows, upload_id)

    def _finished(self, segment_id: str, upload_id: str) -> Queued | None:
        def look(tx: Transaction) -> Queued | None:
            known = load(tx, SEGMENT_UPLOADS, {"upload_id": [upload_id]}, ("segment_id",))
            is_done = [name for (name,) in known.values()] == [segment_id]
            return queueing.one(tx, segment_id) if is_done else None

        return self._store.read(look)

    def _published(self, segment_id: str, upload_id: str, parts: int) -> tuple[Location, int]:
        """The parts as a snapshot; also where an earlier try came so far and no further."""
        published = self._snapshots.root / segment_id / upload_id
        is_published = bool(_UPLOAD_ID.fullmatch(upload_id)) and published.is_dir()
        folder = published if is_published else self._known(segment_id, upload_id)
        paths = [folder / f"{number:06}.parquet" for number in range(1, parts + 1)]
        there = {path for path in folder.iterdir() if path.suffix == ".parquet"}
        if missing := [path for path in paths if path not in there]:
            raise BadInput(f"part {int(missing[0].stem)} is not there", place="parts", hint="Parts are numbered from 1")
        if len(there) > parts:
            raise BadInput(f"there are {len(there)} parts, not {parts}", place="parts")
        rows = _must_follow(paths)
        if is_published:
            os.utime(published)  # the time to be named within begins again
            return Location(folder=str(published.relative_to(self._snapshots.root))), rows
        for left in folder.glob("*.aside"):
            left.unlink(missing_ok=True)
        try:
            with told():
                return self._snapshots.publish(folder), rows
        except FileNotFoundError:
            raise _unknown(upload_id) from None

    def _known(self, segment_id: str, upload_id: str) -> Path:
        folder = self._snapshots.aside(segment_id, upload_id)
        if not _UPLOAD_ID.fullmatch(upload_id) or not folder.is_dir():
            raise _unknown(upload_id)
        return folder


def arrow_ids(user_ids: Sequence[int | str]) -> "pa.Array":
    """Ids as they come in JSON: all numbers, or all text."""
    import pyarrow as pa

    is_text = isinstance(user_ids[0], str) if user_ids else False
    for at, each in enumerate(user_ids):
        if isinstance(each, str) != is_text:
            raise SnapshotWrong("numbers and text in one part", place=f"user_ids[{at}]")
    return pa.array(user_ids, pa.string() if is_text else pa.uint64())


def line_ids(lines: Iterable[str], id_type: str, batch_rows: int) -> "Iterator[pa.Array]":
    """Ids of a text file, one a line."""
    batch: list[Any] = []
    for number, line in enumerate(lines, 1):
        text = line.rstrip("\r\n")
        if id_type == "number":
            if not (text.isascii() and text.isdigit() and len(text) <= 20 and int(text) < 2**64):
                raise SnapshotWrong(
                    f"{text[:50]!r} is not a number of 64 bits", place=f"line {number}", hint="--ids text reads text"
                )
            batch.append(int(text))
        elif any("\ud800" <= each <= "\udfff" for each in text):  # as stdin gives bytes that are no text
            raise SnapshotWrong("this is not text in UTF-8", place=f"line {number}")
        else:
            batch.append(text)
        if len(batch) >= batch_rows:
            yield arrow_ids(batch)
            batch = []
    if batch:
        yield arrow_ids(batch)


def _must_follow(paths: Sequence[Path]) -> int:
    """Every part begins behind the end of the one before it."""
    rows, last = 0, None
    for path in paths:
        place = f"part {int(path.stem)}"
        with open_parquet(path, place) as file:
            first, following, count = _ends(columns_of(file.iter_batches(ROWS, columns=[USER_ID])), place)
        if last is not None and isinstance(first, bytes) != isinstance(last, bytes):
            raise SnapshotWrong("numbers in one part and text in another", place=place)
        if last is not None and first <= last:
            raise SnapshotWrong(
                f"user {as_text(first)} does not come after {as_text(last)}, the last of the part before", place=place
            )
        rows, last = rows + count, following
    return rows


def _ends(batches: "Iterable[pa.Array]", name: str) -> tuple[Any, Any, int]:
    """The first and the last id of a part that must not be empty, and how many there are; a batch in memory at once.

    Ids of text are compared in the width of the longest: one long id among a part's million would take gigabytes.
    """
    first = last = None
    rows = 0
    for keys in checked(batches, name):
        first = keys[0] if first is None else first
        rows, last = rows + len(keys), keys[-1]
    return first, last, rows


def _unknown(upload_id: str) -> NotFound:
    return NotFound(f"there is no upload {upload_id!r}", hint="It was finished, or was forgotten: begin another")
