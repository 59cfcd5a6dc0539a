"""A small run of the real thing on one store: events put, relayed, applied to tallies, and their changes relayed.

Run as a program it is a nursery: imported once, it forks a child for every run, so that a run that will be killed
costs milliseconds and not a second of imports. The tests talk to it through `Nursery` in nursery.py.
"""

import contextlib
import ctypes
import os
from collections.abc import Callable
from typing import NoReturn

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from keyfold.core import outbox
from keyfold.core.clock import ManualClock
from keyfold.core.consumer import ConsumerWorker
from keyfold.core.context import Context
from keyfold.core.errors import DataRefused, KeyfoldError
from keyfold.core.relay import Relay
from keyfold.core.settings import Settings, load
from keyfold.core.topics.topic import Message
from keyfold.tally.part import PART
from keyfold.tally.service import CHANGES, EVENTS

PARTITIONS = 2
LEASE_SECONDS = 10
# A page written in this run is copied into the database after so few others that checkpoints happen within it.
CHECKPOINT_PAGES = 24

# Additions of one transaction each; keys stand several times in one batch and in several batches.
BATCHES = (
    (("a", 1), ("b", 10), ("a", 2)),
    (("b", 20), ("c", 100)),
    (("a", 3), ("d", 1000), ("c", 200), ("d", 2000)),
    (("d", 3000), ("a", 4)),
)

PR_SET_PTRACER, ANYBODY = 0x59616D61, -1
FAILED = 1
VOICE = 99  # the descriptor on which runs speak to the tests


class Ack(Struct, frozen=True):
    """What a run says on its way. With `counts` it acknowledges that so much is committed (Ledger.counts)."""

    part: str  # whose turn comes next: "ground" or "tally"
    counts: list[int] | None = None
    refusal: str = ""  # the error that ended it


class Order(Struct, frozen=True):
    """What the nursery is asked to run: on which store, which scenario, from which worker, with which planted bug."""

    url: str
    scenario: str = "tally"  # or the name of a part
    worker: str = "w1"
    plant: str = ""


Say = Callable[[Ack], None]


def settings(url: str) -> Settings:
    options = {"store.url": url, "topics.partitions": PARTITIONS, "leases.lease_seconds": LEASE_SECONDS}
    return load(environ={}, options=options)


def messages() -> list[list[Message]]:
    """The batches as messages; a key's versions grow by one."""
    versions: dict[str, int] = {}
    made = []
    for batch in BATCHES:
        made.append(list[Message]())
        for key, add in batch:
            versions[key] = versions.get(key, 0) + 1
            payload = b'{"add":%d}' % add
            made[-1].append(Message(key=key, version=versions[key], event_time_us=0, schema="event/1", payload=payload))
    return made


def payloads() -> dict[str, list[bytes]]:
    """The payloads of all events of each key, in order: what the ledger must hold at the end."""
    by_key: dict[str, list[bytes]] = {}
    for batch in messages():
        for message in batch:
            by_key.setdefault(message.key, []).append(message.payload)
    return by_key


def opened(url: str, clock: ManualClock) -> contextlib.closing[Context]:
    return contextlib.closing(Context.open(settings(url), [PART], clock=clock))


class Worker:
    """Everything one process does for the tally, each step by hand."""

    def __init__(self, context: Context, name: str) -> None:
        self.context = context
        self.events = Relay(context, EVENTS.name, name)
        (consumer,) = PART.consumers(context) if PART.consumers else ()
        self.tally = ConsumerWorker(context, consumer, name)
        self.changes = Relay(context, CHANGES.name, name)

    def put(self, batch: list[Message]) -> None:
        """Put a batch that an earlier run may have put; the same id is refused, and with it the whole batch."""
        topics = self.context.topics
        with contextlib.suppress(DataRefused):
            self.context.store.transact(lambda tx: outbox.put(tx, topics, EVENTS.name, batch), name="put")

    def run_dry(self) -> None:
        """Step until a whole round has nothing left to do."""
        while self.events.step() | self.tally.step() | self.changes.step():
            pass

    def stop(self) -> None:
        for each in (self.events, self.tally, self.changes):
            each.stop()


