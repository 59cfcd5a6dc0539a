"""Listing reads: `POST /v1/offers` for 10 ids over HTTP on PostgreSQL, against `pgbench` and FastAPI.

1 M offers of 2 KB (KEYFOLD_BENCH_OFFERS for another number), half of them of one seller, the others of 1,000. Every
request asks for 10 offers, all offers equally likely; an answer has 20 KB.

Ours is one `keyfold serve` as its users run it. `wrk` has 96 connections and one thread on the same machine. `pgbench`
is in its prepared mode with 96 clients, and again with the 16 that suit two cores best, and makes the same two reads in
two statements: who has the offers, and the offers; it reads what the server sends and makes nothing of it. FastAPI is
one uvicorn (uvloop, httptools) with SQLAlchemy on the same tables: a pydantic body, a session a request, on the threads
that FastAPI has, a pool of 12 connections as ours; it checks no rights. Its answers are compared with ours, and the
rows of `pgbench`, before the clock starts. What the same server does on SQLite is shown without a goal.
"""

import json
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import sqlalchemy as sa

from bench import stores
from bench.harness import Goal, Race, Side
from bench.listings import (
    CLIENTS,
    FEW_CLIENTS,
    IDS,
    SCATTER,
    FastApi,
    answer,
    fill,
    half_large,
    listings_at,
    offer_id_at,
    pgbench,
)
from bench.serving import requests_per_second, served
from keyfold.listings.service.saving import told
from keyfold.listings.tables import OFFER, OFFER_IDS

OPTION = "KEYFOLD_BENCH_OFFERS"
ASKED = 10
SERVED, PGBENCH, FASTAPI = "keyfold serve", "pgbench", "FastAPI + SQLAlchemy"
FEW = f"pgbench, {FEW_CLIENTS} clients"
PLACES = range(1, ASKED + 1)

OWNERS = f"""
SELECT array_agg(offer_id) AS ids, array_agg(seller_id) AS sellers FROM offer_ids
WHERE offer_id = ANY (ARRAY[{", ".join(f"lpad(:i{place}::text, 16, '0')" for place in PLACES)}])"""
OFFERS = """
SELECT o.seller_id, o.offer_id, o.kind, o.version, o.shown, o.body
FROM unnest(:ids::text[], :sellers::text[]) AS asked (offer_id, seller_id)
JOIN offer AS o ON o.seller_id = asked.seller_id AND o.offer_id = asked.offer_id AND o.kind = 'offer'"""
SCRIPT = "\n".join(
    [
        *(f"\\set n{place} random(0, :count - 1)" for place in PLACES),
        *(f"\\set i{place} :n{place} * {SCATTER} % {IDS}" for place in PLACES),
        f"{OWNERS} \\gset",
        f"{OFFERS};",
    ]
)


class Sizes:
    def __init__(self, quick: bool) -> None:
        self.offers = int(os.environ.get(OPTION, 20_000 if quick else 1_000_000))
        self.seconds = 2 if quick else 5


def races(quick: bool) -> Iterator[Race]:
    sizes = Sizes(quick)
    with stores.postgres() as new_url:
        url = new_url()
        _fill(url, sizes.offers)
        _must_answer_alike(url, sizes.offers)
        yield _postgres(url, sizes)
    with stores.sqlite() as new_url:
        url = new_url()
        _fill(url, sizes.offers)
        yield Race(title=_title("SQLite", sizes), unit="requests/s", sides=[Side(SERVED, lambda: _ours(url, sizes))])


def _fill(url: str, count: int) -> None:
    started = time.perf_counter()
    with listings_at(url):
        fill(url, count, half_large)
    print(f"  filled in {time.perf_counter() - started:.0f} s", flush=True)


def _postgres(url: str, sizes: Sizes) -> Race:
    def theirs() -> float:
        with FastApi("bench.b10_listing_reads", url) as server:
            return _load(server.port, sizes)

    return Race(
        title=_title("PostgreSQL", sizes),
        unit="requests/s",
        sides=[
            Side(SERVED, lambda: _ours(url, sizes)),
            Side(PGBENCH, lambda: pgbench(url, SCRIPT, {"count": sizes.offers}, sizes.seconds)),
            Side(FEW, lambda: pgbench(url, SCRIPT, {"count": sizes.offers}, sizes.seconds, FEW_CLIENTS)),
            Side(FASTAPI, theirs),
        ],
        goals=[
            *(Goal(side=SERVED, against=each, must=0.3, moonshot=0.7) for each in (PGBENCH, FEW)),
            Goal(side=SERVED, against=FASTAPI, must=5),
        ],
    )


