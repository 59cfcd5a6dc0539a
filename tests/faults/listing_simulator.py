"""A seeded simulator of listings: schedulers, sellers, moderation, photos, feeds and relays, stopped around commits.

Opinions come twice, late and for offers that nobody has; sellers ask again for what they got no answer to; presets
change under everybody's hands, counts are spoilt and repaired, the clock jumps over every age. A `Book` compares.
"""

import contextlib
import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from keyfold.core import progress
from keyfold.core.clock import SECOND_US, ManualClock
from keyfold.core.consumer import ConsumerWorker
from keyfold.core.errors import Conflict, KeyfoldError
from keyfold.core.relay import Relay
from keyfold.core.settings import Settings, load
from keyfold.core.store import Store, Transaction
from keyfold.core.topics.topic import Message
from keyfold.listings import model, worker
from keyfold.listings.model import Preset, offer_id_of
from keyfold.listings.part import PART
from keyfold.listings.service import drafting, keeping, offers, presets, saving, walking
from keyfold.listings.service.drafting import Filled, Opening, Publishing
from keyfold.listings.service.feeds import applying, reporting, staging, sweeping, tasks
from keyfold.listings.service.keeping import Judged, Opinion
from keyfold.listings.service.listings import Listings
from keyfold.listings.service.offers import Edit, Move
from keyfold.listings.service.repairing import Drift
from keyfold.listings.service.saving import Change, Saved
from keyfold.listings.settings import ListingsSettings
from keyfold.listings.worker import JOB, Scheduler
from tests.faults.listing_ledger import Book, Found, compare_log
from tests.faults.log_stage import DAY, LogStage, Sweep
from tests.faults.scenario import LEASE_SECONDS
from tests.faults.stage import Actor, OutsideTopic, patched
from tests.listings import CAR, car

OFFERS, REQUESTS, ANSWERS, OPINIONS = "offers", "photo-requests", "photo-answers", "moderation-opinions"
SELLERS = ("7", "8", "9")
VISITOR = "visitor"
NOBODYS = "0000000000000000"
URLS = ("https://photos.example.com/1.jpg", "https://photos.example.com/2.jpg")
EXTERNAL_IDS = ("a", "b", "c", "d")
EXPIRE_DAYS, ARCHIVE_DAYS, DRAFT_DAYS = 4, 2, 6
SHARDS = 2
TRANSACTION_SECONDS_MAX = 10
NEW_OFFERS_MAX = 12
FEEDS_MAX = 6
BACK_SECONDS_MAX = DAY / 2
LEASING = ("scheduler", "relay", "log", "photos")
# What a scheduler does, each under its guard.
GUARDED = ("listings ages", "listings scrub", "feed step", "feed set aside")
PRESETS: tuple[dict[str, Preset], ...] = (
    {"all": Preset(number=1), "active": Preset(number=2, statuses=frozenset({"active"}))},
    {"all": Preset(number=1), "active": Preset(number=2, statuses=frozenset({"active", "banned"}))},
    {"photos": Preset(number=3, has_photos=True), "active": Preset(number=2, statuses=frozenset({"active"}))},
)

Wish = Callable[[], None]  # what somebody asks for, and asks again for where there was no answer


