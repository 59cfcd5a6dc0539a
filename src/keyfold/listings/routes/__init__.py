"""The endpoints of listings: for sellers, for the site, for feeds, stages and moderation."""

from keyfold.core.context import Context
from keyfold.core.route import Route
from keyfold.listings.routes.cabinet import cabinet_routes
from keyfold.listings.routes.drafts import draft_routes
from keyfold.listings.routes.feeds import feed_routes
from keyfold.listings.routes.offers import offer_routes
from keyfold.listings.service.listings import Listings


def routes(context: Context) -> list[Route]:
    listings = Listings.opened(context)
    return [
        *draft_routes(context, listings),
        *offer_routes(context, listings),
        *cabinet_routes(context, listings),
        *feed_routes(context, listings),
    ]
