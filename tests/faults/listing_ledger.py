"""The laws of listings (G1 to G6, X1, X2), folded by hand from the rows of the store.

Every change of an offer leaves its message, whole and with a version: what is committed is told there from the first to
the last change, whoever did it. The rows, the presets, the counts and the counters must follow from that, by the rules
as they are written down here once more. A `Book` only has to be told what cannot be seen: what was acknowledged, what
the feeds had whose end was, and which counts were spoilt on purpose.
"""

import itertools
import json
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from keyfold.core.store import Store, Transaction
from tests.faults.ledger import Entry

DAY_US = 86_400_000_000
SHARDS = 16
EXPIRE_DAYS, ARCHIVE_DAYS = 60, 30
FEED_REASON = "no longer in the feed"
COUNTED = {"active": "Active", "expired": "Expired", "banned": "Banned"}
MOVES = {
    ("active", "expired"),
    ("active", "sold"),
    ("active", "removed"),
    ("expired", "active"),
    ("expired", "sold"),
    ("expired", "removed"),
    ("expired", "archived"),
    ("sold", "archived"),
    ("removed", "active"),
    ("removed", "archived"),
}

Body = Mapping[str, Any]
Key = tuple[str, str]  # offer and kind


class Row(NamedTuple):
    """A kind of an offer."""

    seller_id: str
    version: int
    shown: str | None
    shard_id: int | None
    due_at_us: int | None
    body: Any


class Told(NamedTuple):
    """A message of a change."""

    version: int
    payload: Body
    place: tuple[int, int] | None  # partition and position; None: not published yet


class Task(NamedTuple):
    """A feed of a seller."""

    stage: str
    reason: str


class Draft(NamedTuple):
    version: int
    filled: Body
    offer_id: str


class Found:
    """What is committed at one moment."""

    def __init__(self, tx: Transaction, topic: str = "offers", requests_topic: str = "photo-requests") -> None:
        self.rows: dict[Key, Row] = {}
        every = "SELECT offer_id, kind, seller_id, version, shown, shard_id, due_at_us, body FROM offer"
        for offer_id, kind, *row, body in tx.driver(every):
            self.rows[offer_id, kind] = Row(*row, json.loads(body))
        self.messages: dict[Key, list[Told]] = defaultdict(list)
        self.requests: dict[str, list[Told]] = defaultdict(list)
        sent = "SELECT topic, key, kind, version, payload, partition, position FROM messages ORDER BY id"
        for told_to, key, kind, version, payload, partition, position in tx.driver(sent):
            told = Told(version, json.loads(bytes(payload)), None if position is None else (partition, position))
            if told_to == topic:
                self.messages[key, kind].append(told)
            elif told_to == requests_topic:
                self.requests[key].append(told)
        self.ids: dict[str, str] = _pairs(tx, "SELECT offer_id, seller_id FROM offer_ids")
        self.sellers: dict[str, int] = _pairs(tx, "SELECT seller_id, shard_id FROM sellers")
        self.listed = {tuple(row) for row in tx.driver("SELECT * FROM user_offer_presets")}
        self.counts = _sums(tx, "SELECT seller_id, preset_id, offers FROM user_offer_presets_count")
        self.counters = _sums(tx, "SELECT seller_id, counter_id, counter_value FROM user_total_counters")
        self.sold = {tuple(row) for row in tx.driver("SELECT seller_id, offer_id, currency, amount FROM sold_offers")}
        self.presets: dict[int, tuple[Body, str]] = {
            number: (json.loads(definition), state)
            for number, definition, state in tx.driver("SELECT preset_id, definition, state FROM offer_presets")
        }
        self.drafts = {
            (owner, draft_id): Draft(version, json.loads(body), offer_id)
            for owner, draft_id, version, body, offer_id in tx.driver(
                "SELECT owner_id, draft_id, version, body, offer_id FROM draft"
            )
        }
        self.current: dict[str, str] = _pairs(tx, "SELECT owner_id, draft_id FROM current_draft")
        self.tasks = {
            (seller, task_id): Task(stage, reason)
            for seller, task_id, stage, reason in tx.driver("SELECT seller_id, task_id, stage, reason FROM feed_tasks")
        }
        self.ended: dict[str, int | None] = _pairs(tx, "SELECT seller_id, ended_task_id FROM sellers")
        walks = [tuple(row) for row in tx.driver("SELECT walk, is_done FROM listing_walks")]
        self.walks = {walk for walk, _ in walks}
        self.walked: int = sum(done for _, done in walks)

    def history(self, offer_id: str) -> list[Body]:
        """An offer itself, from its first version to its last."""
        return [each.payload for each in self.messages[offer_id, "offer"]]

    def fingerprint(self) -> object:
        """Equal where the same follows."""
        told = [(kind, len(each), sum(one.place is not None for one in each)) for (_, kind), each in self._all()]
        stages = tuple(sorted((*key, task.stage) for key, task in self.tasks.items()))
        return tuple(sorted(told)), tuple(sorted(self.counts.items())), len(self.drafts), stages, self.walked

    def _all(self) -> list[tuple[Key, list[Told]]]:
        return [*self.messages.items(), *(((key, "request"), each) for key, each in self.requests.items())]

    def waiting(self) -> list[str]:
        """What was never published."""
        return [
            f"G2: version {each.version} of {key} was never published"
            for key, told in self._all()
            for each in told
            if each.place is None
        ]


