"""States on file systems, local and remote: whole or not at all, never overwritten, and refused where damaged."""

import errno
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import fsspec
import msgspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from keyfold.bulk import engines, folders
from keyfold.bulk.engines import DuckDB
from keyfold.bulk.folders import MANIFEST, FolderBroken, FolderUnreachable, Root
from keyfold.core.errors import BadInput, Conflict, KeyfoldError, NotFound
from keyfold.numbering.model import Key
from keyfold.numbering.service import finding, running, states
from keyfold.numbering.service.states import Stored
from tests.numbering_runs import TEXTS, leftovers, outcome, places, request, write_offers

KEYS = [Key(1, text, 1, 1) for text in TEXTS]


class FailingFileSystem(MemoryFileSystem):
    """A remote file system whose disk or network fails at one of its operations."""

    protocol = "failing"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    operations: ClassVar[int] = 0
    fails_at: ClassVar[int | None] = None

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("failing://")))

    @classmethod
    def count(cls) -> None:
        cls.operations += 1
        if cls.operations == cls.fails_at:
            raise OSError(errno.EIO, "the network is gone")

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        self.count()
        # What came before the failure stays.
        with self.open(rpath, "wb") as file:
            file.write(Path(lpath).read_bytes()[:10])
        self.count()
        super().put_file(lpath, rpath, **options)

    def get_file(self, rpath: str, lpath: str, **options: Any) -> None:
        self.count()
        super().get_file(rpath, lpath, **options)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "rb":
            self.count()
        return super()._open(path, mode, **options)


@pytest.fixture
def failing() -> Iterator[type[FailingFileSystem]]:
    fsspec.register_implementation("failing", FailingFileSystem, clobber=True)
    FailingFileSystem.operations, FailingFileSystem.fails_at = 0, None
    yield FailingFileSystem
    FailingFileSystem.store.clear()
    FailingFileSystem.pseudo_dirs[:] = [""]


class HangingFileSystem(FailingFileSystem):
    """One whose first upload hangs at one of its files, and fails when it goes on."""

    protocol = "hanging"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    hangs_at: ClassVar[int] = 0
    hung: ClassVar[threading.Event]
    released: ClassVar[threading.Event]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.removeprefix("hanging://")))

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        is_late = self.wait()
        MemoryFileSystem.put_file(self, lpath, rpath, **options)
        if is_late:
            self.pipe_file(rpath, Path(lpath).read_bytes()[:10])
            raise OSError(errno.EIO, "the network is gone")

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        is_late = self.wait()
        super().cp_file(path1, path2, **options)
        if is_late:
            raise OSError(errno.EIO, "the network is gone")

    @classmethod
    def wait(cls) -> bool:
        cls.operations += 1
        if cls.operations != cls.hangs_at:
            return False
        cls.hung.set()
        assert cls.released.wait(60)
        return True


@pytest.fixture
def hanging() -> Iterator[type[HangingFileSystem]]:
    fsspec.register_implementation("hanging", HangingFileSystem, clobber=True)
    HangingFileSystem.operations = 0
    HangingFileSystem.hung, HangingFileSystem.released = threading.Event(), threading.Event()
    yield HangingFileSystem
    HangingFileSystem.released.set()
    HangingFileSystem.store.clear()
    HangingFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(params=["local", "memory"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Root]:
    if request.param == "local":
        yield Root(str(tmp_path / "cluster"))
        return
    root = Root(f"memory://{uuid.uuid4().hex}/cluster")
    yield root
    with root.failing():
        root._fs.rm(root.path, recursive=True) if root.exists() else None


@pytest.fixture
def offers(tmp_path: Path) -> str:
    return write_offers(tmp_path / "offers.parquet", KEYS[:20])


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


def first_and_second(root: Root, offers: str, tmp_path: Path) -> tuple[Stored, Stored]:
    first = running.run(request(offers, root, path="states/1"))
    more = write_offers(tmp_path / "more.parquet", KEYS[10:])
    return first, running.run(request(more, root, first, path="states/2", ttl_runs=0))


@pytest.mark.spec("NUM-09")
def test_a_state_reads_back_as_it_was_written_and_the_next_run_builds_on_it(
    cluster: Root, offers: str, tmp_path: Path
) -> None:
    first, second = first_and_second(cluster, offers, tmp_path)
    for state in (first, second):
        read = states.read(cluster, state.path, checksum=state.checksum)
        states.verify(read)
        assert (read.manifest, read.checksum) == (state.manifest, state.checksum)
        assert outcome(read) == outcome(state)
    assert second.manifest.parent == first.checksum
    assert sorted(places(second)) == sorted(KEYS[10:])
    assert sorted(places(second, "expired_docs")) == sorted(KEYS[:10])
    assert leftovers(tmp_path) == []


@pytest.mark.spec("NUM-09")
def test_what_is_there_is_never_overwritten(cluster: Root, offers: str) -> None:
    first = running.run(request(offers, cluster, path="state"))
    with pytest.raises(Conflict, match="is there already"):
        running.run(request(offers, cluster, first, path="state"))
    states.verify(states.read(cluster, "state", checksum=first.checksum))


@pytest.mark.spec("NUM-09")
def test_of_two_that_write_one_state_the_second_is_refused(cluster: Root, offers: str, tmp_path: Path) -> None:
    other: list[Stored] = []

    def meanwhile(step: str) -> None:
        if step == "checked":
            other.append(running.run(request(offers, cluster, path="state")))

    with pytest.raises(Conflict):
        running.run(request(offers, cluster, path="state"), meanwhile)
    states.verify(states.read(cluster, "state", checksum=other[0].checksum))
    assert leftovers(tmp_path) == []


def flipped(data: bytes) -> bytes:
    return data[:-20] + bytes([data[-20] ^ 1]) + data[-19:]


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "a bit is another": flipped,
    "the end is missing": lambda data: data[:-1],
    "it is empty": lambda _: b"",
    "it is longer": lambda data: data + b"x",
    "it is gone": lambda _: None,
}


