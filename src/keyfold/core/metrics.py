"""What Prometheus sees: one name a thing, units last, made once at import."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry()

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_ITEMS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)

REQUESTS = Counter("keyfold_requests", "HTTP requests", ["method", "route", "status"], registry=REGISTRY)
REQUEST_SECONDS = Histogram(
    "keyfold_request_seconds", "Time to answer a request", ["method", "route"], buckets=_SECONDS, registry=REGISTRY
)
RETRIES = Counter("keyfold_transaction_retries", "Transactions that ran again", ["name", "reason"], registry=REGISTRY)
GATHERED_ITEMS = Histogram(
    "keyfold_gathered_items", "Requests in one gathered transaction", ["operation"], buckets=_ITEMS, registry=REGISTRY
)
GATHER_SECONDS = Histogram(
    "keyfold_gather_seconds", "Time of one gathered transaction", ["operation"], buckets=_SECONDS, registry=REGISTRY
)
QUEUE_DEPTH = Gauge("keyfold_queue_depth", "Requests waiting for a transaction", ["operation"], registry=REGISTRY)
OUTBOX_PENDING = Gauge("keyfold_outbox_pending", "Messages not yet published", ["topic"], registry=REGISTRY)
OUTBOX_LAG_SECONDS = Gauge(
    "keyfold_outbox_lag_seconds", "Age of the oldest message not yet published", ["topic"], registry=REGISTRY
)
RELAYED = Counter("keyfold_messages_published", "Messages published", ["topic"], registry=REGISTRY)
CONSUMED = Counter("keyfold_messages_consumed", "Messages applied", ["consumer", "topic"], registry=REGISTRY)
CONSUMER_LAG = Gauge(
    "keyfold_consumer_lag_messages", "Messages published but not applied", ["consumer", "topic"], registry=REGISTRY
)
DEAD_LETTERS = Gauge("keyfold_dead_letters", "Messages set aside", ["consumer", "state"], registry=REGISTRY)
LOOP_FAILURES = Counter("keyfold_loop_failures", "Failed steps of a worker's loop", ["loop"], registry=REGISTRY)
SHARDS_HELD = Gauge("keyfold_shards_held", "Shards this process works on", ["job"], registry=REGISTRY)
