"""Durable profile updates: a stream of events through the profile service, against Redis with a Lua script.

20,000 profiles, 200 keys, both by Zipf 1.1, decay 1, at most 60 keys a profile; every round starts from an empty store.
"ids" is the service's `count_events` with a mark an event, in transactions of what the HTTP door gathers
(`limits.gather_items_max`), events decoded beforehand; ids grow with time, "random ids" are UUIDs of version 4.
"positions" is the consumer that `keyfold work` runs, in its own batches, on an embedded log that was filled before the
clock started: reading the topic, decoding, and moving the position are in the measure. "published" puts every changed
profile in the outbox (`profiles.publish`, the default), "unpublished" does not; the relay of that topic is in neither.
Ours syncs every commit: SQLite with `synchronous=FULL`, PostgreSQL with one writer and `synchronous_commit`.

The peer is one redis-py client (with hiredis) and a Redis that syncs once a second, so that a crash costs it a second;
it knows nothing of event ids and counts a repeat twice. The script decays, keeps the time of each key and evicts the
oldest above the cap: a hash of packed (value, time), which was faster here than a hash and a sorted set. HINCRBYFLOAT
only adds. Both are pipelined, 1,000 commands at a time. A few profiles of every run are compared with a plain sum.
"""

import gc
import itertools
import math
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import redis

from bench import stores
from bench.harness import Goal, Race, Side, rate
from bench.redis_server import RedisServer
from bench.serving import prepared
from keyfold.core import memory, outbox
from keyfold.core.consumer import ConsumerWorker
from keyfold.core.context import Context
from keyfold.core.limits import Limits
from keyfold.core.relay import Relay
from keyfold.core.settings import load
from keyfold.core.topics.topic import Message
from keyfold.core.workers import consumer_named
from keyfold.counters.counters import Counters
from keyfold.profiles.handlers import Event, Updates, handler
from keyfold.profiles.model import event_of
from keyfold.profiles.part import PART
from keyfold.profiles.service.counting import count_events
from keyfold.profiles.service.product import Product, opened
from keyfold.profiles.service.reading import stored_bodies
from keyfold.profiles.settings import ProfilesSettings
from keyfold.profiles.worker import consumer_name
from tests.product import consume_all, relay_all

PROFILES = 20_000
KEYS = 200
ZIPF = 1.1
RECORDS_MAX = 60
EXPIRE_DAYS = 30
DECAY = 1.0
WEEK_SECONDS = 604_800
STREAM_SECONDS = 86_400
TRANSACTION_EVENTS = Limits().gather_items_max
PIPELINE = 1_000
WARM = 500
COMPARED = 50

LOG = "bench"
COUNTER, TIME_COUNTER = 1, 1001

LUA, ADD_ONLY = "Redis, Lua script", "Redis, HINCRBYFLOAT"
IDS, IDS_UNPUBLISHED, RANDOM = "ids, published", "ids, unpublished", "random ids, published"
POSITIONS, POSITIONS_UNPUBLISHED = "positions, published", "positions, unpublished"
WITH_IDS = {"SQLite": (1.5, 10), "PostgreSQL": (0.5, 3)}
BY_POSITION = {"SQLite": (3, 10), "PostgreSQL": (0.5, 3)}

SCRIPT = """
local value, time = tonumber(ARGV[2]), tonumber(ARGV[3])
local found = redis.call('HGET', KEYS[1], ARGV[1])
if found then
  local old, at = struct.unpack('<dI4', found)
  if at > time then
    value = old + value * math.exp(-tonumber(ARGV[4]) * (at - time) / 604800)
    time = at
  else
    value = value + old * math.exp(-tonumber(ARGV[4]) * (time - at) / 604800)
  end
end
redis.call('HSET', KEYS[1], ARGV[1], struct.pack('<dI4', value, time))
if not found and redis.call('HLEN', KEYS[1]) > tonumber(ARGV[5]) then
  local all = redis.call('HGETALL', KEYS[1])
  local oldest, oldest_time = nil, math.huge
  for index = 1, #all, 2 do
    local _, at = struct.unpack('<dI4', all[index + 1])
    if at < oldest_time then oldest, oldest_time = all[index], at end
  end
  redis.call('HDEL', KEYS[1], oldest)
end
"""

