"""Numbering under every coordinator: masters of two data centres, tickets, lost states, pruning, the topic."""

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from keyfold.bulk import engines, folders
from keyfold.bulk.folders import FolderBroken, FolderUnreachable
from keyfold.core import outbox
from keyfold.core.audit import AUDIT
from keyfold.core.consumer import ConsumerWorker
from keyfold.core.errors import (
    BadInput,
    CommitUnknown,
    Conflict,
    LeaseLost,
    LeasesUnreachable,
    NotFound,
    SettingsWrong,
    Unavailable,
)
from keyfold.core.leases.lease import Lease
from keyfold.core.relay import Relay
from keyfold.core.store import Transaction
from keyfold.core.topics.topic import Message, Record
from keyfold.numbering.model import Place, Version
from keyfold.numbering.service import (
    building,
    comparing,
    coordinating,
    finding,
    mastering,
    planning,
    receipts,
    running,
    states,
)
from keyfold.numbering.service.mastering import CopiesLacking, LockTaken, Master, StateLost, StateNotBrought
from keyfold.numbering.worker import Upkeep, consumers
from tests.numbering import Numbering, columns, key, opened, places, rows, write_offers
from tests.product import consume_all, relay_all
from tests.servers.zookeeper import ZooKeeperServer

COORDINATORS = ["sqlite", "postgres", pytest.param("zookeeper", marks=pytest.mark.xdist_group("zookeeper"))]


def coordinated(kind: str, request: pytest.FixtureRequest, folder: Path) -> tuple[str, dict[str, object]]:
    """The store, and what makes it coordinate: itself, or a ZooKeeper."""
    if kind == "postgres":
        return str(request.getfixturevalue("postgres_url")), {}
    options: dict[str, object] = {}
    if kind == "zookeeper":
        server: ZooKeeperServer = request.getfixturevalue("zookeeper_server")
        server.start()
        options = {"leases.kind": "zookeeper", "leases.zookeeper": server.hosts}
    return f"sqlite:///{folder / 'keyfold.db'}", options


@pytest.fixture(params=COORDINATORS)
def numbering(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Numbering]:
    url, options = coordinated(request.param, request, tmp_path)
    # Tests share a ZooKeeper: a type of their own keeps them apart.
    with opened(url, tmp_path, options=options, types={"main": {"number": 1}}) as product:
        if request.param == "zookeeper":
            _separate(product, tmp_path.name)
        yield product


def _separate(product: Numbering, mark: str) -> None:
    """Give every name that goes to the shared server an ending of this test's."""
    leases: Any = product.context.leases
    acquire, held, publish, published = leases.acquire, leases.held, leases.publish, leases.published
    leases.acquire = lambda names, holder, seconds: acquire([f"{name}-{mark}" for name in names], holder, seconds)
    leases.held = lambda names: held([f"{name}-{mark}" for name in names])
    leases.publish = lambda path, *rest: publish(f"{path}-{mark}", *rest)
    leases.published = lambda path: published(f"{path}-{mark}")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Numbering]:
    """Where the coordinator does not matter."""
    with opened(f"sqlite:///{tmp_path / 'keyfold.db'}", tmp_path, grace_hours=0, states_kept=2) as product:
        yield product


# Masters ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("NUM-10", "NUM-02", "NUM-05")
def test_masters_of_two_clusters_take_turns_and_places_stay(numbering: Numbering) -> None:
    one = numbering.run(1, 2, 3, 4, cluster="arnold")
    before = places(numbering.last())
    two = numbering.run(2, 3, 4, 5, cluster="hahn")
    after = places(numbering.last())
    assert (one.version, two.version) == ("1.0.0.0", "1.0.0.1")
    assert {each: after[each] for each in before} == before
    assert set(after) - set(before) == {key(5)}
    record = numbering.record()
    assert record.current == two
    assert two.ticket > one.ticket
    assert record.taken is not None
    assert (record.taken.master, record.taken.ticket) == ("master of hahn", two.ticket)
    assert (two.known, two.new, two.expired) == (3, 1, 0)
    for cluster in ("arnold", "hahn"):
        assert states.read(numbering.root(cluster), two.path, checksum=two.checksum).manifest.parent == one.checksum
    assert coordinating.holder(numbering.context.leases, "main") is None


@pytest.mark.spec("NUM-15")
def test_a_state_is_published_when_a_second_cluster_has_it(numbering: Numbering) -> None:
    seen: list[str] = []

    def look(what: str) -> None:
        if what.startswith("copied to"):
            assert numbering.record().current is None
            seen.append(what)

    published = numbering.run(1, 2, tell=look)
    assert seen == ["copied to hahn"]
    assert published.clusters == ["arnold", "hahn"]
    # The last state is copied from there when ours is gone.
    shutil.rmtree(numbering.cluster("arnold") / published.path.split("/")[1])
    assert numbering.run(1, 2, 3).version == "1.0.0.1"


@pytest.mark.spec("NUM-10")
def test_who_is_refused_the_lock_asks_again_until_it_is_free(numbering: Numbering) -> None:
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            release.set()
            holding.join()

    taken, release = threading.Event(), threading.Event()

    def hold() -> None:
        with coordinating.locked(numbering.context, numbering.settings, "main", "somebody") as held:
            assert held is not None
            taken.set()
            release.wait(60)

    holding = threading.Thread(target=hold)
    holding.start()
    assert taken.wait(60)
    told: list[str] = []
    with pytest.raises(LockTaken):
        numbering.run(1, wait_seconds_max=0, tell=told.append)
    assert told == ["another master holds the lock; waiting"]
    published = numbering.run(1, sleep=wait)
    assert waits == [1, 1, 1]
    assert published.version == "1.0.0.0"


