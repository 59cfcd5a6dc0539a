"""Orders that were taken back, in files that the engine of history reads."""

import ibis
import pytest

from keyfold.core.errors import BadInput
from keyfold.orders.service import excluding
from keyfold.orders.service.excluding import ORDER_ID, Excluded

pytestmark = pytest.mark.spec("ORD-08", "ORD-16")


def test_they_are_left_out_and_nothing_stays_behind_in_the_engine() -> None:
    engine = ibis.duckdb.connect()
    engine.raw_sql("CREATE TABLE history AS SELECT 'o' || range AS order_id FROM range(10)")
    for pages in ([["o1", "o2"], ["o3"]], [["o9"]]):
        excluded = Excluded(pages)
        left = engine.table("history").anti_join(excluded.table(engine), ORDER_ID).count().execute()
        assert left == 10 - excluded.count
        excluded.close()
        assert engine.list_tables() == ["history"]


def test_what_was_never_asked_for_is_closed_as_well() -> None:
    excluded = Excluded([["o1"]])
    excluded.table(ibis.duckdb.connect())
    excluded.close()
    Excluded().close()


def test_an_engine_that_does_not_read_the_files_is_given_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(excluding, "UPLOADED_MAX", 2)
    engine = ibis.sqlite.connect()
    assert Excluded([["o1"], ["o2"]]).table(engine).count().execute() == 2
    with pytest.raises(BadInput, match="3 orders were taken back, 2 can be left out of a history in sqlite"):
        Excluded([["o1", "o2"], ["o3"]]).table(engine)
