"""What listings tell of themselves."""

from prometheus_client import Counter, Gauge

from keyfold.core.metrics import REGISTRY

CHANGES = Counter("keyfold_listings_changes", "Changes of offers that were stored", registry=REGISTRY)
MOVED = Counter("keyfold_listings_moved", "Offers that the scheduler moved", ["to"], registry=REGISTRY)
DRIFT = Gauge(
    "keyfold_listings_drift", "By how much counts differed from the rows in the last round", ["what"], registry=REGISTRY
)
REPAIRED = Counter("keyfold_listings_repaired", "Counts that were repaired", ["what"], registry=REGISTRY)
OVERDUE = Gauge("keyfold_listings_overdue_seconds", "For how long the oldest offer has been due", registry=REGISTRY)
FEEDS = Gauge("keyfold_listings_feeds", "Feeds by stage", ["stage"], registry=REGISTRY)
ANSWERS = Counter("keyfold_listings_photo_answers", "Answers of the photo service", ["result"], registry=REGISTRY)
OPINIONS = Counter("keyfold_listings_opinions", "Opinions of moderation", ["result"], registry=REGISTRY)
