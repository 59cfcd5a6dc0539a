"""Which fault struck which part: counted by every test that declares a fault, printed at the end of the run.

A test declares `@pytest.mark.fault(name, *parts)` and calls the fixture `hit` whenever the fault has really struck a
part. A declared cell that was never hit fails the test: a harness whose fault never fires proves nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from tests.faults.effort import LONG, rotation

TOPICAL = ("ground", "tally", "profiles", "orders", "segments", "listings")  # what they do begins or ends in a topic
PARTS = (*TOPICAL, "numbering")

# Every cell that the run must hit; test_matrix.py keeps this table and the tests alike.
FAULTS = {
    "killed at a system call": PARTS,
    "power lost": PARTS,
    "server killed": PARTS,
    "answer to COMMIT lost": PARTS,
    "COMMIT never arrived": PARTS,
    "disk full": PARTS,
    "I/O error": PARTS,
    "many writers of one key": PARTS,
    "crash between two steps": PARTS,
    "message delivered twice": TOPICAL,
    "acknowledgement lost": TOPICAL,
    "holder paused past its lease": PARTS,
    "poison message": TOPICAL,
    "file spoilt": ("numbering",),  # segments count a spoilt snapshot as a poison message
    "coordinator unreachable": ("numbering",),
    "told to stop": ("ground", "tally"),  # profiles and orders stop as every consumer does, diffs where a tick may
    "clock jumped": ("profiles", "orders", "listings"),
    "planted bug": PARTS,
}

Hit = Callable[..., None]

_hits: Counter[tuple[str, str]] = Counter()
_PASSED = pytest.StashKey[bool]()


@pytest.fixture
def hit(request: pytest.FixtureRequest) -> Iterator[Hit]:
    """Call `hit(part, times)` where the declared fault has struck; `fault=` names one of several."""
    declared = cells(request.node)
    assert declared, "a test that counts hits declares its fault by @pytest.mark.fault"
    only = {fault for fault, _ in declared}
    counted: Counter[tuple[str, str]] = Counter()

    def count(part: str, times: int = 1, *, fault: str = "") -> None:
        cell = (fault or next(iter(only)), part)
        assert cell in declared, f"{cell} was not declared"
        counted[cell] += times

    yield count
    request.node.user_properties.extend(("fault", [*cell, times]) for cell, times in counted.items())
    never = [cell for cell in declared if not counted[cell]]
    if never and request.node.stash.get(_PASSED, False):
        pytest.fail(f"this fault never struck: {never}", pytrace=False)


def cells(item: pytest.Item) -> list[tuple[str, str]]:
    return [(mark.args[0], part) for mark in item.iter_markers("fault") for part in mark.args[1:]]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Remember whether the test passed: one that failed need not be told that its fault never struck."""
    report = yield
    if call.when == "call":
        item.stash[_PASSED] = report.passed  # type: ignore[attr-defined]
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        for name, value in report.user_properties:
            if name == "fault":
                fault, part, times = value  # type: ignore[misc]
                _hits[fault, part] += times


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _hits:
        return
    terminalreporter.section("faults that struck")
    width = max(map(len, FAULTS))
    terminalreporter.write_line(" " * width + "".join(f"{part:>12}" for part in PARTS))
    for fault in sorted({fault for fault, _ in _hits}, key=lambda fault: (*FAULTS, fault).index(fault)):
        row = "".join(f"{_hits[fault, part] or '-':>12}" for part in PARTS)
        terminalreporter.write_line(f"{fault:<{width}}{row}")
    share = "everything" if LONG else f"a share, chosen by KEYFOLD_FAULTS_ROTATION={rotation()}"
    terminalreporter.write_line(f"Tried was {share}.")
