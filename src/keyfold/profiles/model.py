"""The rules of profiles, pure: what an event must be, what holds an owned update back, and what releases it."""

import zlib
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from keyfold.core.errors import BadInput, KeyfoldError
from keyfold.counters.catalog import Counter
from keyfold.counters.errors import UpdateRefused
from keyfold.profiles.handlers import Event, Handler, Update, Updates, Writable

ProfileKey = tuple[str, str]  # type, id
EVENT_ID_MAX = 200
PROFILE_ID_BYTES_MAX = 400
UPDATES_MAX = 1_000

Status = Literal["counted", "duplicate", "conflict", "late", "refused"]


class Verdict(Struct, frozen=True, gc=False):
    """What became of an event. It does not say whether something was held back."""

    event_id: str
    status: Status
    reason: str = ""


class Ready(Struct, frozen=True, gc=False):
    """An event that its handlers have read: which profiles it changes, and how."""

    log: str
    event_id: str
    time: int
    changes: list[tuple[ProfileKey, list[Update]]]
    fields: Mapping[str, Any]
    is_owned: bool


class Row(Struct, frozen=True, gc=False):
    """One update of one profile, and its place in the event that asked for it."""

    profile: ProfileKey
    counter: Counter
    key: int
    value: float | int
    time: int
    owner: int
    event_id: str
    log: str
    number: int


class Held(Struct, frozen=True, gc=False):
    """An owned update that waits for a second source."""

    counter_id: int
    key: int
    value: float | int
    time: int
    owner: int
    event_id: str
    log: str
    number: int
    committed_at_us: int

    @property
    def age(self) -> tuple[int, int, str]:
        """The smallest go first where there are too many."""
        return self.time, self.key, self.event_id


def event_of(fields: Mapping[str, Any]) -> Event:
    """An event from what was sent; refused where it lacks what every event has."""
    event_id, time = fields.get("event_id"), fields.get("time")
    if not isinstance(event_id, str) or not 1 <= len(event_id) <= EVENT_ID_MAX or "\0" in event_id:
        raise BadInput(f"event_id must be text of 1 to {EVENT_ID_MAX} characters without NUL", place="event_id")
    if not isinstance(time, int) or isinstance(time, bool):
        raise BadInput("time must be whole unix seconds", place="time")
    return Event(event_id, time, fields)


def profile_id_of(given: Any, place: str = "profile_id") -> str:
    """An id as it is stored: text, or a 64-bit number written as text."""
    if isinstance(given, int) and not isinstance(given, bool):
        if not -(2**63) <= given < 2**64:
            raise BadInput("a number must fit in 64 bits", place=place)
        return str(given)
    if not isinstance(given, str) or not given or "\0" in given or not _fits(given):
        raise BadInput(f"an id must be a 64-bit number, or text of 1 to {PROFILE_ID_BYTES_MAX} bytes", place=place)
    return given


def _fits(text: str) -> bool:
    """Whether it is short enough, counting bytes only where that could matter."""
    return len(text) * 4 <= PROFILE_ID_BYTES_MAX or len(text.encode(errors="replace")) <= PROFILE_ID_BYTES_MAX


def ready(writing: Sequence[tuple[Handler, Writable]], log: str, event: Event) -> Ready:
    """Let the handlers of a log read an event; what they ask for is checked, so that it counts whole or not at all."""
    changes: list[tuple[ProfileKey, list[Update]]] = []
    count, is_owned = 0, False
    for each, writable in writing:
        updates = Updates(writable)
        try:
            each.handle(event, updates)
        except KeyfoldError:
            raise
        except Exception as error:
            name = each.handle.__name__
            raise UpdateRefused(f"the handler {name} failed: {type(error).__name__}: {error}") from error
        if not updates.rows:
            continue
        profile = (each.profile_type, profile_id_of(event.fields.get(each.id_field), each.id_field))
        changes.append((profile, updates.rows))
        count += len(updates.rows)
        is_owned |= updates.is_owned
    if count > UPDATES_MAX:
        raise UpdateRefused(f"the event makes {count} updates, {UPDATES_MAX} are allowed")
    return Ready(log, event.id, event.time, changes, event.fields, is_owned)


