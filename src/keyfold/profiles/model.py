"""The rules of profiles, pure: what an event must be, what holds an owned update back, and what releases it."""

import zlib
from bisect import bisect_left, bisect_right, insort
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, cast

import msgspec
from msgspec import Struct

from keyfold.core.errors import BadInput, KeyfoldError
from keyfold.counters.catalog import Counter
from keyfold.counters.errors import UpdateRefused
from keyfold.profiles.handlers import Event, Handler, Update, Updates, Writable

ProfileKey = tuple[str, str]  # type, id
EventKey = tuple[str, str]  # log, event id
UpdateKey = tuple[str, str, int]  # log, event id, which update of its event
LogEvent = tuple[str, Event]  # log, event
EVENT_ID_MAX = 200
PROFILE_ID_BYTES_MAX = 400
UPDATES_MAX = 1_000
_SURELY_FITS = PROFILE_ID_BYTES_MAX // 4  # characters, of four bytes at most

Status = Literal["counted", "duplicate", "conflict", "late", "refused"]


class Verdict(Struct, frozen=True, gc=False):
    """What became of an event. It does not say whether something was held back."""

    event_id: str
    status: Status
    reason: str = ""


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

    @property
    def update(self) -> UpdateKey:
        return self.log, self.event_id, self.number


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

    @property
    def update(self) -> UpdateKey:
        return self.log, self.event_id, self.number


def event_of(fields: Mapping[str, Any]) -> Event:
    """An event from what was sent; refused where it lacks what every event has."""
    event_id, time = fields.get("event_id"), fields.get("time")
    if not isinstance(event_id, str) or not 1 <= len(event_id) <= EVENT_ID_MAX or "\0" in event_id:
        raise BadInput(f"event_id must be text of 1 to {EVENT_ID_MAX} characters without NUL", place="event_id")
    if type(time) is not int:
        raise BadInput("time must be whole unix seconds", place="time")
    return Event(event_id, time, fields)


def events_of(sent: Sequence[Mapping[str, Any]]) -> list[Event]:
    """Events from what was sent, each as `event_of` judges it; of many that are as usual this is found out at once."""
    ids = [fields.get("event_id") for fields in sent]
    times = [fields.get("time") for fields in sent]
    if {int}.issuperset(map(type, times)) and {str}.issuperset(map(type, ids)) and _are_event_ids(cast(list[str], ids)):
        return list(map(Event, ids, times, sent))  # type: ignore[arg-type]
    return [event_of(fields) for fields in sent]


def _are_event_ids(ids: Sequence[str]) -> bool:
    return all(ids) and max(map(len, ids), default=0) <= EVENT_ID_MAX and "\0" not in "".join(ids)


def profile_id_of(given: Any, place: str = "profile_id") -> str:
    """An id as it is stored: text, or a 64-bit number written as text."""
    if type(given) is str and 0 < len(given) <= _SURELY_FITS and "\0" not in given:
        return given
    if isinstance(given, int) and not isinstance(given, bool):
        if not -(2**63) <= given < 2**64:
            raise BadInput("a number must fit in 64 bits", place=place)
        return str(given)
    if (
        not isinstance(given, str)
        or not given
        or "\0" in given
        or len(given.encode(errors="replace")) > PROFILE_ID_BYTES_MAX
    ):
        raise BadInput(f"an id must be a 64-bit number, or text of 1 to {PROFILE_ID_BYTES_MAX} bytes", place=place)
    return given


