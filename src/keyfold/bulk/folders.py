"""Immutable folders on any file system: written aside, checksummed, visible whole or not at all.

A folder is what its manifest lists. The manifest is written last, after every file is synced; on a local file system
the whole folder then gets its name by one rename. A folder without a manifest is nothing.
"""

import concurrent.futures
import contextlib
import hashlib
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct

from keyfold.core.errors import BadInput, Conflict, NotFound, Unavailable
from keyfold.core.files import make_folder, sync

MANIFEST = "manifest.json"
CHUNK_BYTES = 8 * 1024 * 1024
WRITING = ".writing-"
T = TypeVar("T")


class FolderBroken(Unavailable):
    """A file of a folder is missing, shorter, or not what was written"""

    slug = "folder-broken"


class FolderUnreachable(Unavailable):
    """A file system does not answer, is full, or refuses"""

    slug = "folder-unreachable"


class FileEntry(Struct, frozen=True):
    """A file of a folder, by its path below it."""

    path: str
    bytes: int
    sha256: str


class Root:
    """A file system, and the path on it below which everything lies."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ImportError:
            raise BadInput("file systems need fsspec", hint="pip install 'keyfold[bulk]'") from None
        if not url:
            raise BadInput("a folder is named by a path or by URL, not by nothing")
        try:
            self._fs, self.path = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise BadInput(f"{url!r} names no file system: {error}") from None
        self.url = url
        self.is_local = "file" in self._protocols()

    def _protocols(self) -> tuple[str, ...]:
        protocol = self._fs.protocol
        return (protocol,) if isinstance(protocol, str) else tuple(protocol)

    def at(self, path: str) -> str:
        return f"{self.path.rstrip('/')}/{path}" if path else self.path

    def below(self, path: str) -> "Root":
        return Root(self.shown(path)) if path else self

    def exists(self, path: str = "") -> bool:
        with self.failing():
            self._fs.invalidate_cache()
            return bool(self._fs.exists(self.at(path)))

    def read(self, path: str, bytes_max: int = 64 * 1024 * 1024) -> bytes:
        with self.failing():
            try:
                with self._fs.open(self.at(path), "rb") as file:
                    data = file.read(bytes_max + 1)
            except (FileNotFoundError, NotADirectoryError):
                raise NotFound(f"there is no {self.shown(path)}") from None
        if len(data) > bytes_max:
            raise FolderBroken(f"{self.shown(path)} is larger than {bytes_max} bytes")
        return bytes(data)

    def open(self, path: str) -> Any:
        """A file to read from at any place."""
        with self.failing():
            try:
                return self._fs.open(self.at(path), "rb")
            except (FileNotFoundError, NotADirectoryError):
                raise NotFound(f"there is no {self.shown(path)}") from None

    def names(self, path: str = "") -> list[str]:
        """What lies directly below a folder; nothing where there is none."""
        with self.failing():
            try:
                self._fs.invalidate_cache()
                found = self._fs.ls(self.at(path), detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
        return sorted(str(each).rstrip("/").rpartition("/")[2] for each in found)

    def remove(self, path: str) -> None:
        """Delete a folder whole. Locally it is renamed first, so that nobody sees half of it."""
        with self.failing():
            target = self.at(path)
            if self.is_local:
                aside = f"{target}{WRITING}{uuid.uuid4().hex}"
                with contextlib.suppress(FileNotFoundError):
                    os.rename(target, aside)
                    shutil.rmtree(aside)
            elif self._fs.exists(target):
                # The manifest goes first: without it there is no folder.
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(f"{target}/{MANIFEST}")
                if any(mark in target for mark in "*?["):  # rm would take it for a pattern, and delete others too
                    for each, found in reversed(self._fs.find(target, withdirs=True, detail=True).items()):
                        (self._fs.rmdir if found["type"] == "directory" else self._fs.rm_file)(each)
                else:
                    self._fs.rm(target, recursive=True)

    def shown(self, path: str = "") -> str:
        return f"{self.url}{'' if self.url.endswith('/') else '/'}{path}" if path else self.url

    def local(self, path: str = "") -> Path:
        assert self.is_local
        return Path(self.at(path))

    def put(self, source: Path, path: str) -> None:
        """Copy a local file here."""
        with self.failing():
            self._fs.makedirs(self.at(path).rpartition("/")[0], exist_ok=True)
            self._fs.put_file(str(source), self.at(path))

    def take(self, source: "Root", name: str, path: str) -> None:
        """Give a file of another folder on this file system a name here."""
        from fsspec import AbstractFileSystem

        with self.failing():
            self._fs.makedirs(self.at(path).rpartition("/")[0], exist_ok=True)
            if type(self._fs).mv is AbstractFileSystem.mv:  # no rename, and it would take names for patterns
                self._fs.cp_file(source.at(name), self.at(path))
            else:
                self._fs.mv(source.at(name), self.at(path))

    def write(self, path: str, data: bytes) -> None:
        """Write a small file, which is there after a loss of power."""
        with self.failing():
            if not self.is_local:
                self._fs.makedirs(self.at(path).rpartition("/")[0], exist_ok=True)
                self._fs.pipe_file(self.at(path), data)
                return
            file = self.local(path)
            make_folder(file.parent)
            file.write_bytes(data)
            sync(file)
            sync(file.parent)

    def drop(self, path: str) -> None:
        """Delete a file; it may be gone already."""
        with self.failing(), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self.at(path))

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """The failures of a file system in one word."""
        try:
            yield
        except OSError as error:
            raise FolderUnreachable(f"{self.url}: {error.strerror or error}") from error


class Draft:
    """A folder that is being written, on this machine, and has no name yet.

    With `go_on` others may be at the same folder: it is asked before each step, and what has the name is never deleted.
    """

    def __init__(self, target: Root, path: str, scratch: Path | None, go_on: Callable[[], None] | None = None) -> None:
        self._target, self._path = target, path
        self._is_ours = go_on is None
        self._go_on = go_on or (lambda: None)
        if target.exists(path) and target.names(path):
            raise Conflict(f"{target.shown(path)} is there already", hint="A state is never overwritten: name another")
        name = f"{path.rpartition('/')[2] or target.path.rstrip('/').rpartition('/')[2]}{WRITING}{uuid.uuid4().hex}"
        with target.failing():
            if target.is_local:
                final = target.local(path)
                make_folder(final.parent)
                self.folder = final.parent / name
            else:
                above = scratch or Path(os.environ.get("TMPDIR", "/tmp"))  # noqa: S108
                self.folder = above / name
            self.folder.mkdir(parents=True)

    def files(self) -> list[FileEntry]:
        """Sync every file, and say what it holds."""
        found = sorted(path for path in self.folder.rglob("*") if path.is_file())
        with self._target.failing(), concurrent.futures.ThreadPoolExecutor(4) as pool:
            entries = list(pool.map(lambda path: _entry(path, str(path.relative_to(self.folder))), found))
            for folder in {path.parent for path in found} | {self.folder}:
                sync(folder)
        return entries

    def publish(self, manifest: bytes | None) -> None:
        """Give it its name. From here on it never changes. Without a manifest it is a plain dataset."""
        with self._target.failing():
            written = self.folder / MANIFEST
            if manifest is not None:
                written.write_bytes(manifest)
                sync(written)
                sync(self.folder)
            if self._target.is_local:
                final = self._target.local(self._path)
                try:
                    os.rename(self.folder, final)
                except OSError as error:
                    if final.exists():
                        raise Conflict(f"{self._target.shown(self._path)} was made by somebody else") from error
                    raise
                sync(final.parent)
                sync(self._target.local())  # who made the folder in between may have died before it did
                return
            files = sorted(path for path in self.folder.rglob("*") if path.is_file() and path != written)
            self._upload([*files, *([written] if manifest is not None else [])])  # the manifest last
            shutil.rmtree(self.folder, ignore_errors=True)

    def _upload(self, files: Sequence[Path]) -> None:
        """Bring all files there under a name of our own, and then each to its place, the manifest last.

        An upload that hangs is left behind, and another may end before it fails: it has touched nothing of that one's.
        """
        aside = Root(f"{self._target.shown(self._path).rstrip('/')}{WRITING}{uuid.uuid4().hex}")
        names = [str(file.relative_to(self.folder)) for file in files]
        try:
            self._must_be_free()
            for file, name in zip(files, names, strict=True):
                self._go_on()
                aside.put(file, name)
            self._must_be_free()
            self._take(aside, names)
        finally:
            with contextlib.suppress(FolderUnreachable):
                aside.remove("")

    def _take(self, aside: Root, names: Sequence[str]) -> None:
        try:
            for name in names:
                self._go_on()
                self._target.take(aside, name, _joined(self._path, name))
        except BaseException:
            # What cannot be cleared away, or may be another's by now, has no whole manifest, and so is nothing.
            if self._is_ours:
                with contextlib.suppress(FolderUnreachable):
                    self._target.remove(self._path)
            raise

    def _must_be_free(self) -> None:
        if self._target.names(self._path):
            raise Conflict(f"{self._target.shown(self._path)} was made by somebody else")

    def drop(self) -> None:
        """Forget it, where it was not published."""
        shutil.rmtree(self.folder, ignore_errors=True)


def verify(root: Root, path: str, files: Sequence[FileEntry], tell: Callable[[int], None] = lambda _: None) -> None:
    """Read every file and compare it with what was written."""

    def check(entry: FileEntry) -> None:
        digest, size = hashlib.sha256(), 0
        with contextlib.closing(_open_listed(root, path, entry)) as file:
            while chunk := _read(root, file):
                digest.update(chunk)
                size += len(chunk)
        _must_be(entry, size, digest.hexdigest(), root.shown(path))
        tell(size)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(check, files))


def fetch(root: Root, path: str, files: Sequence[FileEntry], into: Path) -> None:
    """Copy the files of a folder to this machine, and compare them with what was written."""
    for entry in files:
        target = into / entry.path
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as written:
            _copied(root, path, entry, written.write, lambda: None)


def copy(
    source: Root,
    target: Root,
    path: str,
    files: Sequence[FileEntry],
    manifest: bytes,
    *,
    scratch: Path | None = None,
    go_on: Callable[[], None] = lambda: None,
    tell: Callable[[int], None] = lambda _: None,
) -> None:
    """Copy a folder under the same path to another file system; it becomes visible there when it is whole.

    A copy that was left half done is done again; one that is there is compared.
    """
    if target.exists(_joined(path, MANIFEST)):
        there = target.read(_joined(path, MANIFEST))
        if not manifest.startswith(there):
            raise FolderBroken(f"{target.shown(path)} is there and is another")
        if there == manifest:
            verify(target, path, files, tell)
            return
    if target.exists(path):
        go_on()  # who was left behind must not delete what was made since
        target.remove(path)
    draft = Draft(target, path, scratch, go_on)
    try:
        for entry in files:
            local = draft.folder / entry.path
            with target.failing():
                local.parent.mkdir(parents=True, exist_ok=True)
                with local.open("wb") as written:
                    _copied(source, path, entry, written.write, go_on)
                    written.flush()
                    os.fsync(written.fileno())
            tell(entry.bytes)
        with target.failing():
            for folder in {(draft.folder / entry.path).parent for entry in files}:
                sync(folder)
        draft.publish(manifest)
    except Conflict:
        draft.drop()
        # A copy that was given up, and went on: what it made is what was wanted.
        if target.read(_joined(path, MANIFEST)) != manifest:
            raise
        verify(target, path, files)
    except BaseException:
        draft.drop()
        raise


def within(seconds: float, work: Callable[[Callable[[], None]], T], what: str) -> T:
    """Do work that may hang in a file system; it is left behind after so long, and gives up at its next step."""
    ended = threading.Event()
    deadline = time.monotonic() + seconds

    def go_on() -> None:
        if ended.is_set() or time.monotonic() > deadline:
            raise FolderUnreachable(f"{what} took longer than {seconds:g} seconds")

    result: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            result.set_result(work(go_on))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name=what, daemon=True).start()
    try:
        return result.result(timeout=seconds)
    except concurrent.futures.TimeoutError:
        if result.done():
            raise
        ended.set()
        raise FolderUnreachable(f"{what} took longer than {seconds:g} seconds") from None


def _joined(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _entry(path: Path, name: str) -> FileEntry:
    sync(path)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileEntry(name, path.stat().st_size, digest)


def _open_listed(root: Root, path: str, entry: FileEntry) -> Any:
    try:
        return root.open(_joined(path, entry.path))
    except NotFound:
        raise FolderBroken(f"{root.shown(path)} has lost {entry.path}") from None


def _copied(
    root: Root, path: str, entry: FileEntry, write: Callable[[bytes], object], go_on: Callable[[], None]
) -> None:
    digest, size = hashlib.sha256(), 0
    with contextlib.closing(_open_listed(root, path, entry)) as file:
        while chunk := _read(root, file):
            go_on()
            digest.update(chunk)
            size += len(chunk)
            write(chunk)
    _must_be(entry, size, digest.hexdigest(), root.shown(path))


def _read(root: Root, file: Any) -> bytes:
    with root.failing():
        return bytes(file.read(CHUNK_BYTES))


def _must_be(entry: FileEntry, size: int, sha256: str, where: str) -> None:
    if size != entry.bytes:
        raise FolderBroken(f"{entry.path} of {where} has {size} bytes, not {entry.bytes}")
    if sha256 != entry.sha256:
        raise FolderBroken(f"{entry.path} of {where} was altered: its checksum is another")