@pytest.mark.spec("NUM-11")
@pytest.mark.parametrize("moment", ["read", "places given", "copied to hahn"])
def test_a_master_that_lost_its_lock_publishes_nothing(numbering: Numbering, moment: str) -> None:
    numbering.run(1, 2)
    won: list[Any] = []

    def lose(what: str) -> None:
        if what == moment and not won:
            # As if its time had run out, and another were there at once.
            (lease,) = numbering.context.leases.held([coordinating.lock_name("main")])
            numbering.context.leases.release([lease])
            won.append(numbering.run(1, 2, 3, cluster="hahn"))

    with pytest.raises(LeaseLost):
        numbering.run(1, 2, 77, tell=lose)
    record = numbering.record()
    assert record.current == won[0]
    assert len(record.states) == 2
    assert key(77) not in places(numbering.last())
    # What it wrote goes, at the latest with the next master after the grace.
    numbering.settings = structs.replace(numbering.settings, grace_hours=0)
    numbering.run(1, 2, 3)
    named = {each.path.split("/")[1] for each in numbering.record().states}
    for cluster in ("arnold", "hahn"):
        assert {name.removesuffix(".index") for name in numbering.names(cluster)} <= named


@pytest.mark.spec("NUM-11")
def test_a_master_that_takes_too_long_loses_the_lock_though_it_lives(small: Numbering) -> None:
    small.settings = structs.replace(small.settings, run_seconds_max=1)

    def dawdle(what: str) -> None:
        if what == "places given":
            time.sleep(1.2)

    with pytest.raises(LeaseLost):
        small.run(1, tell=dawdle)
    assert small.record().current is None
    assert small.names("arnold") == []


