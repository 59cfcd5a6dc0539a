"""Planted bugs of listings, each with the harness that must catch it; planted as those in plants.py are."""

import time
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from msgspec import structs

from keyfold.core import outbox
from keyfold.core.store import Transaction
from keyfold.core.store.batch import Columns
from keyfold.core.store.shapes import insert_new
from keyfold.listings import worker
from keyfold.listings.model import Offer
from keyfold.listings.service import drafting, keeping, offers, presets, repairing, saving, walking
from keyfold.listings.service.drafting import DraftShown, Filled
from keyfold.listings.service.feeds import applying
from keyfold.listings.service.keeping import Opinion
from keyfold.listings.service.listings import Listings
from keyfold.listings.service.offers import Edit
from keyfold.listings.service.repairing import Drift
from keyfold.listings.tables import USER_OFFER_PRESETS_COUNT
from tests.faults.plants import Plot, commit_after, plant
from tests.listings import CAR

SIMULATOR, KILLS, WRITERS = "listing simulator", "listing kill sweep", "listing writers"
ALL_AT_ONCE = "all at one seller"

# Rows, counts and messages -------------------------------------------------------------------------------------------


@plant("the rows of presets change, and their counts do not", SIMULATOR, "listings")
def _(plot: Plot) -> None:
    increment = saving.increment

    def increment_others(tx: Transaction, table: sa.Table, columns: Columns) -> None:
        if table is not USER_OFFER_PRESETS_COUNT:
            increment(tx, table, columns)

    plot.name(saving, "increment", increment_others)


@plant("counts of presets are committed before the counters", KILLS, "listings")
def _(plot: Plot) -> None:
    commit_after(plot, saving, "_store_presets")


@plant("a change is told in another transaction", KILLS, "listings")
def _(plot: Plot) -> None:
    commit_after(plot, saving, "_store_counters")


@plant("a sale counts whenever it is sold, and not the first time only", SIMULATOR, "listings")
def _(plot: Plot) -> None:
    """Sold, banned, lifted: each is a change of an offer that is sold."""
    changes = saving.counter_changes

    def count_again(before: Offer | None, after: Offer) -> dict[str, int]:
        added = changes(before, after)
        if after.status == "sold" and before is not None and before.was_sold:
            added["Sold"] = 1
        return added

    plot.name(saving, "counter_changes", count_again)
    plot.name(saving, "insert", lambda *_: None)


@plant("an offer that is banned is counted by the status beneath", SIMULATOR, "listings")
def _(plot: Plot) -> None:
    changes = saving.counter_changes
    plot.name(
        saving,
        "counter_changes",
        lambda before, after: changes(
            structs.replace(before, is_banned=False) if before else None, structs.replace(after, is_banned=False)
        ),
    )


@plant("a row of an offer is saved without comparing its version", WRITERS, "listings")
def _(plot: Plot) -> None:
    """The message alone then says that two have written one version, or that one is missing."""

    def overwrite(tx: Transaction, table: sa.Table, columns: Columns) -> None:
        names = list(columns)
        for values in zip(*columns.values(), strict=True):
            row = dict(zip(names, values, strict=True))
            here = sa.and_(*(table.c[name] == row[name] for name in ("seller_id", "offer_id", "kind")))
            row["version"] += 1
            if not tx.execute(sa.update(table).where(here).values(**row)).rowcount:
                insert_new(tx, table, {name: [value] for name, value in row.items()})

    plot.name(saving, "compare_and_set", overwrite)
    plot.name(keeping, "compare_and_set", overwrite)
    plot.name(outbox, "insert", insert_new)


@plant("an edit of a version that is not the last is taken", SIMULATOR, "listings")
def _(plot: Plot) -> None:
    edit = offers.edit

    def edit_anyway(tx: Transaction, listings: Listings, edits: Sequence[Edit]) -> Any:
        found = saving.load_by_id(tx, [each.offer_id for each in edits])
        return edit(tx, listings, [structs.replace(each, version=found[each.offer_id].version) for each in edits])

    plot.name(offers, "edit", edit_anyway)


# Drafts --------------------------------------------------------------------------------------------------------------


@plant("a draft that was published is published again", SIMULATOR, "listings")
def _(plot: Plot) -> None:
    load = drafting._load

    def load_as_new(tx: Transaction, keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], DraftShown]:
        found = load(tx, keys)
        filled = Filled(category="cars", content=dict(CAR))
        return {
            key: structs.replace(draft, offer_id="", filled=filled) if draft.offer_id else draft
            for key, draft in found.items()
        }

    plot.name(drafting, "_load", load_as_new)
    plot.name(drafting, "_must_be_at", lambda *_: None)


