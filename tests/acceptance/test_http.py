"""The server as its users meet it: started, called rightly and wrongly, and stopped."""

import json
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from keyfold.core.access import SCOPES
from tests.acceptance.served import KEYFOLD, Served, Start, tally, token_for
from tests.acceptance.served import TYPES as TYPES_SET
from tests.numbering import opened as numbering_opened

JSON = "Content-Type: application/json\r\n"


def slug(answer: requests.Response) -> str:
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    return str(answer.json()["type"]).removeprefix("/problems/")


def raw(served: Served, data: bytes, seconds: float = 10.0) -> bytes:
    """What comes back on a bare connection until it closes or falls silent."""
    got = b""
    with socket.create_connection(served.address, timeout=seconds) as connection:
        try:
            connection.sendall(data)
            while chunk := connection.recv(65536):
                got += chunk
                if got.endswith((b"}", b"\r\n\r\n")):
                    break
        except OSError:
            pass
    return got


# Starting ---------------------------------------------------------------------------------------------------------


@pytest.mark.spec("CORE-17")
def test_the_address_is_printed_when_the_server_really_answers(start: Start) -> None:
    served = start()
    assert served.call("GET", "/healthz").json() == {"status": "alive"}
    assert served.call("GET", "/readyz").json() == {"status": "ready"}


@pytest.mark.spec("CORE-13")
def test_a_taken_address_is_refused_in_one_line(start: Start) -> None:
    first = start()
    second = start("--port", str(first.address[1]), ready=False)
    assert second.wait() != 0
    assert f"cannot listen on 127.0.0.1:{first.address[1]}: Address already in use" in second.log
    assert "Traceback" not in second.log
    assert first.call("GET", "/healthz").status_code == 200


@pytest.mark.spec("CORE-15")
def test_an_address_open_to_the_network_is_refused_while_there_is_no_token(start: Start, tmp_path: Path) -> None:
    refused = start("--host", "0.0.0.0", ready=False)
    assert refused.wait() != 0
    assert "keyfold token create" in refused.log
    assert "Traceback" not in refused.log
    token_for(f"sqlite:///{tmp_path / 'keyfold.db'}")
    served = start("--host", "0.0.0.0")
    assert requests.get(f"http://127.0.0.1:{served.address[1]}/healthz", timeout=30).status_code == 200


@pytest.mark.spec("CORE-15")
def test_a_demo_may_not_be_open_to_the_network(start: Start) -> None:
    refused = start("--demo", "--host", "0.0.0.0", ready=False)
    assert refused.wait() != 0
    assert "demo mode asks for no token and may not listen on 0.0.0.0" in refused.log


@pytest.mark.spec("CORE-15")
def test_a_demo_on_loopback_answers_without_a_token(start: Start) -> None:
    served = start("--demo")
    assert served.call("POST", "/v1/tallies/read", json={"keys": ["a"]}).status_code == 200
    assert served.call("POST", "/v1/tallies/read", "kf_0_wrong", json={"keys": ["a"]}).status_code == 401


@pytest.mark.spec("CORE-13")
@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7", "not an address"])
def test_an_address_that_is_not_of_this_machine_is_refused_in_one_line(start: Start, tmp_path: Path, host: str) -> None:
    url = f"sqlite:///{tmp_path / 'keyfold.db'}"
    subprocess.run([*KEYFOLD, "store", "upgrade", "--store", url], check=True, cwd=tmp_path, capture_output=True)
    token_for(url)
    refused = start("--host", host, ready=False)
    assert refused.wait() != 0
    assert "Traceback" not in refused.log
    assert host in refused.log


# What is sent wrongly ---------------------------------------------------------------------------------------------


def item(**fields: object) -> bytes:
    return json.dumps({"items": [{"key": "victim", "add": 1}, fields]}).encode()


