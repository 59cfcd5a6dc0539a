"""What every store must do, whichever it is."""

import itertools
import multiprocessing
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa

from keyfold.core.errors import DataRefused, LostRace, SchemaUnknown, StoreBusy
from keyfold.core.limits import Limits
from keyfold.core.store import Store, Transaction, batch, migrate, shapes
from keyfold.core.store.schema import HEAD, METADATA, Bytes, Int64, Text, UInt64
from keyfold.core.tables import BATCH_TOKENS, LEASES, MESSAGES
from keyfold.tally.tables import TALLIES

pytestmark = pytest.mark.spec("CORE-01", "CORE-04")


def add(keys: list[str], value: int = 1) -> Callable[[Transaction], None]:
    count = len(keys)
    rows = {"key": keys, "value": [value] * count, "version": [1] * count, "event_version": [0] * count}
    return lambda tx: shapes.increment(tx, TALLIES, rows) and None


def values(store: Store) -> dict[str, int]:
    return {row.key: row.value for row in store.read(lambda tx: tx.execute(sa.select(TALLIES)).all())}


def test_a_transaction_that_raises_leaves_nothing(store: Store) -> None:
    def work(tx: Transaction) -> None:
        add(["a"])(tx)
        raise RuntimeError("after the write")

    with pytest.raises(RuntimeError, match="after the write"):
        store.transact(work)
    assert values(store) == {}


@pytest.mark.spec("CORE-02")
def test_all_writes_of_a_transaction_are_seen_together_or_not_at_all(store: Store) -> None:
    seen: list[int] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            rows = store.read(lambda tx: tx.execute(sa.select(TALLIES.c.value)).scalars().all())
            seen.append(len(set(rows)))

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        for _ in range(50):
            store.transact(add(["a", "b", "c"]))
        stop.set()
        watching.result()
    assert set(seen) <= {0, 1}


def test_concurrent_increments_of_shared_keys_lose_nothing(store: Store) -> None:
    """Writers come with their keys in different orders; sorting in the helper keeps them from deadlocking."""
    keys = [f"k{number}" for number in range(40)]

    def write(seed: int) -> None:
        shuffled = random.Random(seed).sample(keys, len(keys))
        for _ in range(25):
            store.transact(add(shuffled))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert values(store) == dict.fromkeys(keys, 100)


@pytest.mark.parametrize("loading", [shapes.load, shapes.locking_load])
def test_concurrent_load_fold_save_loses_no_update(store: Store, loading: Callable[..., dict]) -> None:
    """The sum of all folds is there, whether the rows were compared by version or locked by the load."""
    keys = ["a", "b", "c"]
    store.transact(add(keys, 0))

    def fold(tx: Transaction) -> None:
        rows = loading(tx, TALLIES, {"key": keys}, ["value", "version", "event_version"])
        columns = {
            "key": keys,
            "value": [rows[key,][0] + 1 for key in keys],
            "version": [rows[key,][1] for key in keys],
            "event_version": [0] * 3,
        }
        shapes.compare_and_set(tx, TALLIES, columns)

    def write(_: int) -> None:
        for _ in range(15):
            store.transact(fold)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(write, range(3)))
    assert values(store) == dict.fromkeys(keys, 45)


def test_a_changed_row_is_a_lost_race_and_the_whole_transaction_runs_again(store: Store) -> None:
    store.transact(add(["a"]))
    runs: list[int] = []

    def work(tx: Transaction) -> None:
        ((value, version),) = shapes.load(tx, TALLIES, {"key": ["a"]}, ["value", "version"]).values()
        runs.append(version)
        stale = version if len(runs) > 1 else version + 7
        columns = {"key": ["a"], "value": [value + 10], "version": [stale], "event_version": [0]}
        shapes.compare_and_set(tx, TALLIES, columns)

    store.transact(work)
    assert len(runs) == 2
    assert values(store) == {"a": 11}


def test_two_first_inserts_of_one_key_leave_one_row(store: Store) -> None:
    def make(number: int) -> None:
        def work(tx: Transaction) -> None:
            found = shapes.load(tx, TALLIES, {"key": ["a"]}, ["value", "version"]).get(("a",), (0, 0))
            columns = {"key": ["a"], "value": [found[0] + 1], "version": [found[1]], "event_version": [0]}
            shapes.compare_and_set(tx, TALLIES, columns)

        store.transact(work)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(make, range(8)))
    assert values(store) == {"a": 8}