class Book:
    """What must be there."""

    def __init__(
        self, *, expire_days: int = EXPIRE_DAYS, archive_days: int = ARCHIVE_DAYS, shards: int = SHARDS
    ) -> None:
        self.broken: list[str] = []
        self.counted: dict[Key, int] = {}  # what was acknowledged: the version of each kind of an offer
        self.planted: Counter[tuple[str, str, int | str]] = Counter()  # by how much counts were spoilt
        self.made_of: dict[str, str] = {}  # draft -> the offer it has become
        self.feeds: dict[tuple[str, int], dict[str, bool]] = {}  # whose end was told: external ids, and which are valid
        self._shards = shards
        self._ages_us = {"active": expire_days * DAY_US}
        self._archived_us = archive_days * DAY_US

    # What happens -----------------------------------------------------------------------------------------------------

    def commit(self, now_us: int, told: Iterable[tuple[str, str, int]]) -> None:
        """These changes (offer, kind, version) were acknowledged."""
        for offer_id, kind, version in told:
            self.counted[offer_id, kind] = max(version, self.counted.get((offer_id, kind), 0))

    def published(self, draft_id: str, offer_id: str) -> None:
        """A draft was answered as published."""
        if self.made_of.setdefault(draft_id, offer_id) != offer_id:
            self.broken.append(f"X2: the draft {draft_id} became {self.made_of[draft_id]} and {offer_id}")

    def spoilt(self, what: str, seller_id: str, name: int | str, by: int) -> None:
        """A count was changed on purpose; `what` is `presets` or `counters`."""
        self.planted[what, seller_id, name] += by

    def repaired(self, seller_id: str) -> None:
        for key in [key for key in self.planted if key[1] == seller_id]:
            del self.planted[key]

    # What is there ----------------------------------------------------------------------------------------------------

    def look(self, tx: Transaction) -> Found:
        return Found(tx)

    def broken_in(self, store: Store) -> list[str]:
        return self.broken + self.compare(store.snapshot(self.look))

    def compare(self, found: Found) -> list[str]:
        """What holds between any two commits."""
        return [
            *self._acknowledged(found),
            *_told_all(found),
            *_told_in_order(found),
            *self._moved(found),
            *_banned(found),
            *_asked(found),
            *self._listed(found),
            *self._counted(found),
            *self._drafted(found),
            *self._columns(found),
            *self._fed(found),
        ]

    def _acknowledged(self, found: Found) -> list[str]:
        return [
            f"X1: version {version} of {key} was acknowledged, {len(found.messages[key])} are there"
            for key, version in self.counted.items()
            if version > len(found.messages[key])
        ]

    def _moved(self, found: Found) -> list[str]:
        """Every change of status is one of the table, and the scheduler comes when it is time."""
        broken = []
        for offer_id, kind in found.messages:
            history = found.history(offer_id) if kind == "offer" else []
            for one, two in itertools.pairwise(history):
                before, after = one["status"], two["status"]
                stood_us = two["status_at_us"] - one["status_at_us"]
                if before == after:
                    if stood_us:
                        broken.append(f"G1: {offer_id} stays {after} and has the time of another status")
                elif (before, after) not in MOVES:
                    broken.append(f"G1: {offer_id} went from {before} to {after}")
                elif after in ("expired", "archived") and stood_us < self._stays_us(before):
                    broken.append(f"G1: {offer_id} was {before} for {stood_us} µs only, and became {after}")
                if one["was_sold"] > two["was_sold"] or two["updated_at_us"] < one["updated_at_us"]:
                    broken.append(f"G1: {offer_id} went back in time: {one} {two}")
                if one["created_at_us"] != two["created_at_us"] or one["seller_id"] != two["seller_id"]:
                    broken.append(f"G1: {offer_id} is another offer at version {two['version']}")
                if _content(one) == _content(two):
                    broken.append(f"G1: {offer_id} got version {two['version']} for nothing")
        return broken

    def _stays_us(self, status: str) -> int:
        return self._ages_us.get(status, self._archived_us)

    def _listed(self, found: Found) -> list[str]:
        """G4: a ready preset lists just the offers that meet it, and a count says how many rows there are."""
        expected = {
            (offer["seller_id"], number, offer["created_at_us"], offer_id)
            for offer_id, offer in _last(found).items()
            for number, (preset, _) in found.presets.items()
            if is_in(offer, preset)
        }
        ready = {number for number, (_, state) in found.presets.items() if state == "ready"}
        wrong = {row for row in expected ^ found.listed if row[1] in ready}
        broken = [f"G4: {row} {'is not' if row in expected else 'is'} listed" for row in sorted(wrong)]
        broken += [f"G4: {row} is listed in no preset" for row in found.listed if row[1] not in found.presets]
        rows = Counter((seller, number) for seller, number, _, _ in found.listed)
        return broken + self._compare_counts("presets", rows, found.counts)

    def _counted(self, found: Found) -> list[str]:
        """G4: the counters are what the statuses say; what was sold counts once and for ever."""
        expected: Counter[tuple[str, Any]] = Counter()
        sold: set[tuple[Any, ...]] = set()
        for offer_id, offer in _last(found).items():
            if (status := shown(offer)) in COUNTED:
                expected[offer["seller_id"], COUNTED[status]] += 1
            first = next((each for each in found.history(offer_id) if each["status"] == "sold"), None)
            if first is not None:
                price = first["price"] or {"currency": "", "amount": 0}
                expected[offer["seller_id"], "Sold"] += 1
                if price["currency"]:
                    expected[offer["seller_id"], f"MoneyEarned.{price['currency']}"] += price["amount"]
                sold.add((offer["seller_id"], offer_id, price["currency"], price["amount"]))
        broken = [f"G4: {each} is marked as sold by one of two" for each in sorted(sold ^ found.sold)]
        return broken + self._compare_counts("counters", expected, found.counters)

    def _compare_counts(
        self, what: str, expected: Mapping[tuple[str, Any], int], there: Mapping[tuple[str, Any], int]
    ) -> list[str]:
        return [
            f"G4: {what} {key} is {there.get(key, 0)}, the rows say {expected.get(key, 0)} and {spoilt} was planted"
            for key in sorted({*expected, *there}, key=str)
            if there.get(key, 0) != expected.get(key, 0) + (spoilt := self.planted.get((what, *key), 0))
        ]

    def _drafted(self, found: Found) -> list[str]:
        """G6: an owner's only draft that is not published is the current one; a draft becomes one offer."""
        open_ones = {key for key, draft in found.drafts.items() if not draft.offer_id}
        broken = [f"G6: {key} is not the current draft" for key in open_ones - set(found.current.items())]
        broken += [f"G6: {key} is current and not there" for key in set(found.current.items()) - open_ones]
        for (owner, draft_id), draft in found.drafts.items():
            if not draft.offer_id:
                continue
            self.published(draft_id, draft.offer_id)
            if found.ids.get(draft.offer_id) != owner:
                broken.append(f"X1: {draft_id} of {owner} was published as {draft.offer_id}, which is not there")
        twice = [offer_id for offer_id, times in Counter(self.made_of.values()).items() if times > 1]
        return broken + [f"X2: {offer_id} was made of two drafts" for offer_id in twice]

    def _fed(self, found: Found) -> list[str]:
        """G5: when the newest feed that has ended is done, what is live of feeds is what it has; what an offer is told
        to be comes of feeds that are never older than before. Items have the number of their feed in `mileage_km`."""
        broken = []
        live: dict[str, list[str]] = defaultdict(list)
        newest: dict[tuple[str, str], Body] = {}  # of each external id
        for offer_id, offer in sorted(_last(found).items(), key=lambda each: each[1]["created_at_us"]):
            if not offer["external_id"]:
                continue
            newest[offer["seller_id"], offer["external_id"]] = offer
            if offer["status"] in ("active", "expired"):
                live[offer["seller_id"]].append(offer["external_id"])
            tasks = [each["content"]["mileage_km"] for each in found.history(offer_id)]
            if tasks != sorted(tasks):
                broken.append(f"G5: {offer_id} was changed by the feeds {tasks}")
        for seller, external_ids in live.items():
            if len(set(external_ids)) < len(external_ids):
                broken.append(f"G5: {seller} has two offers of one external id: {sorted(external_ids)}")
        for seller, task_id in found.ended.items():
            items = self.feeds.get((seller, task_id or 0))
            task = found.tasks.get((seller, task_id or 0))
            if items is None or task is None or task.stage != "done":
                continue
            if extra := set(live[seller]) - set(items):
                broken.append(f"G5: feed {task_id} of {seller} is done and has not {sorted(extra)}, which are live")
            for name in (name for name, is_valid in items.items() if is_valid):
                last = newest.get((seller, name))
                if last is None or (last["status"] == "removed" and last["reason"] == FEED_REASON):
                    broken.append(f"G5: feed {task_id} of {seller} is done and has {name!r}, which is {last}")
        return broken

    def _columns(self, found: Found) -> list[str]:
        broken = []
        for (offer_id, kind), row in found.rows.items():
            if kind != "offer":
                continue
            offer = row.body
            due = None if offer["status"] == "archived" else offer["status_at_us"] + self._stays_us(offer["status"])
            shard = zlib.crc32(row.seller_id.encode()) % self._shards
            if (row.shown, row.shard_id, row.due_at_us) != (shown(offer), shard, due):
                broken.append(f"G1: {offer_id} is {row}, which is not what it is due for: {due} in {shard}")
            if found.ids.get(offer_id) != row.seller_id or found.sellers.get(row.seller_id) != shard:
                broken.append(f"X1: {offer_id} of {row.seller_id} has no place in the directory")
        return broken + [
            f"X1: {each} is in the directory alone" for each in found.ids if (each, "offer") not in found.rows
        ]

    def ends(self, found: Found, now_us: int) -> list[str]:
        """Everything has run dry: all is published, nothing is due, every preset is ready, every count is right."""
        broken = found.waiting()
        broken += [
            f"G1: {offer_id} has been due since {row.due_at_us}"
            for (offer_id, _), row in found.rows.items()
            if row.due_at_us is not None and row.due_at_us <= now_us
        ]
        broken += [
            f"G4: the preset {number} is {state}" for number, (_, state) in found.presets.items() if state != "ready"
        ]
        broken += [f"G4: the walk {walk} was left behind" for walk in found.walks - {"scrub"}]
        broken += [
            f"G5: {key} is {task.stage}: {task.reason}"
            for key, task in found.tasks.items()
            if task.stage not in ("done", "superseded", "taking")
        ]
        return broken + [f"G4: {key} was never repaired" for key, by in self.planted.items() if by]


