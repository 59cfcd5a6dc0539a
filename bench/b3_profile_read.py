"""Profile read: 20 people a request, 5 counters each, in process against Redis and over HTTP against FastAPI.

Two kinds of profiles. "whole counters": each of the 5 counters has 20 keys, and ours answers them all, keys and values
(100 numbers a person); Redis answers one number a counter (HMGET of 5 fields, parsed to floats), and for the same
content HMGET of all 100 fields. "one key": each counter has one key, and both answer the same 5 numbers a person. In
process ours is `store.read` of the service, one caller, with expired keys left out: `read_numbers` answers arrays
(which person, counter and key, and the number), `read_profiles` an object for each pack, with lists of Python's
numbers, as protobuf is written from. The peer is redis-py (with hiredis), 20 HMGET in one pipeline, one caller, its
answers made into lists of floats.

Over HTTP both sides are one process on the same store, answer the same JSON (compared before the clock starts), and
have the same `wrk` with 96 connections on the same machine. The peer is FastAPI on uvicorn (uvloop, httptools) as one
would write it with speed in mind: a pydantic body, one statement on the bare driver for the 20 people, protobuf decode,
JSONResponse of plain dicts; not gathered, no access control, no expiry.
"""

import http.client
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa

from bench import stores
from bench.b2_profile_updates import COUNTER, KEYS, STREAM_SECONDS, catalog, name, profiles_at
from bench.harness import Goal, Race, Side, rate
from bench.redis_server import RedisServer
from bench.serving import requests_per_second, served
from keyfold.core import memory
from keyfold.core.context import Context
from keyfold.core.store.batch import Columns
from keyfold.core.store.shapes import insert
from keyfold.core.store.sqlite import driver as sqlite_driver
from keyfold.counters.bulk import Updates, fold
from keyfold.counters.bulk.columns import Numbers
from keyfold.profiles.service.product import Product
from keyfold.profiles.service.reading import Read, View, read_numbers, read_profiles
from keyfold.profiles.tables import PROFILES
from tests.servers.process import ServerProcess, free_port

COUNTERS = 5
WHOLE_KEYS = 20
PEOPLE = 20
CLIENTS = 96
BODIES_SENT = 200  # different requests that wrk sends in turn
INSERT_ROWS = 5_000

ARRAYS, OURS = "read_numbers", "read_profiles"
PEER, PEER_WHOLE = "Redis, HMGET of 5 fields", "Redis, HMGET of all 100 fields"
SERVED, FASTAPI = "keyfold serve", "FastAPI"
WANTED = list(range(COUNTER, COUNTER + COUNTERS))


class Sizes:
    def __init__(self, quick: bool) -> None:
        self.people = 2_000 if quick else 20_000
        self.requests = 200 if quick else 2_000
        self.seconds = 3 if quick else 5  # answers of gathered requests come in waves


def races(quick: bool) -> Iterator[Race]:
    memory.settle()  # as every server and worker does when it starts
    sizes = Sizes(quick)
    with RedisServer() as server, stores.each_kind() as kinds:
        for what, keys in (("whole counters", WHOLE_KEYS), ("one key", 1)):
            people = People(sizes.people, keys)
            for kind, new_url in kinds.items():
                url = new_url()
                with profiles_at(url, COUNTERS) as (context, product):
                    people.fill(context, product)
                    yield _in_process(f"{what}, {kind}", people, context, product, server, sizes.requests)
                yield _over_http(f"{what}, {kind}", people, url, sizes.seconds)


