"""Prints the table of writers that only the page witness sees, for docs/consistency.md."""

from writers.registry import table

print("\n".join(table()))
