"""Order read: `POST /v1/orders` with 4 identities, 1 filter and 2 group-bys, against the bare query and FastAPI.

10 M cells on PostgreSQL (KEYFOLD_BENCH_CELLS for another number): people with a phone, an account, a card and a device,
5 cells each of 54 combinations of tariff, brand and payment type. A request asks for the four identities of one person,
of one brand, by payment type and tariff; everybody is equally likely. The same counts stand in the document's table, in
the same database, with its index that covers the query.

"p50" is one caller, one request after the other. Ours goes over HTTP: `keyfold serve` in a process of its own, a socket
that is kept open, requests made beforehand, the body of the answer read and not decoded. The bare query is the same
question in one prepared statement of psycopg, rows fetched and not made into anything: on the document's table, and on
our tables, where slices are joined and their JSON is taken apart by the server.

Under load both sides are one process on the same database, answer the same JSON (compared before the clock starts), and
have the same `wrk` with 96 connections on the same machine. The peer is FastAPI on uvicorn (uvloop, httptools) with
SQLAlchemy on the document's table: a pydantic body, one statement for all identities built by SQLAlchemy, a session of
its own a request, on the threads that FastAPI has; a pool of 12 connections, as ours. It checks no rights.
"""

import http.client
import json
import os
import random
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg
import sqlalchemy as sa

from bench import stores
from bench.b4_order_intake import BRANDS, DOCUMENT_SCHEMA, PAYMENTS, TARIFFS, UNIT, orders_at
from bench.harness import Goal, Race, Side
from bench.serving import requests_per_second, served
from keyfold.core.store.batch import Columns
from keyfold.orders.model import Slice, slice_of
from keyfold.orders.settings import RIDES_DIMENSIONS, RIDES_IDENTITIES
from keyfold.orders.tables import tables_of
from tests.servers.process import ServerProcess, free_port

OPTION = "KEYFOLD_BENCH_CELLS"
CELLS_OF_IDENTITY = 5
CELLS_OF_PERSON = CELLS_OF_IDENTITY * len(RIDES_IDENTITIES)
FILL_PEOPLE = 50_000
SCATTER = 0x9E3779B97F4A7C15  # odd, so that multiplying by it maps numbers of 64 bits one to one
CREATED_US = 1_760_000_000_000_000
GROUP_BY = ("payment_method_type", "tariff")
CLIENTS = 96
BODIES_SENT = 1_000  # different requests that wrk sends in turn
WARM = 200

SERVED, FASTAPI = "keyfold serve", "FastAPI + SQLAlchemy"
P50 = "p50 over HTTP"
BARE, BARE_OURS = "the bare query, the document's table", "the bare query, our tables"

SLICES: list[Slice] = [
    slice_of(dict(zip(RIDES_DIMENSIONS, (tariff, brand, payment), strict=True)))
    for tariff in TARIFFS
    for brand in BRANDS
    for payment in PAYMENTS
]

# Measured: a join with the four rows is the plan that PostgreSQL also chooses when the statement is prepared.
QUERY = """
SELECT c.identity_type_name, c.identity_value, c.payment_method_type, c.tariff, sum(c.counter_value)
FROM (VALUES (%s::identity_type, %s::text), (%s, %s), (%s, %s), (%s, %s)) AS asked (type, value)
JOIN orders_counters AS c ON c.identity_value = asked.value AND c.identity_type_name = asked.type
WHERE c.brand = %s
GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4
"""
QUERY_OURS = """
SELECT c.identity_type, c.identity_value, s.dimension_values::jsonb ->> 'payment_method_type',
  s.dimension_values::jsonb ->> 'tariff', sum(c.live_count + c.history_count)
FROM (VALUES (%s::int, %s::text), (%s, %s), (%s, %s), (%s, %s)) AS asked (type, value)
JOIN orders_rides_cells AS c ON c.identity_type = asked.type AND c.identity_value = asked.value
JOIN orders_rides_slices AS s ON s.slice_id = c.slice_id
WHERE s.dimension_values::jsonb ->> 'brand' = %s
GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4
"""


