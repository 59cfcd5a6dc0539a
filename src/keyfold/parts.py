"""The parts of the product, in the order of its documentation. A new part is one line here."""

from keyfold.core.part import Part
from keyfold.counters.part import PART as COUNTERS
from keyfold.listings.part import PART as LISTINGS
from keyfold.numbering.part import PART as NUMBERING
from keyfold.orders.part import PART as ORDERS
from keyfold.profiles.part import PART as PROFILES
from keyfold.segments.part import PART as SEGMENTS
from keyfold.tally.part import PART as TALLY

PARTS: tuple[Part, ...] = (COUNTERS, PROFILES, ORDERS, SEGMENTS, NUMBERING, LISTINGS, TALLY)


def settings_of_parts() -> dict[str, type]:
    return {part.name: part.settings for part in PARTS if part.settings is not None}
