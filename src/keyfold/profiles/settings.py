"""The settings of profiles: the catalog, the handlers, the windows, and what each client receives."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from keyfold.core.settings import Section

Days = Annotated[int, Meta(ge=1, le=3650)]
DAY_US = 86_400 * 1_000_000


class ClientView(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a client, by the name of its token, receives; what is not set is everything that its token may see."""

    types: list[str] | None = None
    counters: list[int | str] | None = None
    keywords: tuple[Literal["counters", "segments"], ...] = ("counters", "segments")
    restrictions: tuple[str, ...] = ()  # the usage restrictions that it has a grant for
    legacy: bool = False


class ProfilesSettings(Section, frozen=True, kw_only=True):
    catalog: Annotated[str, Meta(description="the catalog of counters: a .proto file or its descriptor set")] = ""
    handlers: Annotated[str, Meta(description="where the handlers are: a module, or a file ending in .py")] = ""
    topics: Annotated[dict[str, str], Meta(description="the topic of a log where it is not LOG-log")] = {}  # noqa: RUF012
    by_position: Annotated[
        list[str], Meta(description="logs whose events are counted once by position, without a mark an event")
    ] = []  # noqa: RUF012
    event_days: Annotated[Days, Meta(description="how long the mark of an event is kept; older events are late")] = 7
    future_seconds_max: Annotated[
        int, Meta(ge=0, le=10 * 365 * 86_400, description="how far ahead of now the time of an event may be")
    ] = 86_400
    merge_days: Annotated[Days, Meta(description="two sources release each other within this (MergePeriod)")] = 180
    delete_days: Annotated[Days, Meta(description="held-back data is deleted after this (DeletePeriod)")] = 5
    profile_bytes_max: Annotated[
        int, Meta(ge=1_000, le=8_000_000, description="largest body of a profile; what would exceed it is refused")
    ] = 256_000
    read_bytes_max: Annotated[
        int, Meta(ge=1_000_000, le=2**31, description="most bytes of stored profiles that one request may read")
    ] = 32_000_000
    write_bytes_max: Annotated[
        int,
        Meta(ge=1_000_000, le=2**31, description="most bytes of stored profiles that one batch of events may load"),
    ] = 64_000_000
    ids_max: Annotated[int, Meta(ge=1, le=1_000, description="most ids of one person in a read")] = 100
    merged_read_ms: Annotated[
        int,
        Meta(ge=0, le=1_000, description="over HTTP, answers that merge ids leave at multiples of this; 0: at once"),
    ] = 10
    publish: Annotated[bool, Meta(description="publish every changed profile to the topic `profiles`")] = True
    segments_topic: Annotated[str, Meta(description="the topic that segment sets are taken from")] = "cdp-segments-log"
    segments_type: Annotated[str, Meta(description="the type of the profiles that segment sets belong to")] = "user"
    segments_max: Annotated[int, Meta(ge=1, le=10_000, description="most segments kept in a profile")] = 500
    idf_hours: Annotated[int, Meta(ge=1, le=24 * 365, description="how often Idf weights are computed anew")] = 24
    kernel: Annotated[
        Literal["auto", "numpy", "numba"], Meta(description="what folds: NumPy, or Numba where it is installed")
    ] = "auto"
    clients: Annotated[
        dict[str, ClientView], Meta(description="what each client, by the name of its token, receives")
    ] = {}  # noqa: RUF012

    @property
    def merge_seconds(self) -> int:
        return self.merge_days * 86_400

    @property
    def delete_us(self) -> int:
        return self.delete_days * DAY_US
