"""The door without a server: a request goes in as ASGI and comes out as an answer."""

import asyncio
import shutil
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from keyfold.core import access
from keyfold.core.access import SCOPES
from keyfold.core.context import Context
from keyfold.core.gather import Gatherer
from keyfold.http.app import Door, create_app
from tests.unit.http import trial

T = TypeVar("T")


class Answered(msgspec.Struct):
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def slug(self) -> str:
        """The name of the problem; a problem has the shape of one, whatever it is about."""
        assert self.headers["content-type"] == "application/problem+json"
        problem = self.json
        assert problem["status"] == self.status
        assert problem["title"]
        assert problem["detail"]
        assert problem["request_id"] == self.headers["x-request-id"]
        assert problem["type"].startswith("/problems/")
        return str(problem["type"].removeprefix("/problems/"))


class Caller:
    """Calls the door on an event loop of its own; several at once with `together`."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.runner = asyncio.Runner()
        self.gatherer = Gatherer(context.store, context.limits)
        self.door: Door = create_app(context, self.gatherer)
        self.token = access.create(context.store, "tests", list(SCOPES))

    def __call__(self, method: str, path: str, **request: Any) -> Answered:
        return self.run(self.call(method, path, **request))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def together(self, *calls: Coroutine[Any, Any, Answered]) -> list[Answered]:
        async def main() -> list[Answered]:
            return list(await asyncio.gather(*calls))

        return self.run(main())

    async def call(
        self,
        method: str,
        path: str,
        *,
        json: object = None,
        body: bytes | None = None,
        chunks: Sequence[bytes] | None = None,
        headers: dict[str, str] | Sequence[tuple[str, str]] = (),
        token: str | None = "",
        remote: str = "192.0.2.1",
        receive: Callable[[], Coroutine[Any, Any, Any]] | None = None,
    ) -> Answered:
        """One request; `token=None` sends none, `chunks` sends a body without a length."""
        given = list(headers.items() if isinstance(headers, dict) else headers)
        names = {name.lower() for name, _ in given}
        if json is not None:
            body = msgspec.json.encode(json)
        if (body is not None or chunks is not None) and "content-type" not in names:
            given.append(("content-type", "application/json"))
        if body is not None and "content-length" not in names:
            given.append(("content-length", str(len(body))))
        if chunks is not None:
            given.append(("transfer-encoding", "chunked"))
        if token is not None and "authorization" not in names:
            given.append(("authorization", f"Bearer {token or self.token}"))
        raw, _, query = path.partition("?")
        scope: dict[str, object] = {
            "type": "http",
            "method": method,
            "raw_path": raw.encode(),
            "path": raw,
            "query_string": query.encode(),
            "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in given],
            "client": (remote, "4444"),
        }
        events: list[dict[str, object]] = [
            {"type": "http.request", "body": chunk, "more_body": True} for chunk in (chunks or [body or b""])
        ]
        events.append({"type": "http.request", "body": b"", "more_body": False})
        sent: list[dict[str, Any]] = []

        async def next_event() -> dict[str, object]:
            return events.pop(0) if events else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        await self.door(scope, receive or next_event, send)
        return Answered(
            sent[0]["status"], {name.decode(): value.decode() for name, value in sent[0]["headers"]}, sent[1]["body"]
        )

    def stand_still(self) -> None:
        """No bucket refills any more, so that a slow machine does not make more room than a fast one."""
        guards = self.door._guards
        for rates in (guards.rates, guards.access._refusals):
            rates._clock = lambda now=rates._clock(): now

    def value(self, key: str) -> int:
        return self.context.store.read(lambda tx: trial.rows(tx, [key]))[key].value

    def total(self) -> int:
        """What every change so far has left behind, so that `nothing changed` can be said of the whole table."""
        return int(
            self.context.store.read(
                lambda tx: tx.driver("SELECT coalesce(sum(version), 0) + count(*) FROM trials").scalar_one()
            )
        )

    def close(self) -> None:
        self.gatherer.close()
        self.door.close()
        self.runner.close()
        self.context.close()


Open = Callable[..., Caller]


@pytest.fixture(scope="session")
def new_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a store with our schema and nothing in it, to be copied: making one takes longer than most tests."""
    file = tmp_path_factory.mktemp("store") / "keyfold.db"
    trial.open_context(store_url=f"sqlite:///{file}").close()
    return file


@pytest.fixture
def open_caller(tmp_path: Path, new_store: Path) -> Iterator[Open]:
    """Makes a door with settings of one's own."""
    opened: list[Caller] = []

    def make(**options: object) -> Caller:
        file = shutil.copy(new_store, tmp_path / f"keyfold-{len(opened)}.db")
        opened.append(Caller(trial.open_context(**{"store_url": f"sqlite:///{file}", **options})))
        return opened[-1]

    yield make
    for caller in opened:
        caller.close()


@pytest.fixture
def caller(open_caller: Open) -> Caller:
    """A door with the trial part and a token that may do everything."""
    return open_caller()
