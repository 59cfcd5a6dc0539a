"""Pytest fixtures that hand tests a real server, started by the first test of a worker that asks for it."""

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest
from tests.servers.kafka import KafkaServer
from tests.servers.postgres import PostgresServer
from tests.servers.process import ServerProcess, ServerUnavailable
from tests.servers.zookeeper import ZooKeeperServer

Server = TypeVar("Server", bound=ServerProcess)


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


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """The URL of an empty database on PostgreSQL 18, for one test."""
    with _fresh_database(postgres_server) as url:
        yield url


@pytest.fixture
def postgres_15_url(postgres_15_server: PostgresServer) -> Iterator[str]:
    """The URL of an empty database on PostgreSQL 15, for one test."""
    with _fresh_database(postgres_15_server) as url:
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
        yield server


@contextmanager
def _fresh_database(server: PostgresServer) -> Iterator[str]:
    name = f"test_{uuid.uuid4().hex}"
    # The test before may have left the server killed or paused.
    server.start()
    url = server.create_database(name)
    try:
        yield url
    finally:
        server.start()
        server.drop_database(name)
