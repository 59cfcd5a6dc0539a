"""What a change of the catalog does to the profiles that are stored already."""

from collections.abc import Iterator
from typing import Literal

import msgspec
from msgspec import Struct

from keyfold.counters.catalog import Catalog, Counter, Group

Severity = Literal["breaks", "loses", "safe"]
SEVERITIES: tuple[Severity, ...] = ("breaks", "loses", "safe")

NEW_ID = "take a new id, fill it beside the old one, and remove the old one when nobody reads it"


class Finding(Struct, frozen=True, kw_only=True):
    """One change: `breaks` misreads or refuses what is stored or gives it away, `loses` lets some of it go."""

    severity: Severity
    id: int
    counter: str
    change: str
    effect: str
    advice: str = ""


def lint(old: Catalog, new: Catalog) -> list[Finding]:
    """Every change that stored profiles or their readers notice, the worst first."""
    found = [finding for counter in old.counters.values() for finding in _of(counter, old, new)]
    found += [_added(counter, old) for counter in new.counters.values() if counter.id not in old]
    return sorted(found, key=lambda finding: (SEVERITIES.index(finding.severity), finding.id))


def _of(was: Counter, old: Catalog, new: Catalog) -> Iterator[Finding]:
    if was.id not in new:
        yield _removed(was, new)
        return
    now = new[was.id]
    if was.name != now.name:
        yield _renamed(was, now, new)
    for severity, change, effect, advice in (
        *_meaning(was, now),
        *_time(was, now, old),
        *_decay(was, now),
        *_limits(was, now),
        *_access(was, now),
        *_handling(was, now),
    ):
        yield Finding(severity=severity, id=now.id, counter=now.name, change=change, effect=effect, advice=advice)


Change = tuple[Severity, str, str, str]  # severity, change, effect, advice


def _removed(was: Counter, new: Catalog) -> Finding:
    moved = new.by_name.get(was.name)
    return Finding(
        severity="loses",
        id=was.id,
        counter=was.name,
        change=f"id moved from {was.id} to {moved.id}" if moved else "removed",
        effect="what is stored stays in the profiles, where nothing reads it, decays it or expires it",
        advice=f"keep the id {was.id}"
        if moved
        else "keep it with NoOperation until its keys have expired, and never use the id again",
    )


def _renamed(was: Counter, now: Counter, new: Catalog) -> Finding:
    alike = msgspec.structs.replace(was, name=now.name) == now
    if alike and was.name not in new.by_name:
        return Finding(
            severity="safe",
            id=now.id,
            counter=now.name,
            change=f"renamed from {was.name}",
            effect="what is stored goes by the id, and stays",
            advice="handlers, clients and grants that name it must follow",
        )
    return Finding(
        severity="breaks",
        id=now.id,
        counter=now.name,
        change=f"the id of {was.name} is used again",
        effect=f"what is stored for {was.name} is read as {now.name}",
        advice="take an id that was never used",
    )


def _added(now: Counter, old: Catalog) -> Finding:
    joins = now.time_counter_id is not None and now.time_counter_id in old
    effect = "keys that are there already read 0 until their next event" if joins else "nothing is stored for it yet"
    advice = "windows over it and its siblings hold only for events counted by all of them" if joins else ""
    return Finding(severity="safe", id=now.id, counter=now.name, change="added", effect=effect, advice=advice)


def _meaning(was: Counter, now: Counter) -> Iterator[Change]:
    if was.kind is not now.kind:
        change = f"kind changed from {was.kind.name.lower()} to {now.kind.name.lower()}"
        yield "breaks", change, "profiles that hold it are refused (kind-wrong)", NEW_ID
    keys = (was.namespace, was.secondary_namespace, was.id_function)
    if keys != (now.namespace, now.secondary_namespace, now.id_function):
        change = f"keys changed from {keys_of(was)} to {keys_of(now)}"
        yield "breaks", change, "stored keys are taken for keys of another sort", NEW_ID
    if was.profile_type != now.profile_type:
        change = f"ProfileType changed from {was.profile_type} to {now.profile_type}"
        yield "loses", change, f"what is stored in profiles of type {was.profile_type} is not read any more", NEW_ID


