"""The endpoints of listings."""

from keyfold.core.context import Context
from keyfold.core.route import Route
from keyfold.listings.routes.feeds import feed_routes
from keyfold.listings.service.listings import Listings


def routes(context: Context) -> list[Route]:
    listings = Listings.opened(context)
    return [*feed_routes(context, listings)]
