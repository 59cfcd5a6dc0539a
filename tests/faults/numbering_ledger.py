"""The laws of numbering (N1 to N5), read from the folders of states and the coordinator's record, not by its own code.

A `Book` is shown the record. It reads every state that the record names with PyArrow, compares its files with their
checksums, and deals the places of each once more by hand, from the state before it.
"""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pyarrow.parquet as pq

from keyfold.core.store import Store

Key = tuple[int, str, int, int]
Place = tuple[int, int]
Json = dict[str, Any]
T = TypeVar("T")
KEY = ("business_id", "offer_id", "shop_id", "warehouse_id")
PLACE = ("shard_id", "doc_id")
TABLES = ("places", "free", "new_docs", "expired_docs", "remap")
ENDING_OF_AN_INDEX = ".index"


class Held(NamedTuple):
    place: Place
    generation: int
    is_reused: bool
    seen_run: int


class Contents:
    """A state as its files say."""

    def __init__(self, folder: Path, manifest: Json) -> None:
        self.manifest = manifest
        rows = {name: _rows(folder, name, manifest["files"]) for name in TABLES}
        self.twice = _repeated(map(_key, rows["places"]))
        self.places = {_key(row): _held(row) for row in rows["places"]}
        self.new = {_key(row): _held(row) for row in rows["new_docs"]}
        self.expired = {_key(row): _held(row) for row in rows["expired_docs"]}
        self.free = [_place(row) for row in rows["free"]]
        self.remap = {(row["old_shard_id"], row["old_doc_id"]): _place(row) for row in rows["remap"]}
        self.sizes = {shard["shard_id"]: shard["size"] for shard in manifest["shards"] if shard["size"]}
        self.type, self.scheme, self.rebuild, self.generation = map(int, manifest["version"].split("."))

    @property
    def run(self) -> int:
        return int(self.manifest["run"])

    @property
    def input(self) -> set[Key]:
        """What this run was given: nothing else is seen in it."""
        return {key for key, held in self.places.items() if held.seen_run == self.run}

    def broken_alone(self) -> list[str]:
        """N1, and that every place ever given in this V is in somebody's hands or free."""
        broken = [f"N1: {key} is there twice" for key in self.twice]
        taken = [held.place for held in self.places.values()]
        broken += [f"N1: {place} is given twice" for place in _repeated(taken)]
        broken += [f"N1: {place} is free twice" for place in _repeated(self.free)]
        every = {(shard, doc) for shard, size in self.sizes.items() for doc in range(size)}
        if set(taken) & set(self.free):
            broken.append(f"N1: {sorted(set(taken) & set(self.free))} are given and free")
        if set(taken) | set(self.free) != every:
            broken.append(f"N5: places {sorted((set(taken) | set(self.free)) ^ every)} are not those ever given")
        scheme = self.manifest["scheme"]["shards"]
        broken += [
            f"N1: {key} is not in its shard" for key, held in self.new.items() if held.place[0] != _of(key, scheme)
        ]
        return broken


