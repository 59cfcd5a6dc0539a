"""The one table of settings: what is in force, and from where (default, keyfold.toml, environment, command line)."""

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from keyfold.core.errors import SettingsWrong
from keyfold.core.limits import Limits

T = TypeVar("T", bound=Struct)


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of a section of the settings; a part adds its own by subclassing."""


class StoreSettings(Section, frozen=True, kw_only=True):
    url: Annotated[str, Meta(description="sqlite:///FILE or postgresql://…")] = "sqlite:///keyfold.db"
    connections_max: Annotated[int, Meta(ge=2, le=500, description="connections to a server store")] = 12


class HttpSettings(Section, frozen=True, kw_only=True):
    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0 takes a free one")] = 8080
    demo: Annotated[bool, Meta(description="loopback only: answer without a token")] = False
    stop_seconds_max: Annotated[int, Meta(ge=1, le=600, description="longest a graceful stop may take")] = 20


class TopicsSettings(Section, frozen=True, kw_only=True):
    kind: Annotated[Literal["embedded", "kafka"], Meta(description="where topics live")] = "embedded"
    kafka: Annotated[str, Meta(description="Kafka bootstrap servers, HOST:PORT,…")] = ""
    kafka_options: Annotated[
        dict[str, str], Meta(description="further librdkafka properties (security.protocol, …)")
    ] = {}
    partitions: Annotated[int, Meta(ge=1, le=1024, description="partitions of a topic when it is made")] = 4
    replay_seconds: Annotated[int, Meta(ge=60, description="how long published messages are kept")] = 7 * 86400


class LeasesSettings(Section, frozen=True, kw_only=True):
    kind: Annotated[Literal["sql", "zookeeper"], Meta(description="who grants leases")] = "sql"
    zookeeper: Annotated[str, Meta(description="ZooKeeper hosts, HOST:PORT,…")] = ""
    lease_seconds: Annotated[int, Meta(ge=1, le=3600, description="a silent holder loses its lease after this")] = 10


class LogSettings(Section, frozen=True, kw_only=True):
    level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="least level logged")] = "info"
    form: Annotated[Literal["json", "text"], Meta(description="one JSON object a line, or text for people")] = "text"


class IdempotencySettings(Section, frozen=True, kw_only=True):
    keep_seconds: Annotated[int, Meta(ge=60, description="how long the answer to an Idempotency-Key is kept")] = 86400


CORE_SECTIONS: dict[str, type[Struct]] = {
    "store": StoreSettings,
    "http": HttpSettings,
    "topics": TopicsSettings,
    "leases": LeasesSettings,
    "idempotency": IdempotencySettings,
    "limits": Limits,
    "log": LogSettings,
}


class InForce(Struct, frozen=True):
    """One row of the table of settings."""

    name: str
    value: Any
    source: str
    description: str
    default: Any


class Settings:
    """Every section, validated, with the source of every value."""

    def __init__(self, sections: Mapping[str, Struct], table: list[InForce]) -> None:
        self._sections = dict(sections)
        self.table = table

    def section(self, name: str, kind: type[T]) -> T:
        found = self._sections.get(name)
        if found is None:  # nobody asked for it when the settings were loaded, so nothing of it was given
            return kind()
        if not isinstance(found, kind):
            raise TypeError(f"section {name} is {type(found).__name__}, not {kind.__name__}")
        return found

    @property
    def store(self) -> StoreSettings:
        return self.section("store", StoreSettings)

    @property
    def http(self) -> HttpSettings:
        return self.section("http", HttpSettings)

    @property
    def topics(self) -> TopicsSettings:
        return self.section("topics", TopicsSettings)

    @property
    def leases(self) -> LeasesSettings:
        return self.section("leases", LeasesSettings)

    @property
    def idempotency(self) -> IdempotencySettings:
        return self.section("idempotency", IdempotencySettings)

    @property
    def limits(self) -> Limits:
        return self.section("limits", Limits)

    @property
    def log(self) -> LogSettings:
        return self.section("log", LogSettings)


def load(
    *,
    parts: Mapping[str, type[Struct]] | None = None,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    options: Mapping[str, object] | None = None,
) -> Settings:
    """Merge defaults, `keyfold.toml`, `KEYFOLD_*` and command-line options (`{"http.port": 80}`), in that order."""
    kinds = {**CORE_SECTIONS, **(parts or {})}
    given: dict[str, tuple[object, str]] = {}
    given.update(_from_file(kinds, file))
    given.update(_from_environment(kinds, os.environ if environ is None else environ))
    for name, value in (options or {}).items():
        if value is not None:
            given[name] = (value, "command line")

    sections: dict[str, Struct] = {}
    table: list[InForce] = []
    for section_name, kind in kinds.items():
        values = {
            field.name: given[f"{section_name}.{field.name}"][0]
            for field in msgspec.structs.fields(kind)
            if f"{section_name}.{field.name}" in given
        }
        section = _validated(section_name, kind, values, given)
        sections[section_name] = section
        for field in msgspec.structs.fields(kind):
            name = f"{section_name}.{field.name}"
            default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
            source = given[name][1] if name in given else "default"
            table.append(InForce(name, getattr(section, field.name), source, description(field.type), default))
    return Settings(sections, table)


def description(annotation: object) -> str:
    """The description in the annotation of a setting, wherever it is nested."""
    texts = [
        meta.description
        for meta in getattr(annotation, "__metadata__", ())
        if isinstance(meta, Meta) and meta.description
    ]
    return texts[-1] if texts else ""


def redacted(text: str) -> str:
    """The text with the password of every URL in it blotted out."""
    return re.sub(r"(://[^:/@\s]*:)\S*@", r"\1***@", text)


def _validated(
    section: str, kind: type[Struct], values: dict[str, object], given: Mapping[str, tuple[object, str]]
) -> Struct:
    try:
        return msgspec.convert(values, kind, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        match = re.search(r"`\$\.([a-z_]+)", str(error))
        name = f"{section}.{match.group(1)}" if match else section
        source = given.get(name, (None, "settings"))[1]
        reason, _, path = str(error).partition(" - at `$.")
        where = f"{section}.{path.rstrip('`')}" if path else name
        raise SettingsWrong(f"{where}: {reason}", place=source, hint="`keyfold settings` lists every setting") from None


def _from_file(kinds: Mapping[str, type[Struct]], file: Path | None) -> dict[str, tuple[object, str]]:
    path = file or Path("keyfold.toml")
    if not path.exists():
        if file is not None:
            raise SettingsWrong(f"there is no file {file}")
        return {}
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise SettingsWrong(f"{path} cannot be read: {error}") from None
    given: dict[str, tuple[object, str]] = {}
    for section, values in document.items():
        if section not in kinds:
            raise SettingsWrong(f"unknown section [{section}]", place=str(path), hint=_known(kinds))
        if not isinstance(values, dict):
            raise SettingsWrong(f"{section} must be a section", place=str(path), hint=f"Write [{section}] above it")
        for name, value in values.items():
            _must_exist(kinds, section, name, str(path))
            given[f"{section}.{name}"] = (value, str(path))
    return given


def _from_environment(kinds: Mapping[str, type[Struct]], environ: Mapping[str, str]) -> dict[str, tuple[object, str]]:
    by_variable = {
        f"KEYFOLD_{section}_{field.name}".upper(): f"{section}.{field.name}"
        for section, kind in kinds.items()
        for field in msgspec.structs.fields(kind)
    }
    given: dict[str, tuple[object, str]] = {}
    for variable, text in environ.items():
        if not variable.startswith("KEYFOLD_") or variable in ENVIRONMENT_ONLY:
            continue
        if variable not in by_variable:
            raise SettingsWrong(
                f"unknown setting {variable}", place="environment", hint="`keyfold settings` lists them"
            )
        name = by_variable[variable]
        given[name] = (_from_text(text), variable)
    return given


# Read by the command line and by tests, not settings of the product.
ENVIRONMENT_ONLY = frozenset(
    f"KEYFOLD_{name}" for name in ("CONFIG", "TOKEN", "URL", "CITUS_URL", "FAULTS", "FAULTS_ROTATION", "FAULTS_SEED")
)


def _from_text(text: str) -> object:
    if text[:1] in "[{" and text:
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError:
            return text
    return text


def _must_exist(kinds: Mapping[str, type[Struct]], section: str, name: str, place: str) -> None:
    names = [field.name for field in msgspec.structs.fields(kinds[section])]
    if name not in names:
        raise SettingsWrong(f"unknown setting {section}.{name}", place=place, hint=f"Known: {', '.join(names)}")


def _known(kinds: Mapping[str, type[Struct]]) -> str:
    return f"Known sections: {', '.join(kinds)}"
