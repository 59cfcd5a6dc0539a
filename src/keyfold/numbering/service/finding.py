"""Look-ups in both directions without reading the whole state: an index of sorted files beside it.

`by_place` holds the rows of the state in the order of their places, `by_key` the places in the order of their keys'
hash. Small row groups with their least and greatest values tell where to look: a look-up reads a few of them. What it
reads is compared with what was written, block by block: an answer comes from no other bytes than those.
"""

import bisect
import contextlib
import hashlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from msgspec import Struct

from keyfold.bulk import engines
from keyfold.bulk.folders import MANIFEST, Draft, FileEntry, FolderBroken, FolderUnreachable, Root
from keyfold.core.errors import Conflict, NotFound, Unavailable
from keyfold.core.files import arrow_and_parquet
from keyfold.numbering.expressions import PLACES
from keyfold.numbering.model import Key, Place
from keyfold.numbering.service import states
from keyfold.numbering.service.states import Stored

GROUP_ROWS = 16_384
BLOCK_BYTES = 64 * 1024
BY_PLACE, BY_KEY = "by_place.parquet", "by_key.parquet"
HASH_DIGITS = 15
_DIGITS = 16  # of the checksum of a block


class Found(Struct, frozen=True):
    """An offer and its place."""

    business_id: int
    offer_id: str
    shop_id: int
    warehouse_id: int
    shard_id: int
    doc_id: int
    generation: int
    is_reused: bool
    seen_run: int

    @property
    def key(self) -> Key:
        return Key(self.business_id, self.offer_id, self.shop_id, self.warehouse_id)

    @property
    def place(self) -> Place:
        return Place(self.shard_id, self.doc_id)


class IndexFile(Struct, frozen=True):
    """A file of an index, and the checksums of its blocks, one after the other."""

    path: str
    bytes: int
    sums: str


class IndexManifest(Struct, frozen=True):
    """Which state an index is of, and its files."""

    checksum: str
    files: list[IndexFile]


class IndexLacking(Unavailable):
    """A state has no look-up index yet"""

    slug = "index-lacking"


INDEX = ".index"
MENDING = "keyfold number index builds it again"


def index_path(path: str) -> str:
    return f"{path}{INDEX}"


def build(state: Stored, megabytes_max: int, scratch: Path | None = None, *, is_verified: bool = False) -> None:
    """Write the index beside a state, where there is none of it yet; or none that is whole, if that is verified."""
    root, path = _beside(state)
    if _is_built(state, is_verified=is_verified):
        return
    if root.exists(path):
        root.remove(path)
    draft = Draft(root, path, scratch)
    try:
        with (
            engines.failing("duckdb"),
            states.at_hand(state, ("places",), scratch) as files,
            engines.scratch_folder("keyfold-index", scratch) as spill,
        ):
            connection = engines.duckdb_connection(megabytes_max, spill)
            try:
                connection.raw_sql("SET preserve_insertion_order = true")
                _write(connection, files["places"], draft.folder)
            finally:
                connection.disconnect()
        entries = [_entry(draft.folder, written) for written in draft.files()]
        draft.publish(msgspec.json.encode(IndexManifest(state.checksum, entries)))
    except Conflict:
        draft.drop()  # somebody else has built it meanwhile
    except BaseException:
        draft.drop()
        raise


def _is_built(state: Stored, *, is_verified: bool) -> bool:
    try:
        manifest = _manifest(state)
        if is_verified:
            _verify(state, manifest)
    except (IndexLacking, FolderBroken):
        return False
    return True


def _verify(state: Stored, manifest: IndexManifest) -> None:
    """Read an index whole."""
    root, path = _beside(state)
    for entry in manifest.files:
        with _checked(root, path, entry) as file:
            while file.read(BLOCK_BYTES):
                pass


def _manifest(state: Stored) -> IndexManifest:
    """What the index of a state is, as far as there is one and it is of this state."""
    root, path = _beside(state)
    try:
        manifest = msgspec.json.decode(root.read(f"{path}/{MANIFEST}"), type=IndexManifest)
    except NotFound:
        raise IndexLacking(f"{state.where} has no look-up index", hint="Build it: keyfold number index") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise FolderBroken(f"the index of {state.where} cannot be read: {error}", hint=MENDING) from None
    if manifest.checksum != state.checksum:
        raise FolderBroken(f"the index of {state.where} is of another state", hint=MENDING)
    return manifest


