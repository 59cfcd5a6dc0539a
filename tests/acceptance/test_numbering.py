"""Numbering as people use it: by the command line, with masters beside each other, and over HTTP."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.acceptance.served import KEYFOLD, Start, token_for
from tests.numbering import columns, key, write_offers

Run = Callable[..., subprocess.CompletedProcess[str]]
CLUSTERS = {"KEYFOLD_NUMBERING_CLUSTERS": '{"arnold": "dc/arnold", "hahn": "dc/hahn"}'}
ONE_SHARD = {
    "KEYFOLD_NUMBERING_SCHEMES": '{"0": {"by": "offer", "shards": 1}, "1": {"by": "business", "shards": 4}}',
    "KEYFOLD_NUMBERING_TTL_RUNS": "1",
}


@pytest.fixture
def keyfold(in_process: Run) -> Run:
    """`keyfold number` with two clusters and one shard."""

    def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return in_process("number", *arguments, **{**CLUSTERS, **ONE_SHARD, **environ})

    return run


def told(done: "subprocess.CompletedProcess[str]") -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def refused(done: "subprocess.CompletedProcess[str]") -> str:
    """One line, and a code that says so."""
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    return done.stderr.strip().splitlines()[-1]


def offers(folder: Path, name: str, *numbers: int) -> str:
    write_offers(folder / name, columns(key(n) for n in numbers))
    return name


def docs(folder: Path, state: str, table: str = "places") -> dict[str, int]:
    rows = [row for file in sorted((folder / state / table).iterdir()) for row in pq.read_table(file).to_pylist()]
    return {row["offer_id"]: row["doc_id"] for row in rows}


@pytest.mark.spec("NUM-08", "NUM-12", "NUM-02", "NUM-03", "NUM-04", "NUM-05")
def test_the_five_cases_of_the_document(keyfold: Run, tmp_path: Path) -> None:
    def run(before: str, after: str, table: str, *more: str) -> Any:
        state = ["--input-state-table", before] if before else []
        return told(
            keyfold("run", *state, "--input-offers-table", table, "--output-state-table", after, *more, "--json")
        )

    first = run("", "s1", offers(tmp_path, "o1", *range(8)))
    assert (first["version"], first["reason"]) == ("1.0.0.0", "first")
    assert docs(tmp_path, "s1") == {f"offer {n:03}": n for n in range(8)}

    # 5: the ordinary case.
    ordinary = run("s1", "s2", offers(tmp_path, "o2", *range(10)))
    assert (ordinary["version"], ordinary["reason"]) == ("1.0.0.1", "")
    assert docs(tmp_path, "s2", "new_docs") == {"offer 008": 8, "offer 009": 9}

    # 2: more runs than the TTL have passed, nobody has expired.
    run("s2", "s3", "o2")
    without = run("s3", "s4", offers(tmp_path, "o4", *range(11)))
    assert without["summary"]["expired"] == 0
    assert docs(tmp_path, "s4", "new_docs") == {"offer 010": 10}

    # 3: some have expired; their places go first.
    run("s4", "s5", offers(tmp_path, "o5", *(n for n in range(11) if n not in (2, 5))))
    expired = run(
        "s5",
        "s6",
        offers(tmp_path, "o6", *(n for n in range(14) if n not in (2, 5))),
        *("--intermediate-new-docs-table", "new", "--intermediate-expired-docs-table", "gone"),
    )
    assert expired["summary"] | {"bytes": 0} == {
        "known": 9,
        "absent": 0,
        "new": 3,
        "reused": 2,
        "expired": 2,
        "holes": 0,
        "bytes": 0,
    }
    assert docs(tmp_path, "s6", "new_docs") == {"offer 011": 2, "offer 012": 5, "offer 013": 11}
    assert docs(tmp_path, ".", "new") == docs(tmp_path, "s6", "new_docs")
    assert docs(tmp_path, ".", "gone") == {"offer 002": 2, "offer 005": 5}

    # 1: forced, by either name.
    for option, target in (("--rebuild-state-force", "s7"), ("--force-rebuild-state", "s7b")):
        forced = run("s6", target, offers(tmp_path, "o7", 3, 12, 13, 20), option)
        assert (forced["version"], forced["reason"]) == ("1.0.1.0", "forced")
        assert [shard["size"] for shard in forced["shards"]] == [4]
        assert docs(tmp_path, target) == {"offer 003": 0, "offer 012": 1, "offer 013": 2, "offer 020": 3}
    remap = pq.read_table(tmp_path / "s7" / "remap").to_pylist()
    assert {row["old_doc_id"]: row["doc_id"] for row in remap} == {3: 0, 5: 1, 11: 2}

    # 4: by itself, because too many holes are left.
    by_itself = run("s6", "s8", "o7")
    assert (by_itself["version"], by_itself["reason"]) == ("1.0.1.0", "ratio")
    assert docs(tmp_path, "s8") == docs(tmp_path, "s7")

    # And another scheme.
    resharded = run("s8", "s9", "o7", "--output-sharding-scheme", "1", "--output-primary-medium", "ssd_blobs")
    assert (resharded["version"], resharded["reason"]) == ("1.1.2.0", "scheme")


@pytest.mark.spec("NUM-08", "NUM-13", "NUM-06")
def test_a_person_asks_about_states_without_any_store(keyfold: Run, tmp_path: Path) -> None:
    keyfold("run", "--input-offers-table", offers(tmp_path, "o1", *range(8)), "--output-state-table", "s1")
    keyfold("run", "--input-offers-table", "o1", "--input-state-table", "s1", "--output-state-table", "s2")
    done = keyfold("find", "1/0/0/offer 006", "0:3", "0:99", "--state", "s1", "--json")
    found = told(done)
    assert [(each["offer_id"], each["doc_id"]) for each in found["found"]] == [("offer 006", 6), ("offer 003", 3)]
    assert found["not_found"] == ["0:99"]
    assert keyfold("find", "0:99", "--state", "s1").returncode == 1
    assert told(keyfold("index", "--state", "s2", "--json")) == {"version": "1.0.0.0"}
    assert told(keyfold("compatible", "1.0.0.0", "--state", "s1", "--json"))["answer"] == "yes"
    no = keyfold("compatible", "1.0.1.0", "--state", "s1")
    assert no.returncode == 1
    assert no.stdout.startswith("no: the data are of rebuild 1")
    assert "8 places" not in keyfold("plan", "--state", "s1").stdout
    plan = told(keyfold("plan", "--state", "s1", "--input-offers-table", offers(tmp_path, "o2", 1, 2, 9), "--json"))
    assert (plan["run"]["known"], plan["run"]["new"], plan["shards"][0]["places"]) == (2, 1, 9)
    assert plan["would_rebuild"]
    assert not (tmp_path / "keyfold.db").exists()


@pytest.mark.spec("NUM-08", "CORE-13")
def test_what_is_typed_wrong_is_said_in_a_line(keyfold: Run, tmp_path: Path) -> None:
    table = offers(tmp_path, "o1", 1, 2)
    keyfold("run", "--input-offers-table", table, "--output-state-table", "s1")
    cases: list[tuple[tuple[str, ...], str]] = [
        (("run", "--input-offers-table", table, "--output-state-table", "s1"), "s1 is there already"),
        (("run", "--input-offers-table", "nothing", "--output-state-table", "s2"), "no Parquet files at nothing"),
        (("run", "--input-offers-table", table, "--input-state-table", "o1", "--output-state-table", "s2"), "no state"),
        (("run", "--input-offers-table", table, "--output-state-table", "s2", "--engine", "abacus"), "duckdb or spark"),
        (
            ("run", "--input-offers-table", table, "--output-state-table", "s2", "--output-sharding-scheme", "9"),
            "no sharding scheme 9",
        ),
        (
            ("run", "--input-offers-table", table, "--output-state-table", "s2", "--output-primary-medium", "tape"),
            "no medium 'tape'",
        ),
        (("run", "--input-offers-table", table, "--output-state-table", "s2", "--type", "x"), "no type 'x'"),
        (("run-master", "--input-offers-table", table), "which cluster is yours"),
        (("run-master", "--input-offers-table", table, "--cluster", "sas"), "no cluster 'sas'"),
        (("run-master", "--cluster", "hahn"), "no offers are named"),
        (("find", "1/2/3", "--state", "s1"), "is not a key"),
        (("find", "1:x", "--state", "s1"), "not a number"),
        (("find", "5", "--state", "s1"), "neither a key nor a place"),
        (("compatible", "1.0", "--state", "s1"), "is not a version"),
        (("compatible", "1.0.0.0"), "no state was published yet"),
        (("plan", "--state", "s1", "--output-sharding-scheme", "1"), "with the offers"),
        (("offers", "out"), "no topic of offers"),
        (("invalidate",), "no state of main was ever published"),
    ]
    for arguments, words in cases:
        assert words in refused(keyfold(*arguments)), arguments
    assert not (tmp_path / "s2").exists()
    assert [path.name for path in tmp_path.iterdir() if ".writing-" in path.name] == []
    changed = keyfold(
        *("run", "--input-offers-table", table, "--input-state-table", "s1", "--output-state-table", "s2"),
        KEYFOLD_NUMBERING_SCHEMES='{"0": {"by": "offer", "shards": 2}}',
    )
    assert "needs a new number" in refused(changed)
    nowhere = keyfold(
        *("run", "--input-offers-table", table, "--output-state-table", "s2"),
        KEYFOLD_NUMBERING_SCRATCH=str(tmp_path / "no" / "scratch"),
    )
    assert "numbering.scratch" in refused(nowhere)


@pytest.mark.spec("NUM-10", "NUM-11", "NUM-15", "NUM-14")
def test_masters_follow_each_other_and_the_history_tells(keyfold: Run, tmp_path: Path) -> None:
    one = told(
        keyfold("run-master", "--cluster", "arnold", "--input-offers-table", offers(tmp_path, "o1", 1, 2), "--json")
    )
    two = told(
        keyfold("run-master", "--cluster", "hahn", "--input-offers-table", offers(tmp_path, "o2", 1, 2, 3), "--json")
    )
    assert (one["version"], two["version"]) == ("1.0.0.0", "1.0.0.1")
    assert one["ticket"] < two["ticket"]
    told_of = told(keyfold("history", "--json"))
    assert [each["version"] for each in told_of["record"]["states"]] == ["1.0.0.0", "1.0.0.1"]
    assert told_of["lock"] is None
    assert told(keyfold("prune", "--json")) == {"dropped": [], "deleted": [], "leftovers": 0, "failures": []}
    shown = keyfold("history").stdout
    assert "last" in shown
    assert "kept" in shown
    for file in (tmp_path / "dc/hahn" / two["path"] / "places").iterdir():
        os.truncate(file, file.stat().st_size - 1)
    assert told(keyfold("compatible", "1.0.0.0", "--json"))["state"] == "1.0.0.1"
    assert told(keyfold("plan", "--input-offers-table", "o2", "--json"))["run"]["known"] == 3
    assert "cannot be read: hahn" in refused(keyfold("compatible", "1.0.0.0", "--cluster", "hahn"))
    assert told(keyfold("find", "0:2", "--cluster", "hahn", "--json"))["found"][0]["offer_id"] == "offer 003"

    for cluster in ("arnold", "hahn"):
        (tmp_path / "dc" / cluster / two["path"] / "manifest.json").unlink()
    assert "keyfold number invalidate" in refused(
        keyfold("run-master", "--cluster", "hahn", "--input-offers-table", "o2")
    )
    assert "1.0.0.0 is the last state again" in keyfold("invalidate", "--why", "fire").stdout
    three = told(keyfold("run-master", "--cluster", "hahn", "--input-offers-table", "o2", "--json"))
    assert (three["version"], three["reason"]) == ("1.0.1.0", "restart")
    assert "invalid: fire" in keyfold("history").stdout


@pytest.mark.spec("NUM-14", "NUM-06")
def test_the_version_of_data_tells_the_type_of_their_state(keyfold: Run, tmp_path: Path) -> None:
    types = {"KEYFOLD_NUMBERING_TYPES": '{"main": {"number": 1}, "turbo": {"number": 2, "scheme": 1}}'}
    table = offers(tmp_path, "o1", 1, 2)
    for name in ("main", "turbo"):
        run = ("run-master", "--cluster", "arnold", "--input-offers-table", table, "--type", name, "--json")
        told(keyfold(*run, **types))
    assert told(keyfold("compatible", "2.1.0.0", "--json", **types))["answer"] == "yes"
    assert told(keyfold("compatible", "1.0.0.0", "--json", **types))["state"] == "1.0.0.0"
    assert "none of the states" in refused(keyfold("compatible", "2.1.0.0", "--type", "main", **types))
    assert "numbering.types has 1 (main), 2 (turbo)" in refused(keyfold("compatible", "3.0.0.0", **types))


@pytest.mark.spec("NUM-10")
def test_two_masters_started_at_once_publish_one_after_the_other(tmp_path: Path) -> None:
    table = offers(tmp_path, "o1", *range(50))
    subprocess.run([*KEYFOLD, "store", "upgrade"], cwd=tmp_path, check=True, capture_output=True)
    masters = [
        subprocess.Popen(
            [*KEYFOLD, "number", "run-master", "--cluster", cluster, "--input-offers-table", table, "--json"],
            cwd=tmp_path,
            env={**os.environ, **CLUSTERS, "KEYFOLD_NUMBERING_RETRY_SECONDS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for cluster in ("arnold", "hahn")
    ]
    answers = []
    for master in masters:
        out, error = master.communicate(timeout=120)
        assert master.returncode == 0, error
        answers.append(json.loads(out))
    assert sorted(each["run"] for each in answers) == [1, 2]
    assert {each["version"] for each in answers} == {"1.0.0.0"}


@pytest.mark.spec("NUM-08")
def test_offers_of_the_topic_are_numbered(keyfold: Run, tmp_path: Path, start: Start) -> None:
    from keyfold.core import outbox
    from keyfold.core.context import Context
    from keyfold.core.settings import load
    from keyfold.core.topics.topic import Message
    from keyfold.parts import PARTS, settings_of_parts

    url = f"sqlite:///{tmp_path / 'keyfold.db'}"
    settings = load(
        parts=settings_of_parts(), environ={}, options={"store.url": url, "numbering.offers_topic": "exported"}
    )
    context = Context.open(settings, PARTS)
    messages = [
        Message(
            key=f"o{n}",
            version=1,
            event_time_us=1,
            schema="offer/1",
            payload=json.dumps({"offer_id": f"o{n}", "business_id": n, "shop_id": n}).encode(),
        )
        for n in range(5)
    ]
    context.store.transact(lambda tx: outbox.put(tx, context.topics, "exported", messages))
    context.close()
    environ = {"KEYFOLD_NUMBERING_OFFERS_TOPIC": "exported"}
    worked = subprocess.run(
        [*KEYFOLD, "work", "--until-idle", "numbering"],
        cwd=tmp_path,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert worked.returncode == 0, worked.stderr
    assert told(keyfold("offers", "built", "--json", **environ))["offers"] == 5
    assert told(keyfold("run-master", "--cluster", "arnold", "--json", **environ))["new"] == 5


@pytest.mark.spec("NUM-13", "NUM-06", "NUM-10", "CORE-15")
def test_what_is_published_is_told_over_http(keyfold: Run, tmp_path: Path, start: Start) -> None:
    for cluster, last in (("arnold", 6), ("hahn", 8)):
        told(
            keyfold(
                *("run-master", "--cluster", cluster, "--json"),
                *("--input-offers-table", offers(tmp_path, f"o{last}", *range(last))),
            )
        )
    # One broken copy is in nobody's way.
    for file in tmp_path.glob("dc/hahn/main/2-*/places/*"):
        os.truncate(file, file.stat().st_size - 1)
    url = f"sqlite:///{tmp_path / 'keyfold.db'}"
    served = start(**CLUSTERS)
    token = token_for(url, ["read"], numbering=["main"])

    def get(path: str, **request: Any) -> Any:
        answer = served.call("POST" if request else "GET", path, token, **request)
        assert answer.status_code == 200, answer.text
        return answer.json()

    shown = get("/v1/numbering/main")
    assert shown["state"]["version"] == "1.0.0.1"
    assert shown["state"]["stands"] == "last"
    assert [each["size"] for each in shown["shards"]] == [8]
    assert [each["version"] for each in get("/v1/numbering/main/history?limit=1")["states"]] == ["1.0.0.1"]
    assert get("/v1/numbering/main/compatible?data=1.0.0.0")["answer"] == "yes"
    assert get("/v1/numbering/main/compatible?data=1.0.7.0")["answer"] == "no"
    wanted = key(3)._asdict()
    found = get(
        "/v1/numbering/main/find",
        json={"keys": [wanted, {**wanted, "offer_id": "?"}], "places": [{"shard_id": 0, "doc_id": 7}]},
    )
    assert [each and each["doc_id"] for each in found["keys"]] == [3, None]
    assert found["places"][0]["offer_id"] == "offer 007"
    for wrong in ("?data=1.0", "", "?data=1.0.0.99999999999"):
        assert served.call("GET", f"/v1/numbering/main/compatible{wrong}", token).status_code == 400
    assert served.call("GET", "/v1/numbering/other", token).status_code == 404

    # What cannot be read is said, but not where it lies; an answer that was given once is given again.
    for index in [*tmp_path.rglob("*.index")]:
        shutil.rmtree(index)
    asked = {"json": {"places": [{"shard_id": 0, "doc_id": 7}]}}
    lacking = served.call("POST", "/v1/numbering/main/find", token, **asked)
    assert (lacking.status_code, "no look-up index yet" in lacking.text) == (503, True), lacking.text
    for file in [*tmp_path.rglob("main/*/places"), *tmp_path.rglob("main/*/manifest.json")]:
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    lost = served.call("GET", "/v1/numbering/main", token)
    assert (lost.status_code, "cannot be read now" in lost.text) == (503, True)
    for answer in (lacking, lost):
        assert "main/" not in answer.json()["detail"]
        assert str(tmp_path) not in answer.text
    assert get("/v1/numbering/main/compatible?data=1.0.0.0")["answer"] == "yes"


@pytest.mark.spec("NUM-10", "CORE-20")
def test_a_master_that_is_told_to_stop_hands_the_lock_back(keyfold: Run, tmp_path: Path) -> None:
    table = offers(tmp_path, "o1", 1, 2)
    told(keyfold("run-master", "--cluster", "arnold", "--input-offers-table", table, "--json"))
    # An input that never comes.
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "slow.parquet")
    slow = subprocess.Popen(
        [*KEYFOLD, "number", "run-master", "--cluster", "hahn", "--input-offers-table", "pipe/slow.parquet"],
        cwd=tmp_path,
        env={**os.environ, **CLUSTERS, **ONE_SHARD},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert slow.stderr is not None
    assert "lock taken" in slow.stderr.readline()
    slow.terminate()
    slow.wait(60)
    assert told(keyfold("history", "--json"))["lock"] is None
    assert told(keyfold("run-master", "--cluster", "hahn", "--input-offers-table", table, "--json"))["run"] == 2
