"""The verbs of numbering."""
