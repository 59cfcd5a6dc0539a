"""The Python of the README and of the pages runs as it stands."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from keyfold.counters.compile import EXAMPLE

ROOT = Path(__file__).parents[2]


@pytest.mark.spec("CNT-12", "CNT-13")
@pytest.mark.parametrize("page", ["README.md", "docs/counters.md", "docs/profiles.md"])
def test_the_python_of_a_page_runs_with_the_example_catalog(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(EXAMPLE, tmp_path / "counters.proto")
    (tmp_path / "keyfold.toml").write_text("[orders.units.rides]\ndedupe_days = 20\n")  # pages share one file
    monkeypatch.setenv("KEYFOLD_STORE_URL", "sqlite:///pages.db")
    monkeypatch.setenv("KEYFOLD_PROFILES_CATALOG", "counters.proto")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        ran = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
