"""Backfill: historical orders from Parquet into the history part of cells on PostgreSQL, all four identity types.

10 M orders (KEYFOLD_BENCH_BACKFILL for another number) of a tenth as many people, each with a phone, an account, a card
and a device, in 54 combinations of tariff, brand and payment type by Zipf 1; a card is missing in a third of them.
`keyfold.orders.service.backfilling.backfill` runs in a process of its own, as `keyfold orders backfill` would, with its
checks of the file before and its comparison of sums afterwards in the measure; every step is committed and synced. An
order counts once in the rate, although it is set for four identities. The memory is the most that this process ever
had (`ru_maxrss`), DuckDB included, PostgreSQL not. No peer. `python -m bench.backfill` does one round and tells more.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from bench import stores
from bench.b4_order_intake import BRANDS, PAYMENTS, TARIFFS, orders_at
from bench.harness import Goal, Race, Side
from keyfold.core import memory
from keyfold.core.times import iso
from keyfold.orders.service.backfilling import backfill
from keyfold.orders.service.history import names_of
from keyfold.orders.service.history import opened as history_of
from keyfold.orders.settings import RIDES_IDENTITIES

OPTION = "KEYFOLD_BENCH_BACKFILL"
ORDERS_OF_PERSON = 10
SIDE = "backfill"

# Draws are hashes of the row's number: the same file every time, whatever the number of threads.
WRITE = """
COPY (
  SELECT
    md5(number::varchar) AS id,
    TIMESTAMPTZ '2026-01-01 00:00:00+00' + INTERVAL 1 SECOND * (hash(number, 1) % 20000000) AS created_proc,
    'phone-' || person AS user_phone_id,
    'uid-' || person AS user_uid,
    CASE WHEN hash(number, 2) % 3 > 0 THEN 'card-' || person END AS payment_tech_main_card_persistent_id,
    'device-' || person AS device_id,
    {tariff} AS performer_tariff_class,
    {brand} AS brand,
    {payment} AS payment_tech_type
  FROM (SELECT range AS number, (hash(range, 0) % {people})::varchar AS person FROM range({orders}))
) TO '{path}' (FORMAT parquet, COMPRESSION zstd)
"""


def races(quick: bool) -> Iterator[Race]:
    orders = int(os.environ.get(OPTION, 100_000 if quick else 10_000_000))
    told: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="keyfold-bench-") as folder, stores.postgres() as new_url:
        path = Path(folder) / "orders.parquet"
        write(path, orders)

        def run() -> float:
            told.append(run_alone(new_url(), path))
            return orders / float(told[-1]["seconds"])

        title = f"backfill of {orders:,} orders × 4, PostgreSQL"
        yield Race(title=title, unit="orders/s", sides=[Side(SIDE, run)])
        megabytes = iter([each["megabytes"] for each in told])  # of the same runs
        yield Race(
            title=f"{title}, peak memory",
            unit="MB",
            sides=[Side(SIDE, lambda: next(megabytes))],
            goals=[Goal(side=SIDE, against=None, note=f"{told[-1]['cells']:,} cells")],
            better="less",
        )


def write(path: Path, orders: int) -> None:
    """History under the names of the table of finished rides."""
    import duckdb

    chosen = {"tariff": TARIFFS, "brand": BRANDS, "payment": PAYMENTS}
    given = {name: _by_zipf(values, seed) for seed, (name, values) in enumerate(chosen.items(), 3)}
    people = max(1, orders // ORDERS_OF_PERSON)
    with duckdb.connect() as connection:
        connection.execute(WRITE.format(**given, people=people, orders=orders, path=path))


def _by_zipf(values: tuple[str, ...], seed: int) -> str:
    """SQL that draws one of the values, the first most often."""
    weights = [60 // rank for rank in range(1, len(values) + 1)]
    draw, bound, cases = f"hash(number, {seed}) % {sum(weights)}", 0, ""
    for value, weight in zip(values, weights, strict=True):
        bound += weight
        cases += f" WHEN {draw} < {bound} THEN '{value}'"
    return f"CASE{cases} END"


def run_alone(url: str, path: Path) -> dict[str, Any]:
    """One backfill in a process of its own."""
    root = str(Path(__file__).parent.parent)
    program = f"from bench.backfill import measure; measure({url!r}, {str(path)!r})"
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def measure(url: str, path: str) -> None:
    """The program of that process."""
    memory.settle()
    start = datetime.now(UTC) + timedelta(seconds=5)
    options = {"start": iso(int(start.timestamp()) * 1_000_000), "start_lead_seconds_min": 0, "future_seconds_max": 0}
    with orders_at(url, **options) as (context, unit):
        before = _megabytes()
        started = time.perf_counter()
        state = context.store.read(unit.stood).state
        history = history_of(unit, path, names_of(unit, state, RIDES_IDENTITIES))
        done = backfill(context.store, unit, history, RIDES_IDENTITIES)
        seconds = time.perf_counter() - started
        assert sum(each.orders for each in done) == _orders(path)
        told = {
            "seconds": seconds,
            "megabytes": _megabytes(),
            "megabytes_before": before,
            "orders": sum(each.orders for each in done),
            "cells": sum(each.cells for each in done),
            "steps": sum(each.steps for each in done),
        }
    print(json.dumps(told))


def _orders(path: str) -> int:
    """What must have been counted: every order once for each identity that it has."""
    import duckdb

    counts = "count(user_phone_id) + count(user_uid) + count(payment_tech_main_card_persistent_id) + count(device_id)"
    row = duckdb.execute(f"SELECT {counts} FROM read_parquet('{path}')").fetchone()
    assert row is not None
    return int(row[0])


def _megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    orders = int(os.environ.get(OPTION, 100_000))
    with tempfile.TemporaryDirectory(prefix="keyfold-bench-") as folder, stores.postgres() as new_url:
        path = Path(folder) / "orders.parquet"
        write(path, orders)
        told = run_alone(new_url(), path)
        size = path.stat().st_size / 2**20
    print(f"{orders:,} orders ({size:.0f} MB of Parquet), {orders / told['seconds']:,.0f} orders/s, {told}")


if __name__ == "__main__":
    main()
