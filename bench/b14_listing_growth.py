"""Growth of listings: edits/s and the p99 of a read of 10 offers, on stores of 0.1 M and 1 M offers, and of 10 M.

Set KEYFOLD_BENCH_GROWTH=full for the store of 10 M (43 GB of disk on SQLite, 20 on PostgreSQL, and a long fill). The
stores of all sizes stand side by side and take turns. They are filled directly, as in b10_listing_reads: offers of 2 KB
under ids that are scattered over the key space, half of them of one seller. An edit gives an offer another price; edits
come in transactions of 500, all offers equally likely. Reads are of 10 ids, in process, one caller. "flat within 1.5×"
is a ratio of at least 0.67 between the two largest. Messages of earlier rounds stay, equally many in each store.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from bench import growth
from bench.b2_profile_updates import undisturbed_rate
from bench.harness import Race
from bench.listings import content_of, fill, half_large, listings_at, offer_id_at
from keyfold.core.context import Context
from keyfold.core.store import Transaction
from keyfold.listings.model import Price
from keyfold.listings.service import offers
from keyfold.listings.service.drafting import Filled
from keyfold.listings.service.listings import Listings
from keyfold.listings.service.offers import Edit, Told
from keyfold.listings.service.saving import Saved

TITLES = growth.Titles("offers", "edits", "edits/s", "a read of 10 offers")
ASKED = 10
TRANSACTION_EDITS = 500


def races(quick: bool) -> Iterator[Race]:
    return growth.races(quick, TITLES, grown_at, transactions={TRANSACTION_EDITS: 1 if quick else 10})


@contextmanager
def grown_at(url: str, count: int) -> Iterator["Grown"]:
    with listings_at(url) as (context, listings):
        fill(url, count, half_large)
        yield Grown(context, listings, count)


class Grown(growth.Grown[Mapping[str, Told]]):
    """A store that holds so many offers."""

    def __init__(self, context: Context, listings: Listings, count: int) -> None:
        super().__init__(context, count)
        self._listings = listings
        self._content = content_of()
        self._versions: dict[int, int] = {}  # of offers that were edited

    def write(self, transactions: int, size: int) -> float:
        batches = [[self._edit(number) for number in self._some(size)] for _ in range(transactions)]
        return undisturbed_rate(transactions * size, lambda: [self._apply(batch) for batch in batches])

    def _question(self) -> Callable[[Transaction], Mapping[str, Told]]:
        ids = [offer_id_at(number) for number in self._some(ASKED)]
        return lambda tx: offers.read(tx, ids)

    def _is_whole(self, answer: Mapping[str, Told]) -> bool:
        return len(answer) == ASKED

    def _some(self, size: int) -> list[int]:
        return self._chance.sample(range(self.count), size)

    def _edit(self, number: int) -> Edit:
        version = self._versions.get(number, 1)
        self._versions[number] = version + 1
        filled = Filled(category="cars", content=self._content, price=Price(version, "EUR"))
        return Edit(offer_id=offer_id_at(number), version=version, filled=filled, may_see=lambda _: True)

    def _apply(self, batch: list[Edit]) -> None:
        saved = self._context.store.transact(lambda tx: offers.edit(tx, self._listings, batch), once=True)
        assert all(isinstance(each, Saved) for each in saved)
