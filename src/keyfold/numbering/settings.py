"""The settings of numbering: types, sharding schemes, clusters, and how long things may take."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, TypeVar

from msgspec import Meta, Struct, field

from keyfold.core.errors import BadInput
from keyfold.core.settings import Section
from keyfold.numbering.model import VERSION_PART_MAX
from keyfold.numbering.sharding import SHARDS_MAX, By, Scheme

T = TypeVar("T")


class SchemeSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sharding scheme. A change of it must have a new number: the old one is part of published versions."""

    by: By = "offer"
    shards: Annotated[int, Meta(ge=1, le=SHARDS_MAX)] = 8


class TypeSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A type of states: `number` is the T of its versions."""

    number: Annotated[int, Meta(ge=0, le=VERSION_PART_MAX)]
    scheme: Annotated[int, Meta(ge=0, le=VERSION_PART_MAX)] = 0
    offers: str = ""  # Parquet files of this generation's offers; empty: said with each run, or built from the topic
    shops: str = ""


SCHEMES: Mapping[str, SchemeSettings] = {
    "0": SchemeSettings(by="offer", shards=8),
    "1": SchemeSettings(by="business", shards=8),
    "2": SchemeSettings(by="shop_tier", shards=8),
}


class NumberingSettings(Section, frozen=True, kw_only=True):
    types: Annotated[dict[str, TypeSettings], Meta(description="types of states, by name")] = field(
        default_factory=lambda: {"main": TypeSettings(number=1)}
    )
    schemes: Annotated[dict[str, SchemeSettings], Meta(description="sharding schemes, by number")] = field(
        default_factory=lambda: dict(SCHEMES)
    )
    clusters: Annotated[
        dict[str, str], Meta(description="data centres: the folder or URL of each, where states are kept")
    ] = field(default_factory=lambda: {"home": "keyfold-numbering"})
    copies_min: Annotated[
        int,
        Meta(ge=1, le=16, description="clusters that must hold a state before it is published, if there are as many"),
    ] = 2
    ttl_runs: Annotated[
        int, Meta(ge=0, le=1_000_000, description="a key absent for more published runs loses its place")
    ] = 10
    rebuild_ratio: Annotated[
        float, Meta(ge=1, le=1_000_000, description="a shard that reaches beyond so many times its input is compacted")
    ] = 1.5
    input_share_min: Annotated[
        float, Meta(ge=0, le=1, description="an input with a smaller share of the last run's offers is refused")
    ] = 0.1
    engine: Annotated[
        Literal["duckdb", "spark"],
        Meta(description="what runs are computed by; Spark reads its own settings from SPARK_CONF_DIR"),
    ] = "duckdb"
    engine_megabytes_max: Annotated[
        int, Meta(ge=100, le=10_000_000, description="memory of a run; what does not fit goes to disk")
    ] = 8_000
    scratch: Annotated[
        str, Meta(description="where a run puts what does not fit, and states before they go to a remote cluster")
    ] = ""
    media: Annotated[
        dict[str, str], Meta(description="what --output-primary-medium may name: folders; empty: the path as it is")
    ] = field(default_factory=lambda: {"ssd_blobs": ""})
    retry_seconds: Annotated[
        int, Meta(ge=1, le=86_400, description="a master that was refused the lock asks again after so long")
    ] = 30
    run_seconds_max: Annotated[
        int, Meta(ge=1, le=7 * 86_400, description="a master that holds the lock for longer loses it")
    ] = 6 * 3_600
    copy_seconds_max: Annotated[
        int, Meta(ge=1, le=86_400, description="longest one copy of a state to a cluster may take")
    ] = 3_600
    copy_tries_max: Annotated[int, Meta(ge=1, le=100, description="tries of one copy of a state")] = 3
    states_kept: Annotated[int, Meta(ge=1, le=1_000, description="newest states of a type that are kept")] = 5
    rebuilds_kept: Annotated[
        int, Meta(ge=0, le=1_000, description="of so many newest rebuilds the last state is kept")
    ] = 2
    grace_hours: Annotated[
        int, Meta(ge=0, le=24 * 365, description="files of a dropped state are deleted after so long")
    ] = 24
    history_max: Annotated[int, Meta(ge=10, le=500, description="states that the history of a type tells of")] = 200
    is_indexed: Annotated[bool, Meta(description="masters build the look-up index of what they publish")] = True
    exceptions_max: Annotated[
        int, Meta(ge=1, le=10_000_000, description="most reassigned places that one answer lists")
    ] = 100_000
    offers_topic: Annotated[str, Meta(description="the topic of exported offers; empty: none is read")] = ""
    bytes_per_place: Annotated[
        int, Meta(ge=1, le=1_000_000, description="what a place costs in the index, for plans")
    ] = 64

    def __post_init__(self) -> None:
        if twice := _twice([each.number for each in self.types.values()]):
            raise ValueError(f"two types have the number {twice[0]}: their versions could not be told apart")
        if same := _twice([root.rstrip("/") for root in self.clusters.values()]):
            raise ValueError(f"two clusters are the one folder {same[0]}: a copy there is no second copy")


def _twice(values: Iterable[T]) -> list[T]:
    return [value for value, times in Counter(values).items() if times > 1]


def type_named(settings: NumberingSettings, name: str) -> TypeSettings:
    if name not in settings.types:
        raise BadInput(f"there is no type {name[:100]!r}", hint=f"numbering.types has {', '.join(settings.types)}")
    return settings.types[name]


def type_numbered(settings: NumberingSettings, number: int) -> str:
    """The name of the type that has a number: no two have the same."""
    for name, each in settings.types.items():
        if each.number == number:
            return name
    known = ", ".join(f"{each.number} ({name})" for name, each in settings.types.items())
    raise BadInput(f"no type has the number {number}", hint=f"numbering.types has {known}")


def scheme_numbered(settings: NumberingSettings, number: int) -> Scheme:
    found = settings.schemes.get(str(number))
    if found is None:
        raise BadInput(
            f"there is no sharding scheme {number}", hint=f"numbering.schemes has {', '.join(settings.schemes)}"
        )
    return Scheme(number=number, by=found.by, shards=found.shards)
