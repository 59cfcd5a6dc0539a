"""A body of lines is taken as it comes, some lines at a time, in constant memory however long it is."""

import asyncio
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from keyfold.core.gather import Operation
from keyfold.http import body as bodies
from keyfold.http.mount import must_be_sound
from keyfold.http.openapi import document, errors_of
from tests.unit.http import trial
from tests.unit.http.conftest import Answered, Caller, Open

pytestmark = pytest.mark.spec("CORE-14", "LST-12")

NDJSON = {"content-type": "application/x-ndjson"}


@pytest.fixture(autouse=True)
def handed() -> Iterator[None]:
    trial.handed.clear()
    yield
    trial.handed.clear()


def send(caller: Caller, *chunks: bytes, query: str = "", **more: Any) -> Answered:
    given: dict[str, Any] = {"headers": NDJSON, **more}
    if len(chunks) == 1:
        return caller("POST", f"/v1/lines{query}", body=chunks[0], **given)
    return caller("POST", f"/v1/lines{query}", chunks=list(chunks), **given)


def lines() -> list[bytes]:
    """All that were handed over; their numbers follow each other."""
    found: list[bytes] = []
    for each in trial.handed:
        assert each.first == len(found)
        found += each.lines
    return found


def split(chunks: list[bytes], line_bytes_max: int = 1_000) -> list[bytes]:
    splitter = bodies._Splitter(line_bytes_max)
    for chunk in chunks:
        splitter.add(chunk)
    splitter.end()
    found: list[bytes] = []
    while splitter.lines:
        found += splitter.taken().lines
    return found


@given(st.lists(st.binary(max_size=8).map(lambda text: text.translate(bytes.maketrans(b"abc", b"\n\n\r"))), max_size=9))
def test_lines_are_the_same_wherever_the_pieces_end(chunks: list[bytes]) -> None:
    whole = b"".join(chunks)
    assert split(chunks) == [line for line in whole.split(b"\n") if line.strip()]


@pytest.mark.parametrize("chunks", [(b"1\n2\n\n \r\n3",), (b"1", b"\n2\n", b"\n \r", b"\n3", b"\n")])
def test_lines_are_handed_over_without_those_that_are_empty(caller: Caller, chunks: tuple[bytes, ...]) -> None:
    answer = send(caller, *chunks)
    assert (answer.status, answer.json) == (200, {"said": "3 lines"})
    assert lines() == [b"1", b"2", b"3"]


def test_a_body_without_a_line_is_answered_all_the_same(caller: Caller) -> None:
    assert send(caller, b"").json == {"said": "0 lines"}
    assert send(caller, b"\n", b"\n").json == {"said": "0 lines"}


def test_so_many_lines_are_handed_over_at_once(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "LINES_MAX", 3)
    monkeypatch.setattr(bodies, "LINES_BYTES", 100)
    body = b"".join(b"%d\n" % number for number in range(10)) + b"x" * 60 + b"\n" + b"y" * 60 + b"\n" + b"z" * 60
    assert send(caller, body).json == {"said": "13 lines"}
    assert [len(each.lines) for each in trial.handed] == [3, 3, 3, 3, 1]
    assert len(lines()) == 13


@pytest.mark.parametrize(
    ("headers", "status", "slug"),
    [
        ({"content-type": "application/json"}, 415, "wrong-media-type"),
        ({"content-type": "application/x-ndjson; charset=latin-1"}, 415, "wrong-media-type"),
        ({"content-type": ""}, 415, "wrong-media-type"),
        ({**NDJSON, "content-encoding": "gzip"}, 415, "wrong-media-type"),
        ({**NDJSON, "content-length": "2"}, 400, "bad-input"),
        ({**NDJSON, "content-length": "500"}, 400, "bad-input"),
        ({**NDJSON, "content-length": "x"}, 400, "bad-input"),
    ],
)
def test_a_head_that_does_not_fit_the_body_is_refused(
    caller: Caller, headers: dict[str, str], status: int, slug: str
) -> None:
    answer = send(caller, b"1\n2\n", headers=headers)
    assert (answer.status, answer.slug) == (status, slug)
    assert lines() == []


@pytest.mark.parametrize("kind", ["application/x-ndjson; charset=utf-8", 'Application/X-NDJSON;charset="UTF-8"'])
def test_lines_may_name_their_only_charset(caller: Caller, kind: str) -> None:
    assert send(caller, b"1", headers={"content-type": kind}).status == 200


