"""Cabinet page: pages 1 and 1000 of a preset, of a seller with 100 and of one with 1 M offers, against `OFFSET` paging.

Offers have 2 KB, a page has 20 of them (KEYFOLD_BENCH_OFFERS for another number of the large seller). One caller, one
page after the other, always the same page of a side, on a store that holds both sellers. In process it is
`service.cabinet.page`: the preset, the page, its offers and the count. Over HTTP it is a `keyfold serve` in a process
of its own, a socket that is kept open, the body of the answer read and not decoded.

`OFFSET` paging is the bare query by the driver on the same tables, in process: the page is cut in a subquery and its
offers are joined to it, which is the better of the two ways to write it; it reads no preset and no count.

"at most 1.5×" is a ratio of at least 0.67: a ratio reads "times better".
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import psycopg
import sqlalchemy as sa

from bench import stores
from bench.b5_order_read import Caller
from bench.harness import Goal, Race, Side
from bench.listings import LARGE, SELLER_FIRST, fill, listings_at
from bench.serving import served
from keyfold.core.context import Context
from keyfold.core.store.sqlite import driver as sqlite_driver
from keyfold.listings.service import cabinet

OPTION = "KEYFOLD_BENCH_OFFERS"
SMALL, SMALL_OFFERS = str(SELLER_FIRST), 100
PRESET, NUMBER = "active", 2
PAGE_OFFERS, FAR = 20, 1_000
MUST, MOONSHOT = 0.67, 0.91
WARM = 100

Ask = Callable[[], object]


class Sizes:
    def __init__(self, quick: bool) -> None:
        self.large = int(os.environ.get(OPTION, 30_000 if quick else 1_000_000))
        self.requests = 200 if quick else 1_000

    @property
    def pages(self) -> dict[str, tuple[str, int]]:
        """The seller and how many offers come before the page, by the name of the side."""
        return {
            f"{SMALL_OFFERS} offers, page 1": (SMALL, 0),
            f"{self.large:,} offers, page 1": (LARGE, 0),
            f"{self.large:,} offers, page {FAR}": (LARGE, (FAR - 1) * PAGE_OFFERS),
        }


def races(quick: bool) -> Iterator[Race]:
    sizes = Sizes(quick)
    with stores.each_kind() as kinds:
        for kind, new_url in kinds.items():
            url = new_url()
            with listings_at(url) as (context, _), ExitStack() as stack:
                started = time.perf_counter()
                fill(url, sizes.large + SMALL_OFFERS, lambda number: LARGE if number < sizes.large else SMALL)
                print(f"  filled in {time.perf_counter() - started:.0f} s", flush=True)
                cursors = {name: _cursor(context, *page) for name, page in sizes.pages.items()}
                service = {name: _in_process(context, page[0], cursors[name]) for name, page in sizes.pages.items()}
                peer = _peer(url, sizes, stack)
                _must_be_alike(service, peer)
                for percent in (99, 50):
                    yield _race(f"p{percent} of a page in process, {kind}", service, peer, sizes, percent)
                with _over_http(url, sizes, cursors) as asks:
                    for percent in (99, 50):
                        yield _race(f"p{percent} of a page over HTTP, {kind}", asks, {}, sizes, percent)


def _race(title: str, asks: dict[str, Ask], peer: dict[str, Ask], sizes: Sizes, percent: int) -> Race:
    small, near, far = asks
    goals = [Goal(side=each, against=small, must=MUST, moonshot=MOONSHOT) for each in (near, far)]
    if percent != 99:
        goals = [Goal(side=each, against=small) for each in (near, far)]
    goals += [Goal(side=side, against=theirs) for side, theirs in zip(asks, peer, strict=False)]
    return Race(
        title=title,
        unit="ms",
        sides=[
            Side(name, lambda ask=ask: _milliseconds(ask, sizes.requests, percent))  # type: ignore[misc]
            for name, ask in (asks | peer).items()
        ],
        goals=goals,
        better="less",
    )


def _milliseconds(ask: Ask, requests: int, percent: int) -> float:
    for _ in range(WARM):
        ask()
    taken = []
    for _ in range(requests):
        started = time.perf_counter()
        ask()
        taken.append(time.perf_counter() - started)
    return float(np.percentile(taken, percent)) * 1000


# Ours ----------------------------------------------------------------------------------------------------------------


def _cursor(context: Context, seller: str, before: int) -> str:
    """The cursor of the page that begins behind so many offers."""
    if not before:
        return ""
    mark = "?" if context.store.is_sqlite else "%s"
    query = (
        f"SELECT create_time, offer_id FROM user_offer_presets WHERE seller_id = {mark} AND preset_id = {mark}"
        f" ORDER BY create_time DESC, offer_id DESC LIMIT 1 OFFSET {before - 1}"
    )
    (row,) = context.store.read(lambda tx: tx.rows(query, (seller, NUMBER)))
    return cabinet.cursor_of(*row)


def _in_process(context: Context, seller: str, cursor: str) -> Ask:
    return lambda: context.store.read(lambda tx: cabinet.page(tx, seller, PRESET, cursor, PAGE_OFFERS))


@contextmanager
def _over_http(url: str, sizes: Sizes, cursors: dict[str, str]) -> Iterator[dict[str, Ask]]:
    with served(url) as (port, _), Caller(port) as caller:

        def asking(seller: str, cursor: str) -> Ask:
            path = f"/v1/sellers/{seller}/presets/{PRESET}?limit={PAGE_OFFERS}{f'&cursor={cursor}' if cursor else ''}"
            request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()
            return lambda: caller.ask(request)

        yield {name: asking(page[0], cursors[name]) for name, page in sizes.pages.items()}


# OFFSET --------------------------------------------------------------------------------------------------------------


def _peer(url: str, sizes: Sizes, stack: ExitStack) -> dict[str, Ask]:
    connection: Any
    if url.startswith("sqlite"):
        connection = sqlite_driver().connect(sa.make_url(url).database, isolation_level=None)
        stack.callback(connection.close)
        options = {}
    else:
        connection = stack.enter_context(psycopg.connect(url, autocommit=True))
        options = {"prepare": True}
    mark = "?" if url.startswith("sqlite") else "%s"
    query = (
        "SELECT o.offer_id, o.version, o.shown, o.body FROM ("
        "SELECT seller_id, create_time, offer_id FROM user_offer_presets"
        f" WHERE seller_id = {mark} AND preset_id = {NUMBER}"
        f" ORDER BY create_time DESC, offer_id DESC LIMIT {PAGE_OFFERS} OFFSET {mark}) AS page"
        " JOIN offer AS o ON o.seller_id = page.seller_id AND o.offer_id = page.offer_id AND o.kind = 'offer'"
        " ORDER BY page.create_time DESC, page.offer_id DESC"
    )
    return {
        f"OFFSET, {name}": lambda page=page: connection.execute(query, page, **options).fetchall()  # type: ignore[misc]
        for name, page in sizes.pages.items()
    }


def _must_be_alike(service: dict[str, Ask], peer: dict[str, Ask]) -> None:
    for ours, theirs in zip(service.values(), peer.values(), strict=True):
        page, rows = ours(), theirs()
        assert isinstance(page, cabinet.PageOf)
        assert isinstance(rows, list)
        assert [each.offer_id for each in page.offers] == [row[0] for row in rows]
        assert len(rows) == PAGE_OFFERS
