"""The difference of two sorted streams of user ids, in memory that does not grow with them.

Ids come as Arrow arrays and are compared as NumPy arrays: numbers as unsigned 64 bits, text as its UTF-8 bytes. A
piece of both streams is merged by a stable sort, which on two sorted runs is one pass (3 ns an id); an id that then
stands alone is the difference. (Searching each id in the other stream took 22 ns.)
"""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from msgspec import Struct

from keyfold.core.errors import BadInput
from keyfold.segments.model import USER_ID_BYTES_MAX

if TYPE_CHECKING:
    import pyarrow as pa

Keys = np.ndarray[Any, np.dtype[Any]]
IdType = Literal["number", "text"]


class SnapshotWrong(BadInput):
    """A snapshot is not what it must be"""

    slug = "snapshot-wrong"


class Piece(Struct, frozen=True, gc=False):
    """The difference of a stretch of both streams: everything up to and including `upto` was looked at."""

    added: Keys
    removed: Keys
    upto: Any
    old_rows: int
    new_rows: int


class Chunk(Struct, frozen=True, gc=False):
    """Changed users in the order of their ids, ready for one transaction; it ends with the id `upto`."""

    user_ids: list[str]
    is_added: list[bool]
    upto: str


class Counts(Struct, frozen=True):
    """What a whole difference comes to."""

    old_rows: int = 0
    new_rows: int = 0
    added: int = 0
    removed: int = 0

    def plus(self, piece: Piece) -> "Counts":
        return Counts(
            self.old_rows + piece.old_rows,
            self.new_rows + piece.new_rows,
            self.added + len(piece.added),
            self.removed + len(piece.removed),
        )


def checked(batches: "Iterable[pa.Array]", name: str, *, rows_before: int = 0) -> Iterator[Keys]:
    """The ids of a snapshot as arrays that ascend without a repeat; anything else is refused with its place."""
    rows, last, kind = rows_before, None, ""
    for batch in batches:
        keys = keys_of(batch, name, rows)
        if not len(keys):
            continue
        if kind and keys.dtype.kind != kind:
            raise SnapshotWrong("numbers and text in one snapshot", place=f"{name}, row {rows + 1}")
        _must_ascend(keys, last, name, rows)
        rows, last, kind = rows + len(keys), keys[-1], keys.dtype.kind
        yield keys


def ahead(arrays: Iterator[Keys], count: int = 2) -> Iterator[Keys]:
    """The same arrays; the next ones are read by a thread of its own while the last is worked on.

    Reading a file and comparing ids are both done without the interpreter, so that two cores share them.
    """
    with ThreadPoolExecutor(1, "snapshot") as thread:
        coming = deque(thread.submit(next, arrays, None) for _ in range(count))
        while (keys := coming.popleft().result()) is not None:
            coming.append(thread.submit(next, arrays, None))
            yield keys


def keys_of(batch: "pa.Array", name: str, rows_before: int = 0) -> Keys:
    """One Arrow array as comparable keys. Whole numbers are read as unsigned; a negative one as its 64 bits."""
    import pyarrow as pa

    kind = batch.type
    if pa.types.is_dictionary(kind):
        batch, kind = batch.cast(kind.value_type), kind.value_type
    if batch.null_count:
        nulls = batch.is_null().to_numpy(zero_copy_only=False)
        raise SnapshotWrong("there is no user id", place=f"{name}, row {rows_before + int(np.argmax(nulls)) + 1}")
    if pa.types.is_integer(kind):
        numbers: Keys = batch.to_numpy(zero_copy_only=False)
        return numbers.astype(np.uint64, copy=False)
    if pa.types.is_decimal(kind) and kind.scale == 0:
        return _decimals(batch, name, rows_before)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _texts(batch, name, rows_before)
    if pa.types.is_null(kind) and not len(batch):
        return np.empty(0, np.uint64)
    raise SnapshotWrong(
        f"user ids are {kind}", place=name, hint="They must be whole numbers of 64 bits, or text: cast the column"
    )


def id_type_of(keys: Keys) -> IdType:
    return "number" if keys.dtype.kind == "u" else "text"


def as_text(key: Any) -> str:
    """An id as the world knows it."""
    return key.decode() if isinstance(key, bytes) else str(int(key))


def is_number(text: str) -> bool:
    """Whether this is how a number of 64 bits is written: there is one way only."""
    return text.isascii() and text.isdigit() and (text == "0" or text[0] != "0") and int(text) < 2**64


def as_key(text: str, id_type: IdType) -> Any:
    """An id as it is compared."""
    return np.uint64(int(text)) if id_type == "number" else text.encode()


def difference(old: Iterator[Keys], new: Iterator[Keys]) -> Iterator[Piece]:
    """What `new` has and `old` has not, and the other way round, stretch by stretch in the order of the ids."""
    left, right = _Side(old), _Side(new)
    while True:
        left.fill()
        right.fill()
        if left.is_done and right.is_done:
            return
        if left.is_done or right.is_done:
            alone = right if left.is_done else left
            keys = alone.take_all()
            none = keys[:0]
            added, removed = (keys, none) if alone is right else (none, keys)
            yield Piece(added, removed, keys[-1], len(removed), len(added))
            continue
        _must_be_alike(left.keys, right.keys)
        upto = min(left.keys[-1], right.keys[-1])
        before, after = left.take(upto), right.take(upto)
        added, removed = _apart(before, after)
        yield Piece(added, removed, upto, len(before), len(after))


