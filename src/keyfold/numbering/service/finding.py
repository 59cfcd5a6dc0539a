"""Look-ups in both directions without reading the whole state: an index of sorted files beside it.

`by_place` holds the rows of the state in the order of their places, `by_key` the places in the order of their keys'
hash. Small row groups with their least and greatest values tell where to look: a look-up reads a few of them.
"""

import bisect
import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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
HASH_DIGITS = 15


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


class IndexManifest(Struct, frozen=True):
    """Which state an index is of, and its files."""

    checksum: str
    files: list[FileEntry]


class IndexLacking(Unavailable):
    """A state has no look-up index yet"""

    slug = "index-lacking"


INDEX = ".index"


def index_path(path: str) -> str:
    return f"{path}{INDEX}"


def build(state: Stored, megabytes_max: int, scratch: Path | None = None) -> None:
    """Write the index beside a state, where there is none yet."""
    root, path = _beside(state)
    if root.exists(f"{path}/{MANIFEST}"):
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
        draft.publish(msgspec.json.encode(IndexManifest(state.checksum, draft.files())))
    except Conflict:
        draft.drop()  # somebody else has built it meanwhile
    except BaseException:
        draft.drop()
        raise


def _write(connection: Any, files: Sequence[str], folder: Path) -> None:
    listed = ", ".join(engines.quoted(engines.exactly(file)) for file in files)
    source = f"read_parquet([{listed}], hive_partitioning = false)" if files else f"(SELECT {_nothing()} WHERE false)"
    options = f"(FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE {GROUP_ROWS})"
    text = "business_id || '/' || shop_id || '/' || warehouse_id || '/' || offer_id"
    columns = ", ".join(PLACES)
    connection.raw_sql(
        f"COPY (SELECT {columns} FROM {source} ORDER BY shard_id, doc_id)"  # noqa: S608
        f" TO {engines.quoted(str(folder / 'by_place.parquet'))} {options}"
    )
    connection.raw_sql(
        f"COPY (SELECT ('0x' || md5({text})[1:{HASH_DIGITS}])::BIGINT AS key_hash, shard_id, doc_id FROM {source}"  # noqa: S608
        f" ORDER BY key_hash) TO {engines.quoted(str(folder / 'by_key.parquet'))} {options}"
    )


def _nothing() -> str:
    kinds = {"int64": "BIGINT", "int32": "INTEGER", "string": "VARCHAR", "boolean": "BOOLEAN"}
    return ", ".join(f"NULL::{kinds[kind]} AS {name}" for name, kind in PLACES.items())


class Index:
    """An opened index."""

    def __init__(self, state: Stored) -> None:
        root, path = _beside(state)
        try:
            manifest = msgspec.json.decode(root.read(f"{path}/{MANIFEST}"), type=IndexManifest)
        except NotFound:
            raise IndexLacking(f"{state.where} has no look-up index", hint="Build it: keyfold number index") from None
        except msgspec.DecodeError as error:
            raise FolderBroken(f"the index of {state.where} cannot be read: {error}") from None
        if manifest.checksum != state.checksum:
            raise FolderBroken(f"the index of {state.where} is of another state")
        self._where = root.shown(path)
        with contextlib.ExitStack() as opened:
            self._by_place = self._sorted(opened, root, f"{path}/by_place.parquet", ("shard_id", "doc_id"))
            self._by_key = self._sorted(opened, root, f"{path}/by_key.parquet", ("key_hash",))
            self._open = opened.pop_all()

    def __enter__(self) -> "Index":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._open.close()

    def _sorted(self, opened: contextlib.ExitStack, root: Root, path: str, columns: Sequence[str]) -> "_Sorted":
        with self._failing():
            return _Sorted(opened.enter_context(contextlib.closing(root.open(path))), columns)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """A file system that fails, or files that are not what was written, in our words."""
        try:
            yield
        except (NotFound, ValueError, NotImplementedError, OSError) as error:
            if isinstance(error, OSError) and error.errno:
                raise FolderUnreachable(f"{self._where}: {error.strerror or error}") from error
            raise FolderBroken(
                f"the index {self._where} cannot be read: {error}", hint="Delete it, and build it again"
            ) from error

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
