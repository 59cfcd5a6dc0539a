"""The real servers that the tests start: PostgreSQL, Kafka, ZooKeeper and Spark."""