def test_retries_are_bounded_and_end_in_busy(store_url: str) -> None:
    store = Store.open(store_url, limits=Limits(transaction_tries_max=3))
    runs: list[int] = []

    def work(tx: Transaction) -> None:
        runs.append(1)
        raise LostRace("always")

    with pytest.raises(StoreBusy):
        store.transact(work)
    assert len(runs) == 3
    store.close()


def test_of_concurrent_marks_exactly_one_is_new(store: Store) -> None:
    def mark(number: int) -> set[tuple[str]]:
        keys = [f"m{(number + step) % 20}" for step in range(20)]
        rows = {"token": keys, "stored_at_us": [number] * 20}
        return store.transact(lambda tx: shapes.insert_new(tx, BATCH_TOKENS, rows))

    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(mark, range(8)))
    assert sorted(key for each in won for (key,) in each) == sorted(f"m{number}" for number in range(20))


@pytest.mark.parametrize("count", [1, 49, 50, 51, 100, 237])
def test_of_many_marks_those_that_were_there_are_not_new_and_stay_as_they_were(store: Store, count: int) -> None:
    def mark(numbers: range, at_us: int) -> set[tuple[str]]:
        tokens = [f"{number:04}" for number in numbers]
        random.shuffle(tokens)
        rows = {"token": tokens, "stored_at_us": [at_us] * len(tokens)}
        return store.transact(lambda tx: shapes.insert_new(tx, BATCH_TOKENS, rows))

    def kept() -> dict[str, int]:
        found = store.read(lambda tx: tx.execute(sa.select(BATCH_TOKENS)).all())
        return {row.token: row.stored_at_us for row in found}

    assert mark(range(count), 1) == {(f"{number:04}",) for number in range(count)}
    assert mark(range(count), 2) == set()
    assert mark(range(count - 1, count + 60), 3) == {(f"{number:04}",) for number in range(count, count + 60)}
    assert kept() == {f"{number:04}": 1 if number < count else 3 for number in range(count + 60)}


@pytest.mark.spec("CORE-14")
@pytest.mark.parametrize(
    ("key", "value"),
    [("a", 2**63), ("a", -(2**63) - 1), ("nul\0", 1), ("lone \ud800", 1)],
    ids=["above", "below", "nul", "surrogate"],
)
def test_a_value_that_does_not_fit_is_refused_and_nothing_changes(store: Store, key: str, value: int) -> None:
    store.transact(add(["before"]))
    before = values(store)
    with pytest.raises(DataRefused):
        store.transact(add(["b", key], value))
    assert values(store) == before


@pytest.mark.spec("CORE-14")
def test_a_key_longer_than_an_index_holds_is_refused_not_an_error_of_ours(store: Store) -> None:
    if store.is_sqlite:
        pytest.skip("its keys have no such bound")
    chance = random.Random(1)
    key = "".join(chr(chance.randrange(0x10000, 0x30000)) for _ in range(1_000))
    with pytest.raises(DataRefused, match="index row size"):
        store.transact(add(["b", key]))
    assert values(store) == {}


@pytest.mark.spec("CORE-14")
def test_an_addition_that_overflows_64_bits_is_refused(store: Store) -> None:
    store.transact(add(["a"], 2**63 - 1))
    with pytest.raises(DataRefused, match="does not fit in 64 bits"):
        store.transact(add(["a"], 1))
    assert values(store) == {"a": 2**63 - 1}


def test_increment_folds_least_greatest_and_latest(store: Store) -> None:
    def work(columns: dict[str, list]) -> dict:
        return store.transact(
            lambda tx: shapes.increment(
                tx,
                LEASES,
                columns,
                greatest=["ticket"],
                least=["expires_at_us"],
                latest=["holder"],
                returning=["holder", "ticket", "expires_at_us"],
            )
        )

    work({"name": ["n"], "holder": ["a"], "ticket": [5], "expires_at_us": [50]})
    after = work({"name": ["n", "n"], "holder": ["b", "c"], "ticket": [3, 4], "expires_at_us": [70, 40]})
    assert after == {("n",): ("c", 5, 40)}


def test_messages_with_composite_keys_are_updated_and_deleted_by_key(store: Store) -> None:
    count = 5
    rows = {
        "topic": ["t"] * count,
        "key": list("edcba"),
        "kind": [""] * count,
        "version": [1] * count,
        "id": list(range(count)),
        "partition": [0] * count,
        "schema_name": ["s"] * count,
        "event_time_us": [1] * count,
        "payload": [b"\x00\xff\x80"] * count,
        "queued_at_us": [1] * count,
    }
    store.transact(lambda tx: shapes.insert(tx, MESSAGES, rows))
    keys = {name: rows[name] for name in ("topic", "key", "kind", "version")}
    assert store.transact(lambda tx: shapes.update(tx, MESSAGES, {**keys, "position": list(range(count))})) == count
    found = store.read(lambda tx: shapes.load(tx, MESSAGES, keys, ["position", "payload"]))
    assert {key[1]: (position, bytes(payload)) for key, (position, payload) in found.items()} == {
        key: (position, b"\x00\xff\x80") for position, key in enumerate("edcba")
    }
    assert store.transact(lambda tx: shapes.delete(tx, MESSAGES, keys)) == count