class Sizes:
    def __init__(self, quick: bool) -> None:
        self.cells = int(os.environ.get(OPTION, 200_000 if quick else 10_000_000))
        self.requests = 500 if quick else 5_000
        self.seconds = 3 if quick else 5  # answers of gathered requests come in waves

    @property
    def people(self) -> int:
        return self.cells // CELLS_OF_PERSON


class Request:
    """The identities of one person, and one brand."""

    def __init__(self, person: int, brand: str) -> None:
        self.identities = [(name, identity(person)) for name in RIDES_IDENTITIES]
        self.brand = brand

    def body(self) -> str:
        return json.dumps(
            {
                "identities": [{"type": name, "value": value} for name, value in self.identities],
                "filters": [{"name": "brand", "value": self.brand}],
                "group_by": GROUP_BY,
            }
        )

    def parameters(self) -> tuple[Any, ...]:
        return (*(each for pair in self.identities for each in pair), self.brand)

    def parameters_ours(self) -> tuple[Any, ...]:
        numbered = enumerate(self.identities, 1)
        return (*(each for number, (_, value) in numbered for each in (number, value)), self.brand)


def identity(person: int) -> str:
    """Scattered over the key space, the same for all four types."""
    return f"{person * SCATTER % 2**64:016x}"


def slices_of(person: int) -> list[Slice]:
    """Five of a person, the same for all four identities, as orders with all of them would leave it."""
    return [SLICES[(person + step * 11) % len(SLICES)] for step in range(CELLS_OF_IDENTITY)]


def counts_of(person: int, step: int) -> tuple[int, int]:
    """Live and historical orders of a cell."""
    return 1 + (person + step) % 4, (person * 7 + step) % 9


def fill(url: str, people: int) -> None:
    """Cells as the product writes them, in pieces, each in key order."""
    tables = tables_of(UNIT)
    slices = stores.filling(url, tables.slices.name)
    slices.insert(
        {
            "slice_id": [each.slice_id for each in SLICES],
            "dimension_values": [each.text for each in SLICES],
        }
    )
    slices.close()
    cells = stores.filling(url, tables.cells.name)
    for start in range(0, people, FILL_PEOPLE):
        some = sorted(range(start, min(start + FILL_PEOPLE, people)), key=identity)
        for type_id in range(1, len(RIDES_IDENTITIES) + 1):
            cells.insert(_cells(type_id, some))
    cells.close()


def _cells(type_id: int, people: Sequence[int]) -> Columns:
    rows = []
    for person in people:
        value = identity(person)
        for step, each in enumerate(slices_of(person)):
            live, history = counts_of(person, step)
            rows.append((value, each.slice_id, live, history, CREATED_US + person))
    values, slice_ids, live_counts, history_counts, created = zip(*rows, strict=True)
    return {
        "identity_type": [type_id] * len(rows),
        "identity_value": values,
        "slice_id": slice_ids,
        "live_count": live_counts,
        "live_from_us": created,
        "live_to_us": created,
        "history_count": history_counts,
        "history_from_us": [CREATED_US - 1] * len(rows),
        "history_to_us": [CREATED_US - 1] * len(rows),
    }


COPY_TO_DOCUMENT = """
INSERT INTO orders_counters
  (identity_type_name, identity_value, counter_value, counted_from, counted_to, tariff, brand, payment_method_type)
SELECT (enum_range(NULL::identity_type))[c.identity_type], c.identity_value, c.live_count + c.history_count,
  to_timestamp(c.live_from_us / 1e6), to_timestamp(c.live_to_us / 1e6), s.tariff, s.brand, s.payment_method_type
FROM orders_rides_cells AS c
JOIN (
  SELECT slice_id, dimension_values::jsonb ->> 'tariff' AS tariff, dimension_values::jsonb ->> 'brand' AS brand,
    dimension_values::jsonb ->> 'payment_method_type' AS payment_method_type
  FROM orders_rides_slices
) AS s USING (slice_id)
ORDER BY c.identity_value
"""


