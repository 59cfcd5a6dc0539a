"""What all parts stand on; it knows none of them."""
