"""What segments tell of themselves."""

from prometheus_client import Counter, Gauge

from keyfold.core.metrics import REGISTRY

STAGES = Gauge("keyfold_segments", "Segments by the stage they are in", ["stage"], registry=REGISTRY)
OLDEST_SECONDS = Gauge(
    "keyfold_segments_oldest_seconds", "Age of the segment that is in a stage longest", ["stage"], registry=REGISTRY
)
STUCK = Gauge("keyfold_segments_stuck", "Segments that wait or do not move for too long", registry=REGISTRY)
ROWS = Counter("keyfold_segment_rows", "Rows of snapshots read by diffs", ["phase"], registry=REGISTRY)
USERS = Counter(
    "keyfold_segment_users_changed", "Users whose set changed, by what happened", ["what"], registry=REGISTRY
)
CHUNKS = Counter("keyfold_segment_chunks", "Chunks of diffs committed", registry=REGISTRY)
DIFFS = Counter("keyfold_segment_diffs", "Diffs by how they ended", ["outcome"], registry=REGISTRY)
EVALUATIONS = Counter("keyfold_segment_evaluations", "Evaluations by how they ended", ["outcome"], registry=REGISTRY)
