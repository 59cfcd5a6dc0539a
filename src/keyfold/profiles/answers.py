"""Profiles as they are answered: the fields of the message `Profile`, in JSON or as protobuf."""

from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct

from keyfold.counters import messages_pb2 as messages
from keyfold.counters.bulk.reading import Pack
from keyfold.counters.packs import fill
from keyfold.profiles.service.reading import LeftOut, Read, View

JSON = "application/json"
PROTOBUF = "application/x-protobuf"


class Values(Struct, frozen=True, gc=False):
    value: Sequence[float | int]


class ValueType(Struct, frozen=True, omit_defaults=True, gc=False):
    """The values of one counter, in the order of the keys; one of the four is there."""

    float_values: Values | None = None
    double_values: Values | None = None
    fixed32_values: Values | None = None
    fixed64_values: Values | None = None


class CounterPack(Struct, frozen=True, gc=False):
    """A table: a row for each counter, a column for each key."""

    counter_ids: list[int]
    keys: Sequence[int]
    values: list[ValueType]


class Counter(Struct, frozen=True, gc=False):
    """The older form, for clients configured as legacy: one counter."""

    counter_id: int
    keys: Sequence[int]
    values: ValueType


class Segment(Struct, frozen=True, gc=False):
    id: str
    evaluation_version: int


class Profile(Struct, frozen=True, gc=False, omit_defaults=True):
    """One person, banner, page, …; of several ids, the type and id of the first, and the sum of the versions.

    `problem` is there only where the counters that are stored cannot be read, and says why.
    """

    type: str
    id: str
    packed_counters: list[CounterPack]
    counters: list[Counter]
    segments: list[Segment]
    version: int
    problem: str = ""


class Profiles(Struct, frozen=True):
    """The profiles in the order asked for, and the counters that this client does not get."""

    profiles: list[Profile]
    left_out: list[LeftOut]


class Written(Struct, frozen=True, gc=False, omit_defaults=True):
    """A `Profile` whose packs are JSON already."""

    type: str
    id: str
    packed_counters: msgspec.Raw
    counters: list[Counter]
    segments: list[Segment]
    version: int
    problem: str = ""


class Answer(Struct, frozen=True, gc=False):
    """`Profiles`, as they are encoded."""

    profiles: list[Profile | Written]
    left_out: list[LeftOut]


_encode = msgspec.json.Encoder().encode


def as_json(read: Sequence[Read], view: View) -> bytes:
    profiles = [_profile(each, view.legacy) if each.written is None else _written(each, each.written) for each in read]
    return _encode(Answer(profiles, view.left_out))


def as_structs(read: Sequence[Read], view: View) -> Profiles:
    """For whoever looks at the numbers, which were not asked for as JSON."""
    return Profiles([_profile(each, view.legacy) for each in read], view.left_out)


def as_protobuf(read: Sequence[Read], view: View) -> bytes:
    answer = messages.Profiles()
    for each in read:
        profile = answer.profiles.add(type=each.key[0], id=each.key[1], version=each.version, problem=each.problem)
        for name, version in each.segments:
            profile.segments.add(id=name, evaluation_version=version)
        for pack in each.packs:
            _add(profile, pack, view.legacy)
    for left in view.left_out:
        answer.left_out.add(counter_id=left.counter_id, reason=left.reason)
    return answer.SerializeToString(deterministic=True)


def _profile(read: Read, legacy: bool) -> Profile:
    segments = [Segment(name, version) for name, version in read.segments]
    if legacy:
        older = [counter for pack in read.packs for counter in _older(pack)]
        return Profile(read.key[0], read.key[1], [], older, segments, read.version, read.problem)
    packs = [
        CounterPack(pack.counter_ids, pack.keys, [_VALUES[kind](values) for kind, values in pack.rows])
        for pack in read.packs
    ]
    return Profile(read.key[0], read.key[1], packs, [], segments, read.version, read.problem)


def _written(read: Read, packs: bytes) -> Written:
    segments = [Segment(name, version) for name, version in read.segments]
    return Written(read.key[0], read.key[1], msgspec.Raw(packs), [], segments, read.version, read.problem)


def _older(pack: Pack) -> list[Counter]:
    return [
        Counter(each, pack.keys, _VALUES[kind](values))
        for each, (kind, values) in zip(pack.counter_ids, pack.rows, strict=True)
    ]


# By the number of the kind, because to look up an enum by its hash takes longer than to make what is looked up.
_VALUES: tuple[Callable[[Sequence[float | int]], ValueType], ...] = (
    lambda _: ValueType(),
    lambda values: ValueType(Values(values)),
    lambda values: ValueType(None, Values(values)),
    lambda values: ValueType(None, None, Values(values)),
    lambda values: ValueType(None, None, None, Values(values)),
)


def _add(profile: messages.Profile, pack: Pack, legacy: bool) -> None:
    if legacy:
        for counter_id, (kind, values) in zip(pack.counter_ids, pack.rows, strict=True):
            older = profile.counters.add(counter_id=counter_id, keys=pack.keys)
            fill(older.values, kind, values)
        return
    packed = profile.packed_counters.add(counter_ids=pack.counter_ids, keys=pack.keys)
    for kind, values in pack.rows:
        fill(packed.values.add(), kind, values)
