"""Named, partitioned topics, ordered per key: embedded in the store, or Kafka."""