def damage(root: Root, path: str, change: Callable[[bytes], bytes | None]) -> None:
    changed = change(root.read(path))
    root._fs.rm_file(root.at(path))
    if changed is not None:
        root._fs.pipe_file(root.at(path), changed)


@pytest.mark.spec("NUM-09", "NUM-15")
@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_state_is_refused_and_nothing_is_built_on_it(
    cluster: Root, offers: str, tmp_path: Path, how: str
) -> None:
    state = running.run(request(offers, cluster, path="state"))
    file = state.listed("places")[0].path
    damage(cluster, f"state/{file}", DAMAGES[how])
    state = states.read(cluster, "state", checksum=state.checksum)
    with pytest.raises(FolderBroken, match=file):
        states.verify(state)
    with pytest.raises(FolderBroken, match=file):
        running.run(request(offers, cluster, state, path="next"))
    with pytest.raises(FolderBroken, match=file):
        finding.build(state, 500)
    assert cluster.names() == ["state"]
    assert leftovers(tmp_path) == []


def with_manifest(**changes: Any) -> Callable[[bytes], bytes]:
    return lambda data: msgspec.json.encode(msgspec.json.decode(data) | changes)


def listing(path: str) -> Callable[[bytes], bytes]:
    return with_manifest(files=[{"path": path, "bytes": 1, "sha256": "0"}])


@pytest.mark.spec("NUM-09")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda _: b"", "cannot be read"),
        (lambda data: data[:-5], "cannot be read"),
        (lambda _: b"\xff\xfe", "cannot be read"),
        (with_manifest(version="1.0"), "cannot be read"),
        (with_manifest(format=3), "format 3"),
        (listing("../places/00000.parquet"), "outside"),
        (listing("places/../../00000.parquet"), "outside"),
        (listing("/etc/passwd"), "outside"),
    ],
)
def test_a_manifest_that_was_altered_is_refused(
    cluster: Root, offers: str, change: Callable[[bytes], bytes], words: str
) -> None:
    state = running.run(request(offers, cluster, path="state"))
    damage(cluster, f"state/{MANIFEST}", change)
    with pytest.raises(FolderBroken, match=words):
        states.read(cluster, "state")
    with pytest.raises(FolderBroken, match="checksum"):
        states.read(cluster, "state", checksum=state.checksum)


@pytest.mark.spec("NUM-09", "NUM-03")
def test_no_byte_of_a_manifest_can_change_unnoticed(cluster: Root, offers: str) -> None:
    """Nobody has its checksum where a run goes from files to files: with another run's number keys expired early."""
    random = Random(7)
    state = running.run(request(offers, cluster, path="state"))
    path, data = f"state/{MANIFEST}", cluster.read(f"state/{MANIFEST}")
    for at in range(len(data)):
        cluster.write(path, data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :])
        with pytest.raises(FolderBroken):
            states.read(cluster, "state")
    cluster.write(path, data.replace(b'"run": 1,', b'"run": 91,'))
    with pytest.raises(FolderBroken, match="its own checksum"):
        states.read(cluster, "state")
    cluster.write(path, data)
    assert states.read(cluster, "state").manifest == state.manifest


