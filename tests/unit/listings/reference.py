"""The rules of listings once more, in plain dicts and slowly: what drafts, offers and what is kept at them become.

Written from the specification, without the product's code. Presets, counts and counters follow from what is told, and
are folded in tests/faults/listing_ledger.py.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

DAY_US = 86_400_000_000
EXPIRE_US, ARCHIVE_US, DRAFT_US, RETURN_US = 60 * DAY_US, 30 * DAY_US, 90 * DAY_US, 30 * DAY_US
SELLERS_MOVES = {
    "active": {"sold", "removed"},
    "expired": {"active", "sold", "removed"},
}

Dict = dict[str, Any]


class Refused(Exception):
    """`stale`, `conflict`, `absent` or `invalid`."""


class Reference:
    """What must be there, if everything was asked one after another."""

    def __init__(self) -> None:
        self.offers: dict[str, Dict] = {}
        self.told: dict[tuple[str, str], list[Any]] = {}  # by offer and kind, from version 1 on
        self.requests: dict[str, list[tuple[int, list[str]]]] = {}
        self.drafts: dict[tuple[str, str], Dict] = {}
        self.current: dict[str, str] = {}
        self.fed: dict[tuple[str, str], Dict] = {}  # by seller and external id: offer, task, when it was removed

    # Drafts -----------------------------------------------------------------------------------------------------------

    def open_draft(self, anonymous: str, seller: str, category: str, new_id: str, now_us: int) -> tuple[str, str]:
        """The owner and id of the draft that is gone on with; `new_id` is what the product calls one that it made."""
        owner = seller or anonymous
        there = [(each, self.current[each]) for each in (seller, anonymous) if each and each in self.current]
        if not there:
            self._put_draft(owner, new_id, {"version": 1, "filled": _empty(category), "offer_id": "", "at": now_us})
            return owner, new_id
        alike = [key for key in there if category and self.drafts[key]["filled"]["category"] == category]
        if category and not alike:
            chosen = there[0]
        elif len(alike) == 1:
            chosen = alike[0]
        else:
            chosen = there[0]
            for key in there[1:]:
                if self.drafts[key]["at"] > self.drafts[chosen]["at"]:
                    chosen = key
        draft = dict(self.drafts[chosen])
        is_reset = bool(category) and not alike
        if is_reset and draft["filled"] != _empty(category):
            draft["filled"] = _empty(category)
            if chosen[0] == owner:
                draft["version"] += 1
                draft["at"] = max(now_us, draft["at"])
        if chosen[0] != owner:
            draft["version"] += 1
        for key in there:
            del self.drafts[key]
            del self.current[key[0]]
        self._put_draft(owner, chosen[1], draft)
        return owner, chosen[1]

    def _put_draft(self, owner: str, draft_id: str, draft: Dict) -> None:
        self.drafts[owner, draft_id] = draft
        self.current[owner] = draft_id

    def fill(self, owner: str, draft_id: str, version: int, filled: Dict, now_us: int) -> int:
        draft = self.drafts.get((owner, draft_id))
        if draft is None:
            raise Refused("absent")
        if draft["offer_id"] or draft["version"] != version:
            raise Refused("conflict")
        if filled != draft["filled"]:
            draft.update(filled=filled, version=version + 1, at=max(now_us, draft["at"]))
        return int(draft["version"])

    def forget_drafts(self, now_us: int) -> None:
        for (owner, draft_id), draft in list(self.drafts.items()):
            if draft["at"] < now_us - DRAFT_US:
                del self.drafts[owner, draft_id]
                if self.current.get(owner) == draft_id:
                    del self.current[owner]

    def publish(self, owner: str, draft_id: str, version: int, is_valid: bool, new_id: str, now_us: int) -> str:
        """The offer that it is now; `new_id` is what the product calls it where it is new."""
        draft = self.drafts.get((owner, draft_id))
        if draft is None:
            raise Refused("absent")
        if draft["offer_id"]:
            return str(draft["offer_id"])
        if draft["version"] != version:
            raise Refused("conflict")
        if not is_valid:
            raise Refused("invalid")
        self.make(new_id, owner, draft["filled"], now_us)
        draft.update(filled=_empty(""), version=version + 1, offer_id=new_id, at=now_us)
        del self.current[owner]
        return new_id

    # Offers -----------------------------------------------------------------------------------------------------------

    def make(self, offer_id: str, seller: str, filled: Dict, now_us: int, external_id: str = "") -> None:
        self.offers[offer_id] = {
            "offer_id": offer_id,
            "seller_id": seller,
            "status": "active",
            "is_banned": False,
            "was_sold": False,
            "reason": "",
            "external_id": external_id,
            "created_at_us": now_us,
            "status_at_us": now_us,
            "updated_at_us": now_us,
            **_taken(filled),
        }
        self._tell(offer_id, "offer", self.offers[offer_id])
        self._photos(offer_id)

    def version(self, offer_id: str, kind: str = "offer") -> int:
        return len(self.told.get((offer_id, kind), ()))

    def edit(self, offer_id: str, version: int, filled: Dict, is_valid: bool, now_us: int) -> int:
        if offer_id not in self.offers:
            raise Refused("absent")
        if self.version(offer_id) != version:
            raise Refused("stale")
        if not is_valid:
            raise Refused("invalid")
        self.change(offer_id, now_us, **_taken(filled))
        return self.version(offer_id)

    def move(self, offer_id: str, status: str, version: int | None, reason: str, now_us: int) -> int:
        if offer_id not in self.offers:
            raise Refused("absent")
        if version is not None and self.version(offer_id) != version:
            raise Refused("stale")
        before = self.offers[offer_id]["status"]
        if before != status:
            if status not in SELLERS_MOVES.get(before, ()):
                raise Refused("conflict")
            self.change(offer_id, now_us, status=status, reason=reason if status == "removed" else "")
        return self.version(offer_id)

    def change(self, offer_id: str, now_us: int, **fields: Any) -> None:
        before = self.offers[offer_id]
        after = {**before, **fields}
        if after == before:
            return
        after["updated_at_us"] = max(now_us, before["updated_at_us"])
        if after["status"] != before["status"]:
            after["status_at_us"] = after["updated_at_us"]
            after["was_sold"] = before["was_sold"] or after["status"] == "sold"
        self.offers[offer_id] = after
        self._tell(offer_id, "offer", after)
        if after["photos"] != before["photos"]:
            self._photos(offer_id)

    def age(self, now_us: int) -> None:
        """The scheduler has seen everything."""
        for offer_id, offer in self.offers.items():
            stood = now_us - offer["status_at_us"]
            if offer["status"] == "active" and stood >= EXPIRE_US:
                self.change(offer_id, now_us, status="expired", reason="")
            elif offer["status"] in ("expired", "sold", "removed") and stood >= ARCHIVE_US:
                self.change(offer_id, now_us, status="archived")

    # What is kept at them ---------------------------------------------------------------------------------------------

    def judge(self, offer_id: str, version: int, is_banned: bool, now_us: int) -> str:
        if offer_id not in self.offers:
            return "unknown"
        told = self.told.get((offer_id, "moderation"), [])
        if told and told[-1]["version"] >= version:
            return "old"
        self.change(offer_id, now_us, is_banned=is_banned)
        self._tell(offer_id, "moderation", {"version": version, "is_banned": is_banned})
        return "applied"

    def answer_photos(self, offer_id: str, answers: Sequence[tuple[str, Any, str]]) -> None:
        """Answers that came together: address, image, error."""
        told = self.told.get((offer_id, "photos"))
        if not told:
            return
        photos = copy.deepcopy(told[-1])
        for photo in photos:
            for url, image, error in answers:
                if photo["url"] == url and not (photo["state"] == "ready" and error):
                    photo.update(state="failed" if error else "ready", image=image, error=error)
        if photos != told[-1]:
            self._tell(offer_id, "photos", photos)

    def _photos(self, offer_id: str) -> None:
        told = self.told.get((offer_id, "photos"), [[]])
        known = {photo["url"]: photo for photo in told[-1]}
        wanted = self.offers[offer_id]["photos"]
        if not wanted and not known:
            return
        fresh = {"state": "asked", "image": None, "error": ""}
        self._tell(offer_id, "photos", [known.get(url, {"url": url, **fresh}) for url in wanted])
        if new := [url for url in wanted if url not in known]:
            self.requests.setdefault(offer_id, []).append((self.version(offer_id, "photos"), new))

    def write_stage(self, offer_id: str, stage: str, version: int, state: Any) -> int:
        kind = "billing" if stage == "billing" else f"stage:{stage}"
        if offer_id not in self.offers:
            raise Refused("absent")
        if self.version(offer_id, kind) != version:
            raise Refused("stale")
        told = self.told.get((offer_id, kind))
        if not told or told[-1] != state:
            self._tell(offer_id, kind, state)
        return self.version(offer_id, kind)

    # Feeds ------------------------------------------------------------------------------------------------------------

    def feed(
        self, seller: str, task_id: int, items: Mapping[str, Dict | None], new_ids: Mapping[str, str], now_us: int
    ) -> None:
        """A whole feed, newer than any before it; None is an item that is not valid. `new_ids` are the product's."""
        for name, filled in items.items():
            row = self.fed.get((seller, name))
            offer = self.offers[row["offer_id"]] if row is not None else None
            offer_id = ""
            if offer is not None and offer["status"] in ("active", "expired", "sold"):
                offer_id = offer["offer_id"]
                if filled is not None:
                    status = "active" if offer["status"] == "expired" else offer["status"]
                    self.change(offer_id, now_us, status=status, **_taken(filled))
            elif offer is not None and offer["was_sold"]:
                offer_id = offer["offer_id"]
            elif filled is None:
                continue
            elif offer is not None and offer["status"] == "removed" and offer["status_at_us"] >= now_us - RETURN_US:
                offer_id = offer["offer_id"]
                self.change(offer_id, now_us, status="active", reason="", **_taken(filled))
            else:
                offer_id = new_ids[name]
                self.make(offer_id, seller, filled, now_us, name)
            self.fed[seller, name] = {"offer_id": offer_id, "task": task_id, "removed_at": None}
        for (owner, _), row in self.fed.items():
            if owner == seller and row["task"] < task_id and row["removed_at"] is None:
                row["removed_at"] = now_us
                if self.offers[row["offer_id"]]["status"] in ("active", "expired"):
                    self.change(row["offer_id"], now_us, status="removed", reason="no longer in the feed")

    def forget_fed(self, now_us: int) -> None:
        """What a feed removed too long ago to return."""
        for key, row in list(self.fed.items()):
            if row["removed_at"] is not None and row["removed_at"] < now_us - RETURN_US:
                del self.fed[key]

    def _tell(self, offer_id: str, kind: str, body: Any) -> None:
        self.told.setdefault((offer_id, kind), []).append(copy.deepcopy(body))


def _empty(category: str) -> Dict:
    return {"category": category, "content": {}, "price": None, "photos": []}


def _taken(filled: Mapping[str, Any]) -> Dict:
    """What an offer takes from what was filled in."""
    taken = {name: copy.deepcopy(filled[name]) for name in ("category", "content", "price")}
    return {**taken, "photos": list(dict.fromkeys(filled["photos"]))}
