"""The weights of rare keys (Idf): a periodic walk over all profiles counts in how many each key stands."""

from collections import Counter as Tally

import sqlalchemy as sa

from keyfold.core.clock import SECOND_US
from keyfold.core.context import Context
from keyfold.core.store import Transaction
from keyfold.core.store.batch import Columns
from keyfold.core.store.shapes import increment, insert
from keyfold.counters.counters import Counters
from keyfold.counters.errors import PackWrong
from keyfold.profiles.model import ProfileKey
from keyfold.profiles.service.product import Product
from keyfold.profiles.service.storing import Stored, next_profiles, public_rows
from keyfold.profiles.tables import KEY_FREQUENCIES, PROFILE_TOTALS, PROFILES

PAGE = 1_000
# Beyond this the rarest are forgotten: they weigh as if they stood in one profile only.
KEYS_MAX = 1_000_000


class Weighing:
    """One walk in pages; what was counted replaces the last count in one transaction."""

    def __init__(self, context: Context, product: Product) -> None:
        self._store = context.store
        self._product = product
        self._idf = {c.id for c in product.catalog.counters.values() if c.idf}
        self._types = sorted({product.catalog[each].profile_type for each in self._idf})
        self._after: ProfileKey | None = ("", "")  # None: all is counted, and not yet stored
        self._totals: Tally[str] = Tally()
        self._keys: Tally[tuple[int, int]] = Tally()
        self._some: dict[int, int] = {}  # of each counter that was met, one of its keys

    def step(self) -> bool:
        """Count one page; whether the walk goes on."""
        if not self._idf or (self._after == ("", "") and not self._is_due()):
            return False
        after = self._after
        if after is not None:
            page, self._after, now = self._store.read(lambda tx: self._page(tx, after))
            for (profile_type, _), row in page.items():
                self._count(profile_type, row.body, now)
        if self._after is not None:
            return True
        self._store.transact(self._replace, name="profile weights")
        self._after, self._totals, self._keys, self._some = ("", ""), Tally(), Tally(), {}
        return False

    def _is_due(self) -> bool:
        def counted(tx: Transaction) -> bool:
            known = {row.profile_type: row.counted_at_us for row in tx.execute(sa.select(PROFILE_TOTALS))}
            last = min((known.get(each, 0) for each in self._types), default=None)
            return last is None or tx.now_us - last >= self._product.settings.idf_hours * 3600 * SECOND_US

        return self._store.read(counted)

    def _page(self, tx: Transaction, after: ProfileKey) -> tuple[dict[ProfileKey, Stored], ProfileKey | None, int]:
        wanted = sa.and_(PROFILES.c.profile_type.in_(self._types), PROFILES.c.public_version > 0)
        rows, last = next_profiles(tx, after, (), wanted, PAGE, self._product.settings.read_bytes_max)
        return public_rows(tx, [(row.profile_type, row.profile_id) for row in rows]), last, tx.now_us // 1_000_000

    def _count(self, profile_type: str, body: bytes, now: int) -> None:
        try:
            counters = Counters(self._product.catalog, body, now)
            groups = list(counters.groups())
        except PackWrong:
            return
        self._totals[profile_type] += 1
        for group in groups:
            if wanted := self._idf.intersection(counters.counter_ids(group)):
                keys = counters.keys(group)
                for counter_id in wanted if keys else ():
                    self._keys.update((counter_id, key) for key in keys)
                    self._some[counter_id] = keys[0]
        if len(self._keys) > 2 * KEYS_MAX:
            self._keys = Tally(dict(self._keys.most_common(KEYS_MAX)))

    def _replace(self, tx: Transaction) -> None:
        """A key that stands in one profile needs no row: that is what a missing row means.

        But a counter needs one: it tells that the counter was counted, and not made an Idf counter since.
        """
        kept = {place: count for place, count in self._keys.most_common(KEYS_MAX) if count > 1}
        kept = dict.fromkeys(self._some.items(), 1) | kept
        totals: Columns = {
            "profile_type": self._types,
            "profiles": [self._totals[each] for each in self._types],
            "counted_at_us": [tx.now_us] * len(self._types),
        }
        # First, so that two workers that come to the end of their walks replace the weights one after the other.
        increment(tx, PROFILE_TOTALS, totals, latest=["profiles", "counted_at_us"])
        tx.execute(sa.delete(KEY_FREQUENCIES))
        insert(
            tx,
            KEY_FREQUENCIES,
            {
                "counter_id": [counter_id for counter_id, _ in kept],
                "key": [key for _, key in kept],
                "profiles": list(kept.values()),
            },
        )
