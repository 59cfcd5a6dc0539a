"""Reads on connections that stay open, on every store."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from keyfold.core.errors import DataRefused, LostRace, StoreUnreachable
from keyfold.core.limits import Limits
from keyfold.core.store import Store, Transaction, migrate, shapes
from keyfold.core.store.pqcursor import PREPARED_MAX
from keyfold.tally.tables import TALLIES

pytestmark = pytest.mark.spec("CORE-01", "CORE-04")


def put(store: Store, keys: list[str], value: int = 1) -> None:
    rows = {"key": keys, "value": [value] * len(keys), "version": [1] * len(keys), "event_version": [0] * len(keys)}
    store.transact(lambda tx: shapes.increment(tx, TALLIES, rows))


def values(store: Store, keys: list[str]) -> dict[str, int]:
    found = store.read(lambda tx: shapes.load(tx, TALLIES, {"key": keys}, ("value",)))
    return {key: value for (key,), (value,) in found.items()}


def backend(tx: Transaction) -> int:
    return int(tx.rows("SELECT pg_backend_pid()")[0][0])


def end_all_sessions(url: str) -> None:
    """What a restart of the server does to every connection."""
    with psycopg.connect(url, autocommit=True) as connection:
        others = "pid <> pg_backend_pid() AND datname = current_database()"
        ended = connection.execute(f"SELECT pid, pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}")
        pids = [pid for pid, _ in ended.fetchall()]
        while connection.execute("SELECT 1 FROM pg_stat_activity WHERE pid = ANY(%s)", (pids,)).fetchone():
            time.sleep(0.01)


def test_each_read_sees_what_was_committed_before_it(store: Store) -> None:
    for expected in range(1, 20):
        put(store, ["a"])
        assert values(store, ["a", "b"]) == {"a": expected}


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 100])
def test_few_keys_and_many_are_found_alike(store: Store, count: int) -> None:
    keys = [f"{number} ' \" \\ % {{}} é" for number in range(count)]
    put(store, keys, 2**40)
    for _ in range(8):  # more often than a statement is run before the driver prepares it
        assert values(store, [*keys, "none"]) == dict.fromkeys(keys, 2**40)


def test_readers_at_the_same_time_do_not_get_each_others_rows(store: Store) -> None:
    keys = [f"key {number}" for number in range(8)]
    put(store, keys)

    def read_often(key: str) -> bool:
        return all(values(store, [key]) == {key: 1} for _ in range(100))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(read_often, keys))


def test_a_read_that_fails_leaves_nothing_to_the_next(store: Store) -> None:
    put(store, ["a"])
    for _ in range(20):  # more than there are connections
        with pytest.raises(DataRefused):
            values(store, ["NUL \0"])
        with pytest.raises(RuntimeError, match="in the middle"):
            store.read(_raise)
        assert values(store, ["a"]) == {"a": 1}


def _raise(tx: Transaction) -> None:
    tx.rows(f"SELECT key FROM {TALLIES.name}")
    raise RuntimeError("in the middle")


def test_a_write_that_begins_with_rows_of_the_driver_is_committed_and_rolled_back_as_any(store: Store) -> None:
    insert = f"INSERT INTO {TALLIES.name} (key, value, version, event_version) VALUES ('{{}}', 1, 1, 0) RETURNING key"

    def fail(tx: Transaction) -> None:
        tx.rows(insert.format("b"))
        raise RuntimeError("after the write")

    assert store.transact(lambda tx: tx.rows(insert.format("a"))) == [("a",)]
    with pytest.raises(RuntimeError, match="after the write"):
        store.transact(fail)
    assert values(store, ["a", "b"]) == {"a": 1}


def test_connections_kept_for_reads_leave_room_for_writers(store_url: str) -> None:
    """Four connections: readers used all of them at once, then three writers hold one each."""
    store = Store.open(store_url, limits=Limits(lock_seconds_max=2), connections_max=4)
    migrate.upgrade(store)
    together = threading.Barrier(4)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: store.read(lambda tx: together.wait()), range(4)))
        if not store.is_sqlite:
            writers = threading.Barrier(3)
            list(threads.map(lambda _: store.transact(lambda tx: writers.wait()), range(3)))
    put(store, ["a"])
    assert values(store, ["a"]) == {"a": 1}
    store.close()


class TestPostgres:
    """What only a server can do to a connection."""

    def test_the_first_transactions_of_a_store_need_one_connection_each(self, postgres_url: str) -> None:
        """As many as there are connections begin at once, as the loops and lanes of a server do when it starts."""
        migrated = Store.open(postgres_url)
        migrate.upgrade(migrated)
        migrated.close()
        store = Store.open(postgres_url, limits=Limits(lock_seconds_max=2), connections_max=4)
        together = threading.Barrier(4)

        def write(key: str) -> None:
            def work(tx: Transaction) -> None:
                together.wait(5)
                shapes.load(tx, TALLIES, {"key": [key]}, ("value",))
                shapes.increment(tx, TALLIES, {"key": [key], "value": [1], "version": [1], "event_version": [0]})

            store.transact(work)

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(write, "abcd"))
        assert values(store, list("abcd")) == dict.fromkeys("abcd", 1)
        store.close()

    def test_a_connection_is_used_again(self, postgres_url: str) -> None:
        store = Store.open(postgres_url)
        assert len({store.read(backend) for _ in range(10)}) == 1
        store.close()

    def test_parameters_of_every_kind_come_back_alike_prepared_or_not(self, postgres_url: str) -> None:
        store = Store.open(postgres_url)
        some = [
            "",
            "a",
            "é 'quoted' \\ \" % %s $1",
            None,
            0,
            -1,
            2**15,
            2**31,
            -(2**63),
            1.5,
            True,
            b"\0\xff",
            ["a,", "{}"],
        ]
        sql = "SELECT %s::{}, '%%', %s::text"
        kinds = {str: "text", int: "bigint", float: "float8", bool: "bool", bytes: "bytea", list: "text[]"}
        for _ in range(4):
            for each in some:
                asked = sql.format(kinds.get(type(each), "text"))
                found = store.read(lambda tx, asked=asked, each=each: tx.rows(asked, (each, "x")))  # type: ignore[misc]
                assert found == [(each, "%", "x")]
            assert store.read(lambda tx: tx.rows("SELECT 1 WHERE false")) == []
        store.close()

    def test_more_statements_than_are_prepared_are_read_alike(self, postgres_url: str) -> None:
        store = Store.open(postgres_url)
        for _ in range(3):
            for number in range(PREPARED_MAX + 10):
                assert store.read(lambda tx, n=number: tx.rows(f"SELECT {n}")) == [(number,)]  # type: ignore[misc]
        assert store.read(lambda tx: tx.rows("SELECT count(*) FROM pg_prepared_statements"))[0][0] <= PREPARED_MAX + 10
        store.close()

    def test_a_read_goes_on_where_its_table_was_changed(self, postgres_url: str) -> None:
        store = Store.open(postgres_url)
        store.transact(lambda tx: tx.driver("CREATE TABLE changing AS SELECT 1 AS a"))
        asked = "SELECT * FROM changing"
        for column in range(3):
            for _ in range(4):
                assert store.read(lambda tx: tx.rows(asked)) == [(1, *range(column))]
            change = f"ALTER TABLE changing ADD COLUMN b{column} int DEFAULT {column}"
            store.transact(lambda tx, change=change: tx.driver(change))  # type: ignore[misc]
        store.read(lambda tx: tx.driver("DEALLOCATE ALL"))
        assert store.read(lambda tx: tx.rows(asked)) == [(1, 0, 1, 2)]
        store.close()

    def test_a_read_is_tried_again_where_all_connections_broke(self, postgres_url: str) -> None:
        store = Store.open(postgres_url)
        migrate.upgrade(store)
        put(store, ["a"])
        together = threading.Barrier(6)
        with ThreadPoolExecutor(6) as threads:
            for _ in range(3):
                list(threads.map(lambda _: store.read(lambda tx: (backend(tx), together.wait())), range(6)))
                end_all_sessions(postgres_url)
                tries: list[int] = []

                def read(tx: Transaction, tries: list[int] = tries) -> int:
                    tries.append(1)
                    return backend(tx)

                store.read(read)
                assert len(tries) == 2
                assert values(store, ["a"]) == {"a": 1}
        put(store, ["a"])
        store.close()

    def test_a_slow_read_holds_up_no_other_thread(self, postgres_url: str) -> None:
        store = Store.open(postgres_url)
        sleep = "SELECT pg_sleep(%s)"
        for _ in range(2):
            store.read(lambda tx: tx.rows(sleep, (0.0,)))  # so that it is prepared
        slow = threading.Thread(target=lambda: store.read(lambda tx: tx.rows(sleep, (1.0,))))
        slow.start()
        reads = 0
        while slow.is_alive():
            store.read(backend)
            reads += 1
        assert reads > 2
        store.close()

    def test_a_read_that_takes_too_long_is_ended_and_the_next_is_not_hurt(self, postgres_url: str) -> None:
        store = Store.open(postgres_url, limits=Limits(transaction_seconds_max=1, lock_seconds_max=1))
        with pytest.raises(LostRace, match="statement timeout"):
            store.read(lambda tx: tx.rows("SELECT pg_sleep(30)"))
        assert store.read(lambda tx: tx.rows("SELECT 1")) == [(1,)]
        store.close()

    def test_a_read_in_the_middle_of_which_the_server_goes_is_tried_again(self, postgres_url: str) -> None:
        store = Store.open(postgres_url)
        ended: list[int] = []

        def read(tx: Transaction) -> list[tuple[object, ...]]:
            tx.rows("SELECT 1")
            if not ended:
                ended.append(1)
                end_all_sessions(postgres_url)
            return tx.rows("SELECT 2")

        assert store.read(read) == [(2,)]
        with pytest.raises(StoreUnreachable):
            store.read(lambda tx: (end_all_sessions(postgres_url), tx.rows("SELECT 2")))
        assert store.read(lambda tx: tx.rows("SELECT 3")) == [(3,)]
        store.close()


def test_text_is_read_whatever_the_client_encoding_of_the_role_is(postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {connection.info.dbname} SET client_encoding = 'LATIN1'")
    store = Store.open(postgres_url)
    migrate.upgrade(store)
    put(store, ["ключ", "é"], 7)
    for _ in range(3):  # a statement that comes again is prepared
        assert values(store, ["ключ", "é"]) == {"ключ": 7, "é": 7}
    store.close()


def test_text_with_a_nul_is_refused_and_never_cut_off_there(postgres_url: str) -> None:
    store = Store.open(postgres_url)
    for _ in range(3):  # a statement that comes again is prepared
        assert store.read(lambda tx: tx.rows("SELECT %s::text", ("a",))) == [("a",)]
    with pytest.raises(DataRefused):
        store.read(lambda tx: tx.rows("SELECT %s::text", ("a\0b",)))
    store.close()
