"""A log line is one object or one line of text, carries the id of its request, and never a secret."""

import io
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from keyfold.core import logs
from keyfold.core.settings import LogSettings

pytestmark = pytest.mark.spec("CORE-17")

TOKEN = "kf_0123456789ab_Canary-Canary_Canary0123456789"
SECRETS = [
    TOKEN,
    f"the token {TOKEN} was refused",
    f"Authorization: Bearer {TOKEN}",
    "Authorization: Bearer opaque-canary-1234",
    "authorization=Basic Y2FuYXJ5OmNhbmFyeQ==",
    "postgresql://keyfold:canary@db.internal/keyfold",
    "postgresql://keyfold:can@ary@db.internal/keyfold",
    "sasl.password=canary",
    "password='canary'",
    '{"password": "canary"}',
    "could not connect: host=db user=keyfold password=canary dbname=x",
]
CANARIES = ("anary", "Y2FuYXJ5OmNhbmFyeQ", "can@", "ary@")

Write = Callable[..., str]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Leave the logs of the other tests as they were."""
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    structlog.reset_defaults()
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
    structlog.contextvars.clear_contextvars()


def logged(work: Callable[[Any], None], **settings: Any) -> str:
    out = io.StringIO()
    logs.configure(LogSettings(**settings), out)
    work(structlog.get_logger("test"))
    return out.getvalue()


def leaks(text: str) -> bool:
    return any(canary in text for canary in CANARIES)


@pytest.mark.parametrize("form", ["json", "text"])
@pytest.mark.parametrize("secret", SECRETS)
def test_a_secret_is_blotted_out_wherever_it_stands(form: str, secret: str) -> None:
    def work(log: Any) -> None:
        log.error(secret, plain=secret, nested={"a": [{"b": (secret, secret.encode())}]}, thing=ValueError(secret))
        try:
            raise RuntimeError(secret)
        except RuntimeError as error:
            log.error("failed", exc_info=error)

    written = logged(work, form=form)
    assert "***" in written
    assert not leaks(written)


@pytest.mark.parametrize("form", ["json", "text"])
@pytest.mark.parametrize("secret", SECRETS)
def test_what_a_library_logs_is_blotted_out_too(form: str, secret: str) -> None:
    def work(_: Any) -> None:
        try:
            raise RuntimeError(secret)
        except RuntimeError:
            logging.getLogger("library").exception("it said %s", secret)

    written = logged(work, form=form)
    assert "RuntimeError" in written
    assert not leaks(written)


@pytest.mark.parametrize(
    "name", ["authorization", "Authorization", "password", "store_password", "secret", "token", "cookie"]
)
def test_a_value_with_the_name_of_a_secret_is_blotted_out_whatever_it_is(name: str) -> None:
    assert not leaks(logged(lambda log: log.info("x", **{name: "canary"}), form="json"))
    assert not leaks(logged(lambda log: log.info("x", headers={name: "canary"}), form="json"))


def test_the_id_of_a_token_stays_so_that_it_can_be_found() -> None:
    assert logs.redact(f"refused {TOKEN}") == "refused kf_0123456789ab_***"


@pytest.mark.parametrize(
    "text", ["a plain line", "http://127.0.0.1:8080/docs", "12:30@noon", "the bearer of news", "kf_"]
)
def test_what_is_no_secret_stays_as_it_is(text: str) -> None:
    assert logs.redact(text) == text


@given(st.text())
def test_redacting_twice_is_redacting_once(text: str) -> None:
    assert logs.redact(logs.redact(text)) == logs.redact(text)


def test_a_line_is_an_object_with_time_level_and_the_id_of_its_request() -> None:
    def work(log: Any) -> None:
        structlog.contextvars.bind_contextvars(request_id="r-1")
        log.info("hello", number=7, text="two\nlines", nothing=None)

    written = logged(work, form="json")
    assert written.count("\n") == 1
    found = json.loads(written)
    assert found.pop("at").endswith("Z")
    assert found == {
        "event": "hello",
        "level": "info",
        "request_id": "r-1",
        "number": 7,
        "text": "two\nlines",
        "nothing": None,
    }


@pytest.mark.parametrize(("level", "count"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_what_is_below_the_level_is_left_out(level: str, count: int) -> None:
    def work(log: Any) -> None:
        log.debug("d")
        log.info("i")
        log.warning("w")
        log.error("e")

    assert len(logged(work, form="json", level=level).splitlines()) == count


def test_libraries_speak_from_warnings_up() -> None:
    def work(_: Any) -> None:
        logging.getLogger("library").info("chatter")
        logging.getLogger("library").warning("heed")

    assert [json.loads(line)["event"] for line in logged(work, form="json", level="debug").splitlines()] == ["heed"]


def test_a_value_that_json_does_not_know_is_written_as_text() -> None:
    assert json.loads(logged(lambda log: log.info("x", thing=object), form="json"))["thing"] == "<class 'object'>"
