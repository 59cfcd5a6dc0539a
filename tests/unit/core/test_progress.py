"""Claims about the guard row: who may move a shard, from where, and what a refusal leaves behind."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import pytest

from keyfold.core import progress
from keyfold.core.clock import ManualClock
from keyfold.core.errors import NotFound, TicketRefused, TopicChanged
from keyfold.core.store import Store, Transaction

pytestmark = pytest.mark.spec("CORE-10")

T = TypeVar("T")


def adopt(store: Store, ticket: int, source: str = "", *, job: str = "job", shard: int = 0) -> int:
    return store.transact(lambda tx: progress.adopt(tx, job, shard, ticket, source))


def advance(store: Store, ticket: int, expected: int, position: int, *, job: str = "job", shard: int = 0) -> None:
    store.transact(lambda tx: progress.advance(tx, job, shard, ticket, expected, position))


def standing(store: Store, job: str = "job") -> dict[int, tuple[int, int]]:
    found = store.read(lambda tx: progress.positions(tx, job))
    return {shard: (each.position, each.ticket) for shard, each in found.items()}


def test_a_shard_that_nobody_worked_on_starts_at_position_0(store: Store) -> None:
    assert adopt(store, ticket=5) == 0
    assert standing(store) == {0: (0, 5)}


def test_a_newer_ticket_takes_the_shard_over_where_it_stands(store: Store) -> None:
    adopt(store, ticket=5)
    advance(store, 5, 0, 30)
    assert adopt(store, ticket=6) == 30
    assert standing(store) == {0: (30, 6)}


def test_the_same_ticket_may_adopt_again(store: Store) -> None:
    adopt(store, ticket=5)
    advance(store, 5, 0, 30)
    assert adopt(store, ticket=5) == 30


def test_an_older_ticket_neither_adopts_nor_moves_and_changes_nothing(store: Store) -> None:
    adopt(store, ticket=5)
    advance(store, 5, 0, 30)
    adopt(store, ticket=6)
    with pytest.raises(TicketRefused, match="ticket 6, newer than 5"):
        adopt(store, ticket=5)
    with pytest.raises(TicketRefused):
        advance(store, 5, 30, 40)
    assert standing(store) == {0: (30, 6)}


def test_a_ticket_that_did_not_adopt_the_shard_does_not_move_it_even_if_newer(store: Store) -> None:
    adopt(store, ticket=5)
    with pytest.raises(TicketRefused):
        advance(store, 6, 0, 10)
    assert standing(store) == {0: (0, 5)}


def test_a_batch_read_from_another_position_is_refused(store: Store) -> None:
    adopt(store, ticket=5)
    advance(store, 5, 0, 30)
    for expected in (0, 29, 31):
        with pytest.raises(TicketRefused):
            advance(store, 5, expected, 60)
    assert standing(store) == {0: (30, 5)}


def test_a_shard_that_nobody_adopted_does_not_move(store: Store) -> None:
    with pytest.raises(TicketRefused):
        advance(store, 5, 0, 10)
    assert standing(store) == {}


def test_standing_still_under_the_ticket_is_allowed_and_going_back_is_not(store: Store) -> None:
    adopt(store, ticket=5)
    advance(store, 5, 0, 30)
    advance(store, 5, 30, 30)
    with pytest.raises(ValueError, match="use rewind"):
        advance(store, 5, 30, 29)


def test_what_a_refused_transaction_wrote_before_is_undone(store: Store) -> None:
    adopt(store, ticket=5, shard=0)
    adopt(store, ticket=6, shard=1)

    def work(tx: Transaction) -> None:
        progress.advance(tx, "job", 0, 5, 0, 10)
        progress.advance(tx, "job", 1, 5, 0, 10)

    with pytest.raises(TicketRefused):
        store.transact(work)
    assert standing(store) == {0: (0, 5), 1: (0, 6)}


def test_jobs_and_shards_are_guarded_apart(store: Store) -> None:
    adopt(store, ticket=5, job="a", shard=0)
    adopt(store, ticket=7, job="a", shard=1)
    adopt(store, ticket=6, job="b", shard=0)
    advance(store, 5, 0, 10, job="a", shard=0)
    assert standing(store, "a") == {0: (10, 5), 1: (0, 7)}
    assert standing(store, "b") == {0: (0, 6)}


def test_a_63_bit_ticket_and_position_are_kept_exactly(store: Store) -> None:
    largest = 2**63 - 1
    adopt(store, ticket=largest)
    advance(store, largest, 0, largest)
    assert standing(store) == {0: (largest, largest)}


def test_moving_records_when_and_adopting_does_not(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    monkeypatch.setattr(store, "_clock", clock)

    def moved_at_us() -> int:
        return store.read(lambda tx: progress.positions(tx, "job"))[0].moved_at_us

    adopt(store, ticket=5)
    clock.advance(1)
    advance(store, 5, 0, 1)
    moved = clock.now_us()
    clock.advance(1)
    adopt(store, ticket=6)
    assert moved_at_us() == moved
    advance(store, 6, 1, 2)
    assert moved_at_us() == clock.now_us()


# The source -------------------------------------------------------------------------------------------------------


def test_positions_in_one_topic_are_not_used_for_another(store: Store) -> None:
    adopt(store, ticket=5, source="topic one")
    advance(store, 5, 0, 30)
    with pytest.raises(TopicChanged, match="topic one, which is now topic two"):
        adopt(store, ticket=6, source="topic two")
    with pytest.raises(TopicChanged):
        adopt(store, ticket=6, source="")
    assert standing(store) == {0: (30, 5)}
    assert adopt(store, ticket=6, source="topic one") == 30


def test_a_source_is_noted_by_the_first_who_names_one(store: Store) -> None:
    adopt(store, ticket=5)
    adopt(store, ticket=6, source="topic one")
    with pytest.raises(TopicChanged):
        adopt(store, ticket=7, source="topic two")


def test_an_old_ticket_is_told_of_its_ticket_first(store: Store) -> None:
    adopt(store, ticket=5, source="topic one")
    with pytest.raises(TicketRefused):
        adopt(store, ticket=4, source="topic two")


# Rewinding --------------------------------------------------------------------------------------------------------


def test_a_live_holder_notices_that_its_shard_was_rewound_and_goes_on_from_there(store: Store) -> None:
    adopt(store, ticket=5)
    advance(store, 5, 0, 30)
    store.transact(lambda tx: progress.rewind(tx, "job", 0, 10))
    with pytest.raises(TicketRefused):
        advance(store, 5, 30, 40)
    assert adopt(store, ticket=5) == 10
    advance(store, 5, 10, 20)


def test_a_recreated_topic_is_accepted_by_naming_it(store: Store) -> None:
    adopt(store, ticket=5, source="topic one")
    store.transact(lambda tx: progress.rewind(tx, "job", 0, 0, source="topic two"))
    assert adopt(store, ticket=6, source="topic two") == 0


def test_only_a_shard_that_was_worked_on_is_rewound_and_never_below_0(store: Store) -> None:
    with pytest.raises(NotFound):
        store.transact(lambda tx: progress.rewind(tx, "job", 0, 10))
    with pytest.raises(ValueError, match="not negative"):
        store.transact(lambda tx: progress.rewind(tx, "job", 0, -1))


# Two at once ------------------------------------------------------------------------------------------------------


def test_a_takeover_waits_for_the_commit_in_hand_and_sees_it(store: Store) -> None:
    adopt(store, ticket=5)
    moved, asked = threading.Event(), threading.Event()

    def work(tx: Transaction) -> None:
        progress.advance(tx, "job", 0, 5, 0, 10)
        moved.set()
        asked.wait()
        time.sleep(0.1)  # the other is at the row now, most likely; the claim holds either way

    holder = Background(lambda: store.transact(work))
    moved.wait()
    successor = Background(lambda: (asked.set(), adopt(store, ticket=6))[1])
    holder.result()
    assert successor.result() == 10


def test_a_commit_waits_for_the_takeover_in_hand_and_is_refused(store: Store) -> None:
    adopt(store, ticket=5)
    adopted, asked = threading.Event(), threading.Event()

    def work(tx: Transaction) -> None:
        progress.adopt(tx, "job", 0, 6, "")
        adopted.set()
        asked.wait()
        time.sleep(0.1)

    successor = Background(lambda: store.transact(work))
    adopted.wait()
    holder = Background(lambda: (asked.set(), advance(store, 5, 0, 10)))
    successor.result()
    with pytest.raises(TicketRefused):
        holder.result()
    assert standing(store) == {0: (0, 6)}


def test_of_many_who_adopt_at_once_the_newest_ticket_stays(store: Store) -> None:
    def try_adopting(ticket: int) -> bool:
        try:
            adopt(store, ticket)
        except TicketRefused:
            return False
        return True

    attempts = [Background(lambda ticket=ticket: try_adopting(ticket)) for ticket in (3, 8, 5, 1, 7, 2, 6, 4)]
    succeeded = [attempt.result() for attempt in attempts]
    assert succeeded[1]
    assert standing(store) == {0: (0, 8)}


class Background:
    """Something done in a thread, with its result or its error."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], object] = work
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._error: BaseException | None = None
        self._result: object = None
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error

    def result(self) -> object:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result


@pytest.mark.spec("CORE-10")
def test_reset_tickets_lets_a_lower_ticket_take_over_at_the_same_position(store: Store) -> None:
    store.transact(lambda tx: progress.adopt(tx, "job", 0, 100, ""))
    store.transact(lambda tx: progress.advance(tx, "job", 0, 100, 0, 7))
    with pytest.raises(TicketRefused):
        store.transact(lambda tx: progress.adopt(tx, "job", 0, 1, ""))
    assert store.transact(progress.reset_tickets) == 1
    assert store.transact(lambda tx: progress.adopt(tx, "job", 0, 1, "")) == 7
