"""A body is read no further than the limit, and only JSON that means one thing becomes a struct."""

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from keyfold.core.errors import BadInput, TooDeep
from keyfold.core.jsontext import must_not_be_deeper
from keyfold.core.limits import Limits
from keyfold.http import body as bodies
from tests.unit.http.conftest import Caller, Open

pytestmark = pytest.mark.spec("CORE-14", "CORE-16")


class Anything(Struct, forbid_unknown_fields=True):
    x: Any


take = bodies.Decoder(Anything, Limits())
GOOD = {"items": [{"key": "a", "add": 1}]}


def nested(levels: int, opening: bytes = b"[", closing: bytes = b"]") -> bytes:
    return b'{"x":' + opening * (levels - 1) + b"1" + closing * (levels - 1) + b"}"


def test_a_body_in_one_piece_is_taken(caller: Caller) -> None:
    assert caller("POST", "/v1/trials", json=GOOD).status == 200


def test_a_body_in_pieces_without_a_length_is_taken(caller: Caller) -> None:
    pieces = [bytes([byte]) for byte in json.dumps(GOOD).encode()]
    assert caller("POST", "/v1/trials", chunks=pieces).status == 200
    assert caller.value("a") == 1


@pytest.mark.parametrize(
    ("headers", "status", "slug"),
    [
        ({"content-type": "text/plain"}, 415, "wrong-media-type"),
        ({"content-type": "application/xml"}, 415, "wrong-media-type"),
        ({"content-type": "application/json; charset=latin-1"}, 415, "wrong-media-type"),
        ({"content-type": "application/jsonx"}, 415, "wrong-media-type"),
        ({"content-type": ""}, 415, "wrong-media-type"),
        ({"content-encoding": "gzip"}, 415, "wrong-media-type"),
        ({"content-length": "5"}, 400, "bad-input"),
        ({"content-length": "500"}, 400, "bad-input"),
        ({"content-length": "-1"}, 400, "bad-input"),
        ({"content-length": "1e3"}, 400, "bad-input"),
        ({"content-length": "9" * 30}, 400, "bad-input"),
        ({"content-length": "0"}, 400, "bad-input"),
    ],
)
def test_a_head_that_does_not_fit_the_body_is_refused(
    caller: Caller, headers: dict[str, str], status: int, slug: str
) -> None:
    answer = caller("POST", "/v1/trials", json=GOOD, headers=headers)
    assert (answer.status, answer.slug) == (status, slug)
    assert caller.total() == 0


@pytest.mark.parametrize(
    "kind", ["application/json", "application/json; charset=utf-8", 'Application/JSON;charset="UTF-8"']
)
def test_json_may_name_its_only_charset(caller: Caller, kind: str) -> None:
    assert caller("POST", "/v1/trials", json=GOOD, headers={"content-type": kind}).status == 200


def test_a_body_that_declares_too_much_is_refused_before_it_is_read(open_caller: Open) -> None:
    caller = open_caller(limits_body_bytes_max=1_000_000)

    async def unread() -> Any:
        raise AssertionError("the body was read")

    answer = caller.run(
        caller.call(
            "POST",
            "/v1/trials",
            body=b"",
            headers={"content-length": "1000001", "expect": "100-continue"},
            receive=unread,
        )
    )
    assert (answer.status, answer.slug) == (413, "too-large")


def test_a_body_without_a_length_is_cut_off_at_the_limit_and_never_held_beyond_it(open_caller: Open) -> None:
    caller = open_caller(limits_body_bytes_max=1_000_000)
    left = [600]

    async def endless() -> Any:
        left[0] -= 1
        return {"type": "http.request", "body": bytes(bytearray(100_000)), "more_body": left[0] > 0}

    caller("GET", "/healthz")
    tracemalloc.start()
    answer = caller.run(caller.call("POST", "/v1/trials", chunks=[b""], receive=endless))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (answer.status, answer.slug) == (413, "too-large")
    assert peak < 3_000_000


def test_a_caller_that_goes_away_within_its_body_changes_nothing(caller: Caller) -> None:
    async def gone() -> Any:
        return {"type": "http.disconnect"}

    answer = caller.run(caller.call("POST", "/v1/trials", json=GOOD, receive=gone))
    assert answer.status == 400
    assert caller.total() == 0
    assert caller.door.under_way == 0


