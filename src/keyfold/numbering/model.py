"""The rules of numbering on small data: versions, places, TTL, compaction, compatibility, what a coordinator records.

`number` is the oracle: the engines compute the same with one Ibis expression, and tests compare them.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Literal, NamedTuple, TypeVar

from msgspec import Meta, Struct, structs

from keyfold.core.errors import BadInput, Conflict, TicketRefused

DOC_ID_MAX = 2**31 - 1
VERSION_PART_MAX = 999_999_999

TypeName = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]


class Key(NamedTuple):
    """What an offer is known by."""

    business_id: int
    offer_id: str
    shop_id: int
    warehouse_id: int


class Place(NamedTuple):
    """Where an offer stands in the search index."""

    shard_id: int
    doc_id: int


class Version(Struct, frozen=True, order=True):
    """T.S.V.G: type, sharding scheme, rebuild version, generation."""

    type: int
    scheme: int
    rebuild: int
    generation: int

    def __str__(self) -> str:
        return f"{self.type}.{self.scheme}.{self.rebuild}.{self.generation}"

    @classmethod
    def parse(cls, text: str) -> "Version":
        parts = text.split(".")
        if len(parts) != 4 or not all(re.fullmatch(r"[0-9]{1,9}", part) for part in parts):
            raise BadInput(f"{text[:100]!r} is not a version", hint="Write T.S.V.G, four whole numbers such as 1.0.3.7")
        return cls(*(int(part) for part in parts))


# Compatibility -----------------------------------------------------------------------------------------------------

Fit = Literal["yes", "no", "yes except"]


def fits(state: Version, data: Version) -> tuple[bool, str]:
    """The document's rule, and why not: equal T.S.V, and a state that is not older than the data."""
    if state.type != data.type:
        return False, f"the data are of type {data.type}, the state of type {state.type}"
    if state.scheme != data.scheme:
        return False, f"the data are sharded by scheme {data.scheme}, the state by {state.scheme}"
    if state.rebuild != data.rebuild:
        return False, f"the data are of rebuild {data.rebuild}, the state of {state.rebuild}: places were dealt anew"
    if state.generation < data.generation:
        return False, f"the state is of generation {state.generation}, older than the data's {data.generation}"
    return True, ""


def is_reassigned(generation: int, is_reused: bool, data: Version) -> bool:
    """Whether a place may have meant another offer when the data were made."""
    return is_reused and generation > data.generation


# One run -----------------------------------------------------------------------------------------------------------

Reason = Literal["", "first", "forced", "scheme", "ratio", "restart"]
SUMMARY_WORDS: Mapping[Reason, str] = {
    "": "places kept",
    "first": "the first state",
    "forced": "rebuilt as asked",
    "scheme": "rebuilt by another sharding scheme",
    "ratio": "rebuilt because a shard had too many holes",
    "restart": "places kept, under a new V because the last state was lost",
}


class Held(NamedTuple):
    """A place in the hands of a key: since which generation, whether another key had it before, when last seen."""

    place: Place
    generation: int
    is_reused: bool
    seen_run: int


class State(Struct, frozen=True):
    """What one run leaves to the next. `free` places were given before in this V; `sizes` counts those ever given."""

    version: Version
    run: int
    places: Mapping[Key, Held]
    free: frozenset[Place] = frozenset()
    sizes: Mapping[int, int] = {}


class Outcome(Struct, frozen=True):
    """A run: the state it leaves, which keys it gave a place to, which it let go, and the map of a rebuild."""

    state: State
    reason: Reason
    new: Mapping[Key, Held]
    expired: Mapping[Key, Held]
    remap: Mapping[Place, Place] = {}


class Rules(Struct, frozen=True, kw_only=True):
    """What a run is done by."""

    type: int
    scheme: int
    ttl_runs: int
    rebuild_ratio: float
    is_forced: bool = False
    rebuild_min: int = 0  # V must not be below: what the type has used before
    is_restart: bool = False  # the line of generations was cut off: V rises though places are kept


