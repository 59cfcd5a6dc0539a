"""What numbering tells of itself."""

from prometheus_client import Counter, Gauge

from keyfold.core.metrics import REGISTRY

RUNS = Counter("keyfold_numbering_runs", "Runs of masters by how they ended", ["type", "outcome"], registry=REGISTRY)
RUN_SECONDS = Gauge(
    "keyfold_numbering_run_seconds", "How long the last published run took", ["type"], registry=REGISTRY
)
GENERATION = Gauge(
    "keyfold_numbering_generation", "Generation of the last published state", ["type"], registry=REGISTRY
)
PLACES = Gauge("keyfold_numbering_places", "Places of the last published state", ["type"], registry=REGISTRY)
HOLES = Gauge(
    "keyfold_numbering_holes", "Places of the last state that no offer of its input has", ["type"], registry=REGISTRY
)
OFFERS = Counter("keyfold_numbering_offers", "Offers taken from the topic", ["what"], registry=REGISTRY)