def run(order: Order, say: Say) -> None:
    """Do the whole scenario, stopping and starting in the middle, and acknowledge each step that has committed."""
    batches = messages()
    half = len(batches) // 2
    clock = ManualClock()
    for part_of_run in (batches[:half], batches[half:]):
        with opened(order.url, clock) as context:
            worker = Worker(context, order.worker)
            for batch in part_of_run:
                say(Ack("ground"))
                worker.put(batch)
                say(Ack("ground", counts(context)))
                worker.events.step()
                say(Ack("tally", counts(context)))
                worker.tally.step()
                say(Ack("ground", counts(context)))
                worker.changes.step()
                say(Ack("ground", counts(context)))
            worker.stop()


def finish(url: str) -> None:
    """Start anew after a crash, when the dead worker's leases have passed, put what is missing, and run dry."""
    clock = ManualClock()
    clock.advance(10 * LEASE_SECONDS)
    with opened(url, clock) as context:
        worker = Worker(context, "w2")
        for batch in messages():
            worker.put(batch)
        worker.run_dry()


def counts(context: Context) -> list[int]:
    from tests.faults.ledger import Ledger

    return Ledger.of(context.store).counts()


def _checkpoint_often(connection: object, _: object) -> None:
    connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")  # type: ignore[attr-defined]


def _be_child(order: Order) -> None:
    """Wait until whoever wants to trace this process does, then run."""
    # Where only ancestors may trace (Yama), let anybody: strace is a sibling.
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, ANYBODY, 0, 0, 0)
    if order.plant:
        from tests.faults import (
            listing_plants,
            numbering_plants,
            order_plants,
            plants,
            profile_plants,
            segment_plants,
        )

        # They stand among the others.
        assert all((listing_plants, numbering_plants, order_plants, profile_plants, segment_plants))
        plants.named(order.plant).plant()
    _say(b"pid %d" % os.getpid())
    _read_line()
    from tests.faults import listing_scenario, numbering_scenario, order_scenario, profile_scenario, segment_scenario

    plays = {
        "tally": run,
        "profiles": profile_scenario.run,
        "orders": order_scenario.run,
        "segments": segment_scenario.run,
        "numbering": numbering_scenario.run,
        "listings": listing_scenario.run,
    }
    plays[order.scenario](order, lambda ack: _say(b"ack " + msgspec.json.encode(ack)))


def _live(order: Order) -> NoReturn:
    """Be the child and nothing after it; a failure that we name is an end like another."""
    status = FAILED
    try:
        _be_child(order)
        status = 0
    except KeyfoldError as error:
        _say(b"ack " + msgspec.json.encode(Ack("ground", refusal=error.slug)))
    finally:
        os._exit(status)


def _say(line: bytes) -> None:
    """One write a line, so that a process that dies has said it whole or not at all."""
    os.write(VOICE, line + b"\n")


def _read_line() -> bytes:
    """One line of standard input and not a byte more: the rest is for another process."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line


def _nurse() -> None:
    # Opened in a child, these would be imported there, between the counted calls.
    import keyfold.core.store.sqlite
    from tests.faults import listing_scenario, numbering_scenario, order_scenario, profile_scenario, segment_scenario

    assert all((keyfold.core.store.sqlite, listing_scenario, order_scenario))
    profile_scenario.warm_up()
    segment_scenario.warm_up()
    numbering_scenario.warm_up()
    os.dup2(1, VOICE)
    os.dup2(2, 1)  # logs must not be taken for acknowledgements
    sa.event.listen(sa.Engine, "connect", _checkpoint_often)
    while line := _read_line():
        order = msgspec.json.decode(line, type=Order)
        child = os.fork()
        if child == 0:
            _live(order)
        _, status = os.waitpid(child, 0)
        _say(b"end %d" % os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    _nurse()
