"""The catalog: what a file may say, and how its mistakes are reported."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from keyfold.counters.catalog import Catalog, Counter, Group, Kind
from keyfold.counters.compile import EXAMPLE, load
from keyfold.counters.errors import CatalogWrong, CounterUnknown

TEXT = EXAMPLE.read_text()
HEAD = TEXT[: TEXT.index("enum CounterId {")]
NAMES = ("CI_A", "CI_B", "CI_C", "CI_D", "CI_E")
Written = Callable[..., Path]


@pytest.fixture(scope="module")
def example() -> Catalog:
    return load(EXAMPLE)


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """A catalog file with these values in its enum."""

    def write(values: str, *, head: str = HEAD, name: str = "catalog.proto") -> Path:
        file = tmp_path / name
        file.write_text(f"{head}enum CounterId {{\n{values}\n}}\n")
        return file

    return write


def value(name: str, number: int | str, **fields: object) -> str:
    """One value of the enum; a wrong or missing field is what a test is about."""
    given = {"EngineNamespace": "EN_PAGE_ID", "ValueFunction": "VF_FLOAT", **fields}
    text = " ".join(f"{field}: {found}" for field, found in given.items() if found is not None)
    return f"{name} = {number} [(CounterDescription) = {{ {text} }}];"


def mistakes_of(call: Callable[[], object]) -> list[str]:
    with pytest.raises(CatalogWrong) as caught:
        call()
    return caught.value.mistakes


# What a catalog says ----------------------------------------------------------------------------------------------


@pytest.mark.spec("CNT-02")
def test_the_counters_of_the_document_are_read_from_its_own_words(example: Catalog) -> None:
    assert example["CI_DESKTOP_MAP_PERMALINK_CLICK_COUNT"] == Counter(
        id=539,
        name="CI_DESKTOP_MAP_PERMALINK_CLICK_COUNT",
        kind=Kind.FLOAT,
        namespace="EN_CATALOG_COMPANY_ID",
        decay=1.0,
        time_counter_id=540,
        input_types=("redir",),
        description="how often the card of a company was opened from the map",
        restriction="UR_METRIKA_OWNED",
    )
    time = example[540]
    assert (time.kind, time.records_max, time.expire_days, time.no_operation) == (Kind.FIXED32, 60, 30, True)
    pages = example[156]
    assert (pages.namespace, pages.secondary_namespace, pages.id_function) == ("EN_PAGE_ID", "EN_IMP_ID", "IF_POLY2")


@pytest.mark.spec("CNT-02")
def test_the_example_shows_every_field_of_a_description(example: Catalog) -> None:
    every = example.counters.values()
    for field in msgspec.structs.fields(Counter):
        given = [getattr(counter, field.name) for counter in every]
        assert any(found not in (None, False, (), "", 0.0) for found in given), field.name
    assert {counter.kind for counter in every} == set(Kind)
    assert all(counter.description for counter in every)


@pytest.mark.spec("CNT-01")
def test_profiles_have_types_and_that_of_a_user_is_the_default(example: Catalog) -> None:
    assert example.profile_types == ("banner", "user")
    assert example[539].profile_type == "user"
    assert example.group_of(700).profile_type == "banner"


@pytest.mark.spec("CNT-02")
def test_counters_under_one_time_counter_are_a_group_and_one_without_is_alone(example: Catalog) -> None:
    pages = example.group_of(157)
    assert (pages.id, pages.counter_ids, pages.records_max, pages.expire_seconds) == (
        159,
        (156, 157, 158, 159),
        100,
        2592000,
    )
    assert [counter.decay for counter in pages.values] == [1.0, 7.0, 168.0]
    assert example.group_of(600).delayed_records_max == 600
    alone = example.group_of(630)
    assert alone == Group(id=630, profile_type="user", time=None, values=(example[630],))
    assert (alone.records_max, alone.expire_seconds, alone.delayed_records_max) == (None, None, None)


@pytest.mark.spec("CNT-03")
def test_each_value_function_has_its_kind_of_storage(example: Catalog) -> None:
    kinds = {539: Kind.FLOAT, 601: Kind.DOUBLE, 540: Kind.FIXED32, 602: Kind.FIXED64}
    assert {counter_id: example[counter_id].kind for counter_id in kinds} == kinds


def test_a_counter_that_is_not_there_is_refused_by_name(example: Catalog) -> None:
    assert 539 in example
    assert 1 not in example
    for which in (1, "CI_NOPE"):
        with pytest.raises(CounterUnknown, match=str(which)):
            example[which]


@pytest.mark.spec("CNT-02")
def test_enums_inside_messages_imported_files_and_compiled_catalogs_are_read(tmp_path: Path) -> None:
    """Here the catalog is in two files, one enum of it inside a message, and a time counter is named as text."""
    (tmp_path / "shared").mkdir()
    head = HEAD.replace("optional CounterId TimeCounterId", "optional string TimeCounterId")
    (tmp_path / "shared" / "description.proto").write_text(head)
    time = value("CI_TIME", 2, ValueFunction="VF_AGE")
    count = value("CI_COUNT", 1, DecayFactor=1, TimeCounterId='"CI_TIME"')
    (tmp_path / "catalog.proto").write_text(
        'syntax = "proto2";\npackage marketplace;\nimport "shared/description.proto";\nimport "times.proto";\n'
        f"message Outer {{ enum Inner {{ {count} }} }}\n"
        "enum Unrelated { U_A = 1 [deprecated = true]; }\n"
    )
    (tmp_path / "times.proto").write_text(
        f'syntax = "proto2";\npackage marketplace;\nimport "shared/description.proto";\nenum Times {{ {time} }}\n'
    )
    from_text = load(tmp_path / "catalog.proto")
    assert from_text.group_of(1).counter_ids == (1, 2)
    compiler = [sys.executable, "-m", "grpc_tools.protoc", f"-I{tmp_path}", "--include_imports"]
    subprocess.run([*compiler, f"--descriptor_set_out={tmp_path}/catalog.binpb", "catalog.proto"], check=True)
    assert load(tmp_path / "catalog.binpb").counters == from_text.counters


# Mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.spec("CNT-02")
def test_all_mistakes_of_a_file_are_reported_at_once_by_name_and_the_file_stays_as_it_was(written: Written) -> None:
    """Those that the compiler stops at, one a counter, and those that only we see; no place on our disk is shown."""
    file = written(
        "\n".join(
            [
                value("CI_NAMESPACE", 1, EngineNamespace="EN_NOPE", DecayFactor=1),
                value("CI_FUNCTION", 2, ValueFunction="VF_NOPE", IdFunction="IF_NOPE"),
                value("CI_TIMELESS", 3, TimeCounterId="CI_NOPE", DecayFactor=-1),
                value("CI_TYPE", 4, ProfileType="PT_NOPE", UsageRestriction="UR_NOPE"),
                value("CI_NUMBER", 5, Description="'a { brace'", DecayFactor='"one"'),
                value("CI_TWICE", 5),
                value("CI_WRONG_TIME", 7, TimeCounterId="CI_TWICE"),
                value("CI_BARE", 8, EngineNamespace=None, ValueFunction=None),
                "CI_EMPTY = 9;",
            ]
        )
    )
    before = file.read_bytes()
    found = mistakes_of(lambda: load(file))
    assert [mistake for mistake in found if not mistake.startswith("CI_")] == []
    for expected in (
        "CI_NAMESPACE: unknown namespace EN_NOPE",
        "CI_NAMESPACE: DecayFactor needs a TimeCounterId",
        "CI_FUNCTION: ValueFunction is VF_NOPE, and must be one of VF_FLOAT, VF_DOUBLE, VF_AGE, VF_FIXED64",
        "CI_FUNCTION: IdFunction is IF_NOPE, and must be one of IF_ID, IF_POLY2",
        "CI_TIMELESS: TimeCounterId CI_NOPE is unknown",
        "CI_TIMELESS: DecayFactor -1.0 must be a finite number of at least 0",
        "CI_TYPE: unknown ProfileType PT_NOPE",
        "CI_TYPE: unknown UsageRestriction UR_NOPE",
        'CI_NUMBER: Expected double, got: "one"',
        "CI_BARE: ValueFunction is missing, and must be one of VF_FLOAT, VF_DOUBLE, VF_AGE, VF_FIXED64",
        "CI_BARE: EngineNamespace is missing",
        "CI_EMPTY: no CounterDescription",
    ):
        assert expected in found
    assert file.read_bytes() == before


@pytest.mark.spec("CNT-02")
@pytest.mark.parametrize("option", ["", "option allow_alias = true;"])
def test_a_number_used_twice_is_reported_also_where_the_enum_allows_it(written: Written, option: str) -> None:
    file = written(option + value("CI_A", 1) + value("CI_B", 1, EngineNamespace="EN_NOPE"))
    assert mistakes_of(lambda: load(file)) == [
        "CI_B: the id 1 is that of CI_A already",
        "CI_B: unknown namespace EN_NOPE",
    ]


@pytest.mark.spec("CNT-02")
@pytest.mark.parametrize("between", ["\n", " ", " // like enum Foo {\n", ' /* enum Foo { " */ '])
def test_every_number_that_is_used_twice_is_reported(written: Written, between: str) -> None:
    values = [value(name, number) for name, number in zip(NAMES, (1, 1, 1, 2, 2), strict=True)]
    file = written(between.join(values))
    assert mistakes_of(lambda: load(file)) == [
        "CI_B: the id 1 is that of CI_A already",
        "CI_C: the id 1 is that of CI_A already",
        "CI_E: the id 2 is that of CI_D already",
    ]


@pytest.mark.spec("CNT-02")
def test_numbers_used_twice_in_several_enums_of_one_line_are_reported_with_what_else_is_wrong(written: Written) -> None:
    twice = [value("CI_A", 1), value("CI_B", 1), value("CI_C", 2), value("CI_D", 2, EngineNamespace="EN_NOPE")]
    inner = f"message Outer {{ enum One {{ {twice[0]} {twice[1]} }} enum Two {{ {twice[2]} {twice[3]} }} }}"
    file = written(value("CI_E", 3, DecayFactor='"one"'), head=f"{HEAD}{inner}\n")
    assert sorted(mistakes_of(lambda: load(file))) == [
        "CI_B: the id 1 is that of CI_A already",
        "CI_D: the id 2 is that of CI_C already",
        "CI_D: unknown namespace EN_NOPE",
        'CI_E: Expected double, got: "one"',
    ]


@pytest.mark.spec("CNT-02")
@pytest.mark.parametrize(
    ("number", "also"),
    [
        ("-5", ["CI_B: the id -5 is not a positive 64-bit number"]),
        ("- 5", ["CI_B: the id -5 is not a positive 64-bit number"]),
        ("0x10", []),
        ("7 /* = 8 [ */", []),
        ("7 // seven\n", []),
    ],
)
def test_a_mistake_is_that_of_its_own_counter_however_the_number_is_written(
    written: Written, number: str, also: list[str]
) -> None:
    file = written(value("CI_A", 1) + "\n" + value("CI_B", number, EngineNamespace="EN_NOPE"))
    assert mistakes_of(lambda: load(file)) == [*also, "CI_B: unknown namespace EN_NOPE"]


@pytest.mark.spec("CNT-02")
def test_fields_for_other_readers_may_be_of_any_type(written: Written) -> None:
    labels = (
        "map<string, string> Labels = 15; map<int32, CleanUpSettings> Plans = 16; repeated CleanUpSettings Old = 17;"
    )
    head = HEAD.replace("optional bool Idf = 13;", f"optional bool Idf = 13; {labels}")
    given = {"Labels": '{ key: "team" value: "map" }', "Plans": "{ key: 1 value: {} }", "Old": "{}"}
    assert load(written(value("CI_A", 1, **given), head=head))["CI_A"].name == "CI_A"
    head = HEAD.replace("optional string Description", "map<string, string> Description")
    file = written(value("CI_A", 1, Description='{ key: "en" value: "clicks" }'), head=head)
    assert mistakes_of(lambda: load(file)) == ["CI_A: Description cannot be {'en': 'clicks'}"]


@pytest.mark.spec("CNT-02")
@pytest.mark.parametrize(
    ("declared", "given"), [("repeated TCounterDescription", "{}"), ("optional string", '"clicks"')]
)
def test_an_option_that_is_not_one_message_is_named(written: Written, declared: str, given: str) -> None:
    head = HEAD.replace("optional TCounterDescription CounterDescription", f"{declared} CounterDescription")
    file = written(f"CI_A = 1 [(CounterDescription) = {given}];", head=head)
    assert mistakes_of(lambda: load(file)) == ["CI_A: CounterDescription must be declared as one message"]


@pytest.mark.spec("CNT-02")
def test_unknown_names_are_reported_beside_what_makes_a_description_unreadable(written: Written) -> None:
    wrong = value("CI_A", 1, EngineNamespace="EN_NOPE", ValueFunction="VF_NOPE", DecayFactor='"one"')
    assert mistakes_of(lambda: load(written(wrong))) == [
        'CI_A: Expected double, got: "one"',
        "CI_A: unknown EngineNamespace EN_NOPE",
        "CI_A: unknown ValueFunction VF_NOPE",
    ]
    numbers = HEAD.replace("repeated string InputTypes", "repeated int32 InputTypes")
    wrong = value("CI_A", 1, ValueFunction="VF_NOPE", InputTypes="[1]")
    assert mistakes_of(lambda: load(written(wrong, head=numbers))) == [
        "CI_A: InputTypes cannot be [1]",
        "CI_A: unknown ValueFunction VF_NOPE",
    ]


@pytest.mark.spec("CNT-02")
def test_of_a_file_that_names_no_syntax_the_same_mistakes_are_reported(written: Written) -> None:
    values = value("CI_A", 1, ValueFunction="VF_NOPE") + value("CI_B", 2, DecayFactor=1)
    mistakes = mistakes_of(lambda: load(written(values)))
    assert len(mistakes) == 2
    bare = HEAD.replace('syntax = "proto2";', "")
    assert mistakes_of(lambda: load(written(values, head=bare))) == mistakes


@pytest.mark.spec("CNT-02")
def test_a_file_may_have_a_name_in_any_letters(written: Written) -> None:
    assert load(written(value("CI_A", 1), name="счётчики.proto"))["CI_A"].id == 1
    file = written(value("CI_A", 1, EngineNamespace="EN_NOPE"), name="счётчики.proto")
    assert mistakes_of(lambda: load(file)) == ["CI_A: unknown namespace EN_NOPE"]


@pytest.mark.spec("CNT-02")
def test_the_logs_of_a_counter_may_be_an_enum_and_are_read_as_names(written: Written) -> None:
    enum = "enum InputType { redir = 1; visit = 2; }\n"
    head = HEAD.replace("repeated string InputTypes", "repeated InputType InputTypes") + enum
    catalog = load(written(value("CI_A", 1, InputTypes="[redir, visit]"), head=head))
    assert catalog["CI_A"].input_types == ("redir", "visit")
    numbers = HEAD.replace("repeated string InputTypes", "repeated int32 InputTypes")
    file = written(value("CI_A", 1, InputTypes="[1, 2]"), head=numbers)
    assert mistakes_of(lambda: load(file)) == ["CI_A: InputTypes cannot be [1, 2]"]


@pytest.mark.spec("CNT-02")
def test_what_the_compiler_cannot_read_is_reported_by_file_and_line(tmp_path: Path, written: Written) -> None:
    line, *_ = mistakes_of(lambda: load(written("CI_A = 1 [(CounterDescription = {}];")))
    assert line.startswith(f"catalog.proto, line {HEAD.count(chr(10)) + 2}: ")
    imports = mistakes_of(lambda: load(written("", head='syntax = "proto2";\nimport "absent.proto";\n')))
    assert 'Import "absent.proto" was not found' in " ".join(imports)
    assert str(tmp_path) not in " ".join([line, *imports])


@pytest.mark.spec("CNT-02")
def test_a_file_that_is_no_catalog_is_refused(tmp_path: Path, written: Written) -> None:
    noise = tmp_path / "noise.binpb"
    noise.write_bytes(b"\xff\xff not a descriptor set")
    assert "neither" in mistakes_of(lambda: load(noise))[0]
    assert "no file" in mistakes_of(lambda: load(tmp_path / "absent.proto"))[0]
    assert "no enum value carries" in mistakes_of(lambda: load(written("CI_A = 1;")))[0]
    file = written("CI_A = 1 [deprecated = true];", head='syntax = "proto2";\n')  # knows of no options of ours
    assert "no enum value carries" in mistakes_of(lambda: load(file))[0]


TIME = Counter(id=2, name="TIME", kind=Kind.FIXED32, namespace="EN_A")
COUNT = Counter(id=1, name="COUNT", kind=Kind.FLOAT, namespace="EN_A", decay=1.0, time_counter_id=2)


@pytest.mark.spec("CNT-02", "CNT-03", "CNT-19")
@pytest.mark.parametrize(
    ("changed", "of_time", "says"),
    [
        ({"time_counter_id": 9}, {}, "COUNT: TimeCounterId 9 is unknown"),
        ({"time_counter_id": 1}, {}, "COUNT: TimeCounterId names the counter itself"),
        ({"time_counter_id": None}, {}, "COUNT: DecayFactor needs a TimeCounterId"),
        ({}, {"kind": Kind.FLOAT}, "COUNT: its time counter TIME must have ValueFunction VF_AGE"),
        ({}, {"time_counter_id": 1}, "COUNT: its time counter TIME has a time counter of its own"),
        ({"kind": Kind.FIXED64}, {}, "COUNT: DecayFactor needs ValueFunction VF_FLOAT or VF_DOUBLE"),
        ({"kind": Kind.FIXED32}, {}, "COUNT: DecayFactor needs ValueFunction VF_FLOAT or VF_DOUBLE"),
        ({"decay": float("nan")}, {}, "COUNT: DecayFactor nan must be a finite number of at least 0"),
        ({"id": 2}, {}, "TIME: the id 2 is that of COUNT already"),
        ({"id": 0}, {}, "COUNT: the id 0 is not a positive 64-bit number"),
        ({"name": "TIME"}, {}, "TIME: there are two counters of this name"),
        ({"namespace": "EN_X"}, {}, "COUNT: unknown namespace EN_X"),
        ({"namespace": "EN_B"}, {}, "COUNT: EngineNamespace EN_B differs from EN_A of its time counter TIME"),
        (
            {"secondary_namespace": "EN_B", "id_function": "IF_POLY2"},
            {},
            "COUNT: IdFunction IF_POLY2 differs from IF_ID of its time counter TIME",
        ),
        ({"profile_type": "page"}, {}, "COUNT: ProfileType page differs from user of its time counter TIME"),
        ({"id_function": "IF_POLY2"}, {}, "COUNT: IF_POLY2 needs a SecondaryEngineNamespace"),
        ({"secondary_namespace": "EN_B"}, {}, "COUNT: SecondaryEngineNamespace needs IdFunction IF_POLY2"),
        ({"id_function": "IF_MD5"}, {}, "COUNT: IdFunction is IF_MD5, and must be one of IF_ID, IF_POLY2"),
        ({"records_max": 1}, {}, "COUNT: CleanUpSettings stand on the time counter, not on a counter that has one"),
        ({}, {"records_max": 0}, "TIME: MaxRecords 0 must be between 1 and 10000000"),
        ({"input_types": ("",)}, {}, "COUNT: an InputTypes is empty"),
        ({}, {"not_glued": True}, "COUNT: its time counter TIME is NotGlued, so it must be NotGlued too"),
        (
            {"restriction": "UR_A"},
            {},
            "counters that share keys must have one UsageRestriction: TIME none, COUNT UR_A",
        ),
    ],
)
def test_each_mistake_has_its_own_words(changed: dict[str, Any], of_time: dict[str, Any], says: str) -> None:
    counters = [msgspec.structs.replace(COUNT, **changed), msgspec.structs.replace(TIME, **of_time)]
    assert says in mistakes_of(lambda: Catalog(counters, namespaces=["EN_A", "EN_B"]))


@pytest.mark.spec("CNT-02")
def test_owned_updates_need_a_time_counter() -> None:
    alone = Counter(id=1, name="ALONE", kind=Kind.FIXED64, namespace="EN_A", delayed_records_max=600)
    (says,) = mistakes_of(lambda: Catalog([alone]))
    assert says == "ALONE: CleanUpSettings (MaxRecords, ExpireDays, MaxDelayedRecords) need a time counter"
