"""Numbering as a part of the product. What stands on Ibis and Arrow is imported when it is first needed."""

import keyfold.numbering.tables  # noqa: F401  # the schema is known even where nothing of it is used
from keyfold.core.part import Part, later
from keyfold.core.settings import Settings
from keyfold.core.topics.topic import TopicSpec
from keyfold.numbering.settings import NumberingSettings


def topics(settings: Settings) -> list[TopicSpec]:
    topic = settings.section("numbering", NumberingSettings).offers_topic
    return (
        [TopicSpec(topic, "exported offers: {offer_id, business_id, shop_id, warehouse_id, status}")] if topic else []
    )


PART = Part(
    name="numbering",
    summary="a persistent place <shard_id, doc_id> for every offer: runs, masters, compatibility, look-ups",
    settings=NumberingSettings,
    topics=topics,
    routes=later("keyfold.numbering.routes:routes"),
    consumers=later("keyfold.numbering.worker:consumers"),
    loops=later("keyfold.numbering.worker:loops"),
    commands="keyfold.numbering.commands:app",
    command_name="number",
)
