"""Listing writes: offers of 2 KB published and edited over HTTP on PostgreSQL, against `pgbench` and FastAPI.

An offer is a car of the example category, without photos. Publishing makes an offer of a draft that was written
beforehand (each is published once): the offer, the directory of ids, two presets with their counts, the counter
`Active`, the message, and the draft itself. An edit gives an offer another price, with the version that it has (every
offer once a cycle): it is read, saved and told; by the presets that there are by default it moves to no other list, so
counts and counters are looked at and stay. Both are spread evenly over 1,000 sellers.

Ours is one `keyfold serve` as its users run it, the relay and all other loops inside, every request checked against the
schema of its category. `wrk` has 96 connections and one thread on the same machine.

`pgbench` is in its prepared mode with 96 clients, and again with the 16 that suit two cores best, and runs the same
statements, one offer a transaction: the same reads, the same rows and the same 2 KB to the server, made in the shortest
way: the number of the message is drawn where it is inserted, the clock comes with the first read, and nothing is kept
for a commit whose answer is lost. It checks nothing, takes no requests and answers nobody.

FastAPI is one uvicorn (uvloop, httptools) with SQLAlchemy: a pydantic body, a session and a transaction a request, on
the threads that FastAPI has, a pool of 12 connections as ours. It checks neither rights nor schemas.

Each side has a database of its own on one server, filled alike. What each of them stores and answers is compared before
the clock starts. No peer publishes the messages that it has written.
"""

import json
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import sqlalchemy as sa

from bench import stores
from bench.harness import Goal, Race, Side
from bench.listings import (
    AGES,
    CLIENTS,
    CREATED_US,
    FEW_CLIENTS,
    IDS,
    SCATTER,
    SELLER_FIRST,
    SELLERS,
    FastApi,
    answer,
    content_of,
    fill,
    listings_at,
    offer_at,
    offer_id_at,
    pgbench,
    seller_at,
)
from bench.serving import LoadFailed, requests_per_second, served
from keyfold.core.settings import TopicsSettings
from keyfold.core.tables import MESSAGES
from keyfold.core.topics.topic import partition_of
from keyfold.listings.model import ID_DIGITS, SEQ_NOS, SHARDS, Price, shard_of
from keyfold.listings.service.drafting import Filled
from keyfold.listings.tables import (
    CURRENT_DRAFT,
    DRAFT,
    OFFER,
    OFFER_IDS,
    OFFER_PRESETS,
    USER_OFFER_PRESETS,
    USER_OFFER_PRESETS_COUNT,
    USER_TOTAL_COUNTERS,
)
from keyfold.listings.tables import (
    SELLERS as SELLERS_TABLE,
)

SERVED, PGBENCH, FASTAPI = "keyfold serve", "pgbench", "FastAPI + SQLAlchemy"
FEW = f"pgbench, {FEW_CLIENTS} clients"
PARTITIONS = TopicsSettings().partitions
OFFERS = CLIENTS * 200
WARM_OFFERS = CLIENTS * 20  # further ones, so that no version is in doubt when the clock starts
WARM_SECONDS = 2
PER_SECOND_MAX = {SERVED: 5_000, PGBENCH: 5_000, FASTAPI: 1_000}  # so many drafts are made
COMPARED = 0  # the draft and the offer that are compared
PRICE = Price(4_900_00, "EUR")


class Sizes:
    def __init__(self, quick: bool) -> None:
        self.seconds = 2 if quick else 4
        self.runs = 3 if quick else 5


def races(quick: bool) -> Iterator[Race]:
    sizes = Sizes(quick)
    with stores.postgres() as new_url, tempfile.TemporaryDirectory(prefix="keyfold-bench-") as folder:
        urls = {}
        started = time.perf_counter()
        for name in (SERVED, PGBENCH, FASTAPI):
            urls[name] = new_url()
            with listings_at(urls[name]):
                fill(urls[name], OFFERS + WARM_OFFERS)
            _fill_drafts(urls[name], 1 + sizes.runs * _drafts_of_run(name, sizes) * (2 if name == PGBENCH else 1))
        print(f"  filled in {time.perf_counter() - started:.0f} s", flush=True)
        _must_store_alike(urls)
        yield _published(urls, sizes)
        yield _edited(urls, sizes, Path(folder))


