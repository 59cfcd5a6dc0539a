"""The verbs of profiles, each a batch inside a transaction."""
