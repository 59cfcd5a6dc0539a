"""Feeds: a seller's whole stock as a stream of items with an end, staged, planned, applied and reported."""
