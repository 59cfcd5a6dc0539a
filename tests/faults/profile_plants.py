"""Planted bugs of profiles, each with the harness that must catch it; planted as those in plants.py are."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from keyfold.core.store import Transaction
from keyfold.core.store.shapes import load
from keyfold.profiles.model import Held, settled
from keyfold.profiles.service import counting, folding, holding, reading, storing, sweeping
from tests.faults.plants import Plot, commit, commit_after, look_then_insert, not_there, plant

SIMULATOR, KILLS, WRITERS = "profile simulator", "profile kill sweep", "profile writers"


# Marks ---------------------------------------------------------------------------------------------------------------


@plant("dedupe by mark dropped", SIMULATOR, "profiles")
def _(plot: Plot) -> None:
    plot.name(counting, "_unmarked", lambda tx, log_events, arrived, verdicts: (arrived, []))


@plant("marks are kept in memory and inserted with the next batch", SIMULATOR, "profiles")
def _(plot: Plot) -> None:
    insert_new, kept = counting.insert_new, list[tuple[Any, Any]]()

    def mark_later(tx: Transaction, table: Any, columns: Any) -> set[Any]:
        for earlier in kept:
            insert_new(tx, *earlier)
        kept[:] = [(table, columns)]
        return not_there(tx, table, columns)

    plot.name(counting, "insert_new", mark_later)


@plant("the fingerprint of an event is not looked at", SIMULATOR, "profiles")
def _(plot: Plot) -> None:
    plot.name(counting, "fingerprint", lambda fields: 0)


@plant("a refused event leaves its mark", SIMULATOR, "profiles")
def _(plot: Plot) -> None:
    plot.name(counting, "delete", lambda *_: 0)


@plant("the watermark is not looked at", SIMULATOR, "profiles")
def _(plot: Plot) -> None:
    plot.name(counting, "_must_be_in_time", lambda *_, **__: None)


@plant("marks are purged ahead of the watermark", SIMULATOR, "profiles")
def _(plot: Plot) -> None:
    def purge(tx: Transaction, *_: object) -> None:
        tx.driver("DELETE FROM event_marks")

    plot.name(sweeping, "purge_marks", purge)


@plant("marks are committed before what they vouch for", KILLS, "profiles")
def _(plot: Plot) -> None:
    commit_after(plot, counting, "insert_new")


@plant("marks are looked for, and then inserted", WRITERS, "profiles")
def _(plot: Plot) -> None:
    plot.name(counting, "insert_new", look_then_insert(counting.insert_new))


# What is held back ---------------------------------------------------------------------------------------------------


@plant("what was released goes on waiting", SIMULATOR, "profiles")
def _(plot: Plot) -> None:
    plot.name(holding, "delete", lambda *_: 0)


@plant("updates of one owner release each other", SIMULATOR, "profiles")
def _(plot: Plot) -> None:
    settled = holding.settled

    def settle(held: Sequence[Held], public_time: int | None, steps: Sequence[Any], **options: Any) -> Any:
        """Every update is taken for one of an owner of its own."""
        known: dict[int, Held] = {}  # by the owner that it is given

        def disguised(one: Any) -> Any:
            if isinstance(one, int):
                return one
            copy = msgspec.structs.replace(one, owner=len(known) + 1)
            known[copy.owner] = one
            return copy

        found = settled([*map(disguised, held)], public_time, [*map(disguised, steps)], **options)
        lists = {name: [known[each.owner] for each in getattr(found, name)] for name in found.__struct_fields__}
        return type(found)(**lists)

    plot.name(holding, "settled", settle)


@plant("sources exactly a period apart release each other", SIMULATOR, "profiles")
def _(plot: Plot) -> None:
    settled = holding.settled

    def settle(*given: Any, merge_seconds: int, **options: Any) -> Any:
        return settled(*given, merge_seconds=merge_seconds + 1, **options)

    plot.name(holding, "settled", settle)


@plant("an owned update is public while it waits", SIMULATOR, "profiles")
def _(plot: Plot) -> None:
    settlement = folding.settlement

    def settle(product: Any, *given: Any) -> Any:
        found = settlement(product, *given)
        seen = [holding._as_row(product, profile, each) for profile, _, each in found.waiting]
        return msgspec.structs.replace(found, released=[*found.released, *seen])

    plot.name(folding, "settlement", settle)


@plant("public events are refused for what is released beside them", SIMULATOR, "profiles")
def _(plot: Plot) -> None:
    plot.name(folding, "_too_much", lambda counters, spot, here: here)


@plant("in a merge owners release each other in the order of the ids", SIMULATOR, "profiles")
def _(plot: Plot) -> None:
    plot.name(
        reading,
        "released_by_merge",
        lambda held, merge_seconds, _: settled([], None, held, merge_seconds=merge_seconds).released,
    )


@plant("held-back data raises the version that the world sees", SIMULATOR, "profiles")
def _(plot: Plot) -> None:
    raise_versions = counting.raise_versions
    plot.name(counting, "raise_versions", lambda tx, stored, _: raise_versions(tx, stored, list(stored)))


@plant("what nobody confirmed in its period is released later", SIMULATOR, "profiles")
def _(plot: Plot) -> None:
    held_at, loaded = holding.held_at, counting.loaded

    def held_for_ever(tx: Transaction, product: Any, keys: Any) -> Any:
        patient = copy.copy(product)
        patient.settings = msgspec.structs.replace(product.settings, delete_days=3650)
        return held_at(tx, patient, keys)

    def loaded_as_waiting(*given: Any, **options: Any) -> dict[Any, Any]:
        rows = loaded(*given, **options)
        for row in rows.values():
            row.held_at_us = 2**62 if row.held_at_us else 0
        return rows

    plot.name(holding, "held_at", held_for_ever)
    plot.name(counting, "loaded", loaded_as_waiting)


@plant("what nobody confirmed is never deleted", SIMULATOR, "profiles")
def _(plot: Plot) -> None:
    plot.name(sweeping, "delete_unconfirmed", lambda *_: 0)


# Versions and messages -----------------------------------------------------------------------------------------------


@plant("a profile that comes back begins at version 1", SIMULATOR, "profiles")
def _(plot: Plot) -> None:
    def raise_versions(tx: Transaction, stored: Mapping[Any, Any], public: Sequence[Any]) -> None:
        for key in public:
            stored[key].public_version += 1

    plot.name(counting, "raise_versions", raise_versions)


@plant("a deleted profile leaves no floor", SIMULATOR, "profiles")
def _(plot: Plot) -> None:
    plot.name(sweeping, "_raise_floors", lambda *_: None)


@plant("a change is published with the next one", SIMULATOR, "profiles")
def _(plot: Plot) -> None:
    publish, kept = counting.publish, list[dict[Any, Any]]()

    def publish_later(tx: Transaction, product: Any, profiles: Mapping[Any, Any]) -> None:
        for earlier in kept:
            publish(tx, product, earlier)
        kept[:] = [dict(profiles)]

    plot.name(counting, "publish", publish_later)


@plant("a change is published in a transaction of its own", KILLS, "profiles")
def _(plot: Plot) -> None:
    publish = counting.publish

    def commit_then_publish(tx: Transaction, *given: Any) -> None:
        commit(tx)
        publish(tx, *given)

    plot.name(counting, "publish", commit_then_publish)


@plant("a profile is loaded for writing without its lock", WRITERS, "profiles")
def _(plot: Plot) -> None:
    plot.name(storing, "locking_load", load)