class Asked:
    """What handlers ask for: the updates of all events in one list, and of each run of them the event and the profile.

    A run is what one handler asks for because of one event. Millions of events pass here, so that an event has no
    object of its own for it: it is known by its number in the batch.
    """

    def __init__(self, log_events: Sequence[LogEvent]) -> None:
        self.log_events = log_events
        self.refused: set[int] = set()  # the events that do not count; all others count whole, with updates or without
        self.updates: list[Update] = []
        self.is_owned = False  # whether an update may have an owner
        self.profiles: list[ProfileKey] = []  # each once
        self.event: list[int] = []  # of each run, the number of its event
        self.profile: list[int] = []  # and the place of its profile
        self.size: list[int] = []

    def runs(self) -> Iterator[tuple[int, ProfileKey, list[Update]]]:
        end = 0
        for number, profile, size in zip(self.event, self.profile, self.size, strict=True):
            begin, end = end, end + size
            yield number, self.profiles[profile], self.updates[begin:end]

    def rows(self) -> Iterator[Row]:
        """The updates one by one, numbered within their event."""
        place, before = 0, -1
        for number, profile, updates in self.runs():
            log, event = self.log_events[number]
            place = place if number == before else 0
            before = number
            for counter, key, value, owner in updates:
                yield Row(profile, counter, key, value, event.time, owner, event.id, log, place)
                place += 1

    def without(self, refused: Container[EventKey]) -> "Asked":
        """The same without some events."""
        left = Asked(self.log_events)
        left.is_owned, left.profiles = self.is_owned, self.profiles
        left.refused = self.refused | {
            number for number, (log, event) in enumerate(self.log_events) if (log, event.id) in refused
        }
        for profile, (number, _, updates) in zip(self.profile, self.runs(), strict=True):
            if number not in left.refused:
                left.event.append(number)
                left.profile.append(profile)
                left.size.append(len(updates))
                left.updates += updates
        return left

    def take_back(self, number: int, updates: int) -> None:
        """Refuse the last event, before which there were so many updates."""
        self.refused.add(number)
        while self.event and self.event[-1] == number:
            del self.event[-1], self.size[-1]
        del self.profile[len(self.event) :], self.updates[updates:]


class _Places(dict[Any, int]):
    """Where the profiles of a type stand among all that are asked for, by what events give as their id.

    Text only: among numbers, True would be taken for 1.
    """

    def __init__(self, profiles: list[ProfileKey], profile_type: str) -> None:
        self._profiles = profiles
        self._type = profile_type

    def of(self, given: Any, field: str) -> int:
        profile_id = profile_id_of(given, field)
        place = self.get(profile_id)
        if place is None:
            place = self[profile_id] = len(self._profiles)
            self._profiles.append((self._type, profile_id))
        return place


def ask(
    writing: Mapping[str, Sequence[tuple[Handler, Writable]]], log_events: Sequence[LogEvent], arrived: Iterable[int]
) -> tuple[Asked, dict[EventKey, str]]:
    """Let the handlers read those events that arrived, by their numbers.

    What they ask for is checked, so that an event counts whole or not at all.
    """
    asked, refused = Asked(log_events), dict[EventKey, str]()
    types = {each.profile_type for own in writing.values() for each, _ in own}
    places = {each: _Places(asked.profiles, each) for each in types}
    writers = {
        log: [
            (each, each.handle, each.id_field, Updates(writable, asked.updates), places[each.profile_type])
            for each, writable in own
        ]
        for log, own in writing.items()
    }
    rows, end = asked.updates, 0
    add_event, add_profile, add_size = asked.event.append, asked.profile.append, asked.size.append
    for number in arrived:
        log, event = log_events[number]
        begin = end
        try:
            for each, handle, id_field, updates, known in writers.get(log, ()):  # noqa: B007
                handle(event, updates)
                if size := len(rows) - end:
                    given = event.fields.get(id_field)
                    add_profile(known[given] if type(given) is str and given in known else known.of(given, id_field))
                    add_event(number)
                    add_size(size)
                    end += size
            if end - begin > UPDATES_MAX:
                raise UpdateRefused(f"the event makes {end - begin} updates, {UPDATES_MAX} are allowed")
        except Exception as error:
            asked.take_back(number, begin)
            end = begin
            reason = str(error if isinstance(error, KeyfoldError) else _failed(each, error))
            # It may quote what no answer takes: half a character, of a text that the handler has read out of the event.
            refused[log, event.id] = reason.encode(errors="replace").decode()
    asked.is_owned = any(updates.is_owned for own in writers.values() for _, _, _, updates, _ in own)
    return asked, refused


def _failed(one: Handler, error: Exception) -> KeyfoldError:
    return UpdateRefused(f"the handler {one.handle.__name__} failed: {type(error).__name__}: {error}")


_encoded_in_order = msgspec.json.Encoder(order="sorted").encode


