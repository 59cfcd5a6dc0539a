"""The parts of the product, in the order of its documentation. A new part is one line here."""

from keyfold.core.part import Part
from keyfold.tally.part import PART as TALLY

PARTS: tuple[Part, ...] = (TALLY,)


def settings_of_parts() -> dict[str, type]:
    return {part.name: part.settings for part in PARTS if part.settings is not None}
