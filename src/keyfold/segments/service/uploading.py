"""Snapshots that somebody sends: parts over HTTP, files by the command line. What arrives is checked at once."""

import os
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from keyfold.core.errors import BadInput, Conflict, NotFound
from keyfold.core.store import Store, Transaction
from keyfold.segments.difference import SnapshotWrong, as_text, checked, id_type_of
from keyfold.segments.service import queueing, snapshots
from keyfold.segments.service.describing import described
from keyfold.segments.service.queueing import Queued
from keyfold.segments.service.snapshots import USER_ID, Location, Snapshots, not_written, open_parquet

if TYPE_CHECKING:
    import pyarrow as pa

PARTS_MAX = 10_000
_UPLOAD_ID = re.compile(r"[0-9a-f]{32}")


class PartTaken(Struct, frozen=True):
    """A part of an upload that is there."""

    number: int
    rows: int
    first: str
    last: str


def accept(store: Store, segment_id: str, location: Location, rows: int) -> Queued:
    """Give a snapshot that is written its version, and put the segment into the queue."""

    def work(tx: Transaction) -> Queued:
        row = queueing.one(tx, segment_id)
        queueing.must_be_on(row)
        version = row.evaluation_version + 1
        snapshots.name(tx, segment_id, version, location, rows)
        changed = queueing.arrived(tx, row, version)
        snapshots.forget(tx, changed)
        return changed

    return store.transact(work, name="segment snapshot", once=True)


def upload(store: Store, found: Snapshots, segment_id: str, ids: "Iterable[pa.Array]", name: str) -> Queued:
    """Take a whole snapshot."""
    must_take_uploads(store, segment_id)
    written = found.write(segment_id, ids, name)
    return accept(store, segment_id, written.location, written.rows)  # where it fails the collector deletes the files


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
        upload_id = secrets.token_hex(16)
        self._snapshots.begin(segment_id, upload_id)
        return upload_id

    def put(self, segment_id: str, upload_id: str, number: int, user_ids: Sequence[int | str]) -> PartTaken:
        """Keep one part; it must ascend in itself, and its neighbours are looked at when the upload is finished."""
        import pyarrow as pa
        from pyarrow import parquet

        folder = self._known(segment_id, upload_id)
        ids = arrow_ids(user_ids)
        (keys,) = checked([ids], f"part {number}")
        path = folder / f"{number:06}.parquet"
        aside = folder / f"{number:06}.{secrets.token_hex(4)}.aside"
        try:
            parquet.write_table(pa.table({USER_ID: ids}), aside, use_dictionary=False, compression="lz4")
            with aside.open("rb") as file:
                os.fsync(file.fileno())
            os.rename(aside, path)
        except FileNotFoundError:
            raise _unknown(upload_id) from None
        except OSError as error:
            aside.unlink(missing_ok=True)
            raise not_written(error) from None
        return PartTaken(number, len(keys), as_text(keys[0]), as_text(keys[-1]))

    def finish(self, segment_id: str, upload_id: str, parts: int) -> Queued:
        """All parts are there: they become the next snapshot of the segment. The answer to a repeat is 404."""
        must_take_uploads(self._store, segment_id)
        folder = self._known(segment_id, upload_id)
        paths = [folder / f"{number:06}.parquet" for number in range(1, parts + 1)]
        there = {path for path in folder.iterdir() if path.suffix == ".parquet"}
        if missing := [path for path in paths if path not in there]:
            raise BadInput(f"part {int(missing[0].stem)} is not there", place="parts", hint="Parts are numbered from 1")
        if len(there) > parts:
            raise BadInput(f"there are {len(there)} parts, not {parts}", place="parts")
        rows = _must_follow(paths)
        try:
            for left in folder.glob("*.aside"):
                left.unlink()
            location = self._snapshots.publish(folder)
        except FileNotFoundError:
            raise _unknown(upload_id) from None
        except OSError as error:
            raise not_written(error) from None
        return accept(self._store, segment_id, location, rows)

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
            if not (text.isascii() and text.isdigit() and int(text) < 2**64):
                raise SnapshotWrong(
                    f"{text[:50]!r} is not a number of 64 bits", place=f"line {number}", hint="--ids text reads text"
                )
            batch.append(int(text))
        else:
            batch.append(text)
        if len(batch) >= batch_rows:
            yield arrow_ids(batch)
            batch = []
    if batch:
        yield arrow_ids(batch)


def _must_follow(paths: Sequence[Path]) -> int:
    """Every part begins behind the end of the one before it."""
    rows, last, kind = 0, None, ""
    for path in paths:
        with open_parquet(path, path.name) as file:
            ids = file.read(columns=[USER_ID]).column(0).combine_chunks()
        (keys,) = checked([ids], f"part {int(path.stem)}")
        if kind and id_type_of(keys) != kind:
            raise SnapshotWrong("numbers in one part and text in another", place=f"part {int(path.stem)}")
        if last is not None and keys[0] <= last:
            raise SnapshotWrong(
                f"user {as_text(keys[0])} does not come after {as_text(last)}, the last of the part before",
                place=f"part {int(path.stem)}",
            )
        rows, last, kind = rows + len(keys), keys[-1], id_type_of(keys)
    return rows


def _unknown(upload_id: str) -> NotFound:
    return NotFound(f"there is no upload {upload_id!r}", hint="It was finished, or was forgotten: begin another")
