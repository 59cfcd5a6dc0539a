"""The page on order statistics: its coupon service runs, and every setting of a unit is told."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from keyfold.orders.settings import UnitSettings
from tests.acceptance.served import Served, serving, token_for

PAGE = (Path(__file__).parents[2] / "docs/orders.md").read_text(encoding="utf-8")


def test_every_setting_of_a_unit_is_told() -> None:
    told = set(re.findall(r"^\| `([a-z_]+)` \|", PAGE, re.MULTILINE))
    assert set(UnitSettings.__struct_fields__) <= told


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, module_url: str) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("coupons"), {"KEYFOLD_STORE_URL": module_url}) as server:
        yield server


@pytest.mark.spec("ORD-13", "ORD-14")
def test_the_coupon_service_grants_the_first_three_rides_and_fails_closed(served: Served, tmp_path: Path) -> None:
    token = token_for(served.store_url, ["ingest", "read"])
    (tmp_path / "coupons.py").write_text(re.findall(r"```python\n(# coupons.py.*?)```", PAGE, re.DOTALL)[0])

    def coupons(line: str, url: str = served.url) -> str:
        ran = subprocess.run(
            [sys.executable, "-c", f"from coupons import *; print({line})"],
            cwd=tmp_path,
            env={**os.environ, "KEYFOLD_URL": url, "KEYFOLD_TOKEN": token},
            capture_output=True,
            text=True,
            check=True,
        )
        return ran.stdout.strip()

    def complete(order_id: str, device: str) -> None:
        order = {
            "order_id": order_id,
            "created_at": datetime.now(UTC).isoformat(),
            "identities": {"phone_id": "p", "device_id": device},
            "properties": {"tariff": "econom"},
        }
        assert served.call("POST", "/v1/orders/completed", token, json={"orders": [order]}).json()["accepted"] == 1

    grants = "[grant(each, 'econom', 'p', None, 'd') for each in ('r1', 'r2', 'r3', 'r4')]"
    assert coupons(grants) == "[True, True, True, False]"
    assert coupons("grant('r5', 'business', 'p', None, 'd')") == "True"
    complete("r1", "d")
    complete("r2", "d")
    assert coupons("(cancel('r3'), grant('r4', 'econom', 'other', None, 'd'))[1]") == "True", (
        "another phone, same device"
    )
    complete("r4", "d")
    assert coupons("grant('r6', 'econom', 'new', None, 'd')") == "False"
    assert coupons("grant('r7', 'econom', 'fresh', None, None)", url="http://127.0.0.1:1") == "False"
