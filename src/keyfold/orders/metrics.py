"""What order statistics tell of themselves."""

from prometheus_client import Counter

from keyfold.core.metrics import REGISTRY

ORDERS = Counter("keyfold_orders", "Completed orders by what became of them", ["unit", "status"], registry=REGISTRY)
LEFT_TO_HISTORY = Counter(
    "keyfold_orders_left_to_history",
    "Orders created before the start of an identity type that they have",
    ["unit"],
    registry=REGISTRY,
)
CHECKS = Counter("keyfold_order_checks", "First-N checks by their answer", ["unit", "answer"], registry=REGISTRY)
CORRECTED = Counter("keyfold_orders_corrected", "Orders taken back", ["unit"], registry=REGISTRY)