class ListingSimulation(LogStage[Opinion]):
    """Three sellers, of whom one has feeds."""

    steps = 600
    look_every_steps = 60
    test = "test_listing_simulator.py"
    part = PART
    log_topic = OPINIONS
    relayed_topic = OFFERS
    outside = (OFFERS, REQUESTS, ANSWERS, OPINIONS)
    sent_max = 25
    batches_max = 0
    sweeper_rests = 3
    book: Book

    def __init__(self, seed: int, template: Path, directory: Path) -> None:
        super().__init__(seed, template, directory, settings, ManualClock())
        for topic in (ANSWERS, OPINIONS):  # what others put there
            self._outside[topic] = self._topics.outside[topic] = OutsideTopic(topic, PART.name, self, losing=0.0)
        self._store.limits = msgspec.structs.replace(
            self._store.limits, transaction_seconds_max=TRANSACTION_SECONDS_MAX, lock_seconds_max=1
        )
        self.book = Book(expire_days=EXPIRE_DAYS, archive_days=ARCHIVE_DAYS, shards=SHARDS)
        ids = random.Random(seed)
        self._new_offer_id = lambda _=None: offer_id_of(ids.randrange(10**15))
        self._listings = Listings.of(self._context())
        Store.transact(self._store, lambda tx: presets.adopt(tx, self._listings.settings))
        first = [Change(None, car(seller, photos=URLS[:1])) for seller in SELLERS for _ in range(2)]
        with patched([(model, "SHARDS", SHARDS), (Listings, "new_offer_id", self._new_offer_id)]):
            Store.transact(self._store, lambda tx: saving.save(tx, self._listings, first))
        self._consumer, self._photos = worker.consumers(self._context())
        self._wishes: dict[str, Wish] = {}
        self._opinions: dict[tuple[str, int], Opinion] = {}
        self._feeds = 0
        self._task_ids = sorted(range(1, FEEDS_MAX + 1), key=lambda number: number + self.chance.uniform(-1, 1))
        self._sending: tuple[str, int, dict[str, bool]] = ("", 0, {})
        self._answered: dict[int, int] = {}  # how far the photo service has read
        self._guarded: list[Transaction] = []

    # The run ----------------------------------------------------------------------------------------------------------

    def _kinds(self) -> Sequence[str]:
        people = ("seller0", "seller1", "feeder", "operator", "sender", "photographer")
        return ("scheduler", "scheduler", "log", "log", "photos", "relay", "relay", "asker", *people)

    def _own_bodies(self) -> Mapping[str, Callable[[], None]]:
        context = self._context()
        return {
            "scheduler": lambda: self._keep_stepping(self._scheduler()),
            "photos": lambda: self._keep_stepping(ConsumerWorker(context, self._photos, f"photos{self._names}")),
            "asker": lambda: self._keep_stepping(Relay(context, REQUESTS, f"asker{self._names}")),
            "seller0": lambda: self._keep_wishing("seller0", self._sellers_wish),
            "seller1": lambda: self._keep_wishing("seller1", self._sellers_wish),
            "feeder": lambda: self._keep_wishing("feeder", self._feeders_wish),
            "operator": self._operate,
            "photographer": self._keep_answering,
        }

    def _one_step(self) -> None:
        draw = self.chance.random()
        if draw < 0.02:
            self._crash(self.chance.choice(self._actors))
        elif draw < 0.03:
            leasing = [actor for actor in self._actors if actor.kind in LEASING]
            self._sleep(self.chance.choice([each for each in leasing if _is_guarded(each)] or leasing))
        elif draw < 0.042:
            self._move_clock(self.chance.choice((40, 40, DAY / 4, DAY, ARCHIVE_DAYS * DAY)))
        elif draw < 0.045 and self._back_seconds < BACK_SECONDS_MAX:
            self._move_clock(-BACK_SECONDS_MAX / 2)
        elif draw < 0.055:
            self._rewind()
        elif draw < 0.4 and (awake := [each for each in self._actors if self._is_awake_scheduler(each)]):
            self._turn(self.chance.choice(awake))  # they have a long way to go
        else:
            self._anybodys_turn()

    def _is_awake_scheduler(self, actor: Actor) -> bool:
        return actor.kind == "scheduler" and actor.asleep_until_step <= self._step

    def _run_dry(self) -> None:
        paused = [each for each in self._actors if each.kind in LEASING and _is_guarded(each)]
        self._actors = [each for each in self._actors if each not in paused]
        self._kill_all()
        self._move_clock(self._back_seconds + 10 * LEASE_SECONDS + 3 * TRANSACTION_SECONDS_MAX)
        for wish in [*self._wishes.values()]:
            wish()
        while self._sent < self.sent_max and self.book.counted:
            self._send()
        self._read_to_the_end([])
        for round_ in range(2):
            self._schedule_to_the_end()
            for topic in (REQUESTS, OFFERS):
                last = Relay(self._context(), topic, f"last{round_}")
                self._tame(last)
                while last.step():
                    pass
                last._shards.release_all()
            self._answer(self.chance.random)
            photos = ConsumerWorker(self._context(), self._photos, f"last{round_}")
            self._tame(photos)
            while photos.step():
                pass
            photos._shards.release_all()
        for actor in paused:  # others have done their work meanwhile
            self._turn(actor)
            self._kill(actor)

    def _schedule_to_the_end(self) -> None:
        """Until nothing is due: feeds are approved, a round of the scrubber is over, presets are ready."""
        scheduler = self._scheduler()
        self._tame(scheduler)
        self._move_clock(self._listings.settings.scrub_seconds + 1)
        for _ in range(200):
            self._move_clock(LEASE_SECONDS / 2)
            is_more = scheduler.step()
            for (seller, task_id), task in self._found().tasks.items():
                if task.stage == "held":
                    is_more = True
                    self._store.transact(
                        lambda tx, key=(seller, task_id): tasks.approve(tx, self._listings, *key, "operator")  # type: ignore[misc]
                    )
            if not is_more and scheduler._shards.held:
                break
        scheduler.stop()

    # The actors -------------------------------------------------------------------------------------------------------

    def _scheduler(self) -> Scheduler:
        return Scheduler(self._context(), Listings.of(self._context()), f"scheduler{self._names}")

    def _keep_wishing(self, kind: str, wish: Callable[[], Wish]) -> None:
        while True:
            self.pause("between two requests")
            if kind not in self._wishes:
                self._wishes[kind] = wish()
            self._wishes[kind]()
            del self._wishes[kind]

    def _sellers_wish(self) -> Wish:
        found = self._found()
        drafts = [key for key, draft in found.drafts.items() if not draft.offer_id]
        draw = self.chance.random()
        if draw < 0.1 or not found.drafts:
            return self._opening()
        if draw < 0.25 and drafts:
            return self._filling(*self.chance.choice(drafts), found)
        if draw < 0.4 and len(found.ids) < NEW_OFFERS_MAX:
            key = self.chance.choice(drafts or list(found.drafts))
            return self._publishing(*key, found.drafts[key].version)
        if not found.ids:
            return self._opening()
        return self._changing(self.chance.choice(sorted(found.ids)), found)

    def _opening(self) -> Wish:
        opening = Opening(
            anonymous_id=self.chance.choice((VISITOR, "")),
            seller_id=self.chance.choice(SELLERS),
            category="cars",
        )
        return lambda: self._ask_for(drafting.open_drafts, opening)

    def _filling(self, owner: str, draft_id: str, found: Found) -> Wish:
        version, filled = found.drafts[owner, draft_id].version, self._filled()
        return lambda: self._ask_for(drafting.fill, owner, draft_id, version, filled)

    def _publishing(self, owner: str, draft_id: str, version: int) -> Wish:
        one = Publishing(owner_id=owner, draft_id=draft_id, version=version)

        def publish() -> None:
            said = self._ask_for(drafting.publish, [one])
            if said and isinstance(said[0], Saved):
                self.book.published(draft_id, said[0].offer.offer_id)

        return publish

    def _changing(self, offer_id: str, found: Found) -> Wish:
        version = found.rows[offer_id, "offer"].version
        draw = self.chance.random()
        if draw < 0.5 and not found.rows[offer_id, "offer"].body["external_id"]:
            return self._editing(Edit(offer_id=offer_id, version=version, filled=self._filled(), may_see=anyone))
        if draw < 0.85:
            status: Any = self.chance.choice(("active", "active", "sold", "removed"))
            move = Move(offer_id=offer_id, status=status, may_see=anyone)
            return lambda: self._ask_for(offers.move, [move])
        state = self.chance.randint(1, 3)
        kept = found.rows.get((offer_id, "stage:x"))
        return lambda: self._ask_for(
            keeping.write_stage, offer_id, "x", kept.version if kept is not None else 0, state, anyone
        )

    def _editing(self, one: Edit) -> Wish:
        def edit() -> None:
            said = self._ask_for(lambda tx, listings: offers.edit(tx, listings, [one]))
            if said and isinstance(said[0], Saved) and said[0].version > one.version + 1:
                self.book.broken.append(f"X2: an edit of version {one.version} made version {said[0].version}")

        return edit

    def _ask_for(self, verb: Callable[..., Any], *given: Any) -> Any:
        try:
            said = self._store.transact(lambda tx: verb(tx, self._listings, *given), name=f"listings {verb.__name__}")
        except KeyfoldError as error:
            self.pause(f"refused: {error}")
            return None
        for each in said if isinstance(said, list) else []:
            if isinstance(each, Saved):
                self.book.commit(0, [(each.offer.offer_id, "offer", each.version)])
        return said

    def _filled(self) -> Filled:
        chance = self.chance
        price = model.Price(chance.randint(0, 9), chance.choice(("EUR", "USD"))) if chance.random() < 0.8 else None
        photos = tuple(chance.sample(URLS, chance.choice((0, 1, 2))))
        return Filled(category="cars", content={**CAR, "year": chance.choice((1989, 2001))}, price=price, photos=photos)

    def _feeders_wish(self) -> Wish:
        """A feed is sent, some of it twice, and its end told; now and then an older one comes after it."""
        if self._feeds >= FEEDS_MAX:
            return lambda: None
        seller, chance, task_id = SELLERS[0], self.chance, self._task_ids[self._feeds]
        self._feeds += 1
        names = [name for name in EXTERNAL_IDS if chance.random() < chance.choice((0.3, 0.7, 1.0))]
        items = {name: chance.random() < 0.85 for name in names}
        lines = [feed_line(name, task_id, is_valid) for name, is_valid in items.items()]

        def send() -> None:
            try:
                for at in range(0, len(lines), 2):
                    for _ in range(1 + (chance.random() < 0.2)):
                        staging.take_lines(self._store, self._listings, seller, task_id, at, lines[at : at + 2])
                self._store.transact(
                    lambda tx: tasks.end_task(tx, self._listings, seller, task_id, len(lines)), name="feed end"
                )
            except KeyfoldError as error:
                self.pause(f"refused: {error}")

        self._sending = (seller, task_id, items)
        return send

    def _operate(self) -> None:
        """Redrives what was set aside, approves feeds, changes presets, and spoils counts."""
        while True:
            for _ in range(4):
                self.pause("looking")
            found = self._found()
            self._redrive()
            for (seller, task_id), task in found.tasks.items():
                if task.stage == "held":
                    with contextlib.suppress(Conflict):
                        self._store.transact(
                            lambda tx, key=(seller, task_id): tasks.approve(tx, self._listings, *key, "operator")  # type: ignore[misc]
                        )
            if self.chance.random() < 0.3:
                chosen = msgspec.structs.replace(self._listings.settings, presets=self.chance.choice(PRESETS))
                self._store.transact(lambda tx, chosen=chosen: presets.adopt(tx, chosen), name="listings adopt presets")  # type: ignore[misc]
            if found.ids and self.chance.random() < 0.4:
                self._spoil(self.chance.choice(sorted(found.ids.values())))

    def _spoil(self, seller: str) -> None:
        by = self.chance.choice((-2, 3))
        number, name = self.chance.choice((1, 2)), self.chance.choice(("Active", "Sold"))

        def work(tx: Transaction) -> None:
            for table, key, column, which in (
                ("user_offer_presets_count", "preset_id", "offers", number),
                ("user_total_counters", "counter_id", "counter_value", name),
            ):
                tx.driver(
                    f"INSERT INTO {table} (seller_id, {key}, seq_no, {column}) VALUES (?, ?, 1, ?)"
                    f" ON CONFLICT (seller_id, {key}, seq_no) DO UPDATE SET {column} = {column} + excluded.{column}",
                    (seller, which, by),
                )

        Store.transact(self._store, work)
        self.book.spoilt("presets", seller, number, by)
        self.book.spoilt("counters", seller, name, by)
        self.trace.append(f"{self._step} counts of {seller} are spoilt by {by}")

    # Moderation and photos --------------------------------------------------------------------------------------------

    def _item(self) -> Opinion:
        """A new opinion, one that came before, or one that comes late."""
        if self._opinions and self.chance.random() < 0.3:
            return self.chance.choice(list(self._opinions.values()))
        known = sorted(self._found().ids)
        offer_id = self.chance.choice(known[:3] if self.chance.random() < 0.7 else known)
        version = self.chance.randint(1, 40)
        fresh = Opinion(offer_id=offer_id, version=version, is_banned=self.chance.random() < 0.5)
        return self._opinions.setdefault((offer_id, version), fresh)

    def _send(self) -> None:
        if not self._found().ids:
            return
        draw = self.chance.random() if self.faulty else 1.0
        payload = msgspec.json.encode(self._item())
        if draw < 0.06:
            payload = b'{"offer_id":"what is this"}'
        elif draw < 0.12:
            payload = msgspec.json.encode(Opinion(offer_id=NOBODYS, version=1, is_banned=True))
        message = Message(key="", version=self._sent, event_time_us=0, schema="opinion/1", payload=payload)
        self._outside[OPINIONS].logs[self.chance.randrange(self.partitions)].append(message)
        self._sent += 1

    def _keep_answering(self) -> None:
        while True:
            self.pause("between two photos")
            self._answer(self.chance.random)

    def _answer(self, draw: Callable[[], float]) -> None:
        """The photo service answers what it was asked for since it last looked; now and then twice."""
        for partition, log in self._outside[REQUESTS].logs.items():
            for message in log[self._answered.get(partition, 0) :]:
                asked = json.loads(message.payload)
                for url in asked["urls"] * (1 + (draw() < 0.2)):
                    what = {"error": "not an image"} if draw() < 0.3 else {"image": {"id": url[-5]}}
                    payload = json.dumps({"offer_id": asked["offer_id"], "url": url, **what}).encode()
                    answer = Message(key="", version=0, event_time_us=0, schema="answer/1", payload=payload)
                    self._outside[ANSWERS].logs[partition].append(answer)
            self._answered[partition] = len(log)

    def _caller(self) -> Callable[[Sequence[Opinion]], Mapping[str, str]]:
        raise NotImplementedError

    def _sweep(self) -> Sweep:
        raise NotImplementedError

    # What is looked at ------------------------------------------------------------------------------------------------

    def _found(self) -> Found:
        return Store.read(self._store, self.book.look)

    def _broken_besides(self, found: Found, at_the_end: bool) -> list[str]:
        broken = compare_log(found, self._outside[OFFERS].entries().values(), at_the_end)
        if at_the_end:
            broken += self.book.ends(found, self._clock.now_us())
            broken += self._unheard(found)
        return broken

    def _unheard(self, found: Found) -> list[str]:
        """X1: of each offer the newest opinion is the one that holds, and every photo was answered."""
        newest: dict[str, int] = {}
        for log in self._outside[OPINIONS].logs.values():
            for message in log:
                said = json.loads(message.payload)
                if said["offer_id"] in found.ids:
                    newest[said["offer_id"]] = max(said["version"], newest.get(said["offer_id"], 0))
        applied = {
            key: told[-1].payload["body"]["version"]
            for (key, kind), told in found.messages.items()
            if kind == "moderation" and told
        }
        broken = [
            f"X1: the opinion {version} of {key} was never applied"
            for key, version in newest.items()
            if applied.get(key) != version
        ]
        for (key, kind), row in found.rows.items():
            if kind == "photos":
                waiting = [each for each in row.body.get("photos", []) if each.get("state", "asked") == "asked"]
                broken += [f"X1: the photo {each['url']} of {key} was never answered" for each in waiting]
        return broken

    def _committed(self, name: str, tx: Transaction, result: object) -> None:
        if name in GUARDED and tx not in self._guarded:
            self.book.broken.append(f"N3: {name} was committed without a look at its ticket")
        self._guarded.clear()
        for said_tx, said in self._said:
            if said_tx is tx:
                self.struck["message delivered twice", PART.name] += sum(status == "old" for _, status in said)
        self._said.clear()
        if name == "listings repair" and isinstance(result, list):
            for drift in result:
                assert isinstance(drift, Drift)
                self.book.repaired(drift.seller_id)
        if name == "feed end":
            seller, task_id, items = self._sending
            self.book.feeds[seller, task_id] = items

    def _is_guarded(self, job: str) -> bool:
        return job in (JOB, self._consumer.job, self._photos.job)

    def _spies(self) -> contextlib.AbstractContextManager[None]:
        return self._spying()

    @contextlib.contextmanager
    def _spying(self) -> Iterator[None]:
        """Hear of every guard and opinion; give the code this simulation's time, chance and small steps."""
        judge = keeping.judge
        time = SimpleNamespace(monotonic=lambda: self._monotonic_us / SECOND_US)
        names = itertools.count()

        def watch_judge(tx: Transaction, listings: Listings, opinions: Sequence[Opinion], **how: bool) -> list[Judged]:
            said = judge(tx, listings, opinions, **how)
            results = [(opinion, each.result) for opinion, each in zip(opinions, said, strict=True)]
            self._said.append((tx, results))
            return said

        with self._heard(
            [
                (keeping, "judge", watch_judge),
                *((place, "SHARDS", SHARDS) for place in (model, worker, walking, sweeping, reporting)),
                (walking, "DUE_MAX", 2),
                (walking, "WALK_MAX", 3),
                (walking, "SELLERS_MAX", 2),
                (applying, "STEP_ITEMS", 2),
                (applying, "STEP_REMOVALS", 1),
                (worker, "time", time),
                (saving, "random", SimpleNamespace(randrange=self.chance.randrange)),
                (drafting, "secrets", SimpleNamespace(token_hex=lambda _: f"draft{next(names)}")),
                (Listings, "new_offer_id", self._new_offer_id),
            ]
        ):
            watched = progress.advance

            def advance_and_note(tx: Transaction, job: str, *given: Any) -> None:
                watched(tx, job, *given)
                self._guarded.append(tx)

            progress.advance = advance_and_note
            try:
                yield
            finally:
                progress.advance = watched


def settings(url: str) -> Settings:
    options = {
        "store.url": url,
        "topics.partitions": 2,
        "leases.lease_seconds": LEASE_SECONDS,
        "listings.expire_days": EXPIRE_DAYS,
        "listings.archive_days": ARCHIVE_DAYS,
        "listings.return_days": 1,
        "listings.draft_days": DRAFT_DAYS,
        "listings.scrub_seconds": int(DAY / 4),
        "listings.presets": msgspec.to_builtins(PRESETS[0]),
    }
    return load(parts={"listings": ListingsSettings}, environ={}, options=options)  # type: ignore[arg-type]


def feed_line(external_id: str, task_id: int, is_valid: bool) -> bytes:
    content = {**CAR, "mileage_km": task_id} if is_valid else {"make": 1}
    return json.dumps({"external_id": external_id, "category": "cars", "content": content}).encode()


def anyone(_: str) -> bool:
    return True


def _is_guarded(actor: Actor) -> bool:
    return actor.where.removeprefix("before ") in GUARDED or actor.where in (
        "before listings-opinions",
        f"after reading {OPINIONS}",
    )