@pytest.mark.spec("NUM-09")
def test_a_state_from_before_manifests_had_a_checksum_of_their_own_is_read(cluster: Root, offers: str) -> None:
    state = running.run(request(offers, cluster, path="state"))
    older = msgspec.json.decode(cluster.read(f"state/{MANIFEST}")) | {"format": 1}
    del older["seal"]
    cluster.write(f"state/{MANIFEST}", msgspec.json.encode(older))
    assert running.run(request(offers, cluster, states.read(cluster, "state"), path="next")).manifest.run == 2
    assert state.manifest.format == 2


@pytest.mark.spec("NUM-09")
def test_a_folder_without_a_manifest_is_no_state(cluster: Root, offers: str) -> None:
    with pytest.raises(NotFound, match="no state"):
        states.read(cluster, "state")
    running.run(request(offers, cluster, path="state"))
    damage(cluster, f"state/{MANIFEST}", lambda _: None)
    with pytest.raises(NotFound, match="no state"):
        states.read(cluster, "state")


@pytest.mark.spec("NUM-09")
def test_a_run_whose_upload_fails_anywhere_leaves_nothing_and_can_be_done_again(
    failing: type[FailingFileSystem], offers: str, tmp_path: Path, scratch: Path
) -> None:
    root = Root("failing://far/cluster")
    for failure in range(1, 100):  # how many files there are depends on the threads that write them
        failing.operations, failing.fails_at = 0, failure
        try:
            state = running.run(request(offers, root, path="state", scratch=scratch))
            break
        except FolderUnreachable as error:
            gone = str(error)
        assert "the network is gone" in gone
        failing.fails_at = None
        assert root.names("state") == []
        assert list(scratch.iterdir()) == []
    assert 6 <= failing.operations < failure
    failing.fails_at = None
    states.verify(state)


@pytest.mark.spec("NUM-09")
def test_a_run_whose_downloads_fail_anywhere_writes_nothing(
    failing: type[FailingFileSystem], offers: str, tmp_path: Path, scratch: Path
) -> None:
    root = Root("failing://far/cluster")
    root.put(Path(offers), "offers/1.parquet")
    before = running.run(request(offers, root, path="state"))
    target = tmp_path / "target"
    failing.operations = 0
    running.run(request("failing://far/cluster/offers", target / "counted", before, scratch=scratch))
    operations = failing.operations
    assert operations >= 3
    for failure in range(1, operations + 1):
        failing.operations, failing.fails_at = 0, failure
        with pytest.raises(FolderUnreachable, match=r"failing://far/cluster.*: the network is gone"):
            running.run(request("failing://far/cluster/offers", target / "run", before, scratch=scratch))
        assert sorted(path.name for path in target.iterdir()) == ["counted"]
        assert list(scratch.iterdir()) == []


@pytest.mark.spec("NUM-09", "NUM-15")
def test_a_copy_that_fails_anywhere_is_done_again_and_becomes_visible_whole(
    failing: type[FailingFileSystem], offers: str, tmp_path: Path
) -> None:
    source, target = Root(str(tmp_path / "near")), Root("failing://far/cluster")
    state = running.run(request(offers, source, path="state"))

    def copy() -> None:
        manifest = states.encoded(state.manifest)
        folders.copy(source, target, "state", state.manifest.files, manifest)

    for failure in range(1, 100):
        failing.operations, failing.fails_at = 0, failure
        try:
            copy()
        except FolderUnreachable:
            assert not target.exists(f"state/{MANIFEST}")
        else:
            break
    assert failure > 6
    failing.fails_at = None
    states.verify(states.read(target, "state", checksum=state.checksum))
    copy()


@pytest.mark.spec("NUM-09", "NUM-15")
@pytest.mark.parametrize("step", ["first file", "manifest", "first name", "name of the manifest"])
def test_a_copy_that_was_left_behind_spoils_nothing_of_the_one_that_was_made_since(
    hanging: type[HangingFileSystem], offers: str, tmp_path: Path, step: str
) -> None:
    source, target = Root(str(tmp_path / "near")), Root("hanging://far/cluster")
    state = running.run(request(offers, source, path="state"))
    manifest = states.encoded(state.manifest)

    def copy(go_on: Callable[[], None]) -> None:
        folders.copy(source, target, "state", state.manifest.files, manifest, scratch=tmp_path, go_on=go_on)

    count = len(state.manifest.files)
    hanging.hangs_at = {"first file": 1, "manifest": count + 1, "first name": count + 2}.get(step, 2 * count + 2)
    with pytest.raises(FolderUnreachable, match="took longer"):
        folders.within(1, copy, "the first try")
    folders.within(30, copy, "the second try")
    hanging.released.set()
    for thread in threading.enumerate():
        if thread.name == "the first try":
            thread.join(60)
    states.verify(states.read(target, "state", checksum=state.checksum))
    assert target.names() == ["state"]
    assert leftovers(tmp_path) == []


