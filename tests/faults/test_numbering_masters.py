"""Whatever happens to masters, tickets only grow, and the pointer names a whole state that follows from the last."""

import itertools
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from keyfold.bulk.folders import FolderUnreachable
from keyfold.core.clock import ManualClock
from keyfold.core.errors import BadInput
from keyfold.numbering.model import DOC_ID_MAX
from keyfold.numbering.service import states
from keyfold.numbering.service.mastering import CopiesLacking
from keyfold.numbering.service.states import Stored
from tests.faults.effort import LONG, TIMEOUT_SECONDS, effort, rotation, seed
from tests.faults.matrix import Hit
from tests.faults.numbering_masters import (
    DAMAGES,
    KINDS,
    MOMENTS,
    Insisting,
    cut_off,
    keys_of,
    numbering_at,
    overtaken,
    run_at_once,
    run_one_after_another,
    spoilt,
    through_lost_commits,
)
from tests.faults.numbering_scenario import GIVEN, key, offers
from tests.faults.pgproxy import Cut
from tests.faults.smalldisk import Ballast
from tests.servers.postgres import PostgresServer
from tests.servers.zookeeper import ZooKeeperServer

pytestmark = [pytest.mark.spec("NUM-10", "NUM-11"), pytest.mark.timeout(TIMEOUT_SECONDS)]

LOST, LOST_LONG = 6, 5_000
CYCLES, CYCLES_LONG = 2, 300
REFUSED = {"lease-lost", "ticket-refused"}
UNREACHED = REFUSED | {"leases-unreachable", "commit-unknown"}  # just woken up, it may not have found its way back


STORES = ("sqlite", "postgres")


@pytest.fixture(params=STORES)
def store_url(request: pytest.FixtureRequest, fast_path: Path) -> str:
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_url"))
    return f"sqlite:///{fast_path / 'keyfold.db'}"


# More than one --------------------------------------------------------------------------------------------------------


@pytest.mark.spec("NUM-01", "NUM-02", "NUM-03", "NUM-04", "NUM-05", "NUM-06")
def test_runs_one_after_another_obey_the_laws(fast_path: Path) -> None:
    """What a planted bug in the rules is caught by; here the engine deals."""
    url = f"sqlite:///{fast_path / 'keyfold.db'}"
    with numbering_at(url, fast_path, rebuild_ratio=3.0, is_indexed=False) as numbering:
        assert not run_one_after_another(numbering, effort(6, 200))


@pytest.mark.spec("NUM-01", "NUM-02", "NUM-05")
@pytest.mark.fault("many writers of one key", "numbering")
def test_masters_at_once_publish_one_state_after_the_other(store_url: str, fast_path: Path, hit: Hit) -> None:
    broken, waits = run_at_once(store_url, fast_path / "clusters", effort(3, 200))
    assert not broken
    hit("numbering", waits)


def _pauses() -> list[tuple[str, str]]:
    """In `make test` today's moment on one store, and on the other the last, which the fence alone refuses."""
    if LONG:
        return list(itertools.product(STORES, MOMENTS))
    return [*zip(STORES, (MOMENTS[rotation() % (len(MOMENTS) - 1)], MOMENTS[-1]), strict=True)]


@pytest.mark.fault("holder paused past its lease", "numbering")
@pytest.mark.parametrize(("store_url", "moment"), _pauses(), indirect=["store_url"])
def test_a_master_paused_past_its_lease_publishes_nothing_when_it_wakes(
    moment: str, store_url: str, fast_path: Path, hit: Hit
) -> None:
    """Stopped by a signal while another finishes; its state is refused, the record is as it was, its folder goes."""
    _is_refused(moment, store_url, fast_path, "", hit)


@pytest.mark.xdist_group("zookeeper")
@pytest.mark.fault("holder paused past its lease", "numbering")
@pytest.mark.parametrize("moment", MOMENTS if LONG else MOMENTS[-1:])
def test_a_master_paused_past_its_session_publishes_nothing_when_it_wakes(
    moment: str, zookeeper_server: ZooKeeperServer, fast_path: Path, hit: Hit
) -> None:
    _empty(zookeeper_server)
    _is_refused(moment, f"sqlite:///{fast_path / 'keyfold.db'}", fast_path, zookeeper_server.hosts, hit)


