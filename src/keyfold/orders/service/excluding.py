"""Orders that were taken back: history still has them, and whoever counts it leaves them out.

They are never purged, so that this process must not hold them all: their ids go page by page into Parquet files, which
the engine of history reads itself.
"""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from keyfold.core.errors import BadInput
from keyfold.core.store import Store, Transaction
from keyfold.orders.service.unit import Unit

if TYPE_CHECKING:
    import ibis.expr.types as ir
    from pyarrow.dataset import Dataset

PAGE_ROWS = 50_000  # looked at in one read
UPLOADED_MAX = 1_000_000  # given to an engine that does not read our files
ORDER_ID = "order_id"


def corrected(store: Store, unit: Unit) -> Iterator[list[str]]:
    """The orders that were taken back, in bounded pages; one that is taken back meanwhile may be among them."""
    after, is_last = "", False
    while not is_last:
        page = store.read(partial(_page_of_corrected, unit=unit, after=after))
        is_last = len(page) < PAGE_ROWS
        if page:
            yield page
            after = page[-1]


def _page_of_corrected(tx: Transaction, unit: Unit, after: str) -> list[str]:
    order_id = unit.tables.corrections.c.order_id
    return list(tx.execute(sa.select(order_id).where(order_id > after).order_by(order_id).limit(PAGE_ROWS)).scalars())


class Excluded:
    """Ids of orders in files of their own, which go when it is closed."""

    def __init__(self, pages: Iterable[Sequence[str]] = ()) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="keyfold-excluded-", ignore_cleanup_errors=True)
        self._table: ir.Table | None = None
        self._duckdb: Any = None
        self.count = 0
        try:
            for number, page in enumerate(pages):
                _write(Path(self._folder.name) / f"{number}.parquet", page)
                self.count += len(page)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._duckdb is not None and self._table is not None:
            self._duckdb.con.unregister(self._table.get_name())  # it may be a connection of the user's
        self._folder.cleanup()

    def files(self) -> "Dataset":
        """The ids as they lie there."""
        import pyarrow as pa
        from pyarrow import dataset

        return dataset.dataset(self._folder.name, pa.schema([(ORDER_ID, pa.string())]), format="parquet")

    def table(self, engine: Any) -> "ir.Table":
        """The ids as a table of an expression that the engine computes."""
        if self._table is None:
            self._table = self._read_by(engine)
        return self._table

    def _read_by(self, engine: Any) -> "ir.Table":
        import ibis

        if engine.name == "duckdb":
            self._duckdb = engine
            return ibis.memtable(self.files())
        if self.count > UPLOADED_MAX:
            raise BadInput(
                f"{self.count} orders were taken back, {UPLOADED_MAX} can be left out of a history in {engine.name}",
                place="history",
                hint="Write history to Parquet files, and name those",
            )
        return ibis.memtable(self.files().to_table())


def _write(file: Path, order_ids: Sequence[str]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({ORDER_ID: pa.array(order_ids, pa.string())}), file)
