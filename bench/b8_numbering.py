"""Numbering: one run over 10 M places and 9 M offers, against hand-written DuckDB SQL and pandas.

Before the run there are 10 M places in 8 shards. Of the 9 M offers 10 % are new; 10 % of the places expire in this run,
the rest of those that are not in the input are kept. Offers and the state before are Parquet files on the same disk,
read once before. Every side reads them, gives the new keys freed places first and then the next, in the order of their
keys, and writes four tables as Parquet (zstd): places, free places, new and expired documents. All must agree.

"keyfold" is the run as `keyfold number run` does it: it also compares the checksums of the state before, refuses
repeated and broken keys, counts what the manifest says, checks whether a shard must be compacted, syncs every file,
takes their checksums, and publishes the whole by a rename. The hand-written SQL (DuckDB, two threads, the same memory)
and pandas do none of that; pandas keeps everything in memory and shards new keys by `hashlib`.

`KEYFOLD_BENCH_PLACES` sets the places (10 M), `KEYFOLD_BENCH_PLACES_LARGE` those of the second size (50 M), which is
compared with the first: a side that is linear does as many places a second. Memory is the peak resident size of a
process that does nothing else; DuckDB is given 8 GB.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb

from bench.harness import Goal, Race, Side
from keyfold.bulk.folders import Draft, Root
from keyfold.numbering.service import running, states
from keyfold.numbering.service.states import Manifest, Shard, Stored, Summary
from keyfold.numbering.sharding import DIGITS, Scheme

SCHEME = Scheme(number=0, by="offer", shards=8)
RUN, TTL = 21, 10
MEGABYTES = 8_000
OURS, SQL, PANDAS = "keyfold", "hand-written SQL", "pandas"
KEY = "business_id, offer_id, shop_id, warehouse_id"
COPY = "(FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE 122880, PER_THREAD_OUTPUT true)"


def shard_sql() -> str:
    """The scheme in DuckDB's own words."""
    text = "business_id || '/' || shop_id || '/' || warehouse_id || '/' || offer_id"
    return f"(('0x' || md5({text})[1:{DIGITS}])::BIGINT % {SCHEME.shards})::INTEGER"


class Work:
    """A state and a generation of offers below a folder."""

    def __init__(self, folder: Path, places: int) -> None:
        self.folder, self.places = folder, places
        self.offers = folder / "offers"
        self.root = Root(str(folder / "state"))

    def make(self) -> None:
        self.folder.mkdir(parents=True)
        with connected(self.folder) as db:
            db.execute(
                f"""CREATE TEMP VIEW keys AS SELECT range AS n, (range * 7919) % 100003 AS business_id,
                    'offer-' || md5(range::VARCHAR)[1:10] AS offer_id, (range * 104729) % 200003 AS shop_id,
                    range % 50 AS warehouse_id FROM range({self.places + self.places * 9 // 100})"""
            )
            draft = Draft(self.root, "", None)
            # Of ten places: one was not seen for too long, 0.9 were not seen of late, 8.1 are in the input.
            db.execute(
                f"""COPY (SELECT {KEY}, shard_id,
                      (row_number() OVER (PARTITION BY shard_id ORDER BY n) - 1)::INTEGER AS doc_id,
                      0::INTEGER AS generation, false AS is_reused,
                      (CASE WHEN n % 100 < 10 THEN {RUN - TTL - 1} WHEN n % 100 < 19 THEN {RUN - 2}
                            ELSE {RUN - 1} END)::BIGINT AS seen_run
                    FROM (SELECT *, {shard_sql()} AS shard_id FROM keys WHERE n < {self.places}))
                    TO '{draft.folder / "places"}' {COPY}"""
            )
            db.execute(
                f"""COPY (SELECT {KEY} FROM keys WHERE n >= {self.places} OR n % 100 >= 19)
                    TO '{self.offers}' {COPY}"""
            )
            found = db.execute(
                f"""SELECT shard_id, count(*), max(doc_id) + 1, sum((seen_run = {RUN - 1})::INTEGER)
                    FROM '{draft.folder}/places/*.parquet' GROUP BY ALL ORDER BY ALL"""
            ).fetchall()
        for name in states.TABLES:
            (draft.folder / name).mkdir(exist_ok=True)
        manifest = Manifest(
            version="1.0.0.0",
            run=RUN - 1,
            scheme=SCHEME,
            reason="",
            parent="",
            engine="duckdb",
            ttl_runs=TTL,
            shards=[Shard(shard, top, top, count, int(seen), 0) for shard, count, top, seen in found],
            summary=Summary(0, 0, 0, 0, 0, 0, 0),
            files=draft.files(),
        )
        draft.publish(states.encoded(manifest))

    def state(self) -> Stored:
        return states.read(self.root)


