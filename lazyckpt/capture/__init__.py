"""Decides which storages are copied lazily: which optimizer owns each, and whether it stayed unchanged."""
