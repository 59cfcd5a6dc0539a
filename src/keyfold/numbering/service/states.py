"""States: immutable folders of Parquet tables with a manifest that says what they are and proves it."""

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct, structs

from keyfold.bulk import engines, folders
from keyfold.bulk.engines import Engine
from keyfold.bulk.folders import MANIFEST, Draft, FileEntry, FolderBroken, Root
from keyfold.core.errors import BadInput, NotFound
from keyfold.numbering import expressions
from keyfold.numbering.model import Reason, Version
from keyfold.numbering.sharding import Scheme

if TYPE_CHECKING:
    import ibis.expr.types as ir

FORMAT = 2
UNSEALED = 1  # the format of manifests that have no checksum of their own
NO_SEAL = "0" * 64
# The tables of a state: what they are called, and their columns.
TABLES: dict[str, dict[str, str]] = {
    "places": expressions.PLACES,
    "free": expressions.FREE,
    "new_docs": expressions.PLACES,
    "expired_docs": expressions.PLACES,
    "remap": expressions.REMAP,
}


class Shard(Struct, frozen=True):
    """One shard of a state."""

    shard_id: int
    size: int  # places ever given in this V: the next new one has this doc_id
    top: int  # the greatest doc_id in use, + 1: what position-based files are as long as
    places: int
    input: int  # of this run
    free: int

    @property
    def holes(self) -> int:
        """Places below the top that no offer of this run's input has."""
        return self.top - self.input

    @property
    def unaccounted(self) -> int:
        """Places that were given, and are neither in use nor free: none."""
        return self.size - self.places - self.free


class Summary(Struct, frozen=True):
    """What a run did."""

    known: int  # of the input
    absent: int  # kept though not in the input
    new: int
    reused: int  # of the new, those on freed places
    expired: int
    holes: int
    bytes: int


class Manifest(Struct, frozen=True, kw_only=True):
    """What a state is, and what its files must be."""

    format: int = FORMAT
    version: str
    run: int
    scheme: Scheme
    reason: Reason
    parent: str  # the checksum of the state before; empty for a first one
    engine: str
    ttl_runs: int
    shards: list[Shard]
    summary: Summary
    files: list[FileEntry]
    seal: str = NO_SEAL  # the SHA-256 of the manifest itself, with zeros here


class Stored(Struct, frozen=True):
    """A state that lies somewhere."""

    root: Root
    path: str
    manifest: Manifest
    checksum: str

    @property
    def version(self) -> Version:
        return Version.parse(self.manifest.version)

    @property
    def where(self) -> str:
        return self.root.shown(self.path)

    def listed(self, table: str) -> list[FileEntry]:
        return [entry for entry in self.manifest.files if entry.path.startswith(f"{table}/")]


def read(root: Root, path: str = "", *, checksum: str | None = None) -> Stored:
    """A state by what its manifest says; its files are not looked at."""
    try:
        data = root.read(f"{path}/{MANIFEST}" if path else MANIFEST)
    except NotFound:
        raise NotFound(
            f"there is no state at {root.shown(path)}", hint="A state is a folder with a manifest.json"
        ) from None
    found = hashlib.sha256(data).hexdigest()
    if checksum is not None and found != checksum:
        raise FolderBroken(f"the manifest of {root.shown(path)} was altered: its checksum is another")
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
        Version.parse(manifest.version)
    except (msgspec.DecodeError, ValueError, BadInput) as error:  # ValueError: what is no UTF-8
        raise FolderBroken(f"the manifest of {root.shown(path)} cannot be read: {error}") from None
    if any(entry.path.startswith("/") or ".." in entry.path.split("/") for entry in manifest.files):
        raise FolderBroken(f"the manifest of {root.shown(path)} names files outside of it")
    if manifest.format not in (UNSEALED, FORMAT):
        raise FolderBroken(f"{root.shown(path)} has format {manifest.format}; this program knows {FORMAT}")
    if manifest.format != UNSEALED and not _is_sealed(data, manifest.seal):
        raise FolderBroken(f"the manifest of {root.shown(path)} was altered: it does not fit its own checksum")
    return Stored(root, path, manifest, found)


def verify(state: Stored) -> None:
    """Compare every file with what was written."""
    folders.verify(state.root, state.path, state.manifest.files)


@contextlib.contextmanager
def at_hand(state: Stored, tables: Sequence[str], scratch: Path | None) -> Iterator[dict[str, list[str]]]:
    """The files of some tables on this machine, each compared with what was written."""
    wanted = [entry for table in tables for entry in state.listed(table)]
    if state.root.is_local:
        folders.verify(state.root, state.path, wanted)
        yield {table: [str(state.root.local(_below(state, each))) for each in state.listed(table)] for table in tables}
        return
    with engines.scratch_folder("keyfold-state", scratch) as folder:
        folders.fetch(state.root, state.path, wanted, folder)
        yield {table: [str(folder / each.path) for each in state.listed(table)] for table in tables}


def table(engine: Engine, files: dict[str, list[str]], name: str) -> "ir.Table":
    if not files[name]:
        return engines.empty(TABLES[name])
    return expressions.with_types(engine.read(files[name]), TABLES[name])


def gather_files(draft: Draft, name: str, written: Sequence[Path]) -> None:
    """Put what an engine wrote into the folder of a table, under plain names."""
    folder = draft.folder / name
    folder.mkdir(exist_ok=True)
    count = len(list(folder.iterdir()))
    for source in written:
        for file in sorted(source.glob("*.parquet")):
            file.rename(folder / f"{count:05d}.parquet")
            count += 1
        for other in source.iterdir():
            other.unlink()
        source.rmdir()


def sealed(manifest: Manifest) -> Manifest:
    """A manifest with its own checksum: in a run of files alone nothing else tells that it was altered."""
    return structs.replace(manifest, seal=checksum_of(encoded(structs.replace(manifest, seal=NO_SEAL))))


def _is_sealed(data: bytes, seal: str) -> bool:
    """By the bytes as they are, whatever the fields of a manifest are: the seal is the last of them."""
    before, found, after = data.rpartition(seal.encode() or NO_SEAL.encode())
    return bool(found) and checksum_of(before + NO_SEAL.encode() + after) == seal


def encoded(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1)


def checksum_of(manifest: bytes) -> str:
    return hashlib.sha256(manifest).hexdigest()


def _below(state: Stored, entry: FileEntry) -> str:
    return f"{state.path}/{entry.path}" if state.path else entry.path