def connected(folder: Path) -> Any:
    return duckdb.connect(
        config={
            "memory_limit": f"{MEGABYTES}MB",
            "temp_directory": str(folder / "spill"),
            "preserve_insertion_order": "false",
        }
    )


def by_keyfold(work: Work, target: Path) -> None:
    running.run(
        running.Request(
            offers=str(work.offers),
            before=work.state(),
            target=Root(str(target)),
            type=1,
            scheme=SCHEME,
            ttl_runs=TTL,
            rebuild_ratio=1.5,
            megabytes_max=MEGABYTES,
        )
    )


def by_sql(work: Work, target: Path) -> None:
    """What somebody who knows DuckDB would write for this one job."""
    target.mkdir()
    with connected(target) as db:
        db.execute(f"CREATE VIEW places AS FROM '{work.folder}/state/places/*.parquet'")
        db.execute(f"CREATE VIEW offers AS FROM '{work.offers}/*.parquet'")
        db.execute(
            f"""CREATE TEMP TABLE fresh AS SELECT {KEY}, {shard_sql()} AS shard_id
                FROM offers ANTI JOIN places USING ({KEY})"""
        )
        db.execute(
            f"""CREATE TEMP TABLE gone AS FROM (FROM places WHERE seen_run < {RUN - TTL})
                ANTI JOIN offers USING ({KEY})"""
        )
        db.execute(
            f"""COPY (SELECT p.* REPLACE (CASE WHEN o.business_id IS NULL THEN p.seen_run ELSE {RUN} END AS seen_run)
                FROM places p LEFT JOIN offers o USING ({KEY})
                WHERE o.business_id IS NOT NULL OR p.seen_run >= {RUN - TTL}) TO '{target}/places' {COPY}"""
        )
        db.execute(
            f"""CREATE TEMP TABLE given AS
                WITH sizes AS (SELECT shard_id, max(doc_id) + 1 AS size FROM places GROUP BY ALL),
                     free AS (SELECT shard_id, doc_id, row_number() OVER (PARTITION BY shard_id ORDER BY doc_id) AS rank
                              FROM gone),
                     frees AS (SELECT shard_id, count(*) AS frees FROM gone GROUP BY ALL),
                     waiting AS (SELECT *, row_number() OVER (PARTITION BY shard_id ORDER BY {KEY}) AS rank FROM fresh)
                SELECT {KEY}, shard_id, coalesce(free.doc_id, size + rank - 1 - coalesce(frees, 0))::INTEGER AS doc_id,
                       1::INTEGER AS generation, free.doc_id IS NOT NULL AS is_reused, {RUN}::BIGINT AS seen_run
                FROM waiting LEFT JOIN free USING (shard_id, rank) JOIN sizes USING (shard_id)
                LEFT JOIN frees USING (shard_id)"""
        )
        db.execute(f"COPY given TO '{target}/new_docs' {COPY}")
        db.execute(f"COPY gone TO '{target}/expired_docs' {COPY}")
        db.execute(
            f"""COPY (SELECT shard_id, doc_id FROM gone ANTI JOIN given USING (shard_id, doc_id))
                TO '{target}/free' {COPY}"""
        )
    for number, file in enumerate(sorted((target / "new_docs").iterdir())):
        (target / "places" / f"given_{number}.parquet").hardlink_to(file)


def by_pandas(work: Work, target: Path) -> None:
    import hashlib

    import numpy as np
    import pandas as pd

    target.mkdir()
    key = KEY.split(", ")
    places = pd.read_parquet(work.folder / "state" / "places")
    offers = pd.read_parquet(work.offers)
    joined = places.merge(offers, on=key, how="outer", indicator=True)
    del places, offers
    seen, is_new = joined["_merge"] != "left_only", joined["_merge"] == "right_only"
    fresh = joined.loc[is_new, key].sort_values(key)
    old = joined[~is_new].drop(columns="_merge")
    seen = seen[~is_new]
    del joined
    old = old.astype({"shard_id": "int32", "doc_id": "int32", "generation": "int32", "is_reused": "bool"})
    expired = ~seen & (old["seen_run"] < RUN - TTL)
    sizes = old.groupby("shard_id")["doc_id"].max() + 1
    gone, kept = old[expired], old[~expired].copy()
    kept["seen_run"] = np.where(seen[~expired], RUN, kept["seen_run"]).astype("int64")
    text = (f"{b}/{s}/{w}/{o}".encode() for b, o, s, w in fresh.itertuples(index=False))
    fresh["shard_id"] = np.fromiter(
        (int(hashlib.md5(each).hexdigest()[:DIGITS], 16) % SCHEME.shards for each in text), "int32", len(fresh)
    )
    fresh["rank"] = fresh.groupby("shard_id").cumcount()
    free = gone[["shard_id", "doc_id"]].sort_values(["shard_id", "doc_id"])
    free["rank"] = free.groupby("shard_id").cumcount()
    given = fresh.merge(free, on=["shard_id", "rank"], how="left")
    frees = given["shard_id"].map(free.groupby("shard_id").size()).fillna(0)
    given["is_reused"] = given["doc_id"].notna()
    after = given["shard_id"].map(sizes) + given["rank"] - frees
    given["doc_id"] = given["doc_id"].fillna(after).astype("int32")
    given["generation"], given["seen_run"] = np.int32(1), np.int64(RUN)
    given = given[list(kept.columns)]
    taken = fresh.groupby("shard_id").size()
    left = free[free["rank"] >= free["shard_id"].map(taken).fillna(0)][["shard_id", "doc_id"]]
    for name, table in (
        ("places", pd.concat([kept, given])),
        ("new_docs", given),
        ("expired_docs", gone),
        ("free", left),
    ):
        (target / name).mkdir()
        table.to_parquet(target / name / "0.parquet", compression="zstd", index=False)


