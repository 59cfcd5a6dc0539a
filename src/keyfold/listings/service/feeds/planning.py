"""What a task would do, counted in the store before anything is done."""

import sqlalchemy as sa

from keyfold.core.store import Transaction
from keyfold.listings.model import FeedPlan
from keyfold.listings.service.feeds.tasks import Task

LARGE = 10_000  # items

# An item meets the offer that the row of its external id names; what it does depends on that offer alone.
_ITEMS = sa.text("""
SELECT count(CASE WHEN NOT is_invalid AND NOT is_there AND NOT is_over THEN 1 END) AS created,
       count(CASE WHEN NOT is_invalid AND is_there THEN 1 END)                    AS updated,
       count(CASE WHEN is_invalid AND is_there THEN 1 END)                        AS kept,
       count(CASE WHEN is_invalid THEN 1 END)                                     AS invalid,
       count(CASE WHEN NOT is_invalid AND is_over THEN 1 END)                     AS sold
FROM (
    SELECT feed_items.body = ''                                                           AS is_invalid,
           coalesce(offer.shown, '') IN ('active', 'expired', 'sold', 'banned')           AS is_there,
           coalesce(offer.shown, '') = 'archived' AND sold_offers.offer_id IS NOT NULL    AS is_over
    FROM feed_items
    LEFT JOIN feed        ON feed.seller_id = feed_items.seller_id AND feed.external_id = feed_items.external_id
    LEFT JOIN offer       ON offer.seller_id = feed.seller_id AND offer.offer_id = feed.offer_id
                         AND offer.kind = 'offer'
    LEFT JOIN sold_offers ON sold_offers.seller_id = feed.seller_id AND sold_offers.offer_id = feed.offer_id
    WHERE feed_items.seller_id = :seller_id AND feed_items.task_id = :task_id
) AS items
""")

# What the end would remove: offers that a row of a smaller task has, and no item of this one. An item that is not
# valid keeps its offer too. What was sold stays, also where a ban stands over it.
_LIVE = sa.text("""
SELECT count(*)                                                                              AS live,
       count(CASE WHEN feed_items.external_id IS NULL AND feed.task_id < :task_id THEN 1 END) AS deleted
FROM feed
JOIN offer           ON offer.seller_id = feed.seller_id AND offer.offer_id = feed.offer_id AND offer.kind = 'offer'
LEFT JOIN feed_items ON feed_items.seller_id = feed.seller_id AND feed_items.task_id = :task_id
                    AND feed_items.external_id = feed.external_id
LEFT JOIN sold_offers ON sold_offers.seller_id = feed.seller_id AND sold_offers.offer_id = feed.offer_id
WHERE feed.seller_id = :seller_id AND feed.removed_at_us IS NULL AND offer.shown IN ('active', 'expired', 'banned')
      AND sold_offers.offer_id IS NULL
""")


def plan_of(tx: Transaction, task: Task) -> FeedPlan:
    """The plan as of now; the items of a task without its end may still become more."""
    given = {"seller_id": task.seller_id, "task_id": task.task_id}
    if task.position > LARGE and not tx.is_sqlite:
        # Of items that just came PostgreSQL has no statistics, and would look them up one by one.
        tx.driver("SET LOCAL enable_nestloop = off")
    items = tx.execute(_ITEMS, given).one()
    feed = tx.execute(_LIVE, given).one()
    return FeedPlan(
        create=items.created,
        update=items.updated,
        delete=feed.deleted,
        keep=items.kept,
        invalid=items.invalid + task.counts.taken.unreadable,
        live=feed.live,
        has_ended=task.counts.has_ended,
        sold=items.sold,
    )
