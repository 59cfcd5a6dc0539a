"""The tables of listings. Everything of a seller lies together; ids of offers have a directory of their own."""

import sqlalchemy as sa

from keyfold.core.store.schema import EVERYWHERE, BinaryText, Int32, Int64, Text, table

DRAFT = table(
    "draft",
    sa.Column("owner_id", BinaryText, primary_key=True),
    sa.Column("draft_id", Text, primary_key=True),
    sa.Column("version", Int64, nullable=False),
    sa.Column("body", Text, nullable=False),  # JSON: category, content, price, photos
    sa.Column("offer_id", Text, nullable=False),  # what it was published as; empty: not yet
    sa.Column("updated_at_us", Int64, nullable=False, index=True),
    distribute_by="owner_id",
)

CURRENT_DRAFT = table(
    "current_draft",
    sa.Column("owner_id", BinaryText, primary_key=True),
    sa.Column("version", Int64, nullable=False),  # raised by whoever looks, which locks the row
    sa.Column("draft_id", Text, nullable=False),
    distribute_by="owner_id",
)

# Who has an offer. Written in the transaction that makes the offer; rows never change.
OFFER_IDS = table(
    "offer_ids",
    sa.Column("offer_id", Text, primary_key=True),
    sa.Column("seller_id", BinaryText, nullable=False),
    distribute_by="offer_id",
    with_rowid=False,
)

# An offer by kind: rows under one key, so that those who write different kinds do not meet. What the scheduler and the
# repair look for are columns of the kind `offer` alone; all else is in the body.
OFFER = table(
    "offer",
    sa.Column("seller_id", BinaryText, primary_key=True),
    sa.Column("offer_id", Text, primary_key=True),
    sa.Column("kind", Text, primary_key=True),
    sa.Column("version", Int64, nullable=False),
    sa.Column("shown", Text),  # the status as it is shown, of the kind `offer`
    sa.Column("shard_id", Int32),  # of the seller, where something is due
    sa.Column("due_at_us", Int64),  # when it expires, or is archived
    sa.Column("body", Text, nullable=False),
    distribute_by="seller_id",
)
_IS_DUE = OFFER.c.due_at_us.is_not(None)
sa.Index("offer_due", OFFER.c.shard_id, OFFER.c.due_at_us, sqlite_where=_IS_DUE, postgresql_where=_IS_DUE)
_IS_OFFER = OFFER.c.shown.is_not(None)
sa.Index("offer_shown", OFFER.c.seller_id, OFFER.c.shown, sqlite_where=_IS_OFFER, postgresql_where=_IS_OFFER)

# A seller: the row that repairs and feeds queue at, and where the scrubber finds whom to look at.
SELLERS = table(
    "sellers",
    sa.Column("seller_id", BinaryText, primary_key=True),
    sa.Column("shard_id", Int32, nullable=False),
    sa.Column("repairs", Int64, nullable=False),
    sa.Column("ended_task_id", Int64),  # the newest feed whose end has come
    distribute_by="seller_id",
)
sa.Index("sellers_shard", SELLERS.c.shard_id, SELLERS.c.seller_id)

USER_OFFER_PRESETS = table(
    "user_offer_presets",
    sa.Column("seller_id", BinaryText, primary_key=True),
    sa.Column("preset_id", Int32, primary_key=True, autoincrement=False),
    sa.Column("create_time", Int64, primary_key=True, autoincrement=False),
    sa.Column("offer_id", Text, primary_key=True),
    distribute_by="seller_id",
    with_rowid=False,
)

USER_OFFER_PRESETS_COUNT = table(
    "user_offer_presets_count",
    sa.Column("seller_id", BinaryText, primary_key=True),
    sa.Column("preset_id", Int32, primary_key=True, autoincrement=False),
    sa.Column("seq_no", Int32, primary_key=True, autoincrement=False),  # one row would be where all writers meet
    sa.Column("offers", Int64, nullable=False),
    distribute_by="seller_id",
    with_rowid=False,
)

USER_TOTAL_COUNTERS = table(
    "user_total_counters",
    sa.Column("seller_id", BinaryText, primary_key=True),
    sa.Column("counter_id", Text, primary_key=True),
    sa.Column("seq_no", Int32, primary_key=True, autoincrement=False),
    sa.Column("counter_value", Int64, nullable=False),
    distribute_by="seller_id",
    with_rowid=False,
)

