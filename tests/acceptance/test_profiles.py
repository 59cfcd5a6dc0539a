"""Profiles as their users meet them: events in and profiles out over HTTP, and the commands."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import sqlalchemy as sa

from keyfold.core import access
from keyfold.core.clock import ManualClock
from keyfold.core.store import Store
from keyfold.counters.messages_pb2 import Profiles
from keyfold.profiles.tables import PROFILES as PROFILE_ROWS
from tests.acceptance.served import PROFILES, Served, serving
from tests.profiles import OFFER, OFFER_TIME, opened
from tests.profiles import event as own_event

pytestmark = pytest.mark.spec("PRO-08")

Run = Callable[..., "subprocess.CompletedProcess[str]"]

NOW = int(time.time())  # of all events, so that none decays by the second that passes between two of them

SETTINGS = """
[profiles]
merged_read_ms = 150

[profiles.clients.narrow]
counters = [600]
keywords = ["counters"]

[profiles.clients.granted]
restrictions = ["UR_METRIKA_OWNED"]

[profiles.clients.older]
legacy = true
types = ["user"]
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, module_url: str) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("profiles")
    (directory / "keyfold.toml").write_text(SETTINGS)
    with serving(directory, {**PROFILES, "KEYFOLD_STORE_URL": module_url}) as server:
        yield server


def named(served: Served, name: str, **grants: list[str]) -> str:
    store = Store.open(served.store_url)
    try:
        return access.create(store, name, ["read"], grants or None)
    finally:
        store.close()


def send(served: Served, log: str, *events: dict[str, Any]) -> list[str]:
    answer = served.call("POST", f"/v1/logs/{log}", served.token, json={"events": list(events)})
    assert answer.status_code == 200, answer.text
    return [each["status"] for each in answer.json()["events"]]


def event(event_id: str, profile_id: object, *updates: list[object]) -> dict[str, Any]:
    return {"event_id": event_id, "profile_id": profile_id, "time": NOW, "updates": list(updates)}


def read(served: Served, token: str, *people: list[object], **more: Any) -> requests.Response:
    profiles = [{"ids": [{"type": "user", "id": each} for each in ids]} for ids in people]
    headers = more.pop("headers", {})
    return served.call("POST", "/v1/profiles", token, json={"profiles": profiles, **more}, headers=headers)


@pytest.mark.spec("PRO-02", "PRO-12")
def test_what_was_sent_is_read_at_once_in_json_and_in_protobuf(served: Served) -> None:
    large = 2**64 - 1
    sent = [event("e1", 7, [OFFER, large, 2.5]), event("e2", "x", [OFFER, 1])]
    assert send(served, "visit", *sent, {"event_id": "bad"}, sent[0]) == ["counted", "counted", "refused", "duplicate"]
    answer = read(served, served.token, [7], ["x"], ["nobody"], counters=[OFFER, "CI_OFFER_INTEREST_TIME"]).json()
    first, second, third = answer["profiles"]
    assert (first["type"], first["id"], first["version"]) == ("user", "7", 1)
    (pack,) = first["packed_counters"]
    assert pack["counter_ids"] == [OFFER, OFFER_TIME]
    assert pack["keys"] == [large]
    assert pack["values"][0] == {"float_values": {"value": [2.5]}}
    assert second["packed_counters"][0]["keys"] == [1]
    assert third == {
        "type": "user",
        "id": "nobody",
        "packed_counters": [],
        "counters": [],
        "segments": [],
        "version": 0,
    }
    binary = read(served, served.token, [7], ["x"], headers={"Accept": "application/x-protobuf"})
    assert binary.headers["content-type"] == "application/x-protobuf"
    message = Profiles.FromString(binary.content)
    assert list(message.profiles[0].packed_counters[0].keys) == [large]
    assert [left.counter_id for left in message.left_out] == [539, 540]
    assert (
        read(served, served.token, [7], headers={"Accept": "text/html, */*"}).headers["content-type"]
        == "application/json"
    )


