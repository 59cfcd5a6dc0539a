"""The loops of a worker process: a relay a topic, the parts' consumers and loops, the janitor."""

import os
import secrets
import socket
from collections.abc import Sequence

from keyfold.core.consumer import Consumer, ConsumerWorker
from keyfold.core.context import Context
from keyfold.core.errors import BadInput
from keyfold.core.janitor import Janitor
from keyfold.core.loops import Loop
from keyfold.core.part import Part
from keyfold.core.relay import Relay


def worker_name() -> str:
    """Unique among workers, and readable to whoever looks at who holds what."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


def loops(context: Context, names: Sequence[str] = ()) -> list[Loop]:
    """The loops of the named parts, or of all; relays and the janitor belong to every worker."""
    worker = worker_name()
    made = [Janitor(context).loop()]
    made.extend(Relay(context, topic, worker).loop() for topic in context.topics.names)
    for part in chosen(context, names):
        made.extend(ConsumerWorker(context, consumer, worker).loop() for consumer in consumers(context, part))
        made.extend(part.loops(context) if part.loops else ())
    return made


def chosen(context: Context, names: Sequence[str]) -> list[Part]:
    known = {part.name: part for part in context.parts}
    if unknown := [name for name in names if name not in known]:
        raise BadInput(f"there is no part {unknown[0]!r}", hint=f"Known: {', '.join(known)}")
    return [part for part in context.parts if not names or part.name in names]


def consumers(context: Context, part: Part) -> Sequence[Consumer]:
    return part.consumers(context) if part.consumers else ()


def consumer_named(context: Context, name: str) -> Consumer:
    every = [consumer for part in context.parts for consumer in consumers(context, part)]
    for consumer in every:
        if consumer.name == name:
            return consumer
    raise BadInput(f"there is no consumer {name!r}", hint=f"Known: {', '.join(each.name for each in every)}")
