"""The commands of listings, in process on the store."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from keyfold.core.answer import Answer, Row, printable
from keyfold.core.context import Context
from keyfold.core.errors import BadInput, NotFound
from keyfold.core.times import iso

if TYPE_CHECKING:
    from keyfold.core.store import Transaction
    from keyfold.listings.service.feeds.tasks import FeedShown
    from keyfold.listings.service.listings import Listings
    from keyfold.listings.service.repairing import Drift

app = typer.Typer(no_args_is_help=True, help="Listings: offers, sellers, feeds, and whether their counts are right.")

ACTOR = "command line"
SELLERS_MAX = 1_000
SellerArgument = Annotated[str, typer.Argument(metavar="SELLER", help="which seller")]


@app.command()
def offer(
    ctx: typer.Context,
    offer_id: Annotated[
        list[str], typer.Argument(metavar="OFFER", help="16 digits, in groups or not: 1234 5678 9012 3452")
    ],
) -> Answer:
    """Show an offer, with everything that is kept at it."""
    from keyfold.listings.model import offer_id_read, offer_id_shown
    from keyfold.listings.service import offers

    context, _ = _opened(ctx)
    wanted = offer_id_read(" ".join(offer_id))

    def look(tx: "Transaction") -> tuple[Any, list[Any]]:
        told = offers.read(tx, [wanted]).get(wanted)
        if told is None:
            raise offers.not_there(wanted)
        return msgspec.json.decode(told.body), offers.kinds_of(tx, told.seller_id, wanted)

    found, kinds = context.store.read(look)
    price = found["price"]
    rows = [
        {"what": "offer", "is": offer_id_shown(wanted)},
        {"what": "seller", "is": printable(found["seller_id"])},
        {"what": "category", "is": f"{found['category']}, schema {found['schema_version']}"},
        {"what": "status", "is": f"{found['shown']}, version {found['version']}"},
        {"what": "since", "is": iso(found["status_at_us"])},
        {"what": "made", "is": iso(found["created_at_us"])},
        {"what": "price", "is": f"{price['amount']} {price['currency']}" if price else ""},
        {"what": "from a feed", "is": printable(found["external_id"])},
        *({"what": f"kind {each.kind}", "is": f"version {each.version}"} for each in kinds if each.kind != "offer"),
    ]
    return Answer(
        data={"offer": found, "kinds": kinds}, table=rows, lines=[msgspec.json.encode(found["content"]).decode()]
    )


@app.command()
def seller(
    ctx: typer.Context,
    seller_id: SellerArgument,
    preset: Annotated[str, typer.Option(help="Which list of the cabinet.")] = "all",
    cursor: Annotated[str, typer.Option(help="Go on behind the page before.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=1_000, help="Offers on the page.")] = 20,
) -> Answer:
    """Show what is counted of a seller, and a page of the cabinet."""
    from keyfold.listings.service import cabinet, walking

    context, _ = _opened(ctx)

    def look(tx: "Transaction") -> Any:
        return (
            walking.is_seller(tx, seller_id),
            cabinet.counters(tx, seller_id),
            cabinet.preset_counts(tx, seller_id),
            cabinet.page(tx, seller_id, preset, cursor, limit),
        )

    is_seller, counters, presets, page = context.store.read(look)
    offers = [msgspec.json.decode(told.body) for told in page.offers]
    lines = [f"{name}: {value}" for name, value in counters.items()]
    lines += [f"preset {each.preset}: {each.offers}" + ("" if each.is_complete else " (building)") for each in presets]
    if page.cursor:
        lines.append(f"next page: keyfold listings seller {seller_id} --preset {preset} --cursor {page.cursor}")
    rows = [
        {
            "offer": each["offer_id"],
            "status": each["shown"],
            "category": each["category"],
            "made": iso(each["created_at_us"]),
            "version": each["version"],
        }
        for each in offers
    ]
    data = {"counters": counters, "presets": presets, "offers": offers, "cursor": page.cursor}
    notes = [] if is_seller else [f"{printable(seller_id)} has never had an offer"]
    return Answer(data=data, table=rows, lines=lines, notes=notes)


@app.command()
def feed(
    ctx: typer.Context,
    seller_id: SellerArgument,
    task: Annotated[int | None, typer.Argument(metavar="[TASK]", help="one feed; the newest ones if left out")] = None,
    approve: Annotated[bool, typer.Option("--approve", help="Let a feed that is held go on.")] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Let feeds begin again with a smaller task id; offers stay as they are.")
    ] = False,
    after: Annotated[str, typer.Option(metavar="PLACE", help="Problems behind this place.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=1_000, help="Problems shown, or feeds.")] = 20,
) -> Answer:
    """Show the feeds of a seller, or one with its plan and problems."""
    from keyfold.listings.service.feeds import reporting, restarting, tasks

    context, listings = _opened(ctx)
    if restart:
        if task is not None or approve:
            raise BadInput("--restart is for all feeds of a seller", place="TASK")
        done = restarting.restart(context.store, seller_id, ACTOR)
        lines = [f"the next feed of {printable(seller_id)} may have any task id that was not used"]
        return Answer(data=done, lines=lines, notes=[f"{done.superseded} unfinished feeds were given up"])
    if task is None:
        if approve:
            raise BadInput("--approve needs the TASK", place="TASK")
        found = context.store.read(lambda tx: tasks.newest(tx, seller_id, limit))
        return Answer(data=found, table=[_feed_row(each) for each in found])
    if approve:
        context.store.transact(
            lambda tx: tasks.approve(tx, listings, seller_id, task, ACTOR), name="feed approve", once=True
        )
    report = context.store.read(lambda tx: reporting.report(tx, listings, seller_id, task, after, limit))
    plan = report.feed.plan
    lines = [f"problem at {printable(each.place)}: {printable(each.reason)}" for each in report.problems]
    if plan is not None:
        lines.insert(0, f"plan: create {plan.create}, update {plan.update}, remove {plan.delete} of {plan.live}")
    if report.next_after:
        lines.append(f"more: keyfold listings feed {seller_id} {task} --after '{report.next_after}'")
    return Answer(data=report, table=[_feed_row(report.feed)], lines=lines)


@app.command()
def drift(
    ctx: typer.Context,
    sellers: Annotated[list[str] | None, typer.Argument(metavar="[SELLER]...", help="all if left out")] = None,
) -> Answer:
    """Compare counts with rows; exit code 1 where they differ."""
    from keyfold.listings.service import repairing

    context, _ = _opened(ctx)
    looked, found = 0, []
    for seller_id in _sellers(context, sellers or ()):
        looked += 1
        found += context.store.read(lambda tx, seller_id=seller_id: repairing.drift(tx, seller_id))  # type: ignore[misc]
    notes = [] if found else [f"the counts of {looked} sellers are right"]
    return _drifted(found, notes, exit_code=1 if found else 0)


@app.command()
def repair(
    ctx: typer.Context,
    sellers: Annotated[list[str] | None, typer.Argument(metavar="[SELLER]...", help="whose counts")] = None,
    every: Annotated[bool, typer.Option("--all", help="Of all sellers.")] = False,
) -> Answer:
    """Repair counts that have drifted, exactly, while writes go on."""
    from keyfold.listings.service import repairing

    context, _ = _opened(ctx)
    if every == bool(sellers):
        raise BadInput("name sellers, or say --all", place="SELLER")
    found: list[Drift] = []
    looked = 0
    for seller_id in _sellers(context, sellers or ()):
        looked += 1
        if context.store.read(lambda tx, seller_id=seller_id: repairing.drift(tx, seller_id)):  # type: ignore[misc]
            found += context.store.transact(
                lambda tx, seller_id=seller_id: repairing.repair(tx, seller_id, ACTOR),  # type: ignore[misc]
                name="listings repair",
                once=True,
            )
    return _drifted(found, [f"{looked} sellers were looked at, {len(found)} counts repaired"])


@app.command("export-status")
def export_status(ctx: typer.Context) -> Answer:
    """Show what waits to be exported, by shard of the topic."""
    from keyfold.listings.service import exporting

    context, listings = _opened(ctx)
    topic = listings.settings.topic
    shards = context.store.read(lambda tx: exporting.status(tx, topic, context.topics.partitions(topic)))
    rows = [
        {
            "shard": each.shard,
            "pending": each.pending,
            "oldest": f"{each.oldest_seconds:.1f} s" if each.pending else "",
            "published": each.published,
        }
        for each in shards
    ]
    waiting = sum(each.pending for each in shards)
    return Answer(data=shards, table=rows, lines=[f"{waiting} changes wait to go to {topic}"])


def _feed_row(shown: "FeedShown") -> Row:
    return {
        "task": shown.task_id,
        "stage": shown.stage,
        "items": shown.position,
        "reason": printable(shown.reason),
        "moved": iso(shown.moved_at_us),
    }


def _drifted(found: "Sequence[Drift]", notes: Sequence[str], exit_code: int = 0) -> Answer:
    rows = [
        {"seller": printable(each.seller_id), "what": each.what, "name": each.name, "missing": f"{each.missing:+d}"}
        for each in found
    ]
    return Answer(data=list(found), table=rows, notes=notes, exit_code=exit_code)


def _sellers(context: Context, named: Sequence[str]) -> Any:
    """Those that were named, or all, some at a time."""
    from keyfold.listings.service import walking

    if named:
        for seller_id in named:
            if not context.store.read(lambda tx, seller_id=seller_id: walking.is_seller(tx, seller_id)):  # type: ignore[misc]
                raise NotFound(f"there is no seller {printable(seller_id)!r}")
            yield seller_id
        return
    after = ""
    while listed := context.store.read(lambda tx, after=after: walking.sellers_after(tx, after, SELLERS_MAX)):  # type: ignore[misc]
        yield from listed
        after = listed[-1]


def _opened(ctx: typer.Context) -> "tuple[Context, Listings]":
    from keyfold.listings.service.listings import Listings

    context: Context = ctx.obj.product(make=False)
    return context, Listings.of(context)
