"""A real Kafka broker for tests: one process that is broker and controller (KRaft)."""

import base64
import logging
import time
import uuid
from collections.abc import Mapping

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewTopic

from tests.servers.java import find_jars, find_java, java_command
from tests.servers.process import POLL_SECONDS, ServerProcess, free_port

HEAP_MEGABYTES = 384
REQUEST_SECONDS = 30
SETTINGS = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "listener.security.protocol.map": "CLIENT:PLAINTEXT,CONTROLLER:PLAINTEXT",
    "inter.broker.listener.name": "CLIENT",
    "controller.listener.names": "CONTROLLER",
    "auto.create.topics.enable": "false",
    "default.replication.factor": "1",
    "min.insync.replicas": "1",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "1",
    # A group forms at once and a dead member is missed soon.
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    # After a kill the broker is let in again only when its old session is over (9 s by default).
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
    # 128 MB of the heap by default.
    "log.cleaner.dedupe.buffer.size": "4194304",
    "num.network.threads": "2",
    "num.io.threads": "2",
}

# Refused connections are what waiting for a broker looks like, nothing for the output of a test.
_silent = logging.Logger("kafka")
_silent.addHandler(logging.NullHandler())


class KafkaServer(ServerProcess):
    """One broker; `settings` are lines of its server.properties."""

    name = "kafka"

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        self._java, self._jars = find_java(), find_jars("kafka")
        super().__init__()
        self.port, controller_port = free_port(), free_port()
        self.bootstrap = f"127.0.0.1:{self.port}"
        self._settings = {
            **SETTINGS,
            "listeners": f"CLIENT://{self.bootstrap},CONTROLLER://127.0.0.1:{controller_port}",
            "advertised.listeners": f"CLIENT://{self.bootstrap}",
            "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
            "log.dirs": str(self.directory / "data"),
            **(settings or {}),
        }
        self._properties = self.directory / "server.properties"

    def create_topic(self, name: str, partitions: int, config: Mapping[str, str] | None = None) -> None:
        """Create a topic and return when each partition has a leader, so that clients find it at once."""
        admin = self._admin()
        topic = NewTopic(name, num_partitions=partitions, replication_factor=1, config=dict(config or {}))
        admin.create_topics([topic], operation_timeout=REQUEST_SECONDS)[name].result(REQUEST_SECONDS)
        deadline = time.monotonic() + REQUEST_SECONDS
        while not self._leads(admin, name, partitions):
            if time.monotonic() > deadline:
                raise TimeoutError(f"topic {name} has partitions without a leader after {REQUEST_SECONDS} s")
            time.sleep(POLL_SECONDS)

    def _prepare(self) -> None:
        (self.directory / "tmp").mkdir()
        self._properties.write_text("".join(f"{name}={value}\n" for name, value in self._settings.items()))
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        # In one word, because a cluster id may begin with a dash.
        self._run(self._run_class("kafka.tools.StorageTool", "format", f"-t={cluster}", "-c", str(self._properties)))

    def _command(self) -> list[str]:
        return self._run_class("kafka.Kafka", str(self._properties))

    def _answers(self) -> bool:
        try:
            # A broker that the controller has not let in yet is not in its own list.
            return bool(self._admin().list_topics(timeout=1).brokers)
        except KafkaException:
            return False

    def _run_class(self, *main: str) -> list[str]:
        return java_command(self._java, self._jars, self.directory / "tmp", HEAP_MEGABYTES, *main)

    def _admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self.bootstrap, "reconnect.backoff.max.ms": 200}, logger=_silent)

    @staticmethod
    def _leads(admin: AdminClient, name: str, partitions: int) -> bool:
        found = admin.list_topics(name, timeout=REQUEST_SECONDS).topics[name].partitions.values()
        return len(found) == partitions and all(partition.leader >= 0 for partition in found)
