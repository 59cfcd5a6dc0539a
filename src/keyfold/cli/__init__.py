"""The `keyfold` command: a door that opens the product, calls a verb, and prints its answer."""
