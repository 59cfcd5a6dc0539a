"""The settings of listings: topics, categories, presets of the cabinet, ages, feeds, bounds."""

from typing import Annotated

import msgspec
from msgspec import Meta

from keyfold.core.settings import Section
from keyfold.listings.model import Preset


def _presets() -> dict[str, Preset]:
    return {
        "all": Preset(number=1, statuses=frozenset({"active", "expired", "sold", "banned"})),
        "active": Preset(number=2, statuses=frozenset({"active"})),
        "expired": Preset(number=3, statuses=frozenset({"expired"})),
        "banned": Preset(number=4, statuses=frozenset({"banned"})),
        "sold": Preset(number=5, statuses=frozenset({"sold"})),
    }


class ListingsSettings(Section, frozen=True, kw_only=True):
    topic: Annotated[str, Meta(min_length=1, description="the topic that every change of an offer goes to")] = "offers"
    photo_requests_topic: Annotated[str, Meta(min_length=1, description="where photos are asked for")] = (
        "photo-requests"
    )
    photo_answers_topic: Annotated[str, Meta(min_length=1, description="where the photo service answers")] = (
        "photo-answers"
    )
    opinions_topic: Annotated[str, Meta(min_length=1, description="where opinions of moderation arrive")] = (
        "moderation-opinions"
    )
    categories: Annotated[
        str, Meta(description="a folder of CATEGORY/VERSION.json, JSON Schemas; empty: the examples cars and flats")
    ] = ""
    presets: Annotated[dict[str, Preset], Meta(description="the lists of a seller's cabinet by name")] = msgspec.field(
        default_factory=_presets
    )
    offer_bytes_max: Annotated[int, Meta(ge=1_000, le=700_000, description="largest offer, as JSON")] = 100 * 1024
    photos_max: Annotated[int, Meta(ge=0, le=1_000, description="most photos of an offer")] = 50
    stages_max: Annotated[int, Meta(ge=1, le=1_000, description="most stages that keep state with one offer")] = 20
    page_offers_max: Annotated[int, Meta(ge=1, le=1_000, description="most offers on a page of a cabinet")] = 100
    expire_days: Annotated[int, Meta(ge=1, le=3650, description="an active offer expires after this")] = 60
    archive_days: Annotated[
        int, Meta(ge=1, le=3650, description="an expired, sold or removed offer is archived after this")
    ] = 30
    draft_days: Annotated[int, Meta(ge=1, le=3650, description="a draft that nobody touches is forgotten after")] = 90
    return_days: Annotated[
        int, Meta(ge=0, le=3650, description="within this an offer that a feed removed gets its id back")
    ] = 30
    feed_delete_share_max: Annotated[
        float, Meta(ge=0, le=1, description="a feed that removes a larger share of its offers is held for approval")
    ] = 0.5
    feed_items_max: Annotated[int, Meta(ge=1, le=100_000_000, description="most items of one feed")] = 2_000_000
    feed_tasks_max: Annotated[int, Meta(ge=1, le=1_000, description="most feeds of a seller begun and not ended")] = 10
    feed_problems_max: Annotated[int, Meta(ge=1, le=1_000_000, description="most problems told of one feed")] = 10_000
    feed_days: Annotated[int, Meta(ge=1, le=365, description="how long the report of a feed is kept")] = 30
    scrub_seconds: Annotated[int, Meta(ge=1, le=30 * 86_400, description="how often all counts are compared")] = 86_400
    scrub_repairs: Annotated[bool, Meta(description="repair counts that have drifted as they are found")] = True

    def __post_init__(self) -> None:
        numbers = [preset.number for preset in self.presets.values()]
        if len(set(numbers)) != len(numbers):
            raise ValueError("presets: a number stands twice")
        if len({self.topic, self.photo_requests_topic, self.photo_answers_topic, self.opinions_topic}) < 4:
            raise ValueError("the four topics must have different names")
        if self.return_days > self.archive_days:
            raise ValueError("return_days must not exceed archive_days: what is archived does not return")
