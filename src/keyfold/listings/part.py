"""Listings as a part of the product. What stands on JSON Schema is imported when it is first needed."""

import keyfold.listings.tables  # noqa: F401  # the schema is known even where nothing of it is used
from keyfold.core.part import Part, later
from keyfold.core.settings import Settings
from keyfold.core.topics.topic import TopicSpec
from keyfold.listings.settings import ListingsSettings


def topics(settings: Settings) -> list[TopicSpec]:
    section = settings.section("listings", ListingsSettings)
    return [
        TopicSpec(section.topic, "every change of an offer, by kind: the offer itself, photos, moderation, stages"),
        TopicSpec(section.photo_requests_topic, "photos to fetch: {offer_id, urls}"),
        TopicSpec(section.photo_answers_topic, "what became of a photo: {offer_id, url, image | error}"),
        TopicSpec(section.opinions_topic, "opinions of moderation: {offer_id, version, is_banned, reason, details}"),
    ]


PART = Part(
    name="listings",
    summary="classified offers: drafts, cabinets with counts, feeds, moderation, photos, ordered export",
    settings=ListingsSettings,
    topics=topics,
    routes=later("keyfold.listings.routes:routes"),
    consumers=later("keyfold.listings.worker:consumers"),
    loops=later("keyfold.listings.worker:loops"),
    commands="keyfold.listings.commands:app",
)
