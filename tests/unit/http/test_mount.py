"""Between the wire and an operation: scope, grants, path, query, version and key, each checked in one place."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import Struct, structs

from keyfold.core import access
from keyfold.core.access import SCOPES
from keyfold.core.gather import Ask, Operation, Reply
from keyfold.core.route import Route
from keyfold.http.mount import must_be_sound, no_query
from tests.unit.http import trial
from tests.unit.http.conftest import Caller

# One good request for each route of the trial part, about the thing named `key`.
GOOD: dict[tuple[str, str], Callable[[str], tuple[str, dict[str, Any]]]] = {
    ("POST", "/v1/trials"): lambda key: ("/v1/trials", {"json": {"items": [{"key": key}]}}),
    ("POST", "/v1/trials/read"): lambda key: ("/v1/trials/read", {"json": {"keys": [key]}}),
    ("PUT", "/v1/trials/{key}"): lambda key: (
        f"/v1/trials/{key}",
        {"json": {"value": 1}, "headers": {"if-match": '"0"'}},
    ),
    ("GET", "/v1/trials/{key}"): lambda key: (f"/v1/trials/{key}", {}),
    ("DELETE", "/v1/trials/{key}"): lambda key: (f"/v1/trials/{key}", {}),
    ("POST", "/v1/trials/open"): lambda key: ("/v1/trials/open", {"json": {"anything": key}}),
    ("GET", "/v1/slow"): lambda key: ("/v1/slow", {}),
    ("POST", "/v1/slow"): lambda key: ("/v1/slow", {"json": {"items": [{"key": key}]}}),
    ("GET", "/v1/broken"): lambda key: ("/v1/broken", {}),
    ("POST", "/v1/lines"): lambda key: (
        "/v1/lines",
        {"body": b"", "headers": {"content-type": "application/x-ndjson"}},
    ),
}


@pytest.mark.spec("CORE-15")
def test_each_route_needs_its_scope_and_no_other_opens_it(caller: Caller) -> None:
    """The matrix of scopes and routes; a route without a case fails."""
    by_scope = {scope: access.create(caller.context.store, scope, [scope]) for scope in SCOPES}
    for route in trial.routes(caller.context):
        path, request = GOOD[route.method, route.path]("a")
        for scope, token in by_scope.items():
            answer = caller(route.method, path, token=token, **request)
            allowed = scope in (route.scope, "admin")
            assert (answer.status == 403) is not allowed, f"{route.method} {route.path} with {scope}: {answer.status}"
            if not allowed:
                assert answer.slug == "scope-missing"


@pytest.mark.spec("CORE-15")
def test_of_two_tokens_each_sees_its_own_things_and_not_the_others(caller: Caller) -> None:
    """Disjoint grants on every route that names a thing."""
    store = caller.context.store
    mine = access.create(store, "mine", ["ingest", "read"], {"tally": ["mine"]})
    yours = access.create(store, "yours", ["ingest", "read"], {"tally": ["yours"]})
    tried = 0
    for route in trial.routes(caller.context):
        if route.path in ("/v1/slow", "/v1/broken", "/v1/lines", "/v1/trials/open") or route.scope == "moderate":
            continue  # these name no thing
        for token, own, other in ((mine, "mine", "yours"), (yours, "yours", "mine")):
            tried += 1
            path, request = GOOD[route.method, route.path](other)
            hidden = caller(route.method, path, token=token, **request)
            assert (hidden.status, hidden.slug) == (404, "not-found"), f"{route.method} {route.path}"
            path, request = GOOD[route.method, route.path](own)
            assert caller(route.method, path, token=token, **request).status in (200, 412)
    assert tried == 8
    assert caller.value("mine") == caller.value("yours") != 0


@pytest.mark.spec("CORE-22")
def test_an_edit_without_a_version_gets_428(caller: Caller) -> None:
    answer = caller("PUT", "/v1/trials/a", json={"value": 1})
    assert (answer.status, answer.slug) == (428, "version-needed")


@pytest.mark.spec("CORE-22")
@pytest.mark.parametrize(
    "given",
    [
        "1",
        "*",
        'W/"1"',
        '""',
        '"x"',
        '"-1"',
        '"01"',
        '"1',
        '"1","2"',
        '"1.0"',
        f'"{2**63}"',
        '" 1"',
        '"１"'.encode().decode("latin-1"),
    ],
)
def test_a_version_that_is_none_of_ours_gets_400_and_changes_nothing(caller: Caller, given: str) -> None:
    answer = caller("PUT", "/v1/trials/a", json={"value": 1}, headers={"if-match": given})
    assert (answer.status, answer.slug) == (400, "bad-input")
    assert answer.json["place"] == "header if-match"
    assert caller.total() == 0


@pytest.mark.spec("CORE-22")
def test_the_etag_of_an_answer_is_the_version_of_the_next_edit(caller: Caller) -> None:
    first = caller("PUT", "/v1/trials/a", json={"value": 5}, headers={"if-match": '"0"'})
    assert (first.status, first.headers["etag"]) == (200, '"1"')
    read = caller("GET", "/v1/trials/a")
    assert read.headers["etag"] == '"1"'
    second = caller("PUT", "/v1/trials/a", json={"value": 6}, headers={"if-match": read.headers["etag"]})
    assert second.headers["etag"] == '"2"'
    stale = caller("PUT", "/v1/trials/a", json={"value": 7}, headers={"if-match": '"1"'})
    assert (stale.status, stale.slug) == (412, "version-stale")
    assert caller.value("a") == 6


@pytest.mark.spec("CORE-22")
def test_a_repeat_with_its_key_gets_the_first_answer_to_the_byte(caller: Caller) -> None:
    request: dict[str, Any] = {"json": {"value": 5}, "headers": {"if-match": '"0"', "idempotency-key": "k1"}}
    first = caller("PUT", "/v1/trials/a", **request)
    again = caller("PUT", "/v1/trials/a", **request)
    assert (again.status, again.body, again.headers["etag"]) == (first.status, first.body, '"1"')
    assert caller.value("a") == 5


@pytest.mark.spec("CORE-22")
def test_requests_with_one_key_at_once_are_one_change(caller: Caller) -> None:
    request: dict[str, Any] = {"json": {"items": [{"key": "a"}]}, "headers": {"idempotency-key": "k1"}}
    answers = caller.together(*(caller.call("POST", "/v1/trials", **request) for _ in range(20)))
    assert {(answer.status, answer.body) for answer in answers} == {(200, answers[0].body)}
    assert caller.value("a") == 1


@pytest.mark.spec("CORE-22")
@pytest.mark.parametrize(
    ("path", "json"),
    [("/v1/trials", {"items": [{"key": "a", "add": 2}]}), ("/v1/slow", {"items": [{"key": "a"}]})],
)
def test_a_key_used_with_another_body_or_path_gets_409(caller: Caller, path: str, json: object) -> None:
    headers = {"idempotency-key": "k1"}
    assert caller("POST", "/v1/trials", json={"items": [{"key": "a"}]}, headers=headers).status == 200
    answer = caller("POST", path, json=json, headers=headers)
    assert (answer.status, answer.slug) == (409, "idempotency-conflict")
    assert caller.value("a") == 1


@pytest.mark.spec("CORE-22")
def test_the_keys_of_two_clients_have_nothing_to_do_with_each_other(caller: Caller) -> None:
    other = access.create(caller.context.store, "other", ["ingest"])
    request: dict[str, Any] = {"json": {"items": [{"key": "a"}]}, "headers": {"idempotency-key": "k1"}}
    caller("POST", "/v1/trials", **request)
    caller("POST", "/v1/trials", token=other, **request)
    assert caller.value("a") == 2


@pytest.mark.spec("CORE-22")
@pytest.mark.parametrize("key", ["", " ", "a b", "x" * 201, "ключ".encode().decode("latin-1"), "\x7f", "a\tb"])
def test_a_key_that_is_not_visible_ascii_gets_400_and_changes_nothing(caller: Caller, key: str) -> None:
    answer = caller("POST", "/v1/trials", json={"items": [{"key": "a"}]}, headers={"idempotency-key": key})
    assert (answer.status, answer.slug) == (400, "bad-input")
    assert caller.total() == 0


@pytest.mark.spec("CORE-22")
@pytest.mark.parametrize("key", ["!", "~" * 200, '{"quoted"}', "0"])
def test_any_visible_ascii_is_a_key(caller: Caller, key: str) -> None:
    answer = caller("POST", "/v1/trials", json={"items": [{"key": "a"}]}, headers={"idempotency-key": key})
    assert answer.status == 200


@pytest.mark.spec("CORE-14")
@pytest.mark.parametrize(
    ("sent", "key"),
    [
        ("a", "a"),
        ("a%2Fb", "a/b"),
        ("%D0%BA", "к"),
        ("к", "к"),
        ("a+b", "a+b"),
        ("%25", "%"),
        ("a%20b", "a b"),
        ("..", ".."),
    ],
)
def test_a_part_of_the_path_is_decoded_once_and_exactly(caller: Caller, sent: str, key: str) -> None:
    assert caller("GET", f"/v1/trials/{sent}").json["key"] == key


@pytest.mark.spec("CORE-14")
@pytest.mark.parametrize("sent", ["%", "%z", "%zz", "%f", "%ff", "%c3%28", "%00", "a%00b", "%ED%A0%80"])
def test_a_part_of_the_path_that_is_not_text_gets_400(caller: Caller, sent: str) -> None:
    answer = caller("GET", f"/v1/trials/{sent}")
    assert (answer.status, answer.slug) == (400, "bad-input")
    assert answer.json["place"] == "path key"


@pytest.mark.spec("CORE-14")
def test_an_empty_part_of_the_path_is_not_found(caller: Caller) -> None:
    assert caller("GET", "/v1/trials/").status == 404


@pytest.mark.spec("CORE-14")
@pytest.mark.parametrize(
    ("query", "place"),
    [
        ("odd=1", "$"),
        ("limit=1&limit=2", "query limit"),
        ("limit=0", "query limit"),
        ("limit=101", "query limit"),
        ("limit=x", "query limit"),
        ("limit=", "query limit"),
        ("factor=nan", "query factor"),
        ("factor=inf", "query factor"),
        ("factor=-infinity", "query factor"),
        ("factor=1e999", "query factor"),
        ("after=%00", "query after"),
        ("after=%ff", "query"),
        ("after=%zz", "query"),
        ("limit", "query"),
        ("&".join(f"a{number}=1" for number in range(60)), "query"),
    ],
)
def test_a_query_that_is_wrong_says_where(caller: Caller, query: str, place: str) -> None:
    answer = caller("GET", f"/v1/trials/a?{query}")
    assert (answer.status, answer.slug) == (400, "bad-input")
    assert answer.json["place"] == place


@pytest.mark.spec("CORE-14")
def test_a_query_where_none_is_taken_gets_400(caller: Caller) -> None:
    answer = caller("POST", "/v1/trials?dry=1", json={"items": [{"key": "a"}]})
    assert (answer.status, answer.json["place"]) == (400, "query dry")
    assert caller.total() == 0


def test_without_a_query_a_request_has_its_defaults_unless_something_must_be_said() -> None:
    class Needed(Struct, frozen=True, forbid_unknown_fields=True):
        name: str

    class Changeable(Struct, forbid_unknown_fields=True):
        name: str = ""

    assert no_query(trial.ListQuery) == trial.ListQuery()
    assert no_query(Needed) is None
    assert no_query(Changeable) is None, "shared between requests, it could be changed by one of them"


@pytest.mark.spec("CORE-14")
def test_a_good_query_arrives_converted(caller: Caller) -> None:
    assert caller("GET", "/v1/trials/a?limit=7&factor=0.5&after=x%20y").status == 200


class Loose(Struct):
    name: str


class Nested(Struct, forbid_unknown_fields=True):
    inner: list[Loose]


class Unbounded(Struct, forbid_unknown_fields=True):
    number: int


def route(**changes: Any) -> Route:
    base = Route(method="POST", path="/v1/x", summary="x", scope="read", run=lambda ask: None)
    return structs.replace(base, **changes)


READ = Operation(name="r", apply=lambda tx, asks: [], writes=False)


@pytest.mark.spec("CORE-14")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"body": Loose}, "forbid_unknown_fields"),
        ({"body": Nested}, r"Loose at \$.inner\[\] must have forbid_unknown_fields"),
        ({"query": Loose}, "forbid_unknown_fields"),
        ({"body": Unbounded}, r"the integer at \$.number needs ge and le"),
        ({"scope": "everything"}, "there is no scope"),
        ({"path": "v1/x"}, "must look like"),
        ({"path": "/v1/{Key}"}, "must look like"),
        ({"idempotent": True}, "only a gathered operation"),
        ({"run": READ, "idempotent": True}, "only a write"),
        ({"run": READ, "status": 201}, "answers 201, its operation 200"),
    ],
)
def test_a_route_that_could_not_keep_its_promises_is_not_mounted(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(TypeError, match=reason):
        must_be_sound(route(**changes))


def test_a_sound_route_is_mounted() -> None:
    must_be_sound(route())


@pytest.mark.spec("CORE-15")
def test_a_request_is_alone_where_no_other_is_under_way_be_it_only_with_its_head(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []
    ask_of = caller.gatherer.ask

    async def ask(operation: Operation, one: Ask, *, is_alone: bool = False) -> Reply:
        told.append(is_alone)
        return await ask_of(operation, one, is_alone=is_alone)

    monkeypatch.setattr(caller.gatherer, "ask", ask)

    async def no_body_yet() -> Any:
        await asyncio.Event().wait()

    async def beside_one_that_waits() -> None:
        path, request = GOOD["POST", "/v1/trials/read"]("a")
        waiting = asyncio.create_task(caller.call("POST", path, receive=no_body_yet, **request))
        await asyncio.sleep(0)
        assert (await caller.call("POST", path, **request)).status == 200
        waiting.cancel()
        await asyncio.wait({waiting})
        assert (await caller.call("POST", path, **request)).status == 200

    path, request = GOOD["POST", "/v1/trials/read"]("a")
    assert caller("POST", path, **request).status == 200
    caller.run(beside_one_that_waits())
    assert told == [True, False, True]
