"""Order statistics: exact counts of completed orders per identity and dimensions, each order once."""