def test_a_call_without_a_body_refuses_one(caller: Caller) -> None:
    assert caller("GET", "/v1/trials/a", body=b"{}").slug == "bad-input"


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}"), (b'[{"b":', b"}]")])
def test_an_open_type_is_as_deep_as_the_limit_and_no_deeper(opening: bytes, closing: bytes) -> None:
    levels = 2 if b"{" in opening and b"[" in opening else 1
    body = b'{"x":' + opening * (31 // levels) + b"1" + closing * (31 // levels) + b"}"
    take(body)
    with pytest.raises(TooDeep):
        take(b'{"x":' + opening * (32 // levels + 1) + b"1" + closing * (32 // levels + 1) + b"}")


def test_brackets_in_text_are_not_depth() -> None:
    take(json.dumps({"x": ["[" * 100, '"' + "{" * 100, "\\" + "[" * 100]}).encode())


@pytest.mark.parametrize("levels", [1_000, 100_000, 1_000_000])
def test_any_depth_is_refused_without_harm(levels: int) -> None:
    with pytest.raises(TooDeep):
        take(nested(levels))


@given(
    st.recursive(
        st.none() | st.integers(0, 9) | st.text(max_size=5),
        lambda x: st.lists(x) | st.dictionaries(st.text(max_size=3), x),
        max_leaves=60,
    )
)
def test_depth_is_counted_exactly(value: Any) -> None:
    def depth(node: Any) -> int:
        if isinstance(node, dict):
            return 1 + max((depth(child) for child in node.values()), default=0)
        return 1 + max((depth(child) for child in node), default=0) if isinstance(node, list) else 0

    body = json.dumps(value).encode()
    levels = depth(value)
    must_not_be_deeper(body, max(1, levels))
    if levels > 1:
        with pytest.raises(TooDeep):
            must_not_be_deeper(body, levels - 1)


@pytest.mark.parametrize(
    "body", [b'{"x":"\\u0000"}', b'{"x":"a\\u0000b"}', b'{"x":{"\\u0000":1}}', b'{"x":"\\\\\\u0000"}', b'{"x":"\x00"}']
)
def test_nul_is_refused_in_any_text(body: bytes) -> None:
    with pytest.raises(BadInput):
        take(body)


def test_the_text_backslash_u0000_is_not_nul() -> None:
    take(b'{"x":"\\\\u0000"}')


@pytest.mark.parametrize("text", [b"\\ud800", b"\\udc00", b"\\ud800\\ud800", b"\\ud83d x", b"\\uDBFF\\u0041"])
def test_half_a_surrogate_pair_is_refused_by_its_name(text: bytes) -> None:
    with pytest.raises(BadInput, match="surrogate"):
        take(b'{"x":"' + text + b'"}')


def test_a_whole_surrogate_pair_is_one_character() -> None:
    take(b'{"x":"\\ud83d\\ude00"}')


@pytest.mark.parametrize(
    "body",
    [
        b'{"x":1,"x":2}',
        b'{"x":{"a":1,"a":1}}',
        b'{"x":[{"a":1},{"a":1,"b":2,"a":3}]}',
        b'{"x":{"a" : 1, "a" :1}}',
        b'{"x":{"a":1,"\\u0061":2}}',
        b'{"x":{":":1,"\\u003a":2}}',
        b'{"x":{"a":"\\u003a\\u003a","a":1}}',
        b'{"x":{"a":1,"a":"\\u003a\\u003A"}}',
        b'{"x":{"a":{"b":1},"a":{"c":":"}}}',
    ],
)
def test_a_name_twice_in_one_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadInput, match="appears twice"):
        take(body)


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
        lambda x: (
            st.lists(x, max_size=4)
            | st.dictionaries(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), x, max_size=4)
        ),
        max_leaves=20,
    ),
    st.booleans(),
)
def test_any_json_that_means_one_thing_is_taken(value: Any, escaped: bool) -> None:
    take(json.dumps({"x": value}, ensure_ascii=escaped).encode())


@pytest.mark.spec("CORE-14")
@pytest.mark.parametrize("number", [b"18446744073709551616", b"-9223372036854775809", b"9" * 30, b"-" + b"9" * 300])
@pytest.mark.parametrize("within", [b'{"x":%s}', b'{"x":{"a":[1, %s ]}}', b'{"x":{"a\\"":%s}}'])
def test_an_integer_of_more_than_64_bits_is_refused_with_its_place(number: bytes, within: bytes) -> None:
    body = within % number
    with pytest.raises(BadInput) as refused:
        take(body)
    assert refused.value.place == f"byte {body.index(number)}"


@pytest.mark.spec("CORE-14")
@pytest.mark.parametrize(
    "value",
    [
        b"18446744073709551615",
        b"-9223372036854775808",
        b'"99999999999999999999999"',
        b"0.12345678901234567890123",
        b"1234567890123456789012.5",
        b"12345678901234567890123e-3",
    ],
)
def test_other_numbers_and_digits_in_text_are_taken(value: bytes) -> None:
    take(b'{"x":[%s]}' % value)


@pytest.mark.parametrize(
    "number", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"0x10", b"01", b"+1", b"1."]
)
def test_what_is_not_a_finite_number_is_refused(number: bytes) -> None:
    with pytest.raises(BadInput):
        take(b'{"x":' + number + b"}")
