"""Benchmarks: one file each, with its peers side by side in one run. `python -m bench --list` names them."""