# The permanent mark of an offer's first sale, with what it brought.
SOLD_OFFERS = table(
    "sold_offers",
    sa.Column("seller_id", BinaryText, primary_key=True),
    sa.Column("offer_id", Text, primary_key=True),
    sa.Column("currency", Text, nullable=False),  # empty: no price was told
    sa.Column("amount", Int64, nullable=False),
    sa.Column("sold_at_us", Int64, nullable=False),
    distribute_by="seller_id",
)

# The presets as they are in force for every writer, whatever the settings of its process say.
OFFER_PRESETS = table(
    "offer_presets",
    sa.Column("preset_id", Int32, primary_key=True, autoincrement=False),
    sa.Column("name", Text, nullable=False),
    sa.Column("definition", Text, nullable=False),
    sa.Column("state", Text, nullable=False),  # building, ready, dropping
    sa.Column("since_us", Int64, nullable=False),
    distribute_by=EVERYWHERE,
)

# How far a walk over the offers of a shard has come: the scrubber, and the building of a preset.
LISTING_WALKS = table(
    "listing_walks",
    sa.Column("walk", Text, primary_key=True),
    sa.Column("shard_id", Int32, primary_key=True, autoincrement=False),
    sa.Column("upto_seller", BinaryText, nullable=False),
    sa.Column("upto_offer", Text, nullable=False),
    sa.Column("is_done", Int32, nullable=False),
    sa.Column("moved_at_us", Int64, nullable=False),
    distribute_by="walk",
)

# What the feeds of a seller know of an external id: its offer, and the last task that had it.
FEED = table(
    "feed",
    sa.Column("seller_id", BinaryText, primary_key=True),
    sa.Column("external_id", BinaryText, primary_key=True),
    sa.Column("offer_id", Text, nullable=False),
    sa.Column("task_id", Int64, nullable=False),
    sa.Column("removed_at_us", Int64),  # when a feed removed it; within a window it may return
    distribute_by="seller_id",
)
_IS_LIVE = FEED.c.removed_at_us.is_(None)
sa.Index("feed_task", FEED.c.seller_id, FEED.c.task_id, sqlite_where=_IS_LIVE, postgresql_where=_IS_LIVE)
_IS_REMOVED = FEED.c.removed_at_us.is_not(None)
sa.Index("feed_removed", FEED.c.removed_at_us, sqlite_where=_IS_REMOVED, postgresql_where=_IS_REMOVED)

FEED_TASKS = table(
    "feed_tasks",
    sa.Column("seller_id", BinaryText, primary_key=True),
    sa.Column("task_id", Int64, primary_key=True, autoincrement=False),
    sa.Column("version", Int64, nullable=False),
    sa.Column("shard_id", Int32, nullable=False),
    sa.Column("stage", Text, nullable=False),
    sa.Column("is_staged", Int32, nullable=False),  # whether there may be rows of FEED_ITEMS
    sa.Column("position", Int64, nullable=False),  # items taken in
    sa.Column("counts", Text, nullable=False),  # JSON: the plan, and what was done
    sa.Column("upto", BinaryText, nullable=False),  # the last external id that was applied
    sa.Column("reason", Text, nullable=False),
    sa.Column("begun_at_us", Int64, nullable=False),
    sa.Column("moved_at_us", Int64, nullable=False),
    distribute_by="seller_id",
)
sa.Index("feed_tasks_stage", FEED_TASKS.c.shard_id, FEED_TASKS.c.stage, FEED_TASKS.c.moved_at_us)
_IS_STAGED = FEED_TASKS.c.is_staged == sa.literal_column("1")
sa.Index("feed_tasks_staged", FEED_TASKS.c.stage, sqlite_where=_IS_STAGED, postgresql_where=_IS_STAGED)

# The items of a task until it is done; of one external id the last.
FEED_ITEMS = table(
    "feed_items",
    sa.Column("seller_id", BinaryText, primary_key=True),
    sa.Column("task_id", Int64, primary_key=True, autoincrement=False),
    sa.Column("external_id", BinaryText, primary_key=True),
    sa.Column("number", Int64, nullable=False),
    sa.Column("body", Text, nullable=False),  # empty: invalid, but its external id could be read
    distribute_by="seller_id",
)

# What a seller is told of a feed: items that could not be taken, repeats, photos that failed. `place` is the item's
# position or the photo, written so that the places are in order.
FEED_PROBLEMS = table(
    "feed_problems",
    sa.Column("seller_id", BinaryText, primary_key=True),
    sa.Column("task_id", Int64, primary_key=True, autoincrement=False),
    sa.Column("place", BinaryText, primary_key=True),
    sa.Column("external_id", Text, nullable=False),
    sa.Column("reason", Text, nullable=False),
    distribute_by="seller_id",
)
