"""The columnar fold: a large batch of updates into many packed profiles at once, bytes in and bytes out."""

from keyfold.counters.bulk.columns import NEVER, Folded, KernelName, Updates
from keyfold.counters.bulk.folding import fold

__all__ = ["NEVER", "Folded", "KernelName", "Updates", "fold"]