def _time(was: Counter, now: Counter, old: Catalog) -> Iterator[Change]:
    before, after = was.time_counter_id, now.time_counter_id
    if before == after:
        return
    if after is None:
        effect = "stored values lose their times and limits, and stay for good"
        yield "loses", f"time counter {before} removed", effect, NEW_ID
        return
    change = f"time counter {after} added" if before is None else f"time counter moved from {before} to {after}"
    if after in old:
        effect = f"stored values are read as of the times that {after} has for their keys, not of their own events"
        yield "breaks", change, effect, NEW_ID
    else:
        yield "loses", change, "stored values have no time and count as of 1970: what fades or expires is gone", NEW_ID


def _decay(was: Counter, now: Counter) -> Iterator[Change]:
    if was.decay != now.decay:
        change = f"DecayFactor changed from {was.decay:g} to {now.decay:g}"
        effect = "stored sums were decayed at the old rate and go on at the new one: right for neither until they fade"
        yield "loses", change, effect, NEW_ID


def _limits(was: Counter, now: Counter) -> Iterator[Change]:
    for name, before, after, goes, returns in (
        ("MaxRecords", was.records_max, now.records_max, "the oldest keys above it go at the next cleanup", ""),
        (
            "ExpireDays",
            was.expire_days,
            now.expire_days,
            "keys older than it are gone at once",
            "; expired keys that no cleanup has met come back",
        ),
        (
            "MaxDelayedRecords",
            was.delayed_records_max,
            now.delayed_records_max,
            "the oldest held-back updates above it go",
            "",
        ),
    ):
        if before == after:
            continue
        if name == "MaxDelayedRecords" and after is None:
            effect = "owned updates are set aside as errors, held-back ones are not released any more"
            yield (
                "loses",
                f"{name} {before} removed",
                effect,
                "wait until no handler sends owners, then for DeletePeriod",
            )
        elif name == "MaxDelayedRecords" and before is None:
            yield "safe", f"{name} {after} added", "owned updates are held back from now on", ""
        elif after is None:
            yield "safe", f"{name} {before} removed", f"profiles may grow{returns}", "watch the size of profiles"
        elif before is None:
            yield "loses", f"{name} {after} added", goes, ""
        elif after < before:
            yield "loses", f"{name} lowered from {before} to {after}", goes, "the eviction bill shows how much went"
        else:
            yield "safe", f"{name} raised from {before} to {after}", f"what has gone stays gone{returns}", ""


def _access(was: Counter, now: Counter) -> Iterator[Change]:
    before, after = was.restriction, now.restriction
    if before == after:
        return
    if before is None:
        yield "safe", f"UsageRestriction {after} added", "clients without the grant do not get it any more", ""
        return
    change = f"UsageRestriction changed from {before} to {after}" if after else f"UsageRestriction {before} removed"
    effect = "a leak: what was collected under the restriction is given to clients that never had the grant"
    yield "breaks", change, effect, "take a new id for what may be shared from now on"


def _handling(was: Counter, now: Counter) -> Iterator[Change]:
    """What touches no stored value, only who writes it and how it is read."""
    for name, before, after, set_effect, unset_effect in (
        (
            "NotGlued",
            was.not_glued,
            now.not_glued,
            "left out where several profiles are read as one",
            "summed where several profiles are read as one",
        ),
        ("Idf", was.idf, now.idf, "may be read weighted, once its job has run", "is not read weighted any more"),
        ("NoOperation", was.no_operation, now.no_operation, "handlers may not write it", "handlers may write it"),
    ):
        if before != after:
            yield "safe", f"{name} {'set' if after else 'unset'}", set_effect if after else unset_effect, ""
    yield from _logs(set(was.input_types), set(now.input_types))


def _logs(before: set[str], after: set[str]) -> Iterator[Change]:
    """A counter that names no log is written by any."""
    gone, come = sorted(before - after), sorted(after - before)
    if gone and not after:
        yield "safe", f"InputTypes {', '.join(gone)} removed", "events of any log are counted from now on", ""
        return
    if come and not before:
        yield "safe", f"InputTypes {', '.join(come)} added", "no more events of other logs are counted", ""
        return
    if gone:
        yield "safe", f"InputTypes without {', '.join(gone)}", "no more events of these logs are counted", ""
    if come:
        yield "safe", f"InputTypes with {', '.join(come)}", "events of these logs are counted from now on", ""


def keys_of(counter: Counter | Group) -> str:
    """What the keys are, as a person writes it."""
    if isinstance(counter, Group):
        counter = counter.time or counter.values[0]
    names = [name for name in (counter.namespace, counter.secondary_namespace) if name]
    return f"{counter.id_function}({', '.join(names)})"
