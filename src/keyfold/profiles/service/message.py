"""The one message of a profile: what the API answers, what is published, what an export holds."""

from collections.abc import Sequence
from functools import lru_cache

from keyfold.counters import wire
from keyfold.counters.catalog import Catalog
from keyfold.counters.counters import MutableCounters
from keyfold.counters.messages_pb2 import Profile, Segment
from keyfold.profiles.model import ProfileKey


def whole(key: ProfileKey, body: bytes, segments: bytes, version: int) -> bytes:
    """A serialised Profile: its parts are stored as messages of the same type, so that they only need to be joined."""
    return b"".join((_type_field(key[0]), wire.text_field(2, key[1]), body, segments, wire.number_field(6, version)))


def current(catalog: Catalog, body: bytes, now: int) -> bytes:
    """A stored body without what has expired since its last change: as in every answer."""
    counters = MutableCounters(catalog, body, now)
    counters.cleanup()
    return counters.serialise()


@lru_cache(maxsize=64)
def _type_field(profile_type: str) -> bytes:
    return wire.text_field(1, profile_type)


def segments_stored(segments: Sequence[tuple[str, int]]) -> bytes:
    """The segments of a profile as they are stored, in their order."""
    return Profile(
        segments=[Segment(id=each, evaluation_version=version) for each, version in segments]
    ).SerializeToString()