_HEAD = """syntax = "proto2";
package bench;
import "google/protobuf/descriptor.proto";
enum EngineNamespace { EN_KEY = 1; }
enum ValueFunction { VF_FLOAT = 1; VF_DOUBLE = 2; VF_AGE = 3; VF_FIXED64 = 4; }
enum IdFunction { IF_ID = 1; IF_POLY2 = 2; }
enum ProfileType { PT_USER = 1; }
enum UsageRestriction { UR_NONE = 1; }
message CleanUpSettings {
  optional uint64 MaxRecords = 1;
  optional uint64 ExpireDays = 2;
  optional uint64 MaxDelayedRecords = 3;
}
message TCounterDescription {
  optional EngineNamespace EngineNamespace = 1;
  optional EngineNamespace SecondaryEngineNamespace = 2;
  optional ValueFunction ValueFunction = 3;
  optional IdFunction IdFunction = 4;
  optional double DecayFactor = 5;
  optional CounterId TimeCounterId = 6;
  repeated string InputTypes = 7;
  optional string Description = 8;
  optional UsageRestriction UsageRestriction = 9;
  optional ProfileType ProfileType = 10;
  optional bool NoOperation = 11;
  optional bool NotGlued = 12;
  optional bool Idf = 13;
  optional CleanUpSettings CleanUpSettings = 14;
}
extend google.protobuf.EnumValueOptions { optional TCounterDescription CounterDescription = 50539; }
enum CounterId {
"""


def catalog(counters: int) -> str:
    """A catalog of so many counters, 1, 2, …, each with a time counter, 1001, 1002, …, of its own."""
    lines = [_HEAD]
    for number in range(COUNTER, COUNTER + counters):
        lines.append(
            f"  CI_{number}_COUNT = {number} [(CounterDescription) = {{ EngineNamespace: EN_KEY"
            f" ValueFunction: VF_FLOAT IdFunction: IF_ID DecayFactor: {DECAY:g} TimeCounterId: CI_{number}_TIME"
            f' InputTypes: "{LOG}" }}];\n'
            f"  CI_{number}_TIME = {number + 1000} [(CounterDescription) = {{ EngineNamespace: EN_KEY"
            f" ValueFunction: VF_AGE IdFunction: IF_ID NoOperation: true"
            f" CleanUpSettings: {{ MaxRecords: {RECORDS_MAX} ExpireDays: {EXPIRE_DAYS} }} }}];\n"
        )
    return "".join([*lines, "}\n"])


@handler(LOG)
def count(event: Event, updates: Updates) -> None:
    """The handler of the log: this module is what `profiles.handlers` names."""
    updates.one(COUNTER, event["key"])


@contextmanager
def profiles_at(url: str, counters: int = 1, **options: object) -> Iterator[tuple[Context, Product]]:
    """The product with profiles on the store at `url`; options are settings of the section `profiles`."""
    prepared(url)
    with tempfile.TemporaryDirectory(prefix="keyfold-bench-") as folder:
        path = Path(folder) / "catalog.proto"
        path.write_text(catalog(counters))
        own = {"store.url": url, "profiles.catalog": str(path), "profiles.handlers": __name__}
        given = {f"profiles.{name}": value for name, value in options.items()}
        settings = load(parts={"profiles": ProfilesSettings}, environ={}, options={**own, **given})
        context = Context.open(settings, [PART])
        try:
            yield context, opened(context)
        finally:
            context.close()


class Stream:
    """The events of a run, the same for every side: growing times that end now."""

    def __init__(self, count: int) -> None:
        chance = np.random.default_rng(2)
        self.profile = zipf(chance, PROFILES, count).tolist()
        self.key = zipf(chance, KEYS, count).tolist()
        first = int(time.time()) - STREAM_SECONDS
        self.time = np.sort(first + chance.integers(0, STREAM_SECONDS, count)).tolist()
        self.count = count

    def fields(self, random_ids: bool) -> list[dict[str, Any]]:
        """Events as they are sent, decoded."""
        ids = (str(uuid.uuid4()) if random_ids else f"{1_700_000_000_000 + n:015d}-bench" for n in itertools.count())
        return [
            {"event_id": event_id, "time": at, "profile_id": name(profile), "key": key}
            for event_id, at, profile, key in zip(ids, self.time, self.profile, self.key, strict=False)
        ]

    def expected(self) -> dict[int, dict[int, float]]:
        """Some profiles that the cap does not touch, summed event by event: value by key, as of the key's last time."""
        keys: dict[int, set[int]] = {}
        for profile, key in zip(self.profile, self.key, strict=True):
            keys.setdefault(profile, set()).add(key)
        chosen = sorted(profile for profile, own in keys.items() if len(own) <= RECORDS_MAX)[:COMPARED]
        found: dict[int, dict[int, tuple[float, int]]] = {profile: {} for profile in chosen}
        for profile, key, at in zip(self.profile, self.key, self.time, strict=True):
            if profile in found:
                value, last = found[profile].get(key, (0.0, at))
                found[profile][key] = value * math.exp(-DECAY * (at - last) / WEEK_SECONDS) + 1, at
        return {profile: {key: value for key, (value, _) in own.items()} for profile, own in found.items()}


