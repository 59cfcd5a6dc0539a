"""Order statistics as a part of the product."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from keyfold.core.part import Part
from keyfold.core.settings import Settings
from keyfold.core.topics.topic import TopicSpec
from keyfold.orders.settings import OrdersSettings

if TYPE_CHECKING:
    import sqlalchemy as sa

    from keyfold.core.consumer import Consumer
    from keyfold.core.context import Context
    from keyfold.core.loops import Loop
    from keyfold.core.route import Route


def _topics(settings: Settings) -> Sequence[TopicSpec]:
    from keyfold.orders.service.unit import topics

    return topics(settings)


def _tables(settings: Settings) -> "Sequence[sa.Table]":
    from keyfold.orders.service.unit import tables

    return tables(settings)


def _routes(context: "Context") -> "Sequence[Route]":
    from keyfold.orders.routes import routes

    return routes(context)


def _consumers(context: "Context") -> "Sequence[Consumer]":
    from keyfold.orders.worker import consumers

    return consumers(context)


def _loops(context: "Context") -> "Sequence[Loop]":
    from keyfold.orders.worker import loops

    return loops(context)


PART = Part(
    name="orders",
    summary="exact counts of orders per identity and dimensions, each order once",
    settings=OrdersSettings,
    topics=_topics,
    tables=_tables,
    routes=_routes,
    consumers=_consumers,
    loops=_loops,
    commands="keyfold.orders.commands:app",
)