def number(
    before: State | None,
    offers: Iterable[Key],
    rules: Rules,
    shard_of: Callable[[Key], int],
    *,
    doc_id_max: int = DOC_ID_MAX,
) -> Outcome:
    """One run over small data."""
    keys = sorted(offers)
    if before is None:
        return _rebuilt(None, keys, rules, shard_of, "first", doc_id_max)
    if rules.is_forced:
        return _rebuilt(before, keys, rules, shard_of, "forced", doc_id_max)
    if rules.scheme != before.version.scheme:
        return _rebuilt(before, keys, rules, shard_of, "scheme", doc_id_max)
    moved_on = _moved_on(before, keys, rules, shard_of, doc_id_max)
    if must_rebuild(_tops(moved_on.state), _inputs(moved_on.state), rules.rebuild_ratio):
        return _rebuilt(before, keys, rules, shard_of, "ratio", doc_id_max)
    return moved_on


def must_rebuild(tops: Mapping[int, int], inputs: Mapping[int, int], ratio: float) -> bool:
    """Whether any shard reaches too far beyond its input; `tops` is each shard's maximum + 1."""
    return any(top > ratio * inputs.get(shard, 0) for shard, top in tops.items())


def next_version(before: Version | None, rules: Rules, reason: Reason, is_giving: bool) -> Version:
    """V is raised by a rebuild and never used twice; G starts anew with V, and rises in a run that gives a place."""
    if before is None:
        return Version(rules.type, rules.scheme, rules.rebuild_min, 0)
    if reason or rules.is_restart:
        return Version(rules.type, rules.scheme, max(before.rebuild + 1, rules.rebuild_min), 0)
    return structs.replace(before, generation=before.generation + is_giving)


def is_expired(run: int, seen_run: int, ttl_runs: int) -> bool:
    """Absent for more than TTL runs."""
    return run - seen_run > ttl_runs


def _moved_on(
    before: State, keys: Sequence[Key], rules: Rules, shard_of: Callable[[Key], int], doc_id_max: int
) -> Outcome:
    run, present = before.run + 1, set(keys)
    expired = {
        key: held
        for key, held in before.places.items()
        if key not in present and is_expired(run, held.seen_run, rules.ttl_runs)
    }
    new = [key for key in keys if key not in before.places]
    version = next_version(before.version, rules, "", bool(new))
    kept = {
        key: Held(
            held.place,
            0 if rules.is_restart else held.generation,
            held.is_reused and not rules.is_restart,
            run if key in present else held.seen_run,
        )
        for key, held in before.places.items()
        if key not in expired
    }
    free = before.free | {held.place for held in expired.values()}
    given, free, sizes = _dealt(new, free, before.sizes, shard_of, version.generation, run, doc_id_max)
    if rules.is_restart:
        given = {key: held._replace(is_reused=False) for key, held in given.items()}
    reason: Reason = "restart" if rules.is_restart else ""
    return Outcome(State(version, run, kept | given, free, sizes), reason, given, expired)


def _rebuilt(
    before: State | None,
    keys: Sequence[Key],
    rules: Rules,
    shard_of: Callable[[Key], int],
    reason: Reason,
    doc_id_max: int,
) -> Outcome:
    run = before.run + 1 if before else 1
    version = next_version(before.version if before else None, rules, reason, bool(keys))
    given, _, sizes = _dealt(keys, frozenset(), {}, shard_of, 0, run, doc_id_max)
    known = before.places if before else {}
    return Outcome(
        State(version, run, given, frozenset(), sizes),
        reason,
        {key: held for key, held in given.items() if key not in known},
        {key: held for key, held in known.items() if key not in given},
        {held.place: given[key].place for key, held in known.items() if key in given},
    )


def _dealt(
    keys: Sequence[Key],
    free: frozenset[Place],
    sizes: Mapping[int, int],
    shard_of: Callable[[Key], int],
    generation: int,
    run: int,
    doc_id_max: int,
) -> tuple[dict[Key, Held], frozenset[Place], dict[int, int]]:
    """Places for sorted keys: freed ones in order first, then the next after the shard's maximum."""
    waiting: dict[int, list[Place]] = defaultdict(list)
    for place in sorted(free, reverse=True):
        waiting[place.shard_id].append(place)
    after, given = dict(sizes), {}
    for key in keys:
        shard = shard_of(key)
        is_reused = bool(waiting[shard])
        if is_reused:
            place = waiting[shard].pop()
        else:
            place = Place(shard, after.get(shard, 0))
            must_fit(shard, place.doc_id + 1, doc_id_max)
            after[shard] = place.doc_id + 1
        given[key] = Held(place, generation, is_reused, run)
    return given, frozenset(place for places in waiting.values() for place in places), after