def zipf(chance: np.random.Generator, size: int, count: int) -> "np.ndarray[Any, Any]":
    weights = 1.0 / np.arange(1, size + 1) ** ZIPF
    return chance.choice(size, count, p=weights / weights.sum())


def name(profile: int) -> str:
    return f"user-{profile}"


def races(quick: bool) -> Iterator[Race]:
    memory.settle()  # as every server and worker does when it starts
    stream = Stream(20_000 if quick else 200_000)
    with RedisServer() as server, stores.each_kind() as kinds:
        peer = Peer(server, stream)
        for kind, new_url in kinds.items():
            yield _race(kind, Ours(new_url, stream), peer, server.version())


def _race(kind: str, ours: "Ours", peer: "Peer", version: str) -> Race:
    sides = [
        Side(IDS, lambda: ours.by_id()),
        Side(IDS_UNPUBLISHED, lambda: ours.by_id(publish=False)),
        Side(RANDOM, lambda: ours.by_id(random_ids=True)),
        Side(POSITIONS, lambda: ours.by_position()),
        Side(POSITIONS_UNPUBLISHED, lambda: ours.by_position(publish=False)),
        Side(LUA, peer.lua),
        Side(ADD_ONLY, peer.add_only),
    ]
    goals = [_goal(side, *WITH_IDS[kind]) for side in (IDS, IDS_UNPUBLISHED, RANDOM)]
    goals += [_goal(side, *BY_POSITION[kind]) for side in (POSITIONS, POSITIONS_UNPUBLISHED)]
    goals += [Goal(side=side, against=ADD_ONLY) for side in (IDS, POSITIONS)]
    return Race(
        title=f"{ours.count:,} profile updates, {kind}, against Redis {version}",
        unit="events/s",
        sides=sides,
        goals=goals,
    )


def _goal(side: str, must: float, moonshot: float) -> Goal:
    return Goal(side=side, against=LUA, must=must, moonshot=moonshot)


class Ours:
    """The profile service on fresh stores of one kind."""

    def __init__(self, new_url: stores.NewUrl, stream: Stream) -> None:
        self._new_url = new_url
        self._stream = stream
        self._expected = stream.expected()
        self.count = stream.count

    def by_id(self, *, publish: bool = True, random_ids: bool = False) -> float:
        events = [(LOG, event_of(fields)) for fields in self._stream.fields(random_ids)]
        with profiles_at(self._new_url(), publish=publish) as (context, product):
            count_marked(context, product, [(LOG, event_of(fields)) for fields in _warm_fields()])
            result = undisturbed_rate(len(events), lambda: count_marked(context, product, events))
            self._must_be_counted(context, product)
            return result

    def by_position(self, *, publish: bool = True) -> float:
        with profiles_at(self._new_url(), publish=publish, by_position=[LOG]) as (context, product):
            relay = Relay(context, product.topic_of(LOG), "bench")
            worker = ConsumerWorker(context, consumer_named(context, consumer_name(LOG)), "bench")
            _put(context, product, _warm_fields(), relay)
            consume_all(worker)
            _put(context, product, self._stream.fields(random_ids=False), relay)
            result = undisturbed_rate(self.count, lambda: consume_all(worker))
            self._must_be_counted(context, product)
            relay.stop()
            worker.stop()
            return result

    def _must_be_counted(self, context: Context, product: Product) -> None:
        keys = [("user", name(profile)) for profile in self._expected]
        bodies = context.store.read(lambda tx: stored_bodies(tx, keys))
        now = int(time.time())
        for profile, expected in self._expected.items():
            counters = Counters(product.catalog, bodies["user", name(profile)], now)
            group, counter = product.catalog.groups[TIME_COUNTER], product.catalog[COUNTER]
            found = counters.keys(group)
            must_agree(dict(zip(found, counters.column(counter, group, found), strict=True)), expected)