def fill_document(url: str) -> None:
    """The same counts in the document's table."""
    before, _, index = DOCUMENT_SCHEMA.partition("CREATE UNIQUE INDEX")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET maintenance_work_mem = '1GB'")
        connection.execute("SET work_mem = '1GB'")
        connection.execute(before)
        connection.execute(COPY_TO_DOCUMENT)
        connection.execute(f"CREATE UNIQUE INDEX {index}")
        connection.execute("VACUUM ANALYZE orders_counters")
        connection.execute("CHECKPOINT")


def races(quick: bool) -> Iterator[Race]:
    sizes = Sizes(quick)
    with stores.postgres() as new_url:
        url = new_url()
        with orders_at(url):
            started = time.perf_counter()
            fill(url, sizes.people)
            fill_document(url)
            print(f"  filled in {time.perf_counter() - started:.0f} s", flush=True)
        chance = random.Random(5)
        asked = [Request(chance.randrange(sizes.people), chance.choice(BRANDS)) for _ in range(sizes.requests)]
        _must_answer_alike(url, asked[:20])
        yield _p50(url, sizes, asked)
        yield _under_load(url, sizes, asked)


# One caller ----------------------------------------------------------------------------------------------------------


def _p50(url: str, sizes: Sizes, asked: Sequence[Request]) -> Race:
    def ours() -> float:
        with served(url) as (port, _), Caller(port) as caller:
            return _median_ms(caller.ask, [caller.request(each.body()) for each in asked])

    def bare(query: str, parameters: list[tuple[Any, ...]]) -> float:
        with psycopg.connect(url, autocommit=True) as connection:
            return _median_ms(lambda each: connection.execute(query, each, prepare=True).fetchall(), parameters)

    return Race(
        title=f"p50 of a read, PostgreSQL, {sizes.cells:,} cells, one caller",
        unit="ms",
        sides=[
            Side(P50, ours),
            Side(BARE, lambda: bare(QUERY, [each.parameters() for each in asked])),
            Side(BARE_OURS, lambda: bare(QUERY_OURS, [each.parameters_ours() for each in asked])),
        ],
        # A ratio reads "times better": "at most 2×" is at least 0.5, "at most 1.3×" at least 0.77.
        goals=[Goal(side=P50, against=each, must=0.5, moonshot=0.77) for each in (BARE, BARE_OURS)],
        better="less",
    )


def _median_ms(ask: Callable[[Any], object], requests: Sequence[Any]) -> float:
    for each in requests[:WARM]:
        ask(each)
    taken = []
    for each in requests:
        started = time.perf_counter()
        ask(each)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken) * 1000


