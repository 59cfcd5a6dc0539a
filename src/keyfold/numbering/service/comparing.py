"""Whether data fit a state, and which of several states data fit."""

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from keyfold.bulk import engines
from keyfold.core.errors import NotFound
from keyfold.numbering import expressions, model
from keyfold.numbering.model import Fit, Place, Published, Record, Version
from keyfold.numbering.service import states
from keyfold.numbering.service.states import Stored


class Compatibility(Struct, frozen=True):
    """The answer. `places` were given to another offer since the data were made; of them at most some are listed."""

    answer: Fit
    state: str
    data: str
    explanation: str
    reassigned: int = 0
    places: Sequence[Place] = ()


def compatible(
    state: Stored, data: Version, *, places_max: int, megabytes_max: int, scratch: Path | None
) -> Compatibility:
    """Yes, no, or yes except the places that were reassigned since the data's generation."""
    version = state.version
    is_fit, why = model.fits(version, data)
    if not is_fit:
        return Compatibility("no", str(version), str(data), why)
    if version.generation == data.generation:
        return Compatibility("yes", str(version), str(data), "the data are of the state's own generation")
    with (
        states.at_hand(state, ("places",), scratch) as files,
        engines.opened("duckdb", job="compatible", megabytes_max=megabytes_max, scratch=scratch) as engine,
    ):
        changed = engine.keep(expressions.reassigned(states.table(engine, files, "places"), data.generation))
        count = int(engine.rows(changed.aggregate(rows=changed.count()))[0]["rows"])
        if not count:
            return Compatibility("yes", str(version), str(data), f"no place was reassigned since {data}")
        listed = engine.rows(changed.order_by(*expressions.PLACE).limit(places_max))
    return Compatibility(
        "yes except",
        str(version),
        str(data),
        f"{count} places were given to other offers since {data}",
        count,
        [Place(row["shard_id"], row["doc_id"]) for row in listed],
    )


def chosen(record: Record, data: Version | None) -> Published:
    """The last state, or the newest that data of a version fit."""
    valid = [each for each in record.states if not each.invalid and not each.is_deleted]
    if not valid:
        raise NotFound("no state was published yet", hint="keyfold number run-master")
    if data is None:
        return valid[-1]
    found = model.choose(valid, lambda each: Version.parse(each.version), data)
    if found is None:
        raise NotFound(
            f"none of the states that are kept fits data of {data}",
            hint=f"There are {', '.join(each.version for each in valid)}",
        )
    # Of equal versions the newest run.
    return [each for each in valid if each.version == found.version][-1]
