"""Listings as people use them: a seller over HTTP, a support desk by the command line."""

import json
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from keyfold.core.store import Store
from keyfold.listings.model import offer_id_shown
from tests.acceptance.served import KEYFOLD, Served, token_for
from tests.acceptance.test_http import CAR, publish_car, slug
from tests.listings import Product, car, opened
from tests.stores import made_ready

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def keyfold(in_process: Run) -> Run:
    return partial(in_process, "listings")


def told(done: "subprocess.CompletedProcess[str]", code: int = 0) -> Any:
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def changed(url: str, sql: str) -> None:
    store = Store.open(url)
    store.transact(lambda tx: tx.driver(sql))
    store.close()


# Workers as processes ------------------------------------------------------------------------------------------------


@pytest.fixture(params=["sqlite", "postgresql-18"])
def worked_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'keyfold.db'}"
    url = str(request.getfixturevalue("postgres_url"))
    store = Store.open(url)
    made_ready(store)
    store.close()
    return url


def eventually(look: Callable[[], bool], seconds_max: float = 60.0) -> None:
    ends_at = time.monotonic() + seconds_max
    while not look():
        assert time.monotonic() < ends_at, "it did not come about"
        time.sleep(0.1)


@pytest.mark.spec("LST-01", "LST-06", "LST-11", "CORE-11", "CORE-20")
def test_a_worker_that_is_killed_is_followed_by_the_other_and_everything_is_exported(
    worked_url: str, tmp_path: Path
) -> None:
    environ = {"KEYFOLD_STORE_URL": worked_url, "KEYFOLD_LEASES_LEASE_SECONDS": "2"}
    with opened(worked_url) as product:
        workers = [Served([*KEYFOLD, "work", "listings"], tmp_path, environ) for _ in range(2)]
        try:
            product.make(*[car(str(seller)) for seller in range(40)])
            eventually(lambda: both_hold(product, "listings") and both_hold(product, "relay/offers"))
            workers[0].signal(signal.SIGKILL)
            made = product.make(*[car(str(seller)) for seller in range(40)])
            changed(worked_url, "UPDATE offer SET due_at_us = 1 WHERE shown = 'active'")  # put off, or expired
            product.change(made[0].offer.offer_id, status="sold")
            wanted = set(stored_versions(product))
            eventually(lambda: {(key, version) for key, version, _ in exported(product)} >= wanted)
            positions = [(key, position) for key, _, position in sorted(exported(product))]
            assert positions == sorted(positions)  # of each offer in the order of its versions
            eventually(lambda: product.rows("SELECT count(*) FROM offer WHERE due_at_us = 1") == [(0,)])
            assert workers[1].stop() == 0
        finally:
            for worker in workers:
                worker.stop()


def both_hold(product: Product, job: str) -> bool:
    rows = product.rows("SELECT name, holder FROM leases WHERE expires_at_us > 0")
    return len({holder for name, holder in rows if name.rpartition("#")[0] == job}) == 2


def stored_versions(product: Product) -> list[tuple[str, int]]:
    """Every version that an offer has had."""
    rows = product.rows("SELECT offer_id, version FROM offer WHERE kind = 'offer'")
    return [(offer_id, version) for offer_id, last in rows for version in range(1, last + 1)]


def exported(product: Product) -> list[tuple[str, int, int]]:
    """Of which offer, which version, and where in its partition."""
    rows = product.rows(
        "SELECT key, version, position FROM messages WHERE topic = 'offers' AND kind = 'offer' AND position IS NOT NULL"
    )
    return [(key, version, position) for key, version, position in rows]


# By the command line -------------------------------------------------------------------------------------------------