def _entry(folder: Path, written: FileEntry) -> IndexFile:
    with (folder / written.path).open("rb") as file:
        return IndexFile(written.path, written.bytes, _sums(file))


def _opened(root: Root, path: str, name: str) -> Any:
    try:
        return root.open(f"{path}/{name}")
    except NotFound:
        raise FolderBroken(f"the index {root.shown(path)} has lost {name}", hint=MENDING) from None


def _write(connection: Any, files: Sequence[str], folder: Path) -> None:
    listed = ", ".join(engines.quoted(engines.exactly(file)) for file in files)
    source = f"read_parquet([{listed}], hive_partitioning = false)" if files else f"(SELECT {_nothing()} WHERE false)"
    options = f"(FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE {GROUP_ROWS})"
    text = "business_id || '/' || shop_id || '/' || warehouse_id || '/' || offer_id"
    columns = ", ".join(PLACES)
    connection.raw_sql(
        f"COPY (SELECT {columns} FROM {source} ORDER BY shard_id, doc_id)"  # noqa: S608
        f" TO {engines.quoted(str(folder / BY_PLACE))} {options}"
    )
    connection.raw_sql(
        f"COPY (SELECT ('0x' || md5({text})[1:{HASH_DIGITS}])::BIGINT AS key_hash, shard_id, doc_id FROM {source}"  # noqa: S608
        f" ORDER BY key_hash) TO {engines.quoted(str(folder / BY_KEY))} {options}"
    )


def _nothing() -> str:
    kinds = {"int64": "BIGINT", "int32": "INTEGER", "string": "VARCHAR", "boolean": "BOOLEAN"}
    return ", ".join(f"NULL::{kinds[kind]} AS {name}" for name, kind in PLACES.items())


class Index:
    """An opened index."""

    def __init__(self, state: Stored) -> None:
        manifest = _manifest(state)
        root, path = _beside(state)
        self._where = root.shown(path)
        with contextlib.ExitStack() as opened:
            files = {entry.path: opened.enter_context(_checked(root, path, entry)) for entry in manifest.files}
            self._by_place = self._sorted(files, BY_PLACE, ("shard_id", "doc_id"))
            self._by_key = self._sorted(files, BY_KEY, ("key_hash",))
            self._open = opened.pop_all()

    def __enter__(self) -> "Index":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._open.close()

    def _sorted(self, files: "dict[str, Checked]", name: str, columns: Sequence[str]) -> "_Sorted":
        if name not in files:
            raise FolderBroken(f"the index {self._where} lists no {name}", hint=MENDING)
        with self._failing():
            return _Sorted(files[name], columns)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """A file system that fails, or files that are not what was written, in our words."""
        try:
            yield
        except (NotFound, ValueError, NotImplementedError, OSError) as error:
            if isinstance(error, OSError) and error.errno:
                raise FolderUnreachable(f"{self._where}: {error.strerror or error}") from error
            raise FolderBroken(f"the index {self._where} cannot be read: {error}", hint=MENDING) from error

    def by_places(self, places: Sequence[Place]) -> dict[Place, Found]:
        """Who has these places; those that nobody has are left out."""
        wanted = {_place_number(*place) for place in places if max(place) < _SHARD and min(place) >= 0}
        with self._failing():
            rows = self._by_place.rows(sorted(wanted))
        found = (Found(**{name: row[name] for name in PLACES}) for row in rows)
        return {each.place: each for each in found}

    def by_keys(self, keys: Sequence[Key]) -> dict[Key, Found]:
        """The places of these keys; those that have none are left out."""
        hashes = sorted({_hash(key) for key in keys})
        with self._failing():
            candidates = [Place(row["shard_id"], row["doc_id"]) for row in self._by_key.rows(hashes)]
        wanted = set(keys)
        return {each.key: each for each in self.by_places(candidates).values() if each.key in wanted}


