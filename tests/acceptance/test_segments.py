"""Segments as people use them: by the command line, over HTTP, and on to the profiles of the same users."""

import io
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.acceptance.served import PROFILES, Served, Start, token_for

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def keyfold(in_process: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    def run(*arguments: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO((given or "").encode())))
            return in_process(*arguments)

    return run


def told(done: "subprocess.CompletedProcess[str]") -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.spec("SEG-01", "SEG-09", "SEG-10", "SEG-11", "SEG-12", "SEG-13")
def test_a_segment_lives_through_the_command_line(keyfold: Run, tmp_path: Path) -> None:
    people = pa.table({"user_id": pa.array(range(1, 101), pa.uint64()), "visits": [n % 10 for n in range(100)]})
    pq.write_table(people, tmp_path / "people.parquet")
    (tmp_path / "keyfold.toml").write_text('[segments.tables.people]\nurl = "people.parquet"\n')
    made = told(
        keyfold(
            "segments", "create", "fans", "--table", "people", "--where", "visits >= 5", "--title", "Fans", "--json"
        )
    )
    assert made["stage"] == "evaluation"
    assert told(keyfold("segments", "evaluate", "fans", "--json"))["stage"] == "awaiting_diff"
    assert keyfold("work", "--until-idle").returncode == 0
    assert told(keyfold("segments", "get", "6", "7", "--json"))[0]["segments"][0]["segment_id"] == "fans"
    assert told(keyfold("segments", "why", "6", "fans", "--json"))["state"] == "in"

    assert keyfold("segments", "create", "buyers").returncode == 0
    ids = "\n".join(map(str, range(1, 51)))
    assert told(keyfold("segments", "upload", "buyers", "-", "--json", given=ids))["evaluation_version"] == 1
    keyfold("work", "--until-idle")
    pq.write_table(people.slice(0, 10).select(["user_id"]), tmp_path / "buyers.parquet")
    told(keyfold("segments", "upload", "buyers", "buyers.parquet", "--json"))
    keyfold("work", "--until-idle")
    shown = told(keyfold("segments", "status", "--stage", "held", "--json"))
    assert [each["segment_id"] for each in shown["segments"]] == ["buyers"]
    assert shown["segments"][0]["counts"] == {"old_rows": 50, "new_rows": 10, "added": 0, "removed": 40}
    assert "buyers: 40 of 50 users would leave" in keyfold("segments", "status").stdout
    refused = keyfold("segments", "approve", "buyers", "--version", "1")
    assert refused.returncode == 1
    assert "version 2 of buyers is held, not 1" in refused.stderr
    assert keyfold("segments", "approve", "buyers").returncode == 0
    keyfold("work", "--until-idle")
    assert "left: was no longer in the snapshot" in keyfold("segments", "why", "30", "buyers").stdout
    assert told(keyfold("segments", "history", "30", "--json"))[0]["left"] == ["buyers"]

    assert told(keyfold("segments", "off", "fans", "--json"))["is_on"] is False
    assert told(keyfold("segments", "sweep", "--json"))["changed"] == 50
    assert told(keyfold("segments", "on", "fans", "--json"))["is_evaluation_wanted"] is True
    keyfold("work", "--until-idle")
    assert told(keyfold("segments", "get", "6", "--json"))[0]["segments"][-1] == {
        "segment_id": "fans",
        "evaluation_version": 2,
    }
    assert "nothing to try again" in keyfold("segments", "retry", "fans").stderr


