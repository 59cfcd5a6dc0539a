"""The table of historical completed orders: any Ibis table, Parquet by default, under the names that a unit uses.

Everything that could be wrong with it is looked at before anything is written, and all of it is told at once.
"""

import hashlib
import tempfile
import uuid
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from keyfold.bulk import engines
from keyfold.core.errors import BadInput, Conflict
from keyfold.core.times import iso
from keyfold.orders.model import APPLICATION, BRAND, UNKNOWN, IdentityType, UnitState
from keyfold.orders.service.excluding import ORDER_ID, Excluded
from keyfold.orders.service.unit import Unit
from keyfold.orders.settings import OWN_PREFIX

if TYPE_CHECKING:
    import ibis.expr.types as ir

CREATED_AT = "created_at"
# Columns of our own beside those of users, whose names cannot begin like this.
COUNT, FROM, TO, SINGLE, LIVE, OTHER = (
    f"{OWN_PREFIX}{name}" for name in ("count", "from", "to", "single", "is_live", "other_brand")
)
TEXT_MAX = 200
SHOWN_MAX = 10
BATCH_ROWS = 50_000
# That times are cut to, by the names that the engines know.
_UNITS_US = {"D": 86_400_000_000, "h": 3_600_000_000, "m": 60_000_000, "s": 1_000_000, "ms": 1_000}


class HistoryCell(Struct, frozen=True, gc=False):
    """How many orders of an identity have these values; with an order id it is that one order."""

    identity: str
    values: tuple[str, ...]  # of the dimensions, in their order
    count: int
    from_us: int
    to_us: int
    order_id: str = ""
    is_live: bool = False  # created from the start on


class Names(Struct, frozen=True):
    """What is to be read of history, and what it calls it."""

    identities: list[str]
    dimensions: list[str]
    columns: Mapping[str, str]
    added: Sequence[str] = ()  # identity types whose columns were named by a command, not by the settings


def names_of(unit: Unit, state: UnitState, identities: Sequence[str] | None = None) -> Names:
    """The names of a unit as it is now."""
    every = [each.name for each in state.identities]
    return Names(
        every if identities is None else list(identities),
        list(state.dimensions),
        {**unit.settings.columns, **state.columns},
        [name for name in every if name in state.columns],
    )