@pytest.mark.spec("PRO-08", "PRO-09", "CNT-11")
def test_each_client_receives_what_its_configuration_names(served: Served) -> None:
    send(served, "redir", event("c1", 20, [539, 5]))
    send(served, "visit", event("c2", 20, [OFFER, 5]))

    def ids(answer: requests.Response) -> list[list[int]]:
        return [pack["counter_ids"] for pack in answer.json()["profiles"][0]["packed_counters"]]

    plain = read(served, named(served, "anyone"), [20])
    assert ids(plain) == [[OFFER, OFFER_TIME]]
    assert plain.json()["left_out"][0] == {"counter_id": 539, "reason": "needs a grant for UR_METRIKA_OWNED"}
    assert ids(read(served, named(served, "granted"), [20])) == [[539, 540], [OFFER, OFFER_TIME]]
    assert ids(read(served, named(served, "narrow"), [20])) == [[OFFER]]
    older = read(served, named(served, "older"), [20]).json()["profiles"][0]
    assert [each["counter_id"] for each in older["counters"]] == [OFFER, OFFER_TIME]
    assert older["packed_counters"] == []
    hidden = served.call(
        "POST", "/v1/profiles", named(served, "older"), json={"profiles": [{"ids": [{"type": "banner", "id": 1}]}]}
    )
    assert hidden.status_code == 404


@pytest.mark.spec("PRO-05", "PRO-07", "PRO-10")
def test_owned_data_is_hidden_explained_to_an_administrator_and_released_in_a_merge(served: Served) -> None:
    before = read(served, served.token, [31], [32]).content
    assert send(
        served, "visit", event("o1", 31, [OFFER, 9, 1, "a.example"]), event("o2", 32, [OFFER, 9, 1, "b.example"])
    ) == [
        "counted",
        "counted",
    ]
    assert read(served, served.token, [31], [32]).content == before
    merged = read(served, served.token, [31, 32, 31]).json()["profiles"][0]
    assert merged["packed_counters"][0]["values"][0] == {"float_values": {"value": [2.0]}}
    (held,) = served.call("GET", "/v1/profiles/user/31/held", served.token).json()["held"]
    assert (held["key"], held["event_id"]) == (9, "o1")
    assert "of another owner" in held["waits_for"]


@pytest.mark.spec("PRO-01", "PRO-03", "PRO-04")
def test_two_logs_feed_one_profile_each_with_its_counters_and_a_second_owner_releases_the_first(
    served: Served,
) -> None:
    assert send(served, "redir", event("l1", 41, [539, 5]), event("l2", 41, [OFFER, 5])) == ["counted", "refused"]
    owners = ["a.example", "a.example", "b.example"]
    sent = [event(f"l{n}", 41, [OFFER, 9, 1, owner]) for n, owner in enumerate(owners, 3)]
    assert send(served, "visit", *sent[:2]) == ["counted"] * 2
    granted = named(served, "granted")
    assert read(served, granted, [41], counters=[OFFER]).json()["profiles"][0]["packed_counters"] == []
    assert send(served, "visit", sent[2]) == ["counted"]
    (first,) = read(served, granted, [41], counters=[539, OFFER]).json()["profiles"]
    told = {pack["counter_ids"][0]: (pack["keys"], pack["values"][0]) for pack in first["packed_counters"]}
    assert told == {539: ([5], {"float_values": {"value": [1.0]}}), OFFER: ([9], {"float_values": {"value": [3.0]}})}


@pytest.mark.spec("PRO-10", "PRO-12")
def test_every_id_that_can_be_written_can_be_read_and_explained(served: Served) -> None:
    for each in ("i" * 400, "ж" * 200):
        sent = [
            event(f"public {each[0]}", each, [OFFER, 5]),
            event(f"held {each[0]}", each, [OFFER, 6, 1, "a.example"]),
        ]
        assert send(served, "visit", *sent) == ["counted", "counted"]
        answer = read(served, served.token, [each])
        assert (answer.status_code, answer.json()["profiles"][0]["id"]) == (200, each)
        held = served.call("GET", f"/v1/profiles/user/{each}/held", served.token)
        assert [one["key"] for one in held.json()["held"]] == [6]
    for each in ("i" * 401, "ж" * 201):
        assert send(served, "visit", event(f"too long {each[0]}", each, [OFFER, 5])) == ["refused"]
        assert read(served, served.token, [each]).status_code == 400
        assert served.call("GET", f"/v1/profiles/user/{each}/held", served.token).status_code == 400