def test_unsigned_numbers_keep_their_value_and_their_order(store: Store) -> None:
    numbers = [0, 1, 2**63 - 1, 2**63, 2**64 - 1]
    trial = sa.Table(
        "unsigned_trial",
        sa.MetaData(),
        sa.Column("id", UInt64, primary_key=True, autoincrement=False),
        sa.Column("version", sa.BigInteger().with_variant(sa.Integer(), "sqlite")),
    )
    store.transact(lambda tx: trial.create(tx.connection))
    store.transact(lambda tx: shapes.insert(tx, trial, {"id": numbers[::-1], "version": [1] * 5}))
    assert store.read(lambda tx: tx.execute(sa.select(trial.c.id).order_by(trial.c.id)).scalars().all()) == numbers
    assert set(store.read(lambda tx: shapes.load(tx, trial, {"id": numbers}, []))) == {(n,) for n in numbers}
    assert store.transact(lambda tx: shapes.locking_load(tx, trial, {"id": numbers}, ["version"])) == {
        (n,): (2,) for n in numbers
    }

    def joined(tx: Transaction) -> list[int]:
        wanted = batch.relation(tx, trial, {"id": numbers})
        return list(
            tx.execute(sa.select(trial.c.id).join(wanted, wanted.c.id == trial.c.id).order_by(trial.c.id)).scalars()
        )

    assert store.read(joined) == numbers


@pytest.mark.parametrize("differing", ["name", "number", "mark", "several", "none"])
def test_rows_are_loaded_by_keys_that_differ_in_any_of_their_columns(store: Store, differing: str) -> None:
    trial = sa.Table(
        "composite_trial",
        sa.MetaData(),
        sa.Column("name", Text, primary_key=True),
        sa.Column("number", UInt64, primary_key=True, autoincrement=False),
        sa.Column("mark", Bytes, primary_key=True),
        sa.Column("place", Int64),
    )
    columns = {"name": ["a", "1", 'é "'], "number": [0, 2**63, 2**64 - 1], "mark": [b"", b"\x00'", b"\xff"]}
    every = list(itertools.product(*columns.values()))
    stored = {name: [row[at] for row in every] for at, name in enumerate(columns)}
    store.transact(lambda tx: trial.create(tx.connection))
    store.transact(lambda tx: shapes.insert(tx, trial, {**stored, "place": list(range(len(every)))}))
    keys = {name: values if differing in (name, "several") else values[1:2] * 3 for name, values in columns.items()}
    found = store.read(lambda tx: shapes.load(tx, trial, keys, ["place"]))
    expected = set(zip(*keys.values(), strict=True))
    assert {(name, number, bytes(mark)): place for (name, number, mark), (place,) in found.items()} == {
        row: place for place, row in enumerate(every) if row in expected
    }

    def among(tx: Transaction) -> tuple[set[int], set[int]]:
        is_one = batch.is_among(tx, trial, keys)
        one, other = (set(tx.execute(sa.select(trial.c.place).where(each)).scalars()) for each in (is_one, ~is_one))
        return one, other

    there = {place for place, row in enumerate(every) if row in expected}
    assert store.read(among) == (there, set(range(len(every))) - there)


def test_a_batch_that_rows_are_looked_up_in_is_read_once(sqlite_store: Store) -> None:
    """Read anew for each row, a step of a backfill took as long as the square of its cells."""

    def plan(tx: Transaction) -> str:
        rows = sa.select(TALLIES.c.key).where(~batch.is_among(tx, TALLIES, {"key": ["a", "b"]}))
        compiled = rows.compile(dialect=tx.dialect)
        given = [compiled.params[name] for name in compiled.positiontup or ()]
        return str(tx.rows(f"EXPLAIN QUERY PLAN {compiled}", given))

    told = sqlite_store.read(plan)
    assert "LIST SUBQUERY" in told
    assert "CORRELATED" not in told


