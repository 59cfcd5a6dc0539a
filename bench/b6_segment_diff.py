"""Segment diff: two sorted snapshots of user ids, streamed in constant memory, against DuckDB and `comm`.

Snapshots hold random unsigned numbers of 64 bits; one id in two hundred is only in the old one, as many only in the
new one. Files are Parquet as the product writes them, on the same disk and read once before.

"check and chunks" is what a tick does: a first pass that checks that ids ascend and counts, then a second that checks
again and hands out the changed users in chunks of 5,000 with their ids as text. "one pass" is the second alone. DuckDB
(two threads) does `EXCEPT` both ways over the same files, in a connection made for it, with its results fetched as
Arrow; it does not check that ids are sorted, and needs no order. `comm -3` reads the ids as text of 20 digits, sorted,
and writes what differs to a pipe that is read; it checks the order as it goes. All three must find the same.

Memory is the peak resident size of a process that does both passes, of the large snapshots less that of small ones.
`KEYFOLD_BENCH_ROWS` and `KEYFOLD_BENCH_ROWS_LARGE` set the sizes (20 M and 200 M; 2 M is the small one).
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.harness import Goal, Race, Side, seconds
from keyfold.segments.difference import Chunk, Keys, chunked, difference
from keyfold.segments.service.snapshots import Location, Reading, Snapshot, Snapshots
from keyfold.segments.settings import SegmentsSettings

STEP = 1_000_000  # ids made at a time
SMALL = 2_000_000
OURS, ONE_PASS, DUCKDB, COMM = "check and chunks", "one pass", "DuckDB EXCEPT both ways", "comm -3"
MEMORY = "200 M rows less 2 M rows"


class Pair:
    """Two snapshots below a folder."""

    def __init__(self, folder: Path, rows: int) -> None:
        self.folder = folder
        self.rows = rows
        self.old, self.new = folder / "old", folder / "new"
        self._make()

    def _make(self) -> None:
        schema = pa.schema([("user_id", pa.uint64())])
        for path in (self.old, self.new):
            path.mkdir(parents=True)
        chance = np.random.default_rng(6)
        gap = 2**64 // (self.rows + self.rows // 100)
        at = 0
        with (
            pq.ParquetWriter(self.old / "0000.parquet", schema, use_dictionary=False, compression="lz4") as old,
            pq.ParquetWriter(self.new / "0000.parquet", schema, use_dictionary=False, compression="lz4") as new,
        ):
            for begin in range(0, self.rows, STEP):
                ids = at + np.cumsum(chance.integers(1, 2 * gap - 2, min(STEP, self.rows - begin), dtype=np.uint64))
                at = ids[-1]
                only = chance.random(len(ids))
                for writer, kept in ((old, ids[only >= 0.005]), (new, ids[only < 0.995])):
                    writer.write_table(pa.table({"user_id": kept}), row_group_size=262_144)

    def as_text(self) -> None:
        for path in (self.old, self.new):
            with (self.folder / f"{path.name}.txt").open("wb") as out:
                for batch in pq.ParquetFile(path / "0000.parquet").iter_batches(batch_size=100_000):
                    out.write(b"".join(b"%020d\n" % each for each in batch.column(0).to_pylist()))

    def chunks(self) -> Iterator[Chunk]:
        return chunked(difference(*self._read()), SegmentsSettings().chunk_users_max)

    def check(self) -> int:
        return sum(len(piece.added) + len(piece.removed) for piece in difference(*self._read()))

    def _read(self) -> tuple[Iterator[Keys], Iterator[Keys]]:
        """As a tick reads them."""
        found = Snapshots(SegmentsSettings(), self.folder)
        old, new = (Reading(found, Snapshot(Location(folder=name), self.rows), name).keys() for name in ("old", "new"))
        return old, new


def both_passes(pair: Pair) -> int:
    expected = pair.check()
    found = sum(len(chunk.user_ids) for chunk in pair.chunks())
    assert found == expected
    return found


def by_duckdb(pair: Pair) -> int:
    import duckdb

    with duckdb.connect() as connection:
        old, new = (f"SELECT user_id FROM '{path / '0000.parquet'}'" for path in (pair.old, pair.new))
        added: Any = connection.execute(f"{new} EXCEPT {old}").to_arrow_table()
        removed: Any = connection.execute(f"{old} EXCEPT {new}").to_arrow_table()
    return len(added) + len(removed)


def by_comm(pair: Pair) -> int:
    files = [str(pair.folder / f"{name}.txt") for name in ("old", "new")]
    with subprocess.Popen(
        ["comm", "-3", *files], env={"LC_ALL": "C", "PATH": os.defpath}, stdout=subprocess.PIPE
    ) as run:
        assert run.stdout is not None
        count = 0
        while read := run.stdout.read(1 << 20):
            count += read.count(b"\n")
    return count


def peak_megabytes(folder: Path) -> float:
    """Of a process of its own that does both passes. (`ru_maxrss` would begin with what its parent had.)"""
    code = (
        "import sys; from pathlib import Path; from bench.b6_segment_diff import Pair, both_passes;"
        "pair = Pair.__new__(Pair); pair.folder, pair.rows = Path(sys.argv[1]), 10**9; both_passes(pair);"
        "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    return float(ran.stdout) / 1024


def races(quick: bool) -> Iterator[Race]:
    rows = int(os.environ.get("KEYFOLD_BENCH_ROWS", 500_000 if quick else 20_000_000))
    large = int(os.environ.get("KEYFOLD_BENCH_ROWS_LARGE", 4_000_000 if quick else 200_000_000))
    with tempfile.TemporaryDirectory(prefix="keyfold-bench-") as directory:
        pair = Pair(Path(directory) / "pair", rows)
        pair.as_text()
        expected = both_passes(pair)
        for way in (by_duckdb, by_comm):
            assert way(pair) == expected, way.__name__

        def side(name: str, work: Any) -> Side:
            return Side(name, lambda: 2 * rows / seconds(lambda: work(pair)))

        yield Race(
            title=f"two snapshots of {rows:,} ids, 1 % changed",
            unit="rows/s",
            sides=[
                side(OURS, both_passes),
                side(ONE_PASS, lambda pair: sum(len(chunk.user_ids) for chunk in pair.chunks())),
                side(DUCKDB, by_duckdb),
                side(COMM, by_comm),
            ],
            goals=[
                Goal(side=OURS, against=DUCKDB, must=3, moonshot=6),
                Goal(side=OURS, against=COMM, must=2, moonshot=4),
                Goal(side=ONE_PASS, against=DUCKDB),
                Goal(side=ONE_PASS, against=COMM),
            ],
        )
        for file in pair.folder.rglob("*.*"):
            file.unlink()
        small, huge = Pair(Path(directory) / "small", SMALL), Pair(Path(directory) / "large", large)
        yield Race(
            title=f"peak memory of {large:,} rows less that of {SMALL:,}",
            unit="MB",
            better="less",
            sides=[Side(MEMORY, lambda: abs(peak_megabytes(huge.folder) - peak_megabytes(small.folder)))],
            goals=[Goal(side=MEMORY, against=None, must=20)],
        )
