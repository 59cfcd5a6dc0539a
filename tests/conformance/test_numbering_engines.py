"""Every engine of numbering computes what the oracle says, run after run, whatever the keys and the requests are."""

import signal
from pathlib import Path
from random import Random
from typing import Any

import pytest

from keyfold.bulk.engines import EngineName
from keyfold.bulk.folders import Root
from keyfold.cli.run import run as run_command
from keyfold.core.errors import BadInput
from keyfold.numbering.model import Key, Outcome, State
from keyfold.numbering.service import finding, running, states
from keyfold.numbering.service.states import Stored
from tests.numbering_runs import (
    SCHEMES,
    TEXTS,
    Step,
    every_rule,
    expect,
    history,
    outcome,
    places,
    run_step,
    shards,
    summary,
    write_offers,
)
from tests.numbering_runs import request as asked
from tests.servers.spark import SparkCluster


def check_history(
    steps: list[Step], folder: Path, engine: EngineName, begun_by: EngineName | None = None
) -> list[Outcome]:
    """Do the runs one after the other, the first by another engine if it is said, and compare each with the oracle."""
    before: Stored | None = None
    known: State | None = None
    found: list[Outcome] = []
    for number, step in enumerate(steps):
        expected = expect(step, known)
        before = run_step(step, folder, f"run{number}", before, engine=engine if before else begun_by or engine)
        states.verify(before)
        written = outcome(before)
        assert written == expected
        assert before.manifest.shards == shards(expected.state)
        size = sum(entry.bytes for entry in before.manifest.files)
        assert before.manifest.summary == summary(expected, known, size)
        known = expected.state
        found.append(written)
    return found


@pytest.mark.spec("NUM-01", "NUM-02", "NUM-03", "NUM-04", "NUM-05", "NUM-07", "NUM-09")
@pytest.mark.parametrize("seed", range(10))
def test_duckdb_computes_what_the_oracle_says(tmp_path: Path, seed: int) -> None:
    check_history(history(Random(seed), 5), tmp_path, "duckdb")


@pytest.mark.spec("NUM-02", "NUM-03", "NUM-04", "NUM-05", "NUM-06", "NUM-07", "NUM-09")
@pytest.mark.xdist_group("spark")
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("spark_session")
def test_spark_writes_what_duckdb_writes_by_every_rule_and_in_a_folder_of_any_name(tmp_path: Path) -> None:
    """Spark takes some names for patterns, and some for columns; beside it lies what the pattern would find."""
    names = {"duckdb": "duckdb", "spark": 'generation=77 it\'s a "state" %20 é [x]*?{a,b} $1'}
    folders = {engine: tmp_path / name for engine, name in names.items()}
    decoy = tmp_path / names["spark"].replace("[x]*?{a,b}", "x-a")
    for folder in (*folders.values(), decoy):
        folder.mkdir()
    check_history(history(Random(6), 2), decoy, "duckdb")
    steps = every_rule()
    found = check_history(steps, folders["duckdb"], "duckdb")
    assert [each.reason for each in found] == ["first", "", "ratio", "forced"]
    assert found[1].expired
    assert {held.is_reused for held in found[1].new.values()} == {True, False}
    assert all(each.remap and each.expired for each in found[2:])
    assert found[3].state.version.scheme != found[2].state.version.scheme
    # Runs of Spark take long; it does first ones in the tests below.
    assert check_history(steps, folders["spark"], "spark", begun_by="duckdb") == found


@pytest.mark.spec("NUM-02", "NUM-09")
@pytest.mark.xdist_group("spark")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["duckdb", "spark"])
def test_new_keys_take_places_in_the_order_of_their_bytes(
    tmp_path: Path, engine: EngineName, request: pytest.FixtureRequest
) -> None:
    if engine == "spark":
        request.getfixturevalue("spark_session")
    keys = [Key(1, text, 1, 1) for text in TEXTS]
    url = write_offers(tmp_path / "offers.parquet", reversed(keys))
    state = running.run(asked(url, tmp_path / "state", scheme=SCHEMES[3], engine=engine))
    in_order = sorted(places(state), key=lambda key: places(state)[key].place)
    assert in_order == sorted(keys, key=lambda key: key.offer_id.encode())


@pytest.mark.spec("NUM-09")
@pytest.mark.parametrize("name", ['it\'s a "state" %20 é', "[x]", "?*", "generation=77"])
def test_a_folder_may_have_any_name(tmp_path: Path, name: str) -> None:
    """DuckDB takes some names for patterns, and some for columns; beside each lies what the pattern would find."""
    keys = [Key(1, text, 1, 1) for text in TEXTS]
    decoy = tmp_path / "x" / "run1"
    running.run(asked(write_offers(tmp_path / "x" / "offers.parquet", keys[:1]), decoy))
    folder = tmp_path / name
    first = running.run(asked(write_offers(folder / "offers.parquet", keys[:9]), folder / "run1"))
    second = running.run(asked(write_offers(folder / "more.parquet", keys), folder / "run2", first))
    assert all(places(second)[key].place == held.place for key, held in places(first).items())
    assert sorted(places(second)) == sorted(keys)
    assert {held.generation for held in places(second).values()} == {0, 1}
    finding.build(second, 500)
    with finding.Index(second) as index:
        assert {key: found.place for key, found in index.by_keys(keys).items()} == {
            key: held.place for key, held in places(second).items()
        }


@pytest.mark.spec("NUM-09")
def test_duckdb_refuses_a_folder_that_it_would_take_for_another(tmp_path: Path) -> None:
    offers = write_offers(tmp_path / "offers.parquet", [Key(1, "a", 1, 1)])
    with pytest.raises(BadInput, match="backslash"):
        running.run(asked(offers, tmp_path / "\\[x]" / "state"))
    assert list((tmp_path / "\\[x]").iterdir()) == []


@pytest.mark.spec("NUM-09")
@pytest.mark.xdist_group("spark")
def test_spark_is_configured_as_spark_is(spark_cluster: SparkCluster, spark_session: Any) -> None:
    """By spark-defaults.conf in SPARK_CONF_DIR, but for what the result depends on."""
    assert spark_session.sparkContext.master == spark_cluster.url
    assert spark_session.conf.get("spark.sql.shuffle.partitions") == "2"
    assert spark_session.conf.get("spark.sql.ansi.enabled") == "true"


@pytest.mark.spec("NUM-08", "NUM-09")
@pytest.mark.xdist_group("spark")
@pytest.mark.usefixtures("spark_session")
def test_a_command_is_computed_by_spark(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    offers = write_offers(tmp_path / "offers.parquet", [Key(1, text, 1, 1) for text in TEXTS])
    stopping = signal.getsignal(signal.SIGTERM)
    try:
        target = ("--output-state-table", str(tmp_path / "state"))
        code = run_command(["number", "run", "--engine", "spark", "--input-offers-table", offers, *target, "--json"])
    finally:
        signal.signal(signal.SIGTERM, stopping)
    assert code == 0, capfd.readouterr().err
    state = states.read(Root(str(tmp_path / "state")))
    assert state.manifest.engine == "spark"
    assert len(places(state)) == len(TEXTS)
