"""The settings of segments: where snapshots lie, what is evaluated over, how large a chunk is, what is held."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from keyfold.core.settings import Section
from keyfold.segments.model import SET_SEGMENTS_MAX


class TableSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table that segments are evaluated over.

    `url` is Parquet files (`users/*.parquet`) or what Ibis connects to (`duckdb:///warehouse.db`), then `name` is the
    table there. With `segment_id` and `version`, the columns so called say which segment and which evaluation a row
    belongs to: its snapshots are read in place.
    """

    url: str
    name: str = ""
    user_id: str = "user_id"
    segment_id: str = ""
    version: str = ""


class SegmentsSettings(Section, frozen=True, kw_only=True):
    topic: Annotated[str, Meta(min_length=1, description="the topic that changed sets go to")] = "cdp-segments-log"
    folder: Annotated[str, Meta(min_length=1, description="where snapshots are kept; all workers see it")] = (
        "keyfold-segments"
    )
    tables: Annotated[dict[str, TableSettings], Meta(description="tables that segments are evaluated over")] = {}  # noqa: RUF012
    engine: Annotated[Literal["duckdb", "spark"], Meta(description="what evaluates over Parquet files")] = "duckdb"
    engine_megabytes_max: Annotated[
        int, Meta(ge=100, le=1_000_000, description="memory of an evaluation; what does not fit goes to disk")
    ] = 1_000
    workers: Annotated[int, Meta(ge=1, le=64, description="segments diffed at once by one process")] = 2
    chunk_users_max: Annotated[
        int, Meta(ge=1, le=100_000, description="most changed users in one transaction of a diff")
    ] = 5_000
    batch_rows: Annotated[
        int, Meta(ge=16, le=10_000_000, description="rows of a snapshot that are held in memory at once")
    ] = 131_072
    segments_max: Annotated[
        int, Meta(ge=1, le=10_000, description="most segments in the set of a user; beyond it the oldest leave")
    ] = SET_SEGMENTS_MAX
    remove_share_max: Annotated[
        float, Meta(ge=0, le=1, description="a diff that removes a larger share of its users is held for approval")
    ] = 0.5
    tries_max: Annotated[int, Meta(ge=1, le=1_000, description="tries of a diff before it counts as failed")] = 5
    stuck_seconds: Annotated[
        int,
        Meta(ge=1, le=30 * 86_400, description="a segment that waits or does not move for so long is shown as stuck"),
    ] = 1_800
    upload_hours: Annotated[
        int, Meta(ge=1, le=24 * 365, description="an upload that is not finished within this is forgotten")
    ] = 24
    uploads_max: Annotated[
        int, Meta(ge=1, le=1_000, description="most uploads of one segment that are begun and not finished")
    ] = 8
    segments_shown_max: Annotated[int, Meta(ge=1, le=100_000, description="most segments in one answer")] = 1_000
