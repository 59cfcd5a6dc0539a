"""Pytest fixtures that hand tests a real server, started by the first test of a worker that asks for it."""

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from tests.servers.kafka import KafkaServer
from tests.servers.postgres import PostgresServer
from tests.servers.process import ServerProcess, ServerUnavailable
from tests.servers.spark import SparkCluster
from tests.servers.zookeeper import ZooKeeperServer

Server = TypeVar("Server", bound=ServerProcess)

_started: list[ServerProcess] = []


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """PostgreSQL 18."""
    yield from running(PostgresServer)


@pytest.fixture(scope="session")
def postgres_15_server() -> Iterator[PostgresServer]:
    """PostgreSQL 15, the oldest that is supported."""
    yield from running(lambda: PostgresServer(15))


@pytest.fixture(scope="session")
def kafka_server() -> Iterator[KafkaServer]:
    """A Kafka broker; group its tests by `xdist_group("kafka")`, so that one worker starts it."""
    yield from running(KafkaServer)


@pytest.fixture(scope="session")
def zookeeper_server() -> Iterator[ZooKeeperServer]:
    """A ZooKeeper server; group its tests by `xdist_group("zookeeper")`, so that one worker starts it."""
    yield from running(ZooKeeperServer)


@pytest.fixture(scope="session")
def spark_cluster() -> Iterator[SparkCluster]:
    """A Spark master with two workers; group its tests by `xdist_group("spark")`, so that one worker starts it."""
    yield from running(SparkCluster)


@pytest.fixture(scope="session")
def spark_session(spark_cluster: SparkCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The session of this process, on the cluster that spark-defaults.conf names, as the product opens it."""
    from pyspark.sql import SparkSession

    from keyfold.bulk.engines import spark_connection

    assert SparkSession.getActiveSession() is None, "a test of this process has opened Spark without a cluster"
    folder = tmp_path_factory.mktemp("spark")
    spark_cluster.write_defaults(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SPARK_MASTER", raising=False)
        patch.setenv("SPARK_CONF_DIR", str(folder))
        session = spark_connection("tests")._session
        try:
            yield session
        finally:
            session.stop()


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """The URL of an empty database on PostgreSQL 18, for one test."""
    with fresh_database(postgres_server) as url:
        yield url


@pytest.fixture
def postgres_15_url(postgres_15_server: PostgresServer) -> Iterator[str]:
    """The URL of an empty database on PostgreSQL 15, for one test."""
    with fresh_database(postgres_15_server) as url:
        yield url


def running(make: Callable[[], Server]) -> Iterator[Server]:
    """Start a server for the length of a fixture, or say why there is none."""
    try:
        server = make()
    except ServerUnavailable as unavailable:
        # A skipped test is a person's choice; in CI it would be a hole that nobody sees.
        if os.environ.get("CI"):
            pytest.fail(str(unavailable), pytrace=False)
        pytest.skip(str(unavailable))
    with server:
        _started.append(server)
        try:
            yield server
        finally:
            _started.remove(server)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """A test that fails while a server is killed or paused must not take the tests after it along."""
    try:
        yield
    finally:
        for server in _started:
            if server.is_paused or not server.is_running:
                server.start()


@contextmanager
def fresh_database(server: PostgresServer, template: str = "template0") -> Iterator[str]:
    """A database for one test."""
    name = f"test_{uuid.uuid4().hex}"
    url = server.create_database(name, template)
    try:
        yield url
    finally:
        # The test may have left it killed or paused.
        server.start()
        server.drop_database(name)
