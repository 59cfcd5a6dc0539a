"""What can be wrong with a catalog, a pack or an update: each invariant has its own name."""

from collections.abc import Sequence

from keyfold.core.errors import BadInput


class CatalogWrong(BadInput):
    """The catalog of counters has mistakes"""

    slug = "catalog-wrong"

    def __init__(self, mistakes: Sequence[str], *, place: str | None = None, hint: str | None = None) -> None:
        self.mistakes = list(mistakes)
        count = f"{len(self.mistakes)} mistakes" if len(self.mistakes) > 1 else "a mistake"
        super().__init__(f"the catalog has {count}: " + "; ".join(self.mistakes), place=place, hint=hint)


class PackWrong(BadInput):
    """The packs of a profile break an invariant"""

    slug = "pack-wrong"


class BodyUnreadable(PackWrong):
    """The body of a profile is not the protobuf message it should be"""

    slug = "body-unreadable"


class PackEmpty(PackWrong):
    """A pack has no counters or no keys"""

    slug = "pack-empty"


class RowsMissing(PackWrong):
    """A pack has another number of value rows than of counter ids"""

    slug = "rows-missing"


class RowLengthWrong(PackWrong):
    """A row of values is not as long as the keys"""

    slug = "row-length-wrong"


class KindMissing(PackWrong):
    """A row of values has no kind"""

    slug = "kind-missing"


class KindWrong(PackWrong):
    """The kind of a row is not the kind of its counter"""

    slug = "kind-wrong"


class CounterTwice(PackWrong):
    """A counter stands in two rows of a profile"""

    slug = "counter-twice"


class KeyTwice(PackWrong):
    """A key stands twice in a pack"""

    slug = "key-twice"


class ValueNotFinite(PackWrong):
    """A stored value is not a finite number"""

    slug = "value-not-finite"


class UpdateRefused(BadInput):
    """The update of a counter was refused"""

    slug = "update-refused"


class CounterUnknown(UpdateRefused):
    """There is no such counter in the catalog"""

    slug = "counter-unknown"


class CounterReadOnly(UpdateRefused):
    """The counter is marked NoOperation: handlers may not write it"""

    slug = "counter-read-only"


class ValueWrong(UpdateRefused):
    """The value does not fit the counter"""

    slug = "value-wrong"


class TimeWrong(UpdateRefused):
    """The time of an update is not one that can be kept"""

    slug = "time-wrong"


class KindUnknown(UpdateRefused):
    """The counter is stored in a kind that this version does not know"""

    slug = "kind-unknown"


class CounterOverflow(UpdateRefused):
    """The sum would leave 64 bits"""

    slug = "counter-overflow"
