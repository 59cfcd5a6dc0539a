"""Segments as a part of the product. What stands on NumPy and Arrow is imported when it is first needed."""

import keyfold.segments.tables  # noqa: F401  # the schema is known even where nothing of it is used
from keyfold.core.part import Part, later
from keyfold.core.settings import Settings
from keyfold.core.topics.topic import TopicSpec
from keyfold.segments.settings import SegmentsSettings


def topics(settings: Settings) -> list[TopicSpec]:
    topic = settings.section("segments", SegmentsSettings).topic
    return [
        TopicSpec(topic, "the whole set of a user after every change: {segments: [{segment_id, evaluation_version}]}")
    ]


PART = Part(
    name="segments",
    summary="which users are in which segments: differences of snapshots as versioned sets",
    settings=SegmentsSettings,
    topics=topics,
    routes=later("keyfold.segments.routes:routes"),
    loops=later("keyfold.segments.worker:loops"),
    commands="keyfold.segments.commands:app",
)
