"""The tally as a part of the product."""

from keyfold.core.part import Part
from keyfold.tally.routes import routes
from keyfold.tally.service import CHANGES, EVENTS
from keyfold.tally.worker import consumers

PART = Part(
    name="tally",
    summary="a number per key: the walking example",
    topics=(EVENTS, CHANGES),
    routes=routes,
    consumers=consumers,
    commands="keyfold.tally.commands:app",
)
