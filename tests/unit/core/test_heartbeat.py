"""Claims about calls in the background: while there is work, whatever fails, no longer than their owner."""

import threading
import time
from collections.abc import Callable

import pytest

from keyfold.core.heartbeat import Heartbeat

pytestmark = pytest.mark.spec("CORE-11")

SECONDS = 0.01


class Owner:
    def __init__(self, name: str, error: Exception | None = None) -> None:
        self.beats = 0
        self._error = error
        self.heartbeat = Heartbeat(self._beat, SECONDS, name)

    def _beat(self) -> None:
        self.beats += 1
        if self._error is not None:
            raise self._error


def eventually(look: Callable[[], object]) -> None:
    for _ in range(500):
        if look():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come about")


def runs(name: str) -> bool:
    return any(thread.name == name for thread in threading.enumerate())


@pytest.mark.parametrize("error", [None, RuntimeError("planted")], ids=["well", "failing"])
def test_it_beats_while_work_is_in_hand_and_only_then(error: Exception | None) -> None:
    owner = Owner("beats", error)
    owner.heartbeat.begin()
    eventually(lambda: owner.beats > 2)
    owner.heartbeat.end()
    time.sleep(5 * SECONDS)  # one may be on its way
    beats = owner.beats
    time.sleep(5 * SECONDS)
    assert owner.beats == beats
    owner.heartbeat.begin()
    eventually(lambda: owner.beats > beats)
    owner.heartbeat.stop()
    eventually(lambda: not runs("beats"))


def test_after_a_stop_it_may_begin_again() -> None:
    owner = Owner("again")
    owner.heartbeat.begin()
    owner.heartbeat.stop()
    owner.beats = 0
    owner.heartbeat.begin()
    eventually(lambda: owner.beats)
    owner.heartbeat.stop()
    eventually(lambda: not runs("again"))


def test_an_owner_that_is_dropped_takes_its_thread_along() -> None:
    owner = Owner("dropped")
    owner.heartbeat.begin()
    assert runs("dropped")
    del owner
    eventually(lambda: not runs("dropped"))
