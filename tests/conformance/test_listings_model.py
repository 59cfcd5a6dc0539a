"""Listings against a slow reference in plain dicts: random requests, repeats, stale ones, roll-backs, feeds, drift.

After every step what is stored and told is compared with the reference, and the laws of RELIABILITY.md (G1 to G6)
with what is told. `KEYFOLD_FAULTS_SEED` chooses the first seed, `KEYFOLD_FAULTS=long` plays many.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from keyfold.core.clock import ManualClock
from keyfold.core.errors import BadInput, Conflict, KeyfoldError, NotFound, VersionStale
from keyfold.core.relay import Relay
from keyfold.core.store import Transaction
from keyfold.listings.model import Condition, Preset
from keyfold.listings.service import drafting, keeping, offers, presets, repairing, walking
from keyfold.listings.service.drafting import Filled, Opening, Publishing
from keyfold.listings.service.feeds import applying, staging, sweeping, tasks
from keyfold.listings.service.keeping import Opinion, PhotoAnswer
from keyfold.listings.service.offers import Edit, Move
from keyfold.listings.service.saving import Saved
from tests.faults.effort import LONG, effort, seed
from tests.faults.listing_ledger import Book, Found
from tests.listings import CAR, Product, opened
from tests.unit.listings.reference import Dict, Reference, Refused

pytestmark = [
    pytest.mark.spec(
        "LST-02", "LST-05", "LST-06", "LST-07", "LST-08", "LST-09", "LST-10", "LST-11", "LST-12", "LST-17"
    ),
    pytest.mark.timeout(0 if LONG else 300),
]

T = TypeVar("T")

SELLERS = ("7", "8", "Ж")
VISITORS = ("v1", "v2")
URLS = tuple(f"https://photos.example.com/{number}.jpg" for number in range(4))
EXTERNAL_IDS = ("a", "b", "Ж", "d e")
NOBODYS = "0000000000000000"
SHARDS = 16
REFUSALS: dict[str, type[KeyfoldError]] = {
    "stale": VersionStale,
    "conflict": Conflict,
    "absent": NotFound,
    "invalid": BadInput,
}
FLAT = {"kind": "flat", "area_m2": 40, "rooms": 2}
SHOWN = frozenset({"active", "expired", "sold", "banned"})
PRESETS: tuple[dict[str, Preset], ...] = (
    {
        "all": Preset(number=1, statuses=SHOWN),  # type: ignore[arg-type]
        "active": Preset(number=2, statuses=frozenset({"active"})),
        "banned": Preset(number=4, statuses=frozenset({"banned"})),
    },
    {
        "all": Preset(number=1),
        "active": Preset(number=2, statuses=frozenset({"active", "expired"})),
        "photos": Preset(number=3, has_photos=True),
    },
    {
        "every": Preset(number=1),
        "new": Preset(number=5, where=(Condition(field="year", at_least=2000),)),
        "fine": Preset(number=3, where=(Condition(field="make", one_of=("Volvo",)),), statuses=frozenset({"active"})),
    },
)


TABLES = [
    "offer",
    "offer_ids",
    "messages",
    "sellers",
    "draft",
    "current_draft",
    "user_offer_presets",
    "user_offer_presets_count",
    "user_total_counters",
    "sold_offers",
    "offer_presets",
    "listing_walks",
    "feed",
    "feed_tasks",
    "feed_items",
    "feed_problems",
]


class RolledBack(Exception):
    """Thrown at the end of a transaction."""


class Play:
    """Random requests to a product, and the same to the reference."""

    def __init__(self, product: Product, number: int) -> None:
        assert product.clock is not None
        self.product = product
        self.clock: ManualClock = product.clock
        self.chance = random.Random(number)
        self.reference = Reference()
        self.book = Book()
        self.tasks = dict.fromkeys(SELLERS[:2], 0)  # the last feed of each seller whose end has come
        self.drafts: list[tuple[str, str]] = []  # every one that there ever was
        self.trace: list[str] = []
        self.relays = [Relay(product.context, topic, "test") for topic in ("offers", "photo-requests")]
        self.acts: Sequence[tuple[Callable[[], None], int]] = (
            (self.sell, 14),
            (self.open_draft, 4),
            (self.fill, 6),
            (self.publish, 6),
            (self.edit, 8),
            (self.move, 6),
            (self.judge, 8),
            (self.answer_photos, 4),
            (self.write_stage, 4),
            (self.age, 3),
            (self.forget, 1),
            (self.pass_time, 4),
            (self.change_presets, 1),
            (self.build, 4),
            (self.spoil, 2),
            (self.repair, 2),
            (self.scrub, 1),
            (self.relay, 4),
            (self.feed, 6),
        )

    @property
    def now_us(self) -> int:
        return self.clock.now_us()

    def run(self, steps: int) -> None:
        acts, weights = zip(*self.acts, strict=True)
        self.change_presets()
        for _ in range(steps):
            self.clock.advance(self.chance.uniform(0.001, 1.0))
            act = self.chance.choices(acts, weights)[0]
            self.trace.append(act.__name__)
            act()
            self.must_agree()
        self.finish()

    def finish(self) -> None:
        """Everything runs dry."""
        self.clock.advance(5 * 86_400)  # it may have been set back
        self.scheduled(lambda shard: walking.build(self.product.store, self.product.listings, shard, free))
        self.age()
        for seller in list(self.reference_sellers()):
            self.product.store.transact(lambda tx, seller=seller: repairing.repair(tx, seller, "test"))  # type: ignore[misc]
            self.book.repaired(seller)
        for relay in self.relays:
            while relay.step():
                pass
            relay.step()
        found = self.must_agree()
        broken = self.book.ends(found, self.now_us)
        assert not broken, (broken[:3], self.trace[-10:])

    # Asked of both ----------------------------------------------------------------------------------------------------

    def do(self, verb: Callable[..., T], *given: Any) -> T:
        """A verb in a transaction; now and then it is rolled back at its end before that, and changes nothing."""
        if self.chance.random() < 0.15:

            def fail(tx: Transaction) -> None:
                verb(tx, self.product.listings, *given)
                raise RolledBack

            with pytest.raises((RolledBack, KeyfoldError)):
                self.product.store.transact(fail)
        return self.product.do(verb, *given)

    def both(self, ask: Callable[[], Any], expected: Callable[[Any], Any]) -> Any:
        """What the product says, an answer or an error, is what the reference says."""
        said, refusal = _outcome(ask, KeyfoldError)
        said = refusal if refusal is not None else said
        wanted, refused = _outcome(lambda: expected(said), Refused)
        if refused is not None:
            assert isinstance(said, REFUSALS[str(refused)]), (said, refused)
            return None
        assert not isinstance(said, KeyfoldError), said
        return wanted, said

    def open_draft(self) -> None:
        seller = self.chance.choice((*SELLERS, ""))
        anonymous = self.chance.choice((*VISITORS, "")) if seller else self.chance.choice(VISITORS)
        category = self.chance.choice(("cars", "cars", "flats", ""))
        opening = Opening(anonymous_id=anonymous, seller_id=seller, category=category)
        said = self.do(drafting.open_drafts, opening)
        wanted = self.reference.open_draft(anonymous, seller, category, said.draft_id, self.now_us)
        assert (said.owner_id, said.draft_id) == wanted
        assert said.version == self.reference.drafts[wanted]["version"]
        self.drafts.append(wanted)

    def sell(self) -> None:
        """Open, fill in and publish, without a slip."""
        seller = self.chance.choice(SELLERS)
        said = self.do(drafting.open_drafts, Opening(seller_id=seller, category="cars"))
        key = self.reference.open_draft("", seller, "cars", said.draft_id, self.now_us)
        self.drafts.append(key)
        filled, is_valid = self._filled()
        said = self.do(drafting.fill, *key, said.version, msgspec.convert(filled, Filled))
        self.reference.fill(*key, self.reference.drafts[key]["version"], filled, self.now_us)
        self._publish(*key, said.version, is_valid)

    def _draft(self) -> tuple[str, str]:
        """Mostly one that is there."""
        there = [key for key, draft in self.reference.drafts.items() if not draft["offer_id"]]
        if there and self.chance.random() < 0.85:
            return self.chance.choice(there)
        return self.chance.choice(self.drafts) if self.drafts else ("nobody", "x")

    def _version(self, version: int) -> int:
        return version if self.chance.random() < 0.85 else max(0, version + self.chance.choice((-1, 1)))

    def _filled(self) -> tuple[Dict, bool]:
        """What somebody writes, and whether it meets its category."""
        chance = self.chance
        car = {**CAR, "make": chance.choice(("Volvo", "Saab")), "year": chance.choice((1989, 2001))}
        is_valid = chance.random() < 0.85
        if not is_valid:
            car["year"] = "old"
        photos = chance.sample(URLS, chance.choice((0, 0, 1, 2, 3)))
        price = {"amount": chance.choice((0, 1, 500_00)), "currency": chance.choice(("EUR", "USD"))}
        return {
            "category": "cars",
            "content": car,
            "price": price if chance.random() < 0.8 else None,
            "photos": photos + photos[:1] if chance.random() < 0.1 else photos,
        }, is_valid

    def fill(self) -> None:
        owner, draft_id = self._draft()
        draft = self.reference.drafts.get((owner, draft_id), {"version": 1})
        version, (filled, _) = self._version(draft["version"]), self._filled()
        self.both(
            lambda: self.do(drafting.fill, owner, draft_id, version, msgspec.convert(filled, Filled)).version,
            lambda _: self.reference.fill(owner, draft_id, version, filled, self.now_us),
        )

    def publish(self) -> None:
        owner, draft_id = self._draft()
        draft = self.reference.drafts.get((owner, draft_id), {"version": 1, "filled": {"content": {}}})
        version = self._version(draft["version"])
        is_valid = draft["filled"]["content"].get("year") in (1989, 2001)
        self._publish(owner, draft_id, version, is_valid)

    def _publish(self, owner: str, draft_id: str, version: int, is_valid: bool) -> None:
        """Now and then twice."""
        for _ in range(1 + (self.chance.random() < 0.2)):
            one = Publishing(owner_id=owner, draft_id=draft_id, version=version)
            said = self.do(drafting.publish, [one])[0]
            self.both(
                lambda said=said: said,  # type: ignore[misc]
                lambda said: self.reference.publish(
                    owner,
                    draft_id,
                    version,
                    is_valid,
                    getattr(said, "offer", None) and said.offer.offer_id,
                    self.now_us,
                ),
            )
            if isinstance(said, Saved):
                self.book.published(draft_id, said.offer.offer_id)
                self.acknowledge(said)

    def acknowledge(self, said: Saved) -> None:
        self.book.commit(self.now_us, [(said.offer.offer_id, "offer", said.version)])
        assert said.version == self.reference.version(said.offer.offer_id)

    def _offer(self) -> str:
        known = list(self.reference.offers)
        return self.chance.choice(known) if known and self.chance.random() < 0.97 else NOBODYS

    def edit(self) -> None:
        offer_id = self._offer()
        version = self._version(self.reference.version(offer_id))
        filled, is_valid = self._filled()
        if offer_id in self.reference.offers and self.chance.random() < 0.2:  # as it is: nothing changes
            offer = self.reference.offers[offer_id]
            filled = {name: offer[name] for name in ("category", "content", "price", "photos")}
            is_valid = True
        if offer_id in self.reference.offers and self.reference.offers[offer_id]["external_id"]:
            before = self.reference.offers[offer_id]["content"]
            filled["content"] = {**filled["content"], "mileage_km": before["mileage_km"]}
        one = Edit(offer_id=offer_id, version=version, filled=msgspec.convert(filled, Filled), may_see=anyone)
        said = self.do(offers.edit, [one])[0]
        if self.both(
            lambda: said, lambda _: self.reference.edit(offer_id, version, filled, is_valid, self.now_us)
        ) and isinstance(said, Saved):
            self.acknowledge(said)

    def move(self) -> None:
        offer_id = self._offer()
        status: Any = self.chance.choice(("active", "sold", "sold", "removed", "expired", "archived"))
        version = self._version(self.reference.version(offer_id)) if self.chance.random() < 0.5 else None
        one = Move(offer_id=offer_id, status=status, version=version, reason="a trial", may_see=anyone)
        said = self.do(offers.move, [one])[0]
        if self.both(
            lambda: said, lambda _: self.reference.move(offer_id, status, version, "a trial", self.now_us)
        ) and isinstance(said, Saved):
            self.acknowledge(said)

    def judge(self) -> None:
        """Opinions of several offers at once; of one offer the newest counts, wherever it stands."""
        opinions = {
            (offer_id := self._offer()): Opinion(
                offer_id=offer_id, version=self.chance.randint(1, 30), is_banned=self.chance.random() < 0.5
            )
            for _ in range(self.chance.randint(1, 3))
        }
        for _ in range(1 + (self.chance.random() < 0.2)):
            asked = list(opinions.values())
            said = [each.result for each in self.do(keeping.judge, asked)]
            wanted = [self.reference.judge(each.offer_id, each.version, each.is_banned, self.now_us) for each in asked]
            assert said == wanted

    def answer_photos(self) -> None:
        answers = []
        for offer_id in dict.fromkeys(self._offer() for _ in range(2)):
            for url in self.chance.sample(URLS, 2):
                error = "not an image" if self.chance.random() < 0.4 else ""
                image = None if error else {"id": url[-5]}
                answers.append(PhotoAnswer(offer_id=offer_id, url=url, image=image, error=error))
        self.do(keeping.add_photos, answers)
        by_offer: dict[str, list[PhotoAnswer]] = {}
        for each in answers:
            by_offer.setdefault(each.offer_id, []).append(each)
        for offer_id, several in by_offer.items():
            self.reference.answer_photos(offer_id, [(each.url, each.image, each.error) for each in several])

    def write_stage(self) -> None:
        offer_id, stage = self._offer(), self.chance.choice(("pricing", "billing"))
        kind = "billing" if stage == "billing" else f"stage:{stage}"
        version = self._version(self.reference.version(offer_id, kind))
        state = {"a": self.chance.randint(0, 2)}
        self.both(
            lambda: self.do(keeping.write_stage, offer_id, stage, version, state, anyone).version,
            lambda _: self.reference.write_stage(offer_id, stage, version, state),
        )

    # Feeds ------------------------------------------------------------------------------------------------------------

    def feed(self) -> None:
        """A feed in pieces, some of which come twice; now and then one that is not newer than the last."""
        seller = self.chance.choice(list(self.tasks))
        task_id = self.tasks[seller] + self.chance.choice((-1, 0, 1, 1, 1, 1, 3))
        items: dict[str, Dict | None] = {}
        lines = []
        for name in self.chance.choices(EXTERNAL_IDS, k=self.chance.randint(0, 6)):  # of one id the last wins
            items[name] = self._fed(task_id) if self.chance.random() < 0.85 else None
            lines.append(_line(name, items[name]))
        if task_id <= max(0, self.tasks[seller]):
            if task_id > 0 and lines:
                with pytest.raises(Conflict):
                    self.send(seller, task_id, 0, lines)
            return
        for at in range(0, len(lines), 2):
            for _ in range(1 + (self.chance.random() < 0.2)):
                self.send(seller, task_id, at, lines[at : at + 2])
        self.do(tasks.end_task, seller, task_id, len(lines))
        self.apply(seller, task_id)
        ids = dict(self.rows_of("SELECT external_id, offer_id FROM feed WHERE seller_id = {m}", seller))
        self.reference.feed(seller, task_id, items, ids, self.now_us)
        self.tasks[seller] = task_id
        self.book.feeds[seller, task_id] = {name: filled is not None for name, filled in items.items()}

    def send(self, seller: str, task_id: int, at: int, lines: list[bytes]) -> None:
        staging.take_lines(self.product.store, self.product.listings, seller, task_id, at, lines)

    def apply(self, seller: str, task_id: int) -> None:
        """To its end; what is held is approved."""

        def stage(tx: Transaction) -> str:
            return tasks.must_find(tx, seller, task_id).stage

        for _ in range(20):
            self.scheduled(lambda shard: applying.step(self.product.store, self.product.listings, shard, free))
            if self.product.store.read(stage) != "held":
                break
            self.do(tasks.approve, seller, task_id, "test")
        assert self.product.store.read(stage) == "done"

    def _fed(self, task_id: int) -> Dict:
        """A valid item; which feed it is of is told by its content."""
        while not (made := self._filled())[1] or len(set(made[0]["photos"])) < len(made[0]["photos"]):
            pass
        return {**made[0], "content": {**made[0]["content"], "mileage_km": task_id}}

    def rows_of(self, sql: str, *given: Any) -> list[tuple[Any, ...]]:
        return self.product.store.read(lambda tx: tx.rows(sql.format(m="?" if tx.is_sqlite else "%s"), given))

    # Time and the scheduler -------------------------------------------------------------------------------------------

    def pass_time(self) -> None:
        """Mostly forward; now and then the clock is set back."""
        days = self.chance.choice((0.01, 0.1, 1, 2, 5, 29, 31, -0.5))
        self.clock.advance(days * 86_400)

    def scheduled(self, step: Callable[[int], bool]) -> None:
        for shard in range(SHARDS):
            while step(shard):
                pass

    def age(self) -> None:
        self.scheduled(lambda shard: walking.age(self.product.store, self.product.listings, shard, free))
        self.reference.age(self.now_us)

    def forget(self) -> None:
        walking.forget(self.product.store, self.product.listings, 1_000)
        self.reference.forget_drafts(self.now_us)
        while sweeping.forget(self.product.store, self.product.listings, 1_000):
            pass
        self.reference.forget_fed(self.now_us)

    def change_presets(self) -> None:
        listings = self.product.listings
        listings.settings = msgspec.structs.replace(listings.settings, presets=self.chance.choice(PRESETS))
        self.do(lambda tx, listings: presets.adopt(tx, listings.settings))

    def build(self) -> None:
        """Some shards go on, or as many as it takes."""
        if self.chance.random() < 0.5:
            self.clock.advance(300)
        count = self.chance.choice((3, SHARDS))
        for shard in self.chance.sample(range(SHARDS), count):
            while walking.build(self.product.store, self.product.listings, shard, free):
                if self.chance.random() < 0.3:
                    break

    # Counts that are spoilt -------------------------------------------------------------------------------------------

    def reference_sellers(self) -> list[str]:
        return sorted({offer["seller_id"] for offer in self.reference.offers.values()})

    def spoil(self) -> None:
        """Somebody changes counts by hand, and adds some where there are none."""
        sellers = self.reference_sellers()
        if not sellers:
            return
        seller, by = self.chance.choice(sellers), self.chance.choice((-3, 1, 7))
        number, name = self.chance.choice((1, 2, 3)), self.chance.choice(("Active", "Sold", "MoneyEarned.EUR"))
        spoil_count(self.product, "user_offer_presets_count", "preset_id", "offers", seller, number, by)
        self.book.spoilt("presets", seller, number, by)
        spoil_count(self.product, "user_total_counters", "counter_id", "counter_value", seller, name, -by)
        self.book.spoilt("counters", seller, name, -by)

    def repair(self) -> None:
        for seller in self.reference_sellers()[:1]:
            self.do(lambda tx, _: repairing.repair(tx, seller, "test"))  # noqa: B023
            self.book.repaired(seller)

    def scrub(self) -> None:
        """A round over everybody, when it is time for one."""
        self.clock.advance(2 * 86_400)
        scrubber = walking.Scrubber(self.product.store, self.product.listings)
        self.scheduled(lambda shard: scrubber.step(shard, free))
        for seller in self.reference_sellers():
            self.book.repaired(seller)

    def relay(self) -> None:
        self.chance.choice(self.relays).step()

    # What is compared -------------------------------------------------------------------------------------------------

    def must_agree(self) -> Found:
        found: Found = self.product.store.snapshot(self.book.look)
        broken = self.book.broken + self.book.compare(found)
        assert not broken, (broken[:3], self.trace[-10:])
        assert self._told(found) == self.reference.told, self.trace[-10:]
        asked = {
            key: [(each.version, each.payload["urls"]) for each in told] for key, told in found.requests.items() if told
        }
        assert asked == self.reference.requests
        drafts = {
            key: (
                draft.version,
                {name: draft.filled[name] for name in ("category", "content", "price", "photos")},
                draft.offer_id,
            )
            for key, draft in found.drafts.items()
        }
        wanted = {
            key: (each["version"], each["filled"], each["offer_id"]) for key, each in self.reference.drafts.items()
        }
        assert drafts == wanted, self.trace[-10:]
        assert found.current == self.reference.current
        return found

    def _told(self, found: Found) -> dict[tuple[str, str], list[Any]]:
        """What is told of each kind, as the reference has it."""
        return {key: [_as_told(key, each.payload) for each in told] for key, told in found.messages.items() if told}


def _outcome(work: Callable[[], Any], refusal: type[Exception]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except refusal as error:
        return None, error


def _line(external_id: str, filled: Dict | None) -> bytes:
    item = filled if filled is not None else {"category": "cars", "content": {"make": 1}}
    return msgspec.json.encode({"external_id": external_id, **item})


def _as_told(key: tuple[str, str], payload: Any) -> Any:
    if key[1] == "offer":
        left_out = ("schema_version", "business_id", "shop_id", "warehouse_id", "tier", "shown", "version")
        return {name: value for name, value in payload.items() if name not in left_out}
    body = payload["body"]
    if key[1] == "moderation":
        return {name: body[name] for name in ("version", "is_banned")}
    if key[1] == "photos":
        return [{"state": "asked", "image": None, "error": "", **photo} for photo in body["photos"]]
    return body


def spoil_count(product: Product, table: str, name: str, value: str, seller: str, which: Any, by: int) -> None:
    def work(tx: Transaction) -> None:
        mark = "?" if tx.is_sqlite else "%s"
        tx.driver(
            f"INSERT INTO {table} (seller_id, {name}, seq_no, {value}) VALUES ({mark}, {mark}, 3, {mark})"
            f" ON CONFLICT (seller_id, {name}, seq_no) DO UPDATE SET {value} = {table}.{value} + excluded.{value}",
            (seller, which, by),
        )

    product.store.transact(work)


def anyone(_: str) -> bool:
    return True


def free(_: Transaction) -> None:
    """A guard of nobody."""


@pytest.fixture(params=["sqlite", "postgresql-18"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'keyfold.db'}"
    return str(request.getfixturevalue("postgres_url"))


@pytest.mark.parametrize("share", range(2))
def test_whatever_is_asked_the_product_does_what_the_reference_does(url: str, share: int) -> None:
    first = seed()
    with opened(url, clock=ManualClock(1_800_000_000_000_000), limits__transaction_seconds_max=10) as product:
        for number in range(effort(1, 200)):
            print(f"KEYFOLD_FAULTS_SEED={first + number} share {share}")
            Play(product, (first + number) * 2 + share).run(200)
            for table in TABLES:
                product.store.transact(lambda tx, table=table: tx.driver(f"DELETE FROM {table}"))  # type: ignore[misc]
