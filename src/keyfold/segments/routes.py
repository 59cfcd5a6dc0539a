"""The endpoints of segments."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Literal

from msgspec import Meta, Struct

from keyfold.core.context import Context
from keyfold.core.errors import Conflict, NotFound, TooLarge
from keyfold.core.gather import Ask, Operation, Outcome
from keyfold.core.route import Route
from keyfold.core.store import Transaction
from keyfold.segments.model import Entry, SegmentId, UserId
from keyfold.segments.service import acting, describing, evaluating, queueing, reading, sweeping
from keyfold.segments.service.describing import Segment, SegmentShown
from keyfold.segments.service.queueing import Queued, QueueFigures
from keyfold.segments.service.reading import Because, Change, UserSet
from keyfold.segments.service.snapshots import Snapshots
from keyfold.segments.service.sources import must_be_condition
from keyfold.segments.service.sweeping import Swept
from keyfold.segments.service.uploading import PARTS_MAX, PartTaken, Uploads
from keyfold.segments.settings import SegmentsSettings

KIND = "segment"
EVERY = "*"
Number64 = Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": 2**64 - 1})]


AnyStage = Literal["any", "evaluation", "awaiting_diff", "diffing", "held", "done", "failed"]


class CreateBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    segment_id: SegmentId
    title: Annotated[str, Meta(max_length=200)] = ""
    source_table: Annotated[str, Meta(max_length=200, description="a table of the settings; none: uploaded")] = ""
    condition: Annotated[str, Meta(max_length=10_000, description="SQL over the columns of the table")] = ""
    remove_share_max: Annotated[float, Meta(ge=0, le=1)] | None = None


class SegmentPath(Struct, frozen=True):
    segment_id: SegmentId


class UploadPath(Struct, frozen=True):
    segment_id: SegmentId
    upload_id: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}$")]


class PartPath(Struct, frozen=True):
    segment_id: SegmentId
    upload_id: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}$")]
    number: Annotated[int, Meta(ge=1, le=PARTS_MAX)]


class UserPath(Struct, frozen=True):
    user_id: UserId


class ListQuery(Struct, frozen=True, forbid_unknown_fields=True):
    stage: AnyStage = "any"
    after: Annotated[str, Meta(max_length=100)] = ""
    limit: Annotated[int, Meta(ge=1, le=1_000)] = 100
    stuck: bool = False


class HistoryQuery(Struct, frozen=True, forbid_unknown_fields=True):
    before: Annotated[int, Meta(ge=1, le=2**63 - 1, description="only versions below this")] = 2**63 - 1
    limit: Annotated[int, Meta(ge=1, le=1_000)] = 100


class WhyQuery(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    segment_id: SegmentId


class PartBody(Struct, frozen=True, forbid_unknown_fields=True):
    user_ids: Annotated[list[Number64 | UserId], Meta(min_length=1, description="ascending, without a repeat")]

    def __post_init__(self) -> None:
        for each in self.user_ids:
            if isinstance(each, int) and not 0 <= each < 2**64:
                raise ValueError(f"{each} in user_ids is not a number of 64 bits without a sign")


class FinishBody(Struct, frozen=True, forbid_unknown_fields=True):
    parts: Annotated[int, Meta(ge=1, le=PARTS_MAX, description="how many there are, numbered from 1")]


class ApproveBody(Struct, frozen=True, forbid_unknown_fields=True):
    evaluation_version: Annotated[int, Meta(ge=1, le=2**63 - 1, description="what is held; another is refused")]


class SweepBody(Struct, frozen=True, forbid_unknown_fields=True):
    after: Annotated[str, Meta(max_length=200, description="go on behind this user")] = ""
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 1_000


class UsersBody(Struct, frozen=True, forbid_unknown_fields=True):
    user_ids: Annotated[list[UserId], Meta(min_length=1, description="users whose sets are wanted")]


class SegmentsAnswer(Struct, frozen=True):
    segments: list[SegmentShown]


class UploadBegun(Struct, frozen=True):
    upload_id: str


class SetShown(Struct, frozen=True):
    """The segments of a user that the caller may see; the version only where that is all of them."""

    user_id: str
    version: int | None
    segments: list[Entry]


class SetsAnswer(Struct, frozen=True):
    """The sets, in the order asked for."""

    users: list[SetShown]


class HistoryAnswer(Struct, frozen=True):
    changes: list[Change]


def routes(context: Context) -> list[Route]:
    doors = Doors(context, context.settings.section("segments", SegmentsSettings))
    one = partial(Route, answer=SegmentShown, path_type=SegmentPath, errors=(NotFound, Conflict))
    act = partial(one, method="POST", scope="admin")
    upload = partial(Route, scope="ingest", errors=(NotFound, Conflict))
    user = partial(Route, method="GET", scope="read", path_type=UserPath, errors=(NotFound,))
    return [
        Route(
            method="POST",
            path="/v1/segments",
            summary="Make a segment",
            scope="admin",
            body=CreateBody,
            answer=SegmentShown,
            errors=(Conflict,),
            run=doors.create,
        ),
        Route(
            method="GET",
            path="/v1/segments",
            summary="List segments and where they stand",
            scope="read",
            query=ListQuery,
            answer=SegmentsAnswer,
            run=doors.list,
        ),
        Route(
            method="GET",
            path="/v1/segment-queue",
            summary="Figures of the queue",
            scope="read",
            answer=QueueFigures,
            errors=(NotFound,),
            run=doors.queue,
        ),
        one(method="GET", path="/v1/segments/{segment_id}", summary="One segment", scope="read", run=doors.get),
        act(path="/v1/segments/{segment_id}/evaluate", summary="Ask for an evaluation", run=doors.act(evaluating.want)),
        act(
            path="/v1/segments/{segment_id}/approve",
            summary="Let a held diff go on",
            body=ApproveBody,
            run=doors.approve,
        ),
        act(path="/v1/segments/{segment_id}/retry", summary="Try again", run=doors.recorded(acting.retry)),
        act(path="/v1/segments/{segment_id}/off", summary="Turn a segment off", run=doors.recorded(acting.turn_off)),
        act(path="/v1/segments/{segment_id}/on", summary="Turn a segment on", run=doors.recorded(acting.turn_on)),
        upload(
            method="POST",
            path="/v1/segments/{segment_id}/uploads",
            summary="Begin to upload a snapshot",
            path_type=SegmentPath,
            answer=UploadBegun,
            run=doors.begin_upload,
        ),
        upload(
            method="PUT",
            path="/v1/segments/{segment_id}/uploads/{upload_id}/parts/{number}",
            summary="Upload a part of a snapshot",
            path_type=PartPath,
            body=PartBody,
            answer=PartTaken,
            run=doors.put_part,
        ),
        upload(
            method="POST",
            path="/v1/segments/{segment_id}/uploads/{upload_id}/finish",
            summary="Finish an upload",
            path_type=UploadPath,
            body=FinishBody,
            answer=SegmentShown,
            run=doors.finish_upload,
        ),
        Route(
            method="POST",
            path="/v1/segment-sweep",
            summary="Collect what has expired, step by step",
            scope="admin",
            body=SweepBody,
            answer=Swept,
            errors=(NotFound,),
            run=doors.sweep,
        ),
        Route(
            method="POST",
            path="/v1/user-segments",
            summary="The sets of users",
            scope="read",
            body=UsersBody,
            answer=SetsAnswer,
            run=doors.reading(),
        ),
        user(
            path="/v1/user-segments/{user_id}/why",
            summary="Why a user is, or is not, in a segment",
            query=WhyQuery,
            answer=Because,
            run=doors.why,
        ),
        user(
            path="/v1/user-segments/{user_id}/history",
            summary="How the set of a user changed, within the replay window",
            query=HistoryQuery,
            answer=HistoryAnswer,
            run=doors.history,
        ),
    ]


class Doors:
    """What the endpoints do; a segment that a token does not name is not there."""

    def __init__(self, context: Context, settings: SegmentsSettings) -> None:
        self._context = context
        self._store = context.store
        self._settings = settings
        self._snapshots = Snapshots.of(context, settings)
        self._uploads = Uploads(context.store, self._snapshots)

    def create(self, ask: Ask) -> Outcome:
        body: CreateBody = ask.body
        ask.client.must_see(KIND, [body.segment_id])
        if body.condition:
            must_be_condition(body.condition)
        wanted = Segment(**{name: getattr(body, name) for name in Segment.__struct_fields__})
        return self._store.transact(
            lambda tx: describing.create(tx, self._settings, wanted, ask.client.name), name="segment create", once=True
        )

    def list(self, ask: Ask) -> Outcome:
        query: ListQuery = ask.query
        only = None if ask.client.may(KIND, EVERY) else sorted(ask.client.grants.get(KIND, frozenset()))

        def look(tx: Transaction) -> SegmentsAnswer:
            names = describing.listed(
                tx,
                stage=None if query.stage == "any" else query.stage,
                only=only,
                after=query.after,
                count_max=query.limit,
                stuck_seconds=self._settings.stuck_seconds if query.stuck else None,
            )
            return SegmentsAnswer(describing.shown(tx, self._settings, names))

        return self._store.read(look)

    def queue(self, ask: Ask) -> Outcome:
        ask.client.must_see(KIND, [EVERY])
        return self._store.read(lambda tx: queueing.figures(tx, self._settings.stuck_seconds))

    def get(self, ask: Ask) -> Outcome:
        return self._shown(self._segment(ask))

    def act(self, act: Callable[[Transaction, str], Queued]) -> Callable[[Ask], Outcome]:
        def run(ask: Ask) -> Outcome:
            name = self._segment(ask)
            self._store.transact(lambda tx: act(tx, name), name="segment act", once=True)
            return self._shown(name)

        return run

    def recorded(self, act: Callable[[Transaction, str, str], Queued]) -> Callable[[Ask], Outcome]:
        """An act that the audit keeps, with whose token it was."""

        def run(ask: Ask) -> Outcome:
            name = self._segment(ask)
            self._store.transact(lambda tx: act(tx, name, ask.client.name), name="segment act", once=True)
            return self._shown(name)

        return run

    def approve(self, ask: Ask) -> Outcome:
        name, version = self._segment(ask), ask.body.evaluation_version
        self._store.transact(
            lambda tx: acting.approve(tx, name, version, ask.client.name), name="segment act", once=True
        )
        return self._shown(name)

    def begin_upload(self, ask: Ask) -> Outcome:
        return UploadBegun(self._uploads.begin(self._segment(ask)))

    def put_part(self, ask: Ask) -> Outcome:
        return self._uploads.put(self._segment(ask), ask.path["upload_id"], int(ask.path["number"]), ask.body.user_ids)

    def finish_upload(self, ask: Ask) -> Outcome:
        name = self._segment(ask)
        self._uploads.finish(name, ask.path["upload_id"], ask.body.parts)
        return self._shown(name)

    def sweep(self, ask: Ask) -> Outcome:
        ask.client.must_see(KIND, [EVERY])
        body: SweepBody = ask.body
        return self._store.transact(
            lambda tx: sweeping.sweep_step(tx, self._context, self._settings, body.after, body.limit),
            name="segment sweep",
        )

    def why(self, ask: Ask) -> Outcome:
        user, name = ask.path["user_id"], ask.query.segment_id
        ask.client.must_see(KIND, [name])
        told = reading.why(self._store, self._snapshots, self._settings, user, name)
        return told if ask.client.may(KIND, EVERY) else reading.without_versions(told)

    def history(self, ask: Ask) -> Outcome:
        """A history tells of all segments, so it needs leave to see all."""
        ask.client.must_see(KIND, [EVERY])
        user, query = ask.path["user_id"], ask.query
        return self._store.read(
            lambda tx: HistoryAnswer(
                reading.history(tx, self._settings.topic, user, before=query.before, count_max=query.limit)
            )
        )

    def reading(self) -> Operation:
        items_max = self._context.limits.batch_items_max

        def check(ask: Ask) -> None:
            if len(ask.body.user_ids) > items_max:
                raise TooLarge(f"{len(ask.body.user_ids)} users, {items_max} are allowed", place="user_ids")

        def apply(tx: Transaction, asks: Sequence[Ask]) -> list[Outcome]:
            found = reading.read_sets(tx, [user for ask in asks for user in ask.body.user_ids])
            return [SetsAnswer([_visible(ask, found[user]) for user in ask.body.user_ids]) for ask in asks]

        return Operation(
            name="segments read", apply=apply, writes=False, check=check, weight=lambda ask: len(ask.body.user_ids)
        )

    def _segment(self, ask: Ask) -> str:
        name = ask.path["segment_id"]
        ask.client.must_see(KIND, [name])
        return name

    def _shown(self, segment_id: str) -> SegmentShown:
        def look(tx: Transaction) -> SegmentShown:
            queueing.one(tx, segment_id)
            return describing.shown(tx, self._settings, [segment_id])[0]

        return self._store.read(look)


def _visible(ask: Ask, found: UserSet) -> SetShown:
    if ask.client.may(KIND, EVERY):
        return SetShown(found.user_id, found.version, found.segments)
    return SetShown(found.user_id, None, [each for each in found.segments if ask.client.may(KIND, each.segment_id)])