def test_a_line_that_is_too_long_is_refused_with_its_number(open_caller: Open) -> None:
    caller = open_caller(limits_body_bytes_max=1_000, limits_message_bytes_max=1_000)
    assert send(caller, b"x" * 1_000 + b"\n").status == 200
    for chunks in ((b"1\n" + b"x" * 1_001 + b"\n",), (b"1\n", *[b"x" * 100] * 11)):
        answer = send(caller, *chunks)
        assert (answer.status, answer.slug, answer.json["place"]) == (413, "too-large", "line 1")
    assert send(caller, b"1\n\xff\n").status == 200  # what a line must be is the affair of whoever reads it


def test_what_was_handed_over_before_an_error_stays(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "LINES_MAX", 2)
    answer = send(caller, b"0\n1\n2\n3\n4\n", query="?refuse=3")
    assert (answer.status, answer.slug) == (409, "conflict")
    assert lines() == [b"0", b"1"]
    answer = send(caller, b"0\n1\n2\n", query="?refuse=-2")
    assert answer.status == 400


def test_lines_of_a_body_that_breaks_off_are_handed_over_only_whole(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "LINES_MAX", 2)
    events: list[dict[str, Any]] = [
        {"type": "http.request", "body": b"0\n1\n2\n3", "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Any:
        return events.pop(0)

    answer = caller.run(
        caller.call("POST", "/v1/lines", headers=[*NDJSON.items(), ("transfer-encoding", "chunked")], receive=receive)
    )
    assert (answer.status, answer.slug) == (400, "bad-input")
    assert lines() == [b"0", b"1"]


def test_a_body_may_take_longer_than_a_request_as_long_as_lines_come(open_caller: Open) -> None:
    caller = open_caller(limits_request_seconds_max=1)
    pieces = [b"%d\n" % number for number in range(8)]

    async def receive() -> Any:
        await asyncio.sleep(0.25)
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    headers = [*NDJSON.items(), ("transfer-encoding", "chunked")]
    answer = caller.run(caller.call("POST", "/v1/lines", headers=headers, receive=receive))
    assert (answer.status, answer.json) == (200, {"said": "8 lines"})
    assert len(trial.handed) > 1


def test_a_body_whose_lines_do_not_end_is_too_slow(open_caller: Open) -> None:
    caller = open_caller(limits_request_seconds_max=1)

    async def receive() -> Any:
        await asyncio.sleep(0.1)
        return {"type": "http.request", "body": b"x", "more_body": True}

    headers = [*NDJSON.items(), ("expect", "100-continue")]
    answer = caller.run(caller.call("POST", "/v1/lines", headers=headers, receive=receive))
    assert (answer.status, answer.slug) == (408, "too-slow")


def test_work_that_takes_too_long_is_answered_as_that(open_caller: Open) -> None:
    caller = open_caller(limits_request_seconds_max=1)
    answer = send(caller, b"1", query="?seconds=1.6")
    assert (answer.status, answer.slug) == (503, "unavailable")


def test_a_long_body_is_held_in_constant_memory(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0

    def forget(handed: Any) -> None:
        nonlocal count
        count += len(handed.lines)

    monkeypatch.setattr(trial, "handed", type("Counted", (), {"append": staticmethod(forget)})())
    piece = (b"x" * 999 + b"\n") * 64
    left = 1_500  # 96 MB

    async def receive() -> Any:
        nonlocal left
        left -= 1
        return {"type": "http.request", "body": bytes(piece), "more_body": left > 0}

    headers = [*NDJSON.items(), ("transfer-encoding", "chunked")]
    tracemalloc.start()
    try:
        answer = caller.run(caller.call("POST", "/v1/lines", headers=headers, receive=receive))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (answer.status, count) == (200, 96_000)
    assert peak < 8_000_000


def test_only_a_function_takes_lines_and_nothing_else(caller: Caller) -> None:
    route = next(route for route in trial.routes(caller.context) if route.lines is not None)
    must_be_sound(route)
    operation = Operation(name="x", apply=trial.add, writes=True)
    for change in ({"run": operation}, {"body": trial.SetBody}, {"if_match": True}, {"lines": trial.Trial}):
        with pytest.raises(TypeError):
            must_be_sound(structs.replace(route, **change))


def test_the_document_says_what_a_line_is(caller: Caller) -> None:
    routes = trial.routes(caller.context)
    told: Any = document(routes)
    content = told["paths"]["/v1/lines"]["post"]["requestBody"]["content"]
    assert content == {
        "application/x-ndjson": {
            "schema": {
                "type": "string",
                "contentMediaType": "application/x-ndjson",
                "contentSchema": {"$ref": "#/components/schemas/Item"},
            },
        }
    }
    assert "Item" in told["components"]["schemas"]
    route = next(route for route in routes if route.lines is not None)
    assert {408, 413, 415} <= {error.status for error in errors_of(route)}
