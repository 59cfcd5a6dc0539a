"""A signal is noted whenever it comes, also a moment before somebody waits for it."""

import signal
import subprocess
import sys

import pytest

from keyfold.cli.signals import Stopping

pytestmark = pytest.mark.spec("CORE-20")

# The signal comes where the main thread cannot be woken: within a call, right before it begins to wait.
RIGHT_BEFORE = """
import os, signal, threading
from keyfold.cli import signals
stopping = signals.stop_on_signals()
sleep, once = signals.time.sleep, iter([True])
def late(seconds):
    if next(once, False):
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    sleep(seconds)
signals.time.sleep = late
assert stopping.wait()
print("stopped", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
sleep(60)
"""


def test_a_signal_that_comes_right_before_the_wait_ends_it_and_a_second_ends_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", RIGHT_BEFORE], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (128 + signal.SIGTERM, "stopped\n"), ended.stderr


def test_a_wait_ends_in_time_where_no_signal_comes() -> None:
    stopping = Stopping()
    assert not stopping.wait(0.01)
    stopping.set()
    assert stopping.is_set()
    assert stopping.wait()
