"""The presets in force: they stand in the store, so that every writer goes by the same ones.

A process that is started with other settings puts them there (`adopt`). Whoever saves an offer reads them in the same
transaction. A preset that is new or changed is `building` until every offer was looked at (service/walking.py); that
walk begins only when no transaction can still run that has read the presets before.
"""

from collections.abc import Sequence
from functools import lru_cache

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from keyfold.core import audit
from keyfold.core.errors import LostRace
from keyfold.core.store import Transaction
from keyfold.core.store.shapes import delete, insert_new
from keyfold.listings.model import Offer, Preset, presets_of
from keyfold.listings.settings import ListingsSettings
from keyfold.listings.tables import LISTING_WALKS, OFFER_PRESETS

BUILDING, READY, DROPPING = "building", "ready", "dropping"


class PresetRow(Struct, frozen=True):
    """A preset as it stands in the store."""

    number: int
    name: str
    definition: str
    state: str
    since_us: int

    @property
    def walk(self) -> str:
        """A walk belongs to this definition: another one begins anew."""
        return f"preset {self.number} {self.since_us}"


class InForce(Struct, frozen=True):
    """What an offer is put into. Of presets that are not ready it is not known which rows are there."""

    rows: tuple[PresetRow, ...]
    presets: tuple[Preset, ...]
    unsure: frozenset[int]

    def of(self, offer: Offer | None) -> frozenset[int]:
        return frozenset() if offer is None else presets_of(offer, self.presets)


def stored(tx: Transaction) -> list[PresetRow]:
    rows = tx.rows("SELECT preset_id, name, definition, state, since_us FROM offer_presets ORDER BY preset_id")
    return [PresetRow(*row) for row in rows]


def in_force(tx: Transaction) -> InForce:
    return _in_force(tuple(stored(tx)))


@lru_cache(maxsize=8)
def _in_force(rows: tuple[PresetRow, ...]) -> InForce:
    kept = [row for row in rows if row.state != DROPPING]
    presets = tuple(msgspec.json.decode(row.definition, type=Preset) for row in kept)
    # What is dropped is taken out of the cabinet by every save as well: the walk then finds less to do.
    return InForce(rows, presets, frozenset(row.number for row in rows if row.state != READY))


def defined(preset: Preset) -> str:
    """A definition as it is compared: the order of its sets is not part of it."""
    return msgspec.json.encode(preset, order="sorted").decode()


def adopt(tx: Transaction, settings: ListingsSettings, actor: str = "settings") -> list[str]:
    """Put the presets of the settings in force; returns the names of those that changed."""
    known = {row.number: row for row in stored(tx)}
    wanted = {preset.number: (name, defined(preset)) for name, preset in settings.presets.items()}
    state = BUILDING if tx.rows("SELECT 1 FROM sellers LIMIT 1") else READY  # where there are no offers yet
    fresh = [
        PresetRow(number, name, definition, state, tx.now_us)
        for number, (name, definition) in wanted.items()
        if number not in known or known[number].state == DROPPING or known[number].definition != definition
    ]
    renamed = [
        msgspec.structs.replace(known[number], name=name)
        for number, (name, definition) in wanted.items()
        if number in known and known[number].name != name and number not in {each.number for each in fresh}
    ]
    dropped = [
        msgspec.structs.replace(row, state=DROPPING, since_us=tx.now_us)
        for number, row in known.items()
        if number not in wanted and row.state != DROPPING
    ]
    changed = [*fresh, *renamed, *dropped]
    if not changed:
        return []
    delete(tx, OFFER_PRESETS, {"preset_id": [row.number for row in changed if row.number in known]})
    stored_now = insert_new(
        tx,
        OFFER_PRESETS,
        {
            "preset_id": [row.number for row in changed],
            "name": [row.name for row in changed],
            "definition": [row.definition for row in changed],
            "state": [row.state for row in changed],
            "since_us": [row.since_us for row in changed],
        },
    )
    if len(stored_now) < len(changed):
        raise LostRace("another process has put presets in force meanwhile")
    for row in changed:
        audit.record(tx, actor, "preset changed", f"{row.number} {row.name}: {row.state}")
    return [row.name for row in changed]


def is_adopted(tx: Transaction, settings: ListingsSettings) -> bool:
    """Whether the presets of the settings are those in force."""
    there = {row.number: (row.name, row.definition) for row in stored(tx) if row.state != DROPPING}
    return there == {preset.number: (name, defined(preset)) for name, preset in settings.presets.items()}


def finish(tx: Transaction, row: PresetRow) -> None:
    """A walk has seen every offer: the preset is ready, or gone."""
    here = sa.and_(OFFER_PRESETS.c.preset_id == row.number, OFFER_PRESETS.c.since_us == row.since_us)
    if row.state == DROPPING:
        tx.execute(sa.delete(OFFER_PRESETS).where(here))
    else:
        tx.execute(sa.update(OFFER_PRESETS).where(here).values(state=READY))
    tx.execute(sa.delete(LISTING_WALKS).where(LISTING_WALKS.c.walk == row.walk))


def named(rows: Sequence[PresetRow], name: str) -> PresetRow | None:
    return next((row for row in rows if row.name == name and row.state != DROPPING), None)
