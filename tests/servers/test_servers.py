"""Claims about the servers of the tests: what a fault test builds on must itself be true."""

import os
import select
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from confluent_kafka import Consumer, Producer
from kazoo.client import KazooClient

from tests.servers import postgres
from tests.servers.fixtures import pytest_runtest_teardown, running
from tests.servers.kafka import KafkaServer
from tests.servers.postgres import PostgresServer, find_binaries
from tests.servers.process import ServerFailed, ServerProcess, ServerUnavailable, is_dead, wait_until
from tests.servers.spark import WORKERS, SparkCluster
from tests.servers.zookeeper import ZooKeeperServer

ROOT = Path(__file__).resolve().parents[2]
# How long an answer is waited for that must not come, and one that must.
PATIENCE_SECONDS = 1
ANSWER_SECONDS = 60


@pytest.fixture(params=["postgres_server", "postgres_15_server"])
def any_postgres_server(request: pytest.FixtureRequest) -> PostgresServer:
    server = request.getfixturevalue(request.param)
    assert isinstance(server, PostgresServer)
    return server


@pytest.fixture
def database_url(any_postgres_server: PostgresServer) -> Iterator[str]:
    name = f"test_{uuid.uuid4().hex}"
    yield any_postgres_server.create_database(name)
    any_postgres_server.drop_database(name)


@pytest.fixture
def topic(kafka_server: KafkaServer) -> str:
    name = f"topic-{uuid.uuid4().hex}"
    kafka_server.create_topic(name, partitions=1)
    return name


def test_postgres_serves_the_version_that_was_asked_for(any_postgres_server: PostgresServer) -> None:
    with psycopg.connect(any_postgres_server.url) as connection:
        assert connection.info.server_version // 10_000 == any_postgres_server.version


