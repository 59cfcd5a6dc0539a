"""The loops of profiles: a consumer for each log and one for segment sets, the sweep, the weights of rare keys."""

from collections.abc import Sequence
from typing import Any

import msgspec

from keyfold.core.clock import SECOND_US
from keyfold.core.consumer import Consumer
from keyfold.core.context import Context
from keyfold.core.deadletters import Refusal
from keyfold.core.errors import KeyfoldError
from keyfold.core.loops import Loop
from keyfold.core.store import Transaction
from keyfold.core.topics.topic import Record, payloads_of
from keyfold.profiles.handlers import Event
from keyfold.profiles.model import ProfileKey, event_of, events_of
from keyfold.profiles.service import sweeping, weighing
from keyfold.profiles.service.counting import not_counted
from keyfold.profiles.service.folding import warm
from keyfold.profiles.service.product import Product, opened
from keyfold.profiles.service.segments import apply_segments

# A profile that has expired is invisible already; walking all of them once in a while frees the space.
REST_SECONDS = 300.0


def consumer_name(log: str) -> str:
    return f"profiles-{log}"


def consumers(context: Context) -> list[Consumer]:
    product = opened(context)
    if not product.is_set_up:
        return []
    warm(product)
    logs = [_log_consumer(product, log) for log in product.handlers.logs]
    # A set is whole, and goes by its version: nothing needs to wait behind one that cannot be read.
    segments = Consumer(
        name="profiles-segments",
        topic=product.settings.segments_topic,
        apply=lambda tx, records: apply_segments(tx, product, records),
        ordered=False,
        replayable=True,
    )
    return [*logs, segments]


def _log_consumer(product: Product, log: str) -> Consumer:
    marked = log not in product.settings.by_position

    def apply(tx: Transaction, records: Sequence[Record]) -> list[Refusal]:
        return apply_events(tx, product, log, records, marked=marked)

    # The fold does not mind the order of events, so nothing needs to wait behind a poison message.
    return Consumer(
        name=consumer_name(log),
        topic=product.topic_of(log),
        apply=apply,
        ordered=False,
        replayable=marked,
        payload_only=True,
    )


_decoded = msgspec.json.Decoder(dict[str, Any]).decode
UNREADABLE = (KeyfoldError, msgspec.DecodeError, UnicodeError, RecursionError)


def apply_events(
    tx: Transaction, product: Product, log: str, records: Sequence[Record], *, marked: bool
) -> list[Refusal]:
    """Count the events of a log; those that cannot be counted are returned with the reason."""
    refused: list[Refusal] = []
    try:
        events = [(log, event) for event in events_of([_decoded(payload) for payload in payloads_of(records)])]
    except UNREADABLE:
        events, records, refused = _readable(log, records)
    for number, verdict in sorted(not_counted(tx, product, events, marked=marked).items()):
        if verdict.status != "duplicate":
            refused.append(Refusal(records[number], f"{verdict.status}: {verdict.reason}"))
    return refused


def _readable(log: str, records: Sequence[Record]) -> tuple[list[tuple[str, Event]], list[Record], list[Refusal]]:
    """The events that can be read, their records, and why the others cannot."""
    events: list[tuple[str, Event]] = []
    read: list[Record] = []
    refused: list[Refusal] = []
    for record in records:
        try:
            events.append((log, event_of(_decoded(record.message.payload))))
            read.append(record)
        except UNREADABLE as error:
            refused.append(Refusal(record, f"{type(error).__name__}: {error}"))
    return events, read, refused


def loops(context: Context) -> list[Loop]:
    product = opened(context)
    if not product.is_set_up:
        return []
    sweep, weigh = Sweep(context, product), weighing.Weighing(context, product)
    return [
        Loop(name="profiles sweep", step=sweep.step, idle_seconds=5.0, idle_seconds_max=60.0),
        Loop(name="profiles weights", step=weigh.step, idle_seconds=60.0, idle_seconds_max=600.0),
    ]


class Sweep:
    """Deletes what has outlived its time, in bounded steps; several may run at once."""

    def __init__(self, context: Context, product: Product) -> None:
        self._store = context.store
        self._product = product
        self._rows_max = context.limits.purge_rows_max
        self._after: ProfileKey = ("", "")
        self._rested_at_us = -(2**62)
        # Where the walk over the marks of a log is; it begins anew whenever the watermark has moved.
        self._marks: dict[str, str] = dict.fromkeys(product.handlers.logs, "")

    def step(self) -> bool:
        product, rows_max = self._product, self._rows_max
        moved = self._store.transact(lambda tx: sweeping.move_watermarks(tx, product), name="watermarks")
        self._marks |= dict.fromkeys(moved, "")
        deleted = self._store.transact(
            lambda tx: sweeping.delete_unconfirmed(tx, product, rows_max), name="unconfirmed"
        )
        more = [self._purged(), self._walked(), deleted >= rows_max]
        return any(more)

    def _purged(self) -> bool:
        """Look at the next marks of one log that has some to look at; whether there are more."""
        if not self._marks:
            return False
        log, after = next(iter(self._marks.items()))
        reached = self._store.transact(
            lambda tx: sweeping.purge_marks(tx, log, after, self._rows_max), name="purge marks"
        )
        if reached is None:
            del self._marks[log]
        else:
            self._marks[log] = reached
        return bool(self._marks)

    def _walked(self) -> bool:
        """Look at the next profiles of a walk over all; whether it goes on."""

        def work(tx: Transaction) -> tuple[sweeping.Step, int] | None:
            if tx.now_us - self._rested_at_us < REST_SECONDS * SECOND_US:
                return None
            return sweeping.delete_expired(tx, self._product, self._after, min(self._rows_max, 1_000)), tx.now_us

        walked = self._store.transact(work, name="sweep profiles")
        if walked is None:
            return False
        step, now_us = walked
        self._after = step.after or ("", "")
        self._rested_at_us = self._rested_at_us if step.after else now_us
        return step.after is not None
