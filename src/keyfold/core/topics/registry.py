"""The topics of the product by name: how many partitions each has, where it is read, where it is published."""

import threading
from collections.abc import Iterable, Sequence

import sqlalchemy as sa

from keyfold.core.errors import NotFound, SettingsWrong
from keyfold.core.settings import Settings
from keyfold.core.store import Store, Transaction
from keyfold.core.store.shapes import insert_new
from keyfold.core.tables import TOPICS
from keyfold.core.topics.embedded import EmbeddedTopic
from keyfold.core.topics.topic import Sink, Source, TopicSpec


class Topics:
    """Opened once; a topic's partitions are those of the store, whatever the settings say later."""

    def __init__(self, store: Store, settings: Settings, partitions: dict[str, int]) -> None:
        self._store = store
        self._settings = settings.topics
        self._lease_seconds = settings.leases.lease_seconds
        self._partitions = partitions
        self.limits = settings.limits
        self._opened: list[Source | Sink] = []
        self._listening: dict[str, list[threading.Event]] = {}

    @classmethod
    def open(cls, store: Store, settings: Settings, specs: Sequence[TopicSpec]) -> "Topics":
        wanted = {spec.name: spec.partitions or settings.topics.partitions for spec in specs}
        if settings.topics.kind == "kafka" and not settings.topics.kafka:
            raise SettingsWrong("topics.kind is kafka but topics.kafka is empty", hint="Name the bootstrap servers")
        known = store.read(partitions_known)
        if missing := {name: count for name, count in wanted.items() if name not in known}:
            store.transact(lambda tx: _make(tx, missing, settings.topics.kind), name="make topics")
            known = store.read(partitions_known)
        return cls(store, settings, known)

    @property
    def names(self) -> list[str]:
        return sorted(self._partitions)

    @property
    def embedded(self) -> bool:
        return self._settings.kind == "embedded"

    def partitions(self, name: str) -> int:
        if name not in self._partitions:
            raise NotFound(f"there is no topic {name!r}", hint="`keyfold topics list` shows them")
        return self._partitions[name]

    def listen(self, what: str) -> threading.Event:
        """An event that is set when this process puts to (`pending/TOPIC`) or publishes (`published/TOPIC`) a topic."""
        event = threading.Event()
        self._listening.setdefault(what, []).append(event)
        return event

    def ring(self, what: str) -> None:
        for event in self._listening.get(what, ()):
            event.set()

    def source(self, name: str, *, payload_only: bool = False) -> Source:
        """A reader of the topic, for one thread; with `payload_only` it may leave the rest of a message unread."""
        partitions = self.partitions(name)
        if self.embedded:
            return EmbeddedTopic(self._store, name, partitions, payload_only=payload_only)
        from keyfold.core.topics.kafka import KafkaSource

        opened = KafkaSource(self._settings.kafka, name, partitions, self._settings.kafka_options)
        self._opened.append(opened)
        return opened

    def sink(self, name: str) -> Sink | None:
        """Where the relay sends; None where the store itself is the topic."""
        partitions = self.partitions(name)
        if self.embedded:
            return None
        from keyfold.core.topics.kafka import KafkaSink

        opened = KafkaSink(
            self._settings.kafka,
            name,
            partitions,
            self._settings.kafka_options,
            timeout_seconds=self._lease_seconds / 2,
        )
        self._opened.append(opened)
        return opened

    def close(self) -> None:
        for opened in self._opened:
            opened.close()


def partitions_known(tx: Transaction) -> dict[str, int]:
    rows: Iterable[sa.Row[tuple[str, int]]] = tx.execute(sa.select(TOPICS.c.topic, TOPICS.c.partitions))
    return {row.topic: row.partitions for row in rows}


def _make(tx: Transaction, wanted: dict[str, int], kind: str) -> None:
    insert_new(
        tx,
        TOPICS,
        {
            "topic": list(wanted),
            "partitions": list(wanted.values()),
            "identity": [kind] * len(wanted),
            "made_at_us": [tx.now_us] * len(wanted),
        },
    )
