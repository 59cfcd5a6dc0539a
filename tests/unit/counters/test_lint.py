"""What a change of the catalog does to stored data."""

from typing import Any

import msgspec
import pytest

from keyfold.counters.catalog import Catalog, Counter, Kind
from keyfold.counters.counters import Counters, MutableCounters
from keyfold.counters.lint import Finding, lint

TIME = Counter(
    id=2, name="TIME", kind=Kind.FIXED32, namespace="EN_A", records_max=30, expire_days=60, delayed_records_max=600
)
COUNT = Counter(
    id=1, name="COUNT", kind=Kind.FLOAT, namespace="EN_A", decay=1.0, time_counter_id=2, input_types=("redir",)
)
OTHER = Counter(id=3, name="OTHER", kind=Kind.FIXED32, namespace="EN_A")
OLD = Catalog([COUNT, TIME, OTHER])


def changed(*, count: dict[str, Any] | None = None, time: dict[str, Any] | None = None) -> list[Finding]:
    counters = [msgspec.structs.replace(COUNT, **(count or {})), msgspec.structs.replace(TIME, **(time or {})), OTHER]
    return lint(OLD, Catalog(counters))


def changed_to(**count: Any) -> Catalog:
    return Catalog([msgspec.structs.replace(COUNT, **count), TIME, OTHER])


@pytest.mark.spec("CNT-19")
def test_the_same_catalog_or_another_description_changes_nothing() -> None:
    assert lint(OLD, OLD) == []
    assert changed(count={"description": "clicks"}) == []


@pytest.mark.spec("CNT-19", "CNT-03")
@pytest.mark.parametrize(
    ("count", "severity", "change", "effect"),
    [
        ({"kind": Kind.DOUBLE}, "breaks", "kind changed from float to double", "refused (kind-wrong)"),
        ({"time_counter_id": 3}, "breaks", "time counter moved from 2 to 3", "as of the times that 3 has"),
        ({"decay": 2.0}, "loses", "DecayFactor changed from 1 to 2", "old rate"),
        ({"name": "CLICKS"}, "safe", "renamed from COUNT", "goes by the id"),
        ({"name": "CLICKS", "description": "other"}, "breaks", "the id of COUNT is used again", "read as CLICKS"),
        ({"not_glued": True}, "safe", "NotGlued set", "left out"),
        ({"idf": True}, "safe", "Idf set", "weighted"),
        ({"no_operation": True}, "safe", "NoOperation set", "may not write"),
        ({"input_types": ()}, "safe", "InputTypes redir removed", "events of any log are counted from now on"),
        ({"input_types": ("redir", "visit")}, "safe", "InputTypes with visit", "from now on"),
    ],
)
def test_a_change_of_a_value_counter_is_told(count: dict[str, Any], severity: str, change: str, effect: str) -> None:
    (finding,) = changed(count=count)
    assert (finding.severity, finding.id, finding.change) == (severity, 1, change)
    assert effect in finding.effect


@pytest.mark.spec("CNT-19")
@pytest.mark.parametrize(
    ("time", "severity", "change", "effect"),
    [
        ({"records_max": 20}, "loses", "MaxRecords lowered from 30 to 20", "oldest keys"),
        ({"records_max": 40}, "safe", "MaxRecords raised from 30 to 40", "stays gone"),
        ({"records_max": None}, "safe", "MaxRecords 30 removed", "may grow"),
        ({"expire_days": 30}, "loses", "ExpireDays lowered from 60 to 30", "gone at once"),
        ({"expire_days": 90}, "safe", "ExpireDays raised from 60 to 90", "come back"),
        ({"expire_days": None}, "safe", "ExpireDays 60 removed", "come back"),
        ({"delayed_records_max": 10}, "loses", "MaxDelayedRecords lowered from 600 to 10", "held-back"),
        ({"delayed_records_max": None}, "loses", "MaxDelayedRecords 600 removed", "set aside as errors"),
    ],
)
def test_a_change_of_the_limits_is_told(time: dict[str, Any], severity: str, change: str, effect: str) -> None:
    (finding,) = changed(time=time)
    assert (finding.severity, finding.id, finding.change) == (severity, 2, change)
    assert effect in finding.effect


@pytest.mark.spec("CNT-19")
def test_limits_where_there_were_none_lose_data_and_room_for_held_back_updates_does_not() -> None:
    limited = msgspec.structs.replace(OTHER, records_max=5, expire_days=7, delayed_records_max=9)
    findings = lint(OLD, Catalog([COUNT, TIME, limited]))
    assert [(finding.severity, finding.change) for finding in findings] == [
        ("loses", "MaxRecords 5 added"),
        ("loses", "ExpireDays 7 added"),
        ("safe", "MaxDelayedRecords 9 added"),
    ]


