"""Runs of numbering for tests: offers and shops as files, random histories, and what the oracle says of each."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Struct

from keyfold.bulk.folders import Root
from keyfold.numbering import model
from keyfold.numbering.model import Held, Key, Outcome, Place, State
from keyfold.numbering.service import running
from keyfold.numbering.service.running import Request
from keyfold.numbering.service.states import Shard, Stored, Summary
from keyfold.numbering.sharding import By, Scheme, shard_of

SCHEMES = [
    Scheme(number=number, by=by, shards=shards)
    for number, (by, shards) in enumerate(
        list[tuple[By, int]]([("offer", 3), ("business", 2), ("shop_tier", 4), ("offer", 1)])
    )
]
IDS = [0, 1, 9, 10, 2**31, 2**63 - 1]
# Java's own strings put an emoji before "\uffff", a language's collation "a" before "Z".
TEXTS = [
    *("a", "Z", "b", "ab", "a b", " ", "é", "e\u0301", "ß", "ss", "it's", '"', "a/b", "/", "\\", "%", "_", "\n", "\t"),
    *("0", "00", "10", "9", "-1", "null", "\u200b", "\uffff", "😀", "\U0010ffff", "日本", "x" * 300),
]
TIERS = [None, "", "small", "large"]


class Step(Struct, frozen=True, kw_only=True):
    """One run of a history: what it reads, and what it is asked."""

    offers: Mapping[Key, str | None]  # each with its own tier
    is_tier_given: bool
    shops: Mapping[int, str | None] | None
    scheme: Scheme
    ttl_runs: int
    rebuild_ratio: float
    is_forced: bool
    is_restart: bool
    rebuild_min: int

    def shard_of(self, key: Key) -> int:
        own = self.offers.get(key) if self.is_tier_given else None
        return shard_of(self.scheme, key, {"tier": own or (self.shops or {}).get(key.shop_id) or ""})


def history(random: Random, runs: int, keys_max: int = 40) -> list[Step]:
    """Runs over keys that come, leave and come back."""
    keys = sorted({some_key(random) for _ in range(random.randint(1, keys_max))})
    scheme, steps = random.choice(SCHEMES), []
    for _ in range(runs):
        if random.random() < 0.2:
            scheme = random.choice(SCHEMES)
        share = random.choice([0.0, 0.2, 0.5, 0.8, 0.9, 1.0])
        steps.append(
            Step(
                offers={key: random.choice(TIERS) for key in keys if random.random() < share},
                is_tier_given=random.random() < 0.5,
                shops={each: random.choice(TIERS) for each in IDS if random.random() < 0.7}
                if random.random() < 0.6
                else None,
                scheme=scheme,
                ttl_runs=random.randint(0, 3),
                rebuild_ratio=random.choice([1.0, 1.5, 3.0, 1e6, 1e6]),
                is_forced=random.random() < 0.1,
                is_restart=random.random() < 0.15,
                rebuild_min=random.choice([0, 0, 0, 7]),
            )
        )
    return steps


def every_rule() -> list[Step]:
    """A short history in which every rule of a run is used: keys expire, their places are given again, and a state is
    rebuilt because of its holes, and by force with another scheme."""
    keys = [Key(IDS[at % 5], text, IDS[at % 3], IDS[at % 2]) for at, text in enumerate(TEXTS)]
    usual: dict[str, Any] = {
        "is_tier_given": False,
        "shops": None,
        "scheme": SCHEMES[0],
        "ttl_runs": 5,
        "rebuild_ratio": 1e6,
        "is_forced": False,
        "is_restart": False,
        "rebuild_min": 0,
    }

    def step(chosen: Sequence[Key], **given: Any) -> Step:
        return Step(offers={key: TIERS[at % 4] for at, key in enumerate(chosen)}, **(usual | given))

    tiers = dict(zip(IDS, [*TIERS, *TIERS], strict=False))
    return [
        step(keys[:20]),
        step(keys[4:28], ttl_runs=0),
        step(keys[20:], rebuild_ratio=1.0),
        step(keys[5:28], scheme=SCHEMES[2], is_tier_given=True, shops=tiers, is_forced=True),
    ]


def some_key(random: Random) -> Key:
    text = random.choice(TEXTS)
    if random.random() < 0.3:
        text += chr(random.choice([*range(1, 0x250), *range(0x1F300, 0x1F350)]))
    return Key(random.choice(IDS), text, random.choice(IDS), random.choice(IDS))


def write_offers(file: Path, keys: Iterable[Key], tiers: Sequence[str | None] | None = None, **columns: Any) -> str:
    """A Parquet file of offers; `columns` replace those of the keys, or come besides."""
    rows = list(keys)
    table: dict[str, Any] = {
        name: pa.array([getattr(key, name) for key in rows], pa.string() if name == "offer_id" else pa.int64())
        for name in Key._fields
    }
    if tiers is not None:
        table["tier"] = pa.array(list(tiers), pa.string())
    table |= columns
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({name: column for name, column in table.items() if column is not None}), file)
    return str(file)


def write_shops(file: Path, shops: Mapping[int, str | None]) -> str:
    records = (f"#shop_id\t{shop}\n" + (f"tier\t{tier}\n" if tier is not None else "") for shop, tier in shops.items())
    file.write_text("\n".join(records))
    return str(file)


def request(offers: str, target: Root | Path | str, before: Stored | None = None, **given: Any) -> Request:
    """A run as it is usually asked for, but for what is given."""
    usual: dict[str, Any] = {"type": 1, "scheme": SCHEMES[0], "ttl_runs": 2, "rebuild_ratio": 1e6, "megabytes_max": 500}
    root = target if isinstance(target, Root) else Root(str(target))
    return Request(offers=offers, target=root, before=before, **(usual | given))


def run_step(step: Step, folder: Path, name: str, before: Stored | None, **given: Any) -> Stored:
    """Do one run of a history."""
    offers = list(step.offers)
    url = write_offers(
        folder / f"{name}.parquet", offers, [step.offers[key] for key in offers] if step.is_tier_given else None
    )
    return running.run(
        request(
            url,
            folder / name,
            before,
            shops=write_shops(folder / f"{name}.shops", step.shops) if step.shops is not None else "",
            scheme=step.scheme,
            ttl_runs=step.ttl_runs,
            rebuild_ratio=step.rebuild_ratio,
            is_forced=step.is_forced,
            is_restart=step.is_restart and before is not None,
            rebuild_min=step.rebuild_min,
            is_shrinking_allowed=True,
            **given,
        )
    )


def expect(step: Step, before: State | None) -> Outcome:
    """What the oracle makes of it."""
    rules = model.Rules(
        type=1,
        scheme=step.scheme.number,
        ttl_runs=step.ttl_runs,
        rebuild_ratio=step.rebuild_ratio,
        is_forced=step.is_forced,
        is_restart=step.is_restart and before is not None,
        rebuild_min=step.rebuild_min,
    )
    return model.number(before, step.offers, rules, step.shard_of)


def rows(state: Stored, table: str) -> list[dict[str, Any]]:
    """The rows of a table, on whatever file system it is."""
    found: list[dict[str, Any]] = []
    for entry in state.listed(table):
        path = f"{state.path}/{entry.path}" if state.path else entry.path
        with state.root.open(path) as file:
            found.extend(pq.ParquetFile(file).read().to_pylist())
    return found


def places(state: Stored, table: str = "places") -> dict[Key, Held]:
    found = rows(state, table)
    held = {
        Key(*(row[name] for name in Key._fields)): Held(
            Place(row["shard_id"], row["doc_id"]), row["generation"], row["is_reused"], row["seen_run"]
        )
        for row in found
    }
    assert len(held) == len(found), "a key has two places"
    return held


def outcome(state: Stored) -> Outcome:
    """What a run has written, in the words of the oracle."""
    manifest = state.manifest
    free = [Place(row["shard_id"], row["doc_id"]) for row in rows(state, "free")]
    moved = [
        (Place(row["old_shard_id"], row["old_doc_id"]), Place(row["shard_id"], row["doc_id"]))
        for row in rows(state, "remap")
    ]
    assert len(set(free)) == len(free)
    assert len(dict(moved)) == len(moved)
    return Outcome(
        State(
            state.version,
            manifest.run,
            places(state),
            frozenset(free),
            {shard.shard_id: shard.size for shard in manifest.shards},
        ),
        manifest.reason,
        places(state, "new_docs"),
        places(state, "expired_docs"),
        dict(moved),
    )


def shards(state: State) -> list[Shard]:
    """What a manifest must say of the shards of a state."""
    found = []
    for number in sorted(state.sizes):
        held = [each for each in state.places.values() if each.place.shard_id == number]
        found.append(
            Shard(
                number,
                state.sizes[number],
                max((each.place.doc_id + 1 for each in held), default=0),
                len(held),
                sum(each.seen_run == state.run for each in held),
                sum(place.shard_id == number for place in state.free),
            )
        )
    return found


def summary(expected: Outcome, before: State | None, bytes_written: int) -> Summary:
    """What a manifest must say of a run."""
    state = expected.state
    seen = sum(held.seen_run == state.run for held in state.places.values())
    freed = (before.free if before else frozenset()) | {held.place for held in expected.expired.values()}
    return Summary(
        seen - len(expected.new),
        len(state.places) - seen,
        len(expected.new),
        sum(held.place in freed for held in expected.new.values()) if expected.reason in ("", "restart") else 0,
        len(expected.expired),
        sum(shard.top for shard in shards(state)) - seen,
        bytes_written,
    )


def leftovers(folder: Path) -> list[str]:
    """What unfinished runs have left below a folder."""
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if ".writing-" in path.name]
