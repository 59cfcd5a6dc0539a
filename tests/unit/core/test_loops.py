"""Loops look less often while idle, wake when told, survive failures, and stop after the step in hand."""

import threading
from collections.abc import Callable

import pytest

from keyfold.core.loops import Loop, Runner

pytestmark = pytest.mark.spec("CORE-20")


def test_a_waiting_loop_wakes_when_it_is_told_to() -> None:
    steps: list[int] = []
    stepped = threading.Event()

    def step() -> bool:
        steps.append(1)
        stepped.set()
        return False

    loop = Loop(name="trial", step=step, idle_seconds=3600, idle_seconds_max=3600)
    runner = Runner([loop])
    runner.start()
    assert stepped.wait(10)
    stepped.clear()
    loop.wake.set()
    assert stepped.wait(10)
    assert runner.stop(10)
    assert len(steps) == 2


def test_a_failing_step_is_tried_again_and_does_not_end_the_loop() -> None:
    done = threading.Event()
    failures = iter([ValueError("first"), ValueError("second")])

    def step() -> bool:
        for error in failures:
            raise error
        done.set()
        return False

    runner = Runner([Loop(name="trial", step=step)])
    runner.start()
    assert done.wait(20)
    assert runner.stop(10)


@pytest.mark.parametrize("hand_back", [lambda: None, lambda: 1 / 0])
def test_stopping_finishes_the_step_in_hand_and_then_hands_back(hand_back: Callable[[], object]) -> None:
    order: list[str] = []
    began, go_on = threading.Event(), threading.Event()

    def step() -> bool:
        began.set()
        go_on.wait(10)
        order.append("step")
        return True

    def stop() -> None:
        order.append("stop")
        hand_back()

    runner = Runner([Loop(name="trial", step=step, stop=stop)])
    runner.start()
    began.wait(10)
    assert not runner.stop(0.01)
    go_on.set()
    assert runner.stop(10)
    assert order == ["step", "stop"]