def _told_all(found: Found) -> list[str]:
    """G1: a row at some version has told every one up to it, and the last is what it is."""
    broken = []
    for key in {*found.rows, *found.messages}:
        versions = [each.version for each in found.messages[key]]
        row = found.rows.get(key)
        if row is None:
            broken.append(f"G2: {key} was told of and is not there")
        elif versions != list(range(1, row.version + 1)):
            broken.append(f"G1: {key} is at version {row.version}, told were {versions}")
        elif key[1] == "offer":
            last = found.messages[key][-1].payload
            if last != {**row.body, "shown": row.shown, "version": row.version}:
                broken.append(f"G1: {key} is {row.body}, told was {last}")
        elif found.messages[key][-1].payload["body"] != row.body:
            broken.append(f"G1: {key} is {row.body}, told was {found.messages[key][-1].payload}")
    return broken


def _told_in_order(found: Found) -> list[str]:
    """G3: what is published of a key is its first versions, one after another; no place stands twice."""
    broken = []
    places: Counter[tuple[str, tuple[int, int]]] = Counter()
    for key, told in found._all():
        published = [each.place for each in told if each.place is not None]
        places.update((f"{key[1] == 'request'}", place) for place in published)
        if [each.place for each in told[: len(published)]] != sorted(published):
            broken.append(f"G3: {key} was published as {[(each.version, each.place) for each in told]}")
    return broken + [f"G3: {place} stands twice" for place, times in places.items() if times > 1]