def chunked(pieces: Iterable[Piece], users_max: int) -> Iterator[Chunk]:
    """The changed users of a difference, `users_max` together."""
    kept: list[tuple[Keys, Keys]] = []
    count = 0
    for piece in pieces:
        keys = np.concatenate((piece.added, piece.removed))
        if not len(keys):
            continue
        order = np.argsort(keys, kind="stable")
        kept.append((keys[order], order < len(piece.added)))
        count += len(keys)
        while count >= users_max:
            keys, is_added = (np.concatenate(each) for each in zip(*kept, strict=True))
            yield _chunk(keys[:users_max], is_added[:users_max])
            kept, count = [(keys[users_max:], is_added[users_max:])], count - users_max
    if count:
        keys, is_added = (np.concatenate(each) for each in zip(*kept, strict=True))
        yield _chunk(keys, is_added)


class _Side:
    """One stream, with what is left of its last array."""

    def __init__(self, arrays: Iterator[Keys]) -> None:
        self._arrays = arrays
        self.keys: Keys = np.empty(0, np.uint64)
        self.is_done = False

    def fill(self) -> None:
        while not len(self.keys) and not self.is_done:
            following = next(self._arrays, None)
            if following is None:
                self.is_done = True
            else:
                self.keys = following

    def take(self, upto: Any) -> Keys:
        end = int(np.searchsorted(self.keys, upto, side="right"))
        taken, self.keys = self.keys[:end], self.keys[end:]
        return taken

    def take_all(self) -> Keys:
        taken, self.keys = self.keys, self.keys[:0]
        return taken


def _apart(old: Keys, new: Keys) -> tuple[Keys, Keys]:
    merged = np.concatenate((old, new))
    merged.sort(kind="stable")
    same = np.zeros(len(merged) + 1, np.bool_)
    np.equal(merged[1:], merged[:-1], out=same[1:-1])
    single = merged[~(same[1:] | same[:-1])]
    if not len(single):
        return single, single
    if not len(old):
        return single, single[:0]
    at = np.searchsorted(old, single)
    is_old = old[np.minimum(at, len(old) - 1)] == single
    return single[~is_old], single[is_old]


def _chunk(keys: Keys, is_added: Keys) -> Chunk:
    listed = [key.decode() for key in keys.tolist()] if keys.dtype.kind == "S" else list(map(str, keys.tolist()))
    return Chunk(listed, is_added.tolist(), listed[-1])


def _must_be_alike(old: Keys, new: Keys) -> None:
    if old.dtype.kind != new.dtype.kind:
        raise SnapshotWrong(
            f"the old snapshot has {id_type_of(old)} ids, the new one {id_type_of(new)} ids",
            hint="A segment keeps the type of its user ids",
        )


def _must_ascend(keys: Keys, last: Any, name: str, rows: int) -> None:
    if last is not None and keys[0] <= last:
        _refuse(keys[0], last, name, rows + 1)
    wrong = keys[1:] <= keys[:-1]
    if wrong.any():
        at = int(np.argmax(wrong))
        _refuse(keys[at + 1], keys[at], name, rows + at + 2)


def _refuse(key: Any, before: Any, name: str, row: int) -> None:
    what = "stands there twice" if key == before else f"comes after {as_text(before)}"
    order = "numbers ascend as unsigned" if not isinstance(key, bytes) else "text ascends by its UTF-8 bytes"
    raise SnapshotWrong(f"user {as_text(key)} {what}", place=f"{name}, row {row}", hint=f"Sort it: {order}")


def _decimals(batch: "pa.Array", name: str, rows_before: int) -> Keys:
    """From engines without unsigned numbers of 64 bits."""
    values = batch.to_pylist()
    for at, value in enumerate(values):
        if not 0 <= value < 2**64:
            raise SnapshotWrong(f"{value} does not fit in 64 bits", place=f"{name}, row {rows_before + at + 1}")
    return np.array([int(value) for value in values], dtype=np.uint64)


def _texts(batch: "pa.Array", name: str, rows_before: int) -> Keys:
    """Text of any length as a matrix of bytes, one row an id, filled up with zeros, which sort first as they must."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not len(batch):
        return np.empty(0, "S1")
    lengths = pc.binary_length(batch).to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    longest = int(lengths.max())
    wrong = (lengths == 0) | (lengths > USER_ID_BYTES_MAX)
    if wrong.any():
        at = int(np.argmax(wrong))
        what = "is empty" if lengths[at] == 0 else f"is longer than {USER_ID_BYTES_MAX} bytes"
        raise SnapshotWrong(f"a user id {what}", place=f"{name}, row {rows_before + at + 1}")
    wide = batch.cast(pa.large_string())
    begin = int(np.frombuffer(wide.buffers()[1], np.int64)[wide.offset])
    data = np.frombuffer(wide.buffers()[2], np.uint8, count=int(lengths.sum()), offset=begin)
    if not data.all():
        at = int(np.searchsorted(np.cumsum(lengths), int(np.argmin(data)), side="right"))
        raise SnapshotWrong("a user id holds a NUL character", place=f"{name}, row {rows_before + at + 1}")
    if int(lengths.min()) == longest:
        return np.ascontiguousarray(data).view(f"S{longest}")
    matrix = np.zeros((len(lengths), longest), np.uint8)
    matrix[np.arange(longest) < lengths[:, None]] = data
    return matrix.reshape(-1).view(f"S{longest}")