@pytest.mark.spec("SEG-03", "SEG-10")
@pytest.mark.parametrize(
    ("arguments", "given", "words"),
    [
        (("upload", "a", "-"), "2\n1\n", "user 1 comes after 2 (at -, row 2)"),
        (("upload", "a", "-"), "1\nx\n", "'x' is not a number of 64 bits (at line 2)"),
        (("upload", "a", "-", "--ids", "words"), "1\n", "ids are number or text"),
        (("upload", "a", "nowhere.parquet"), None, "cannot be read"),
        (("upload", "a", "people.parquet", "--column", "user"), None, "no column 'user'"),
        (("upload", "b", "-"), "1\n", "there is no segment 'b'"),
        (("create", "a b"), None, "'a b'"),
        (("create", "c", "--table", "x", "--where", "true"), None, "there is no table 'x'"),
        (("create", "c", "--table", "people", "--where", "visits >"), None, "the condition is not SQL"),
        (("create", "c", "--table", "people"), None, "a table needs a condition"),
        (("status", "nobody"), None, "there is no segment 'nobody'"),
        (("status", "--stage", "resting"), None, "resting"),
        (("evaluate", "a"), None, "no table to be evaluated over"),
        (("approve", "a"), None, "not held"),
        (("why", "1", "nobody"), None, "there is no segment 'nobody'"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(
    keyfold: Run, tmp_path: Path, arguments: tuple[str, ...], given: str | None, words: str
) -> None:
    pq.write_table(pa.table({"user_id": [1, 2], "visits": [1, 2]}), tmp_path / "people.parquet")
    (tmp_path / "keyfold.toml").write_text('[segments.tables.people]\nurl = "people.parquet"\n')
    assert keyfold("segments", "create", "a").returncode == 0
    done = keyfold("segments", *arguments, given=given)
    assert done.returncode in (1, 2)
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def served(start: Start, tmp_path: Path) -> Served:
    server = start(**PROFILES, KEYFOLD_SEGMENTS_CHUNK_USERS_MAX="20")
    server.store_url = f"sqlite:///{tmp_path / 'keyfold.db'}"
    server.token = token_for(server.store_url)
    return server


def wait_for(served: Served, segment_id: str, stage: str, version: int) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while True:
        shown: dict[str, Any] = served.call("GET", f"/v1/segments/{segment_id}", served.token).json()
        if (shown["stage"], shown["evaluation_version"]) == (stage, version):
            return shown
        assert time.monotonic() < deadline, shown
        time.sleep(0.05)


def upload(served: Served, segment_id: str, *parts: list[int]) -> dict[str, Any]:
    address = f"/v1/segments/{segment_id}/uploads"
    upload_id = served.call("POST", address, served.token).json()["upload_id"]
    for number, part in enumerate(parts, 1):
        taken = served.call("PUT", f"{address}/{upload_id}/parts/{number}", served.token, json={"user_ids": part})
        assert taken.status_code == 200, taken.text
        assert taken.json()["rows"] == len(part)
    finished = served.call("POST", f"{address}/{upload_id}/finish", served.token, json={"parts": len(parts)})
    assert finished.status_code == 200, finished.text
    return finished.json()  # type: ignore[no-any-return]


@pytest.mark.spec("SEG-08", "SEG-10", "SEG-11", "SEG-12", "PRO-11")
def test_a_snapshot_uploaded_in_parts_ends_in_the_profiles_of_its_users(served: Served) -> None:
    call, token = served.call, served.token
    assert call("POST", "/v1/segments", token, json={"segment_id": "fans"}).status_code == 200
    upload(served, "fans", list(range(1, 60)), list(range(60, 100)), [2**64 - 1])
    wait_for(served, "fans", "done", 1)
    users = call("POST", "/v1/user-segments", token, json={"user_ids": ["5", str(2**64 - 1), "777"]}).json()["users"]
    assert [len(each["segments"]) for each in users] == [1, 1, 0]

    asked = {"profiles": [{"ids": [{"type": "user", "id": 5}]}]}
    deadline = time.monotonic() + 60
    while True:
        (profile,) = call("POST", "/v1/profiles", token, json=asked).json()["profiles"]
        if profile.get("segments"):
            break
        assert time.monotonic() < deadline, profile
        time.sleep(0.1)
    assert "fans" in json.dumps(profile["segments"])

    upload(served, "fans", [1, 2, 3])
    held = wait_for(served, "fans", "held", 2)
    assert held["reason"] == "97 of 100 users would leave, more than 50%"
    queue = call("GET", "/v1/segment-queue", token).json()
    assert {each["stage"]: each["segments"] for each in queue["stages"]}["held"] == 1
    wrong = call("POST", "/v1/segments/fans/approve", token, json={"evaluation_version": 1})
    assert wrong.status_code == 409
    assert call("POST", "/v1/segments/fans/approve", token, json={"evaluation_version": 2}).status_code == 200
    wait_for(served, "fans", "done", 2)
    why = call("GET", "/v1/user-segments/5/why?segment_id=fans", token).json()
    assert (why["state"], why["version"], why["in_snapshot"]) == ("left", 2, False)
    changes = call("GET", "/v1/user-segments/5/history", token).json()["changes"]
    assert [each["left"] for each in changes] == [["fans"], []]
    assert call("POST", "/v1/segments/fans/off", token).json()["is_on"] is False
    swept = call("POST", "/v1/segment-sweep", token, json={}).json()
    assert swept == {"users": 100, "changed": 3, "upto": None}
    metrics = call("GET", "/metrics", token).text
    assert 'keyfold_segment_users_changed_total{what="left"} 97.0' in metrics


@pytest.mark.spec("SEG-10")
def test_a_part_that_is_wrong_is_refused_with_its_place(served: Served) -> None:
    call, token = served.call, served.token
    call("POST", "/v1/segments", token, json={"segment_id": "fans"})
    upload_id = call("POST", "/v1/segments/fans/uploads", token).json()["upload_id"]
    address = f"/v1/segments/fans/uploads/{upload_id}"
    for ids, words in (
        ([2, 1], "user 1 comes after 2"),
        ([1, "a"], "numbers and text"),
        ([-1], "user_ids"),
        ([2**64], "user_ids"),
        ([1.5], "user_ids"),
        ([], "user_ids"),
        (["a\u0000"], "user_ids"),
    ):
        answer = call("PUT", f"{address}/parts/1", token, json={"user_ids": ids})
        assert answer.status_code == 400, (ids, answer.text)
        assert words in answer.text, answer.text
    assert call("PUT", f"{address}/parts/10001", token, json={"user_ids": [1]}).status_code in (400, 404)
    assert call("POST", f"{address}/finish", token, json={"parts": 1}).status_code == 400
    assert call("PUT", "/v1/segments/fans/uploads/..%2F..%2Fx/parts/1", token, json={"user_ids": [1]}).status_code in (
        400,
        404,
    )


@pytest.mark.spec("SEG-12", "CORE-15")
def test_a_token_for_one_segment_learns_no_version_of_a_set(served: Served) -> None:
    """It would count the changes of the segments that the token may not see."""
    for name in ("others", "fans"):
        assert served.call("POST", "/v1/segments", served.token, json={"segment_id": name}).status_code == 200
        for version, users in enumerate(([1, 2, 3], [2, 3]), 1):
            upload(served, name, users)
            wait_for(served, name, "done", version)
    token = token_for(served.store_url, ["read"], segment=["fans"])
    for user, state in ((1, "left"), (2, "in")):
        address = f"/v1/user-segments/{user}/why?segment_id=fans"
        told = served.call("GET", address, token).json()
        assert (told["state"], told["version"]) == (state, None)
        assert "version" not in told["explanation"]
        assert served.call("GET", address, served.token).json()["version"] is not None