def _is_refused(moment: str, url: str, directory: Path, hosts: str, hit: Hit) -> None:
    said, broken = overtaken(url, directory / "clusters", moment, hosts=hosts)
    assert not broken
    assert said in (UNREACHED if hosts else REFUSED)
    hit("numbering")


@pytest.mark.xdist_group("zookeeper")
@pytest.mark.fault("coordinator unreachable", "numbering")
@pytest.mark.parametrize("for_good", [False, True], ids=["until another has published", "for good"])
def test_a_master_that_cannot_reach_zookeeper_publishes_nothing_and_another_goes_on(
    zookeeper_server: ZooKeeperServer, fast_path: Path, hit: Hit, for_good: bool
) -> None:
    _empty(zookeeper_server)
    url = f"sqlite:///{fast_path / 'keyfold.db'}"
    said, broken = cut_off(url, fast_path / "clusters", zookeeper_server.port, for_good=for_good)
    assert not broken
    assert said in UNREACHED
    hit("numbering")


def _empty(server: ZooKeeperServer) -> None:
    """Other tests use the same server, and the names of types are not theirs to choose."""
    from kazoo.client import KazooClient

    server.start()
    client = KazooClient(server.hosts)
    client.start()
    client.delete("/keyfold", recursive=True)
    client.stop()
    client.close()


# Lost answers and killed servers --------------------------------------------------------------------------------------


@pytest.mark.fault("answer to COMMIT lost", "numbering")
@pytest.mark.fault("COMMIT never arrived", "numbering")
def test_a_master_whose_commits_get_lost_deletes_no_state_that_was_published_and_publishes_none_twice(
    postgres_server: PostgresServer, postgres_url: str, fast_path: Path, hit: Hit
) -> None:
    chosen = seed()
    print(f"KEYFOLD_FAULTS_SEED={chosen}")
    chance, lost = random.Random(chosen), effort(LOST, LOST_LONG)
    broken, proxy = through_lost_commits(postgres_server, postgres_url, fast_path, chance, lost)
    assert not broken
    hit("numbering", proxy.cuts[Cut.AFTER] + proxy.cuts[Cut.DURING], fault="answer to COMMIT lost")
    hit("numbering", proxy.cuts[Cut.BEFORE], fault="COMMIT never arrived")


@pytest.mark.fault("server killed", "numbering")
def test_a_server_killed_under_masters_leaves_a_record_that_the_next_goes_on_from(
    server: PostgresServer, fast_path: Path, hit: Hit
) -> None:
    chosen = seed()
    print(f"KEYFOLD_FAULTS_SEED={chosen}")
    chance, clock = random.Random(chosen), ManualClock()
    has_ended = threading.Event()
    with numbering_at(server.create_database("killed"), fast_path, clock=clock, is_indexed=False) as numbering:
        insisting = Insisting(numbering, clock)
        broken: list[str] = []

        def go_on() -> None:
            number = 0
            while not has_ended.is_set() and not broken:
                insisting.run(number)
                broken.extend(insisting.broken())
                number += 1

        working = threading.Thread(target=go_on)
        working.start()
        try:
            for _ in range(effort(CYCLES, CYCLES_LONG)):
                time.sleep(chance.uniform(0.3, 0.9))
                server.kill()
                time.sleep(0.2)
                server.start()
        finally:
            has_ended.set()
            working.join()
        assert not broken + insisting.broken()
        hit("numbering", insisting.refused)


# Files ----------------------------------------------------------------------------------------------------------------


def _harms() -> list[tuple[str, str]]:
    """Every kind of file, in `make test` with one damage each."""
    turn = rotation()
    return [
        (kind, damage)
        for at, kind in enumerate(KINDS)
        for each, damage in enumerate(DAMAGES)
        if LONG or each == (at + turn) % len(DAMAGES)
    ]


