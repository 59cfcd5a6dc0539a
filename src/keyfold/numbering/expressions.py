"""One run as Ibis expressions: tables in, tables out, the same on every engine.

Engines differ in what they keep in memory and how they write; the rules are here, once.
"""

from typing import TYPE_CHECKING, Any

from keyfold.numbering.sharding import PARAMETERS, Scheme, shard_column

if TYPE_CHECKING:
    import ibis.expr.types as ir

KEY = ("business_id", "offer_id", "shop_id", "warehouse_id")
PLACE = ("shard_id", "doc_id")
PLACES = {
    "business_id": "int64",
    "offer_id": "string",
    "shop_id": "int64",
    "warehouse_id": "int64",
    "shard_id": "int32",
    "doc_id": "int32",
    "generation": "int32",
    "is_reused": "boolean",
    "seen_run": "int64",
}
FREE = {"shard_id": "int32", "doc_id": "int32"}
REMAP = {"old_shard_id": "int32", "old_doc_id": "int32", "shard_id": "int32", "doc_id": "int32"}
FIGURES = {
    "shard_id": "int32",
    "places": "int64",
    "top": "int64",
    "input": "int64",
}


def with_types(table: "ir.Table", types: dict[str, str]) -> "ir.Table":
    """Exactly these columns, of these types, in this order."""
    return table.select(**{name: table[name].cast(kind) for name, kind in types.items()})


def keyed(offers: "ir.Table") -> "ir.Table":
    """The keys of this generation's offers."""
    return offers.select(*KEY)


def unknown(offers: "ir.Table", places: "ir.Table") -> "ir.Table":
    """Offers that have no place yet."""
    return offers.anti_join(places.select(*KEY), KEY)


def sharded(offers: "ir.Table", scheme: Scheme) -> "ir.Table":
    """Keys with the shard that the scheme says."""
    return offers.select(*KEY, shard_id=shard_column(scheme, offers))


def with_parameters(offers: "ir.Table", shops: "ir.Table | None", scheme: Scheme) -> "ir.Table":
    """Offers with what the scheme must know of them: the offer's own parameter, or else the shop's.

    An empty one is not known: offers that are built from the topic have the column always.
    """
    import ibis

    wanted = PARAMETERS[scheme.by]
    if not wanted or shops is None:
        lacking = {name: ibis.literal("") for name in wanted if name not in offers.columns}
        return offers.mutate(**lacking) if lacking else offers
    theirs = shops.select(of_shop=shops.shop_id, **{f"shop_{name}": shops[name] for name in wanted})
    joined = offers.left_join(theirs, offers.shop_id == theirs.of_shop)

    def known(name: str) -> Any:
        of_shop = joined[f"shop_{name}"]
        return ibis.coalesce(joined[name].nullif(""), of_shop) if name in offers.columns else of_shop

    return joined.select(*KEY, **{name: known(name) for name in wanted})


def overdue(places: "ir.Table", offers: "ir.Table", run: int, ttl_runs: int) -> "ir.Table":
    """Places of keys that were absent for more than TTL runs. Few can be: all others are not even looked up."""
    return places.filter(places.seen_run < run - ttl_runs).anti_join(keyed(offers), KEY)


def kept(places: "ir.Table", offers: "ir.Table", run: int, ttl_runs: int, *, is_restart: bool) -> "ir.Table":
    """Places of keys that stay, and when each was last seen. A key twice in the input shows as two rows."""
    import ibis

    present = offers.select(*(offers[name].name(f"in_{name}") for name in KEY))
    joined = places.left_join(present, [places[name] == present[f"in_{name}"] for name in KEY])
    is_seen = joined.in_business_id.notnull()
    stays = joined.filter(is_seen | (joined.seen_run >= run - ttl_runs))
    seen_run = ibis.ifelse(stays.in_business_id.notnull(), run, stays.seen_run)
    changes: dict[str, Any] = {"seen_run": seen_run}
    if is_restart:
        changes |= {"generation": ibis.literal(0), "is_reused": ibis.literal(False)}
    return with_types(stays.mutate(**changes), PLACES)