class History:
    """Historical orders with the names of a unit: order_id, created_at, identities, dimensions."""

    def __init__(
        self, unit: Unit, table: "ir.Table", names: "Names", source: str, stamp: "Callable[[], str] | None" = None
    ) -> None:
        """`stamp` tells what the table is now; None where nothing tells, and it may change while it is read."""
        self.unit = unit
        self.is_fixed = stamp is not None
        self._stamp, self._stamped = stamp, stamp() if stamp else ""
        self.dimensions = names.dimensions
        self.identities = names.identities
        self.source = f"{source} {_read_by(unit, names)}"
        self._given = table
        self._columns = names.columns
        self._time_column = self.column_of(CREATED_AT)
        self._table = _named(unit, table, names)

    def column_of(self, name: str) -> str:
        """What is read under one of our names."""
        return self._columns.get(name, name)

    @engines.failing("duckdb")
    def must_be_sound(self) -> None:
        """Refuse a table that cannot be counted exactly, with everything that is wrong with it."""
        # Where text is no time nothing was made of it, which is not to be told as a time that is not there.
        no_times = [*self._not_times()]
        needed = (ORDER_ID,) if no_times else (ORDER_ID, CREATED_AT)
        wrong = [*no_times, *self._not_there(needed), *self._twice(), *self._unmapped(), *self._misbranded()]
        wrong += [*self._too_early(), *self._not_to_keep()]
        if wrong:
            raise BadInput("; ".join(wrong), place="history")

    @engines.failing("duckdb")
    def ids_at(self, kind: IdentityType, time_us: int, limit: int) -> list[str]:
        """Orders of an identity type that have a time, by their ids, at most so many."""
        orders = self._orders(kind, None)
        found = orders.filter(orders[CREATED_AT] == self._moment(time_us)).select(ORDER_ID).limit(limit)
        return [str(each[ORDER_ID]) for each in found.to_pyarrow().to_pylist()]

    @engines.failing("duckdb")
    def cut_us(self, start_us: int) -> int | None:
        """What the start would be if it were cut as all times of history are; None where it would be the same."""
        moment = self._table[CREATED_AT]
        units = {name: unit_us for name, unit_us in _UNITS_US.items() if start_us % unit_us}
        cut = {name: (moment.truncate(name) == moment).all() for name in units}
        known = {name: each for name, each in cut.items() if self._can_compute(each)}
        if not known:
            return None
        (found,) = self._table.agg(**known).to_pyarrow().to_pylist()
        cut_to_us = max((units[name] for name in known if found[name]), default=None)
        return None if cut_to_us is None else start_us // cut_to_us * cut_to_us

    def _can_compute(self, value: "ir.Value") -> bool:
        """Not every engine can cut a time to every unit."""
        try:
            self._table.get_backend().compile(value)
        except Exception:
            return False
        return True

    def must_be_same(self) -> None:
        """What was read of it is of one history."""
        if self._stamp is not None and self._stamp() != self._stamped:
            raise Conflict("the files of history have changed while they were read", hint="Run it again")

    @engines.failing("duckdb")
    def count(self) -> int:
        return int(self._table.count().execute())

    @engines.failing("duckdb")
    def count_before_start(self, kind: IdentityType) -> int:
        """How many orders of an identity type were created before its start."""
        orders = self._orders(kind, None)
        return int(orders.filter(orders[CREATED_AT] < self._moment(kind.start_us or 0)).count().execute())

    def cells(self, kind: IdentityType, after: str | None, without: Excluded) -> Generator[HistoryCell]:
        """The cells of an identity type, of orders created before its start, in the order of the identities."""
        yield from self._cells(kind, self._orders(kind, after, without))

    def cells_of(self, kind: IdentityType, identities: Sequence[str], without: Excluded) -> Generator[HistoryCell]:
        """The same of some identities."""
        orders = self._orders(kind, None, without)
        yield from self._cells(kind, orders.filter(orders[kind.name].isin(list(identities))))

    def _cells(self, kind: IdentityType, orders: "ir.Table") -> Generator[HistoryCell]:
        import ibis

        orders = orders.filter(orders[CREATED_AT] < self._moment(kind.start_us or 0))
        yield from self._streamed(
            orders.group_by([kind.name, *self.dimensions])
            .agg(**_counted(orders))
            .mutate(**{SINGLE: ibis.literal(""), LIVE: ibis.literal(False)})
            .order_by(kind.name),
            kind.name,
        )

    def all_cells(
        self, kind: IdentityType, after: str | None, without: Excluded, *, single_from_us: int
    ) -> Iterator[HistoryCell]:
        """The cells of all orders, live and history apart.

        Live orders created from `single_from_us` on stand alone, with their ids: their marks tell where they count.
        """
        import ibis

        orders = self._orders(kind, after, without)
        is_live: Any = ibis.literal(True)
        if kind.start_us is not None:
            is_live = orders[CREATED_AT] >= self._moment(kind.start_us)
        orders = orders.mutate(**{LIVE: is_live})
        edge = self._moment(single_from_us)
        old = orders.filter(~((orders[CREATED_AT] >= edge) & orders[LIVE]))
        new = orders.filter((orders[CREATED_AT] >= edge) & orders[LIVE])
        names = [kind.name, *self.dimensions, LIVE]
        together = old.group_by(names).agg(**_counted(old)).mutate(**{SINGLE: ibis.literal("")})
        one = {COUNT: ibis.literal(1, "int64"), FROM: new[CREATED_AT], TO: new[CREATED_AT], SINGLE: new[ORDER_ID]}
        single = new.select(*names, **one)
        columns = [*names, COUNT, FROM, TO, SINGLE]
        every = together.select(*columns).union(single.select(*columns))
        yield from self._streamed(every.order_by(kind.name), kind.name)

    @engines.failing("duckdb")
    def lacking(self, kind: IdentityType, order_ids: Sequence[str]) -> list[str]:
        """Those of the orders that do not count for an identity type: they are not in the table, or otherwise there."""
        import ibis

        if not order_ids:
            return []
        wanted = ibis.memtable({ORDER_ID: list(order_ids)}, schema={ORDER_ID: "string"})
        orders = self._orders(kind, None)
        missing = wanted.anti_join(orders.filter(orders[CREATED_AT] < self._moment(kind.start_us or 0)), ORDER_ID)
        return sorted(missing.to_pyarrow()[ORDER_ID].to_pylist())

    @engines.failing("duckdb")
    def identities_of(
        self, kind: IdentityType, excluded: Excluded, before: Excluded, after: str | None, limit: int
    ) -> list[str]:
        """Whose orders are excluded that were not before: the next identities behind `after`."""
        if not excluded.count:
            return []
        engine = self._table.get_backend()
        orders = self._orders(kind, after, before).semi_join(excluded.table(engine), ORDER_ID)
        found = orders.select(kind.name).distinct().order_by(kind.name).limit(limit)
        return list(found.to_pyarrow()[kind.name].to_pylist())

    def _orders(self, kind: IdentityType, after: str | None, without: Excluded | None = None) -> "ir.Table":
        orders = self._table.filter(self._table[kind.name].notnull())
        if after is not None:
            orders = orders.filter(orders[kind.name] > after)
        if without is not None and without.count:
            orders = orders.anti_join(without.table(orders.get_backend()), ORDER_ID)
        return orders

    def _moment(self, time_us: int) -> Any:
        import ibis

        # Without an offset the text would be a time in whatever zone the connection is set to.
        text = iso(max(time_us, 0)).removesuffix("Z")
        if self._table[CREATED_AT].type().timezone:
            return ibis.literal(f"{text}+00:00").cast("timestamp('UTC')")
        return ibis.literal(text).cast("timestamp")

    def _streamed(self, table: "ir.Table", identity: str) -> Iterator[HistoryCell]:
        import pyarrow as pa

        with engines.failing("duckdb"), closing(table.to_pyarrow_batches(chunk_size=BATCH_ROWS)) as batches:
            for batch in batches:
                rows = {name: batch.column(name) for name in batch.schema.names}
                dimensions = [rows[name].to_pylist() for name in self.dimensions]
                values: Sequence[tuple[str, ...]] = (
                    list(zip(*dimensions, strict=True)) if dimensions else [()] * batch.num_rows
                )
                moments = [
                    rows[name].cast(pa.timestamp("us", tz=rows[name].type.tz), safe=False).cast(pa.int64()).to_pylist()
                    for name in (FROM, TO)
                ]
                yield from map(
                    HistoryCell,
                    rows[identity].to_pylist(),
                    values,
                    rows[COUNT].to_pylist(),
                    *moments,
                    rows[SINGLE].to_pylist(),
                    rows[LIVE].to_pylist(),
                )

    def _not_times(self) -> Iterator[str]:
        text = _column(self._given, self._time_column)
        if not text.type().is_string():
            return
        wrong = self._given.filter(text.notnull() & _time_of(text).isnull()).select(text=text)
        if count := int(wrong.count().execute()):
            shown = wrong.limit(1).to_pyarrow()["text"][0].as_py()
            yield f"{count} values of {self._time_column} are no times: {shown[:50]!r}; write 2026-11-15T20:30:00Z"

    def _not_there(self, needed: Sequence[str]) -> Iterator[str]:
        for name in needed:
            if count := int(self._table[name].isnull().sum().fill_null(0).execute()):
                yield f"{count} orders have no {name}"

    def _too_early(self) -> Iterator[str]:
        """Live such an order is refused. A time that stands for none may be in a year that nothing can write."""
        if count := int(self._table.filter(self._table[CREATED_AT] < self._moment(0)).count().execute()):
            yield f"{count} orders were created before 1970"

    def _twice(self) -> Iterator[str]:
        table = self._table
        by_id = table.group_by(ORDER_ID).agg(times=table.count())
        twice = by_id.filter(by_id.times > 1)
        count = int(twice.count().execute())
        if count:
            shown = twice.order_by(ORDER_ID).limit(SHOWN_MAX).to_pyarrow()[ORDER_ID].to_pylist()
            yield f"{count} orders stand there more than once: {', '.join(map(str, shown))}" + ", …" * (
                count > SHOWN_MAX
            )

    def _unmapped(self) -> Iterator[str]:
        """An application without a brand stops everything: a guess would be a wrong number."""
        if APPLICATION not in self._table.columns:
            return
        known = list(self.unit.settings.application_brands)
        given = self._table.select(APPLICATION).distinct().to_pyarrow()[APPLICATION].to_pylist()
        if missing := sorted(str(each) for each in set(given) - set(known) - {None}):
            shown = ", ".join(missing[:SHOWN_MAX]) + ", …" * (len(missing) > SHOWN_MAX)
            yield f"{len(missing)} applications have no brand: {shown}"

    def _misbranded(self) -> Iterator[str]:
        """Live such an order is set aside: its application belongs to one brand, and it says another."""
        if OTHER not in self._table.columns:
            return
        wrong = self._table.filter(self._table[OTHER].notnull())
        if count := int(wrong.count().execute()):
            (shown,) = wrong.select(APPLICATION, OTHER).limit(1).to_pyarrow().to_pylist()
            pair = f"{shown[APPLICATION]}, {shown[OTHER]}"
            yield f"{count} orders name another brand than that of their application: {pair}"

    def _not_to_keep(self) -> Iterator[str]:
        """Values that no store takes: some would take a NUL, and fail in the middle."""
        # PostgreSQL has no text with a NUL, and its regular expressions know none.
        has_nul = self._table.get_backend().name != "postgres"
        for name in (ORDER_ID, *self.identities, *self.dimensions):
            value = self._table[name]
            if count := int((value.length() > TEXT_MAX).sum().fill_null(0).execute()):
                yield f"{count} values of {name} are longer than {TEXT_MAX} characters"
            if has_nul and (count := int(value.re_search(r"\x00").sum().fill_null(0).execute())):
                yield f"{count} values of {name} have a NUL"


