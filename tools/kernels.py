"""Compiles the kernels of profiles, which are kept beside their source, so that no test waits for them.

`make test` runs it while types are checked.
"""

from types import SimpleNamespace
from typing import Any

from keyfold.counters.compile import EXAMPLE, load
from keyfold.profiles.service import folding


def main() -> None:
    catalog = load(EXAMPLE)
    product: Any = SimpleNamespace(catalog=catalog, writable=catalog, settings=SimpleNamespace(kernel="numba"))
    folding.warm(product)


if __name__ == "__main__":
    main()
