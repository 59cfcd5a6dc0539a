"""A COMMIT whose answer is lost is found out about, not guessed at: what was asked for happens once."""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import pytest

from keyfold.core.clock import SECOND_US, ManualClock
from keyfold.core.errors import CommitUnknown, Unavailable
from keyfold.core.topics.topic import Message
from keyfold.tally.model import Tally
from tests.faults import ledger
from tests.faults.effort import TIMEOUT_SECONDS, effort, seed
from tests.faults.ledger import Ledger
from tests.faults.lostcommit import LOST_CUTS, ONE_TRY, adding, asking, through
from tests.faults.matrix import Hit
from tests.faults.pgproxy import Cut, Plan
from tests.faults.scenario import LEASE_SECONDS, Worker
from tests.faults.stage import step_by_clock
from tests.servers.postgres import PostgresServer

pytestmark = [pytest.mark.spec("CORE-02", "CORE-22"), pytest.mark.timeout(TIMEOUT_SECONDS)]

LOST, LOST_LONG = 200, 100_000


def seldom(cuts: Sequence[Cut], often: float) -> Plan:
    chosen = seed()
    print(f"KEYFOLD_FAULTS_SEED={chosen}")
    chance = random.Random(chosen)
    return lambda: chance.choice(cuts) if chance.random() < often else Cut.NONE


@pytest.mark.fault("answer to COMMIT lost", "tally")
def test_with_a_token_a_lost_answer_is_found_and_the_batch_applied_once(
    postgres_server: PostgresServer, postgres_url: str, hit: Hit
) -> None:
    """Now and then the answer to the second try is lost too."""
    with through(postgres_server, postgres_url, seldom(LOST_CUTS, 0.7)) as product:
        assert not adding(product, effort(LOST, LOST_LONG))
        hit("tally", product.lost)


@pytest.mark.fault("COMMIT never arrived", "tally")
def test_a_commit_that_never_reached_the_server_is_tried_again_and_applied_once(
    postgres_server: PostgresServer, postgres_url: str, hit: Hit
) -> None:
    with through(postgres_server, postgres_url, seldom([Cut.BEFORE], 0.5)) as product:
        for number in range(1, effort(60, 10_000)):
            tally = product.context.store.transact(lambda tx: product.add(tx, "a"), name="trial", once=True)
            assert tally == Tally("a", number, number)
        assert product.tally("a") == Tally("a", number, number)
        hit("tally", product.proxy.cuts[Cut.BEFORE])


@pytest.mark.parametrize(("cut", "there"), [(Cut.AFTER, 1), (Cut.BEFORE, 0)])
def test_without_a_token_a_lost_answer_is_said_to_be_unknown_and_nothing_is_tried_again(
    postgres_server: PostgresServer, postgres_url: str, cut: Cut, there: int
) -> None:
    plan = iter([cut])
    with through(postgres_server, postgres_url, lambda: next(plan, Cut.NONE)) as product:
        with pytest.raises(CommitUnknown):
            product.context.store.transact(lambda tx: product.add(tx, "a"), name="trial")
        assert product.proxy.cuts[cut] == 1
        assert product.tally("a").value == there


@pytest.mark.fault("answer to COMMIT lost", "tally")
def test_a_gathered_request_asked_again_with_its_idempotency_key_gets_the_first_answer(
    postgres_server: PostgresServer, postgres_url: str, hit: Hit
) -> None:
    """One try a transaction, so that every lost answer reaches the caller, who asks again."""
    plan = seldom([*LOST_CUTS, Cut.BEFORE], 0.4)
    with through(postgres_server, postgres_url, plan, limits=ONE_TRY) as product:
        broken, lost = asking(product, effort(60, 2_000))
        assert not broken
        assert lost > 0
        hit("tally", product.lost)


@pytest.mark.fault("answer to COMMIT lost", "ground", "tally")
@pytest.mark.fault("COMMIT never arrived", "ground", "tally")
def test_relay_and_consumer_lose_and_double_nothing_when_commits_get_lost(
    postgres_server: PostgresServer, postgres_url: str, hit: Hit
) -> None:
    """They know no token: the guard row tells them what became of a lost commit."""
    clock = ManualClock()
    plan = seldom([Cut.AFTER, Cut.DURING, Cut.BEFORE], 0.25)
    enough, rounds_max = effort(3, 1_000), effort(100, 100_000)
    with through(postgres_server, postgres_url, plan, clock=clock) as product:
        worker = Worker(product.context, "w1")
        for loop in (worker.events, worker.tally, worker.changes):
            step_by_clock(loop._shards, lambda: clock.now_us() / SECOND_US)
        steps = (("ground", worker.events.step), ("tally", worker.tally.step), ("ground", worker.changes.step))
        struck: Counter[tuple[str, str]] = Counter()
        sent: dict[str, list[bytes]] = defaultdict(list)
        while len(sent["a"]) < rounds_max and not (len(struck) == 4 and min(struck.values()) >= enough):
            batch = [_event(sent, key) for key in ("a", "b", "c")]
            while not _insist(lambda batch=batch: worker.put(batch), clock):
                pass
            for part, step in steps:
                before = product.proxy.cuts.copy()
                _insist(step, clock)
                after = product.proxy.cuts - before
                struck["COMMIT never arrived", part] += after[Cut.BEFORE]
                struck["answer to COMMIT lost", part] += after[Cut.AFTER] + after[Cut.DURING]
            assert not ledger.broken_now(Ledger.of(product.direct))
        product.proxy.plan = lambda: Cut.NONE
        clock.advance(10 * LEASE_SECONDS)
        worker.run_dry()
        found = Ledger.of(product.direct)
        assert not ledger.broken_now(found) + ledger.broken_at_the_end(found, sent)
        for (fault, part), times in struck.items():
            hit(part, times, fault=fault)


def _event(sent: dict[str, list[bytes]], key: str) -> Message:
    sent[key].append(b'{"add":%d}' % len(sent[key]))
    return Message(key=key, version=len(sent[key]), event_time_us=0, schema="event/1", payload=sent[key][-1])


def _insist(step: Callable[[], object], clock: ManualClock) -> bool:
    """As the loop of a worker does: a step that failed is taken again, later. Whether one of a few did not fail."""
    done = False
    for _ in range(4):
        try:
            step()
            done = True
        except Unavailable:
            # A lease whose COMMIT was lost lies idle until it has passed.
            clock.advance(2 * LEASE_SECONDS)
    return done
