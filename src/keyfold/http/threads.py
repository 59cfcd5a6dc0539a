"""Threads for routes that are plain functions: a bounded number of them, and a bounded queue before them."""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from keyfold.core.errors import QueueFull

T = TypeVar("T")


class Threads:
    """As many threads as the store has connections: more would only wait for one."""

    def __init__(self, threads_max: int, queue_max: int) -> None:
        self._pool = ThreadPoolExecutor(threads_max, thread_name_prefix="route")
        self._taken_max = threads_max + queue_max
        self._taken = 0

    async def run(self, function: Callable[[], T]) -> T:
        """Call in a thread. A caller that has gone away leaves the queue; what runs already runs to its end."""
        if self._taken >= self._taken_max:
            raise QueueFull(f"{self._taken} requests wait for a thread", retry_after_seconds=1)
        loop = asyncio.get_running_loop()
        self._taken += 1
        running: Future[T] = self._pool.submit(contextvars.copy_context().run, function)
        # The place is free when the thread is, not when the caller stops waiting.
        running.add_done_callback(lambda _: loop.call_soon_threadsafe(self._free))
        return await asyncio.wrap_future(running)

    def close(self) -> None:
        """Wait for what runs: the interpreter would, at its end, and without a limit."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _free(self) -> None:
        self._taken -= 1
