"""The endpoints of numbering: what is published, whether data fit, and who has which place."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import structlog
from msgspec import Meta, Struct

from keyfold.bulk.folders import FolderBroken, FolderUnreachable
from keyfold.core.context import Context
from keyfold.core.errors import NotFound, TooLarge
from keyfold.core.gather import Ask, Outcome
from keyfold.core.route import Route
from keyfold.core.times import iso
from keyfold.numbering.model import Key, Place, Published, Record, Stands, Taken, TypeName, Version, stands
from keyfold.numbering.service import comparing, coordinating, finding, mastering
from keyfold.numbering.service.comparing import Compatibility
from keyfold.numbering.service.finding import Found, IndexLacking
from keyfold.numbering.service.mastering import StateLost
from keyfold.numbering.service.states import Shard
from keyfold.numbering.settings import NumberingSettings

log = structlog.get_logger(__name__)

KIND = "numbering"
ANSWERS_KEPT_MAX = 8  # each lists up to numbering.exceptions_max places
Id = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Number = Annotated[int, Meta(ge=0, le=2**31 - 1)]
VersionText = Annotated[str, Meta(pattern=r"^[0-9]{1,9}(\.[0-9]{1,9}){3}$", description="T.S.V.G")]


class TypePath(Struct, frozen=True):
    type: TypeName


class DataQuery(Struct, frozen=True, forbid_unknown_fields=True):
    data: VersionText


class HistoryQuery(Struct, frozen=True, forbid_unknown_fields=True):
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100


class StateShown(Struct, frozen=True):
    """A published state."""

    version: str
    run: int
    published_at: str
    ticket: int
    clusters: list[str]
    path: str
    checksum: str
    reason: str
    known: int
    new: int
    reused: int
    expired: int
    holes: int
    bytes: int
    stands: Stands
    why_invalid: str


class TypeShown(Struct, frozen=True):
    """A type: its last state, by shards, and who holds its lock."""

    type: str
    state: StateShown | None
    shards: list[Shard]
    lock: Taken | None
    rebuild_next: int


class TypesShown(Struct, frozen=True):
    types: list[str]


class HistoryShown(Struct, frozen=True):
    """The newest first."""

    states: list[StateShown]


class KeyAsked(Struct, frozen=True, forbid_unknown_fields=True):
    business_id: Id
    offer_id: Annotated[str, Meta(max_length=512)]
    shop_id: Id
    warehouse_id: Id


class PlaceAsked(Struct, frozen=True, forbid_unknown_fields=True):
    shard_id: Number
    doc_id: Number


class FindBody(Struct, frozen=True, forbid_unknown_fields=True):
    """Keys whose places are wanted, and places whose keys are."""

    keys: list[KeyAsked] = []
    places: list[PlaceAsked] = []


class FoundShown(Struct, frozen=True):
    """What was found, in the order of the question; null where there is nothing."""

    version: str
    keys: list[Found | None]
    places: list[Found | None]


def routes(context: Context) -> Sequence[Route]:
    door = Door(context)
    route = partial(Route, path_type=TypePath, errors=(NotFound, StateLost))
    return [
        Route(
            method="GET",
            path="/v1/numbering",
            summary="The types that this token may see",
            scope="read",
            run=door.types,
            answer=TypesShown,
        ),
        route(
            method="GET",
            path="/v1/numbering/{type}",
            summary="The last state of a type and who holds its lock",
            scope="read",
            run=door.type,
            answer=TypeShown,
        ),
        route(
            method="GET",
            path="/v1/numbering/{type}/history",
            summary="The published states of a type",
            scope="read",
            run=door.history,
            query=HistoryQuery,
            answer=HistoryShown,
        ),
        route(
            method="GET",
            path="/v1/numbering/{type}/compatible",
            summary="Whether data of a version can be used, and with which state",
            scope="read",
            run=door.compatible,
            query=DataQuery,
            answer=Compatibility,
            description="The newest state that the data fit is looked at: yes, no, or yes except the places listed,"
            " which were given to other offers since the data were made. At most `numbering.exceptions_max` are listed;"
            " `reassigned` counts them all.",
        ),
        route(
            method="POST",
            path="/v1/numbering/{type}/find",
            summary="Places of keys and keys of places",
            scope="read",
            run=door.find,
            body=FindBody,
            answer=FoundShown,
            errors=(NotFound, StateLost, IndexLacking, TooLarge),
            description="By the index of the last state, which masters build when they have published: until it is"
            " there, ask again.",
        ),
    ]


class Door:
    """What the endpoints share."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._settings = context.settings.section("numbering", NumberingSettings)
        self._comparing = threading.Lock()
        self._answers: dict[tuple[str, Version], Compatibility] = {}

    def types(self, ask: Ask) -> Outcome:
        return TypesShown([name for name in sorted(self._settings.types) if ask.client.may(KIND, name)])

    def type(self, ask: Ask) -> Outcome:
        name = self._named(ask)
        record = coordinating.look(self._context.leases, name)
        lease = coordinating.holder(self._context.leases, name)
        taken = record.taken if lease and record.taken and record.taken.ticket == lease.ticket else None
        current = record.current
        shards: list[Shard] = []
        if current:
            with _reading(current):
                shards = mastering.stored(self._settings, current).manifest.shards
        shown = _shown(current, record) if current else None
        return TypeShown(name, shown, shards, taken, record.rebuild_next)

    def history(self, ask: Ask) -> Outcome:
        record = coordinating.look(self._context.leases, self._named(ask))
        assert isinstance(ask.query, HistoryQuery)
        newest = reversed(record.states[-ask.query.limit :])
        return HistoryShown([_shown(each, record) for each in newest])

    def compatible(self, ask: Ask) -> Outcome:
        name = self._named(ask)
        assert isinstance(ask.query, DataQuery)
        data = Version.parse(ask.query.data)
        record = coordinating.look(self._context.leases, name)
        try:
            state = comparing.chosen(record, data)
        except NotFound:
            state = comparing.chosen(record, None)
        # A comparison reads every place: one at a time, and once, since neither state nor answer ever changes.
        with self._comparing, _reading(state):
            if (answer := self._answers.get((state.checksum, data))) is None:
                compare = partial(
                    comparing.compatible,
                    data=data,
                    places_max=self._settings.exceptions_max,
                    megabytes_max=self._settings.engine_megabytes_max,
                    scratch=Path(self._settings.scratch) if self._settings.scratch else None,
                )
                answer = mastering.read_anywhere(self._settings, state, compare)
                while len(self._answers) >= ANSWERS_KEPT_MAX:
                    del self._answers[next(iter(self._answers))]
                self._answers[state.checksum, data] = answer
        return answer

    def find(self, ask: Ask) -> Outcome:
        name = self._named(ask)
        assert isinstance(ask.body, FindBody)
        wanted = len(ask.body.keys) + len(ask.body.places)
        if wanted > self._context.limits.batch_items_max:
            raise TooLarge(f"{wanted} look-ups; at most {self._context.limits.batch_items_max} in one request")
        state = comparing.chosen(coordinating.look(self._context.leases, name), None)
        keys = [Key(each.business_id, each.offer_id, each.shop_id, each.warehouse_id) for each in ask.body.keys]
        places = [Place(each.shard_id, each.doc_id) for each in ask.body.places]
        with _reading(state):
            look = partial(finding.look_up, keys=keys, places=places)
            by_key, by_place = mastering.read_anywhere(self._settings, state, look)
        return FoundShown(state.version, [by_key.get(key) for key in keys], [by_place.get(place) for place in places])

    def _named(self, ask: Ask) -> str:
        name = ask.path["type"]
        if name not in self._settings.types or not ask.client.may(KIND, name):
            raise NotFound(f"there is no type {name!r}")
        return name


@contextlib.contextmanager
def _reading(state: Published) -> Iterator[None]:
    """Where states lie, and why they cannot be read, is told to the log and not to whoever asks."""
    try:
        yield
    except (StateLost, IndexLacking, FolderBroken, FolderUnreachable) as error:
        log.warning("a state cannot be read", version=state.version, error=str(error))
        if isinstance(error, IndexLacking):
            raise IndexLacking(f"{state.version} has no look-up index yet", retry_after_seconds=10) from error
        raise StateLost(f"{state.version} cannot be read now", retry_after_seconds=10) from error


def _shown(state: Published, record: Record) -> StateShown:
    return StateShown(
        published_at=iso(state.published_at_us),
        stands=stands(state, record),
        why_invalid=state.invalid,
        **{
            name: getattr(state, name)
            for name in StateShown.__struct_fields__
            if name not in ("published_at", "stands", "why_invalid")
        },
    )
