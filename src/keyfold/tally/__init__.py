"""The walking example: a tally per key, in every room that a part has."""