@pytest.mark.spec("NUM-09", "NUM-15")
def test_a_copy_that_ended_within_its_manifest_is_done_again(cluster: Root, offers: str, tmp_path: Path) -> None:
    source = Root(str(tmp_path / "near"))
    state = running.run(request(offers, source, path="state"))
    manifest = states.encoded(state.manifest)
    folders.copy(source, cluster, "state", state.manifest.files, manifest)
    damage(cluster, f"state/{MANIFEST}", lambda data: data[:100])
    damage(cluster, f"state/{state.manifest.files[0].path}", lambda _: None)
    folders.copy(source, cluster, "state", state.manifest.files, manifest)
    states.verify(states.read(cluster, "state", checksum=state.checksum))


@pytest.mark.spec("NUM-09")
def test_nothing_else_is_removed_with_a_folder_whose_name_could_be_a_pattern(cluster: Root, offers: str) -> None:
    for path in ("a", "[a]", "*"):
        running.run(request(offers, cluster, path=path))
    cluster.remove("*")
    cluster.remove("[a]")
    states.verify(states.read(cluster, "a"))
    for path in ("[a]", "*"):
        with pytest.raises(NotFound):
            states.read(cluster, path)
        running.run(request(offers, cluster, path=path))


@pytest.mark.spec("NUM-09", "NUM-15")
@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_state_is_not_copied(cluster: Root, offers: str, tmp_path: Path, how: str) -> None:
    source = Root(str(tmp_path / "near"))
    state = running.run(request(offers, source, path="state"))
    damage(source, f"state/{state.listed('places')[-1].path}", DAMAGES[how])
    with pytest.raises(FolderBroken):
        folders.copy(source, cluster, "state", state.manifest.files, states.encoded(state.manifest))
    assert cluster.names() == []
    assert leftovers(tmp_path) == []


@pytest.mark.spec("NUM-09")
def test_a_copy_is_not_made_over_another_state(cluster: Root, offers: str, tmp_path: Path) -> None:
    source = Root(str(tmp_path / "near"))
    state = running.run(request(offers, source, path="state"))
    other = running.run(request(offers, cluster, path="state", type=2))
    with pytest.raises(FolderBroken, match="is another"):
        folders.copy(source, cluster, "state", state.manifest.files, states.encoded(state.manifest))
    states.verify(states.read(cluster, "state", checksum=other.checksum))


@pytest.mark.spec("NUM-09")
def test_a_disk_that_is_full_anywhere_in_a_run_leaves_nothing(
    offers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "cluster"
    before = running.run(request(offers, target / "before"))
    written, plain = [0], DuckDB.write
    fails_at = [0]

    def write(self: DuckDB, expression: Any, folder: Path) -> None:
        written[0] += 1
        plain(self, expression, folder)
        if written[0] == fails_at[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(engines.DuckDB, "write", write)
    for is_forced in (False, True):
        written[0], fails_at[0] = 0, 0
        running.run(request(offers, tmp_path / f"counted-{is_forced}", before, is_forced=is_forced))
        for failure in range(1, written[0] + 1):
            written[0], fails_at[0] = 0, failure
            with pytest.raises(KeyfoldError, match="No space left"):
                running.run(request(offers, target / "next", before, is_forced=is_forced))
            assert sorted(path.name for path in target.iterdir()) == ["before"]


@pytest.mark.spec("NUM-09")
def test_a_state_that_is_in_use_can_be_removed_and_is_still_read(offers: str, tmp_path: Path) -> None:
    root = Root(str(tmp_path / "cluster"))
    state = running.run(request(offers, root, path="state"))
    finding.build(state, 500)
    with finding.Index(state) as index:
        root.remove("state")
        root.remove("state.index")
        assert sorted(index.by_keys(KEYS)) == sorted(KEYS[:20])
    assert root.names() == []


@pytest.mark.spec("NUM-09")
@pytest.mark.parametrize("url", ["", "nosuch://x/y", "memory:x"])
def test_a_folder_that_cannot_be_named_is_refused(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if url == "memory:x":
        assert Root(url).is_local  # a name like any other
        return
    with pytest.raises(BadInput):
        Root(url)
