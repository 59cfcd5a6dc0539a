"""Every request is answered: through what is mounted at its path, or by a problem that says what was wrong."""

import asyncio
from typing import Any

import pytest
import structlog
from prometheus_client import REGISTRY as OTHERS

from keyfold.core import access, metrics
from keyfold.core.errors import KeyfoldError
from tests.unit.http.conftest import Caller, Open


def every(kind: type[KeyfoldError]) -> list[type[KeyfoldError]]:
    return [kind, *(found for child in kind.__subclasses__() for found in every(child))]


@pytest.mark.spec("CORE-13")
def test_a_path_that_is_not_there_is_not_found(caller: Caller) -> None:
    answer = caller("GET", "/v1/nowhere")
    assert (answer.status, answer.slug) == (404, "not-found")


@pytest.mark.spec("CORE-15")
@pytest.mark.parametrize("path", ["/v1/nowhere", "/v1/trials", "/v1/trials/a", "/metrics", "/nope", "//", "/docs/x"])
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW"])
def test_without_a_token_nothing_is_learnt_of_what_is_there(caller: Caller, method: str, path: str) -> None:
    answer = caller(method, path, token=None)
    assert (answer.status, answer.slug) == (401, "unauthenticated")
    assert answer.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.spec("CORE-13")
@pytest.mark.parametrize("method", ["PATCH", "OPTIONS", "TRACE", "BREW", "CONNECT"])
def test_a_method_that_a_path_does_not_take_names_those_it_takes(caller: Caller, method: str) -> None:
    answer = caller(method, "/v1/trials/a")
    assert (answer.status, answer.slug) == (405, "method-not-allowed")
    assert answer.headers["allow"] == "DELETE, GET, HEAD, PUT"


@pytest.mark.spec("CORE-13")
def test_an_unexpected_fault_is_logged_under_its_request_and_shows_nothing_of_itself(caller: Caller) -> None:
    with structlog.testing.capture_logs(processors=[structlog.contextvars.merge_contextvars]) as logged:
        answer = caller("GET", "/v1/broken", headers={"X-Request-Id": "trace-me"})
    assert (answer.status, answer.slug) == (500, "internal")
    assert "broken-password" not in answer.body.decode()
    assert "Traceback" not in answer.body.decode()
    [line] = [line for line in logged if line["event"] == "request failed unexpectedly"]
    assert line["request_id"] == "trace-me"
    assert isinstance(line["exc_info"], RuntimeError)


@pytest.mark.spec("CORE-17")
def test_the_callers_request_id_comes_back(caller: Caller) -> None:
    assert caller("GET", "/healthz", headers={"X-Request-Id": "abc-1.2_3"}).headers["x-request-id"] == "abc-1.2_3"


@pytest.mark.spec("CORE-17")
@pytest.mark.parametrize("given", ["", "a b", "x" * 65, "<script>", 'a"b', "ünïcode"])
def test_a_request_id_that_is_not_sane_is_replaced(caller: Caller, given: str) -> None:
    made = caller("GET", "/healthz", headers={"X-Request-Id": given}).headers["x-request-id"]
    assert made != given
    assert made


@pytest.mark.spec("CORE-17")
def test_request_ids_of_ours_differ(caller: Caller) -> None:
    made = {caller("GET", "/healthz").headers["x-request-id"] for _ in range(100)}
    assert len(made) == 100


@pytest.mark.spec("CORE-17")
def test_requests_are_counted_by_route_and_never_by_path(caller: Caller) -> None:
    caller("GET", "/v1/trials/some-key-that-must-not-be-a-label")
    caller("GET", "/v1/no-such-path-either")
    caller("WEIRD", "/v1/trials/a")
    labels = [sample.labels for family in metrics.REGISTRY.collect() for sample in family.samples]
    assert {"method": "GET", "route": "/v1/trials/{key}", "status": "200"} in labels
    assert {"method": "GET", "route": "(none)", "status": "404"} in labels
    assert {"method": "OTHER", "route": "/v1/trials/{key}", "status": "405"} in labels
    assert not any("some-key" in str(label) or "no-such-path" in str(label) for label in labels)
    assert OTHERS is not metrics.REGISTRY


@pytest.mark.spec("CORE-17")
def test_an_access_line_is_of_level_info_where_the_server_failed_and_debug_otherwise(caller: Caller) -> None:
    with structlog.testing.capture_logs() as logged:
        caller("GET", "/healthz")
        caller("GET", "/v1/broken")
    lines = [(line["log_level"], line["route"], line["status"]) for line in logged if line["event"] == "request"]
    assert lines == [("debug", "/healthz", 200), ("info", "/v1/broken", 500)]
    assert [line.get("client") for line in logged if line["event"] == "request"] == ["", "tests"]
    assert next(line["error"] for line in logged if line.get("status") == 500).startswith("internal: ")


