"""A token is checked against the store, remembered for a few seconds and no longer, and nobody may guess at speed."""

import asyncio
import threading
import time
from typing import Any

import pytest

from keyfold.core import access as tokens
from keyfold.core.errors import StoreUnreachable
from keyfold.http import access as door_access
from tests.unit.http.conftest import Answered, Caller, Open

pytestmark = pytest.mark.spec("CORE-15")


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How often the store was asked for a token, and in which thread."""
    seen: list[str] = []
    real = tokens.client_of

    def counted(store: Any, text: str) -> Any:
        seen.append(threading.current_thread().name)
        return real(store, text)

    monkeypatch.setattr(tokens, "client_of", counted)
    return seen


class Later:
    """A monotonic clock that can be put forward."""

    ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead

    def time(self) -> float:
        return time.time() + self.ahead


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Later:
    clock = Later()
    monkeypatch.setattr(door_access, "time", clock)
    return clock


def refused(answer: Answered) -> bool:
    return (answer.status, answer.slug) == (401, "unauthenticated")


def mutations(token: str) -> list[str]:
    """Texts that are nearly the token."""
    prefix, token_id, secret = token.split("_", 2)
    flipped = [
        f"{prefix}_{token_id}_{secret[:at]}{'A' if secret[at] != 'A' else 'B'}{secret[at + 1 :]}"
        for at in range(len(secret) - 1)  # the last character holds only four bits of the secret
    ]
    return [
        *flipped,
        "",
        " ",
        prefix,
        f"{prefix}_",
        f"{prefix}_{token_id}",
        f"{prefix}_{token_id}_",
        f"{prefix}_{token_id}_{secret[:-1]}",
        f"{prefix}_{token_id}_{secret}x",
        f"{prefix}_{token_id}_{secret}=",
        f"{prefix}_{token_id}__{secret}",
        f"{prefix}_{token_id}_{secret.swapcase()}",
        f"{prefix}_{token_id}_{secret[::-1]}",
        f"{prefix}__{secret}",
        f"{prefix}_{token_id[::-1]}_{secret}",
        f"{prefix}_{token_id.upper()}x_{secret}",
        f"{prefix}_{'0' * 12}_{secret}",
        f"{prefix.upper()}_{token_id}_{secret}",
        f"xx_{token_id}_{secret}",
        f"{token_id}_{secret}",
        secret,
        f" {token}",
        f"{token},{token}",
        f"{token} {token}",
        f"{token}\t",
        token.replace("_", "-"),
        token * 10,
        f"{prefix}_' OR 1=1 --_{secret}",
        f"{prefix}_{token_id}%_{secret}",
        f"{prefix}_%_{secret}",
        "null",
        "undefined",
        "*",
        "kf_000000000000_" + "A" * 43,
    ]


def test_nothing_that_is_nearly_a_token_is_taken_for_it(open_caller: Open) -> None:
    caller = open_caller(limits_refusals_per_second_max=1_000_000)
    corpus = mutations(caller.token)
    taken = [text for text in corpus if not refused(caller("GET", "/v1/trials/a", token=text or " "))]
    assert len(corpus) > 70
    assert taken == []
    assert caller("GET", "/v1/trials/a").status == 200


@pytest.mark.parametrize(
    "header",
    ["{}", "Basic {}", "bearer{}", "Token {}", "Bearer", "Bearer ", "Bearer  {}", "Bearer\t{}", "Bearer {} x", '"{}"'],
)
def test_a_header_that_is_not_a_bearer_token_is_refused(caller: Caller, header: str) -> None:
    assert refused(caller("GET", "/v1/trials/a", headers={"authorization": header.format(caller.token)}))


def test_the_name_of_the_scheme_may_be_written_in_any_case(caller: Caller) -> None:
    assert caller("GET", "/v1/trials/a", headers={"authorization": f"bEaReR {caller.token}"}).status == 200


def test_the_store_is_asked_once_for_many_requests_and_never_by_the_event_loop(
    caller: Caller, looks: list[str]
) -> None:
    answers = caller.together(*(caller.call("GET", "/v1/trials/a") for _ in range(50)))
    assert [answer.status for answer in answers] == [200] * 50
    assert len(looks) == 1
    assert looks[0].startswith("access")


def test_a_revoked_token_is_refused_when_what_is_remembered_of_it_has_aged(caller: Caller, later: Later) -> None:
    assert caller("GET", "/v1/trials/a").status == 200
    [live] = tokens.tokens(caller.context.store)
    tokens.revoke(caller.context.store, live.token_id)
    assert caller("GET", "/v1/trials/a").status == 200
    later.ahead = door_access.ACCESS_CACHE_SECONDS + 0.1
    answer = caller("GET", "/v1/trials/a")
    assert refused(answer)
    assert answer.json["detail"] == "the token has ended"


def test_a_token_is_not_remembered_past_its_end(
    caller: Caller, looks: list[str], later: Later, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tokens.client_of
    monkeypatch.setattr(tokens, "client_of", lambda store, text: (real(store, text)[0], round((time.time() + 1) * 1e6)))
    assert caller("GET", "/v1/trials/a").status == 200
    assert caller("GET", "/v1/trials/a").status == 200
    assert len(looks) == 1
    later.ahead = 1.5
    caller("GET", "/v1/trials/a")
    assert len(looks) == 2


def test_both_tokens_of_a_rotation_work_while_they_overlap(caller: Caller) -> None:
    [live] = tokens.tokens(caller.context.store)
    new = tokens.rotate(caller.context.store, live.token_id, overlap_seconds=60)
    assert caller("GET", "/v1/trials/a").status == 200
    assert caller("GET", "/v1/trials/a", token=new).status == 200


@pytest.mark.spec("CORE-16")
def test_a_wrong_token_is_looked_up_once(caller: Caller, looks: list[str]) -> None:
    for _ in range(20):
        assert refused(caller("GET", "/v1/trials/a", token="kf_000000000000_wrong"))
    assert len(looks) == 1


@pytest.mark.spec("CORE-16")
def test_an_address_that_tries_too_many_gets_429_and_the_store_is_left_alone(
    open_caller: Open, looks: list[str]
) -> None:
    caller = open_caller(limits_refusals_per_second_max=5)
    caller.stand_still()
    answers = [caller("GET", "/v1/trials/a", token=f"kf_000000000000_{number}") for number in range(40)]
    assert [answer.status for answer in answers] == [401] * 5 + [429] * 35
    assert answers[-1].slug == "rate-exceeded"
    assert int(answers[-1].headers["retry-after"]) >= 1
    assert len(looks) == 5


@pytest.mark.spec("CORE-16")
def test_a_known_token_works_on_beside_a_flood_from_its_own_address(open_caller: Open, later: Later) -> None:
    caller = open_caller(limits_refusals_per_second_max=5)
    caller.stand_still()
    assert caller("GET", "/v1/trials/a").status == 200
    later.ahead = door_access.ACCESS_CACHE_SECONDS + 0.1  # it must be looked up again
    for number in range(20):
        caller("GET", "/v1/trials/a", token=f"kf_000000000000_{number}")
    assert caller("GET", "/v1/trials/a").status == 200


@pytest.mark.spec("CORE-16")
def test_a_flood_from_one_address_does_not_touch_another(open_caller: Open) -> None:
    caller = open_caller(limits_refusals_per_second_max=5)
    caller.stand_still()
    for number in range(20):
        caller("GET", "/v1/trials/a", token=f"kf_000000000000_{number}", remote="2001:db8:1:2::1")
    assert caller("GET", "/x", token="kf_000000000000_a", remote="2001:db8:1:2:ffff::9").status == 429
    assert caller("GET", "/x", token="kf_000000000000_b", remote="2001:db8:1:3::1").status == 401


@pytest.mark.spec("CORE-16")
def test_what_is_remembered_is_bounded(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_access, "REFUSED_MAX", 20)
    access = caller.door._guards.access
    for number in range(100):
        caller("GET", "/v1/trials/a", token=f"kf_000000000000_{number}", remote=f"192.0.2.{number}")
    assert len(access._refused) <= 20
    assert not access._checks


@pytest.mark.spec("CORE-17")
def test_the_text_of_a_token_is_not_what_is_remembered(caller: Caller) -> None:
    caller("GET", "/v1/trials/a")
    secret = caller.token.split("_", 2)[2]
    assert secret not in repr(vars(caller.door._guards.access))


@pytest.mark.spec("CORE-13")
def test_where_the_store_does_not_answer_the_caller_gets_503_and_no_word_of_the_store(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(store: Any, text: str) -> Any:
        raise StoreUnreachable("connection to db.internal:5432 as keyfold failed")

    monkeypatch.setattr(tokens, "client_of", fail)
    answer = caller("GET", "/v1/trials/a")
    assert (answer.status, answer.slug) == (503, "store-unreachable")
    assert answer.headers["retry-after"] == "1"
    assert "db.internal" not in answer.body.decode()


def test_one_caller_going_away_does_not_spoil_the_look_for_another(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tokens.client_of

    def slow(store: Any, text: str) -> Any:
        time.sleep(0.3)
        return real(store, text)

    monkeypatch.setattr(tokens, "client_of", slow)

    async def scenario() -> Answered:
        leaving = asyncio.create_task(caller.call("GET", "/v1/trials/a"))
        staying = asyncio.create_task(caller.call("GET", "/v1/trials/a"))
        await asyncio.sleep(0.1)
        leaving.cancel()
        return await staying

    assert caller.run(scenario()).status == 200


@pytest.mark.parametrize("host", ["127.0.0.1:8080", "localhost", "LOCALHOST:1", "[::1]:8080"])
def test_in_a_demo_nobody_needs_a_token(open_caller: Open, host: str) -> None:
    caller = open_caller(http_demo=True)
    assert caller("GET", "/v1/trials/a", token=None, headers={"host": host}).status == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "", "[::1"])
def test_a_demo_does_not_answer_a_page_that_points_its_own_name_here(open_caller: Open, host: str) -> None:
    caller = open_caller(http_demo=True)
    assert refused(caller("GET", "/v1/trials/a", token=None, headers={"host": host}))


def test_in_a_demo_a_token_that_is_given_is_still_checked(open_caller: Open) -> None:
    caller = open_caller(http_demo=True)
    headers = {"host": "localhost"}
    assert refused(caller("GET", "/v1/trials/a", token="kf_000000000000_wrong", headers=headers))
    narrow = tokens.create(caller.context.store, "narrow", ["ingest"])
    assert caller("GET", "/v1/trials/a", token=narrow, headers=headers).status == 403
