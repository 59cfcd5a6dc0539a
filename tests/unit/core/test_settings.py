"""Settings come from one table; each value names its source, and no secret is shown."""

from pathlib import Path
from typing import Annotated

import msgspec
import pytest
from msgspec import Meta

from keyfold.core.errors import SettingsWrong
from keyfold.core.settings import CORE_SECTIONS, Section, Settings, load, redacted


def sources(settings: Settings) -> dict[str, str]:
    return {row.name: row.source for row in settings.table}


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    file = tmp_path / "some.toml"
    file.write_text("[http]\nport = 1001\nhost = '10.0.0.1'\nstop_seconds_max = 7\n")
    return file


@pytest.mark.parametrize(
    ("with_file", "environ", "options", "port", "source"),
    [
        (False, {}, {}, 8080, "default"),
        (True, {}, {}, 1001, "some.toml"),
        (True, {"KEYFOLD_HTTP_PORT": "1002"}, {}, 1002, "KEYFOLD_HTTP_PORT"),
        (True, {"KEYFOLD_HTTP_PORT": "1002"}, {"http.port": 1003}, 1003, "command line"),
        (True, {}, {"http.port": None}, 1001, "some.toml"),
    ],
    ids=["default", "file over default", "environment over file", "option over environment", "an option not given"],
)
def test_the_nearer_source_wins_and_is_named(
    toml: Path, with_file: bool, environ: dict[str, str], options: dict[str, object], port: int, source: str
) -> None:
    """default < file < environment < command line, for each setting by itself."""
    settings = load(file=toml if with_file else None, environ=environ, options=options)
    assert settings.http.port == port
    assert sources(settings)["http.port"].endswith(source)
    assert settings.http.stop_seconds_max == (7 if with_file else 20)


def test_the_table_has_every_setting_once_with_a_description_and_its_default() -> None:
    settings = load(environ={})
    wanted = [
        f"{section}.{field.name}" for section, kind in CORE_SECTIONS.items() for field in msgspec.structs.fields(kind)
    ]
    assert [row.name for row in settings.table] == wanted
    assert [row.name for row in settings.table if not row.description] == []
    assert [row.name for row in settings.table if row.value != row.default] == []
    assert set(sources(settings).values()) == {"default"}


def test_without_a_name_the_file_of_the_directory_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keyfold.toml").write_text("[log]\nlevel = 'error'\n")
    settings = load(environ={})
    assert (settings.log.level, sources(settings)["log.level"]) == ("error", "keyfold.toml")


def test_a_part_adds_a_section_of_its_own() -> None:
    class Orders(Section, frozen=True, kw_only=True):
        window_days: Annotated[int, Meta(ge=1, description="how far back an order counts")] = 30

    settings = load(parts={"orders": Orders}, environ={"KEYFOLD_ORDERS_WINDOW_DAYS": "60"})
    assert settings.section("orders", Orders).window_days == 60


def test_a_variable_may_hold_json() -> None:
    given = load(environ={"KEYFOLD_TOPICS_KAFKA_OPTIONS": '{"security.protocol": "SSL"}'})
    assert given.topics.kafka_options == {"security.protocol": "SSL"}


@pytest.mark.spec("CORE-13")
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[http", "cannot be read"),
        ("[htp]\nport = 1", "unknown section [htp]"),
        ("[http]\nprot = 1", "unknown setting http.prot"),
        ("[http]\nport = 'many'", "http.port"),
        ("[http]\nport = 70000", "http.port"),
        ("[http]\ndemo = 3", "http.demo"),
        ("[topics]\nkind = 'pigeon'", "topics.kind"),
        ("[limits]\nlock_seconds_max = 100", "lock_seconds_max"),
        ("http = 3", "http must be a section"),
        ("\udcff".encode("utf-8", "surrogateescape"), "cannot be read"),
    ],
)
def test_a_wrong_file_is_refused_with_what_and_where(tmp_path: Path, text: str | bytes, says: str) -> None:
    file = tmp_path / "wrong.toml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(SettingsWrong) as refusal:
        load(file=file, environ={})
    assert says in str(refusal.value)


@pytest.mark.spec("CORE-13")
def test_a_missing_file_is_refused_only_where_it_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    load(environ={})
    with pytest.raises(SettingsWrong, match=r"there is no file .*absent\.toml"):
        load(file=tmp_path / "absent.toml", environ={})


@pytest.mark.spec("CORE-13")
@pytest.mark.parametrize(
    ("variable", "value", "place"),
    [
        ("KEYFOLD_HTTP_PROT", "1", "environment"),
        ("KEYFOLD_HTTP_PORT", "many", "KEYFOLD_HTTP_PORT"),
        ("KEYFOLD_HTTP_PORT", "-1", "KEYFOLD_HTTP_PORT"),
        ("KEYFOLD_LOG_LEVEL", "loud", "KEYFOLD_LOG_LEVEL"),
        ("KEYFOLD_TOPICS_KAFKA_OPTIONS", "{broken", "KEYFOLD_TOPICS_KAFKA_OPTIONS"),
    ],
)
def test_a_wrong_variable_is_refused_with_its_name(variable: str, value: str, place: str) -> None:
    with pytest.raises(SettingsWrong) as refusal:
        load(environ={variable: value})
    assert refusal.value.place == place


def test_variables_of_others_and_of_the_command_line_are_no_settings() -> None:
    load(environ={"KEYFOLD_CONFIG": "x", "KEYFOLD_TOKEN": "x", "PATH": "x", "KEYFOLDER": "x"})


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://ann:secret@host:5432/db", "postgresql://ann:***@host:5432/db"),
        ("postgresql://ann:se@cret@host/db", "postgresql://ann:***@host/db"),
        ("postgresql://:secret@host/db", "postgresql://:***@host/db"),
        ("postgresql://ann:s/e:c@host/db", "postgresql://ann:***@host/db"),
        ("sqlite:///keyfold.db", "sqlite:///keyfold.db"),
        ("postgresql://ann@host/db", "postgresql://ann@host/db"),
        ("at http://host:8080/x and mail a@b", "at http://host:8080/x and mail a@b"),
    ],
)
def test_the_password_of_a_url_is_blotted_out_and_nothing_else(text: str, shown: str) -> None:
    assert redacted(text) == shown
