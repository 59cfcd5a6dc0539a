"""Order statistics as a part of the product. What it stands on is imported when it is first needed."""

from keyfold.core.part import Part, later
from keyfold.orders.settings import OrdersSettings

PART = Part(
    name="orders",
    summary="exact counts of orders per identity and dimensions, each order once",
    settings=OrdersSettings,
    topics=later("keyfold.orders.service.unit:topics"),
    tables=later("keyfold.orders.service.unit:tables"),
    routes=later("keyfold.orders.routes:routes"),
    consumers=later("keyfold.orders.worker:consumers"),
    loops=later("keyfold.orders.worker:loops"),
    commands="keyfold.orders.commands:app",
)