def test_postgres_keeps_committed_rows_through_a_kill(any_postgres_server: PostgresServer, database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute("CREATE TABLE kept AS SELECT generate_series(1, 1000) AS n")
    any_postgres_server.kill()
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(database_url)
    any_postgres_server.start()
    with psycopg.connect(database_url) as connection:
        assert connection.execute("SELECT count(*) FROM kept").fetchone() == (1000,)


def test_postgres_keeps_committed_rows_through_a_stop(any_postgres_server: PostgresServer, database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 1 AS n")
    any_postgres_server.stop()
    any_postgres_server.start()
    with psycopg.connect(database_url) as connection:
        assert connection.execute("SELECT n FROM kept").fetchone() == (1,)


def test_a_paused_postgres_lets_nobody_in_until_it_is_resumed(any_postgres_server: PostgresServer) -> None:
    any_postgres_server.pause()
    assert_all_stand_still(any_postgres_server)
    with pytest.raises(psycopg.errors.ConnectionTimeout):
        psycopg.connect(any_postgres_server.url, connect_timeout=PATIENCE_SECONDS)
    any_postgres_server.resume()
    psycopg.connect(any_postgres_server.url, connect_timeout=ANSWER_SECONDS).close()


def test_a_backend_of_a_paused_postgres_answers_only_when_resumed(any_postgres_server: PostgresServer) -> None:
    with closing(psycopg.connect(any_postgres_server.url)) as connection:
        any_postgres_server.pause()
        connection.pgconn.send_query(b"SELECT 1")
        connection.pgconn.flush()
        assert not answered_within(connection, PATIENCE_SECONDS)
        any_postgres_server.resume()
        assert answered_within(connection, ANSWER_SECONDS)


def test_postgres_syncs_to_disk_unless_told_otherwise(postgres_server: PostgresServer) -> None:
    with psycopg.connect(postgres_server.url) as connection:
        assert connection.execute("SHOW fsync").fetchone() == ("on",)
        assert connection.execute("SHOW synchronous_commit").fetchone() == ("on",)


def test_each_test_has_an_empty_database_of_its_own(postgres_url: str, postgres_server: PostgresServer) -> None:
    with psycopg.connect(postgres_url) as connection:
        connection.execute("CREATE TABLE mine (n int)")
    with psycopg.connect(postgres_server.create_database("another")) as connection:
        assert connection.execute("SELECT to_regclass('mine')").fetchone() == (None,)
    postgres_server.drop_database("another")


def test_a_database_is_dropped_under_an_open_session(postgres_server: PostgresServer) -> None:
    with psycopg.connect(postgres_server.create_database("in_use")) as session:
        postgres_server.drop_database("in_use")
        with pytest.raises(psycopg.OperationalError):
            session.execute("SELECT 1")


@pytest.mark.xdist_group("kafka")
def test_kafka_returns_what_was_produced(kafka_server: KafkaServer, topic: str) -> None:
    assert produce(kafka_server, topic, b"one")
    assert consume(kafka_server, topic, 1) == [b"one"]


@pytest.mark.xdist_group("kafka")
def test_kafka_creates_topics_with_their_partitions_and_configuration(kafka_server: KafkaServer) -> None:
    name = f"topic-{uuid.uuid4().hex}"
    kafka_server.create_topic(name, partitions=3, config={"cleanup.policy": "compact"})
    producer = Producer({"bootstrap.servers": kafka_server.bootstrap})
    assert len(producer.list_topics(name, timeout=ANSWER_SECONDS).topics[name].partitions) == 3


@pytest.mark.xdist_group("kafka")
def test_kafka_makes_no_topic_that_nobody_created(kafka_server: KafkaServer) -> None:
    name = f"topic-{uuid.uuid4().hex}"
    producer = Producer({"bootstrap.servers": kafka_server.bootstrap, "allow.auto.create.topics": True})
    assert producer.list_topics(name, timeout=ANSWER_SECONDS).topics[name].error is not None
    assert name not in producer.list_topics(timeout=ANSWER_SECONDS).topics


@pytest.mark.xdist_group("kafka")
def test_kafka_keeps_acknowledged_messages_through_a_kill(kafka_server: KafkaServer, topic: str) -> None:
    assert produce(kafka_server, topic, b"before")
    kafka_server.kill()
    kafka_server.start()
    assert produce(kafka_server, topic, b"after")
    assert consume(kafka_server, topic, 2) == [b"before", b"after"]


@pytest.mark.xdist_group("kafka")
def test_a_paused_kafka_acknowledges_only_when_resumed(kafka_server: KafkaServer, topic: str) -> None:
    producer = Producer({"bootstrap.servers": kafka_server.bootstrap})
    producer.list_topics(topic, timeout=ANSWER_SECONDS)
    kafka_server.pause()
    assert_all_stand_still(kafka_server)
    producer.produce(topic, b"late")
    assert producer.flush(PATIENCE_SECONDS) == 1
    kafka_server.resume()
    assert producer.flush(ANSWER_SECONDS) == 0
    assert consume(kafka_server, topic, 1) == [b"late"]


@pytest.mark.xdist_group("zookeeper")
def test_zookeeper_keeps_acknowledged_nodes_through_a_kill(zookeeper_server: ZooKeeperServer) -> None:
    path = f"/node-{uuid.uuid4().hex}"
    with zookeeper_client(zookeeper_server) as client:
        client.create(path, b"kept")
    zookeeper_server.kill()
    zookeeper_server.start()
    with zookeeper_client(zookeeper_server) as client:
        assert client.get(path)[0] == b"kept"


@pytest.mark.xdist_group("zookeeper")
def test_zookeeper_grants_sessions_of_a_second(zookeeper_server: ZooKeeperServer) -> None:
    with zookeeper_client(zookeeper_server, session_seconds=1) as client:
        assert client._session_timeout == 1000


@pytest.mark.xdist_group("zookeeper")
def test_a_paused_zookeeper_answers_only_when_resumed(zookeeper_server: ZooKeeperServer) -> None:
    with zookeeper_client(zookeeper_server, session_seconds=ANSWER_SECONDS) as client:
        zookeeper_server.pause()
        assert_all_stand_still(zookeeper_server)
        answer = client.get_async("/")
        answer.wait(PATIENCE_SECONDS)
        assert not answer.ready()
        zookeeper_server.resume()
        assert answer.get(timeout=ANSWER_SECONDS) is not None


@pytest.mark.xdist_group("zookeeper")
@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="there is one worker")
def test_tests_that_share_a_server_run_in_one_worker(request: pytest.FixtureRequest) -> None:
    """A pytest that pytest-xdist does not know yet drops the groups without a word, and every worker starts it all."""
    assert request.node.nodeid.endswith("@zookeeper")


@pytest.mark.xdist_group("spark")
def test_spark_computes_on_both_of_its_workers(spark_cluster: SparkCluster, spark_session: Any) -> None:
    rows = spark_session.range(1000, numPartitions=8).selectExpr("sum(id)").collect()
    assert rows[0][0] == 499_500
    assert [worker["coresused"] for worker in spark_cluster.status()["workers"]] == [1] * WORKERS


@pytest.mark.xdist_group("spark")
@pytest.mark.usefixtures("spark_cluster")
def test_spark_dies_with_a_test_process_that_is_killed() -> None:
    assert_dies_with_its_test_process(SparkCluster, paused=False)


@pytest.mark.parametrize("leave", [PostgresServer.pause, PostgresServer.kill])
def test_the_test_after_one_that_left_a_server_in_ruins_finds_it_running(
    postgres_server: PostgresServer, leave: Callable[[PostgresServer], None]
) -> None:
    leave(postgres_server)
    tear_down = pytest_runtest_teardown()
    next(tear_down)
    with pytest.raises(StopIteration):
        next(tear_down)
    psycopg.connect(postgres_server.url).close()


def test_a_server_that_cannot_start_shows_the_end_of_its_log() -> None:
    server = PostgresServer(settings={"shared_buffers": "nonsense"})
    try:
        with pytest.raises(ServerFailed, match='invalid value for parameter "shared_buffers"'):
            server.start()
    finally:
        server.discard()


def test_a_server_that_cannot_be_had_skips_a_test_but_fails_it_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> PostgresServer:
        raise ServerUnavailable("not on this machine")

    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="not on this machine"):
        next(running(make))
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="not on this machine"):
        next(running(make))


