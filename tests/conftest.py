"""Registers the fixtures that every test may use."""

pytest_plugins = ["tests.servers.fixtures", "tests.stores", "tests.faults.matrix"]