def _banned(found: Found) -> list[str]:
    """Opinions are applied by their own version: what they say grows, and the last one holds."""
    broken = []
    for (offer_id, kind), told in found.messages.items():
        if kind != "moderation":
            continue
        versions = [each.payload["body"]["version"] for each in told]
        if versions != sorted(set(versions)):
            broken.append(f"X2: of {offer_id} were applied the opinions {versions}")
        history = found.history(offer_id)
        if history and history[-1]["is_banned"] != told[-1].payload["body"]["is_banned"]:
            broken.append(f"X1: the last opinion of {offer_id} is {told[-1].payload}, which it is not")
    unheard = [
        offer_id
        for offer_id, offer in _last(found).items()
        if offer["is_banned"] and not found.messages[offer_id, "moderation"]
    ]
    return broken + [f"X2: {offer_id} is banned and nobody was of that opinion" for offer_id in unheard]


def _asked(found: Found) -> list[str]:
    """A photo is asked for when its address enters an offer, and only then; what is ready stays ready."""
    broken = []
    for (offer_id, kind), told in list(found.messages.items()):
        if kind != "photos":
            continue
        before: dict[str, Body] = {}
        asked = []
        for each in told:
            photos = {photo["url"]: photo for photo in each.payload["body"].get("photos", [])}
            if fresh := [url for url in photos if url not in before]:
                asked.append((each.version, fresh))
            for url, photo in photos.items():
                if before.get(url, photo).get("state") == "ready" and photo.get("state") != "ready":
                    broken.append(f"X1: the photo {url} of {offer_id} was ready")
            before = photos
        requests = [(each.version, each.payload["urls"]) for each in found.requests[offer_id]]
        if asked != requests:
            broken.append(f"G1: of {offer_id} are new {asked}, asked for were {requests}")
        history = found.history(offer_id)
        if history and list(before) != history[-1]["photos"]:
            broken.append(f"G1: {offer_id} has the photos {history[-1]['photos']}, beside it {list(before)}")
    return broken