@pytest.mark.spec("NUM-11")
@pytest.mark.parametrize("is_done", [True, False], ids=["published", "not published"])
def test_a_lost_answer_to_the_publication_is_looked_up(
    numbering: Numbering, monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    leases: Any = numbering.context.leases
    publish, lost = leases.publish, [0]

    def lose(path: str, data: bytes, version: int | None, lease: Lease) -> int:
        if b'"states"' in data and not lost[0]:
            lost[0] += 1
            if is_done:
                publish(path, data, version, lease)
            raise CommitUnknown("the answer was lost")
        return publish(path, data, version, lease)  # type: ignore[no-any-return]

    monkeypatch.setattr(leases, "publish", lose)
    published = numbering.run(1, 2)
    assert lost == [1]
    assert numbering.record().states == [published]
    assert places(numbering.last("hahn")).keys() == {key(1), key(2)}


@pytest.mark.spec("NUM-11", "NUM-15")
def test_a_state_that_may_have_been_published_is_not_deleted_by_its_master(
    small: Numbering, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases: Any = small.context.leases
    publish, published = leases.publish, leases.published
    silent: list[bool] = []

    def lose(path: str, data: bytes, version: int | None, lease: Lease) -> int:
        done = publish(path, data, version, lease)
        if b'"states"' in data:
            silent.append(True)
            raise CommitUnknown("the answer was lost")
        return done  # type: ignore[no-any-return]

    def unreachable(path: str) -> Any:
        if silent:
            raise LeasesUnreachable("nobody answers")
        return published(path)

    monkeypatch.setattr(leases, "publish", lose)
    monkeypatch.setattr(leases, "published", unreachable)
    with pytest.raises(LeasesUnreachable):
        small.run(1, 2)
    monkeypatch.undo()
    assert small.last().manifest.version == "1.0.0.0"
    assert small.run(1, 2, 3).version == "1.0.0.1"


@pytest.mark.spec("NUM-10")
def test_a_coordinator_that_does_not_answer_is_waited_for(small: Numbering, monkeypatch: pytest.MonkeyPatch) -> None:
    acquire = small.context.leases.acquire
    fails = [LeasesUnreachable("nobody answers")] * 2

    def hesitant(*given: Any) -> Any:
        if fails:
            raise fails.pop()
        return acquire(*given)

    monkeypatch.setattr(small.context.leases, "acquire", hesitant)
    assert small.run(1, sleep=lambda _: None).version == "1.0.0.0"


# Clusters ---------------------------------------------------------------------------------------------------------


def spoil(small: Numbering, cluster: str, how: str) -> None:
    """Break the copy of the last state that a cluster has."""
    current = small.record().current
    assert current is not None
    folder = small.folder / cluster / current.path
    file = sorted((folder / "places").iterdir())[0]
    if how == "gone":
        shutil.rmtree(folder)
    elif how == "manifest altered":
        manifest = folder / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"run": ', '"run":  '))
    elif how == "file gone":
        file.unlink()
    elif how == "file cut":
        os.truncate(file, file.stat().st_size - 1)
    else:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)


HOW = ["gone", "manifest altered", "file gone", "file cut", "file altered"]


@pytest.mark.spec("NUM-09", "NUM-15")
@pytest.mark.parametrize("how", HOW)
def test_a_broken_copy_is_replaced_by_the_one_of_another_cluster(small: Numbering, how: str) -> None:
    small.run(1, 2)
    spoil(small, "arnold", how)
    assert small.run(1, 2, 3).version == "1.0.0.1"
    assert places(small.last()).keys() == {key(1), key(2), key(3)}


@pytest.mark.spec("NUM-15")
@pytest.mark.parametrize("fault", ["it cannot be written", "it hangs"])
def test_a_cluster_that_cannot_take_the_last_state_is_not_taken_for_a_lost_state(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters = {name: str(tmp_path / name) for name in ("arnold", "hahn", "third")}
    url = f"sqlite:///{tmp_path / 'keyfold.db'}"
    with opened(url, tmp_path, clusters=clusters, copy_seconds_max=1, copy_tries_max=1) as product:
        product.run(1, 2)
        if fault == "it hangs":
            monkeypatch.setattr(folders, "copy", lambda *_, **__: time.sleep(5))
        else:
            (tmp_path / "third").write_text("a file, where a folder should be")
        with pytest.raises(StateNotBrought, match="could not be copied to third from arnold") as refused:
            product.run(1, 2, 3, cluster="third")
        assert "invalidate" not in str(refused.value)
        monkeypatch.undo()
        assert product.run(1, 2, 3).version == "1.0.0.1"


@pytest.mark.spec("NUM-15", "NUM-05")
@pytest.mark.parametrize("how", HOW)
def test_a_state_that_no_cluster_can_read_is_declared_invalid_by_a_ticketed_act(small: Numbering, how: str) -> None:
    small.run(1, 2)
    kept = places(small.last())
    lost = small.run(1, 2, 3)
    for cluster in ("arnold", "hahn"):
        spoil(small, cluster, how)
    with pytest.raises(StateLost, match="keyfold number invalidate"):
        small.run(1, 2, 4)
    record = mastering.invalidate(
        small.context, small.settings, "main", "tester", why="the disks burnt", even_if_readable=False
    )
    assert record.current is not None
    assert record.current.version == "1.0.0.0"
    assert [each.invalid for each in record.states] == ["", "the disks burnt"]
    after = small.run(1, 2, 4)
    assert after.version == "1.0.1.0"
    assert after.reason == "restart"
    assert {each: places(small.last())[each] for each in kept} == kept
    assert lost.version not in {each.version for each in small.record().states if not each.invalid}
    assert small.run(1, 2, 4, 5).version == "1.0.1.1"
    acts = small.context.store.read(lambda tx: tx.driver(f"SELECT act, detail FROM {AUDIT.name}").all())
    assert ("numbering invalidate", "main: 1.0.0.1") in [tuple(each) for each in acts]


@pytest.mark.spec("NUM-15")
def test_a_state_that_can_be_read_is_declared_invalid_only_when_it_is_meant(small: Numbering) -> None:
    with pytest.raises(NotFound):
        mastering.invalidate(small.context, small.settings, "main", "tester", why="", even_if_readable=False)
    small.run(1, 2)
    small.run(1, 2, 3)
    with pytest.raises(Conflict, match="can be read"):
        mastering.invalidate(small.context, small.settings, "main", "tester", why="", even_if_readable=False)
    mastering.invalidate(small.context, small.settings, "main", "tester", why="wrong input", even_if_readable=True)
    mastering.invalidate(small.context, small.settings, "main", "tester", why="wrong input", even_if_readable=True)
    assert small.record().current is None
    # V goes on even when nothing is left to go on from.
    assert small.run(1).version == "1.0.1.0"


@pytest.mark.spec("NUM-10", "NUM-05")
def test_a_new_coordinator_does_not_begin_anew_beside_states_that_it_does_not_know(tmp_path: Path) -> None:
    with opened(f"sqlite:///{tmp_path / 'one.db'}", tmp_path) as product:
        product.run(1, 2)
        product.run(1, 2, 3)
        kept = places(product.last())
    with opened(f"sqlite:///{tmp_path / 'two.db'}", tmp_path) as product:
        for _ in range(2):
            with pytest.raises(Conflict, match="keyfold number adopt"):
                product.run(1)
        record = mastering.adopt(product.context, product.settings, "main", "tester")
        assert record.current is not None
        assert (record.current.version, record.rebuild_next) == ("1.0.0.1", 1)
        assert record.current.clusters == ["arnold", "hahn"]
        with pytest.raises(Conflict, match="already"):
            mastering.adopt(product.context, product.settings, "main", "tester")
        assert product.run(1, 2, 3, 4).version == "1.0.1.0"
        assert {each: places(product.last())[each] for each in kept} == kept


@pytest.mark.spec("NUM-10", "NUM-05")
@pytest.mark.parametrize("after", ["a pruning", "a run while a cluster did not answer", "a refused adoption"])
def test_no_act_makes_a_new_coordinator_forget_that_it_knows_nothing(
    tmp_path: Path, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(f"sqlite:///{tmp_path / 'one.db'}", tmp_path) as product:
        product.run(1, 2)
        there = product.names("arnold"), product.names("hahn")
    with opened(f"sqlite:///{tmp_path / 'two.db'}", tmp_path) as product:
        give_great_tickets(product)
        if after == "a pruning":
            with pytest.raises(Conflict, match="another coordinator"):
                mastering.prune(product.context, product.settings, "main", "tester")
        elif after == "a refused adoption":
            monkeypatch.setattr(mastering, "readable", lambda *_: False)
            with pytest.raises(StateLost):
                mastering.adopt(product.context, product.settings, "main", "tester")
        else:
            monkeypatch.setattr(folders.Root, "names", lambda *_: (_ for _ in ()).throw(FolderUnreachable("no link")))
            with pytest.raises(Unavailable, match="whether arnold has states"):
                product.run(1)
        monkeypatch.undo()
        with pytest.raises(Conflict, match="keyfold number adopt"):
            product.run(1)
        assert (product.names("arnold"), product.names("hahn")) == there


def give_great_tickets(product: Numbering) -> None:
    """As ZooKeeper's are, beside the store's."""
    product.context.store.transact(
        lambda tx: tx.driver("INSERT INTO leases VALUES ('numbering/main', 'somebody', 1000000, 0)")
    )


@pytest.mark.spec("NUM-14")
@pytest.mark.parametrize("greater", ["one", "two"])
def test_states_beside_an_adopted_one_are_deleted_after_the_grace_only(tmp_path: Path, greater: str) -> None:
    with opened(f"sqlite:///{tmp_path / 'one.db'}", tmp_path) as product:
        if greater == "one":
            give_great_tickets(product)
        older = product.run(1, 2)
        product.run(1, 2, 3)
    with opened(f"sqlite:///{tmp_path / 'two.db'}", tmp_path) as product:
        if greater == "two":
            give_great_tickets(product)
        mastering.adopt(product.context, product.settings, "main", "tester")
        product.run(1, 2, 3, 4)
        assert (product.folder / "hahn" / older.path / "manifest.json").exists()
        product.settings = structs.replace(product.settings, grace_hours=0)
        mastering.prune(product.context, product.settings, "main", "tester")
        assert not (product.folder / "hahn" / older.path).exists()
        assert places(product.last())


@pytest.mark.spec("NUM-15")
def test_states_that_cannot_be_seen_from_here_are_not_all_given_up_by_mistake(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'keyfold.db'}"
    with opened(url, tmp_path) as product:
        product.run(1, 2)
        product.run(1, 2, 3)
    elsewhere = {name: str(tmp_path / "not mounted" / name) for name in ("arnold", "hahn")}
    with opened(url, tmp_path, clusters=elsewhere) as product:
        for even_if_readable in (False, True):
            with pytest.raises(Conflict, match="--even-if-none-is-left"):
                mastering.invalidate(
                    product.context, product.settings, "main", "tester", why="", even_if_readable=even_if_readable
                )
        assert not any(each.invalid for each in product.record().states)
        record = mastering.invalidate(
            product.context,
            product.settings,
            "main",
            "tester",
            why="all burnt",
            even_if_readable=False,
            even_if_none_is_left=True,
        )
        assert record.current is None


@pytest.mark.spec("NUM-10", "NUM-15")
def test_a_state_is_read_wherever_a_master_has_brought_it(tmp_path: Path) -> None:
    """Also when the clusters that it was published with are lost, or no longer in the settings."""
    url = f"sqlite:///{tmp_path / 'keyfold.db'}"
    clusters = {name: str(tmp_path / name) for name in ("arnold", "hahn", "third", "fourth")}
    with opened(url, tmp_path, clusters=clusters) as product:
        published = product.run(1, 2)
        assert published.clusters == ["arnold", "hahn"]
        with pytest.raises(BadInput, match="no offer"):
            product.run(cluster="third")  # it brings the state, and fails then
        shutil.rmtree(tmp_path / "hahn")
    with opened(url, tmp_path, clusters={name: clusters[name] for name in ("third", "fourth")}) as product:
        assert places(product.last())
        assert product.run(1, 2, 3, cluster="fourth").version == "1.0.0.1"


class Backup:
    """What a backup of the store has of the coordinator."""

    def __init__(self, product: Numbering) -> None:
        self._store = product.context.store
        self._rows = {
            table: [tuple(row) for row in self._store.read(lambda tx, table=table: tx.driver(f"SELECT * FROM {table}"))]  # type: ignore[misc]
            for table in ("leases", "pointers")
        }

    def restore(self) -> None:
        self._store.transact(self._put_back)

    def _put_back(self, tx: Transaction) -> None:
        mark = "?" if tx.is_sqlite else "%s"
        for table, saved in self._rows.items():
            tx.driver(f"DELETE FROM {table}")
            for row in saved:
                tx.driver(f"INSERT INTO {table} VALUES ({', '.join([mark] * len(row))})", row)
        tx.driver("UPDATE leases SET expires_at_us = 0")  # backups are older than any lease


@pytest.fixture
def stored(store_url: str, tmp_path: Path) -> Iterator[Numbering]:
    with opened(store_url, tmp_path, states_kept=1) as product:
        yield product


@pytest.mark.spec("NUM-10", "NUM-05", "NUM-14")
@pytest.mark.parametrize("lost", [1, 2])
def test_a_store_that_was_set_back_uses_no_version_again(stored: Numbering, lost: int) -> None:
    """However often it is tried: each try takes a ticket, and soon ours are as great as those that were lost."""
    stored.run(1, 2)
    backup = Backup(stored)
    last = [stored.run(*range(1, 4 + more)) for more in range(lost)][-1]
    kept = places(stored.last())
    there = stored.names("arnold"), stored.names("hahn")
    backup.restore()
    for _ in range(5):
        with pytest.raises(Conflict, match="keyfold number adopt --over"):
            stored.run(1, 2, 9)
        with pytest.raises(Conflict, match="keyfold number adopt --over"):
            mastering.prune(stored.context, stored.settings, "main", "tester")
    assert (stored.names("arnold"), stored.names("hahn")) == there
    with pytest.raises(Conflict, match="--over"):
        mastering.adopt(stored.context, stored.settings, "main", "tester")
    record = mastering.adopt(stored.context, stored.settings, "main", "tester", is_over=True)
    assert record.current is not None
    assert record.current.checksum == last.checksum
    assert stored.run(1, 2, 3, 4, 5).version == "1.0.1.0"
    assert {each: places(stored.last())[each] for each in kept} == kept
    assert stored.run(1, 2, 3, 4, 5, 6).version == "1.0.1.1"


@pytest.mark.spec("NUM-10", "NUM-05")
def test_a_backup_that_was_made_while_a_master_ran_is_known_to_be_old(stored: Numbering) -> None:
    """Its ticket is in the backup, so that by the tickets alone its state would be one that a dead master left."""
    stored.run(1, 2)
    backups: list[Backup] = []
    stored.run(1, 2, 3, tell=lambda step: backups.append(Backup(stored)) if step == "read" else None)
    backups[0].restore()
    for _ in range(3):
        with pytest.raises(Conflict, match=r"1\.0\.0\.1 of run 2 was published to arnold"):
            stored.run(1, 2, 9)
    record = mastering.invalidate(
        stored.context, stored.settings, "main", "tester", why="", even_if_readable=True, even_if_none_is_left=True
    )
    # A person has decided that V rises: what was published in the last one is never used again.
    assert record.rebuild_next == 1
    assert stored.run(1, 2, 9).version == "1.0.1.0"


@pytest.mark.spec("NUM-10", "NUM-15")
def test_a_master_that_died_before_it_told_the_clusters_is_made_up_for(
    stored: Numbering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mastering, "leave_receipts", lambda *_: (_ for _ in ()).throw(SystemExit(9)))
    with pytest.raises(SystemExit):
        stored.run(1, 2)
    monkeypatch.undo()
    backup = Backup(stored)
    assert stored.run(1, 2, 3).version == "1.0.0.1"
    backup.restore()
    with pytest.raises(Conflict, match="--over"):
        stored.run(1, 2, 9)


@pytest.mark.spec("NUM-10", "NUM-05")
def test_a_paused_master_takes_back_nothing_of_what_the_clusters_were_told(stored: Numbering) -> None:
    root = stored.root("arnold")
    first = stored.run(1, 2)
    newer = stored.run(1, 2, 3)
    mastering.leave_receipts(stored.settings, "main", first)
    assert max(receipts.found(root, "main")) == receipts.of(newer)
    mastering.leave_receipts(stored.settings, "main", newer)
    assert receipts.found(root, "main") == [receipts.of(newer)]


@pytest.mark.spec("NUM-10", "NUM-05")
def test_nothing_is_published_while_too_few_clusters_can_say_what_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = folders.Root.names

    def silent(root: folders.Root, path: str = "") -> list[str]:
        if root.url.endswith("hahn"):
            raise FolderUnreachable("no link")
        return names(root, path)

    with opened(f"sqlite:///{tmp_path / 'one.db'}", tmp_path, copies_min=1) as product:
        product.run(1, 2)
        monkeypatch.setattr(folders.Root, "names", silent)
        with pytest.raises(Unavailable, match="whether there are newer states of main is not known: hahn"):
            product.run(1, 2, 3)
        # Every state has two copies, so that arnold would know.
        product.settings = structs.replace(product.settings, copies_min=2)
        assert product.run(1, 2, 3).version == "1.0.0.1"


@pytest.mark.spec("NUM-14", "NUM-15")
def test_a_whole_state_that_the_record_does_not_know_has_the_grace_of_others(
    stored: Numbering, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can tell by its files whether it was ever published."""
    monkeypatch.setattr(Master, "_publish", lambda *_: (_ for _ in ()).throw(SystemExit(9)))
    with pytest.raises(SystemExit):
        stored.run(1, 2)
    monkeypatch.undo()
    (stray,) = stored.names("hahn")
    for _ in range(2):
        stored.run(1, 2, 3)
        assert stray in stored.names("arnold")
        assert stray in stored.names("hahn")
    assert list(stored.record().strays) == [f"main/{stray}"]
    stored.settings = structs.replace(stored.settings, grace_hours=0)
    stored.run(1, 2, 3)
    assert stray not in stored.names("arnold") + stored.names("hahn")
    stored.run(1, 2, 3)
    assert stored.record().strays == {}


@pytest.mark.spec("NUM-10")
def test_a_first_master_that_died_stands_in_nobodys_way(small: Numbering, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Master, "_publish", lambda *_: (_ for _ in ()).throw(SystemExit(9)))
    with pytest.raises(SystemExit):
        small.run(1, 2)
    monkeypatch.undo()
    assert any((path / "manifest.json").exists() for path in small.cluster("arnold").iterdir())
    assert small.run(1, 2, 3).version == "1.0.0.0"
    assert len(small.names("hahn")) == 1


@pytest.mark.spec("NUM-15")
def test_without_a_second_cluster_nothing_is_published_unless_that_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path / 'keyfold.db'}"
    (tmp_path / "hahn").write_text("a file, where a folder should be")
    with opened(url, tmp_path) as product:
        with pytest.raises(CopiesLacking, match="hahn"):
            product.run(1, 2)
        assert product.record().current is None
        assert product.names("arnold") == []
    with opened(url, tmp_path, copies_min=1) as product:
        assert product.run(1, 2).clusters == ["arnold"]


@pytest.mark.spec("NUM-10")
def test_a_copy_that_fails_is_tried_again_and_one_that_hangs_is_left(
    small: Numbering, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, tries = folders.copy, [0]

    def failing(*given: Any, **more: Any) -> None:
        tries[0] += 1
        if tries[0] < 3:
            raise FolderUnreachable("the link is down")
        copy(*given, **more)

    monkeypatch.setattr(folders, "copy", failing)
    assert small.run(1).clusters == ["arnold", "hahn"]
    assert tries == [3]

    small.settings = structs.replace(small.settings, copy_seconds_max=1, copy_tries_max=1)
    monkeypatch.setattr(folders, "copy", lambda *_, **__: time.sleep(5))
    with pytest.raises(CopiesLacking, match="longer than 1 seconds"):
        small.run(1, 2)


@pytest.mark.spec("NUM-10")
def test_offers_that_must_be_made_are_made_under_the_lock(small: Numbering) -> None:
    """Those that were made before the wait for another master would be older than what it has published."""

    def made() -> str:
        assert coordinating.holder(small.context.leases, "main") is not None
        return small.offers(1, 2)

    assert small.master().run(made).new == 2


@pytest.mark.spec("NUM-09")
def test_a_copy_for_a_remote_cluster_is_staged_in_the_scratch_folder(small: Numbering) -> None:
    small.run(1)
    state, scratch = small.last(), small.folder / "scratch"
    target = folders.Root(f"memory://{small.folder.name}")
    manifest = state.root.read(f"{state.path}/manifest.json")
    folders.copy(state.root, target, state.path, state.manifest.files, manifest, scratch=scratch)
    assert [*scratch.iterdir()] == []
    states.verify(states.read(target, state.path, checksum=state.checksum))
    target.remove("")


@pytest.mark.spec("NUM-14")
def test_old_states_get_a_tombstone_and_are_deleted_after_the_grace(small: Numbering) -> None:
    for last in range(1, 6):
        small.run(*range(last))
    kept = {each.path.split("/")[1] for each in small.record().states[-2:]}
    for cluster in ("arnold", "hahn"):
        assert {name.removesuffix(".index") for name in small.names(cluster)} == kept
    assert [each.is_deleted for each in small.record().states] == [True, True, True, False, False]
    small.settings = structs.replace(small.settings, grace_hours=1)
    small.run(*range(6))
    dropped = small.record().states[3]
    assert dropped.dropped_at_us
    assert not dropped.is_deleted
    assert (small.folder / "arnold" / dropped.path / "manifest.json").exists()


@pytest.mark.spec("NUM-14")
def test_pruning_leaves_alone_what_is_not_of_a_dead_master(small: Numbering) -> None:
    published = small.run(1)
    folder = small.cluster("hahn")
    ours = ["0-0123456789abcdef", f"0-0123456789abcdef{folders.WRITING}0123"]
    theirs = ["notes", f"{published.ticket + 1_000_000_000}-0123456789abcdef"]
    for name in (*ours, *theirs):
        (folder / name).mkdir()
    pruned = mastering.prune(small.context, small.settings, "main", "tester")
    assert pruned.leftovers == len(ours)
    assert set(theirs) <= set(small.names("hahn"))
    assert not set(ours) & set(small.names("hahn"))
    assert places(small.last("hahn"))


# Types, versions, look-ups ------------------------------------------------------------------------------------------


@pytest.mark.spec("NUM-14")
def test_types_are_kept_side_by_side_and_data_find_the_state_that_fits(tmp_path: Path) -> None:
    types = {"blue": {"number": 1}, "turbo": {"number": 2, "scheme": 1}}
    with opened(f"sqlite:///{tmp_path / 'keyfold.db'}", tmp_path, types=types) as product:
        product.run(1, 2, type_name="blue")
        product.run(1, 2, 3, type_name="blue")
        product.run(1, 2, 3, type_name="blue", is_forced=True)
        assert product.run(5, type_name="turbo").version == "2.1.0.0"
        record = product.record("blue")
        assert [each.version for each in record.states] == ["1.0.0.0", "1.0.0.1", "1.0.1.0"]
        assert comparing.chosen(record, None).version == "1.0.1.0"
        assert comparing.chosen(record, Version.parse("1.0.0.0")).version == "1.0.0.1"
        with pytest.raises(NotFound, match=r"1\.0\.0\.0, 1\.0\.0\.1, 1\.0\.1\.0"):
            comparing.chosen(record, Version.parse("1.0.0.2"))
        with pytest.raises(NotFound):
            comparing.chosen(product.record("nothing"), None)


def compatible(product: Numbering, data: str, places_max: int = 100) -> comparing.Compatibility:
    return comparing.compatible(
        product.last(), Version.parse(data), places_max=places_max, megabytes_max=500, scratch=None
    )


@pytest.mark.spec("NUM-06")
def test_data_fit_except_where_a_place_was_given_to_another_offer(tmp_path: Path) -> None:
    with opened(f"sqlite:///{tmp_path / 'keyfold.db'}", tmp_path, ttl_runs=0) as product:
        product.run(*range(20))
        first = places(product.last())
        product.run(*range(5, 20))  # five places are freed
        assert compatible(product, "1.0.0.0").answer == "yes"
        product.run(*range(5, 40))
        now = places(product.last())
        meant = {place: each for each, place in first.items()}
        wrong = sorted(place for each, place in now.items() if meant.get(place, each) != each)
        told = compatible(product, "1.0.0.0")
        assert wrong
        assert (told.answer, told.reassigned, list(told.places)) == ("yes except", len(wrong), wrong)
        assert len(compatible(product, "1.0.0.0", places_max=1).places) == 1
        assert compatible(product, "1.0.0.1").answer == "yes"
        no = compatible(product, "1.0.0.2")
        assert no.answer == "no"
        assert "older than the data's 2" in no.explanation


@pytest.mark.spec("NUM-13")
def test_masters_index_what_they_publish(small: Numbering) -> None:
    small.run(*range(50))
    state = small.last()
    expected = places(state)
    with finding.Index(state) as index:
        assert {each: found.place for each, found in index.by_keys([key(n) for n in range(60)]).items()} == expected
        back = index.by_places([*expected.values(), Place(0, 9_999), Place(9, 0)])
        assert {found.key: place for place, found in back.items()} == expected
    with pytest.raises(finding.IndexLacking, match="keyfold number index"):
        finding.Index(small.last("hahn"))


@pytest.mark.spec("NUM-13")
@pytest.mark.parametrize("cluster", ["arnold", "hahn"])
def test_look_ups_are_answered_whichever_cluster_has_published(stored: Numbering, cluster: str) -> None:
    state = stored.run(*range(20), cluster=cluster)
    look = partial(finding.look_up, keys=[key(3), key(77)], places=[])
    by_key, _ = mastering.read_anywhere(stored.settings, state, look)
    assert {each: found.place for each, found in by_key.items()} == {key(3): places(stored.last())[key(3)]}
    stored.root(cluster).remove(finding.index_path(state.path))
    with pytest.raises(finding.IndexLacking):
        mastering.read_anywhere(stored.settings, state, look)


@pytest.mark.spec("NUM-06", "NUM-15")
@pytest.mark.parametrize("cluster", ["arnold", "hahn"])
@pytest.mark.parametrize("how", HOW)
def test_what_is_asked_of_a_state_is_answered_by_any_whole_copy(small: Numbering, how: str, cluster: str) -> None:
    small.run(1, 2)
    state = small.run(1, 2, 3)
    spoil(small, cluster, how)
    compare = partial(
        comparing.compatible, data=Version.parse("1.0.0.0"), places_max=9, megabytes_max=500, scratch=None
    )
    assert mastering.read_anywhere(small.settings, state, compare).answer == "yes"
    with pytest.raises(StateLost, match=f"cannot be read: {cluster}"):
        mastering.read_anywhere(small.settings, state, compare, cluster)


@pytest.mark.spec("NUM-13")
def test_an_index_of_another_state_is_refused(small: Numbering) -> None:
    small.run(1, 2)
    state = small.last()
    manifest = small.folder / "arnold" / finding.index_path(state.path) / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"checksum": "other"}))
    with pytest.raises(FolderBroken, match="another state"):
        finding.Index(state)


# Plans --------------------------------------------------------------------------------------------------------------


def request(product: Numbering, offers: str, scheme: int = 0, **given: Any) -> running.Request:
    return running.asked(
        product.settings,
        offers=offers,
        before=product.last(),
        target=product.root("arnold"),
        path="planned",
        type=1,
        scheme=scheme,
        **given,
    )


@pytest.mark.spec("NUM-04", "NUM-07")
def test_a_plan_tells_what_a_run_a_compaction_and_a_resharding_would_do(small: Numbering) -> None:
    small.run(*range(30))
    small.run(*range(10, 30))
    offers = small.offers(*range(15, 40))
    before = small.last()
    names = small.names("arnold")

    plan = planning.of_run(request(small, offers), 64)
    resharded = planning.of_run(request(small, offers, scheme=1), 64)
    assert small.names("arnold") == names

    ran = running.run(request(small, offers))
    assert plan.run is not None
    assert (plan.run.known, plan.run.new, plan.run.holes) == (15, 10, ran.manifest.summary.holes)
    assert {row.shard_id: row.places for row in plan.shards} == {
        each.shard_id: each.top for each in ran.manifest.shards
    }
    shutil.rmtree(small.folder / "arnold" / "planned")
    compacted = running.run(request(small, offers, is_forced=True))
    tops = {each.shard_id: each.top for each in compacted.manifest.shards}
    assert {row.shard_id: row.compacted for row in plan.shards if row.compacted} == tops
    assert plan.bytes_saved == 64 * (sum(row.places for row in plan.shards) - sum(tops.values()))
    assert plan.moves is not None
    moved = [row for row in rows(compacted, "remap") if row["old_doc_id"] != row["doc_id"]]
    assert (plan.moves.places, plan.moves.shards) == (len(moved), 0)
    assert "1.0.0, generations 0 to 0" in plan.invalidated

    shutil.rmtree(small.folder / "arnold" / "planned")
    moved = [
        row
        for row in rows(running.run(request(small, offers, scheme=1)), "remap")
        if row["old_shard_id"] != row["shard_id"]
    ]
    assert resharded.moves is not None
    assert resharded.moves.shards == len(moved) > 0

    quick = planning.of_state(before, 1.2, 64)
    assert quick.run is None
    assert quick.holes == before.manifest.summary.holes == 10
    assert quick.would_rebuild


# The topic of exported offers ---------------------------------------------------------------------------------------


TOPIC = "offers"


@pytest.fixture
def exported(store_url: str, tmp_path: Path) -> Iterator[Numbering]:
    with opened(store_url, tmp_path, offers_topic=TOPIC) as product:
        yield product


def export(product: Numbering, *messages: tuple[str, int, object], kind: str = "offer") -> None:
    sent = [
        Message(
            key=name,
            version=version,
            event_time_us=version,
            schema="offer/1",
            kind=kind,
            payload=said if isinstance(said, bytes) else json.dumps(said).encode(),
        )
        for name, version, said in messages
    ]
    product.context.store.transact(lambda tx: outbox.put(tx, product.context.topics, TOPIC, sent))
    relay = Relay(product.context, TOPIC, "relay")
    relay_all(relay)
    relay.stop()
    (consumer,) = consumers(product.context)
    worker = ConsumerWorker(product.context, consumer, "w1")
    consume_all(worker)
    worker.stop()


def offer(n: int, **more: object) -> dict[str, object]:
    each = key(n)
    return {
        "offer_id": each.offer_id,
        "business_id": each.business_id,
        "shop_id": each.shop_id,
        "warehouse_id": each.warehouse_id,
        **more,
    }


@pytest.mark.spec("NUM-08", "NUM-02")
def test_exported_offers_become_the_offers_of_a_generation(exported: Numbering) -> None:
    export(exported, *((f"o{n}", 1, offer(n, price=5)) for n in range(6)))
    export(exported, ("o1", 2, offer(1, status="sold")), ("o2", 2, offer(2, is_banned=True)))
    export(exported, ("o3", 3, offer(3, status="removed")), ("o3", 4, offer(3, status="active")))
    target = exported.folder / "built"
    built = building.build_offers(exported.context.store, str(target))
    assert built.offers == 4
    published = exported.master().run(str(target))
    assert published.new == 4
    assert places(exported.last()).keys() == {key(0), key(3), key(4), key(5)}
    with pytest.raises(Conflict):
        building.build_offers(exported.context.store, str(target))


@pytest.mark.spec("NUM-08")
def test_an_older_version_and_other_kinds_change_nothing_and_poison_is_set_aside(exported: Numbering) -> None:
    export(exported, ("o1", 5, offer(1)))
    # As a replay would bring it.
    (consumer,) = consumers(exported.context)
    old = Message(key="o1", version=4, event_time_us=4, schema="", kind="offer", payload=json.dumps(offer(9)).encode())
    exported.context.store.transact(lambda tx: consumer.apply(tx, [Record(0, 0, old), Record(0, 1, old)]))
    export(exported, ("o1", 9, offer(8)), kind="moderation")
    wrong = (b"{", {"offer_id": "x"}, offer(1, business_id=-1), offer(1, business_id=2**63), offer(1, offer_id="a\0b"))
    export(exported, *((f"bad{at}", 1, said) for at, said in enumerate(wrong)), ("o2", 1, offer(2)))
    building.build_offers(exported.context.store, str(exported.folder / "built"))
    assert exported.master().run(str(exported.folder / "built")).new == 2
    assert places(exported.last()).keys() == {key(1), key(2)}
    dead = exported.context.store.read(lambda tx: tx.driver("SELECT count(*) FROM dead_letters").scalar_one())
    assert dead == len(wrong)


@pytest.mark.spec("NUM-08")
def test_offers_that_are_gone_for_long_are_forgotten(exported: Numbering) -> None:
    export(exported, ("o1", 1, offer(1, status="removed")), ("o2", 1, offer(2)))
    store = exported.context.store
    store.transact(lambda tx: tx.driver("UPDATE numbering_offers SET moved_at_us = 0"))
    Upkeep(exported.context).step()
    left = store.read(lambda tx: tx.driver("SELECT message_key FROM numbering_offers").scalars().all())
    assert left == ["o2"]


@pytest.mark.spec("NUM-08")
def test_an_offer_that_comes_back_while_it_is_forgotten_stays(exported: Numbering) -> None:
    export(exported, ("o1", 1, offer(1, status="removed")))
    store = exported.context.store
    store.transact(lambda tx: tx.driver("UPDATE numbering_offers SET moved_at_us = 0"))

    def forget(tx: Transaction) -> int:
        execute = tx.execute

        def between(statement: Any, parameters: Any = None) -> Any:
            found = execute(statement, parameters)
            if statement.is_select:
                chosen = found.scalars().all()
                tx.driver("UPDATE numbering_offers SET is_live = 1")
                return SimpleNamespace(scalars=lambda: chosen)
            return found

        tx.execute = between  # type: ignore[method-assign]
        return building.forget_dead(tx, 10)

    assert store.transact(forget) == 0
    assert store.read(building.live_count) == 1


@pytest.mark.spec("NUM-01")
def test_offers_that_change_while_they_are_numbered_are_noticed(
    small: Numbering, monkeypatch: pytest.MonkeyPatch
) -> None:
    offers = small.offers(1, 2, 3)
    write = engines.DuckDB.write

    def changed(engine: Any, expression: Any, folder: Path) -> None:
        write_offers(Path(offers), columns(key(n) for n in range(5)))
        write(engine, expression, folder)

    monkeypatch.setattr(engines.DuckDB, "write", changed)
    with pytest.raises(BadInput, match="were given"):
        small.master().run(offers)
    assert small.record().current is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"types": {"main": {"number": 1}, "test": {"number": 1}}}, "number 1"),
        ({"clusters": {"arnold": "/data", "hahn": "/data/"}}, "no second copy"),
    ],
)
def test_settings_that_would_mix_up_types_or_clusters_are_refused(
    tmp_path: Path, given: dict[str, Any], words: str
) -> None:
    with (
        pytest.raises(SettingsWrong, match=words),
        opened(f"sqlite:///{tmp_path / 'keyfold.db'}", tmp_path, **given),
    ):
        pass


@pytest.mark.spec("NUM-08")
def test_what_is_wrong_with_the_input_is_said_and_nothing_is_published(small: Numbering) -> None:
    small.run(*range(20))
    before = small.record()
    cases = {
        "no offer in the input": small.offers(),
        "20": small.offers(1),
        "more than once": small.written(columns([*(key(n) for n in range(20)), key(3), key(3)])),
        "business_id 25, offer_id 'offer 100'": small.written(
            columns([*(key(n) for n in range(20)), key(100), key(100)])
        ),
    }
    for words, offers in cases.items():
        with pytest.raises(BadInput, match=words):
            small.master().run(offers)
    after = small.record()
    assert after.states == before.states
    assert not [name for name in small.names("arnold") if folders.WRITING in name]
    assert small.run(1, is_shrinking_allowed=True).known == 1
