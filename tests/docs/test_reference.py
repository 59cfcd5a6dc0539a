"""The reference is complete: it is exactly what the code says."""

import pytest

from tools import reference


@pytest.mark.spec("CORE-13", "CORE-16", "CORE-19")
def test_the_reference_lists_every_command_setting_endpoint_metric_and_error() -> None:
    assert reference.TARGET.read_text(encoding="utf-8") == reference.reference(), "run `make docs`"