ATTACKS: dict[str, tuple[bytes, set[int]]] = {
    "huge": (b'{"items":[{"key":"' + b"x" * 3_000_000 + b'"}]}', {413}),
    "deep array": (b'{"items":' + b"[" * 500_000 + b"]" * 500_000 + b"}", {400}),
    "deep object": (b'{"items":' + b'{"a":' * 300_000 + b"1" + b"}" * 300_000 + b"}", {400, 413}),
    "not a number": (b'{"items":[{"key":"victim","add":1},{"key":"v","add":NaN}]}', {400}),
    "infinite": (b'{"items":[{"key":"victim","add":1},{"key":"v","add":1e999}]}', {400}),
    "beyond 64 bits": (item(key="victim", add=2**64), {400}),
    "below 64 bits": (item(key="victim", add=-(2**63) - 1), {400}),
    "NUL": (b'{"items":[{"key":"victim","add":1},{"key":"v\\u0000"}]}', {400}),
    "raw NUL": (b'{"items":[{"key":"victim","add":1},{"key":"v\x00"}]}', {400}),
    "lone surrogate": (b'{"items":[{"key":"victim","add":1},{"key":"\\ud800"}]}', {400}),
    "bad UTF-8": (b'{"items":[{"key":"victim","add":1},{"key":"\xff"}]}', {400}),
    "unknown field": (item(key="victim", ban=True), {400}),
    "duplicate key": (b'{"items":[{"key":"victim","add":1,"add":2}]}', {400}),
    "wrong type": (item(key=5), {400}),
    "number as text": (item(key="victim", add="1"), {400}),
    "null": (b"null", {400}),
    "array": (b"[]", {400}),
    "empty": (b"", {400}),
    "blank": (b"   ", {400}),
    "truncated": (b'{"items":[{"key":"victim","add":1}', {400}),
    "trailing": (b'{"items":[{"key":"victim","add":1}]}{}', {400}),
    "too many items": (b'{"items":[' + b",".join([b'{"key":"victim"}'] * 10_001) + b"]}", {400, 413}),
    "no items": (b'{"items":[]}', {400}),
    "long key": (item(key="x" * 100_000), {400, 413}),
    "byte order mark": (b'\xef\xbb\xbf{"items":[{"key":"victim"}]}', {400}),
    "UTF-16": ('{"items":[{"key":"victim"}]}'.encode("utf-16"), {400}),
}


@pytest.mark.spec("CORE-14", "CORE-16")
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_body_gets_its_4xx_and_changes_nothing(shared: Served, attack: str) -> None:
    body, statuses = ATTACKS[attack]
    token = shared.token
    before = tally(shared, token, "victim")
    answer = shared.call("POST", "/v1/tallies", token, data=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in statuses, answer.text
    assert slug(answer)
    assert "Traceback" not in answer.text
    assert tally(shared, token, "victim") == before


@pytest.mark.spec("CORE-14")
def test_a_query_that_lacks_what_it_must_say_gets_400(shared: Served) -> None:
    answer = shared.call("GET", "/v1/user-segments/1/why", shared.token)
    assert (answer.status_code, slug(answer)) == (400, "bad-input"), answer.text
    assert "segment_id" in answer.text


@pytest.mark.spec("CORE-14", "CORE-16")
def test_hostile_bodies_by_the_hundred_do_not_fill_the_memory(shared: Served) -> None:
    process = psutil.Process(shared.process.pid)
    token = shared.token

    def attack() -> None:
        for body, _ in ATTACKS.values():
            shared.call("POST", "/v1/tallies", token, data=body, headers={"Content-Type": "application/json"})

    attack()
    before = process.memory_info().rss
    for _ in range(4):
        attackers = [threading.Thread(target=attack) for _ in range(4)]
        for each in attackers:
            each.start()
        for each in attackers:
            each.join()
    assert process.memory_info().rss - before < 64 * 1024 * 1024


@pytest.mark.spec("CORE-14", "CORE-16")
def test_a_slow_body_gets_408_and_changes_nothing(shared: Served) -> None:
    token = shared.token
    before = tally(shared, token, "victim")
    head = (
        f"POST /v1/tallies HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Type: application/json\r\n"
    )
    started = time.monotonic()
    answer = raw(shared, f'{head}Content-Length: 40\r\n\r\n{{"items":[{{"key":"victim"}}]'.encode())
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"/problems/too-slow" in answer
    assert 1.5 < time.monotonic() - started < 6
    assert tally(shared, token, "victim") == before


@pytest.mark.spec("CORE-15", "CORE-16")
def test_who_has_no_token_cannot_hold_a_connection_by_a_slow_body(shared: Served) -> None:
    started = time.monotonic()
    answer = raw(shared, b"POST /v1/tallies HTTP/1.1\r\nHost: x\r\nContent-Length: 40\r\n\r\n{")
    assert answer.startswith(b"HTTP/1.1 401")
    assert time.monotonic() - started < 1.5


@pytest.mark.spec("CORE-14")
@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"a" * 9_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 2_000_000 + b"\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X%d: 1\r\n" % n for n in range(500)) + b"\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nBad Header: 1\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\n folded: 1\r\n\r\n",
        b"POST /v1/tallies HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        b"POST /v1/tallies HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/tallies HTTP/1.1\r\nHost: x\r\nContent-Length: abc\r\n\r\n",
        b"POST /v1/tallies HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"POST /v1/tallies HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_what_is_hardly_http_is_refused_and_the_server_goes_on(shared: Served, data: bytes) -> None:
    answer = raw(shared, data)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4"), answer[:200]
    assert shared.call("GET", "/healthz").status_code == 200


