"""The page needs no network, runs nothing but itself, and shows nothing to other sites."""

import base64
import hashlib
import re

import pytest

from tests.unit.http.conftest import Caller

pytestmark = pytest.mark.spec("CORE-18")


def test_the_policy_allows_the_pages_own_script_and_style_and_nothing_else(caller: Caller) -> None:
    answer = caller("GET", "/docs", token=None)
    policy = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    for tag in ("script", "style"):
        [inline] = re.findall(rf"<{tag}>(.*?)</{tag}>", answer.body.decode(), re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"


def test_the_page_names_no_other_host(caller: Caller) -> None:
    html = caller("GET", "/docs", token=None).body.decode()
    assert set(re.findall(r"https?://[^\s'\"`)]+", html)) == {"http://www.w3.org/2000/svg"}
    assert " src=" not in html
    assert "onclick" not in html
    assert " style=" not in html


@pytest.mark.spec("CORE-15")
def test_the_page_tells_other_sites_nothing(caller: Caller) -> None:
    headers = caller("GET", "/docs", token=None).headers
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.spec("CORE-15")
def test_the_token_is_kept_in_the_tab_only(caller: Caller) -> None:
    html = caller("GET", "/docs", token=None).body.decode()
    assert "sessionStorage" in html
    assert "localStorage" not in html
    assert "document.cookie" not in html
