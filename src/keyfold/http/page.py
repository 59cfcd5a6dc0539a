"""The interactive page of the API: one file, no network, nothing that a strict browser would refuse."""

import base64
import hashlib
import importlib.resources
import re
from collections.abc import Mapping

import msgspec

import keyfold
from keyfold.http.wire import ANSWER_HEADERS, JSON_HEADERS, Answer, Call, Headers


class Docs:
    """The page, read once; the policy names the hashes of its own script and style and allows nothing else."""

    template = "/docs"

    def __init__(self) -> None:
        self._body = (importlib.resources.files("keyfold.http") / "docs.html").read_bytes()
        self._headers = headers_of(self._body)

    async def answer(self, call: Call, params: Mapping[str, str]) -> Answer:
        return Answer(200, self._body, self._headers)


class Home:
    """Where a browser starts; a program reads where to go."""

    template = "/"

    def __init__(self) -> None:
        links = {"keyfold": keyfold.__version__, "docs": "/docs", "openapi": "/openapi.json", "ready": "/readyz"}
        self._body = msgspec.json.encode(links)

    async def answer(self, call: Call, params: Mapping[str, str]) -> Answer:
        return Answer(307, self._body, [*JSON_HEADERS, (b"location", b"/docs")])


def headers_of(html: bytes) -> Headers:
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hashes(html, b'script')}",
            f"style-src {_hashes(html, b'style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )
    return [
        (b"content-type", b"text/html; charset=utf-8"),
        (b"content-security-policy", policy.encode()),
        (b"referrer-policy", b"no-referrer"),
        (b"cross-origin-opener-policy", b"same-origin"),
        *ANSWER_HEADERS,
    ]


def _hashes(html: bytes, tag: bytes) -> str:
    inline = re.findall(rb"<%s>(.*?)</%s>" % (tag, tag), html, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in inline)