@pytest.mark.spec("LST-04", "LST-09", "LST-11")
def test_a_support_desk_finds_offers_sellers_and_drift(keyfold: Run, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'keyfold.db'}"
    with opened(url) as product:
        first, second = product.make(car(content=dict(CAR) | {"title": "red\x1b[31m"}), car())
        product.change(second.offer.offer_id, status="sold", was_sold=True)
    groups = offer_id_shown(first.offer.offer_id).split()
    shown = keyfold("offer", *groups)
    assert shown.returncode == 0, shown.stderr
    assert "active, version 1" in shown.stdout
    assert "\x1b" not in shown.stdout
    assert told(keyfold("offer", first.offer.offer_id, "--json"))["offer"]["seller_id"] == "7"
    slip = first.offer.offer_id[:-1] + str((int(first.offer.offer_id[-1]) + 1) % 10)
    assert "a digit is wrong" in keyfold("offer", slip).stderr
    assert "16 digits" in keyfold("offer", "12").stderr
    assert "there is no offer" in keyfold("offer", "0" * 16).stderr

    seller = told(keyfold("seller", "7", "--limit", "1", "--json"))
    assert seller["counters"]["Active"] == seller["counters"]["Sold"] == 1
    assert len(seller["offers"]) == 1
    further = told(keyfold("seller", "7", "--limit", "1", "--cursor", seller["cursor"], "--json"))
    assert further["offers"] != seller["offers"]
    assert "there is no preset 'x'" in keyfold("seller", "7", "--preset", "x").stderr

    assert "the counts of 1 sellers are right" in keyfold("drift").stderr
    changed(url, "UPDATE user_offer_presets_count SET offers = offers + 2 WHERE preset_id = 1")
    drift = told(keyfold("drift", "7", "--json"), code=1)
    assert {(each["name"], each["missing"]) for each in drift} <= {("all", -2), ("all", -4)}
    assert "name sellers, or say --all" in keyfold("repair").stderr
    assert "there is no seller 'x'" in keyfold("repair", "x").stderr
    assert told(keyfold("repair", "--all", "--json")) == drift
    assert told(keyfold("drift", "--json")) == []

    assert told(keyfold("feed", "7", "--json")) == []
    assert "has no feed 1" in keyfold("feed", "7", "1").stderr
    assert "--approve needs the TASK" in keyfold("feed", "7", "--approve").stderr
    assert "for all feeds of a seller" in keyfold("feed", "7", "1", "--restart").stderr
    assert "there is no seller" in keyfold("feed", "nobody", "--restart").stderr
    assert "may have any task id" in keyfold("feed", "7", "--restart").stdout
    waiting = told(keyfold("export-status", "--json"))
    assert sum(each["pending"] for each in waiting) == 3
    assert "3 changes wait to go to offers" in keyfold("export-status").stdout


