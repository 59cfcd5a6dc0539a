"""The real servers that the tests start: PostgreSQL, Kafka and ZooKeeper."""