def test_numbers_grow_and_are_never_given_twice(store: Store) -> None:
    def take(_: int) -> list[int]:
        return [n for _ in range(5) for n in store.transact(lambda tx: list(shapes.next_numbers(tx, "messages", 7)))]

    with ThreadPoolExecutor(3) as pool:
        taken = list(pool.map(take, range(3)))
    assert all(each == sorted(each) for each in taken)
    assert len({n for each in taken for n in each}) == 3 * 5 * 7


def test_a_large_batch_of_awkward_keys_comes_back_as_it_went_in(store: Store) -> None:
    keys = [f"ключ {number} 'quoted\" \\ %s ? :name {{}} \n\t💾" for number in range(3000)]
    store.transact(add(keys))
    assert values(store) == dict.fromkeys(keys, 1)
    found = store.read(lambda tx: shapes.load(tx, TALLIES, {"key": keys}, ["value"]))
    assert len(found) == 3000


def _write_in_process(url: str, count: int) -> None:
    store = Store.open(url)
    for _ in range(count):
        store.transact(add(["shared"]))
    store.close()


def test_two_processes_on_one_store_both_make_progress_and_lose_nothing(store: Store, store_url: str) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_write_in_process, args=(store_url, 60)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    assert values(store) == {"shared": 120}


@pytest.mark.spec("CORE-12")
def test_an_upgraded_store_has_exactly_the_declared_tables(store: Store) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    def compare(tx: Transaction) -> list[object]:
        context = MigrationContext.configure(tx.connection, opts={"compare_type": True})
        return [change for change in compare_metadata(context, METADATA) if "sequence" not in str(change[0])]

    assert store.read(compare) == []


@pytest.mark.spec("CORE-12")
def test_the_known_schema_is_the_newest_migration(store: Store) -> None:
    assert migrate.status(store).current == HEAD
    assert migrate.upgrade(store).state == "current"


@pytest.mark.spec("CORE-12")
@pytest.mark.parametrize(("found", "hint"), [("0000", "keyfold store upgrade"), ("9999", "newer keyfold")])
def test_a_schema_that_is_not_ours_is_refused_with_what_to_do(store: Store, found: str, hint: str) -> None:
    store.transact(lambda tx: tx.driver(f"UPDATE alembic_version SET version_num = '{found}'"))
    with pytest.raises(SchemaUnknown, match=hint):
        migrate.must_be_current(store, "URL")


@pytest.mark.spec("CORE-12")
def test_an_empty_store_is_refused_until_it_is_upgraded(empty_url: str) -> None:
    store = Store.open(empty_url)
    with pytest.raises(SchemaUnknown, match="keyfold store upgrade"):
        migrate.must_be_current(store, empty_url)
    migrate.upgrade(store)
    migrate.must_be_current(store, empty_url)
    store.close()


def test_a_transaction_that_runs_too_long_is_rolled_back(store_url: str) -> None:
    """The relay's lower bound and the purges rest on no transaction being older than the limit."""
    store = Store.open(store_url, limits=Limits(transaction_seconds_max=1, lock_seconds_max=1))
    migrate.upgrade(store)

    def slow(tx: Transaction) -> None:
        add(["a"])(tx)
        threading.Event().wait(1.1)

    with pytest.raises(StoreBusy, match="longer than 1 seconds"):
        store.transact(slow)
    assert values(store) == {}
    store.close()


@pytest.mark.spec("CORE-04")
def test_a_client_that_is_stuck_between_statements_that_are_sent_ahead_keeps_no_row(postgres_url: str) -> None:
    store = Store.open(postgres_url, limits=Limits(transaction_seconds_max=1, lock_seconds_max=1))
    migrate.upgrade(store)
    if store.read(lambda tx: int(tx.rows("SHOW server_version_num")[0][0])) < 170_000:
        pytest.skip("before PostgreSQL 17 nothing bounds a whole transaction")
    add_one = "INSERT INTO tallies VALUES (%s, 1, 1, 1) ON CONFLICT (key) DO UPDATE SET value = 9"
    locked, freed = threading.Event(), threading.Event()

    def stuck(tx: Transaction) -> None:
        def statements() -> Iterator[tuple[str, Any]]:
            yield add_one, ("a",)
            locked.set()
            assert freed.wait(30)
            yield add_one, ("b",)

        tx.run_meanwhile(statements())

    other = Store.open(postgres_url, limits=Limits(transaction_seconds_max=20, lock_seconds_max=20))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.transact, stuck)
        assert locked.wait(10)
        other.transact(lambda tx: tx.driver(add_one, ("a",)))
        freed.set()
        waiting.result()  # tried again as a whole, when nobody is in the way
    assert values(store) == {"a": 9, "b": 1}
    other.close()
    store.close()


