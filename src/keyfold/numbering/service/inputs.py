"""What a run reads: this generation's offers and the shops, from Parquet datasets and files on any file system."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keyfold.bulk import engines
from keyfold.bulk.engines import Engine
from keyfold.bulk.folders import Root
from keyfold.core.errors import BadInput, NotFound
from keyfold.numbering import expressions
from keyfold.numbering.expressions import KEY
from keyfold.numbering.sharding import PARAMETERS, Scheme

if TYPE_CHECKING:
    import ibis.expr.types as ir

EXAMPLES_MAX = 5


@contextlib.contextmanager
def dataset(url: str, scratch: Path | None) -> Iterator[list[str]]:
    """The Parquet files of a file, a folder or a pattern, on this machine."""
    root = Root(url)
    found = _parquet(root)
    if not found:
        raise NotFound(
            f"there are no Parquet files at {url}", hint="Name a file, a folder, or a pattern such as x/*.parquet"
        )
    if root.is_local:
        yield found
        return
    with engines.scratch_folder("keyfold-input", scratch) as folder:
        local = [str(folder / f"{number:05d}.parquet") for number in range(len(found))]
        with root.failing():
            for source, target in zip(found, local, strict=True):
                root._fs.get_file(source, target)
        yield local


def _parquet(root: Root) -> list[str]:
    """A folder is a dataset of all the Parquet files below it, but for those whose name is not meant to be read.

    What is there under just this name is meant; else its * ? [ are a pattern.
    """
    with root.failing():
        fs, path = root._fs, root.path
        if fs.isfile(path):
            return [path]
        if not fs.exists(path) and any(mark in path for mark in "*?["):
            return sorted(str(each) for each in fs.glob(path) if fs.isfile(each))
        found = (str(each) for each in fs.find(path)) if fs.exists(path) else ()
        below = len(path.rstrip("/")) + 1
        return sorted(
            each
            for each in found
            if each.endswith(".parquet") and not any(part[:1] in "._" for part in each[below:].split("/"))
        )


def offers(engine: Engine, files: Sequence[str], scheme: Scheme, shops: "ir.Table | None") -> "ir.Table":
    """Keys, and what the scheme must know of each offer."""
    try:
        table = engine.read(files)
    except Exception as error:  # each engine has its own
        raise BadInput(f"the offers cannot be read: {engines.first_line(error)}", place="offers") from None
    if lacking := [name for name in KEY if name not in table.columns]:
        raise BadInput(
            f"the offers have no column {', '.join(lacking)}",
            place="offers",
            hint=f"They have {', '.join(table.columns)[:300]}",
        )
    own = [name for name in PARAMETERS[scheme.by] if name in table.columns]
    for name in (*KEY, *own):
        _must_be_of_type(name, table[name].type(), expressions.PLACES.get(name, "string"))
    typed = expressions.with_types(
        table, {name: expressions.PLACES[name] for name in KEY} | dict.fromkeys(own, "string")
    )
    return expressions.with_parameters(typed, shops, scheme)


def _must_be_of_type(name: str, kind: Any, wanted: str) -> None:
    """Engines would convert a number or a text each in its own way, and some values silently."""
    if wanted == "string":
        is_right, words = kind.is_string() or kind.is_null(), "text"
    else:
        # Spark has no unsigned 64 bits, but for decimals of 20 digits.
        is_right, words = kind.is_integer() or (kind.is_decimal() and kind.scale == 0), "whole numbers"
    if not is_right:
        raise BadInput(f"the column {name} of the offers is of {kind}, and must be of {words}", place="offers")


def shops(url: str, scheme: Scheme) -> "ir.Table | None":
    """The shops' parameters that a scheme uses, by `shop_id`; None where it uses none.

    The file has a record for each shop: lines of a name, a tab and a value, and an empty line after each record.
    """
    wanted = PARAMETERS[scheme.by]
    if not wanted or not url:
        return None
    root = Root(url)
    try:
        text = root.read("", bytes_max=1024**3).decode()
    except UnicodeDecodeError as error:
        raise BadInput(f"the shops file is not UTF-8: {error}", place=url) from None
    found: dict[int, dict[str, str]] = {}
    for number, record in _records(text):
        shop_id = record.get("shop_id", "")
        if not shop_id.isascii() or not shop_id.isdigit() or int(shop_id) >= 2**63:
            raise BadInput(
                f"a shop has no shop_id that is a number, but {shop_id[:50]!r}", place=f"{url}, line {number}"
            )
        if int(shop_id) in found:
            raise BadInput(f"shop {shop_id} is there twice", place=f"{url}, line {number}")
        found[int(shop_id)] = record
    types = {"shop_id": "int64", **dict.fromkeys(wanted, "string")}
    columns: dict[str, Sequence[Any]] = {"shop_id": list(found)}
    columns |= {name: [record.get(name) for record in found.values()] for name in wanted}
    return engines.rows_of(types, columns)


def _records(text: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Records with the line each begins at. A name may be marked with a leading #."""
    record: dict[str, str] = {}
    begins = 1
    for number, line in enumerate([*text.split("\n"), ""], 1):  # not splitlines: values may hold what it splits at
        if line.strip():
            if not record:
                begins = number
            name, tab, value = line.partition("\t")
            if not tab:
                raise BadInput(f"line {number} of the shops file is no name, tab and value: {line[:100]!r}")
            record[name.lstrip("#").strip()] = value.strip()
        elif record:
            yield begins, record
            record = {}


def must_be_whole(engine: Engine, keys: "ir.Table") -> None:
    """No key may lack a part: numbers are from 0, text is not empty. Others could not be looked up."""
    numbers = (keys.business_id, keys.shop_id, keys.warehouse_id)
    is_lacking = keys.offer_id.isnull() | (keys.offer_id == "")
    for number in numbers:
        is_lacking = is_lacking | number.isnull() | (number < 0)
    found = engine.rows(keys.filter(is_lacking).select(*KEY).limit(EXAMPLES_MAX))
    if found:
        raise BadInput(f"offers without a whole key: {examples(found)}", place="offers")


def must_be_unique(engine: Engine, keys: "ir.Table") -> None:
    """No key may come twice: which of its rows would be meant nobody knows."""
    found = engine.rows(expressions.repeated(keys, EXAMPLES_MAX))
    if found:
        shown = examples([{name: row[name] for name in KEY} for row in found])
        raise BadInput(
            f"keys that are in the offers more than once: {shown}", place="offers", hint="Each key may come once"
        )


def examples(rows: Sequence[dict[str, Any]]) -> str:
    return "; ".join(", ".join(f"{name} {value!r}" for name, value in row.items()) for row in rows)
