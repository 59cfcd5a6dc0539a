"""What Prometheus sees of profiles; numbers only, never whose."""

from collections.abc import Mapping, Sequence

from prometheus_client import Counter

from keyfold.core.metrics import REGISTRY
from keyfold.counters.catalog import Catalog

EVENTS = Counter(
    "keyfold_profile_events", "Events of logs, by what became of them", ["log", "status"], registry=REGISTRY
)
FOLDS = Counter("keyfold_profile_updates", "Updates folded into profiles", registry=REGISTRY)
DROPPED = Counter(
    "keyfold_profile_updates_dropped", "Updates older than the expiry of their counter", registry=REGISTRY
)
HELD = Counter("keyfold_held_updates", "Owned updates held back", registry=REGISTRY)
RELEASED = Counter(
    "keyfold_held_updates_released", "Held-back updates that a second source confirmed", registry=REGISTRY
)
DELETED = Counter("keyfold_held_updates_deleted", "Held-back updates that nobody confirmed in time", registry=REGISTRY)
PUSHED_OUT = Counter(
    "keyfold_held_updates_pushed_out", "Held-back updates pushed out by MaxDelayedRecords", registry=REGISTRY
)
LOST_WEIGHT = Counter(
    "keyfold_counter_lost_weight",
    "Decayed weight lost to MaxRecords and ExpireDays",
    ["counter", "to"],
    registry=REGISTRY,
)
PROFILES_EXPIRED = Counter("keyfold_profiles_expired", "Profiles deleted because all had expired", registry=REGISTRY)


def count_lost(catalog: Catalog, bill: Mapping[int, Sequence[float]]) -> None:
    """Add an eviction bill: of each counter, what it lost to MaxRecords and to ExpireDays."""
    for counter_id, (to_records_max, to_expire_days) in bill.items():
        name = catalog[counter_id].name
        # A sum of negative values would turn the counter back, which a counter must not.
        LOST_WEIGHT.labels(name, "MaxRecords").inc(abs(to_records_max))
        LOST_WEIGHT.labels(name, "ExpireDays").inc(abs(to_expire_days))
