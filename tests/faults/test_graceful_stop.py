"""A worker told to stop under load finishes or rolls back what it has in hand, hands its leases back, loses nothing."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from keyfold.core.clock import SystemClock
from keyfold.core.context import Context
from keyfold.core.topics.topic import Message
from keyfold.tally.part import PART
from tests.faults import ledger, scenario
from tests.faults.effort import TIMEOUT_SECONDS, effort, seed
from tests.faults.ledger import Ledger
from tests.faults.matrix import Hit
from tests.faults.scenario import Worker

pytestmark = [pytest.mark.spec("CORE-20"), pytest.mark.timeout(TIMEOUT_SECONDS)]

STOP_SECONDS_MAX = 60
KEYFOLD = Path(sys.executable).with_name("keyfold")


@pytest.mark.fault("told to stop", "ground", "tally")
def test_a_worker_stopped_by_sigterm_loses_nothing_and_leaves_no_lease_behind(
    template: Path, fast_path: Path, hit: Hit
) -> None:
    chosen = seed()
    print(f"KEYFOLD_FAULTS_SEED={chosen}")
    chance = random.Random(chosen)
    path = fast_path / "run.db"
    path.write_bytes(template.read_bytes())
    url = f"sqlite:///{path}"
    sent: dict[str, list[bytes]] = {key: [] for key in "abcdef"}
    context = Context.open(scenario.settings(url), [PART])
    writer = Worker(context, "writer")
    before = Ledger.of(context.store).counts()
    try:
        for _ in range(effort(3, 300)):
            with subprocess.Popen([KEYFOLD, "work", "--store", url, "--json"], stdout=subprocess.PIPE) as process:
                assert process.stdout
                assert b"started" in process.stdout.readline()
                deadline = time.monotonic() + chance.uniform(0.05, 0.6)
                while time.monotonic() < deadline or Ledger.of(context.store).counts()[2] == before[2]:
                    writer.put([_event(sent, key) for key in chance.sample(sorted(sent), 3)])
                process.send_signal(signal.SIGTERM)
                writer.put([_event(sent, key) for key in sent])
                assert process.wait(STOP_SECONDS_MAX) == 0
            found = Ledger.of(context.store)
            assert not ledger.broken_now(found)
            assert not _leases_in_force(context)
            after = found.counts()
            hit("ground", int(after[1] > before[1]))
            hit("tally", int(after[2] > before[2]))
            before = after
        writer.run_dry()
        found = Ledger.of(context.store)
        assert not ledger.broken_now(found) + ledger.broken_at_the_end(found, sent)
    finally:
        context.close()


def _event(sent: dict[str, list[bytes]], key: str) -> Message:
    sent[key].append(b'{"add":%d}' % len(sent[key]))
    return Message(key=key, version=len(sent[key]), event_time_us=0, schema="event/1", payload=sent[key][-1])


def _leases_in_force(context: Context) -> list[str]:
    now_us = SystemClock().now_us()
    held = "SELECT name FROM leases WHERE expires_at_us > ?"
    return context.store.read(lambda tx: list(tx.driver(held, (now_us,)).scalars()))
