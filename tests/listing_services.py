"""Small stand-ins of the services around listings: they know nothing but the topics and the shapes of messages."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from keyfold.core import outbox
from keyfold.core.consumer import Consumer, ConsumerWorker
from keyfold.core.context import Context
from keyfold.core.store import Transaction
from keyfold.core.topics.topic import Message, Record


class PhotoService:
    """Reads requests and answers each address: by an image, or by an error."""

    def __init__(self, context: Context, requests: str, answers: str, look: Callable[[str], dict[str, Any]]) -> None:
        self.asked: list[str] = []
        self._topics = context.topics
        self._answers = answers
        self._look = look  # what becomes of an address: {"image": …} or {"error": …}
        self._numbers = itertools.count(1)
        consumer = Consumer(name="photo-service", topic=requests, apply=self._answer, replayable=True)
        self.worker = ConsumerWorker(context, consumer, "photo-service")

    def _answer(self, tx: Transaction, records: Sequence[Record]) -> None:
        messages = []
        for record in records:
            request = msgspec.json.decode(record.message.payload)
            for url in request["urls"]:
                self.asked.append(url)
                answer = {"offer_id": request["offer_id"], "url": url, **self._look(url)}
                messages.append(_message(request["offer_id"], next(self._numbers), answer, "photo-answer/1"))
        outbox.put(tx, self._topics, self._answers, messages)


class Moderation:
    """Sends opinions, each with a version of its own."""

    def __init__(self, context: Context, topic: str) -> None:
        self._context = context
        self._topic = topic
        self._numbers = itertools.count(1)

    def say(self, offer_id: str, *, is_banned: bool, version: int | None = None, reason: str = "") -> None:
        number = next(self._numbers)
        opinion = {
            "offer_id": offer_id,
            "version": number if version is None else version,
            "is_banned": is_banned,
            "reason": reason,
        }
        self.send(offer_id, number, opinion)

    def send(self, key: str, number: int, payload: Any) -> None:
        """Whatever it may be."""
        message = _message(key, number, payload, "opinion/1")
        self._context.store.transact(lambda tx: outbox.put(tx, self._context.topics, self._topic, [message]))


def _message(key: str, version: int, payload: Any, schema: str) -> Message:
    return Message(key=key, version=version, event_time_us=version, schema=schema, payload=msgspec.json.encode(payload))