WAYS: dict[str, Callable[[Work, Path], None]] = {OURS: by_keyfold, SQL: by_sql, PANDAS: by_pandas}


def same(work: Work, one: Path, other: Path) -> None:
    with connected(work.folder) as db:
        for name in ("places", "free", "new_docs", "expired_docs"):
            left, right = (f"(SELECT * FROM '{each}/{name}/*.parquet')" for each in (one, other))
            count, differing = db.execute(
                f"SELECT (SELECT count(*) FROM {left}), (SELECT count(*) FROM ({left} EXCEPT ALL {right}))"
                f" + (SELECT count(*) FROM ({right} EXCEPT ALL {left}))"
            ).fetchone() or (0, 0)
            assert differing == 0, f"{name}: {differing} of {count} rows differ between {one.name} and {other.name}"


def timed(work: Work, way: str) -> float:
    target = work.folder / f"out-{time.monotonic_ns()}"
    begin = time.perf_counter()
    WAYS[way](work, target)
    took = time.perf_counter() - begin
    shutil.rmtree(target)
    return took


def peak_megabytes(work: Work, way: str) -> float:
    code = (
        "import sys; from pathlib import Path; from bench.b8_numbering import Work, timed;"
        "timed(Work(Path(sys.argv[1]), int(sys.argv[2])), sys.argv[3]);"
        "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])"
    )
    command = [sys.executable, "-c", code, str(work.folder), str(work.places), way]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(ran.stdout.split()[-1]) / 1024  # behind what DuckDB draws while it works


def races(quick: bool) -> Iterator[Race]:
    places = int(os.environ.get("KEYFOLD_BENCH_PLACES", 500_000 if quick else 10_000_000))
    large = int(os.environ.get("KEYFOLD_BENCH_PLACES_LARGE", 2_500_000 if quick else 50_000_000))
    with tempfile.TemporaryDirectory(prefix="keyfold-bench-") as directory:
        work = Work(Path(directory) / "work", places)
        work.make()
        made = {way: work.folder / way.replace(" ", "-") for way in WAYS}
        for way, target in made.items():
            WAYS[way](work, target)
            same(work, made[OURS], target)
        for target in made.values():
            shutil.rmtree(target)
        yield Race(
            title=f"{places:,} places, {places * 9 // 10:,} offers, 10 % new, 10 % expired",
            unit="places/s",
            sides=[Side(way, lambda way=way: places / timed(work, way)) for way in WAYS],  # type: ignore[misc]
            goals=[
                Goal(side=OURS, against=SQL, must=1 / 1.2, moonshot=1, note="at most 1.2 times its time"),
                Goal(side=OURS, against=PANDAS, must=5),
            ],
        )
        yield Race(
            title=f"peak memory, {places:,} places",
            unit="MB",
            better="less",
            sides=[Side(OURS, lambda: peak_megabytes(work, OURS)), Side(SQL, lambda: peak_megabytes(work, SQL))],
        )
        larger = Work(Path(directory) / "larger", large)
        larger.make()
        small, huge = f"{OURS}, {places:,}", f"{OURS}, {large:,}"
        yield Race(
            title=f"growth to {large:,} places",
            unit="places/s",
            sides=[
                Side(small, lambda: places / timed(work, OURS)),
                Side(huge, lambda: large / timed(larger, OURS)),
                Side(f"{SQL}, {large:,}", lambda: large / timed(larger, SQL)),
            ],
            goals=[
                Goal(side=huge, against=small, note="linear: 1x"),
                Goal(side=huge, against=f"{SQL}, {large:,}", must=1 / 1.2, moonshot=1),
            ],
        )
        yield Race(
            title=f"peak memory, {large:,} places",
            unit="MB",
            better="less",
            sides=[Side(OURS, lambda: peak_megabytes(larger, OURS)), Side(SQL, lambda: peak_megabytes(larger, SQL))],
        )