@pytest.mark.parametrize("paused", [False, True])
def test_postgres_dies_with_a_test_process_that_is_killed(paused: bool) -> None:
    assert_dies_with_its_test_process(PostgresServer, paused=paused)


@pytest.mark.xdist_group("zookeeper")
@pytest.mark.usefixtures("zookeeper_server")
def test_zookeeper_dies_with_a_test_process_that_is_killed() -> None:
    assert_dies_with_its_test_process(ZooKeeperServer, paused=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives the server another account")
def test_postgres_runs_from_a_project_that_only_root_can_enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    binaries = postgres._copy_wheel(find_binaries(18), tmp_path)
    monkeypatch.setattr(postgres, "find_binaries", lambda _: binaries)
    with PostgresServer() as server, psycopg.connect(server.url) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_server_outlives_the_thread_that_started_it() -> None:
    script = (
        "import threading; from tests.servers.postgres import PostgresServer; server = PostgresServer();"
        "thread = threading.Thread(target=server.start); thread.start(); thread.join();"
        "server.create_database('made'); alive = server.is_running; server.discard(); print(alive)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=ANSWER_SECONDS
    )
    assert answer.stdout.strip() == "True"


def assert_all_stand_still(server: ServerProcess) -> None:
    states = {process.status() for process in server.processes()}
    assert states <= {psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE}


def answered_within(connection: psycopg.Connection[tuple[object, ...]], seconds: float) -> bool:
    readable, _, _ = select.select([connection.fileno()], [], [], seconds)
    return bool(readable)


def produce(server: KafkaServer, topic: str, value: bytes) -> bool:
    """Whether the broker acknowledged the message."""
    acknowledged: list[bool] = []
    producer = Producer({"bootstrap.servers": server.bootstrap, "acks": "all"})
    producer.produce(topic, value, on_delivery=lambda error, _: acknowledged.append(error is None))
    producer.flush(ANSWER_SECONDS)
    return acknowledged == [True]


def consume(server: KafkaServer, topic: str, count: int) -> list[bytes | None]:
    settings = {
        "bootstrap.servers": server.bootstrap,
        "group.id": uuid.uuid4().hex,
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
    }
    with closing(Consumer(settings)) as consumer:
        consumer.subscribe([topic])
        return [message.value() for message in consumer.consume(count, timeout=ANSWER_SECONDS)]


@contextmanager
def zookeeper_client(server: ZooKeeperServer, session_seconds: float = 10) -> Iterator[KazooClient]:
    client = KazooClient(server.hosts, timeout=session_seconds)
    client.start(timeout=ANSWER_SECONDS)
    try:
        yield client
    finally:
        client.stop()
        client.close()


def assert_dies_with_its_test_process(server: type[ServerProcess], *, paused: bool) -> None:
    script = (
        f"import signal; from {server.__module__} import {server.__name__} as Server; server = Server();"
        f"server.start(); {'server.pause();' if paused else ''}"
        "print(server.directory, *(process.pid for process in server.processes()), flush=True); signal.pause()"
    )
    processes: list[psutil.Process] = []
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True) as test_process:
        try:
            assert test_process.stdout is not None
            directory, *pids = test_process.stdout.readline().split()
            for pid in pids:
                # The backend of a client that has just left may be gone.
                with suppress(psutil.NoSuchProcess):
                    processes.append(psutil.Process(int(pid)))
        finally:
            test_process.kill()
    assert processes
    wait_until(lambda: all(map(is_dead, processes)))
    shutil.rmtree(directory)
