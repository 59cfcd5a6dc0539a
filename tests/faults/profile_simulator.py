"""A seeded simulator of profiles: workers of a log, requests, sweeps and the relay, stopped before and after commits.

Events come twice, in any order, by topic and by request; some say another thing under a known id, some cannot be kept.
Owners confirm each other or do not; the clock jumps over the periods, and back. A `Book` is told of every commit.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa

from keyfold.core.clock import SECOND_US, ManualClock
from keyfold.core.relay import Relay
from keyfold.core.settings import Settings, load
from keyfold.core.store import Store, Transaction
from keyfold.core.topics.topic import Message
from keyfold.profiles import handlers, worker
from keyfold.profiles.handlers import Event, Handlers
from keyfold.profiles.model import Verdict, event_of
from keyfold.profiles.part import PART
from keyfold.profiles.service import counting
from keyfold.profiles.service.product import PROFILES_TOPIC, Product, section
from keyfold.profiles.settings import ProfilesSettings
from keyfold.profiles.tables import HELD_UPDATES
from keyfold.profiles.tables import PROFILES as PROFILE_ROWS
from keyfold.profiles.worker import Sweep
from tests.faults.log_stage import LogStage
from tests.faults.profile_ledger import LOG, Book, Fields, Found
from tests.faults.scenario import LEASE_SECONDS
from tests.profiles import DAY, EXAMPLE, HANDLERS, OFFER, catalog

EXACT = 602  # an exact sum beside OFFER
MERGE_DAYS, DELETE_DAYS, EVENT_DAYS, EXPIRE_DAYS = 2, 5, 7, 60
TOPIC = f"{LOG}-log"
PARTITIONS = LogStage.partitions
# Further than future_seconds_max: see the first of test_profiles_found.py.
BACK_SECONDS_MAX = 4 * DAY
TOO_MUCH = [EXACT, 9, 2**63]  # twice is more than 64 bits
PROFILES = ("u0", "u1", "u2")
LEASING = ("log", "relay")
OWNERS = ("a.example", "b.example")


class ProfileSimulation(LogStage[Fields]):
    """Profiles of three people, of whom one is busy."""

    steps = 110
    look_every_steps = 40
    test = "test_profile_simulator.py"
    part = PART
    log_topic = TOPIC
    relayed_topic = PROFILES_TOPIC.name
    outside = (TOPIC, PROFILES_TOPIC.name)
    sent_max, batches_max, sweeper_rests = 10, 4, 3

    book: Book

    def __init__(self, seed: int, template: Path, directory: Path) -> None:
        super().__init__(seed, template, directory, settings, ManualClock())
        self._product = Product(section(self._settings), catalog(), _handlers(), self._topics)
        self._consumer = worker._log_consumer(self._product, LOG)
        self.book = Book(self._product)
        self._made: list[Fields] = []

    # The run ----------------------------------------------------------------------------------------------------------

    def _kinds(self) -> Sequence[str]:
        return ("log", "log", "asker0", "asker1", "sender", "sweeper", "relay", "operator")

    def _own_bodies(self) -> Mapping[str, Callable[[], None]]:
        return {"operator": self._operate}

    def _one_step(self) -> None:
        draw = self.chance.random()
        if draw < 0.04:
            self._crash(self.chance.choice(self._actors))
        elif draw < 0.06:
            self._sleep(self.chance.choice([actor for actor in self._actors if actor.kind in LEASING]))
        elif draw < 0.11:
            self._move_clock(self.chance.choice((1, DAY, DAY, 3 * DAY, 6 * DAY)))
        elif draw < 0.113:
            self._move_clock((EXPIRE_DAYS + 1) * DAY)
        elif draw < 0.123 and self._back_seconds < BACK_SECONDS_MAX:
            self._move_clock(-BACK_SECONDS_MAX / 2)
        elif draw < 0.14:
            self._rewind()
        else:
            self._anybodys_turn()

    def _run_dry(self) -> None:
        paused = self._all_but_paused_die("log")
        self._send_and_ask_the_rest(self._caller())
        relay_last = Relay(self._context(), PROFILES_TOPIC.name, "last")
        self._tame(relay_last)
        self._read_to_the_end(paused)
        self._age((DELETE_DAYS + 1) * DAY)
        if left := self._store.read(lambda tx: tx.execute(sa.select(HELD_UPDATES)).all()):
            self.book.broken.append(f"C4: {left[0]} outlived its period")
        self._age((EXPIRE_DAYS + 1) * DAY)
        self._asking["asker0"] = [self._comes_back(profile) for profile in PROFILES]
        self._ask("asker0", self._caller())
        while relay_last.step():
            pass

    def _age(self, seconds: float) -> None:
        self._move_clock(seconds)
        self._sweep().step()

    def _sweep(self) -> Sweep:
        return Sweep(self._context(), self._product)

    def _comes_back(self, profile: str) -> dict[str, Any]:
        """An event of a profile of which everything has expired."""
        now = self._clock.now_us() // SECOND_US
        return {"event_id": f"again {profile}", "profile_id": profile, "time": now, "updates": [[OFFER, 1]]}

    # The actors -------------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        """Put an event in the topic, where a broker might have put it anywhere; poison now and then."""
        poisoned = self.faulty and self.chance.random() < 0.05
        fields = {"event_id": f"poison{self._sent}"} if poisoned else self._item()
        message = Message(
            key=str(fields.get("profile_id")),
            version=self._sent,
            event_time_us=0,
            schema="event/1",
            payload=msgspec.json.encode(fields),
        )
        self._outside[TOPIC].logs[self.chance.randrange(PARTITIONS)].append(message)
        self._sent += 1

    def _caller(self) -> Callable[[Sequence[Fields]], Mapping[str, str]]:
        def count(batch: Sequence[Fields]) -> Mapping[str, str]:
            events = [(LOG, event_of(fields)) for fields in batch]
            verdicts = self._store.transact(
                lambda tx: counting.count_events(tx, self._product, events, marked=True), name="count"
            )
            said = zip(events, verdicts, strict=True)
            return {event.id: verdict.status for (_, event), verdict in said if verdict.status == "counted"}

        return count

    def _operate(self) -> None:
        while True:
            for _ in range(3):
                self.pause("looking")
            self._redrive()

    def _item(self) -> Fields:
        """An event: a new one, one that came before, or another thing under an id that came before."""
        chance, made = self.chance, self._made
        draw = chance.random()
        if made and draw < 0.3:
            return chance.choice(made)
        if made and draw < 0.36:
            return {**chance.choice(made), "said": "otherwise"}
        # Whole days, so that sources are also exactly a period apart.
        time = self._clock.now_us() // SECOND_US // DAY * DAY - chance.choice((0, 0, 0, 1, 2, 3)) * DAY
        updates = self._updates()
        fields = {
            "event_id": f"e{len(made)}",
            "profile_id": PROFILES[0] if TOO_MUCH in updates else chance.choice((PROFILES[0], *PROFILES)),
            "time": time,
            "updates": updates,
        }
        made.append(fields)
        return fields

    def _updates(self) -> list[list[Any]]:
        chance = self.chance
        draw = chance.random()
        if draw < 0.08:
            return [[OFFER, 5], TOO_MUCH]
        if draw < 0.12:
            return [[OFFER, 5], [*TOO_MUCH[:2], chance.choice((1, 2**63, 2**64 - 1)), chance.choice(OWNERS)]]
        if draw < 0.18:
            return [[OFFER, 10 + key] for key in chance.sample(range(40), 20)]  # more than MaxRecords
        return [
            [chance.choice((OFFER, EXACT)), chance.randrange(3), chance.randint(1, 9), chance.choice((None, *OWNERS))]
            for _ in range(chance.choice((1, 1, 2)))
        ]

    # What is looked at ------------------------------------------------------------------------------------------------

    def _broken_besides(self, found: Found, at_the_end: bool) -> list[str]:
        broken = self._topic(found, at_the_end=at_the_end)
        if at_the_end:
            settled = {*self.book.counted, *self.book.refused}
            lost = [each["event_id"] for each in self._made if each["event_id"] not in settled]
            broken += [f"X1: {each} was sent and never counted" for each in lost]
        return broken

    def _topic(self, found: Found, *, at_the_end: bool) -> list[str]:
        """G2, G3: the topic has what was committed and nothing else, in order; at the end all of it."""
        committed = {
            (f"user/{profile}", message.version): message.payload
            for profile, messages in found.messages.items()
            for message in messages
        }
        broken = []
        highest: dict[str, int] = defaultdict(int)
        first: set[tuple[str, int]] = set()
        for log in self._outside[PROFILES_TOPIC.name].entries().values():
            for entry in log:
                if committed.get((entry.key, entry.version)) != entry.payload:
                    broken.append(f"G2: the topic has {entry.key} {entry.version}, which nobody committed")
                if (entry.key, entry.version) not in first and entry.version < highest[entry.key]:
                    broken.append(f"G3: the topic has {entry.key} {entry.version} after {highest[entry.key]}")
                first.add((entry.key, entry.version))
                highest[entry.key] = max(highest[entry.key], entry.version)
        if at_the_end:
            broken += [f"G2: {each} never reached the topic" for each in committed if each not in first]
        return broken

    def _spies(self) -> contextlib.AbstractContextManager[None]:
        """Hear what is said of every event."""
        not_counted = counting.not_counted

        def watch_count(
            tx: Transaction, product: Product, events: Sequence[tuple[str, Event]], *, marked: bool
        ) -> dict[int, Verdict]:
            others = not_counted(tx, product, events, marked=marked)
            said: list[tuple[Fields, str]] = [(event.fields, "counted") for _, event in events]
            for number, verdict in others.items():
                said[number] = (events[number][1].fields, verdict.status)
            self._said.append((tx, said))
            return others

        return self._heard([(counting, "not_counted", watch_count), (worker, "not_counted", watch_count)])

    def _committed(self, name: str, tx: Transaction, result: object) -> None:
        super()._committed(name, tx, result)
        if name == "watermarks":
            self.book.move_watermark(tx.now_us)
        elif name == "unconfirmed":
            self.book.sweep(tx.now_us)
        elif name == "sweep profiles":
            public = sa.select(PROFILE_ROWS.c.profile_id).where(PROFILE_ROWS.c.public_version > 0)
            left = Store.read(self._store, lambda tx: tx.execute(public).scalars().all())
            self.book.keep_only(left, tx.now_us)


def settings(url: str) -> Settings:
    options = {
        "store.url": url,
        "topics.partitions": PARTITIONS,
        "leases.lease_seconds": LEASE_SECONDS,
        "profiles.catalog": str(EXAMPLE),
        "profiles.handlers": str(HANDLERS),
        "profiles.merge_days": MERGE_DAYS,
        "profiles.delete_days": DELETE_DAYS,
        "profiles.event_days": EVENT_DAYS,
        "profiles.kernel": "numpy",
    }
    return load(parts={"profiles": ProfilesSettings}, environ={}, options=options)  # type: ignore[arg-type]


@cache
def _handlers() -> Handlers:
    """Those of the one log, so that a sweep has no others to look at."""
    return Handlers(handlers.load(str(HANDLERS)).by_log[LOG])
