"""Order statistics as their users meet them: the document's example over HTTP, and the commands."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import requests

from keyfold.orders.service.splitting import switch
from tests.acceptance.served import LOGS, Served, serving, token_for
from tests.orders import NOW, opened, order, write_history

pytestmark = pytest.mark.spec("ORD-03")

Run = Callable[..., "subprocess.CompletedProcess[str]"]

# The request and the answer of the document.
ASKED = {
    "identities": [{"type": "phone_id", "value": "12345"}, {"type": "yandex_uid", "value": "67890"}],
    "filters": [{"name": "brand", "value": "yataxi"}],
    "group_by": ["payment_method_type", "tariff"],
}


def item(payment: str, tariff: str, count: int) -> dict[str, Any]:
    properties = [{"name": "payment_method_type", "value": payment}, {"name": "tariff", "value": tariff}]
    return {"properties": properties, "counter_value": count}


ANSWERED = {
    "data": [
        {"identity": identity, "data": [item("card", "econom", 10), item("cash", "econom", 5)]}
        for identity in ASKED["identities"]
    ]
}


def now(seconds: float = 0) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()


def completed(order_id: str, identities: dict[str, str], created_at: str = "", **properties: str) -> dict[str, Any]:
    return {
        "order_id": order_id,
        "created_at": created_at or now(-60),
        "identities": identities,
        "properties": properties,
    }


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, module_url: str) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("orders")
    (directory / "keyfold.toml").write_text(
        "[orders.units.rides]\n"
        "dedupe_days = 20\n"
        "[orders.units.food]\n"
        'identities = ["eater"]\n'
        'dimensions = ["place"]\n'
        f'start = "{now(7200)}"\n'
        "[orders.units.mapped]\n"
        'application_brands = {android = "yataxi"}\n'
    )
    with serving(directory, {"KEYFOLD_STORE_URL": module_url}) as server:
        yield server


def send(served: Served, *orders: dict[str, Any], unit: str = "rides") -> Any:
    answer = served.call("POST", f"/v1/orders/completed?unit={unit}", served.token, json={"orders": list(orders)})
    assert answer.status_code == 200, answer.text
    return answer.json()


def ask(served: Served, path: str, body: Any) -> requests.Response:
    return served.call("POST", path, served.token, json=body)


@pytest.mark.spec("ORD-01", "ORD-04", "ORD-05", "ORD-06")
def test_the_example_of_the_document(served: Served) -> None:
    both = {"phone_id": "12345", "yandex_uid": "67890"}
    sent = [
        *[completed(f"a{n}", both, brand="yataxi", payment_method_type="cash", tariff="econom") for n in range(5)],
        *[completed(f"b{n}", both, brand="yataxi", payment_method_type="card", tariff="econom") for n in range(10)],
        completed("c", both, brand="uber", payment_method_type="card", tariff="econom"),
    ]
    told = {"accepted": 16, "duplicates": 0, "late": 0, "before_start": 0, "conflicts": []}
    assert send(served, *sent) == told
    repeated = [*sent, {**sent[0], "created_at": now(-61)}, completed("old", both, now(-30 * 86_400))]
    assert send(served, *repeated) == {**told, "accepted": 0, "duplicates": 16, "late": 1, "conflicts": ["a0"]}
    # The first is read by a lane, and those that follow by the event loop itself.
    for _ in range(20):
        answer = ask(served, "/v1/orders", ASKED)
        assert (answer.status_code, answer.json()) == (200, ANSWERED)


@pytest.mark.spec("ORD-02", "ORD-07", "ORD-13")
def test_other_units_are_asked_for_by_name_and_evidence_on_request(served: Served) -> None:
    assert send(served, completed("1", {"eater": "e"}, place="cafe"), unit="food")["before_start"] == 1
    body = {"identities": [{"type": "eater", "value": "e"}], "filters": [], "group_by": []}
    (told,) = ask(served, "/v1/orders?unit=food&evidence=true", body).json()["data"]
    assert told["data"] == []
    evidence = told["evidence"]
    assert (evidence["history"], evidence["is_complete"], evidence["counted_from"]) == ("pending", False, None)
    assert evidence["lag_messages"] == 0
    assert ask(served, "/v1/orders?unit=nothing", body).status_code == 404
    listed = served.call("GET", "/v1/orders/kept?unit=food&why=before_start", served.token).json()["orders"]
    assert [each["order_id"] for each in listed] == ["1"]
    check = {"identities": body["identities"], "fewer_than": 1}
    refused = ask(served, "/v1/orders/check?unit=food", check).json()
    assert (refused["allowed"], refused["reason"]) == (False, "the history of eater is not counted yet")


@pytest.mark.spec("ORD-11")
def test_an_application_without_a_brand_is_set_aside_and_told(served: Served) -> None:
    told = send(served, completed("1", {"phone_id": "1"}, application="new"), unit="mapped")
    assert told["set_aside"] == [{"order_id": "1", "reason": "the application 'new' has no brand"}]


@pytest.mark.spec("ORD-14", "ORD-16")
def test_a_place_is_held_taken_given_back_and_an_order_taken_back(served: Served) -> None:
    who = {"identities": [{"type": "phone_id", "value": "n"}, {"type": "card_id", "value": "n"}], "fewer_than": 1}

    def reserve(order_id: str) -> Any:
        answer = ask(served, "/v1/orders/check", {**who, "reserve": {"order_id": order_id, "seconds": 60}})
        return answer.json().get("allowed", answer.status_code)

    assert [reserve("n1"), reserve("n2")] == [True, False]
    assert ask(served, "/v1/orders/release", {"order_ids": ["n1"]}).json() == {"released": 2}
    assert reserve("n2") is True
    send(served, completed("n2", {"phone_id": "n", "card_id": "n"}))
    assert [reserve("n3"), reserve("n2")] == [False, 409]
    corrections = {"order_ids": ["n2", "nobody"], "reason": "refund"}
    assert [each["status"] for each in ask(served, "/v1/orders/corrections", corrections).json()["orders"]] == [
        "corrected",
        "not known",
    ]
    assert reserve("n3") is True
    reader = token_for(served.store_url, ["read"])
    body = {**who, "reserve": {"order_id": "x"}}
    assert served.call("POST", "/v1/orders/check", reader, json=body).status_code == 403
    assert served.call("POST", "/v1/orders/check", reader, json=who).status_code == 200


ONE = {"type": "phone_id", "value": "1"}


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("", {**ASKED, "identities": []}, 400, "length >= 1"),
        ("", {**ASKED, "identities": [{"type": "mail", "value": "1"}]}, 400, "identities[0].type"),
        ("", {**ASKED, "filters": [{"name": "city", "value": "1"}]}, 400, "filters[0].name"),
        ("", {**ASKED, "filters": ASKED["filters"] * 2}, 400, "filtered twice"),
        ("", {**ASKED, "group_by": ["city"]}, 400, "group_by[0]"),
        ("", {**ASKED, "identities": [ONE] * 10_001}, 413, "10001 identities, 10000 are allowed"),
        ("", {"identities": [ONE]}, 400, "filters"),
        ("", {**ASKED, "more": 1}, 400, "more"),
        ("/completed", {"orders": []}, 400, "length >= 1"),
        ("/completed", {"orders": [completed("1", {})]}, 400, "orders[0].identities"),
        ("/completed", {"orders": [completed("1", {"mail": "1"})]}, 400, "orders[0].identities.mail"),
        ("/completed", {"orders": [completed("1", {"phone_id": "1"}, city="x")]}, 400, "orders[0].properties.city"),
        ("/completed", {"orders": [completed("1", {"phone_id": "1"}, now(3600))]}, 400, "orders[0].created_at"),
        ("/completed", {"orders": [completed("1", {"phone_id": "1"}, "2026-01-01T00:00:00")]}, 400, "created_at"),
        ("/completed", {"orders": [completed("", {"phone_id": "1"})]}, 400, "order_id"),
        ("/completed", {"orders": [completed("1", {"phone_id": "\0"})]}, 400, "orders[0].identities"),
        ("/check", {"identities": [ONE]}, 400, "fewer_than"),
        ("/check", {"identities": [ONE], "fewer_than": 1, "at_least": 1}, 400, "one of them"),
        ("/check", {"identities": [ONE], "at_least": 1, "reserve": {"order_id": "1"}}, 400, "reserve"),
        ("/check", {"identities": [ONE], "fewer_than": 0}, 400, "fewer_than"),
        (
            "/check",
            {"identities": [ONE], "fewer_than": 1, "reserve": {"order_id": "1", "seconds": 86_401}},
            400,
            "86400 seconds",
        ),
        ("/corrections", {"order_ids": ["1"], "reason": ""}, 400, "reason"),
        ("/corrections", {"order_ids": [str(n) for n in range(101)], "reason": "x"}, 400, "length <= 100"),
    ],
)
def test_bad_input_is_refused_with_its_place_and_changes_nothing(
    served: Served, path: str, body: Any, status: int, said: str
) -> None:
    answer = ask(served, f"/v1/orders{path}", body)
    assert answer.status_code == status, answer.text
    assert said in answer.text
    nothing = {"identities": [ONE], "filters": [], "group_by": []}
    assert ask(served, "/v1/orders", nothing).json()["data"][0]["data"] == []


@pytest.mark.spec("ORD-05", "CORE-14")
def test_one_wrong_order_refuses_its_request_and_no_other(served: Served) -> None:
    good, wrong = completed("w1", {"phone_id": "w"}), completed("w2", {"mail": "w"})
    assert ask(served, "/v1/orders/completed", {"orders": [good, wrong]}).status_code == 400
    assert send(served, good)["accepted"] == 1


METRICS = (
    'keyfold_orders_total{status="accepted",unit="rides"}',
    'keyfold_orders_total{status="duplicate",unit="rides"}',
    'keyfold_orders_total{status="late",unit="rides"}',
    'keyfold_orders_left_to_history_total{unit="rides"}',
    'keyfold_orders_left_to_history_total{unit="food"}',
    'keyfold_order_checks_total{answer="allowed",unit="rides"}',
    'keyfold_order_checks_total{answer="refused",unit="rides"}',
    'keyfold_orders_corrected_total{unit="rides"}',
)


def measured(served: Served) -> dict[str, float]:
    """What the metrics of orders have come to; zero where nothing was measured yet."""
    lines = served.call("GET", "/metrics", served.token).text.splitlines()
    told = {name: float(value) for name, _, value in (each.rpartition(" ") for each in lines) if name in METRICS}
    return {name: told.get(name, 0.0) for name in METRICS}


@pytest.mark.spec("ORD-06", "ORD-07", "ORD-14", "ORD-16")
def test_the_metrics_tell_what_became_of_orders(served: Served) -> None:
    before = measured(served)
    sent = [completed(f"m{n}", {"phone_id": "m"}) for n in range(3)]
    send(served, *sent, completed("m3", {"phone_id": "m"}, now(-100 * 86_400)))
    send(served, *sent[:2])
    left = [completed(f"l{n}", {"eater": "m"}) for n in range(2)]
    send(served, *left, unit="food")
    send(served, *left, unit="food")
    for fewer_than in (2, 3, 4):
        who = {"identities": [{"type": "phone_id", "value": "m"}], "fewer_than": fewer_than}
        assert ask(served, "/v1/orders/check", who).status_code == 200
    ask(served, "/v1/orders/corrections", {"order_ids": ["m0", "m1", "nobody"], "reason": "refund"})
    ask(served, "/v1/orders/corrections", {"order_ids": ["m1"], "reason": "refund"})
    after = measured(served)
    assert [after[name] - before[name] for name in METRICS] == [3, 2, 1, 0, 2, 1, 2, 2]


# Commands ---------------------------------------------------------------------------------------------------------


class Terminal:
    """The command line in a directory of its own."""

    def __init__(self, directory: Path, store_url: str, in_process: Run) -> None:
        self.directory = directory
        self._in_process = in_process
        self._environ = {"KEYFOLD_STORE_URL": store_url, **LOGS}

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        done = self._in_process(*arguments, **self._environ)
        assert "Traceback" not in done.stderr, done.stderr
        assert "Warning" not in done.stderr, done.stderr
        return done

    def answer(self, *arguments: str, code: int = 0) -> Any:
        done = self.run(*arguments, "--json")
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout)


@pytest.fixture(params=["sqlite", "postgresql"])
def terminal(request: pytest.FixtureRequest, tmp_path: Path, in_process: Run) -> Terminal:
    url = f"sqlite:///{tmp_path / 'keyfold.db'}"
    if request.param == "postgresql":
        url = str(request.getfixturevalue("postgres_url"))
    (tmp_path / "keyfold.toml").write_text(
        "[orders.units.rides]\n"
        f'start = "{now(10)}"\n'
        "start_lead_seconds_min = 0\n"
        "future_seconds_max = 0\n"
        'mixed_brand = "yataxi"\n'
        'history = "h.parquet"\n'
        "[limits]\n"
        "transaction_seconds_max = 1\n"
        "lock_seconds_max = 1\n"
    )
    made = Terminal(tmp_path, url, in_process)
    assert made.run("store", "upgrade").returncode == 0
    assert made.run("orders", "status").returncode == 0
    return made


@pytest.mark.spec("ORD-08", "ORD-09", "ORD-10", "ORD-15", "ORD-16", "CORE-19")
def test_the_commands_fill_history_add_what_is_new_and_take_back(terminal: Terminal) -> None:
    status = terminal.answer("orders", "status")
    start = datetime.fromisoformat(status["identities"][0]["start"]).timestamp()
    write_history(terminal.directory / "h.parquet", [order("o0", start - 60, tariff="econom")])
    early = terminal.run("orders", "backfill", "--identity", "phone_id")
    assert "phone_id: history goes on until " in early.stderr, early.stderr
    assert [each["is_complete"] for each in terminal.answer("orders", "status")["identities"]] == [False] * 4
    while time.time() < start + 0.1:
        time.sleep(0.1)
    past = [
        order(f"o{n}", start - 60 - n, {"phone_id": f"p{n % 3}", "mail": "m"}, tariff="econom", city=f"c{n % 2}")
        for n in range(9)
    ]
    write_history(terminal.directory / "h.parquet", past)
    filled = terminal.answer("orders", "backfill", "--identity", "phone_id")
    assert [(each["identity"], each["orders"], each["lacking"]) for each in filled] == [("phone_id", 9, 0)]
    told = terminal.run("orders", "backfill", "--identity", "phone_id")
    assert "history goes on" not in told.stderr
    assert [each["is_complete"] for each in terminal.answer("orders", "status")["identities"]] == [True] + [False] * 3
    assert "Backfill: orders by phone_id (9 of 9)" in told.stderr
    (read,) = terminal.answer("orders", "query", "phone_id=p1", "--evidence")["data"]
    assert (read["data"][0]["counter_value"], read["evidence"]["history"]) == (3, "backfilled")
    assert terminal.answer("orders", "check", "phone_id=p1", "--fewer-than", "3", code=1)["allowed"] is False
    assert terminal.answer("orders", "check", "phone_id=p1", "--fewer-than", "4")["allowed"] is True
    shown = terminal.run("orders", "query", "phone_id=p1", "phone_id=none", "--group-by", "tariff")
    assert "econom" in shown.stdout
    assert "phone_id=none: no orders" in shown.stdout

    done = terminal.answer("orders", "add-dimension", "city", "--from", "history.city")
    assert done["is_done"] is True
    assert [each["orders_after"] for each in done["types"] if each["identity"] == "phone_id"] == [9]
    assert (
        terminal.answer("orders", "query", "phone_id=p1", "--filter", "city=c1")["data"][0]["data"][0]["counter_value"]
        == 2
    )
    again = terminal.run("orders", "add-dimension", "city", "--from", "history.city")
    assert (again.returncode, again.stdout.strip()) == (0, "city is there already.")

    added = terminal.answer("orders", "add-identity", "mail", "--start", now(10))
    while time.time() * 1_000_000 < added["start_us"]:
        time.sleep(0.1)
    (mail,) = terminal.answer("orders", "backfill", "--identity", "mail", "--from", "h.parquet")
    assert mail["orders"] == 9
    assert terminal.answer("orders", "query", "mail=m")["data"][0]["data"][0]["counter_value"] == 9

    (terminal.directory / "old.json").write_text(
        json.dumps({"_id": "c9", "created": now(-900), "updated": now(-800), "tariffs": {"econom": {"value": 7}}})
        + "\nno\n"
    )
    imported = terminal.answer("orders", "import", "old.json", "--identity", "card_id", code=1)
    assert (imported["orders"], imported["refused"]) == (7, 1)
    assert terminal.answer("orders", "query", "card_id=c9")["data"][0]["data"][0]["counter_value"] == 7
    corrected = terminal.answer("orders", "correct", "nobody", "--reason", "fraud", code=1)
    assert corrected == [{"order_id": "nobody", "status": "not known"}]


@pytest.mark.spec("ORD-11")
def test_a_redrive_tells_why_orders_stay_set_aside(tmp_path: Path, in_process: Run) -> None:
    url = f"sqlite:///{tmp_path / 'keyfold.db'}"
    with opened(url, application_brands={"android": "yataxi"}) as orders:
        orders.clock.advance(time.time() - NOW)
        sent = [order(f"o{n}", time.time() - 60, application="new_app" if n else "other", tariff="t") for n in range(3)]
        assert orders.count(*sent) == ["set_aside"] * 3
    (tmp_path / "keyfold.toml").write_text("[orders.units.rides]\napplication_brands = {android = 'yataxi'}\n")
    done = Terminal(tmp_path, url, in_process).run("orders", "redrive")
    assert done.stdout.strip() == "3 set_aside"
    assert done.stderr.splitlines() == [
        "the application 'other' has no brand: 1, the first is o0",
        "the application 'new_app' has no brand: 2, the first is o1",
        "Those that stay: keyfold orders kept --why set_aside --unit rides",
    ]


@pytest.mark.spec("ORD-10")
def test_a_mistyped_column_changes_nothing_where_a_dimension_was_begun_without_one(
    tmp_path: Path, in_process: Run
) -> None:
    url = f"sqlite:///{tmp_path / 'keyfold.db'}"
    with opened(url) as orders:
        orders.count(order("1", tariff="t"))
        switch(orders.store, orders.unit, "city")
    write_history(tmp_path / "h.parquet", [order("1", tariff="t", city="riga")])
    terminal = Terminal(tmp_path, url, in_process)
    mistyped = terminal.run("orders", "add-dimension", "city", "--from", "h.parquet.ctiy")
    assert "the history lacks columns: ctiy (city)" in mistyped.stderr
    assert terminal.answer("orders", "add-dimension", "city", "--from", "h.parquet.city")["is_done"] is True


@pytest.fixture
def unchanged(served: Served, tmp_path: Path, in_process: Run) -> Terminal:
    """A store that is in use, and that mistakes do not change."""
    return Terminal(tmp_path, served.store_url, in_process)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("query", "phone_id"), "'phone_id' is not an identity. Write NAME=VALUE"),
        (("query", "mail=1"), "there is no identity type 'mail'"),
        (("query", "phone_id=1", "--filter", "city=x"), "there is no property 'city'"),
        (("query", "phone_id=1", "--unit", "nothing"), "there is no unit 'nothing'"),
        (("query", "phone_id=1", "--filter", "brand=a", "--filter", "brand=b"), "filtered twice (at filters[1].name)"),
        (("query", "phone_id=1", "phone_id=" + "x" * 201), "length <= 200 (at identities[1].value)"),
        (("query", "phone_id=1", "--filter", "brand=" + "x" * 201), "length <= 200 (at filters[0].value)"),
        (("query", *["phone_id=1"] * 10_001), "10001 identities, 10000 are allowed (at identities)"),
        (("check", *["phone_id=1"] * 101, "--fewer-than", "1"), "101 identities, 100 are allowed (at identities)"),
        (("check", "phone_id=1", "--fewer-than", "0"), "0 is not at least 1"),
        (("check", "phone_id=1"), "a check needs `fewer_than` or `at_least`"),
        (("check", "phone_id=1", "--fewer-than", "1", "--reserve", ""), "length >= 1 (at --reserve)"),
        (("check", "phone_id=1", "--fewer-than", "1", "--reserve", "x" * 201), "length <= 200 (at --reserve)"),
        (("correct", "1", "x" * 201, "--reason", "fraud"), "length <= 200 (at order_ids[1])"),
        (("correct", "1", "--reason", ""), "length >= 1 (at --reason)"),
        (("correct", "1", "--reason", "x" * 201), "length <= 200 (at --reason)"),
        (("backfill", "--from", "nothing.parquet"), "there is no history to count"),
        (("backfill", "--identity", "mail", "--from", "x"), "there is no identity type 'mail'"),
        (("add-dimension", "city"), "say where history has it: --from TABLE.COLUMN"),
        (("add-dimension", "city", "--from", "city"), "'city' is not TABLE.COLUMN"),
        (("add-dimension", "a b", "--rest-as-unknown"), "cannot be the name of a dimension"),
        (("add-identity", "phone id"), "cannot be the name of an identity type"),
        (("add-identity", "mail", "--start", "2020-01-01T00:00:00Z"), "ahead of now"),
        (("import", "nothing.json", "--identity", "phone_id"), "there is no file nothing.json"),
        (("import", "/dev/null", "--identity", "phone_id"), "/dev/null is not a plain file"),
        (("kept", "--why", "bored"), "is no reason to keep an order"),
    ],
)
def test_a_mistake_on_the_command_line_is_told_in_one_line(
    unchanged: Terminal, arguments: tuple[str, ...], said: str
) -> None:
    done = unchanged.run("orders", *arguments)
    assert done.returncode != 0
    assert said in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2