class People:
    """Profiles of so many people, with so many keys in each of the five counters."""

    def __init__(self, count: int, keys: int) -> None:
        chance = np.random.default_rng(3)
        self.count = count
        self.keys = keys
        # One permutation a counter and a person: keys of a counter are different.
        self.key = np.argsort(chance.random((count, COUNTERS, KEYS)), axis=2)[:, :, :keys].astype(np.uint64)
        self.value = chance.integers(1, 50, (count, COUNTERS, keys)).astype(np.float64)
        self.time = int(time.time()) - chance.integers(0, STREAM_SECONDS, (count, COUNTERS, keys))

    def fill(self, context: Context, product: Product) -> None:
        bodies, expires_at = self.bodies(product)
        for start in range(0, self.count, INSERT_ROWS):
            end = min(start + INSERT_ROWS, self.count)
            rows = rows_of([name(each) for each in range(start, end)], bodies[start:end], expires_at[start:end])
            context.store.transact(lambda tx, rows=rows: insert(tx, PROFILES, rows))  # type: ignore[misc]

    def bodies(self, product: Product) -> tuple[list[bytes], list[int]]:
        """The stored form, as the product writes it, and when it expires."""
        each = self.count * COUNTERS * self.keys
        updates = Updates(
            profile=np.repeat(np.arange(self.count), COUNTERS * self.keys),
            counter=np.tile(np.repeat(np.array(WANTED, np.uint64), self.keys), self.count),
            key=self.key.reshape(each),
            value=self.value.reshape(each),
            time=self.time.reshape(each),
        )
        folded = fold(product.catalog, [b""] * self.count, updates, now=int(time.time()))
        assert not folded.refused
        return folded.bodies, folded.expires_at.tolist()

    def requests(self, count: int) -> list[list[int]]:
        chance = random.Random(3)
        return [chance.sample(range(self.count), PEOPLE) for _ in range(count)]


def rows_of(ids: Sequence[str], bodies: Sequence[bytes], expires_at: Sequence[int]) -> Columns:
    """The columns of profiles that were counted once."""
    count = len(ids)
    return {
        "profile_type": ["user"] * count,
        "profile_id": ids,
        "version": [1] * count,
        "public_version": [1] * count,
        "body": bodies,
        "segments": [b""] * count,
        "segments_version": [0] * count,
        "held_at_us": [0] * count,
        "expires_at": expires_at,
    }


# In process ---------------------------------------------------------------------------------------------------------


def _in_process(
    where: str, people: People, context: Context, product: Product, server: RedisServer, count: int
) -> Race:
    requests = people.requests(count)
    reader, peer = Reader(context, product, requests), Peer(server, people, requests)
    reader.must_answer(people)
    sides = [Side(ARRAYS, reader.run_arrays), Side(OURS, reader.run), Side(PEER, peer.run)]
    goals = [Goal(side=each, against=PEER, must=1, moonshot=3) for each in (ARRAYS, OURS)]
    if people.keys > 1:
        sides.append(Side(PEER_WHOLE, peer.run_whole))
        goals += [Goal(side=each, against=PEER_WHOLE, note="the same content") for each in (ARRAYS, OURS)]
    return Race(
        title=f"in process, {where}, against Redis {server.version()}", unit="requests/s", sides=sides, goals=goals
    )


class Reader:
    """The service, one caller."""

    def __init__(self, context: Context, product: Product, requests: Sequence[Sequence[int]]) -> None:
        self._context = context
        self._product = product
        self._view = View(frozenset(WANTED), [])
        self._requests = requests
        self._people = [[[("user", name(each))] for each in request] for request in requests]
        self._entries = [[(ids, self._view) for ids in people] for people in self._people]

    def run_arrays(self) -> float:
        return rate(len(self._people), self._read_all_arrays)

    def _read_all_arrays(self) -> None:
        for people in self._people:
            self._read_arrays(people)

    def _read_arrays(self, people: Any) -> Numbers:
        found, problems = self._context.store.read(lambda tx: read_numbers(tx, self._product, people, self._view))
        assert not problems
        return found

    def run(self) -> float:
        return rate(len(self._entries), self._read_all)

    def _read_all(self) -> None:
        for entries in self._entries:
            self._read(entries)

    def _read(self, entries: Any) -> list[Read]:
        return self._context.store.read(lambda tx: read_profiles(tx, self._product, entries))

    def must_answer(self, people: People) -> None:
        found = self._read_arrays(self._people[0])
        asked = self._requests[0]
        assert found.profile.tolist() == np.repeat(np.arange(PEOPLE), COUNTERS * people.keys).tolist()
        assert found.counter.tolist() == np.tile(np.repeat(WANTED, people.keys), PEOPLE).tolist()
        for keys, values, person in zip(
            found.key.reshape(PEOPLE, COUNTERS, -1), found.value.reshape(PEOPLE, COUNTERS, -1), asked, strict=True
        ):
            order, given = np.argsort(keys, axis=1), np.argsort(people.key[person], axis=1)
            for mine, theirs in ((keys, people.key[person]), (values, people.value[person])):
                assert np.array_equal(np.take_along_axis(mine, order, 1), np.take_along_axis(theirs, given, 1))
        for person, read in zip(self._requests[0], self._read(self._entries[0]), strict=True):
            assert [pack.counter_ids for pack in read.packs] == [[each] for each in WANTED]
            for counter, pack in enumerate(read.packs):
                given = dict(
                    zip(people.key[person, counter].tolist(), people.value[person, counter].tolist(), strict=True)
                )
                assert dict(zip(pack.keys, pack.rows[0][1], strict=True)) == given


