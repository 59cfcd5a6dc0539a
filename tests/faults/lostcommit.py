"""A product on PostgreSQL whose COMMITs, or their answers, get lost on the way; and callers that insist."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from keyfold.core.access import ANYONE
from keyfold.core.clock import ManualClock
from keyfold.core.context import Context
from keyfold.core.errors import Unavailable
from keyfold.core.gather import Ask, Gatherer, Operation, Outcome, Reply
from keyfold.core.limits import Limits
from keyfold.core.store import Store, Transaction, migrate
from keyfold.tally import service
from keyfold.tally.model import Addition, Tally
from keyfold.tally.part import PART
from tests.faults import ledger, scenario
from tests.faults.ledger import Ledger
from tests.faults.pgproxy import CommitProxy, Cut, Plan
from tests.servers.postgres import PostgresServer

LOST_CUTS = (Cut.AFTER, Cut.DURING)
# So that every lost answer reaches the caller.
ONE_TRY = Limits(transaction_tries_max=1)
TRIES_MAX = 100


class Through:
    """The product through the proxy, and its store without it."""

    def __init__(self, context: Context, proxy: CommitProxy, direct: Store) -> None:
        self.context = context
        self.proxy = proxy
        self.direct = direct

    @property
    def lost(self) -> int:
        """Answers that were lost although the server had, or would have, committed."""
        return sum(self.proxy.cuts[cut] for cut in LOST_CUTS)

    def add(self, tx: Transaction, key: str) -> Tally:
        return service.add(tx, self.context.topics, [Addition(key, 1)])[key]

    def tally(self, key: str) -> Tally:
        return self.direct.read(lambda tx: service.read(tx, [key]))[key]


@contextmanager
def through(
    server: PostgresServer, url: str, plan: Plan, *, limits: Limits | None = None, clock: ManualClock | None = None
) -> Iterator[Through]:
    direct = Store.open(url)
    migrate.upgrade(direct)
    with CommitProxy(server.port, lambda: Cut.NONE) as proxy:
        context = Context.open(scenario.settings(proxy.url_of(url)), [PART], clock=clock)
        if limits:
            context.store.limits = limits
        proxy.plan = plan
        try:
            yield Through(context, proxy, direct)
        finally:
            context.close()
            direct.close()


def adding(product: Through, lost_min: int) -> list[str]:
    """Add one after another by transactions with a token, until so many answers were lost: the laws broken."""
    done = 0
    while product.lost < lost_min:
        tally = product.context.store.transact(lambda tx: product.add(tx, "a"), name="adding", once=True)
        done += 1
        if tally != Tally("a", done, done):
            return [f"X2: the answer to addition {done} is {tally}"]
    return ledger.broken_now(Ledger.of(product.direct), added={"a": done})


def asking(product: Through, count: int) -> tuple[list[str], int]:
    """Gathered requests with an Idempotency-Key, each asked until it is answered: the laws broken, the answers lost."""
    lost, values = asyncio.run(_ask_all(product, count))
    broken = ledger.broken_now(Ledger.of(product.direct), added={"a": count})
    if values != list(range(1, count + 1)):
        broken.append(f"X2: the answers are {values}")
    return broken, lost


async def _ask_all(product: Through, count: int) -> tuple[int, list[int]]:
    def add(tx: Transaction, asks: Sequence[Ask]) -> list[Outcome]:
        return [product.add(tx, ask.body) for ask in asks]

    operation = Operation(name="asking", apply=add, writes=True)
    gatherer = Gatherer(product.context.store, product.context.store.limits)
    lost, values = 0, []
    for number in range(count):
        ask = Ask(client=ANYONE, body="a", idempotency_key=f"ask{number}", fingerprint=b"%d" % number)
        reply: Reply | None = None
        for _ in range(TRIES_MAX):
            try:
                reply = await gatherer.ask(operation, ask)
                break
            except Unavailable:
                lost += 1
        assert reply is not None
        values.append(msgspec.json.decode(reply.body, type=Tally).value)
    await asyncio.to_thread(gatherer.close)
    return lost, values