def must_fit(shard: int, size: int, doc_id_max: int = DOC_ID_MAX) -> None:
    if size - 1 > doc_id_max:
        raise BadInput(
            f"shard {shard} would need {size} places, more than {doc_id_max + 1}",
            hint="Reshard into more shards by --output-sharding-scheme",
        )


def _tops(state: State) -> dict[int, int]:
    tops: dict[int, int] = {}
    for held in state.places.values():
        tops[held.place.shard_id] = max(tops.get(held.place.shard_id, 0), held.place.doc_id + 1)
    return tops


def _inputs(state: State) -> dict[int, int]:
    inputs: dict[int, int] = defaultdict(int)
    for held in state.places.values():
        inputs[held.place.shard_id] += held.seen_run == state.run
    return inputs


# What a coordinator records ----------------------------------------------------------------------------------------


class Taken(Struct, frozen=True):
    """The write lock of a type: who took it, when, under which ticket."""

    master: str
    ticket: int
    taken_at_us: int


class Published(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One published state: where it lies, and what it is."""

    version: str
    run: int
    path: str  # below the root of each of its clusters
    clusters: list[str]
    checksum: str
    ticket: int
    published_at_us: int
    reason: str = ""
    known: int = 0
    new: int = 0
    reused: int = 0
    expired: int = 0
    holes: int = 0
    bytes: int = 0
    invalid: str = ""  # why it was declared so
    dropped_at_us: int = 0  # its tombstone: the files may go after a grace period
    is_deleted: bool = False  # given up: its files are gone, or about to go


class Record(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that a coordinator knows of a type, changed by one compare-and-set."""

    taken: Taken | None = None
    states: list[Published] = []  # the oldest first
    rebuild_next: int = 0  # no V below was left unused
    is_begun: bool = False  # a first run may be done: no cluster had states of another coordinator
    is_cut: bool = False  # the last state was declared invalid: the next run raises V
    strays: dict[str, int] = {}  # whole states that nobody is known to have published, and since when they are known

    @property
    def current(self) -> Published | None:
        """The last consistent state."""
        for state in reversed(self.states):
            if not state.invalid:
                return state
        return None


Stands = Literal["last", "kept", "dropped", "deleted", "invalid"]


def stands(state: Published, record: Record) -> Stands:
    """What became of a published state."""
    if state == record.current:
        return "last"
    if state.invalid:
        return "invalid"
    if state.is_deleted:
        return "deleted"
    return "dropped" if state.dropped_at_us else "kept"


def take(record: Record, master: str, ticket: int, now_us: int) -> Record:
    """Note who holds the lock. Tickets only grow."""
    _must_hold(record, ticket)
    return structs.replace(record, taken=Taken(master, ticket, now_us))


def publish(record: Record, state: Published, *, history_max: int) -> Record:
    """Move the pointer to a state that follows from the last one."""
    _must_hold(record, state.ticket)
    last, version = record.current, Version.parse(state.version)
    run_before = last.run if last else 0
    if state.run != run_before + 1:
        raise Conflict(f"a state of run {state.run} does not follow run {run_before}")
    if last and not record.is_cut:
        before = Version.parse(last.version)
        stays = (before.type, before.scheme, before.rebuild) == (version.type, version.scheme, version.rebuild)
        if stays and version.generation - before.generation not in (0, 1):
            raise Conflict(f"{version} does not follow {before}")
        if not stays and (version.rebuild < record.rebuild_next or version.generation != 0):
            raise Conflict(f"{version} does not follow {before}: V rises, and G starts at 0")
    elif version.rebuild < record.rebuild_next or version.generation != 0:
        raise Conflict(f"{version} uses a V that may have been used: it is at least {record.rebuild_next}")
    states = [*record.states, state]
    forgettable = [each for each in states[:-1] if each.is_deleted]
    for each in forgettable[: max(0, len(states) - history_max)]:
        states.remove(each)
    return structs.replace(
        record, states=states, rebuild_next=max(record.rebuild_next, version.rebuild + 1), is_cut=False
    )


def is_behind(record: Record, rebuild: int, generation: int, run: int) -> bool:
    """Whether a publication came after all that the record knows, so that what it would publish next was used before.

    A record that is cut uses no V again, whatever was published in those before.
    """
    known = [(Version.parse(each.version), each.run) for each in record.states]
    reached = [(version.rebuild, version.generation, each) for version, each in known]
    cut = [(record.rebuild_next, -1, 0)] if record.is_cut else []
    return (rebuild, generation, run) > max(reached + cut, default=(-1, -1, 0))


def note_strays(record: Record, ticket: int, found: Iterable[str], now_us: int) -> Record:
    """Put tombstones on states that nobody is known to have published, and forget those that are gone."""
    _must_hold(record, ticket)
    return structs.replace(record, strays={path: record.strays.get(path, now_us) for path in sorted(found)})


def begin(record: Record, ticket: int) -> Record:
    """Note that there is nothing to go on from, so that what a dead first master leaves is known to be ours."""
    _must_hold(record, ticket)
    return structs.replace(record, is_begun=True)


def declare_invalid(record: Record, ticket: int, checksums: Iterable[str], why: str) -> Record:
    """Return the pointer to the newest state that is not named here; the next run raises V."""
    _must_hold(record, ticket)
    lost = set(checksums)
    if record.current is None or record.current.checksum not in lost:
        raise Conflict("the last state is not among those that are to be declared invalid")
    states = [
        structs.replace(each, invalid=why) if each.checksum in lost and not each.invalid else each
        for each in record.states
    ]
    record = structs.replace(record, states=states, is_cut=True)
    # A state that had its tombstone is needed again.
    kept = [structs.replace(each, dropped_at_us=0) if each is record.current else each for each in states]
    return structs.replace(record, states=kept)


def adopt(record: Record, state: Published, others: Sequence[Published], rebuild_next: int, now_us: int) -> Record:
    """Begin a record with a state that another coordinator published. What came after it is not known: V rises.

    The others are dropped: nobody knows which of them were ever published, but some may still be read.
    """
    _must_hold(record, state.ticket)
    found = {state.checksum, *(each.checksum for each in others)}
    dropped = [structs.replace(each, invalid="of another coordinator", dropped_at_us=now_us) for each in others]
    states = [*(each for each in record.states if each.checksum not in found), *dropped, state]
    return structs.replace(record, states=states, rebuild_next=max(record.rebuild_next, rebuild_next), is_cut=True)


def to_drop(record: Record, *, states_kept: int, rebuilds_kept: int) -> list[Published]:
    """States that nobody should need any more: not among the newest, nor the last of a newest rebuild."""
    valid = [each for each in record.states if not each.invalid]
    kept = {id(each) for each in valid[-max(1, states_kept) :]}
    last_of: dict[int, Published] = {Version.parse(each.version).rebuild: each for each in valid}
    newest = sorted(last_of)[-rebuilds_kept:] if rebuilds_kept else []
    kept |= {id(last_of[rebuild]) for rebuild in newest}
    return [each for each in record.states if id(each) not in kept and not each.dropped_at_us]


def drop(record: Record, ticket: int, checksums: Iterable[str], now_us: int) -> Record:
    """Put tombstones on states; never on the last."""
    _must_hold(record, ticket)
    return _marked(record, checksums, dropped_at_us=now_us)


def deleted(record: Record, ticket: int, checksums: Iterable[str]) -> Record:
    """Give up dropped states: the pointer cannot return to them, and their files may go."""
    _must_hold(record, ticket)
    return _marked(record, checksums, is_deleted=True)


def _marked(record: Record, checksums: Iterable[str], **changes: object) -> Record:
    chosen = set(checksums)
    if record.current and record.current.checksum in chosen:
        raise Conflict("the last state is not dropped")
    states = [structs.replace(each, **changes) if each.checksum in chosen else each for each in record.states]
    return structs.replace(record, states=states)


def _must_hold(record: Record, ticket: int) -> None:
    if record.taken is not None and record.taken.ticket > ticket:
        raise TicketRefused(
            f"ticket {ticket} is older than {record.taken.ticket} of {record.taken.master}",
            hint="The lock has passed on; what this master made is not published",
        )


T = TypeVar("T")


def choose(states: Sequence[T], version_of: Callable[[T], Version], data: Version) -> T | None:
    """The newest of several states that the data fit."""
    fitting = [each for each in states if fits(version_of(each), data)[0]]
    return max(fitting, key=version_of, default=None)