def _counted(orders: "ir.Table") -> dict[str, Any]:
    created_at = orders[CREATED_AT]
    return {COUNT: orders.count(), FROM: created_at.min(), TO: created_at.max()}


def opened(unit: Unit, where: "str | ir.Table", names: Names, source: str = "") -> History:
    """The history of a unit: Parquet files by path or pattern, or an Ibis table that a program gives."""
    if not isinstance(where, str):
        # Two tables cannot be told apart: a run that was stopped begins anew, unless the caller says which this is.
        return History(unit, where, names, source or uuid.uuid4().hex, (lambda: source) if source else None)
    paths = _files(where)
    read = dict.fromkeys([*_wanted(unit, names), *names.dimensions])
    # Where brands come from applications, an order may name none.
    optional = {names.columns.get(BRAND, BRAND)} if unit.settings.application_brands else set()
    is_one_schema = _must_be_alike(paths, [names.columns.get(name, name) for name in read], optional)
    table = _parquet(paths, unit.settings.history_megabytes_max, by_name=not is_one_schema)
    return History(unit, table, names, _stamp(paths), lambda: _stamp(paths))


def _stamp(paths: Sequence[Path]) -> str:
    """What tells files from those that they were before."""
    found = [(str(path), *((path.stat().st_size, path.stat().st_mtime_ns) if path.exists() else ())) for path in paths]
    return hashlib.sha256(msgspec.json.encode(found)).hexdigest()