def rows_of(event: Ready) -> Iterator[Row]:
    """The updates of an event, one by one."""
    number = 0
    for profile, updates in event.changes:
        for counter, key, value, owner in updates:
            yield Row(profile, counter, key, value, event.time, owner, event.event_id, event.log, number)
            number += 1


def fingerprint(fields: Mapping[str, Any]) -> int:
    """CRC-32 of what an event says, whatever the order of its fields: it tells a repeat from a conflict.

    Neither is counted, so a collision can only call a conflict a repeat.
    """
    return zlib.crc32(msgspec.json.encode(fields, order="sorted"))


class Settled(Struct):
    """One key after a batch: what was released, what waits on, and what had no room to wait."""

    released: list[Held]
    waiting: list[Held]
    pushed_out: list[Held]


def settled(
    held: Sequence[Held],
    public_time: int | None,
    steps: Sequence[Held | int],
    *,
    merge_seconds: int,
    expired_before: int | None = None,
    count_max: int | None = None,
) -> Settled:
    """What a sequence of updates of one key releases: an int is the time of a public update, a Held is an owned one.

    Step by step, as if each came alone: so it does not matter how events were gathered into batches.
    """
    waiting = _Waiting(merge_seconds)
    for each in held:
        waiting.add(each)
    result = Settled([], [], [])
    latest = public_time
    for step in steps:
        if isinstance(step, Held):
            waiting.add(step)
            may_release = waiting.has_source(step, latest)
        else:
            latest = _moved(latest, step, expired_before)
            may_release = latest is not None and waiting.any_near(latest)
        while may_release and (free := waiting.take_free(latest)):
            result.released += free
            for each in sorted(free, key=lambda one: -one.time):
                latest = _moved(latest, each.time, expired_before)
        if count_max is not None and len(waiting.held) > count_max:
            result.pushed_out.append(waiting.take_smallest())
    result.waiting = waiting.held
    return result


class _Waiting:
    """The held-back updates of one key, with the times of each owner in order: a look for a source is a search."""

    def __init__(self, merge_seconds: int) -> None:
        self.held: list[Held] = []
        self._merge_seconds = merge_seconds
        self._times: dict[int, list[int]] = {}

    def add(self, held: Held) -> None:
        self.held.append(held)
        insort(self._times.setdefault(held.owner, []), held.time)

    def has_source(self, held: Held, latest: int | None) -> bool:
        """Another source strictly closer than the period: the public key, or an update of another owner."""
        if latest is not None and abs(held.time - latest) < self._merge_seconds:
            return True
        return any(self._is_near(times, held.time) for owner, times in self._times.items() if owner != held.owner)

    def any_near(self, time: int) -> bool:
        return any(self._is_near(times, time) for times in self._times.values())

    def take_free(self, latest: int | None) -> list[Held]:
        """Take out everything that has another source."""
        free = [each for each in self.held if self.has_source(each, latest)]
        self._remove(free)
        return free

    def take_smallest(self) -> Held:
        smallest = min(self.held, key=lambda each: each.age)
        self._remove([smallest])
        return smallest

    def _is_near(self, times: Sequence[int], time: int) -> bool:
        at = bisect_right(times, time - self._merge_seconds)
        return at < len(times) and times[at] < time + self._merge_seconds

    def _remove(self, gone: Sequence[Held]) -> None:
        out = {id(each) for each in gone}
        self.held = [each for each in self.held if id(each) not in out]
        for each in gone:
            times = self._times[each.owner]
            del times[bisect_left(times, each.time)]
            if not times:
                del self._times[each.owner]


def released_by_merge(held: Sequence[Sequence[Held]], merge_seconds: int) -> list[Held]:
    """What the held-back updates of one key, of several profiles of one person, release of each other.

    Only owners confirm each other here: a public key of another id would let anyone who may write to a profile of
    their own read what others wait with.
    """
    steps: list[Held | int] = [each for profile in held for each in profile]
    return settled([], None, steps, merge_seconds=merge_seconds).released


def _moved(latest: int | None, time: int, expired_before: int | None) -> int | None:
    """The public time after an update: one that is too old for a key that is not there changes nothing."""
    if latest is None:
        return None if expired_before is not None and time < expired_before else time
    return max(latest, time)
