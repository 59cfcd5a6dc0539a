"""What Prometheus sees of profiles; numbers only, never whose."""

from prometheus_client import Counter

from keyfold.core.metrics import REGISTRY

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