class Peer:
    """Redis, one caller: a hash a person, a field for each key of each counter."""

    def __init__(self, server: RedisServer, people: People, requests: Sequence[Sequence[int]]) -> None:
        self._client = server.client()
        self._requests = [[name(each) for each in request] for request in requests]
        self._people = people
        self._fields = [
            [[f"{counter}:{key}" for key in people.key[person, at]] for at, counter in enumerate(WANTED)]
            for person in range(people.count)
        ]
        self._few = self._wanted(requests, lambda fields: [each[0] for each in fields])
        self._whole = self._wanted(requests, lambda fields: [field for each in fields for field in each])
        self._fill()

    def run(self) -> float:
        return rate(len(self._few), lambda: self._read_all(self._few))

    def run_whole(self) -> float:
        return rate(len(self._whole), lambda: self._read_all(self._whole))

    def _wanted(
        self, requests: Sequence[Sequence[int]], pick: Callable[[list[list[str]]], list[str]]
    ) -> list[list[tuple[str, list[str]]]]:
        return [[(name(person), pick(self._fields[person])) for person in request] for request in requests]

    def _fill(self) -> None:
        self._client.flushall()
        for start in range(0, self._people.count, 500):
            pipeline = self._client.pipeline(transaction=False)
            for person in range(start, min(start + 500, self._people.count)):
                values = self._people.value[person].reshape(-1).tolist()
                flat = [field for each in self._fields[person] for field in each]
                pipeline.hset(name(person), mapping=dict(zip(flat, values, strict=True)))
            pipeline.execute()

    def _read_all(self, requests: Sequence[Sequence[tuple[str, list[str]]]]) -> None:
        for request in requests:
            pipeline = self._client.pipeline(transaction=False)
            for person, fields in request:
                pipeline.hmget(person, fields)
            answer = [[float(value) for value in row] for row in pipeline.execute()]
            assert len(answer) == PEOPLE


# Over HTTP ----------------------------------------------------------------------------------------------------------


def _over_http(where: str, people: People, url: str, seconds: int) -> Race:
    bodies = [_body(request) for request in people.requests(BODIES_SENT)]
    script = _script(bodies)

    def ours() -> float:
        with _served(url) as port:
            return _load(port, script, seconds)

    def theirs() -> float:
        with FastApi(url) as server:
            return _load(server.port, script, seconds)

    _must_answer_alike(url, bodies[0])
    return Race(
        title=f"over HTTP, {where}, {CLIENTS} callers",
        unit="requests/s",
        sides=[Side(SERVED, ours), Side(FASTAPI, theirs)],
        goals=[Goal(side=SERVED, against=FASTAPI, must=5)],
    )


@contextmanager
def _served(url: str) -> Iterator[int]:
    with tempfile.TemporaryDirectory(prefix="keyfold-bench-") as folder:
        path = Path(folder) / "catalog.proto"
        path.write_text(catalog(COUNTERS))
        with served(url, {"KEYFOLD_PROFILES_CATALOG": str(path)}) as (port, _):
            yield port


def _load(port: int, script: str, seconds: int) -> float:
    requests_per_second(port, "/v1/profiles", script, connections=CLIENTS, seconds=1)
    return requests_per_second(port, "/v1/profiles", script, connections=CLIENTS, seconds=seconds)


def _body(request: Sequence[int]) -> str:
    people = [{"ids": [{"type": "user", "id": name(each)}]} for each in request]
    return json.dumps({"profiles": people, "counters": WANTED})


def _script(bodies: Sequence[str]) -> str:
    """Requests are made once: wrk itself has a core to share with the server."""
    listed = ",\n".join(f"[==[{body}]==]" for body in bodies)
    return f"""
local bodies = {{ {listed} }}
local requests, at = {{}}, 0
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
function init(arguments)
  for index, body in ipairs(bodies) do requests[index] = wrk.format(nil, nil, nil, body) end
end
function request()
  at = at % #requests + 1
  return requests[at]
end
"""


