"""Packs as they are stored: their invariants, each with its own error, and the linear reader over them."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from msgspec import Struct
from numpy.typing import NDArray

from keyfold.counters import wire
from keyfold.counters.catalog import Catalog, Kind
from keyfold.counters.errors import (
    BodyUnreadable,
    CounterTwice,
    KeyTwice,
    KindMissing,
    KindWrong,
    PackEmpty,
    RowLengthWrong,
    RowsMissing,
)
from keyfold.counters.messages_pb2 import Counter, CounterPack, Profile, ValueType
from keyfold.counters.model import Number

FIELDS = {
    "float_values": Kind.FLOAT,
    "double_values": Kind.DOUBLE,
    "fixed32_values": Kind.FIXED32,
    "fixed64_values": Kind.FIXED64,
}
NAMES = {kind: name for name, kind in FIELDS.items()}
DTYPES = {Kind.FLOAT: "<f4", Kind.DOUBLE: "<f8", Kind.FIXED32: "<u4", Kind.FIXED64: "<u8"}


class Row(Struct, frozen=True):
    """One counter's values, beside the keys of its pack. `kind` is None where this version knows no such kind."""

    counter_id: int
    keys: Sequence[int]
    kind: Kind | None
    values: Sequence[Number]


class ArrayRow(Struct, frozen=True):
    """One counter's values as an array over the bytes of the body."""

    counter_id: int
    keys: NDArray[np.uint64]
    values: NDArray[Any]


def parsed(body: bytes) -> Profile:
    try:
        return Profile.FromString(body)
    except DecodeError:
        raise BodyUnreadable("the body of the profile cannot be decoded") from None


def as_packs(profile: Profile) -> Iterator[CounterPack | Counter]:
    """Everything that holds values: packs, and the older single counters."""
    yield from profile.packed_counters
    yield from profile.counters


def rows(profile: Profile, wanted: Collection[int] | None = None) -> Iterator[Row]:
    """The rows of the counters asked for, in the order they are stored, without promises about that order."""
    for pack in as_packs(profile):
        ids, values = shape(pack)
        for counter_id, row in zip(ids, values, strict=True):
            if wanted is None or counter_id in wanted:
                yield _row(counter_id, pack.keys, row)


def read(body: bytes, wanted: Collection[int] | None = None) -> Iterator[tuple[int, int, Number]]:
    """The linear reader: every (counter_id, key, value) of the counters asked for. Nothing is cached."""
    for row in rows(parsed(body), wanted):
        for key, value in zip(row.keys, row.values, strict=False):
            yield row.counter_id, key, value


def arrays(body: bytes, wanted: Collection[int] | None = None) -> Iterator[ArrayRow]:
    """Whole rows as arrays; values are views of the body's own bytes."""
    for pack in wire.packs(body):
        ids = pack.counter_ids
        if len(ids) == 0 or not any(start < end for start, end in pack.keys):
            raise PackEmpty("a pack has no counters or no keys")
        if len(ids) != len(pack.rows):
            raise RowsMissing(f"a pack has {len(ids)} counters and {len(pack.rows)} rows of values")
        keys: NDArray[np.uint64] | None = None
        for counter_id, row in zip(ids.tolist(), pack.rows, strict=True):
            if row is None or (wanted is not None and counter_id not in wanted):
                continue
            keys = wire.varints(body, pack.keys) if keys is None else keys
            values = wire.fixed(body, row.spans, DTYPES[Kind(row.field)])
            if len(values) != len(keys):
                raise RowLengthWrong(f"counter {counter_id} has {len(values)} values for {len(keys)} keys")
            yield ArrayRow(counter_id, keys, values)


def shape(pack: CounterPack | Counter) -> tuple[Sequence[int], Sequence[ValueType]]:
    """The ids of a pack and its rows, where they fit each other."""
    ids: Sequence[int]
    values: Sequence[ValueType]
    ids, values = (
        (pack.counter_ids, pack.values) if isinstance(pack, CounterPack) else ([pack.counter_id], [pack.values])
    )
    if not ids or not pack.keys:
        raise PackEmpty("a pack has no counters or no keys")
    if len(ids) != len(values):
        raise RowsMissing(f"a pack has {len(ids)} counters and {len(values)} rows of values")
    return ids, values


def must_be_whole(profile: Profile, catalog: Catalog) -> None:
    """Check every invariant of a profile's packs. Counters and kinds that this catalog does not know pass."""
    for _ in whole_rows(profile, catalog):
        pass


def whole_rows(profile: Profile, catalog: Catalog) -> Iterator[Row]:
    """The rows of the counters of a catalog; every invariant is checked on the way, of the other rows too."""
    seen: set[int] = set()
    for pack in as_packs(profile):
        ids, values = shape(pack)
        if len(set(pack.keys)) != len(pack.keys):
            raise KeyTwice(f"a key stands twice in the pack of counters {_listed(ids)}")
        for counter_id, row in zip(ids, values, strict=True):
            if counter_id in seen:
                raise CounterTwice(f"counter {counter_id} stands in two rows")
            seen.add(counter_id)
            found = _row(counter_id, pack.keys, row)
            if counter_id not in catalog:
                continue
            if found.kind is None and not row.ByteSize():  # otherwise a kind of a later version
                raise KindMissing(f"the row of counter {counter_id} has no kind")
            if found.kind is not None and found.kind is not catalog[counter_id].kind:
                raise KindWrong(
                    f"counter {counter_id} is stored as {found.kind.name.lower()}, "
                    f"the catalog says {catalog[counter_id].kind.name.lower()}",
                    hint="`keyfold counters lint` tells what a change of the catalog does to stored data",
                )
            yield found


def fill(row: ValueType, kind: Kind, values: Iterable[Number]) -> None:
    """Put the values of a counter into its row."""
    getattr(row, NAMES[kind]).value.extend(values)


def as_legacy(pack: CounterPack) -> Iterator[Counter]:
    """The older form of a pack: each counter by itself."""
    for counter_id, row in zip(pack.counter_ids, pack.values, strict=True):
        yield Counter(counter_id=counter_id, keys=pack.keys, values=row)


def _row(counter_id: int, keys: Sequence[int], row: ValueType) -> Row:
    field = row.WhichOneof("value")
    if field is None:
        return Row(counter_id, keys, None, ())
    values = getattr(row, field).value
    if len(values) != len(keys):
        raise RowLengthWrong(f"counter {counter_id} has {len(values)} values for {len(keys)} keys")
    return Row(counter_id, keys, FIELDS[field], values)


def _listed(ids: Iterable[int]) -> str:
    return ", ".join(str(each) for each in list(ids)[:5])
