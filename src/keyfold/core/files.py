"""Files that must be there after a loss of power, and the library that reads and writes Parquet."""

import itertools
import os
from pathlib import Path
from typing import Any

from keyfold.core.errors import BadInput


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, onto the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it that are not there, each of them to stay after a loss of power."""
    missing = list(itertools.takewhile(lambda each: not each.is_dir(), (folder, *folder.parents)))
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        sync(each.parent)


def arrow_and_parquet() -> tuple[Any, Any]:
    """PyArrow, where it is installed."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise BadInput("Parquet needs PyArrow", hint="pip install 'keyfold[bulk]'") from None
    return pyarrow, parquet