@pytest.mark.spec("CORE-17")
def test_the_values_of_a_row_that_is_refused_are_in_no_log(postgres_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """The driver warns of a pipeline that ends by an error, and the server's error has the whole row in it."""
    store = Store.open(postgres_url)
    migrate.upgrade(store)

    def refused(tx: Transaction) -> None:
        def statements() -> Iterator[tuple[str, Any]]:
            yield "INSERT INTO tallies VALUES (%s, NULL, 1, 1)", ("of-somebody",)
            raise RuntimeError("meanwhile")

        tx.run_meanwhile(statements())

    with caplog.at_level("WARNING"), pytest.raises((RuntimeError, DataRefused)):
        store.transact(refused)
    assert "of-somebody" not in caplog.text
    assert values(store) == {}
    store.close()


def test_a_migration_takes_as_long_as_it_takes(empty_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index of a large table is not made within the time of a transaction."""
    store = Store.open(empty_url, limits=Limits(transaction_seconds_max=1, lock_seconds_max=1))
    large = sa.Table("large", sa.MetaData(), sa.Column("id", sa.Integer, primary_key=True))
    create = large.create

    def slowly(bind: sa.Connection, checkfirst: bool) -> None:
        if bind.dialect.name == "postgresql":
            bind.exec_driver_sql("SELECT pg_sleep(1.2)")
        else:
            threading.Event().wait(1.2)
        create(bind, checkfirst=checkfirst)

    monkeypatch.setattr(large, "create", slowly)
    migrate.upgrade(store, [large])
    assert migrate.missing(store, [large]) == []
    store.close()


def test_closing_twice_is_harmless(store: Store) -> None:
    store.close()
    store.close()


# While the store works --------------------------------------------------------------------------------------------


def marks(count: int, first: int = 0) -> dict[str, list[object]]:
    tokens = [f"{number:06d}" for number in range(first, first + count)]
    return {"token": [*tokens], "stored_at_us": [*range(count)]}


def insert_meanwhile(tx: Transaction, count: int, work: Callable[[], object]) -> tuple[set[batch.Row], object]:
    def columns_of(numbers: Sequence[int]) -> batch.Columns:
        return marks(len(numbers), numbers[0]) if numbers else marks(0)

    return shapes.insert_new_meanwhile(tx, BATCH_TOKENS, range(count), columns_of, work)


@pytest.mark.parametrize("count", [0, 1, 499, 500, 2_500, 6_000])
def test_what_is_made_meanwhile_changes_nothing_of_what_is_new(store: Store, count: int) -> None:
    store.transact(lambda tx: shapes.insert_new(tx, BATCH_TOKENS, marks(count // 2)))
    new, made = store.transact(lambda tx: insert_meanwhile(tx, count, lambda: "made meanwhile"))
    assert new == {(f"{number:06d}",) for number in range(count // 2, count)}
    assert made in (None, "made meanwhile")
    assert (made is not None) == (count >= 500 and not store.is_sqlite)


def test_work_that_fails_meanwhile_leaves_nothing_and_hurts_no_later_transaction(store: Store) -> None:
    def fail() -> None:
        raise RuntimeError("meanwhile")

    for _ in range(20):  # more often than there are connections
        if not store.is_sqlite:
            with pytest.raises(RuntimeError, match="meanwhile"):
                store.transact(lambda tx: insert_meanwhile(tx, 6_000, fail))
        assert store.read(lambda tx: shapes.load(tx, BATCH_TOKENS, {"token": ["000001"]}, ())) == {}
    assert len(store.transact(lambda tx: shapes.insert_new(tx, BATCH_TOKENS, marks(1_000)))) == 1_000


@pytest.mark.parametrize("held", [500, 2_900, 5_900])
def test_a_statement_that_fails_with_work_beside_it_has_the_meaning_that_it_has_alone(
    postgres_url: str, held: int
) -> None:
    """Whichever of the statements fails, also where others were sent behind it."""
    limits = Limits(lock_seconds_max=1, transaction_tries_max=2)
    store = Store.open(postgres_url, limits=limits)
    migrate.upgrade(store)
    tries: list[int] = []

    def insert(tx: Transaction) -> object:
        return insert_meanwhile(tx, 6_000, lambda: tries.append(1))

    def hold(tx: Transaction) -> None:
        shapes.insert_new(tx, BATCH_TOKENS, marks(1, held))
        with pytest.raises(StoreBusy, match="lock timeout"):
            store.transact(insert)

    store.transact(hold)
    assert len(tries) == 2
    new, _ = store.transact(lambda tx: insert_meanwhile(tx, 6_000, lambda: 1))
    assert len(new) == 5_999
    store.close()
