"""The loops of the tally: one consumer."""

from keyfold.core.consumer import Consumer
from keyfold.core.context import Context
from keyfold.tally import service


def consumers(context: Context) -> list[Consumer]:
    return [
        Consumer(
            name="tally",
            topic=service.EVENTS.name,
            apply=lambda tx, records: service.apply_events(tx, context.topics, records),
            replayable=True,
        )
    ]
