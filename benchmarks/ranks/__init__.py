"""The benchmark of a sharded job on many ranks: `tables.py` runs it."""