@pytest.mark.spec("CNT-19")
@pytest.mark.parametrize(
    ("both", "severity", "change"),
    [
        ({"namespace": "EN_B"}, "breaks", "keys changed from IF_ID(EN_A) to IF_ID(EN_B)"),
        (
            {"secondary_namespace": "EN_B", "id_function": "IF_POLY2"},
            "breaks",
            "keys changed from IF_ID(EN_A) to IF_POLY2(EN_A, EN_B)",
        ),
        ({"profile_type": "banner"}, "loses", "ProfileType changed from user to banner"),
        ({"restriction": "UR_A"}, "safe", "UsageRestriction UR_A added"),
    ],
)
def test_a_change_of_what_a_group_has_in_common_is_told_for_each_counter(
    both: dict[str, Any], severity: str, change: str
) -> None:
    findings = changed(count=both, time=both)
    assert [(finding.severity, finding.id, finding.change) for finding in findings] == [
        (severity, 1, change),
        (severity, 2, change),
    ]


@pytest.mark.spec("CNT-19")
@pytest.mark.parametrize(
    ("after", "change"),
    [(None, "UsageRestriction UR_A removed"), ("UR_B", "UsageRestriction changed from UR_A to UR_B")],
)
def test_lifting_a_restriction_is_a_leak(after: str | None, change: str) -> None:
    before = Catalog([msgspec.structs.replace(OTHER, restriction="UR_A")])
    (finding,) = lint(before, Catalog([msgspec.structs.replace(OTHER, restriction=after)]))
    assert (finding.severity, finding.change) == ("breaks", change)
    assert finding.effect.startswith("a leak")


@pytest.mark.spec("CNT-19")
def test_naming_logs_where_any_was_counted_leaves_the_others_out() -> None:
    (finding,) = lint(changed_to(input_types=()), OLD)
    assert (finding.severity, finding.change) == ("safe", "InputTypes redir added")
    assert finding.effect == "no more events of other logs are counted"
    both = changed_to(input_types=("redir", "visit"))
    (finding,) = lint(both, OLD)
    assert (finding.change, finding.effect) == (
        "InputTypes without visit",
        "no more events of these logs are counted",
    )


@pytest.mark.spec("CNT-19")
def test_gaining_or_losing_a_time_counter_loses_the_times() -> None:
    plain = msgspec.structs.replace(COUNT, decay=0.0, time_counter_id=None)
    timed = msgspec.structs.replace(COUNT, decay=0.0)
    without, with_time = Catalog([plain]), Catalog([timed, TIME])
    (added, _), (removed, _) = lint(without, with_time), lint(with_time, without)
    assert (added.severity, added.change) == ("loses", "time counter 2 added")
    assert (removed.severity, removed.change) == ("loses", "time counter 2 removed")


@pytest.mark.spec("CNT-19")
def test_a_time_counter_that_has_times_already_gives_them_to_values_it_did_not_time() -> None:
    """What had faded within a year would count in full, by an event of another counter today."""
    now, year = 1_700_000_000, 365 * 86_400
    lasting = Catalog([COUNT, msgspec.structs.replace(OTHER, id=2, name="TIME"), OTHER])
    moved = changed_to(time_counter_id=3)
    counters = MutableCounters(lasting, b"", now)
    counters.update("COUNT", 7, 5.0, now - year)
    counters.update("OTHER", 7, 1, now)
    assert counters.get("COUNT", 7, at=now) < 1e-15
    assert Counters(moved, counters.serialise(), now).get("COUNT", 7, at=now) == 5.0
    (finding,) = lint(OLD, moved)
    assert (finding.severity, finding.change) == ("breaks", "time counter moved from 2 to 3")
    plain = Catalog([msgspec.structs.replace(COUNT, decay=0.0, time_counter_id=None), TIME, OTHER])
    (finding,) = lint(plain, changed_to(decay=0.0))
    assert (finding.severity, finding.change) == ("breaks", "time counter 2 added")


@pytest.mark.spec("CNT-19")
def test_a_counter_that_goes_moves_or_comes_is_told() -> None:
    (removed,) = lint(OLD, Catalog([COUNT, TIME]))
    assert (removed.severity, removed.counter, removed.change) == ("loses", "OTHER", "removed")
    assert "never use the id again" in removed.advice

    moved, added = lint(OLD, Catalog([COUNT, TIME, msgspec.structs.replace(OTHER, id=9)]))
    assert (moved.severity, moved.id, moved.change) == ("loses", 3, "id moved from 3 to 9")
    assert (added.severity, added.id, added.change) == ("safe", 9, "added")

    sibling = msgspec.structs.replace(COUNT, id=7, name="DAY", decay=7.0)
    (joined,) = lint(OLD, Catalog([COUNT, TIME, OTHER, sibling]))
    assert "read 0" in joined.effect


@pytest.mark.spec("CNT-19")
def test_swapped_names_are_no_renaming() -> None:
    """What was stored for one would be read as the other."""
    swapped = [msgspec.structs.replace(COUNT, name="DAY"), msgspec.structs.replace(COUNT, id=7)]
    before = [COUNT, msgspec.structs.replace(COUNT, id=7, name="DAY")]
    findings = lint(Catalog([*before, TIME]), Catalog([*swapped, TIME]))
    assert [(finding.severity, finding.id) for finding in findings] == [("breaks", 1), ("breaks", 7)]


@pytest.mark.spec("CNT-19")
def test_the_worst_comes_first() -> None:
    findings = changed(count={"kind": Kind.DOUBLE, "idf": True}, time={"records_max": 1, "expire_days": 90})
    assert [finding.severity for finding in findings] == ["breaks", "loses", "safe", "safe"]
