"""The verbs of segments."""