class Book:
    """What the record has said so far, and what must follow from it."""

    def __init__(self, clusters: Mapping[str, Path], type_name: str, *, copies: int, ratio: float = 1.5) -> None:
        self.broken: list[str] = []  # what was seen and cannot be
        self.inputs: set[frozenset[Key]] = set()  # what runs were given; empty: anything
        self.spoilt: set[tuple[str, str]] = set()  # cluster and path, on purpose
        self.contents: dict[str, Contents] = {}  # by checksum, also of states that are gone
        self._clusters = clusters
        self._type = type_name
        self._copies = copies
        self._ratio = ratio
        self._last: Json = {}
        self._compared: set[str] = set()
        self._since: dict[str, int] = {}  # the first ticket of every version
        self._meant: dict[str, dict[Place, Key]] = defaultdict(dict)  # by version

    def compare(self, record: Json) -> list[str]:
        """The laws that this record, and what it names, breaks."""
        broken = self.broken + self._follows(record) + _tickets(record)
        current = current_of(record)
        for state in record.get("states", ()):
            whole = [] if state.get("is_deleted") else self._whole(state)
            lacking = set(state["clusters"]) - set(whole) - self._spoilt(state["path"])
            if state is current and len(whole) < self._copies - len(self._spoilt(state["path"])):
                broken.append(f"N4: the last state, {state['version']}, is whole on {whole} alone")
            elif lacking and not state.get("dropped_at_us"):
                broken.append(f"N4: {state['version']} is not whole on {sorted(lacking)}")
            if state["checksum"] not in self.contents and whole:
                self._learn(state, whole[0])
        for state in record.get("states", ()):
            self._since.setdefault(state["version"], state["ticket"])
            if state["checksum"] in self.contents and state["checksum"] not in self._compared:
                self._compared.add(state["checksum"])
                broken += self._compare_state(state)
        self._last = record
        return broken

    def leftovers(self, record: Json) -> list[str]:
        """What lies about that the record does not name."""
        paths = {state["path"] for state in record.get("states", ()) if not state.get("is_deleted")}
        paths |= set(record.get("strays", ()))
        named = paths | {path + ENDING_OF_AN_INDEX for path in paths}
        found = [
            f"{self._type}/{path.name}" for root in self._clusters.values() for path in root.glob(f"{self._type}/*")
        ]
        return [f"N4: {path} was left behind" for path in found if path not in named]

    # The record -------------------------------------------------------------------------------------------------------

    def _follows(self, record: Json) -> list[str]:
        """What may change from one look to the next: states are added, and marked; the ticket and V only grow."""
        before, broken = self._last, []
        known = {state["checksum"]: state for state in record.get("states", ())}
        for state in before.get("states", ()):
            now = known.get(state["checksum"])
            if now is None and not state.get("is_deleted"):
                broken.append(f"N3: the record has forgotten {state['version']}")
            elif now is not None and _unmarked(now) != _unmarked(state):
                broken.append(f"N3: what is said of {state['version']} has changed")
        if _ticket(record) < _ticket(before):
            broken.append(f"N3: ticket {_ticket(record)} was taken after {_ticket(before)}")
        if record.get("rebuild_next", 0) < before.get("rebuild_next", 0):
            broken.append("N5: a V that was used may be used again")
        return broken

    # The files --------------------------------------------------------------------------------------------------------

    def _spoilt(self, path: str) -> set[str]:
        return {cluster for cluster, spoilt in self.spoilt if spoilt == path}

    def _whole(self, state: Json) -> list[str]:
        """The clusters that have all of a state, byte for byte."""
        return [name for name, root in self._clusters.items() if _is_whole(root / state["path"], state["checksum"])]

    def _learn(self, state: Json, cluster: str) -> None:
        folder = self._clusters[cluster] / state["path"]
        self.contents[state["checksum"]] = Contents(folder, json.loads((folder / "manifest.json").read_bytes()))

    # The places -------------------------------------------------------------------------------------------------------

    def _compare_state(self, state: Json) -> list[str]:
        after = self.contents[state["checksum"]]
        broken = after.broken_alone()
        if (after.manifest["version"], after.run) != (state["version"], state["run"]):
            broken.append(
                f"N4: {state['version']} of run {state['run']} names a state that is {after.manifest['version']}"
            )
        for key, held in after.places.items():
            if self._meant[state["version"]].setdefault(held.place, key) != key:
                broken.append(f"N5: {state['version']} names two states: {held.place} is given to two")
        if self.inputs and after.input not in self.inputs:
            broken.append(f"N2: run {after.run} has seen {len(after.input)} offers that nobody sent together")
        parent = after.manifest["parent"]
        if not parent:
            return broken + _dense(after) + self._new_rebuild(state)
        if parent not in self.contents:
            return broken  # it was gone before anybody looked
        before = self.contents[parent]
        if after.run != before.run + 1:
            broken.append(f"N5: run {after.run} follows {before.run}")
        if after.manifest["reason"] in ("forced", "scheme", "ratio"):
            return broken + _rebuilt(before, after) + self._new_rebuild(state)
        if after.manifest["reason"] == "restart":
            broken += self._new_rebuild(state)
        elif (after.scheme, after.rebuild) != (before.scheme, before.rebuild):
            broken.append(f"N5: {state['version']} follows without a reason")
        return broken + _moved_on(before, after, self._ratio)

    def _new_rebuild(self, state: Json) -> list[str]:
        """N5: V was never used before, and G starts at 0."""
        version = list(map(int, state["version"].split(".")))
        used = {int(each.split(".")[2]) for each, ticket in self._since.items() if ticket < state["ticket"]}
        if version[3] or (used and version[2] <= max(used)):
            return [f"N5: {state['version']} is a rebuild after V {sorted(used)}"]
        return []


def record_in(store: Store, type_name: str = "main") -> Json:
    """What the table of pointers holds."""
    rows = store.read(lambda tx: list(tx.driver(f"SELECT data FROM pointers WHERE name = 'numbering/{type_name}'")))
    return json.loads(bytes(rows[0][0])) if rows else {}


def current_of(record: Json) -> Json | None:
    return next((state for state in reversed(record.get("states", ())) if not state.get("invalid")), None)


def _tickets(record: Json) -> list[str]:
    """N3: accepted tickets grow, and none is newer than the last that was taken."""
    tickets = [state["ticket"] for state in record.get("states", ())]
    broken = []
    if tickets != sorted(set(tickets)):
        broken.append(f"N3: states were published under tickets {tickets}")
    if tickets and max(tickets) > _ticket(record):
        broken.append(f"N3: ticket {max(tickets)} was accepted, and never noted as taken")
    return broken


def _ticket(record: Json) -> int:
    return int((record.get("taken") or {}).get("ticket", 0))


def _unmarked(state: Json) -> Json:
    return {name: value for name, value in state.items() if name not in ("invalid", "dropped_at_us", "is_deleted")}


def _is_whole(folder: Path, checksum: str) -> bool:
    try:
        manifest = (folder / "manifest.json").read_bytes()
        if hashlib.sha256(manifest).hexdigest() != checksum:
            return False
        return all(
            hashlib.sha256((folder / each["path"]).read_bytes()).hexdigest() == each["sha256"]
            for each in json.loads(manifest)["files"]
        )
    except OSError:
        return False