class Caller:
    """One connection that is kept open, with as little of its own as Python can have."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> "Caller":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def request(self, body: str) -> bytes:
        head = (
            f"POST /v1/orders HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return (head + body).encode()

    def ask(self, request: bytes) -> bytes:
        """Send a request and read its answer to the end."""
        self._socket.sendall(request)
        said = self._socket.recv(65_536)
        while (end := said.find(b"\r\n\r\n")) < 0:
            said += self._socket.recv(65_536)
        assert said.startswith(b"HTTP/1.1 200"), said[:500]
        head = said[:end].lower()
        at = head.index(b"content-length:") + 15
        length = int(head[at : head.find(b"\r\n", at) if b"\r\n" in head[at:] else end])
        body = said[end + 4 :]
        while len(body) < length:
            body += self._socket.recv(65_536)
        return body


# Many callers --------------------------------------------------------------------------------------------------------


def _under_load(url: str, sizes: Sizes, asked: Sequence[Request]) -> Race:
    script = _script([each.body() for each in asked[:BODIES_SENT]])

    def ours() -> float:
        with served(url) as (port, _):
            return _load(port, script, sizes.seconds)

    def theirs() -> float:
        with FastApi(url) as server:
            return _load(server.port, script, sizes.seconds)

    return Race(
        title=f"over HTTP, PostgreSQL, {sizes.cells:,} cells, {CLIENTS} callers",
        unit="requests/s",
        sides=[Side(SERVED, ours), Side(FASTAPI, theirs)],
        goals=[Goal(side=SERVED, against=FASTAPI, must=5)],
    )


def _load(port: int, script: str, seconds: int) -> float:
    requests_per_second(port, "/v1/orders", script, connections=CLIENTS, seconds=1)
    return requests_per_second(port, "/v1/orders", script, connections=CLIENTS, seconds=seconds)


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


def _must_answer_alike(url: str, asked: Sequence[Request]) -> None:
    """Ours, the peer, and both bare queries."""
    with served(url) as (port, _), Caller(port) as caller:
        ours = [json.loads(caller.ask(caller.request(each.body()))) for each in asked]
    with FastApi(url) as server, Caller(server.port) as caller:
        theirs = [json.loads(caller.ask(caller.request(each.body()))) for each in asked]
    assert ours == theirs, (str(ours)[:500], str(theirs)[:500])
    assert any(each["data"] for answer in ours for each in answer["data"])
    with psycopg.connect(url, autocommit=True) as connection:
        for request, answer in zip(asked, ours, strict=True):
            listed = _listed(answer)
            assert _named(connection.execute(QUERY, request.parameters()).fetchall()) == listed
            assert _named(connection.execute(QUERY_OURS, request.parameters_ours()).fetchall()) == listed


def _listed(answer: dict[str, Any]) -> list[tuple[Any, ...]]:
    return sorted(
        (each["identity"]["type"], each["identity"]["value"], *(one["value"] for one in item["properties"]), count)
        for each in answer["data"]
        for item in each["data"]
        for count in [item["counter_value"]]
    )


def _named(rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    names = dict(enumerate(RIDES_IDENTITIES, 1))
    return sorted((names.get(kind, kind), *values, int(count)) for kind, *values, count in rows)


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
            f"import sys; sys.path.insert(0, {root!r}); from bench.b5_order_read import serve_fastapi;"
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
    """The peer's program: what someone would write for the same endpoint on the document's table."""
    import uvicorn
    from fastapi import FastAPI
    from fastapi.responses import JSONResponse
    from pydantic import BaseModel
    from sqlalchemy.orm import Session

    class Identity(BaseModel):
        type: str
        value: str

    class Property(BaseModel):
        name: str
        value: str

    class Body(BaseModel):
        identities: list[Identity]
        filters: list[Property]
        group_by: list[str]

    app = FastAPI()
    engine = sa.create_engine(sa.make_url(url).set(drivername="postgresql+psycopg"), pool_size=12, max_overflow=0)
    kind = sa.Enum(*RIDES_IDENTITIES, name="identity_type")
    counters = sa.table(
        "orders_counters",
        sa.column("identity_type_name", kind),
        sa.column("identity_value", sa.Text),
        sa.column("counter_value", sa.Integer),
        *(sa.column(name, sa.Text) for name in RIDES_DIMENSIONS),
    ).c

    @app.get("/readyz")
    async def ready() -> dict[str, str]:
        return {"status": "ok"}

    # Measured: 534 requests/s on threads, 419 in the event loop, 257 with AsyncSession, on 200,000 cells.
    @app.post("/v1/orders")
    def read(body: Body) -> JSONResponse:
        names = [counters[name] for name in body.group_by]
        person = [counters.identity_type_name, counters.identity_value]
        pairs = [(each.type, each.value) for each in body.identities]
        wanted = (
            sa.select(*person, *names, sa.func.sum(counters.counter_value))
            .where(sa.tuple_(*person).in_(pairs), *(counters[each.name] == each.value for each in body.filters))
            .group_by(*person, *names)
            .order_by(*names)
        )
        with Session(engine) as session:
            rows = session.execute(wanted).all()
        found: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for type_name, value, *values, count in rows:
            properties = [{"name": name, "value": each} for name, each in zip(body.group_by, values, strict=True)]
            found.setdefault((type_name, value), []).append({"properties": properties, "counter_value": count})
        data = [
            {"identity": {"type": each.type, "value": each.value}, "data": found.get((each.type, each.value), [])}
            for each in body.identities
        ]
        return JSONResponse({"data": data})

    uvicorn.run(
        app, host="127.0.0.1", port=port, loop="uvloop", http="httptools", log_level="warning", access_log=False
    )
