"""The endpoints of feeds: items as lines, the end, the plan, approval and the report."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from keyfold.core.context import Context
from keyfold.core.errors import Conflict, TooLarge
from keyfold.core.gather import Ask, Operation, Outcome
from keyfold.core.route import Lines, Route
from keyfold.core.store import Transaction
from keyfold.listings.model import why_held
from keyfold.listings.routes.shapes import SELLER, SellerId
from keyfold.listings.service.feeds import planning, reporting, staging, tasks
from keyfold.listings.service.feeds.items import FeedItem
from keyfold.listings.service.feeds.reporting import FeedReport
from keyfold.listings.service.feeds.staging import Position
from keyfold.listings.service.feeds.tasks import FeedShown
from keyfold.listings.service.listings import Listings

COUNT_MAX = 2**53
TASK_WEIGHT = 100  # in a batch: each locks the row of its seller and marks the tasks before


class FeedPath(Struct, frozen=True):
    seller: SellerId
    task: Annotated[int, Meta(ge=1, le=2**63 - 1, description="greater than that of every feed before")]


class ItemsQuery(Struct, frozen=True, forbid_unknown_fields=True):
    position: Annotated[
        int, Meta(ge=0, le=COUNT_MAX, description="the number of the first line in the whole feed, from 0")
    ] = 0


class FeedQuery(Struct, frozen=True, forbid_unknown_fields=True):
    plan: Annotated[bool, Meta(description="count what a feed would do whose end has not come")] = False


class ReportQuery(Struct, frozen=True, forbid_unknown_fields=True):
    after: Annotated[str, Meta(max_length=200, description="the `next_after` of the page before")] = ""
    limit: Annotated[int, Meta(ge=1, le=1_000)] = 100


class EndBody(Struct, frozen=True, forbid_unknown_fields=True):
    items: Annotated[int, Meta(ge=0, le=COUNT_MAX, description="how many lines the whole feed has")]


def feed_routes(context: Context, listings: Listings) -> list[Route]:
    """The task and the seller are in the path; a token sees the sellers that it was granted."""
    store = context.store

    def key(ask: Ask) -> tuple[str, int]:
        ask.client.must_see(SELLER, [ask.path["seller"]])
        return ask.path["seller"], int(ask.path["task"])

    def take(ask: Ask) -> Outcome:
        lines: Lines = ask.body
        return staging.take_lines(store, listings, *key(ask), ask.query.position + lines.first, lines.lines)

    def end(tx: Transaction, asks: Sequence[Ask]) -> list[Outcome]:
        return [tasks.end_task(tx, listings, *key(ask), ask.body.items) for ask in asks]

    def approve(tx: Transaction, asks: Sequence[Ask]) -> list[Outcome]:
        return [tasks.approve(tx, listings, *key(ask), ask.client.name) for ask in asks]

    def show(ask: Ask) -> Outcome:
        seller_id, task_id = key(ask)
        # The counts of a plan must be of one moment, and how it is made is set for its transaction.
        read = store.snapshot if ask.query.plan else store.read
        return read(lambda tx: _shown(tx, listings, seller_id, task_id, with_plan=ask.query.plan))

    def report(ask: Ask) -> Outcome:
        seller_id, task_id = key(ask)
        return store.read(
            lambda tx: reporting.report(tx, listings, seller_id, task_id, ask.query.after, ask.query.limit)
        )

    route = partial(Route, path_type=FeedPath, tag="feeds")

    def check(ask: Ask) -> None:
        key(ask)

    operation = partial(
        Operation, writes=True, check=check, weight=lambda _: TASK_WEIGHT, key=lambda ask: ask.path["seller"]
    )
    write = partial(route, method="POST", scope="listings.write", errors=(Conflict,))
    read = partial(route, method="GET", scope="read")
    base = "/v1/feeds/{seller}/{task}"
    return [
        write(
            path=f"{base}/items",
            summary="Send items of a feed",
            description="One item a line. Lines that were taken before are skipped; the answer, and `GET` of the feed,"
            " tell the position from which a feed goes on that was cut. So no Idempotency-Key is needed, and none"
            " is taken. An item that is not valid refuses nothing but itself: the report tells of it, and its offer"
            " stays as it is.",
            lines=FeedItem,
            query=ItemsQuery,
            run=take,
            answer=Position,
            errors=(Conflict, TooLarge),
        ),
        write(
            path=f"{base}/end",
            summary="End a feed",
            description="From here on the feed is applied: offers that it lacks are removed. Older feeds of the seller"
            " change nothing any more. A repeat answers as the first.",
            body=EndBody,
            run=operation(name="listings feed end", apply=end),
            idempotent=True,
            answer=FeedShown,
        ),
        write(
            path=f"{base}/approve",
            summary="Approve a feed that is held",
            description="A feed that would remove too large a share of the seller's offers waits for this.",
            run=operation(name="listings feed approve", apply=approve),
            idempotent=True,
            answer=FeedShown,
        ),
        read(path=base, summary="Read a feed: its stage, plan and counts", query=FeedQuery, run=show, answer=FeedShown),
        read(
            path=f"{base}/report",
            summary="Read the problems of a feed",
            query=ReportQuery,
            run=report,
            answer=FeedReport,
        ),
    ]


def _shown(tx: Transaction, listings: Listings, seller_id: str, task_id: int, *, with_plan: bool) -> FeedShown:
    task = tasks.must_find(tx, seller_id, task_id)
    shown = tasks.shown(task)
    if not with_plan or shown.plan is not None or task.stage not in ("taking", "ended"):
        return shown
    plan = planning.plan_of(tx, task)
    return msgspec.structs.replace(shown, plan=plan, reason=why_held(plan, listings.settings.feed_delete_share_max))