def compare_log(found: Found, logs: Iterable[Sequence[Entry]], at_the_end: bool) -> list[str]:
    """What a topic outside the store has: of every offer and kind growing versions at first, nothing else."""
    broken = []
    seen: dict[Key, list[int]] = defaultdict(list)
    for entry in (entry for log in logs for entry in log):
        payload = json.loads(entry.payload)
        key = (entry.key, payload.get("kind", "offer") if "body" in payload else "offer")
        if entry.version not in seen[key]:
            seen[key].append(entry.version)
        told = {each.version: each.payload for each in found.messages[key]}
        if told.get(entry.version) != payload:
            broken.append(f"G2: version {entry.version} of {key} was published and never committed")
    for key, versions in seen.items():
        if versions != list(range(1, len(versions) + 1)):
            broken.append(f"G3: of {key} were published {versions}")
    if at_the_end:
        broken += [
            f"G2: {key} is at version {row.version}, the topic at {len(seen[key])}"
            for key, row in found.rows.items()
            if len(seen[key]) != row.version
        ]
    return broken


# The rules, once more ------------------------------------------------------------------------------------------------


def shown(offer: Body) -> str:
    is_over = offer["is_banned"] and offer["status"] not in ("removed", "archived")
    return "banned" if is_over else str(offer["status"])


def is_in(offer: Body, preset: Body) -> bool:
    """Of conditions only `one_of` and `at_least`, of fields at the top: what the tests use."""
    if preset["statuses"] and shown(offer) not in preset["statuses"]:
        return False
    if preset["categories"] and offer["category"] not in preset["categories"]:
        return False
    if preset["is_from_feed"] is not None and preset["is_from_feed"] != (offer["external_id"] != ""):
        return False
    if preset["has_photos"] is not None and preset["has_photos"] != (len(offer["photos"]) > 0):
        return False
    for condition in preset["where"]:
        value = offer["content"].get(condition["field"])
        if condition["one_of"] and value not in condition["one_of"]:
            return False
        if condition["at_least"] is not None and (not isinstance(value, int) or value < condition["at_least"]):
            return False
    return True


def _last(found: Found) -> dict[str, Body]:
    return {key: each[-1].payload for (key, kind), each in found.messages.items() if kind == "offer" and each}


def _content(offer: Body) -> Body:
    return {name: value for name, value in offer.items() if name not in ("updated_at_us", "version")}


def _pairs(tx: Transaction, sql: str) -> dict[Any, Any]:
    return dict(map(tuple, tx.driver(sql)))


def _sums(tx: Transaction, sql: str) -> dict[tuple[str, Any], int]:
    sums: Counter[tuple[str, Any]] = Counter()
    for seller, name, value in tx.driver(sql):
        sums[seller, name] += int(value)
    return {key: value for key, value in sums.items() if value}
