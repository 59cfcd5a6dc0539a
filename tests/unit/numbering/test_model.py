"""The rules of numbering on small data: places, TTL, compaction, versions, compatibility, the coordinator's record."""

import itertools
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyfold.core.errors import BadInput, Conflict, TicketRefused
from keyfold.numbering import model
from keyfold.numbering.model import Held, Key, Outcome, Place, Published, Record, Rules, State, Version, number

SHARDS = 3


def key(n: int) -> Key:
    return Key(n // 4, f"offer {n:02}", n % 3, n % 2)  # in the order of n


def shard_of(each: Key) -> int:
    return int(each.offer_id.split()[1]) % SHARDS


def rules(**given: object) -> Rules:
    return Rules(**({"type": 1, "scheme": 0, "ttl_runs": 2, "rebuild_ratio": 100.0} | given))  # type: ignore[arg-type]


def offers(*numbers: int) -> list[Key]:
    return [key(n) for n in numbers]


def first(*numbers: int, **given: object) -> State:
    return number(None, offers(*numbers), rules(**given), shard_of).state


def places(state: State) -> dict[int, tuple[int, int]]:
    return {int(each.offer_id.split()[1]): tuple(held.place) for each, held in state.places.items()}


runs = st.lists(
    st.tuples(
        st.frozensets(st.integers(0, 14), max_size=12),
        st.booleans(),  # forced
        st.booleans(),  # restart
    ),
    min_size=1,
    max_size=8,
)


def history(steps: list[tuple[frozenset[int], bool, bool]], ttl_runs: int, ratio: float) -> list[Outcome]:
    done: list[Outcome] = []
    before: State | None = None
    for wanted, is_forced, is_restart in steps:
        asked = rules(
            ttl_runs=ttl_runs,
            rebuild_ratio=ratio,
            is_forced=is_forced and before is not None,
            is_restart=is_restart and before is not None,
        )
        done.append(number(before, offers(*wanted), asked, shard_of))
        before = done[-1].state
    return done


laws = given(runs, st.integers(0, 3), st.sampled_from([1.0, 1.5, 3.0, 1e9]))


@pytest.mark.spec("NUM-01")
@laws
def test_no_two_keys_share_a_place_and_every_offer_of_the_input_has_one(
    steps: list[tuple[frozenset[int], bool, bool]], ttl_runs: int, ratio: float
) -> None:
    for (wanted, _, _), done in zip(steps, history(steps, ttl_runs, ratio), strict=True):
        held = [each.place for each in done.state.places.values()]
        assert len(held) == len(set(held))
        assert set(offers(*wanted)) <= done.state.places.keys()


@pytest.mark.spec("NUM-02")
@laws
def test_places_in_use_and_free_ones_are_all_that_were_ever_given(
    steps: list[tuple[frozenset[int], bool, bool]], ttl_runs: int, ratio: float
) -> None:
    for done in history(steps, ttl_runs, ratio):
        held = {each.place for each in done.state.places.values()}
        assert not held & done.state.free
        by_shard = defaultdict(set)
        for place in held | done.state.free:
            by_shard[place.shard_id].add(place.doc_id)
        assert {shard: set(range(size)) for shard, size in done.state.sizes.items() if size} == dict(by_shard)


@pytest.mark.spec("NUM-02")
@laws
def test_within_a_rebuild_a_key_keeps_its_place_until_it_expires(
    steps: list[tuple[frozenset[int], bool, bool]], ttl_runs: int, ratio: float
) -> None:
    done = history(steps, ttl_runs, ratio)
    for before, after in itertools.pairwise(done):
        for each, held in before.state.places.items():
            if after.reason not in ("", "restart"):
                assert each in after.state.places or each in after.expired
            elif each in after.state.places:
                assert after.state.places[each].place == held.place
            else:
                assert after.expired[each] == held


@pytest.mark.spec("NUM-02")
@laws
def test_new_keys_take_freed_places_first_in_the_order_of_both(
    steps: list[tuple[frozenset[int], bool, bool]], ttl_runs: int, ratio: float
) -> None:
    done = history(steps, ttl_runs, ratio)
    for before, after in itertools.pairwise(done):
        if after.reason not in ("", "restart"):
            continue
        for shard in range(SHARDS):
            given_now = [held.place.doc_id for each, held in sorted(after.new.items()) if held.place.shard_id == shard]
            freed = before.state.free | {held.place for held in after.expired.values()}
            ready = sorted(place.doc_id for place in freed if place.shard_id == shard)
            size = before.state.sizes.get(shard, 0)
            assert given_now == [*ready, *range(size, size + len(given_now))][: len(given_now)]


@pytest.mark.spec("NUM-03")
@laws
def test_a_key_expires_when_it_was_absent_for_more_runs_than_the_ttl(
    steps: list[tuple[frozenset[int], bool, bool]], ttl_runs: int, ratio: float
) -> None:
    seen: dict[Key, int] = {}
    for at, ((wanted, _, _), done) in enumerate(zip(steps, history(steps, ttl_runs, ratio), strict=True), 1):
        seen |= dict.fromkeys(offers(*wanted), at)
        if done.reason in ("", "restart"):
            assert done.state.places.keys() == {each for each, run in seen.items() if at - run <= ttl_runs}
        seen = {each: run for each, run in seen.items() if each in done.state.places}
        assert {each: held.seen_run for each, held in done.state.places.items()} == seen
        assert done.state.run == at


@pytest.mark.spec("NUM-04")
@laws
def test_a_rebuild_deals_places_dense_from_zero_to_the_input_alone_and_tells_what_moved(
    steps: list[tuple[frozenset[int], bool, bool]], ttl_runs: int, ratio: float
) -> None:
    before: State | None = None
    for (wanted, _, _), done in zip(steps, history(steps, ttl_runs, ratio), strict=True):
        if done.reason in ("first", "forced", "scheme", "ratio"):
            assert done.state.places.keys() == set(offers(*wanted))
            for shard in range(SHARDS):
                docs = sorted(held.place.doc_id for held in done.state.places.values() if held.place.shard_id == shard)
                assert docs == list(range(len(docs)))
            known = before.places if before else {}
            assert done.remap == {
                known[each].place: held.place for each, held in done.state.places.items() if each in known
            }
            assert done.expired.keys() == known.keys() - done.state.places.keys()
        before = done.state


@pytest.mark.spec("NUM-04")
@laws
def test_after_a_run_no_shard_is_over_the_ratio(
    steps: list[tuple[frozenset[int], bool, bool]], ttl_runs: int, ratio: float
) -> None:
    for done in history(steps, ttl_runs, ratio):
        assert not model.must_rebuild(model._tops(done.state), model._inputs(done.state), ratio)


@pytest.mark.spec("NUM-05")
@laws
def test_versions_grow_and_none_names_two_assignments(
    steps: list[tuple[frozenset[int], bool, bool]], ttl_runs: int, ratio: float
) -> None:
    named: dict[Version, dict[Key, Place]] = {}
    last: Version | None = None
    for done in history(steps, ttl_runs, ratio):
        version = done.state.version
        if last is not None:
            is_new_v = done.reason != ""
            assert version.rebuild == last.rebuild + is_new_v
            assert version.generation == (0 if is_new_v else last.generation + bool(done.new))
        assignment = named.setdefault(version, {})
        for each, held in done.state.places.items():
            assert assignment.setdefault(each, held.place) == held.place
        last = version


@pytest.mark.spec("NUM-06")
@laws
def test_the_exceptions_are_the_places_that_meant_another_key_when_the_data_were_made(
    steps: list[tuple[frozenset[int], bool, bool]], ttl_runs: int, ratio: float
) -> None:
    done = history(steps, ttl_runs, ratio)
    for index, after in enumerate(done):
        for earlier in done[: index + 1]:
            data = earlier.state.version
            if not model.fits(after.state.version, data)[0]:
                continue
            meant = {held.place: each for each, held in earlier.state.places.items()}
            wrong = {
                held.place
                for each, held in after.state.places.items()
                if held.place in meant and meant[held.place] != each
            }
            told = {
                held.place
                for held in after.state.places.values()
                if model.is_reassigned(held.generation, held.is_reused, data)
            }
            assert wrong <= told
            # Nothing is told but what was given to another key since.
            assert all(held.generation > data.generation for held in after.state.places.values() if held.place in told)


@pytest.mark.spec("NUM-02")
def test_the_order_of_the_input_does_not_matter() -> None:
    state = first(1, 4, 7)
    one = number(state, offers(2, 10, 13, 1), rules(), shard_of)
    other = number(state, offers(13, 1, 10, 2), rules(), shard_of)
    assert one == other


# The five cases of the document --------------------------------------------------------------------------------------


@pytest.mark.spec("NUM-12")
def test_a_forced_rebuild_gives_shards_as_large_as_their_input() -> None:
    state = first(0, 3, 6, 9, 1, 4)
    done = number(state, offers(3, 9, 4), rules(is_forced=True), shard_of)
    assert done.state.sizes == {0: 2, 1: 1}
    assert places(done.state) == {3: (0, 0), 9: (0, 1), 4: (1, 0)}
    assert done.state.version == Version(1, 0, 1, 0)
    assert set(done.expired) == set(offers(0, 6, 1))


@pytest.mark.spec("NUM-12")
def test_past_the_ttl_without_expired_documents_new_ones_come_after_the_maximum() -> None:
    state = first(0, 3)
    for _ in range(4):
        state = number(state, offers(0, 3), rules(), shard_of).state
    done = number(state, offers(0, 3, 6), rules(), shard_of)
    assert places(done.state)[6] == (0, 2)
    assert not done.expired


@pytest.mark.spec("NUM-12")
def test_past_the_ttl_with_expired_documents_new_ones_take_their_places_then_the_next() -> None:
    state = first(0, 3, 6)
    for _ in range(2):
        state = number(state, offers(0, 6), rules(), shard_of).state
        assert places(state)[3] == (0, 1)
    done = number(state, offers(0, 6, 9, 12), rules(), shard_of)
    assert places(done.state) == {0: (0, 0), 6: (0, 2), 9: (0, 1), 12: (0, 3)}
    assert list(done.expired) == offers(3)
    assert [held.is_reused for _, held in sorted(done.new.items())] == [True, False]


@pytest.mark.spec("NUM-12", "NUM-04")
def test_too_many_holes_rebuild_by_themselves() -> None:
    state = first(0, 3, 6, 9)
    kept = number(state, offers(0, 3, 6), rules(rebuild_ratio=1.5), shard_of)
    assert kept.reason == ""  # 4 places for 3 offers
    done = number(kept.state, offers(0, 3), rules(rebuild_ratio=1.5), shard_of)  # 4 places for 2
    assert done.reason == "ratio"
    assert done.state.sizes == {0: 2}


@pytest.mark.spec("NUM-12")
def test_in_the_ordinary_case_new_documents_get_new_places() -> None:
    done = number(first(0, 3), offers(0, 3, 6, 1), rules(), shard_of)
    assert places(done.state) == {0: (0, 0), 3: (0, 1), 6: (0, 2), 1: (1, 0)}
    assert done.state.version == Version(1, 0, 0, 1)


# Edges ---------------------------------------------------------------------------------------------------------------


@pytest.mark.spec("NUM-03")
def test_a_key_that_returns_after_its_time_is_new() -> None:
    state = first(0, 3, ttl_runs=0)
    state = number(state, offers(3), rules(ttl_runs=0), shard_of).state
    done = number(state, offers(0, 3), rules(ttl_runs=0), shard_of)
    assert set(done.new) == set(offers(0))
    assert done.new[key(0)] == Held(Place(0, 0), 1, True, 3)


@pytest.mark.spec("NUM-05")
def test_a_run_that_gives_no_place_keeps_its_generation() -> None:
    done = number(first(0, 3), offers(0), rules(), shard_of)
    assert done.state.version == Version(1, 0, 0, 0)
    assert done.state.run == 2


@pytest.mark.spec("NUM-07", "NUM-05")
def test_another_scheme_reshards_and_raises_v() -> None:
    done = number(first(0, 1, 2), offers(0, 1, 2), rules(scheme=4), lambda _: 0)
    assert done.reason == "scheme"
    assert done.state.version == Version(1, 4, 1, 0)
    assert done.state.sizes == {0: 3}
    assert set(done.remap) == {Place(0, 0), Place(1, 0), Place(2, 0)}


@pytest.mark.spec("NUM-15", "NUM-05")
def test_after_a_lost_state_v_rises_beyond_all_that_were_used_and_places_are_kept() -> None:
    state = first(0, 3)
    done = number(state, offers(0, 3, 6), rules(is_restart=True, rebuild_min=7), shard_of)
    assert done.state.version == Version(1, 0, 7, 0)
    assert {held.generation for held in done.state.places.values()} == {0}
    assert places(done.state) == {0: (0, 0), 3: (0, 1), 6: (0, 2)}


@pytest.mark.spec("NUM-02")
def test_a_shard_has_no_place_beyond_its_last_number() -> None:
    state = first(0, 3, 6)
    with pytest.raises(BadInput, match="shard 0 would need 4 places, more than 3"):
        number(state, offers(0, 3, 6, 9), rules(), shard_of, doc_id_max=2)
    number(state, offers(0, 3, 6, 1), rules(), shard_of, doc_id_max=2)
    model.must_fit(0, 2**31)
    with pytest.raises(BadInput):
        model.must_fit(0, 2**31 + 1)


# Versions ------------------------------------------------------------------------------------------------------------


@pytest.mark.spec("NUM-05")
def test_a_version_is_four_numbers() -> None:
    assert str(Version.parse("1.0.3.7")) == "1.0.3.7"
    for wrong in ("", "1.2.3", "1.2.3.4.5", "1.2.3.x", "1.2.3.-4", "1.2.3.٣", "1.2.3.99999999999", "1.2.3.4 "):
        with pytest.raises(BadInput):
            Version.parse(wrong)


@pytest.mark.spec("NUM-05")
@pytest.mark.parametrize(
    ("state", "data", "fits"),
    [
        ("1.0.3.7", "1.0.3.7", True),
        ("1.0.3.7", "1.0.3.0", True),
        ("1.0.3.7", "1.0.3.8", False),
        ("1.0.3.7", "1.0.2.7", False),
        ("1.0.3.7", "1.0.4.0", False),
        ("1.0.3.7", "1.1.3.7", False),
        ("1.0.3.7", "2.0.3.7", False),
    ],
)
def test_data_fit_a_state_of_equal_t_s_v_that_is_not_older(state: str, data: str, fits: bool) -> None:
    told, why = model.fits(Version.parse(state), Version.parse(data))
    assert told == fits
    assert bool(why) != fits


@pytest.mark.spec("NUM-14")
def test_of_several_states_the_newest_that_fits_is_chosen() -> None:
    states = [Version.parse(each) for each in ("1.0.2.9", "1.0.3.2", "1.0.3.5", "1.0.4.0", "2.0.3.9")]
    assert model.choose(states, lambda each: each, Version.parse("1.0.3.1")) == Version.parse("1.0.3.5")
    assert model.choose(states, lambda each: each, Version.parse("1.0.3.6")) is None


# The coordinator's record --------------------------------------------------------------------------------------------


def published(version: str, run: int, ticket: int, **given: object) -> Published:
    said: dict[str, object] = {"path": f"main/{ticket}", "clusters": ["a", "b"], "checksum": f"{version} {ticket}"}
    return Published(**({"version": version, "run": run, "ticket": ticket, "published_at_us": 0} | said | given))  # type: ignore[arg-type]


def recorded(*versions: str) -> Record:
    record = Record()
    for at, version in enumerate(versions, 1):
        record = model.take(record, f"master {at}", at, 0)
        record = model.publish(record, published(version, at, at), history_max=100)
    return record


@pytest.mark.spec("NUM-10", "NUM-11")
def test_an_older_ticket_changes_nothing() -> None:
    record = model.take(recorded("1.0.0.0", "1.0.0.1"), "bob", 9, 5)
    assert record.taken == model.Taken("bob", 9, 5)
    for act in (
        lambda: model.take(record, "alice", 8, 0),
        lambda: model.publish(record, published("1.0.0.2", 3, 8), history_max=10),
        lambda: model.declare_invalid(record, 8, ["1.0.0.1 2"], "lost"),
        lambda: model.drop(record, 8, ["1.0.0.0 1"], 0),
        lambda: model.deleted(record, 8, ["1.0.0.0 1"]),
        lambda: model.note_strays(record, 8, ["main/7-a"], 0),
    ):
        with pytest.raises(TicketRefused):
            act()


@pytest.mark.spec("NUM-05")
@pytest.mark.parametrize(
    ("version", "run", "is_taken"),
    [
        ("1.0.0.1", 3, True),
        ("1.0.0.2", 3, True),
        ("1.0.1.0", 3, True),
        ("1.2.1.0", 3, True),
        ("1.0.0.3", 3, False),
        ("1.0.0.0", 3, False),
        ("1.0.1.1", 3, False),
        ("1.2.0.2", 3, False),
        ("1.0.0.2", 4, False),
        ("1.0.0.2", 2, False),
    ],
)
def test_only_what_follows_the_last_state_is_published(version: str, run: int, is_taken: bool) -> None:
    record = recorded("1.0.0.0", "1.0.0.1")
    if is_taken:
        after = model.publish(record, published(version, run, 3), history_max=10)
        assert after.current is not None
        assert after.current.version == version
    else:
        with pytest.raises(Conflict):
            model.publish(record, published(version, run, 3), history_max=10)


@pytest.mark.spec("NUM-05", "NUM-10")
@pytest.mark.parametrize(
    ("receipt", "is_cut", "is_behind"),
    [
        ((0, 1, 2), False, False),  # what it knows, or older
        ((1, 0, 3), False, False),
        ((1, 0, 4), False, True),  # a run that gave no place
        ((1, 1, 4), False, True),
        ((2, 0, 4), False, True),
        ((1, 7, 9), True, False),  # no V below the next is used again
        ((2, 0, 4), True, True),
    ],
)
def test_a_record_is_behind_a_publication_that_came_after_all_that_it_knows(
    receipt: tuple[int, int, int], is_cut: bool, is_behind: bool
) -> None:
    record = recorded("1.0.0.0", "1.0.0.1", "1.0.1.0")
    if is_cut:
        record = model.declare_invalid(record, 4, ["1.0.1.0 3"], "lost")
    assert model.is_behind(record, *receipt) == is_behind
    assert model.is_behind(Record(), *receipt)


@pytest.mark.spec("NUM-14")
def test_the_tombstone_of_a_stray_is_as_old_as_when_it_was_first_seen() -> None:
    record = model.note_strays(recorded("1.0.0.0"), 2, ["main/1-a", "main/1-b"], 5)
    assert model.note_strays(record, 2, ["main/1-b", "main/1-c"], 9).strays == {"main/1-b": 5, "main/1-c": 9}


@pytest.mark.spec("NUM-15")
def test_a_lost_state_returns_the_pointer_and_its_v_is_never_used_again() -> None:
    record = recorded("1.0.0.0", "1.0.0.1", "1.0.1.0")
    record = model.declare_invalid(record, 4, ["1.0.1.0 3"], "lost")
    assert record.current is not None
    assert (record.current.version, record.rebuild_next, record.is_cut) == ("1.0.0.1", 2, True)
    for refused in ("1.0.0.2", "1.0.1.0", "1.0.2.1"):
        with pytest.raises(Conflict):
            model.publish(record, published(refused, 3, 4), history_max=10)
    after = model.publish(record, published("1.0.2.0", 3, 4), history_max=10)
    assert not after.is_cut
    assert after.rebuild_next == 3
    with pytest.raises(Conflict):
        model.declare_invalid(after, 5, ["1.0.0.1 2"], "not the last")


@pytest.mark.spec("NUM-15", "NUM-14")
def test_a_dropped_state_that_the_pointer_returns_to_is_dropped_no_more() -> None:
    record = model.drop(recorded("1.0.0.0", "1.0.0.1"), 2, ["1.0.0.0 1"], 5)
    record = model.declare_invalid(record, 3, ["1.0.0.1 2"], "wrong")
    assert record.current is not None
    assert (record.current.version, record.current.dropped_at_us) == ("1.0.0.0", 0)


@pytest.mark.spec("NUM-14")
def test_pruning_keeps_the_newest_and_the_last_of_every_kept_rebuild() -> None:
    record = recorded("1.0.0.0", "1.0.0.1", "1.0.1.0", "1.0.1.1", "1.0.2.0", "1.0.2.1", "1.0.2.2")
    dropped = model.to_drop(record, states_kept=2, rebuilds_kept=2)
    assert [each.version for each in dropped] == ["1.0.0.0", "1.0.0.1", "1.0.1.0", "1.0.2.0"]
    record = model.drop(record, 8, [each.checksum for each in dropped], 77)
    assert model.to_drop(record, states_kept=2, rebuilds_kept=2) == []
    with pytest.raises(Conflict):
        model.drop(record, 8, ["1.0.2.2 7"], 0)
    record = model.deleted(record, 8, [each.checksum for each in dropped])
    after = model.publish(record, published("1.0.2.3", 8, 8), history_max=5)
    assert [each.version for each in after.states] == ["1.0.1.1", "1.0.2.0", "1.0.2.1", "1.0.2.2", "1.0.2.3"]