@pytest.mark.spec("CORE-14")
def test_a_second_request_cannot_be_smuggled_in_the_body_of_the_first(shared: Served) -> None:
    inner = b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Request-Id: smuggled\r\n\r\n"
    head = b"POST /v1/tallies HTTP/1.1\r\nHost: x\r\n"
    both = raw(
        shared, head + b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" % (5 + len(inner)) + inner
    )
    plain = raw(shared, head + b"Content-Length: %d\r\n\r\n" % len(inner) + inner)
    assert b"smuggled" not in both + plain
    assert "smuggled" not in shared.log


@pytest.mark.spec("CORE-13", "CORE-16")
def test_a_caller_that_sends_far_too_much_still_reads_why_it_was_refused(shared: Served) -> None:
    for body in (b"x" * 20_000_000, iter([b"y" * 1_000_000] * 20)):
        answer = shared.call(
            "POST", "/v1/tallies", shared.token, data=body, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 413
        assert slug(answer) == "too-large"


@pytest.mark.spec("CORE-16")
def test_a_silent_connection_is_closed_so_that_others_get_their_turn(start: Start) -> None:
    served = start("--no-work", KEYFOLD_LIMITS_SILENCE_SECONDS_MAX="1", KEYFOLD_LIMITS_CONNECTIONS_MAX="3")
    silent = [socket.create_connection(served.address, timeout=20) for _ in range(3)]
    silent[1].sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Never-Ends: ")
    assert served.call("GET", "/healthz").status_code == 200
    for connection in silent:
        connection.settimeout(20)
        assert connection.recv(1000)[:12] in (b"", b"HTTP/1.1 408")
        connection.close()


@pytest.mark.spec("CORE-16")
def test_callers_that_go_away_leave_nothing_behind(shared: Served) -> None:
    """At every point of a request; afterwards the server has the files, threads and memory that it had before."""
    process = psutil.Process(shared.process.pid)
    body = b'{"items":[{"key":"left"}]}'
    head = f"POST /v1/tallies HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {shared.token}\r\n{JSON}".encode()
    whole = head + b"Content-Length: %d\r\n\r\n" % len(body) + body

    def leave(times: int) -> None:
        for number in range(times):
            with socket.create_connection(shared.address) as connection:
                connection.sendall(whole[: number % len(whole) + 1])

    leave(len(whole))
    before = (process.memory_info().rss, process.num_threads())
    leave(5 * len(whole))
    deadline = time.monotonic() + 30
    while process.num_fds() > 60 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert process.num_fds() <= 60
    assert process.num_threads() <= before[1] + 2
    assert process.memory_info().rss - before[0] < 16 * 1024 * 1024
    assert shared.call("GET", "/readyz").status_code == 200


# Who may do what --------------------------------------------------------------------------------------------------

# Of what a key stands for in a test: a tally of that name, a type of profile, a log that feeds this type alone.
UNIT_OF = {"a": "rides", "hers": "rides", "his": "food", "nobodys": "groceries"}
TYPES = {"a": "user", "hers": "user", "his": "banner", "nobodys": "page"}
LOGS_OF = {"user": "visit", "banner": "ads", "page": "none"}
SEGMENT = "/v1/segments/{segment_id}"
NUMBERING = "/v1/numbering/{type}"
UPLOAD_OF = {"nobodys": "0" * 32}  # of each segment, once it was begun
DRAFT, OFFER, FEED = "/v1/drafts/{draft_id}", "/v1/offers/{offer_id}", "/v1/feeds/{seller}/{task}"
DRAFT_OF, OFFER_OF = {"nobodys": "0" * 32}, {"nobodys": "0" * 16}  # of each seller, once they were made
CAR = {"make": "Volvo", "model": "240", "year": 1989, "mileage_km": 312_000}

# One good request for every route in the document, about the thing that `key` stands for.
CASES: dict[tuple[str, str], Callable[[str], tuple[str, dict[str, Any]]]] = {
    ("post", "/v1/tallies"): lambda key: ("/v1/tallies", {"json": {"items": [{"key": key}]}}),
    ("post", "/v1/tallies/read"): lambda key: ("/v1/tallies/read", {"json": {"keys": [key]}}),
    ("put", "/v1/tallies/{key}"): lambda key: (
        f"/v1/tallies/{key}",
        {"json": {"value": 1}, "headers": {"If-Match": '"999999"'}},
    ),
    ("post", "/v1/logs/{log}"): lambda key: (
        f"/v1/logs/{LOGS_OF[TYPES[key]]}",
        {"json": {"events": [{"event_id": f"{key}{time.monotonic_ns()}", "time": int(time.time()), "profile_id": 1}]}},
    ),
    ("post", "/v1/profiles"): lambda key: (
        "/v1/profiles",
        {"json": {"profiles": [{"ids": [{"type": TYPES[key], "id": 1}]}]}},
    ),
    ("get", "/v1/profiles/{type}/{id}/held"): lambda key: (f"/v1/profiles/{TYPES[key]}/1/held", {}),
    ("post", "/v1/orders"): lambda key: (
        f"/v1/orders?unit={UNIT_OF[key]}",
        {"json": {"identities": [{"type": "phone_id", "value": "1"}], "filters": [], "group_by": []}},
    ),
    ("post", "/v1/orders/completed"): lambda key: (
        f"/v1/orders/completed?unit={UNIT_OF[key]}",
        {"json": {"orders": [{"order_id": "1", "created_at": now_iso(), "identities": {"phone_id": "1"}}]}},
    ),
    ("post", "/v1/orders/check"): lambda key: (
        f"/v1/orders/check?unit={UNIT_OF[key]}",
        {"json": {"identities": [{"type": "phone_id", "value": "1"}], "fewer_than": 3}},
    ),
    ("post", "/v1/orders/release"): lambda key: (
        f"/v1/orders/release?unit={UNIT_OF[key]}",
        {"json": {"order_ids": ["1"]}},
    ),
    ("post", "/v1/orders/corrections"): lambda key: (
        f"/v1/orders/corrections?unit={UNIT_OF[key]}",
        {"json": {"order_ids": ["nobody"], "reason": "trial"}},
    ),
    ("get", "/v1/orders/kept"): lambda key: (f"/v1/orders/kept?unit={UNIT_OF[key]}", {}),
    ("post", "/v1/segments"): lambda key: ("/v1/segments", {"json": {"segment_id": key}}),
    ("get", "/v1/segments"): lambda key: ("/v1/segments", {}),
    ("get", "/v1/segment-queue"): lambda key: ("/v1/segment-queue", {}),
    ("post", "/v1/segment-sweep"): lambda key: ("/v1/segment-sweep", {"json": {}}),
    ("get", f"{SEGMENT}"): lambda key: (f"/v1/segments/{key}", {}),
    ("post", f"{SEGMENT}/evaluate"): lambda key: (f"/v1/segments/{key}/evaluate", {}),
    ("post", f"{SEGMENT}/approve"): lambda key: (f"/v1/segments/{key}/approve", {"json": {"evaluation_version": 1}}),
    ("post", f"{SEGMENT}/retry"): lambda key: (f"/v1/segments/{key}/retry", {}),
    ("post", f"{SEGMENT}/off"): lambda key: (f"/v1/segments/{key}/off", {}),
    ("post", f"{SEGMENT}/on"): lambda key: (f"/v1/segments/{key}/on", {}),
    ("post", f"{SEGMENT}/uploads"): lambda key: (f"/v1/segments/{key}/uploads", {}),
    ("put", f"{SEGMENT}/uploads/{{upload_id}}/parts/{{number}}"): lambda key: (
        f"/v1/segments/{key}/uploads/{UPLOAD_OF[key]}/parts/1",
        {"json": {"user_ids": [1, 2]}},
    ),
    ("post", f"{SEGMENT}/uploads/{{upload_id}}/finish"): lambda key: (
        f"/v1/segments/{key}/uploads/{UPLOAD_OF[key]}/finish",
        {"json": {"parts": 2}},
    ),
    ("post", "/v1/user-segments"): lambda key: ("/v1/user-segments", {"json": {"user_ids": ["1"]}}),
    ("get", "/v1/user-segments/{user_id}/why"): lambda key: (f"/v1/user-segments/1/why?segment_id={key}", {}),
    ("get", "/v1/user-segments/{user_id}/history"): lambda key: ("/v1/user-segments/1/history", {}),
    ("get", "/v1/numbering"): lambda key: ("/v1/numbering", {}),
    ("get", NUMBERING): lambda key: (f"/v1/numbering/{key}", {}),
    ("get", f"{NUMBERING}/history"): lambda key: (f"/v1/numbering/{key}/history", {}),
    ("get", f"{NUMBERING}/compatible"): lambda key: (f"/v1/numbering/{key}/compatible?data=1.0.0.0", {}),
    ("post", f"{NUMBERING}/find"): lambda key: (
        f"/v1/numbering/{key}/find",
        {"json": {"places": [{"shard_id": 0, "doc_id": 0}]}},
    ),
    ("post", "/v1/drafts"): lambda key: ("/v1/drafts", {"json": {"seller_id": key}}),
    ("get", DRAFT): lambda key: (f"/v1/drafts/{DRAFT_OF[key]}?owner_id={key}", {}),
    ("put", DRAFT): lambda key: (
        f"/v1/drafts/{DRAFT_OF[key]}",
        {"json": {"owner_id": key, "version": 999, "filled": {}}},
    ),
    ("post", f"{DRAFT}/publish"): lambda key: (
        f"/v1/drafts/{DRAFT_OF[key]}/publish",
        {"json": {"owner_id": key, "version": 999}},
    ),
    ("post", "/v1/offers"): lambda key: ("/v1/offers", {"json": {"offer_ids": [OFFER_OF[key]]}}),
    ("get", OFFER): lambda key: (f"/v1/offers/{OFFER_OF[key]}", {}),
    ("put", OFFER): lambda key: (
        f"/v1/offers/{OFFER_OF[key]}",
        {"json": {"category": "cars", "content": CAR}, "headers": {"If-Match": '"999999"'}},
    ),
    ("post", f"{OFFER}/status"): lambda key: (f"/v1/offers/{OFFER_OF[key]}/status", {"json": {"status": "active"}}),
    ("get", f"{OFFER}/stages/{{stage}}"): lambda key: (f"/v1/offers/{OFFER_OF[key]}/stages/trial", {}),
    ("put", f"{OFFER}/stages/{{stage}}"): lambda key: (
        f"/v1/offers/{OFFER_OF[key]}/stages/trial",
        {"json": {"state": 1}, "headers": {"If-Match": '"999999"'}},
    ),
    ("post", "/v1/opinions"): lambda key: (
        "/v1/opinions",
        {"json": {"opinions": [{"offer_id": OFFER_OF[key], "version": 1, "is_banned": False}]}},
    ),
    ("get", "/v1/sellers/{seller}/presets/{preset}"): lambda key: (f"/v1/sellers/{key}/presets/all", {}),
    ("get", "/v1/sellers/{seller}/counters"): lambda key: (f"/v1/sellers/{key}/counters", {}),
    ("post", f"{FEED}/items"): lambda key: (
        f"/v1/feeds/{key}/1/items?position=0",
        {"data": '{"external_id": "1"}\n', "headers": {"Content-Type": "application/x-ndjson"}},
    ),
    ("post", f"{FEED}/end"): lambda key: (f"/v1/feeds/{key}/1/end", {"json": {"items": 5}}),
    ("post", f"{FEED}/approve"): lambda key: (f"/v1/feeds/{key}/1/approve", {}),
    ("get", FEED): lambda key: (f"/v1/feeds/{key}/1", {}),
    ("get", f"{FEED}/report"): lambda key: (f"/v1/feeds/{key}/1/report", {}),
    ("get", "/metrics"): lambda key: ("/metrics", {}),
}
# Its answer has only what the caller may see.
NAMES_NOTHING = {
    ("get", "/metrics"),
    ("get", "/v1/segments"),
    ("post", "/v1/user-segments"),
    ("get", "/v1/numbering"),
    ("post", "/v1/offers"),
    ("post", "/v1/opinions"),
}
# It speaks of everything, so a caller who may see some is told that there is nothing.
NEEDS_ALL = {
    ("get", "/v1/segment-queue"),
    ("post", "/v1/segment-sweep"),
    ("get", "/v1/user-segments/{user_id}/history"),
}
# What a good request gets where it is not 200: nothing is held or has failed, and one part of two is there.
ANSWERS = {
    ("put", "/v1/tallies/{key}"): 412,
    ("post", f"{SEGMENT}/evaluate"): 409,
    ("post", f"{SEGMENT}/approve"): 409,
    ("post", f"{SEGMENT}/retry"): 409,
    ("post", f"{SEGMENT}/uploads/{{upload_id}}/finish"): 400,
    ("put", DRAFT): 409,
    ("post", f"{DRAFT}/publish"): 409,
    ("put", OFFER): 412,
    ("post", f"{FEED}/end"): 409,
    ("post", f"{FEED}/approve"): 409,
    ("put", f"{OFFER}/stages/{{stage}}"): 412,
}


@pytest.fixture(scope="module")
def with_things(shared: Served, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """The shared server with segments, uploads begun, and places given."""
    for key in ("a", "hers", "his"):
        made = shared.call("POST", "/v1/segments", shared.token, json={"segment_id": key})
        assert made.status_code == 200, made.text
        begun = shared.call("POST", f"/v1/segments/{key}/uploads", shared.token)
        UPLOAD_OF[key] = begun.json()["upload_id"]
        OFFER_OF[key] = publish_car(shared, key)
        kept = shared.call(
            "PUT",
            f"/v1/offers/{OFFER_OF[key]}/stages/trial",
            shared.token,
            json={"state": 0},
            headers={"If-Match": '"0"'},
        )
        assert kept.status_code == 200, kept.text
        address, request = CASES["post", f"{FEED}/items"](key)
        assert shared.call("POST", address, shared.token, **request).status_code == 200
        DRAFT_OF[key] = shared.call("POST", "/v1/drafts", shared.token, json={"seller_id": key}).json()["draft_id"]
    number_offers(shared, tmp_path_factory.mktemp("numbering"))
    return shared


def publish_car(served: Served, seller: str) -> str:
    """An offer of a seller, as a seller makes one."""
    draft = served.call("POST", "/v1/drafts", served.token, json={"seller_id": seller, "category": "cars"}).json()
    filled = {"category": "cars", "content": CAR, "price": {"amount": 100, "currency": "EUR"}}
    address, named = f"/v1/drafts/{draft['draft_id']}", {"owner_id": seller}
    draft = served.call(
        "PUT", address, served.token, json=named | {"version": draft["version"], "filled": filled}
    ).json()
    made = served.call("POST", f"{address}/publish", served.token, json=named | {"version": draft["version"]})
    assert made.status_code == 200, made.text
    return str(made.json()["offer_id"])


def number_offers(served: Served, folder: Path) -> None:
    """Publish a state of every type, as a master beside the server does."""
    home = Path(served.store_url.removeprefix("sqlite:///")).parent / "keyfold-numbering"
    types = json.loads(TYPES_SET["KEYFOLD_NUMBERING_TYPES"])
    with numbering_opened(served.store_url, folder, types=types, clusters={"home": str(home)}) as numbering:
        for name in types:
            numbering.run(1, 2, 3, cluster="home", type_name=name)


def now_iso() -> str:
    return datetime.now(UTC).isoformat()


def guarded(served: Served) -> list[tuple[str, str, str]]:
    """Every operation of the document that needs a token, with its scope."""
    paths = served.call("GET", "/openapi.json").json()["paths"]
    return [
        (method, path, operation["security"][0]["bearer"][0])
        for path, item in paths.items()
        for method, operation in item.items()
        if operation["security"]
    ]


@pytest.mark.spec("CORE-15")
def test_every_route_refuses_whoever_has_no_token(with_things: Served) -> None:
    for method, path, _ in guarded(with_things):
        address, request = CASES[method, path]("a")
        answer = with_things.call(method, address, **request)
        assert (answer.status_code, slug(answer)) == (401, "unauthenticated"), f"{method} {path}"


@pytest.mark.spec("CORE-15")
def test_every_route_takes_its_own_scope_and_no_other(with_things: Served) -> None:
    """The matrix of scopes and routes from the document; a route without a case fails."""
    served = with_things
    routes = guarded(served)
    assert {(method, path) for method, path, _ in routes} == set(CASES)
    for scope in SCOPES:
        token = token_for(served.store_url, [scope])
        for method, path, needed in routes:
            address, request = CASES[method, path]("a")
            answer = served.call(method, address, token, **request)
            if scope in (needed, "admin"):
                expected = ANSWERS.get((method, path), 200)
                assert answer.status_code == expected, f"{method} {path} with {scope}: {answer.text}"
            else:
                assert (answer.status_code, slug(answer)) == (403, "scope-missing"), f"{method} {path} with {scope}"


@pytest.mark.spec("CORE-15")
def test_of_two_tokens_neither_sees_what_is_granted_to_the_other(with_things: Served) -> None:
    """Disjoint grants × every route × both things; what is hidden looks as what is not there."""
    shared = with_things
    url = shared.store_url
    tokens = {
        own: token_for(
            url, tally=[own], profile=[TYPES[own]], unit=[UNIT_OF[own]], segment=[own], numbering=[own], seller=[own]
        )
        for own in ("hers", "his")
    }
    for method, path, _ in guarded(shared):
        if (method, path) in NAMES_NOTHING:
            continue
        for own, token in tokens.items():
            for key in (*tokens, "nobodys"):
                address, request = CASES[method, path](key)
                answer = shared.call(method, address, token, **request)
                if key == own and (method, path) not in NEEDS_ALL:
                    expected = ANSWERS.get((method, path), 200)
                    assert answer.status_code == expected, f"{method} {path}: {answer.text}"
                else:
                    assert (answer.status_code, slug(answer)) == (404, "not-found"), f"{method} {path} of {key}"
    values = {key: tally(shared, shared.token, key)[0] for key in ("hers", "his", "nobodys")}
    assert values == {"hers": 1, "his": 1, "nobodys": 0}
    listed = shared.call("GET", "/v1/segments", tokens["hers"]).json()["segments"]
    assert [each["segment_id"] for each in listed] == ["hers"]
    assert shared.call("GET", "/v1/numbering", tokens["hers"]).json() == {"types": ["hers"]}
    every = {"offer_ids": list(OFFER_OF.values())}
    seen = shared.call("POST", "/v1/offers", tokens["hers"], json=every).json()
    assert [each["offer_id"] for each in seen["offers"]] == [OFFER_OF["hers"]]
    assert sorted(seen["missing"]) == sorted(set(OFFER_OF.values()) - {OFFER_OF["hers"]})
    opinions = [{"offer_id": each, "version": 9, "is_banned": False} for each in OFFER_OF.values()]
    judged = shared.call("POST", "/v1/opinions", tokens["hers"], json={"opinions": opinions}).json()["opinions"]
    assert {each["offer_id"] for each in judged if each["result"] == "applied"} == {OFFER_OF["hers"]}


# Asking again -----------------------------------------------------------------------------------------------------


@pytest.mark.spec("CORE-22")
def test_an_answer_that_was_lost_can_be_asked_for_again(shared: Served) -> None:
    token = shared.token
    body = b'{"items":[{"key":"once","add":7}]}'
    head = (
        f"POST /v1/tallies HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nIdempotency-Key: lost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(shared.address) as connection:
        connection.sendall(head.encode() + body)
    headers = {"Idempotency-Key": "lost", "Content-Type": "application/json"}
    answers = [shared.call("POST", "/v1/tallies", token, data=body, headers=headers) for _ in range(3)]
    assert {answer.text for answer in answers} == {'{"tallies":[{"key":"once","value":7,"version":1}]}'}
    other = shared.call("POST", "/v1/tallies", token, data=body.replace(b"7", b"8"), headers=headers)
    assert (other.status_code, slug(other)) == (409, "idempotency-conflict")
    assert tally(shared, token, "once") == (7, 1)


@pytest.mark.spec("CORE-22")
def test_an_edit_needs_the_version_that_was_read(shared: Served) -> None:
    token = shared.token

    def edit(value: int, **headers: str) -> requests.Response:
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        return shared.call("PUT", "/v1/tallies/edited", token, json={"value": value}, headers=named)

    assert slug(edit(1)) == "version-needed"
    first = edit(1, If_Match='"0"')
    assert first.headers["ETag"] == '"1"'
    assert edit(2, If_Match=first.headers["ETag"]).headers["ETag"] == '"2"'
    assert slug(edit(3, If_Match=first.headers["ETag"])) == "version-stale"
    assert tally(shared, token, "edited") == (2, 2)


# Secrets ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("CORE-15", "CORE-17")
def test_neither_a_token_nor_the_password_of_the_store_is_ever_written(start: Start, postgres_url: str) -> None:
    """A canary in every place where a secret passes, looked for in everything that comes out."""
    scheme, _, rest = postgres_url.partition("://")
    user, _, place = rest.rpartition("@")
    url = f"{scheme}://{user.partition(':')[0] or 'postgres'}:canary-password@{place}"
    subprocess.run([*KEYFOLD, "store", "upgrade", "--store", url], check=True, capture_output=True)
    served = start(KEYFOLD_STORE_URL=url, KEYFOLD_LIMITS_REFUSALS_PER_SECOND_MAX="1000")
    token = token_for(url)
    secret = token.split("_", 2)[2]
    answers = [
        served.call("POST", "/v1/tallies", token, json={"items": [{"key": "a"}]}),
        served.call("POST", "/v1/tallies", token, data=b"{", headers={"Content-Type": "application/json"}),
        served.call("POST", "/v1/tallies", token + "x", json={"items": [{"key": "a"}]}),
        served.call("GET", f"/v1/{token}", token),
        served.call("GET", f"/nowhere?token={token}", token),
        served.call("GET", "/metrics", token),
        served.call("GET", "/readyz"),
        served.call("GET", "/openapi.json"),
    ]
    written = "\n".join(answer.text + str(answer.headers) for answer in answers)
    served.stop()
    assert "request" in served.log
    assert secret not in written
    assert secret not in served.log
    assert "canary-password" not in written
    assert "canary-password" not in served.log


@pytest.mark.spec("CORE-13", "CORE-17")
def test_a_store_that_cannot_be_reached_is_named_without_its_password(start: Start) -> None:
    url = "postgresql://keyfold:canary-password@127.0.0.1:1/keyfold"
    refused = start(ready=False, KEYFOLD_STORE_URL=url)
    assert refused.wait() != 0
    assert "Traceback" not in refused.log
    assert "canary-password" not in refused.log


@pytest.mark.spec("CORE-17")
def test_a_dump_of_the_store_holds_no_token(shared: Served) -> None:
    file = Path(shared.store_url.removeprefix("sqlite:///"))
    dump = b"".join(each.read_bytes() for each in file.parent.glob(f"{file.name}*"))
    assert shared.token.split("_", 2)[1].encode() in dump
    assert shared.token.split("_", 2)[2].encode() not in dump


@pytest.mark.spec("CORE-17")
def test_log_lines_are_json_with_the_id_of_their_request(shared: Served) -> None:
    shared.call("GET", "/healthz", headers={"X-Request-Id": "find-me"})
    time.sleep(0.2)
    lines = [json.loads(line) for line in shared.log.splitlines() if line.startswith("{")]
    [found] = [line for line in lines if line.get("request_id") == "find-me"]
    assert (found["event"], found["route"], found["status"], found["level"]) == ("request", "/healthz", 200, "debug")


# Stopping ---------------------------------------------------------------------------------------------------------


@pytest.mark.spec("CORE-20")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_an_idle_server_at_once_and_cleanly(start: Start, number: signal.Signals) -> None:
    served = start()
    with socket.create_connection(served.address):  # an idle connection holds nothing up
        started = time.monotonic()
        served.signal(number)
        assert served.wait() == 0
    assert time.monotonic() - started < 5


@pytest.mark.spec("CORE-20")
def test_what_is_under_way_is_answered_and_nothing_new_is_taken(start_trial: Start, tmp_path: Path) -> None:
    served = start_trial()
    token = token_for(f"sqlite:///{tmp_path / 'trial.db'}")
    answers: list[requests.Response] = []

    def ask(method: str, path: str, **request: Any) -> threading.Thread:
        thread = threading.Thread(target=lambda: answers.append(served.call(method, path, token, **request)))
        thread.start()
        return thread

    asked = [ask("GET", "/v1/slow?seconds=4"), ask("POST", "/v1/slow", json={"items": [{"key": "a"}]})]
    time.sleep(1)
    served.signal()
    time.sleep(0.5)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(served.address, timeout=5)
    for thread in asked:
        thread.join()
    assert served.wait() == 0
    assert [answer.status_code for answer in answers] == [200, 200]
    assert all(answer.headers["connection"] == "close" for answer in answers)


@pytest.mark.spec("CORE-20")
def test_a_stop_ends_in_time_and_tells_those_it_cannot_wait_for(start_trial: Start, tmp_path: Path) -> None:
    served = start_trial(http_stop_seconds_max=3, limits_request_seconds_max=60)
    token = token_for(f"sqlite:///{tmp_path / 'trial.db'}")
    answers: list[requests.Response] = []
    asked = threading.Thread(target=lambda: answers.append(served.call("GET", "/v1/slow?seconds=25", token)))
    asked.start()
    time.sleep(1)
    started = time.monotonic()
    served.signal()
    assert served.wait() == 1
    assert time.monotonic() - started < 4.5
    asked.join()
    assert (answers[0].status_code, slug(answers[0])) == (503, "stopping")
    assert "did not stop in time" in served.log


@pytest.mark.spec("CORE-20")
def test_a_second_signal_stops_at_once(start_trial: Start, tmp_path: Path) -> None:
    served = start_trial()
    token = token_for(f"sqlite:///{tmp_path / 'trial.db'}")

    def ask() -> None:
        with pytest.raises(requests.ConnectionError):
            served.call("GET", "/v1/slow?seconds=20", token)

    asked = threading.Thread(target=ask)
    asked.start()
    time.sleep(1)
    served.signal()
    time.sleep(0.3)
    served.signal()
    assert served.wait(3) == 128 + signal.SIGTERM
    asked.join()


@pytest.mark.spec("CORE-20")
@pytest.mark.parametrize("fresh", [False, True], ids=["kept connections", "a connection each"])
def test_a_stop_under_load_answers_every_change_that_it_made(start: Start, tmp_path: Path, fresh: bool) -> None:
    """Each request changes a tally of its own; who got no answer finds that nothing was changed."""
    served = start("--no-work")
    url = f"sqlite:///{tmp_path / 'keyfold.db'}"
    token = token_for(url)
    answered: set[str] = set()
    unanswered: set[str] = set()
    stopped = threading.Event()

    def hammer(name: str) -> None:
        session = requests.Session()
        session.headers["Authorization"] = f"Bearer {token}"
        for number in range(100_000):
            key = f"{name}-{number}"
            try:
                sender = requests if fresh else session
                answer = sender.post(
                    f"{served.url}/v1/tallies",
                    json={"items": [{"key": key}]},
                    headers={"Authorization": f"Bearer {token}"},
                    timeout=30,
                )
                (answered if answer.status_code == 200 else unanswered).add(key)
            except requests.RequestException:
                unanswered.add(key)
                if stopped.is_set():
                    return

    hammers = [threading.Thread(target=hammer, args=(f"h{number}",)) for number in range(8)]
    for each in hammers:
        each.start()
    time.sleep(2)
    served.signal()
    stopped.set()
    assert served.wait() == 0
    for each in hammers:
        each.join()
    assert len(answered) > 100
    again = start("--no-work")
    keys = sorted(answered | unanswered)
    found: dict[str, int] = {}
    for at in range(0, len(keys), 5_000):
        read = again.call("POST", "/v1/tallies/read", token, json={"keys": keys[at : at + 5_000]})
        found.update({each["key"]: each["value"] for each in read.json()["tallies"]})
    assert {key for key in answered if found[key] != 1} == set()
    assert {key for key in unanswered if found[key] != 0} == set()