@plant("the current draft stays when it is published", SIMULATOR, "listings")
def _(plot: Plot) -> None:
    plot.name(drafting, "_delete_current", lambda *_: None)


# Moderation ----------------------------------------------------------------------------------------------------------


@plant("an opinion is applied when it comes, whatever its version", SIMULATOR, "listings")
def _(plot: Plot) -> None:
    judge = keeping.judge

    def judge_by_arrival(
        tx: Transaction, listings: Listings, opinions: Sequence[Opinion], *given: Any, **how: Any
    ) -> Any:
        for offer_id in {each.offer_id for each in opinions}:
            tx.driver(
                "UPDATE offer SET body = json_set(body, '$.version', 0) WHERE kind = 'moderation' AND offer_id = ?",
                (offer_id,),
            )
        return judge(tx, listings, opinions, *given, **how)

    plot.name(keeping, "judge", judge_by_arrival)


# The scheduler -------------------------------------------------------------------------------------------------------


@plant("the scheduler does not look at its ticket", SIMULATOR, "listings")
def _(plot: Plot) -> None:
    plot.name(worker, "_must_hold", lambda *_: None)


@plant("a preset is built of offers that may change meanwhile", ALL_AT_ONCE, "listings")
def _(plot: Plot) -> None:
    plot.name(walking, "hold", lambda *_: time.sleep(0.01))


@plant("a preset is ready when the first shard has come to its end", SIMULATOR, "listings")
def _(plot: Plot) -> None:
    build = walking._build

    def build_and_finish(tx: Transaction, row: Any, shard_id: int, guard: Any) -> bool:
        more = build(tx, row, shard_id, guard)
        if not more and row in presets.stored(tx):
            presets.finish(tx, row)
        return more

    plot.name(walking, "_build", build_and_finish)


@plant("a save leaves a preset alone that is being built", SIMULATOR, "listings")
def _(plot: Plot) -> None:
    force = presets._in_force.__wrapped__

    def only_ready(tx: Transaction) -> Any:
        rows = tuple(row for row in presets.stored(tx) if row.state == presets.READY)
        return force(rows)

    plot.name(saving.presets, "in_force", only_ready)


# Repair --------------------------------------------------------------------------------------------------------------


@plant("a repair adds what an earlier look has found", SIMULATOR, "listings")
def _(plot: Plot) -> None:
    """Between the look and the repair another has repaired it, or the rows have changed."""
    looked: dict[str, list[Drift]] = {}
    drift = repairing.drift

    def look(tx: Transaction, seller_id: str) -> list[Drift]:
        found = drift(tx, seller_id)
        looked.setdefault(seller_id, found or [])
        return found

    def repair(tx: Transaction, seller_id: str, actor: str) -> list[Drift]:
        found = looked.pop(seller_id, [])
        names = {row.name: row.number for row in presets.stored(tx)}
        for each in found:
            is_preset = each.what == repairing.PRESETS
            table, name, value = (
                ("user_offer_presets_count", "preset_id", "offers")
                if is_preset
                else ("user_total_counters", "counter_id", "counter_value")
            )
            which = names.get(each.name, each.name) if is_preset else each.name
            tx.driver(
                f"INSERT INTO {table} (seller_id, {name}, seq_no, {value}) VALUES (?, ?, 0, ?)"
                f" ON CONFLICT (seller_id, {name}, seq_no) DO UPDATE SET {value} = {value} + excluded.{value}",
                (seller_id, which, each.missing),
            )
        return found

    plot.name(repairing, "drift", look)
    plot.name(repairing, "repair", repair)


@plant("a repair sets the counts", ALL_AT_ONCE, "listings")
def _(plot: Plot) -> None:
    """To what the rows said when it looked, and not by as much as they differed."""

    def repair(tx: Transaction, seller_id: str, actor: str) -> list[Drift]:
        rows = tx.rows(
            "SELECT preset_id, count(*) FROM user_offer_presets WHERE seller_id = %s GROUP BY 1", (seller_id,)
        )
        time.sleep(0.01)
        tx.driver("UPDATE user_offer_presets_count SET offers = 0 WHERE seller_id = %s", (seller_id,))
        for number, count in rows:
            tx.driver(
                "INSERT INTO user_offer_presets_count (seller_id, preset_id, seq_no, offers) VALUES (%s, %s, 0, %s)"
                " ON CONFLICT (seller_id, preset_id, seq_no) DO UPDATE SET offers = excluded.offers",
                (seller_id, number, count),
            )
        return []

    plot.name(repairing, "repair", repair)


# Feeds ---------------------------------------------------------------------------------------------------------------


@plant("the offers that a feed lacks are left alone", SIMULATOR, "listings")
def _(plot: Plot) -> None:
    plot.name(applying, "removed_by_feed", lambda offer: offer)