def _must_answer_alike(url: str, body: str) -> None:
    with _served(url) as port:
        ours = _answer(port, body)
    with FastApi(url) as server:
        theirs = _answer(server.port, body)
    assert ours == theirs, (str(ours)[:500], str(theirs)[:500])


def _answer(port: int, body: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("POST", "/v1/profiles", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        said = answer.read()
        assert answer.status == 200, said
        return json.loads(said)
    finally:
        connection.close()


class FastApi(ServerProcess):
    """The peer, in a process of its own."""

    name = "fastapi"

    def __init__(self, url: str) -> None:
        super().__init__()
        self.port = free_port()
        self._url = url

    def _prepare(self) -> None:
        """Nothing: the store is there."""

    def _command(self) -> list[str]:
        root = str(Path(__file__).parent.parent)
        program = (
            f"import sys; sys.path.insert(0, {root!r}); from bench.b3_profile_read import serve_fastapi;"
            f" serve_fastapi({self._url!r}, {self.port})"
        )
        return [sys.executable, "-c", program]

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


def serve_fastapi(url: str, port: int) -> None:
    """The peer's program: what someone would write for the same endpoint on the same table."""
    import uvicorn
    from fastapi import FastAPI
    from fastapi.responses import JSONResponse
    from pydantic import BaseModel

    class Id(BaseModel):
        type: str
        id: str

    class Person(BaseModel):
        ids: list[Id]

    class Body(BaseModel):
        profiles: list[Person]
        counters: list[int]

    app = FastAPI()
    stored = _statement(url)

    @app.get("/readyz")
    async def ready() -> dict[str, str]:
        return {"status": "ok"}

    # Measured: in the event loop it answers more than on a thread a request, because a read is shorter than the hop.
    @app.post("/v1/profiles")
    async def read(body: Body) -> JSONResponse:
        asked = [person.ids[0] for person in body.profiles]
        found = stored([each.id for each in asked])
        wanted = set(body.counters)
        profiles = [_as_dict(each.type, each.id, found.get(each.id), wanted) for each in asked]
        return JSONResponse({"profiles": profiles, "left_out": []})

    uvicorn.run(
        app, host="127.0.0.1", port=port, loop="uvloop", http="httptools", log_level="warning", access_log=False
    )


Found = dict[str, tuple[bytes, int]]


def _statement(url: str) -> Callable[[list[str]], Found]:
    """Bodies and versions by id, in one statement on the bare driver."""
    parsed = sa.make_url(url)
    select = "SELECT profile_id, body, public_version FROM profiles WHERE profile_type = 'user' AND profile_id"
    if parsed.get_backend_name() == "sqlite":
        reader = sqlite_driver().connect(parsed.database, isolation_level=None, check_same_thread=False)

        def by_list(ids: list[str]) -> Found:
            rows = reader.execute(f"{select} IN ({','.join('?' * len(ids))})", ids)
            return {each: (body, version) for each, body, version in rows}

        return by_list
    import psycopg

    connection = psycopg.connect(url, autocommit=True)

    def by_array(ids: list[str]) -> Found:
        rows = connection.execute(f"{select} = ANY(%s)", (ids,), binary=True)
        return {each: (body, version) for each, body, version in rows}

    return by_array


def _as_dict(kind: str, profile_id: str, row: tuple[bytes, int] | None, wanted: set[int]) -> dict[str, Any]:
    from keyfold.counters.messages_pb2 import Profile

    packs = []
    for pack in Profile.FromString(row[0]).packed_counters if row else ():
        picked = [(each, values) for each, values in zip(pack.counter_ids, pack.values, strict=True) if each in wanted]
        if picked:
            packs.append(
                {
                    "counter_ids": [each for each, _ in picked],
                    "keys": list(pack.keys),
                    "values": [{"float_values": {"value": list(values.float_values.value)}} for _, values in picked],
                }
            )
    version = row[1] if row else 0
    return {
        "type": kind,
        "id": profile_id,
        "packed_counters": packs,
        "counters": [],
        "segments": [],
        "version": version,
    }
