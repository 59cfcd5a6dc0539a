"""The opened part: settings, categories and topics, and what is made of them once."""

import secrets

from keyfold.core.clock import SECOND_US
from keyfold.core.context import Context
from keyfold.core.topics.registry import Topics
from keyfold.listings.categories import Categories
from keyfold.listings.model import ID_DIGITS, Ages, offer_id_of
from keyfold.listings.service import presets
from keyfold.listings.settings import ListingsSettings

DAY_US = 86_400 * SECOND_US


class Listings:
    """What every verb of the part gets."""

    def __init__(self, settings: ListingsSettings, topics: Topics) -> None:
        self.settings = settings
        self.topics = topics
        self.categories = Categories(settings.categories)
        self.ages = Ages(settings.expire_days * DAY_US, settings.archive_days * DAY_US)

    @classmethod
    def opened(cls, context: Context) -> "Listings":
        """For those who write: the presets of the settings are put in force."""
        listings = cls.of(context)
        if not context.store.read(lambda tx: presets.is_adopted(tx, listings.settings)):
            context.store.transact(lambda tx: presets.adopt(tx, listings.settings), name="listings presets")
        return listings

    @classmethod
    def of(cls, context: Context) -> "Listings":
        return cls(context.settings.section("listings", ListingsSettings), context.topics)

    def new_offer_id(self) -> str:
        """Nobody can guess it. Whether it is free is seen when it is stored."""
        return offer_id_of(secrets.randbelow(10**ID_DIGITS))