class Checked(io.RawIOBase):
    """A file of an index; every block that is read is compared with what was written."""

    def __init__(self, file: Any, entry: IndexFile, where: str) -> None:
        self._file, self._entry, self._where = file, entry, where
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._entry.bytes}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        begin, end = self._at, min(self._at + len(buffer), self._entry.bytes)
        if begin >= end:
            return 0
        first = begin // BLOCK_BYTES
        data = self._blocks(first, -(-end // BLOCK_BYTES))
        wanted = data[begin - first * BLOCK_BYTES : end - first * BLOCK_BYTES]
        buffer[: len(wanted)] = wanted
        self._at = end
        return len(wanted)

    def _blocks(self, first: int, last: int) -> bytes:
        """Some blocks, each as it was written."""
        self._file.seek(first * BLOCK_BYTES)
        size = min(last * BLOCK_BYTES, self._entry.bytes) - first * BLOCK_BYTES
        data = bytes(self._file.read(size))
        if len(data) != size or _sums(io.BytesIO(data)) != self._entry.sums[_DIGITS * first : _DIGITS * last]:
            raise FolderBroken(f"{self._entry.path} of the index {self._where} was altered", hint=MENDING)
        return data


@contextlib.contextmanager
def _checked(root: Root, path: str, entry: IndexFile) -> Iterator[Checked]:
    with contextlib.closing(_opened(root, path, entry.path)) as file:
        yield Checked(file, entry, root.shown(path))


def _sums(file: BinaryIO) -> str:
    """The checksums of the blocks of a file."""
    blocks = iter(lambda: file.read(BLOCK_BYTES), b"")
    return "".join(hashlib.blake2b(block, digest_size=_DIGITS // 2).hexdigest() for block in blocks)


def look_up(state: Stored, keys: Sequence[Key], places: Sequence[Place]) -> tuple[dict[Key, Found], dict[Place, Found]]:
    """The places of keys and who has places, by the index of a state."""
    with Index(state) as index:
        return index.by_keys(keys), index.by_places(places)


class _Sorted:
    """A Parquet file in the order of a number that its columns make."""

    def __init__(self, file: Any, columns: Sequence[str]) -> None:
        _, parquet = arrow_and_parquet()
        self._columns = columns
        self._file = parquet.ParquetFile(file)
        metadata = self._file.metadata
        names = [metadata.schema.column(at).name for at in range(metadata.num_columns)]
        first = names.index(columns[0])
        # By the first column alone: groups of one value follow each other.
        statistics = [metadata.row_group(group).column(first).statistics for group in range(metadata.num_row_groups)]
        self._least = [each.min for each in statistics]
        self._greatest = [each.max for each in statistics]
        self._second: list[tuple[int, int]] | None = None
        if len(columns) > 1:
            second = names.index(columns[1])
            of_second = [
                metadata.row_group(group).column(second).statistics for group in range(metadata.num_row_groups)
            ]
            self._second = [(each.min, each.max) for each in of_second]

    def rows(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """The rows of these numbers, which are sorted."""
        import numpy as np

        wanted = np.asarray(numbers, dtype=np.int64)
        found: list[dict[str, Any]] = []
        for group in sorted({group for number in numbers for group in self._groups(number)}):
            table = self._file.read_row_group(group)
            parts = [table.column(name).to_numpy() for name in self._columns]
            chosen = np.flatnonzero(np.isin(_numbers(parts), wanted))
            if len(chosen):
                found.extend(table.take(chosen).to_pylist())
        return found

    def _groups(self, number: int) -> range | list[int]:
        first, second = (number, None) if self._second is None else divmod(number, _SHARD)
        begin, end = bisect.bisect_left(self._greatest, first), bisect.bisect_right(self._least, first)
        if self._second is None or second is None:
            return range(begin, end)
        # A group that holds the end of one shard and the beginning of the next has the widest bounds: look there too.
        return [at for at in range(begin, end) if self._second[at][0] <= second <= self._second[at][1]]


_SHARD = 2**31


def _place_number(shard_id: int, doc_id: int) -> int:
    return shard_id * _SHARD + doc_id


def _numbers(parts: Sequence[Any]) -> Any:
    import numpy as np

    first = parts[0].astype(np.int64)
    return first if len(parts) == 1 else first * _SHARD + parts[1]


def _hash(key: Key) -> int:
    text = f"{key.business_id}/{key.shop_id}/{key.warehouse_id}/{key.offer_id}"
    # What is no Unicode has a hash that no stored key has.
    return int(hashlib.md5(text.encode(errors="surrogatepass"), usedforsecurity=False).hexdigest()[:HASH_DIGITS], 16)


def _beside(state: Stored) -> tuple[Root, str]:
    """Where the index of a state lies: beside its folder."""
    if state.path:
        return state.root, index_path(state.path)
    above, slash, name = state.root.url.rstrip("/").rpartition("/")
    return Root(f"{above}{slash}" or "."), index_path(name)