def undisturbed_rate(count: int, work: Callable[[], object]) -> float:
    """A rate in which Python's collector does not walk what was prepared: a server would not have it in memory."""
    gc.collect()
    gc.freeze()
    try:
        return rate(count, work)
    finally:
        gc.unfreeze()


def count_marked(context: Context, product: Product, events: Sequence[tuple[str, Event]]) -> None:
    """Count events with their ids, in the transactions that the HTTP door gathers."""
    for start in range(0, len(events), TRANSACTION_EVENTS):
        some = events[start : start + TRANSACTION_EVENTS]
        verdicts = context.store.transact(
            lambda tx, some=some: count_events(tx, product, some, marked=True)  # type: ignore[misc]
        )
        assert all(verdict.status == "counted" for verdict in verdicts)


def _put(context: Context, product: Product, fields: Sequence[dict[str, Any]], relay: Relay) -> None:
    """Fill the log, as whoever writes it would, and publish it."""
    topic = product.topic_of(LOG)
    messages = [
        Message(
            key=each["event_id"],
            version=1,
            event_time_us=each["time"] * 1_000_000,
            schema="bench/1",
            payload=msgspec.json.encode(each),
            route=each["profile_id"],
        )
        for each in fields
    ]
    for start in range(0, len(messages), TRANSACTION_EVENTS):
        some = messages[start : start + TRANSACTION_EVENTS]
        context.store.transact(lambda tx, some=some: outbox.put(tx, context.topics, topic, some))  # type: ignore[misc]
    relay_all(relay)


def _warm_fields() -> list[dict[str, Any]]:
    """Events of profiles that no stream has: they compile the kernel and open the connections."""
    at = int(time.time()) - STREAM_SECONDS
    return [
        {"event_id": f"warm-{number}", "time": at, "profile_id": f"warm-{number % 50}", "key": number % KEYS}
        for number in range(WARM)
    ]


class Peer:
    """One Redis client; every run starts from an empty Redis."""

    def __init__(self, server: RedisServer, stream: Stream) -> None:
        self._client: redis.Redis = server.client()
        self._script = str(self._client.script_load(SCRIPT))
        self._expected = stream.expected()
        # As ready for the client as ours are for the service.
        self._rows = [
            (name(profile), str(key), str(at))
            for profile, key, at in zip(stream.profile, stream.key, stream.time, strict=True)
        ]

    def lua(self) -> float:
        self._client.flushall()
        result = undisturbed_rate(len(self._rows), self._count_by_script)
        for profile, expected in self._expected.items():
            stored = self._client.hgetall(name(profile))
            found = {int(key): float(np.frombuffer(value, "<f8", 1)[0]) for key, value in stored.items()}
            must_agree(found, expected)
        return result

    def add_only(self) -> float:
        self._client.flushall()
        return undisturbed_rate(len(self._rows), self._add)

    def _count_by_script(self) -> None:
        decay, records_max = f"{DECAY:g}", str(RECORDS_MAX)
        for start in range(0, len(self._rows), PIPELINE):
            pipeline = self._client.pipeline(transaction=False)
            for profile, key, at in self._rows[start : start + PIPELINE]:
                pipeline.evalsha(self._script, 1, profile, key, "1", at, decay, records_max)
            pipeline.execute()

    def _add(self) -> None:
        for start in range(0, len(self._rows), PIPELINE):
            pipeline = self._client.pipeline(transaction=False)
            for profile, key, _ in self._rows[start : start + PIPELINE]:
                pipeline.hincrbyfloat(profile, key, 1.0)
            pipeline.execute()


def must_agree(found: dict[int, Any], expected: dict[int, float]) -> None:
    """Same keys, and values within what a 32-bit float keeps."""
    assert found.keys() == expected.keys(), (found, expected)
    assert all(math.isclose(found[key], value, rel_tol=1e-4) for key, value in expected.items()), (found, expected)
