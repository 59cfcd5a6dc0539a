"""For an administrator: what of a profile is held back, since when, until when, and what it waits for."""

from collections.abc import Iterable, Sequence

from msgspec import Struct

from keyfold.core.clock import SECOND_US
from keyfold.core.store import Transaction
from keyfold.core.times import iso
from keyfold.counters.counters import Counters
from keyfold.counters.errors import PackWrong
from keyfold.counters.model import TIME_MAX
from keyfold.profiles.model import Held, ProfileKey
from keyfold.profiles.service.holding import Place, held_at
from keyfold.profiles.service.product import Product
from keyfold.profiles.service.reading import stored_bodies
from keyfold.profiles.service.storing import keys_of


class Explained(Struct, frozen=True):
    """One held-back update."""

    counter: str
    counter_id: int
    key: int
    owner: str  # sixteen hexadecimal digits
    value: float | int
    time: int
    event_id: str
    log: str
    held_since_us: int
    held_until_us: int
    waits_for: str


def explain(
    tx: Transaction, product: Product, profile: ProfileKey, counter: int | str | None = None, key: int | None = None
) -> list[Explained]:
    """Every update of a profile that is held back, oldest first."""
    group_id = None if counter is None else product.catalog.group_of(product.catalog[counter].id).id
    places = {
        place: waiting
        for place, waiting in held_at(tx, product, keys_of([profile])).items()
        if (group_id is None or place[2] == group_id) and (key is None or place[3] == key)
        if place[2] in product.catalog.groups
    }
    body = stored_bodies(tx, [profile]).get(profile, b"")
    public = _public(product, body, places, tx.now_us // 1_000_000)
    found = [
        _explained(product, each, waiting, public.times.get(place), public.problem)
        for place, waiting in places.items()
        for each in waiting
    ]
    return sorted(found, key=lambda each: (each.held_since_us, each.event_id))


class _Public(Struct):
    """The times of public keys by place, as far as there are any; or why they cannot be read."""

    times: dict[Place, int | None]
    problem: str


def _public(product: Product, body: bytes, places: Iterable[Place], now: int) -> _Public:
    try:
        counters = Counters(product.catalog, body, now)
        found = {place: counters.find(place[2], place[3]) for place in places}
    except PackWrong as error:  # what waits lies outside the body: it can be told all the same
        return _Public({}, str(error))
    return _Public({place: value.time for place, value in found.items() if value is not None}, "")


def _explained(
    product: Product, held: Held, waiting: Sequence[Held], public_time: int | None, problem: str
) -> Explained:
    known = product.catalog.counters.get(held.counter_id)
    return Explained(
        known.name if known else "",
        held.counter_id,
        held.key,
        f"{held.owner:016x}",
        held.value,
        held.time,
        held.event_id,
        held.log,
        held.committed_at_us,
        held.committed_at_us + product.settings.delete_us,
        _waits_for(held, waiting, public_time, product.settings.merge_seconds)
        + (f"; the public part of the profile cannot be read: {problem}" if problem else ""),
    )


def _waits_for(held: Held, waiting: Sequence[Held], public_time: int | None, merge_seconds: int) -> str:
    sources = [each.time for each in waiting if each.owner != held.owner]
    sources += [] if public_time is None else [public_time]
    if any(abs(time - held.time) < merge_seconds for time in sources):
        return "the next event of this key, which releases it if its profile has room: it has a source"
    within = f"between {_when(held.time - merge_seconds + 1)} and {_when(held.time + merge_seconds - 1)}"
    others = {each.owner for each in waiting} - {held.owner}
    seen = []
    if public_time is not None:
        seen.append(f"the public key is at {_when(public_time)}")
    if others:
        seen.append(f"{len(others)} other owner{'s' if len(others) > 1 else ''} too far away in time")
    return f"an update of this key without an owner, or of another owner, {within}" + (
        f" ({'; '.join(seen)})" if seen else ""
    )


def _when(seconds: int) -> str:
    """A moment as people read it, of those that an event can have."""
    return iso(min(max(seconds, 1), TIME_MAX) * SECOND_US)
