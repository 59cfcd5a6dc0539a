"""How much of the fault tests is run: a share in `make test`, all of it in `make faults`."""

import datetime
import os
import random

LONG = os.environ.get("KEYFOLD_FAULTS") == "long"
TENTHS = 10
# Of one test: enough for a machine that is busy with others, and no end in `make faults`.
TIMEOUT_SECONDS = 0 if LONG else 600


def effort(short: int, long: int) -> int:
    """How many times; the long figure is for `make faults`."""
    return long if LONG else short


def rotation() -> int:
    """Which tenth of the kill points is today's; KEYFOLD_FAULTS_ROTATION chooses another."""
    chosen = os.environ.get("KEYFOLD_FAULTS_ROTATION")
    return int(chosen) % TENTHS if chosen else datetime.datetime.now(datetime.UTC).toordinal() % TENTHS


def seed() -> int:
    """The seed of a run: fixed by KEYFOLD_FAULTS_SEED, otherwise new every time, and always printed."""
    chosen = os.environ.get("KEYFOLD_FAULTS_SEED")
    return int(chosen) if chosen else random.SystemRandom().randrange(2**31)
