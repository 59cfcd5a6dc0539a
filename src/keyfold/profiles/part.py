"""Profiles as a part of the product. What stands on NumPy and protobuf is imported when it is first needed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import keyfold.profiles.tables  # noqa: F401  # the schema is known even where nothing of it is used
from keyfold.core.part import Part
from keyfold.core.settings import Settings
from keyfold.core.topics.topic import TopicSpec
from keyfold.profiles.settings import ProfilesSettings

if TYPE_CHECKING:
    from keyfold.core.consumer import Consumer
    from keyfold.core.context import Context
    from keyfold.core.loops import Loop
    from keyfold.core.route import Route


def _topics(settings: Settings) -> Sequence[TopicSpec]:
    from keyfold.profiles.service.product import topics

    return topics(settings)


def _routes(context: "Context") -> "Sequence[Route]":
    from keyfold.profiles.routes import routes

    return routes(context)


def _consumers(context: "Context") -> "Sequence[Consumer]":
    from keyfold.profiles.worker import consumers

    return consumers(context)


def _loops(context: "Context") -> "Sequence[Loop]":
    from keyfold.profiles.worker import loops

    return loops(context)


PART = Part(
    name="profiles",
    summary="decaying counters about a person, owned data held back",
    settings=ProfilesSettings,
    topics=_topics,
    routes=_routes,
    consumers=_consumers,
    loops=_loops,
    commands="keyfold.profiles.commands:app",
)
