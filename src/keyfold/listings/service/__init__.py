"""The verbs of listings, each a batch inside a transaction."""