def _rows(folder: Path, name: str, files: Collection[Json]) -> list[Json]:
    paths = [each["path"] for each in files if each["path"].startswith(f"{name}/")]
    return [row for path in paths for row in pq.read_table(folder / path).to_pylist()]


def _key(row: Json) -> Key:
    return row["business_id"], row["offer_id"], row["shop_id"], row["warehouse_id"]


def _place(row: Json) -> Place:
    return row["shard_id"], row["doc_id"]


def _held(row: Json) -> Held:
    return Held(_place(row), row["generation"], row["is_reused"], row["seen_run"])


def _of(key: Key, shards: int) -> int:
    """The shard of an offer by scheme `offer`."""
    text = f"{key[0]}/{key[2]}/{key[3]}/{key[1]}"
    return int(hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()[:6], 16) % shards


def _repeated(given: Iterable[T]) -> list[T]:
    return [each for each, times in Counter(given).items() if times > 1]


# One run, by hand -----------------------------------------------------------------------------------------------------


def _dealt(keys: Iterable[Key], free: Iterable[Place], sizes: Mapping[int, int], shards: int) -> dict[Key, Place]:
    """N5: freed places first, then the next after the greatest."""
    waiting, tops = sorted(free), dict(sizes)
    given: dict[Key, Place] = {}
    for key in sorted(keys):
        shard = _of(key, shards)
        place = next((each for each in waiting if each[0] == shard), None)
        if place is not None:
            waiting.remove(place)
        else:
            place = (shard, tops.get(shard, 0))
            tops[shard] = place[1] + 1
        given[key] = place
    return given


def _dense(after: Contents) -> list[str]:
    """Places dealt anew, to what this run was given and to nobody else."""
    wanted = _dealt(after.places, (), {}, after.manifest["scheme"]["shards"])
    broken = [] if wanted == _places(after) else ["N5: a rebuild has not dealt places from 0"]
    if after.input != set(after.places) or after.free:
        broken.append("N5: a rebuild has kept more than its input")
    if any(held.generation or held.is_reused for held in after.places.values()):
        broken.append("N2: a rebuild has places of another generation than 0")
    return broken


def _rebuilt(before: Contents, after: Contents) -> list[str]:
    broken = _dense(after)
    moved = {held.place: after.places[key].place for key, held in before.places.items() if key in after.places}
    if after.remap != moved:
        broken.append("N2: the map of a rebuild is another")
    if set(after.expired) != set(before.places) - set(after.places):
        broken.append("N2: the expired of a rebuild are others")
    return broken


def _moved_on(before: Contents, after: Contents, ratio: float) -> list[str]:
    is_restart = after.manifest["reason"] == "restart"
    run, ttl = after.run, after.manifest["ttl_runs"]
    broken = []
    gone = {key for key in before.places if key not in after.places}
    due = {key for key, held in before.places.items() if run - held.seen_run > ttl}
    if wrong := [key for key in gone if key not in due]:
        broken.append(f"N2: {sorted(wrong)} lost their places before they had expired")
    if late := [key for key in due - gone if after.places[key].seen_run != run]:
        broken.append(f"N2: {sorted(late)} have expired and keep their places")
    if set(after.expired) != gone:
        broken.append("N2: the expired are not those who lost their places")
    for key in before.places.keys() & after.places.keys():
        was, now = before.places[key], after.places[key]
        since = (0, False) if is_restart else (was.generation, was.is_reused)
        if now.place != was.place or (now.generation, now.is_reused) != since:
            broken.append(f"N2: {key} held {was}, and now {now}")
        if now.seen_run not in (was.seen_run, run):
            broken.append(f"N2: {key} was last seen in run {was.seen_run}, and now {now.seen_run}")
    new = set(after.places) - set(before.places)
    freed = {*before.free, *(before.places[key].place for key in gone)}
    wanted = _dealt(new, freed, before.sizes, after.manifest["scheme"]["shards"])
    if wanted != {key: after.places[key].place for key in new}:
        broken.append("N5: new places are not the freed ones first, and then the next")
    generation = 0 if is_restart else before.generation + bool(new)
    if after.generation != generation:
        broken.append(f"N5: generation {after.generation} follows {before.generation}")
    for key in new:
        is_reused = wanted[key] in freed and not is_restart
        if after.places[key][1:] != (generation, is_reused, run) or after.new.get(key) != after.places[key]:
            broken.append(f"N2: {key} was given {after.places[key]}, which is not told as such")
    if set(after.new) != new:
        broken.append("N2: the new are not those who were given a place")
    tops: dict[int, int] = defaultdict(int)
    seen: dict[int, int] = defaultdict(int)
    for held in after.places.values():
        tops[held.place[0]] = max(tops[held.place[0]], held.place[1] + 1)
        seen[held.place[0]] += held.seen_run == run
    broken += [
        f"N5: shard {shard} should have been rebuilt" for shard, top in tops.items() if top > ratio * seen[shard]
    ]
    return broken


def _places(state: Contents) -> dict[Key, Place]:
    return {key: held.place for key, held in state.places.items()}