def fingerprint(fields: Mapping[str, Any]) -> int:
    """CRC-32 of what an event says, whatever the order of its fields: it tells a repeat from a conflict.

    Neither is counted, so a collision can only call a conflict a repeat.
    """
    return zlib.crc32(_encoded_in_order(fields))


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
    kept_back: Container[UpdateKey] = frozenset(),
) -> Settled:
    """What a sequence of updates of one key releases: an int is the time of a public update, a Held is an owned one.

    Step by step, as if each came alone: so it does not matter how events were gathered into batches. First of all,
    what waits is settled by itself: a source may be there that was not when it came, because the clock went back into
    the period of one, or a setting was changed. From then on only what is near a step can be released by it.

    What is kept back has no room in its profile: it is a source for others, and waits on itself.
    """
    waiting = _Waiting(merge_seconds, kept_back)
    for each in held:
        waiting.add(each)
    result = Settled([], [], [])
    latest = public_time
    if waiting.any_free(latest):
        latest = _release(result.released, waiting, latest, expired_before)
    for step in steps:
        if isinstance(step, Held):
            waiting.add(step)
            may_release = waiting.has_source(step, latest)
        else:
            latest = _moved(latest, step, expired_before)
            may_release = latest is not None and waiting.any_near(latest)
        if may_release:
            latest = _release(result.released, waiting, latest, expired_before)
        if count_max is not None and len(waiting.held) + len(waiting.kept_back) > count_max:
            result.pushed_out.append(waiting.take_smallest())
    result.waiting = waiting.all()
    return result


class _Waiting:
    """The held-back updates of one key, with the times of each owner in order: a look for a source is a search."""

    def __init__(self, merge_seconds: int, kept_back: Container[UpdateKey]) -> None:
        self.held: list[Held] = []
        self.kept_back: list[Held] = []  # apart from the others, so that no look for what is free goes through them
        self._merge_seconds = merge_seconds
        self._is_kept_back = kept_back
        self._times: dict[int, list[int]] = {}

    def all(self) -> list[Held]:
        return [*self.held, *self.kept_back]

    def add(self, held: Held) -> None:
        (self.kept_back if held.update in self._is_kept_back else self.held).append(held)
        insort(self._times.setdefault(held.owner, []), held.time)

    def has_source(self, held: Held, latest: int | None) -> bool:
        """Another source strictly closer than the period: the public key, or an update of another owner."""
        if latest is not None and abs(held.time - latest) < self._merge_seconds:
            return True
        return any(self._is_near(times, held.time) for owner, times in self._times.items() if owner != held.owner)

    def any_near(self, time: int) -> bool:
        return any(self._is_near(times, time) for times in self._times.values())

    def any_free(self, latest: int | None) -> bool:
        """Whether anything has another source: where two owners are near each other, two neighbours in time are."""
        if latest is not None and self.any_near(latest):
            return True
        in_order = sorted(self.all(), key=lambda each: each.time)
        return any(
            one.owner != after.owner and after.time - one.time < self._merge_seconds
            for one, after in pairwise(in_order)
        )

    def take_free(self, latest: int | None) -> list[Held]:
        """Take out everything that has another source."""
        free = [each for each in self.held if self.has_source(each, latest)]
        self._remove(free)
        return free

    def take_smallest(self) -> Held:
        smallest = min(self.all(), key=lambda each: each.age)
        self._remove([smallest])
        return smallest

    def _is_near(self, times: Sequence[int], time: int) -> bool:
        at = bisect_right(times, time - self._merge_seconds)
        return at < len(times) and times[at] < time + self._merge_seconds

    def _remove(self, gone: Sequence[Held]) -> None:
        out = {id(each) for each in gone}
        self.held = [each for each in self.held if id(each) not in out]
        self.kept_back = [each for each in self.kept_back if id(each) not in out]
        for each in gone:
            times = self._times[each.owner]
            del times[bisect_left(times, each.time)]
            if not times:
                del self._times[each.owner]


def _release(released: list[Held], waiting: _Waiting, latest: int | None, expired_before: int | None) -> int | None:
    """Move what has another source to what is released, and what that confirms in turn; returns the public time."""
    while free := waiting.take_free(latest):
        released += free
        for each in sorted(free, key=lambda one: -one.time):
            latest = _moved(latest, each.time, expired_before)
    return latest


def released_by_merge(held: Sequence[Held], merge_seconds: int, expired_before: int | None = None) -> list[Held]:
    """What the held-back updates of one key, of several profiles of one person, release of each other.

    All at once, because the ids of a person have no order. Only owners confirm each other here: a public key of
    another id would let anyone who may write to a profile of their own read what others wait with.
    """
    return settled(held, None, [], merge_seconds=merge_seconds, expired_before=expired_before).released


def _moved(latest: int | None, time: int, expired_before: int | None) -> int | None:
    """The public time after an update: one that is too old for a key that is not there changes nothing."""
    if latest is None:
        return None if expired_before is not None and time < expired_before else time
    return max(latest, time)