@pytest.mark.spec("NUM-05", "NUM-09", "NUM-15")
@pytest.mark.fault("file spoilt", "numbering")
@pytest.mark.parametrize(("kind", "damage"), _harms())
def test_a_spoilt_state_is_refused_replaced_by_another_clusters_copy_or_given_up_with_its_v(
    kind: str, damage: str, fast_path: Path, hit: Hit
) -> None:
    folder = fast_path / "clusters"
    with numbering_at(f"sqlite:///{fast_path / 'keyfold.db'}", folder, is_indexed=False) as numbering:
        assert not spoilt(numbering, folder, kind, damage)
    hit("numbering")


@pytest.mark.spec("NUM-09", "NUM-15")
@pytest.mark.fault("disk full", "numbering")
@pytest.mark.parametrize("cluster", ["x", "y"], ids=["its own", "the other one"])
def test_a_full_cluster_takes_no_part_of_a_state_and_the_run_says_why(
    cluster: str, small_disk: Path, fast_path: Path, hit: Hit
) -> None:
    """Whatever room is left: for nothing, for some of the files, for all but the last."""
    folder = fast_path / "clusters"
    folder.mkdir()
    (folder / cluster).symlink_to(small_disk, target_is_directory=True)
    url = f"sqlite:///{fast_path / 'keyfold.db'}"
    with numbering_at(url, folder, copy_tries_max=1) as numbering:
        first = numbering.run("x", GIVEN[0])
        before = numbering.record()["states"]
        ballast = Ballast(small_disk)
        for room in range(0, 5 * 4096, 4096):
            ballast.leave(room)
            with pytest.raises(FolderUnreachable if cluster == "x" else CopiesLacking) as refused:
                numbering.run("x", GIVEN[1])
            assert "No space left" in str(refused.value)
            assert numbering.record()["states"] == before
            assert not numbering.broken()
            assert [path.name for path in (folder / "y" / "main").iterdir()] == [first.path.partition("/")[2]]
            hit("numbering")
        ballast.free()
        numbering.run("x", GIVEN[1])
        assert not numbering.tidied()


# Input ----------------------------------------------------------------------------------------------------------------


@pytest.mark.spec("NUM-01", "NUM-03")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "no offer in the input"),
        ([*keys_of(1), keys_of(1)[0]], "more than once"),
        ([*keys_of(1), (7, "new", 7, 7), (7, "new", 7, 7)], "more than once"),
    ],
    ids=["nothing", "a known key twice", "a new key twice"],
)
def test_an_input_that_cannot_be_meant_is_refused_and_changes_nothing(
    given: list[tuple[int, str, int, int]], said: str, fast_path: Path
) -> None:
    with numbering_at(f"sqlite:///{fast_path / 'keyfold.db'}", fast_path / "clusters", is_indexed=False) as numbering:
        for _ in range(2):  # as the first state, and as one that follows
            before = numbering.record().get("states")
            with pytest.raises(BadInput, match=said):
                numbering.master("x").run(offers(given))
            assert numbering.record().get("states") == before
            assert not numbering.broken() + numbering.book.leftovers(numbering.record())
            numbering.run("x", keys_of(1))


@pytest.mark.spec("NUM-01")
def test_a_shard_with_more_places_than_a_doc_id_can_name_is_refused_and_changes_nothing(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last state is made to say that every place of its shards was given."""
    with numbering_at(f"sqlite:///{fast_path / 'keyfold.db'}", fast_path / "clusters", is_indexed=False) as numbering:
        numbering.run("x", GIVEN[0])
        read = states.read

        def read_full(*given: Any, **named: Any) -> Stored:
            found = read(*given, **named)
            shards = [structs.replace(shard, size=DOC_ID_MAX + 1) for shard in found.manifest.shards]
            return structs.replace(found, manifest=structs.replace(found.manifest, shards=shards))

        monkeypatch.setattr(states, "read", read_full)
        before = numbering.record()["states"]
        with pytest.raises(BadInput, match=f"more than {DOC_ID_MAX + 1}"):
            numbering.run("x", map(key, range(24)))
        assert numbering.record()["states"] == before
        assert not numbering.book.leftovers(numbering.record())
