"""Plain functions run in threads, so many at once and so many waiting; who goes away leaks nothing."""

import asyncio
import threading

import pytest
import structlog

from keyfold.core.errors import QueueFull
from keyfold.http.threads import Threads

pytestmark = pytest.mark.spec("CORE-16")


def test_a_function_runs_in_a_thread_with_the_context_of_its_request() -> None:
    async def main() -> tuple[str, object]:
        structlog.contextvars.bind_contextvars(request_id="r-7")
        return await Threads(1, 1).run(
            lambda: (threading.current_thread().name, structlog.contextvars.get_contextvars()["request_id"])
        )

    name, request_id = asyncio.run(main())
    assert name.startswith("route")
    assert request_id == "r-7"


def test_beyond_the_queue_a_request_is_refused_at_once() -> None:
    async def main() -> list[object]:
        threads, leave = Threads(2, 3), threading.Event()
        calls = [asyncio.create_task(threads.run(leave.wait)) for _ in range(8)]
        await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        leave.set()
        return await asyncio.gather(*calls, return_exceptions=True)

    outcomes = asyncio.run(main())
    assert [type(outcome) for outcome in outcomes] == [bool] * 5 + [QueueFull] * 3


def test_the_place_of_a_caller_that_went_away_is_free_again_when_its_thread_is() -> None:
    async def main() -> None:
        threads, leave = Threads(1, 1), threading.Event()
        running = asyncio.create_task(threads.run(leave.wait))
        waiting = asyncio.create_task(threads.run(leave.wait))
        await asyncio.sleep(0.05)
        running.cancel()
        waiting.cancel()
        await asyncio.wait({running, waiting})
        with pytest.raises(QueueFull):
            await asyncio.gather(*(threads.run(lambda: None) for _ in range(2)))
        leave.set()
        await asyncio.to_thread(threads._pool.shutdown)  # what still runs has ended
        await asyncio.sleep(0.01)
        assert threads._taken == 0

    asyncio.run(main())


def test_a_failure_comes_back_to_its_caller() -> None:
    async def main() -> None:
        await Threads(1, 1).run(lambda: int("x"))

    with pytest.raises(ValueError, match="invalid literal"):
        asyncio.run(main())