@pytest.mark.spec("PRO-05")
def test_the_time_of_a_merged_read_does_not_tell_what_is_looked_at(served: Served) -> None:
    for people in ([[61, 62]], [[61], [62, 63]]):
        started = time.monotonic()
        assert read(served, served.token, *people).status_code == 200
        assert time.monotonic() - started >= 0.150, "it leaves no sooner than the pace, however little there was"


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"profiles": []}, 400, "length >= 1"),
        ({"profiles": [{"ids": []}]}, 400, "length >= 1"),
        ({"profiles": [{"ids": [{"type": "user", "id": 2**64}]}]}, 400, "64 bits"),
        ({"profiles": [{"ids": [{"type": "user", "id": 1.5}]}]}, 400, "id"),
        ({"profiles": [{"ids": [{"type": "user", "id": "\U0001f4be" * 101}]}]}, 400, "400 bytes"),
        ({"profiles": [{"ids": [{"type": "user", "id": "a\0"}]}]}, 400, "NUL"),
        ({"profiles": [{"ids": [{"type": "nothing", "id": 1}]}]}, 404, "nothing"),
        ({"profiles": [{"ids": [{"type": "user", "id": 1}]}], "counters": [999]}, 404, "there is no counter 999"),
        ({"profiles": [{"ids": [{"type": "user", "id": 1}]}], "counters": ["CI_X"]}, 404, "there is no counter CI_X"),
        ({"profiles": [{"ids": [{"type": "user", "id": n} for n in range(101)]}]}, 413, "100 are allowed"),
        ({"profiles": [{"ids": [{"type": "user", "id": 1}]}], "as_of": "then"}, 400, "as_of"),
        ({"profiles": [{"ids": [{"type": "user", "id": 1, "name": "x"}]}]}, 400, "name"),
    ],
)
def test_a_wrong_request_is_refused_with_its_reason(
    served: Served, body: dict[str, Any], status: int, said: str
) -> None:
    answer = served.call("POST", "/v1/profiles", served.token, json=body)
    assert answer.status_code == status, answer.text
    assert said in answer.text


@pytest.mark.spec("PRO-02", "CORE-14")
def test_wrong_events_are_refused_one_by_one_and_a_wrong_log_is_not_there(served: Served) -> None:
    now = int(time.time())
    wrong: list[dict[str, Any]] = [
        {},
        {"event_id": 5, "time": now, "profile_id": 1},
        {"event_id": "", "time": now, "profile_id": 1},
        {"event_id": "w1", "time": "now", "profile_id": 1},
        {"event_id": "w2", "time": now + 0.5, "profile_id": 1},
        {"event_id": "w3", "time": True, "profile_id": 1},
        {"event_id": "w4", "time": now, "profile_id": None, "updates": [[OFFER, 1]]},
        {"event_id": "w5", "time": now, "profile_id": 1, "updates": [[OFFER, 2**64]]},
        {"event_id": "w6", "time": now, "profile_id": 1, "updates": [[OFFER, "1"]]},
        {"event_id": "w7", "time": now, "profile_id": 1, "updates": 5},
        {"event_id": "w8", "time": now * 1000, "profile_id": 1, "updates": [[OFFER, 1]]},
        {"event_id": "w9", "time": now, "profile_id": 1, "updates": [[OFFER, 1, 1e300]]},
    ]
    assert send(served, "visit", *wrong) == ["refused"] * len(wrong)
    assert served.call("POST", "/v1/logs/none", served.token, json={"events": [{}]}).status_code == 404
    assert (
        served.call("POST", "/v1/logs/visit", served.token, json={"events": [{"event_id": "é" * 300}]}).status_code
        == 200
    )


