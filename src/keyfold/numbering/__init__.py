"""Numbering: a persistent place `<shard_id, doc_id>` for every offer, versioned, fenced across data centres."""
