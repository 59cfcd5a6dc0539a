"""Bulk work: Ibis on DuckDB or Spark, Parquet datasets, immutable folders on any file system."""