@pytest.mark.spec("CNT-18")
def test_the_metrics_tell_folds_held_back_data_and_what_was_lost(served: Served) -> None:
    send(
        served,
        "visit",
        *[event(f"m{n}", 50, [OFFER, n]) for n in range(40)],
        event("m", 51, [OFFER, 1, 1, "a.example"]),
    )
    metrics = served.call("GET", "/metrics", served.token).text
    lines = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    # Of 40 keys 30 are kept; what is lost is weighed as it is by now.
    assert float(lines['keyfold_counter_lost_weight_total{counter="CI_OFFER_INTEREST_COUNT",to="MaxRecords"}']) > 9.9
    assert float(lines["keyfold_held_updates_total"]) >= 1
    assert float(lines['keyfold_profile_events_total{log="visit",status="counted"}']) >= 41
    assert float(lines["keyfold_profile_updates_total"]) >= 40


# Commands ---------------------------------------------------------------------------------------------------------


@pytest.mark.spec("PRO-10", "PRO-13")
def test_the_commands_read_explain_and_export(served: Served, tmp_path: Path, in_process: Run) -> None:
    def profiles(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return in_process("profiles", *arguments, **PROFILES, KEYFOLD_STORE_URL=served.store_url)

    send(served, "visit", event("x1", 61, [OFFER, 5, 2.0]), event("x2", 61, [OFFER, 6, 1, "a.example"]))
    got = json.loads(profiles("get", "user", "61", "--json").stdout)
    assert [(each["counter_id"], each["key"]) for each in got["counters"]] == [(OFFER, 5), (OFFER_TIME, 5)]
    send(served, "visit", event("x3", 62, [OFFER, 6, 1, "b.example"]), event("x4", 64, [OFFER, 6, 1, "c.example"]))
    assert "user 62: nothing is known" in profiles("get", "user", "62").stdout
    released = profiles("get", "user", "62", "64").stdout
    assert "nothing is known" not in released, "what owners release of each other is known"
    assert "CI_OFFER_INTEREST_COUNT" in released
    held = json.loads(profiles("explain", "user", "61", "--json").stdout)
    assert [each["key"] for each in held] == [6]
    assert "CI_OFFER_INTEREST_COUNT" in profiles("explain", "user", "61", "--counter", "600").stdout
    assert "an id must be" in profiles("explain", "user", "").stderr
    done = profiles("export", str(tmp_path / "all.parquet"), "--type", "user")
    assert "profiles are in" in done.stdout, done.stderr
    refused = profiles("export", str(tmp_path / f"{'a' * 250}.parquet"))
    assert refused.returncode
    assert "cannot be written: File name too long" in refused.stderr
    spoil = sa.update(PROFILE_ROWS).where(PROFILE_ROWS.c.profile_id == "61").values(body=b"\xff")
    store = Store.open(served.store_url)
    store.transact(lambda tx: tx.execute(spoil))
    store.close()
    broken = profiles("get", "user", "61")
    assert "its counters cannot be read: " in broken.stderr
    assert json.loads(profiles("get", "user", "61", "--json").stdout)["problem"]
    wrong = profiles("get", "person", "61")
    assert (wrong.returncode, wrong.stderr) == (1, "keyfold: there is no profile type 'person'. Known: banner, user\n")


@pytest.mark.spec("PRO-02")
def test_a_log_is_replayed_and_counts_nothing_twice(store_url: str, in_process: Run) -> None:
    environ = {**PROFILES, "KEYFOLD_STORE_URL": store_url}

    def replay(log: str) -> "subprocess.CompletedProcess[str]":
        return in_process("profiles", "replay", log, "--from-position", "0", **environ)

    assert in_process("store", "upgrade", **environ).returncode == 0
    clock = ManualClock(int(time.time()) * 1_000_000)
    with opened(store_url, clock=clock) as profiles:
        now = clock.now_us() // 1_000_000
        profiles.send("visit", *[own_event(f"e{n}", 1, [OFFER, 5], time=now) for n in range(10)])
    done = replay("visit")
    assert done.stdout == "10 messages of visit-log are read again.\n", done.stderr
    with opened(store_url, clock=clock) as profiles:
        profiles.consume("profiles-visit")
        assert profiles.values(1) == {5: 10.0}
    assert "Handlers read: ads, order, redir, visit" in replay("none").stderr
