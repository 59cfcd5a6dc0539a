"""The tally as a part of the product."""

from keyfold.core.context import Context
from keyfold.core.part import Part
from keyfold.core.route import Route
from keyfold.tally.service import CHANGES, EVENTS
from keyfold.tally.worker import consumers


def _routes(context: Context) -> list[Route]:
    from keyfold.tally.routes import routes

    return routes(context)


PART = Part(
    name="tally",
    summary="a number per key: the walking example",
    topics=(EVENTS, CHANGES),
    routes=_routes,
    consumers=consumers,
    commands="keyfold.tally.commands:app",
)