# Over HTTP -----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("LST-02", "LST-03", "LST-10", "LST-15", "LST-16", "LST-18")
def test_a_seller_publishes_edits_and_sells(shared: Served) -> None:
    served = shared
    mine = token_for(served.store_url, ["read", "listings.write"], seller=["anna", "visitor:1"])
    site = token_for(served.store_url, ["read"])
    moderator = token_for(served.store_url, ["moderate"])

    visit = served.call("POST", "/v1/drafts", mine, json={"anonymous_id": "visitor:1", "category": "cars"}).json()
    address = f"/v1/drafts/{visit['draft_id']}"
    wrong = {"owner_id": "visitor:1", "version": 1, "filled": {"category": "cars", "content": {"year": "old"}}}
    filled = served.call("PUT", address, mine, json=wrong).json()
    assert filled["version"] == 2
    taken = served.call("POST", "/v1/drafts", mine, json={"anonymous_id": "visitor:1", "seller_id": "anna"}).json()
    assert (taken["draft_id"], taken["owner_id"]) == (visit["draft_id"], "anna")
    assert served.call("GET", f"{address}?owner_id=visitor:1", mine).status_code == 404
    named = {"owner_id": "anna"}
    refused = served.call("POST", f"{address}/publish", mine, json=named | {"version": taken["version"]})
    assert (refused.status_code, slug(refused)) == (422, "content-refused")
    assert "content.year" in refused.json()["detail"]

    offer = {"category": "cars", "content": CAR, "price": {"amount": 100, "currency": "EUR"}}
    filled = served.call("PUT", address, mine, json=named | {"version": taken["version"], "filled": offer}).json()
    stale = served.call("POST", f"{address}/publish", mine, json=named | {"version": filled["version"] - 1})
    assert (stale.status_code, slug(stale)) == (409, "conflict")
    published = [
        served.call("POST", f"{address}/publish", mine, json=named | {"version": filled["version"]}) for _ in range(2)
    ]
    assert published[0].json() == published[1].json()
    offer_id = published[0].json()["offer_id"]
    assert published[0].headers["ETag"] == '"1"'

    edited = served.call(
        "PUT",
        f"/v1/offers/{offer_id}",
        mine,
        json=offer | {"price": {"amount": 250, "currency": "EUR"}},
        headers={"If-Match": '"1"'},
    )
    assert edited.json()["price"]["amount"] == 250
    again = served.call("PUT", f"/v1/offers/{offer_id}", mine, json=offer, headers={"If-Match": '"1"'})
    assert (again.status_code, slug(again)) == (412, "version-stale")

    seen = served.call("POST", "/v1/offers", site, json={"offer_ids": [offer_id, "0" * 16]}).json()
    assert [each["version"] for each in seen["offers"]] == [2]
    assert seen["missing"] == ["0" * 16]
    opinion = {"offer_id": offer_id, "version": 1, "is_banned": True, "reason": "a trial"}
    served.call("POST", "/v1/opinions", moderator, json={"opinions": [opinion]})
    page = served.call("GET", "/v1/sellers/anna/presets/banned", mine).json()
    assert [(each["offer_id"], each["shown"]) for each in page["offers"]] == [(offer_id, "banned")]
    lifted = opinion | {"version": 2, "is_banned": False}
    served.call("POST", "/v1/opinions", moderator, json={"opinions": [lifted]})
    sold = [served.call("POST", f"/v1/offers/{offer_id}/status", mine, json={"status": "sold"}) for _ in range(2)]
    assert sold[0].json() == sold[1].json()
    counters = served.call("GET", "/v1/sellers/anna/counters", mine).json()["counters"]
    assert counters == {"Active": 0, "Expired": 0, "Banned": 0, "Sold": 1, "MoneyEarned.EUR": 250}
    back = served.call("POST", f"/v1/offers/{offer_id}/status", mine, json={"status": "active"})
    assert (back.status_code, slug(back)) == (409, "conflict")

    stage = f"/v1/offers/{offer_id}/stages/pricing"
    service = token_for(served.store_url, ["ingest"])
    first = served.call("PUT", stage, service, json={"state": {"a": 1}}, headers={"If-Match": '"0"'})
    assert first.headers["ETag"] == '"1"'
    assert served.call("GET", stage, service).json()["state"] == {"a": 1}
    assert slug(served.call("GET", stage, mine)) == "scope-missing"  # what a stage keeps is no seller's affair
    whole = served.call("GET", f"/v1/offers/{offer_id}", mine).json()
    assert whole["moderation"] == {"is_banned": False, "reason": "a trial"}
    assert whole["photos"] == []
    assert whole["offer"]["shown"] == "sold"


def item(number: int, **more: Any) -> str:
    return json.dumps({"external_id": str(number), "category": "cars", "content": CAR} | more)


def send(served: Served, task: int, lines: list[str], position: int = 0) -> Any:
    body = "".join(f"{line}\n" for line in lines).encode()
    return served.call(
        "POST",
        f"/v1/feeds/feeder/{task}/items?position={position}",
        served.token,
        data=body,
        headers={"Content-Type": "application/x-ndjson"},
    )