def _title(kind: str, sizes: Sizes) -> str:
    return f"{ASKED} offers by id over HTTP, {kind}, {sizes.offers:,} offers, {CLIENTS} callers"


def _ours(url: str, sizes: Sizes) -> float:
    with served(url) as (port, _):
        return _load(port, sizes)


def _load(port: int, sizes: Sizes) -> float:
    for seconds in (1, sizes.seconds):
        reached = requests_per_second(
            port, "/v1/offers", _script(sizes.offers, seconds), connections=CLIENTS, seconds=seconds
        )
    return reached


def _script(count: int, seed: int) -> str:
    """Ids as `offer_id_at` makes them, of whole numbers of 64 bits."""
    return f"""
math.randomseed({seed})
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
local function offer_id()
  local digits = tostring(math.random(0, {count - 1}) * {SCATTER}LL % {IDS}LL):sub(1, -3)
  return '"' .. string.rep("0", 16 - #digits) .. digits .. '"'
end
function request()
  local ids = {{}}
  for place = 1, {ASKED} do ids[place] = offer_id() end
  return wrk.format(nil, nil, nil, '{{"offer_ids":[' .. table.concat(ids, ",") .. ']}}')
end
"""


def _must_answer_alike(url: str, count: int) -> None:
    chance = random.Random(10)
    asked = [chance.sample(range(count), ASKED) for _ in range(20)]
    bodies = [json.dumps({"offer_ids": [offer_id_at(number) for number in some]}) for some in asked]
    with served(url) as (port, _):
        ours = [_answer(port, body) for body in bodies]
    with FastApi("bench.b10_listing_reads", url) as server:
        theirs = [_answer(server.port, body) for body in bodies]
    assert ours == theirs, (str(ours)[:500], str(theirs)[:500])
    with psycopg.connect(url) as connection:
        for some, given in zip(asked, ours, strict=True):
            assert _by_statements(connection, some) == {offer["offer_id"]: offer for offer in given["offers"]}
            assert not given["missing"]


def _answer(port: int, body: str) -> Any:
    status, said = answer(port, "POST", "/v1/offers", body)
    assert status == 200, said
    return json.loads(said)


def _by_statements(connection: "psycopg.Connection[tuple[Any, ...]]", numbers: list[int]) -> dict[str, Any]:
    """What `pgbench` reads, told as we tell it."""
    ids = {f"i{place}": str(int(offer_id_at(number))) for place, number in zip(PLACES, numbers, strict=True)}
    found = connection.execute(_for_driver(OWNERS), ids).fetchone()
    assert found is not None
    rows = connection.execute(_for_driver(OFFERS), {"ids": found[0], "sellers": found[1]}).fetchall()
    return {row[1]: json.loads(told(row[5].encode(), row[3], row[4])) for row in rows}


def _for_driver(sql: str) -> bytes:
    """The same statement with the driver's marks for pgbench's variables."""
    names = ["ids", "sellers", *(f"i{place}" for place in reversed(PLACES))]
    for name in names:
        sql = sql.replace(f":{name}::", f"%({name})s::")
    return sql.encode()


def serve_fastapi(url: str, port: int) -> None:
    """The peer's program: what someone would write for the same endpoint on the same tables."""
    import uvicorn
    from fastapi import FastAPI
    from fastapi.responses import JSONResponse
    from pydantic import BaseModel
    from sqlalchemy.orm import Session

    class Body(BaseModel):
        offer_ids: list[str]

    app = FastAPI()
    engine = sa.create_engine(sa.make_url(url).set(drivername="postgresql+psycopg"), pool_size=12, max_overflow=0)

    @app.get("/readyz")
    async def ready() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/v1/offers")
    def read(body: Body) -> JSONResponse:
        owners = sa.select(OFFER_IDS.c.seller_id, OFFER_IDS.c.offer_id).where(OFFER_IDS.c.offer_id.in_(body.offer_ids))
        key = (OFFER.c.seller_id, OFFER.c.offer_id, OFFER.c.kind)
        with Session(engine) as session:
            keys = [(row.seller_id, row.offer_id, "offer") for row in session.execute(owners)]
            wanted = sa.select(*key, OFFER.c.version, OFFER.c.shown, OFFER.c.body).where(sa.tuple_(*key).in_(keys))
            rows = session.execute(wanted).all()
        found = {row.offer_id: {**json.loads(row.body), "shown": row.shown, "version": row.version} for row in rows}
        return JSONResponse(
            {
                "offers": [found[each] for each in body.offer_ids if each in found],
                "missing": [each for each in body.offer_ids if each not in found],
            }
        )

    uvicorn.run(
        app, host="127.0.0.1", port=port, loop="uvloop", http="httptools", log_level="warning", access_log=False
    )
