"""The endpoints of profiles: events in, profiles out, and what is held back for an administrator."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from keyfold.core.context import Context
from keyfold.core.errors import KeyfoldError, NotFound, TooLarge
from keyfold.core.gather import Ask, Encoded, Operation, Outcome
from keyfold.core.route import Route
from keyfold.core.store import Transaction
from keyfold.profiles.answers import JSON, PROTOBUF, Profiles, as_json, as_protobuf
from keyfold.profiles.handlers import Event
from keyfold.profiles.model import PROFILE_ID_BYTES_MAX, ProfileKey, Verdict, event_of, profile_id_of
from keyfold.profiles.service.counting import count_events
from keyfold.profiles.service.explaining import Explained, explain
from keyfold.profiles.service.folding import warm
from keyfold.profiles.service.product import Product, opened
from keyfold.profiles.service.reading import View, must_be_counters, read_profiles, view_of
from keyfold.profiles.settings import ClientView

Name = Annotated[str, Meta(min_length=1, max_length=100, pattern=r"^[^\x00]*$")]

# As an event may give it: what can be written can be read.
ID_BYTES = f"at most {PROFILE_ID_BYTES_MAX} bytes of UTF-8"


class LogPath(Struct, frozen=True):
    log: Name


class LogBody(Struct, frozen=True, forbid_unknown_fields=True):
    events: Annotated[
        list[dict[str, Any]],
        Meta(
            min_length=1,
            description="events, each with `event_id`, `time` (unix seconds), `profile_id`, and what the handlers read",
        ),
    ]


class Verdicts(Struct, frozen=True):
    """What became of each event, in their order; one that could not be counted stops no other."""

    events: list[Verdict]


class ProfileId(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    # Without patterns, which cost more than all else of a body: the door itself lets no NUL in.
    type: Annotated[str, Meta(min_length=1, max_length=100)]
    id: (
        Annotated[int, Meta(extra_json_schema={"minimum": -(2**63), "maximum": 2**64 - 1})]
        | Annotated[str, Meta(min_length=1, max_length=PROFILE_ID_BYTES_MAX, description=ID_BYTES)]
    )

    def __post_init__(self) -> None:
        # Short text is within the bounds that are declared above, whatever its characters take.
        if not isinstance(self.id, str) or len(self.id) * 4 > PROFILE_ID_BYTES_MAX:
            profile_id_of(self.id, "id")


class Person(Struct, frozen=True, forbid_unknown_fields=True):
    ids: Annotated[list[ProfileId], Meta(min_length=1, description="the ids of one person; their profiles are merged")]


class ReadBody(Struct, frozen=True, forbid_unknown_fields=True):
    profiles: Annotated[list[Person], Meta(min_length=1, description="the people to read")]
    counters: Annotated[
        Annotated[list[Annotated[int, Meta(ge=1, le=2**31 - 1)] | Name], Meta(max_length=1_000)] | None,
        Meta(description="counters by id or name; all that the client receives, if left out"),
    ] = None
    as_of: Annotated[
        Literal["key", "now"], Meta(description="values as of each key's latest time, or decayed to now")
    ] = "key"
    idf: Annotated[bool, Meta(description="weigh the keys of Idf counters by how rare they are")] = False


class HeldPath(Struct, frozen=True):
    type: Name
    id: Annotated[str, Meta(min_length=1, max_length=PROFILE_ID_BYTES_MAX, pattern=r"^[^\x00]*$", description=ID_BYTES)]


class HeldBack(Struct, frozen=True):
    """What of a profile is held back, since when, until when, and what it waits for."""

    held: list[Explained]


def routes(context: Context) -> list[Route]:
    product = opened(context)
    warm(product)
    counting, reading = _counting(context, product), _reading(context, product)

    def held(ask: Ask) -> Outcome:
        profile = (ask.path["type"], profile_id_of(ask.path["id"], "id"))
        _must_see(product, ask, ClientView(), [profile[0]])
        return HeldBack(context.store.snapshot(lambda tx: explain(tx, product, profile)))

    return [
        Route(
            method="POST",
            path="/v1/logs/{log}",
            summary="Count the events of a log",
            scope="ingest",
            body=LogBody,
            path_type=LogPath,
            answer=Verdicts,
            run=counting,
            idempotent=True,
            judges_items=True,
        ),
        Route(
            method="POST",
            path="/v1/profiles",
            summary="Read profiles",
            scope="read",
            body=ReadBody,
            answer=Profiles,
            run=reading,
            media=(PROTOBUF,),
            pace=lambda ask: _pace(product, ask),
            description="With `Accept: application/x-protobuf` the answer is the message `keyfold.counters.Profiles`.",
        ),
        Route(
            method="GET",
            path="/v1/profiles/{type}/{id}/held",
            summary="Explain what of a profile is held back",
            scope="admin",
            path_type=HeldPath,
            answer=HeldBack,
            run=held,
        ),
    ]


def _counting(context: Context, product: Product) -> Operation:
    items_max = context.limits.batch_items_max

    def check(ask: Ask) -> None:
        if len(ask.body.events) > items_max:
            raise TooLarge(f"{len(ask.body.events)} events, {items_max} are allowed in one request")
        log = ask.path["log"]
        types = product.handlers.types_of(log)
        if not types or not all(ask.client.may("profile", each) for each in types):
            raise NotFound(f"there is no log {log!r}")

    def apply(tx: Transaction, asks: Sequence[Ask]) -> list[Outcome]:
        given = [(ask.path["log"], fields) for ask in asks for fields in ask.body.events]
        verdicts = _counted(tx, product, given)
        outcomes: list[Outcome] = []
        at = 0
        for ask in asks:
            outcomes.append(Verdicts(verdicts[at : at + len(ask.body.events)]))
            at += len(ask.body.events)
        return outcomes

    return Operation(
        name="profiles count",
        apply=apply,
        writes=True,
        check=check,
        weight=lambda ask: len(ask.body.events),
        key=lambda ask: str(ask.body.events[0].get("profile_id", "")),
    )


def _counted(tx: Transaction, product: Product, given: Sequence[tuple[str, dict[str, Any]]]) -> list[Verdict]:
    """The verdict on each event, also on what is not one."""
    events: list[tuple[str, Event]] = []
    verdicts: list[Verdict | None] = []
    for log, fields in given:
        try:
            events.append((log, event_of(fields)))
            verdicts.append(None)
        except KeyfoldError as error:
            event_id = fields.get("event_id")
            verdicts.append(Verdict(event_id[:200] if isinstance(event_id, str) else "", "refused", str(error)))
    counted = iter(count_events(tx, product, events, marked=True))
    return [verdict or next(counted) for verdict in verdicts]


def _reading(context: Context, product: Product) -> Operation:
    items_max, ids_max = context.limits.batch_items_max, product.settings.ids_max
    views: dict[tuple[object, ...], View] = {}

    def check(ask: Ask) -> None:
        people = ask.body.profiles
        for index, person in enumerate(people):
            if len(person.ids) > ids_max:
                raise TooLarge(
                    f"{len(person.ids)} ids, {ids_max} are allowed for one person", place=f"profiles[{index}]"
                )
        asked = [each for person in people for each in person.ids]
        if len(asked) > items_max:
            raise TooLarge(f"{len(asked)} ids, {items_max} are allowed in one request")
        _must_see(product, ask, _client(product, ask), {each.type for each in asked})
        must_be_counters(product, ask.body.counters or ())

    def view(ask: Ask) -> View:
        body: ReadBody = ask.body
        wanted = None if body.counters is None else tuple(dict.fromkeys(body.counters))
        asked = (ask.client.name, wanted, body.as_of, body.idf, ask.media)
        if asked not in views:
            if len(views) >= 1_000:
                views.clear()
            views[asked] = view_of(
                product,
                _client(product, ask),
                wanted,
                at_now=body.as_of == "now",
                weighted=body.idf,
                as_json=ask.media == JSON,
            )
        return views[asked]

    def apply(tx: Transaction, asks: Sequence[Ask]) -> list[Outcome]:
        seen = [view(ask) for ask in asks]
        entries = [(_keys(person), own) for ask, own in zip(asks, seen, strict=True) for person in ask.body.profiles]
        read = read_profiles(tx, product, entries)
        outcomes: list[Outcome] = []
        at = 0
        for ask, own in zip(asks, seen, strict=True):
            part = read[at : at + len(ask.body.profiles)]
            at += len(part)
            encode = as_protobuf if ask.media == PROTOBUF else as_json
            outcomes.append(Encoded(encode(part, own), ask.media))
        return outcomes

    def looks(ask: Ask) -> bool:
        return _looks_at_what_waits(product, ask)

    # An answer that leaves at once must not wait for a look at what is held back, not even for that of its neighbours.
    return Operation(
        name="profiles read",
        apply=apply,
        writes=False,
        check=check,
        weight=_weight,
        is_apart=looks,
        needs_snapshot=looks,
    )


def _weight(ask: Ask) -> int:
    return sum([len(person.ids) for person in ask.body.profiles])


def _pace(product: Product, ask: Ask) -> float:
    """Several ids read together are looked up among what is held back, which takes the longer the more waits there."""
    return product.settings.merged_read_ms / 1_000 if _looks_at_what_waits(product, ask) else 0.0


def _looks_at_what_waits(product: Product, ask: Ask) -> bool:
    return bool(product.delayed) and any(len(person.ids) > 1 for person in ask.body.profiles)


def _keys(person: Person) -> list[ProfileKey]:
    return [(each.type, str(each.id)) for each in person.ids]


def _client(product: Product, ask: Ask) -> ClientView:
    return product.settings.clients.get(ask.client.name, ClientView())


def _must_see(product: Product, ask: Ask, client: ClientView, types: Sequence[str] | set[str]) -> None:
    """A type that the token or the client's configuration does not name is not there."""
    for each in sorted(types):
        configured = client.types is None or each in client.types
        if not configured or not product.knows_type(each) or not ask.client.may("profile", each):
            raise NotFound(f"there is no profile type {each!r}")