def _drafts_of_run(name: str, sizes: Sizes) -> int:
    return PER_SECOND_MAX[name] * (sizes.seconds + WARM_SECONDS) // CLIENTS * CLIENTS


def _fill_drafts(url: str, count: int) -> None:
    """Drafts ready to be published; the first of every owner is the current one."""
    body = msgspec.json.encode(Filled(category="cars", content=content_of(), price=PRICE)).decode()
    table = stores.filling(url, DRAFT.name)
    for start in range(0, count, 20_000):
        numbers = range(start, min(start + 20_000, count))
        table.insert(
            {
                "owner_id": [seller_at(number) for number in numbers],
                "draft_id": [f"{number:032d}" for number in numbers],
                "version": [1] * len(numbers),
                "body": [body] * len(numbers),
                "offer_id": [""] * len(numbers),
                "updated_at_us": [CREATED_US + number for number in numbers],
            }
        )
    table.close()
    first = range(min(SELLERS, count))
    current = stores.filling(url, CURRENT_DRAFT.name)
    current.insert(
        {
            "owner_id": [seller_at(number) for number in first],
            "version": [1] * len(first),
            "draft_id": [f"{number:032d}" for number in first],
        }
    )
    current.close()


# Publishing ----------------------------------------------------------------------------------------------------------


def _published(urls: Mapping[str, str], sizes: Sizes) -> Race:
    at = dict.fromkeys(urls, 1)  # the first draft that is left

    def taken(name: str) -> int:
        first = at[name]
        at[name] += _drafts_of_run(name, sizes)
        return first

    def over_http(name: str, port: int) -> float:
        first, warm = taken(name), PER_SECOND_MAX[name] * WARM_SECONDS
        _load_publish(port, first, WARM_SECONDS)
        reached = _load_publish(port, first + warm, sizes.seconds)
        for last in (first + warm - 1, at[name] - 1):
            _must_be_left(urls[name], last)
        return reached

    def ours() -> float:
        with served(urls[SERVED]) as (port, _):
            return over_http(SERVED, port)

    def theirs() -> float:
        with FastApi("bench.b9_listing_writes", urls[FASTAPI]) as server:
            return over_http(FASTAPI, server.port)

    def bare(clients: int) -> float:
        first = taken(PGBENCH)
        share = (at[PGBENCH] - first) // clients
        reached = pgbench(urls[PGBENCH], PUBLISH, _variables(first=first, share=share), sizes.seconds, clients)
        for client in range(clients):
            _must_be_left(urls[PGBENCH], first + (client + 1) * share - 1)
        return reached

    return Race(
        title=f"publishing, PostgreSQL, {CLIENTS} callers",
        unit="offers/s",
        sides=[
            Side(SERVED, ours),
            Side(PGBENCH, lambda: bare(CLIENTS)),
            Side(FEW, lambda: bare(FEW_CLIENTS)),
            Side(FASTAPI, theirs),
        ],
        goals=_goals(),
    )


def _goals() -> list[Goal]:
    return [
        *(Goal(side=SERVED, against=each, must=0.5, moonshot=1) for each in (PGBENCH, FEW)),
        Goal(side=SERVED, against=FASTAPI, must=5),
    ]


def _load_publish(port: int, first: int, seconds: int) -> float:
    return requests_per_second(port, "/", _publish_script(first), connections=CLIENTS, seconds=seconds)


def _publish_script(first: int) -> str:
    return f"""
local at = {first} - 1
local headers = {{ ["Content-Type"] = "application/json" }}
function request()
  at = at + 1
  local body = string.format('{{"owner_id":"%d","version":1}}', {SELLER_FIRST} + at % {SELLERS})
  return wrk.format("POST", string.format("/v1/drafts/%032d/publish", at), headers, body)
end
"""


def _must_be_left(url: str, number: int) -> None:
    """A draft that is published again costs less: there must have been enough of them."""
    with psycopg.connect(url) as connection:
        rows = connection.execute("SELECT offer_id FROM draft WHERE draft_id = %s", (f"{number:032d}",)).fetchall()
    if rows != [("",)]:
        raise LoadFailed("there were too few drafts for so fast a side: raise PER_SECOND_MAX")


# Editing -------------------------------------------------------------------------------------------------------------