def ranked(table: "ir.Table", order: tuple[str, ...]) -> "ir.Table":
    """Rows with their rank within the shard, from 0."""
    import ibis

    over = ibis.window(group_by=table.shard_id, order_by=[table[name] for name in order])
    return table.mutate(rank=ibis.row_number().over(over).cast("int64"))


def dealt(
    new: "ir.Table", free: "ir.Table", shards: "ir.Table", generation: int, run: int, *, is_restart: bool
) -> "ir.Table":
    """Places for new keys, in the order of their keys: freed ones first, then the next after the shard's maximum.

    `shards` says of every shard its `size`, the places ever given in it, and how many of them are `free`.
    """
    import ibis

    waiting = ranked(new, KEY)
    ready = ranked(free, ("doc_id",)).select(free_shard="shard_id", free_rank="rank", free_doc="doc_id")
    sizes = shards.select(size_shard="shard_id", size="size", free="free")
    joined = waiting.left_join(ready, [waiting.shard_id == ready.free_shard, waiting["rank"] == ready.free_rank])
    joined = joined.left_join(sizes, joined.shard_id == sizes.size_shard)
    is_reused = joined.free_doc.notnull()
    size, count = (ibis.coalesce(joined[name], 0) for name in ("size", "free"))
    return with_types(
        joined.mutate(
            doc_id=ibis.ifelse(is_reused, joined.free_doc, size + joined["rank"] - count),
            generation=ibis.literal(generation),
            is_reused=ibis.literal(False) if is_restart else is_reused,
            seen_run=ibis.literal(run),
            was_free=is_reused,
        ),
        {**PLACES, "was_free": "boolean"},
    )


def still_free(free: "ir.Table", counts: "ir.Table") -> "ir.Table":
    """Freed places that no new key has taken: those beyond the new keys of their shard."""
    import ibis

    ready = ranked(free, ("doc_id",))
    taken = counts.select(new_shard="shard_id", new="new")
    joined = ready.left_join(taken, ready.shard_id == taken.new_shard)
    return with_types(joined.filter(joined["rank"] >= ibis.coalesce(joined.new, 0)), FREE)


def rebuilt(offers: "ir.Table", scheme: Scheme, run: int) -> "ir.Table":
    """Places dealt anew, dense from 0, to the keys of the input."""
    import ibis

    dense = ranked(sharded(offers, scheme), KEY)
    return with_types(
        dense.mutate(
            doc_id=dense["rank"],
            generation=ibis.literal(0),
            is_reused=ibis.literal(False),
            seen_run=ibis.literal(run),
        ),
        PLACES,
    )


def moved(before: "ir.Table", after: "ir.Table") -> "ir.Table":
    """The old place and the new one of every key that both states hold."""
    old = before.select(*KEY, old_shard_id="shard_id", old_doc_id="doc_id")
    return with_types(old.inner_join(after.select(*KEY, *PLACE), KEY), REMAP)


def figures(places: "ir.Table", run: int) -> "ir.Table":
    """Of every shard: keys, maximum + 1, and keys of this run's input."""
    grouped = places.group_by("shard_id").aggregate(
        places=places.count(),
        top=places.doc_id.max().cast("int64") + 1,
        input=(places.seen_run == run).cast("int64").sum(),
    )
    return with_types(grouped, FIGURES)


def counts(table: "ir.Table", name: str) -> "ir.Table":
    """Rows by shard."""
    return with_types(
        table.group_by("shard_id").aggregate(**{name: table.count()}), {"shard_id": "int32", name: "int64"}
    )


def repeated(offers: "ir.Table", examples_max: int) -> "ir.Table":
    """Keys that the input has more than once."""
    grouped = offers.group_by(*KEY).aggregate(times=offers.count())
    return grouped.filter(grouped.times > 1).order_by(*KEY).limit(examples_max)


def reassigned(places: "ir.Table", generation: int) -> "ir.Table":
    """Places that were given to another key after a generation."""
    return places.filter(places.is_reused & (places.generation > generation)).select(*PLACE)
