"""Leases with tickets that only grow: in the store, or in ZooKeeper."""
