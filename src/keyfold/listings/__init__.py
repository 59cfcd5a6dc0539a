"""Listings: classified offers with drafts, presets and their counts, seller counters, feeds, moderation, photos."""
