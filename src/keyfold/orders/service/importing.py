"""Import of the older nested documents: counts by tariff, and by brand and tariff, one document an identity.

Counts that name no brand belong to the brand for mixed data; the payment method was not kept, so it is `unknown`. What
cannot be mapped, or was updated after the start, is refused and listed; the rest is set whole identity by identity.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import IO, Any

import msgspec
from msgspec import Struct, structs

from keyfold.core.errors import BadInput
from keyfold.core.store import Store, Transaction
from keyfold.core.times import moment_us
from keyfold.orders.model import BRAND, UNKNOWN, IdentityType
from keyfold.orders.service.filling import (
    Filled,
    Report,
    claim,
    claimable,
    finish,
    lack,
    left_to_history,
    look_anew,
    must_have_dimensions,
    set_identities,
    silent,
)
from keyfold.orders.service.jobs import Job, Progress
from keyfold.orders.service.unit import Unit

TARIFF = "tariff"
DOCUMENTS_MAX = 1_000  # in one transaction
SHOWN_MAX = 100
_SPAN = re.compile(r"^\s*-|ago\s*$")
_ISO_DATE = re.compile(r"^ISODate\(['\"](.+)['\"]\)$")


class RefusedDocument(Struct, frozen=True):
    line: int
    identity: str
    reason: str


class Imported(Struct, frozen=True):
    """What was imported."""

    identity: str
    documents: int
    orders: int
    refused: int
    refused_documents: list[RefusedDocument]  # some of them
    left: int  # orders that arrived live and were left to history: documents do not tell whether they have them
    lacking: int  # at least so many are not known to be counted, of this file and of those before


class _Refused(Exception):
    """Why a document cannot be imported."""


def import_documents(
    store: Store,
    unit: Unit,
    name: str,
    lines: IO[bytes],
    source: str,
    report: Report = silent,
    *,
    is_settled: bool = False,
    documents_max: int = DOCUMENTS_MAX,
) -> Imported:
    """Set the history part of identities from documents, one JSON object a line.

    What was refused, of any file, and what was left to history keep it incomplete until somebody says that it is
    settled: that is in the documents by now, or is to be left out.
    """
    dimensions = _must_fit(store, unit)
    (kind,) = store.read(lambda tx: claimable(tx, unit, [name], "import"))
    started_at_us = store.read(lambda tx: tx.now_us)
    read_by = f"{source} {','.join(dimensions)} {unit.settings.mixed_brand}"
    job = Job.begin(store, unit, f"import {name}", read_by, partial(_begun, unit=unit, name=name))
    left: int | None = None
    refused: list[RefusedDocument] = []
    for number, read in _read_on(unit, kind, dimensions, job, _pieces(lines, _begin(job), documents_max), refused):
        if left is None and any(isinstance(each, tuple) for each in read):
            left = _claimed(store, unit, kind, job)
        _step(store, unit, kind, job, dimensions, number, read)
        report(number, f"documents of {name}")
    done = structs.replace(job.progress, is_done=True)
    numbers = done.numbers
    # A type of which all was refused can still be backfilled.
    is_taken = left is not None or kind.source == "import" or not numbers.get("refused", 0)
    if left is None:
        left = _claimed(store, unit, kind, job) if is_taken else _left(store, unit, kind, job)
    not_known = numbers.get("refused", 0) + (0 if is_settled else left)

    def end(tx: Transaction) -> int:
        job.step(tx, done)
        stood = unit.stood(tx)
        lacking = not_known if is_settled else max(not_known, stood.state.by_name[name].lacking)
        if is_taken:
            finish(tx, unit, stood, kind, started_at_us, lacking)
        else:
            lack(tx, unit, name, lacking)
        return lacking

    lacking = store.transact(end, name="import done", once=True)
    return Imported(
        name,
        documents=numbers.get("documents", 0),
        orders=numbers.get("orders", 0),
        refused=numbers.get("refused", 0),
        refused_documents=refused,
        left=left,
        lacking=lacking,
    )


def _begun(tx: Transaction, is_other_unfinished: bool, unit: Unit, name: str) -> None:
    claimable(tx, unit, [name], "import")
    if is_other_unfinished:
        # Nobody knows how much of that file is not in: its place is taken by the one that begins now.
        lack(tx, unit, name, 1)


def _begin(job: Job) -> int:
    """The line behind which this run begins."""
    return int(job.progress.after or 0)


def _read_on(
    unit: Unit,
    kind: IdentityType,
    dimensions: Sequence[str],
    job: Job,
    pieces: Iterator[list[tuple[int, bytes]]],
    refused: list[RefusedDocument],
) -> Iterator[tuple[int, list["Document | RefusedDocument"]]]:
    """What is read of each piece, with its last line; some of what was refused is added to `refused`.

    What was refused before a run was stopped is not stored: it is read again, to be told, and no more of it than that.
    """
    begin, to_tell = _begin(job), min(job.progress.numbers.get("refused", 0), SHOWN_MAX)
    for piece in pieces:
        last = piece[-1][0]
        if last <= begin and len(refused) >= to_tell:
            continue
        read = [_read(unit, kind, dimensions, number, line) for number, line in piece]
        refused += [each for each in read if isinstance(each, RefusedDocument)][: SHOWN_MAX - len(refused)]
        if last > begin:
            yield last, read


def _claimed(store: Store, unit: Unit, kind: IdentityType, job: Job) -> int:
    """The type is filled by import from now on; how many orders were left to its history so far."""
    # First: of a type that nothing fills, nobody says that an order was left to it.
    claim(store, unit, [kind.name], "import")
    return _left(store, unit, kind, job)


def _left(store: Store, unit: Unit, kind: IdentityType, job: Job) -> int:
    """How many orders were left to history so far; whoever leaves one from now on says so."""

    def work(tx: Transaction) -> None:
        job.step(tx, job.progress)
        look_anew(tx, unit, kind)

    store.transact(work, name="look", once=True)
    return sum(len(each) for each in left_to_history(store, unit, kind))


def _must_fit(store: Store, unit: Unit) -> list[str]:
    dimensions = store.read(unit.stood).state.dimensions
    for name in (TARIFF, BRAND):
        if name not in dimensions:
            raise BadInput(f"the unit {unit.name} has no dimension {name!r}, older documents need it")
    if not unit.settings.mixed_brand:
        raise BadInput(
            "the brand of counts that name none is not set",
            place=f"orders.units.{unit.name}.mixed_brand",
            hint="Older documents mix the brands: name the one that their counts belong to",
        )
    return dimensions


def _pieces(lines: IO[bytes], begin: int, documents_max: int) -> Iterator[list[tuple[int, bytes]]]:
    """The lines in pieces, none of them on both sides of where a run begins."""
    piece: list[tuple[int, bytes]] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            piece.append((number, line))
        if piece and (len(piece) == documents_max or number == begin):
            yield piece
            piece = []
    if piece:
        yield piece


Document = tuple[str, list[Filled]]


def _read(
    unit: Unit, kind: IdentityType, dimensions: Sequence[str], number: int, line: bytes
) -> Document | RefusedDocument:
    identity = ""
    try:
        document = msgspec.json.decode(line, type=dict[str, Any])
        identity = str(document.get("_id", ""))
        return identity, list(filled_of(unit, kind, dimensions, document))
    except (_Refused, BadInput, msgspec.DecodeError, UnicodeError, RecursionError) as error:
        return RefusedDocument(number, identity[:200], str(error))


def filled_of(
    unit: Unit, kind: IdentityType, dimensions: Sequence[str], document: Mapping[str, Any]
) -> Iterator[Filled]:
    """The cells of one document."""
    unknown = sorted(set(document) - {"_id", "transactions", "tariffs", "brand", "created", "updated"})
    if unknown:
        raise _Refused(f"it has fields that cannot be mapped: {', '.join(unknown)}")
    identity = document.get("_id")
    if not isinstance(identity, str) or not 1 <= len(identity) <= 200 or "\0" in identity:
        raise _Refused("_id must be text of 1 to 200 characters")
    created_us, updated_us = _moment(document, "created"), _moment(document, "updated")
    if created_us < 0:
        raise _Refused("it was created before 1970")
    if created_us > updated_us:
        raise _Refused("it was updated before it was created")
    if kind.start_us is not None and updated_us >= kind.start_us:
        raise _Refused("it was updated after the start: some of its orders may have counted live")
    counts = dict(_tariffs(document, unit.settings.mixed_brand, ""))
    for brand, own in _object(document, "brand", "").items():
        if not isinstance(own, dict) or set(own) - {"tariffs", "transactions"}:
            raise _Refused(f"brand.{brand} cannot be mapped")
        for key, count in _tariffs(own, brand, f"brand.{brand}."):
            counts[key] = counts.get(key, 0) + count
    for (brand, tariff), count in counts.items():
        values = dict.fromkeys(dimensions, UNKNOWN) | {BRAND: brand, TARIFF: tariff}
        if count:
            yield Filled(identity, unit.slice_of(values), count, created_us, updated_us)


def _tariffs(holder: Mapping[str, Any], brand: str, place: str) -> Iterator[tuple[tuple[str, str], int]]:
    for tariff, own in _object(holder, "tariffs", place).items():
        count = own.get("value") if isinstance(own, dict) and set(own) == {"value"} else None
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count < 2**53:
            raise _Refused(f"{place}tariffs.{tariff} cannot be mapped")
        if not 1 <= len(tariff) <= 200 or not 1 <= len(brand) <= 200 or "\0" in tariff + brand:
            raise _Refused(f"{place}tariffs has a name that cannot be kept")
        yield (brand, tariff), count


def _object(holder: Mapping[str, Any], name: str, place: str) -> Mapping[str, Any]:
    found = holder.get(name, {})
    if not isinstance(found, dict):
        raise _Refused(f"{place}{name} cannot be mapped")
    return found


def _moment(document: Mapping[str, Any], name: str) -> int:
    """A time as the older store exports it: ISODate('…'), {"$date": …}, or plain ISO 8601."""
    given = document.get(name)
    if isinstance(given, dict) and set(given) == {"$date"}:
        given = given["$date"]
    if not isinstance(given, str):
        raise _Refused(f"{name} is not a time")
    wrapped = _ISO_DATE.match(given)
    text = wrapped[1] if wrapped else given
    # A span before now is for people at a command line: in a file it would be another moment each day.
    if _SPAN.search(text):
        raise _Refused(f"{name} is not a time")
    return moment_us(text, 0)


def _step(
    store: Store,
    unit: Unit,
    kind: IdentityType,
    job: Job,
    dimensions: Sequence[str],
    number: int,
    read: Sequence[Document | RefusedDocument],
) -> None:
    # Of two documents of one identity the later one stands.
    documents = dict(each for each in read if isinstance(each, tuple))
    filled = [cell for cells in documents.values() for cell in cells]
    before = job.progress
    progress = Progress(
        before.source,
        str(number),
        False,
        before.adding(
            documents=len(documents),
            orders=sum(each.count for each in filled),
            refused=sum(isinstance(each, RefusedDocument) for each in read),
        ),
    )

    def work(tx: Transaction) -> None:
        job.step(tx, progress)
        must_have_dimensions(tx, unit, dimensions)
        set_identities(tx, unit, kind, sorted(documents), filled)
        lack(tx, unit, kind.name, progress.numbers["refused"])

    store.transact(work, name="import", once=True)
    job.stepped(progress)
