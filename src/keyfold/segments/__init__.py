"""Segments: the difference of two sorted snapshots, folded into a versioned set per user."""
