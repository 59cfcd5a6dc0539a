"""Alive says that the process answers; ready says that it can work, or what is missing; figures need their scope."""

import pytest

from keyfold.core import access
from keyfold.core.errors import StoreUnreachable
from keyfold.core.store import migrate
from keyfold.http import health
from tests.unit.http.conftest import Caller

pytestmark = pytest.mark.spec("CORE-17")


@pytest.fixture(autouse=True)
def without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "READY_SECONDS", 0.0)


def test_the_open_pages_need_no_token(caller: Caller) -> None:
    statuses = {
        path: caller("GET", path, token=None).status for path in ("/", "/docs", "/openapi.json", "/healthz", "/readyz")
    }
    assert statuses == {"/": 307, "/docs": 200, "/openapi.json": 200, "/healthz": 200, "/readyz": 200}


def test_alive_does_not_look_at_the_store(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise AssertionError("the store was read")

    monkeypatch.setattr(caller.context.store, "read", fail)
    assert caller("GET", "/healthz", token=None).json == {"status": "alive"}


def test_ready_while_the_store_answers_with_our_schema(caller: Caller) -> None:
    assert caller("GET", "/readyz", token=None).json == {"status": "ready"}


def test_not_ready_where_the_store_does_not_answer_and_no_word_of_where_it_is(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise StoreUnreachable("no route to db.internal as keyfold:canary")

    monkeypatch.setattr(migrate, "status", fail)
    answer = caller("GET", "/readyz", token=None)
    assert (answer.status, answer.slug) == (503, "unavailable")
    assert answer.json["detail"] == "the store does not answer (store-unreachable)"
    assert answer.headers["retry-after"] == "1"


def test_not_ready_where_the_schema_is_not_ours_and_says_what_to_do(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrate, "status", lambda _: migrate.SchemaStatus("0000", "0001", "old"))
    answer = caller("GET", "/readyz", token=None)
    assert answer.status == 503
    assert "schema is 0000, this program needs 0001" in answer.json["detail"]
    assert "keyfold store upgrade" in answer.json["hint"]


@pytest.mark.spec("CORE-20")
def test_not_ready_once_the_server_stops(caller: Caller) -> None:
    caller.door.stop()
    answer = caller("GET", "/readyz", token=None)
    assert (answer.status, answer.slug) == (503, "stopping")


@pytest.mark.spec("CORE-16")
def test_however_many_ask_the_store_is_asked_once(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "READY_SECONDS", 60.0)
    looks: list[int] = []
    real = migrate.status
    monkeypatch.setattr(migrate, "status", lambda store: (looks.append(1), real(store))[1])
    answers = caller.together(*(caller.call("GET", "/readyz", token=None) for _ in range(30)))
    caller("GET", "/readyz", token=None)
    assert {answer.status for answer in answers} == {200}
    assert len(looks) == 1


@pytest.mark.spec("CORE-15")
def test_figures_need_their_scope(caller: Caller) -> None:
    store = caller.context.store
    assert caller("GET", "/metrics", token=None).status == 401
    assert caller("GET", "/metrics", token=access.create(store, "r", ["read"])).status == 403
    answer = caller("GET", "/metrics", token=access.create(store, "m", ["metrics"]))
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain")


def test_figures_tell_throughput_latency_and_queues(caller: Caller) -> None:
    caller("POST", "/v1/trials", json={"items": [{"key": "a"}]})
    text = caller("GET", "/metrics").body.decode()
    assert 'keyfold_requests_total{method="POST",route="/v1/trials",status="200"}' in text
    assert 'keyfold_request_seconds_bucket{le="0.0005",method="POST",route="/v1/trials"}' in text
    assert 'keyfold_queue_depth{operation="trial add"}' in text
    assert 'keyfold_gathered_items_count{operation="trial add"}' in text


def test_home_leads_to_the_documentation(caller: Caller) -> None:
    answer = caller("GET", "/", token=None)
    assert (answer.status, answer.headers["location"]) == (307, "/docs")
    assert answer.json["openapi"] == "/openapi.json"