def ended(served: Served, task: int, items: int) -> str:
    """The stage in which a feed comes to rest after its end."""
    address = f"/v1/feeds/feeder/{task}"
    answer = served.call("POST", f"{address}/end", served.token, json={"items": items})
    assert answer.status_code == 200, answer.text
    deadline = time.monotonic() + 60
    while True:
        stage = str(served.call("GET", address, served.token).json()["stage"])
        if stage in ("held", "done", "superseded") or time.monotonic() > deadline:
            return stage
        time.sleep(0.05)


@pytest.mark.spec("LST-12", "LST-13", "LST-18")
def test_a_seller_sends_feeds(shared: Served) -> None:
    lines = [item(number) for number in range(2_500)]
    assert send(shared, 1, lines[:1_000]).json()["position"] == 1_000
    assert send(shared, 1, lines[500:1_500], 500).json()["position"] == 1_500  # some of them again
    gap = send(shared, 1, lines[2_000:], 2_000)
    assert (gap.status_code, slug(gap)) == (409, "conflict")
    assert "1500" in gap.text
    cut = shared.call("POST", "/v1/feeds/feeder/1/end", shared.token, json={"items": 2_500})
    assert cut.status_code == 409
    send(shared, 1, lines[1_500:], 1_500)
    assert ended(shared, 1, 2_500) == "done"
    counters = shared.call("GET", "/v1/sellers/feeder/counters", shared.token).json()["counters"]
    assert counters["Active"] == 2_500

    send(shared, 2, [item(1), "{", item(2, category="boats")])
    assert ended(shared, 2, 3) == "held"
    held = shared.call("GET", "/v1/feeds/feeder/2", shared.token).json()
    assert "2498 of 2500" in held["reason"]
    assert shared.call("POST", "/v1/feeds/feeder/2/approve", shared.token).status_code == 200
    deadline = time.monotonic() + 60
    while shared.call("GET", "/v1/feeds/feeder/2", shared.token).json()["stage"] != "done":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    counters = shared.call("GET", "/v1/sellers/feeder/counters", shared.token).json()["counters"]
    assert counters["Active"] == 2
    report = shared.call("GET", "/v1/feeds/feeder/2/report", shared.token).json()
    assert [each["external_id"] for each in report["problems"]] == ["", "2"]
    old = send(shared, 1, lines)
    assert (old.status_code, slug(old)) == (409, "conflict")


@pytest.mark.spec("LST-14")
@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/a.jpg",
        "http://[::1]/a.jpg",
        "http://2130706433/a.jpg",
        "http://0x7f.0.0.1/a.jpg",
        "http://169.254.169.254/latest/meta-data",
        "http://metadata.google.internal/",
        "http://127.0.0.1.nip.io/a.jpg",
        "http://localhost/a.jpg",
        "file:///etc/passwd",
        "gopher://example.com/",
        "https://user:secret@example.com/a.jpg",
        "https://example.com:8443/a.jpg",
        "//example.com/a.jpg",
        "https://example.com\\@127.0.0.1/a.jpg",
    ],
)
def test_a_photo_from_where_no_photo_comes_is_refused(shared: Served, url: str) -> None:
    offer_id = publish_car(shared, "photographer")
    body = {"category": "cars", "content": CAR, "photos": [url]}
    answer = shared.call("PUT", f"/v1/offers/{offer_id}", shared.token, json=body, headers={"If-Match": '"1"'})
    assert (answer.status_code, slug(answer)) == (400, "bad-input")
    assert answer.json()["place"] == "photos"


@pytest.mark.spec("LST-18")
@pytest.mark.parametrize("field", ["status", "is_banned", "was_sold", "seller_id", "created_at_us", "shown", "version"])
def test_a_seller_cannot_write_what_is_the_servers(shared: Served, field: str) -> None:
    offer_id = publish_car(shared, "assigner")
    body = {"category": "cars", "content": CAR, field: "sold"}
    answer = shared.call("PUT", f"/v1/offers/{offer_id}", shared.token, json=body, headers={"If-Match": '"1"'})
    assert answer.status_code == 400
    assert field in answer.text
