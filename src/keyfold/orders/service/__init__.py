"""The verbs of order statistics, each a batch inside a transaction."""