def _read_by(unit: Unit, names: Names) -> str:
    """What decides, besides the table, what is read of it: where this has changed nothing is gone on with."""
    said = [names.columns, unit.settings.application_brands, unit.hooks.source]
    return hashlib.sha256(msgspec.json.encode(said, order="sorted")).hexdigest()[:16]


def _files(where: str) -> list[Path]:
    path = Path(where)
    paths = sorted(path.parent.glob(path.name)) if any(each in path.name for each in "*?[") else [path]
    paths = [each for each in paths if each.exists()]
    if not paths:
        raise BadInput(f"there are no files {where}", place="history", hint="Name Parquet files: orders/*.parquet")
    return paths


def _must_be_alike(paths: Sequence[Path], columns: Sequence[str], optional: Collection[str]) -> bool:
    """Refuse files that mean different things by one column; whether it is of the very same type in all of them.

    The engine would make the values of all files those of one type: 7 of "007", "123.0" of 123.0.
    """
    kinds: dict[str, dict[str, Path]] = {name: {} for name in columns}  # each with the first file that has it
    types: set[tuple[str, ...]] = set()
    for path in paths:
        schema = _schema(path)
        if twice := [name for name in columns if schema.names.count(name) > 1]:
            raise BadInput(f"{path} has more than one column {', '.join(twice)}", place="history")
        found = {name: _field(schema, name) for name in columns}
        types.add(tuple(str(each) for each in found.values()))
        for name, kind in found.items():
            if (said := _kind(kind)) is not None and not (kind is None and name in optional):
                kinds[name].setdefault(said, path)
    differing = [
        f"{name} is {', '.join(f'{kind} in {path}' for kind, path in files.items())}"
        for name, files in kinds.items()
        if len(files) > 1
    ]
    if differing:
        raise BadInput(
            f"the files differ: {'; '.join(differing)}", place="history", hint="Write all of them with the same types"
        )
    return len(types) == 1


