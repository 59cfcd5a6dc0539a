"""Numbering opened for a test: offers as files, clusters as folders, masters that are run by hand."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from keyfold.bulk.folders import Root
from keyfold.core.context import Context, open_store
from keyfold.core.settings import load
from keyfold.core.store import migrate
from keyfold.numbering.model import Key, Place, Published, Record
from keyfold.numbering.part import PART
from keyfold.numbering.service import coordinating, mastering, states
from keyfold.numbering.service.mastering import Master
from keyfold.numbering.service.states import Stored
from keyfold.numbering.settings import NumberingSettings

Offers = Mapping[str, list[Any]]


def key(n: int) -> Key:
    return Key(n // 4, f"offer {n:03}", n % 3, n % 2)


def columns(keys: Iterable[Key], **more: list[Any]) -> Offers:
    listed = list(keys)
    return {name: [getattr(each, name) for each in listed] for name in Key._fields} | more


def write_offers(path: Path, offers: Offers) -> Path:
    types = [(name, pa.string() if name not in Key._fields or name == "offer_id" else pa.int64()) for name in offers]
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(dict(offers), schema=pa.schema(types)), path)
    return path


def rows(state: Stored, table: str) -> list[dict[str, Any]]:
    """The rows of a table of a state, as its files have them."""
    found: list[dict[str, Any]] = []
    for entry in state.listed(table):
        with state.root.open(f"{state.path}/{entry.path}" if state.path else entry.path) as file:
            found.extend(pq.ParquetFile(file).read().to_pylist())
    return found


def places(state: Stored, table: str = "places") -> dict[Key, Place]:
    return {
        Key(*(row[name] for name in Key._fields)): Place(row["shard_id"], row["doc_id"]) for row in rows(state, table)
    }


class Numbering:
    """A product with numbering, and two data centres."""

    def __init__(self, context: Context, folder: Path) -> None:
        self.context = context
        self.folder = folder
        self.settings = context.settings.section("numbering", NumberingSettings)
        self._files = 0

    def offers(self, *numbers: int) -> str:
        return self.written(columns(key(n) for n in numbers))

    def written(self, offers: Offers) -> str:
        self._files += 1
        return str(write_offers(self.folder / "offers" / f"{self._files}.parquet", offers))

    def master(self, cluster: str = "arnold", name: str = "", type_name: str = "main") -> Master:
        return Master(self.context, self.settings, type_name, cluster, name or f"master of {cluster}")

    def run(self, *numbers: int, cluster: str = "arnold", type_name: str = "main", **given: Any) -> Published:
        return self.master(cluster, type_name=type_name).run(self.offers(*numbers), **given)

    def record(self, type_name: str = "main") -> Record:
        return coordinating.look(self.context.leases, type_name)

    def last(self, cluster: str = "", type_name: str = "main") -> Stored:
        current = self.record(type_name).current
        assert current is not None
        found = mastering.stored(self.settings, current, cluster)
        states.verify(found)
        return found

    def root(self, cluster: str) -> Root:
        return mastering.root_of(self.settings, cluster)

    def cluster(self, cluster: str, type_name: str = "main") -> Path:
        return self.folder / cluster / type_name

    def names(self, cluster: str) -> list[str]:
        folder = self.cluster(cluster)
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@contextmanager
def opened(url: str, folder: Path, *, options: Mapping[str, object] = {}, **given: Any) -> Iterator[Numbering]:
    """A product on the store at `url`, with the settings of numbering that are given."""
    said: dict[str, Any] = {
        "clusters": {"arnold": str(folder / "arnold"), "hahn": str(folder / "hahn")},
        "schemes": {"0": {"by": "offer", "shards": 3}, "1": {"by": "business", "shards": 2}},
        "ttl_runs": 2,
        "rebuild_ratio": 1_000,
        "engine_megabytes_max": 500,
        "retry_seconds": 1,
    }
    settings = load(
        parts={"numbering": NumberingSettings},
        environ={},
        options={
            "store.url": url,
            **{f"numbering.{name}": value for name, value in (said | given).items()},
            **options,
        },
    )
    store = open_store(settings)
    migrate.upgrade(store)
    store.close()
    context = Context.open(settings, [PART])
    try:
        yield Numbering(context, folder)
    finally:
        context.close()
