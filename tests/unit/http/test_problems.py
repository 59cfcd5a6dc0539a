"""An error becomes a problem: a stable type, what was wrong and where, when to come back, and never a secret."""

import msgspec
import pytest
from msgspec import Struct

from keyfold.core.errors import (
    BadInput,
    RateExceeded,
    StoreUnreachable,
    TooDeep,
    Unauthenticated,
    Unavailable,
)
from keyfold.http import problems

pytestmark = pytest.mark.spec("CORE-13")


class Item(Struct, forbid_unknown_fields=True):
    key: str


class Body(Struct, forbid_unknown_fields=True):
    items: list[Item]


def refused(body: bytes) -> BadInput:
    try:
        msgspec.json.decode(body, type=Body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return problems.refused_input(error, "the body")
    raise AssertionError("it was taken")


def headers_of(error: BadInput | Unavailable | RateExceeded | Unauthenticated) -> dict[bytes, bytes]:
    return dict(problems.answer(error, "id").headers)


def test_a_problem_has_the_members_of_rfc_9457_and_the_request_id() -> None:
    error = BadInput("a number is needed", place="$.items[3].key", hint="Send 1")
    assert msgspec.json.decode(problems.answer(error, "r-1").body) == {
        "type": "/problems/bad-input",
        "title": "The input was refused and nothing was changed",
        "status": 400,
        "detail": "a number is needed",
        "place": "$.items[3].key",
        "hint": "Send 1",
        "request_id": "r-1",
    }


def test_what_is_not_known_is_left_out() -> None:
    assert set(msgspec.json.decode(problems.answer(BadInput("no"), "r").body)) == {
        "type",
        "title",
        "status",
        "detail",
        "request_id",
    }


@pytest.mark.parametrize(
    ("body", "detail", "place"),
    [
        (b'{"items":[{"key":"a"},{"key":5}]}', "Expected `str`, got `int`", "$.items[1].key"),
        (b'{"items":[{"key":"a","odd":1}]}', "Object contains unknown field `odd`", "$.items[0]"),
        (b"[]", "Expected `object`, got `array`", "$"),
        (b"{}", "Object missing required field `items`", "$"),
        (b'{"items":[NaN]}', "the body is not valid JSON: invalid character", "byte 10"),
        (b'{"items":[]}x', "the body is not valid JSON: trailing characters", "byte 13"),
        (b'{"items":', "the body is not valid JSON: Input data was truncated", None),
        (b'{"items":[{"key":"\xff"}]}', "the body is not UTF-8: invalid start byte", None),
    ],
)
def test_a_refusal_of_the_decoder_says_what_and_where(body: bytes, detail: str, place: str | None) -> None:
    error = refused(body)
    assert (error.detail, error.place) == (detail, place)


def test_too_deep_for_the_decoder_is_too_deep() -> None:
    assert isinstance(problems.refused_input(RecursionError(), "the body"), TooDeep)


@pytest.mark.parametrize("error", [Unavailable("busy"), RateExceeded("slow down"), StoreUnreachable("gone")])
def test_every_503_and_429_says_when_to_come_back(error: Unavailable) -> None:
    assert headers_of(error)[b"retry-after"] == b"1"


def test_an_error_says_itself_when_to_come_back() -> None:
    assert headers_of(Unavailable("busy", retry_after_seconds=7))[b"retry-after"] == b"7"


def test_a_401_names_the_scheme() -> None:
    assert headers_of(Unauthenticated("who?"))[b"www-authenticate"].startswith(b"Bearer")


@pytest.mark.spec("CORE-17")
def test_a_password_in_the_detail_of_a_server_error_is_blotted_out() -> None:
    error = StoreUnreachable("postgresql://keyfold:canary@db/keyfold did not answer", hint="Bearer canary-canary")
    assert b"canary" not in problems.answer(error, "r").body