def _schema(path: Path) -> Any:
    import pyarrow.parquet as pq

    try:
        return pq.read_schema(path)
    except Exception as error:
        raise BadInput(f"the history cannot be read: {path}: {engines.first_line(error)}", place="history") from None


def _field(schema: Any, path: str) -> Any:
    """The type of a column of a file, or of a field of a struct; None where there is none."""
    import pyarrow as pa

    if path in schema.names:
        return schema.field(path).type
    first, _, rest = path.partition(".")
    kind = schema.field(first).type if rest and first in schema.names else None
    for name in rest.split("."):
        if kind is None or not pa.types.is_struct(kind) or kind.get_field_index(name) < 0:
            return None
        kind = kind.field(name).type
    return kind


def _kind(kind: Any) -> str | None:
    """What values of a type are, whatever their width; None where they are all null, and go with any."""
    from pyarrow import types

    if kind is None:
        return "missing"
    if types.is_dictionary(kind):
        return _kind(kind.value_type)
    if types.is_null(kind):
        return None
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "text"
    if types.is_integer(kind) or (types.is_decimal(kind) and kind.scale == 0):
        return "whole numbers"
    return "times" if types.is_timestamp(kind) else str(kind)


def _parquet(paths: Sequence[Path], megabytes_max: int, *, by_name: bool) -> "ir.Table":
    # What does not fit lies in a folder of its own, which goes with the connection.
    scratch = Path(tempfile.gettempdir()) / f"keyfold-history-{uuid.uuid4().hex}"
    connection = engines.duckdb_connection(megabytes_max, scratch)
    files = [engines.exactly(str(path)) for path in paths]
    try:
        # A folder called tariff=gold would otherwise be the column of this name. By name, the types of all files are
        # looked at and the widest are taken, not those of the first.
        return connection.read_parquet(files, hive_partitioning=False, union_by_name=by_name)
    except Exception as error:
        raise BadInput(f"the history cannot be read: {engines.first_line(error)}", place="history") from None


def _is_by_application(unit: Unit, names: Names) -> bool:
    return BRAND in names.dimensions and bool(unit.settings.application_brands)


def _wanted(unit: Unit, names: Names) -> list[str]:
    """What has to be in history, by our names. Where there are applications it need not have brands as well."""
    every = [ORDER_ID, CREATED_AT, *names.identities, *names.dimensions]
    if not _is_by_application(unit, names):
        return every
    return [*(name for name in every if name != BRAND or BRAND in names.columns), APPLICATION]


def _named(unit: Unit, table: "ir.Table", names: Names) -> "ir.Table":
    """The columns under our names; all that are missing are told at once."""
    columns = names.columns
    found: dict[str, Any] = {}
    missing: list[str] = []
    for name in _wanted(unit, names):
        column = _column(table, columns.get(name, name))
        if column is None:
            missing.append(name)
        else:
            found[name] = column
    if BRAND in names.dimensions and (brand := _column(table, columns.get(BRAND, BRAND))) is not None:
        found[BRAND] = brand
    if missing:
        raise BadInput(
            f"the history lacks columns: {', '.join(f'{columns.get(name, name)} ({name})' for name in missing)}",
            place="history",
            hint=f"{_where_named(unit, names, missing)}; there are {', '.join(table.columns)}",
        )
    named = _normal(table.select(**found), names, {name: f"{columns.get(name, name)} ({name})" for name in found})
    # Once more behind the hook: what it leaves without a value would be a slice that nobody can read.
    hooked = _normal(_hooked(unit, named), names, {name: f"{name} of the hook" for name in (*found, BRAND)})
    # Also behind it, as of live orders: it may be what makes an application one that has a brand.
    return _branded(hooked, unit.settings.application_brands) if _is_by_application(unit, names) else hooked