@pytest.mark.spec("CORE-14")
def test_an_address_beyond_the_limit_is_refused(caller: Caller) -> None:
    answer = caller("GET", "/v1/trials/" + "a" * 9000)
    assert (answer.status, answer.slug) == (414, "address-too-long")


@pytest.mark.spec("CORE-14")
@pytest.mark.parametrize("name", ["Authorization", "Content-Type", "Content-Length", "Idempotency-Key", "If-Match"])
def test_a_header_that_means_one_thing_may_not_be_sent_twice(caller: Caller, name: str) -> None:
    answer = caller("GET", "/v1/trials/a", headers=[(name, "1"), (name, "1")])
    assert (answer.status, answer.slug) == (400, "bad-input")
    assert answer.json["place"] == f"header {name.lower()}"


@pytest.mark.spec("CORE-16")
def test_a_request_that_takes_too_long_gets_503_and_retry_after(open_caller: Open) -> None:
    caller = open_caller(limits_request_seconds_max=1)
    answer = caller("GET", "/v1/slow?seconds=2.5")
    assert (answer.status, answer.slug) == (503, "unavailable")
    assert answer.headers["retry-after"] == "1"
    assert caller.door.under_way == 0


@pytest.mark.spec("CORE-16")
def test_a_body_that_arrives_too_slowly_gets_408_and_changes_nothing(open_caller: Open) -> None:
    caller = open_caller(limits_request_seconds_max=1)

    async def never() -> Any:
        await asyncio.sleep(60)

    async def scenario() -> Any:
        return await caller.call("POST", "/v1/trials", body=b"{", receive=never)

    answer = caller.run(scenario())
    assert (answer.status, answer.slug) == (408, "too-slow")
    assert caller.total() == 0


@pytest.mark.spec("CORE-20")
def test_while_stopping_every_answer_closes_its_connection(caller: Caller) -> None:
    assert "connection" not in caller("GET", "/healthz").headers
    caller.door.stop()
    assert caller("GET", "/healthz").headers["connection"] == "close"


@pytest.mark.spec("CORE-20")
def test_what_cannot_end_in_time_is_told_that_the_server_stops(caller: Caller) -> None:
    async def scenario() -> Any:
        call = asyncio.create_task(caller.call("GET", "/v1/slow?seconds=3"))
        await asyncio.sleep(0.5)
        caller.door.end_all()
        return await call

    answer = caller.run(scenario())
    assert (answer.status, answer.slug) == (503, "stopping")


def test_a_head_request_is_answered_as_a_get(caller: Caller) -> None:
    assert caller("HEAD", "/healthz").status == 200


def test_an_answer_of_204_has_no_body_and_no_type(caller: Caller) -> None:
    answer = caller("DELETE", "/v1/trials/a")
    assert (answer.status, answer.body) == (204, b"")
    assert "content-type" not in answer.headers


@pytest.mark.spec("CORE-15")
def test_no_answer_may_be_kept_or_taken_for_another_type(caller: Caller) -> None:
    for path in ("/healthz", "/docs", "/openapi.json", "/metrics", "/v1/trials/a", "/nowhere", "/"):
        headers = caller("GET", path).headers
        assert headers["cache-control"] == "no-store"
        assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.spec("CORE-16")
def test_a_client_beyond_its_rate_gets_429_while_others_go_on(open_caller: Open) -> None:
    caller = open_caller(limits_requests_per_second_max=5)
    caller.stand_still()
    other = access.create(caller.context.store, "other", ["read"])
    statuses = [caller("GET", "/v1/trials/a").status for _ in range(8)]
    refused = caller("GET", "/nowhere")
    assert statuses == [200] * 5 + [429] * 3
    assert (refused.status, refused.slug) == (429, "rate-exceeded")
    assert int(refused.headers["retry-after"]) >= 1
    assert caller("GET", "/v1/trials/a", token=other).status == 200


@pytest.mark.spec("CORE-13")
def test_every_error_of_the_tree_has_a_name_and_a_title_of_its_own() -> None:
    errors = every(KeyfoldError)
    slugs = [error.slug for error in errors if error.__module__ == "keyfold.core.errors"]
    assert len(set(slugs)) == len(slugs)
    assert all(error.title() and not error.title().endswith(".") for error in errors)