def _edited(urls: Mapping[str, str], sizes: Sizes, folder: Path) -> Race:
    def over_http(name: str, port: int) -> float:
        _load_edit(urls[name], port, folder, range(OFFERS, OFFERS + WARM_OFFERS), WARM_SECONDS)
        return _load_edit(urls[name], port, folder, range(OFFERS), sizes.seconds)

    def ours() -> float:
        with served(urls[SERVED]) as (port, _):
            return over_http(SERVED, port)

    def theirs() -> float:
        with FastApi("bench.b9_listing_writes", urls[FASTAPI]) as server:
            return over_http(FASTAPI, server.port)

    def bare(clients: int) -> float:
        return pgbench(urls[PGBENCH], EDIT, _variables(first=0, share=OFFERS // clients), sizes.seconds, clients)

    return Race(
        title=f"editing, PostgreSQL, {CLIENTS} callers",
        unit="offers/s",
        sides=[
            Side(SERVED, ours),
            Side(PGBENCH, lambda: bare(CLIENTS)),
            Side(FEW, lambda: bare(FEW_CLIENTS)),
            Side(FASTAPI, theirs),
        ],
        goals=_goals(),
    )


def _load_edit(url: str, port: int, folder: Path, numbers: range, seconds: int) -> float:
    """Versions are those of the store: of the last requests of an earlier load nobody knows what became."""
    path = folder / "versions"
    with psycopg.connect(url) as connection:
        versions: dict[str, int] = dict(
            connection.execute("SELECT offer_id, version FROM offer WHERE kind = 'offer'").fetchall()
        )
    ids = [offer_id_at(number) for number in numbers]
    path.write_text("".join(f"{offer_id} {versions[offer_id]}\n" for offer_id in ids))
    return requests_per_second(port, "/", _edit_script(path), connections=CLIENTS, seconds=seconds)


def _edit_script(path: Path) -> str:
    """The price says which version it is, so that every edit changes something. wrk asks for one request beforehand,
    which it does not send: the first offer begins again."""
    before, _, after = _edit_body(0).partition('"amount":0')
    return f"""
local ids, versions, at = {{}}, {{}}, -1
for line in io.lines("{path}") do
  local id, version = line:match("(%d+) (%d+)")
  ids[#ids + 1] = "/v1/offers/" .. id
  versions[#versions + 1] = tonumber(version)
end
local headers = {{ ["Content-Type"] = "application/json" }}
function request()
  if at < 0 then
    at = 0
    return wrk.format("GET", "/")
  end
  at = at % #ids + 1
  local version = versions[at]
  versions[at] = version + 1
  headers["If-Match"] = '"' .. version .. '"'
  return wrk.format("PUT", ids[at], headers, [==[{before}"amount":]==] .. version .. [==[{after}]==])
end
"""


def _edit_body(amount: int) -> str:
    filled = Filled(category="cars", content=content_of(), price=Price(amount, "EUR"))
    return msgspec.json.encode(filled).decode()


# pgbench -------------------------------------------------------------------------------------------------------------


def _variables(first: int, share: int) -> dict[str, str | int]:
    """Every client has a share of drafts or offers of its own. Offers go to the server as templates of 2 KB."""
    return {
        "at": -1,
        "first": first,
        "share": share,
        "offer": _template(),
        "told": _template(is_told=True),
        "empty": msgspec.json.encode(Filled()).decode(),
    }


def _template(is_told: bool = False) -> str:
    """An offer for the server's `format`, which puts in: id, seller, price, when made, when changed, version."""
    offer = msgspec.json.encode(offer_at(COMPARED, seller_at(COMPARED), content_of())).decode()
    made = str(CREATED_US + COMPARED)
    for name, value, place in (
        ("offer_id", f'"{offer_id_at(COMPARED)}"', '"%1$s"'),
        ("seller_id", f'"{seller_at(COMPARED)}"', '"%2$s"'),
        ("business_id", seller_at(COMPARED), "%2$s"),
        ("shop_id", seller_at(COMPARED), "%2$s"),
        ("amount", str(PRICE.amount), "%3$s"),
        ("created_at_us", made, "%4$s"),
        ("status_at_us", made, "%4$s"),
        ("updated_at_us", made, "%5$s"),
    ):
        before = f'"{name}":{value}'
        assert before in offer
        offer = offer.replace(before, f'"{name}":{place}')
    return offer[:-1] + ',"shown":"active","version":%6$s}' if is_told else offer


def _body(offer_id: str, amount: str, created: str) -> str:
    return f"format(:offer::text, {offer_id}, :seller::text, {amount}, {created}::text, :now_us::text)"


def _told(offer_id: str, amount: str, created: str, version: str) -> str:
    given = f"{offer_id}, :seller::text, {amount}, {created}::text, :now_us::text, {version}"
    return f"convert_to(format(:told::text, {given}), 'UTF8')"


def _of_seller(modulus: int) -> str:
    return f"(crc32(convert_to(:seller::text, 'UTF8')) % {modulus})::int"


NOW = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS now_us"
READ_PRESETS = "SELECT preset_id, name, definition, state, since_us FROM offer_presets ORDER BY preset_id;"
NEW_ID, DRAFT_ID, OLD_ID = "lpad(:id::text, 16, '0')", "lpad(:number::text, 32, '0')", "lpad(:id::text, 16, '0')"
_NEW = (NEW_ID, f"'{PRICE.amount}'", ":now_us")
_OLD = (OLD_ID, ":version::text", ":created")


def _message(offer_id: str, version: str, payload: str) -> str:
    return f"""
INSERT INTO messages
  (topic, key, kind, version, id, partition, schema_name, event_time_us, payload, queued_at_us)
VALUES ('offers', {offer_id}, 'offer', {version}, nextval('messages_numbers'), {_of_seller(PARTITIONS)}, 'offer/1',
  :now_us::bigint, {payload}, :now_us::bigint);"""


PUBLISH = f"""
\\set at :at + 1
\\set number :first + :client_id * :share + :at
\\set seller {SELLER_FIRST} + :number % {SELLERS}
\\set id random(0, {10**ID_DIGITS - 1}) * 10
\\set counts_seq_no random(0, {SEQ_NOS - 1})
\\set counters_seq_no random(0, {SEQ_NOS - 1})
BEGIN;
SELECT version, body, offer_id, updated_at_us, {NOW}
FROM draft WHERE owner_id = :seller::text AND draft_id = {DRAFT_ID} \\gset
INSERT INTO offer (seller_id, offer_id, kind, version, shown, shard_id, due_at_us, body)
VALUES (:seller::text, {NEW_ID}, 'offer', 1, 'active', {_of_seller(SHARDS)}, :now_us::bigint + {AGES.expires},
  {_body(*_NEW)}) ON CONFLICT DO NOTHING;
INSERT INTO offer_ids (offer_id, seller_id) VALUES ({NEW_ID}, :seller::text)
ON CONFLICT DO NOTHING RETURNING offer_id;
SELECT seller_id FROM sellers WHERE seller_id = :seller::text;
{READ_PRESETS}
INSERT INTO user_offer_presets (seller_id, preset_id, create_time, offer_id)
VALUES (:seller::text, 1, :now_us::bigint, {NEW_ID}), (:seller::text, 2, :now_us::bigint, {NEW_ID})
ON CONFLICT DO NOTHING RETURNING seller_id, preset_id, create_time, offer_id;
INSERT INTO user_offer_presets_count AS c (seller_id, preset_id, seq_no, offers)
VALUES (:seller::text, 1, :counts_seq_no::int, 1), (:seller::text, 2, :counts_seq_no::int, 1)
ON CONFLICT (seller_id, preset_id, seq_no) DO UPDATE SET offers = c.offers + excluded.offers;
INSERT INTO user_total_counters AS c (seller_id, counter_id, seq_no, counter_value)
VALUES (:seller::text, 'Active', :counters_seq_no::int, 1)
ON CONFLICT (seller_id, counter_id, seq_no) DO UPDATE SET counter_value = c.counter_value + excluded.counter_value;
{_message(NEW_ID, "1", _told(*_NEW, "1"))}
UPDATE draft SET version = version + 1, body = :empty::text, offer_id = {NEW_ID},
  updated_at_us = :now_us::bigint
WHERE owner_id = :seller::text AND draft_id = {DRAFT_ID} AND version = :version::bigint;
DELETE FROM current_draft WHERE owner_id = :seller::text AND draft_id = {DRAFT_ID};
COMMIT;
"""

EDIT = f"""
\\set at (:at + 1) % :share
\\set number :first + :client_id * :share + :at
\\set id :number * {SCATTER} % {IDS}
\\set created {CREATED_US} + :number
BEGIN;
SELECT seller_id AS seller FROM offer_ids WHERE offer_id = {OLD_ID} \\gset
SELECT version, body, {NOW}
FROM offer WHERE seller_id = :seller::text AND offer_id = {OLD_ID} AND kind = 'offer' \\gset
{READ_PRESETS}
UPDATE offer SET version = version + 1, shown = 'active', shard_id = {_of_seller(SHARDS)},
  due_at_us = :created::bigint + {AGES.expires}, body = {_body(*_OLD)}
WHERE seller_id = :seller::text AND offer_id = {OLD_ID} AND kind = 'offer' AND version = :version::bigint;
{_message(OLD_ID, ":version::bigint + 1", _told(*_OLD, "(:version::bigint + 1)::text"))}
COMMIT;
"""


# What is stored and answered -----------------------------------------------------------------------------------------

STORED = {
    "draft": "SELECT version, body, offer_id, updated_at_us FROM draft WHERE draft_id = %(draft_id)s",
    "current_draft": "SELECT count(*) FROM current_draft",
    "offer": "SELECT * FROM offer WHERE offer_id IN (%(made)s, %(edited)s) ORDER BY version",
    "offer_ids": "SELECT * FROM offer_ids WHERE offer_id = %(made)s",
    "sellers": "SELECT seller_id, shard_id FROM sellers WHERE seller_id = %(seller)s",
    "presets": "SELECT * FROM user_offer_presets WHERE offer_id IN (%(made)s, %(edited)s) ORDER BY preset_id, offer_id",
    "counts": "SELECT preset_id, sum(offers) FROM user_offer_presets_count WHERE seller_id = %(seller)s"
    " GROUP BY preset_id ORDER BY preset_id",
    "counters": "SELECT counter_id, sum(counter_value) FROM user_total_counters WHERE seller_id = %(seller)s"
    " GROUP BY counter_id",
    "messages": "SELECT topic, key, kind, version, partition, schema_name, event_time_us, convert_from(payload, 'UTF8')"
    " FROM messages ORDER BY id",
}


def _must_store_alike(urls: Mapping[str, str]) -> None:
    """One draft published and one offer edited by each side: the same rows, but for what is drawn and the clock."""
    with served(urls[SERVED]) as (port, _):
        ours = _write_once(port)
    with FastApi("bench.b9_listing_writes", urls[FASTAPI]) as server:
        theirs = _write_once(server.port)
    for script in (PUBLISH, EDIT):
        pgbench(urls[PGBENCH], script, _variables(first=COMPARED, share=1), 1, clients=1, transactions=1)
    rows = {name: _stored(url) for name, url in urls.items()}
    assert _plain(json.dumps(ours)) == _plain(json.dumps(theirs)), (ours, theirs)
    for name in (PGBENCH, FASTAPI):
        for table, stored in rows[SERVED].items():
            assert rows[name][table] == stored, f"{name}, {table}:\n{rows[name][table]}\n{stored}"


def _write_once(port: int) -> list[Any]:
    body = json.dumps({"owner_id": seller_at(COMPARED), "version": 1})
    published = answer(port, "POST", f"/v1/drafts/{COMPARED:032d}/publish", body)
    edited = answer(port, "PUT", f"/v1/offers/{offer_id_at(COMPARED)}", _edit_body(1), {"If-Match": '"1"'})
    assert (published[0], edited[0]) == (200, 200), (published, edited)
    answers = [json.loads(published[1]), json.loads(edited[1])]
    answers[0]["offer_id"] = "made"
    return answers


def _stored(url: str) -> dict[str, str]:
    with psycopg.connect(url) as connection:
        draft_id = f"{COMPARED:032d}"
        found = connection.execute("SELECT offer_id FROM draft WHERE draft_id = %s", (draft_id,)).fetchone()
        assert found is not None
        given = {
            "draft_id": draft_id,
            "made": found[0],
            "edited": offer_id_at(COMPARED),
            "seller": seller_at(COMPARED),
        }
        return {
            name: _plain(str(connection.execute(query, given).fetchall()).replace(found[0], "made"))
            for name, query in STORED.items()
        }


def _plain(text: str) -> str:
    """Without microseconds, except those that were filled in."""
    return re.sub(r"\b1[6-9][0-9]{14}\b", lambda found: _time(int(found[0])), text)


def _time(time_us: int) -> str:
    is_filled = time_us in (CREATED_US + COMPARED, CREATED_US + COMPARED + AGES.expires)
    return str(time_us) if is_filled else "expires" if time_us > CREATED_US + AGES.expires else "now"


# FastAPI -------------------------------------------------------------------------------------------------------------


def serve_fastapi(url: str, port: int) -> None:
    """The peer's program: what someone would write for the same endpoints on the same tables."""
    import random
    import secrets
    from typing import Annotated

    import uvicorn
    from fastapi import FastAPI, Header, HTTPException
    from fastapi.responses import JSONResponse
    from pydantic import BaseModel
    from sqlalchemy.dialects.postgresql import insert
    from sqlalchemy.orm import Session

    class PublishBody(BaseModel):
        owner_id: str
        version: int

    class PriceBody(BaseModel):
        amount: int
        currency: str

    class EditBody(BaseModel):
        category: str
        content: dict[str, Any]
        price: PriceBody | None = None
        photos: list[str] = []
        warehouse_id: int = 0

    app = FastAPI()
    engine = sa.create_engine(sa.make_url(url).set(drivername="postgresql+psycopg"), pool_size=12, max_overflow=0)
    next_number = sa.Sequence("messages_numbers").next_value()

    @app.get("/readyz")
    async def ready() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/v1/drafts/{draft_id}/publish")
    def publish(draft_id: str, body: PublishBody) -> JSONResponse:
        key = (DRAFT.c.owner_id == body.owner_id, DRAFT.c.draft_id == draft_id)
        with Session(engine) as session, session.begin():
            columns = (DRAFT.c.version, DRAFT.c.body, DRAFT.c.offer_id, DRAFT.c.updated_at_us)
            draft = session.execute(sa.select(*columns).where(*key)).one_or_none()
            if draft is None or draft.version != body.version:
                raise HTTPException(409)
            now_us = time.time_ns() // 1_000
            offer = _new_offer(body.owner_id, f"{secrets.randbelow(10**ID_DIGITS)}0".zfill(16), now_us)
            _fill_in(offer, json.loads(draft.body))
            session.execute(insert(OFFER).values(**_offer_row(offer), version=1).on_conflict_do_nothing())
            made = {"offer_id": offer["offer_id"], "seller_id": body.owner_id}
            session.execute(insert(OFFER_IDS).values(**made).on_conflict_do_nothing().returning(OFFER_IDS.c.offer_id))
            session.execute(sa.select(SELLERS_TABLE.c.seller_id).where(SELLERS_TABLE.c.seller_id == body.owner_id))
            numbers = _presets_of(session.execute(sa.select(OFFER_PRESETS)).all())
            rows = [{**made, "preset_id": number, "create_time": now_us} for number in numbers]
            session.execute(
                insert(USER_OFFER_PRESETS).values(rows).on_conflict_do_nothing().returning(*USER_OFFER_PRESETS.c)
            )
            seq_no = random.randrange(SEQ_NOS)
            counts = insert(USER_OFFER_PRESETS_COUNT).values(
                [{"seller_id": body.owner_id, "preset_id": each, "seq_no": seq_no, "offers": 1} for each in numbers]
            )
            session.execute(
                counts.on_conflict_do_update(
                    index_elements=["seller_id", "preset_id", "seq_no"],
                    set_={"offers": USER_OFFER_PRESETS_COUNT.c.offers + counts.excluded.offers},
                )
            )
            counters = insert(USER_TOTAL_COUNTERS).values(
                seller_id=body.owner_id, counter_id="Active", seq_no=random.randrange(SEQ_NOS), counter_value=1
            )
            session.execute(
                counters.on_conflict_do_update(
                    index_elements=["seller_id", "counter_id", "seq_no"],
                    set_={"counter_value": USER_TOTAL_COUNTERS.c.counter_value + counters.excluded.counter_value},
                )
            )
            shown = {**offer, "shown": "active", "version": 1}
            session.execute(sa.insert(MESSAGES).values(id=next_number, **_message_row(shown, now_us)))
            changed = sa.update(DRAFT).where(*key, DRAFT.c.version == draft.version)
            session.execute(
                changed.values(
                    version=DRAFT.c.version + 1,
                    body=msgspec.json.encode(Filled()).decode(),
                    offer_id=offer["offer_id"],
                    updated_at_us=now_us,
                )
            )
            session.execute(
                sa.delete(CURRENT_DRAFT).where(
                    CURRENT_DRAFT.c.owner_id == body.owner_id, CURRENT_DRAFT.c.draft_id == draft_id
                )
            )
        return JSONResponse(shown)

    @app.put("/v1/offers/{offer_id}")
    def edit(offer_id: str, body: EditBody, if_match: Annotated[str, Header()]) -> JSONResponse:
        with Session(engine) as session, session.begin():
            owner = sa.select(OFFER_IDS.c.seller_id).where(OFFER_IDS.c.offer_id == offer_id)
            seller_id = session.execute(owner).scalar_one()
            key = (OFFER.c.seller_id == seller_id, OFFER.c.offer_id == offer_id, OFFER.c.kind == "offer")
            stored = session.execute(sa.select(OFFER.c.version, OFFER.c.body).where(*key)).one()
            if f'"{stored.version}"' != if_match:
                raise HTTPException(412)
            now_us = time.time_ns() // 1_000
            offer = json.loads(stored.body)
            before = dict(offer)
            _fill_in(offer, body.model_dump())
            offer["updated_at_us"] = now_us
            rows = session.execute(sa.select(OFFER_PRESETS)).all()
            if before["status"] != offer["status"] or not _presets_of(rows):
                raise HTTPException(500)  # nothing here moves an offer to another list
            changed = sa.update(OFFER).where(*key, OFFER.c.version == stored.version)
            done = session.execute(changed.values(**_offer_row(offer), version=OFFER.c.version + 1))
            if done.rowcount != 1:  # type: ignore[attr-defined]
                raise HTTPException(412)
            shown = {**offer, "shown": "active", "version": stored.version + 1}
            session.execute(sa.insert(MESSAGES).values(id=next_number, **_message_row(shown, now_us)))
        return JSONResponse(shown)

    uvicorn.run(
        app, host="127.0.0.1", port=port, loop="uvloop", http="httptools", log_level="warning", access_log=False
    )


def _new_offer(seller_id: str, offer_id: str, now_us: int) -> dict[str, Any]:
    return {
        "offer_id": offer_id,
        "seller_id": seller_id,
        "category": "",
        "schema_version": 2,
        "status": "active",
        "is_banned": False,
        "was_sold": False,
        "price": None,
        "photos": [],
        "external_id": "",
        "business_id": int(seller_id),
        "shop_id": int(seller_id),
        "warehouse_id": 0,
        "tier": "",
        "created_at_us": now_us,
        "status_at_us": now_us,
        "updated_at_us": now_us,
        "reason": "",
        "content": {},
    }


def _fill_in(offer: dict[str, Any], filled: dict[str, Any]) -> None:
    for name in ("category", "content", "price", "photos", "warehouse_id"):
        offer[name] = filled[name]


def _offer_row(offer: dict[str, Any]) -> dict[str, Any]:
    return {
        "seller_id": offer["seller_id"],
        "offer_id": offer["offer_id"],
        "kind": "offer",
        "shown": offer["status"],
        "shard_id": shard_of(offer["seller_id"]),
        "due_at_us": offer["status_at_us"] + AGES.expires,
        "body": _json(offer),
    }


def _message_row(shown: dict[str, Any], now_us: int) -> dict[str, Any]:
    return {
        "topic": "offers",
        "key": shown["offer_id"],
        "kind": "offer",
        "version": shown["version"],
        "partition": partition_of(shown["seller_id"], PARTITIONS),
        "schema_name": "offer/1",
        "event_time_us": now_us,
        "payload": _json(shown).encode(),
        "queued_at_us": now_us,
    }


def _presets_of(rows: Any) -> list[int]:
    """Of an active offer: by its status, which is all that the default presets look at."""
    return [row.preset_id for row in rows if "active" in json.loads(row.definition)["statuses"]]


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