def _where_named(unit: Unit, names: Names, missing: Sequence[str]) -> str:
    """Where it is told what history calls them."""
    added = [name for name in missing if name in names.added]
    said = [f"keyfold orders add-identity {name} --column COLUMN --unit {unit.name}" for name in added]
    if len(added) < len(missing):
        said.append(f"orders.units.{unit.name}.columns")
    return f"{' and '.join(said)} tells what they are called"


def _normal(table: "ir.Table", names: Names, called: Mapping[str, str]) -> "ir.Table":
    """Times as timestamps, all else as text, null where it is empty; a dimension without a value is `unknown`."""
    given: dict[str, Any] = {name: table[name] for name in called if name in table.columns}
    moment = given.pop(CREATED_AT)
    if moment.type().is_string():
        moment = _time_of(moment)
    elif not moment.type().is_timestamp():
        raise BadInput(f"{called[CREATED_AT]} must be a timestamp", place="history")
    if wrong := [f"{called[name]} is {why}" for name, column in given.items() if (why := _why_not_text(column.type()))]:
        raise BadInput("; ".join(wrong), place="history", hint=_AS_TEXT)
    texts = {name: column.cast("string").nullif("") for name, column in given.items()}
    known = {name: texts[name].fill_null(UNKNOWN) for name in names.dimensions if name in texts}
    return table.mutate(**{CREATED_AT: moment, **texts, **known})


def _hooked(unit: Unit, named: "ir.Table") -> "ir.Table":
    """The table as the hook of the unit wants it counted, with all the columns that it was given."""
    if unit.hooks.history is None:
        return named
    hooked = unit.hooks.history(named)
    if lost := sorted(set(named.columns) - set(hooked.columns)):
        raise BadInput(f"the hook of history has dropped columns: {', '.join(lost)}", place="history")
    return hooked


def _branded(named: "ir.Table", brands: Mapping[str, str]) -> "ir.Table":
    """With the brand of the application; without one, the brand that history or a hook has given, or none is known."""
    import ibis

    given = named[BRAND] if BRAND in named.columns else ibis.literal(UNKNOWN)
    brand = named[APPLICATION].cases(*brands.items(), else_=None)
    is_other = brand.notnull() & (given != UNKNOWN) & (given != brand)
    # Two columns of one statement: what is called brand here is still what was given.
    return named.mutate(**{BRAND: ibis.coalesce(brand, given), OTHER: is_other.ifelse(given, None)})


def _time_of(text: Any) -> Any:
    """The time that text tells, null where it tells none and the engine can say so.

    Text that names no zone is taken as UTC, not in the zone that the connection is set to.
    """
    from ibis.expr import operations

    with_zone = text.re_search(_ZONE).ifelse(text, text + "Z")
    can_try = text.get_backend().has_operation(operations.TryCast)
    return (with_zone.try_cast if can_try else with_zone.cast)("timestamp('UTC')")


_ZONE = r"\d:\d\d(:\d\d(\.\d+)?)?\s*([Zz]|[+-]\d\d(:?\d\d)?)$"  # behind a time of the day, or a date would end in one
_AS_TEXT = "Write it as text, or as whole numbers that may be null: 123.0 would be another identity than 123"


def _why_not_text(kind: Any) -> str:
    """Why values of a type are not written as live orders write them; nothing where they are."""
    if kind.is_floating():
        return "of real numbers"
    # Of a decimal whose scale nobody names, each value may have its own.
    is_whole = kind.is_integer() or (kind.is_decimal() and kind.scale == 0)
    if is_whole or kind.is_string() or kind.is_boolean() or kind.is_uuid() or kind.is_null():
        return ""
    return f"of the type {str(kind).removeprefix('!')}"


def _column(table: "ir.Table", path: str) -> Any:
    """A column by its name, or a field of a struct by its path."""
    if path in table.columns:
        return table[path]
    first, _, rest = path.partition(".")
    if not rest or first not in table.columns or not table[first].type().is_struct():
        return None
    column: Any = table[first]
    for name in rest.split("."):
        if not column.type().is_struct() or name not in column.type().names:
            return None
        column = column[name]
    return column
